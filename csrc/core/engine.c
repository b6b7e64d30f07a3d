/* The forward and the backward of linear cross entropy: one loop over chunks of rows each, which
 * all strategies (flce_save) share. It executes the plan by calling a backend's functions. Sizes,
 * dtypes and buffers are decided in plan.c, the arithmetic is the backend's. */
#include "core/engine.h"

#include <stdatomic.h>

/* The factor of exp(z - c) where it is stored in float16. c is the row's largest logit, so the
 * largest entry is 2^15, and entries down to 2^-29 of it keep their full precision. */
static const double kF16ExpScale = 32768.0;

static _Atomic int64_t gemm_count;
int64_t flce_gemm_count(void) {
  return atomic_load(&gemm_count);
}

static void* buffer(const engine* e, flce_buffer_id id) {
  const flce_buffer* b = &e->plan->buffers[id];
  return b->bytes > 0 && b->offset >= 0 ? (char*)e->tensors->workspace + b->offset : NULL;
}

static bool wants_gradients(const engine* e) {
  return e->problem->want_grad_input || e->problem->want_grad_weight || e->problem->want_grad_bias;
}

static flce_status run_gemm(const engine* e, flce_gemm gemm) {
  gemm.dtype = e->plan->dtype;
  atomic_fetch_add(&gemm_count, 1);
  CALL(e, gemm, &gemm, buffer(e, FLCE_BUF_GEMM), e->plan->buffers[FLCE_BUF_GEMM].bytes);
  return FLCE_OK;
}

/* ---- operands ---- */

/* *out = `given` [rows][cols] as [rows][pitch] of `dtype`, zero-padded: `given` itself if it is
 * that, else a copy in buffer `id`. */
static flce_status convert(const engine* e, flce_buffer_id id, const void* given,
                           flce_dtype given_dtype, flce_dtype dtype, int64_t rows, int64_t cols,
                           int64_t pitch, const void** out) {
  *out = given;
  if (given == NULL || (given_dtype == dtype && pitch == cols)) return FLCE_OK;
  *out = buffer(e, id);
  CALL(e, cast, buffer(e, id), dtype, pitch, given, given_dtype, cols, rows, cols);
  return FLCE_OK;
}

static flce_status open_engine(engine* e, const flce_backend* backend, const flce_problem* problem,
                               const flce_plan* plan, const flce_tensors* tensors,
                               bool needs_bias) {
  *e = (engine){.backend = backend, .problem = problem, .plan = plan, .tensors = tensors};
  e->stat = flce_stat_dtype(plan->dtype);
  int64_t h = problem->hidden, v = problem->vocab;
  FLCE_TRY(convert(e, FLCE_BUF_INPUT_CAST, tensors->input, problem->input_dtype, plan->dtype,
                   problem->tokens, h, plan->hidden, &e->input));
  FLCE_TRY(convert(e, FLCE_BUF_WEIGHT_CAST, tensors->linear_weight, problem->weight_dtype,
                   plan->dtype, v, h, plan->hidden, &e->linear_weight));
  if (!needs_bias) return FLCE_OK;
  return convert(e, FLCE_BUF_BIAS_CAST, tensors->linear_bias, problem->bias_dtype, e->stat, 1, v, v,
                 &e->bias);
}

/* ---- one chunk ---- */

typedef struct chunk {
  int64_t first, rows;       /* computed rows [first, first + rows) */
  flce_buffer_id gathered_x; /* the buffer for a copy of the chunk's rows of x */
  flce_rows view;            /* z: the result of the logits GEMM; out: E or dz */
  const void* coef;          /* [FLCE_COEF_ROWS][N] stat dtype, indexed like the view's vectors */
} chunk;

static chunk open_chunk(const engine* e, int64_t first, int64_t chunk_rows, flce_buffer_id x) {
  int64_t left = e->problem->rows - first;
  chunk c = {.first = first, .rows = left < chunk_rows ? left : chunk_rows, .gathered_x = x};
  int64_t vectors = e->plan->gathers ? 0 : first; /* an index counts from token 0 */
  c.view = open_rows(e, vectors, c.rows);
  if (e->plan->holds_weight) c.view.input_unit = scalar(e, FLCE_SCALAR_INPUT_UNIT);
  if (e->plan->gathers) c.view.index = (const int64_t*)buffer(e, FLCE_BUF_INDEX) + first;
  c.coef = from(buffer(e, FLCE_BUF_COEF), vectors, e->stat);
  return c;
}

/* E or dz overwrites the logits; each row starts at the address of its row of logits. */
static void set_out_in_place(const engine* e, flce_rows* view) {
  int64_t ratio = flce_size_of(view->z_dtype) / flce_size_of(e->plan->dtype);
  set_out(view, (void*)view->z, e->plan->dtype, view->z_pitch * ratio, e->plan->out_pitch);
}

static void* saved_rows(const engine* e, int64_t first) {
  return at(e->tensors->saved, first * e->plan->saved_pitch, e->plan->saved_dtype);
}

/* x at token 0 if the chunk's rows are given by an index, else at the chunk's first row. */
static const void* rows_of_input(const engine* e, const chunk* c) {
  return at(e->input, e->plan->gathers ? 0 : c->first * e->plan->hidden, e->plan->dtype);
}

/* The A operand of the logits GEMM: the chunk's rows of x, or a copy if they are gathered or need
 * another pitch. */
static flce_status chunk_input(const engine* e, const chunk* c, const void** x) {
  const flce_plan* plan = e->plan;
  *x = rows_of_input(e, c);
  if (!plan->gathers && plan->input_pitch == plan->hidden) return FLCE_OK;
  void* copy = buffer(e, c->gathered_x);
  CALL(e, scale_rows, copy, plan->input_pitch, *x, plan->dtype, NULL, c->view.index, c->rows,
       plan->hidden);
  *x = copy;
  return FLCE_OK;
}

/* Fills `gemm` for the logits GEMM of a chunk, z = x W^T, without its C. */
static flce_status logits_product(const engine* e, const chunk* c, flce_gemm* gemm) {
  int64_t h = e->plan->hidden;
  *gemm = (flce_gemm){.m = c->rows,
                      .n = e->problem->vocab,
                      .k = h,
                      .transpose_b = true,
                      .b = e->linear_weight,
                      .pitch_a = e->plan->input_pitch,
                      .pitch_b = h,
                      .dtype = e->plan->dtype};
  return chunk_input(e, c, &gemm->a);
}

/* Sets C of the logits GEMM: the saved buffer if the plan writes z there, else the chunk's logits
 * buffer. */
static void set_z_destination(const engine* e, chunk* c, flce_gemm* gemm) {
  const flce_plan* plan = e->plan;
  gemm->c = plan->z_in_saved ? saved_rows(e, c->first) : buffer(e, FLCE_BUF_LOGITS);
  gemm->c_dtype = plan->z_dtype;
  gemm->pitch_c = plan->z_pitch;
  set_z(&c->view, gemm->c, plan->z_dtype, plan->z_pitch);
}

static flce_status logits_gemm(const engine* e, chunk* c) {
  flce_gemm gemm;
  FLCE_TRY(logits_product(e, c, &gemm));
  set_z_destination(e, c, &gemm);
  gemm.bias = e->plan->gemm_adds_bias ? e->bias : NULL;
  return run_gemm(e, gemm);
}

/* The first call of the fused logits GEMM. It writes E (form exp) or z (form dz) for the strategies
 * that read them, save=logits and save=grads. */
static flce_status fused_logits(const engine* e, chunk* c, flce_gemm* gemm, flce_rows* rows) {
  const flce_plan* plan = e->plan;
  bool saves = plan->save == FLCE_SAVE_LOGITS, gradients = plan->save == FLCE_SAVE_GRADS;
  bool keeps = saves || gradients, exp_form = plan->form == FLCE_FORM_EXP;
  FLCE_TRY(logits_product(e, c, gemm));
  if (keeps && exp_form)
    set_out(&c->view, saves ? saved_rows(e, c->first) : buffer(e, FLCE_BUF_LOGITS), plan->dtype,
            plan->out_pitch, plan->out_pitch);
  if (keeps && !exp_form) set_z_destination(e, c, gemm);
  *rows = c->view;
  rows->bias = e->bias;
  /* sum_weight has computed this sum for dX. The label-smoothing sums that follow from it are
   * cheaper than those that the GEMM's epilogue would compute. */
  if (gradients && e->problem->want_grad_input && !e->bias) rows->wsum = buffer(e, FLCE_BUF_SMOOTH);
  atomic_fetch_add(&gemm_count, 1);
  CALL(e, fused_logits, gemm, rows, buffer(e, FLCE_BUF_FUSED));
  return FLCE_OK;
}

/* The factor of the loss's gradient for grad_output = 1. In float16 it includes a power of two (see
 * FLCE_SCALAR_UNIT), which scale_grads divides out. */
static const void* unit_factor(const engine* e) {
  bool in_units = e->plan->dtype == FLCE_F16;
  return scalar(e, in_units ? FLCE_SCALAR_UNIT : FLCE_SCALAR_INV_DENOM);
}

/* The second call of the fused logits GEMM: statistics, and with save=grads also coef. */
static flce_status fused_statistics(const engine* e, chunk* c, const flce_gemm* gemm,
                                    const flce_rows* rows) {
  bool gradients = e->plan->save == FLCE_SAVE_GRADS;
  CALL(e, fused_statistics, gemm, rows, unit_factor(e), gradients ? (void*)c->coef : NULL,
       buffer(e, FLCE_BUF_FUSED));
  if (gradients && e->plan->form == FLCE_FORM_DZ) set_out_in_place(e, &c->view);
  return FLCE_OK;
}

/* Computes the chunk's coef. The vectors of `upstream` start at token 0. */
static flce_status coefficients(const engine* e, const chunk* c, flce_upstream upstream,
                                const void* factor) {
  if (!e->plan->gathers) {
    upstream.loss = from(upstream.loss, upstream.loss_stride * c->first, e->stat);
    upstream.lse = from(upstream.lse, c->first, e->stat);
    upstream.entropy = from(upstream.entropy, c->first, e->stat);
  }
  CALL(e, row_coefficients, &c->view, &upstream, factor, (void*)c->coef);
  return FLCE_OK;
}

static const void* coef_row(const engine* e, const chunk* c, enum flce_coef_row row) {
  return at(c->coef, row * e->problem->tokens, e->stat);
}

/* The buffer for the B operand of dW's GEMM, or NULL if that is x itself. Form exp: coef * x. Form
 * dz: x * FLCE_SCALAR_INPUT_UNIT with zeros in ignored rows, because a NaN in x times a dz of 0
 * would be NaN. */
static void* scaled_input(const engine* e) {
  return e->problem->want_grad_weight ? buffer(e, FLCE_BUF_SCALED_X) : NULL;
}

/* dX of the chunk from c->view.out, which holds E or dz. In form exp the pass after the GEMM also
 * writes scaled_input, since it reads the rows' factors anyway. */
static flce_status input_gradient(const engine* e, const chunk* c) {
  const flce_plan* plan = e->plan;
  const flce_rows* view = &c->view;
  int64_t h = plan->hidden, cols = e->problem->hidden;
  void* dx =
      at(e->tensors->grad_input, plan->gathers ? 0 : c->first * cols, plan->grad_input_dtype);
  void* own = buffer(e, FLCE_BUF_DX_ROWS);
  void* product = own ? own : dx;
  FLCE_TRY(run_gemm(e, (flce_gemm){.m = c->rows,
                                   .n = h,
                                   .k = e->problem->vocab,
                                   .a = view->out,
                                   .b = e->linear_weight,
                                   .c = product,
                                   .pitch_a = view->out_pitch,
                                   .pitch_b = h,
                                   .pitch_c = h,
                                   .c_dtype = plan->dx_gemm_dtype}));
  bool exp_form = plan->form == FLCE_FORM_EXP;
  if (!exp_form && !own) return FLCE_OK;
  flce_rows finished = *view;
  finished.coef = exp_form ? c->coef : NULL;
  CALL(e, finish_grad_input, dx, plan->grad_input_dtype, product, plan->dx_gemm_dtype,
       e->linear_weight, plan->dtype, &finished, buffer(e, FLCE_BUF_SMOOTH), rows_of_input(e, c),
       exp_form ? scaled_input(e) : NULL, h, cols);
  return FLCE_OK;
}

/* The accumulator of dW over chunks: a buffer of its own, or the output itself. */
static void* dw_accum(const engine* e) {
  void* own = buffer(e, FLCE_BUF_DW_ACCUM);
  return own ? own : e->tensors->grad_weight;
}

/* True if dW is accumulated in the caller's grad_weight, on top of its contents. */
static bool sums_in_callers(const engine* e) {
  return e->problem->adds_grad_weight && !buffer(e, FLCE_BUF_DW_ACCUM);
}

/* The weights of the chunk's rows of E in db, [rows] stat dtype. NULL, for ones, in form dz. */
static flce_status row_weights(const engine* e, const chunk* c, const void** weights) {
  *weights = NULL;
  if (e->plan->form != FLCE_FORM_EXP) return FLCE_OK;
  *weights = coef_row(e, c, FLCE_COEF_ROW);
  if (!e->plan->gathers) return FLCE_OK;
  void* gathered = buffer(e, FLCE_BUF_GATHERED_COEF);
  CALL(e, scale_rows, gathered, 1, *weights, e->stat, NULL, c->view.index, c->rows, 1);
  *weights = gathered;
  return FLCE_OK;
}

/* dW's GEMM and the sums of db in one kernel. */
static flce_status weight_and_bias(const engine* e, const chunk* c, const flce_gemm* gemm) {
  const void* weights;
  FLCE_TRY(row_weights(e, c, &weights));
  atomic_fetch_add(&gemm_count, 1);
  CALL(e, grad_weight_gemm, gemm, c->view.index, weights, buffer(e, FLCE_BUF_DB_PARTS),
       c->first > 0);
  return FLCE_OK;
}

/* dW of the chunk, added to its accumulator: E^T (coef x), or dz^T x. */
static flce_status weight_gradient(const engine* e, const chunk* c) {
  const flce_plan* plan = e->plan;
  int64_t h = plan->hidden, v = e->problem->vocab;
  bool exp_form = plan->form == FLCE_FORM_EXP;
  const void* x = rows_of_input(e, c);
  void* scaled = scaled_input(e);
  if (scaled && !(exp_form && e->problem->want_grad_input))
    CALL(e, scale_rows, scaled, h, x, plan->dtype,
         coef_row(e, c, exp_form ? FLCE_COEF_ROW : FLCE_COEF_VALID), c->view.index, c->rows, h);
  if (scaled) x = scaled;
  flce_gemm gemm = {.m = v,
                    .n = h,
                    .k = c->rows,
                    .transpose_a = true,
                    .a = c->view.out,
                    .b = x,
                    .c = dw_accum(e),
                    .pitch_a = c->view.out_pitch,
                    .pitch_b = h,
                    .pitch_c = h,
                    .dtype = plan->dtype,
                    .c_dtype = plan->accum_dtype,
                    .beta = c->first > 0 || sums_in_callers(e) ? 1.0 : 0.0,
                    .shift = plan->holds_weight ? flce_held_shift(plan->rows) : 0};
  if (plan->bias_parts > 0) return weight_and_bias(e, c, &gemm);
  if (plan->dw_block_rows == 0) return run_gemm(e, gemm);
  void* block = buffer(e, FLCE_BUF_DW_BLOCK);
  for (int64_t j = 0; j < v; j += plan->dw_block_rows) {
    gemm.m = v - j < plan->dw_block_rows ? v - j : plan->dw_block_rows;
    gemm.a = at(c->view.out, j, plan->dtype);
    gemm.c = block;
    gemm.c_dtype = plan->dtype;
    gemm.beta = 0.0;
    FLCE_TRY(run_gemm(e, gemm));
    CALL(e, add_block, at(dw_accum(e), j * h, plan->accum_dtype), plan->accum_dtype, block,
         plan->dtype, h, gemm.m, h);
  }
  return FLCE_OK;
}

static flce_status bias_gradient(const engine* e, const chunk* c) {
  const void* weights;
  FLCE_TRY(row_weights(e, c, &weights));
  CALL(e, column_sum, buffer(e, FLCE_BUF_DB_ACCUM), c->view.out, e->plan->dtype, c->view.out_pitch,
       c->rows, e->problem->vocab, weights, c->first > 0, buffer(e, FLCE_BUF_COLUMN_SUM));
  return FLCE_OK;
}

static flce_status chunk_gradients(const engine* e, const chunk* c) {
  if (e->problem->want_grad_input) FLCE_TRY(input_gradient(e, c));
  if (e->problem->want_grad_weight) FLCE_TRY(weight_gradient(e, c));
  if (e->problem->want_grad_bias && !e->plan->bias_parts) FLCE_TRY(bias_gradient(e, c));
  return FLCE_OK;
}

/* ---- around the chunk loop of the gradients ---- */

/* Zeros the gradients of the padding rows of W and b. If dW is added to the caller's gradient, its
 * padding rows are left unchanged. */
static flce_status zero_padding(const engine* e) {
  const flce_problem* problem = e->problem;
  const flce_plan* plan = e->plan;
  int64_t v = problem->vocab, h = problem->hidden, padding = problem->weight_rows - v;
  if (padding > 0 && problem->want_grad_weight && !problem->adds_grad_weight)
    CALL(e, fill, at(e->tensors->grad_weight, v * h, plan->grad_weight_dtype), 0,
         padding * h * flce_size_of(plan->grad_weight_dtype));
  if (padding > 0 && problem->want_grad_bias)
    CALL(e, fill, at(e->tensors->grad_bias, v, plan->grad_bias_dtype), 0,
         padding * flce_size_of(plan->grad_bias_dtype));
  return FLCE_OK;
}

/* sum_j w_j W_j, for label smoothing's term of dX. */
static flce_status sum_weight(const engine* e) {
  const flce_problem* problem = e->problem;
  void* smooth = buffer(e, FLCE_BUF_SMOOTH);
  if (!smooth || !problem->want_grad_input) return FLCE_OK;
  int64_t h = e->plan->hidden;
  CALL(e, column_sum, smooth, e->linear_weight, e->plan->dtype, h, problem->vocab, h,
       e->tensors->class_weight, false, buffer(e, FLCE_BUF_COLUMN_SUM));
  return FLCE_OK;
}

static flce_status begin_gradients(const engine* e) {
  const flce_problem* problem = e->problem;
  FLCE_TRY(zero_padding(e));
  if (e->plan->gathers) {
    flce_rows all = open_rows(e, 0, problem->tokens);
    /* finish_gradients sums coef over all tokens, also over those that are in no chunk. */
    CALL(e, fill, buffer(e, FLCE_BUF_COEF), 0, e->plan->buffers[FLCE_BUF_COEF].bytes);
    if (problem->want_grad_input)
      CALL(e, blank_rows, &all, problem->rows, e->tensors->grad_input, e->plan->grad_input_dtype,
           problem->hidden);
  }
  /* The first chunk's GEMM overwrites the accumulator. It has to be zeroed only if there is no
   * chunk, or if add_block adds to it. */
  bool no_chunks = problem->rows == 0;
  if (problem->want_grad_weight && !sums_in_callers(e) && (no_chunks || e->plan->dw_block_rows > 0))
    CALL(e, fill, dw_accum(e), 0,
         problem->vocab * e->plan->hidden * flce_size_of(e->plan->accum_dtype));
  if (problem->want_grad_bias && no_chunks)
    CALL(e, fill, buffer(e, FLCE_BUF_DB_ACCUM), 0, problem->vocab * flce_size_of(e->stat));
  return FLCE_OK;
}

/* Adds the terms of dW that no GEMM computes (target, label smoothing), and writes or adds the
 * result to the output, rounded once. */
static flce_status finish_weight(const engine* e, const void* coef_target, const void* order,
                                 const void* xsum) {
  const flce_plan* plan = e->plan;
  int64_t h = plan->hidden, cols = e->problem->hidden, v = e->problem->vocab;
  void *out = e->tensors->grad_weight, *accum = dw_accum(e);
  bool added = e->problem->adds_grad_weight && accum != out, padded = h != cols;
  bool in_accum = added || padded;
  CALL(e, finish_grad_weight, in_accum ? accum : out,
       in_accum ? plan->accum_dtype : plan->grad_weight_dtype, accum, plan->accum_dtype, e->input,
       plan->dtype, coef_target, order, e->problem->tokens, xsum, e->tensors->class_weight, v, h);
  if (added)
    CALL(e, add_block, out, plan->grad_weight_dtype, accum, plan->accum_dtype, h, v, cols);
  else if (padded)
    CALL(e, cast, out, plan->grad_weight_dtype, cols, accum, plan->accum_dtype, h, v, cols);
  return FLCE_OK;
}

static flce_status finish_gradients(const engine* e) {
  const flce_problem* problem = e->problem;
  const flce_plan* plan = e->plan;
  int64_t n = problem->tokens, h = plan->hidden, v = problem->vocab;
  if (!problem->want_grad_weight && !problem->want_grad_bias) return FLCE_OK;
  bool exp_form = plan->form == FLCE_FORM_EXP;
  const void* coef = buffer(e, FLCE_BUF_COEF);
  const void* coef_target = exp_form ? at(coef, FLCE_COEF_TARGET * n, e->stat) : NULL;
  const void* coef_smooth = at(coef, FLCE_COEF_SMOOTH * n, e->stat);
  void* order = buffer(e, FLCE_BUF_ORDER);
  void* smooth = buffer(e, FLCE_BUF_SMOOTH);
  void* xsum = smooth ? at(smooth, h, e->stat) : NULL;
  void* smooth_total = smooth ? at(smooth, 2 * h, e->stat) : NULL;
  if (problem->want_grad_weight) {
    if (smooth)
      CALL(e, column_sum, xsum, e->input, plan->dtype, h, n, h, coef_smooth, false,
           buffer(e, FLCE_BUF_COLUMN_SUM));
    FLCE_TRY(finish_weight(e, coef_target, order, xsum));
  }
  if (problem->want_grad_bias) {
    if (plan->bias_parts > 0 && problem->rows > 0)
      CALL(e, column_sum, buffer(e, FLCE_BUF_DB_ACCUM), buffer(e, FLCE_BUF_DB_PARTS), e->stat, v,
           plan->bias_parts, v, NULL, false, buffer(e, FLCE_BUF_COLUMN_SUM));
    if (smooth) CALL(e, reduce, smooth_total, coef_smooth, n, NULL, e->stat, false);
    CALL(e, finish_grad_bias, e->tensors->grad_bias, plan->grad_bias_dtype,
         buffer(e, FLCE_BUF_DB_ACCUM), e->stat, coef_target, order, n, smooth_total,
         e->tensors->class_weight, v);
  }
  return FLCE_OK;
}

/* ---- forward ---- */

/* Without fused_logits: statistics and loss of a chunk by row passes over its logits, and E if the
 * strategy needs it. */
static flce_status pass_rows(const engine* e, chunk* c) {
  const flce_plan* plan = e->plan;
  bool keeps = plan->save == FLCE_SAVE_LOGITS;
  if (plan->save == FLCE_SAVE_NOTHING || plan->save == FLCE_SAVE_STATS) {
    CALL(e, stat_rows, &c->view);
    return FLCE_OK;
  }
  if (keeps)
    set_out(&c->view, saved_rows(e, c->first), plan->saved_dtype, plan->saved_pitch,
            plan->saved_pitch);
  else
    set_out_in_place(e, &c->view);
  if (plan->form == FLCE_FORM_EXP) {
    CALL(e, exp_rows, &c->view);
    return FLCE_OK;
  }
  CALL(e, stat_rows, &c->view);
  if (keeps && plan->saves_exp) CALL(e, grad_rows, &c->view, kF16ExpScale, false, false);
  return FLCE_OK;
}

/* save=grads: the gradients of a chunk for grad_output = 1. */
static flce_status forward_gradients(const engine* e, chunk* c) {
  if (!e->plan->fuses_rows) FLCE_TRY(coefficients(e, c, (flce_upstream){0}, unit_factor(e)));
  if (e->plan->form == FLCE_FORM_DZ) {
    flce_rows with_coef = c->view;
    with_coef.coef = c->coef;
    CALL(e, grad_rows, &with_coef, 1.0, false, false);
  }
  return chunk_gradients(e, c);
}

/* Computes FLCE_BUF_INDEX, if the plan gathers rows. */
static flce_status gather_rows(const engine* e) {
  if (!e->plan->gathers) return FLCE_OK;
  void* index = buffer(e, FLCE_BUF_INDEX);
  /* The float poison of the workspace would read as -1, which means an empty row. */
  if (flce_poisons()) CALL(e, fill, index, FLCE_POISON_INT, e->plan->buffers[FLCE_BUF_INDEX].bytes);
  CALL(e, compact_rows, e->problem, e->tensors->target, index);
  return FLCE_OK;
}

/* Scalars, the order of the targets, and the results of rows that are not computed. `overlaps`: the
 * first chunk's logits GEMM was queued before and reads none of these, so prepare may run
 * concurrently with it (PDL). */
static flce_status begin_rows(const engine* e, bool gradients, bool overlaps) {
  CALL(e, prepare, e->problem, e->tensors, gradients ? buffer(e, FLCE_BUF_ORDER) : NULL,
       e->plan->holds_weight, overlaps);
  if (e->plan->gathers) {
    flce_rows all = open_rows(e, 0, e->problem->tokens);
    CALL(e, blank_rows, &all, e->problem->rows, NULL, e->plan->dtype, 0);
  }
  return gradients ? begin_gradients(e) : FLCE_OK;
}

/* The forward of a chunk: logits, statistics, loss, and what the strategy computes from them. */
static flce_status forward_rows(const engine* e, chunk* c, bool gradients) {
  const flce_plan* plan = e->plan;
  bool begins = c->first == 0;
  flce_gemm gemm;
  flce_rows rows;
  if (begins && !plan->fuses_rows) FLCE_TRY(begin_rows(e, gradients, false));
  if (plan->fuses_rows) {
    FLCE_TRY(fused_logits(e, c, &gemm, &rows));
    if (begins) FLCE_TRY(begin_rows(e, gradients, true));
    FLCE_TRY(fused_statistics(e, c, &gemm, &rows));
  } else {
    FLCE_TRY(logits_gemm(e, c));
    FLCE_TRY(pass_rows(e, c));
  }
  return gradients ? forward_gradients(e, c) : FLCE_OK;
}

flce_status flce_forward(const flce_backend* backend, const flce_problem* problem,
                         const flce_plan* plan, const flce_tensors* given) {
  engine e;
  flce_tensors tensors = *given;
  FLCE_TRY(open_engine(&e, backend, problem, plan, &tensors, true));
  if (!plan->keeps_statistics) {
    tensors.stats = buffer(&e, FLCE_BUF_STATS);
    tensors.scalars = buffer(&e, FLCE_BUF_SCALARS);
  }
  e.losses = problem->reduction == FLCE_NONE ? tensors.loss : buffer(&e, FLCE_BUF_ROW_LOSS);
  bool gradients = plan->save == FLCE_SAVE_GRADS && wants_gradients(&e);
  FLCE_TRY(gather_rows(&e));
  if (gradients) FLCE_TRY(sum_weight(&e));
  if (problem->rows == 0) FLCE_TRY(begin_rows(&e, gradients, false));
  for (int64_t first = 0; first < problem->rows; first += plan->chunk_rows) {
    chunk c = open_chunk(&e, first, plan->chunk_rows, plan->gathered_x);
    FLCE_TRY(forward_rows(&e, &c, gradients));
  }
  if (gradients) FLCE_TRY(finish_gradients(&e));
  /* The last kernel before reduce must be one of the backend's own, which waits for all kernels
   * before it: in form exp that is a pass that finishes the gradients. In form dz it may be a
   * library's GEMM. */
  bool overlaps = gradients && problem->rows > 0 && plan->form == FLCE_FORM_EXP;
  if (problem->reduction != FLCE_NONE)
    CALL(&e, reduce, tensors.loss, buffer(&e, FLCE_BUF_ROW_LOSS), problem->tokens,
         scalar(&e, FLCE_SCALAR_INV_DENOM), e.stat, overlaps);
  return FLCE_OK;
}

/* ---- backward ---- */

/* Makes c->view.out the chunk's E or dz: from FLCE_BUF_SAVED, or from recomputed logits. */
static flce_status backward_rows(const engine* e, chunk* c) {
  const flce_plan* plan = e->plan;
  bool exp_form = plan->form == FLCE_FORM_EXP, stored = plan->save == FLCE_SAVE_LOGITS;
  if (stored && exp_form) {
    set_out(&c->view, saved_rows(e, c->first), plan->dtype, plan->saved_pitch, plan->saved_pitch);
    return FLCE_OK;
  }
  if (stored) {
    set_z(&c->view, saved_rows(e, c->first), plan->saved_dtype, plan->saved_pitch);
    set_out(&c->view, buffer(e, FLCE_BUF_LOGITS), plan->dtype, plan->out_pitch, plan->out_pitch);
  } else {
    FLCE_TRY(logits_gemm(e, c));
    set_out_in_place(e, &c->view);
  }
  flce_rows view = c->view;
  view.coef = exp_form ? NULL : c->coef;
  view.wants_entropy = e->tensors->grad_entropy != NULL;
  bool from_exp = stored && plan->saves_exp;
  CALL(e, grad_rows, &view, from_exp ? kF16ExpScale : 1.0, true, from_exp);
  return FLCE_OK;
}

flce_status flce_check_backward(const flce_plan* plan) {
  if (plan->save == FLCE_SAVE_LOGITS || plan->save == FLCE_SAVE_STATS) return FLCE_OK;
  return flce_fail(FLCE_INVALID_ARGUMENT,
                   "save: expected \"logits\" or \"stats\" in a backward, got \"%s\"",
                   flce_save_name(plan->save));
}

flce_status flce_backward(const flce_backend* backend, const flce_problem* problem,
                          const flce_plan* plan, const flce_tensors* tensors) {
  FLCE_TRY(flce_check_backward(plan));
  engine e;
  bool needs_bias = plan->save == FLCE_SAVE_STATS || (!plan->saves_exp && !plan->gemm_adds_bias);
  FLCE_TRY(open_engine(&e, backend, problem, plan, tensors, needs_bias));
  if (!wants_gradients(&e)) return FLCE_OK;
  FLCE_TRY(gather_rows(&e));
  FLCE_TRY(sum_weight(&e));
  FLCE_TRY(begin_gradients(&e));
  flce_upstream upstream = upstream_of(&e);
  for (int64_t first = 0; first < problem->rows; first += plan->backward_chunk_rows) {
    chunk c = open_chunk(&e, first, plan->backward_chunk_rows, plan->backward_gathered_x);
    FLCE_TRY(coefficients(&e, &c, upstream, scalar(&e, FLCE_SCALAR_INV_DENOM)));
    FLCE_TRY(backward_rows(&e, &c));
    FLCE_TRY(chunk_gradients(&e, &c));
  }
  void* order = buffer(&e, FLCE_BUF_ORDER);
  if (order) CALL(&e, order_targets, problem, tensors->target, order);
  return finish_gradients(&e);
}
