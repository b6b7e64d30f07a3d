/* Implements engine_case.h: the definition in double, a run of the engine, and the comparison. */
#include "engine_case.h"

#include <sanitizer/asan_interface.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

setting make_setting(flce_dtype dtype, flce_save save) {
  return (setting){
      .problem = {.shape.tokens = 23,
                  .shape.hidden = 19,
                  .shape.vocab = 67,
                  .shape.weight_rows = 67,
                  .shape.rows = 23,
                  .dtypes.gemm = dtype,
                  .dtypes.input = dtype,
                  .dtypes.weight = dtype,
                  .dtypes.bias = dtype,
                  .dtypes.accum = dtype,
                  .dtypes.logits = flce_stat_dtype(dtype),
                  .reduction = FLCE_MEAN,
                  .save = save,
                  .wants.grad_input = true,
                  .wants.grad_weight = true,
                  .wants.grad_bias = true,
                  .has.bias = true,
                  .loss = {.ignore_index = IGNORE_INDEX, .logit_scale = 1.0, .temperature = 1.0},
                  .memory.bound = 1 << 20},
      .std = 2.0};
}

flce_dtype stat_of(const setting* s) {
  return flce_stat_dtype(s->problem.dtypes.gemm);
}

/* ---- the definition ---- */

static double optional(bool given, const void* vector, flce_dtype stat, int64_t i) {
  return given ? flce_load(vector, stat, i) : 1.0;
}

static double class_weight(const setting* s, const model* m, int64_t j) {
  return optional(s->problem.has.class_weight, m->class_weight, stat_of(s), j);
}

/* A row: its logits, their slopes with respect to z, the gradient and the magnitudes of its terms.
 * The logits use a wider type than what is tested, if the machine has one: exp of large logits
 * shows every rounding. */
typedef struct row {
  long double *l, lse;
  double *slope, *dz, *size;
  double entropy, loss, loss_size;
} row;

static void make_logits(const setting* s, const model* m, int64_t i, row* r) {
  const flce_problem* p = &s->problem;
  const flce_loss* o = &p->loss;
  double temperature = o->temperature * optional(s->temperature, m->temperature, stat_of(s), i);
  long double largest = -INFINITY, sum = 0.0;
  for (int64_t j = 0; j < p->shape.vocab; j++) {
    long double z = p->has.bias ? flce_load(m->bias, p->dtypes.bias, j) : 0.0;
    for (int64_t h = 0; h < p->shape.hidden; h++)
      z += (long double)flce_load(m->x, p->dtypes.input, i * p->shape.hidden + h) *
           flce_load(m->w, p->dtypes.weight, j * p->shape.hidden + h);
    long double capped = o->softcap > 0.0 ? tanhl(o->logit_scale * z / o->softcap) : 0.0;
    r->l[j] = (o->softcap > 0.0 ? o->softcap * capped : o->logit_scale * z) / temperature;
    r->slope[j] = (double)(o->logit_scale / temperature * (1.0 - capped * capped));
    largest = fmaxl(largest, r->l[j]);
  }
  for (int64_t j = 0; j < p->shape.vocab; j++) sum += expl(r->l[j] - largest);
  r->lse = largest + logl(sum);
  r->entropy = 0.0;
  for (int64_t j = 0; j < p->shape.vocab; j++)
    r->entropy += (double)(expl(r->l[j] - r->lse) * (r->lse - r->l[j]));
}

/* The row's loss, and its gradient for upstream gradients k of the loss, g_lse of lse, g_entropy of
 * the entropy; z_factor: the z-loss's factor relative to the loss's. */
static void row_loss(const setting* s, const model* m, int64_t i, double k, double g_lse,
                     double g_entropy, double z_factor, row* r) {
  const flce_problem* p = &s->problem;
  double smoothing = p->loss.label_smoothing, z_loss = p->loss.z_loss * z_factor, weight_sum = 0.0;
  double lse = (double)r->lse;
  double token = optional(s->token_weight, m->token_weight, stat_of(s), i);
  r->loss = z_loss * lse * lse;
  for (int64_t j = 0; j < p->shape.vocab; j++) {
    double q = smoothing / (double)p->shape.vocab;
    if (p->has.probabilities)
      q += (1.0 - smoothing) * flce_load(m->probabilities, FLCE_F32, i * p->shape.weight_rows + j);
    else if (j == m->target[i])
      q += 1.0 - smoothing;
    weight_sum += q * class_weight(s, m, j);
    r->loss += q * class_weight(s, m, j) * (double)(r->lse - r->l[j]);
    r->dz[j] = -k * token * q * class_weight(s, m, j);
    r->size[j] = fabs(r->dz[j]);
  }
  double push = k * token * (weight_sum + 2.0 * z_loss * lse) + g_lse;
  for (int64_t j = 0; j < p->shape.vocab; j++) {
    double log_p = (double)(r->l[j] - r->lse), prob = (double)expl(r->l[j] - r->lse);
    r->dz[j] = r->slope[j] * (r->dz[j] + prob * (push - g_entropy * (log_p + r->entropy)));
    r->size[j] += prob * (fabs(k * token) * (weight_sum + 2.0 * z_loss * fabs(lse)) + fabs(g_lse) +
                          fabs(g_entropy) * (fabs(log_p) + r->entropy));
    r->size[j] *= fabs(r->slope[j]);
  }
  r->loss *= token;
  r->loss_size = fabs(r->loss) + token * (1.0 + 2.0 * z_loss) * fabs(lse);
}

static void add_row(const setting* s, model* m, int64_t i, const row* r) {
  const flce_problem* p = &s->problem;
  for (int64_t j = 0; j < p->shape.vocab; j++) {
    m->db[j] += r->dz[j];
    m->db_size[j] += r->size[j];
    for (int64_t h = 0; h < p->shape.hidden; h++) {
      int64_t xi = i * p->shape.hidden + h, wi = j * p->shape.hidden + h;
      double x = flce_load(m->x, p->dtypes.input, xi), w = flce_load(m->w, p->dtypes.weight, wi);
      m->dx[xi] += r->dz[j] * w;
      m->dx_size[xi] += fabs(w) * r->size[j];
      if (h < p->shape.frozen_hidden) continue;
      int64_t made = j * flce_grad_weight_cols(p) + h - p->shape.frozen_hidden;
      m->dw[made] += r->dz[j] * x;
      m->dw_size[made] += fabs(x) * r->size[j];
    }
  }
}

static bool is_ignored(const setting* s, const model* m, int64_t i) {
  return !s->problem.has.probabilities && m->target[i] == IGNORE_INDEX;
}

/* The initial content of the tensor that dW is added to; its magnitudes count among dW's terms. */
static void make_start(const setting* s, model* m) {
  const flce_problem* p = &s->problem;
  int64_t used = p->shape.vocab * flce_grad_weight_cols(p),
          all = p->shape.weight_rows * flce_grad_weight_cols(p);
  m->start = test_fill_normal(p->backward.added_dtype, all, 0.25);
  for (int64_t k = used; k < all; k++) flce_store(m->start, p->backward.added_dtype, k, NAN);
  for (int64_t k = 0; s->problem.backward.adds_grad_weight && k < used; k++) {
    double start = flce_load(m->start, p->backward.added_dtype, k);
    m->dw[k] += start;
    m->dw_size[k] += fabs(start);
  }
}

static void make_expected(const setting* s, model* m) {
  const flce_problem* p = &s->problem;
  flce_dtype stat = stat_of(s);
  row r = {.l = malloc((size_t)p->shape.vocab * sizeof *r.l),
           .slope = test_doubles(p->shape.vocab),
           .dz = test_doubles(p->shape.vocab),
           .size = test_doubles(p->shape.vocab)};
  double weights = 0.0, count = 0.0;
  for (int64_t i = 0; i < p->shape.tokens; i++) {
    if (is_ignored(s, m, i)) continue;
    weights += p->has.probabilities ? 1.0 : class_weight(s, m, m->target[i]);
    count += 1.0;
  }
  bool mean = p->reduction == FLCE_MEAN, none = p->reduction == FLCE_NONE;
  double denominator = s->num_items ? flce_load(m->num_items, stat, 0) : weights;
  double factor = !mean ? 1.0 : denominator > 0.0 ? 1.0 / denominator : 0.0;
  double z_factor = mean && !s->num_items
                        ? weights / count
                        : 1.0; /* the z-loss is averaged over the number of rows */
  for (int64_t i = 0; i < p->shape.tokens; i++) {
    if (is_ignored(s, m, i)) continue;
    make_logits(s, m, i, &r);
    double g_lse = s->upstream ? flce_load(m->grad_lse, stat, i) : 0.0;
    bool pulls = s->upstream && p->wants.entropy;
    row_loss(s, m, i, factor * flce_load(m->grad_output, stat, none ? i : 0), g_lse,
             pulls ? flce_load(m->grad_entropy, stat, i) : 0.0, z_factor, &r);
    m->loss[none ? i : 0] += factor * r.loss;
    m->loss_size[none ? i : 0] += factor * r.loss_size;
    add_row(s, m, i, &r);
  }
  free(r.l), free(r.slope), free(r.dz), free(r.size);
}

model make_model(const setting* s) {
  const flce_problem* p = &s->problem;
  int64_t n = p->shape.tokens, h = p->shape.hidden, v = p->shape.weight_rows;
  flce_dtype stat = stat_of(s);
  model m = {.x = test_fill_normal(p->dtypes.input, n * h, 1.0),
             .w = test_fill_normal(p->dtypes.weight, v * h, s->std / sqrt((double)h)),
             .bias = test_fill_normal(p->dtypes.bias, v, 0.5),
             .class_weight = test_buffer(stat, v),
             .grad_output = test_buffer(stat, n + 1),
             .token_weight = test_buffer(stat, n),
             .temperature = test_buffer(stat, n),
             .num_items = test_buffer(stat, 1),
             .grad_lse = test_fill_normal(stat, n, 1.0),
             .grad_entropy = test_fill_normal(stat, n, 1.0),
             .probabilities = test_buffer(FLCE_F32, n * v),
             .target = malloc(sizeof(int64_t) * (size_t)(n + 1))};
  for (int64_t k = 0; s->identity && k < v * h; k++)
    flce_store(m.w, p->dtypes.weight, k, k % h == k / h ? 1.0 : 0.0);
  for (int64_t j = 0; j < v; j++) flce_store(m.class_weight, stat, j, test_uniform(0.25, 4.0));
  for (int64_t i = 0; i <= n; i++) flce_store(m.grad_output, stat, i, test_uniform(0.5, 3.0));
  for (int64_t k = 0; k < n * v; k++)
    flce_store(m.probabilities, FLCE_F32, k, test_uniform(0.0, 2.0 / (double)v));
  flce_store(m.num_items, stat, 0, 11.0);
  for (int64_t i = 0; i < n; i++) {
    flce_store(m.token_weight, stat, i, i == 4 ? 0.0 : test_uniform(0.25, 2.0));
    flce_store(m.temperature, stat, i, test_uniform(0.5, 2.0));
    m.target[i] = (int64_t)(test_random() % (uint64_t)p->shape.vocab);
    if (s->peaked) /* x is parallel to its target's row of W: a tiny loss */
      for (int64_t k = 0; k < h; k++)
        flce_store(m.x, p->dtypes.input, i * h + k,
                   16.0 * flce_load(m.w, p->dtypes.weight, m.target[i] * h + k));
    if (p->has.probabilities || (!s->all_ignored && i % 5 != 3)) continue;
    m.target[i] = IGNORE_INDEX;
    /* NaN in an ignored row must not reach any result; the definition never reads it. */
    for (int64_t k = 0; k < h; k++) flce_store(m.x, p->dtypes.input, i * h + k, NAN);
  }
  /* Padding rows of W are not read: NaN there must not reach any result either. */
  for (int64_t j = p->shape.vocab; j < v; j++) {
    flce_store(m.bias, p->dtypes.bias, j, NAN);
    flce_store(m.class_weight, stat, j, NAN);
    for (int64_t k = 0; k < h; k++) flce_store(m.w, p->dtypes.weight, j * h + k, NAN);
    for (int64_t i = 0; i < n; i++) flce_store(m.probabilities, FLCE_F32, i * v + j, NAN);
  }
  m.loss = test_doubles(n + 1), m.loss_size = test_doubles(n + 1);
  m.dx = test_doubles(n * h), m.dx_size = test_doubles(n * h);
  m.dw = test_doubles(v * h), m.dw_size = test_doubles(v * h);
  m.db = test_doubles(v), m.db_size = test_doubles(v);
  make_expected(s, &m);
  make_start(s, &m);
  return m;
}

void free_model(model* m) {
  free(m->x), free(m->w), free(m->bias), free(m->class_weight), free(m->grad_output);
  free(m->token_weight), free(m->temperature), free(m->num_items), free(m->grad_lse);
  free(m->grad_entropy), free(m->probabilities), free(m->start);
  free(m->target), free(m->loss), free(m->loss_size), free(m->dx), free(m->dx_size);
  free(m->dw), free(m->dw_size), free(m->db), free(m->db_size);
}

/* ---- a run ---- */

void* plan_buffer(const flce_plan* plan, flce_buffer_id id) {
  int64_t bytes = plan->buffers[id].bytes;
  if (bytes == 0 || !(plan->buffers[id].lifetime & FLCE_OUTPUT)) return NULL;
  void* buffer = malloc((size_t)bytes);
  memset(buffer, 0xff, (size_t)bytes); /* NaN in every dtype: a read before the first write shows */
  return buffer;
}

void* workspace(const flce_plan* plan, unsigned pass) {
  bool forward = pass == FLCE_IN_FORWARD;
  int64_t bytes = forward ? plan->forward_workspace_bytes : plan->backward_workspace_bytes;
  char* memory = aligned_alloc(256, (size_t)((bytes + 256) / 256 * 256));
  ASAN_POISON_MEMORY_REGION(memory, bytes + 1);
  for (int id = 0; id < FLCE_BUF_COUNT; id++) {
    const flce_buffer* b = &plan->buffers[id];
    if (b->bytes == 0 || (b->lifetime & (FLCE_OUTPUT | pass)) != pass) continue;
    ASAN_UNPOISON_MEMORY_REGION(memory + b->offset, b->bytes);
    memset(memory + b->offset, 0xff, (size_t)b->bytes);
  }
  return memory;
}

/* The tensor of dW: a new one, or the caller's with its initial content. */
static void* weight_buffer(const setting* s, const model* m, const flce_plan* plan) {
  const flce_problem* p = &s->problem;
  if (!p->backward.adds_grad_weight) return plan_buffer(plan, FLCE_BUF_GRAD_WEIGHT);
  CHECK(plan->buffers[FLCE_BUF_GRAD_WEIGHT].bytes == 0, "the plan has a dW besides the caller's");
  size_t bytes = (size_t)(p->shape.weight_rows * flce_grad_weight_cols(p) *
                          flce_size_of(p->backward.added_dtype));
  return memcpy(malloc(bytes), m->start, bytes);
}

/* save=grads: what op.cpp runs in a backward. */
static void scale_gradients(const flce_backend* b, const setting* s, run* r, const void* g) {
  const flce_problem* p = &s->problem;
  flce_dtype stat = stat_of(s);
  const void* scalars = r->plan.dtype == FLCE_F16 ? r->t.scalars : NULL;
  const flce_scaled all[FLCE_GRADIENTS] = {
      {r->t.grad_input, r->t.grad_input, r->plan.grad_input_dtype, r->plan.grad_input_dtype,
       flce_input_rows(p) * p->shape.hidden},
      {r->t.grad_weight, r->t.grad_weight, r->plan.grad_weight_dtype, r->plan.grad_weight_dtype,
       p->shape.weight_rows * flce_grad_weight_cols(p)},
      {r->t.grad_bias, r->t.grad_bias, r->plan.grad_bias_dtype, r->plan.grad_bias_dtype,
       p->shape.weight_rows}};
  flce_scaled made[FLCE_GRADIENTS];
  int number = 0;
  for (int k = 0; k < FLCE_GRADIENTS; k++)
    if (all[k].out) made[number++] = all[k];
  CHECK_OK(b->scale_grads(b->self, made, number, g, scalars, stat));
}

void open_backward(const flce_backend* b, const setting* s, const model* m, run* r) {
  r->t.grad_output = m->grad_output;
  r->t.grad_lse = s->upstream ? m->grad_lse : NULL;
  r->t.grad_entropy = r->problem.wants.entropy_gradient ? m->grad_entropy : NULL;
  if (!flce_has_backward(r->plan.strategy)) return;
  int64_t forward_gemms = r->plan.forward_gemms;
  r->problem.backward.has_grad_entropy = r->problem.wants.entropy_gradient;
  r->problem.backward.consumes_saved = s->consumes;
  CHECK_OK(flce_plan_call(b, &r->problem, &r->plan));
  r->plan.forward_gemms = forward_gemms;
  free(r->t.workspace);
  r->t.workspace = workspace(&r->plan, FLCE_IN_BACKWARD);
}

static void run_backward(const flce_backend* b, const setting* s, const model* m, run* r) {
  open_backward(b, s, m, r);
  if (r->plan.strategy == FLCE_SAVE_GRADS) {
    scale_gradients(b, s, r, m->grad_output);
  } else if (r->plan.strategy != FLCE_SAVE_NOTHING) {
    int64_t before = flce_gemm_count();
    r->status = flce_backward(b, s->comm, &r->problem, &r->plan, &r->t);
    CHECK(r->status == FLCE_OK, "backward: %s", flce_last_error());
    r->backward_gemms = flce_gemm_count() - before;
  }
}

run open_run(const flce_backend* b, const setting* s, const model* m) {
  run r = {.problem = s->problem};
  r.problem.wants.entropy_gradient = s->upstream && s->problem.wants.entropy;
  r.status = flce_plan_call(b, &r.problem, &r.plan);
  CHECK(r.status == FLCE_OK, "plan: %s", flce_last_error());
  if (r.status != FLCE_OK) return r;
  r.t = (flce_tensors){.input = m->x,
                       .linear_weight = m->w,
                       .linear_bias = s->problem.has.bias ? m->bias : NULL,
                       .target = s->problem.has.probabilities ? NULL : m->target,
                       .probabilities = s->problem.has.probabilities ? m->probabilities : NULL,
                       .probabilities_dtype = FLCE_F32,
                       .class_weight = s->problem.has.class_weight ? m->class_weight : NULL,
                       .token_weight = s->token_weight ? m->token_weight : NULL,
                       .temperature = s->temperature ? m->temperature : NULL,
                       .num_items = s->num_items ? m->num_items : NULL,
                       .seed = &s->seed,
                       .teacher = s->problem.divergence.teacher ? &m->teacher : NULL,
                       .predictions = plan_buffer(&r.plan, FLCE_BUF_PREDICTIONS),
                       .loss = plan_buffer(&r.plan, FLCE_BUF_LOSS),
                       .stats = plan_buffer(&r.plan, FLCE_BUF_STATS),
                       .scalars = plan_buffer(&r.plan, FLCE_BUF_SCALARS),
                       .saved = plan_buffer(&r.plan, FLCE_BUF_SAVED),
                       .grad_input = plan_buffer(&r.plan, FLCE_BUF_GRAD_INPUT),
                       .grad_weight = weight_buffer(s, m, &r.plan),
                       .grad_bias = plan_buffer(&r.plan, FLCE_BUF_GRAD_BIAS),
                       .workspace = workspace(&r.plan, FLCE_IN_FORWARD)};
  return r;
}

run run_all(const setting* s, const model* m, int threads) {
  flce_cpu cpu = test_cpu(threads);
  flce_backend b;
  flce_cpu_backend(&cpu, &b);
  if (s->fused) plain_fused(&b, s->skips);
  run r = open_run(&b, s, m);
  if (r.status != FLCE_OK) return r;
  int64_t before = flce_gemm_count();
  r.status = flce_forward(&b, s->comm, &r.problem, &r.plan, &r.t);
  CHECK(r.status == FLCE_OK, "forward: %s", flce_last_error());
  r.forward_gemms = flce_gemm_count() - before;
  if (r.status == FLCE_OK) run_backward(&b, s, m, &r);
  return r;
}

void free_run(run* r) {
  free(r->t.loss), free(r->t.stats), free(r->t.predictions), free(r->t.scalars), free(r->t.saved),
      free(r->t.grad_input);
  free(r->t.grad_weight), free(r->t.grad_bias), free(r->t.workspace);
}

/* ---- comparison ---- */

/* Number of roundings that an element passes through: logits, E, GEMMs, sums. On the CPU the logits
 * are rounded to the GEMMs' dtype, so their size is part of every error there. */
static double error_of(const setting* s, const run* r) {
  double logits = 1.0 + 4.0 * s->std;
  double rounding = test_epsilon(r->plan.dtype);
  if (s->peaked) logits += 32.0 * s->std * s->std; /* x = 16 W_y */
  /* The plain GEMM sums in double: a float64 logit has one rounding per term, others have one in
   * all. */
  if (r->plan.dtype == FLCE_F64) logits *= sqrt((double)s->problem.shape.hidden);
  const flce_loss* o = &s->problem.loss;
  logits *= fmax(1.0, fabs(o->logit_scale) / o->temperature * (s->temperature ? 2.0 : 1.0));
  return rounding * (4.0 + 2.0 * logits) + test_epsilon(stat_of(s)) * 16.0;
}

void describe(const setting* s, const run* r, char* text, size_t size) {
  const flce_problem* p = &s->problem;
  snprintf(
      text, size,
      "%s%s save %s dtype %s x %s W %s accum %s N %lld H %lld V %lld reduction %d bias %d "
      "weight %d smoothing %g scale %g cap %g T %g z-loss %g t %d entropy %d rows %lld rows of W "
      "%lld chunks %lld wants %d%d%d adds %d %s",
      flce_cpu_variant(),
      s->skips   ? " skips"
      : s->fused ? " fused"
                 : "",
      flce_save_name(p->save), flce_dtype_name(p->dtypes.gemm), flce_dtype_name(p->dtypes.input),
      flce_dtype_name(p->dtypes.weight), flce_dtype_name(p->dtypes.accum),
      (long long)p->shape.tokens, (long long)p->shape.hidden, (long long)p->shape.vocab,
      p->reduction, p->has.bias, p->has.class_weight, p->loss.label_smoothing, p->loss.logit_scale,
      p->loss.softcap, p->loss.temperature, p->loss.z_loss, p->has.probabilities, p->wants.entropy,
      (long long)p->shape.rows, (long long)p->shape.weight_rows, (long long)r->plan.chunks,
      p->wants.grad_input, p->wants.grad_weight, p->wants.grad_bias, p->backward.adds_grad_weight,
      flce_dtype_name(p->backward.added_dtype));
}

void compare(const setting* s, const run* r, const char* name, const void* actual, flce_dtype dtype,
             const double* expected, const double* size, int64_t count) {
  char text[600];
  describe(s, r, text, sizeof text);
  CHECK(actual != NULL, "%s is missing, %s", name, text);
  if (!actual) return;
  double error = error_of(s, r) + 2.0 * test_epsilon(dtype), worst = 0.0;
  /* An E that underflows is 0; its factor would have been a sum of x or W, here some hundreds. */
  double underflow = test_tiny(dtype) + 1000.0 * test_tiny(stat_of(s));
  int64_t wrong = -1;
  for (int64_t k = 0; k < count; k++) {
    double value = flce_load(actual, dtype, k), off = fabs(value - expected[k]);
    if (!(off <= error * size[k] + underflow)) {
      wrong = k;
      worst = size[k] > 0.0 ? off / size[k] : INFINITY;
    }
  }
  CHECK(wrong < 0, "%s[%lld] is off by %g of its terms, allowed %g, %s", name, (long long)wrong,
        worst, error, text);
}

/* Zeros follow the columns of the saved tensor. */
static void check_padding(const setting* s, const run* r, const char* text) {
  const flce_plan* plan = &r->plan;
  if (plan->strategy != FLCE_SAVE_LOGITS) return;
  bool zeros = true;
  for (int64_t i = 0; i < plan->rows; i++)
    for (int64_t j = s->problem.shape.vocab; j < plan->saved_pitch; j++)
      zeros &= flce_load(r->t.saved, plan->saved_dtype, i * plan->saved_pitch + j) == 0.0;
  CHECK(zeros, "what is saved is not padded with zeros, %s", text);
}

void check_run(const setting* s, const model* m, const run* r) {
  const flce_problem* p = &s->problem;
  const flce_plan* plan = &r->plan;
  bool none = p->reduction == FLCE_NONE, gradients = plan->strategy != FLCE_SAVE_NOTHING;
  char text[600];
  describe(s, r, text, sizeof text);
  check_padding(s, r, text);
  CHECK(r->forward_gemms == plan->forward_gemms && r->backward_gemms == plan->backward_gemms,
        "GEMMs %lld and %lld, planned %lld and %lld, %s", (long long)r->forward_gemms,
        (long long)r->backward_gemms, (long long)plan->forward_gemms,
        (long long)plan->backward_gemms, text);
  compare(s, r, "loss", r->t.loss, stat_of(s), m->loss, m->loss_size, none ? p->shape.tokens : 1);
  if (gradients && p->wants.grad_input && p->shape.tokens > 0)
    compare(s, r, "dX", r->t.grad_input, plan->grad_input_dtype, m->dx, m->dx_size,
            p->shape.tokens * p->shape.hidden);
  int64_t used = p->shape.vocab * flce_grad_weight_cols(p),
          all = p->shape.weight_rows * flce_grad_weight_cols(p);
  if (gradients && p->wants.grad_weight)
    compare(s, r, "dW", r->t.grad_weight, plan->grad_weight_dtype, m->dw, m->dw_size,
            p->backward.adds_grad_weight ? used : all);
  int64_t size = flce_size_of(p->backward.added_dtype);
  if (p->backward.adds_grad_weight)
    CHECK(test_same((char*)r->t.grad_weight + used * size, (char*)m->start + used * size,
                    (all - used) * size),
          "the caller's padding has changed, %s", text);
  if (gradients && p->wants.grad_bias)
    compare(s, r, "db", r->t.grad_bias, plan->grad_bias_dtype, m->db, m->db_size,
            p->shape.weight_rows);
}

static bool same_run(const setting* s, const run* a, const run* b) {
  const flce_problem* p = &s->problem;
  const flce_plan* plan = &a->plan;
  bool same = test_same(a->t.loss, b->t.loss, plan->buffers[FLCE_BUF_LOSS].bytes);
  if (a->t.grad_input)
    same &= test_same(a->t.grad_input, b->t.grad_input,
                      p->shape.tokens * p->shape.hidden * flce_size_of(plan->grad_input_dtype));
  if (a->t.grad_weight)
    same &= test_same(
        a->t.grad_weight, b->t.grad_weight,
        p->shape.weight_rows * flce_grad_weight_cols(p) * flce_size_of(plan->grad_weight_dtype));
  if (a->t.grad_bias)
    same &= test_same(a->t.grad_bias, b->t.grad_bias,
                      p->shape.weight_rows * flce_size_of(plan->grad_bias_dtype));
  return same;
}

static void test_kernel(const setting* s, const model* m) {
  run serial = run_all(s, m, 1);
  if (serial.status == FLCE_OK) {
    check_run(s, m, &serial);
    run threaded = run_all(s, m, 3);
    char text[600];
    describe(s, &serial, text, sizeof text);
    CHECK(same_run(s, &serial, &threaded), "threads change the bits, %s", text);
    free_run(&threaded);
  }
  free_run(&serial);
}

void test_setting(const setting* s) {
  setting fused = *s, skips = *s;
  fused.fused = skips.fused = skips.skips = true;
  model m = make_model(s);
  test_kernel(s, &m);
  test_kernel(&fused, &m);
  test_kernel(&skips, &m);
  free_model(&m);
}

flce_status plan_on_cpu(const setting* s, flce_plan* plan) {
  flce_cpu cpu = test_cpu(1);
  flce_backend b;
  flce_cpu_backend(&cpu, &b);
  flce_facts facts;
  CHECK_OK(b.facts(b.self, &s->problem, &facts));
  return flce_plan_make(&s->problem, &facts, plan);
}
