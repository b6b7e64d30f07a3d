// The options of linear cross entropy's operators, which arrive as one text.
#ifndef FLCE_OP_OPTIONS_H
#define FLCE_OP_OPTIONS_H

#include <locale>
#include <sstream>
#include <unordered_map>

#include "torch_device.h"

namespace {

inline flce_dtype to_dtype(const std::string& name, const char* argument) {
  return choose<flce_dtype, 4>(argument, name,
                               {{{"float64", FLCE_F64},
                                 {"float32", FLCE_F32},
                                 {"bfloat16", FLCE_BF16},
                                 {"float16", FLCE_F16}}});
}

// Reads "name=value name=value ...", whose names it is told in their order.
class OptionReader {
 public:
  explicit OptionReader(const std::string& text) : words_(text) {
    words_.imbue(std::locale::classic());  // a point in a number, wherever the process runs
  }

  std::string word(const char* name) {
    std::string word, start = std::string(name) + "=";
    words_ >> word;
    if (word.compare(0, start.size(), start) != 0) fail(start, word);
    return word.substr(start.size());
  }
  int64_t integer(const char* name) { return value<int64_t>(name, "an integer"); }
  double number(const char* name) { return value<double>(name, "a number"); }
  bool flag(const char* name) {
    int64_t value = integer(name);
    if (value != 0 && value != 1) fail(std::string(name) + "=0 or 1", std::to_string(value));
    return value == 1;
  }
  void end() {
    std::string rest;
    if (words_ >> rest) fail("no more", rest);
  }

 private:
  template <typename T>
  T value(const char* name, const char* what) {
    std::string text = word(name);
    std::istringstream number(text);
    number.imbue(std::locale::classic());
    T value;
    if (!(number >> value) || number.peek() != EOF) fail(std::string(name) + "=" + what, text);
    return value;
  }
  [[noreturn]] static void fail(const std::string& expected, const std::string& got) {
    throw std::invalid_argument("options: expected " + expected + ", got \"" + got + "\"");
  }

  std::istringstream words_;
};

// The options that forward, backward and plan share: a problem without its sizes.
struct Options {
  flce_problem problem;
  bool allow_tf32;
};

inline Options parse_options(const std::string& text) {
  OptionReader read(text);
  Options options{};
  flce_problem& problem = options.problem;
  problem.reduction = to_reduction(read.word("reduction"));
  problem.loss.ignore_index = read.integer("ignore_index");
  problem.loss.label_smoothing = read.number("label_smoothing");
  problem.loss.logit_scale = read.number("logit_scale");
  problem.loss.softcap = read.number("softcap");
  problem.loss.temperature = read.number("temperature");
  problem.loss.z_loss = read.number("z_loss");
  problem.wants_entropy = read.flag("wants_entropy");
  problem.wants_predictions = read.flag("wants_predictions");
  problem.wants_statistics = read.flag("wants_statistics");
  problem.dtype = problem.input_dtype = problem.weight_dtype = problem.bias_dtype =
      to_dtype(read.word("dtype"), "dtype");
  problem.accum_dtype = to_dtype(read.word("accum_dtype"), "accum_dtype");
  problem.logits_dtype = to_dtype(read.word("logits_dtype"), "logits_dtype");
  problem.save = to_save(read.word("save"));
  problem.max_memory = read.integer("max_memory");
  problem.saves_memory = read.flag("saves_memory");
  problem.want_grad_input = read.flag("grad_input");
  problem.want_grad_weight = read.flag("grad_weight");
  problem.want_grad_bias = read.flag("grad_bias");
  options.allow_tf32 = read.flag("allow_tf32");
  read.end();
  return options;
}

// One text and two sizes, which may be symbolic, instead of twenty arguments: the dispatcher takes
// its time for each (benchmarks/NOTES.md, 2026-11-22), and the device waits for that before a small
// step. The text of a step is that of the step before, so it is read once.
inline Options options_of(const std::string& text) {
  static thread_local std::unordered_map<std::string, Options> known;
  constexpr size_t kKept = 256;
  auto found = known.find(text);
  if (found != known.end()) return found->second;
  Options options = parse_options(text);
  if (known.size() >= kKept) known.clear();
  return known.emplace(text, options).first->second;
}

}  // namespace

#endif
