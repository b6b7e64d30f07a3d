/* What the operators need of torch: errors, dtypes, devices, allocation, argument checks. For
 * the files of csrc/binding. */
#ifndef FLCE_TORCH_DEVICE_H
#define FLCE_TORCH_DEVICE_H

#include <dlfcn.h>

#include <array>
#include <cmath>
#include <fstream>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "backend.h"
#include "peers.h"
#include "tuning.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// ---- errors ----

/* What every refusal and failure of the binding is thrown as. Which Python exception an exception
 * of C++ becomes differs between versions of torch, so the text says which one it has to be: "flce:
 * ", the name of the status, ": " and the message. flce/autograd.py raises it. */
class Failure : public std::runtime_error {
 public:
  Failure(flce_status status, const std::string& message)
      : std::runtime_error("flce: " + std::string(flce_status_name(status)) + ": " + message),
        status_(status),
        message_(message) {}
  flce_status status() const { return status_; }
  const std::string& message() const { return message_; }

 private:
  flce_status status_;
  std::string message_;
};

inline void check(flce_status status) {
  if (status != FLCE_OK) throw Failure(status, flce_last_error());
}

inline std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); i++) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

inline std::vector<int64_t> shape_of(const Tensor& tensor) {
  std::vector<int64_t> shape(tensor.dim());
  for (size_t i = 0; i < shape.size(); i++) shape[i] = tensor.size(static_cast<int64_t>(i));
  return shape;
}

/* ---- dtypes ---- */

inline flce_dtype to_dtype(ScalarType type, const char* argument) {
  switch (type) {
    case ScalarType::Double:
      return FLCE_F64;
    case ScalarType::Float:
      return FLCE_F32;
    case ScalarType::BFloat16:
      return FLCE_BF16;
    case ScalarType::Half:
      return FLCE_F16;
    default:
      throw Failure(FLCE_INVALID_TYPE,
                    std::string(argument) +
                        ": expected float64, float32, bfloat16 or float16, got another dtype");
  }
}

inline ScalarType to_scalar_type(flce_dtype dtype) {
  switch (dtype) {
    case FLCE_F64:
      return ScalarType::Double;
    case FLCE_F32:
      return ScalarType::Float;
    case FLCE_BF16:
      return ScalarType::BFloat16;
    case FLCE_F16:
      return ScalarType::Half;
  }
  throw std::logic_error("flce: a dtype outside the enumeration");
}

// ---- devices ----

struct DeviceId {
  int32_t type, index;
};

inline DeviceId device_of(const Tensor& tensor) {
  DeviceId id;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &id.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &id.index));
  return id;
}

inline Tensor matrix_view(const void* data, int64_t rows, int64_t cols, int64_t pitch,
                          bool transposed, flce_dtype dtype) {
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
inline flce_status torch_gemm(void*, const flce_gemm* gemm) {
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

inline void torch_parallel(int64_t begin, int64_t end, int64_t grain, flce_range_fn fn,
                           void* context) {
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, fn, context));
}

/* libflce_cuda.so, in the directory of this module. It is loaded when the first CUDA tensor
 * arrives, or when there are tuned algorithms to pass to it. */
struct CudaLibrary {
  std::string path, error;
  flce_cuda_backend_fn open = nullptr;
  flce_cuda_describe_fn describe = nullptr;
  flce_cuda_tuning_fn tuning = nullptr;
  flce_cuda_peers_begin_fn peers_begin = nullptr;
  flce_cuda_peers_wait_fn peers_wait = nullptr;
  AOTITorchError (*current_stream)(int32_t, void**) = nullptr;

  CudaLibrary() {
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
    tuning = reinterpret_cast<flce_cuda_tuning_fn>(dlsym(library, "flce_cuda_tuning_table"));
    peers_begin =
        reinterpret_cast<flce_cuda_peers_begin_fn>(dlsym(library, "flce_cuda_peers_begin"));
    peers_wait = reinterpret_cast<flce_cuda_peers_wait_fn>(dlsym(library, "flce_cuda_peers_wait"));
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    void* stream = torch_cuda ? dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream") : nullptr;
    current_stream = reinterpret_cast<AOTITorchError (*)(int32_t, void**)>(stream);
    if (!open || !describe || !tuning || !peers_begin || !peers_wait)
      error = "it lacks a function of this version of flce";
  }
};

inline const CudaLibrary& cuda_library() {
  static const CudaLibrary library;
  return library;
}

/* The backend of a call's device, together with the guard that makes this device the current
 * one. */
class Device {
 public:
  Device(DeviceId id, bool allow_tf32) : id_(id) {
    if (id.type == aoti_torch_device_type_cpu()) {
      cpu_ = {torch_gemm, torch_parallel, nullptr};
      flce_cpu_backend(&cpu_, &table_);
      return;
    }
    const CudaLibrary& library = cuda_library();
    if (!library.error.empty())
      throw Failure(
          FLCE_UNSUPPORTED,
          "no CUDA library for a CUDA tensor: looked for " + library.path + ": " + library.error +
              ". Build flce with nvcc and cublasLt.h at hand (FLCE_CUDA=1 says what is missing).");
    if (!library.current_stream)
      throw Failure(FLCE_UNSUPPORTED,
                    "a CUDA tensor, but no libtorch_cuda.so with the current stream is loaded");
    TORCH_ERROR_CODE_CHECK(aoti_torch_create_device_guard(id.index, &guard_));
    cuda_ = {id.index, nullptr, allow_tf32};
    if (library.current_stream(id.index, &cuda_.stream) != AOTI_TORCH_SUCCESS)
      fail_opening("torch gave no current stream");
    if (library.open(&cuda_, &table_) != FLCE_OK)
      fail_opening(table_.last_error ? table_.last_error() : "the CUDA backend did not open");
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device() {
    if (guard_) aoti_torch_delete_device_guard(guard_);
  }

  DeviceId id() const { return id_; }
  const flce_backend* table() const { return &table_; }
  const flce_cuda* cuda() const { return &cuda_; }

  flce_plan plan(const flce_problem& problem) const {
    flce_plan plan;
    check(flce_plan_call(&table_, &problem, &plan));
    return plan;
  }

  /* A new contiguous tensor; `buffer` is its name in an out-of-memory error. */
  Tensor allocate(const std::vector<int64_t>& sizes, flce_dtype dtype, const char* buffer) const {
    return empty(sizes, to_scalar_type(dtype), flce_size_of(dtype), buffer);
  }

  Tensor allocate_indices(const std::vector<int64_t>& sizes, const char* buffer) const {
    return empty(sizes, ScalarType::Long, sizeof(int64_t), buffer);
  }

  /* int32, for the lists of samples. */
  Tensor allocate_lists(const std::vector<int64_t>& sizes, const char* buffer) const {
    return empty(sizes, ScalarType::Int, sizeof(int32_t), buffer);
  }

  Tensor allocate_bytes(int64_t bytes, const char* buffer) const {
    return empty({bytes}, ScalarType::Byte, 1, buffer);
  }

 private:
  [[noreturn]] void fail_opening(const char* reason) {
    if (guard_) aoti_torch_delete_device_guard(guard_);
    throw Failure(FLCE_DEVICE_ERROR, reason);
  }

  Tensor empty(const std::vector<int64_t>& sizes, ScalarType type, int64_t element_bytes,
               const char* buffer) const {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
    AtenTensorHandle handle;
    int32_t code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
    int64_t bytes = element_bytes;
    for (int64_t size : sizes) bytes *= size;
    if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                 code, id_.type, id_.index, &handle) == AOTI_TORCH_SUCCESS) {
      Tensor tensor(handle);
      const bool integers = type == ScalarType::Long || type == ScalarType::Int;
      const int poison = integers ? FLCE_POISON_INT : FLCE_POISON_FLOAT;
      if (flce_poisons()) check(table_.fill(table_.self, tensor.mutable_data_ptr(), poison, bytes));
      return tensor;
    }
    throw Failure(FLCE_OUT_OF_MEMORY,
                  std::to_string(bytes) + " bytes for buffer \"" + buffer + "\"");
  }

  DeviceId id_;
  DeviceGuardHandle guard_ = nullptr;
  flce_cpu cpu_{};
  flce_cuda cuda_{};
  flce_backend table_{};
};

// ---- checks ----

inline void expect_contiguous(const char* name, const Tensor& tensor) {
  if (!tensor.is_contiguous())
    throw Failure(FLCE_INVALID_ARGUMENT, std::string(name) + ": expected a contiguous tensor");
}

inline void expect_shape(const char* name, const Tensor& tensor,
                         const std::vector<int64_t>& expected) {
  if (shape_of(tensor) != expected)
    throw Failure(FLCE_INVALID_ARGUMENT, std::string(name) + ": expected shape " +
                                             shape_text(expected) + ", got " +
                                             shape_text(shape_of(tensor)));
  expect_contiguous(name, tensor);
}

inline void expect_same_device(const char* name, const Tensor& tensor, DeviceId id) {
  DeviceId got = device_of(tensor);
  if (got.type != id.type || got.index != id.index)
    throw Failure(FLCE_INVALID_ARGUMENT,
                  std::string(name) + ": expected the device of input, got another device");
}

inline void expect_type(const char* name, const Tensor& tensor, ScalarType type,
                        const char* type_name) {
  if (tensor.scalar_type() != type)
    throw Failure(FLCE_INVALID_TYPE, std::string(name) + ": expected dtype " + type_name);
}

inline void expect_dim(const char* name, const Tensor& tensor, int64_t dim) {
  if (tensor.dim() != dim)
    throw Failure(FLCE_INVALID_ARGUMENT, std::string(name) + ": expected " + std::to_string(dim) +
                                             " dimensions, got shape " +
                                             shape_text(shape_of(tensor)));
}

inline void expect_like(const char* name, const Tensor& tensor, const std::vector<int64_t>& shape,
                        flce_dtype dtype, DeviceId id) {
  expect_shape(name, tensor, shape);
  expect_type(name, tensor, to_scalar_type(dtype), flce_dtype_name(dtype));
  expect_same_device(name, tensor, id);
}

/* The data pointer of an optional tensor of the stat dtype, after its checks; NULL if there is no
 * tensor. */
inline const void* optional_pointer(const char* name, const OptionalTensor& tensor,
                                    const std::vector<int64_t>& shape, flce_dtype stat,
                                    DeviceId id) {
  if (!tensor) return nullptr;
  expect_like(name, *tensor, shape, stat, id);
  return tensor->const_data_ptr();
}

}  // namespace

#endif
