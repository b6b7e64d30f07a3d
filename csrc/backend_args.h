/* What the functions of a backend (backend.h) take: indices of statistics and scalars, a GEMM, a
 * view of rows, and a struct for each function with many arguments. Symbols are those of flce.h. */
#ifndef FLCE_BACKEND_ARGS_H
#define FLCE_BACKEND_ARGS_H

#include "flce.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of flce_tensors.stats, [FLCE_STAT_COUNT][N] stat dtype: one value for each token. */
enum flce_stat_row {
  FLCE_STAT_LSE,     /* logsumexp of the row's l */
  FLCE_STAT_NLL,     /* class targets: lse - l_y, accurate also if tiny; probabilities: 0 */
  FLCE_STAT_OFFSET,  /* c_i in E_ij = exp(l_ij - c_i) */
  FLCE_STAT_INV_SUM, /* 1 / sum_j exp(l_ij - c_i), the target's column included */
  FLCE_STAT_ENTROPY, /* -sum_j p_j log p_j if wants_entropy, else 0 */
  /* Class targets: 1 - tanh^2 of the softcap at the target's logit, 1 without a softcap.
   * Probabilities: 0. */
  FLCE_STAT_SLOPE,
  FLCE_STAT_WEIGHT_SUM, /* probabilities: sum_j w_j ((1-s) t_j + s/V); class targets: 0 */
  /* If wants.tail: logsumexp of l over the tail, the classes that are not among the row's own
   * (flce_row_classes); -inf if there is none. Else 0. */
  FLCE_STAT_TAIL_LSE,
  FLCE_STAT_COUNT
};

/* Elements of flce_tensors.scalars, [FLCE_SCALAR_COUNT] stat dtype: one value for the call. */
enum flce_scalar {
  FLCE_SCALAR_VALID, /* number of rows that are not ignored */
  /* FLCE_MEAN with num_items: 1 / num_items. FLCE_MEAN without: 1 / sum of the targets' class
   * weights over valid rows (without class weights: over their number). 0 if the number of valid
   * rows and, where it is given, num_items is 0. Other reductions: 1. NaN if more rows are valid
   * than problem->shape.rows, and for num_items 0 with valid rows, which the CPU refuses. */
  FLCE_SCALAR_INV_DENOM,
  FLCE_SCALAR_WEIGHT_TOTAL, /* sum of class weights over the vocabulary; V without class weights */
  /* u: INV_DENOM times the power of two with u * (bound of |dz|) in (2^13, 2^14]. float16 gradients
   * that are computed before grad_output is known are kept times u. The bound is the product of
   * max |class weight|, max |token weight| / temperature over valid rows, |logit_scale|, and
   * 1 + 128 z_loss Z_FACTOR, which assumes |lse| <= 64. */
  FLCE_SCALAR_LOSS_SCALE,
  /* v: if dW is kept in float16, the power of two with v max |x| in (2^12, 2^13], x of valid rows;
   * else 1. */
  FLCE_SCALAR_INPUT_SCALE,
  /* If dW is kept in float16: u v 2^flce_plan.dw_fp16_shift, the factor that it is kept times, with
   * which its elements are at most 2^15. Else u. */
  FLCE_SCALAR_DW_SCALE,
  /* Factor by which the z-loss's divisor differs from INV_DENOM. FLCE_MEAN with class weights and
   * without num_items: (sum of the targets' class weights over valid rows) / (number of valid
   * rows), so that the z-loss is averaged over valid rows. Else 1. */
  FLCE_SCALAR_Z_FACTOR,
  FLCE_SCALAR_COUNT
};

/* Bounds of LOSS_SCALE and INPUT_SCALE: powers of two whose product a float can hold. Only sums of
 * weights below 2^-66, and x below float16's smallest number, would need larger ones. */
enum { FLCE_MAX_SCALE_EXPONENT = 80, FLCE_MAX_INPUT_EXPONENT = 40 };

/* Rows of the gradient's coefficients, [FLCE_COEF_COUNT][stat_pitch] stat dtype: factors of a row's
 * gradient. With k = token_weight_i g, a = logit_scale / (temperature temperature_i),
 * slope_j = 1 - tanh^2(logit_scale z_j / softcap) (1 without a softcap),
 * A = (1-s) w_y + s/V sum(w) (probabilities: WEIGHT_SUM), r = k (A + 2 z_loss Z_FACTOR lse) +
 * g_lse, m = lse - entropy: dz_j = slope_j (exp(l_j - c) (EXP + ENTROPY (m - l_j)) - SMOOTH w_j -
 * SOFT w_j t_j)
 *          + [j = y] ( TARGET - slope_y exp(l_y - c) EXP )
 *          + [j in the tail] slope_j exp(l_j - TAIL_LSE) TAIL
 *          + the gradient of z_j as an output (flce_row_classes.grads), if j is among the row's
 *            classes,
 * where g = grad_output * factor[0]; g_lse, g_entropy and g_tail are not multiplied by factor. */
enum flce_coef_row {
  FLCE_COEF_EXP, /* a r inv_sum: the factor of exp(l - c) */
  /* Class targets: a slope_y (r p_y - k (1-s) w_y), computed without cancellation: the gradient in
   * the target's column, without the terms of label smoothing and, unless
   * flce_upstream.entropy_in_target is set, of the entropy. */
  FLCE_COEF_TARGET,
  FLCE_COEF_SMOOTH,  /* a k s/V */
  FLCE_COEF_VALID,   /* the factor of x in form dz: input_scale, 0 for ignored rows */
  FLCE_COEF_ENTROPY, /* a g_entropy inv_sum */
  FLCE_COEF_SOFT,    /* probabilities: a k (1-s); class targets: 0 */
  FLCE_COEF_TAIL,    /* a g_tail: the factor of the softmax over the tail alone */
  FLCE_COEF_COUNT
};

/* What scale_coefficients writes first: {1/u, 0, 1, 0}. */
enum { FLCE_DZ_SCALE_NUMBERS = 4 };

/* The facts that follow from the type of the device and the dtype of a call alone. */
static inline void flce_facts_of_type(bool cpu, flce_dtype dtype, flce_facts* facts) {
  if (cpu) {
    /* torch's CPU GEMMs write the operands' dtype, and its float16 GEMM is slow. oneDNN's bfloat16
     * GEMM on AMX reads each row of A up to the next multiple of 32 elements beyond k and
     * multiplies the excess by zeros, so a NaN there becomes a NaN in the result. Hence the
     * alignments. */
    facts->row_alignment = FLCE_AMX_DEPTH * 2;
    facts->input_alignment = dtype == FLCE_BF16 ? FLCE_AMX_DEPTH : 1;
    facts->hidden_alignment = 1;
    return;
  }
  facts->gemm_writes_f32 = facts->gemm_adds_bias = facts->gemm_f16 = true;
  facts->hidden_alignment = flce_size_of(dtype) == 2 ? 8 : 1;
  facts->row_alignment = 128; /* a cache line, and a row of a TMA box */
  facts->multiprocessors = 1; /* any number > 0: that of the device is not known here */
}

/* C[m,n] = 2^shift op(A) op(B) + beta C + bias, all row-major. */
struct flce_gemm {
  int64_t m,          /* rows of C */
      n,              /* columns of C */
      k;              /* columns of op(A), rows of op(B) */
  bool transpose_a,   /* A is stored [k][m], else [m][k] */
      transpose_b;    /* B is stored [n][k], else [k][n] */
  const void* a;      /* dtype */
  const void* b;      /* dtype */
  void* c;            /* [m][n] c_dtype */
  int64_t pitch_a,    /* elements between the rows of A as stored */
      pitch_b,        /* the same of B */
      pitch_c;        /* the same of C */
  flce_dtype dtype;   /* of A and B */
  flce_dtype c_dtype; /* of C */
  double beta;        /* 0 or 1; with 0, C is not read */
  int shift;          /* the result is multiplied by 2^shift */
  /* NULL, or float32 numbers in the device's memory: the factor of the result in place of 2^shift,
   * 0 and 1. Only where operands are float16. */
  const float* factors;
  /* [n] c_dtype, added to every row of C, or NULL. Only if facts.gemm_adds_bias. */
  const void* bias;
};

/* Classes of each row whose logits are an output (flce_tensors.classes); the others are the row's
 * tail. The vectors are indexed like those of flce_rows, with `count` elements a row. */
typedef struct flce_row_classes {
  int64_t* ids;      /* classes of the whole vocabulary; NULL where there are none */
  const void* z;     /* stat dtype: flce_tensors.class_logits; read by class_gradients */
  const void* grads; /* stat dtype: the gradients of these z, or NULL for 0 */
  int64_t count;     /* of a row */
  int64_t first;     /* class of column 0: this rank's first one */
  int64_t all;       /* of the whole vocabulary */
  int64_t none;      /* the id that is no class */
} flce_row_classes;

/* The rows of one chunk, the argument of the row passes.
 *
 * z and out have one row for each computed row r of the chunk. The vectors over tokens (target,
 * token_weight, temperature, stats, loss, predictions, coef; and the rows of `probabilities`) are
 * indexed by i, the token of row r:
 * - index NULL: i = r, and the pointers to vectors are already advanced to the chunk's first row.
 * - else i = index[r], and the pointers are to token 0. index[r] = -1 is an absent row: out gets
 *   zeros, nothing else is written.
 *
 * All row passes read z + bias. Rows whose target is ignore_index get statistics 0, prediction -1
 * and rows of zeros, whatever z holds (also NaN). Rows whose target is out of range get NaN, and
 * prediction -1. */
typedef struct flce_rows {
  int64_t rows, /* of the chunk */
      vocab;    /* V, or of a block of the classes their number */
  /* Classes before those of the columns, and after them: 0 but where the columns of z and out are a
   * block of the classes, as grad_rows and class_gradients take. Then `target` names classes from
   * the first one on, and the vectors with an element for each class begin with the block's. */
  int64_t earlier_classes, later_classes;
  const int64_t* index; /* [rows], or NULL */
  const void* z;        /* [rows][z_pitch] z_dtype; exp(l - c) for a grad_rows with z_is_exp */
  flce_dtype z_dtype;   /* of z */
  int64_t z_pitch;      /* elements between rows of z */
  /* stat_rows, and fused_logits where it writes z (not packed), write zeros to the columns of z in
   * [vocab, z_columns). */
  int64_t z_columns;
  const void* bias;      /* [V] stat dtype, or NULL */
  const int64_t* target; /* [N] class targets; NULL with probabilities */
  /* t, [N][probabilities_pitch] probabilities_dtype; NULL with class targets. No row is ignored. */
  const void* probabilities;
  flce_dtype probabilities_dtype; /* of t */
  int64_t probabilities_pitch;    /* elements between rows of t */
  const void* class_weight;       /* w, [V] stat dtype, or NULL for ones */
  const void* token_weight;       /* [N] stat dtype, or NULL for ones */
  const void* temperature;        /* temperature_i, [N] stat dtype, or NULL for ones */
  flce_loss options;              /* parameters of the loss */
  bool wants_entropy;             /* stats: compute ENTROPY; gradients: add the entropy's */
  bool has_tail_gradient;         /* gradients: add those of TAIL_LSE */
  /* [rows][out_pitch] out_dtype, or NULL. May be z itself: then each row of out starts at the
   * address of its row of z. */
  void* out;
  flce_dtype out_dtype; /* of out */
  int64_t out_pitch;    /* elements between rows of out */
  int64_t out_columns;  /* columns of out to write: zeros from vocab on */
  void* stats;          /* [FLCE_STAT_COUNT][stat_pitch] stat dtype */
  int64_t stat_pitch;   /* elements between rows of stats and of coef: N */
  /* [N] stat dtype: token_weight (nll-part + z_loss Z_FACTOR lse^2), not yet divided by the
   * denominator. Class targets: nll-part = (1-s) w_y nll + s/V sum_j w_j (lse - l_j).
   * Probabilities: nll-part = sum_j w_j ((1-s) t_j + s/V) (lse - l_j). 0 for ignored rows. */
  void* loss;
  int64_t* predictions; /* [N]: the lowest column with the largest l; or NULL */
  flce_row_classes classes;
  bool finds_classes;      /* fused_logits: top_classes reads its E and its scratch */
  const void* scalars;     /* [FLCE_SCALAR_COUNT] stat dtype */
  const void* input_scale; /* row_coefficients: [1] stat dtype, what FLCE_COEF_VALID is in rows that
                            * are not ignored; NULL for 1 */
  const void* coef;        /* [FLCE_COEF_COUNT][stat_pitch] stat dtype, or NULL */
  /* [H] stat dtype: sum_j w_j W_j for fused_logits with label smoothing, if it is known already and
   * z has neither bias nor softcap. Or NULL. */
  const void* wsum;
  /* fused_logits of a divergence's student: that of its teacher, whose statistics are complete, or
   * NULL. The C of both GEMMs is the same memory: the teacher's float32 z is replaced, class by
   * class, by 32 bits (cuda/rows/packed_rows.cuh) from which divergence_rows makes p, q and d. */
  const struct flce_fused_call* teacher;
} flce_rows;

/* The arguments of a fused_logits that has been queued. */
typedef struct flce_fused_call {
  flce_gemm gemm;
  flce_rows rows;
  void* scratch;
} flce_fused_call;

/* Sums over the classes of a row that a divergence is made of: the divergence, of terms that are
 * none negative; the sum of p_j times the derivatives by p_j (divergence.h); and that of the
 * rounded p_j. */
enum flce_divergence_sum {
  FLCE_DIVERGENCE_VALUE,
  FLCE_DIVERGENCE_MEAN,
  FLCE_DIVERGENCE_MASS,
  FLCE_DIVERGENCE_SUMS
};

/* Both views have the same rows, index and targets, and vectors for the same tokens. */
typedef struct flce_divergence_args {
  /* z, bias, temperature, options, target and stats (OFFSET and INV_SUM) are read; loss, which
   * holds that of the target, and out are written. out NULL: no gradients; else coef too. */
  const flce_rows* student;
  const flce_rows* teacher; /* its z may have another dtype */
  /* Where the student's fused_logits had a teacher: its scratch, which begins with how each row is
   * packed. The student's z then holds the packed logits of both, and the teacher's is not read.
   * Else NULL. */
  const void* packing;
  flce_divergence divergence;
  double beta, hard_weight; /* of flce_problem */
  /* [FLCE_DIVERGENCE_SUMS][rows] stat dtype, of each row of z: written if `sums`, else read. NULL
   * with both `sums` and `writes`. */
  void* partial;
  bool sums; /* computes the sums over these classes */
  /* Writes loss and out from the sums, or from `partial` without `sums`. With neither `sums` nor
   * `out` no z is read: a rank without a class has none. */
  bool writes;
  /* With `writes`: replaces the student's INV_SUM by 1 / an upper bound of the row's sum of |dz_j|,
   * or by 0 for a bound of 0: sample_rows reads it as 1 / S. */
  bool stores_bound;
} flce_divergence_args;

/* ---- a sharded vocabulary (core/shards.c) ----
 *
 * Each rank runs the passes above over its own classes. In a row whose target y is another rank's
 * class, all passes treat a substitute column as the target's: y modulo the rank's number of
 * classes, 0 if it has none. TARGET of its coefficients leaves out the term of the one-hot target.
 * So every row has one column that is left out of E and one coefficient for it, on every rank. */

/* The targets of the rows' local view: a column of this rank, or one of these. */
enum { FLCE_SHARD_IGNORED = -1, FLCE_SHARD_OUT_OF_RANGE = -2 };

/* The classes of this rank. */
typedef struct flce_shard {
  int64_t first, /* the first one */
      count;     /* how many; may be 0 */
} flce_shard;

/* What a rank knows of a row from its own classes, in the stat dtype; the ranks exchange it. The
 * fields from ENTROPY to COLUMN are exchanged if any of them is needed, and all if TAIL is
 * (flce_shard_stat_count). */
enum flce_shard_stat {
  FLCE_SHARD_STAT_LSE,       /* logsumexp of the rank's l; -inf if it has no class */
  FLCE_SHARD_STAT_NLL,       /* LSE - l_y on the target's rank, -1 on the others */
  FLCE_SHARD_STAT_ENTROPY,   /* of the softmax over the rank's classes */
  FLCE_SHARD_STAT_SMOOTHING, /* sum_j w_j (LSE - l_j) */
  FLCE_SHARD_STAT_WEIGHT,    /* sum_j w_j */
  FLCE_SHARD_STAT_TOP,       /* the largest l, -inf if there is none */
  FLCE_SHARD_STAT_COLUMN,    /* the lowest class that has it */
  FLCE_SHARD_STAT_TAIL,      /* TAIL_LSE of the rank's classes; -inf if it has none */
  FLCE_SHARD_STATS
};

/* The highest class count whose numbers float32 holds exactly. */
enum { FLCE_EXACT_CLASSES = 1 << 24 };

static inline int flce_shard_stat_count(const flce_problem* problem) {
  bool more =
      problem->wants.entropy || problem->wants.predictions || problem->loss.label_smoothing > 0.0;
  if (problem->wants.tail) return FLCE_SHARD_STATS;
  return more ? FLCE_SHARD_STAT_TAIL : FLCE_SHARD_STAT_ENTROPY;
}

/* Upstream gradients, stat dtype. Their vectors are indexed like those of flce_rows. */
typedef struct flce_upstream {
  const void* loss;    /* of a row's loss (loss_stride 1) or of all (loss_stride 0); NULL for 1 */
  int64_t loss_stride; /* 0 or 1 */
  const void* lse;     /* of a row's lse; NULL for 0 */
  const void* entropy; /* of a row's entropy; NULL for 0 */
  const void* tail;    /* of a row's TAIL_LSE; NULL for 0 */
  /* TARGET includes the entropy's term, a slope_y g_entropy p_y (m - l_y): for save=samples, whose
   * lists have no E of the target. */
  bool entropy_in_target;
  /* The lists are of dz itself (sampled divergences): EXP is 1 and TARGET 0 in valid rows. */
  bool of_dz;
} flce_upstream;

enum { FLCE_GRADIENTS = 3 }; /* dX, dW, db: the most arrays of a scale_grads call */

/* A gradient that the forward computed, and the array that gets it after scaling. */
typedef struct flce_scaled {
  void* out;            /* [count] out_dtype; may be `in` */
  const void* in;       /* [count] in_dtype */
  flce_dtype out_dtype, /* of out */
      in_dtype;         /* of in */
  int64_t count;        /* elements */
} flce_scaled;

/* ---- arguments of the functions of the same names, which say what they do ---- */

typedef struct flce_cast_args {
  void* out;            /* [rows][out_pitch] out_dtype */
  const void* in;       /* [rows][in_pitch] in_dtype */
  flce_dtype out_dtype; /* of out */
  flce_dtype in_dtype;  /* of in */
  int64_t out_pitch;    /* leading dimension of out */
  int64_t in_pitch;     /* leading dimension of in */
  int64_t rows;         /* of both */
  int64_t cols;         /* copied of each row */
} flce_cast_args;

typedef struct flce_grad_rows_args {
  const flce_rows* rows;
  double scale;     /* the factor of exp(l - c) where that is written or, with z_is_exp, read */
  bool hide_target; /* without rows->coef: writes 0 in the target's column */
  /* z already holds scale * exp(l - c), the result of an earlier call without coef, whose logarithm
   * is l - c with z's own relative error. Not with a softcap or probabilities. */
  bool z_is_exp;
} flce_grad_rows_args;

typedef struct flce_scale_rows_args {
  void* out;            /* [rows][out_pitch] dtype */
  const void* x;        /* [][hidden] dtype */
  const void* coef;     /* stat dtype, indexed as x is; or NULL for ones */
  const int64_t* index; /* [rows] rows of x, -1 for none; or NULL for 0, 1, ... */
  flce_dtype dtype;     /* of x and out */
  int64_t out_pitch;    /* leading dimension of out */
  int64_t rows;         /* of out */
  int64_t hidden;       /* columns of x */
} flce_scale_rows_args;

typedef struct flce_grad_input_args {
  void* dx;              /* [][cols] dx_dtype, indexed as the vectors of `rows` */
  const void* d;         /* [rows->rows][hidden] d_dtype: the result of dX's GEMM; may be dx */
  const void* w;         /* [V][hidden] dtype */
  const void* x;         /* [][hidden] dtype, indexed as dx */
  void* scaled_x;        /* [rows->rows][hidden] dtype, or NULL */
  const void* wsum;      /* [hidden] stat dtype, or NULL */
  const flce_rows* rows; /* target, index, coef and stat_pitch are read */
  flce_dtype dx_dtype;   /* of dx */
  flce_dtype d_dtype;    /* of d */
  flce_dtype dtype;      /* of w, x and scaled_x */
  int64_t hidden;        /* columns of all but dx */
  int64_t cols;          /* columns of dx */
} flce_grad_input_args;

typedef struct flce_class_logits_args {
  void* out;             /* [][classes.count] stat dtype, indexed as the vectors of `rows` */
  const flce_rows* rows; /* target, vocab and classes are read */
  const void* x;         /* [][hidden] dtype, indexed as the vectors of `rows` */
  const void* w;         /* [V][hidden] dtype */
  const void* bias;      /* [V] stat dtype, or NULL */
  flce_dtype dtype;      /* of x and w */
  flce_dtype rounded;    /* to which the sum is rounded before the bias is added, as the logits are:
                            dtype or the stat dtype */
  int64_t hidden;        /* columns of x and w */
} flce_class_logits_args;

typedef struct flce_column_sum_args {
  void* out;           /* [cols] stat dtype */
  const void* a;       /* [rows][pitch] a_dtype */
  const void* weights; /* [rows] stat dtype, or NULL for ones */
  void* scratch;       /* facts.column_sum_bytes */
  flce_dtype a_dtype;  /* of a */
  int64_t pitch;       /* leading dimension of a */
  int64_t rows;        /* of a */
  int64_t cols;        /* of a that are summed */
  bool accumulate;     /* adds to out */
} flce_column_sum_args;

typedef struct flce_grad_weight_args {
  void* dw;                 /* [vocab][hidden] dw_dtype */
  const void* accum;        /* [vocab][hidden] accum_dtype; may be dw */
  const void* x;            /* [tokens][x_pitch] dtype */
  const void* coef_target;  /* [tokens] stat dtype, or NULL */
  const void* order;        /* of order_targets; read where coef_target is not NULL */
  const void* xsum;         /* [hidden] stat dtype, or NULL */
  const void* class_weight; /* [vocab] stat dtype, or NULL for ones */
  flce_dtype dw_dtype;      /* of dw */
  flce_dtype accum_dtype;   /* of accum */
  flce_dtype dtype;         /* of x */
  int64_t tokens;           /* rows of x */
  int64_t vocab;            /* rows of dw */
  int64_t hidden;           /* columns of x that are read, of accum and dw */
  int64_t x_pitch;          /* leading dimension of x */
} flce_grad_weight_args;

typedef struct flce_grad_bias_args {
  void* db;                 /* [vocab] db_dtype */
  const void* accum;        /* [vocab] stat; may be db */
  const void* coef_target;  /* [tokens] stat, or NULL */
  const void* order;        /* of order_targets; read where coef_target is not NULL */
  const void* smooth_total; /* [1] stat: the sum of coef_smooth; or NULL */
  const void* class_weight; /* [vocab] stat, or NULL for ones */
  flce_dtype db_dtype;      /* of db */
  flce_dtype stat;          /* the stat dtype */
  int64_t tokens;           /* that were ordered */
  int64_t vocab;            /* elements of db */
} flce_grad_bias_args;

typedef struct flce_add_block_args {
  void* accum;            /* [rows][cols] accum_dtype */
  const void* block;      /* [rows][pitch] dtype */
  flce_dtype accum_dtype; /* of accum */
  flce_dtype dtype;       /* of block */
  int64_t pitch;          /* leading dimension of block */
  int64_t rows;           /* of both */
  int64_t cols;           /* of accum */
} flce_add_block_args;

typedef struct flce_shard_targets_args {
  int64_t* out;          /* [tokens] */
  const int64_t* target; /* [tokens] classes of the whole vocabulary */
  int64_t tokens;        /* of both */
  flce_shard shard;      /* this rank's classes */
  int64_t classes;       /* of the whole vocabulary */
  int64_t ignore_index;  /* of `target` */
} flce_shard_targets_args;

typedef struct flce_pack_args {
  void* shard_stats; /* [count][rows->rows] stat dtype */
  int count;         /* flce_shard_stat_count() */
  /* Of the whole vocabulary: target, class_weight, vocab, options; stats, loss and predictions hold
   * what the passes over this rank's classes wrote. */
  const flce_rows* rows;
  flce_shard shard;    /* this rank's classes */
  const void* scalars; /* of this rank's classes */
  const void* x;       /* [][hidden] dtype, indexed as the vectors of `rows` */
  const void* w;       /* [shard.count][hidden] dtype */
  const void* bias;    /* [shard.count] stat dtype, or NULL */
  flce_dtype dtype;    /* of x and w */
  int64_t hidden;      /* columns of both */
} flce_pack_args;

typedef struct flce_merge_args {
  const flce_rows* rows;   /* as in flce_pack_args */
  flce_shard shard;        /* this rank's classes */
  const void* shard_stats; /* [ranks][count][rows->rows] stat dtype */
  int count;               /* flce_shard_stat_count() */
  int64_t ranks;           /* of `shard_stats` */
  int64_t rank;            /* this one */
} flce_merge_args;

typedef struct flce_sum_dx_args {
  void* out;            /* [count] out_dtype */
  void* copy;           /* [count] out_dtype, a second output; or NULL */
  flce_dtype out_dtype; /* dtype, or a 16-bit dtype where that is float32 */
  const void* received; /* [ranks][count] dtype; the block of `rank` is not read */
  const void* own;      /* [count] dtype: the term of `rank` */
  flce_dtype dtype;     /* of received and own */
  int64_t ranks;        /* partial gradients */
  int64_t rank;         /* this one */
  int64_t count;        /* of elements */
} flce_sum_dx_args;

typedef struct flce_sample_rows_args {
  const flce_rows* rows; /* target, index, out (E), stats and stat_pitch are read */
  int32_t* lists;        /* [rows->rows][flce_sample_pitch(eps)] */
  double eps;            /* flce_problem.sampling.eps */
  int bits;              /* flce_sample_bits() */
  const int64_t* seed;   /* [1] */
  int64_t first_token;   /* the number of the token at which the vectors of `rows` start */
} flce_sample_rows_args;

typedef struct flce_sampled_input_args {
  void* dx; /* [][cols] dx_dtype, indexed as the vectors of `rows` */
  /* target, index, coef, stats, stat_pitch and wants_entropy are read */
  const flce_rows* rows;
  const int32_t* lists; /* [rows->rows][flce_sample_pitch(eps)] */
  double eps;           /* flce_problem.sampling.eps */
  const void* w;        /* [V][hidden] dtype */
  const void* wsum;     /* [hidden] stat dtype, or NULL */
  flce_dtype dx_dtype;  /* of dx */
  flce_dtype dtype;     /* of w */
  int64_t hidden;       /* leading dimension of w */
  int64_t cols;         /* columns of dx */
} flce_sampled_input_args;

typedef struct flce_order_samples_args {
  void* order; /* facts.sample_bytes */
  /* index, coef, stats, stat_pitch, wants_entropy and vocab are read */
  const flce_rows* rows;
  const int32_t* lists; /* [rows->rows][flce_sample_pitch(eps)] */
  double eps;           /* flce_problem.sampling.eps */
  int64_t hidden;       /* columns of dW; at most those that facts.sample_bytes was computed for */
} flce_order_samples_args;

typedef struct flce_sampled_weight_args {
  void* dw;                 /* [vocab][cols] dw_dtype */
  const void* x;            /* [N][x_pitch] dtype */
  void* order;              /* of order_samples */
  const void* xsum;         /* [hidden] stat dtype, or NULL */
  const void* class_weight; /* [vocab] stat dtype, or NULL for ones */
  double eps;               /* flce_problem.sampling.eps */
  flce_dtype dw_dtype;      /* of dw */
  flce_dtype dtype;         /* of x */
  int64_t rows;             /* whose lists were ordered */
  int64_t vocab;            /* rows of dw */
  int64_t hidden;           /* columns of x that are read */
  int64_t x_pitch;          /* leading dimension of x */
  int64_t cols;             /* columns of dw */
  bool adds;                /* adds to dw, of which only the rows that change are written */
} flce_sampled_weight_args;

typedef struct flce_sampled_bias_args {
  void* db;                 /* [vocab] db_dtype */
  const void* order;        /* of order_samples */
  const void* smooth_total; /* [1] stat: the sum of coef_smooth; or NULL */
  const void* class_weight; /* [vocab] stat, or NULL for ones */
  double eps;               /* flce_problem.sampling.eps */
  flce_dtype db_dtype;      /* of db */
  int64_t rows;             /* whose lists were ordered */
  int64_t vocab;            /* elements of db */
  int64_t hidden;           /* as in flce_order_samples_args */
} flce_sampled_bias_args;

#ifdef __cplusplus
}
#endif

#endif
