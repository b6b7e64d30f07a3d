/* What the gradient of a row is made of, by the formula of enum flce_coef_row. */
#ifndef FLCE_CPU_ROW_TERMS_H
#define FLCE_CPU_ROW_TERMS_H

#include "cpu/row_pass.h"

/* The coefficients (enum flce_coef_row) and statistics of one row. */
typedef struct row_terms {
  double offset, row, entropy, smooth, soft; /* c; the coefficients of these names */
  double mean_logit;                         /* m - c, with m the mean logit under the softmax */
  double tail_of_target; /* the term of TAIL in the target's column, if that is in the tail */
  bool capped;
} row_terms;

static inline row_terms flce_cpu_row_terms(const row_pass* pass, const flce_logit_map* map,
                                           int64_t i) {
  row_terms terms = {.offset = row_stat(pass, FLCE_STAT_OFFSET, i),
                     .row = pass->scale,
                     .capped = map->curve != FLCE_LINE};
  if (!pass->rows->coef) return terms;
  terms.row = row_coef(pass, FLCE_COEF_EXP, i);
  terms.entropy = row_coef(pass, FLCE_COEF_ENTROPY, i);
  terms.smooth = row_coef(pass, FLCE_COEF_SMOOTH, i);
  terms.soft = row_coef(pass, FLCE_COEF_SOFT, i);
  /* log S is computed from 1 / S, because lse - c would carry the rounding error of a large lse. */
  if (terms.entropy != 0.0)
    terms.mean_logit =
        -log(row_stat(pass, FLCE_STAT_INV_SUM, i)) - row_stat(pass, FLCE_STAT_ENTROPY, i);
  return terms;
}

/* Takes TAIL_LSE as the offset in place of c, and adds the gradient of TAIL_LSE. The terms then
 * hold for the tail's columns, where exp(l - TAIL_LSE) is at most 1 however small the tail's
 * probability is; class_gradients overwrites the other columns. */
static inline void flce_cpu_refer_to_tail(const row_pass* pass, int64_t i, row_terms* terms) {
  if (!pass->rows->has_tail_gradient) return;
  double tail = row_stat(pass, FLCE_STAT_TAIL_LSE, i), factor = row_coef(pass, FLCE_COEF_TAIL, i);
  if (tail == -INFINITY) return; /* there is no such column, or all have l = -inf */
  double ratio = exp(tail - terms->offset);
  /* It overflows only where another rank holds the tail's large logits: then exp(l - TAIL_LSE) is 0
   * for every l of this rank. */
  if (isinf(ratio)) ratio = 0.0;
  double l_y = row_stat(pass, FLCE_STAT_LSE, i) - row_stat(pass, FLCE_STAT_NLL, i);
  double e_y = l_y < tail ? exp(l_y - tail) : 1.0;
  terms->row = terms->row * ratio + factor;
  terms->entropy *= ratio;
  terms->mean_logit += terms->offset - tail;
  terms->offset = tail;
  terms->tail_of_target = factor * row_stat(pass, FLCE_STAT_SLOPE, i) * e_y;
}

/* e (EXP + ENTROPY (m - l)), or 0 if e is 0: there l may be -inf. */
INLINE double flce_cpu_pushed(const row_terms* terms, double e, double l) {
  return e == 0.0 ? 0.0
                  : e * (terms->row + terms->entropy * (terms->mean_logit + (terms->offset - l)));
}

#endif
