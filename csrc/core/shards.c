/* A divided vocabulary: each rank has the rows of W, b, dW and db of its own classes, and every
 * rank gets the whole loss and dX.
 *
 * A rank runs the passes and GEMMs of a call over its own classes, with a column that stands in for
 * a target of another rank (backend.h). Two exchanges make the parts whole: the statistics of the
 * rows, which hides under the GEMM of dX, because E needs no coefficients, and the ranks' terms of
 * dX: an all-to-all, a sum in the order of the ranks, and an all-gather. */
#include "core/engine.h"
#include "core/plan.h"

flce_shard flce_shard_of(const engine* e) {
  return (flce_shard){.first = e->whole->first_class, .count = e->whole->vocab};
}

/* Where to write what the slot sends: memory of the collectives, or `own` if they need none. */
static flce_status place(const engine* e, flce_slot slot, int64_t bytes, void* own, void** memory) {
  FLCE_TRY(e->comm->place(e->comm->self, slot, bytes, memory));
  if (!*memory) *memory = own;
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

/* x of all tokens, in place of those of this rank. */
static flce_status gather_input(const engine* e, flce_tensors* own) {
  const flce_problem* problem = e->whole;
  if (!problem->scatters_input) return FLCE_OK;
  char* all = buffer(e, FLCE_BUF_SHARD_INPUT);
  int64_t elements = flce_input_rows(problem) * problem->hidden;
  int64_t bytes = elements * flce_size_of(problem->input_dtype);
  void* sent;
  FLCE_TRY(place(e, FLCE_SLOT_INPUT, bytes, (void*)e->given->input, &sent));
  if (sent != e->given->input) {
    FLCE_TRY(copy(e, sent, e->given->input, elements, problem->input_dtype));
    FLCE_TRY(copy(e, all + problem->rank * bytes, sent, elements, problem->input_dtype));
  }
  FLCE_TRY(e->comm->gather(e->comm->self, FLCE_SLOT_INPUT, all, sent, bytes));
  own->input = all;
  return e->comm->wait(e->comm->self, FLCE_SLOT_INPUT);
}

static bool exchanges_input(const flce_problem* problem) {
  return problem->want_grad_input && !problem->keeps_partial && problem->tokens > 0;
}

/* Elements of the rows of dX that a rank sums. */
static int64_t block_size(const engine* e) {
  return ceil_div(e->problem->tokens, e->problem->ranks) * e->problem->hidden;
}

/* Bytes of a rank's term of them. */
static int64_t term_bytes(const engine* e) {
  return block_size(e) * flce_size_of(e->plan->input_term_dtype);
}

/* Where this rank's terms of dX are made: in memory of the collectives, in the caller's dX, or in
 * the workspace, where dX has not whole blocks of rows or another dtype. */
static flce_status place_partial(const engine* e, flce_tensors* own) {
  if (!exchanges_input(e->whole) || !own->grad_input) return FLCE_OK;
  void* partial = buffer(e, FLCE_BUF_PARTIAL_INPUT);
  return place(e, FLCE_SLOT_TERMS, e->whole->ranks * term_bytes(e),
               partial ? partial : own->grad_input, &own->grad_input);
}

flce_status flce_open_shard(engine* e, const flce_comm* comm, shard_call* own) {
  if (!comm)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "comm: expected the collectives of %lld ranks, got NULL",
                     (long long)e->problem->ranks);
  e->comm = comm;
  e->whole = e->problem;
  e->given = e->tensors;
  own->problem = *e->problem;
  own->problem.loss.ignore_index = FLCE_SHARD_IGNORED;
  own->tensors = *e->tensors;
  int64_t* target = buffer(e, FLCE_BUF_SHARD_TARGET);
  own->tensors.target = target;
  own->tensors.class_weight = from(own->tensors.class_weight, e->whole->first_class, e->stat);
  FLCE_TRY(place_partial(e, &own->tensors));
  FLCE_TRY(gather_input(e, &own->tensors));
  CALL(e, shard_targets,
       &(flce_shard_targets_args){.out = target,
                                  .target = e->given->target,
                                  .tokens = e->whole->tokens,
                                  .shard = flce_shard_of(e),
                                  .classes = e->whole->classes,
                                  .ignore_index = e->whole->loss.ignore_index});
  e->problem = &own->problem;
  e->tensors = &own->tensors;
  return FLCE_OK;
}

/* ---- statistics ---- */

flce_status flce_prepare_shard(const engine* e, void* order, bool overlaps) {
  flce_problem whole = *e->whole;
  flce_tensors tensors = *e->given;
  whole.vocab = whole.weight_rows = whole.classes;
  tensors.input = e->tensors->input;
  CALL(e, prepare, &whole, &tensors, NULL, e->plan->holds_weight, overlaps);
  if (e->problem->vocab == 0) return FLCE_OK;
  flce_tensors own = *e->tensors;
  own.scalars = buffer(e, FLCE_BUF_SHARD_SCALARS);
  CALL(e, prepare, e->problem, &own, order, false, false);
  return FLCE_OK;
}

void flce_set_rank_view(const engine* e, flce_rows* view) {
  view->options.label_smoothing = view->options.label_smoothing > 0.0 ? 1.0 : 0.0;
  view->options.z_loss = 0.0;
  view->token_weight = NULL;
  view->scalars = buffer(e, FLCE_BUF_SHARD_SCALARS);
}

flce_rows flce_whole_view(const engine* e, const chunk* c) {
  flce_rows view = c->view;
  view.vocab = e->whole->classes;
  view.target = e->given->target + (e->plan->gathers ? 0 : c->first);
  view.class_weight = e->given->class_weight;
  view.options = e->whole->loss;
  view.z_dtype = e->stat;
  return view;
}

flce_status flce_send_statistics(const engine* e, const chunk* c) {
  flce_rows view = flce_whole_view(e, c);
  int count = flce_part_count(e->problem);
  int64_t bytes = count * c->rows * flce_size_of(e->stat);
  char *all = buffer(e, FLCE_BUF_PARTS), *own = all + e->problem->rank * bytes;
  void* parts;
  FLCE_TRY(place(e, FLCE_SLOT_STATISTICS, bytes, own, &parts));
  CALL(e, pack_statistics,
       &(flce_pack_args){.parts = parts,
                         .count = count,
                         .rows = &view,
                         .shard = flce_shard_of(e),
                         .scalars = buffer(e, FLCE_BUF_SHARD_SCALARS),
                         .x = rows_of_input(e, c),
                         .w = e->linear_weight,
                         .bias = e->bias,
                         .dtype = e->plan->dtype,
                         .hidden = e->plan->hidden});
  if (parts != own) FLCE_TRY(copy(e, own, parts, count * c->rows, e->stat));
  return e->comm->gather(e->comm->self, FLCE_SLOT_STATISTICS, all, parts, bytes);
}

flce_status flce_merge_statistics(const engine* e, const chunk* c) {
  FLCE_TRY(e->comm->wait(e->comm->self, FLCE_SLOT_STATISTICS));
  flce_rows view = flce_whole_view(e, c);
  CALL(e, merge_statistics,
       &(flce_merge_args){.rows = &view,
                          .shard = flce_shard_of(e),
                          .parts = buffer(e, FLCE_BUF_PARTS),
                          .count = flce_part_count(e->problem),
                          .ranks = e->problem->ranks,
                          .rank = e->problem->rank});
  return FLCE_OK;
}

/* ---- dX ---- */

flce_status flce_send_input_gradient(const engine* e) {
  if (!e->problem->want_grad_input) return FLCE_OK;
  char* partial = e->tensors->grad_input;
  int64_t row = e->problem->hidden * flce_size_of(e->plan->input_term_dtype);
  /* What the GEMMs leave out: the rows after the last token, or all without a class. */
  int64_t made = e->problem->vocab > 0 ? e->problem->tokens * row : 0;
  bool exchanges = exchanges_input(e->problem);
  int64_t all = exchanges ? e->problem->ranks * term_bytes(e) : e->problem->tokens * row;
  if (made < all) CALL(e, fill, partial + made, 0, all - made);
  if (!exchanges) return FLCE_OK;
  return e->comm->exchange(e->comm->self, FLCE_SLOT_TERMS, buffer(e, FLCE_BUF_INPUT_TERMS), partial,
                           term_bytes(e));
}

/* Where dX is gathered: the terms' buffer, which has been sent, if dX has not whole blocks of rows.
 */
static void* gathered_input(const engine* e) {
  bool whole_blocks = e->problem->tokens % e->problem->ranks == 0;
  return whole_blocks ? e->given->grad_input : buffer(e, FLCE_BUF_PARTIAL_INPUT);
}

flce_status flce_sum_input_gradient(const engine* e) {
  const flce_problem* problem = e->problem;
  if (!exchanges_input(problem)) return FLCE_OK;
  flce_dtype dtype = e->plan->grad_input_dtype, term_dtype = e->plan->input_term_dtype;
  int64_t count = block_size(e), bytes = count * flce_size_of(dtype), first = problem->rank * bytes;
  char* sum = problem->scatters_input ? e->given->grad_input : (char*)gathered_input(e) + first;
  void* sent = sum;
  if (!problem->scatters_input) FLCE_TRY(place(e, FLCE_SLOT_SUMS, bytes, sum, &sent));
  FLCE_TRY(e->comm->wait(e->comm->self, FLCE_SLOT_TERMS));
  CALL(e, sum_partials,
       &(flce_sum_partials_args){
           .out = sum,
           .copy = sent != sum ? sent : NULL,
           .parts = buffer(e, FLCE_BUF_INPUT_TERMS),
           .own = at(e->tensors->grad_input, problem->rank * count, term_dtype),
           .out_dtype = dtype,
           .dtype = term_dtype,
           .ranks = problem->ranks,
           .rank = problem->rank,
           .count = count});
  if (problem->scatters_input) return FLCE_OK;
  return e->comm->gather(e->comm->self, FLCE_SLOT_SUMS, gathered_input(e), sent, bytes);
}

flce_status flce_receive_input_gradient(const engine* e) {
  const flce_problem* problem = e->problem;
  if (!exchanges_input(problem) || problem->scatters_input) return FLCE_OK;
  FLCE_TRY(e->comm->wait(e->comm->self, FLCE_SLOT_SUMS));
  void *gathered = gathered_input(e), *dx = e->given->grad_input;
  int64_t elements = problem->tokens * problem->hidden;
  return gathered == dx ? FLCE_OK : copy(e, dx, gathered, elements, e->plan->grad_input_dtype);
}
