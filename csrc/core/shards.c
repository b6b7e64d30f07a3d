/* A sharded vocabulary: each rank has the rows of W, b, dW and db of its own classes. Every rank
 * gets the whole loss, and of dX all tokens, its share of the tokens (input_is_sharded) or its own
 * term (partial_grad_input).
 *
 * A rank runs the passes and GEMMs on its own classes, with substitute columns for the targets of
 * others (backend.h). The ranks exchange (1) the statistics of the rows, by an all-gather, which
 * with save=grads and form exp runs during the GEMM of dX, because E does not depend on them; (2)
 * their terms of dX, by an all-to-all, a sum in the order of the ranks, and an all-gather; (3) x,
 * by an all-gather, if the caller's is sharded by tokens. */
#include "core/engine.h"
#include "core/plan.h"

flce_shard flce_shard_of(const engine* e) {
  return (flce_shard){.first = e->caller_problem->first_class, .count = e->caller_problem->vocab};
}

/* The collectives of e->comm, noted in e->in_flight. One whose begin fails may have begun. */
static flce_status all_gather(const engine* e, flce_collective_id id, void* recv, const void* send,
                              int64_t bytes) {
  *e->in_flight |= 1u << id;
  return e->comm->all_gather(e->comm->self, id, recv, send, bytes);
}

static flce_status all_to_all(const engine* e, flce_collective_id id, void* recv, const void* send,
                              int64_t bytes) {
  *e->in_flight |= 1u << id;
  return e->comm->all_to_all(e->comm->self, id, recv, send, bytes);
}

static flce_status wait_for(const engine* e, flce_collective_id id) {
  FLCE_TRY(e->comm->wait(e->comm->self, id));
  *e->in_flight &= ~(1u << id);
  return FLCE_OK;
}

/* Where to write what the collective sends: memory of flce_comm, or `fallback` if it needs none. */
static flce_status choose_send_buffer(const engine* e, flce_collective_id id, int64_t bytes,
                                      void* fallback, void** memory) {
  FLCE_TRY(e->comm->send_buffer(e->comm->self, id, bytes, memory));
  if (!*memory) *memory = fallback;
  return FLCE_OK;
}

static flce_status copy(const engine* e, void* out, const void* in, int64_t elements,
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
static flce_status gather_input(const engine* e, bool reads, flce_tensors* local) {
  const flce_problem* problem = e->caller_problem;
  if (!problem->input_is_sharded || !reads) return FLCE_OK;
  char* all = buffer(e, FLCE_BUF_SHARD_INPUT);
  int64_t elements = flce_input_rows(problem) * problem->hidden;
  int64_t bytes = elements * flce_size_of(problem->input_dtype);
  void* sent;
  FLCE_TRY(
      choose_send_buffer(e, FLCE_ALL_GATHER_INPUT, bytes, (void*)e->caller_tensors->input, &sent));
  if (sent != e->caller_tensors->input) {
    FLCE_TRY(copy(e, sent, e->caller_tensors->input, elements, problem->input_dtype));
    FLCE_TRY(copy(e, all + problem->rank * bytes, sent, elements, problem->input_dtype));
  }
  FLCE_TRY(all_gather(e, FLCE_ALL_GATHER_INPUT, all, sent, bytes));
  local->input = all;
  return wait_for(e, FLCE_ALL_GATHER_INPUT);
}

/* Bytes of a rank's term of the rows of dX that one rank sums. */
static int64_t term_bytes(const engine* e) {
  return summed_elements(e->problem) * flce_size_of(e->plan->input_term_dtype);
}

/* Where this rank's terms of dX are written: in memory of flce_comm, else in the caller's dX, or in
 * the workspace if that cannot hold `ranks` blocks of ceil(N / ranks) rows of them: it is sharded,
 * N is no multiple of the ranks, or the terms have another dtype. */
static flce_status choose_term_buffer(const engine* e, flce_tensors* local) {
  if (!sums_input(e->caller_problem) || !local->grad_input) return FLCE_OK;
  void* terms = buffer(e, FLCE_BUF_OWN_TERMS);
  return choose_send_buffer(e, FLCE_ALL_TO_ALL_TERMS, e->caller_problem->ranks * term_bytes(e),
                            terms ? terms : local->grad_input, &local->grad_input);
}

flce_status flce_open_shard(engine* e, const flce_comm* comm, bool reads_input, local_call* local) {
  if (!comm)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "comm: expected the collectives of %lld ranks, got NULL",
                     (long long)e->problem->ranks);
  local->in_flight = 0;
  e->comm = comm;
  e->in_flight = &local->in_flight;
  e->caller_problem = e->problem;
  e->caller_tensors = e->tensors;
  local->problem = *e->problem;
  local->problem.loss.ignore_index = FLCE_SHARD_IGNORED;
  local->tensors = *e->tensors;
  int64_t* target = buffer(e, FLCE_BUF_SHARD_TARGET);
  local->tensors.target = target;
  local->tensors.class_weight =
      from(local->tensors.class_weight, e->caller_problem->first_class, e->stat);
  FLCE_TRY(choose_term_buffer(e, &local->tensors));
  FLCE_TRY(gather_input(e, reads_input, &local->tensors));
  CALL(e, shard_targets,
       &(flce_shard_targets_args){.out = target,
                                  .target = e->caller_tensors->target,
                                  .tokens = e->caller_problem->tokens,
                                  .shard = flce_shard_of(e),
                                  .classes = e->caller_problem->classes,
                                  .ignore_index = e->caller_problem->loss.ignore_index});
  e->problem = &local->problem;
  e->tensors = &local->tensors;
  return FLCE_OK;
}

/* ---- statistics ---- */

flce_status flce_prepare_shard(const engine* e, void* order, bool overlaps) {
  flce_problem whole = *e->caller_problem;
  flce_tensors tensors = *e->caller_tensors;
  whole.vocab = whole.weight_rows = whole.classes;
  tensors.input = e->tensors->input;
  CALL(e, prepare, &whole, &tensors, NULL, e->plan->holds_weight, overlaps);
  if (e->problem->vocab == 0) return FLCE_OK;
  /* The order of the targets, and WEIGHT_TOTAL of this rank's classes. */
  flce_tensors local = *e->tensors;
  local.scalars = buffer(e, FLCE_BUF_SHARD_SCALARS);
  CALL(e, prepare, e->problem, &local, order, false, false);
  return FLCE_OK;
}

void flce_set_rank_view(const engine* e, flce_rows* view) {
  /* With label_smoothing 1 and no other term a row's loss is the mean of w_j (LSE - l_j) over this
   * rank's classes, from which FLCE_SHARD_STAT_SMOOTHING follows. */
  view->options.label_smoothing = view->options.label_smoothing > 0.0 ? 1.0 : 0.0;
  view->options.z_loss = 0.0;
  view->token_weight = NULL;
  view->scalars = buffer(e, FLCE_BUF_SHARD_SCALARS);
}

flce_rows flce_whole_view(const engine* e, const chunk* c) {
  flce_rows view = c->view;
  view.vocab = e->caller_problem->classes;
  view.target = e->caller_tensors->target + (e->plan->gathers ? 0 : c->first);
  view.class_weight = e->caller_tensors->class_weight;
  view.options = e->caller_problem->loss;
  view.z_dtype = e->stat;
  return view;
}

flce_status flce_send_statistics(const engine* e, const chunk* c) {
  flce_rows view = flce_whole_view(e, c);
  int count = flce_shard_stat_count(e->problem);
  int64_t bytes = count * c->rows * flce_size_of(e->stat);
  char *all = buffer(e, FLCE_BUF_SHARD_STATS), *own_block = all + e->problem->rank * bytes;
  void* sent;
  FLCE_TRY(choose_send_buffer(e, FLCE_ALL_GATHER_STATISTICS, bytes, own_block, &sent));
  CALL(e, pack_statistics,
       &(flce_pack_args){.shard_stats = sent,
                         .count = count,
                         .rows = &view,
                         .shard = flce_shard_of(e),
                         .scalars = buffer(e, FLCE_BUF_SHARD_SCALARS),
                         .x = rows_of_input(e, c),
                         .w = e->linear_weight,
                         .bias = e->bias,
                         .dtype = e->plan->dtype,
                         .hidden = e->plan->hidden});
  if (sent != own_block) FLCE_TRY(copy(e, own_block, sent, count * c->rows, e->stat));
  return all_gather(e, FLCE_ALL_GATHER_STATISTICS, all, sent, bytes);
}

flce_status flce_merge_statistics(const engine* e, const chunk* c) {
  FLCE_TRY(wait_for(e, FLCE_ALL_GATHER_STATISTICS));
  flce_rows view = flce_whole_view(e, c);
  CALL(e, merge_statistics,
       &(flce_merge_args){.rows = &view,
                          .shard = flce_shard_of(e),
                          .shard_stats = buffer(e, FLCE_BUF_SHARD_STATS),
                          .count = flce_shard_stat_count(e->problem),
                          .ranks = e->problem->ranks,
                          .rank = e->problem->rank});
  return FLCE_OK;
}

/* ---- dX ---- */

flce_status flce_send_input_gradient(const engine* e) {
  if (!e->problem->want_grad_input) return FLCE_OK;
  char* terms = e->tensors->grad_input;
  int64_t row = e->problem->hidden * flce_size_of(e->plan->input_term_dtype);
  /* The GEMMs do not write the padding rows after token N - 1, and no row if this rank has no
   * class. */
  int64_t made = e->problem->vocab > 0 ? e->problem->tokens * row : 0;
  bool exchanges = sums_input(e->problem);
  int64_t all = exchanges ? e->problem->ranks * term_bytes(e) : e->problem->tokens * row;
  if (made < all) CALL(e, fill, terms + made, 0, all - made);
  if (!exchanges) return FLCE_OK;
  return all_to_all(e, FLCE_ALL_TO_ALL_TERMS, buffer(e, FLCE_BUF_RECEIVED_TERMS), terms,
                    term_bytes(e));
}

/* Where the sums are gathered: the caller's dX or, if N is no multiple of the ranks,
 * FLCE_BUF_OWN_TERMS, whose contents have been sent by then. */
static void* gathered_input(const engine* e) {
  bool whole_blocks = e->problem->tokens % e->problem->ranks == 0;
  return whole_blocks ? e->caller_tensors->grad_input : buffer(e, FLCE_BUF_OWN_TERMS);
}

flce_status flce_sum_input_gradient(const engine* e) {
  const flce_problem* problem = e->problem;
  if (!sums_input(problem)) return FLCE_OK;
  flce_dtype dtype = e->plan->grad_input_dtype, term_dtype = e->plan->input_term_dtype;
  int64_t count = summed_elements(problem), bytes = count * flce_size_of(dtype),
          first = problem->rank * bytes;
  char* sum =
      problem->input_is_sharded ? e->caller_tensors->grad_input : (char*)gathered_input(e) + first;
  void* sent = sum;
  if (!problem->input_is_sharded)
    FLCE_TRY(choose_send_buffer(e, FLCE_ALL_GATHER_SUMS, bytes, sum, &sent));
  FLCE_TRY(wait_for(e, FLCE_ALL_TO_ALL_TERMS));
  CALL(e, sum_terms,
       &(flce_sum_terms_args){.out = sum,
                              .copy = sent != sum ? sent : NULL,
                              .received = buffer(e, FLCE_BUF_RECEIVED_TERMS),
                              .own = at(e->tensors->grad_input, problem->rank * count, term_dtype),
                              .out_dtype = dtype,
                              .dtype = term_dtype,
                              .ranks = problem->ranks,
                              .rank = problem->rank,
                              .count = count});
  if (problem->input_is_sharded) return FLCE_OK;
  return all_gather(e, FLCE_ALL_GATHER_SUMS, gathered_input(e), sent, bytes);
}

flce_status flce_receive_input_gradient(const engine* e) {
  const flce_problem* problem = e->problem;
  if (!sums_input(problem) || problem->input_is_sharded) return FLCE_OK;
  FLCE_TRY(wait_for(e, FLCE_ALL_GATHER_SUMS));
  void *gathered = gathered_input(e), *dx = e->caller_tensors->grad_input;
  int64_t elements = problem->tokens * problem->hidden;
  return gathered == dx ? FLCE_OK : copy(e, dx, gathered, elements, e->plan->grad_input_dtype);
}
