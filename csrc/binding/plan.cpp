/* The operators without tensors that tell what a call would do: `describe`, for the fakes of the
 * operators and the checks of options alone, and `plan`, for flce.plan. */
#include <algorithm>
#include <tuple>
#include <utility>

#include "binding/call.h"
#include "binding/library.h"
#include "gpu.h"

namespace flce {

namespace {

/* The slots of `operands` in the schemas: sizes and dtypes (flce_dtype, or -1 for None) of a call,
 * as flce/options.py packs them. */
enum OperandSlot {
  kOnCpu,
  kTokens,
  kHidden,
  kWeightRows,
  kRows, /* to compute */
  kInputDtype,
  kWeightDtype,
  kBiasDtype,
  kAddedDtype, /* of the gradient to which dW is added */
  kProbabilities,
  kClasses,       /* of each row, whose logits are an output */
  kTeacherHidden, /* of a divergence's teacher, 0 for none */
  kTeacherLogits, /* dtype of its logits, where they are given */
  kOperandSlots
};

flce_problem problem_of(const std::vector<int64_t>& operands, std::optional<int64_t> valid_vocab,
                        const PackedOptions& options) {
  if (operands.size() != kOperandSlots)
    refuse("operands", std::to_string(kOperandSlots) + " values", std::to_string(operands.size()));
  for (size_t slot : {kInputDtype, kWeightDtype, kBiasDtype, kAddedDtype, kTeacherLogits})
    if (operands[slot] < (slot < kBiasDtype ? 0 : -1) || operands[slot] > FLCE_F16)
      refuse("operands", "the index of a dtype", std::to_string(operands[slot]));
  flce_problem problem = options.problem;
  problem.tokens = operands[kTokens];
  problem.hidden = operands[kHidden];
  problem.weight_rows = operands[kWeightRows];
  problem.rows = operands[kRows];
  problem.input_dtype = static_cast<flce_dtype>(operands[kInputDtype]);
  problem.weight_dtype = static_cast<flce_dtype>(operands[kWeightDtype]);
  problem.has_bias = operands[kBiasDtype] >= 0;
  problem.bias_dtype =
      problem.has_bias ? static_cast<flce_dtype>(operands[kBiasDtype]) : problem.input_dtype;
  problem.adds_grad_weight = operands[kAddedDtype] >= 0;
  if (problem.adds_grad_weight)
    problem.added_dtype = static_cast<flce_dtype>(operands[kAddedDtype]);
  problem.has_probabilities = operands[kProbabilities] != 0;
  if (operands[kClasses] > 0) problem.row_classes = operands[kClasses];
  check(
      flce_find_classes(&problem, options.start, options.vocab, valid_vocab.value_or(FLCE_ABSENT)));
  choose_dtypes(options, &problem);
  return problem;
}

/* [strategy up to few rows, few rows, strategy up to some rows, some rows, strategy of more;
 * whether statistics are kept; dtype and leading dimension of what is saved; dtypes of the
 * gradients of input, weight and bias; stat dtype; first class, number of all classes; candidates
 * for topk]. Checks the
 * options. No device is asked: what does not depend on rows follows from the device's type alone.
 */
std::vector<int64_t> describe(std::vector<int64_t> operands, std::optional<int64_t> valid_vocab,
                              std::vector<int64_t> integers, std::vector<double> numbers) {
  flce_problem problem = problem_of(operands, valid_vocab, unpack_options(integers, numbers));
  check(flce_check_problem(&problem));
  flce_facts facts = {0};
  flce_facts_of_type(operands[kOnCpu] != 0, problem.dtype, &facts);
  flce_problem equal = flce_equal_share(&problem);
  flce_strategy s;
  flce_choose_strategy(&equal, &facts, &s);
  flce_plan plan = {};
  plan.save = problem.save = s.many;
  flce_choose_dtypes(&problem, &facts, &plan);
  int64_t saved = s.many == FLCE_SAVE_SAMPLES ? -1 : plan.saved_dtype;
  return {s.few,
          s.few_rows,
          s.some,
          s.some_rows,
          s.many,
          plan.keeps_statistics,
          saved,
          plan.saved_pitch,
          plan.grad_input_dtype,
          plan.grad_weight_dtype,
          plan.grad_bias_dtype,
          flce_stat_dtype(problem.dtype),
          problem.first_class,
          flce_is_sharded(&problem) ? problem.classes : problem.vocab,
          problem.row_classes};
}

/* Refuses matrices of which a dozen in float64 have more bytes than fit into int64. */
void check_elements(const flce_problem& problem) {
  const int64_t most = int64_t{1} << 54;
  const int64_t vocab = std::max(problem.vocab, problem.classes);
  const std::pair<const char*, int64_t> sizes[] = {
      {"tokens", problem.tokens}, {"hidden", problem.hidden}, {"vocab", vocab}};
  for (size_t i = 0; i < 3; i++)
    for (size_t j = 0; j < i; j++)
      if (sizes[i].second > most / std::max<int64_t>(sizes[j].second, 1))
        refuse(std::string(sizes[j].first) + ", " + sizes[i].first, "a product of at most 2^54",
               std::to_string(sizes[j].second) + " and " + std::to_string(sizes[i].second));
}

template <typename Write>
std::string text_of(Write write, const flce_plan& plan) {
  std::string text(static_cast<size_t>(write(&plan, nullptr, 0)) + 1, '\0');
  write(&plan, text.data(), static_cast<int64_t>(text.size()));
  text.pop_back();
  return text;
}

flce_gpu gpu_of(const std::string& text) {
  flce_gpu gpu;
  check(flce_find_gpu(text.c_str(), &gpu));
  return gpu;
}

/* The GPUs that have a name, separated by blanks. */
std::string gpu_names() {
  int count;
  const flce_gpu* gpus = flce_gpus(&count);
  std::string names;
  for (int i = 0; i < count; i++) names += (i ? " " : "") + std::string(gpus[i].name);
  return names;
}

/* [capability, multiprocessors, memory, multiply-adds a second, bandwidth], as flce_gpu. */
std::vector<double> find_gpu(std::string text) {
  flce_gpu gpu = gpu_of(text);
  return {static_cast<double>(gpu.capability), static_cast<double>(gpu.multiprocessors),
          static_cast<double>(gpu.memory), gpu.multiply_adds, gpu.bandwidth};
}

/* The problem of the teacher, where `operands` name one; `student` becomes that of a divergence. */
std::optional<flce_problem> add_teacher(const std::vector<int64_t>& operands,
                                        const PackedOptions& options, flce_problem* student) {
  int64_t hidden = operands[kTeacherHidden], logits = operands[kTeacherLogits];
  if (hidden == 0 && logits < 0) return std::nullopt;
  student->divergence = FLCE_FORWARD_KL; /* no size depends on which one it is */
  student->beta = 0.5;
  flce_problem problem = teacher_of(*student);
  if (logits >= 0) {
    give_logits(static_cast<flce_dtype>(logits), student->weight_rows, &problem);
    return problem;
  }
  problem.hidden = hidden;
  problem.has_bias = false;
  choose_teacher_dtypes(options, &problem);
  check_elements(problem);
  return problem;
}

/* The plan's fields in JSON, its sampled_time, and its text. `gpu`: one that need not be there, as
 * flce_find_gpu takes it; empty for the CPU or the CUDA device of that index. */
std::tuple<std::string, double, std::string> plan(std::string gpu, int64_t device_index,
                                                  std::vector<int64_t> operands,
                                                  std::optional<int64_t> valid_vocab,
                                                  std::vector<int64_t> integers,
                                                  std::vector<double> numbers) {
  PackedOptions options = unpack_options(integers, numbers);
  flce_problem problem = problem_of(operands, valid_vocab, options);
  check_elements(problem);
  std::optional<flce_problem> teacher = add_teacher(operands, options, &problem);
  if (teacher) problem.teacher = &*teacher;
  flce_plan made;
  if (!gpu.empty()) {
    flce_gpu absent = gpu_of(gpu);
    flce_backend backend;
    flce_gpu_backend(&absent, &backend);
    check(flce_plan_step(&backend, &problem, &made));
    return {text_of(flce_plan_json, made), made.sampled_time, text_of(flce_plan_text, made)};
  }
  bool cpu = operands[kOnCpu] != 0;
  DeviceId id = {cpu ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda(),
                 static_cast<int32_t>(device_index)};
  Device device(id, options.allow_tf32);
  check(flce_plan_step(device.table(), &problem, &made));
  return {text_of(flce_plan_json, made), made.sampled_time, text_of(flce_plan_text, made)};
}

}  // namespace

FLCE_LIBRARY_FRAGMENT(m) {
  m.def("describe(int[] operands, int? valid_vocab, int[] integers, float[] numbers) -> int[]");
  m.def(
      "plan(str gpu, int device_index, int[] operands, int? valid_vocab, int[] integers, float[] "
      "numbers) -> (str fields, float sampled_time, str text)");
  m.def("gpu_names() -> str");
  m.def("find_gpu(str gpu) -> float[]");
}

FLCE_LIBRARY_IMPL(CompositeExplicitAutograd, m) {
  m.impl("describe", TORCH_BOX(&describe));
  m.impl("plan", TORCH_BOX(&plan));
  m.impl("gpu_names", TORCH_BOX(&gpu_names));
  m.impl("find_gpu", TORCH_BOX(&find_gpu));
}

}  // namespace flce
