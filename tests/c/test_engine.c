/* The whole path, plan to gradients, on the CPU backend with a plain GEMM, against a definition in
 * double: strategies, options, chunks, wanted gradients, dtypes, refusals. */
#include "test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IGNORE_INDEX = -100 };

typedef struct setting {
  flce_problem problem;
  double logit_scale;                 /* standard deviation of the logits, about */
  bool all_ignored, peaked, identity; /* identity: W = 1, the logits are x */
} setting;

/* Inputs, and the loss and gradients that belong to them. */
typedef struct model {
  void *x, *w, *bias, *class_weight, *grad_output;
  int64_t* target;
  double *loss, *dx, *dw, *db; /* the gradients are for grad_output */
  /* Sums of the magnitudes of each gradient's terms: what its rounding errors are relative to. */
  double *dx_size, *dw_size, *db_size, *loss_size;
} model;

static flce_dtype stat_of(const setting* s) {
  return flce_stat_dtype(s->problem.dtype);
}

/* ---- the definition ---- */

static double class_weight(const setting* s, const model* m, int64_t j) {
  return s->problem.has_class_weight ? flce_load(m->class_weight, stat_of(s), j) : 1.0;
}

/* Logits of row i; returns their logsumexp. */
static double make_logits(const setting* s, const model* m, int64_t i, double* z) {
  const flce_problem* p = &s->problem;
  double largest = -INFINITY, sum = 0.0;
  for (int64_t j = 0; j < p->vocab; j++) {
    z[j] = p->has_bias ? flce_load(m->bias, p->bias_dtype, j) : 0.0;
    for (int64_t h = 0; h < p->hidden; h++)
      z[j] += flce_load(m->x, p->input_dtype, i * p->hidden + h) *
              flce_load(m->w, p->weight_dtype, j * p->hidden + h);
    largest = fmax(largest, z[j]);
  }
  for (int64_t j = 0; j < p->vocab; j++) sum += exp(z[j] - largest);
  return largest + log(sum);
}

/* The loss of a row and its gradient by the logits, for g = 1, with the terms' magnitudes. */
static double row_loss(const setting* s, const model* m, int64_t y, const double* z, double lse,
                       double* dz, double* dz_size) {
  const flce_problem* p = &s->problem;
  double smoothing = p->label_smoothing, share = smoothing / (double)p->vocab, total = 0.0;
  double own = (1.0 - smoothing) * class_weight(s, m, y), loss = own * (lse - z[y]);
  for (int64_t j = 0; j < p->vocab; j++) {
    total += class_weight(s, m, j);
    loss += share * class_weight(s, m, j) * (lse - z[j]);
  }
  for (int64_t j = 0; j < p->vocab; j++) {
    double q = exp(z[j] - lse), smooth = share * class_weight(s, m, j);
    dz[j] = (own + share * total) * q - smooth - (j == y ? own : 0.0);
    dz_size[j] = (own + share * total) * q + smooth + (j == y ? own : 0.0);
  }
  return loss;
}

static void add_row(const setting* s, model* m, int64_t i, double g, const double* dz,
                    const double* dz_size) {
  const flce_problem* p = &s->problem;
  for (int64_t j = 0; j < p->vocab; j++) {
    m->db[j] += g * dz[j];
    m->db_size[j] += fabs(g) * dz_size[j];
    for (int64_t h = 0; h < p->hidden; h++) {
      int64_t xi = i * p->hidden + h, wi = j * p->hidden + h;
      double x = flce_load(m->x, p->input_dtype, xi), w = flce_load(m->w, p->weight_dtype, wi);
      m->dx[xi] += g * dz[j] * w;
      m->dx_size[xi] += fabs(g * w) * dz_size[j];
      m->dw[wi] += g * dz[j] * x;
      m->dw_size[wi] += fabs(g * x) * dz_size[j];
    }
  }
}

static void make_expected(const setting* s, model* m) {
  const flce_problem* p = &s->problem;
  double *z = test_doubles(p->vocab), *dz = test_doubles(p->vocab),
         *dz_size = test_doubles(p->vocab);
  double denominator = 0.0;
  for (int64_t i = 0; i < p->tokens; i++)
    if (m->target[i] != IGNORE_INDEX) denominator += class_weight(s, m, m->target[i]);
  double factor = p->reduction != FLCE_MEAN ? 1.0 : denominator > 0.0 ? 1.0 / denominator : 0.0;
  bool none = p->reduction == FLCE_NONE;
  for (int64_t i = 0; i < p->tokens; i++) {
    if (m->target[i] == IGNORE_INDEX) continue;
    double lse = make_logits(s, m, i, z);
    double loss = row_loss(s, m, m->target[i], z, lse, dz, dz_size);
    m->loss[none ? i : 0] += factor * loss;
    m->loss_size[none ? i : 0] += factor * (fabs(loss) + fabs(lse));
    double g = factor * flce_load(m->grad_output, stat_of(s), none ? i : 0);
    add_row(s, m, i, g, dz, dz_size);
  }
  free(z), free(dz), free(dz_size);
}

static model make_model(const setting* s) {
  const flce_problem* p = &s->problem;
  int64_t n = p->tokens, h = p->hidden, v = p->vocab;
  flce_dtype stat = stat_of(s);
  model m = {.x = test_fill_normal(p->input_dtype, n * h, 1.0),
             .w = test_fill_normal(p->weight_dtype, v * h, s->logit_scale / sqrt((double)h)),
             .bias = test_fill_normal(p->bias_dtype, v, 0.5),
             .class_weight = test_buffer(stat, v),
             .grad_output = test_buffer(stat, n + 1),
             .target = malloc(sizeof(int64_t) * (size_t)(n + 1))};
  for (int64_t k = 0; s->identity && k < v * h; k++)
    flce_store(m.w, p->weight_dtype, k, k % h == k / h ? 1.0 : 0.0);
  for (int64_t j = 0; j < v; j++) flce_store(m.class_weight, stat, j, test_uniform(0.25, 4.0));
  for (int64_t i = 0; i <= n; i++) flce_store(m.grad_output, stat, i, test_uniform(0.5, 3.0));
  for (int64_t i = 0; i < n; i++) {
    m.target[i] = (int64_t)(test_random() % (uint64_t)v);
    if (s->peaked) /* x points at its target's row of W: a tiny loss */
      for (int64_t k = 0; k < h; k++)
        flce_store(m.x, p->input_dtype, i * h + k,
                   16.0 * flce_load(m.w, p->weight_dtype, m.target[i] * h + k));
    if (!s->all_ignored && i % 5 != 3) continue;
    m.target[i] = IGNORE_INDEX;
    /* NaN in an ignored row must not be seen anywhere; the definition never reads it. */
    for (int64_t k = 0; k < h; k++) flce_store(m.x, p->input_dtype, i * h + k, NAN);
  }
  m.loss = test_doubles(n + 1), m.loss_size = test_doubles(n + 1);
  m.dx = test_doubles(n * h), m.dx_size = test_doubles(n * h);
  m.dw = test_doubles(v * h), m.dw_size = test_doubles(v * h);
  m.db = test_doubles(v), m.db_size = test_doubles(v);
  make_expected(s, &m);
  return m;
}

static void free_model(model* m) {
  free(m->x), free(m->w), free(m->bias), free(m->class_weight), free(m->grad_output);
  free(m->target), free(m->loss), free(m->loss_size), free(m->dx), free(m->dx_size);
  free(m->dw), free(m->dw_size), free(m->db), free(m->db_size);
}

/* ---- a run ---- */

typedef struct run {
  flce_plan plan;
  flce_tensors t;
  int64_t forward_gemms, backward_gemms;
  flce_status status;
} run;

static void* plan_buffer(const flce_plan* plan, flce_buffer_id id) {
  int64_t bytes = plan->buffers[id].bytes;
  if (bytes == 0) return NULL;
  void* buffer = malloc((size_t)bytes);
  memset(buffer, 0xff, (size_t)bytes); /* NaN in every dtype: nothing may be read before written */
  return buffer;
}

static void* workspace(int64_t bytes) {
  void* buffer = aligned_alloc(256, (size_t)((bytes + 256) / 256 * 256));
  memset(buffer, 0xff, (size_t)bytes);
  return buffer;
}

/* save=grads: what op.cpp does in a backward. */
static void scale_gradients(const flce_backend* b, const setting* s, run* r, const void* g) {
  const flce_problem* p = &s->problem;
  flce_dtype stat = stat_of(s);
  const void* scalars = r->plan.form == FLCE_FORM_DZ ? r->t.scalars : NULL;
  struct {
    void* data;
    flce_dtype dtype;
    int64_t count;
  } all[] = {{r->t.grad_input, r->plan.grad_input_dtype, p->tokens * p->hidden},
             {r->t.grad_weight, r->plan.grad_weight_dtype, p->vocab * p->hidden},
             {r->t.grad_bias, r->plan.grad_bias_dtype, p->vocab}};
  for (int k = 0; k < 3; k++)
    if (all[k].data)
      CHECK_OK(b->scale_grad(b->self, all[k].data, all[k].dtype, all[k].data, all[k].dtype, g,
                             scalars, stat, all[k].count));
}

static void run_backward(const flce_backend* b, const setting* s, const model* m, run* r) {
  r->t.grad_output = m->grad_output;
  if (r->plan.save == FLCE_SAVE_GRADS) {
    scale_gradients(b, s, r, m->grad_output);
  } else if (r->plan.save != FLCE_SAVE_NOTHING) {
    free(r->t.workspace);
    r->t.workspace = workspace(r->plan.backward_workspace_bytes);
    int64_t before = flce_gemm_count();
    r->status = flce_backward(b, &s->problem, &r->plan, &r->t);
    CHECK(r->status == FLCE_OK, "backward: %s", flce_last_error());
    r->backward_gemms = flce_gemm_count() - before;
  }
}

static run run_all(const setting* s, const model* m, int threads) {
  flce_cpu cpu = test_cpu(threads);
  flce_backend b;
  flce_cpu_backend(&cpu, &b);
  flce_facts facts;
  CHECK_OK(b.facts(b.self, &s->problem, &facts));
  run r = {0};
  r.status = flce_plan_make(&s->problem, &facts, &r.plan);
  CHECK(r.status == FLCE_OK, "plan: %s", flce_last_error());
  if (r.status != FLCE_OK) return r;
  r.t = (flce_tensors){.input = m->x,
                       .linear_weight = m->w,
                       .linear_bias = s->problem.has_bias ? m->bias : NULL,
                       .target = m->target,
                       .class_weight = s->problem.has_class_weight ? m->class_weight : NULL,
                       .loss = plan_buffer(&r.plan, FLCE_BUF_LOSS),
                       .stats = plan_buffer(&r.plan, FLCE_BUF_STATS),
                       .scalars = plan_buffer(&r.plan, FLCE_BUF_SCALARS),
                       .saved = plan_buffer(&r.plan, FLCE_BUF_SAVED),
                       .grad_input = plan_buffer(&r.plan, FLCE_BUF_GRAD_INPUT),
                       .grad_weight = plan_buffer(&r.plan, FLCE_BUF_GRAD_WEIGHT),
                       .grad_bias = plan_buffer(&r.plan, FLCE_BUF_GRAD_BIAS),
                       .workspace = workspace(r.plan.forward_workspace_bytes)};
  int64_t before = flce_gemm_count();
  r.status = flce_forward(&b, &s->problem, &r.plan, &r.t);
  CHECK(r.status == FLCE_OK, "forward: %s", flce_last_error());
  r.forward_gemms = flce_gemm_count() - before;
  if (r.status == FLCE_OK) run_backward(&b, s, m, &r);
  return r;
}

static void free_run(run* r) {
  free(r->t.loss), free(r->t.stats), free(r->t.scalars), free(r->t.saved), free(r->t.grad_input);
  free(r->t.grad_weight), free(r->t.grad_bias), free(r->t.workspace);
}

/* ---- comparison ---- */

/* Steps of rounding that an element passes through: logits, E, products, sums. The products' dtype
 * rounds the logits on the CPU, so that their size enters every error there. */
static double error_of(const setting* s, const run* r) {
  double logits = 1.0 + 4.0 * s->logit_scale;
  double rounding = test_epsilon(r->plan.dtype);
  if (s->peaked) logits += 32.0 * s->logit_scale * s->logit_scale; /* x = 16 W_y */
  return rounding * (4.0 + 2.0 * logits) + test_epsilon(stat_of(s)) * 16.0;
}

static void describe(const setting* s, const run* r, char* text, size_t size) {
  const flce_problem* p = &s->problem;
  snprintf(text, size,
           "%s save %s dtype %s x %s W %s accum %s N %lld H %lld V %lld reduction %d bias %d "
           "weight %d smoothing %g chunks %lld wants %d%d%d",
           flce_cpu_variant(), flce_save_name(p->save), flce_dtype_name(p->dtype),
           flce_dtype_name(p->input_dtype), flce_dtype_name(p->weight_dtype),
           flce_dtype_name(p->accum_dtype), (long long)p->tokens, (long long)p->hidden,
           (long long)p->vocab, p->reduction, p->has_bias, p->has_class_weight, p->label_smoothing,
           (long long)r->plan.chunks, p->want_grad_input, p->want_grad_weight, p->want_grad_bias);
}

static void compare(const setting* s, const run* r, const char* name, const void* actual,
                    flce_dtype dtype, const double* expected, const double* size, int64_t count) {
  char text[400];
  describe(s, r, text, sizeof text);
  CHECK(actual != NULL, "%s is missing, %s", name, text);
  if (!actual) return;
  double error = error_of(s, r) + 2.0 * test_epsilon(dtype), worst = 0.0;
  /* An E that underflows is 0; it would have met a sum of x or W, some hundreds here. */
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

static void check_run(const setting* s, const model* m, const run* r) {
  const flce_problem* p = &s->problem;
  const flce_plan* plan = &r->plan;
  bool none = p->reduction == FLCE_NONE, gradients = plan->save != FLCE_SAVE_NOTHING;
  char text[400];
  describe(s, r, text, sizeof text);
  CHECK(r->forward_gemms == plan->forward_gemms && r->backward_gemms == plan->backward_gemms,
        "GEMMs %lld and %lld, planned %lld and %lld, %s", (long long)r->forward_gemms,
        (long long)r->backward_gemms, (long long)plan->forward_gemms,
        (long long)plan->backward_gemms, text);
  compare(s, r, "loss", r->t.loss, stat_of(s), m->loss, m->loss_size, none ? p->tokens : 1);
  if (gradients && p->want_grad_input && p->tokens > 0)
    compare(s, r, "dX", r->t.grad_input, plan->grad_input_dtype, m->dx, m->dx_size,
            p->tokens * p->hidden);
  if (gradients && p->want_grad_weight)
    compare(s, r, "dW", r->t.grad_weight, plan->grad_weight_dtype, m->dw, m->dw_size,
            p->vocab * p->hidden);
  if (gradients && p->want_grad_bias)
    compare(s, r, "db", r->t.grad_bias, plan->grad_bias_dtype, m->db, m->db_size, p->vocab);
}

static bool same_run(const setting* s, const run* a, const run* b) {
  const flce_problem* p = &s->problem;
  const flce_plan* plan = &a->plan;
  bool same = test_same(a->t.loss, b->t.loss, plan->buffers[FLCE_BUF_LOSS].bytes);
  if (a->t.grad_input)
    same &= test_same(a->t.grad_input, b->t.grad_input,
                      p->tokens * p->hidden * flce_size_of(plan->grad_input_dtype));
  if (a->t.grad_weight)
    same &= test_same(a->t.grad_weight, b->t.grad_weight,
                      p->vocab * p->hidden * flce_size_of(plan->grad_weight_dtype));
  return same;
}

/* One setting, serially and on three threads. */
static void test_setting(const setting* s) {
  model m = make_model(s);
  run serial = run_all(s, &m, 1);
  if (serial.status == FLCE_OK) {
    check_run(s, &m, &serial);
    run threaded = run_all(s, &m, 3);
    char text[400];
    describe(s, &serial, text, sizeof text);
    CHECK(same_run(s, &serial, &threaded), "threads change the bits, %s", text);
    free_run(&threaded);
  }
  free_run(&serial);
  free_model(&m);
}

/* ---- cases ---- */

static setting make_setting(flce_dtype dtype, flce_save save) {
  return (setting){.problem = {.tokens = 23,
                               .hidden = 19,
                               .vocab = 67,
                               .dtype = dtype,
                               .input_dtype = dtype,
                               .weight_dtype = dtype,
                               .bias_dtype = dtype,
                               .accum_dtype = dtype,
                               .logits_dtype = flce_stat_dtype(dtype),
                               .reduction = FLCE_MEAN,
                               .save = save,
                               .want_grad_input = true,
                               .want_grad_weight = true,
                               .want_grad_bias = true,
                               .has_bias = true,
                               .ignore_index = IGNORE_INDEX,
                               .max_memory = 1 << 20},
                   .logit_scale = 2.0};
}

static void test_options(void) {
  for (int dtype = FLCE_F64; dtype <= FLCE_F16; dtype++) {
    for (int save = FLCE_SAVE_NOTHING; save <= FLCE_SAVE_STATS; save++) {
      for (int options = 0; options < 24; options++) {
        setting s = make_setting((flce_dtype)dtype, (flce_save)save);
        s.problem.reduction = (flce_reduction)(options % 3);
        if (save == FLCE_SAVE_GRADS && s.problem.reduction == FLCE_NONE) continue;
        s.problem.has_bias = s.problem.want_grad_bias = options / 3 & 1;
        s.problem.has_class_weight = options / 6 & 1;
        s.problem.label_smoothing = options / 12 & 1 ? 0.1 : 0.0;
        test_setting(&s);
      }
    }
  }
}

/* Budgets from one row of logits up: a ragged last chunk, one chunk, one row. */
static void test_chunks(void) {
  static const int64_t rows[] = {1, 2, 7, 8, 9, 16, 22, 23, 24};
  for (int dtype = FLCE_F64; dtype <= FLCE_BF16; dtype++) {
    for (int save = FLCE_SAVE_LOGITS; save <= FLCE_SAVE_STATS; save++) {
      for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        setting s = make_setting((flce_dtype)dtype, (flce_save)save);
        int64_t align = 16 / flce_size_of(s.problem.dtype);
        int64_t pitch = (s.problem.vocab + align - 1) / align * align;
        s.problem.max_memory = rows[k] * pitch * flce_size_of(s.problem.dtype);
        s.problem.label_smoothing = k % 2 ? 0.2 : 0.0;
        s.problem.accum_dtype = k % 2 ? flce_stat_dtype(s.problem.dtype) : s.problem.dtype;
        test_setting(&s);
      }
    }
  }
}

static void test_wanted(void) {
  for (int save = FLCE_SAVE_LOGITS; save <= FLCE_SAVE_STATS; save++) {
    for (int wanted = 0; wanted < 8; wanted++) {
      setting s = make_setting(FLCE_F32, (flce_save)save);
      s.problem.want_grad_input = wanted & 1;
      s.problem.want_grad_weight = wanted & 2;
      s.problem.want_grad_bias = wanted & 4;
      s.problem.label_smoothing = wanted == 7 ? 0.1 : 0.0;
      s.problem.max_memory = 8 * 68 * 4;
      model m = make_model(&s);
      run r = run_all(&s, &m, 1);
      check_run(&s, &m, &r);
      int64_t gradients = (wanted & 1) + (wanted >> 1 & 1);
      int64_t again = save == FLCE_SAVE_STATS && wanted ? 1 : 0;
      int64_t forward = save == FLCE_SAVE_LOGITS ? 1 : 3, backward = forward * (again + gradients);
      if (save == FLCE_SAVE_GRADS) forward *= 1 + gradients, backward = 0;
      CHECK(r.forward_gemms == forward && r.backward_gemms == backward,
            "GEMMs of save %s wanted %d: %lld and %lld, expected %lld and %lld",
            flce_save_name((flce_save)save), wanted, (long long)r.forward_gemms,
            (long long)r.backward_gemms, (long long)forward, (long long)backward);
      CHECK(!(wanted & 1) == !r.t.grad_input && !(wanted & 2) == !r.t.grad_weight,
            "a gradient that is not wanted has a buffer");
      free_run(&r);
      free_model(&m);
    }
  }
}

static void test_edges(void) {
  for (int dtype = FLCE_F64; dtype <= FLCE_BF16; dtype++) {
    for (int save = FLCE_SAVE_NOTHING; save <= FLCE_SAVE_STATS; save++) {
      setting base = make_setting((flce_dtype)dtype, (flce_save)save), s = base;
      s.problem.tokens = 0;
      test_setting(&s);
      s = base;
      s.problem.vocab = 1;
      test_setting(&s);
      s = base;
      s.problem.hidden = 1;
      test_setting(&s);
      s = base;
      s.all_ignored = true;
      test_setting(&s);
      s = base;
      s.problem.vocab = 300;
      s.problem.hidden = 40;
      s.logit_scale = 4.0;
      s.peaked = true;
      test_setting(&s);
    }
  }
}

/* Autocast: x and W in float32, products in bfloat16; dW in float32 from a float32 sum. */
static void test_autocast(void) {
  for (int save = FLCE_SAVE_LOGITS; save <= FLCE_SAVE_STATS; save++) {
    setting s = make_setting(FLCE_BF16, (flce_save)save);
    s.problem.input_dtype = s.problem.weight_dtype = s.problem.bias_dtype = FLCE_F32;
    s.problem.accum_dtype = FLCE_F32;
    s.problem.max_memory = 9 * 72 * 2;
    test_setting(&s);
    s.problem.label_smoothing = 0.1;
    s.problem.dtype = FLCE_F16;
    test_setting(&s);
  }
}

/* A loss far below what 1 - p holds, and its gradient, which 16 bits of p - 1 would lose. */
static void test_tiny_loss(void) {
  float x[] = {1.0f}, w[] = {0.0f, 40.0f}, loss, dx, dw[2], one = 1.0f;
  int64_t target[] = {1};
  setting s = make_setting(FLCE_F32, FLCE_SAVE_LOGITS);
  s.problem.tokens = s.problem.hidden = 1;
  s.problem.vocab = 2;
  s.problem.has_bias = s.problem.want_grad_bias = false;
  model m = {.x = x, .w = w, .target = target, .grad_output = &one};
  run r = run_all(&s, &m, 1);
  memcpy(&loss, r.t.loss, sizeof loss);
  memcpy(&dx, r.t.grad_input, sizeof dx);
  memcpy(dw, r.t.grad_weight, sizeof dw);
  double p = exp(-40.0), tolerance = 1e-5 * p;
  CHECK(test_close(loss, p, tolerance), "loss is %g, expected %g", loss, p);
  CHECK(test_close(dw[0], p, tolerance) && test_close(dw[1], -p, tolerance), "dW is %g, %g", dw[0],
        dw[1]);
  CHECK(test_close(dx, -40.0 * p, 40.0 * tolerance), "dX is %g, expected %g", dx, -40.0 * p);
  free_run(&r);
}

static void test_cross_entropy(void) {
  for (int dtype = FLCE_F64; dtype <= FLCE_F16; dtype++) {
    for (int options = 0; options < 12; options++) {
      setting s = make_setting((flce_dtype)dtype, FLCE_SAVE_NOTHING);
      s.problem.hidden = s.problem.vocab;
      s.identity = true;
      s.problem.has_bias = false;
      s.problem.reduction = (flce_reduction)(options % 3);
      s.problem.has_class_weight = options / 3 & 1;
      s.problem.label_smoothing = options / 6 & 1 ? 0.1 : 0.0;
      model m = make_model(&s);
      int64_t n = s.problem.tokens, v = s.problem.vocab, stat = flce_size_of(stat_of(&s));
      flce_cpu cpu = test_cpu(1);
      flce_backend b;
      flce_cpu_backend(&cpu, &b);
      run r = {.plan = {.dtype = s.problem.dtype, .save = FLCE_SAVE_NOTHING}};
      r.t = (flce_tensors){.input = m.x,
                           .target = m.target,
                           .class_weight = s.problem.has_class_weight ? m.class_weight : NULL,
                           .loss = malloc((size_t)(n * stat)),
                           .stats = malloc((size_t)(FLCE_STAT_ROWS * n * stat)),
                           .scalars = malloc((size_t)(FLCE_SCALAR_COUNT * stat)),
                           .grad_input = test_buffer(s.problem.dtype, n * v),
                           .grad_output = m.grad_output,
                           .workspace = workspace(flce_cross_entropy_workspace_bytes(&s.problem))};
      CHECK_OK(flce_cross_entropy_forward(&b, &s.problem, &r.t));
      CHECK_OK(flce_cross_entropy_backward(&b, &s.problem, &r.t));
      compare(&s, &r, "cross entropy", r.t.loss, stat_of(&s), m.loss, m.loss_size,
              s.problem.reduction == FLCE_NONE ? n : 1);
      compare(&s, &r, "dz", r.t.grad_input, s.problem.dtype, m.dx, m.dx_size, n * v);
      free_run(&r);
      free_model(&m);
    }
  }
}

static flce_status plan_of(const setting* s, flce_plan* plan) {
  flce_cpu cpu = test_cpu(1);
  flce_backend b;
  flce_cpu_backend(&cpu, &b);
  flce_facts facts;
  CHECK_OK(b.facts(b.self, &s->problem, &facts));
  return flce_plan_make(&s->problem, &facts, plan);
}

static void test_plan(void) {
  setting s = make_setting(FLCE_F32, FLCE_SAVE_GRADS);
  flce_plan plan;
  s.problem.max_memory = 8 * 68 * 4;
  CHECK_OK(plan_of(&s, &plan));
  char text[4096], small[16];
  int64_t length = flce_plan_text(&plan, text, sizeof text);
  CHECK(length == (int64_t)strlen(text), "length %lld of a text of %zu", (long long)length,
        strlen(text));
  CHECK(strstr(text, "save=grads form=exp dtype=float32") &&
            strstr(text, "chunk_rows=8 chunks=3") &&
            strstr(text, "forward_gemms=9 backward_gemms=0") && strstr(text, "grad_weight"),
        "plan: %s", text);
  CHECK(flce_plan_text(&plan, small, sizeof small) == length && strlen(small) == 15 &&
            strncmp(small, text, 15) == 0,
        "a short buffer: %s", small);
  CHECK(flce_plan_text(&plan, NULL, 0) == length, "no buffer");
}

static void expect_refusal(const setting* s, const char* part) {
  flce_plan plan;
  flce_status status = plan_of(s, &plan);
  CHECK(status == FLCE_INVALID_ARGUMENT, "status %s for %s", flce_status_name(status), part);
  CHECK(strstr(flce_last_error(), part), "the sentence: %s; expected %s", flce_last_error(), part);
}

static void test_refusals(void) {
  setting base = make_setting(FLCE_F32, FLCE_SAVE_STATS), s = base;
  s.problem.max_memory = 68 * 4 - 1;
  expect_refusal(&s, "max_memory: expected at least one row of logits, 272 bytes, got 271");
  s = base;
  s.problem.save = FLCE_SAVE_GRADS;
  s.problem.reduction = FLCE_NONE;
  expect_refusal(&s, "save: expected");
  s = base;
  s.problem.label_smoothing = 1.5;
  expect_refusal(&s, "label_smoothing: expected 0 <= label_smoothing <= 1, got 1.5");
  s = base;
  s.problem.vocab = 0;
  expect_refusal(&s, "vocab >= 1");

  s = base;
  model m = make_model(&s);
  m.target[4] = s.problem.vocab;
  flce_cpu cpu = test_cpu(1);
  flce_backend b;
  flce_cpu_backend(&cpu, &b);
  flce_plan plan;
  CHECK_OK(plan_of(&s, &plan));
  flce_tensors t = {.input = m.x,
                    .linear_weight = m.w,
                    .linear_bias = m.bias,
                    .target = m.target,
                    .scalars = plan_buffer(&plan, FLCE_BUF_SCALARS),
                    .workspace = workspace(plan.forward_workspace_bytes)};
  int64_t before = flce_gemm_count();
  flce_status status = flce_forward(&b, &s.problem, &plan, &t);
  CHECK(status == FLCE_TARGET_OUT_OF_RANGE && flce_gemm_count() == before,
        "a target out of range gives %s", flce_status_name(status));
  CHECK(strstr(flce_last_error(), "target[4] is 67: expected 0 <= target < 67"), "the sentence: %s",
        flce_last_error());
  free(t.scalars), free(t.workspace);
  free_model(&m);
}

int main(void) {
  test_seed(4);
  for (int index = 0; test_next_variant(&index);) {
    test_options();
    test_chunks();
    test_wanted();
    test_edges();
    test_autocast();
    test_tiny_loss();
    test_cross_entropy();
  }
  test_plan();
  test_refusals();
  return test_verdict();
}
