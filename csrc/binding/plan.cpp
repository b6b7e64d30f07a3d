/* The operators without tensors that tell what a call would do: `describe`, for the fakes of the
 * operators and the checks of options alone, and `plan`, for flce.plan. Of the plan's rules
 * flce.linear_loss, which has chunks of its own, asks for `wide_sum_chunks`. */
#include <tuple>

#include "binding/call.h"
#include "binding/library.h"
#include "gpu.h"

namespace flce {

namespace {

/* Sizes and dtypes of a call: a dtype is its index in flce_dtype, or -1 for None. rows: to compute;
 * added_dtype: of the gradient to which dW is added; classes: of each row, whose logits are an
 * output; teacher_hidden: of a divergence's teacher, 0 for none; teacher_logits: dtype of its
 * logits, where they are given. */
struct Sizes {
  int64_t on_cpu, tokens, hidden, weight_rows, rows, probabilities, classes, teacher_hidden;
  int64_t input_dtype, weight_dtype, bias_dtype, added_dtype, teacher_logits;
};
#define SIZES_SCHEMA                                                                      \
  "int? valid_vocab, int[] integers, float[] numbers, *, int on_cpu=0, int tokens=0, "    \
  "int hidden=8, int weight_rows=1, int rows=0, int probabilities=0, int input_dtype=1, " \
  "int weight_dtype=1, int bias_dtype=-1, int added_dtype=-1, int classes=0, "            \
  "int teacher_hidden=0, int teacher_logits=-1"
#define SIZES_ARGUMENTS                                                                           \
  std::optional<int64_t> valid_vocab, std::vector<int64_t> integers, std::vector<double> numbers, \
      int64_t on_cpu, int64_t tokens, int64_t hidden, int64_t weight_rows, int64_t rows,          \
      int64_t probabilities, int64_t input_dtype, int64_t weight_dtype, int64_t bias_dtype,       \
      int64_t added_dtype, int64_t classes, int64_t teacher_hidden, int64_t teacher_logits
#define SIZES                                                                                   \
  {on_cpu,         tokens,      hidden,       weight_rows, rows,        probabilities, classes, \
   teacher_hidden, input_dtype, weight_dtype, bias_dtype,  added_dtype, teacher_logits}

flce_problem problem_of(const Sizes& sizes, std::optional<int64_t> valid_vocab,
                        const PackedOptions& options) {
  const struct {
    const char* name;
    int64_t dtype, least;
  } dtypes[] = {{"input_dtype", sizes.input_dtype, 0},
                {"weight_dtype", sizes.weight_dtype, 0},
                {"bias_dtype", sizes.bias_dtype, -1},
                {"added_dtype", sizes.added_dtype, -1},
                {"teacher_logits", sizes.teacher_logits, -1}};
  for (const auto& one : dtypes)
    if (one.dtype < one.least || one.dtype > FLCE_F16)
      refuse(one.name, "the index of a dtype", std::to_string(one.dtype));
  flce_problem problem = options.problem;
  problem.shape.tokens = sizes.tokens;
  problem.shape.hidden = sizes.hidden;
  problem.shape.weight_rows = sizes.weight_rows;
  problem.shape.rows = sizes.rows;
  problem.dtypes.input = static_cast<flce_dtype>(sizes.input_dtype);
  problem.dtypes.weight = static_cast<flce_dtype>(sizes.weight_dtype);
  problem.has.bias = sizes.bias_dtype >= 0;
  problem.dtypes.bias =
      problem.has.bias ? static_cast<flce_dtype>(sizes.bias_dtype) : problem.dtypes.input;
  problem.backward.adds_grad_weight = sizes.added_dtype >= 0;
  if (problem.backward.adds_grad_weight)
    problem.backward.added_dtype = static_cast<flce_dtype>(sizes.added_dtype);
  problem.has.probabilities = sizes.probabilities != 0;
  if (sizes.classes > 0) problem.wants.row_classes = sizes.classes;
  check(
      flce_find_classes(&problem, options.start, options.vocab, valid_vocab.value_or(FLCE_ABSENT)));
  choose_dtypes(options, &problem);
  return problem;
}

/* The problem of the teacher of a divergence, which the options name or, as no size depends on
 * which one it is, the teacher's sizes alone. */
std::optional<flce_problem> add_teacher(int64_t hidden, int64_t logits,
                                        const PackedOptions& options, flce_problem* student) {
  bool has_sizes = hidden != 0 || logits >= 0;
  if (!student->divergence.kind && !has_sizes) return std::nullopt;
  if (!student->divergence.kind) student->divergence.kind = FLCE_FORWARD_KL;
  flce_problem problem = teacher_of(*student);
  if (logits >= 0) {
    set_teacher_logits(static_cast<flce_dtype>(logits), student->shape.weight_rows, &problem);
    return problem;
  }
  problem.shape.hidden = hidden != 0 ? hidden : 1;
  problem.has.bias = false;
  choose_teacher_dtypes(options, &problem);
  return problem;
}

/* [strategy and most rows of the first two ranges of rows (flce_strategies), strategy of the last;
 * whether statistics are kept; dtype and leading dimension of what is saved; dtypes of the
 * gradients of input, weight and bias; stat dtype; first class, number of all classes; candidates
 * for topk]. Checks the options. No device is asked: what does not depend on rows follows from the
 * device's type alone. */
std::vector<int64_t> describe(SIZES_ARGUMENTS) {
  PackedOptions options = unpack_options(integers, numbers);
  flce_problem problem = problem_of(SIZES, valid_vocab, options);
  std::optional<flce_problem> teacher =
      add_teacher(teacher_hidden, teacher_logits, options, &problem);
  if (teacher) problem.divergence.teacher = &*teacher;
  check(flce_check_problem(&problem));
  flce_facts facts = {0};
  flce_facts_of_type(on_cpu != 0, problem.dtypes.gemm, &facts);
  flce_problem equal = flce_equal_share(&problem);
  flce_strategies s;
  flce_choose_strategies(&equal, &facts, &s);
  flce_plan plan = {};
  const auto &one_chunk = s.ranges[FLCE_ROWS_OF_ONE_CHUNK], &to_keep = s.ranges[FLCE_ROWS_TO_KEEP];
  plan.strategy = problem.save = s.ranges[FLCE_ROWS_BEYOND].strategy;
  flce_choose_dtypes(&problem, &facts, &plan);
  int64_t saved = plan.strategy == FLCE_SAVE_SAMPLES ? -1 : plan.saved_dtype;
  return {one_chunk.strategy,
          one_chunk.most_rows,
          to_keep.strategy,
          to_keep.most_rows,
          plan.strategy,
          plan.keeps_statistics,
          saved,
          plan.saved_pitch,
          plan.grad_input_dtype,
          plan.grad_weight_dtype,
          plan.grad_bias_dtype,
          flce_stat_dtype(problem.dtypes.gemm),
          problem.shard.first_class,
          flce_is_sharded(&problem) ? problem.shard.classes : problem.shape.vocab,
          problem.wants.row_classes};
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

int64_t wide_sum_chunks() {
  return FLCE_WIDE_SUM_CHUNKS;
}

/* [capability, multiprocessors, memory, multiply-adds a second, bandwidth], as flce_gpu. */
std::vector<double> find_gpu(std::string text) {
  flce_gpu gpu = gpu_of(text);
  return {static_cast<double>(gpu.capability), static_cast<double>(gpu.multiprocessors),
          static_cast<double>(gpu.memory), gpu.multiply_adds, gpu.bandwidth};
}

/* The plan's fields in JSON, its sampled_time, and its text. `gpu`: one that need not be there, as
 * flce_find_gpu takes it; empty for the CPU or the CUDA device of that index. */
std::tuple<std::string, double, std::string> plan(std::string gpu, int64_t device_index,
                                                  SIZES_ARGUMENTS) {
  PackedOptions options = unpack_options(integers, numbers);
  flce_problem problem = problem_of(SIZES, valid_vocab, options);
  std::optional<flce_problem> teacher =
      add_teacher(teacher_hidden, teacher_logits, options, &problem);
  if (teacher) problem.divergence.teacher = &*teacher;
  flce_plan made;
  if (!gpu.empty()) {
    flce_gpu absent = gpu_of(gpu);
    flce_backend backend;
    flce_gpu_backend(&absent, &backend);
    check(flce_plan_step(&backend, &problem, &made));
    return {text_of(flce_plan_json, made), made.sampled_time, text_of(flce_plan_text, made)};
  }
  DeviceId id = {on_cpu ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda(),
                 static_cast<int32_t>(device_index)};
  Device device(id, options.allow_tf32);
  check(flce_plan_step(device.table(), &problem, &made));
  return {text_of(flce_plan_json, made), made.sampled_time, text_of(flce_plan_text, made)};
}

}  // namespace

FLCE_LIBRARY_FRAGMENT(m) {
  m.def("describe(" SIZES_SCHEMA ") -> int[]");
  m.def("plan(str gpu, int device_index, " SIZES_SCHEMA
        ") -> (str fields, float sampled_time, str text)");
  m.def("gpu_names() -> str");
  m.def("wide_sum_chunks() -> int");
  m.def("find_gpu(str gpu) -> float[]");
}

FLCE_LIBRARY_IMPL(CompositeExplicitAutograd, m) {
  m.impl("describe", TORCH_BOX(&describe));
  m.impl("plan", TORCH_BOX(&plan));
  m.impl("gpu_names", TORCH_BOX(&gpu_names));
  m.impl("wide_sum_chunks", TORCH_BOX(&wide_sum_chunks));
  m.impl("find_gpu", TORCH_BOX(&find_gpu));
}

}  // namespace flce
