/* Cross entropy of logits that the caller provides: flce_cross_entropy_forward and _backward. One
 * pass over all rows by the row passes of a backend; no GEMM, no chunks, no plan. */

#include "core/execution.h"

static flce_rows view_logits(const flce_backend* backend, const flce_problem* problem,
                             const flce_tensors* tensors, void* losses, execution* e) {
  *e = (execution){.backend = backend,
                   .problem = problem,
                   .tensors = tensors,
                   .stat = flce_stat_dtype(problem->dtypes.gemm),
                   .losses = losses};
  flce_rows view = open_rows(e, 0, problem->shape.tokens);
  view.probabilities_pitch = problem->shape.vocab;
  set_z(&view, &(chunk_matrix){(void*)tensors->input, problem->dtypes.gemm, problem->shape.vocab,
                               problem->shape.vocab});
  return view;
}

static flce_status check_has_classes(const flce_problem* problem) {
  if (problem->shape.vocab >= 1) return FLCE_OK;
  return flce_fail(FLCE_INVALID_ARGUMENT, "logits: expected at least one class, got %lld",
                   (long long)problem->shape.vocab);
}

flce_status flce_cross_entropy_forward(const flce_backend* backend, const flce_problem* problem,
                                       const flce_tensors* tensors) {
  execution e;
  bool reduced = problem->reduction != FLCE_NONE;
  flce_rows view =
      view_logits(backend, problem, tensors, reduced ? tensors->workspace : tensors->loss, &e);
  FLCE_TRY(check_has_classes(problem));
  FLCE_TRY(flce_check_loss(problem));
  CALL(&e, prepare, problem, tensors, NULL, 0, false);
  CALL(&e, stat_rows, &view);
  if (reduced)
    CALL(&e, reduce, tensors->loss, tensors->workspace, problem->shape.tokens,
         scalar(&e, FLCE_SCALAR_INV_DENOM), e.stat, false);
  return FLCE_OK;
}

flce_status flce_cross_entropy_backward(const flce_backend* backend, const flce_problem* problem,
                                        const flce_tensors* tensors) {
  execution e;
  flce_rows view = view_logits(backend, problem, tensors, NULL, &e);
  set_out(&view, &(chunk_matrix){tensors->grad_input, problem->dtypes.gemm, problem->shape.vocab,
                                 problem->shape.vocab});
  flce_upstream upstream = upstream_of(&e);
  FLCE_TRY(check_has_classes(problem));
  CALL(&e, row_coefficients, &view, NULL, &upstream, scalar(&e, FLCE_SCALAR_INV_DENOM),
       tensors->workspace);
  view.coef = tensors->workspace;
  CALL(&e, grad_rows, &(flce_grad_rows_args){.rows = &view, .scale = 1.0});
  return FLCE_OK;
}
