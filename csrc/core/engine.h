/* For the files of csrc/core: the pointers of a call and of a chunk, and helpers that make the
 * arguments of a backend's functions from them. */
#ifndef FLCE_ENGINE_H
#define FLCE_ENGINE_H

#include "backend.h"
#include "comm.h"

/* The state of one call. Nothing of it outlives the call. */
typedef struct engine {
  const flce_backend* backend;
  const flce_comm* comm; /* NULL unless the vocabulary is sharded */
  unsigned* in_flight;   /* its collectives that have begun, as flce_comm.abandon takes them */
  /* As the row passes and GEMMs see them: the caller's or, if the vocabulary is sharded, copies
   * with targets as columns of this rank (flce_open_shard). */
  const flce_problem* problem;
  const flce_plan* plan; /* NULL in cross_entropy.c */
  const flce_tensors* tensors;
  const flce_problem* caller_problem; /* as the caller gave it; NULL if comm is */
  const flce_tensors* caller_tensors; /* as the caller gave them; NULL if comm is */
  flce_dtype stat;                    /* the stat dtype */
  const void* input;         /* [N][plan->hidden] plan->dtype; NULL if the call does not read it */
  const void* linear_weight; /* [V][plan->hidden] plan->dtype */
  const void* bias;          /* [V] stat dtype, or NULL */
  void* losses;              /* [N] stat dtype, or NULL in a backward */
} engine;

/* Calls a function of the backend. If it fails, its error message becomes flce_last_error()'s, and
 * the calling function returns the status. */
#define CALL(engine, function, ...)                                                  \
  do {                                                                               \
    const flce_backend* backend_ = (engine)->backend;                                \
    flce_status status_ = backend_->function(backend_->self, __VA_ARGS__);           \
    if (status_ != FLCE_OK) return flce_fail(status_, "%s", backend_->last_error()); \
  } while (0)

static inline void* at(const void* base, int64_t elements, flce_dtype dtype) {
  return (char*)base + elements * flce_size_of(dtype);
}

/* The address of element `count` of an optional vector; NULL stays NULL. */
static inline const void* from(const void* vector, int64_t count, flce_dtype dtype) {
  return vector ? at(vector, count, dtype) : NULL;
}

static inline const void* scalar(const engine* e, enum flce_scalar index) {
  return at(e->tensors->scalars, index, e->stat);
}

/* flce_rows without z and out; its vectors start at token `first`. */
static inline flce_rows open_rows(const engine* e, int64_t first, int64_t rows) {
  const flce_problem* problem = e->problem;
  const flce_tensors* tensors = e->tensors;
  int64_t columns = problem->weight_rows;
  bool adds_bias = e->plan && e->plan->gemm_adds_bias;
  return (flce_rows){
      .rows = rows,
      .vocab = problem->vocab,
      /* row_coefficients and blank_rows take the stat dtype from it, also where z is not set. */
      .z_dtype = e->stat,
      .bias = adds_bias ? NULL : e->bias,
      .target = tensors->target ? tensors->target + first : NULL,
      .probabilities = from(tensors->probabilities, first * columns, tensors->probabilities_dtype),
      .probabilities_dtype = tensors->probabilities_dtype,
      .probabilities_pitch = columns,
      .class_weight = tensors->class_weight,
      .token_weight = from(tensors->token_weight, first, e->stat),
      .temperature = from(tensors->temperature, first, e->stat),
      .options = problem->loss,
      .wants_entropy = problem->wants_entropy,
      .stats = at(tensors->stats, first, e->stat),
      .stat_pitch = problem->tokens,
      .loss = (void*)from(e->losses, first, e->stat),
      .predictions = tensors->predictions ? (int64_t*)tensors->predictions + first : NULL,
      .scalars = tensors->scalars,
  };
}

static inline void set_z(flce_rows* view, void* z, flce_dtype dtype, int64_t pitch) {
  view->z = z;
  view->z_dtype = dtype;
  view->z_pitch = view->z_columns = pitch;
}

static inline void set_out(flce_rows* view, void* out, flce_dtype dtype, int64_t pitch,
                           int64_t columns) {
  view->out = out;
  view->out_dtype = dtype;
  view->out_pitch = pitch;
  view->out_columns = columns;
}

/* The backward's upstream gradients; their vectors start at token 0. */
static inline flce_upstream upstream_of(const engine* e) {
  const flce_tensors* tensors = e->tensors;
  return (flce_upstream){.loss = tensors->grad_output,
                         .loss_stride = e->problem->reduction == FLCE_NONE ? 1 : 0,
                         .lse = tensors->grad_lse,
                         .entropy = tensors->grad_entropy};
}

/* A buffer of the workspace; NULL where the plan has none. */
static inline void* buffer(const engine* e, flce_buffer_id id) {
  const flce_buffer* b = &e->plan->buffers[id];
  return b->bytes > 0 && b->offset >= 0 ? (char*)e->tensors->workspace + b->offset : NULL;
}

/* Consecutive computed rows whose logits are in memory at a time. */
typedef struct chunk {
  int64_t first, rows;       /* computed rows [first, first + rows) */
  flce_buffer_id gathered_x; /* the buffer for a copy of the chunk's rows of x */
  flce_rows view;            /* z: the result of the logits GEMM; out: E or dz */
  const void* coef;          /* [FLCE_COEF_ROWS][N] stat dtype, indexed like the view's vectors */
} chunk;

/* x at token 0 if the chunk's rows are given by an index, else at the chunk's first row. NULL in a
 * backward that does not read x. */
static inline const void* rows_of_input(const engine* e, const chunk* c) {
  return from(e->input, e->plan->gathers ? 0 : c->first * e->plan->hidden, e->plan->dtype);
}

/* x from column frozen_hidden on: the columns that dW is computed from. */
static inline const void* weight_input(const engine* e) {
  return at(e->input, e->plan->hidden - e->plan->weight_hidden, e->plan->dtype);
}

static inline bool wants_gradients(const engine* e) {
  return e->problem->want_grad_input || e->problem->want_grad_weight || e->problem->want_grad_bias;
}

/* ---- shards.c: what a sharded vocabulary adds to a call ---- */

/* Storage of what an engine points to: the copies of the problem and the tensors. */
typedef struct local_call {
  flce_problem problem;
  flce_tensors tensors;
  unsigned in_flight;
} local_call;
/* Fills `local` and points e->problem and e->tensors to it: x of all tokens, targets as columns of
 * this rank. Begins and completes the all-gather of x, if the call reads it. */
flce_status flce_open_shard(engine* e, const flce_comm* comm, bool reads_input, local_call* local);
/* `prepare` for all classes, and for this rank's. */
flce_status flce_prepare_shard(const engine* e, void* order, bool overlaps);
/* The view with which the statistics of this rank's logits are computed. */
void flce_set_rank_view(const engine* e, flce_rows* view);
/* Begins the all-gather of a chunk's statistics. */
flce_status flce_send_statistics(const engine* e, const chunk* c);
/* Waits for it: statistics and losses of the whole vocabulary. */
flce_status flce_merge_statistics(const engine* e, const chunk* c);
/* The chunk's rows in the whole vocabulary, for row_coefficients. */
flce_rows flce_whole_view(const engine* e, const chunk* c);
flce_shard flce_shard_of(const engine* e);
/* Begins the all-to-all of dX, after its last chunk: this rank's terms are complete. */
flce_status flce_send_input_gradient(const engine* e);
/* Waits for it, sums the terms of all ranks, and begins the all-gather of the sums. */
flce_status flce_sum_input_gradient(const engine* e);
/* Waits for that. */
flce_status flce_receive_input_gradient(const engine* e);

/* engine.c */
void flce_count_gemm(void);
flce_status flce_run_gemm(const engine* e, flce_gemm gemm);
/* Computes the chunk's coef. The vectors of `upstream` start at token 0. */
flce_status flce_coefficients(const engine* e, const chunk* c, flce_upstream upstream,
                              const void* factor);

/* gradients.c */
/* Label smoothing's sum of W, before the first chunk. */
flce_status flce_sum_weight(const engine* e);
/* Initial values of what the chunks add to, and the rows that no chunk holds. */
flce_status flce_begin_gradients(const engine* e);
/* The GEMM of the chunk's dX; in form exp it needs no coefficients. */
flce_status flce_input_product(const engine* e, const chunk* c);
/* The rest of the chunk's gradients: dX from that product, dW and db. */
flce_status flce_chunk_gradients(const engine* e, const chunk* c);
/* Label smoothing's sums over the rows, weighted with FLCE_COEF_SMOOTH: of x, and of ones. NULL
 * without smoothing, and where no gradient needs them. */
flce_status flce_sum_smooth(const engine* e, void** xsum, void** total);
/* The terms that no GEMM makes, after the last chunk. */
flce_status flce_finish_gradients(const engine* e);

/* samples.c */
/* Draws the lists of the chunk's rows from its E. */
flce_status flce_sample_chunk(const engine* e, const chunk* c);
/* dX, dW and db from the lists. `all`: all computed rows as one chunk, with its coef. */
flce_status flce_sampled_gradients(const engine* e, const chunk* all);

#endif
