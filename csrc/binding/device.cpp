/* The backend of a device: the CPU's, with torch's GEMM and threads, or that of libflce_cuda.so. */
#include "binding/device.h"

#include <dlfcn.h>

#include <cmath>
#include <fstream>

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include "environment.h"

namespace flce {

namespace {

Tensor matrix_view(const void* data, int64_t rows, int64_t cols, int64_t pitch, bool transposed,
                   flce_dtype dtype) {
  int64_t sizes[2] = {rows, cols};
  int64_t strides[2] = {transposed ? 1 : pitch, transposed ? pitch : 1};
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
      const_cast<void*>(data), 2, sizes, strides, 0,
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(to_scalar_type(dtype))),
      aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

/* The GEMM of the CPU backend is torch's own (MKL, oneDNN). */
flce_status torch_gemm(void*, const flce_gemm* gemm) {
  if (gemm->m == 0 || gemm->n == 0) return FLCE_OK;
  if (gemm->c_dtype != gemm->dtype)
    return flce_fail(FLCE_UNSUPPORTED, "torch's CPU products write their operands' dtype, not %s",
                     flce_dtype_name(gemm->c_dtype));
  Tensor a = matrix_view(gemm->a, gemm->m, gemm->k, gemm->pitch_a, gemm->transpose_a, gemm->dtype);
  Tensor b = matrix_view(gemm->b, gemm->k, gemm->n, gemm->pitch_b, gemm->transpose_b, gemm->dtype);
  Tensor c = matrix_view(gemm->c, gemm->m, gemm->n, gemm->pitch_c, false, gemm->dtype);
  bool plain = gemm->beta == 0.0 && gemm->shift == 0;
  AOTITorchError error = plain ? aoti_torch_cpu_mm_out(c.get(), a.get(), b.get())
                               : aoti_torch_cpu_addmm_out(c.get(), c.get(), a.get(), b.get(),
                                                          gemm->beta, std::ldexp(1.0, gemm->shift));
  if (error == AOTI_TORCH_SUCCESS) return FLCE_OK;
  return flce_fail(FLCE_GEMM_FAILED, "torch's product of %lld x %lld by %lld x %lld failed",
                   static_cast<long long>(gemm->m), static_cast<long long>(gemm->k),
                   static_cast<long long>(gemm->k), static_cast<long long>(gemm->n));
}

void torch_parallel(int64_t begin, int64_t end, int64_t grain, flce_range_fn fn, void* context) {
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, fn, context));
}

}  // namespace

CudaLibrary::CudaLibrary() {
  Dl_info self;
  dladdr(reinterpret_cast<void*>(&torch_gemm), &self);
  std::string module = self.dli_fname;
  std::string folder = module.substr(0, module.find_last_of('/') + 1);
  path = folder + "libflce_cuda.so";
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    error = dlerror();
    std::string why;  // a build without the library has written this file (setup.py)
    if (std::getline(std::ifstream(folder + "libflce_cuda.txt"), why)) error = why;
    return;
  }
  open = reinterpret_cast<flce_cuda_backend_fn>(dlsym(library, "flce_cuda_backend"));
  describe = reinterpret_cast<flce_cuda_describe_fn>(dlsym(library, "flce_cuda_describe"));
  peers_begin = reinterpret_cast<flce_cuda_peers_begin_fn>(dlsym(library, "flce_cuda_peers_begin"));
  peers_wait = reinterpret_cast<flce_cuda_peers_wait_fn>(dlsym(library, "flce_cuda_peers_wait"));
  void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  void* stream = torch_cuda ? dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream") : nullptr;
  current_stream = reinterpret_cast<AOTITorchError (*)(int32_t, void**)>(stream);
  auto headers = reinterpret_cast<flce_cuda_headers_fn>(dlsym(library, "flce_cuda_headers"));
  if (!open || !describe || !peers_begin || !peers_wait || !headers)
    error = "it lacks a function of this version of flce";
  else if (headers() != FLCE_HEADERS)
    error = "it was built from other sources than " + module;
}

const CudaLibrary& cuda_library() {
  static const CudaLibrary library;
  return library;
}

Device::Device(DeviceId id, bool allow_tf32) : id_(id) {
  if (id.type != aoti_torch_device_type_cpu()) {
    open_cuda(allow_tf32);
    return;
  }
  cpu_ = {torch_gemm, torch_parallel, nullptr};
  flce_cpu_backend(&cpu_, &table_);
}

void Device::open_cuda(bool allow_tf32) {
  const CudaLibrary& library = cuda_library();
  if (!library.error.empty())
    throw Failure(
        FLCE_UNSUPPORTED,
        "no CUDA library for a CUDA tensor: looked for " + library.path + ": " + library.error +
            ". Build flce with nvcc and cublasLt.h at hand (FLCE_CUDA=1 says what is missing).");
  if (!library.current_stream)
    throw Failure(FLCE_UNSUPPORTED,
                  "a CUDA tensor, but no libtorch_cuda.so with the current stream is loaded");
  TORCH_ERROR_CODE_CHECK(aoti_torch_create_device_guard(id_.index, &guard_));
  cuda_ = {id_.index, nullptr, allow_tf32, flce_variable_text(FLCE_VARIABLE_KERNEL)};
  const char* reason = nullptr;
  if (library.current_stream(id_.index, &cuda_.stream) != AOTI_TORCH_SUCCESS)
    reason = "torch gave no current stream";
  else if (library.open(&cuda_, &table_) != FLCE_OK)
    reason = table_.last_error ? table_.last_error() : "the CUDA backend did not open";
  if (!reason) return;
  aoti_torch_delete_device_guard(guard_); /* no destructor runs after an exception here */
  throw Failure(FLCE_DEVICE_ERROR, reason);
}

Tensor new_tensor(const std::vector<int64_t>& sizes, ScalarType type, DeviceId id, const char* what,
                  const char* name) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  AtenTensorHandle handle;
  int32_t code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  auto bytes = static_cast<int64_t>(aoti_torch_dtype_element_size(code));
  for (int64_t size : sizes) bytes *= size;
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                               code, id.type, id.index, &handle) != AOTI_TORCH_SUCCESS)
    throw Failure(FLCE_OUT_OF_MEMORY,
                  std::to_string(bytes) + " bytes for " + what + " \"" + name + "\"");
  return Tensor(handle);
}

Tensor Device::allocate(const std::vector<int64_t>& sizes, ScalarType type,
                        const char* buffer) const {
  Tensor tensor = new_tensor(sizes, type, id_, "buffer", buffer);
  const bool integers = type == ScalarType::Long || type == ScalarType::Int;
  const int poison = integers ? FLCE_POISON_INT : FLCE_POISON_FLOAT;
  auto bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
  if (flce_poisons()) check(table_.fill(table_.self, tensor.mutable_data_ptr(), poison, bytes));
  return tensor;
}

}  // namespace flce
