/* A rank of a sharded vocabulary whose call fails: every call of the backend and of the collectives
 * fails once. The other rank is made up: it sends what this rank sends. Results are written late,
 * at the wait; what the engine leaves in flight is written after the call's buffers are gone, which
 * AddressSanitizer sees. */
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
  X(grad_rows, (const flce_rows* a, double b, bool c, bool d), (a, b, c, d))                     \
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
  ONE_ARGUMENT(X, sampled_grad_bias, flce_sampled_bias_args)

#define FAILING(name, parameters, arguments)                         \
  static flce_status failing_##name(void* self, UNPACK parameters) { \
    if (fails_now()) return failure(FLCE_DEVICE_ERROR);              \
    return g_plain.name(self, UNPACK arguments);                     \
  }
FUNCTIONS(FAILING)

static void failing_backend(flce_cpu* cpu, bool fused, flce_backend* made) {
  flce_cpu_backend(cpu, &g_plain);
  if (fused) plain_fused(&g_plain, false);
  *made = g_plain;
#define REPLACE(name, parameters, arguments) made->name = failing_##name;
  FUNCTIONS(REPLACE)
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
  if (comm->has_buffers && !comm->buffers[id]) comm->buffers[id] = calloc(1, (size_t)bytes + 1);
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

/* Forward and backward; true if nothing has failed. The buffers are gone afterwards. */
static bool step(const flce_backend* b, const setting* s, const model* m, rank_comm* comm,
                 double* loss) {
  run r = open_run(b, s, m);
  CHECK(r.status == FLCE_OK, "plan: %s", flce_last_error());
  int64_t input = flce_input_rows(&s->problem) * s->problem.hidden;
  void* x = test_buffer(s->problem.input_dtype, input); /* a collective may send from it */
  memcpy(x, m->x, (size_t)(input * flce_size_of(s->problem.input_dtype)));
  r.t.input = x;
  g_calls = 0, comm->asked = 0, comm->abandons = 0;
  flce_status status = flce_forward(b, s->comm, &r.problem, &r.plan, &r.t);
  if (status == FLCE_OK) {
    *loss = flce_load(r.t.loss, stat_of(s), 0);
    open_backward(b, s, m, &r);
    if (flce_has_backward(r.plan.save))
      status = flce_backward(b, s->comm, &r.problem, &r.plan, &r.t);
  }
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
  free_run(&r);
  free(x);
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
  failing_backend(&cpu, s.fused, &b);
  s.comm = &table;
  double loss = 0.0, again = 0.0;
  int most = 0;
  for (int late = 0; late < 2; late++) {
    g_fails_late = late;
    for (g_fails_at = 0; !step(&b, &s, &m, &comm, &loss); g_fails_at++) {
      int at = g_fails_at; /* the next call is as without a failure */
      g_fails_at = 1 << 30;
      CHECK(step(&b, &s, &m, &comm, &again), "a call after a failure");
      g_fails_at = at;
    }
    CHECK(loss == again && isfinite(loss), "loss %g, after failures %g", loss, again);
    most = g_fails_at;
  }
  CHECK(most >= 10, "%d calls", most);
  for (int id = 0; id < FLCE_COLLECTIVES; id++) free(comm.buffers[id]);
  free_model(&m);
}

int main(void) {
  test_seed(11);
  const flce_save saves[] = {FLCE_SAVE_NOTHING, FLCE_SAVE_LOGITS, FLCE_SAVE_GRADS, FLCE_SAVE_STATS,
                             FLCE_SAVE_SAMPLES};
  for (int k = 0; k < 5; k++)
    for (int way = 0; way < 12; way++) {
      bool sampled = saves[k] == FLCE_SAVE_SAMPLES, float16 = way % 3 == 2;
      setting s = make_setting(float16 ? FLCE_F16 : way % 3 ? FLCE_BF16 : FLCE_F32, saves[k]);
      flce_problem* p = &s.problem;
      p->ranks = RANKS, p->classes = p->vocab, p->tokens = p->rows = 30;
      p->input_is_sharded = way & 1;
      p->wide_terms = (way & 2) && way % 3;
      p->gradient_eps = 0x1p-4;
      p->has_class_weight = way & 4;
      if (way & 2) p->loss.label_smoothing = 0.2;
      if (way % 5 == 0) p->max_memory = 6 * 67 * 8; /* several chunks */
      if (saves[k] == FLCE_SAVE_NOTHING)
        p->want_grad_input = p->want_grad_weight = p->want_grad_bias = false;
      s.fused = way >= 6 && !sampled && !float16;
      test_step(&s, way & 2);
    }
  return test_verdict();
}
