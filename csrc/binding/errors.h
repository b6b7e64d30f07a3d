/* Refusals and failures of the binding, and what their messages are made of. */
#ifndef FLCE_BINDING_ERRORS_H
#define FLCE_BINDING_ERRORS_H

#include <stdexcept>
#include <string>
#include <vector>

#include <torch/headeronly/core/ScalarType.h>

#include "flce.h"

namespace flce {

using torch::headeronly::ScalarType;

/* What every refusal and failure of the binding is thrown as. Which Python exception an exception
 * of C++ becomes differs between versions of torch, so the text says which one it has to be: "flce:
 * ", the name of the status, ": " and the message. flce/operators.py raises it. */
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

/* The form of every refusal of an argument. */
[[noreturn]] inline void refuse(const std::string& name, const std::string& expected,
                                const std::string& got,
                                flce_status status = FLCE_INVALID_ARGUMENT) {
  throw Failure(status, name + ": expected " + expected + ", got " + got);
}

inline std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); i++) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

/* As Python shows a torch.dtype. */
inline std::string dtype_text(ScalarType type) {
  static const struct {
    ScalarType type;
    const char* name;
  } kNames[] = {
      {ScalarType::Double, "float64"},
      {ScalarType::Float, "float32"},
      {ScalarType::BFloat16, "bfloat16"},
      {ScalarType::Half, "float16"},
      {ScalarType::Long, "int64"},
      {ScalarType::Int, "int32"},
      {ScalarType::Short, "int16"},
      {ScalarType::Char, "int8"},
      {ScalarType::Byte, "uint8"},
      {ScalarType::Bool, "bool"},
      {ScalarType::ComplexDouble, "complex128"},
      {ScalarType::ComplexFloat, "complex64"},
      {ScalarType::ComplexHalf, "complex32"},
      {ScalarType::Float8_e4m3fn, "float8_e4m3fn"},
      {ScalarType::Float8_e5m2, "float8_e5m2"},
      {ScalarType::Float8_e4m3fnuz, "float8_e4m3fnuz"},
      {ScalarType::Float8_e5m2fnuz, "float8_e5m2fnuz"},
      {ScalarType::Float8_e8m0fnu, "float8_e8m0fnu"},
      {ScalarType::UInt16, "uint16"},
      {ScalarType::UInt32, "uint32"},
      {ScalarType::UInt64, "uint64"},
  };
  for (const auto& one : kNames)
    if (one.type == type) return std::string("torch.") + one.name;
  return "another dtype";
}

// ---- dtypes ----

inline ScalarType to_scalar_type(flce_dtype dtype) {
  constexpr ScalarType kTypes[] = {ScalarType::Double, ScalarType::Float, ScalarType::BFloat16,
                                   ScalarType::Half};
  return kTypes[dtype];
}

inline bool is_float(ScalarType type) {
  return type == ScalarType::Double || type == ScalarType::Float || type == ScalarType::BFloat16 ||
         type == ScalarType::Half;
}

inline flce_dtype to_dtype(ScalarType type, const char* argument) {
  for (flce_dtype dtype : {FLCE_F64, FLCE_F32, FLCE_BF16, FLCE_F16})
    if (to_scalar_type(dtype) == type) return dtype;
  refuse(argument, "float64, float32, bfloat16 or float16", dtype_text(type), FLCE_INVALID_TYPE);
}

}  // namespace flce

#endif
