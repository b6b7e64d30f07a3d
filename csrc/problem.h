/* What flce_plan_call() and flce_plan_make() take: the problem of a call and the facts of a device;
 * with the dtypes and the statuses that everything uses. */
#ifndef FLCE_PROBLEM_H
#define FLCE_PROBLEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

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

/* What the forward keeps for the backward: the caller's option `save`. */
typedef enum flce_save {
  FLCE_SAVE_NOTHING, /* nothing: no gradient is wanted */
  FLCE_SAVE_LOGITS,  /* E or z, [rows][V]; the backward runs the two gradient GEMMs */
  FLCE_SAVE_GRADS,   /* the gradients for grad_output = 1; the backward scales them */
  FLCE_SAVE_STATS,   /* row statistics; the backward recomputes the logits, chunk by chunk */
  FLCE_SAVE_SAMPLES, /* the sampled gradient: lists of entries of E; the backward gathers with
                        them the rows of W and x, without a GEMM */
  FLCE_SAVE_AUTO,    /* flce_choose_strategies() chooses one of the others */
} flce_save;
const char* flce_save_name(flce_save save);

/* What a call does: the caller's `save`, or what auto has become. Never FLCE_SAVE_AUTO. */
typedef flce_save flce_strategy;

/* True if flce_backward() makes the gradients: with save=grads they are only scaled. */
static inline bool flce_has_backward(flce_strategy strategy) {
  return strategy == FLCE_SAVE_LOGITS || strategy == FLCE_SAVE_STATS ||
         strategy == FLCE_SAVE_SAMPLES;
}

/* What the gradient GEMMs read.
 * EXP: E_ij = exp(l_ij - c_i) (times 1 - tanh^2 with a softcap), 0 in the target's column. The row
 * factors are applied to x and dX, and the target's term is added separately. So nothing cancels,
 * and applying grad_output needs no pass over [N][V].
 * DZ: the gradient of z, rounded once. It is needed for float16, whose range cannot hold E
 * (samples are drawn from E in bfloat16), and where the gradient is not a row factor times E:
 * probability targets, a softcap with label smoothing or top-k, the tail's logsumexp, the gradients
 * of the entropy and of the logits of classes, divergences. */
typedef enum flce_form { FLCE_FORM_EXP, FLCE_FORM_DZ } flce_form;

/* ---- samples (docs/sampled-reference.md) ----
 *
 * With save=samples the gradient GEMMs are replaced by gathers: a row's E_ij, j != y, are replaced
 * by an unbiased sparse estimate. With S_i = sum_j exp(l_ij - c_i), each class has the probability
 * q_ij = min(1, E_ij / (eps S_i)) to be kept, with the value max(E_ij, eps S_i).
 *
 * The draw is systematic, with one random number u_i in [0, 1) for a row. Let F_j be the sum of
 * q_ik over the classes k <= j. Class j is kept if there is an integer m with F_{j-1} <= m + u_i <
 * F_j. F and u_i are fixed-point numbers with flce_sample_bits() fraction bits; those of u_i are
 * the upper bits of the first two output words of Philox4x32-10 of key seed and counter i, i the
 * token's number, from first_token on.
 *
 * The list of a computed row has flce_sample_pitch() int32: pair 0 is the target's class y and the
 * number n of the pairs after it; pair 1 + m is a class other than y, ascending, and the bits of
 * its E_ij in float32; zeros follow. y is -1 and n is 0 if the row is ignored or absent; both are
 * 0 if the target is out of range: the row's factors are NaN. */

enum {
  /* Fraction bits of q in the prefix sums up to FLCE_NARROW_CLASSES classes: sums of up to 256
   * values of at most 2^23 fit 32 bits; sample_rows adds groups of 32 or 128 classes. */
  FLCE_NARROW_BITS = 23,
  FLCE_NARROW_CLASSES = 1 << 20,
  /* With more classes: q of equal logits is at least 2^-31, so that its rounding, at most 2^-41, is
   * at most 2^-10 of it. */
  FLCE_WIDE_BITS = 40,
};

/* `classes`: of all ranks, as all of them share a row's S. */
static inline int flce_sample_bits(int64_t classes) {
  return classes <= FLCE_NARROW_CLASSES ? FLCE_NARROW_BITS : FLCE_WIDE_BITS;
}

/* For a divergence the lists are drawn from dz at grad_output = 1: |dz_ij| replaces E_ij, and S_i
 * is an upper bound of sum_j |dz_ij| (divergence.h). A kept class has the value sign(dz_ij)
 * max(|dz_ij|, eps S_i). y is drawn like every class; pair 0 contributes nothing. A rank of a
 * sharded vocabulary draws from its own classes. */

/* The range of eps, and the most classes that can be sampled. */
#define FLCE_LEAST_EPS 0x1p-12
enum { FLCE_SAMPLE_CLASSES = INT32_MAX };

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
 * fields of flce_loss, their checks and the list in which the operators take them follow from it.
 */
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

/* What takes the place of the cross entropy: how far the softmax p of a row's l is from q, that of
 * a teacher's logits. KL(q || p); KL(p || q); with m = beta q + (1 - beta) p,
 * beta KL(q || m) + (1 - beta) KL(p || m).
 *
 * X(name here, name in calls, takes_mean, largest). From these rows follow the enum, the range of
 * its values, Python's DIVERGENCES (flce/packing.py) and the CUDA kernels. A compiled graph holds
 * the number of a row: a new one is the last. takes_mean: p times the derivatives by p has a sum to
 * be taken out of the gradient (flce_divergence_mean). If not, its sum is 0 but for errors, and one
 * pass makes loss and dz. largest: a bound of a row's gradient by l, for row factors of 1, from
 * which float16's loss scale follows. p log(p / q) of the reverse KL has none: where it exceeds
 * this one by four times, float16 overflows. */
#define FLCE_DIVERGENCES(X)               \
  X(FORWARD_KL, "forward_kl", false, 1.0) \
  X(REVERSE_KL, "reverse_kl", true, 16.0) \
  X(JSD, "jsd", true, 1.0)

#define FLCE_ENUMERATOR(NAME, ...) , FLCE_##NAME
/* Each switch over them has no default: the compiler says which ones lack the next. */
typedef enum flce_divergence {
  FLCE_NO_DIVERGENCE FLCE_DIVERGENCES(FLCE_ENUMERATOR)
} flce_divergence;
#undef FLCE_ENUMERATOR

#define FLCE_ONE_MORE(...) +1
enum { FLCE_DIVERGENCE_COUNT = FLCE_DIVERGENCES(FLCE_ONE_MORE) }; /* the last one's value */
#undef FLCE_ONE_MORE

/* FLCE_INVALID_ARGUMENT for what is none. */
flce_status flce_check_divergence(flce_divergence kind);

/* A call: what it computes of which operands, and how. Each group of fields is set in one place.
 * The core takes the problem as const; where it asks the same for other sizes (a rank's equal
 * share, a divergence's teacher) it changes a copy.
 *
 *   csrc/binding, before every pass of a call
 *     from the operands  shape, dtypes, has
 *     from the options   loss, reduction, divergence, wants, save, sampling, graph, memory, shard
 *     in a backward      backward; consumes_saved is an option
 *   flce_plan_call       derived; and in its copies what the caller may leave open: save, if it is
 *                        auto, and dtypes.accum of a rank */
typedef struct flce_problem {
  /* The sizes of the operands, and which part of them is computed. */
  struct {
    int64_t tokens, /* N */
        hidden,     /* H */
        vocab;      /* V; of a rank: of its classes, may be 0 (flce_find_classes) */
    /* Rows of the caller's W, b, dW, db and, without ranks, class weights, and columns of the
     * caller's target probabilities; at least vocab. Rows from vocab on are padding: they are never
     * read, and their gradient is 0. */
    int64_t weight_rows;
    /* Rows to compute: `tokens`, or an upper bound of the number of rows that are not ignored. If
     * it is less than `tokens`, or if facts.skips_rows is set and the form is exp, the rows are
     * gathered (compact_rows). */
    int64_t rows;
    /* The number of token 0, where the tokens are a part of the caller's: in draws and messages. */
    int64_t first_token;
    /* How many of W's first columns get no gradient, a multiple of 8: dW has the others,
     * [weight_rows][hidden - frozen_hidden]. */
    int64_t frozen_hidden;
    /* With has.logits: the column of the input from which on it has those of this rank's classes.
     */
    int64_t first_logit;
  } shape;

  /* Those of the operands, and those that the caller asks for. */
  struct {
    /* Of the GEMMs: autocast's dtype under autocast, else that of x and W. */
    flce_dtype gemm;
    flce_dtype input, /* of the caller's x, and of dX */
        weight,       /* of the caller's W, and of dW unless backward.adds_grad_weight */
        bias;         /* of the caller's b, and of db */
    /* In which dW is summed over chunks: `gemm` or the stat dtype. Of a rank it becomes that of the
     * plan of an equal share. */
    flce_dtype accum;
    /* accum is the default, `gemm`, not the caller's choice: the plan takes the stat dtype for
     * FLCE_WIDE_SUM_CHUNKS chunks or more. */
    bool widens_accum;
    /* The requested dtype of the logits: the stat dtype (exact), or `gemm` (rounded, as in eager
     * PyTorch). */
    flce_dtype logits;
  } dtypes;

  /* Which operands there are besides x, W and class targets. */
  struct {
    bool bias,             /* b is given */
        class_weight,      /* class weights are given */
        probabilities,     /* the targets are probabilities, not class indices */
        temperature,       /* a temperature for each row is given */
        unaligned_operand; /* x or W does not start at a multiple of 16 bytes */
    /* Of a teacher: its logits are given. The input is z itself, and shape.hidden the number of its
     * columns. */
    bool logits;
  } has;

  /* ---- from the options ---- */

  flce_loss loss;           /* its parameters */
  flce_reduction reduction; /* of the row losses */

  /* What takes the place of the cross entropy, if `kind` says so. */
  struct {
    flce_divergence kind;
    double beta, hard_weight; /* h: a row's loss is (1 - h) divergence + h cross entropy */
    /* The problem of the teacher's logits, with the student's rows and classes; NULL in that
     * problem itself, which has the kind of its student. */
    const struct flce_problem* teacher;
  } divergence;

  /* The outputs that the caller wants besides the loss. */
  struct {
    bool grad_input,       /* dX */
        grad_weight,       /* dW */
        grad_bias;         /* db */
    bool entropy;          /* of each row */
    bool entropy_gradient; /* with save=logits or save=stats its gradient may follow */
    bool predictions;      /* the argmax of each row */
    /* The logits of so many classes of each row are an output, 0 for none: those that the caller
     * gives, or, with topk, flce_candidates() of those with the largest logits. */
    int64_t row_classes;
    int64_t topk; /* 0, or the number of classes that the caller wants of these */
    bool tail;    /* FLCE_STAT_TAIL_LSE of each row */
    bool
        class_gradient; /* with save=logits or save=stats the gradient of these logits may follow */
    /* Stats and scalars as outputs. A backward that reads them gets them in any case. */
    bool statistics;
  } wants;

  /* What the caller asks the forward to keep for the backward. What a call does is
   * flce_plan.strategy. */
  flce_save save;

  /* Sampled gradients. */
  struct {
    bool wanted; /* the caller asks for them, also those of a divergence */
    double eps;  /* in [FLCE_LEAST_EPS, 1]; 0 where it is not set */
  } sampling;

  /* What the forward is told of the graph that it is in: what save=auto is depends on it. */
  struct {
    bool differentiates_outputs, /* lse, entropy or logits of classes may be differentiated */
        accumulates,             /* the backward adds dW to a gradient of the caller's */
        traced;                  /* the call is part of a compiled graph */
  } graph;

  /* Bytes. */
  struct {
    int64_t bound; /* of the logits buffer, whole or of a chunk */
    /* With save=auto, of what save=logits keeps: where losses are not reduced, outputs may be
     * differentiated, or the forward must not make gradients (strategy.c). Else that is `bound`. */
    int64_t kept;
    /* `bound` is the default, not the caller's choice. With 16-bit operands on a GPU the plan then
     * takes the smallest chunks whose predicted time is within 1 % of the best; else the fastest
     * chunks that fit. */
    bool bound_is_default;
  } memory;

  /* With ranks > 1 the vocabulary is sharded over so many ranks (core/shards.c). W, b, dW and db
   * are those of this rank's classes, shape.vocab of the `classes` in all, from first_class on.
   * Targets and class weights are those of all classes. Else the vocabulary is not sharded, and
   * none of these fields is read. */
  struct {
    int64_t ranks, rank;          /* from the options */
    int64_t first_class, classes; /* by flce_find_classes */
    /* x and dX have only this rank's share: tokens / ranks tokens, from rank * (tokens / ranks) on.
     */
    bool input_is_sharded;
    bool partial_grad_input; /* dX is not summed over the ranks (reduce_input_grad=False) */
    bool wide_terms;         /* the ranks' partial dX is exchanged in float32, not in dX's dtype */
  } shard;

  /* ---- of a backward ---- */

  struct {
    /* There are gradients of the entropy; of logits of classes, or of TAIL_LSE; of TAIL_LSE. */
    bool has_grad_entropy, has_grad_classes, has_grad_tail;
    bool consumes_saved; /* it may overwrite what the forward saved */
    /* It adds dW to the contents of the caller's grad_weight, whose padding rows it leaves
     * unchanged. Not for save=grads, whose forward already computes dW. */
    bool adds_grad_weight;
    /* Dtype of that grad_weight: dtypes.weight, or F32 if dtypes.weight has 16 bits. */
    flce_dtype added_dtype;
    /* FLCE_BUF_SAVED, or the grad_weight to which dW is added, does not start at a multiple of 16
     * bytes. */
    bool has_unaligned;
  } backward;

  /* ---- derived by the core: 0 and false in what the caller passes ---- */

  /* Of a rank: those of the plan of an equal share, so that all ranks have the same chunks and row
   * order. Of a teacher: chunk_rows is the student's. */
  struct {
    int64_t chunk_rows, block_rows, block_classes;
    bool gathers;
    int64_t teacher_bytes; /* of the teacher's workspace */
  } derived;
} flce_problem;

/* The most classes that topk may ask for. */
enum { FLCE_MOST_TOPK = 1024 };

/* The candidates for the `topk` classes with the largest logits. They are chosen by rounded values,
 * and the caller chooses among them by the exact logits: a class that more than topk / 8 + 8 others
 * equal in rounded value may be left out. */
#define FLCE_CANDIDATES(topk) ((topk) + (topk) / 8 + 8)
/* 0 for a topk that flce_check_problem refuses, too. */
static inline int64_t flce_candidates(int64_t topk) {
  return topk > 0 && topk <= FLCE_MOST_TOPK ? FLCE_CANDIDATES(topk) : 0;
}

/* The id that is none in a row's classes: topk's are -1, the caller's ignore_index. */
static inline int64_t flce_no_class(const flce_problem* problem) {
  return problem->wants.topk > 0 ? -1 : problem->loss.ignore_index;
}

/* Whether gradients are sampled: as asked for, or by the strategy. */
static inline bool flce_is_sampled(const flce_problem* problem) {
  return problem->sampling.wanted || problem->save == FLCE_SAVE_SAMPLES;
}

static inline bool flce_is_sharded(const flce_problem* problem) {
  return problem->shard.ranks > 1;
}

/* Rows of the caller's x and dX. */
static inline int64_t flce_input_rows(const flce_problem* problem) {
  bool scatters = flce_is_sharded(problem) && problem->shard.input_is_sharded;
  return scatters ? problem->shape.tokens / problem->shard.ranks : problem->shape.tokens;
}

/* Columns of dW as the caller gets it. */
static inline int64_t flce_grad_weight_cols(const flce_problem* problem) {
  return problem->shape.hidden - problem->shape.frozen_hidden;
}

/* What the plan needs to know of a device and of its backend. The backend fills it for one problem
 * (`facts` of flce_backend), but for what is asked by FLCE_BLOCKS. */
typedef struct flce_facts {
  bool gemm_writes_f32; /* a GEMM of 16-bit operands can write a float32 result */
  bool gemm_adds_bias;  /* a GEMM with a float32 result adds the bias in its epilogue, for free */
  bool gemm_f16;        /* float16 GEMMs are fast; if not, operands are cast to float32 */
  /* Bytes of fused_logits' scratch for each row; 0 if fused_logits does not support the problem. */
  int64_t fused_row_bytes;
  int64_t fused_tile_rows; /* rows that fused_logits computes at a time, if it is supported */
  /* fused_logits is worth using also where it has to write z. Only if it is supported. */
  bool fused_writes_z;
  /* fused_logits of a divergence's student can pack both logits (flce_rows.teacher in
   * backend_args.h). */
  bool fused_packs;
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
  /* Set by core/plan_call.c, from FLCE_BLOCKS: whether it is set, and the rows and classes of a
   * block that it asks for, 0 for chunks of all classes; and whether in the memory of dW, if
   * possible. */
  bool asks_block, asks_dw_memory;
  int64_t asked_rows, asked_classes;
  int64_t gemm_workspace_bytes; /* scratch of one GEMM */
  int64_t order_bytes;          /* scratch and result of order_targets for N tokens */
  int64_t compact_bytes;        /* scratch and result of compact_rows for N tokens */
  int64_t column_sum_bytes;     /* scratch of column_sum for V or H columns, whichever is more */
  int64_t sample_bytes; /* scratch and result of order_samples; 0 unless gradients are sampled */
} flce_facts;

#ifdef __cplusplus
}
#endif

#endif
