/* The operators: schemas, boxing, argument checks, status -> error. The files of csrc/binding are
 * the only C++ and the only code that includes torch. They use torch's stable ABI only, so one
 * build works with every torch >= 2.10.
 */
#include <tuple>

#include "binding/op_comm.h"
#include "binding/op_options.h"
#include "binding/op_outputs.h"

namespace {

// ---- tensors of the loss ----

/* The tensors of the loss other than the operands; every operator takes them in this order. */
struct LossTensors {
  Tensor target;
  OptionalTensor weight, token_weight, temperature, num_items;
};

/* Checks the tensors of the loss against the sizes of the problem, and sets the fields of `problem`
 * and `tensors` that follow from them. */
void bind_loss(const LossTensors& given, DeviceId id, flce_problem* problem,
               flce_tensors* tensors) {
  flce_dtype stat = flce_stat_dtype(problem->dtype);
  const Tensor& target = given.target;
  expect_same_device("target", target, id);
  problem->has_probabilities = target.scalar_type() != ScalarType::Long;
  if (problem->has_probabilities) {
    tensors->probabilities_dtype = to_dtype(target.scalar_type(), "target");
    expect_shape("target", target, {problem->tokens, problem->weight_rows});
    tensors->probabilities = target.const_data_ptr();
  } else {
    expect_shape("target", target, {problem->tokens});
    tensors->target = static_cast<const int64_t*>(target.const_data_ptr());
  }
  problem->has_class_weight = given.weight.has_value();
  int64_t classes = flce_is_sharded(problem) ? problem->classes : problem->weight_rows;
  tensors->class_weight = optional_pointer("weight", given.weight, {classes}, stat, id);
  tensors->token_weight =
      optional_pointer("token_weight", given.token_weight, {problem->tokens}, stat, id);
  tensors->temperature =
      optional_pointer("temperature", given.temperature, {problem->tokens}, stat, id);
  problem->has_temperature = given.temperature.has_value();
  tensors->num_items = optional_pointer("num_items", given.num_items, {}, stat, id);
}

/* The number of rows to compute: on the CPU the rows that are not ignored; on a GPU the caller's
 * bound, or all rows. */
int64_t rows_to_compute(const flce_problem& problem, const flce_tensors& tensors, DeviceId id,
                        std::optional<int64_t> bound) {
  int64_t tokens = problem.tokens;
  if (bound && (*bound < 0 || *bound > tokens))
    throw Failure(FLCE_INVALID_ARGUMENT, "rows: expected 0 to " + std::to_string(tokens) +
                                             ", the number of tokens, got " +
                                             std::to_string(*bound));
  if (problem.has_probabilities) {
    if (bound.value_or(tokens) < tokens)
      throw Failure(FLCE_INVALID_ARGUMENT,
                    "rows: expected " + std::to_string(tokens) +
                        " with probabilities, of which no row is ignored, got " +
                        std::to_string(*bound));
    return tokens;
  }
  if (id.type != aoti_torch_device_type_cpu()) return bound.value_or(tokens);
  int64_t valid = 0;
  for (int64_t i = 0; i < tokens; i++) valid += tensors.target[i] != problem.loss.ignore_index;
  if (bound && valid > *bound)
    throw Failure(FLCE_INVALID_ARGUMENT, "valid_bound: expected at least " + std::to_string(valid) +
                                             ", the number of rows that are not ignored, got " +
                                             std::to_string(*bound));
  return valid;
}

// ---- linear cross entropy ----

/* The arguments after the tensors in the schemas of forward, backward and plan. */
#define SETTINGS \
  "SymInt? valid_vocab, SymInt? rows, int[] integers, float[] numbers, str? group=None"
/* The arguments after the tensors, parsed. */
struct Settings {
  std::optional<int64_t> valid_vocab, rows;
  Options options;
  std::optional<std::string> group; /* of a sharded vocabulary: its name in torch.distributed */
};

/* The number of W's rows that are classes. */
int64_t classes_of(const flce_problem& problem, std::optional<int64_t> valid_vocab) {
  if (!flce_is_sharded(&problem)) return valid_vocab.value_or(problem.weight_rows);
  int64_t left = problem.classes - problem.first_class;
  return left < 0 ? 0 : left < problem.weight_rows ? left : problem.weight_rows;
}

/* input [N, H], linear_weight [V, H] and linear_bias [V]. */
struct Operands {
  Tensor input, linear_weight;
  OptionalTensor linear_bias;
};

/* Checks the operands against each other; sets the sizes in `problem` and the data pointers in
 * `tensors`. */
void bind_operands(const Operands& given, const LossTensors& loss, const Settings& settings,
                   flce_problem* problem, flce_tensors* tensors) {
  const Tensor &input = given.input, &linear_weight = given.linear_weight;
  const OptionalTensor& linear_bias = given.linear_bias;
  DeviceId id = device_of(input);
  expect_dim("input", input, 2);
  expect_dim("linear_weight", linear_weight, 2);
  bool scatters = flce_is_sharded(problem) && problem->input_is_sharded;
  problem->tokens = input.size(0) * (scatters ? problem->ranks : 1);
  problem->hidden = input.size(1);
  problem->weight_rows = linear_weight.size(0);
  problem->vocab = classes_of(*problem, settings.valid_vocab);
  problem->input_dtype = to_dtype(input.scalar_type(), "input");
  problem->weight_dtype = to_dtype(linear_weight.scalar_type(), "linear_weight");
  expect_shape("input", input, {flce_input_rows(problem), problem->hidden});
  expect_shape("linear_weight", linear_weight, {problem->weight_rows, problem->hidden});
  expect_same_device("linear_weight", linear_weight, id);
  tensors->input = input.const_data_ptr();
  tensors->linear_weight = linear_weight.const_data_ptr();
  uintptr_t addresses = reinterpret_cast<uintptr_t>(tensors->input) |
                        reinterpret_cast<uintptr_t>(tensors->linear_weight);
  problem->unaligned = addresses % 16 != 0;
  problem->has_bias = linear_bias.has_value();
  problem->bias_dtype = problem->input_dtype;
  if (linear_bias) {
    expect_shape("linear_bias", *linear_bias, {problem->weight_rows});
    expect_same_device("linear_bias", *linear_bias, id);
    problem->bias_dtype = to_dtype(linear_bias->scalar_type(), "linear_bias");
    tensors->linear_bias = linear_bias->const_data_ptr();
  } else if (problem->want_grad_bias) {
    throw Failure(FLCE_INVALID_ARGUMENT,
                  "grad_bias: expected a linear_bias to take the gradient of, got None");
  }
  bind_loss(loss, id, problem, tensors);
  problem->rows = rows_to_compute(*problem, *tensors, id, settings.rows);
}

/* Text that suggests a max_memory of half the current logits buffer, if that still holds one
 * row. */
std::string memory_advice(const flce_problem& problem, const flce_plan& plan) {
  bool samples = plan.save == FLCE_SAVE_SAMPLES; /* its lists do not depend on max_memory */
  int64_t logits =
      plan.buffers[FLCE_BUF_LOGITS].bytes + (samples ? 0 : plan.buffers[FLCE_BUF_SAVED].bytes);
  int64_t smaller = (logits < problem.max_memory ? logits : problem.max_memory) / 2;
  std::string advice = "; the plan needs " + std::to_string(plan.peak_bytes) +
                       " bytes over the inputs, of which " + std::to_string(logits) +
                       " for logits (save=\"" + flce_save_name(plan.save) + "\")";
  if (smaller < plan.z_pitch * flce_size_of(plan.z_dtype)) return advice;
  advice += ". Try max_memory=" + std::to_string(smaller);
  return plan.save == FLCE_SAVE_LOGITS ? advice + " with save=\"auto\"" : advice;
}

/* Rethrows; out of memory with that text. */
[[noreturn]] void rethrow_with_advice(const Failure& failure, const flce_problem& problem,
                                      const flce_plan& plan) {
  if (failure.status() != FLCE_OUT_OF_MEMORY) throw;
  throw Failure(FLCE_OUT_OF_MEMORY, failure.message() + memory_advice(problem, plan));
}

/* The shape [rows][leading dimension] of what save="logits" and save="samples" keep, with the rows
 * that the operator's caller has given. */
std::vector<int64_t> saved_shape(const flce_problem& problem, const flce_plan& plan,
                                 std::optional<int64_t> rows) {
  return {rows.value_or(problem.tokens), plan.saved_pitch};
}

bool keeps_tensor(const flce_plan& plan) {
  return plan.save == FLCE_SAVE_LOGITS || plan.save == FLCE_SAVE_SAMPLES;
}

/* Checks the tensor that a forward has saved. */
void expect_saved(const OptionalTensor& saved, const std::vector<int64_t>& shape,
                  const flce_plan& plan, DeviceId id) {
  if (!saved)
    throw Failure(FLCE_INVALID_ARGUMENT, std::string("saved: expected a tensor with save=\"") +
                                             flce_save_name(plan.save) + "\", got None");
  expect_shape("saved", *saved, shape);
  if (plan.save == FLCE_SAVE_LOGITS)
    expect_type("saved", *saved, to_scalar_type(plan.saved_dtype),
                flce_dtype_name(plan.saved_dtype));
  else
    expect_type("saved", *saved, ScalarType::Int, "int32");
  expect_same_device("saved", *saved, id);
  /* the CUDA backend reads the lists as pairs */
  bool aligned = reinterpret_cast<uintptr_t>(saved->const_data_ptr()) % 8 == 0;
  if (plan.save == FLCE_SAVE_SAMPLES && !aligned)
    throw Failure(FLCE_INVALID_ARGUMENT, "saved: expected memory aligned to 8 bytes");
}

/* A caller that could not count the valid rows (torch.compile on the CPU) allocates more rows than
 * are computed. The others are set to 0, so that no output is undefined. */
void zero_unused_rows(const Device& device, const flce_problem& problem, const flce_plan& plan,
                      const Tensor& saved) {
  int64_t row_bytes = plan.saved_pitch * flce_size_of(plan.saved_dtype);
  int64_t used = problem.rows * row_bytes, all = saved.size(0) * row_bytes;
  const flce_backend* table = device.table();
  if (used < all)
    check(table->fill(table->self, static_cast<char*>(saved.mutable_data_ptr()) + used, 0,
                      all - used));
}

using ForwardResult = std::tuple<Tensor, OptionalTensor, OptionalTensor, OptionalTensor,
                                 OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor>;

ForwardResult run_forward(const Device& device, const flce_problem& problem, const flce_plan& plan,
                          const Settings& settings, const Tensor& input, flce_tensors* tensors) {
  Statistics made = allocate_statistics(device, problem, plan.keeps_statistics, tensors);
  OptionalTensor saved;
  if (keeps_tensor(plan)) {
    std::vector<int64_t> shape = saved_shape(problem, plan, settings.rows);
    saved = plan.save == FLCE_SAVE_LOGITS ? device.allocate(shape, plan.saved_dtype, "saved")
                                          : device.allocate_lists(shape, "saved");
    tensors->saved = saved->mutable_data_ptr();
    zero_unused_rows(device, problem, plan, *saved);
  }
  Tensor loss = allocate_loss(device, problem, tensors);
  Gradients gradients;
  if (plan.save == FLCE_SAVE_GRADS) gradients = allocate_gradients(device, problem, plan, tensors);
  Tensor workspace = device.allocate_bytes(plan.forward_workspace_bytes, "forward workspace");
  tensors->workspace = workspace.mutable_data_ptr();
  Collectives collectives(device, problem, settings.group, {input, gradients.input, workspace});
  check(flce_forward(device.table(), collectives.table(), &problem, &plan, tensors));
  return {loss,  made.stats,      made.scalars,     made.predictions,
          saved, gradients.input, gradients.weight, gradients.bias};
}

/* Binds the seed of the draw, which save="samples" needs. */
void bind_seed(const OptionalTensor& seed, const flce_problem& problem, DeviceId id,
               flce_tensors* tensors) {
  if (problem.save != FLCE_SAVE_SAMPLES) return;
  if (!seed)
    throw Failure(FLCE_INVALID_ARGUMENT, "seed: expected a tensor with save=\"samples\", got None");
  if (seed->numel() != 1)
    throw Failure(FLCE_INVALID_ARGUMENT,
                  "seed: expected one element, got shape " + shape_text(shape_of(*seed)));
  expect_type("seed", *seed, ScalarType::Long, "int64");
  expect_same_device("seed", *seed, id);
  tensors->seed = static_cast<const int64_t*>(seed->const_data_ptr());
}

ForwardResult forward(Tensor input, Tensor linear_weight, Tensor target, OptionalTensor linear_bias,
                      OptionalTensor weight, OptionalTensor token_weight,
                      OptionalTensor token_temperature, OptionalTensor num_items,
                      OptionalTensor seed, std::optional<int64_t> valid_vocab,
                      std::optional<int64_t> rows, std::vector<int64_t> integers,
                      std::vector<double> numbers, std::optional<std::string> group) {
  Settings settings = {valid_vocab, rows, read_options(integers, numbers), group};
  flce_problem problem = settings.options.problem;
  flce_tensors tensors{};
  bind_operands({input, linear_weight, linear_bias},
                {target, weight, token_weight, token_temperature, num_items}, settings, &problem,
                &tensors);
  bind_seed(seed, problem, device_of(input), &tensors);
  Device device(device_of(input), settings.options.allow_tf32);
  flce_plan plan = device.plan(problem);
  try {
    return run_forward(device, problem, plan, settings, input, &tensors);
  } catch (const Failure& failure) {
    rethrow_with_advice(failure, problem, plan);
  }
}

Gradients run_backward(const Device& device, const flce_problem& problem, const flce_plan& plan,
                       const std::optional<std::string>& group, const Tensor& input,
                       flce_tensors* tensors) {
  Gradients gradients = allocate_gradients(device, problem, plan, tensors);
  Tensor workspace = device.allocate_bytes(plan.backward_workspace_bytes, "backward workspace");
  tensors->workspace = workspace.mutable_data_ptr();
  Collectives collectives(device, problem, group, {input, gradients.input, workspace});
  check(flce_backward(device.table(), collectives.table(), &problem, &plan, tensors));
  return gradients;
}

/* Binds what a forward saved for its backward, and the upstream gradients. grad_stats holds the
 * gradients of lse and entropy in the rows of these statistics; the other statistics have no
 * gradient. */
void bind_saved(const Tensor& grad_output, const OptionalTensor& grad_stats, const Tensor& stats,
                const Tensor& scalars, const flce_problem& problem, DeviceId id,
                flce_tensors* tensors) {
  flce_dtype stat = flce_stat_dtype(problem.dtype);
  int64_t n = problem.tokens;
  std::vector<int64_t> rows = {n}, one = {};
  expect_like("grad_output", grad_output, problem.reduction == FLCE_NONE ? rows : one, stat, id);
  expect_like("stats", stats, {FLCE_STAT_ROWS, n}, stat, id);
  expect_like("scalars", scalars, {FLCE_SCALAR_COUNT}, stat, id);
  tensors->grad_output = grad_output.const_data_ptr();
  tensors->stats = stats.mutable_data_ptr();
  tensors->scalars = scalars.mutable_data_ptr();
  if (!grad_stats) return;
  expect_like("grad_stats", *grad_stats, {FLCE_STAT_ROWS, n}, stat, id);
  const char* rows_of_stats = static_cast<const char*>(grad_stats->const_data_ptr());
  tensors->grad_lse = rows_of_stats + FLCE_STAT_LSE * n * flce_size_of(stat);
  if (problem.wants_entropy)
    tensors->grad_entropy = rows_of_stats + FLCE_STAT_ENTROPY * n * flce_size_of(stat);
}

/* Binds the caller's gradient tensor of the weight, to which dW is added. */
void bind_added(const Tensor& grad_weight, DeviceId id, flce_problem* problem,
                flce_tensors* tensors) {
  const char* name = "grad_weight_into";
  expect_shape(name, grad_weight, {problem->weight_rows, flce_grad_weight_cols(problem)});
  expect_same_device(name, grad_weight, id);
  if (!problem->want_grad_weight)
    throw Failure(FLCE_INVALID_ARGUMENT,
                  "grad_weight: expected True with grad_weight_into, got False");
  problem->added_dtype = to_dtype(grad_weight.scalar_type(), name);
  problem->adds_grad_weight = true;
  tensors->grad_weight = grad_weight.mutable_data_ptr();
}

/* What a forward saved for its backward, and the upstream gradients. */
struct Kept {
  Tensor grad_output;
  OptionalTensor grad_stats;
  Tensor stats, scalars;
  OptionalTensor saved;
};

/* `added`: the caller's gradient tensor of the weight, to which dW is added; none: allocate one. */
Gradients make_gradients(const OptionalTensor& added, const Kept& kept, const Operands& operands,
                         const LossTensors& loss, const Settings& settings) {
  flce_problem problem = settings.options.problem;
  flce_tensors tensors{};
  bind_operands(operands, loss, settings, &problem, &tensors);
  DeviceId id = device_of(operands.input);
  if (added) bind_added(*added, id, &problem, &tensors);
  if (kept.saved) tensors.saved = kept.saved->mutable_data_ptr();
  uintptr_t addresses =
      reinterpret_cast<uintptr_t>(tensors.saved) | reinterpret_cast<uintptr_t>(tensors.grad_weight);
  problem.weight_unaligned = addresses % 16 != 0;
  Device device(id, settings.options.allow_tf32);
  flce_plan plan = device.plan(problem);
  check(flce_check_backward(&plan));
  bind_saved(kept.grad_output, kept.grad_stats, kept.stats, kept.scalars, problem, id, &tensors);
  if (keeps_tensor(plan))
    expect_saved(kept.saved, saved_shape(problem, plan, settings.rows), plan, id);
  try {
    return run_backward(device, problem, plan, settings.group, operands.input, &tensors);
  } catch (const Failure& failure) {
    rethrow_with_advice(failure, problem, plan);
  }
}

#define BACKWARD_SCHEMA                                                          \
  "Tensor grad_output, Tensor? grad_stats, Tensor input, Tensor linear_weight, " \
  "Tensor target, Tensor? linear_bias, Tensor? weight, Tensor? token_weight, "   \
  "Tensor? token_temperature, Tensor stats, Tensor scalars, Tensor? saved, " SETTINGS
#define BACKWARD_ARGUMENTS                                                                         \
  Tensor grad_output, OptionalTensor grad_stats, Tensor input, Tensor linear_weight,               \
      Tensor target, OptionalTensor linear_bias, OptionalTensor weight,                            \
      OptionalTensor token_weight, OptionalTensor token_temperature, Tensor stats, Tensor scalars, \
      OptionalTensor saved, std::optional<int64_t> valid_vocab, std::optional<int64_t> rows,       \
      std::vector<int64_t> integers, std::vector<double> numbers, std::optional<std::string> group
#define MAKE_GRADIENTS(added)                                                     \
  make_gradients(added, {grad_output, grad_stats, stats, scalars, saved},         \
                 {input, linear_weight, linear_bias},                             \
                 {target, weight, token_weight, token_temperature, std::nullopt}, \
                 {valid_vocab, rows, read_options(integers, numbers), group})

std::tuple<OptionalTensor, OptionalTensor, OptionalTensor> backward(BACKWARD_ARGUMENTS) {
  Gradients made = MAKE_GRADIENTS(std::nullopt);
  return {made.input, made.weight, made.bias};
}

/* torch cannot functionalize an operator that writes to an argument and returns an optional tensor,
 * so a missing gradient is an undefined tensor, which is None in Python as well. */
Tensor or_undefined(const OptionalTensor& made) {
  return made ? *made : Tensor();
}

std::tuple<Tensor, Tensor> backward_into(Tensor grad_weight_into, BACKWARD_ARGUMENTS) {
  Gradients made = MAKE_GRADIENTS(grad_weight_into);
  return {or_undefined(made.input), or_undefined(made.bias)};
}

/* ---- scaling of gradients made by the forward ---- */

flce_scaled scaled_array(const char* name, const Tensor& out, const Tensor& grad, DeviceId id) {
  flce_dtype dtype = to_dtype(grad.scalar_type(), name);
  expect_same_device(name, grad, id);
  expect_contiguous(name, grad);
  return {out.mutable_data_ptr(), grad.const_data_ptr(), to_dtype(out.scalar_type(), "dtype"),
          dtype, grad.numel()};
}

void run_scale(const Device& device, const std::vector<flce_scaled>& grads,
               const Tensor& grad_output, const OptionalTensor& scalars) {
  DeviceId id = device.id();
  flce_dtype stat = grad_output.scalar_type() == ScalarType::Double ? FLCE_F64 : FLCE_F32;
  expect_like("grad_output", grad_output, {}, stat, id);
  if (scalars) expect_like("scalars", *scalars, {FLCE_SCALAR_COUNT}, stat, id);
  const flce_backend* table = device.table();
  flce_status status = table->scale_grads(table->self, grads.data(), static_cast<int>(grads.size()),
                                          grad_output.const_data_ptr(),
                                          scalars ? scalars->const_data_ptr() : nullptr, stat);
  if (status != FLCE_OK) check(flce_fail(status, "%s", table->last_error()));
}

void scale_(OptionalTensor grad_input, OptionalTensor grad_weight, OptionalTensor grad_bias,
            Tensor grad_output, OptionalTensor scalars) {
  const OptionalTensor& first = grad_input ? grad_input : grad_weight ? grad_weight : grad_bias;
  if (!first) return;
  DeviceId id = device_of(*first);
  std::vector<flce_scaled> grads;
  auto add = [&](const char* name, const OptionalTensor& grad) {
    if (grad) grads.push_back(scaled_array(name, *grad, *grad, id));
  };
  add("grad_input", grad_input);
  add("grad_weight", grad_weight);
  add("grad_bias", grad_bias);
  run_scale(Device(id, false), grads, grad_output, scalars);
}

Tensor scaled(Tensor grad, Tensor grad_output, OptionalTensor scalars, ScalarType dtype) {
  DeviceId id = device_of(grad);
  Device device(id, false);
  Tensor out = device.allocate(shape_of(grad), to_dtype(dtype, "dtype"), "scaled gradient");
  run_scale(device, {scaled_array("grad", out, grad, id)}, grad_output, scalars);
  return out;
}

// ---- cross entropy on logits ----

flce_problem logits_problem(const std::vector<int64_t>& integers,
                            const std::vector<double>& numbers) {
  flce_problem problem{};
  read_loss(OptionReader(integers, numbers), &problem);
  return problem;
}

void bind_logits(const Tensor& logits, const LossTensors& loss, flce_problem* problem,
                 flce_tensors* tensors) {
  expect_dim("logits", logits, 2);
  problem->tokens = problem->rows = logits.size(0);
  problem->vocab = problem->weight_rows = logits.size(1);
  problem->dtype = to_dtype(logits.scalar_type(), "logits");
  expect_shape("logits", logits, {problem->tokens, problem->vocab});
  tensors->input = logits.const_data_ptr();
  bind_loss(loss, device_of(logits), problem, tensors);
}

std::tuple<Tensor, Tensor, Tensor, OptionalTensor> cross_entropy_forward(
    Tensor logits, Tensor target, OptionalTensor weight, OptionalTensor token_weight,
    OptionalTensor token_temperature, OptionalTensor num_items, std::vector<int64_t> integers,
    std::vector<double> numbers) {
  flce_tensors tensors{};
  flce_problem problem = logits_problem(integers, numbers);
  bind_logits(logits, {target, weight, token_weight, token_temperature, num_items}, &problem,
              &tensors);
  Device device(device_of(logits), false);
  Tensor loss = allocate_loss(device, problem, &tensors);
  Statistics made = allocate_statistics(device, problem, true, &tensors);
  Tensor workspace =
      device.allocate_bytes(flce_cross_entropy_workspace_bytes(&problem), "workspace");
  tensors.workspace = workspace.mutable_data_ptr();
  check(flce_cross_entropy_forward(device.table(), &problem, &tensors));
  return {loss, *made.stats, *made.scalars, made.predictions};
}

Tensor cross_entropy_backward(Tensor grad_output, OptionalTensor grad_stats, Tensor logits,
                              Tensor target, OptionalTensor weight, OptionalTensor token_weight,
                              OptionalTensor token_temperature, Tensor stats, Tensor scalars,
                              std::vector<int64_t> integers, std::vector<double> numbers) {
  flce_tensors tensors{};
  flce_problem problem = logits_problem(integers, numbers);
  bind_logits(logits, {target, weight, token_weight, token_temperature, std::nullopt}, &problem,
              &tensors);
  bind_saved(grad_output, grad_stats, stats, scalars, problem, device_of(logits), &tensors);
  Device device(device_of(logits), false);
  Tensor grad = device.allocate(shape_of(logits), problem.dtype, "grad_logits");
  Tensor workspace =
      device.allocate_bytes(flce_cross_entropy_workspace_bytes(&problem), "workspace");
  tensors.grad_input = grad.mutable_data_ptr();
  tensors.workspace = workspace.mutable_data_ptr();
  check(flce_cross_entropy_backward(device.table(), &problem, &tensors));
  return grad;
}

// ---- the plan ----

std::string plan(int64_t tokens, int64_t hidden, int64_t weight_rows, std::string device_type,
                 int64_t device_index, ScalarType input_dtype, ScalarType weight_dtype,
                 std::optional<ScalarType> bias_dtype, std::optional<ScalarType> added_dtype,
                 bool has_probabilities, std::optional<int64_t> valid_vocab,
                 std::optional<int64_t> rows, std::vector<int64_t> integers,
                 std::vector<double> numbers, std::optional<std::string>) {
  Options given = read_options(integers, numbers);
  flce_problem problem = given.problem;
  problem.tokens = tokens;
  problem.hidden = hidden;
  problem.weight_rows = weight_rows;
  problem.vocab = classes_of(problem, valid_vocab);
  problem.rows = rows.value_or(tokens);
  problem.has_probabilities = has_probabilities;
  problem.input_dtype = to_dtype(input_dtype, "input_dtype");
  problem.weight_dtype = to_dtype(weight_dtype, "weight_dtype");
  problem.has_bias = bias_dtype.has_value();
  if (bias_dtype) problem.bias_dtype = to_dtype(*bias_dtype, "bias_dtype");
  problem.adds_grad_weight = added_dtype.has_value();
  if (added_dtype) problem.added_dtype = to_dtype(*added_dtype, "added_dtype");
  bool cpu = device_type == "cpu";
  DeviceId id = {cpu ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda(),
                 static_cast<int32_t>(device_index)};
  Device device(id, given.allow_tf32);
  flce_plan made = device.plan(problem);
  std::string text(static_cast<size_t>(flce_plan_text(&made, nullptr, 0)) + 1, '\0');
  flce_plan_text(&made, text.data(), static_cast<int64_t>(text.size()));
  text.pop_back();
  return text;
}

}  // namespace

STABLE_TORCH_LIBRARY(flce, m) {
  m.def(
      "forward(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, "
      "Tensor? weight, Tensor? token_weight, Tensor? token_temperature, "
      "Tensor? num_items, Tensor? seed, " SETTINGS
      ") -> (Tensor loss, Tensor? stats, Tensor? scalars, Tensor? predictions, "
      "Tensor? saved, Tensor? grad_input, Tensor? grad_weight, Tensor? grad_bias)");
  m.def("backward(" BACKWARD_SCHEMA
        ") -> (Tensor? grad_input, Tensor? grad_weight, Tensor? grad_bias)");
  m.def("backward_into(Tensor(a!) grad_weight_into, " BACKWARD_SCHEMA
        ") -> (Tensor grad_input, Tensor grad_bias)");
  m.def(
      "scale_(Tensor(a!)? grad_input, Tensor(b!)? grad_weight, Tensor(c!)? grad_bias, "
      "Tensor grad_output, Tensor? scalars) -> ()");
  for (const char* name : {"comm_all_gather", "comm_all_to_all"})
    m.def((std::string(name) + COMM_SCHEMA).c_str());
  m.def("comm_wait(str group, int id) -> ()");
  m.def("comm_abandon() -> ()");
  m.def("comm_error() -> str");
  m.def("comm_send_buffer(str group, int id, int bytes) -> int[]");
  m.def("scaled(Tensor grad, Tensor grad_output, Tensor? scalars, ScalarType dtype) -> Tensor");
  m.def(
      "cross_entropy_forward(Tensor logits, Tensor target, Tensor? weight, Tensor? token_weight, "
      "Tensor? token_temperature, Tensor? num_items, int[] integers, float[] numbers) "
      "-> (Tensor loss, Tensor stats, Tensor scalars, Tensor? predictions)");
  m.def(
      "cross_entropy_backward(Tensor grad_output, Tensor? grad_stats, Tensor logits, "
      "Tensor target, Tensor? weight, Tensor? token_weight, Tensor? token_temperature, "
      "Tensor stats, Tensor scalars, int[] integers, float[] numbers) -> Tensor");
  m.def(
      "plan(int tokens, int hidden, int weight_rows, str device_type, int device_index, "
      "ScalarType input_dtype, ScalarType weight_dtype, ScalarType? bias_dtype, "
      "ScalarType? added_dtype, "
      "bool has_probabilities, " SETTINGS ") -> str");
}

static void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
  m.impl("backward_into", TORCH_BOX(&backward_into));
  m.impl("scale_", TORCH_BOX(&scale_));
  m.impl("scaled", TORCH_BOX(&scaled));
  m.impl("cross_entropy_forward", TORCH_BOX(&cross_entropy_forward));
  m.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward));
}

STABLE_TORCH_LIBRARY_IMPL(flce, CPU, m) {
  implement(m);
}
STABLE_TORCH_LIBRARY_IMPL(flce, CUDA, m) {
  implement(m);
}
STABLE_TORCH_LIBRARY_IMPL(flce, CompositeExplicitAutograd, m) {
  m.impl("plan", TORCH_BOX(&plan));
}
