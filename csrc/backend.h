/* The interface between the engine and a device: the table of functions that the CPU and the CUDA
 * backend fill. Decisions that a backend does not make (strategy, chunks, buffers) are in
 * flce_plan. */
#ifndef FLCE_BACKEND_H
#define FLCE_BACKEND_H

#include "backend_args.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The functions of a backend. `self` is flce_backend.self. All but `facts` queue work in order;
 * none waits for the device. A combination of dtypes or pointers without a kernel is refused with
 * FLCE_UNSUPPORTED. Sizes may be 0: then nothing is done. */
struct flce_backend {
  /* "cpu", "cuda", or that of a GPU that need not be there, whose only function is `facts`. */
  const char* name;
  void* self; /* flce_cpu, flce_cuda or flce_gpu: the first argument of every function */
  /* The message of this thread's last failure in the backend's own library. */
  const char* (*last_error)(void);

  /* Fills the facts of the device for `problem`. */
  flce_status (*facts)(void* self, const flce_problem* problem, flce_facts* facts);
  /* A GEMM, struct flce_gemm; workspace_bytes are facts.gemm_workspace_bytes. */
  flce_status (*gemm)(void* self, const flce_gemm* gemm, void* workspace, int64_t workspace_bytes);
  /* memset: each of `bytes` bytes of `data` is set to `byte`. */
  flce_status (*fill)(void* self, void* data, int byte, int64_t bytes);
  /* Copies in[rows][in_pitch] to out[rows][out_pitch], `cols` elements of each row, converted to
   * out_dtype. Columns of out in [cols, out_pitch) get zeros. */
  flce_status (*cast)(void* self, const flce_cast_args* call);

  /* Computes tensors->scalars from tensors' target, class_weight, token_weight, temperature,
   * num_items, and, if dw_fp16_shift is not 0, input. Also runs order_targets into `order`, unless
   * that is NULL. `may_overlap`: the kernel queued before this call is one of the backend's own and
   * touches none of these arrays, so this call may run concurrently with it (PDL). CPU:
   * FLCE_TARGET_OUT_OF_RANGE names row, value and range; FLCE_INVALID_ARGUMENT if more rows are
   * valid than problem->shape.rows. Both are found before anything is written. CUDA: nothing is
   * checked; INV_DENOM is NaN in the second case. */
  flce_status (*prepare)(void* self, const flce_problem* problem, const flce_tensors* tensors,
                         void* order, int dw_fp16_shift, bool may_overlap);

  /* The first problem->shape.rows elements of `index` (facts.compact_bytes in all) become the rows
   * of target[N] that are not ignored, ascending, then -1. */
  flce_status (*compact_rows)(void* self, const flce_problem* problem, const int64_t* target,
                              void* index);
  /* Writes the results of rows that compact_rows leaves out. `rows` has index NULL and all N rows.
   * Ignored rows get the values that the row passes write for them; the others NaN if
   * scalars[VALID] > bound, else they are not touched. With dx NULL: stats, loss (unless NULL) and
   * predictions (unless NULL) are written; else those rows of dx [N][hidden] instead. */
  flce_status (*blank_rows)(void* self, const flce_rows* rows, int64_t bound, void* dx,
                            flce_dtype dx_dtype, int64_t hidden);

  /* z -> statistics, loss, predictions. On a GPU each logit is read once. */
  flce_status (*stat_rows)(void* self, const flce_rows* rows);
  /* stat_rows, and out = E = exp(l - c) (1 - tanh^2 of the softcap), with 0 in the target's column
   * and in ignored rows. Not for probabilities. */
  flce_status (*exp_rows)(void* self, const flce_rows* rows);
  /* The logits GEMM fused with exp_rows, or with stat_rows if out is NULL. It takes two calls with
   * the same gemm, rows and scratch: fused_logits, which reads no scalars, then fused_statistics.
   * `out`, statistics and losses are complete after the second. z is not written, unless gemm->c is
   * not NULL: then out is NULL, and c gets z + bias in float32. coef not NULL: also
   * row_coefficients without upstream gradients, into coef. No tile is computed whose rows are all
   * beyond the last index that is not -1. `scratch`: facts.fused_row_bytes for each row. Only if
   * facts.fused_row_bytes > 0. */
  flce_status (*fused_logits)(void* self, const flce_gemm* gemm, const flce_rows* rows,
                              void* scratch);
  /* The second call; see fused_logits. */
  flce_status (*fused_statistics)(void* self, const flce_gemm* gemm, const flce_rows* rows,
                                  const void* factor, void* coef, void* scratch);
  /* The logits GEMM fused with grad_rows where coef is NULL and hide_target is set: out = E of the
   * columns of `rows`, a block of the classes, from the statistics. gemm->c is NULL; `scratch` as
   * in fused_logits. Only if facts.fused_row_bytes > 0; bfloat16. */
  flce_status (*fused_exp)(void* self, const flce_gemm* gemm, const flce_rows* rows, void* scratch);
  /* z and statistics -> rows of E or dz. rows->coef NULL: out = scale * exp(l - c) (1 - tanh^2),
   * and 0 in the target's column if hide_target. Else out = dz by the formula of enum
   * flce_coef_row. Ignored rows: zeros. */
  flce_status (*grad_rows)(void* self, const flce_grad_rows_args* call);

  /* Losses and dz of a divergence.
   *
   *   loss = (1 - hard_weight) token_weight VALUE + hard_weight (student's loss, on entry)
   *   dz_j = slope_j a k ((1 - hard_weight) g_j + hard_weight p_j)
   *   g_j  = pull_j - p_j MEAN, and of each divergence
   *     forward_kl   pull_j = p_j - q_j
   *     reverse_kl   pull_j = p_j log(p_j / q_j)
   *     jsd          pull_j = -(1 - beta) p_j log(m_j / p_j), m = beta q + (1 - beta) p
   *
   * p and q are the softmax of student and teacher, exp(l - OFFSET) INV_SUM of their stats; VALUE
   * and MEAN the row's sums (enum flce_divergence_sum); slope_j, a and k those of enum
   * flce_coef_row, a k = EXP / INV_SUM. In the target's column hard_weight TARGET takes the place
   * of slope_j a k hard_weight p_j. Where p and q are near, differences are made from
   * d_j = log(p_j / q_j), itself made from l and the statistics, so that they have its relative
   * error. Rows that are not valid: as grad_rows. */
  flce_status (*divergence_rows)(void* self, const flce_divergence_args* call);

  /* Factors of the rows' gradients, enum flce_coef_row, into coef [FLCE_COEF_COUNT][stat_pitch],
   * which is indexed like stats. Reads stats, target, class_weight, token_weight, temperature,
   * options and scalars of `rows`. factor[0] multiplies upstream->loss; NULL for 1. Ignored rows:
   * 0; out-of-range rows: NaN; absent rows (index -1): nothing is written. `shard`: NULL, or the
   * classes of this rank; `rows` is then as in flce_merge_args. */
  flce_status (*row_coefficients)(void* self, const flce_rows* rows, const flce_shard* shard,
                                  const flce_upstream* upstream, const void* factor, void* coef);
  /* Form dz in float16, which has few bits for small gradients, here without a loss scale:
   * multiplies the rows' coef, except FLCE_COEF_VALID, by the power of two u with u max |dz| of at
   * most 2^12. scale becomes {1/u, 0, 1, 0}, then 1/u `weights` times. */
  flce_status (*scale_coefficients)(void* self, const flce_rows* rows, void* coef, float* scale,
                                    int64_t weights);

  /* rows->classes.ids of each row: this rank's classes with the largest l, as flce_tensors.classes
   * says. Reads z. With fused_scratch, `rows` is that of the fused_logits (form exp, without a
   * softcap) and fused_statistics that used this scratch: then E in `out` is read and, for the
   * target's column, the statistics. Columns that round to the same float32 or E are equal. */
  flce_status (*top_classes)(void* self, const flce_rows* rows, void* fused_scratch);
  /* z of the classes in rows->classes.ids, each the sum of one row of x times one of W, in the stat
   * dtype. NaN for a class that does not exist, and in rows whose target is out of range; else as
   * flce_tensors.class_logits says. */
  flce_status (*class_logits)(void* self, const flce_class_logits_args* call);
  /* TAIL_LSE of the rows, from z; stat_rows or fused_statistics has run before. NaN in a row with a
   * class that does not exist. */
  flce_status (*tail_rows)(void* self, const flce_rows* rows);
  /* Writes the columns of the rows' classes of dz in `out`, by the formula of enum flce_coef_row in
   * the stat dtype from rows->classes.z, rounded once: what grad_rows has written there is rounded
   * already, and a difference such as p_j - q_j with it would have the rounding error of p_j.
   * classes.grads are multiplied by 1 / scale[0], if scale is not NULL; those of equal classes are
   * summed. A class that does not exist makes column 0 of its row NaN. */
  flce_status (*class_gradients)(void* self, const flce_rows* rows, const float* scale);

  /* out[0] = factor[0] * sum_i values[i], in a fixed order; factor NULL for 1. All in the stat
   * dtype `stat`. `may_overlap`: as in prepare. */
  flce_status (*reduce)(void* self, void* out, const void* values, int64_t count,
                        const void* factor, flce_dtype stat, bool may_overlap);

  /* out[r] = coef[i] * x[i], where i = index[r], or r if index is NULL. A row of zeros if coef[i]
   * is 0, whatever x holds, or if i is -1. coef [N] stat dtype, NULL for ones; x [N][hidden] dtype;
   * out [rows][out_pitch] dtype, zeros from column `hidden` on. */
  flce_status (*scale_rows)(void* self, const flce_scale_rows_args* call);

  /* dX of a chunk from D, the result of its GEMM, rounded once. For row r of `rows` and its token
   * i: dX[i] = EXP[i] D[r] + TARGET[i] W[y_i] - SMOOTH[i] wsum, with the factors in rows->coef; or
   * dX[i] = D[r] if rows->coef is NULL. Zeros if the target is ignored, NaN if it is out of range;
   * absent rows (index -1) are not written.
   * D may be dX itself if rows->index is NULL and cols equals hidden. scaled_x, unless NULL, gets
   * scale_rows of x by EXP; only with rows->coef. */
  flce_status (*finish_grad_input)(void* self, const flce_grad_input_args* call);

  /* out[cols] = sum_i weights[i] a[i][:], plus out if `accumulate`, in a fixed order. out and
   * weights [rows] in a_dtype's stat dtype, weights NULL for ones; a [rows][pitch] a_dtype. A row
   * of weight 0 adds nothing, whatever it holds. `scratch`: facts.column_sum_bytes. */
  flce_status (*column_sum)(void* self, const flce_column_sum_args* call);

  /* dW's GEMM, c = a^T b (+ c if beta is 1), and partial sums for db in the same pass over a:
   * sums[p][m] = part p of sum_k coef[k] a[k][m], added to sums if adds_sums. The caller adds the
   * facts.bias_parts rows of sums. The order is fixed. coef and sums in stat dtype; coef NULL for
   * ones. A coef of 0 does not hide a NaN in a, which reaches dW anyway. index [k] as in flce_rows,
   * or NULL: where it is -1, a and b hold zeros, and whole tiles beyond the last other index need
   * not be read. Only if facts.bias_parts > 0. */
  flce_status (*grad_weight_gemm)(void* self, const flce_gemm* gemm, const int64_t* index,
                                  const void* coef, void* sums, bool adds_sums);

  /* Sorts the tokens by target[N]: they are grouped by target and ascend within a group. Tokens
   * whose target is ignored or out of range belong to no group. The format of `order` is the
   * backend's own (facts.order_bytes). */
  flce_status (*order_targets)(void* self, const flce_problem* problem, const int64_t* target,
                               void* order);

  /* dW from its accumulator, for each class j: out_j = accum_j - w_j xsum + sum over the tokens i
   * of target j of coef_target[i] x[i], summed in stat dtype and rounded once. accum may be dw
   * itself; then only rows that change are written. coef_target NULL: no target term (form dz).
   * xsum [hidden] stat dtype, NULL: no smoothing term. dw and accum [vocab][hidden]; x
   * [tokens][hidden] dtype. */
  flce_status (*finish_grad_weight)(void* self, const flce_grad_weight_args* call);
  /* The same for db[V]: out_j = accum_j - w_j smooth_total[0] + the sum of coef_target[i] over the
   * tokens i of target j. smooth_total [1] stat dtype is the sum of FLCE_COEF_SMOOTH, or NULL. */
  flce_status (*finish_grad_bias)(void* self, const flce_grad_bias_args* call);
  /* accum[rows][cols] += block[rows][pitch], computed in accum_dtype's stat dtype. For GEMMs that
   * cannot add to the accumulator, and for adding dW to the caller's gradient. */
  flce_status (*add_block)(void* self, const flce_add_block_args* call);
  /* ---- a sharded vocabulary ---- */

  /* out[i]: target[i] as a column of this rank, its own or a substitute. */
  flce_status (*shard_targets)(void* self, const flce_shard_targets_args* call);
  /* The statistics of the rows over this rank's classes (enum flce_shard_stat), from FLCE_STAT_*
   * and, with label smoothing, from `loss`, which the passes have computed with label_smoothing 1,
   * z_loss 0 and no token_weight (flce_local_rows of core/shards.h). Unspecified in rows that are
   * not valid. */
  flce_status (*pack_statistics)(void* self, const flce_pack_args* call);
  /* Those of all ranks -> statistics, loss and predictions of the whole vocabulary, merged in the
   * order of the ranks, so that all get the same bits, except for OFFSET, INV_SUM, NLL and SLOPE:
   * exp(l - OFFSET) INV_SUM is the probability of this rank's classes in the whole vocabulary; NLL
   * and SLOPE are those of the target or of its substitute. */
  flce_status (*merge_statistics)(void* self, const flce_merge_args* call);
  /* out = the sum of the ranks' partial dX, in the order of the ranks, in the stat dtype, rounded
   * once.
   */
  flce_status (*sum_partial_dx)(void* self, const flce_sum_dx_args* call);

  /* ---- save=samples (problem.h); the stat dtype is float32. Lists that sample_rows did not write
   * for as many classes: FLCE_INVALID_ARGUMENT on the CPU; on CUDA NaN in place of the sums that
   * would read beyond W or the list. ---- */

  /* Draws the lists of a chunk's rows from their E and statistics. */
  flce_status (*sample_rows)(void* self, const flce_sample_rows_args* call);
  /* dX of the computed rows. For row r and its token i: dX[i] = sum_m factor_m W[class_m] +
   * TARGET[i] W[y_i] - SMOOTH[i] wsum, over the pairs m of its list, summed in float32 and rounded
   * once. factor_m = max(E_m, eps S) EXP[i]; with rows->wants_entropy max(E_m, eps S) (EXP[i] -
   * ENTROPY[i] (entropy + log(E_m / S))). Rows that are not valid: as finish_grad_input. */
  flce_status (*sampled_grad_input)(void* self, const flce_sampled_input_args* call);
  /* Sorts the entries of all lists by class, within a class by row, and computes their factors:
   * factor_m, for the target's entry TARGET[i]. The format of `order` is the backend's own. */
  flce_status (*order_samples)(void* self, const flce_order_samples_args* call);
  /* dW: out_j = sum of factor x[i] over the entries of class j - w_j xsum, plus dw_j if `adds`,
   * summed in float32 in a fixed order and rounded once. */
  flce_status (*sampled_grad_weight)(void* self, const flce_sampled_weight_args* call);
  /* db: out_j = sum of the factors of the entries of class j - w_j smooth_total[0]. */
  flce_status (*sampled_grad_bias)(void* self, const flce_sampled_bias_args* call);

  /* out = in * grad_output[0] * [scalars: INV_DENOM / scale], for each of `number` arrays, at most
   * FLCE_GRADIENTS. The scale is DW_SCALE if `in` is float16, else LOSS_SCALE. scalars NULL: the
   * factor is grad_output[0] alone. Both have the dtype `stat`. Nothing is written if out is in and
   * the factor is 1. */
  flce_status (*scale_grads)(void* self, const flce_scaled* grads, int number,
                             const void* grad_output, const void* scalars, flce_dtype stat);
};

/* The names of the functions, from which the backends' declarations and tables follow: those that
 * every backend has, and FLCE_FUSED_FUNCTIONS, which may be NULL; facts say which of these a call
 * can use. */
#define FLCE_EACH(X, a, b, c, d, e, f) X(a) X(b) X(c) X(d) X(e) X(f)
#define FLCE_BACKEND_FUNCTIONS(X)                                                                \
  FLCE_EACH(X, facts, gemm, fill, cast, prepare, compact_rows)                                   \
  FLCE_EACH(X, blank_rows, stat_rows, exp_rows, grad_rows, row_coefficients, scale_coefficients) \
  FLCE_EACH(X, reduce, scale_rows, finish_grad_input, column_sum, order_targets,                 \
            finish_grad_weight)                                                                  \
  FLCE_EACH(X, finish_grad_bias, add_block, shard_targets, pack_statistics, merge_statistics,    \
            sum_partial_dx)                                                                      \
  FLCE_EACH(X, sample_rows, sampled_grad_input, order_samples, sampled_grad_weight,              \
            sampled_grad_bias, scale_grads)                                                      \
  X(top_classes) X(class_logits) X(class_gradients) X(tail_rows) X(divergence_rows)
#define FLCE_FUSED_FUNCTIONS(X) X(fused_logits) X(fused_statistics) X(fused_exp) X(grad_weight_gemm)

#ifdef __cplusplus
}
#endif
#endif
