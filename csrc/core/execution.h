/* The records of a call and of a chunk, and helpers that make the arguments of a backend's
 * functions from them: the lowest layer of the files that execute a plan. Above it are
 * chunk_memory.h, gradients.h, samples.h and shards.h, then steps.h, then forward_steps.h and
 * backward_steps.h, then teacher.h, and above these engine.c. */
#ifndef FLCE_EXECUTION_H
#define FLCE_EXECUTION_H

#include "backend.h"

/* The state of one call. */
typedef struct execution {
  const flce_backend* backend;
  unsigned pass;                   /* FLCE_IN_FORWARD or FLCE_IN_BACKWARD; 0 in cross_entropy.c */
  struct shard_call* shard;        /* shards.h; NULL unless the vocabulary is sharded */
  const struct execution* teacher; /* of a divergence: that of the teacher's logits, or NULL */
  /* As the row passes and GEMMs see them: the caller's or, if the vocabulary is sharded, copies
   * with targets as columns of this rank. */
  const flce_problem* problem;
  const flce_plan* plan; /* NULL in cross_entropy.c */
  const flce_tensors* tensors;
  flce_dtype stat;           /* the stat dtype */
  const void* input;         /* [N][plan->hidden] plan->dtype; NULL if the call does not read it */
  const void* linear_weight; /* [V][plan->hidden] plan->dtype */
  const void* bias;          /* [V] stat dtype, or NULL */
  void* losses;              /* [N] stat dtype, or NULL in a backward */
  const int64_t* index; /* the tokens of the computed rows, if the plan gathers them, or NULL */
  /* The id in tensors->classes that means no class. From the caller's problem: that of a shard has
   * another ignore_index. */
  int64_t no_class;
} execution;

/* Calls a function of the backend. If it fails, its error message becomes flce_last_error()'s, and
 * the calling function returns the status. */
#define CALL(e, function, ...)                                                       \
  do {                                                                               \
    const flce_backend* backend_ = (e)->backend;                                     \
    flce_status status_ = backend_->function(backend_->self, __VA_ARGS__);           \
    if (status_ != FLCE_OK) return flce_fail(status_, "%s", backend_->last_error()); \
  } while (0)

static inline void* element_ptr(const void* base, int64_t elements, flce_dtype dtype) {
  return (char*)base + elements * flce_size_of(dtype);
}

/* The address of element `count` of an optional vector; NULL stays NULL. */
static inline const void* optional_ptr(const void* vector, int64_t count, flce_dtype dtype) {
  return vector ? element_ptr(vector, count, dtype) : NULL;
}

static inline const void* scalar(const execution* e, enum flce_scalar index) {
  return element_ptr(e->tensors->scalars, index, e->stat);
}

/* The rows' classes whose logits are an output, from token `first` on. */
static inline flce_row_classes open_classes(const execution* e, int64_t first) {
  const flce_problem* problem = e->problem;
  int64_t count = problem->wants.row_classes;
  bool sharded = flce_is_sharded(problem);
  return (flce_row_classes){
      .ids = e->tensors->classes ? e->tensors->classes + first * count : NULL,
      .z = optional_ptr(e->tensors->class_logits, first * count, e->stat),
      .grads = optional_ptr(e->tensors->grad_classes, first * count, e->stat),
      .count = count,
      .first = sharded ? problem->shard.first_class : 0,
      .all = sharded ? problem->shard.classes : problem->shape.vocab,
      .none = e->no_class,
  };
}

/* flce_rows without z and out; its vectors start at token `first`. */
static inline flce_rows open_rows(const execution* e, int64_t first, int64_t rows) {
  const flce_problem* problem = e->problem;
  const flce_tensors* tensors = e->tensors;
  int64_t columns = problem->shape.weight_rows;
  bool adds_bias = e->plan && e->plan->gemm_adds_bias;
  return (flce_rows){
      .rows = rows,
      .vocab = problem->shape.vocab,
      /* row_coefficients and blank_rows take the stat dtype from it, also where z is not set. */
      .z_dtype = e->stat,
      .bias = adds_bias ? NULL : e->bias,
      .target = tensors->target ? tensors->target + first : NULL,
      .probabilities =
          optional_ptr(tensors->probabilities, first * columns, tensors->probabilities_dtype),
      .probabilities_dtype = tensors->probabilities_dtype,
      .probabilities_pitch = columns,
      .class_weight = tensors->class_weight,
      .token_weight = optional_ptr(tensors->token_weight, first, e->stat),
      .temperature = optional_ptr(tensors->temperature, first, e->stat),
      .options = problem->loss,
      .wants_entropy = problem->wants.entropy,
      .stats = element_ptr(tensors->stats, first, e->stat),
      .stat_pitch = problem->shape.tokens,
      .loss = (void*)optional_ptr(e->losses, first, e->stat),
      .predictions = tensors->predictions ? (int64_t*)tensors->predictions + first : NULL,
      .classes = open_classes(e, first),
      .scalars = tensors->scalars,
  };
}

/* A matrix with a row for each row of a chunk. */
typedef struct chunk_matrix {
  void* data; /* NULL for none */
  flce_dtype dtype;
  int64_t pitch;   /* elements between rows */
  int64_t columns; /* that are written: those from the vocabulary's end on with zeros */
} chunk_matrix;

static inline void set_z(flce_rows* rows, const chunk_matrix* z) {
  rows->z = z->data;
  rows->z_dtype = z->dtype;
  rows->z_pitch = z->pitch;
  rows->z_columns = z->columns;
}

static inline void set_out(flce_rows* rows, const chunk_matrix* out) {
  rows->out = out->data;
  rows->out_dtype = out->dtype;
  rows->out_pitch = out->pitch;
  rows->out_columns = out->columns;
}

/* The backward's upstream gradients; their vectors start at token 0. */
static inline flce_upstream upstream_of(const execution* e) {
  const flce_tensors* tensors = e->tensors;
  return (flce_upstream){.loss = tensors->grad_output,
                         .loss_stride = e->problem->reduction == FLCE_NONE ? 1 : 0,
                         .lse = tensors->grad_lse,
                         .entropy = tensors->grad_entropy,
                         .tail = tensors->grad_tail,
                         .entropy_in_target = e->plan && e->plan->strategy == FLCE_SAVE_SAMPLES};
}

/* A buffer of this pass's workspace; NULL where the plan has none in this pass. Steps rely on it: a
 * sum or an order that nothing of the call reads has no buffer. */
static inline void* buffer_ptr(const execution* e, flce_buffer_id id) {
  const flce_buffer* b = &e->plan->buffers[id];
  bool exists = (b->lifetime & e->pass) && b->offset >= 0;
  return exists ? (char*)e->tensors->workspace + b->offset : NULL;
}

/* Consecutive computed rows whose logits are in memory at a time, and where their matrices and
 * vectors are. All of it follows from the plan and the first row (chunk_memory.h). */
typedef struct chunk {
  int64_t first, rows; /* computed rows [first, first + rows) */
  /* dW and db of other rows are in their accumulators, to which those of these rows are added. */
  bool adds_dw;
  /* The classes of z and out: all of this rank, or a block of them (engine.c: gradients_of_blocks)
   */
  int64_t first_class, classes;
  const int64_t* index; /* their tokens; NULL: computed row i is token i */
  void* copied_x;       /* the A operand of the logits GEMM, if x itself cannot be it, or NULL */
  /* These three are buffers of the workspace, or in the memory of dW or dX (core/dw_memory.h). */
  void* scaled_x;      /* the B operand of dW's GEMM, or NULL if x itself is */
  void* dx_rows;       /* the result of dX's GEMM, or NULL if that goes to dX */
  void* fused_scratch; /* of fused_logits or fused_exp, or NULL */
  /* Logits: the result of the logits GEMM. In a backward with save=logits what is saved of it: z,
   * or E if the plan saves_exp. */
  chunk_matrix z;
  chunk_matrix out; /* E or dz: what the gradient GEMMs read. It may overwrite z. */
  void* coef;       /* [FLCE_COEF_COUNT][N] stat dtype, indexed as the rows' vectors */
  /* Of a divergence whose logits GEMM packs z of student and teacher: the teacher's, else NULL. */
  const flce_fused_call* packed_with;
} chunk;

/* Restricts the rows' columns to the classes of a chunk that is a block. */
static inline void set_block(flce_rows* rows, flce_dtype stat, const chunk* c) {
  rows->earlier_classes = c->first_class;
  rows->later_classes = rows->vocab - c->first_class - c->classes;
  rows->vocab = c->classes;
  rows->bias = optional_ptr(rows->bias, c->first_class, stat);
  rows->class_weight = optional_ptr(rows->class_weight, c->first_class, stat);
  rows->probabilities =
      optional_ptr(rows->probabilities, c->first_class, rows->probabilities_dtype);
  rows->classes.first += c->first_class;
}

/* The rows of a chunk as a backend takes them: their vectors and their logits, without `out` and
 * `coef`. */
static inline flce_rows rows_of(const execution* e, const chunk* c) {
  flce_rows rows = open_rows(e, e->index ? 0 : c->first, c->rows); /* an index is from token 0 on */
  rows.index = c->index;
  if (e->plan->dw_fp16_shift != 0) rows.input_scale = scalar(e, FLCE_SCALAR_INPUT_SCALE);
  if (c->classes < e->problem->shape.vocab) set_block(&rows, e->stat, c);
  if (c->z.data) set_z(&rows, &c->z);
  return rows;
}

/* x at token 0 if the chunk's rows are given by an index, else at the chunk's first row. NULL in a
 * backward that does not read x. */
static inline const void* input_of(const execution* e, const chunk* c) {
  return optional_ptr(e->input, e->index ? 0 : c->first * e->plan->hidden, e->plan->dtype);
}

/* W from the chunk's first class on. */
static inline const void* weight_of(const execution* e, const chunk* c) {
  return element_ptr(e->linear_weight, c->first_class * e->plan->hidden, e->plan->dtype);
}

/* x from column frozen_hidden on: the columns that dW is computed from. */
static inline const void* weight_input(const execution* e) {
  return element_ptr(e->input, e->plan->hidden - e->plan->weight_hidden, e->plan->dtype);
}

static inline bool wants_gradients(const execution* e) {
  return e->problem->wants.grad_input || e->problem->wants.grad_weight ||
         e->problem->wants.grad_bias;
}

/* For GEMMs that a backend runs within its other functions. */
void flce_count_gemm(void);
flce_status flce_run_gemm(const execution* e, flce_gemm gemm);

#endif
