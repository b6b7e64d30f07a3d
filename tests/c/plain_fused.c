/* The backend functions that only the CUDA backend has, by their definitions: GEMMs and row passes
 * of the CPU backend. */
#include "engine_case.h"

#include <stdlib.h>
#include <string.h>

enum { PRODUCT_ROW_BYTES = 24, PRODUCT_TILE_ROWS = 16, WEIGHT_PARTS = 3 };

/* Checks rows->wsum, if it is given, against its definition in backend.h; `rows` belong to the GEMM
 * `gemm`. */
static void check_wsum(const flce_gemm* gemm, const flce_rows* rows) {
  const flce_loss* o = &rows->options;
  CHECK(o->label_smoothing > 0.0 && o->softcap == 0.0 && !rows->bias, "wsum is of no use here");
  flce_dtype stat = flce_stat_dtype(gemm->dtype);
  for (int64_t h = 0; h < gemm->k; h++) {
    double sum = 0.0, size = 0.0;
    for (int64_t j = 0; j < gemm->n; j++) {
      double weight = rows->class_weight ? flce_load(rows->class_weight, stat, j) : 1.0;
      double term = weight * flce_load(gemm->b, gemm->dtype, j * gemm->pitch_b + h);
      sum += term;
      size += fabs(term);
    }
    double error = fabs(flce_load(rows->wsum, stat, h) - sum);
    CHECK(error <= 1e-5 * size, "wsum[%lld] is off by %g", (long long)h, error);
  }
}

/* In place of packed logits: the student's z; the teacher's is copied before it is overwritten. */
static void* g_teacher_z;

static void keep_teacher(const flce_gemm* teacher) {
  int64_t bytes = teacher->m * teacher->pitch_c * flce_size_of(teacher->c_dtype);
  free(g_teacher_z);
  g_teacher_z = malloc((size_t)bytes);
  memcpy(g_teacher_z, teacher->c, (size_t)bytes);
}

static flce_status plain_divergence_rows(void* self, const flce_divergence_args* call) {
  flce_backend b;
  flce_cpu_backend(self, &b);
  flce_rows teacher = *call->teacher;
  flce_divergence_args with_teacher = *call;
  with_teacher.teacher = &teacher;
  with_teacher.packing = NULL;
  if (call->packing) teacher.z = g_teacher_z;
  flce_status status = b.divergence_rows(b.self, &with_teacher);
  if (call->packing) free(g_teacher_z), g_teacher_z = NULL;
  return status;
}

/* The logits GEMM into *z, a new matrix of the operands' dtype, which `view` then reads. */
static flce_status run_gemm(const flce_backend* b, const flce_gemm* gemm, flce_rows* view,
                            void** z) {
  flce_gemm product = *gemm;
  product.c = *z = test_buffer(gemm->dtype, gemm->m * gemm->n);
  product.c_dtype = view->z_dtype = gemm->dtype;
  product.pitch_c = view->z_pitch = view->z_columns = gemm->n;
  view->z = product.c;
  return b->gemm(b->self, &product, NULL, 0);
}

/* fused_logits and fused_statistics by their definition: the GEMM, then a row pass. Both happen in
 * fused_statistics; fused_logits leaves its output untouched. */
static flce_status plain_fused_logits(void* self, const flce_gemm* gemm, const flce_rows* rows,
                                      void* scratch) {
  (void)self;
  memset(scratch, 0xab, (size_t)(rows->rows * PRODUCT_ROW_BYTES));
  if (rows->wsum) check_wsum(gemm, rows);
  return FLCE_OK;
}

static flce_status plain_fused_statistics(void* self, const flce_gemm* gemm, const flce_rows* rows,
                                          const void* factor, void* coef, void* scratch) {
  flce_backend b;
  flce_cpu_backend(self, &b);
  bool kept = true;
  for (int64_t k = 0; k < rows->rows * PRODUCT_ROW_BYTES; k++)
    kept &= ((const unsigned char*)scratch)[k] == 0xab;
  CHECK(kept, "something wrote to the scratch of a product");
  flce_rows view = *rows;
  void* z;
  flce_status status = run_gemm(&b, gemm, &view, &z);
  if (status == FLCE_OK) status = view.out ? b.exp_rows(b.self, &view) : b.stat_rows(b.self, &view);
  if (rows->teacher) {
    CHECK(gemm->c == rows->teacher->gemm.c, "packed logits replace the teacher's");
    keep_teacher(&rows->teacher->gemm);
  }
  for (int64_t i = 0; i < gemm->m && gemm->c; i++) {
    for (int64_t j = 0; j < gemm->n; j++) {
      double logit = flce_load(z, gemm->dtype, i * gemm->n + j);
      if (view.bias) logit += flce_load(view.bias, flce_stat_dtype(gemm->dtype), j);
      flce_store(gemm->c, gemm->c_dtype, i * gemm->pitch_c + j, logit);
    }
    for (int64_t j = gemm->n; j < rows->z_columns; j++)
      flce_store(gemm->c, gemm->c_dtype, i * gemm->pitch_c + j, 0.0);
  }
  free(z);
  const flce_upstream none = {0};
  if (status != FLCE_OK || !coef) return status;
  return b.row_coefficients(b.self, rows, NULL, &none, factor, coef);
}

/* fused_exp by its definition: the GEMM, then grad_rows. */
static flce_status plain_fused_exp(void* self, const flce_gemm* gemm, const flce_rows* rows,
                                   void* scratch) {
  flce_backend b;
  flce_cpu_backend(self, &b);
  memset(scratch, 0xab, (size_t)(rows->rows * PRODUCT_ROW_BYTES));
  flce_rows view = *rows;
  void* z;
  flce_status status = run_gemm(&b, gemm, &view, &z);
  if (status == FLCE_OK)
    status = b.grad_rows(b.self,
                         &(flce_grad_rows_args){.rows = &view, .scale = 1.0, .hide_target = true});
  free(z);
  return status;
}

/* grad_weight_gemm by its definition: the GEMM, then column sums, of every third row each. */
static flce_status plain_grad_weight_gemm(void* self, const flce_gemm* gemm, const int64_t* index,
                                          const void* coef, void* sums, bool adds_sums) {
  flce_backend b;
  flce_cpu_backend(self, &b);
  flce_gemm product = *gemm;
  product.k = 0;
  while (product.k < gemm->k && (!index || index[product.k] >= 0)) product.k++;
  flce_status status = b.gemm(b.self, &product, NULL, 0);
  flce_dtype stat = flce_stat_dtype(gemm->dtype);
  int64_t size = flce_size_of(stat), rows = product.k;
  char* weights = test_buffer(stat, rows);
  for (int64_t part = 0; part < WEIGHT_PARTS && status == FLCE_OK; part++) {
    for (int64_t i = 0; i < rows; i++) {
      double weight = coef ? flce_load(coef, stat, i) : 1.0;
      flce_store(weights, stat, i, i % WEIGHT_PARTS == part ? weight : 0.0);
    }
    status =
        b.column_sum(b.self, &(flce_column_sum_args){.out = (char*)sums + part * gemm->m * size,
                                                     .a = gemm->a,
                                                     .a_dtype = gemm->dtype,
                                                     .pitch = gemm->pitch_a,
                                                     .rows = rows,
                                                     .cols = gemm->m,
                                                     .weights = weights,
                                                     .accumulate = adds_sums});
  }
  free(weights);
  return status;
}

static flce_status plain_facts(void* self, const flce_problem* problem, flce_facts* facts) {
  flce_backend b;
  flce_cpu_backend(self, &b);
  FLCE_TRY(b.facts(self, problem, facts));
  facts->fused_row_bytes = PRODUCT_ROW_BYTES;
  facts->fused_tile_rows = PRODUCT_TILE_ROWS;
  facts->fused_writes_z = true;
  facts->fused_packs = problem->divergence.teacher && !problem->divergence.teacher->has.logits &&
                       !flce_is_sharded(problem);
  facts->bias_parts = WEIGHT_PARTS;
  return FLCE_OK;
}

static flce_status plain_skipping_facts(void* self, const flce_problem* problem,
                                        flce_facts* facts) {
  FLCE_TRY(plain_facts(self, problem, facts));
  facts->skips_rows = true;
  facts->hidden_alignment = 8; /* H is not a multiple of it */
  facts->gemm_f16 = true;      /* float16 is not widened */
  return FLCE_OK;
}

void plain_fused(flce_backend* backend, bool skips) {
  backend->facts = skips ? plain_skipping_facts : plain_facts;
  backend->fused_logits = plain_fused_logits;
  backend->fused_statistics = plain_fused_statistics;
  backend->fused_exp = plain_fused_exp;
  backend->grad_weight_gemm = plain_grad_weight_gemm;
  backend->divergence_rows = plain_divergence_rows;
}
