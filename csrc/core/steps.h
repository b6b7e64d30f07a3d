/* The steps that the strategies of engine.c are made of: here those that forwards and backwards
 * share; forward_steps.h and backward_steps.h have the others, each in the order of a call.
 * engine.c decides which steps run. A step decides whether it runs fused or separate kernels, what
 * it does for bias, softcap or float16, and what a rank without a class leaves out. The steps of
 * gradients are in gradients.h, those of sampled ones in samples.h, those between ranks in
 * shards.h, those of a divergence in teacher.h. */
#ifndef FLCE_STEPS_H
#define FLCE_STEPS_H

#include "core/execution.h"

/* ---- operands ---- */

/* Sets e->linear_weight, with reads_input also e->input and with reads_bias also e->bias: W, x and
 * b in the plan's dtypes and leading dimensions.
 * `e` has the backend, the pass, the shard_call with its comm, and the caller's problem, plan and
 * tensors. */
flce_status flce_open_operands(execution* e, bool reads_input, bool reads_bias);
/* Computes FLCE_BUF_INDEX, the numbers of the rows that are not ignored, if the plan gathers rows
 * (facts.skips_rows): by compact_rows; blank_rows writes the results of the others. The gathering
 * itself is in flce_copy_input and flce_scale_input. */
flce_status flce_index_rows(const execution* e);

/* ---- logits ---- */

/* The chunk's rows of x into c->copied_x, if the logits GEMM cannot read them where they are. */
flce_status flce_copy_input(const execution* e, const chunk* c);
/* z = x W^T of the chunk, without a bias. */
flce_gemm flce_logits_gemm(const execution* e, const chunk* c);
/* Runs it, with the bias where the plan says so. */
flce_status flce_run_logits_gemm(const execution* e, const chunk* c);

/* ---- gradients ---- */

/* flce_finish_dx, and after the last chunk the beginning of the ranks' exchange of dX. */
flce_status flce_finish_chunk_dx(const execution* e, const chunk* c);
/* flce_finish_chunk_dx, and the chunk's dW and db, added to those of the others; in the last chunk
 * also the sum of dX over the ranks, if their sums are gathered. */
flce_status flce_finish_dx_add_dw_db(const execution* e, const chunk* c);
/* After the last chunk: what no GEMM computes, the sum of dX over the ranks, rounding. */
flce_status flce_finish_gradients(const execution* e);

#endif
