/* The gradients of a call by GEMMs, in the order in which engine.c computes them. */
#ifndef FLCE_GRADIENTS_H
#define FLCE_GRADIENTS_H

#include "core/execution.h"

/* Label smoothing's sum of W, before the first chunk. */
flce_status flce_sum_w_for_smoothing(const execution* e);
/* Initial values of what the chunks add to, and the rows that no chunk holds. */
flce_status flce_begin_gradients(const execution* e);
/* The GEMM of the chunk's dX; in form exp it needs no coefficients. The results of a chunk's
 * blocks of classes are summed: the first one overwrites, the others add. */
flce_status flce_dx_gemm(const execution* e, const chunk* c);
/* The B operand of dW's GEMM, a scaled copy of the chunk's rows of x, where flce_finish_dx does not
 * write it. */
flce_status flce_scale_input(const execution* e, const chunk* c);
/* The chunk's dX from the result of its GEMM. */
flce_status flce_finish_dx(const execution* e, const chunk* c);
/* Adds the chunk's dW and db to their accumulators. */
flce_status flce_add_dw_db(const execution* e, const chunk* c);
/* The parts of dW and db that no GEMM makes, after the last chunk. */
flce_status flce_finish_dw_db(const execution* e);
/* Label smoothing's sums over the rows, weighted with FLCE_COEF_SMOOTH: of x, and of ones. NULL
 * without smoothing, and where no gradient needs them. */
flce_status flce_sum_smooth(const execution* e, void** xsum, void** total);

#endif
