/* A problem for the engine, its results by definition, and one run of it. */
#ifndef FLCE_TESTS_ENGINE_CASE_H
#define FLCE_TESTS_ENGINE_CASE_H

#include "comm.h"
#include "test.h"

enum { IGNORE_INDEX = -100 };

typedef struct setting {
  flce_problem problem;
  double std;                         /* approximate standard deviation of the logits */
  bool all_ignored, peaked, identity; /* identity: W = 1, the logits are x */
  bool token_weight, temperature, num_items;
  bool upstream;         /* gradients from lse and, if it is wanted, from the entropy */
  bool consumes;         /* the backward may overwrite what the forward saved */
  bool fused;            /* the backend has fused_logits and grad_weight_gemm */
  bool skips;            /* fused_logits and grad_weight_gemm skip rows */
  int64_t seed;          /* of save=samples */
  const flce_comm* comm; /* of a rank of a sharded vocabulary */
} setting;

/* Inputs, and the loss and gradients by definition. */
typedef struct model {
  void *x, *w, *bias, *class_weight, *grad_output;
  void *token_weight, *temperature, *num_items, *grad_lse, *grad_entropy;
  void* probabilities; /* float32 */
  void* start; /* initial content of the tensor that dW is added to, in added_dtype; NaN in its
                  padding */
  int64_t* target;
  double *loss, *dx, *dw, *db; /* expected loss; expected gradients for grad_output */
  /* Sums of the magnitudes of each gradient's terms, to which rounding errors are relative. */
  double *dx_size, *dw_size, *db_size, *loss_size;
  flce_tensors
      teacher; /* of a divergence, set by its test: what the loss is then has no definition */
} model;

typedef struct run {
  flce_problem problem;
  flce_plan plan; /* of the forward, then of the backward */
  flce_tensors t;
  int64_t forward_gemms, backward_gemms;
  flce_status status;
} run;

/* All gradients of a small problem with mean reduction and a bias. */
setting make_setting(flce_dtype dtype, flce_save save);
flce_dtype stat_of(const setting* s);

model make_model(const setting* s);
void free_model(model* m);

/* A buffer filled with NaN (bytes 0xff); NULL if the plan gives it no bytes. */
void* plan_buffer(const flce_plan* plan, flce_buffer_id id);
/* The workspace of the forward (FLCE_IN_FORWARD) or the backward. The sanitizer reports a write or
 * read beyond a buffer, though all buffers are one allocation: what lies between them is poisoned.
 */
void* workspace(const flce_plan* plan, unsigned pass);

/* plain_fused.c: adds the fused logits GEMM and the dW GEMM with db to the backend, also to its
 * facts. */
void plain_fused(flce_backend* backend, bool skips);

/* The plan of a setting for the CPU, without FLCE_BLOCKS. */
flce_status plan_on_cpu(const setting* s, flce_plan* plan);
/* The plan of a run and its tensors, and then those of its backward. */
run open_run(const flce_backend* b, const setting* s, const model* m);
void open_backward(const flce_backend* b, const setting* s, const model* m, run* r);
run run_all(const setting* s, const model* m, int threads);
void free_run(run* r);
void describe(const setting* s, const run* r, char* text, size_t size);
/* Checks |actual - expected| against the rounding errors of terms of this size. */
void compare(const setting* s, const run* r, const char* name, const void* actual, flce_dtype dtype,
             const double* expected, const double* size, int64_t count);
void check_run(const setting* s, const model* m, const run* r);
/* Runs one setting serially and on three threads: with GEMMs and passes, with the fused GEMMs, and
 * with fused GEMMs that skip rows. */
void test_setting(const setting* s);

#endif
