/* The gradients of a chunk from its E or dz, and what precedes and follows the loop over chunks. */
#include "core/gradients.h"

#include "core/plan_rules.h"

static const void* coef_row(const execution* e, const chunk* c, enum flce_coef_row row) {
  return element_ptr(c->coef, row * e->problem->shape.tokens, e->stat);
}

/* dX of the chunk; with a sharded vocabulary this rank's part of it. */
static void* dx_of(const execution* e, const chunk* c) {
  int64_t first = e->plan->gathers ? 0 : c->first;
  return element_ptr(e->tensors->grad_input, first * e->problem->shape.hidden,
                     e->plan->partial_dx_dtype);
}

/* Runs a GEMM that writes its accumulator, or adds to it where gemm.beta is 1; its rows have no
 * gaps. For a dtype of the accumulator that the GEMM cannot write, `piece_rows` is not 0: so many
 * rows of the result at a time go to a buffer, from which add_block adds them. */
static flce_status accumulate(const execution* e, flce_gemm gemm, int64_t piece_rows) {
  if (piece_rows == 0) return flce_run_gemm(e, gemm);
  const flce_plan* plan = e->plan;
  void *accum = gemm.c, *piece = buffer_ptr(e, FLCE_BUF_GEMM_PIECE);
  const void* a = gemm.a;
  int64_t rows = gemm.m, row_of_a = gemm.transpose_a ? 1 : gemm.pitch_a;
  if (gemm.beta == 0.0) CALL(e, fill, accum, 0, rows * gemm.n * flce_size_of(gemm.c_dtype));
  flce_dtype accum_dtype = gemm.c_dtype;
  gemm.c = piece;
  gemm.c_dtype = plan->dtype;
  gemm.beta = 0.0;
  for (int64_t j = 0; j < rows; j += piece_rows) {
    gemm.m = min64(rows - j, piece_rows);
    gemm.a = element_ptr(a, j * row_of_a, plan->dtype);
    FLCE_TRY(flce_run_gemm(e, gemm));
    CALL(e, add_block,
         &(flce_add_block_args){.accum = element_ptr(accum, j * gemm.n, accum_dtype),
                                .accum_dtype = accum_dtype,
                                .block = piece,
                                .dtype = plan->dtype,
                                .pitch = gemm.n,
                                .rows = gemm.m,
                                .cols = gemm.n});
  }
  return FLCE_OK;
}

flce_status flce_dx_gemm(const execution* e, const chunk* c) {
  if (!e->problem->wants.grad_input || e->problem->shape.vocab == 0) return FLCE_OK;
  int64_t h = e->plan->hidden;
  flce_gemm gemm = {.m = c->rows,
                    .n = h,
                    .k = c->classes,
                    .a = c->out.data,
                    .b = weight_of(e, c),
                    .c = c->dx_rows ? c->dx_rows : dx_of(e, c),
                    .pitch_a = c->out.pitch,
                    .pitch_b = h,
                    .pitch_c = h,
                    .c_dtype = e->plan->dx_gemm_dtype,
                    .beta = c->first_class > 0 ? 1.0 : 0.0,
                    .factors = buffer_ptr(e, FLCE_BUF_DZ_SCALE)};
  return accumulate(e, gemm, e->plan->dx_piece_rows);
}

/* Whether flce_finish_dx writes c->scaled_x, too: it reads x and its factors anyway. With blocks
 * of classes scaled_x is needed before dX is finished or, with dX first, for other rows. */
static bool dx_scales_input(const execution* e) {
  return e->plan->form == FLCE_FORM_EXP && e->problem->wants.grad_input &&
         e->plan->block_classes == 0;
}

/* Form exp: coef * x. Form dz: x * FLCE_SCALAR_INPUT_SCALE with zeros in ignored rows, because a
 * NaN in x times a dz of 0 would be NaN. */
flce_status flce_scale_input(const execution* e, const chunk* c) {
  if (!c->scaled_x || dx_scales_input(e) || e->problem->shape.vocab == 0) return FLCE_OK;
  bool exp_form = e->plan->form == FLCE_FORM_EXP;
  int64_t h = e->plan->hidden;
  CALL(e, scale_rows,
       &(flce_scale_rows_args){.out = c->scaled_x,
                               .out_pitch = h,
                               .x = input_of(e, c),
                               .dtype = e->plan->dtype,
                               .coef = coef_row(e, c, exp_form ? FLCE_COEF_EXP : FLCE_COEF_VALID),
                               .index = c->index,
                               .rows = c->rows,
                               .hidden = h});
  return FLCE_OK;
}

flce_status flce_finish_dx(const execution* e, const chunk* c) {
  if (!e->problem->wants.grad_input || e->problem->shape.vocab == 0) return FLCE_OK;
  const flce_plan* plan = e->plan;
  int64_t h = plan->hidden, cols = e->problem->shape.hidden;
  void *dx = dx_of(e, c), *result = c->dx_rows ? c->dx_rows : dx;
  bool exp_form = plan->form == FLCE_FORM_EXP;
  if (!exp_form && !c->dx_rows) return FLCE_OK;
  flce_rows rows = rows_of(e, c);
  rows.coef = exp_form ? c->coef : NULL;
  CALL(e, finish_grad_input,
       &(flce_grad_input_args){.dx = dx,
                               .dx_dtype = plan->partial_dx_dtype,
                               .d = result,
                               .d_dtype = plan->dx_gemm_dtype,
                               .w = e->linear_weight,
                               .dtype = plan->dtype,
                               .rows = &rows,
                               .wsum = buffer_ptr(e, FLCE_BUF_SMOOTH),
                               .x = input_of(e, c),
                               .scaled_x = dx_scales_input(e) ? c->scaled_x : NULL,
                               .hidden = h,
                               .cols = cols});
  return FLCE_OK;
}

/* The accumulator of dW over chunks: a buffer of its own, or the output itself. */
static void* dw_accum(const execution* e) {
  void* own = buffer_ptr(e, FLCE_BUF_DW_ACCUM);
  return own ? own : e->tensors->grad_weight;
}

/* True if dW is accumulated in the caller's grad_weight, added to its contents. */
static bool sums_in_callers(const execution* e) {
  return e->problem->backward.adds_grad_weight && !buffer_ptr(e, FLCE_BUF_DW_ACCUM);
}

/* The weights of the chunk's rows of E or dz in db, [rows] stat dtype; NULL for ones. */
static flce_status row_weights(const execution* e, const chunk* c, const void** weights) {
  const float* scale = buffer_ptr(e, FLCE_BUF_DZ_SCALE);
  *weights = scale ? scale + FLCE_DZ_SCALE_NUMBERS : NULL;
  if (e->plan->form != FLCE_FORM_EXP) return FLCE_OK;
  *weights = coef_row(e, c, FLCE_COEF_EXP);
  if (!e->plan->gathers) return FLCE_OK;
  void* gathered = buffer_ptr(e, FLCE_BUF_GATHERED_COEF);
  CALL(e, scale_rows,
       &(flce_scale_rows_args){.out = gathered,
                               .out_pitch = 1,
                               .x = *weights,
                               .dtype = e->stat,
                               .index = c->index,
                               .rows = c->rows,
                               .hidden = 1});
  *weights = gathered;
  return FLCE_OK;
}

/* dW's GEMM and the sums of db in one kernel. */
static flce_status weight_and_bias(const execution* e, const chunk* c, const flce_gemm* gemm) {
  const void* weights;
  FLCE_TRY(row_weights(e, c, &weights));
  flce_count_gemm();
  CALL(e, grad_weight_gemm, gemm, c->index, weights, buffer_ptr(e, FLCE_BUF_DB_PARTS), c->adds_dw);
  return FLCE_OK;
}

/* dW of the chunk, added to its accumulator: E^T (coef x), or dz^T x. */
static flce_status weight_gradient(const execution* e, const chunk* c) {
  const flce_plan* plan = e->plan;
  int64_t h = plan->hidden, width = plan->weight_hidden;
  const void* x = c->scaled_x ? c->scaled_x : input_of(e, c);
  flce_gemm gemm = {.m = c->classes,
                    .n = width,
                    .k = c->rows,
                    .transpose_a = true,
                    .a = c->out.data,
                    .b = element_ptr(x, h - width, plan->dtype),
                    .c = element_ptr(dw_accum(e), c->first_class * width, plan->accum_dtype),
                    .pitch_a = c->out.pitch,
                    .pitch_b = h,
                    .pitch_c = width,
                    .dtype = plan->dtype,
                    .c_dtype = plan->accum_dtype,
                    .beta = c->adds_dw || sums_in_callers(e) ? 1.0 : 0.0,
                    .shift = plan->dw_fp16_shift,
                    .factors = buffer_ptr(e, FLCE_BUF_DZ_SCALE)};
  if (plan->bias_parts > 0) return weight_and_bias(e, c, &gemm);
  return accumulate(e, gemm, plan->dw_piece_rows);
}

static flce_status bias_gradient(const execution* e, const chunk* c) {
  const void* weights;
  FLCE_TRY(row_weights(e, c, &weights));
  CALL(e, column_sum,
       &(flce_column_sum_args){
           .out = element_ptr(buffer_ptr(e, FLCE_BUF_DB_ACCUM), c->first_class, e->stat),
           .a = c->out.data,
           .a_dtype = e->plan->dtype,
           .pitch = c->out.pitch,
           .rows = c->rows,
           .cols = c->classes,
           .weights = weights,
           .accumulate = c->adds_dw,
           .scratch = buffer_ptr(e, FLCE_BUF_COLUMN_SUM)});
  return FLCE_OK;
}

flce_status flce_add_dw_db(const execution* e, const chunk* c) {
  if (e->problem->shape.vocab == 0) return FLCE_OK;
  if (e->problem->wants.grad_weight) FLCE_TRY(weight_gradient(e, c));
  if (e->problem->wants.grad_bias && !e->plan->bias_parts) FLCE_TRY(bias_gradient(e, c));
  return FLCE_OK;
}

/* ---- before and after the loop over chunks ---- */

/* Zeros the gradients of the padding rows of W and b. If dW is added to the caller's gradient, its
 * padding rows are left unchanged. */
static flce_status zero_padding(const execution* e) {
  const flce_problem* problem = e->problem;
  const flce_plan* plan = e->plan;
  int64_t v = problem->shape.vocab, padding = problem->shape.weight_rows - v;
  int64_t cols = flce_grad_weight_cols(problem);
  if (padding > 0 && problem->wants.grad_weight && !problem->backward.adds_grad_weight)
    CALL(e, fill, element_ptr(e->tensors->grad_weight, v * cols, plan->grad_weight_dtype), 0,
         padding * cols * flce_size_of(plan->grad_weight_dtype));
  if (padding > 0 && problem->wants.grad_bias)
    CALL(e, fill, element_ptr(e->tensors->grad_bias, v, plan->grad_bias_dtype), 0,
         padding * flce_size_of(plan->grad_bias_dtype));
  return FLCE_OK;
}

/* sum_j w_j W_j, for label smoothing's term of dX. */
flce_status flce_sum_w_for_smoothing(const execution* e) {
  const flce_problem* problem = e->problem;
  void* smooth = buffer_ptr(e, FLCE_BUF_SMOOTH);
  if (!smooth || !problem->wants.grad_input || problem->shape.vocab == 0) return FLCE_OK;
  int64_t h = e->plan->hidden;
  CALL(e, column_sum,
       &(flce_column_sum_args){.out = smooth,
                               .a = e->linear_weight,
                               .a_dtype = e->plan->dtype,
                               .pitch = h,
                               .rows = problem->shape.vocab,
                               .cols = h,
                               .weights = e->tensors->class_weight,
                               .scratch = buffer_ptr(e, FLCE_BUF_COLUMN_SUM)});
  return FLCE_OK;
}

flce_status flce_begin_gradients(const execution* e) {
  const flce_problem* problem = e->problem;
  FLCE_TRY(zero_padding(e));
  if (e->plan->gathers) {
    flce_rows all = open_rows(e, 0, problem->shape.tokens);
    /* flce_sum_smooth sums coef over all tokens, also over those that are in no chunk. */
    CALL(e, fill, buffer_ptr(e, FLCE_BUF_COEF), 0, e->plan->buffers[FLCE_BUF_COEF].bytes);
    if (problem->wants.grad_input)
      CALL(e, blank_rows, &all, problem->shape.rows, e->tensors->grad_input,
           e->plan->partial_dx_dtype, problem->shape.hidden);
  }
  /* The first chunk's GEMM overwrites the accumulator. It has to be zeroed only if there is no
   * chunk. Sampled gradients have no accumulator. */
  bool no_chunks = problem->shape.rows == 0 && !gradients_are_sampled(e->plan);
  if (problem->wants.grad_weight && !sums_in_callers(e) && no_chunks)
    CALL(e, fill, dw_accum(e), 0,
         problem->shape.vocab * e->plan->weight_hidden * flce_size_of(e->plan->accum_dtype));
  if (problem->wants.grad_bias && no_chunks && buffer_ptr(e, FLCE_BUF_DB_ACCUM))
    CALL(e, fill, buffer_ptr(e, FLCE_BUF_DB_ACCUM), 0,
         problem->shape.vocab * flce_size_of(e->stat));
  return FLCE_OK;
}

flce_status flce_sum_smooth(const execution* e, void** xsum, void** total) {
  const flce_problem* problem = e->problem;
  int64_t n = problem->shape.tokens, h = e->plan->hidden;
  const void* smooth = buffer_ptr(e, FLCE_BUF_SMOOTH);
  const void* coef = element_ptr(buffer_ptr(e, FLCE_BUF_COEF), FLCE_COEF_SMOOTH * n, e->stat);
  *xsum = smooth && problem->wants.grad_weight ? element_ptr(smooth, h, e->stat) : NULL;
  *total = smooth && problem->wants.grad_bias ? element_ptr(smooth, 2 * h, e->stat) : NULL;
  if (*xsum)
    CALL(e, column_sum,
         &(flce_column_sum_args){.out = *xsum,
                                 .a = weight_input(e),
                                 .a_dtype = e->plan->dtype,
                                 .pitch = h,
                                 .rows = n,
                                 .cols = e->plan->weight_hidden,
                                 .weights = coef,
                                 .scratch = buffer_ptr(e, FLCE_BUF_COLUMN_SUM)});
  if (*total) CALL(e, reduce, *total, coef, n, NULL, e->stat, false);
  return FLCE_OK;
}

/* What is added after the loop over chunks is made of these. */
typedef struct final_parts {
  const void* coef_target; /* [N] stat dtype; NULL in form dz */
  const void* order;       /* tokens ordered by target */
  void* xsum;         /* [weight_hidden] stat dtype, label smoothing's sum of x; NULL without */
  void* smooth_total; /* [1] stat dtype, the sum of coef_smooth; NULL without */
} final_parts;

/* Target terms and label smoothing's. A sum in another dtype or leading dimension than the caller's
 * dW is rounded once, when it is added or copied there. */
static flce_status finish_weight(const execution* e, const final_parts* parts) {
  const flce_plan* plan = e->plan;
  int64_t h = plan->weight_hidden, v = e->problem->shape.vocab;
  int64_t cols = flce_grad_weight_cols(e->problem);
  void *out = e->tensors->grad_weight, *accum = dw_accum(e);
  bool added = e->problem->backward.adds_grad_weight && accum != out, padded = h != cols;
  bool in_accum = added || padded;
  CALL(e, finish_grad_weight,
       &(flce_grad_weight_args){.dw = in_accum ? accum : out,
                                .dw_dtype = in_accum ? plan->accum_dtype : plan->grad_weight_dtype,
                                .accum = accum,
                                .accum_dtype = plan->accum_dtype,
                                .x = weight_input(e),
                                .x_pitch = plan->hidden,
                                .dtype = plan->dtype,
                                .coef_target = parts->coef_target,
                                .order = parts->order,
                                .tokens = e->problem->shape.tokens,
                                .xsum = parts->xsum,
                                .class_weight = e->tensors->class_weight,
                                .vocab = v,
                                .hidden = h});
  if (added)
    CALL(e, add_block,
         &(flce_add_block_args){.accum = out,
                                .accum_dtype = plan->grad_weight_dtype,
                                .block = accum,
                                .dtype = plan->accum_dtype,
                                .pitch = h,
                                .rows = v,
                                .cols = cols});
  else if (padded)
    CALL(e, cast,
         &(flce_cast_args){.out = out,
                           .out_dtype = plan->grad_weight_dtype,
                           .out_pitch = cols,
                           .in = accum,
                           .in_dtype = plan->accum_dtype,
                           .in_pitch = h,
                           .rows = v,
                           .cols = cols});
  return FLCE_OK;
}

static flce_status finish_bias(const execution* e, const final_parts* parts) {
  const flce_plan* plan = e->plan;
  int64_t n = e->problem->shape.tokens, v = e->problem->shape.vocab;
  void* accum = buffer_ptr(e, FLCE_BUF_DB_ACCUM);
  if (plan->bias_parts > 0 && e->problem->shape.rows > 0)
    CALL(e, column_sum,
         &(flce_column_sum_args){.out = accum,
                                 .a = buffer_ptr(e, FLCE_BUF_DB_PARTS),
                                 .a_dtype = e->stat,
                                 .pitch = v,
                                 .rows = plan->bias_parts,
                                 .cols = v,
                                 .scratch = buffer_ptr(e, FLCE_BUF_COLUMN_SUM)});
  CALL(e, finish_grad_bias,
       &(flce_grad_bias_args){.db = e->tensors->grad_bias,
                              .db_dtype = plan->grad_bias_dtype,
                              .accum = accum,
                              .stat = e->stat,
                              .coef_target = parts->coef_target,
                              .order = parts->order,
                              .tokens = n,
                              .smooth_total = parts->smooth_total,
                              .class_weight = e->tensors->class_weight,
                              .vocab = v});
  return FLCE_OK;
}

flce_status flce_finish_dw_db(const execution* e) {
  const flce_problem* problem = e->problem;
  if (problem->shape.vocab == 0 || (!problem->wants.grad_weight && !problem->wants.grad_bias))
    return FLCE_OK;
  const void* coef = buffer_ptr(e, FLCE_BUF_COEF);
  bool exp_form = e->plan->form == FLCE_FORM_EXP;
  final_parts parts = {.order = buffer_ptr(e, FLCE_BUF_ORDER)};
  if (exp_form)
    parts.coef_target = element_ptr(coef, FLCE_COEF_TARGET * problem->shape.tokens, e->stat);
  FLCE_TRY(flce_sum_smooth(e, &parts.xsum, &parts.smooth_total));
  if (problem->wants.grad_weight) FLCE_TRY(finish_weight(e, &parts));
  if (problem->wants.grad_bias) FLCE_TRY(finish_bias(e, &parts));
  return FLCE_OK;
}
