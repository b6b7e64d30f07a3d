/* Checks the arguments of a call against each other. A refusal names the argument as
 * flce.linear_cross_entropy does. */
#include "binding/call.h"

#include <cstring>
#include <utility>

#include "environment.h"

namespace flce {

namespace {

std::string shape_of_text(const Tensor& tensor) {
  std::string text = shape_text(shape_of(tensor));
  if (text != "(0,)") return text;
  return text +
         ", as DeepSpeed's ZeRO-3 leaves a parameter outside of its Module's hooks: call the "
         "Module (flce.LinearCrossEntropyHead, or the model after flce.fuse), or enter "
         "deepspeed.zero.GatheredParameters around forward and backward";
}

/* "torch.bfloat16, or torch.float32", each named once. */
std::string either(flce_dtype own, flce_dtype wide) {
  std::string text = dtype_text(to_scalar_type(own));
  return own == wide ? text : text + ", or " + dtype_text(to_scalar_type(wide));
}

void check_first(const char* name, const Tensor& tensor, DeviceId id) {
  to_dtype(type_of(tensor), name);
  bool known = id.type == aoti_torch_device_type_cpu() || id.type == aoti_torch_device_type_cuda();
  if (!known) refuse(name, "a CPU or CUDA tensor", "device " + device_text(id));
  if (tensor.dim() < 1) refuse(name, "at least one dimension", "a 0-d tensor");
}

void bind_operands(const Operands& given, Call* call) {
  const Tensor &input = given.input, &weight = given.linear_weight;
  flce_problem* problem = &call->problem;
  check_first("input", input, call->id);
  expect_tensor("linear_weight", weight);
  problem->dtypes.input = to_dtype(type_of(input), "input");
  problem->dtypes.weight = to_dtype(type_of(weight), "linear_weight");
  problem->shape.hidden = input.size(input.dim() - 1);
  if (weight.dim() != 2 || weight.size(1) != problem->shape.hidden)
    refuse("linear_weight",
           "shape (V, " + std::to_string(problem->shape.hidden) + ") for input of shape " +
               shape_text(shape_of(input)),
           shape_of_text(weight));
  problem->shape.weight_rows = weight.size(0);
  expect_device("linear_weight", weight, call->id, "input");
  call->tensors.input = call->pointer("input", input);
  call->tensors.linear_weight = call->pointer("linear_weight", weight);
  uintptr_t addresses = reinterpret_cast<uintptr_t>(call->tensors.input) |
                        reinterpret_cast<uintptr_t>(call->tensors.linear_weight);
  problem->has.unaligned_operand = addresses % 16 != 0;
  problem->has.bias = given.linear_bias.has_value();
  problem->dtypes.bias = problem->dtypes.input;
  if (!given.linear_bias) {
    if (problem->wants.grad_bias)
      refuse("grad_bias", "a linear_bias to take the gradient of", "None");
    return;
  }
  const Tensor& bias = *given.linear_bias;
  problem->dtypes.bias = to_dtype(type_of(bias), "linear_bias");
  if (shape_of(bias) != std::vector<int64_t>{problem->shape.weight_rows})
    refuse("linear_bias", "shape " + shape_text({problem->shape.weight_rows}), shape_of_text(bias));
  expect_device("linear_bias", bias, call->id, "input");
  call->tensors.linear_bias = call->pointer("linear_bias", bias);
}

void bind_target(const Tensor& target, int64_t classes, const std::string& first, Call* call) {
  flce_problem* problem = &call->problem;
  expect_tensor("target", target);
  ScalarType type = type_of(target);
  problem->has.probabilities = is_float(type);
  if (!is_float(type) && type != ScalarType::Long && type != ScalarType::Int)
    refuse(
        "target",
        "class indices of dtype torch.int64 or torch.int32, or probabilities of a floating dtype",
        dtype_text(type), FLCE_INVALID_TYPE);
  std::vector<int64_t> expected = call->shape;
  if (problem->has.probabilities) expected.push_back(classes);
  expect_shape("target", target, expected,
               problem->has.probabilities ? " for probabilities, a number for each class"
                                          : ", that of " + first + " without its last dimension");
  expect_device("target", target, call->id, "input");
  if (!problem->has.probabilities) {
    call->tensors.target =
        static_cast<const int64_t*>(call->pointer("target", target, ScalarType::Long));
    return;
  }
  call->tensors.probabilities = call->pointer("target", target);
  call->tensors.probabilities_dtype = to_dtype(type, "target");
}

/* An optional vector of real numbers in the stat dtype. */
const void* bind_vector(const char* name, const OptionalTensor& tensor,
                        const std::vector<int64_t>& shape, const std::string& meaning, Call* call) {
  if (!tensor) return nullptr;
  ScalarType type = type_of(*tensor);
  if (type == ScalarType::ComplexDouble || type == ScalarType::ComplexFloat ||
      type == ScalarType::ComplexHalf)
    refuse(name, "real numbers", dtype_text(type), FLCE_INVALID_TYPE);
  expect_shape(name, *tensor, shape, meaning);
  expect_device(name, *tensor, call->id, "input");
  return call->pointer(name, *tensor, to_scalar_type(flce_stat_dtype(call->problem.dtypes.gemm)));
}

bool is_cpu(const Call& call) {
  return call.id.type == aoti_torch_device_type_cpu();
}

int64_t all_classes(const flce_problem& problem) {
  return flce_is_sharded(&problem) ? problem.shard.classes : problem.shape.vocab;
}

/* Checks the range of the classes in `ids`, host memory: indices, and the id of none. */
void check_classes(const int64_t* ids, const flce_problem& problem) {
  int64_t none = flce_no_class(&problem), most = all_classes(problem);
  for (int64_t i = 0; i < problem.shape.tokens * problem.wants.row_classes; i++) {
    if (ids[i] != none && (ids[i] < 0 || ids[i] >= most))
      throw Failure(FLCE_TARGET_OUT_OF_RANGE,
                    "classes: row " +
                        std::to_string(problem.shape.first_token + i / problem.wants.row_classes) +
                        " has class " + std::to_string(ids[i]) + ", expected 0 to " +
                        std::to_string(most - 1) + ", or ignore_index");
  }
}

/* The classes of each row whose logits are an output. */
void bind_classes(const OptionalTensor& classes, const std::string& first, Call* call) {
  flce_problem* problem = &call->problem;
  if (!classes) return;
  int64_t count = classes->dim() > 0 ? classes->size(classes->dim() - 1) : 0;
  std::vector<int64_t> shape = call->shape;
  shape.push_back(std::max<int64_t>(count, 1));
  expect_shape("classes", *classes, shape, ", a number of classes for each row of " + first);
  if (type_of(*classes) != ScalarType::Int) expect_type("classes", *classes, ScalarType::Long);
  expect_device("classes", *classes, call->id, "input");
  problem->wants.row_classes = count;
  const void* ids = call->pointer("classes", *classes, ScalarType::Long);
  call->tensors.classes = static_cast<int64_t*>(const_cast<void*>(ids));
  if (is_cpu(*call)) check_classes(call->tensors.classes, *problem);
}

/* `classes`: of class weights and probabilities; `first`: the tensor with the rows, in words. */
void bind_loss(const LossTensors& given, int64_t classes, const std::string& first, Call* call) {
  flce_problem* problem = &call->problem;
  bind_target(given.target, classes, first, call);
  if (given.weight) to_dtype(type_of(*given.weight), "weight");
  problem->has.class_weight = given.weight.has_value();
  call->tensors.class_weight =
      bind_vector("weight", given.weight, {classes}, ", a factor for each class", call);
  std::string each = ", a number for each row of " + first;
  call->tensors.token_weight =
      bind_vector("token_weight", given.token_weight, call->shape, each, call);
  problem->has.temperature = given.temperature.has_value();
  call->tensors.temperature =
      bind_vector("temperature", given.temperature, call->shape, each, call);
  call->tensors.num_items = bind_vector("num_items", given.num_items, {}, "", call);
  bind_classes(given.classes, first, call);
}

/* The number of targets, in host memory, that are not ignored: at most problem.rows. Refuses those
 * that are no class, where there is one: the plan of a call without classes is refused. */
int64_t valid_rows(const int64_t* target, const flce_problem& problem) {
  int64_t valid = 0, classes = all_classes(problem);
  if (classes < 1) return 0;
  check(flce_check_targets(&problem, target, classes, &valid));
  if (valid > problem.shape.rows)
    refuse("valid_bound",
           "at least " + std::to_string(valid) + ", the number of rows that are not ignored",
           std::to_string(problem.shape.rows));
  return valid;
}

/* Sets problem->shape.rows, those to compute, and saved_rows, those that are allocated. */
void bind_rows(std::optional<int64_t> rows, Call* call) {
  flce_problem* problem = &call->problem;
  int64_t tokens = problem->shape.tokens, bound = rows.value_or(tokens);
  bool counts = bound == kCountedRows;
  if (counts) bound = tokens;
  if (bound < 0 || bound > tokens)
    refuse("rows", "0 to " + std::to_string(tokens) + ", the number of tokens",
           std::to_string(bound));
  problem->shape.rows = call->saved_rows = bound;
  if (problem->has.probabilities) {
    if (bound < tokens)
      refuse("rows", std::to_string(tokens) + " with probabilities, of which no row is ignored",
             std::to_string(bound));
    return;
  }
  if (!is_cpu(*call)) return;
  problem->shape.rows = valid_rows(call->tensors.target, *problem);
  if (counts) call->saved_rows = problem->shape.rows;
}

thread_local bool none_counted = false; /* what take_none_counted returns */

/* Call::none_counted. `valid`: the rows that are not ignored. Not with num_items, which may count
 * the rows of other micro-batches too. */
bool counts_none(int64_t valid, const Call& call) {
  const flce_problem& problem = call.problem;
  bool is_mean = problem.reduction == FLCE_MEAN && !call.tensors.num_items;
  return is_cpu(call) && is_mean && valid == 0 && problem.shape.tokens > 0;
}

/* Checks num_items, where the call divides by it, against the rows that are not ignored. `items`:
 * in host memory and in the stat dtype, or NULL. */
void check_items(const void* items, int64_t valid, const flce_problem& problem) {
  if (!items || problem.reduction != FLCE_MEAN) return;
  bool wide = flce_stat_dtype(problem.dtypes.gemm) == FLCE_F64;
  check(flce_check_items(
      wide ? *static_cast<const double*>(items) : *static_cast<const float*>(items), valid));
}

/* With FLCE_CHECK=1: makes the checks of CPU targets, classes and num_items on other devices too,
 * from copies on the host. Synchronises. */
void check_values(const LossTensors& given, const Call& call) {
  const char* check = flce_variable_text(FLCE_VARIABLE_CHECK);
  const flce_problem& problem = call.problem;
  if (!check || !*check || !std::strcmp(check, "0") || is_cpu(call)) return;
  const DeviceId cpu = {aoti_torch_device_type_cpu(), -1};
  const ScalarType type = ScalarType::Long,
                   stat = to_scalar_type(flce_stat_dtype(problem.dtypes.gemm));
  OptionalTensor items;
  if (given.num_items) items = copied("num_items", *given.num_items, stat, cpu);
  const void* number = items ? items->const_data_ptr() : nullptr;
  if (problem.has.probabilities) {
    check_items(number, problem.shape.tokens, problem);
    return;
  }
  if (given.classes) {
    Tensor classes = copied("classes", *given.classes, type, cpu);
    check_classes(static_cast<const int64_t*>(classes.const_data_ptr()), problem);
  }
  Tensor copy = copied("target", given.target, type, cpu);
  int64_t valid = valid_rows(static_cast<const int64_t*>(copy.const_data_ptr()), problem);
  check_items(number, valid, problem);
}

/* Whether a teacher of so many classes has those of all ranks, of which this one reads its own. */
bool has_all_classes(const flce_problem& student, int64_t rows) {
  return flce_is_sharded(&student) && rows != student.shape.weight_rows &&
         rows >= student.shard.classes;
}

/* The teacher's operands, of the student's dtype and rows. A refusal names teacher_input,
 * teacher_weight or teacher_bias. */
void bind_teacher_operands(const Teacher& given, const PackedOptions& options, const Call& student,
                           Call* call) {
  flce_problem* problem = &call->problem;
  try {
    expect_device("input", *given.input, call->id, "input");
    bind_operands({*given.input, *given.linear_weight, given.linear_bias}, call);
    choose_teacher_dtypes(options, problem);
    ScalarType own = to_scalar_type(student.problem.dtypes.gemm);
    if (problem->dtypes.gemm != student.problem.dtypes.gemm)
      refuse("input", "the dtype of the student's, " + dtype_text(own),
             dtype_text(type_of(*given.input)), FLCE_INVALID_TYPE);
    std::vector<int64_t> rows = leading_shape(student.input());
    rows.push_back(problem->shape.hidden);
    expect_shape("input", *given.input, rows, ", that of the student's but for the last dimension");
  } catch (const Failure& failure) {
    std::string text = failure.message(), prefix = "linear_";
    if (text.rfind(prefix, 0) == 0) text = text.substr(prefix.size());
    throw Failure(failure.status(), "teacher_" + text);
  }
  if (!has_all_classes(student.problem, problem->shape.weight_rows)) return;
  int64_t first = problem->shard.first_class;
  auto skip = [](const void* data, int64_t elements, flce_dtype dtype) -> const void* {
    return data ? static_cast<const char*>(data) + elements * flce_size_of(dtype) : nullptr;
  };
  flce_tensors* tensors = &call->tensors;
  tensors->linear_weight =
      skip(tensors->linear_weight, first * problem->shape.hidden, problem->dtypes.weight);
  tensors->linear_bias = skip(tensors->linear_bias, first, problem->dtypes.bias);
  problem->shape.weight_rows = student.problem.shape.weight_rows;
}

/* The teacher's logits, read in their own dtype, but in float64 where the operands are. */
void bind_teacher_logits(const Tensor& logits, Call* call) {
  flce_problem* problem = &call->problem;
  int64_t columns = logits.dim() > 0 ? logits.size(logits.dim() - 1) : 0;
  std::vector<int64_t> shape = call->shape;
  shape.push_back(columns);
  expect_shape("teacher_logits", logits, shape, ", a logit for each class");
  expect_device("teacher_logits", logits, call->id, "input");
  flce_dtype dtype = to_dtype(type_of(logits), "teacher_logits");
  set_teacher_logits(dtype, columns, problem);
  if (has_all_classes(*problem, columns))
    problem->shape.first_logit = problem->shard.first_class;
  else
    problem->shape.weight_rows = columns;
  call->tensors.input =
      call->pointer("teacher_logits", logits, to_scalar_type(problem->dtypes.gemm));
}

}  // namespace

flce_problem teacher_of(const flce_problem& student) {
  flce_problem problem{}; /* what the call wants of the student is not wanted of it */
  problem.reduction = FLCE_SUM;
  problem.save = FLCE_SAVE_NOTHING;
  problem.shape.tokens = student.shape.tokens;
  problem.shape.hidden = student.shape.hidden;
  problem.shape.rows = student.shape.rows;
  problem.shape.vocab = student.shape.vocab;
  problem.shape.weight_rows = student.shape.weight_rows;
  problem.dtypes.gemm = student.dtypes.gemm;
  problem.dtypes.input = student.dtypes.input;
  problem.dtypes.weight = student.dtypes.weight;
  problem.dtypes.bias = student.dtypes.bias;
  problem.dtypes.accum = student.dtypes.accum;
  problem.dtypes.logits = student.dtypes.logits;
  problem.shard.ranks = student.shard.ranks;
  problem.shard.rank = student.shard.rank;
  problem.shard.first_class = student.shard.first_class;
  problem.shard.classes = student.shard.classes;
  problem.shard.input_is_sharded = student.shard.input_is_sharded;
  problem.loss = student.loss; /* make_teacher replaces what maps logits */
  problem.divergence.kind = student.divergence.kind;
  problem.memory.bound = student.memory.bound;
  problem.memory.kept = student.memory.kept;
  problem.memory.bound_is_default = student.memory.bound_is_default;
  return problem;
}

void expect_no_divergence(const PackedOptions& options) {
  if (options.problem.divergence.kind != FLCE_NO_DIVERGENCE)
    refuse("divergence", "0 in an operator without a teacher",
           std::to_string(options.problem.divergence.kind));
}

void choose_teacher_dtypes(const PackedOptions& options, flce_problem* teacher) {
  choose_dtypes(options, teacher);
  teacher->dtypes.accum = teacher->dtypes.gemm;
  teacher->dtypes.logits = flce_stat_dtype(teacher->dtypes.gemm);
}

void set_teacher_logits(flce_dtype dtype, int64_t columns, flce_problem* teacher) {
  if ((dtype == FLCE_F64) != (teacher->dtypes.gemm == FLCE_F64))
    dtype = flce_stat_dtype(teacher->dtypes.gemm);
  teacher->dtypes.gemm = teacher->dtypes.input = teacher->dtypes.weight = teacher->dtypes.bias =
      dtype;
  teacher->dtypes.accum = dtype;
  teacher->dtypes.logits = flce_stat_dtype(dtype);
  teacher->has.logits = true;
  teacher->has.bias = teacher->shard.input_is_sharded = false;
  teacher->shape.hidden = std::max<int64_t>(columns, 1);
}

void choose_dtypes(const PackedOptions& options, flce_problem* problem) {
  flce_dtype own = problem->dtypes.input, weight = problem->dtypes.weight,
             bias = problem->dtypes.bias;
  bool has_f64 = own == FLCE_F64 || weight == FLCE_F64 || bias == FLCE_F64;
  problem->dtypes.gemm = own;
  if (options.autocast >= 0 && !has_f64) { /* which autocast does not cast */
    problem->dtypes.gemm = static_cast<flce_dtype>(options.autocast);
  } else {
    flce_dtype wide = flce_stat_dtype(own);
    if (weight != own)
      refuse("linear_weight", "the dtype of input, " + dtype_text(to_scalar_type(own)),
             dtype_text(to_scalar_type(weight)) + "; torch.autocast casts both", FLCE_INVALID_TYPE);
    if (bias != own && bias != wide)
      refuse("linear_bias", "the dtype of input, " + either(own, wide),
             dtype_text(to_scalar_type(bias)) + "; torch.autocast casts it", FLCE_INVALID_TYPE);
  }
  problem->dtypes.widens_accum = options.accum_dtype < 0;
  problem->dtypes.accum = problem->dtypes.widens_accum
                              ? problem->dtypes.gemm
                              : static_cast<flce_dtype>(options.accum_dtype);
  problem->dtypes.logits = options.logits_dtype < 0 ? flce_stat_dtype(problem->dtypes.gemm)
                                                    : static_cast<flce_dtype>(options.logits_dtype);
}

Call make_call(const Operands& operands, const LossTensors& loss, const CallArgs& arguments) {
  Call call;
  expect_tensor("input", operands.input);
  call.problem = arguments.options.problem;
  call.allow_tf32 = arguments.options.allow_tf32;
  call.id = device_of(operands.input);
  call.kept.reserve(9);
  bind_operands(operands, &call);
  flce_problem* problem = &call.problem;
  int64_t ranks = problem->shard.ranks;
  bool scatters = ranks > 1 && problem->shard.input_is_sharded;
  call.shape = leading_shape(operands.input);
  if (scatters && !call.shape.empty()) call.shape[0] *= ranks;
  problem->shape.tokens = count_of(call.shape);
  check(flce_find_classes(problem, arguments.options.start, arguments.options.vocab,
                          arguments.valid_vocab.value_or(FLCE_ABSENT)));
  choose_dtypes(arguments.options, problem);
  std::string first = "input";
  if (scatters) first = "the inputs of " + std::to_string(ranks) + " ranks (sequence=True)";
  int64_t classes = arguments.options.vocab; /* of all ranks, padding included */
  if (ranks == 0 || classes < 0) classes = std::max<int64_t>(ranks, 1) * problem->shape.weight_rows;
  bind_loss(loss, classes, first, &call);
  bind_rows(arguments.rows, &call);
  if (is_cpu(call)) check_items(call.tensors.num_items, problem->shape.rows, *problem);
  call.none_counted = counts_none(problem->shape.rows, call);
  check_values(loss, call);
  return call;
}

bool take_none_counted() {
  return std::exchange(none_counted, false);
}

void report_none_counted(const Call& call) {
  none_counted = call.none_counted;
}

Call make_teacher(const Teacher& given, const PackedOptions& options, const Call& student) {
  expect_tensor(given.linear_weight ? "teacher_input" : "teacher_logits", *given.input);
  Call call;
  call.problem = teacher_of(student.problem);
  call.id = student.id;
  call.shape = student.shape;
  flce_problem* problem = &call.problem;
  problem->loss.softcap = options.teacher.softcap;
  problem->loss.logit_scale = options.teacher.logit_scale;
  problem->loss.temperature = options.teacher.temperature;
  if (!given.linear_weight && given.linear_bias)
    refuse("teacher_bias", "None with teacher_logits, which contain it",
           "shape " + shape_of_text(*given.linear_bias));
  if (given.linear_weight)
    bind_teacher_operands(given, options, student, &call);
  else
    bind_teacher_logits(*given.input, &call);
  problem->has.temperature = given.temperature.has_value();
  call.tensors.temperature = bind_vector("teacher_temperature", given.temperature, call.shape,
                                         ", a number for each row of input", &call);
  int64_t own = student.problem.shape.weight_rows, vocab = problem->shape.vocab,
          rows = problem->shape.weight_rows;
  if (rows != own && (vocab == own || rows < vocab)) /* beyond valid_vocab they may differ */
    refuse(problem->has.logits ? "teacher_logits" : "teacher_weight",
           std::to_string(own) + " classes, those of linear_weight", std::to_string(rows));
  return call;
}

Call make_call(const Tensor& logits, const LossTensors& loss, const PackedOptions& options) {
  Call call;
  expect_tensor("logits", logits);
  expect_no_divergence(options);
  call.problem = options.problem;
  call.id = device_of(logits);
  check_first("logits", logits, call.id);
  call.shape = leading_shape(logits);
  flce_problem* problem = &call.problem;
  problem->shape.tokens = problem->shape.rows = count_of(call.shape);
  problem->shape.vocab = problem->shape.weight_rows = logits.size(logits.dim() - 1);
  if (problem->shape.vocab < 1)
    refuse("logits", "at least one class", "shape " + shape_text(shape_of(logits)));
  problem->dtypes.gemm = to_dtype(type_of(logits), "logits");
  call.tensors.input = call.pointer("logits", logits);
  bind_loss(loss, problem->shape.vocab, "logits", &call);
  int64_t valid = problem->shape.tokens;
  if (is_cpu(call) && !problem->has.probabilities)
    valid = valid_rows(call.tensors.target, *problem);
  if (is_cpu(call)) check_items(call.tensors.num_items, valid, *problem);
  call.none_counted = counts_none(valid, call);
  check_values(loss, call);
  return call;
}

}  // namespace flce
