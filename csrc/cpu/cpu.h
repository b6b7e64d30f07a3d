/* Shared by the files of the CPU backend: access to the chosen kernels, the parallel loop, and the
 * functions of the backend table, grouped by the file that defines them. */
#ifndef FLCE_CPU_CPU_H
#define FLCE_CPU_CPU_H

#include "cpu/simd/row_kernels.h"

/* The minimum number of elements for a thread: with fewer, starting the thread costs more than it
 * saves. */
enum { FLCE_GRAIN = 32768 };

/* Elements of the accumulator block on a thread's stack, through which values pass when they are
 * converted from one dtype to another. */
enum { FLCE_BLOCK = 1024 };
typedef union flce_sums {
  double wide[FLCE_BLOCK];
  float narrow[FLCE_BLOCK];
} flce_sums;

static inline int64_t flce_block_end(int64_t begin, int64_t count) {
  return count - begin > FLCE_BLOCK ? begin + FLCE_BLOCK : count;
}
static inline int64_t flce_blocks(int64_t count) {
  return (count + FLCE_BLOCK - 1) / FLCE_BLOCK;
}

/* The index of row r of a pass in the rows' vectors; -1 if row r is unused. */
static inline int64_t flce_row_index(const flce_rows* rows, int64_t r) {
  return rows->index ? rows->index[r] : r;
}

typedef enum flce_row_kind {
  FLCE_ROW_ABSENT,
  FLCE_ROW_IGNORED,
  FLCE_ROW_OUT_OF_RANGE,
  FLCE_ROW_VALID
} flce_row_kind;

static inline flce_row_kind flce_row_kind_at(const flce_rows* rows, int64_t i) {
  if (i < 0) return FLCE_ROW_ABSENT;
  if (!rows->target) return FLCE_ROW_VALID;
  int64_t y = rows->target[i];
  if (y == rows->options.ignore_index) return FLCE_ROW_IGNORED;
  return y >= 0 && y < rows->vocab ? FLCE_ROW_VALID : FLCE_ROW_OUT_OF_RANGE;
}

/* backend.c. They return FLCE_UNSUPPORTED, with the dtypes in the message, if there is no such
 * kernel, and FLCE_INVALID_ARGUMENT if FLCE_CPU_VARIANT names a variant that is unknown or not
 * supported here. */
flce_status flce_cpu_row_kernels(flce_dtype dtype, const flce_row_kernels** kernels);
flce_status flce_cpu_block_kernels(flce_dtype stat, flce_dtype dtype,
                                   const flce_block_kernels** kernels);
/* Runs fn over [0, count) in ranges of at least FLCE_GRAIN elements; an index has `width` elements.
 * The result of an index must not depend on the range that it falls in. */
void flce_cpu_parallel(void* self, int64_t count, int64_t width, flce_range_fn fn, void* context);

/* gemm.c */
flce_status flce_cpu_gemm(void* self, const flce_gemm* gemm, void* workspace,
                          int64_t workspace_bytes);

/* elementwise.c */
flce_status flce_cpu_fill(void* self, void* data, int byte, int64_t bytes);
flce_status flce_cpu_cast(void* self, const flce_cast_args* call);
flce_status flce_cpu_add_block(void* self, const flce_add_block_args* call);
flce_status flce_cpu_scale_grads(void* self, const flce_scaled* grads, int number,
                                 const void* grad_output, const void* scalars, flce_dtype stat);

/* sums.c */
flce_status flce_cpu_reduce(void* self, void* out, const void* values, int64_t count,
                            const void* factor, flce_dtype stat, bool overlaps);
flce_status flce_cpu_column_sum(void* self, const flce_column_sum_args* call);

/* prepare.c */
flce_status flce_cpu_prepare(void* self, const flce_problem* problem, const flce_tensors* tensors,
                             void* order, bool holds_weight, bool overlaps);

/* target_order.c */
int64_t flce_cpu_order_bytes(int64_t tokens);
flce_status flce_cpu_order_targets(void* self, const flce_problem* problem, const int64_t* target,
                                   void* order);

/* ignored_rows.c */
flce_status flce_cpu_compact_rows(void* self, const flce_problem* problem, const int64_t* target,
                                  void* index);
flce_status flce_cpu_blank_rows(void* self, const flce_rows* rows, int64_t bound, void* dx,
                                flce_dtype dx_dtype, int64_t hidden);

/* rows_forward.c */
void flce_cpu_blank_stats(const flce_rows* rows, flce_dtype stat, int64_t i, double value);
flce_status flce_cpu_stat_rows(void* self, const flce_rows* rows);
flce_status flce_cpu_exp_rows(void* self, const flce_rows* rows);

/* rows_backward.c */
flce_status flce_cpu_grad_rows(void* self, const flce_rows* rows, double scale, bool hide_target,
                               bool z_is_exp);

/* row_coefficients.c */
flce_status flce_cpu_row_coefficients(void* self, const flce_rows* rows, const flce_shard* shard,
                                      const flce_upstream* upstream, const void* factor,
                                      void* coef);
flce_status flce_cpu_scale_coefficients(void* self, const flce_rows* rows, void* coef, float* unit,
                                        int64_t weights);

/* shard_rows.c */
flce_status flce_cpu_shard_targets(void* self, const flce_shard_targets_args* call);
flce_status flce_cpu_pack_statistics(void* self, const flce_pack_args* call);
flce_status flce_cpu_merge_statistics(void* self, const flce_merge_args* call);
flce_status flce_cpu_sum_terms(void* self, const flce_sum_terms_args* call);

/* grad_input.c */
flce_status flce_cpu_scale_rows(void* self, const flce_scale_rows_args* call);
flce_status flce_cpu_finish_grad_input(void* self, const flce_grad_input_args* call);

/* grad_weight.c */
flce_status flce_cpu_finish_grad_weight(void* self, const flce_grad_weight_args* call);
flce_status flce_cpu_finish_grad_bias(void* self, const flce_grad_bias_args* call);

/* sample_rows.c */
flce_status flce_cpu_sample_rows(void* self, const flce_sample_rows_args* call);

/* sample_order.c */
int64_t flce_cpu_sample_bytes(int64_t rows, int64_t vocab, double eps);
flce_status flce_cpu_order_samples(void* self, const flce_order_samples_args* call);

/* sampled_grads.c */
flce_status flce_cpu_sampled_grad_input(void* self, const flce_sampled_input_args* call);
flce_status flce_cpu_sampled_grad_weight(void* self, const flce_sampled_weight_args* call);
flce_status flce_cpu_sampled_grad_bias(void* self, const flce_sampled_bias_args* call);

#endif
