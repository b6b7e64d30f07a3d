/* Sampled gradients: save=samples, and of a divergence. */
#ifndef FLCE_SAMPLES_H
#define FLCE_SAMPLES_H

#include "core/execution.h"

/* Draws the lists of the chunk's rows from its E or dz. */
flce_status flce_sample_chunk(const execution* e, const chunk* c);
/* dX, dW and db from the lists. `all`: all computed rows as one chunk, with its coef. */
flce_status flce_sampled_gradients(const execution* e, const chunk* all);

#endif
