/* Inputs of the row passes with every option, and their results by definition. */
#ifndef FLCE_TESTS_ROW_CASE_H
#define FLCE_TESTS_ROW_CASE_H

#include "test.h"

/* PAD elements separate two rows; a pass writes the first ZEROS of them. */
enum { TOKENS = 8, IGNORED = 2, WRONG = 6, IGNORE_INDEX = -7, PAD = 3, ZEROS = 2 };

/* With gathered rows tokens 1 and 4 are omitted: none of their results may be written. */
enum { GATHERED = 8 };
extern const int64_t row_case_index[GATHERED];

enum { FLAT, PEAKED, EXTREME, MASKED, KINDS };

typedef struct setting {
  flce_dtype dtype;
  int64_t vocab;
  int kind;
  flce_loss loss;
  bool bias, class_weight, token_weight, temperature, probabilities, entropy, gathered, in_place;
  bool upstream; /* gradients from lse and, if it is wanted, from the entropy */
  flce_dtype probabilities_dtype;
} setting;

typedef struct data {
  flce_dtype stat;
  int64_t rows, pitch, z_count, t_pitch;
  void *z, *bias, *class_weight, *token_weight, *temperature, *t, *scalars;
  void *g, *g_lse, *g_entropy;
  int64_t target[TOKENS];
} data;

/* Values of scalars: Z_FACTOR, and INV_DENOM, the factor of the loss's gradient. */
static const double kZShare = 0.75, kFactor = 0.5;

#define WHERE                                                                               \
  "%s %s V %lld kind %d scale %g cap %g T %g z-loss %g smoothing %g bias %d w %d token %d " \
  "T_i %d t %d entropy %d gathered %d in place %d token %lld"
#define WHERE_VALUES(s, i)                                                               \
  flce_cpu_variant(), flce_dtype_name((s)->dtype), (long long)(s)->vocab, (s)->kind,     \
      (s)->loss.logit_scale, (s)->loss.softcap, (s)->loss.temperature, (s)->loss.z_loss, \
      (s)->loss.label_smoothing, (s)->bias, (s)->class_weight, (s)->token_weight,        \
      (s)->temperature, (s)->probabilities, (s)->entropy, (s)->gathered, (s)->in_place,  \
      (long long)(i)

/* The token of row r. */
static inline int64_t token_of(const setting* s, int64_t r) {
  return s->gathered ? row_case_index[r] : r;
}

/* Element i, or `absent` if the vector is not given. */
static inline double optional(bool given, const void* vector, flce_dtype stat, int64_t i,
                              double absent) {
  return given ? flce_load(vector, stat, i) : absent;
}

static inline bool has_target(const setting* s) {
  return !s->probabilities;
}

/* Whether token i has no results: it is missing, ignored or out of range. */
static inline bool is_blank(const setting* s, int64_t i) {
  return i < 0 || (has_target(s) && (i == IGNORED || i == WRONG));
}

data make_data(const setting* s);
void free_data(data* d);

/* The definition's results for row r, in double. */
typedef struct truth {
  double *z, *l, *slope, *p, *q,
      *w;            /* for every column; slope = dl/dz, q: target weights without a class target */
  double *dz, *size; /* the gradient, and the magnitudes of its terms */
  double c, lse, sum, nll, entropy, weight_sum, loss, loss_size;
  double error; /* relative error of an exp; absolute error of an l */
  int64_t largest;
} truth;

truth make_truth(const setting* s, const data* d, int64_t r);
void free_truth(truth* t);
/* Checks the definition's gradient against finite differences of its loss. */
void check_truth(const setting* s, const data* d);

/* The outputs of a pass. Before it every element of stats, loss, coef and predictions is UNTOUCHED,
 * every byte of out SENTINEL, or, in place, those of z. */
enum { UNTOUCHED = 77, SENTINEL = 0x5a };
typedef struct result {
  void *out, *stats, *loss, *coef;
  int64_t predictions[TOKENS];
} result;

result make_result(const setting* s, const data* d);
void free_result(result* r);
/* What a pass takes, without coef. */
flce_rows view_of(const setting* s, const data* d, result* r);

#endif
