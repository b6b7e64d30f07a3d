/* The steps that the strategies of engine.c are made of, in the order of a call. A step keeps its
 * choice between fused and separate kernels, of what bias, softcap or float16 need, and of a rank
 * without a class; it knows the plan, and not the strategy. The steps of gradients are in
 * gradients.h, those of sampled ones in samples.h, those between ranks in shards.h, those of a
 * divergence in teacher.h. */
#ifndef FLCE_STEPS_H
#define FLCE_STEPS_H

#include "core/execution.h"

/* ---- operands ---- */

/* x (if the call reads it), W and b (if it reads that) in the plan's dtypes and leading dimensions.
 * `e` has the backend, the pass, the shard_call with its comm, and the caller's problem, plan and
 * tensors. */
flce_status flce_open_operands(execution* e, bool reads_input, bool reads_bias);
/* Computes FLCE_BUF_INDEX, if the plan gathers rows. */
flce_status flce_gather_rows(const execution* e);

/* ---- chunks ---- */

/* All computed rows, without logits. */
chunk flce_all_rows(const execution* e);
/* Forward: E or dz overwrites the logits. */
chunk flce_chunk_in_place(const execution* e, int64_t first);
/* Forward: the caller's `saved` gets E or z. */
chunk flce_chunk_to_saved(const execution* e, int64_t first);
/* Backward: its logits are computed again, and E or dz overwrites them. */
chunk flce_chunk_recomputed(const execution* e, int64_t first);
/* Backward: `saved` holds its E or z. */
chunk flce_chunk_from_saved(const execution* e, int64_t first);

/* ---- logits and statistics ---- */

/* What precedes the statistics of the first chunk. `overlaps`: the kernel queued before is the
 * fused logits GEMM of that chunk, which reads nothing that these steps write, so the first of them
 * may run concurrently with it (PDL). */
typedef flce_status (*flce_beginning)(const execution* e, bool overlaps);
/* Scalars, and the results of rows that are not computed. */
flce_status flce_begin_loss(const execution* e, bool overlaps);

/* Logits of a chunk. If fused_logits computes them, flce_statistics() is its second part. */
flce_status flce_logits(const execution* e, const chunk* c);
/* The same, and of the first chunk `begin`, before or during its logits GEMM. */
flce_status flce_logits_with(const execution* e, const chunk* c, flce_beginning begin);
/* Backward: the logits again, by a GEMM of their own. */
flce_status flce_recompute_logits(const execution* e, const chunk* c);
/* The arguments of fused_logits and fused_statistics. */
flce_fused_call flce_fused_call_of(const execution* e, const chunk* c);
/* From the logits the statistics and losses of the rows, over this rank's classes, and what else is
 * read from logits: predictions, top-k classes, the tail's sum. */
flce_status flce_statistics(const execution* e, const chunk* c);
/* The same; in form exp also E, into c->out. */
flce_status flce_statistics_and_exp(const execution* e, const chunk* c);
/* In form dz: E for the backward, into c->out, if that is what the plan saves. */
flce_status flce_save_exp(const execution* e, const chunk* c);
/* The statistics and losses of the whole vocabulary, from those of the ranks. */
flce_status flce_exchange_statistics(const execution* e, const chunk* c);

/* ---- what the gradient GEMMs read ---- */

/* coef for grad_output = 1, unless fused_statistics has computed them. */
flce_status flce_loss_coefficients(const execution* e, const chunk* c);
/* coef for the caller's upstream gradients. */
flce_status flce_upstream_coefficients(const execution* e, const chunk* c);
/* In form dz: dz of the loss from the logits and coef. */
flce_status flce_loss_dz(const execution* e, const chunk* c);
/* From logits that were computed again: E, or dz with all upstream gradients. */
flce_status flce_upstream_dz(const execution* e, const chunk* c);
/* The same from what is saved: nothing in form exp, where that is E. */
flce_status flce_upstream_dz_of_saved(const execution* e, const chunk* c);

/* ---- gradients and outputs ---- */

/* The chunk's dX from the result of its GEMM, and its dW and db, added to those of the others. */
flce_status flce_add_gradients(const execution* e, const chunk* c);
/* Sorts the tokens by target for what flce_finish_gradients() adds in form exp. A forward has done
 * it in flce_begin_loss(). */
flce_status flce_order_targets(const execution* e);
/* After the last chunk: what no GEMM computes, the sum of dX over the ranks, rounding. */
flce_status flce_finish_gradients(const execution* e);

/* z of the classes whose logits are an output, of all tokens. */
flce_status flce_class_logits(const execution* e);
/* The loss from the losses of the rows. `overlaps`: the kernel queued before is one of the
 * backend's own, which waits for all kernels before it. */
flce_status flce_reduce_losses(const execution* e, bool overlaps);

#endif
