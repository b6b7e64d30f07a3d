/* The steps of a forward, in the order of a call (steps.h). */
#ifndef FLCE_FORWARD_STEPS_H
#define FLCE_FORWARD_STEPS_H

#include "core/execution.h"

/* ---- logits ---- */

/* What precedes the statistics of the first chunk. `may_overlap`: the kernel queued before is the
 * fused logits GEMM of that chunk, which reads nothing that these steps write, so the first of them
 * may run concurrently with it (PDL). */
typedef flce_status (*flce_beginning)(const execution* e, bool may_overlap);
/* The call's scalars, the results of rows that no chunk computes and, in a forward that makes
 * gradients, the order of its targets. */
flce_status flce_scalars_and_skipped_rows(const execution* e, bool may_overlap);
/* The arguments of fused_logits and fused_statistics. */
flce_fused_call flce_fused_call_of(const execution* e, const chunk* c);
/* Logits of a chunk. If fused_logits computes them, flce_statistics() is its second part. */
flce_status flce_logits(const execution* e, const chunk* c);
/* The same; for the first chunk also `begin`: before its GEMM, or queued after fused_logits, with
 * which it may overlap. */
flce_status flce_logits_and_begin(const execution* e, const chunk* c, flce_beginning begin);

/* ---- statistics ---- */

/* From the logits the statistics and losses of the rows, over this rank's classes, and what else is
 * read from logits: predictions, top-k classes, the tail's sum. */
flce_status flce_statistics(const execution* e, const chunk* c);
/* The same; in form exp also E, into c->out. */
flce_status flce_statistics_and_exp(const execution* e, const chunk* c);
/* In form dz: E for the backward, into c->out, if that is what the plan saves: in float16, where E
 * has half the bytes of float32 logits. */
flce_status flce_save_exp(const execution* e, const chunk* c);
/* The statistics and losses of the whole vocabulary, from those of the ranks. */
flce_status flce_exchange_statistics(const execution* e, const chunk* c);

/* ---- what the gradient GEMMs read ---- */

/* coef for grad_output = 1, unless fused_statistics has computed them. */
flce_status flce_loss_coefficients(const execution* e, const chunk* c);
/* In form dz: dz of the loss from the logits and coef. */
flce_status flce_loss_dz(const execution* e, const chunk* c);

/* ---- outputs ---- */

/* z of the classes whose logits are an output, of all tokens. */
flce_status flce_class_logits(const execution* e);
/* The loss from the losses of the rows. `may_overlap`: it may run concurrently with the kernel
 * queued before, which is one of the backend's own and waits for all kernels before it. */
flce_status flce_reduce_losses(const execution* e, bool may_overlap);

#endif
