/* The operators of the loss: schemas and boxing. They use torch's stable ABI only, so one build
 * works with every torch >= 2.10. */
#include <tuple>

#include "binding/collectives.h"
#include "binding/library.h"
#include "binding/outputs.h"

namespace flce {

namespace {

/* The arguments after the tensors in the schemas of forward and backward. */
#define OPTIONS_SCHEMA \
  "SymInt? valid_vocab, SymInt? rows, int[] integers, float[] numbers, str? group=None"

/* Text that suggests a max_memory of half the current logits buffer, if that still holds one
 * row and takes less memory: with more chunks dW may be summed in float32. */
std::string memory_advice(const Device& device, const flce_problem& problem,
                          const flce_plan& plan) {
  bool samples = plan.strategy == FLCE_SAVE_SAMPLES; /* its lists do not depend on max_memory */
  int64_t logits =
      plan.buffers[FLCE_BUF_LOGITS].bytes + (samples ? 0 : plan.buffers[FLCE_BUF_SAVED].bytes);
  int64_t smaller = (logits < problem.memory.bound ? logits : problem.memory.bound) / 2;
  std::string advice = "; the plan needs " + std::to_string(plan.peak_bytes) +
                       " bytes over the inputs, of which " + std::to_string(logits) +
                       " for logits (save=\"" + flce_save_name(plan.strategy) + "\")";
  if (smaller < plan.z_pitch * flce_size_of(plan.z_dtype)) return advice;
  flce_problem cheaper = problem;
  cheaper.memory.bound = smaller;
  cheaper.memory.bound_is_default = false;
  if (plan.strategy == FLCE_SAVE_LOGITS) cheaper.save = FLCE_SAVE_AUTO;
  flce_plan other;
  flce_status status = flce_plan_call(device.table(), &cheaper, &other);
  if (status != FLCE_OK || other.peak_bytes >= plan.peak_bytes) return advice;
  advice += ". Try max_memory=" + std::to_string(smaller);
  return plan.strategy == FLCE_SAVE_LOGITS ? advice + " with save=\"auto\"" : advice;
}

/* Rethrows; out of memory with that text. */
[[noreturn]] void rethrow_with_advice(const Failure& failure, const Device& device,
                                      const flce_problem& problem, const flce_plan& plan) {
  if (failure.status() != FLCE_OUT_OF_MEMORY) throw;
  throw Failure(FLCE_OUT_OF_MEMORY, failure.message() + memory_advice(device, problem, plan));
}

bool keeps_tensor(const flce_plan& plan) {
  return plan.strategy == FLCE_SAVE_LOGITS || plan.strategy == FLCE_SAVE_SAMPLES;
}

ScalarType saved_type(const flce_plan& plan) {
  return plan.strategy == FLCE_SAVE_LOGITS ? to_scalar_type(plan.saved_dtype) : ScalarType::Int;
}

/* Allocates what a forward keeps. With a caller that could not count the valid rows (torch.compile
 * on the CPU) these are more rows than are computed; the rest is set to 0. */
Tensor allocate_saved(const Device& device, const flce_plan& plan, Call* call) {
  Tensor saved = device.allocate({call->saved_rows, plan.saved_pitch}, saved_type(plan), "saved");
  call->tensors.saved = saved.mutable_data_ptr();
  int64_t row_bytes = plan.saved_pitch * flce_size_of(plan.saved_dtype);
  int64_t used = call->problem.shape.rows * row_bytes, all = call->saved_rows * row_bytes;
  const flce_backend* table = device.table();
  if (used < all)
    check(table->fill(table->self, static_cast<char*>(call->tensors.saved) + used, 0, all - used));
  return saved;
}

/* Allocates the logits of the rows' classes and, with topk, the classes. */
ClassLogits allocate_classes(const Device& device, Call* call) {
  ClassLogits made;
  if (call->problem.wants.row_classes == 0) return made;
  std::vector<int64_t> shape = call->shape;
  shape.push_back(call->problem.wants.row_classes);
  if (call->problem.wants.topk > 0) {
    made.classes = device.allocate(shape, ScalarType::Long, "classes");
    call->tensors.classes = static_cast<int64_t*>(made.classes->mutable_data_ptr());
  }
  made.logits = device.allocate(shape, flce_stat_dtype(call->problem.dtypes.gemm), "class_logits");
  call->tensors.class_logits = made.logits->mutable_data_ptr();
  return made;
}

using ForwardResult =
    std::tuple<Tensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor,
               OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor, OptionalTensor>;

ForwardResult run_forward(const Device& device, const flce_plan& plan, const Tensor& input,
                          const std::optional<std::string>& group, Call* call) {
  Statistics made = allocate_statistics(device, plan.keeps_statistics, call);
  OptionalTensor saved;
  if (keeps_tensor(plan)) saved = allocate_saved(device, plan, call);
  Tensor loss = allocate_loss(device, call);
  ClassLogits classes = allocate_classes(device, call);
  Gradients gradients;
  if (plan.strategy == FLCE_SAVE_GRADS) gradients = allocate_gradients(device, input, plan, call);
  Tensor workspace =
      allocate_workspace(device, plan.forward_workspace_bytes, "forward workspace", call);
  Collectives collectives(device, call->problem, group,
                          {call->input(), gradients.input, workspace, call->teacher_input});
  check(flce_forward(device.table(), collectives.table(), &call->problem, &plan, &call->tensors));
  return {loss,           made.stats,      made.scalars,     made.predictions,
          saved,          gradients.input, gradients.weight, gradients.bias,
          classes.logits, classes.classes};
}

/* Binds the seed of the draw. */
void bind_seed(const OptionalTensor& seed, const flce_plan& plan, Call* call) {
  if (plan.strategy != FLCE_SAVE_SAMPLES && !plan.draws_from_dz) return;
  if (!seed) refuse("seed", "a tensor with gradient=\"sampled\"", "None");
  if (seed->numel() != 1) refuse("seed", "one element", "shape " + shape_text(shape_of(*seed)));
  expect_type("seed", *seed, ScalarType::Long);
  expect_device("seed", *seed, call->id, "input");
  call->tensors.seed = static_cast<const int64_t*>(seed->const_data_ptr());
}

/* The teacher of a divergence; nullopt for a loss, which has none. */
std::optional<Call> teacher_call(const Teacher& given, const PackedOptions& options,
                                 const Call& student) {
  bool compares = student.problem.divergence.kind != FLCE_NO_DIVERGENCE;
  if (compares && !given.input) refuse("teacher_input", "a tensor with a divergence", "None");
  const std::pair<const char*, const OptionalTensor&> tensors[] = {
      {"teacher_input", given.input},
      {"teacher_weight", given.linear_weight},
      {"teacher_bias", given.linear_bias},
      {"teacher_temperature", given.temperature}};
  for (const auto& [name, tensor] : tensors)
    if (tensor && !compares) refuse(name, "None without a divergence", "a tensor");
  if (!compares) return std::nullopt;
  return make_teacher(given, options, student);
}

ForwardResult forward(Tensor input, Tensor linear_weight, Tensor target, OptionalTensor linear_bias,
                      OptionalTensor weight, OptionalTensor token_weight,
                      OptionalTensor token_temperature, OptionalTensor num_items,
                      OptionalTensor seed, OptionalTensor classes,
                      std::optional<int64_t> valid_vocab, std::optional<int64_t> rows,
                      std::vector<int64_t> integers, std::vector<double> numbers,
                      std::optional<std::string> group, OptionalTensor teacher_input,
                      OptionalTensor teacher_weight, OptionalTensor teacher_bias,
                      OptionalTensor token_teacher_temperature) {
  CallArgs arguments = {valid_vocab, rows, unpack_options(integers, numbers)};
  Call call =
      make_call({input, linear_weight, linear_bias},
                {target, weight, token_weight, token_temperature, num_items, classes}, arguments);
  std::optional<Call> teacher =
      teacher_call({teacher_input, teacher_weight, teacher_bias, token_teacher_temperature},
                   arguments.options, call);
  if (teacher) {
    call.problem.divergence.teacher = &teacher->problem;
    call.tensors.teacher = &teacher->tensors;
    call.teacher_input = teacher->input();
  }
  Device device(call.id, call.allow_tf32);
  if (classes && call.problem.wants.topk > 0)
    refuse("topk", "0 with classes", std::to_string(call.problem.wants.topk));
  flce_plan plan = device.plan(call.problem);
  bind_seed(seed, plan, &call);
  try {
    ForwardResult result = run_forward(device, plan, input, group, &call);
    report_none_counted(call);
    return result;
  } catch (const Failure& failure) {
    rethrow_with_advice(failure, device, call.problem, plan);
  }
}

/* What a forward saved for its backward, and the upstream gradients. grad_stats holds the gradients
 * of lse, entropy and tail_lse in the rows of these statistics; the other statistics have no
 * gradient. grad_classes is that of class_logits. */
struct Kept {
  Tensor grad_output;
  OptionalTensor grad_stats, grad_classes, class_logits;
  Tensor stats, scalars;
  OptionalTensor saved;
};

/* Binds the logits of the rows' classes, and their gradient if there is one. */
void bind_kept_classes(const Kept& kept, ScalarType type, Call* call) {
  if (!call->problem.backward.has_grad_classes) return;
  std::vector<int64_t> shape = call->shape;
  shape.push_back(call->problem.wants.row_classes);
  if (!kept.class_logits) refuse("class_logits", "those of the forward", "None");
  expect_like("class_logits", *kept.class_logits, shape, type, call->id);
  call->tensors.class_logits = kept.class_logits->mutable_data_ptr();
  if (!kept.grad_classes) return;
  expect_like("grad_classes", *kept.grad_classes, shape, type, call->id);
  call->tensors.grad_classes = kept.grad_classes->const_data_ptr();
}

void bind_kept(const Kept& kept, Call* call) {
  flce_tensors* tensors = &call->tensors;
  flce_dtype stat = flce_stat_dtype(call->problem.dtypes.gemm);
  ScalarType type = to_scalar_type(stat);
  int64_t n = call->problem.shape.tokens;
  bool reduced = call->problem.reduction != FLCE_NONE;
  expect_like("grad_output", kept.grad_output, reduced ? std::vector<int64_t>{} : call->shape, type,
              call->id);
  expect_like("stats", kept.stats, {FLCE_STAT_COUNT, n}, type, call->id);
  expect_like("scalars", kept.scalars, {FLCE_SCALAR_COUNT}, type, call->id);
  tensors->grad_output = kept.grad_output.const_data_ptr();
  tensors->stats = kept.stats.mutable_data_ptr();
  tensors->scalars = kept.scalars.mutable_data_ptr();
  bind_kept_classes(kept, type, call);
  if (!kept.grad_stats) return;
  expect_like("grad_stats", *kept.grad_stats, {FLCE_STAT_COUNT, n}, type, call->id);
  const char* rows = static_cast<const char*>(kept.grad_stats->const_data_ptr());
  tensors->grad_lse = rows + FLCE_STAT_LSE * n * flce_size_of(stat);
  if (call->problem.backward.has_grad_entropy)
    tensors->grad_entropy = rows + FLCE_STAT_ENTROPY * n * flce_size_of(stat);
  if (call->problem.backward.has_grad_tail)
    tensors->grad_tail = rows + FLCE_STAT_TAIL_LSE * n * flce_size_of(stat);
}

/* Checks the tensor that a forward has saved. */
void expect_saved(const OptionalTensor& saved, const flce_plan& plan, const Call& call) {
  if (!saved)
    refuse("saved", std::string("a tensor with save=\"") + flce_save_name(plan.strategy) + "\"",
           "None");
  expect_like("saved", *saved, {call.saved_rows, plan.saved_pitch}, saved_type(plan), call.id);
  /* the CUDA backend reads the lists as pairs */
  bool aligned = reinterpret_cast<uintptr_t>(saved->const_data_ptr()) % 8 == 0;
  if (plan.strategy == FLCE_SAVE_SAMPLES && !aligned)
    refuse("saved", "memory aligned to 8 bytes", "another address");
}

/* Binds the caller's gradient tensor of the weight, to which dW is added. */
void bind_added(const Tensor& grad_weight, Call* call) {
  const char* name = "grad_weight_into";
  flce_problem* problem = &call->problem;
  expect_tensor(name, grad_weight);
  expect_shape(name, grad_weight, {problem->shape.weight_rows, flce_grad_weight_cols(problem)});
  if (!grad_weight.is_contiguous()) refuse(name, "a contiguous tensor", "another layout");
  expect_device(name, grad_weight, call->id, "input");
  if (!problem->wants.grad_weight) refuse("grad_weight", "True with grad_weight_into", "False");
  problem->backward.added_dtype = to_dtype(type_of(grad_weight), name);
  problem->backward.adds_grad_weight = true;
  call->tensors.grad_weight = grad_weight.mutable_data_ptr();
}

Gradients run_backward(const Device& device, const flce_plan& plan, const Tensor& input,
                       const std::optional<std::string>& group, Call* call) {
  Gradients gradients = allocate_gradients(device, input, plan, call);
  Tensor workspace =
      allocate_workspace(device, plan.backward_workspace_bytes, "backward workspace", call);
  Collectives collectives(device, call->problem, group,
                          {call->input(), gradients.input, workspace, std::nullopt});
  flce_status status =
      flce_backward(device.table(), collectives.table(), &call->problem, &plan, &call->tensors);
  if (status != FLCE_OK && call->problem.backward.adds_grad_weight)
    throw Failure(status, std::string(flce_last_error()) +
                              "; with accumulate_into the weight's gradient may hold a part of "
                              "this backward's sum");
  check(status);
  return gradients;
}

/* `added`: the caller's gradient tensor of the weight, to which dW is added; none: allocate one. */
Gradients make_gradients(const OptionalTensor& added, const Kept& kept, const Operands& operands,
                         const LossTensors& loss, const CallArgs& arguments,
                         const std::optional<std::string>& group) {
  expect_no_divergence(arguments.options);
  Call call = make_call(operands, loss, arguments);
  if (added) bind_added(*added, &call);
  if (kept.saved) call.tensors.saved = kept.saved->mutable_data_ptr();
  uintptr_t addresses = reinterpret_cast<uintptr_t>(call.tensors.saved) |
                        reinterpret_cast<uintptr_t>(call.tensors.grad_weight);
  call.problem.backward.has_unaligned = addresses % 16 != 0;
  call.problem.backward.has_grad_entropy = kept.grad_stats && call.problem.wants.entropy_gradient;
  call.problem.backward.has_grad_tail = kept.grad_stats && call.problem.wants.tail;
  call.problem.backward.has_grad_classes = kept.grad_classes || call.problem.backward.has_grad_tail;
  if (call.problem.backward.has_grad_classes && !loss.classes)
    refuse("classes", "those of the forward", "None");
  Device device(call.id, call.allow_tf32);
  flce_plan plan = device.plan(call.problem);
  check(flce_check_backward(&plan));
  bind_kept(kept, &call);
  if (keeps_tensor(plan)) expect_saved(kept.saved, plan, call);
  try {
    return run_backward(device, plan, operands.input, group, &call);
  } catch (const Failure& failure) {
    rethrow_with_advice(failure, device, call.problem, plan);
  }
}

#define BACKWARD_SCHEMA                                                          \
  "Tensor grad_output, Tensor? grad_stats, Tensor? grad_classes, Tensor input, " \
  "Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? weight, "   \
  "Tensor? token_weight, Tensor? token_temperature, Tensor? classes, "           \
  "Tensor? class_logits, Tensor stats, Tensor scalars, Tensor? saved, " OPTIONS_SCHEMA
#define BACKWARD_ARGUMENTS                                                                    \
  Tensor grad_output, OptionalTensor grad_stats, OptionalTensor grad_classes, Tensor input,   \
      Tensor linear_weight, Tensor target, OptionalTensor linear_bias, OptionalTensor weight, \
      OptionalTensor token_weight, OptionalTensor token_temperature, OptionalTensor classes,  \
      OptionalTensor class_logits, Tensor stats, Tensor scalars, OptionalTensor saved,        \
      std::optional<int64_t> valid_vocab, std::optional<int64_t> rows,                        \
      std::vector<int64_t> integers, std::vector<double> numbers, std::optional<std::string> group
#define MAKE_GRADIENTS(added)                                                                  \
  make_gradients(added,                                                                        \
                 {grad_output, grad_stats, grad_classes, class_logits, stats, scalars, saved}, \
                 {input, linear_weight, linear_bias},                                          \
                 {target, weight, token_weight, token_temperature, std::nullopt, classes},     \
                 {valid_vocab, rows, unpack_options(integers, numbers)}, group)

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
  flce_dtype dtype = to_dtype(type_of(grad), name);
  expect_device(name, grad, id, "the first");
  if (!grad.is_contiguous()) refuse(name, "a contiguous tensor", "another layout");
  return {out.mutable_data_ptr(), grad.const_data_ptr(), to_dtype(type_of(out), "dtype"), dtype,
          grad.numel()};
}

void run_scale(const Device& device, const std::vector<flce_scaled>& grads,
               const Tensor& grad_output, const OptionalTensor& scalars) {
  DeviceId id = device.id();
  expect_tensor("grad_output", grad_output);
  flce_dtype stat = type_of(grad_output) == ScalarType::Double ? FLCE_F64 : FLCE_F32;
  expect_like("grad_output", grad_output, {}, to_scalar_type(stat), id);
  if (scalars) expect_like("scalars", *scalars, {FLCE_SCALAR_COUNT}, to_scalar_type(stat), id);
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
  expect_tensor("grad", grad);
  DeviceId id = device_of(grad);
  Device device(id, false);
  Tensor out = device.allocate(shape_of(grad), to_dtype(dtype, "dtype"), "scaled gradient");
  run_scale(device, {scaled_array("grad", out, grad, id)}, grad_output, scalars);
  return out;
}

// ---- cross entropy on logits ----

std::tuple<Tensor, Tensor, Tensor, OptionalTensor> cross_entropy_forward(
    Tensor logits, Tensor target, OptionalTensor weight, OptionalTensor token_weight,
    OptionalTensor token_temperature, OptionalTensor num_items, std::vector<int64_t> integers,
    std::vector<double> numbers) {
  Call call =
      make_call(logits, {target, weight, token_weight, token_temperature, num_items, std::nullopt},
                unpack_options(integers, numbers));
  Device device(call.id, false);
  Tensor loss = allocate_loss(device, &call);
  Statistics made = allocate_statistics(device, true, &call);
  Tensor workspace = allocate_workspace(device, flce_cross_entropy_workspace_bytes(&call.problem),
                                        "workspace", &call);
  check(flce_cross_entropy_forward(device.table(), &call.problem, &call.tensors));
  report_none_counted(call);
  return {loss, *made.stats, *made.scalars, made.predictions};
}

Tensor cross_entropy_backward(Tensor grad_output, OptionalTensor grad_stats, Tensor logits,
                              Tensor target, OptionalTensor weight, OptionalTensor token_weight,
                              OptionalTensor token_temperature, Tensor stats, Tensor scalars,
                              std::vector<int64_t> integers, std::vector<double> numbers) {
  Call call = make_call(
      logits, {target, weight, token_weight, token_temperature, std::nullopt, std::nullopt},
      unpack_options(integers, numbers));
  call.problem.backward.has_grad_entropy = grad_stats && call.problem.wants.entropy_gradient;
  bind_kept({grad_output, grad_stats, std::nullopt, std::nullopt, stats, scalars, std::nullopt},
            &call);
  Device device(call.id, false);
  Tensor grad = device.allocate(shape_of(logits), call.problem.dtypes.gemm, "grad_logits");
  Tensor workspace = allocate_workspace(device, flce_cross_entropy_workspace_bytes(&call.problem),
                                        "workspace", &call);
  call.tensors.grad_input = grad.mutable_data_ptr();
  check(flce_cross_entropy_backward(device.table(), &call.problem, &call.tensors));
  return grad;
}

}  // namespace

FLCE_LIBRARY(m) {
  m.def(
      "forward(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, "
      "Tensor? weight, Tensor? token_weight, Tensor? token_temperature, "
      "Tensor? num_items, Tensor? seed, Tensor? classes, " OPTIONS_SCHEMA
      ", Tensor? teacher_input=None, Tensor? teacher_weight=None, Tensor? teacher_bias=None, "
      "Tensor? token_teacher_temperature=None) -> (Tensor loss, Tensor? stats, Tensor? scalars, "
      "Tensor? predictions, "
      "Tensor? saved, Tensor? grad_input, Tensor? grad_weight, Tensor? grad_bias, "
      "Tensor? class_logits, Tensor? top_classes)");
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

FLCE_LIBRARY_IMPL(CPU, m) {
  implement(m);
}
FLCE_LIBRARY_IMPL(CUDA, m) {
  implement(m);
}

}  // namespace flce
