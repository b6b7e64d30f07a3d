/* Implements row_case.h: random inputs of the row passes and their results by definition. */
#include "row_case.h"

#include <stdlib.h>
#include <string.h>

const int64_t row_case_index[GATHERED] = {5, -1, IGNORED, 0, WRONG, 7, 3, -1};

/* ---- inputs ---- */

static double draw_logit(const setting* s, int64_t i, int64_t j, int64_t peak) {
  double top = 4.0 * (double)(i + 1);
  switch (s->kind) {
    case PEAKED: /* the target leads by more and more */
      return test_normal() + (j == peak ? top / s->loss.logit_scale : 0.0);
    case EXTREME:
      return test_uniform(-200.0, 200.0);
    case MASKED:
      return j != peak && j % 3 == 0 ? -INFINITY : 4.0 * test_normal();
    default:
      return 2.0 * test_normal();
  }
}

static void* draw_factors(flce_dtype stat, int64_t count) {
  void* factors = test_buffer(stat, count);
  for (int64_t i = 0; i < count; i++) flce_store(factors, stat, i, test_uniform(0.25, 4.0));
  return factors;
}

/* Probabilities of a token; 0 where the logit is masked. */
static void draw_probabilities(const setting* s, data* d, int64_t i) {
  double *t = test_doubles(s->vocab), total = 0.0;
  for (int64_t j = 0; j < s->vocab; j++) {
    t[j] = s->kind == MASKED && j % 3 == 0 ? 0.0 : test_uniform(0.0, 1.0);
    total += t[j];
  }
  for (int64_t j = 0; j < s->vocab; j++)
    flce_store(d->t, s->probabilities_dtype, i * d->t_pitch + j, total > 0.0 ? t[j] / total : 0.0);
  free(t);
}

data make_data(const setting* s) {
  int64_t v = s->vocab;
  data d = {.stat = flce_stat_dtype(s->dtype), .pitch = v + PAD, .t_pitch = v + 2};
  d.rows = s->gathered ? GATHERED : TOKENS;
  d.z_count = d.rows * d.pitch;
  d.z = test_buffer(s->dtype, d.z_count);
  memset(d.z, SENTINEL, (size_t)(d.z_count * flce_size_of(s->dtype)));
  d.bias = test_fill_normal(d.stat, v, 1.0);
  d.class_weight = draw_factors(d.stat, v);
  flce_store(d.class_weight, d.stat, v / 2, 0.0);
  d.token_weight = draw_factors(d.stat, TOKENS);
  flce_store(d.token_weight, d.stat, 3, 0.0);
  d.temperature = draw_factors(d.stat, TOKENS);
  d.t = test_buffer(s->probabilities_dtype, TOKENS * d.t_pitch);
  d.g = test_fill_normal(d.stat, TOKENS, 2.0);
  d.g_lse = test_fill_normal(d.stat, TOKENS, 2.0);
  d.g_entropy = test_fill_normal(d.stat, TOKENS, 2.0);
  for (int64_t i = 0; i < TOKENS; i++) {
    d.target[i] = i == 0 ? v - 1 : (int64_t)(test_random() % (uint64_t)v);
    if (s->kind == MASKED) d.target[i] = d.target[i] / 3 * 3 + (v > 1 ? 1 : 0);
    if (d.target[i] >= v) d.target[i] = v > 1 ? 1 : 0;
    draw_probabilities(s, &d, i);
  }
  for (int64_t r = 0; r < d.rows; r++) {
    int64_t i = token_of(s, r);
    bool read = i >= 0 && (s->probabilities || (i != IGNORED && i != WRONG));
    int64_t peak = !read ? 0 : i % 2 ? d.target[i] : v / 3;
    for (int64_t j = 0; j < v; j++)
      flce_store(d.z, s->dtype, r * d.pitch + j, read ? draw_logit(s, i, j, peak) : NAN);
  }
  if (!s->probabilities) d.target[IGNORED] = IGNORE_INDEX, d.target[WRONG] = v;
  double total = 0.0;
  for (int64_t j = 0; j < v; j++)
    total += s->class_weight ? flce_load(d.class_weight, d.stat, j) : 1.0;
  d.scalars = test_buffer(d.stat, FLCE_SCALAR_COUNT);
  flce_fill(d.scalars, d.stat, NAN, FLCE_SCALAR_COUNT);
  flce_store(d.scalars, d.stat, FLCE_SCALAR_WEIGHT_TOTAL, total);
  flce_store(d.scalars, d.stat, FLCE_SCALAR_INV_DENOM, kFactor);
  flce_store(d.scalars, d.stat, FLCE_SCALAR_Z_FACTOR, kZShare);
  return d;
}

void free_data(data* d) {
  free(d->z), free(d->bias), free(d->class_weight), free(d->token_weight), free(d->temperature);
  free(d->t), free(d->scalars), free(d->g), free(d->g_lse), free(d->g_entropy);
}

/* ---- the definition ---- */

static void define_logits(const setting* s, const data* d, int64_t i, truth* t) {
  const flce_loss* o = &s->loss;
  double temperature = o->temperature * optional(s->temperature, d->temperature, d->stat, i, 1.0);
  double widest = 0.0;
  t->c = -INFINITY;
  for (int64_t j = 0; j < s->vocab; j++) {
    double u = o->logit_scale * t->z[j], capped = u, slope = 1.0;
    if (o->softcap != 0.0) {
      capped = o->softcap * tanh(u / o->softcap);
      slope = 1.0 / (cosh(u / o->softcap) * cosh(u / o->softcap));
    }
    t->l[j] = capped / temperature;
    t->slope[j] = slope * o->logit_scale / temperature;
    if (t->l[j] > t->c) t->c = t->l[j], t->largest = j;
    if (isfinite(t->l[j])) widest = fmax(widest, fabs(t->l[j]));
    if (o->softcap != 0.0 && isfinite(u)) widest = fmax(widest, fabs(u / o->softcap));
    if (s->bias && isfinite(u)) widest = fmax(widest, (fabs(u) + 8.0) / temperature);
  }
  double terms = (double)(s->vocab < 2048 ? s->vocab : 2048) / 16.0;
  t->error = test_epsilon(d->stat) *
             (32.0 + 8.0 * widest + (d->stat == FLCE_F64 ? (double)s->vocab : terms));
}

static void define_loss(const setting* s, const data* d, int64_t i, truth* t) {
  double rest = 0.0, smoothing = s->loss.label_smoothing;
  int64_t v = s->vocab, y = has_target(s) ? d->target[i] : -1;
  t->sum = t->entropy = t->weight_sum = t->loss = t->loss_size = 0.0;
  for (int64_t j = 0; j < v; j++) t->sum += exp(t->l[j] - t->c);
  for (int64_t j = 0; j < v; j++)
    if (j != t->largest) rest += exp(t->l[j] - t->c);
  double above = log1p(rest); /* lse - c; lse - l = above + (c - l) does not cancel */
  t->lse = t->c + above;
  for (int64_t j = 0; j < v; j++) {
    t->p[j] = exp(t->l[j] - t->c) / t->sum;
    if (t->p[j] > 0.0) t->entropy += t->p[j] * (above + (t->c - t->l[j]));
    t->q[j] = smoothing / (double)v;
    if (s->probabilities)
      t->q[j] += (1.0 - smoothing) * flce_load(d->t, s->probabilities_dtype, i * d->t_pitch + j);
    t->w[j] = optional(s->class_weight, d->class_weight, d->stat, j, 1.0);
    t->weight_sum += t->w[j] * t->q[j];
    if (t->w[j] * t->q[j] == 0.0) continue;
    t->loss += t->w[j] * t->q[j] * (above + (t->c - t->l[j]));
    t->loss_size += t->w[j] * t->q[j] * (above + (t->c - t->l[j]) + 1.0);
  }
  if (has_target(s)) {
    double others = 0.0, e_y = exp(t->l[y] - t->c);
    for (int64_t j = 0; j < v; j++) others += j == y ? 0.0 : exp(t->l[j] - t->c);
    t->nll = others <= e_y ? log1p(others / e_y) : above + (t->c - t->l[y]);
    t->loss += (1.0 - smoothing) * t->w[y] * t->nll;
    t->loss_size += (1.0 - smoothing) * t->w[y] * t->nll;
  }
  t->loss += s->loss.z_loss * kZShare * t->lse * t->lse;
  t->loss_size += s->loss.z_loss * kZShare * (t->lse * t->lse + fabs(t->lse) + 1.0);
  double token = optional(s->token_weight, d->token_weight, d->stat, i, 1.0);
  t->loss *= token;
  t->loss_size *= token;
}

/* The gradient of kFactor g loss + g_lse lse + g_entropy entropy with respect to z. */
static void define_gradient(const setting* s, const data* d, int64_t i, truth* t) {
  double k = kFactor * flce_load(d->g, d->stat, i) *
             optional(s->token_weight, d->token_weight, d->stat, i, 1.0);
  double g_lse = optional(s->upstream, d->g_lse, d->stat, i, 0.0);
  double g_entropy = optional(s->upstream && s->entropy, d->g_entropy, d->stat, i, 0.0);
  int64_t y = has_target(s) ? d->target[i] : -1;
  double own = y >= 0 ? k * (1.0 - s->loss.label_smoothing) * t->w[y] : 0.0;
  double push = k * t->weight_sum + k * 2.0 * s->loss.z_loss * kZShare * t->lse + g_lse;
  for (int64_t j = 0; j < s->vocab; j++) {
    double log_p = t->p[j] > 0.0 ? t->l[j] - t->c - log(t->sum) : 0.0;
    double away = j == y ? own * expm1(-t->nll) : own * t->p[j];
    double entropy = -g_entropy * t->p[j] * (log_p + t->entropy), soft = k * t->w[j] * t->q[j];
    t->dz[j] = t->slope[j] * (away + push * t->p[j] + entropy - soft);
    t->size[j] =
        fabs(t->slope[j]) * (fabs(away) + fabs(soft) +
                             t->p[j] * (fabs(k * t->weight_sum) + fabs(push) + fabs(g_lse) +
                                        fabs(k * 2.0 * s->loss.z_loss) * (fabs(t->lse) + 1.0) +
                                        fabs(g_entropy) * (fabs(log_p) + t->entropy + 1.0)));
  }
}

truth make_truth(const setting* s, const data* d, int64_t r) {
  int64_t v = s->vocab, i = token_of(s, r);
  truth t = {test_doubles(v), test_doubles(v), test_doubles(v), test_doubles(v), test_doubles(v),
             test_doubles(v), test_doubles(v), test_doubles(v), .largest = 0};
  for (int64_t j = 0; j < v; j++) { /* the passes add the bias in the stat dtype */
    double z = flce_load(d->z, s->dtype, r * d->pitch + j);
    z += optional(s->bias, d->bias, d->stat, j, 0.0);
    t.z[j] = d->stat == FLCE_F32 ? (double)(float)z : z;
  }
  define_logits(s, d, i, &t);
  define_loss(s, d, i, &t);
  define_gradient(s, d, i, &t);
  return t;
}

void free_truth(truth* t) {
  free(t->z), free(t->l), free(t->slope), free(t->p), free(t->q), free(t->w), free(t->dz);
  free(t->size);
}

static double objective(const setting* s, const data* d, int64_t i, truth* t) {
  define_logits(s, d, i, t);
  define_loss(s, d, i, t);
  return kFactor * flce_load(d->g, d->stat, i) * t->loss +
         optional(s->upstream, d->g_lse, d->stat, i, 0.0) * t->lse +
         optional(s->upstream && s->entropy, d->g_entropy, d->stat, i, 0.0) * t->entropy;
}

void check_truth(const setting* s, const data* d) {
  const double step = 1e-5;
  for (int64_t r = 0; r < d->rows; r++) {
    int64_t i = token_of(s, r);
    if (is_blank(s, i)) continue;
    for (int64_t j = 0; j < s->vocab; j += 1 + s->vocab / 3) {
      truth t = make_truth(s, d, r);
      double z = t.z[j];
      t.z[j] = z + step;
      double above = objective(s, d, i, &t);
      t.z[j] = z - step;
      double slope = (above - objective(s, d, i, &t)) / (2.0 * step);
      CHECK(test_close(t.dz[j], slope, 1e-6 * (t.size[j] + fabs(slope)) + 1e-7),
            "the definition's gradient is %g, differences give %g, " WHERE, t.dz[j], slope,
            WHERE_VALUES(s, i));
      free_truth(&t);
    }
  }
}

/* ---- a pass ---- */

result make_result(const setting* s, const data* d) {
  result r = {test_buffer(s->dtype, d->z_count),
              test_buffer(d->stat, FLCE_STAT_COUNT * TOKENS),
              test_buffer(d->stat, TOKENS),
              test_buffer(d->stat, FLCE_COEF_COUNT * TOKENS),
              {0}};
  memset(r.out, SENTINEL, (size_t)(d->z_count * flce_size_of(s->dtype)));
  if (s->in_place) memcpy(r.out, d->z, (size_t)(d->z_count * flce_size_of(s->dtype)));
  flce_fill(r.stats, d->stat, UNTOUCHED, FLCE_STAT_COUNT * TOKENS);
  flce_fill(r.loss, d->stat, UNTOUCHED, TOKENS);
  flce_fill(r.coef, d->stat, UNTOUCHED, FLCE_COEF_COUNT * TOKENS);
  for (int64_t i = 0; i < TOKENS; i++) r.predictions[i] = UNTOUCHED;
  return r;
}

void free_result(result* r) {
  free(r->out), free(r->stats), free(r->loss), free(r->coef);
}

flce_rows view_of(const setting* s, const data* d, result* r) {
  return (flce_rows){.rows = d->rows,
                     .vocab = s->vocab,
                     .index = s->gathered ? row_case_index : NULL,
                     .z = s->in_place ? r->out : d->z,
                     .z_dtype = s->dtype,
                     .z_pitch = d->pitch,
                     .z_columns = s->vocab,
                     .bias = s->bias ? d->bias : NULL,
                     .target = s->probabilities ? NULL : d->target,
                     .probabilities = s->probabilities ? d->t : NULL,
                     .probabilities_dtype = s->probabilities_dtype,
                     .probabilities_pitch = d->t_pitch,
                     .class_weight = s->class_weight ? d->class_weight : NULL,
                     .token_weight = s->token_weight ? d->token_weight : NULL,
                     .temperature = s->temperature ? d->temperature : NULL,
                     .options = s->loss,
                     .wants_entropy = s->entropy,
                     .out = r->out,
                     .out_dtype = s->dtype,
                     .out_pitch = d->pitch,
                     .out_columns = s->vocab + ZEROS,
                     .stats = r->stats,
                     .stat_pitch = TOKENS,
                     .loss = r->loss,
                     .predictions = r->predictions,
                     .scalars = d->scalars};
}
