/* The options of the operators, which are passed as a list of integers and a list of floating-point
 * numbers. A list costs the dispatcher less time than its items as single arguments
 * (benchmarks/NOTES.md, 2026-11-22). */
#ifndef FLCE_OP_OPTIONS_H
#define FLCE_OP_OPTIONS_H

#include "binding/torch_device.h"

namespace {

/* The slots of the integers, in order. Those of the numbers are FLCE_LOSS_NUMBERS and gradient_eps.
 * flce/options.py packs both lists; a test compares the names. */
#define FLCE_INTEGERS(SLOT)                                                                    \
  SLOT(reduction), SLOT(ignore_index), SLOT(accum_dtype), SLOT(logits_dtype), SLOT(save),      \
      SLOT(max_memory), SLOT(gradient), SLOT(dtype), SLOT(frozen_hidden), SLOT(wants_entropy), \
      SLOT(wants_predictions), SLOT(wants_statistics), SLOT(saves_memory), SLOT(grad_input),   \
      SLOT(grad_weight), SLOT(grad_bias), SLOT(allow_tf32), SLOT(ranks), SLOT(rank),           \
      SLOT(first_class), SLOT(classes), SLOT(input_is_sharded), SLOT(partial_grad_input),      \
      SLOT(wide_terms), SLOT(layout)

/* Version of the two lists and of the shapes of the tensors that a forward saves for its backward.
 * Raise it when they change for the same options: torch keeps compiled graphs on disk, and a graph
 * compiled with an earlier build must not run with this one. */
constexpr int64_t kLayout = 5;

#define FLCE_SLOT(name) name
enum class IntegerSlot : size_t { FLCE_INTEGERS(FLCE_SLOT), count };
#undef FLCE_SLOT
#define FLCE_SLOT(name, ...) name,
enum class NumberSlot : size_t { FLCE_LOSS_NUMBERS(FLCE_SLOT) gradient_eps, count };
#undef FLCE_SLOT
#define FLCE_NAME(name) #name
constexpr const char* kIntegerNames[] = {FLCE_INTEGERS(FLCE_NAME)};
#undef FLCE_NAME
#define FLCE_NAME(name, ...) #name,
constexpr const char* kNumberNames[] = {FLCE_LOSS_NUMBERS(FLCE_NAME) "gradient_eps"};
#undef FLCE_NAME

inline std::string option_names() {
  std::string names;
  for (const char* name : kIntegerNames) names += std::string(name) + " ";
  names += "/";
  for (const char* name : kNumberNames) names += std::string(" ") + name;
  return names;
}

/* Reads the two lists; checks their lengths and the range of each slot. */
class OptionReader {
 public:
  OptionReader(const std::vector<int64_t>& integers, const std::vector<double>& numbers)
      : integers_(integers), numbers_(numbers) {
    expect_count("integers", integers.size(), static_cast<size_t>(IntegerSlot::count));
    expect_count("numbers", numbers.size(), static_cast<size_t>(NumberSlot::count));
  }

  int64_t integer(IntegerSlot slot) const { return integers_[static_cast<size_t>(slot)]; }
  double number(NumberSlot slot) const { return numbers_[static_cast<size_t>(slot)]; }
  bool flag(IntegerSlot slot) const { return choice(slot, 2) == 1; }
  flce_dtype dtype(IntegerSlot slot) const {
    return static_cast<flce_dtype>(choice(slot, FLCE_F16 + 1));
  }
  /* An integer in [0, count), the index of one of `count` choices. */
  int64_t choice(IntegerSlot slot, int64_t count) const {
    int64_t value = integer(slot);
    if (value < 0 || value >= count)
      throw Failure(FLCE_INVALID_ARGUMENT, std::string(kIntegerNames[static_cast<size_t>(slot)]) +
                                               ": expected 0 to " + std::to_string(count - 1) +
                                               ", got " + std::to_string(value));
    return value;
  }

 private:
  static void expect_count(const char* name, size_t got, size_t expected) {
    if (got != expected)
      throw Failure(FLCE_INVALID_ARGUMENT, std::string(name) + ": expected " +
                                               std::to_string(expected) + " values, got " +
                                               std::to_string(got));
  }

  const std::vector<int64_t>& integers_;
  const std::vector<double>& numbers_;
};

/* Reads the options that all operators have: those of the loss and its outputs. */
inline void read_loss(const OptionReader& read, flce_problem* problem) {
  problem->reduction =
      static_cast<flce_reduction>(read.choice(IntegerSlot::reduction, FLCE_SUM + 1));
  problem->loss.ignore_index = read.integer(IntegerSlot::ignore_index);
#define FLCE_READ(name, ...) problem->loss.name = read.number(NumberSlot::name);
  FLCE_LOSS_NUMBERS(FLCE_READ)
#undef FLCE_READ
  problem->wants_entropy = read.flag(IntegerSlot::wants_entropy);
  problem->wants_predictions = read.flag(IntegerSlot::wants_predictions);
  problem->wants_statistics = read.flag(IntegerSlot::wants_statistics);
}

/* The options shared by forward, backward and plan: an flce_problem without its sizes. */
struct Options {
  flce_problem problem;
  bool allow_tf32;
};

inline Options read_options(const std::vector<int64_t>& integers,
                            const std::vector<double>& numbers) {
  OptionReader read(integers, numbers);
  int64_t layout = read.integer(IntegerSlot::layout);
  if (layout != kLayout)
    throw Failure(FLCE_INVALID_ARGUMENT, "layout: expected " + std::to_string(kLayout) +
                                             ", that of this build of flce, got " +
                                             std::to_string(layout) + "; compile the graph again");
  Options options{};
  flce_problem& problem = options.problem;
  read_loss(read, &problem);
  problem.dtype = problem.input_dtype = problem.weight_dtype = problem.bias_dtype =
      read.dtype(IntegerSlot::dtype);
  problem.accum_dtype = read.dtype(IntegerSlot::accum_dtype);
  problem.logits_dtype = read.dtype(IntegerSlot::logits_dtype);
  problem.save = static_cast<flce_save>(read.choice(IntegerSlot::save, FLCE_SAVE_SAMPLES + 1));
  problem.gradient_eps = read.number(NumberSlot::gradient_eps);
  bool samples = problem.save == FLCE_SAVE_SAMPLES, keeps = problem.save != FLCE_SAVE_NOTHING;
  if (keeps && read.flag(IntegerSlot::gradient) != samples)
    throw Failure(FLCE_INVALID_ARGUMENT, std::string("save: expected ") +
                                             (samples ? "another with gradient=\"exact\""
                                                      : "\"samples\" with gradient=\"sampled\"") +
                                             ", got \"" + flce_save_name(problem.save) + "\"");
  problem.max_memory = read.integer(IntegerSlot::max_memory);
  problem.frozen_hidden = read.integer(IntegerSlot::frozen_hidden);
  problem.saves_memory = read.flag(IntegerSlot::saves_memory);
  problem.want_grad_input = read.flag(IntegerSlot::grad_input);
  problem.want_grad_weight = read.flag(IntegerSlot::grad_weight);
  problem.want_grad_bias = read.flag(IntegerSlot::grad_bias);
  options.allow_tf32 = read.flag(IntegerSlot::allow_tf32);
  problem.ranks = read.integer(IntegerSlot::ranks);
  problem.rank = read.integer(IntegerSlot::rank);
  problem.first_class = read.integer(IntegerSlot::first_class);
  problem.classes = read.integer(IntegerSlot::classes);
  problem.input_is_sharded = read.flag(IntegerSlot::input_is_sharded);
  problem.partial_grad_input = read.flag(IntegerSlot::partial_grad_input);
  problem.wide_terms = read.flag(IntegerSlot::wide_terms);
  return options;
}

}  // namespace

#endif
