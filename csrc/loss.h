/* What follows from the options of the loss alone: predicates of flce_loss that the plan and the
 * backends use. */
#ifndef FLCE_LOSS_H
#define FLCE_LOSS_H

#include "flce.h"

/* Whether the slope dl/dz depends on z. */
static inline bool flce_caps_logits(const flce_loss* loss) {
  return loss->softcap > 0.0;
}

/* Whether l is not z, in rows without a temperature of their own. */
static inline bool flce_maps_logits(const flce_loss* loss) {
  return loss->logit_scale != 1.0 || loss->temperature != 1.0 || flce_caps_logits(loss);
}

/* Whether l rises with z: a negative scale makes the smallest z the largest l. */
static inline bool flce_logits_rise(const flce_loss* loss) {
  return loss->logit_scale > 0.0;
}

#endif
