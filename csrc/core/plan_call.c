/* flce_plan_call: the plan of a call on a backend: its facts, the strategy, one size of chunks for
 * all ranks, and the workspace of a divergence's teacher. flce_plan_step: of a forward and its
 * backward, for flce.plan. */
#include "core/plan_call.h"

#include "backend.h"
#include "core/plan_rules.h"
#include "core/plan.h"
#include "environment.h"

#include <stdio.h>
#include <string.h>

/* FLCE_BLOCKS, for measurements and tests: the shape of a block, "0" for none, or "in_dw:" and the
 * shape of those that are not in the memory of dW: FLCE_BLOCKS_DX_FIRST with save=grads,
 * FLCE_BLOCKS_IN_DW with save=stats, where the call can use that memory. */
static flce_status read_blocks(flce_facts* facts) {
  const char* text = flce_variable_text(FLCE_VARIABLE_BLOCKS);
  if (!text) return FLCE_OK;
  long long rows = 0, classes = 0;
  int end = 0;
  facts->asks_block = true;
  if (strcmp(text, "0") == 0) return FLCE_OK;
  const char kInDw[] = "in_dw:", *shape = text;
  facts->asks_dw_memory = strncmp(text, kInDw, sizeof kInDw - 1) == 0;
  if (facts->asks_dw_memory) shape += sizeof kInDw - 1;
  bool two = sscanf(shape, "%lldx%lld%n", &rows, &classes, &end) == 2 && shape[end] == 0;
  if (!two || rows < 1 || classes < 1 || classes % FLCE_BLOCK_CLASS_STEP != 0)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "FLCE_BLOCKS: expected \"0\" or rows and a multiple of %d classes such as "
                     "\"2048x4096\", after \"in_dw:\" or alone, got \"%s\"",
                     FLCE_BLOCK_CLASS_STEP, text);
  facts->asked_rows = rows;
  facts->asked_classes = classes;
  return FLCE_OK;
}

/* The facts of the backend for the problem. A rank without a class asks for one
 * class: backends refuse vocab 0. */
static flce_status ask_facts(const flce_backend* backend, const flce_problem* problem,
                             flce_facts* facts) {
  flce_problem asked = *problem;
  if (asked.shape.vocab == 0) asked.shape.vocab = asked.shape.weight_rows = 1;
  flce_status status = backend->facts(backend->self, &asked, facts);
  if (status != FLCE_OK) return flce_fail(status, "%s", backend->last_error());
  return read_blocks(facts);
}

flce_problem flce_equal_share(const flce_problem* problem) {
  flce_problem equal = *problem;
  if (!flce_is_sharded(problem)) return equal;
  equal.shape.vocab = equal.shape.weight_rows =
      ceil_div(problem->shard.classes, problem->shard.ranks);
  equal.shard.rank = equal.shard.first_class = 0;
  equal.has.unaligned_operand = equal.backward.has_unaligned = false;
  return equal;
}

flce_status flce_plan_teacher(const flce_backend* backend, const flce_problem* student,
                              int64_t chunk_rows, flce_plan* plan) {
  flce_problem problem = *student->divergence.teacher;
  flce_facts facts = {0};
  problem.shape.rows = student->shape.rows;
  FLCE_TRY(ask_facts(backend, &problem, &facts));
  if (problem.has.logits) { /* no GEMM reads them */
    facts.hidden_alignment = facts.input_alignment = 1;
    facts.gemm_f16 = true;
    facts.fused_row_bytes = facts.gemm_workspace_bytes = 0;
  }
  problem.derived.chunk_rows = chunk_rows;
  problem.memory.bound = INT64_MAX; /* chunk_rows is chosen within the bound of both */
  return flce_plan_checked(&problem, &facts, plan);
}

/* The plan. That of a divergence is made twice: the plan of the teacher needs its chunks, and its
 * workspace has to contain the teacher's. */
static flce_status make_with_teacher(const flce_backend* backend, const flce_problem* problem,
                                     const flce_facts* facts, flce_plan* plan) {
  FLCE_TRY(flce_plan_checked(problem, facts, plan));
  if (!problem->divergence.teacher) return FLCE_OK;
  flce_problem student = *problem;
  flce_plan teacher;
  FLCE_TRY(flce_plan_teacher(backend, &student, plan->chunk_rows, &teacher));
  student.derived.teacher_bytes = teacher.forward_workspace_bytes;
  return flce_plan_checked(&student, facts, plan);
}

flce_status flce_plan_call(const flce_backend* backend, const flce_problem* caller_problem,
                           flce_plan* plan) {
  FLCE_TRY(flce_check_problem(caller_problem));
  /* share: the problem of a rank that has an equal share of the classes; without ranks the problem
   * itself. */
  flce_problem problem = *caller_problem, share = flce_equal_share(caller_problem);
  flce_facts facts = {0};
  flce_strategies strategies;
  /* ask_facts reads `save` to know whether gradients are sampled. FLCE_SAVE_AUTO becomes a strategy
   * below, from the facts. */
  share.save = flce_known_strategy(caller_problem);
  FLCE_TRY(ask_facts(backend, &share, &facts));
  flce_choose_strategies(&share, &facts, &strategies);
  problem.save = share.save = flce_strategy_of(&strategies, problem.shape.rows);
  FLCE_TRY(flce_check_save(&problem));
  if (!flce_is_sharded(&problem)) return make_with_teacher(backend, &problem, &facts, plan);
  /* The ranks have to run the same loops: what follows from sizes is planned for equal shares. */
  share.derived.gathers = facts.skips_rows;
  FLCE_TRY(flce_plan_checked(&share, &facts, plan));
  problem.derived.gathers = plan->gathers;
  problem.derived.chunk_rows = plan->chunk_rows;
  problem.derived.block_rows = plan->block_rows;
  problem.derived.block_classes = plan->block_classes;
  problem.dtypes.accum = plan->accum_dtype;
  FLCE_TRY(ask_facts(backend, &problem, &facts));
  return make_with_teacher(backend, &problem, &facts, plan);
}

/* Takes the backward of `plan` from a pass of `other`: FLCE_IN_FORWARD or FLCE_IN_BACKWARD. */
static void replace_backward(const flce_plan* other, unsigned pass, flce_plan* plan) {
  bool own = pass == FLCE_IN_BACKWARD;
  plan->accum_dtype = other->accum_dtype;
  plan->backward_chunk_rows = own ? other->backward_chunk_rows : other->chunk_rows;
  plan->backward_chunks = own ? other->backward_chunks : other->chunks;
  plan->blocks = other->blocks;
  plan->block_rows = other->block_rows;
  plan->block_classes = other->block_classes;
  plan->whole_classes = other->whole_classes;
  plan->backward_gemms = own ? other->backward_gemms : other->forward_gemms;
  plan->backward_workspace_bytes =
      own ? other->backward_workspace_bytes : other->forward_workspace_bytes;
  plan->backward_peak_bytes = own ? other->backward_peak_bytes
                                  : max64(other->forward_peak_bytes, other->backward_peak_bytes);
  plan->peak_bytes = max64(plan->forward_peak_bytes, plan->backward_peak_bytes);
  for (int id = 0; id < FLCE_BUF_COUNT; id++) {
    flce_buffer* buffer = &plan->buffers[id];
    const flce_buffer* from = &other->buffers[id];
    buffer->lifetime &= ~(unsigned)FLCE_IN_BACKWARD;
    if (from->lifetime & pass) {
      buffer->bytes = max64(buffer->bytes, from->bytes);
      buffer->lifetime |= (from->lifetime & FLCE_OUTPUT) | FLCE_IN_BACKWARD;
    }
    if (!(buffer->lifetime & (FLCE_IN_FORWARD | FLCE_IN_BACKWARD))) *buffer = (flce_buffer){0};
  }
}

/* A divergence whose backward is a second call. */
static flce_status plan_two_calls(const flce_backend* backend, const flce_problem* problem,
                                  flce_plan* plan) {
  flce_problem forward = *problem, backward = *problem;
  flce_plan second;
  forward.wants.grad_input = forward.wants.grad_weight = forward.wants.grad_bias = false;
  backward.save = FLCE_SAVE_GRADS;
  backward.reduction = FLCE_SUM;
  FLCE_TRY(flce_plan_call(backend, &forward, plan));
  FLCE_TRY(flce_plan_call(backend, &backward, &second));
  plan->strategy = FLCE_SAVE_STATS;
  plan->sampled_time = second.sampled_time;
  replace_backward(&second, FLCE_IN_FORWARD, plan);
  for (int id = 0; id < FLCE_COLLECTIVES; id++) {
    plan->collectives[id].backward = second.collectives[id].forward;
    plan->collectives[id].bytes += second.collectives[id].bytes;
  }
  return FLCE_OK;
}

flce_status flce_plan_step(const flce_backend* backend, const flce_problem* problem,
                           flce_plan* plan) {
  bool wants = problem->wants.grad_input || problem->wants.grad_weight || problem->wants.grad_bias;
  bool later = problem->save == FLCE_SAVE_STATS || problem->reduction == FLCE_NONE;
  if (problem->divergence.teacher && wants && later) return plan_two_calls(backend, problem, plan);
  FLCE_TRY(flce_plan_call(backend, problem, plan));
  if (!problem->wants.class_gradient || !flce_has_backward(plan->strategy)) return FLCE_OK;
  flce_problem backward = *problem;
  flce_plan second;
  backward.save = plan->strategy;
  backward.backward.has_grad_classes = true;
  FLCE_TRY(flce_plan_call(backend, &backward, &second));
  replace_backward(&second, FLCE_IN_BACKWARD, plan);
  return FLCE_OK;
}
