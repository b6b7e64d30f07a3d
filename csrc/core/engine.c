/* The forward and the backward of linear cross entropy: one loop over chunks of rows each, which
 * all strategies (flce_save) share. It executes the plan by calling a backend's functions. Sizes,
 * dtypes and buffers are decided in plan.c, the arithmetic is the backend's. */
#include "core/gradients.h"
#include "core/plan_rules.h"
#include "core/samples.h"
#include "core/shards.h"
#include "core/plan_call.h"
#include "environment.h"

/* The factor of E where it is stored in float16. c is then the row's largest l, so the largest
 * entry is 2^15, and entries down to 2^-29 of it keep their full precision. */
static const double kF16ExpScale = 32768.0;

static double exp_scale(const flce_plan* plan) {
  return plan->saves_exp && plan->dtype == FLCE_F16 ? kF16ExpScale : 1.0;
}

/* ---- operands ---- */

/* *out = `source` [rows][cols] as [rows][pitch] of `dtype`, zero-padded: `source` itself if it is
 * that, else a copy in buffer `id`. */
static flce_status convert(const execution* e, flce_buffer_id id, const void* source,
                           flce_dtype source_dtype, flce_dtype dtype, int64_t rows, int64_t cols,
                           int64_t pitch, const void** out) {
  *out = source;
  if (source == NULL || (source_dtype == dtype && pitch == cols)) return FLCE_OK;
  *out = buffer_ptr(e, id);
  CALL(e, cast,
       &(flce_cast_args){.out = buffer_ptr(e, id),
                         .out_dtype = dtype,
                         .out_pitch = pitch,
                         .in = source,
                         .in_dtype = source_dtype,
                         .in_pitch = cols,
                         .rows = rows,
                         .cols = cols});
  return FLCE_OK;
}

/* `e` has the backend, the shard_call with its comm, and the caller's problem, plan and tensors. */
static flce_status open_operands(execution* e, bool needs_input, bool needs_bias) {
  const flce_plan* plan = e->plan;
  e->stat = flce_stat_dtype(plan->dtype);
  FLCE_TRY(flce_open_shard(e, needs_input));
  const flce_problem* problem = e->problem;
  const flce_tensors* tensors = e->tensors;
  int64_t h = problem->hidden, v = problem->vocab;
  if (needs_input)
    FLCE_TRY(convert(e, FLCE_BUF_INPUT_CAST, tensors->input, problem->input_dtype, plan->dtype,
                     problem->tokens, h, plan->hidden, &e->input));
  FLCE_TRY(convert(e, FLCE_BUF_WEIGHT_CAST, tensors->linear_weight, problem->weight_dtype,
                   plan->dtype, v, h, plan->hidden, &e->linear_weight));
  if (!needs_bias) return FLCE_OK;
  return convert(e, FLCE_BUF_BIAS_CAST, tensors->linear_bias, problem->bias_dtype, e->stat, 1, v, v,
                 &e->bias);
}

/* ---- one chunk ---- */

static chunk open_chunk(const execution* e, int64_t first, int64_t chunk_rows, flce_buffer_id x) {
  int64_t left = e->problem->rows - first;
  chunk c = {.first = first, .rows = left < chunk_rows ? left : chunk_rows, .gathered_x = x};
  int64_t vectors = e->plan->gathers ? 0 : first; /* an index counts from token 0 */
  c.view = open_rows(e, vectors, c.rows);
  if (e->plan->dw_fp16_shift != 0) c.view.input_scale = scalar(e, FLCE_SCALAR_INPUT_SCALE);
  if (e->plan->gathers) c.view.index = (const int64_t*)buffer_ptr(e, FLCE_BUF_INDEX) + first;
  c.coef = optional_ptr(buffer_ptr(e, FLCE_BUF_COEF), vectors, e->stat);
  return c;
}

/* E or dz overwrites the logits; each row starts at the address of its row of logits. */
static void set_out_in_place(const execution* e, flce_rows* view) {
  flce_dtype dtype = e->plan->exp_dtype;
  int64_t ratio = flce_size_of(view->z_dtype) / flce_size_of(dtype);
  set_out(view, (void*)view->z, dtype, view->z_pitch * ratio, e->plan->out_pitch);
}

static void* saved_rows(const execution* e, int64_t first) {
  return element_ptr(e->tensors->saved, first * e->plan->saved_pitch, e->plan->saved_dtype);
}

/* The A operand of the logits GEMM: the chunk's rows of x, or a copy if they are gathered or need
 * another pitch. */
static flce_status chunk_input(const execution* e, const chunk* c, const void** x) {
  const flce_plan* plan = e->plan;
  *x = rows_of_input(e, c);
  if (!plan->gathers && plan->input_pitch == plan->hidden) return FLCE_OK;
  void* copy = buffer_ptr(e, c->gathered_x);
  CALL(e, scale_rows,
       &(flce_scale_rows_args){.out = copy,
                               .out_pitch = plan->input_pitch,
                               .x = *x,
                               .dtype = plan->dtype,
                               .index = c->view.index,
                               .rows = c->rows,
                               .hidden = plan->hidden});
  *x = copy;
  return FLCE_OK;
}

/* Fills `gemm` for the logits GEMM of a chunk, z = x W^T, without its C. */
static flce_status fill_logits_gemm(const execution* e, const chunk* c, flce_gemm* gemm) {
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

/* Sets C of the logits GEMM: the saved buffer if the plan writes z there, the teacher's logits if
 * the student's GEMM packs both there, else the chunk's logits buffer. */
static void set_z_destination(const execution* e, chunk* c, flce_gemm* gemm) {
  const flce_plan* plan = e->plan;
  gemm->c = plan->z_in_saved ? saved_rows(e, c->first)
            : plan->packs    ? (void*)c->teacher.z
                             : buffer_ptr(e, FLCE_BUF_LOGITS);
  gemm->c_dtype = plan->z_dtype;
  gemm->pitch_c = plan->z_pitch;
  set_z(&c->view, gemm->c, plan->z_dtype, plan->z_pitch);
}

static flce_status logits_gemm(const execution* e, chunk* c) {
  flce_gemm gemm;
  FLCE_TRY(fill_logits_gemm(e, c, &gemm));
  set_z_destination(e, c, &gemm);
  gemm.bias = e->plan->gemm_adds_bias ? e->bias : NULL;
  return flce_run_gemm(e, gemm);
}

/* The first call of the fused logits GEMM. It writes E (form exp) or z (form dz) where they are
 * read: for save=logits, save=grads and save=samples, and to find the largest logits. */
static flce_status fused_logits(const execution* e, chunk* c, flce_gemm* gemm, flce_rows* rows) {
  const flce_plan* plan = e->plan;
  bool saves = plan->save == FLCE_SAVE_LOGITS, gradients = plan->save == FLCE_SAVE_GRADS;
  bool keeps = saves || gradients || plan->save == FLCE_SAVE_SAMPLES || plan->finds_classes ||
               plan->compares || e->problem->wants_tail;
  bool exp_form = plan->form == FLCE_FORM_EXP;
  FLCE_TRY(fill_logits_gemm(e, c, gemm));
  if (keeps && exp_form)
    set_out(&c->view, saves ? saved_rows(e, c->first) : buffer_ptr(e, FLCE_BUF_LOGITS),
            plan->exp_dtype, plan->out_pitch, plan->out_pitch);
  if (keeps && !exp_form) set_z_destination(e, c, gemm);
  *rows = c->view;
  rows->bias = e->bias;
  if (plan->packs) rows->teacher = &c->fused_teacher;
  /* flce_sum_weight has computed this sum for dX. The label-smoothing sums that follow from it are
   * cheaper than those that the GEMM's epilogue would compute. */
  if (gradients && e->problem->want_grad_input && !e->bias)
    rows->wsum = buffer_ptr(e, FLCE_BUF_SMOOTH);
  flce_count_gemm();
  CALL(e, fused_logits, gemm, rows, buffer_ptr(e, FLCE_BUF_FUSED));
  return FLCE_OK;
}

/* The factor of the loss's gradient for grad_output = 1. In float16 it includes a power of two (see
 * FLCE_SCALAR_LOSS_SCALE), which scale_grads divides out. */
static const void* loss_factor(const execution* e) {
  bool scales = e->plan->dtype == FLCE_F16;
  return scalar(e, scales ? FLCE_SCALAR_LOSS_SCALE : FLCE_SCALAR_INV_DENOM);
}

/* The second call of the fused logits GEMM: statistics, and with save=grads also coef. */
static flce_status fused_statistics(const execution* e, chunk* c, const flce_gemm* gemm,
                                    const flce_rows* rows) {
  bool gradients = e->plan->save == FLCE_SAVE_GRADS;
  bool makes_coef = gradients && e->plan->ranks == 1; /* else they follow from all statistics */
  CALL(e, fused_statistics, gemm, rows, loss_factor(e), makes_coef ? (void*)c->coef : NULL,
       buffer_ptr(e, FLCE_BUF_FUSED));
  if (gradients && e->plan->form == FLCE_FORM_DZ) set_out_in_place(e, &c->view);
  return FLCE_OK;
}

/* Computes the chunk's coef. The vectors of `upstream` start at token 0. */
static flce_status coefficients(const execution* e, const chunk* c, flce_upstream upstream,
                                const void* factor) {
  if (!e->plan->gathers) {
    upstream.loss = optional_ptr(upstream.loss, upstream.loss_stride * c->first, e->stat);
    upstream.lse = optional_ptr(upstream.lse, c->first, e->stat);
    upstream.entropy = optional_ptr(upstream.entropy, c->first, e->stat);
    upstream.tail = optional_ptr(upstream.tail, c->first, e->stat);
  }
  FLCE_TRY(flce_row_coefficients(e, c, &upstream, factor));
  float* scale = buffer_ptr(e, FLCE_BUF_DZ_SCALE);
  if (scale)
    CALL(e, scale_coefficients, &c->view, (void*)c->coef, scale,
         e->problem->want_grad_bias ? c->rows : 0);
  return FLCE_OK;
}

/* ---- forward ---- */

/* Without fused_logits: statistics and loss of a chunk by row passes over its logits, and E if the
 * strategy needs it. */
static flce_status pass_rows(const execution* e, chunk* c) {
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
  if (keeps && plan->saves_exp) CALL(e, grad_rows, &c->view, exp_scale(plan), false, false);
  return FLCE_OK;
}

/* The chunk's dX from the result of its GEMM, then dW and db. The exchange of dX begins as soon as
 * its last chunk is complete. */
static flce_status chunk_gradients(const execution* e, const chunk* c) {
  FLCE_TRY(flce_finish_dx(e, c));
  if (c->first + c->rows == e->problem->rows) FLCE_TRY(flce_begin_all_to_all_dx(e));
  return flce_add_class_gradients(e, c);
}

static flce_status finish_gradients(const execution* e) {
  if (e->problem->rows == 0) FLCE_TRY(flce_begin_all_to_all_dx(e));
  FLCE_TRY(flce_begin_all_gather_dx(e));
  FLCE_TRY(flce_finish_class_gradients(e));
  return flce_wait_all_gather_dx(e);
}

/* ---- the teacher of a divergence ---- */

/* The execution of its logits, whose workspace is a part of the student's. */
typedef struct teacher_call {
  execution own;
  flce_plan plan;
  flce_problem problem;
  flce_tensors tensors;
  shard_call shard;
} teacher_call;

/* `caller`: the student's tensors. */
static flce_status open_teacher(execution* e, const flce_problem* student,
                                const flce_tensors* caller, teacher_call* call) {
  *call = (teacher_call){.problem = *student->teacher, .tensors = *caller->teacher};
  FLCE_TRY(flce_plan_teacher(e->backend, student, e->plan->chunk_rows, &call->plan));
  execution* own = &call->own;
  *own = *e;
  own->shard = e->shard ? &call->shard : NULL;
  own->problem = &call->problem;
  own->plan = &call->plan;
  own->tensors = &call->tensors;
  if (e->shard) call->shard.comm = e->shard->comm;
  call->problem.rows = student->rows;
  call->tensors.target = caller->target;
  call->tensors.scalars = caller->scalars;
  call->tensors.workspace = buffer_ptr(e, FLCE_BUF_TEACHER);
  call->tensors.stats = buffer_ptr(own, FLCE_BUF_STATS);
  own->losses = buffer_ptr(own, FLCE_BUF_ROW_LOSS);
  own->bias = NULL;
  e->teacher = call;
  return open_operands(own, true, true);
}

/* The chunk's rows of given logits as z. */
static flce_status given_logits(const execution* e, chunk* c) {
  const void* rows;
  FLCE_TRY(chunk_input(e, c, &rows));
  rows = element_ptr(rows, e->problem->first_logit, e->plan->dtype);
  set_z(&c->view, rows, e->plan->dtype, e->plan->input_pitch);
  c->view.z_columns = c->view.vocab; /* the others are not ours to write */
  return FLCE_OK;
}

/* Logits of a chunk, and their statistics over this rank's classes. `e`: the teacher's. */
static flce_status teacher_logits(const execution* e, chunk* c) {
  if (e->problem->vocab == 0) return FLCE_OK;
  if (e->plan->fuses_rows) {
    flce_fused_call* call = &c->fused_teacher;
    call->scratch = buffer_ptr(e, FLCE_BUF_FUSED);
    FLCE_TRY(fused_logits(e, c, &call->gemm, &call->rows));
    return fused_statistics(e, c, &call->gemm, &call->rows);
  }
  FLCE_TRY(e->problem->gives_logits ? given_logits(e, c) : logits_gemm(e, c));
  return pass_rows(e, c);
}

/* Sets c->teacher, of the rows of the student's chunk `c`. */
static flce_status teacher_rows(const execution* e, chunk* c) {
  const execution* teacher = &e->teacher->own;
  chunk other = open_chunk(teacher, c->first, e->plan->chunk_rows, teacher->plan->gathered_x);
  other.view.index = c->view.index;
  FLCE_TRY(teacher_logits(teacher, &other));
  FLCE_TRY(flce_begin_all_gather_statistics(teacher, &other));
  FLCE_TRY(flce_wait_all_gather_statistics(teacher, &other));
  c->teacher = other.view;
  c->fused_teacher = other.fused_teacher;
  return FLCE_OK;
}

/* Losses of a chunk of a divergence and, with save=grads, dz. */
static flce_status compare_rows(const execution* e, const chunk* c, bool gradients) {
  flce_rows student = c->view;
  if (gradients)
    student.coef = c->coef;
  else
    student.out = NULL;
  flce_divergence_args call = {.student = &student,
                               .teacher = &c->teacher,
                               .packed = e->plan->packs ? buffer_ptr(e, FLCE_BUF_FUSED) : NULL,
                               .divergence = e->problem->divergence,
                               .beta = e->problem->beta,
                               .hard_weight = e->problem->hard_weight,
                               .sums = true,
                               .stores_bound = gradients && e->plan->draws,
                               .writes = true};
  return flce_divergence_rows(e, c, &call);
}

/* save=grads: the gradients of a chunk for grad_output = 1. */
static flce_status forward_gradients(const execution* e, const chunk* c) {
  bool sharded = e->plan->ranks > 1;
  /* The GEMM of dX then hides the exchange of statistics. */
  bool gemm_first = sharded && e->plan->form == FLCE_FORM_EXP;
  if (gemm_first) FLCE_TRY(flce_dx_gemm(e, c));
  FLCE_TRY(flce_wait_all_gather_statistics(e, c));
  if (sharded || !e->plan->fuses_rows)
    FLCE_TRY(coefficients(e, c, (flce_upstream){0}, loss_factor(e)));
  if (e->plan->compares) {
    FLCE_TRY(compare_rows(e, c, true));
    if (e->plan->draws) return flce_sample_chunk(e, c);
  } else if (e->plan->form == FLCE_FORM_DZ && e->problem->vocab > 0) {
    flce_rows with_coef = c->view;
    with_coef.coef = c->coef;
    CALL(e, grad_rows, &with_coef, 1.0, false, false);
  }
  if (!gemm_first) FLCE_TRY(flce_dx_gemm(e, c));
  return chunk_gradients(e, c);
}

/* The gradients of all rows from their lists of dz. */
static flce_status drawn_gradients(const execution* e) {
  chunk all = open_chunk(e, 0, e->problem->rows, e->plan->gathered_x);
  FLCE_TRY(flce_row_coefficients(e, &all, &(flce_upstream){.of_dz = true}, NULL));
  return flce_sampled_gradients(e, &all);
}

/* Computes FLCE_BUF_INDEX, if the plan gathers rows. */
static flce_status gather_rows(const execution* e) {
  if (!e->plan->gathers) return FLCE_OK;
  void* index = buffer_ptr(e, FLCE_BUF_INDEX);
  /* The float poison of the workspace would read as -1, which means an absent row. */
  if (flce_poisons()) CALL(e, fill, index, FLCE_POISON_INT, e->plan->buffers[FLCE_BUF_INDEX].bytes);
  CALL(e, compact_rows, e->problem, e->tensors->target, index);
  return FLCE_OK;
}

/* Scalars, the order of the targets, and the results of rows that are not computed. `overlaps`: the
 * first chunk's logits GEMM was queued before and reads none of these, so prepare may run
 * concurrently with it (PDL). */
static flce_status begin_rows(const execution* e, bool gradients, bool overlaps) {
  void* order = gradients ? buffer_ptr(e, FLCE_BUF_ORDER) : NULL;
  FLCE_TRY(flce_prepare(e, order, overlaps));
  if (e->plan->gathers) {
    flce_rows all = open_rows(e, 0, e->problem->tokens);
    CALL(e, blank_rows, &all, e->problem->rows, NULL, e->plan->dtype, 0);
  }
  if (e->plan->finds_classes) /* -1, in the rows of no chunk */
    CALL(e, fill, e->tensors->classes, 0xff, e->plan->buffers[FLCE_BUF_CLASSES].bytes);
  return gradients ? flce_begin_gradients(e) : FLCE_OK;
}

/* Logits of a chunk, their statistics and loss, and E if the strategy needs it. */
static flce_status compute_rows(const execution* e, chunk* c, bool gradients) {
  const flce_plan* plan = e->plan;
  bool begins = c->first == 0 && !plan->compares;
  flce_gemm gemm;
  flce_rows rows;
  bool fuses = plan->fuses_rows && e->problem->vocab > 0;
  if (begins && !fuses) FLCE_TRY(begin_rows(e, gradients, false));
  if (e->problem->vocab == 0) return FLCE_OK;
  if (!fuses) {
    FLCE_TRY(logits_gemm(e, c));
    if (plan->finds_classes) CALL(e, top_classes, &c->view, false);
    FLCE_TRY(pass_rows(e, c));
    if (e->problem->wants_tail) CALL(e, tail_rows, &c->view);
    return FLCE_OK;
  }
  FLCE_TRY(fused_logits(e, c, &gemm, &rows));
  if (begins) FLCE_TRY(begin_rows(e, gradients, true));
  FLCE_TRY(fused_statistics(e, c, &gemm, &rows));
  if (plan->finds_classes) CALL(e, top_classes, &c->view, plan->form == FLCE_FORM_EXP);
  if (e->problem->wants_tail) CALL(e, tail_rows, &c->view);
  return FLCE_OK;
}

/* z of the classes whose logits are an output, of all tokens. Where the logits are rounded, so are
 * these: by the GEMM, so before the bias is added (gemm_adds_bias is for float32 logits). */
static flce_status class_logits(const execution* e) {
  const flce_plan* plan = e->plan;
  if (e->problem->row_classes == 0) return FLCE_OK;
  if (e->problem->vocab == 0) { /* a rank without a class, to which all targets are out of range */
    CALL(e, fill, e->tensors->class_logits, 0, plan->buffers[FLCE_BUF_CLASS_LOGITS].bytes);
    return FLCE_OK;
  }
  flce_rows all = open_rows(e, 0, e->problem->tokens);
  bool rounds = !plan->fuses_rows && plan->z_dtype == plan->dtype;
  CALL(e, class_logits,
       &(flce_class_logits_args){.out = e->tensors->class_logits,
                                 .rows = &all,
                                 .x = e->input,
                                 .w = e->linear_weight,
                                 .bias = e->bias,
                                 .dtype = plan->dtype,
                                 .rounded = rounds ? plan->dtype : e->stat,
                                 .hidden = plan->hidden});
  return FLCE_OK;
}

/* The forward of a chunk: logits, statistics, loss, and what the strategy computes from them. */
static flce_status forward_rows(const execution* e, chunk* c, bool gradients) {
  bool samples = e->plan->save == FLCE_SAVE_SAMPLES;
  flce_rows caller = c->view;
  if (e->plan->compares) { /* first: the student's GEMM may read the teacher's z and statistics */
    if (c->first == 0) FLCE_TRY(begin_rows(e, gradients, false));
    FLCE_TRY(teacher_rows(e, c));
  }
  flce_enable_partial_sums(e, &c->view);
  FLCE_TRY(compute_rows(e, c, gradients));
  c->view.options = caller.options; /* what follows needs the caller's */
  c->view.token_weight = caller.token_weight;
  c->view.scalars = caller.scalars;
  if (!gradients && !samples && !e->plan->compares) return FLCE_OK;
  FLCE_TRY(flce_begin_all_gather_statistics(e, c));
  if (gradients) return forward_gradients(e, c);
  FLCE_TRY(flce_wait_all_gather_statistics(e, c));
  return samples ? flce_sample_chunk(e, c) : compare_rows(e, c, false);
}

static flce_status forward(execution* e, teacher_call* teacher) {
  const flce_problem* problem = e->problem;
  const flce_plan* plan = e->plan;
  void* loss = e->tensors->loss;
  const flce_tensors* callers = e->tensors;
  FLCE_TRY(open_operands(e, true, true));
  if (plan->compares) FLCE_TRY(open_teacher(e, problem, callers, teacher));
  e->losses = problem->reduction == FLCE_NONE ? loss : buffer_ptr(e, FLCE_BUF_ROW_LOSS);
  bool gradients = plan->save == FLCE_SAVE_GRADS && wants_gradients(e);
  FLCE_TRY(gather_rows(e));
  if (gradients) FLCE_TRY(flce_sum_weight(e));
  if (problem->rows == 0) FLCE_TRY(begin_rows(e, gradients, false));
  for (int64_t first = 0; first < problem->rows; first += plan->chunk_rows) {
    chunk c = open_chunk(e, first, plan->chunk_rows, plan->gathered_x);
    FLCE_TRY(forward_rows(e, &c, gradients));
  }
  if (problem->rows > 0 && !gradients && plan->save != FLCE_SAVE_SAMPLES && !plan->compares) {
    /* No chunk needed the merged statistics: those of all rows are exchanged at once. */
    chunk all = open_chunk(e, 0, problem->rows, plan->gathered_x);
    FLCE_TRY(flce_begin_all_gather_statistics(e, &all));
    FLCE_TRY(flce_wait_all_gather_statistics(e, &all));
  }
  if (gradients) FLCE_TRY(plan->draws ? drawn_gradients(e) : finish_gradients(e));
  FLCE_TRY(class_logits(e));
  /* The last kernel before reduce must be one of the backend's own, which waits for all kernels
   * before it: in form exp that is a pass that finishes the gradients. In form dz it may be a
   * library's GEMM. */
  bool overlaps = gradients && problem->rows > 0 && plan->form == FLCE_FORM_EXP && plan->ranks == 1;
  if (problem->reduction != FLCE_NONE)
    CALL(e, reduce, loss, buffer_ptr(e, FLCE_BUF_ROW_LOSS), problem->tokens,
         scalar(e, FLCE_SCALAR_INV_DENOM), e->stat, overlaps);
  return FLCE_OK;
}

/* The caller's problem with the strategy that the plan has chosen. */
static flce_problem with_strategy(const flce_problem* caller, const flce_plan* plan) {
  flce_problem problem = *caller;
  problem.save = plan->save;
  return problem;
}

flce_status flce_forward(const flce_backend* backend, const flce_comm* comm,
                         const flce_problem* caller_problem, const flce_plan* plan,
                         const flce_tensors* caller) {
  flce_problem problem = with_strategy(caller_problem, plan);
  flce_tensors tensors = *caller;
  shard_call shard = {.comm = comm};
  execution e = {.backend = backend,
                 .shard = &shard,
                 .problem = &problem,
                 .plan = plan,
                 .tensors = &tensors,
                 .no_class = flce_no_class(&problem)};
  if (!plan->keeps_statistics) {
    tensors.stats = buffer_ptr(&e, FLCE_BUF_STATS);
    tensors.scalars = buffer_ptr(&e, FLCE_BUF_SCALARS);
  }
  teacher_call teacher = {0};
  flce_status status = flce_close_shard(&e, forward(&e, &teacher));
  return flce_close_shard(&teacher.own, status);
}

/* ---- backward ---- */

/* Makes c->view.out the chunk's E or dz: from FLCE_BUF_SAVED, or from recomputed logits. */
static flce_status backward_rows(const execution* e, chunk* c) {
  const flce_plan* plan = e->plan;
  if (e->problem->vocab == 0) return FLCE_OK;
  bool exp_form = plan->form == FLCE_FORM_EXP, stored = plan->save == FLCE_SAVE_LOGITS;
  if (stored && exp_form) {
    set_out(&c->view, saved_rows(e, c->first), plan->dtype, plan->saved_pitch, plan->saved_pitch);
    return FLCE_OK;
  }
  if (stored) {
    set_z(&c->view, saved_rows(e, c->first), plan->saved_dtype, plan->saved_pitch);
    set_out(&c->view, buffer_ptr(e, FLCE_BUF_LOGITS), plan->dtype, plan->out_pitch,
            plan->out_pitch);
  } else {
    FLCE_TRY(logits_gemm(e, c));
  }
  if (!stored || plan->dz_in_saved) set_out_in_place(e, &c->view);
  flce_rows view = c->view;
  view.coef = exp_form ? NULL : c->coef;
  view.wants_entropy = e->tensors->grad_entropy != NULL;
  view.has_tail_gradient = e->tensors->grad_tail != NULL;
  bool from_exp = stored && plan->saves_exp;
  CALL(e, grad_rows, &view, from_exp ? exp_scale(plan) : 1.0, true, from_exp);
  if (e->problem->has_grad_classes)
    CALL(e, class_gradients, &view, buffer_ptr(e, FLCE_BUF_DZ_SCALE));
  return FLCE_OK;
}

flce_status flce_check_backward(const flce_plan* plan) {
  if (flce_has_backward(plan->save)) return FLCE_OK;
  return flce_fail(FLCE_INVALID_ARGUMENT,
                   "save: expected \"logits\", \"stats\" or \"samples\" in a backward, got \"%s\"",
                   flce_save_name(plan->save));
}

static flce_status backward(execution* e) {
  const flce_problem* problem = e->problem;
  const flce_plan* plan = e->plan;
  bool reads_z = plan->save == FLCE_SAVE_LOGITS && !plan->saves_exp;
  bool needs_bias = plan->save == FLCE_SAVE_STATS || (reads_z && !plan->gemm_adds_bias);
  FLCE_TRY(open_operands(e, backward_reads_input(problem), needs_bias));
  if (!wants_gradients(e)) return FLCE_OK;
  FLCE_TRY(gather_rows(e));
  FLCE_TRY(flce_sum_weight(e));
  FLCE_TRY(flce_begin_gradients(e));
  flce_upstream upstream = upstream_of(e);
  if (plan->save == FLCE_SAVE_SAMPLES) {
    chunk all = open_chunk(e, 0, problem->rows, plan->backward_gathered_x);
    FLCE_TRY(coefficients(e, &all, upstream, scalar(e, FLCE_SCALAR_INV_DENOM)));
    return flce_sampled_gradients(e, &all);
  }
  for (int64_t first = 0; first < problem->rows; first += plan->backward_chunk_rows) {
    chunk c = open_chunk(e, first, plan->backward_chunk_rows, plan->backward_gathered_x);
    FLCE_TRY(coefficients(e, &c, upstream, scalar(e, FLCE_SCALAR_INV_DENOM)));
    FLCE_TRY(backward_rows(e, &c));
    FLCE_TRY(flce_dx_gemm(e, &c));
    FLCE_TRY(chunk_gradients(e, &c));
  }
  void* order = buffer_ptr(e, FLCE_BUF_ORDER);
  if (order && e->problem->vocab > 0) CALL(e, order_targets, e->problem, e->tensors->target, order);
  return finish_gradients(e);
}

flce_status flce_backward(const flce_backend* backend, const flce_comm* comm,
                          const flce_problem* caller_problem, const flce_plan* plan,
                          const flce_tensors* tensors) {
  FLCE_TRY(flce_check_backward(plan));
  flce_problem problem = with_strategy(caller_problem, plan);
  shard_call shard = {.comm = comm};
  execution e = {.backend = backend,
                 .shard = &shard,
                 .problem = &problem,
                 .plan = plan,
                 .tensors = tensors,
                 .no_class = flce_no_class(&problem)};
  return flce_close_shard(&e, backward(&e));
}
