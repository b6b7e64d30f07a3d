/* The operators that benchmarks/tune.py calls: list the recorded GEMMs, list a GEMM's candidate
 * algorithms, time one, select one. */
#include "binding/arguments.h"
#include "binding/library.h"

namespace flce {

namespace {

/* torch has device indices of 8 bits, and takes a negative one for the current device. */
Device cuda_device(int64_t index) {
  DeviceGuardHandle guard = nullptr;
  bool fits = index >= 0 && index <= INT8_MAX;
  if (!fits || aoti_torch_create_device_guard(static_cast<int32_t>(index), &guard))
    refuse("device", "the index of a CUDA device that is present", std::to_string(index));
  aoti_torch_delete_device_guard(guard);
  return Device({aoti_torch_device_type_cuda(), static_cast<int32_t>(index)}, false);
}

const flce_cuda_tuning& tuning() {
  return *cuda_library().tuning(); /* a Device has been opened, so the library is loaded */
}

void check_tuning(flce_status status) {
  if (status != FLCE_OK) check(flce_fail(status, "%s", tuning().last_error()));
}

/* Calls a function that writes a text and its length, first for the length and then for the text,
 * as for the plan's text. */
template <typename Write>
std::string text_of(Write write) {
  int64_t length = 0;
  check_tuning(write(nullptr, 0, &length));
  std::string text(static_cast<size_t>(length) + 1, '\0');
  check_tuning(write(text.data(), length + 1, &length));
  text.resize(static_cast<size_t>(length));
  return text;
}

void gemm_record(int64_t device_index) {
  Device device = cuda_device(device_index);
  tuning().record(true);
}

std::string gemm_recorded(int64_t device_index) {
  Device device = cuda_device(device_index);
  tuning().record(false);
  return text_of([&](char* text, int64_t size, int64_t* used) {
    return tuning().recorded(device.cuda(), text, size, used);
  });
}

std::string gemm_candidates(int64_t device_index, std::string product) {
  Device device = cuda_device(device_index);
  return text_of([&](char* text, int64_t size, int64_t* used) {
    return tuning().candidates(device.cuda(), product.c_str(), text, size, used);
  });
}

/* Of a contiguous tensor on the device. */
int64_t bytes_of(const char* name, const Tensor& tensor, DeviceId id) {
  expect_device(name, tensor, id, "a");
  if (!tensor.is_contiguous()) refuse(name, "a contiguous tensor", "another layout");
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

double gemm_time(Tensor a, Tensor b, Tensor c, std::optional<Tensor> bias, Tensor workspace,
                 std::string product, int64_t candidate, int64_t repeats) {
  Device device(device_of(a), false);
  DeviceId id = device.id();
  flce_gemm_operands operands = {a.const_data_ptr(),
                                 b.const_data_ptr(),
                                 c.mutable_data_ptr(),
                                 bias ? bias->const_data_ptr() : nullptr,
                                 workspace.mutable_data_ptr(),
                                 bytes_of("a", a, id),
                                 bytes_of("b", b, id),
                                 bytes_of("c", c, id),
                                 bias ? bytes_of("bias", *bias, id) : 0,
                                 bytes_of("workspace", workspace, id)};
  double milliseconds = 0;
  check_tuning(
      tuning().time(device.cuda(), product.c_str(), &operands, candidate, repeats, &milliseconds));
  return milliseconds;
}

/* Without a CUDA library there are no GEMMs to select algorithms for. Opens no device. */
void gemm_use(std::string lines) {
  const CudaLibrary& library = cuda_library();
  if (library.error.empty()) check_tuning(tuning().use(lines.c_str()));
}

}  // namespace

FLCE_LIBRARY_FRAGMENT(m) {
  m.def("gemm_record(int device) -> ()");
  m.def("gemm_recorded(int device) -> str");
  m.def("gemm_candidates(int device, str product) -> str");
  m.def(
      "gemm_time(Tensor a, Tensor b, Tensor(a!) c, Tensor? bias, Tensor(b!) workspace, "
      "str product, int candidate, int repeats) -> float");
  m.def("gemm_use(str lines) -> ()");
}

FLCE_LIBRARY_IMPL(CUDA, m) {
  m.impl("gemm_time", TORCH_BOX(&gemm_time));
}

FLCE_LIBRARY_IMPL(CompositeExplicitAutograd, m) {
  m.impl("gemm_record", TORCH_BOX(&gemm_record));
  m.impl("gemm_recorded", TORCH_BOX(&gemm_recorded));
  m.impl("gemm_candidates", TORCH_BOX(&gemm_candidates));
  m.impl("gemm_use", TORCH_BOX(&gemm_use));
}

}  // namespace flce
