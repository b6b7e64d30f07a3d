/* save=samples: the forward draws the lists of the rows, the backward makes the gradients from
 * them. Of a sampled divergence (plan->draws_from_dz) the forward does both. */
#include "core/samples.h"

#include "core/gradients.h"
#include "core/shards.h"

/* The list of a computed row: in FLCE_BUF_SAMPLES of a sampled divergence, else in `saved`. */
static int32_t* list_of_row(const execution* e, int64_t row) {
  int32_t* own = buffer_ptr(e, FLCE_BUF_SAMPLES);
  return (own ? own : (int32_t*)e->tensors->saved) +
         row * flce_sample_pitch(e->problem->sampling.eps);
}

flce_status flce_sample_chunk(const execution* e, const chunk* c) {
  const flce_problem* problem = e->problem;
  int64_t classes = flce_is_sharded(problem) ? problem->shard.classes : problem->shape.vocab;
  int64_t first = problem->shape.first_token + (e->plan->gathers ? 0 : c->first);
  if (problem->shape.vocab == 0) {
    /* A rank without a class, to which all targets are out of range. */
    CALL(e, fill, list_of_row(e, c->first), 0,
         c->rows * flce_sample_pitch(problem->sampling.eps) * (int64_t)sizeof(int32_t));
    return FLCE_OK;
  }
  flce_rows rows = rows_of(e, c);
  set_out(&rows, &c->out);
  CALL(e, sample_rows,
       &(flce_sample_rows_args){.rows = &rows,
                                .lists = list_of_row(e, c->first),
                                .eps = problem->sampling.eps,
                                .bits = flce_sample_bits(classes),
                                .seed = e->tensors->seed,
                                .first_token = first});
  return FLCE_OK;
}

/* The rows of all tokens with their coefficients. */
static flce_rows with_coef(const execution* e, const chunk* all) {
  flce_rows rows = rows_of(e, all);
  rows.coef = all->coef;
  rows.wants_entropy = e->tensors->grad_entropy != NULL;
  return rows;
}

static flce_status sampled_dx(const execution* e, const chunk* all) {
  if (!e->problem->wants.grad_input || e->problem->shape.vocab == 0) return FLCE_OK;
  flce_rows rows = with_coef(e, all);
  CALL(e, sampled_grad_input,
       &(flce_sampled_input_args){.dx = e->tensors->grad_input,
                                  .dx_dtype = e->plan->partial_dx_dtype,
                                  .rows = &rows,
                                  .lists = list_of_row(e, 0),
                                  .eps = e->problem->sampling.eps,
                                  .w = e->linear_weight,
                                  .dtype = e->plan->dtype,
                                  .wsum = buffer_ptr(e, FLCE_BUF_SMOOTH),
                                  .hidden = e->plan->hidden,
                                  .cols = e->problem->shape.hidden});
  return FLCE_OK;
}

static flce_status weight_from_samples(const execution* e, const flce_rows* rows,
                                       const void* xsum) {
  CALL(e, sampled_grad_weight,
       &(flce_sampled_weight_args){.dw = e->tensors->grad_weight,
                                   .dw_dtype = e->plan->grad_weight_dtype,
                                   .x = weight_input(e),
                                   .dtype = e->plan->dtype,
                                   .order = buffer_ptr(e, FLCE_BUF_SAMPLE_ORDER),
                                   .xsum = xsum,
                                   .class_weight = e->tensors->class_weight,
                                   .eps = e->problem->sampling.eps,
                                   .rows = rows->rows,
                                   .vocab = e->problem->shape.vocab,
                                   .hidden = e->plan->weight_hidden,
                                   .x_pitch = e->plan->hidden,
                                   .cols = flce_grad_weight_cols(e->problem),
                                   .adds = e->problem->backward.adds_grad_weight});
  return FLCE_OK;
}

static flce_status bias_from_samples(const execution* e, const flce_rows* rows, const void* total) {
  CALL(e, sampled_grad_bias,
       &(flce_sampled_bias_args){.db = e->tensors->grad_bias,
                                 .db_dtype = e->plan->grad_bias_dtype,
                                 .order = buffer_ptr(e, FLCE_BUF_SAMPLE_ORDER),
                                 .smooth_total = total,
                                 .class_weight = e->tensors->class_weight,
                                 .eps = e->problem->sampling.eps,
                                 .rows = rows->rows,
                                 .vocab = e->problem->shape.vocab,
                                 .hidden = e->plan->weight_hidden});
  return FLCE_OK;
}

static flce_status sampled_dw_db(const execution* e, const chunk* all) {
  const flce_problem* problem = e->problem;
  flce_rows rows = with_coef(e, all);
  if (problem->shape.vocab == 0 || (!problem->wants.grad_weight && !problem->wants.grad_bias))
    return FLCE_OK;
  void *xsum, *total;
  FLCE_TRY(flce_sum_smooth(e, &xsum, &total));
  CALL(e, order_samples,
       &(flce_order_samples_args){.order = buffer_ptr(e, FLCE_BUF_SAMPLE_ORDER),
                                  .rows = &rows,
                                  .lists = list_of_row(e, 0),
                                  .eps = problem->sampling.eps,
                                  .hidden = e->plan->weight_hidden});
  if (problem->wants.grad_weight) FLCE_TRY(weight_from_samples(e, &rows, xsum));
  return problem->wants.grad_bias ? bias_from_samples(e, &rows, total) : FLCE_OK;
}

flce_status flce_sampled_gradients(const execution* e, const chunk* all) {
  FLCE_TRY(sampled_dx(e, all));
  FLCE_TRY(flce_begin_all_to_all_dx(e));
  FLCE_TRY(flce_sum_dx(e));
  FLCE_TRY(sampled_dw_db(e, all));
  return flce_wait_all_gather_dx(e);
}
