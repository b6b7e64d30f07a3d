/* The checks of a problem and of the parameters of its loss. A message names the argument, what was
 * expected and what came. */
#include "backend.h"
#include "core/chunks.h"
#include "loss.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A number as Python shows it: the shortest text that reads as the same number. */
static const char* number_text(double value, char text[32]) {
  int digits = 0;
  do snprintf(text, 32, "%.*e", digits, value);
  while (strtod(text, NULL) != value && ++digits < 17);
  const char* power = strchr(text, 'e');
  int exponent = power ? atoi(power + 1) : 16; /* not finite */
  if (exponent >= -4 && exponent < 16)
    snprintf(text, 32, "%.*f", digits > exponent ? digits - exponent : 1, value);
  return text;
}

/* Checks that a dtype is that of the GEMMs' operands or the wide one. */
static flce_status check_dtype(const char* name, flce_dtype got, flce_dtype own, flce_dtype wide) {
  if (got == own || got == wide) return FLCE_OK;
  return flce_fail(FLCE_INVALID_ARGUMENT, "%s: expected torch.%s%s%s, got torch.%s", name,
                   flce_dtype_name(own), own == wide ? "" : " or torch.",
                   own == wide ? "" : flce_dtype_name(wide), flce_dtype_name(got));
}

flce_status flce_check_loss(const flce_loss* loss) {
  char text[32];
  double value;
#define FLCE_CHECK(name, in_range, expected)                                         \
  value = loss->name;                                                                \
  if (!(isfinite(value) && (in_range)))                                              \
    return flce_fail(FLCE_INVALID_ARGUMENT, #name ": expected " expected ", got %s", \
                     number_text(value, text));
  FLCE_LOSS_NUMBERS(FLCE_CHECK)
#undef FLCE_CHECK
  return FLCE_OK;
}

static flce_status check_added(const flce_problem* problem) {
  if (!problem->adds_grad_weight) return FLCE_OK;
  if (problem->save == FLCE_SAVE_GRADS)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "save: expected \"logits\" or \"stats\" where the weight's gradient is added "
                     "to the caller's, got \"grads\", whose forward would change it");
  flce_dtype weight = problem->weight_dtype, added = problem->added_dtype;
  if (added == weight || added == flce_stat_dtype(weight)) return FLCE_OK;
  return flce_fail(FLCE_INVALID_ARGUMENT, "grad_weight_into: expected dtype %s%s, got %s",
                   flce_dtype_name(weight), flce_size_of(weight) == 2 ? " or float32" : "",
                   flce_dtype_name(added));
}

static flce_status check_samples(const flce_problem* problem) {
  char text[32];
  double eps = problem->gradient_eps;
  bool sampled = problem->sampled || problem->save == FLCE_SAVE_SAMPLES;
  bool chosen = problem->save == FLCE_SAVE_AUTO || problem->save == FLCE_SAVE_NOTHING;
  if (sampled && problem->save != FLCE_SAVE_SAMPLES && !chosen)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "save: expected \"auto\" with gradient=\"sampled\", got \"%s\"",
                     flce_save_name(problem->save));
  bool unset = eps == 0.0 && !sampled;
  if (!unset && !(eps >= FLCE_LEAST_EPS && eps <= 1.0))
    return flce_fail(FLCE_INVALID_ARGUMENT, "gradient_eps: expected from 2**-12 to 1, got %s",
                     number_text(eps, text));
  if (!sampled) return FLCE_OK;
  if (problem->has_probabilities || problem->dtype == FLCE_F64)
    return flce_fail(FLCE_INVALID_ARGUMENT, "gradient: expected \"exact\" with %s, got \"sampled\"",
                     problem->has_probabilities ? "probabilities as target" : "float64 operands");
  if (flce_caps_logits(&problem->loss) && problem->loss.label_smoothing > 0.0)
    return flce_fail(
        FLCE_INVALID_ARGUMENT,
        "label_smoothing: expected 0 with a softcap and gradient=\"sampled\", got %s: its "
        "gradient has an entry for every class",
        number_text(problem->loss.label_smoothing, text));
  /* Of all ranks: each has to refuse what one does. */
  int64_t classes = flce_is_sharded(problem) ? problem->classes : problem->vocab;
  if (classes > FLCE_SAMPLE_CLASSES)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "vocab: expected at most %d with gradient=\"sampled\", got %lld",
                     FLCE_SAMPLE_CLASSES, (long long)classes);
  return FLCE_OK;
}

/* This rank's first class and the number of all classes, as torch.chunk and DTensor divide where
 * `start` is not given. */
static flce_status find_range(flce_problem* problem, int64_t start, int64_t vocab) {
  int64_t rows = problem->weight_rows, ranks = problem->ranks, rank = problem->rank;
  if (vocab < 0) {
    if (rows == 0)
      return flce_fail(FLCE_INVALID_ARGUMENT,
                       "linear_weight: expected at least one row, or vocab= in "
                       "flce.VocabParallel, got 0");
    problem->first_class = rank * rows;
    problem->classes = ranks * rows;
    return FLCE_OK;
  }
  int64_t each = ceil_div(vocab, ranks);
  problem->first_class = start >= 0 ? start : min64(rank * each, vocab);
  problem->classes = vocab;
  int64_t expected = min64(each, vocab - problem->first_class);
  if (start < 0 && rows != expected)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "linear_weight: expected %lld rows on rank %lld of %lld, for %lld classes, "
                     "got %lld",
                     (long long)expected, (long long)rank, (long long)ranks, (long long)vocab,
                     (long long)rows);
  if (rows > vocab - problem->first_class)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "linear_weight: expected at most %lld rows from class %lld on, got %lld",
                     (long long)(vocab - problem->first_class), (long long)problem->first_class,
                     (long long)rows);
  return FLCE_OK;
}

flce_status flce_find_classes(flce_problem* problem, int64_t start, int64_t vocab,
                              int64_t valid_vocab) {
  bool sharded = problem->ranks > 0;
  int64_t all = problem->weight_rows;
  if (sharded) {
    FLCE_TRY(find_range(problem, start, vocab));
    all = problem->classes;
  }
  if (valid_vocab != FLCE_ABSENT && (valid_vocab < 1 || valid_vocab > all))
    return flce_fail(FLCE_INVALID_ARGUMENT, "valid_vocab: expected an int from 1 to %lld, got %lld",
                     (long long)all, (long long)valid_vocab);
  int64_t classes = valid_vocab != FLCE_ABSENT ? valid_vocab : all;
  problem->vocab = classes;
  if (!sharded) return FLCE_OK;
  problem->classes = classes;
  problem->first_class = min64(problem->first_class, classes);
  problem->vocab = min64(problem->weight_rows, classes - problem->first_class);
  if (problem->ranks > 1) return FLCE_OK;
  problem->ranks = 0; /* a group of one rank has all classes */
  if (problem->weight_rows == all) return FLCE_OK;
  return flce_fail(FLCE_INVALID_ARGUMENT,
                   "linear_weight: expected all %lld rows in a group of one rank, got %lld",
                   (long long)all, (long long)problem->weight_rows);
}

static flce_status check_shard(const flce_problem* problem) {
  if (!flce_is_sharded(problem)) return FLCE_OK;
  int64_t ranks = problem->ranks, first = problem->first_class, classes = problem->classes;
  if (problem->rank < 0 || problem->rank >= ranks)
    return flce_fail(FLCE_INVALID_ARGUMENT, "rank: expected 0 to %lld, got %lld",
                     (long long)ranks - 1, (long long)problem->rank);
  if (first < 0 || classes < 1 || problem->vocab > classes || first > classes - problem->vocab)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "vocab_parallel: expected a range within the %lld classes, got [%lld, %lld)",
                     (long long)classes, (long long)first, (long long)(first + problem->vocab));
  if (problem->has_probabilities)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "target: expected class indices with vocab_parallel, got probabilities");
  if (problem->input_is_sharded && problem->tokens % ranks != 0)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "target: expected a multiple of the %lld ranks as the number of tokens with "
                     "sequence=True, got %lld",
                     (long long)ranks, (long long)problem->tokens);
  if (problem->input_is_sharded && problem->partial_grad_input)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "reduce_input_grad: expected True with sequence=True, got False");
  if (problem->wide_terms && (problem->partial_grad_input || problem->input_dtype == FLCE_F64))
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "reduce_dtype: expected None with %s, got torch.float32",
                     problem->partial_grad_input ? "reduce_input_grad=False" : "a float64 input");
  bool exact = classes <= FLCE_EXACT_CLASSES || problem->dtype == FLCE_F64;
  if (problem->wants_predictions && !exact)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "return_predictions, return_accuracy: expected at most %d classes with "
                     "vocab_parallel, got %lld",
                     FLCE_EXACT_CLASSES, (long long)classes);
  return FLCE_OK;
}

flce_status flce_check_problem(const flce_problem* problem) {
  bool empty = problem->vocab == 0 && flce_is_sharded(problem);
  if (problem->tokens < 0 || problem->hidden < 1 || (problem->vocab < 1 && !empty))
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "expected tokens >= 0, hidden >= 1, vocab >= 1, got %lld, %lld, %lld",
                     (long long)problem->tokens, (long long)problem->hidden,
                     (long long)problem->vocab);
  if (problem->weight_rows < problem->vocab)
    return flce_fail(FLCE_INVALID_ARGUMENT, "valid_vocab: expected at most %lld, got %lld",
                     (long long)problem->weight_rows, (long long)problem->vocab);
  int64_t frozen = problem->frozen_hidden;
  if (frozen < 0 || frozen >= problem->hidden || frozen % 8 != 0)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "frozen_hidden: expected a multiple of 8 below %lld, got %lld",
                     (long long)problem->hidden, (long long)frozen);
  if (problem->rows < 0 || problem->rows > problem->tokens)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "rows: expected 0 to %lld, the number of tokens, got %lld",
                     (long long)problem->tokens, (long long)problem->rows);
  if (problem->save == FLCE_SAVE_GRADS && problem->reduction == FLCE_NONE)
    return flce_fail(
        FLCE_INVALID_ARGUMENT,
        "save: expected \"logits\", \"stats\" or \"auto\" with reduction=\"none\", got "
        "\"grads\", which holds the gradients of one scalar");
  if (problem->save == FLCE_SAVE_GRADS && problem->accumulates)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "save: expected \"logits\", \"stats\" or \"auto\" with accumulate_into, got "
                     "\"grads\", whose forward would change the parameter's gradient");
  FLCE_TRY(check_added(problem));
  FLCE_TRY(check_samples(problem));
  FLCE_TRY(check_shard(problem));
  flce_dtype stat = flce_stat_dtype(problem->dtype);
  FLCE_TRY(check_dtype("accum_dtype", problem->accum_dtype, problem->dtype, stat));
  FLCE_TRY(check_dtype("logits_dtype", problem->logits_dtype, problem->dtype, stat));
  return flce_check_loss(&problem->loss);
}
