/* The checks of a problem and of the parameters of its loss. A message names the argument, what was
 * expected and what came. */
#include "backend.h"
#include "core/chunks.h"
#include "loss.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Puts a point where printf has written the decimal separator of the locale, of several bytes in
 * some. */
static void put_point(char* number) {
  char* separator = number + strspn(number, "-0123456789");
  char* fraction = separator + strcspn(separator, "0123456789e");
  if (fraction == separator || !*fraction) return; /* an integer, or not finite */
  *separator = '.';
  memmove(separator + 1, fraction, strlen(fraction) + 1);
}

/* A number as Python shows it: the shortest text that reads as the same number. */
static const char* number_text(double value, char text[32]) {
  int digits = 0;
  do snprintf(text, 32, "%.*e", digits, value);
  while (strtod(text, NULL) != value && ++digits < 17);
  const char* power = strchr(text, 'e');
  int exponent = power ? atoi(power + 1) : 16; /* not finite */
  if (exponent >= -4 && exponent < 16)
    snprintf(text, 32, "%.*f", digits > exponent ? digits - exponent : 1, value);
  put_point(text);
  return text;
}

/* Refuses the call unless `rule` holds; the sizes in a message are of type long long. */
#define EXPECT(rule, ...) \
  if (!(rule)) return flce_fail(FLCE_INVALID_ARGUMENT, __VA_ARGS__)

/* Checks that a dtype is `own`, that of the GEMMs' operands, or `wide`, the stat dtype. */
static flce_status check_dtype(const char* name, flce_dtype got, flce_dtype own, flce_dtype wide) {
  EXPECT(got == own || got == wide, "%s: expected torch.%s%s%s, got torch.%s", name,
         flce_dtype_name(own), own == wide ? "" : " or torch.",
         own == wide ? "" : flce_dtype_name(wide), flce_dtype_name(got));
  return FLCE_OK;
}

flce_status flce_check_loss(const flce_problem* problem) {
  const flce_loss* loss = &problem->loss;
  /* The problem of a divergence's teacher has no teacher of its own. */
  bool is_teacher = problem->divergence.kind && !problem->divergence.teacher;
  const char* whose = is_teacher ? "teacher_" : "";
  char text[32];
  double value;
#define FLCE_CHECK(name, in_range, expected)                                                 \
  value = loss->name;                                                                        \
  EXPECT(isfinite(value) && (in_range), "%s" #name ": expected " expected ", got %s", whose, \
         number_text(value, text));
  FLCE_LOSS_NUMBERS(FLCE_CHECK)
#undef FLCE_CHECK
  EXPECT(!problem->has.probabilities || loss->ignore_index == -100,
         "ignore_index: expected None or -100 with probabilities, which have no index to ignore, "
         "got %lld",
         (long long)loss->ignore_index);
  return FLCE_OK;
}

/* A dozen matrices of so many elements have fewer bytes in float64 than fit into int64. */
static const int64_t kMostElements = INT64_C(1) << 54;

/* Whether the matrices of a call have at most kMostElements. */
static flce_status check_sizes(const flce_problem* problem) {
  int64_t all = flce_is_sharded(problem) ? problem->shard.classes : 0;
  int64_t vocab = max64(problem->shape.weight_rows, all);
  const struct {
    const char* names;
    int64_t rows, cols;
  } matrices[] = {{"tokens, hidden", problem->shape.tokens, problem->shape.hidden},
                  {"tokens, vocab", problem->shape.tokens, vocab},
                  {"hidden, vocab", problem->shape.hidden, vocab},
                  {"tokens, classes", problem->shape.tokens, problem->wants.row_classes}};
  for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++)
    EXPECT(matrices[i].cols <= kMostElements / max64(matrices[i].rows, 1),
           "%s: expected a product of at most 2^54, got %lld and %lld", matrices[i].names,
           (long long)matrices[i].rows, (long long)matrices[i].cols);
  return FLCE_OK;
}

static flce_status check_added(const flce_problem* problem) {
  flce_dtype weight = problem->dtypes.weight, added = problem->backward.added_dtype;
  EXPECT(!problem->backward.adds_grad_weight || added == weight || added == flce_stat_dtype(weight),
         "grad_weight_into: expected dtype %s%s, got %s", flce_dtype_name(weight),
         flce_size_of(weight) == 2 ? " or float32" : "", flce_dtype_name(added));
  return FLCE_OK;
}

static flce_status check_samples(const flce_problem* problem) {
  char text[32];
  const flce_loss* loss = &problem->loss;
  double eps = problem->sampling.eps;
  flce_save save = problem->save;
  bool sampled = flce_is_sampled(problem), unset = eps == 0.0 && !sampled;
  bool exact = save == FLCE_SAVE_LOGITS || save == FLCE_SAVE_GRADS || save == FLCE_SAVE_STATS;
  /* A sampled divergence is drawn within save=grads (plan->draws_from_dz). */
  EXPECT(!sampled || !exact || problem->divergence.teacher,
         "save: expected \"auto\" with gradient=\"sampled\", got \"%s\"", flce_save_name(save));
  EXPECT(unset || (eps >= FLCE_LEAST_EPS && eps <= 1.0),
         "gradient_eps: expected from 2**-12 to 1, got %s", number_text(eps, text));
  if (!sampled) return FLCE_OK;
  EXPECT(!problem->has.probabilities,
         "gradient: expected \"exact\" with probabilities as target, got \"sampled\"");
  EXPECT(problem->dtypes.gemm != FLCE_F64,
         "gradient: expected \"exact\" with float64 operands, got \"sampled\"");
  EXPECT(!problem->backward.has_grad_classes,
         "gradient: expected \"exact\" for a gradient of class_logits, got \"sampled\"");
  EXPECT(!problem->wants.tail,
         "return_tail_lse: expected False with gradient=\"sampled\", got True");
  EXPECT(problem->wants.topk == 0 || !flce_caps_logits(loss),
         "topk: expected 0 with a softcap and gradient=\"sampled\", got %lld",
         (long long)problem->wants.topk);
  EXPECT(!flce_caps_logits(loss) || !(loss->label_smoothing > 0.0),
         "label_smoothing: expected 0 with a softcap and gradient=\"sampled\", got %s: its "
         "gradient has an entry for every class",
         number_text(loss->label_smoothing, text));
  EXPECT(!problem->backward.has_grad_entropy || !flce_caps_logits(loss),
         "return_entropy: expected no gradient of the entropy with a softcap and "
         "gradient=\"sampled\", which keeps no logits; take \"detached\" or gradient=\"exact\"");
  /* Of all ranks: each has to refuse what one does. */
  long long classes = flce_is_sharded(problem) ? problem->shard.classes : problem->shape.vocab;
  EXPECT(classes <= FLCE_SAMPLE_CLASSES,
         "vocab: expected at most %d with gradient=\"sampled\", got %lld", FLCE_SAMPLE_CLASSES,
         classes);
  return FLCE_OK;
}

static flce_status check_rank(const flce_problem* problem) {
  long long ranks = problem->shard.ranks, rank = problem->shard.rank;
  EXPECT(rank >= 0 && rank < ranks, "rank: expected 0 to %lld, got %lld", ranks - 1, rank);
  return FLCE_OK;
}

/* This rank's first class and the number of all classes, as torch.chunk and DTensor divide where
 * `start` is not given. */
static flce_status find_range(flce_problem* problem, int64_t start, int64_t vocab) {
  long long rows = problem->shape.weight_rows, ranks = problem->shard.ranks,
            rank = problem->shard.rank;
  FLCE_TRY(check_rank(problem));
  EXPECT(ranks <= kMostElements / max64(max64(rows, vocab), 1),
         "ranks, vocab: expected a product of at most 2^54, got %lld and %lld", ranks,
         (long long)max64(rows, vocab));
  if (vocab < 0) {
    EXPECT(rows > 0,
           "linear_weight: expected at least one row, or vocab= in flce.VocabParallel, got 0");
    problem->shard.first_class = rank * rows;
    problem->shard.classes = ranks * rows;
    return FLCE_OK;
  }
  long long each = ceil_div(vocab, ranks), first = start >= 0 ? start : min64(rank * each, vocab);
  long long left = vocab - first, expected = min64(each, left);
  EXPECT(start >= 0 || rows == expected,
         "linear_weight: expected %lld rows on rank %lld of %lld, for %lld classes, got %lld",
         expected, rank, ranks, (long long)vocab, rows);
  EXPECT(rows <= left, "linear_weight: expected at most %lld rows from class %lld on, got %lld",
         left, first, rows);
  problem->shard.first_class = first;
  problem->shard.classes = vocab;
  return FLCE_OK;
}

flce_status flce_find_classes(flce_problem* problem, int64_t start, int64_t vocab,
                              int64_t valid_vocab) {
  bool sharded = problem->shard.ranks > 0;
  if (sharded) FLCE_TRY(find_range(problem, start, vocab));
  long long rows = problem->shape.weight_rows, all = sharded ? problem->shard.classes : rows;
  long long classes = valid_vocab != FLCE_ABSENT ? valid_vocab : all;
  EXPECT(valid_vocab == FLCE_ABSENT || (classes >= 1 && classes <= all),
         "valid_vocab: expected an int from 1 to %lld, got %lld", all, classes);
  problem->shape.vocab = classes;
  if (!sharded) return FLCE_OK;
  problem->shard.classes = classes;
  problem->shard.first_class = min64(problem->shard.first_class, classes);
  problem->shape.vocab = min64(rows, classes - problem->shard.first_class);
  if (problem->shard.ranks > 1) return FLCE_OK;
  problem->shard.ranks = 0; /* a group of one rank has all classes */
  EXPECT(rows == all, "linear_weight: expected all %lld rows in a group of one rank, got %lld", all,
         rows);
  return FLCE_OK;
}

static flce_status check_classes(const flce_problem* problem) {
  long long topk = problem->wants.topk, count = problem->wants.row_classes;
  int64_t all = flce_is_sharded(problem) ? problem->shard.classes : problem->shape.vocab;
  long long most = min64(all, FLCE_MOST_TOPK);
  EXPECT(topk >= 0 && topk <= most, "topk: expected 0 to %lld, got %lld", most, topk);
  EXPECT(topk == 0 || count == flce_candidates(topk),
         "classes: expected the %lld candidates for topk, got %lld",
         (long long)flce_candidates(topk), count);
  return FLCE_OK;
}

static flce_status check_shard(const flce_problem* problem) {
  if (!flce_is_sharded(problem)) return FLCE_OK;
  long long ranks = problem->shard.ranks, tokens = problem->shape.tokens;
  long long first = problem->shard.first_class, classes = problem->shard.classes,
            vocab = problem->shape.vocab;
  bool scatters = problem->shard.input_is_sharded, partial = problem->shard.partial_grad_input;
  bool exact = classes <= FLCE_EXACT_CLASSES || problem->dtypes.gemm == FLCE_F64;
  FLCE_TRY(check_rank(problem));
  EXPECT(first >= 0 && classes >= 1 && vocab <= classes && first <= classes - vocab,
         "vocab_parallel: expected a range within the %lld classes, got [%lld, %lld)", classes,
         first, first + vocab);
  EXPECT(!problem->has.probabilities,
         "target: expected class indices with vocab_parallel, got probabilities");
  EXPECT(!scatters || tokens % ranks == 0,
         "target: expected a multiple of the %lld ranks as the number of tokens with "
         "sequence=True, got %lld",
         ranks, tokens);
  EXPECT(!scatters || !partial, "reduce_input_grad: expected True with sequence=True, got False");
  EXPECT(!problem->shard.wide_terms || !partial,
         "reduce_dtype: expected None with reduce_input_grad=False, got torch.float32");
  EXPECT(!problem->shard.wide_terms || problem->dtypes.input != FLCE_F64,
         "reduce_dtype: expected None with a float64 input, got torch.float32");
  EXPECT(!problem->wants.predictions || exact,
         "return_predictions, return_accuracy: expected at most %d classes with "
         "vocab_parallel, got %lld",
         FLCE_EXACT_CLASSES, classes);
  return FLCE_OK;
}

/* Refuses options of the losses that a divergence does not have. */
static flce_status check_absent_options(const flce_problem* problem) {
  const struct {
    const char* name;
    bool is_set;
  } options[] = {{"weight", problem->has.class_weight},
                 {"label_smoothing", problem->loss.label_smoothing != 0.0},
                 {"z_loss", problem->loss.z_loss != 0.0},
                 {"wants_statistics", problem->wants.statistics},
                 {"wants_predictions", problem->wants.predictions},
                 {"wants_entropy", problem->wants.entropy},
                 {"entropy_gradient", problem->wants.entropy_gradient},
                 {"class_gradient", problem->wants.class_gradient},
                 {"topk", problem->wants.topk != 0},
                 {"classes", problem->wants.row_classes > 0},
                 {"grad_weight_into", problem->backward.adds_grad_weight}};
  for (size_t i = 0; i < sizeof options / sizeof *options; i++)
    EXPECT(!options[i].is_set, "%s: expected none with a divergence, got one", options[i].name);
  return FLCE_OK;
}

static flce_status check_teacher(const flce_problem* problem) {
  double beta = problem->divergence.beta, hard = problem->divergence.hard_weight;
  char text[32];
  if (!problem->divergence.teacher) return FLCE_OK;
  FLCE_TRY(flce_check_divergence(problem->divergence.kind));
  FLCE_TRY(check_absent_options(problem));
  EXPECT(beta > 0.0 && beta < 1.0, "beta: expected 0 < beta < 1, got %s", number_text(beta, text));
  EXPECT(hard >= 0.0 && hard <= 1.0, "hard_weight: expected 0 <= hard_weight <= 1, got %s",
         number_text(hard, text));
  EXPECT(!problem->has.probabilities,
         "target: expected class indices with a divergence, got probabilities");
  EXPECT(problem->save != FLCE_SAVE_LOGITS && problem->save != FLCE_SAVE_SAMPLES,
         "save: expected \"auto\", \"grads\" or \"stats\" with a divergence, got \"%s\"",
         flce_save_name(problem->save));
  EXPECT(hard == 0.0 || (problem->loss.temperature == 1.0 && !problem->has.temperature),
         "hard_weight: expected 0 with a temperature, which the cross entropy would have too, got "
         "%s",
         number_text(hard, text));
  flce_problem teacher = *problem->divergence.teacher;
  teacher.shape.rows = problem->shape.rows; /* flce_plan_teacher */
  return flce_check_problem(&teacher);
}

flce_status flce_check_save(const flce_problem* problem) {
  bool grads = problem->save == FLCE_SAVE_GRADS;
  EXPECT(!grads || problem->reduction != FLCE_NONE,
         "save: expected \"logits\", \"stats\" or \"auto\" with reduction=\"none\", got \"grads\", "
         "which holds the gradients of one scalar");
  EXPECT(!grads || !problem->graph.accumulates,
         "save: expected \"logits\", \"stats\" or \"auto\" with accumulate_into, got \"grads\", "
         "whose forward would change the parameter's gradient");
  EXPECT(!grads || !problem->backward.adds_grad_weight,
         "save: expected \"logits\" or \"stats\" where the weight's gradient is added to the "
         "caller's, got \"grads\", whose forward would change it");
  return FLCE_OK;
}

flce_status flce_check_problem(const flce_problem* problem) {
  long long tokens = problem->shape.tokens, hidden = problem->shape.hidden,
            vocab = problem->shape.vocab;
  long long rows = problem->shape.rows, weight_rows = problem->shape.weight_rows;
  long long frozen = problem->shape.frozen_hidden;
  bool empty = vocab == 0 && flce_is_sharded(problem);
  EXPECT(tokens >= 0, "tokens: expected at least 0, got %lld", tokens);
  EXPECT(problem->shape.first_token >= 0 && problem->shape.first_token <= INT64_MAX - tokens,
         "first_token: expected 0 to %lld, got %lld", (long long)(INT64_MAX - tokens),
         (long long)problem->shape.first_token);
  EXPECT(hidden >= 1 && (vocab >= 1 || empty),
         "linear_weight: expected at least one row and column, got shape (%lld, %lld)", vocab,
         hidden);
  EXPECT(vocab <= weight_rows, "valid_vocab: expected at most %lld, got %lld", weight_rows, vocab);
  EXPECT(frozen >= 0 && frozen < hidden && frozen % 8 == 0,
         "frozen_hidden: expected a multiple of 8 below %lld, got %lld", hidden, frozen);
  EXPECT(rows >= 0 && rows <= tokens, "rows: expected 0 to %lld, the number of tokens, got %lld",
         tokens, rows);
  FLCE_TRY(flce_check_save(problem));
  FLCE_TRY(check_sizes(problem));
  FLCE_TRY(check_added(problem));
  FLCE_TRY(check_teacher(problem));
  FLCE_TRY(check_samples(problem));
  FLCE_TRY(check_classes(problem));
  FLCE_TRY(check_shard(problem));
  flce_dtype stat = flce_stat_dtype(problem->dtypes.gemm);
  FLCE_TRY(check_dtype("accum_dtype", problem->dtypes.accum, problem->dtypes.gemm, stat));
  FLCE_TRY(check_dtype("logits_dtype", problem->dtypes.logits, problem->dtypes.gemm, stat));
  return flce_check_loss(problem);
}

flce_status flce_check_targets(const flce_problem* problem, const int64_t* target, int64_t classes,
                               int64_t* valid) {
  int64_t count = 0, ignore_index = problem->loss.ignore_index;
  for (int64_t i = 0; i < problem->shape.tokens; i++) {
    int64_t y = target[i];
    if (y == ignore_index) continue;
    if (y < 0 || y >= classes)
      return flce_fail(FLCE_TARGET_OUT_OF_RANGE,
                       "target[%lld] is %lld: expected 0 <= target < %lld or ignore_index %lld",
                       (long long)(problem->shape.first_token + i), (long long)y,
                       (long long)classes, (long long)ignore_index);
    count++;
  }
  if (valid) *valid = count;
  return FLCE_OK;
}

flce_status flce_check_items(double items, int64_t valid) {
  EXPECT(items != 0.0 || valid == 0,
         "num_items: expected a number other than 0 for %lld rows that are not ignored, got 0",
         (long long)valid);
  return FLCE_OK;
}
