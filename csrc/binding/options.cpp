/* Reads the options that flce/packing.py has packed. */
#include "binding/options.h"

namespace flce {

namespace {

#define FLCE_NAME(name) #name
constexpr const char* kIntegerNames[] = {FLCE_INTEGERS(FLCE_NAME)};
#undef FLCE_NAME
#define FLCE_NAME(name, ...) #name,
constexpr const char* kNumberNames[] = {FLCE_LOSS_NUMBERS(FLCE_NAME) "gradient_eps",
                                        FLCE_DIVERGENCE_NUMBERS(FLCE_NAME)};
#undef FLCE_NAME

void expect_count(const char* name, size_t got, size_t expected) {
  if (got != expected) refuse(name, std::to_string(expected) + " values", std::to_string(got));
}

class Reader {
 public:
  Reader(const std::vector<int64_t>& integers, const std::vector<double>& numbers)
      : integers_(integers), numbers_(numbers) {
    expect_count("integers", integers.size(), static_cast<size_t>(IntegerSlot::count));
    expect_count("numbers", numbers.size(), static_cast<size_t>(NumberSlot::count));
  }

  int64_t integer(IntegerSlot slot) const { return integers_[static_cast<size_t>(slot)]; }
  int64_t least(IntegerSlot slot, int64_t low) const { return choice(slot, low, INT64_MAX); }
  double number(NumberSlot slot) const { return numbers_[static_cast<size_t>(slot)]; }
  bool flag(IntegerSlot slot) const { return choice(slot, 0, 1) == 1; }
  int dtype(IntegerSlot slot) const { return static_cast<int>(choice(slot, -1, FLCE_F16)); }

  /* An integer in [low, high]. */
  int64_t choice(IntegerSlot slot, int64_t low, int64_t high) const {
    int64_t value = integer(slot);
    if (value < low || value > high)
      refuse(kIntegerNames[static_cast<size_t>(slot)],
             std::to_string(low) + " to " + std::to_string(high), std::to_string(value));
    return value;
  }

 private:
  const std::vector<int64_t>& integers_;
  const std::vector<double>& numbers_;
};

void read_loss(const Reader& read, flce_problem* problem) {
  problem->reduction =
      static_cast<flce_reduction>(read.choice(IntegerSlot::reduction, 0, FLCE_SUM));
  problem->loss.ignore_index = read.integer(IntegerSlot::ignore_index);
#define FLCE_READ(name, ...) problem->loss.name = read.number(NumberSlot::name);
  FLCE_LOSS_NUMBERS(FLCE_READ)
#undef FLCE_READ
  problem->wants.entropy = read.flag(IntegerSlot::wants_entropy);
  problem->wants.entropy_gradient = read.flag(IntegerSlot::entropy_gradient);
  problem->wants.predictions = read.flag(IntegerSlot::wants_predictions);
  problem->wants.topk = read.integer(IntegerSlot::topk);
  problem->wants.row_classes = flce_candidates(problem->wants.topk);
  problem->wants.tail = read.flag(IntegerSlot::wants_tail);
  problem->wants.class_gradient = read.flag(IntegerSlot::class_gradient);
  problem->wants.statistics = read.flag(IntegerSlot::wants_statistics);
}

void read_strategy(const Reader& read, flce_problem* problem) {
  problem->save = static_cast<flce_save>(read.choice(IntegerSlot::save, 0, FLCE_SAVE_AUTO));
  problem->sampling.wanted = read.flag(IntegerSlot::gradient);
  problem->sampling.eps = read.number(NumberSlot::gradient_eps);
  if (problem->sampling.eps == 0.0) /* which the core takes as not set */
    refuse("gradient_eps", "from 2**-12 to 1", "0.0");
  problem->memory.bound = read.least(IntegerSlot::max_memory, 0);
  problem->memory.bound_is_default = read.flag(IntegerSlot::bound_is_default);
  problem->memory.kept = read.least(IntegerSlot::kept_memory, 0);
  problem->backward.consumes_saved = read.flag(IntegerSlot::consumes_saved);
  problem->graph.differentiates_outputs = read.flag(IntegerSlot::wants_lse) ||
                                          problem->wants.entropy_gradient ||
                                          problem->wants.class_gradient || problem->wants.tail;
  problem->graph.accumulates = read.flag(IntegerSlot::accumulates);
  problem->graph.traced = read.flag(IntegerSlot::traced);
  problem->wants.grad_input = read.flag(IntegerSlot::grad_input);
  problem->wants.grad_weight = read.flag(IntegerSlot::grad_weight);
  problem->wants.grad_bias = read.flag(IntegerSlot::grad_bias);
}

void read_divergence(const Reader& read, PackedOptions* options) {
  flce_problem* problem = &options->problem;
  problem->divergence.kind = static_cast<flce_divergence>(
      read.choice(IntegerSlot::divergence, FLCE_NO_DIVERGENCE, FLCE_DIVERGENCE_COUNT));
  problem->divergence.beta = read.number(NumberSlot::beta);
  problem->divergence.hard_weight = read.number(NumberSlot::hard_weight);
  options->teacher = {read.number(NumberSlot::teacher_softcap),
                      read.number(NumberSlot::teacher_logit_scale),
                      read.number(NumberSlot::teacher_temperature)};
}

constexpr int64_t kMostRanks = 1 << 20;

void read_shard(const Reader& read, flce_problem* problem) {
  problem->shard.ranks = read.choice(IntegerSlot::ranks, 0, kMostRanks);
  problem->shard.rank = read.least(IntegerSlot::rank, 0);
  problem->shard.input_is_sharded = read.flag(IntegerSlot::input_is_sharded);
  problem->shard.partial_grad_input = read.flag(IntegerSlot::partial_grad_input);
  problem->shard.wide_terms = read.flag(IntegerSlot::wide_terms);
}

}  // namespace

std::string option_names() {
  std::string names;
  for (const char* name : kIntegerNames) names += std::string(name) + " ";
  names += "/";
  for (const char* name : kNumberNames) names += std::string(" ") + name;
  names += "/";
#define FLCE_TEXT(NAME, text, ...) names += " " text;
  FLCE_DIVERGENCES(FLCE_TEXT)
#undef FLCE_TEXT
  return names;
}

PackedOptions unpack_options(const std::vector<int64_t>& integers,
                             const std::vector<double>& numbers) {
  Reader read(integers, numbers);
  int64_t layout = read.integer(IntegerSlot::layout);
  if (layout != kLayout)
    refuse("layout", std::to_string(kLayout) + ", that of this build of flce",
           std::to_string(layout) + "; compile the graph again");
  PackedOptions options{};
  read_loss(read, &options.problem);
  read_strategy(read, &options.problem);
  read_shard(read, &options.problem);
  read_divergence(read, &options);
  options.problem.shape.frozen_hidden = read.least(IntegerSlot::frozen_hidden, 0);
  options.problem.shape.first_token = read.least(IntegerSlot::first_token, 0);
  options.allow_tf32 = read.flag(IntegerSlot::allow_tf32);
  options.accum_dtype = read.dtype(IntegerSlot::accum_dtype);
  options.logits_dtype = read.dtype(IntegerSlot::logits_dtype);
  options.autocast = read.dtype(IntegerSlot::autocast);
  options.start = read.least(IntegerSlot::start, -1);
  options.vocab = read.least(IntegerSlot::vocab, -1);
  return options;
}

}  // namespace flce
