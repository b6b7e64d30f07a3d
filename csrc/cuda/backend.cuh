/* Declarations of the functions of the CUDA backend's table, by the file that defines them, and of
 * the helpers that facts and describe call. backend.h specifies the functions of the table. `self`
 * is a flce_cuda; its device is the current one, and all work is queued on its stream. */
#ifndef FLCE_CUDA_BACKEND_CUH
#define FLCE_CUDA_BACKEND_CUH

#include "cuda/common/types.cuh"

static inline cudaStream_t stream_of(void* self) {
  return (cudaStream_t)((const flce_cuda*)self)->stream;
}

/* gemm/gemm.cu */
flce_status cuda_gemm(void* self, const flce_gemm* gemm, void* workspace, int64_t workspace_bytes);

/* gemm/cublaslt.cu */
/* cuBLASLt's version number, 0 if it cannot be loaded. */
size_t cuda_gemm_version(void);

/* rows/rows_forward.cu */
flce_status cuda_stat_rows(void* self, const flce_rows* rows);
flce_status cuda_exp_rows(void* self, const flce_rows* rows);

/* rows/rows_backward.cu */
flce_status cuda_grad_rows(void* self, const flce_rows* rows, double scale, bool hide_target,
                           bool z_is_exp);

/* rows/row_coefficients.cu */
flce_status cuda_row_coefficients(void* self, const flce_rows* rows, const flce_shard* shard,
                                  const flce_upstream* upstream, const void* factor, void* coef);
flce_status cuda_scale_coefficients(void* self, const flce_rows* rows, void* coef, float* unit,
                                    int64_t weights);

/* rows/shard_rows.cu */
flce_status cuda_shard_targets(void* self, const flce_shard_targets_args* call);
flce_status cuda_pack_statistics(void* self, const flce_pack_args* call);
flce_status cuda_merge_statistics(void* self, const flce_merge_args* call);
flce_status cuda_sum_terms(void* self, const flce_sum_terms_args* call);

/* passes/elementwise.cu */
flce_status cuda_fill(void* self, void* data, int byte, int64_t bytes);
flce_status cuda_cast(void* self, const flce_cast_args* call);
flce_status cuda_add_block(void* self, const flce_add_block_args* call);
flce_status cuda_scale_grads(void* self, const flce_scaled* grads, int number,
                             const void* grad_output, const void* scalars, flce_dtype stat);

/* passes/sums.cu */
flce_status cuda_reduce(void* self, void* out, const void* values, int64_t count,
                        const void* factor, flce_dtype stat, bool overlaps);
int64_t cuda_column_sum_bytes(int64_t rows, int64_t cols, flce_dtype a_dtype);
flce_status cuda_column_sum(void* self, const flce_column_sum_args* call);

/* passes/prepare.cu */
flce_status cuda_prepare(void* self, const flce_problem* problem, const flce_tensors* tensors,
                         void* order, bool holds_weight, bool overlaps);

/* passes/target_order.cu */
flce_status cuda_order_bytes(int64_t tokens, int64_t vocab, int64_t* bytes);
flce_status cuda_order_targets(void* self, const flce_problem* problem, const int64_t* target,
                               void* order);

/* passes/ignored_rows.cu */
flce_status cuda_compact_bytes(int64_t tokens, int64_t* bytes);
flce_status cuda_compact_rows(void* self, const flce_problem* problem, const int64_t* target,
                              void* index);
flce_status cuda_blank_rows(void* self, const flce_rows* rows, int64_t bound, void* dx,
                            flce_dtype dx_dtype, int64_t hidden);

/* passes/grad_input.cu */
flce_status cuda_scale_rows(void* self, const flce_scale_rows_args* call);
flce_status cuda_finish_grad_input(void* self, const flce_grad_input_args* call);

/* passes/grad_weight.cu */
flce_status cuda_finish_grad_weight(void* self, const flce_grad_weight_args* call);
flce_status cuda_finish_grad_bias(void* self, const flce_grad_bias_args* call);

/* samples/sample_rows.cu */
flce_status cuda_sample_rows(void* self, const flce_sample_rows_args* call);

/* samples/sample_order.cu */
flce_status cuda_sample_bytes(const flce_problem* problem, int64_t* bytes);
flce_status cuda_order_samples(void* self, const flce_order_samples_args* call);

/* samples/sampled_grads.cu */
flce_status cuda_sampled_grad_input(void* self, const flce_sampled_input_args* call);
flce_status cuda_sampled_grad_weight(void* self, const flce_sampled_weight_args* call);
flce_status cuda_sampled_grad_bias(void* self, const flce_sampled_bias_args* call);

/* sm90/select.cu */
/* Sets the facts of the sm_90a kernels: fused_*, skips_rows, bias_parts. They are 0 or false where
 * the compute capability (90 for 9.0), FLCE_KERNEL or the problem rules the kernels out; skips_rows
 * does not depend on FLCE_KERNEL. */
flce_status cuda_sm90_facts(int capability, const flce_problem* problem, flce_facts* facts);

/* sm90/fused_logits.cu */
flce_status cuda_fused_logits(void* self, const flce_gemm* gemm, const flce_rows* rows,
                              void* scratch);
flce_status cuda_fused_statistics(void* self, const flce_gemm* gemm, const flce_rows* rows,
                                  const void* factor, void* coef, void* scratch);

/* sm90/grad_weight_gemm.cu */
/* facts.bias_parts: rows of the partial sums of cuda_grad_weight_gemm. */
int64_t cuda_bias_parts(int64_t hidden);
flce_status cuda_grad_weight_gemm(void* self, const flce_gemm* gemm, const int64_t* index,
                                  const void* coef, void* sums, bool adds_sums);

#endif
