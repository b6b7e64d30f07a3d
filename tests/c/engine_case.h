/* A problem for the engine, what it has to give by definition, and a run of it. */
#ifndef FLCE_TESTS_ENGINE_CASE_H
#define FLCE_TESTS_ENGINE_CASE_H

#include "test.h"

enum { IGNORE_INDEX = -100 };

typedef struct setting {
  flce_problem problem;
  double entropy_sum;                 /* standard deviation of the logits, about */
  bool all_ignored, peaked, identity; /* identity: W = 1, the logits are x */
  bool token_weight, temperature, num_items;
  bool upstream; /* gradients from lse and, where it is wanted, from the entropy */
  bool fused;    /* the backend has fused_logits and grad_weight_gemm */
  bool skips;    /* which skip rows */
} setting;

/* Inputs, and the loss and gradients that belong to them. */
typedef struct model {
  void *x, *w, *bias, *class_weight, *grad_output;
  void *token_weight, *temperature, *num_items, *grad_lse, *grad_entropy;
  void* probabilities; /* float32 */
  void* start; /* what dW is added to where the problem says so, added_dtype; NaN in its padding */
  int64_t* target;
  double *loss, *dx, *dw, *db; /* the gradients are for grad_output */
  /* Sums of the magnitudes of each gradient's terms: what its rounding errors are relative to. */
  double *dx_size, *dw_size, *db_size, *loss_size;
} model;

typedef struct run {
  flce_plan plan;
  flce_tensors t;
  int64_t forward_gemms, backward_gemms;
  flce_status status;
} run;

/* Every gradient of a small mean with a bias. */
setting make_setting(flce_dtype dtype, flce_save save);
flce_dtype stat_of(const setting* s);

model make_model(const setting* s);
void free_model(model* m);

/* NaN in every byte's dtype; NULL for no bytes. */
void* plan_buffer(const flce_plan* plan, flce_buffer_id id);
void* workspace(int64_t bytes);

/* plain_fused.c: has the fused products and the one of dW with db, and the facts say so. */
void plain_fused(flce_backend* backend, flce_facts* facts);

run run_all(const setting* s, const model* m, int threads);
void free_run(run* r);
void describe(const setting* s, const run* r, char* text, size_t size);
/* |actual - expected| within the roundings of terms of this size. */
void compare(const setting* s, const run* r, const char* name, const void* actual, flce_dtype dtype,
             const double* expected, const double* size, int64_t count);
void check_run(const setting* s, const model* m, const run* r);
/* One setting, serially and on three threads: by products and passes, by the fused products, and by
 * those that skip rows. */
void test_setting(const setting* s);

#endif
