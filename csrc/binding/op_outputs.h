/* The tensors that the operators of linear cross entropy return, and their allocation. */
#ifndef FLCE_OP_OUTPUTS_H
#define FLCE_OP_OUTPUTS_H

#include "binding/torch_device.h"

namespace {

/* A gradient that is not wanted is nullopt instead of an empty tensor, because allocating an empty
 * tensor takes time too. */
struct Gradients {
  OptionalTensor input, weight, bias;
};

/* Allocates the wanted gradients that this pass computes. */
Gradients allocate_gradients(const Device& device, const flce_problem& problem,
                             const flce_plan& plan, flce_tensors* tensors) {
  auto make = [&](std::vector<int64_t> sizes, flce_dtype dtype, const char* name, void** pointer) {
    Tensor tensor = device.allocate(sizes, dtype, name);
    *pointer = tensor.mutable_data_ptr();
    return tensor;
  };
  int64_t n = flce_input_rows(&problem), h = problem.hidden, v = problem.weight_rows;
  Gradients gradients;
  if (problem.want_grad_input)
    gradients.input = make({n, h}, plan.grad_input_dtype, "grad_input", &tensors->grad_input);
  if (problem.want_grad_weight && !problem.adds_grad_weight)
    gradients.weight = make({v, flce_grad_weight_cols(&problem)}, plan.grad_weight_dtype,
                            "grad_weight", &tensors->grad_weight);
  if (problem.want_grad_bias)
    gradients.bias = make({v}, plan.grad_bias_dtype, "grad_bias", &tensors->grad_bias);
  return gradients;
}

Tensor allocate_loss(const Device& device, const flce_problem& problem, flce_tensors* tensors) {
  std::vector<int64_t> rows = {problem.tokens}, one = {};
  Tensor loss = device.allocate(problem.reduction == FLCE_NONE ? rows : one,
                                flce_stat_dtype(problem.dtype), "loss");
  tensors->loss = loss.mutable_data_ptr();
  return loss;
}

/* What a forward returns in addition to the loss and to what its strategy saves. */
struct Statistics {
  OptionalTensor stats, scalars, predictions;
};

Statistics allocate_statistics(const Device& device, const flce_problem& problem,
                               bool keeps_statistics, flce_tensors* tensors) {
  flce_dtype stat = flce_stat_dtype(problem.dtype);
  Statistics made;
  if (keeps_statistics) {
    made.stats = device.allocate({FLCE_STAT_ROWS, problem.tokens}, stat, "stats");
    made.scalars = device.allocate({FLCE_SCALAR_COUNT}, stat, "scalars");
    tensors->stats = made.stats->mutable_data_ptr();
    tensors->scalars = made.scalars->mutable_data_ptr();
  }
  if (!problem.wants_predictions) return made;
  made.predictions = device.allocate_indices({problem.tokens}, "predictions");
  tensors->predictions = made.predictions->mutable_data_ptr();
  return made;
}

}  // namespace

#endif
