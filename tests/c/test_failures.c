/* Steps that fail: every call of the backend, of its GEMM and of the collectives fails once, in a
 * vocabulary of one process and on a rank of a sharded one. The other rank is made up: it sends
 * what this rank sends. Results are written late, at the wait; what the engine leaves in flight is
 * written after the call's buffers are gone, which AddressSanitizer sees. The core allocates
 * nothing: what the binding allocates fails in tests/core/test_faults.py. */
#include "engine_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 2 };

/* ---- what fails ---- */

/* The step makes its calls in one order. The call `fails_at` fails: a collective or its wait before
 * it has an effect or, if fails_late, after. */
static int g_calls, g_fails_at;
static bool g_fails_late;
static flce_status g_injected;

static bool fails_now(void) {
  return g_calls++ == g_fails_at;
}

static flce_status failure(flce_status status) {
  return flce_fail(g_injected = status, "call %d fails", g_fails_at);
}

/* Whatever a function of the backend gives has to come out. */
static flce_status backend_failure(void) {
  static const flce_status all[] = {FLCE_INVALID_ARGUMENT, FLCE_TARGET_OUT_OF_RANGE,
                                    FLCE_OUT_OF_MEMORY,    FLCE_UNSUPPORTED,
                                    FLCE_GEMM_FAILED,      FLCE_DEVICE_ERROR};
  return failure(all[g_fails_at % (int)(sizeof all / sizeof *all)]);
}

static flce_backend g_plain; /* without failures */

#define UNPACK(...) __VA_ARGS__
/* X(function, its parameters after self, their names) */
#define ONE_ARGUMENT(X, name, type) X(name, (const type* a), (a))
#define FUNCTIONS(X)                                                                             \
  X(gemm, (const flce_gemm* a, void* b, int64_t c), (a, b, c))                                   \
  X(fill, (void* a, int b, int64_t c), (a, b, c))                                                \
  X(prepare, (const flce_problem* a, const flce_tensors* b, void* c, int d, bool e),             \
    (a, b, c, d, e))                                                                             \
  X(compact_rows, (const flce_problem* a, const int64_t* b, void* c), (a, b, c))                 \
  X(blank_rows, (const flce_rows* a, int64_t b, void* c, flce_dtype d, int64_t e),               \
    (a, b, c, d, e))                                                                             \
  X(fused_logits, (const flce_gemm* a, const flce_rows* b, void* c), (a, b, c))                  \
  X(fused_statistics, (const flce_gemm* a, const flce_rows* b, const void* c, void* d, void* e), \
    (a, b, c, d, e))                                                                             \
  X(fused_exp, (const flce_gemm* a, const flce_rows* b, void* c), (a, b, c))                     \
  X(row_coefficients,                                                                            \
    (const flce_rows* a, const flce_shard* b, const flce_upstream* c, const void* d, void* e),   \
    (a, b, c, d, e))                                                                             \
  X(reduce, (void* a, const void* b, int64_t c, const void* d, flce_dtype e, bool f),            \
    (a, b, c, d, e, f))                                                                          \
  X(grad_weight_gemm, (const flce_gemm* a, const int64_t* b, const void* c, void* d, bool e),    \
    (a, b, c, d, e))                                                                             \
  X(scale_coefficients, (const flce_rows* a, void* b, float* c, int64_t d), (a, b, c, d))        \
  X(order_targets, (const flce_problem* a, const int64_t* b, void* c), (a, b, c))                \
  ONE_ARGUMENT(X, cast, flce_cast_args)                                                          \
  ONE_ARGUMENT(X, stat_rows, flce_rows)                                                          \
  ONE_ARGUMENT(X, exp_rows, flce_rows)                                                           \
  ONE_ARGUMENT(X, grad_rows, flce_grad_rows_args)                                                \
  ONE_ARGUMENT(X, scale_rows, flce_scale_rows_args)                                              \
  ONE_ARGUMENT(X, finish_grad_input, flce_grad_input_args)                                       \
  ONE_ARGUMENT(X, column_sum, flce_column_sum_args)                                              \
  ONE_ARGUMENT(X, finish_grad_weight, flce_grad_weight_args)                                     \
  ONE_ARGUMENT(X, finish_grad_bias, flce_grad_bias_args)                                         \
  ONE_ARGUMENT(X, add_block, flce_add_block_args)                                                \
  ONE_ARGUMENT(X, shard_targets, flce_shard_targets_args)                                        \
  ONE_ARGUMENT(X, pack_statistics, flce_pack_args)                                               \
  ONE_ARGUMENT(X, merge_statistics, flce_merge_args)                                             \
  ONE_ARGUMENT(X, sum_partial_dx, flce_sum_dx_args)                                              \
  ONE_ARGUMENT(X, sample_rows, flce_sample_rows_args)                                            \
  ONE_ARGUMENT(X, sampled_grad_input, flce_sampled_input_args)                                   \
  ONE_ARGUMENT(X, order_samples, flce_order_samples_args)                                        \
  ONE_ARGUMENT(X, sampled_grad_weight, flce_sampled_weight_args)                                 \
  ONE_ARGUMENT(X, sampled_grad_bias, flce_sampled_bias_args)                                     \
  X(top_classes, (const flce_rows* a, void* b), (a, b))                                          \
  ONE_ARGUMENT(X, class_logits, flce_class_logits_args)                                          \
  X(class_gradients, (const flce_rows* a, const float* b), (a, b))                               \
  ONE_ARGUMENT(X, tail_rows, flce_rows)                                                          \
  ONE_ARGUMENT(X, divergence_rows, flce_divergence_args)                                         \
  X(scale_grads, (const flce_scaled* a, int b, const void* c, const void* d, flce_dtype e),      \
    (a, b, c, d, e))

/* How often each has failed. */
#define COUNTER(name, parameters, arguments) static int g_failed_##name;
FUNCTIONS(COUNTER)
static int g_failed_facts;

#define FAILING(name, parameters, arguments)                         \
  static flce_status failing_##name(void* self, UNPACK parameters) { \
    if (fails_now()) {                                               \
      g_failed_##name++;                                             \
      return backend_failure();                                      \
    }                                                                \
    return g_plain.name(self, UNPACK arguments);                     \
  }
FUNCTIONS(FAILING)

/* A plan asks for facts outside of the calls of a step, so these fail in test_facts alone. */
static int g_facts_left = 1 << 30;

static flce_status failing_facts(void* self, const flce_problem* problem, flce_facts* facts) {
  if (g_facts_left-- > 0) return g_plain.facts(self, problem, facts);
  g_failed_facts++;
  return flce_fail(FLCE_DEVICE_ERROR, "no facts");
}

/* A function that the table gains has no counter until it is in FUNCTIONS. */
static void check_that_all_have_failed(void) {
#define HAS_FAILED(name) CHECK(g_failed_##name > 0, "%s has not failed", #name);
  FLCE_BACKEND_FUNCTIONS(HAS_FAILED)
  FLCE_FUSED_FUNCTIONS(HAS_FAILED)
}

/* The GEMM below the CPU's table fails too. */
static flce_status (*g_gemm)(void* context, const flce_gemm* gemm);

static flce_status failing_inner_gemm(void* context, const flce_gemm* gemm) {
  if (fails_now()) return failure(FLCE_GEMM_FAILED);
  return g_gemm(context, gemm);
}

static void failing_backend(flce_cpu* cpu, const setting* s, flce_backend* made) {
  g_gemm = test_cpu(1).gemm;
  cpu->gemm = failing_inner_gemm;
  flce_cpu_backend(cpu, &g_plain);
  if (s->fused) plain_fused(&g_plain, s->skips);
  *made = g_plain;
#define REPLACE(name, parameters, arguments) made->name = failing_##name;
  FUNCTIONS(REPLACE)
  made->facts = failing_facts;
}

/* ---- collectives ---- */

typedef struct collective {
  const char* sent;
  char* recv;
  int64_t bytes;
  bool to_all, flies;
} collective;

typedef struct rank_comm {
  bool has_buffers; /* the collectives send from memory of their own */
  void* buffers[FLCE_COLLECTIVES];
  int64_t sizes[FLCE_COLLECTIVES];
  collective all[FLCE_COLLECTIVES];
  unsigned asked; /* to begin, and not waited for with success */
  int abandons;
} rank_comm;

/* Both ranks have sent the same, and this is rank 0. */
static void complete(collective* c, bool keeps_own) {
  for (int r = keeps_own ? 1 : 0; r < RANKS; r++)
    memmove(c->recv + r * c->bytes, c->sent, (size_t)c->bytes);
  c->flies = false;
}

static flce_status begin(rank_comm* comm, flce_collective_id id, collective given) {
  bool fails = fails_now();
  comm->asked |= 1u << id;
  if (fails && !g_fails_late) return failure(FLCE_COMM_FAILED);
  comm->all[id] = given;
  return fails ? failure(FLCE_COMM_FAILED) : FLCE_OK;
}

static flce_status all_gather(void* self, flce_collective_id id, void* recv, const void* send,
                              int64_t bytes) {
  return begin(self, id, (collective){send, recv, bytes, false, true});
}

static flce_status all_to_all(void* self, flce_collective_id id, void* recv, const void* send,
                              int64_t bytes) {
  return begin(self, id, (collective){send, recv, bytes, true, true});
}

static flce_status send_buffer(void* self, flce_collective_id id, int64_t bytes, void** memory) {
  rank_comm* comm = self;
  if (fails_now()) return failure(FLCE_COMM_FAILED);
  if (comm->has_buffers && (!comm->buffers[id] || comm->sizes[id] < bytes)) {
    free(comm->buffers[id]);
    comm->buffers[id] = calloc(1, (size_t)bytes + 1);
    comm->sizes[id] = bytes;
  }
  *memory = comm->buffers[id];
  return FLCE_OK;
}

static flce_status wait_for(void* self, flce_collective_id id) {
  rank_comm* comm = self;
  bool fails = fails_now();
  if (fails && !g_fails_late) return failure(FLCE_COMM_FAILED);
  CHECK(comm->all[id].flies, "nothing to wait for");
  complete(&comm->all[id], comm->buffers[id] != NULL);
  if (fails) return failure(FLCE_COMM_FAILED);
  comm->asked &= ~(1u << id);
  return FLCE_OK;
}

/* Writes what is in flight while its memory is there. */
static void abandon(void* self, unsigned in_flight) {
  rank_comm* comm = self;
  comm->abandons++;
  CHECK(in_flight == comm->asked, "in flight %u, abandoned %u", comm->asked, in_flight);
  for (int id = 0; id < FLCE_COLLECTIVES; id++)
    if (in_flight >> id & 1 && comm->all[id].flies)
      complete(&comm->all[id], comm->buffers[id] != NULL);
}

/* ---- steps ---- */

/* What a step gives: FNV-1a of the bytes of its loss and gradients. */
static uint64_t digest(uint64_t sum, const void* data, int64_t bytes) {
  for (int64_t i = 0; data && i < bytes; i++)
    sum = (sum ^ ((const unsigned char*)data)[i]) * UINT64_C(0x100000001b3);
  return sum;
}

static uint64_t digest_of(const setting* s, const run* r) {
  const flce_problem* p = &s->problem;
  const flce_plan* plan = &r->plan;
  uint64_t sum = digest(UINT64_C(0xcbf29ce484222325), r->t.loss, flce_size_of(stat_of(s)));
  sum = digest(sum, r->t.grad_input,
               flce_input_rows(p) * p->shape.hidden * flce_size_of(plan->grad_input_dtype));
  sum = digest(sum, r->t.grad_weight,
               p->shape.weight_rows * p->shape.hidden * flce_size_of(plan->grad_weight_dtype));
  return digest(sum, r->t.grad_bias, p->shape.weight_rows * flce_size_of(plan->grad_bias_dtype));
}

/* The tensors of the classes of each row, all of them class 1 unless the forward finds them. */
static void open_row_classes(const setting* s, run* r) {
  int64_t count = s->problem.shape.tokens * s->problem.wants.row_classes;
  if (count == 0) return;
  r->t.classes = test_buffer(FLCE_F64, count);
  for (int64_t i = 0; i < count; i++) r->t.classes[i] = 1;
  r->t.class_logits = test_doubles(count);
}

/* What the binding runs in a backward. */
static flce_status backward(const flce_backend* b, const setting* s, const model* m, run* r) {
  bool with_classes = s->problem.wants.row_classes > 0 && s->problem.save == FLCE_SAVE_STATS;
  r->problem.backward.has_grad_classes = with_classes;
  r->problem.backward.has_grad_tail = with_classes && s->problem.wants.tail;
  open_backward(b, s, m, r);
  if (with_classes) r->t.grad_classes = r->t.class_logits;
  if (r->problem.backward.has_grad_tail)
    r->t.grad_tail = r->t.class_logits; /* as many zeros, at least */
  if (flce_has_backward(r->plan.strategy))
    return flce_backward(b, s->comm, &r->problem, &r->plan, &r->t);
  if (r->plan.strategy != FLCE_SAVE_GRADS) return FLCE_OK;
  const flce_plan* plan = &r->plan;
  const flce_scaled grad = {r->t.grad_bias, r->t.grad_bias, plan->grad_bias_dtype,
                            plan->grad_bias_dtype, s->problem.shape.weight_rows};
  const void* scalars = plan->dtype == FLCE_F16 ? r->t.scalars : NULL;
  return b->scale_grads(b->self, &grad, 1, m->grad_output, scalars, stat_of(s));
}

/* Forward and backward; true if nothing has failed. The buffers are gone afterwards. */
static bool step(const flce_backend* b, const setting* s, const model* m, rank_comm* comm,
                 uint64_t* made) {
  run r = open_run(b, s, m);
  CHECK(r.status == FLCE_OK, "plan: %s", flce_last_error());
  int64_t input = flce_input_rows(&s->problem) * s->problem.shape.hidden *
                  flce_size_of(s->problem.dtypes.input);
  void* x = test_buffer(FLCE_F64, input / 8 + 1); /* a collective may send from it */
  memcpy(x, m->x, (size_t)input);
  r.t.input = x;
  open_row_classes(s, &r);
  const flce_tensors teacher = r.t; /* of the same x and W, with other final logits */
  if (s->problem.divergence.teacher) r.t.teacher = &teacher;
  g_calls = 0, comm->asked = 0, comm->abandons = 0;
  flce_status status = flce_forward(b, s->comm, &r.problem, &r.plan, &r.t);
  if (status == FLCE_OK) status = backward(b, s, m, &r);
  *made = digest_of(s, &r);
  bool failed = g_calls > g_fails_at;
  CHECK(failed ? status == g_injected : status == FLCE_OK, "call %d of %d: status %s, %s",
        g_fails_at, g_calls, flce_status_name(status), flce_last_error());
  char expected[32];
  snprintf(expected, sizeof expected, "call %d fails", g_fails_at);
  CHECK(!failed || strcmp(flce_last_error(), expected) == 0, "error: %s", flce_last_error());
  CHECK(failed ? g_calls == g_fails_at + 1 : comm->asked == 0, "%d calls after the failure",
        g_calls - g_fails_at - 1);
  CHECK(comm->abandons == (comm->asked != 0),
        "call %d of save %s: in flight %u, abandoned %d times", g_fails_at,
        flce_save_name(s->problem.save), comm->asked, comm->abandons);
  CHECK(test_same(x, m->x, input), "call %d has written to x", g_fails_at);
  free_run(&r);
  free(x), free(r.t.classes), free(r.t.class_logits);
  for (int id = 0; id < FLCE_COLLECTIVES; id++)
    if (comm->all[id].flies) complete(&comm->all[id], false);
  return !failed;
}

static void test_step(const setting* given, bool has_buffers) {
  rank_comm comm = {.has_buffers = has_buffers};
  const flce_comm table = {&comm, send_buffer, all_gather, all_to_all, wait_for, abandon};
  flce_cpu cpu = test_cpu(1);
  flce_backend b;
  setting s = *given;
  model m = make_model(&s);
  failing_backend(&cpu, &s, &b);
  bool sharded = s.problem.shard.ranks > 1;
  if (sharded) s.comm = &table;
  uint64_t first, again, failed;
  g_fails_at = 1 << 30;
  CHECK(step(&b, &s, &m, &comm, &first), "a call without a failure");
  for (int late = 0; late <= sharded; late++) { /* only collectives fail late */
    g_fails_late = late;
    for (g_fails_at = 0; !step(&b, &s, &m, &comm, &failed); g_fails_at++) {
      int at = g_fails_at; /* the next call is as without a failure */
      g_fails_at = 1 << 30;
      CHECK(step(&b, &s, &m, &comm, &again) && again == first, "a call after a failure");
      g_fails_at = at;
    }
    CHECK(g_fails_at >= 5, "%d calls", g_fails_at);
  }
  for (int id = 0; id < FLCE_COLLECTIVES; id++) free(comm.buffers[id]);
  free_model(&m);
}

static const flce_save kSaves[] = {FLCE_SAVE_NOTHING, FLCE_SAVE_LOGITS, FLCE_SAVE_GRADS,
                                   FLCE_SAVE_STATS, FLCE_SAVE_SAMPLES};

/* A setting of `save`; `way` chooses dtype, chunks, options and kernels. */
static setting make_way(flce_save save, int way) {
  bool sampled = save == FLCE_SAVE_SAMPLES, float16 = way % 3 == 2;
  setting s = make_setting(float16 ? FLCE_F16 : way % 3 ? FLCE_BF16 : FLCE_F32, save);
  flce_problem* p = &s.problem;
  p->shape.tokens = p->shape.rows = 30;
  p->sampling.eps = 0x1p-4;
  p->has.class_weight = way & 4;
  if (way & 2) p->loss.label_smoothing = 0.2;
  if (way % 5 == 0) p->memory.bound = 6 * 67 * 8; /* several chunks */
  if (save == FLCE_SAVE_NOTHING)
    p->wants.grad_input = p->wants.grad_weight = p->wants.grad_bias = false;
  s.fused = way >= 6 && !sampled && !float16;
  return s;
}

static void test_ranks(void) {
  for (int k = 0; k < 5; k++)
    for (int way = 0; way < 12; way++) {
      setting s = make_way(kSaves[k], way);
      flce_problem* p = &s.problem;
      p->shard.ranks = RANKS, p->shard.classes = p->shape.vocab;
      p->shard.input_is_sharded = way & 1;
      p->shard.wide_terms = (way & 2) && way % 3;
      test_step(&s, way & 2);
    }
}

static void test_one_process(void) {
  for (int k = 0; k < 5; k++)
    for (int way = 0; way < 12; way++) {
      setting s = make_way(kSaves[k], way);
      flce_problem* p = &s.problem;
      bool narrow = way == 11 && kSaves[k] != FLCE_SAVE_SAMPLES; /* float16 in form dz */
      if (narrow) s.fused = true, p->loss.softcap = 5.0;
      if (s.fused && way & 1)
        s.skips = true, p->shape.rows = 24; /* the rows that are not ignored */
      if (way == 3) p->dtypes.accum = FLCE_F32, p->dtypes.gemm = FLCE_BF16; /* copies of x and W */
      if (way >= 4 && !narrow && kSaves[k] != FLCE_SAVE_SAMPLES) {
        p->wants.topk =
            way & 1 && !s.fused ? 2 : 0; /* the plain fused GEMM has no rows of E to search */
        p->wants.row_classes = p->wants.topk > 0 ? flce_candidates(p->wants.topk) : 2;
        p->wants.tail = !s.fused; /* nor does it write logits */
      }
      test_step(&s, false);
    }
}

/* Divergences, whose gradients the forward makes, on one rank and on two. */
static void test_divergences(bool draws) {
  for (int ranks = 1; ranks <= RANKS; ranks++)
    for (int way = 0; way < 6; way++) {
      setting s = make_way(draws ? FLCE_SAVE_SAMPLES : FLCE_SAVE_GRADS, way);
      flce_problem *p = &s.problem, teacher;
      p->save = FLCE_SAVE_GRADS, p->sampling.wanted = draws;
      p->has.class_weight = false, p->loss.label_smoothing = 0.0;
      if (ranks > 1) p->shard.ranks = ranks, p->shard.classes = p->shape.vocab;
      teacher = *p;
      teacher.loss.logit_scale = 0.5;
      teacher.reduction = FLCE_SUM, teacher.save = FLCE_SAVE_NOTHING;
      teacher.wants.grad_input = teacher.wants.grad_weight = teacher.wants.grad_bias = false;
      p->divergence.kind = (flce_divergence)(1 + way % FLCE_DIVERGENCE_COUNT);
      p->divergence.beta = 0.3, p->divergence.hard_weight = way & 1 ? 0.25 : 0.0;
      p->divergence.teacher = &teacher;
      test_step(&s, way & 2);
    }
}

/* A plan whose facts fail, the first and the second time that it asks. */
static void test_facts(void) {
  flce_cpu cpu = test_cpu(1);
  for (int ranks = 1; ranks <= RANKS; ranks++)
    for (int at = 0; at < ranks; at++) {
      setting s = make_way(FLCE_SAVE_AUTO, 0);
      flce_backend b;
      flce_plan plan;
      if (ranks > 1) s.problem.shard.ranks = ranks, s.problem.shard.classes = s.problem.shape.vocab;
      failing_backend(&cpu, &s, &b);
      g_facts_left = at;
      flce_status status = flce_plan_call(&b, &s.problem, &plan);
      g_facts_left = 1 << 30;
      CHECK(status == FLCE_DEVICE_ERROR && strcmp(flce_last_error(), "no facts") == 0,
            "facts %d of %d ranks: %s, %s", at, ranks, flce_status_name(status), flce_last_error());
      CHECK_OK(flce_plan_call(&b, &s.problem, &plan));
    }
}

/* Cross entropy of given logits: no plan, no collectives. */
static void test_given_logits(void) {
  for (int with = 0; with < 2; with++) {
    setting s = make_way(FLCE_SAVE_NOTHING, 0);
    flce_problem* p = &s.problem;
    p->shape.hidden = p->shape.vocab, s.identity = true, p->wants.entropy = with;
    model m = make_model(&s);
    flce_cpu cpu = test_cpu(1);
    flce_backend b;
    failing_backend(&cpu, &s, &b);
    int64_t bytes = flce_cross_entropy_workspace_bytes(p),
            logits = p->shape.tokens * p->shape.vocab;
    flce_tensors t = {.input = m.x, .target = m.target, .grad_output = m.grad_output};
    t.loss = test_doubles(1), t.scalars = test_doubles(FLCE_SCALAR_COUNT);
    t.stats = test_doubles(FLCE_STAT_COUNT * p->shape.tokens),
    t.workspace = test_doubles(bytes / 8 + 1);
    t.grad_input = test_doubles(logits);
    uint64_t made[2] = {0, 0};
    for (g_fails_at = -1;; g_fails_at++) { /* -1: nothing fails */
      g_calls = 0;
      flce_status status = flce_cross_entropy_forward(&b, p, &t);
      if (status == FLCE_OK) status = flce_cross_entropy_backward(&b, p, &t);
      bool failed = g_fails_at >= 0 && g_calls > g_fails_at;
      CHECK(failed ? status == g_injected && g_calls == g_fails_at + 1 : status == FLCE_OK,
            "call %d of %d: %s", g_fails_at, g_calls, flce_last_error());
      if (failed) continue;
      made[g_fails_at >= 0] = digest(digest(0, t.loss, 4), t.grad_input, logits * 4);
      if (g_fails_at >= 0) break;
    }
    CHECK(g_fails_at == 5 && made[0] == made[1], "%d calls", g_fails_at);
    free(t.loss), free(t.scalars), free(t.stats), free(t.workspace), free(t.grad_input);
    free_model(&m);
  }
}

int main(void) {
  test_seed(11);
  test_ranks();
  test_one_process();
  test_set_variable("FLCE_BLOCKS", "8x64");
  test_ranks();
  test_one_process();
  test_set_variable("FLCE_BLOCKS", NULL);
  test_divergences(false);
  test_divergences(true);
  test_facts();
  test_given_logits();
  check_that_all_have_failed();
  return test_verdict();
}
