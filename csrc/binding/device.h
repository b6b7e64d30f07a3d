/* A call's device: the CPU, or a GPU by the CUDA library, and the memory that torch allocates
 * there. */
#ifndef FLCE_BINDING_DEVICE_H
#define FLCE_BINDING_DEVICE_H

#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include "backend.h"
#include "binding/errors.h"
#include "peers.h"

namespace flce {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

/* libflce_cuda.so, in the directory of this module. It is loaded when the first CUDA tensor
 * arrives. */
struct CudaLibrary {
  std::string path, error;
  flce_cuda_backend_fn open = nullptr;
  flce_cuda_describe_fn describe = nullptr;
  flce_cuda_peers_begin_fn peers_begin = nullptr;
  flce_cuda_peers_wait_fn peers_wait = nullptr;
  AOTITorchError (*current_stream)(int32_t, void**) = nullptr;

  CudaLibrary();
};

const CudaLibrary& cuda_library();

inline std::vector<int64_t> shape_of(const Tensor& tensor) {
  std::vector<int64_t> shape(tensor.dim());
  for (size_t i = 0; i < shape.size(); i++) shape[i] = tensor.size(static_cast<int64_t>(i));
  return shape;
}

struct DeviceId {
  int32_t type, index;
};

inline DeviceId device_of(const Tensor& tensor) {
  DeviceId id;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &id.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &id.index));
  return id;
}

/* The dtype; Undefined for one that torch's stable ABI does not know. */
inline ScalarType type_of(const Tensor& tensor) {
  try {
    return tensor.scalar_type();
  } catch (const std::exception&) {
    return ScalarType::Undefined;
  }
}

/* A new contiguous tensor of unspecified contents. An out-of-memory error says what it is and its
 * name. */
Tensor new_tensor(const std::vector<int64_t>& sizes, ScalarType type, DeviceId id, const char* what,
                  const char* name);

/* The backend of a call's device, together with the guard that makes this device the current
 * one. */
class Device {
 public:
  Device(DeviceId id, bool allow_tf32);
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
  Tensor allocate(const std::vector<int64_t>& sizes, ScalarType type, const char* buffer) const;
  Tensor allocate(const std::vector<int64_t>& sizes, flce_dtype dtype, const char* buffer) const {
    return allocate(sizes, to_scalar_type(dtype), buffer);
  }

 private:
  void open_cuda(bool allow_tf32);

  DeviceId id_;
  DeviceGuardHandle guard_ = nullptr;
  flce_cpu cpu_{};
  flce_cuda cuda_{};
  flce_backend table_{};
};

}  // namespace flce

#endif
