/* What follows from the options of the loss alone: predicates of flce_loss that the plan and the
 * backends use. */
#ifndef FLCE_LOSS_H
#define FLCE_LOSS_H

#include <math.h>

#include "flce.h"

/* The curves by which options cap the logits: odd, bounded by 1, of slope 1 at 0, with slopes that
 * are functions of their values. They and their slopes are computed by cap_logits of
 * cpu/rows_general.c, for single values by flce_capped below, and by capped and cap_slope of
 * cuda/rows/row.cuh. */
typedef enum flce_curve { FLCE_LINE, FLCE_TANH } flce_curve;

/* l = outer_scale curve(inner_scale z); FLCE_LINE leaves its argument as it is. */
typedef struct flce_logit_map {
  flce_curve curve;
  double inner_scale, outer_scale;
} flce_logit_map;

/* curve(u). */
static inline double flce_capped(flce_curve curve, double u) {
  switch (curve) {
    case FLCE_LINE:
      return u;
    case FLCE_TANH:
      return tanh(u);
  }
  return NAN; /* an enum may hold any integer */
}

/* The map of a row; `temperature`: loss->temperature, times the row's own. */
static inline flce_logit_map flce_logit_map_of(const flce_loss* loss, double temperature) {
  flce_logit_map map = {FLCE_LINE, 1.0, loss->logit_scale / temperature};
  double cap = 0.0;
  if (loss->softcap > 0.0) map.curve = FLCE_TANH, cap = loss->softcap;
  if (map.curve == FLCE_LINE) return map;
  map.inner_scale = loss->logit_scale / cap;
  map.outer_scale = cap / temperature;
  return map;
}

/* Whether the slope dl/dz depends on z. */
static inline bool flce_caps_logits(const flce_loss* loss) {
  return flce_logit_map_of(loss, 1.0).curve != FLCE_LINE;
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
