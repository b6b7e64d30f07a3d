/* A call's problem and pointers, from the tensors and options that an operator is given. */
#ifndef FLCE_BINDING_CALL_H
#define FLCE_BINDING_CALL_H

#include "binding/arguments.h"
#include "binding/options.h"

namespace flce {

/* The tensors of the loss other than the operands; every operator takes them in this order. */
struct LossTensors {
  Tensor target;
  OptionalTensor weight, token_weight, temperature, num_items, classes;
};

/* input (..., H), linear_weight (V, H) and linear_bias (V,). */
struct Operands {
  Tensor input, linear_weight;
  OptionalTensor linear_bias;
};

/* The teacher of a divergence: its operands, or its logits (..., V) as `input` alone; and the
 * temperature of each row, or none. Without a divergence all are none. */
struct Teacher {
  OptionalTensor input, linear_weight, linear_bias, temperature;
};

/* The arguments of an operator after its tensors. rows: nullopt: all; on the CPU those that are not
 * ignored, but memory for all; kCountedRows: memory for those alone. group: of a sharded
 * vocabulary, its name in torch.distributed. */
struct CallArgs {
  std::optional<int64_t> valid_vocab, rows;
  PackedOptions options;
  std::optional<std::string> group;
};
constexpr int64_t kCountedRows = -1;

/* What the core reads of a call. `kept` owns the tensors behind its pointers: the arguments, or
 * copies of those whose dtype or layout is not the core's. */
struct Call {
  flce_problem problem{};
  flce_tensors tensors{};
  DeviceId id{};
  bool allow_tf32 = false;
  std::vector<int64_t> shape; /* of the target: input's without its last dimension */
  int64_t saved_rows = 0;     /* rows of what save=logits and save=samples keep */
  bool none_counted = false;  /* on a CPU: a mean over no row, because all targets are ignored */
  std::vector<Tensor> kept;
  OptionalTensor teacher_input; /* of a divergence: the teacher's x, as the core reads it */

  /* The operand x, as the core reads it. */
  const Tensor& input() const { return kept.front(); }
  const void* pointer(const char* name, const Tensor& tensor) {
    kept.push_back(dense(name, tensor));
    return kept.back().const_data_ptr();
  }
  const void* pointer(const char* name, const Tensor& tensor, ScalarType type) {
    kept.push_back(converted(name, tensor, type));
    return kept.back().const_data_ptr();
  }
};

/* The call of a linear cross entropy, and that of a loss of given logits. */
Call make_call(const Operands& operands, const LossTensors& loss, const CallArgs& arguments);
Call make_call(const Tensor& logits, const LossTensors& loss, const PackedOptions& options);

/* Whether the last forward of this thread was a mean over no row, as far as is known without
 * waiting (Call::none_counted); false when asked again. report_none_counted: of a forward. */
bool take_none_counted();
void report_none_counted(const Call& call);

/* The teacher's part of the call of a divergence. */
Call make_teacher(const Teacher& given, const PackedOptions& options, const Call& student);

/* Refuses a divergence, to an operator that has no teacher. */
void expect_no_divergence(const PackedOptions& options);

/* The problem of a divergence's teacher before its operands: it has the student's rows and classes,
 * and makes no gradients. */
flce_problem teacher_of(const flce_problem& student);
/* The dtypes of its GEMM and logits from those of its operands. */
void choose_teacher_dtypes(const PackedOptions& options, flce_problem* teacher);
/* Makes `teacher` a problem of given logits, without a GEMM. They are read in `dtype`; where one of
 * it and the student's dtype is float64 and the other is not, in the student's stat dtype. */
void set_teacher_logits(flce_dtype dtype, int64_t columns, flce_problem* teacher);

/* Sets the dtypes of the GEMMs, of dW's sum and of the logits from those of the operands. */
void choose_dtypes(const PackedOptions& options, flce_problem* problem);

}  // namespace flce

#endif
