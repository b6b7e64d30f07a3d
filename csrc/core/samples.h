/* Sampled gradients, save=samples. */
#ifndef FLCE_SAMPLES_H
#define FLCE_SAMPLES_H

#include "core/execution.h"

/* Draws the lists of the chunk's rows from its E. */
flce_status flce_sample_chunk(const execution* e, const chunk* c);
/* dX from the lists. `all`: all computed rows as one chunk, with its coef. */
flce_status flce_sampled_dx(const execution* e, const chunk* all);
/* dW and db from the lists. */
flce_status flce_sampled_class_gradients(const execution* e, const chunk* all);

#endif
