/* Checks of the tensors that an operator is given, and their conversion to what the core reads. */
#ifndef FLCE_BINDING_ARGUMENTS_H
#define FLCE_BINDING_ARGUMENTS_H

#include <torch/csrc/stable/ops.h>

#include "binding/device.h"

namespace flce {

inline std::string device_text(DeviceId id) {
  if (id.type == aoti_torch_device_type_cpu()) return "cpu";
  if (id.type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(id.index);
  return id.type == aoti_torch_device_type_meta() ? "meta" : "another device";
}

/* torch passes None as a tensor that is undefined, whose properties cannot be asked for. */
inline void expect_tensor(const char* name, const Tensor& tensor) {
  if (!tensor.defined()) refuse(name, "a tensor", "None", FLCE_INVALID_TYPE);
}

/* `first`: the name of the tensor whose device is `id`. */
inline void expect_device(const char* name, const Tensor& tensor, DeviceId id, const char* first) {
  DeviceId got = device_of(tensor);
  if (got.type != id.type || got.index != id.index)
    refuse(name, std::string("the device of ") + first + ", " + device_text(id), device_text(got));
}

/* `meaning`: what the shape is, appended to it in the message. */
inline void expect_shape(const char* name, const Tensor& tensor,
                         const std::vector<int64_t>& expected, const std::string& meaning = "") {
  std::vector<int64_t> got = shape_of(tensor);
  if (got != expected) refuse(name, "shape " + shape_text(expected) + meaning, shape_text(got));
}

inline void expect_type(const char* name, const Tensor& tensor, ScalarType type) {
  if (type_of(tensor) != type)
    refuse(name, "dtype " + dtype_text(type), dtype_text(type_of(tensor)), FLCE_INVALID_TYPE);
}

/* A contiguous copy of this dtype on a device. */
inline Tensor copied(const char* name, const Tensor& tensor, ScalarType type, DeviceId id) {
  Tensor copy = new_tensor(shape_of(tensor), type, id, "a contiguous copy of", name);
  try {
    return torch::stable::copy_(copy, tensor);
  } catch (const std::exception&) { /* whose text has torch's function alone */
    throw Failure(FLCE_DEVICE_ERROR, std::string(name) + ": torch failed to copy it");
  }
}

/* The tensor itself if it is contiguous and of this dtype, else a copy that is. */
inline Tensor converted(const char* name, const Tensor& tensor, ScalarType type) {
  if (tensor.is_contiguous() && type_of(tensor) == type) return tensor;
  return copied(name, tensor, type, device_of(tensor));
}

inline Tensor dense(const char* name, const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : converted(name, tensor, type_of(tensor));
}

/* Checks a tensor that an operator of the same build has made: nothing converts it. */
inline void expect_like(const char* name, const Tensor& tensor, const std::vector<int64_t>& shape,
                        ScalarType type, DeviceId id) {
  expect_tensor(name, tensor);
  expect_shape(name, tensor, shape);
  if (!tensor.is_contiguous()) refuse(name, "a contiguous tensor", "another layout");
  expect_type(name, tensor, type);
  expect_device(name, tensor, id, "input");
}

/* The shape without its last dimension. */
inline std::vector<int64_t> leading_shape(const Tensor& tensor) {
  std::vector<int64_t> shape = shape_of(tensor);
  shape.pop_back();
  return shape;
}

/* The elements of a tensor's shape; a part of one that has none may have more than fit. */
inline int64_t count_of(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (int64_t size : shape) {
    if (size > 0 && count > INT64_MAX / size) refuse("input", "fewer elements", shape_text(shape));
    count *= size;
  }
  return count;
}

}  // namespace flce

#endif
