/* A sharded vocabulary: each rank has the rows of W, b, dW and db of its own classes. Every rank
 * gets the whole loss, and of dX all tokens, its share of the tokens (input_is_sharded) or its own
 * term, not summed (partial_grad_input).
 *
 * A rank runs the passes and GEMMs on its own classes, with substitute columns for the targets of
 * others (backend_args.h). The ranks exchange (1) the statistics of the rows, by an all-gather,
 * which with save=grads and form exp runs during the GEMM of dX, because E does not depend on them;
 * (2) their partial dX, by an all-to-all, a sum in the order of the ranks, and an all-gather; (3)
 * x, by an all-gather, if the caller's is sharded by tokens. */
#include "core/shards.h"

#include "core/plan_rules.h"

static flce_shard own_classes(const execution* e) {
  return (flce_shard){.first = e->problem->shard.first_class, .count = e->problem->shape.vocab};
}

/* The collectives of the call, noted in in_flight. One whose begin fails may have begun. */
static flce_status all_gather(const execution* e, flce_collective_id id, void* recv,
                              const void* send, int64_t bytes) {
  e->shard->in_flight |= 1u << id;
  return e->shard->comm->all_gather(e->shard->comm->self, id, recv, send, bytes);
}

static flce_status all_to_all(const execution* e, flce_collective_id id, void* recv,
                              const void* send, int64_t bytes) {
  e->shard->in_flight |= 1u << id;
  return e->shard->comm->all_to_all(e->shard->comm->self, id, recv, send, bytes);
}

static flce_status wait_for(const execution* e, flce_collective_id id) {
  FLCE_TRY(e->shard->comm->wait(e->shard->comm->self, id));
  e->shard->in_flight &= ~(1u << id);
  return FLCE_OK;
}

/* Where to write what the collective sends: memory of flce_comm, or `fallback` if it needs none. */
static flce_status choose_send_buffer(const execution* e, flce_collective_id id, int64_t bytes,
                                      void* fallback, void** memory) {
  FLCE_TRY(e->shard->comm->send_buffer(e->shard->comm->self, id, bytes, memory));
  if (!*memory) *memory = fallback;
  return FLCE_OK;
}

static flce_status copy(const execution* e, void* out, const void* in, int64_t elements,
                        flce_dtype dtype) {
  CALL(e, cast,
       &(flce_cast_args){.out = out,
                         .out_dtype = dtype,
                         .out_pitch = elements,
                         .in = in,
                         .in_dtype = dtype,
                         .in_pitch = elements,
                         .rows = 1,
                         .cols = elements});
  return FLCE_OK;
}

/* x of all tokens instead of those of this rank, if the call `reads` it. */
static flce_status gather_input(const execution* e, bool reads) {
  const flce_problem* problem = e->shard->caller_problem;
  if (!problem->shard.input_is_sharded || !reads) return FLCE_OK;
  char* all = buffer_ptr(e, FLCE_BUF_SHARD_INPUT);
  int64_t elements = flce_input_rows(problem) * problem->shape.hidden;
  int64_t bytes = elements * flce_size_of(problem->dtypes.input);
  void* sent;
  FLCE_TRY(choose_send_buffer(e, FLCE_ALL_GATHER_INPUT, bytes,
                              (void*)e->shard->caller_tensors->input, &sent));
  if (sent != e->shard->caller_tensors->input) {
    FLCE_TRY(copy(e, sent, e->shard->caller_tensors->input, elements, problem->dtypes.input));
    FLCE_TRY(copy(e, all + problem->shard.rank * bytes, sent, elements, problem->dtypes.input));
  }
  FLCE_TRY(all_gather(e, FLCE_ALL_GATHER_INPUT, all, sent, bytes));
  e->shard->tensors.input = all;
  return wait_for(e, FLCE_ALL_GATHER_INPUT);
}

/* Bytes of a block of the all-to-all: a rank's term of the rows of dX that one rank sums. */
static int64_t partial_dx_bytes(const execution* e) {
  return summed_elements(e->problem) * flce_size_of(e->plan->partial_dx_dtype);
}

/* Where this rank's partial dX is written: in memory of flce_comm, else in the caller's dX, or in
 * the workspace if that cannot hold `ranks` blocks of ceil(N / ranks) rows of them: it is sharded,
 * N is no multiple of the ranks, or the partial dX has another dtype. */
static flce_status choose_partial_dx(const execution* e) {
  void** dx = &e->shard->tensors.grad_input;
  if (!sums_partial_dx(e->problem) || !*dx) return FLCE_OK;
  void* partial = buffer_ptr(e, FLCE_BUF_PARTIAL_DX);
  return choose_send_buffer(e, FLCE_ALL_TO_ALL_DX, e->problem->shard.ranks * partial_dx_bytes(e),
                            partial ? partial : *dx, dx);
}

flce_status flce_open_shard(execution* e, bool reads_input) {
  shard_call* shard = e->shard;
  const flce_problem* problem = e->problem;
  if (!e->shard) return FLCE_OK;
  if (!shard->comm)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "comm: expected the collectives of %lld ranks, got NULL",
                     (long long)problem->shard.ranks);
  int64_t* target = buffer_ptr(e, FLCE_BUF_SHARD_TARGET);
  shard->caller_problem = problem;
  shard->caller_tensors = e->tensors;
  shard->problem = *problem;
  shard->problem.loss.ignore_index = FLCE_SHARD_IGNORED;
  shard->tensors = *e->tensors;
  shard->tensors.target = target;
  shard->tensors.class_weight =
      optional_ptr(e->tensors->class_weight, problem->shard.first_class, e->stat);
  if (!shard->local_scalars) shard->local_scalars = buffer_ptr(e, FLCE_BUF_SHARD_SCALARS);
  FLCE_TRY(choose_partial_dx(e));
  FLCE_TRY(gather_input(e, reads_input));
  CALL(e, shard_targets,
       &(flce_shard_targets_args){.out = target,
                                  .target = e->tensors->target,
                                  .tokens = problem->shape.tokens,
                                  .shard = own_classes(e),
                                  .classes = problem->shard.classes,
                                  .ignore_index = problem->loss.ignore_index});
  e->problem = &shard->problem;
  e->tensors = &shard->tensors;
  return FLCE_OK;
}

flce_status flce_close_shard(const execution* e, flce_status status) {
  if (status != FLCE_OK && e->shard && e->shard->in_flight != 0)
    e->shard->comm->abandon(e->shard->comm->self, e->shard->in_flight);
  return status;
}

/* ---- statistics ---- */

flce_status flce_prepare(const execution* e, void* order, bool may_overlap) {
  int dw_fp16_shift = e->plan->dw_fp16_shift;
  if (!e->shard) {
    CALL(e, prepare, e->problem, e->tensors, order, dw_fp16_shift, may_overlap);
    return FLCE_OK;
  }
  flce_problem whole = *e->shard->caller_problem;
  flce_tensors tensors = *e->shard->caller_tensors;
  whole.shape.vocab = whole.shape.weight_rows = whole.shard.classes;
  tensors.input = e->tensors->input;
  CALL(e, prepare, &whole, &tensors, NULL, dw_fp16_shift, may_overlap);
  if (e->problem->shape.vocab == 0) return FLCE_OK;
  /* The order of the targets, and WEIGHT_TOTAL of this rank's classes. */
  flce_tensors local = *e->tensors;
  local.scalars = buffer_ptr(e, FLCE_BUF_SHARD_SCALARS);
  CALL(e, prepare, e->problem, &local, order, 0, false);
  return FLCE_OK;
}

flce_rows flce_local_rows(const execution* e, const chunk* c) {
  flce_rows rows = rows_of(e, c);
  if (!e->shard) return rows;
  /* With label_smoothing 1 and no other term a row's loss is the mean of w_j (LSE - l_j) over this
   * rank's classes, from which FLCE_SHARD_STAT_SMOOTHING follows. */
  rows.options.label_smoothing = rows.options.label_smoothing > 0.0 ? 1.0 : 0.0;
  rows.options.z_loss = 0.0;
  rows.token_weight = NULL;
  rows.scalars = e->shard->local_scalars;
  return rows;
}

/* The chunk's rows in the whole vocabulary. */
static flce_rows whole_rows(const execution* e, const chunk* c) {
  flce_rows rows = rows_of(e, c);
  rows.vocab = e->shard->caller_problem->shard.classes;
  rows.target = e->shard->caller_tensors->target + (e->index ? 0 : c->first);
  rows.class_weight = e->shard->caller_tensors->class_weight;
  rows.options = e->shard->caller_problem->loss;
  rows.z_dtype = e->stat;
  return rows;
}

flce_status flce_row_coefficients(const execution* e, const chunk* c, const flce_upstream* upstream,
                                  const void* factor) {
  flce_rows rows = e->shard ? whole_rows(e, c) : rows_of(e, c);
  flce_shard classes = own_classes(e);
  CALL(e, row_coefficients, &rows, e->shard ? &classes : NULL, upstream, factor, c->coef);
  return FLCE_OK;
}

flce_status flce_begin_all_gather_statistics(const execution* e, const chunk* c) {
  if (!e->shard) return FLCE_OK;
  flce_rows rows = whole_rows(e, c);
  int count = flce_shard_stat_count(e->problem);
  int64_t bytes = count * c->rows * flce_size_of(e->stat);
  char *all = buffer_ptr(e, FLCE_BUF_SHARD_STATS),
       *own_block = all + e->problem->shard.rank * bytes;
  void* sent;
  FLCE_TRY(choose_send_buffer(e, FLCE_ALL_GATHER_STATISTICS, bytes, own_block, &sent));
  CALL(e, pack_statistics,
       &(flce_pack_args){.shard_stats = sent,
                         .count = count,
                         .rows = &rows,
                         .shard = own_classes(e),
                         .scalars = buffer_ptr(e, FLCE_BUF_SHARD_SCALARS),
                         .x = input_of(e, c),
                         .w = e->linear_weight,
                         .bias = e->bias,
                         .dtype = e->plan->dtype,
                         .hidden = e->plan->hidden});
  if (sent != own_block) FLCE_TRY(copy(e, own_block, sent, count * c->rows, e->stat));
  return all_gather(e, FLCE_ALL_GATHER_STATISTICS, all, sent, bytes);
}

flce_status flce_wait_all_gather_statistics(const execution* e, const chunk* c) {
  if (!e->shard) return FLCE_OK;
  FLCE_TRY(wait_for(e, FLCE_ALL_GATHER_STATISTICS));
  flce_rows rows = whole_rows(e, c);
  CALL(e, merge_statistics,
       &(flce_merge_args){.rows = &rows,
                          .shard = own_classes(e),
                          .shard_stats = buffer_ptr(e, FLCE_BUF_SHARD_STATS),
                          .count = flce_shard_stat_count(e->problem),
                          .ranks = e->problem->shard.ranks,
                          .rank = e->problem->shard.rank});
  return FLCE_OK;
}

flce_status flce_divergence_rows(const execution* e, const chunk* c, flce_divergence_args* call) {
  if (!e->shard) {
    CALL(e, divergence_rows, call);
    return FLCE_OK;
  }
  const flce_collective_id id = FLCE_ALL_GATHER_STATISTICS;
  int64_t count = FLCE_DIVERGENCE_SUMS * c->rows, bytes = count * flce_size_of(e->stat);
  char *sums = buffer_ptr(e, FLCE_BUF_DIVERGENCE), *received = sums + bytes;
  flce_rows whole = whole_rows(e, c);
  void* sent;
  call->partial = sums;
  call->writes = false;
  if (e->problem->shape.vocab > 0) {
    CALL(e, divergence_rows, call);
  } else { /* no class here: a row is valid if its target is one of all classes */
    CALL(e, fill, sums, 0, bytes);
    call->student = call->teacher = &whole;
  }
  FLCE_TRY(choose_send_buffer(e, id, bytes, sums, &sent));
  if (sent != sums) FLCE_TRY(copy(e, sent, sums, count, e->stat));
  FLCE_TRY(all_gather(e, id, received, sent, bytes));
  FLCE_TRY(wait_for(e, id));
  /* It adds any terms of the ranks, in their order. */
  CALL(e, sum_partial_dx,
       &(flce_sum_dx_args){.out = sums,
                           .out_dtype = e->stat,
                           .received = received,
                           .own = sums,
                           .dtype = e->stat,
                           .ranks = e->problem->shard.ranks,
                           .rank = e->problem->shard.rank,
                           .count = count});
  call->sums = false;
  call->writes = true;
  CALL(e, divergence_rows, call);
  return FLCE_OK;
}

/* ---- dX ---- */

flce_status flce_begin_all_to_all_dx(const execution* e) {
  if (!e->shard || !e->problem->wants.grad_input) return FLCE_OK;
  char* partial = e->tensors->grad_input;
  int64_t row = e->problem->shape.hidden * flce_size_of(e->plan->partial_dx_dtype);
  /* The GEMMs do not write the padding rows after token N - 1, and no row if this rank has no
   * class. */
  int64_t written = e->problem->shape.vocab > 0 ? e->problem->shape.tokens * row : 0;
  bool exchanges = sums_partial_dx(e->problem);
  int64_t all =
      exchanges ? e->problem->shard.ranks * partial_dx_bytes(e) : e->problem->shape.tokens * row;
  if (written < all) CALL(e, fill, partial + written, 0, all - written);
  if (!exchanges) return FLCE_OK;
  return all_to_all(e, FLCE_ALL_TO_ALL_DX, buffer_ptr(e, FLCE_BUF_RECEIVED_DX), partial,
                    partial_dx_bytes(e));
}

/* Where the sums are gathered: the caller's dX or, if N is no multiple of the ranks,
 * FLCE_BUF_PARTIAL_DX, whose contents have been sent by then. */
static void* gathered_dx(const execution* e) {
  bool whole_blocks = e->problem->shape.tokens % e->problem->shard.ranks == 0;
  return whole_blocks ? e->shard->caller_tensors->grad_input : buffer_ptr(e, FLCE_BUF_PARTIAL_DX);
}

flce_status flce_sum_dx(const execution* e) {
  const flce_problem* problem = e->problem;
  if (!sums_partial_dx(problem)) return FLCE_OK;
  flce_dtype dtype = e->plan->grad_input_dtype, term_dtype = e->plan->partial_dx_dtype;
  int64_t count = summed_elements(problem), bytes = count * flce_size_of(dtype),
          first = problem->shard.rank * bytes;
  char* sum = problem->shard.input_is_sharded ? e->shard->caller_tensors->grad_input
                                              : (char*)gathered_dx(e) + first;
  void* sent = sum;
  if (!problem->shard.input_is_sharded)
    FLCE_TRY(choose_send_buffer(e, FLCE_ALL_GATHER_DX, bytes, sum, &sent));
  FLCE_TRY(wait_for(e, FLCE_ALL_TO_ALL_DX));
  CALL(e, sum_partial_dx,
       &(flce_sum_dx_args){
           .out = sum,
           .copy = sent != sum ? sent : NULL,
           .received = buffer_ptr(e, FLCE_BUF_RECEIVED_DX),
           .own = element_ptr(e->tensors->grad_input, problem->shard.rank * count, term_dtype),
           .out_dtype = dtype,
           .dtype = term_dtype,
           .ranks = problem->shard.ranks,
           .rank = problem->shard.rank,
           .count = count});
  if (problem->shard.input_is_sharded) return FLCE_OK;
  return all_gather(e, FLCE_ALL_GATHER_DX, gathered_dx(e), sent, bytes);
}

flce_status flce_wait_all_gather_dx(const execution* e) {
  const flce_problem* problem = e->problem;
  if (!sums_partial_dx(problem) || problem->shard.input_is_sharded) return FLCE_OK;
  FLCE_TRY(wait_for(e, FLCE_ALL_GATHER_DX));
  const void* gathered = gathered_dx(e);
  void* dx = e->shard->caller_tensors->grad_input;
  int64_t elements = problem->shape.tokens * problem->shape.hidden;
  return gathered == dx ? FLCE_OK : copy(e, dx, gathered, elements, e->plan->grad_input_dtype);
}
