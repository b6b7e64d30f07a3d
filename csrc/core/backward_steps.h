/* The steps of a backward, in the order of a call (steps.h); and that of a block of classes, which
 * a forward with save=grads takes too. */
#ifndef FLCE_BACKWARD_STEPS_H
#define FLCE_BACKWARD_STEPS_H

#include "core/execution.h"

/* coef for the caller's upstream gradients. */
flce_status flce_upstream_coefficients(const execution* e, const chunk* c);
/* The logits again, by a GEMM of their own: fused_logits is a forward's. */
flce_status flce_recompute_logits(const execution* e, const chunk* c);
/* Replaces the recomputed logits with what the gradient GEMMs read: in form exp E, which does not
 * depend on the upstream gradients, because coef has them all; in form dz the gradient with respect
 * to the logits, made with coef. */
flce_status flce_exp_or_dz(const execution* e, const chunk* c);
/* dz from what is saved, E or z, made with coef. Nothing in form exp, where E is what is saved. */
flce_status flce_dz_of_saved(const execution* e, const chunk* c);
/* Sorts the tokens by target for what flce_finish_gradients() adds in form exp. A forward
 * that makes gradients (save=grads) does it in flce_scalars_and_skipped_rows(). */
flce_status flce_order_targets(const execution* e);

/* ---- blocks, in a backward or in a forward with save=grads ---- */

/* Runs the logits GEMM of a block of classes and makes E or dz; coef are those of the loss
 * (forward, save=grads) or of the upstream gradients. */
flce_status flce_exp_or_dz_of_block(const execution* e, const chunk* c);

#endif
