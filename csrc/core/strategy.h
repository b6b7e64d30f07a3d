/* What strategy.c decides before a plan is made. */
#ifndef FLCE_STRATEGY_H
#define FLCE_STRATEGY_H

#include "flce.h"

/* The strategy where neither rows nor facts decide it, else FLCE_SAVE_AUTO. */
flce_save flce_known_strategy(const flce_problem* problem);

#endif
