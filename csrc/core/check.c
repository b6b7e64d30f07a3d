/* The checks of a problem and of the parameters of its loss. A message names the argument, what was
 * expected and what came. */
#include "core/check.h"

#include "backend.h"
#include "loss.h"

#include <math.h>

flce_status flce_check_loss(const flce_loss* loss) {
  double value;
#define FLCE_CHECK(name, in_range, expected) \
  value = loss->name;                        \
  if (!(isfinite(value) && (in_range)))      \
    return flce_fail(FLCE_INVALID_ARGUMENT, #name ": expected " expected ", got %g", value);
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
  if (problem->save != FLCE_SAVE_SAMPLES) return FLCE_OK;
  if (!(problem->gradient_eps >= FLCE_LEAST_EPS && problem->gradient_eps <= 1.0))
    return flce_fail(FLCE_INVALID_ARGUMENT, "gradient_eps: expected 2^-12 to 1, got %g",
                     problem->gradient_eps);
  if (problem->has_probabilities)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "target: expected classes with save=\"samples\", got probabilities");
  if (flce_caps_logits(&problem->loss) && problem->loss.label_smoothing > 0.0)
    return flce_fail(
        FLCE_INVALID_ARGUMENT,
        "label_smoothing: expected 0 with a softcap and gradient=\"sampled\", got %g: its "
        "gradient has an entry for every class",
        problem->loss.label_smoothing);
  if (problem->dtype == FLCE_F64)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "save: expected another than \"samples\" with float64 operands");
  /* Of all ranks: each has to refuse what one does. */
  int64_t classes = flce_is_sharded(problem) ? problem->classes : problem->vocab;
  if (classes > FLCE_SAMPLE_CLASSES)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "vocab: expected at most %d with save=\"samples\", got %lld",
                     FLCE_SAMPLE_CLASSES, (long long)classes);
  return FLCE_OK;
}

flce_status flce_check_shard(const flce_problem* problem) {
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
                     "target: expected classes with vocab_parallel, got probabilities");
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
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "save: expected \"logits\" or \"stats\" with reduction=\"none\", got "
                     "\"grads\", which holds gradients "
                     "of one scalar");
  FLCE_TRY(check_added(problem));
  FLCE_TRY(check_samples(problem));
  FLCE_TRY(flce_check_shard(problem));
  flce_dtype stat = flce_stat_dtype(problem->dtype);
  if (problem->accum_dtype != problem->dtype && problem->accum_dtype != stat)
    return flce_fail(FLCE_INVALID_ARGUMENT, "accum_dtype: expected %s or %s, got %s",
                     flce_dtype_name(problem->dtype), flce_dtype_name(stat),
                     flce_dtype_name(problem->accum_dtype));
  if (problem->logits_dtype != problem->dtype && problem->logits_dtype != stat)
    return flce_fail(FLCE_INVALID_ARGUMENT, "logits_dtype: expected %s or %s, got %s",
                     flce_dtype_name(problem->dtype), flce_dtype_name(stat),
                     flce_dtype_name(problem->logits_dtype));
  return flce_check_loss(&problem->loss);
}
