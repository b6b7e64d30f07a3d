/* The tensors that the operators return, and their allocation. */
#ifndef FLCE_BINDING_OUTPUTS_H
#define FLCE_BINDING_OUTPUTS_H

#include "binding/call.h"

namespace flce {

/* A gradient that is not wanted is nullopt instead of an empty tensor, because allocating an empty
 * tensor takes time too. */
struct Gradients {
  OptionalTensor input, weight, bias;
};

/* Allocates the wanted gradients that this pass computes; `input` has their first one's shape. */
inline Gradients allocate_gradients(const Device& device, const Tensor& input,
                                    const flce_plan& plan, Call* call) {
  const flce_problem& problem = call->problem;
  auto make = [&](std::vector<int64_t> sizes, flce_dtype dtype, const char* name, void** pointer) {
    Tensor tensor = device.allocate(sizes, dtype, name);
    *pointer = tensor.mutable_data_ptr();
    return tensor;
  };
  int64_t v = problem.shape.weight_rows;
  flce_tensors* tensors = &call->tensors;
  Gradients gradients;
  if (problem.wants.grad_input)
    gradients.input =
        make(shape_of(input), plan.grad_input_dtype, "grad_input", &tensors->grad_input);
  if (problem.wants.grad_weight && !problem.backward.adds_grad_weight)
    gradients.weight = make({v, flce_grad_weight_cols(&problem)}, plan.grad_weight_dtype,
                            "grad_weight", &tensors->grad_weight);
  if (problem.wants.grad_bias)
    gradients.bias = make({v}, plan.grad_bias_dtype, "grad_bias", &tensors->grad_bias);
  return gradients;
}

inline Tensor allocate_workspace(const Device& device, int64_t bytes, const char* name,
                                 Call* call) {
  Tensor workspace = device.allocate({bytes}, ScalarType::Byte, name);
  call->tensors.workspace = workspace.mutable_data_ptr();
  return workspace;
}

inline Tensor allocate_loss(const Device& device, Call* call) {
  bool reduced = call->problem.reduction != FLCE_NONE;
  Tensor loss = device.allocate(reduced ? std::vector<int64_t>{} : call->shape,
                                flce_stat_dtype(call->problem.dtypes.gemm), "loss");
  call->tensors.loss = loss.mutable_data_ptr();
  return loss;
}

/* What a forward returns in addition to the loss and to what its strategy saves. */
struct Statistics {
  OptionalTensor stats, scalars, predictions;
};

/* The logits of a few classes of each row, and these classes where the forward finds them. */
struct ClassLogits {
  OptionalTensor logits, classes;
};

inline Statistics allocate_statistics(const Device& device, bool keeps_statistics, Call* call) {
  flce_dtype stat = flce_stat_dtype(call->problem.dtypes.gemm);
  Statistics made;
  if (keeps_statistics) {
    made.stats = device.allocate({FLCE_STAT_COUNT, call->problem.shape.tokens}, stat, "stats");
    made.scalars = device.allocate({FLCE_SCALAR_COUNT}, stat, "scalars");
    call->tensors.stats = made.stats->mutable_data_ptr();
    call->tensors.scalars = made.scalars->mutable_data_ptr();
  }
  if (!call->problem.wants.predictions) return made;
  made.predictions = device.allocate(call->shape, ScalarType::Long, "predictions");
  call->tensors.predictions = made.predictions->mutable_data_ptr();
  return made;
}

}  // namespace flce

#endif
