/* flce: fused linear + cross entropy. The public interface of the C core, usable without torch: the
 * problem, the device's facts, the plan, and the calls that run it. The functions that a device
 * implements, and the structs that they take, are in backend.h.
 *
 * Symbols: N tokens, H hidden size, V vocabulary; x[N,H] input, W[V,H] linear weight, b[V] bias,
 * y[N] target; z = x W^T + b; l = softcap(logit_scale z) / temperature, the input of the softmax
 * (l = z without these options); p = softmax(l); lse = logsumexp(l); nll = lse - l_y; g the
 * upstream gradient of a row. Matrices are row-major; a "pitch" is the number of ELEMENTS between
 * rows (the leading dimension).
 *
 * Flow: flce_plan_make() decides everything that follows from sizes, without side effects. The
 * caller allocates the buffers that the plan lists. flce_forward() and flce_backward() then run one
 * loop over chunks of rows, which calls the functions of a backend's table (backend.h).
 */
#ifndef FLCE_H
#define FLCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FLCE_VERSION "0.1.0"
#define FLCE_EXPORT __attribute__((visibility("default")))

typedef struct flce_backend flce_backend; /* backend.h: the functions of a device */
typedef struct flce_gemm flce_gemm;       /* backend.h: the arguments of a GEMM */
typedef struct flce_comm flce_comm;       /* comm.h: the collectives of a group of ranks */

/* ---- status ---- */

typedef enum flce_status {
  FLCE_OK = 0,
  FLCE_INVALID_ARGUMENT,    /* a size, option or memory budget is out of its range */
  FLCE_INVALID_TYPE,        /* a dtype that an argument cannot have */
  FLCE_TARGET_OUT_OF_RANGE, /* a target is neither in [0, V) nor ignore_index (CPU only: the GPU
                               marks the row with NaN) */
  FLCE_OUT_OF_MEMORY,       /* the binding's allocator had no memory for a buffer */
  FLCE_UNSUPPORTED,         /* no kernel for this combination */
  FLCE_GEMM_FAILED,         /* the GEMM library returned an error */
  FLCE_DEVICE_ERROR,        /* a launch or a driver call failed */
  FLCE_COMM_FAILED,         /* a collective of a sharded vocabulary failed (comm.h) */
} flce_status;

/* The name of a status: a static string. */
const char* flce_status_name(flce_status status);

/* Formats an error message, as printf does, keeps it for this thread and returns `status`. The
 * message names the argument, the expected and the actual value. flce_last_error() returns it. */
flce_status flce_fail(flce_status status, const char* format, ...)
    __attribute__((format(printf, 2, 3)));
const char* flce_last_error(void);

/* True if FLCE_POISON=1, which is for tests: outputs and workspaces are filled with NaN before use,
 * and the CPU's bfloat16 GEMM emulates AMX, where oneDNN reads A beyond its k columns. */
bool flce_poisons(void);
enum {
  FLCE_POISON_FLOAT = 0xff, /* fill byte: NaN in every float dtype */
  FLCE_POISON_INT = 0x7f    /* fill byte of integers: 0xff would be -1, which is a valid value */
};

/* Returns from the calling function if `call` fails. */
#define FLCE_TRY(call)                                        \
  do {                                                        \
    flce_status flce_try_status_ = (call);                    \
    if (flce_try_status_ != FLCE_OK) return flce_try_status_; \
  } while (0)

/* ---- types ---- */

typedef enum flce_dtype { FLCE_F64, FLCE_F32, FLCE_BF16, FLCE_F16 } flce_dtype;

/* Bytes of an element. */
int64_t flce_size_of(flce_dtype dtype);
const char* flce_dtype_name(flce_dtype dtype);

/* The "stat dtype", in which row statistics, losses and sums over tokens are held: F64 for F64, F32
 * for every other dtype. */
flce_dtype flce_stat_dtype(flce_dtype dtype);

typedef enum flce_reduction { FLCE_NONE, FLCE_MEAN, FLCE_SUM } flce_reduction;

/* What the forward keeps for the backward. */
typedef enum flce_save {
  FLCE_SAVE_NOTHING, /* nothing: no gradient is wanted */
  FLCE_SAVE_LOGITS,  /* E or z, [rows][V]; the backward runs the two gradient GEMMs */
  FLCE_SAVE_GRADS,   /* the gradients for grad_output = 1; the backward scales them */
  FLCE_SAVE_STATS,   /* row statistics; the backward recomputes the logits, chunk by chunk */
  FLCE_SAVE_SAMPLES, /* the sampled gradient: lists of entries of E; the backward gathers with
                        them the rows of W and x, without a GEMM */
  FLCE_SAVE_AUTO,    /* of a problem alone: flce_choose_strategy() takes one of the others */
} flce_save;
const char* flce_save_name(flce_save save);

/* True if flce_backward() makes the gradients: with save=grads they are only scaled. */
static inline bool flce_has_backward(flce_save save) {
  return save == FLCE_SAVE_LOGITS || save == FLCE_SAVE_STATS || save == FLCE_SAVE_SAMPLES;
}

/* What the gradient GEMMs read.
 * EXP: E_ij = exp(l_ij - c_i) (times 1 - tanh^2 with a softcap), 0 in the target's column. The row
 * factors are applied to x and dX, and the target's term is added separately. So nothing cancels,
 * and applying grad_output needs no pass over [N][V].
 * DZ: the gradient of z, rounded once. It is needed for float16, whose range cannot hold E
 * (samples are drawn from E in bfloat16), and where the gradient is not a row factor times E:
 * probability targets, softcap with label smoothing, the gradient of the entropy. */
typedef enum flce_form { FLCE_FORM_EXP, FLCE_FORM_DZ } flce_form;

/* ---- samples (docs/sampled.md) ----
 *
 * With save=samples the gradient GEMMs are replaced by gathers: a row's E_ij, j != y, are replaced
 * by an unbiased sparse estimate. With S_i = sum_j exp(l_ij - c_i), each class has the probability
 * q_ij = min(1, E_ij / (eps S_i)) to be kept, with the value max(E_ij, eps S_i). The draw is
 * systematic: with F the prefix sums of q, in fixed point of FLCE_SAMPLE_BITS bits, and one uniform
 * number u_i in [0, 1) for the row, class j is kept if some integer m has F_{j-1} <= m + u_i < F_j.
 * u_i is the upper FLCE_SAMPLE_BITS bits of the first output word of Philox4x32-10 of key seed and
 * counter i, i the token's number.
 *
 * The list of a computed row has flce_sample_pitch() int32: pair 0 is the target's class y and the
 * number n of the pairs after it; pair 1 + m is a class other than y, ascending, and the bits of
 * its value in float32; zeros follow. y is -1 and n is 0 if the row is ignored or absent; both are
 * 0 if the target is out of range: the row's factors are NaN. */

/* Fraction bits of q in the prefix sums: sums of up to 256 values of at most 2^23 fit 32 bits;
 * sample_rows adds groups of 32 or 128 classes. */
enum { FLCE_SAMPLE_BITS = 23 };

/* The range of eps, and the most classes that can be sampled. */
#define FLCE_LEAST_EPS 0x1p-12
enum { FLCE_SAMPLE_CLASSES = 1 << 20 };

/* The most pairs after the first; draws beyond are dropped. ceil(1 / eps) + 1, and 2^-8 more
 * because E may be rounded to bfloat16. */
static inline int64_t flce_most_samples(double eps) {
  return (int64_t)(1.00390625 / (eps > FLCE_LEAST_EPS ? eps : FLCE_LEAST_EPS)) + 2;
}

/* Leading dimension of the lists, in int32: a multiple of 128 bytes. */
static inline int64_t flce_sample_pitch(double eps) {
  return (2 * (flce_most_samples(eps) + 1) + 31) / 32 * 32;
}

/* The numbers of the loss: X(name, whether a finite `value` is in range, that range in words). The
 * fields of flce_loss, their checks and the list in which the operators take them follow from it,
 * in the order of OPTIONS in flce/options.py. */
#define FLCE_LOSS_NUMBERS(X)                                                    \
  /* s: the target becomes (1 - s) target + s/V */                              \
  X(label_smoothing, value >= 0.0 && value <= 1.0, "0 <= label_smoothing <= 1") \
  /* C in C tanh(logit_scale z / C); 0 for none */                              \
  X(softcap, value >= 0.0, "a positive finite number or None")                  \
  /* multiplies z */                                                            \
  X(logit_scale, value != 0.0, "a finite number other than 0")                  \
  /* divides the logits of all rows after the softcap */                        \
  X(temperature, value > 0.0, "a positive finite number")                       \
  /* adds z_loss lse^2 to the loss of a row */                                  \
  X(z_loss, value >= 0.0, "a finite number of at least 0")

/* The scalar parameters of the loss. Its tensors are in flce_tensors. */
typedef struct flce_loss {
  int64_t ignore_index; /* class targets: rows with this target are ignored */
#define FLCE_FIELD(name, in_range, expected) double name;
  FLCE_LOSS_NUMBERS(FLCE_FIELD)
#undef FLCE_FIELD
} flce_loss;

/* What the caller asks for: sizes, dtypes, which inputs are present, which outputs are wanted. */
typedef struct flce_problem {
  int64_t tokens, /* N */
      hidden,     /* H */
      vocab;      /* V */
  /* How many of W's first columns get no gradient, a multiple of 8: dW has the others,
   * [weight_rows][hidden - frozen_hidden]. */
  int64_t frozen_hidden;
  /* Rows of the caller's W, b, dW, db and, without ranks, class weights, and columns of the
   * caller's target probabilities; at least vocab. Rows from vocab on are padding: they are never
   * read, and their gradient is 0. */
  int64_t weight_rows;
  /* Rows to compute: `tokens`, or an upper bound of the number of rows that are not ignored. If it
   * is less than `tokens`, or if facts.skips_rows is set and the form is exp, the rows are gathered
   * (compact_rows). */
  int64_t rows;
  /* Dtype of the GEMMs: autocast's dtype under autocast, else that of x and W. */
  flce_dtype dtype;
  flce_dtype input_dtype;  /* of the caller's x, and of dX */
  flce_dtype weight_dtype; /* of the caller's W, and of dW unless adds_grad_weight */
  flce_dtype bias_dtype;   /* of the caller's b, and of db */
  flce_dtype accum_dtype;  /* in which dW is summed over chunks: `dtype` or the stat dtype */
  /* The requested dtype of the logits: the stat dtype (exact), or `dtype` (rounded, as in eager
   * PyTorch). */
  flce_dtype logits_dtype;
  flce_reduction reduction; /* of the row losses */
  flce_save save;           /* what the forward keeps for the backward */
  bool sampled;         /* the gradient is sampled: save is samples, or auto before the choice */
  double gradient_eps;  /* save=samples: eps, in [FLCE_LEAST_EPS, 1] */
  bool want_grad_input, /* dX is needed */
      want_grad_weight, /* dW is needed */
      want_grad_bias;   /* db is needed */
  /* The backward adds dW to the contents of the caller's grad_weight, whose padding rows it leaves
   * unchanged. Not for save=grads, whose forward already computes dW. */
  bool adds_grad_weight;
  /* Dtype of that grad_weight: weight_dtype, or F32 if weight_dtype has 16 bits. */
  flce_dtype added_dtype;
  bool has_bias,          /* b is given */
      has_class_weight;   /* class weights are given */
  bool has_probabilities; /* the targets are probabilities, not class indices */
  /* The entropy of each row is wanted. With save=logits or save=stats its gradient may follow. */
  bool wants_entropy;
  bool wants_predictions; /* the argmax of each row is wanted */
  /* The caller wants stats and scalars as outputs. A backward that reads them gets them in any
   * case. */
  bool wants_statistics;
  /* For the choice of save=auto: lse or entropy are outputs that may be differentiated; the
   * backward adds dW to a gradient of the caller's; the call is part of a compiled graph. */
  bool differentiates_outputs, accumulates, traced;
  bool has_temperature; /* a temperature for each row is given */
  bool unaligned;       /* x or W does not start at a multiple of 16 bytes */
  /* With ranks > 1 the vocabulary is sharded over so many ranks (core/shards.c). W, b, dW and db
   * are those of this rank's classes, `vocab` of the `classes` in all, from first_class on; `vocab`
   * may be 0. Targets and class weights are those of all classes. Else the vocabulary is not
   * sharded, and none of these fields is read. */
  int64_t ranks, rank, first_class, classes;
  /* x and dX have only this rank's share: tokens / ranks tokens, from rank * (tokens / ranks) on.
   */
  bool input_is_sharded;
  bool partial_grad_input; /* dX is not summed over the ranks (reduce_input_grad=False) */
  bool wide_terms;         /* the ranks' partial dX is exchanged in float32, not in dX's dtype */
  /* Set by flce_plan_call from the plan of an equal share, so that all ranks have the same chunks
   * and row order. 0 and false without ranks. */
  int64_t chunk_rows;
  bool gathers;
  /* Set for a backward: FLCE_BUF_SAVED, or the grad_weight to which dW is added, does not start at
   * a multiple of 16 bytes. */
  bool weight_unaligned;
  flce_loss loss;     /* parameters of the loss */
  int64_t max_memory; /* bytes: upper bound of the logits buffer, whole or of a chunk */
  /* max_memory is the default, not the caller's choice. With 16-bit operands on a GPU the plan then
   * takes the smallest chunks whose predicted time is within 1 % of the best; else the fastest
   * chunks that fit. */
  bool saves_memory;
} flce_problem;

static inline bool flce_is_sharded(const flce_problem* problem) {
  return problem->ranks > 1;
}

/* Rows of the caller's x and dX. */
static inline int64_t flce_input_rows(const flce_problem* problem) {
  bool scatters = flce_is_sharded(problem) && problem->input_is_sharded;
  return scatters ? problem->tokens / problem->ranks : problem->tokens;
}

/* Columns of dW as the caller gets it. */
static inline int64_t flce_grad_weight_cols(const flce_problem* problem) {
  return problem->hidden - problem->frozen_hidden;
}

/* What the plan needs to know of a device and of its backend. The backend fills it for one
 * problem; see `facts` in flce_backend. */
typedef struct flce_facts {
  bool gemm_writes_f32; /* a GEMM of 16-bit operands can write a float32 result */
  bool gemm_adds_bias;  /* a GEMM with a float32 result adds the bias in its epilogue, for free */
  bool gemm_f16;        /* float16 GEMMs are fast; if not, operands are cast to float32 */
  /* Bytes of fused_logits' scratch for each row; 0 if fused_logits does not support the problem. */
  int64_t fused_row_bytes;
  int64_t fused_tile_rows; /* rows that fused_logits computes at a time, if it is supported */
  /* fused_logits is worth using also where it has to write z. Only if it is supported. */
  bool fused_writes_z;
  /* fused_logits skips the tiles beyond the last row that compact_rows finds, so finding the rows
   * pays even if none is ignored. A function of sizes and dtypes only. */
  bool skips_rows;
  /* Rows of the partial sums of db that grad_weight_gemm writes; 0 if it does not support the
   * problem. */
  int64_t bias_parts;
  int64_t multiprocessors; /* for wave quantization in chunks.c; 0 if that does not apply */
  /* Bytes. Rows of logits, E and dz start at multiples of it, and the columns of E and dz are
   * zero-padded to the next multiple. 0 or 1: no alignment is needed. */
  int64_t row_alignment;
  /* Elements. The logits GEMM may read a row of A up to the next multiple of it. If H is not a
   * multiple, rows of x are copied and zero-padded. 0 or 1: no alignment is needed. */
  int64_t input_alignment;
  /* Elements. If H is not a multiple of it, x and W are copied and zero-padded to the next
   * multiple, because the GEMMs are faster then. 0 or 1: no alignment is needed. */
  int64_t hidden_alignment;
  int64_t gemm_workspace_bytes; /* scratch of one GEMM */
  int64_t order_bytes;          /* scratch and result of order_targets for N tokens */
  int64_t compact_bytes;        /* scratch and result of compact_rows for N tokens */
  int64_t column_sum_bytes;     /* scratch of column_sum for V or H columns, whichever is more */
  int64_t sample_bytes;         /* scratch and result of order_samples; 0 unless save=samples */
} flce_facts;

/* ---- plan ---- */

/* Every buffer of a call: its outputs, and the parts of its workspaces. [N][H] are its dimensions;
 * a name after them is its dtype, a field of flce_plan unless it says otherwise. */
typedef enum flce_buffer_id {
  FLCE_BUF_LOSS,     /* [1], or [N] for FLCE_NONE, stat dtype */
  FLCE_BUF_ROW_LOSS, /* [N] stat dtype: the losses of the rows, if they are reduced */
  /* [FLCE_STAT_ROWS][N] stat dtype: enum flce_stat_row. An output if the plan keeps_statistics,
   * else part of the workspace. */
  FLCE_BUF_STATS,
  /* [FLCE_SCALAR_COUNT] stat dtype: enum flce_scalar. An output if the plan keeps_statistics, else
   * part of the workspace. */
  FLCE_BUF_SCALARS,
  /* [rows][saved_pitch]: save=logits keeps E or z in it, saved_dtype; save=samples the lists,
   * int32. */
  FLCE_BUF_SAVED,
  FLCE_BUF_PREDICTIONS, /* [N] int64 */
  FLCE_BUF_GRAD_INPUT,  /* [N][H] grad_input_dtype */
  /* [weight_rows][H - frozen_hidden] grad_weight_dtype. Absent if dW is added to the caller's. */
  FLCE_BUF_GRAD_WEIGHT,
  FLCE_BUF_GRAD_BIAS, /* [weight_rows] grad_bias_dtype */
  /* save=grads in float16: the gradients in their final dtype, for those of the three above that
   * are kept in float32 until grad_output is known. */
  FLCE_BUF_ROUNDED,
  /* [N][plan's hidden] dtype: x, if its dtype or its hidden size differs from the plan's. */
  FLCE_BUF_INPUT_CAST,
  /* [V][plan's hidden] dtype: W, if its dtype or its hidden size differs from the plan's. */
  FLCE_BUF_WEIGHT_CAST,
  FLCE_BUF_BIAS_CAST, /* [V] stat dtype: b, if it has another dtype */
  FLCE_BUF_LOGITS,    /* [chunk][z_pitch] z_dtype: logits of a chunk, overwritten by E or dz */
  /* [4 + chunk] float32, of a backward in form dz and float16: see scale_coefficients. */
  FLCE_BUF_DZ_SCALE,
  FLCE_BUF_COEF,  /* [FLCE_COEF_ROWS][N] stat dtype: enum flce_coef_row */
  FLCE_BUF_INDEX, /* int64: the rows to compute, if they are gathered (compact_rows) */
  /* [chunk][input_pitch] dtype: the chunk's rows of x as the A operand of the logits GEMM, if they
   * are copied and the copy is not in FLCE_BUF_SCALED_X. */
  FLCE_BUF_GATHERED_X,
  FLCE_BUF_GATHERED_COEF, /* [chunk] stat dtype: weights of the gathered rows of E in db */
  /* [chunk][plan's hidden] dx_gemm_dtype: E W of a chunk, if the GEMM cannot write it to dX. */
  FLCE_BUF_DX_ROWS,
  /* The B operand of dW's GEMM, [chunk][plan's hidden] dtype. Form exp: coef * x. Form dz: the
   * valid rows of x times FLCE_SCALAR_INPUT_SCALE, if x itself cannot be the operand. Before, it
   * may hold the A operand of the logits GEMM, as FLCE_BUF_GATHERED_X does: [chunk][input_pitch].
   */
  FLCE_BUF_SCALED_X,
  /* [V][weight_hidden] accum_dtype: the sum of dW over chunks, if dW has another dtype or the
   * plan's hidden is not H. */
  FLCE_BUF_DW_ACCUM,
  /* [dw_block_rows][weight_hidden] dtype: some rows of one chunk's dW, if the GEMM cannot write
   * accum_dtype. */
  FLCE_BUF_DW_BLOCK,
  FLCE_BUF_DB_ACCUM, /* [V] stat dtype: the sum of db over chunks */
  FLCE_BUF_DB_PARTS, /* [bias_parts][V] stat dtype: partial sums of db by grad_weight_gemm */
  /* [2 H + 1] stat dtype, H the plan's hidden, for label smoothing: sum_j w_j W_j, sum_i c_i x_i,
   * sum_i c_i, where c is FLCE_COEF_SMOOTH. */
  FLCE_BUF_SMOOTH,
  FLCE_BUF_ORDER,        /* tokens sorted by target (order_targets) */
  FLCE_BUF_SAMPLE_ORDER, /* the sampled entries ordered by class (order_samples) */
  FLCE_BUF_COLUMN_SUM,   /* scratch of column_sum */
  FLCE_BUF_FUSED,        /* scratch of fused_logits for a chunk */
  FLCE_BUF_GEMM,         /* scratch of a GEMM */
  /* The vocabulary is sharded (core/shards.c). R ranks, P flce_shard_stat_count(). */
  FLCE_BUF_SHARD_INPUT,   /* [N][H] input_dtype: x of all tokens, if the caller's is sharded */
  FLCE_BUF_SHARD_TARGET,  /* [N] int64: the targets as columns of this rank */
  FLCE_BUF_SHARD_SCALARS, /* [FLCE_SCALAR_COUNT] stat dtype: the scalars of this rank's classes */
  FLCE_BUF_SHARD_STATS,   /* [R][P][rows] stat dtype: the ranks' statistics of a chunk's rows */
  /* [R][ceil(N/R)][H] partial_dx_dtype: this rank's partial dX, sent, unless the caller's dX can
   * hold it; then the sums of all ranks, received. */
  FLCE_BUF_PARTIAL_DX,
  /* The same shape: the partial dX of all ranks for this rank's tokens, received. */
  FLCE_BUF_RECEIVED_DX,
  FLCE_BUF_COUNT
} flce_buffer_id;

/* Bits of flce_buffer.lifetime. A buffer with both IN bits is alive from the forward to the
 * backward if it is an OUTPUT; if not, each pass has it in its own workspace, at one offset. */
enum { FLCE_IN_FORWARD = 1, FLCE_IN_BACKWARD = 2, FLCE_OUTPUT = 4 };

typedef struct flce_buffer {
  int64_t bytes; /* 0: not needed */
  /* Bytes from the start of the forward's or the backward's workspace; -1 for an FLCE_OUTPUT, which
   * the caller allocates. */
  int64_t offset;
  unsigned lifetime; /* FLCE_IN_* and FLCE_OUTPUT bits */
} flce_buffer;

/* The collectives of a sharded vocabulary (core/shards.c). */
typedef enum flce_collective_id {
  FLCE_ALL_GATHER_INPUT,      /* of x, if it is sharded */
  FLCE_ALL_GATHER_STATISTICS, /* of the rows' statistics */
  FLCE_ALL_TO_ALL_DX,         /* of the ranks' partial dX */
  FLCE_ALL_GATHER_DX,         /* of the sums of these, unless dX is sharded */
  FLCE_COLLECTIVES
} flce_collective_id;

typedef struct flce_collective {
  int64_t forward, backward; /* calls */
  int64_t bytes;             /* that a rank receives from the others in all of them */
} flce_collective;

/* All decisions for one problem on one device. Pitches are in elements. */
typedef struct flce_plan {
  flce_save save;   /* flce_problem.save */
  flce_form form;   /* what the gradient GEMMs read */
  flce_dtype dtype; /* of the GEMM operands and of dz */
  /* Of E: dtype, but bfloat16 where samples are drawn from it for float16, whose range cannot hold
   * E. */
  flce_dtype exp_dtype;
  int64_t rows; /* to compute: flce_problem.rows */
  /* H, zero-padded to hidden_alignment: the leading dimension of x, W and every [][H] buffer of the
   * workspace. */
  int64_t hidden;
  int64_t weight_hidden; /* columns of dW: hidden - frozen_hidden */
  /* Leading dimension of a chunk's rows of x in the logits GEMM: `hidden`, zero-padded to
   * input_alignment. */
  int64_t input_pitch;
  bool gathers; /* rows are computed in the order of FLCE_BUF_INDEX */
  flce_buffer_id
      gathered_x, /* forward: the copy of a chunk's rows of x, if they are gathered or padded */
      backward_gathered_x; /* the same for the backward */
  /* The forward's statistics come from fused_logits. It writes E instead of the logits; in form dz
   * it writes the logits, if a row pass reads them. */
  bool fuses_rows;
  /* Not 0 if dW is kept in float16 before grad_output is known, times FLCE_SCALAR_DW_SCALE. Its
   * GEMM then multiplies by 2^dw_fp16_shift. */
  int dw_fp16_shift;
  int64_t bias_parts; /* rows of FLCE_BUF_DB_PARTS if grad_weight_gemm makes dW and db, else 0 */
  int64_t chunk_rows, /* rows of a chunk of the forward */
      chunks;         /* chunks of the forward */
  /* Rows of a chunk of the backward's loop, and its chunks; 0 for save=grads and save=samples,
   * which have none. */
  int64_t backward_chunk_rows, backward_chunks;
  flce_dtype z_dtype;     /* of FLCE_BUF_LOGITS when the logits GEMM writes it */
  flce_dtype saved_dtype; /* of FLCE_BUF_SAVED: dtype for E, z_dtype for z */
  bool gemm_adds_bias;    /* the logits GEMM or fused_logits adds b; the row passes do not */
  bool saves_exp;         /* FLCE_BUF_SAVED holds E, else z */
  bool z_in_saved;        /* the logits GEMM writes to FLCE_BUF_SAVED, not to FLCE_BUF_LOGITS */
  bool keeps_statistics;  /* stats and scalars are read after the forward */
  int64_t z_pitch,        /* of the logits, elements of z_dtype */
      out_pitch,          /* of E and dz, elements of dtype; columns from vocab on are 0 */
      saved_pitch;        /* of FLCE_BUF_SAVED, elements of saved_dtype, or int32 of the lists */
  flce_dtype grad_input_dtype, /* of FLCE_BUF_GRAD_INPUT */
      partial_dx_dtype,        /* of dX before it is summed over the ranks */
      grad_weight_dtype,       /* of FLCE_BUF_GRAD_WEIGHT, or of the caller's grad_weight */
      grad_bias_dtype;         /* of FLCE_BUF_GRAD_BIAS */
  /* The result of dX's GEMM. It goes directly to dX if that has this dtype and the same rows and
   * columns, else to FLCE_BUF_DX_ROWS. */
  flce_dtype dx_gemm_dtype;
  flce_dtype accum_dtype; /* in which dW is summed over chunks */
  int64_t dw_block_rows;  /* of FLCE_BUF_DW_BLOCK; 0 if the GEMM adds to the accumulator itself */
  flce_buffer buffers[FLCE_BUF_COUNT]; /* by flce_buffer_id */
  int64_t forward_workspace_bytes,     /* of flce_tensors.workspace in the forward */
      backward_workspace_bytes;        /* of flce_tensors.workspace in the backward */
  int64_t forward_peak_bytes, /* outputs and workspace in the forward; the inputs do not count */
      backward_peak_bytes,    /* the same in the backward */
      peak_bytes;             /* the larger of the two */
  int64_t forward_gemms,      /* GEMMs of the forward */
      backward_gemms;         /* GEMMs of the backward */
  /* save=samples: an estimate of the time of its passes over E, W, x and dW, with as many entries
   * as there can be, relative to the gradient GEMMs that they replace. From 1 on sampling may take
   * longer than exact gradients. 0 for the others. */
  double sampled_time;
  int64_t ranks;                                 /* over which the vocabulary is sharded, or 1 */
  flce_collective collectives[FLCE_COLLECTIVES]; /* by flce_collective_id; 0 without ranks */
} flce_plan;

/* valid_vocab: not given. */
#define FLCE_ABSENT INT64_MIN

/* What save=auto is: a strategy for at most few_rows rows, one for at most some_rows, one for more.
 */
typedef struct flce_strategy {
  flce_save few, some, many;
  int64_t few_rows, some_rows;
} flce_strategy;

/* Pure. The strategies of a problem whose `rows` are not read; all three are the same unless save
 * is auto. */
void flce_choose_strategy(const flce_problem* problem, const flce_facts* facts,
                          flce_strategy* strategy);

static inline flce_save flce_strategy_of(const flce_strategy* strategy, int64_t rows) {
  if (rows <= strategy->few_rows) return strategy->few;
  return rows <= strategy->some_rows ? strategy->some : strategy->many;
}

/* A rank's problem if the classes were divided equally: what the ranks have to agree on is decided
 * for it. The problem itself if the vocabulary is not sharded. */
flce_problem flce_equal_share(const flce_problem* problem);

/* Sets problem->vocab and, where the vocabulary is sharded, first_class and classes, from the
 * `start` and `vocab` of VocabParallel, -1 for None, and valid_vocab, or FLCE_ABSENT. A group of
 * one rank becomes no group. */
flce_status flce_find_classes(flce_problem* problem, int64_t start, int64_t vocab,
                              int64_t valid_vocab);

/* FLCE_INVALID_ARGUMENT if a parameter is out of its range; the message names it. */
flce_status flce_check_loss(const flce_loss* loss);

/* The facts of the backend for `problem`, and the plan, whose `save` is chosen if it is auto. Where
 * the vocabulary is sharded, what the ranks have to agree on (the chunks of the forward, the order
 * of its rows) is decided for a rank with an equal share of the classes. No allocation. */
flce_status flce_plan_call(const flce_backend* backend, const flce_problem* problem,
                           flce_plan* plan);

/* Pure: no allocation, no device call. FLCE_INVALID_ARGUMENT if a size, dtype or parameter is out
 * of its range, if max_memory is below one row of logits, or if `save` does not support the
 * reduction. */
flce_status flce_plan_make(const flce_problem* problem, const flce_facts* facts, flce_plan* plan);

/* Writes the plan as text, at most `size` bytes including the terminating 0. Returns the length of
 * the whole text without the 0, as snprintf does. */
int64_t flce_plan_text(const flce_plan* plan, char* text, int64_t size);

/* Pure. Sets the fields of a plan that depend neither on rows nor on sizes of buffers: form,
 * dtypes, leading dimensions. plan->save is set. */
void flce_choose_dtypes(const flce_problem* problem, const flce_facts* facts, flce_plan* plan);

/* Writes the plan's integers to `values`, unless that is NULL, and returns their number: the fields
 * in flce_plan_names(), then the bytes of the buffers, then forward, backward and bytes of each
 * collective. */
int64_t flce_plan_values(const flce_plan* plan, int64_t* values);
/* Three lists of names, separated by '/': fields, buffers, collectives and their kinds. */
const char* flce_plan_names(void);
/* FLCE_INVALID_ARGUMENT if a size, dtype or option is out of its range, or if options that exclude
 * each other are combined. */
flce_status flce_check_problem(const flce_problem* problem);

/* ---- engine ---- */

/* The caller's memory. Outputs that the plan does not list (bytes 0) may be NULL. Shapes are those
 * of the caller's tensors, stat dtype that of the plan's dtype. */
typedef struct flce_tensors {
  const void* input;              /* [flce_input_rows()][H] input_dtype */
  const void* linear_weight;      /* [weight_rows][H] weight_dtype */
  const void* linear_bias;        /* [weight_rows] bias_dtype, or NULL */
  const int64_t* target;          /* [N], or NULL with probabilities */
  const void* probabilities;      /* [N][weight_rows] probabilities_dtype, or NULL */
  flce_dtype probabilities_dtype; /* of `probabilities` */
  const void* class_weight;       /* [weight_rows], sharded [classes], stat dtype; or NULL */
  const void* token_weight;       /* [N] stat dtype, or NULL */
  const void* temperature;        /* [N] stat dtype, or NULL */
  const void* num_items;          /* [1] stat dtype, or NULL; read by the forward with FLCE_MEAN */
  const int64_t* seed;            /* [1], save=samples: of the draw, read by the forward */
  void* loss;                     /* [1], or [N] for FLCE_NONE; stat dtype */
  /* [FLCE_STAT_ROWS][N] stat dtype. Written by the forward, read by the backward. Not accessed
   * unless the plan keeps_statistics. */
  void* stats;
  /* [FLCE_SCALAR_COUNT] stat dtype. Written by the forward, read by the backward. Not accessed
   * unless the plan keeps_statistics. */
  void* scalars;
  /* [rows][saved_pitch]. With save=logits and save=samples written by the forward, read by the
   * backward. */
  void* saved;
  void* predictions; /* [N] int64 */
  /* [flce_input_rows()][H] plan->grad_input_dtype. Written by the forward for save=grads, else by
   * the backward. */
  void* grad_input;
  /* [weight_rows][H] plan->grad_weight_dtype. Written when grad_input is; with adds_grad_weight dW
   * is added to its contents. */
  void* grad_weight;
  void* grad_bias;          /* [weight_rows] plan->grad_bias_dtype; written when grad_input is */
  const void* grad_output;  /* backward: [1], or [N] for FLCE_NONE; stat dtype */
  const void* grad_lse;     /* backward: [N] stat dtype, or NULL for 0 */
  const void* grad_entropy; /* backward: [N] stat dtype, or NULL for 0 */
  /* plan->forward_workspace_bytes or plan->backward_workspace_bytes, aligned to 256 bytes. */
  void* workspace;
} flce_tensors;

/* `comm` is read if the vocabulary is sharded (ranks > 1); every rank has to make the same call. */
flce_status flce_forward(const flce_backend* backend, const flce_comm* comm,
                         const flce_problem* problem, const flce_plan* plan,
                         const flce_tensors* tensors);
flce_status flce_backward(const flce_backend* backend, const flce_comm* comm,
                          const flce_problem* problem, const flce_plan* plan,
                          const flce_tensors* tensors);
/* FLCE_INVALID_ARGUMENT unless flce_has_backward(plan->save). flce_backward() calls it too. */
flce_status flce_check_backward(const flce_plan* plan);

/* GEMMs that the engine has requested from backends since the process started. */
int64_t flce_gemm_count(void);

/* Cross entropy of given logits z[N][V]. tensors->input is z, tensors->grad_input is dz[N][V] in
 * z's dtype, tensors->workspace has flce_cross_entropy_workspace_bytes(); the other tensors are as
 * above. The forward and the backward each read the logits once. Of the problem they read tokens,
 * vocab, dtype, reduction, loss, wants_* and has_*, weight_rows (= vocab) and rows (= tokens). */
int64_t flce_cross_entropy_workspace_bytes(const flce_problem* problem);
flce_status flce_cross_entropy_forward(const flce_backend* backend, const flce_problem* problem,
                                       const flce_tensors* tensors);
flce_status flce_cross_entropy_backward(const flce_backend* backend, const flce_problem* problem,
                                        const flce_tensors* tensors);

/* ---- backends ---- */

/* bfloat16 elements in a row of an AMX tile: the step of a GEMM along k. */
enum { FLCE_AMX_DEPTH = 32 };

/* The CPU backend is part of the module. The caller provides the GEMM and the thread pool; op.cpp
 * passes torch's. */
typedef void (*flce_range_fn)(int64_t begin, int64_t end, void* context);
typedef struct flce_cpu {
  flce_status (*gemm)(void* context, const flce_gemm* gemm); /* gets gemm_context */
  /* Calls fn(from, to, context) in parallel on disjoint ranges that cover [begin, end), of at least
   * `grain` elements where there are as many. */
  void (*parallel_for)(int64_t begin, int64_t end, int64_t grain, flce_range_fn fn, void* context);
  void* gemm_context; /* of `gemm` */
} flce_cpu;
/* Fills `backend` with the CPU's functions and self = cpu. `cpu` must outlive `backend`. */
void flce_cpu_backend(flce_cpu* cpu, flce_backend* backend);
/* The instruction set of the row passes on this machine: "scalar", "avx2" or "avx512".
 * FLCE_CPU_VARIANT overrides the choice, for tests; "none" if it names one that cannot run here. */
const char* flce_cpu_variant(void);

/* The CUDA backend is a library of its own, libflce_cuda.so. Its exports are looked up by name. */
typedef struct flce_cuda {
  int device;      /* CUDA device index; has to be the current device of the calling thread */
  void* stream;    /* cudaStream_t: all work is queued here */
  bool allow_tf32; /* float32 GEMMs may use TF32 */
} flce_cuda;
/* Exported as "flce_cuda_backend": fills `backend` with self = cuda, which must outlive it. */
typedef flce_status (*flce_cuda_backend_fn)(flce_cuda* cuda, flce_backend* backend);
/* Exported as "flce_cuda_describe": describes the build and the device, one line each. */
typedef const char* (*flce_cuda_describe_fn)(void);

#ifdef __cplusplus
}
#endif
#endif
