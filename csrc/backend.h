/* The interface between the engine and a device: the table of functions that the CPU and the CUDA
 * backend fill, and the structs that these functions take. Symbols are those of flce.h. Decisions
 * that a backend does not make (strategy, chunks, buffers) are in flce_plan. */
#ifndef FLCE_BACKEND_H
#define FLCE_BACKEND_H

#include "flce.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of flce_tensors.stats, [FLCE_STAT_ROWS][N] stat dtype: one value for each token. */
enum flce_stat_row {
  FLCE_STAT_LSE,     /* logsumexp of the row's l */
  FLCE_STAT_NLL,     /* class targets: lse - l_y, accurate also if tiny; probabilities: 0 */
  FLCE_STAT_OFFSET,  /* c_i in E_ij = exp(l_ij - c_i) */
  FLCE_STAT_INV_SUM, /* 1 / sum_j exp(l_ij - c_i), the target's column included */
  FLCE_STAT_ENTROPY, /* -sum_j p_j log p_j if wants_entropy, else 0 */
  /* Class targets: 1 - tanh^2 of the softcap at the target's logit, 1 without a softcap.
   * Probabilities: 0. */
  FLCE_STAT_SLOPE,
  FLCE_STAT_WEIGHT_SUM, /* probabilities: sum_j w_j q_j, q = (1-s) t + s/V; class targets: 0 */
  FLCE_STAT_ROWS
};

/* Elements of flce_tensors.scalars, [FLCE_SCALAR_COUNT] stat dtype: one value for the call. */
enum flce_scalar {
  FLCE_SCALAR_VALID, /* number of rows that are not ignored */
  /* FLCE_MEAN with num_items: 1 / num_items. FLCE_MEAN without: 1 / sum of the targets' class
   * weights over valid rows (without class weights: over their number). 0 if num_items or the
   * number of valid rows is 0. Other reductions: 1. NaN if more rows are valid than problem->rows.
   */
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

/* Rows of the gradient's coefficients, [FLCE_COEF_ROWS][stat_pitch] stat dtype: factors of a row's
 * gradient. With k = token_weight_i g, a = logit_scale / (temperature temperature_i),
 * slope_j = 1 - tanh^2(logit_scale z_j / softcap) (1 without a softcap),
 * A = (1-s) w_y + s/V sum(w) (probabilities: WEIGHT_SUM), r = k (A + 2 z_loss Z_FACTOR lse) +
 * g_lse, m = lse - entropy: dz_j = slope_j (exp(l_j - c) (ROW + ENTROPY (m - l_j)) - SMOOTH w_j -
 * SOFT w_j t_j)
 *          + [j = y] ( TARGET - slope_y exp(l_y - c) ROW )
 * where g = grad_output * factor[0]; g_lse and g_entropy are not multiplied by factor. */
enum flce_coef_row {
  FLCE_COEF_ROW, /* a r inv_sum: the factor of exp(l - c) */
  /* Class targets: a slope_y (r p_y - k (1-s) w_y), computed without cancellation: the gradient in
   * the target's column, without the terms of label smoothing and of the entropy. */
  FLCE_COEF_TARGET,
  FLCE_COEF_SMOOTH,  /* a k s/V */
  FLCE_COEF_VALID,   /* the factor of x in form dz: input_scale, 0 for ignored rows */
  FLCE_COEF_ENTROPY, /* a g_entropy inv_sum */
  FLCE_COEF_SOFT,    /* probabilities: a k (1-s); class targets: 0 */
  FLCE_COEF_ROWS
};

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
  facts->multiprocessors = 1; /* at least: which device it is decides */
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
  int64_t rows,         /* of the chunk */
      vocab;            /* V */
  const int64_t* index; /* [rows], or NULL */
  const void* z;        /* [rows][z_pitch] z_dtype */
  flce_dtype z_dtype;   /* of z */
  int64_t z_pitch;      /* elements between rows of z */
  /* stat_rows, and fused_logits where it writes z, write zeros to the columns of z in
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
  bool wants_entropy;             /* stats: compute ENTROPY; grad_rows: add its gradient */
  /* [rows][out_pitch] out_dtype, or NULL. May be z itself: then each row of out starts at the
   * address of its row of z. */
  void* out;
  flce_dtype out_dtype; /* of out */
  int64_t out_pitch;    /* elements between rows of out */
  int64_t out_columns;  /* columns of out to write: zeros from vocab on */
  void* stats;          /* [FLCE_STAT_ROWS][stat_pitch] stat dtype */
  int64_t stat_pitch;   /* elements between rows of stats and of coef: N */
  /* [N] stat dtype: token_weight (nll-part + z_loss Z_FACTOR lse^2), not yet divided by the
   * denominator. Class targets: nll-part = (1-s) w_y nll + s/V sum_j w_j (lse - l_j).
   * Probabilities: nll-part = sum_j w_j q_j (lse - l_j), q = (1-s) t + s/V. 0 for ignored rows. */
  void* loss;
  int64_t* predictions;    /* [N]: the lowest column with the largest l; or NULL */
  const void* scalars;     /* [FLCE_SCALAR_COUNT] stat dtype */
  const void* input_scale; /* row_coefficients: [1] stat dtype, VALID of valid rows; NULL for 1 */
  const void* coef;        /* [FLCE_COEF_ROWS][stat_pitch] stat dtype, or NULL */
  /* [H] stat dtype: sum_j w_j W_j for fused_logits with label smoothing, if it is known already and
   * z has neither bias nor softcap. Or NULL. */
  const void* wsum;
} flce_rows;

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
 * fields from ENTROPY on are exchanged if any of them is needed (flce_shard_stat_count). */
enum flce_shard_stat {
  FLCE_SHARD_STAT_LSE,       /* logsumexp of the rank's l; -inf if it has no class */
  FLCE_SHARD_STAT_NLL,       /* LSE - l_y on the target's rank, -1 on the others */
  FLCE_SHARD_STAT_ENTROPY,   /* of the softmax over the rank's classes */
  FLCE_SHARD_STAT_SMOOTHING, /* sum_j w_j (LSE - l_j) */
  FLCE_SHARD_STAT_WEIGHT,    /* sum_j w_j */
  FLCE_SHARD_STAT_TOP,       /* the largest l, -inf if there is none */
  FLCE_SHARD_STAT_COLUMN,    /* its lowest class */
  FLCE_SHARD_STATS
};

/* The highest class count whose numbers float32 holds exactly. */
enum { FLCE_EXACT_CLASSES = 1 << 24 };

static inline int flce_shard_stat_count(const flce_problem* problem) {
  bool more =
      problem->wants_entropy || problem->wants_predictions || problem->loss.label_smoothing > 0.0;
  return more ? FLCE_SHARD_STATS : FLCE_SHARD_STAT_NLL + 1;
}

/* Upstream gradients, stat dtype. Their vectors are indexed like those of flce_rows. */
typedef struct flce_upstream {
  const void* loss;    /* of a row's loss (loss_stride 1) or of all (loss_stride 0); NULL for 1 */
  int64_t loss_stride; /* 0 or 1 */
  const void* lse;     /* of a row's lse; NULL for 0 */
  const void* entropy; /* of a row's entropy; NULL for 0 */
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

/* Without an index in `rows`, its row 0 is token `first_token`; with one, its vectors start at
 * token 0 and first_token is 0. */
typedef struct flce_sample_rows_args {
  const flce_rows* rows; /* target, index, out (E), stats and stat_pitch are read */
  int32_t* lists;        /* [rows->rows][flce_sample_pitch(eps)] */
  double eps;            /* flce_problem.gradient_eps */
  const int64_t* seed;   /* [1] */
  int64_t first_token;   /* see above */
} flce_sample_rows_args;

typedef struct flce_sampled_input_args {
  void* dx;              /* [][cols] dx_dtype, indexed as the vectors of `rows` */
  const flce_rows* rows; /* target, index, coef and stat_pitch are read */
  const int32_t* lists;  /* [rows->rows][flce_sample_pitch(eps)] */
  double eps;            /* flce_problem.gradient_eps */
  const void* w;         /* [V][hidden] dtype */
  const void* wsum;      /* [hidden] stat dtype, or NULL */
  flce_dtype dx_dtype;   /* of dx */
  flce_dtype dtype;      /* of w */
  int64_t hidden;        /* leading dimension of w */
  int64_t cols;          /* columns of dx */
} flce_sampled_input_args;

typedef struct flce_order_samples_args {
  void* order;           /* facts.sample_bytes */
  const flce_rows* rows; /* index, coef, stat_pitch and vocab are read */
  const int32_t* lists;  /* [rows->rows][flce_sample_pitch(eps)] */
  double eps;            /* flce_problem.gradient_eps */
  int64_t hidden;        /* columns of dW; at most those that facts.sample_bytes was computed for */
} flce_order_samples_args;

typedef struct flce_sampled_weight_args {
  void* dw;                 /* [vocab][cols] dw_dtype */
  const void* x;            /* [N][x_pitch] dtype */
  void* order;              /* of order_samples */
  const void* xsum;         /* [hidden] stat dtype, or NULL */
  const void* class_weight; /* [vocab] stat dtype, or NULL for ones */
  double eps;               /* flce_problem.gradient_eps */
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
  double eps;               /* flce_problem.gradient_eps */
  flce_dtype db_dtype;      /* of db */
  int64_t rows;             /* whose lists were ordered */
  int64_t vocab;            /* elements of db */
  int64_t hidden;           /* as in flce_order_samples_args */
} flce_sampled_bias_args;

/* The functions of a backend. `self` is flce_backend.self. All but `facts` queue work in order;
 * none waits for the device. A combination of dtypes or pointers without a kernel is refused with
 * FLCE_UNSUPPORTED. Sizes may be 0: then nothing is done. */
struct flce_backend {
  const char* name; /* "cpu" or "cuda" */
  void* self;       /* flce_cpu or flce_cuda: the first argument of every function */
  /* The message of this thread's last failure in the backend's own library. */
  const char* (*last_error)(void);

  /* Fills the facts of the device for `problem`. */
  flce_status (*facts)(void* self, const flce_problem* problem, flce_facts* facts);
  /* A GEMM, struct flce_gemm; workspace_bytes are facts.gemm_workspace_bytes. */
  flce_status (*gemm)(void* self, const flce_gemm* gemm, void* workspace, int64_t workspace_bytes);
  /* memset: each of `bytes` bytes of `data` is set to `byte`. */
  flce_status (*fill)(void* self, void* data, int byte, int64_t bytes);
  /* Copies in[rows][in_pitch] to out[rows][out_pitch], `cols` elements of each row, converted to
   * out_dtype. Columns of out in [cols, out_pitch) get zeros. */
  flce_status (*cast)(void* self, const flce_cast_args* call);

  /* Computes tensors->scalars from tensors' target, class_weight, token_weight, temperature,
   * num_items, and, if dw_fp16_shift is not 0, input. Also runs order_targets into `order`, unless
   * that is NULL. `overlaps`: the kernel queued before this call is one of the backend's own and
   * touches none of these arrays, so this call may run concurrently with it (PDL). CPU:
   * FLCE_TARGET_OUT_OF_RANGE names row, value and range; FLCE_INVALID_ARGUMENT if more rows are
   * valid than problem->rows. Both are found before anything is written. CUDA: nothing is checked;
   * INV_DENOM is NaN in the second case. */
  flce_status (*prepare)(void* self, const flce_problem* problem, const flce_tensors* tensors,
                         void* order, int dw_fp16_shift, bool overlaps);

  /* The first problem->rows elements of `index` (facts.compact_bytes in all) become the rows of
   * target[N] that are not ignored, ascending, then -1. */
  flce_status (*compact_rows)(void* self, const flce_problem* problem, const int64_t* target,
                              void* index);
  /* Writes the results of rows that compact_rows leaves out. `rows` has index NULL and all N rows.
   * Ignored rows get what the row passes give an ignored row. The others get NaN if
   * scalars[VALID] > bound, else they are not touched. With dx NULL: stats, loss (unless NULL) and
   * predictions (unless NULL) are written; else those rows of dx [N][hidden] instead. */
  flce_status (*blank_rows)(void* self, const flce_rows* rows, int64_t bound, void* dx,
                            flce_dtype dx_dtype, int64_t hidden);

  /* z -> statistics, loss, predictions. On a GPU each logit is read once. */
  flce_status (*stat_rows)(void* self, const flce_rows* rows);
  /* stat_rows, and out = E = exp(l - c) (1 - tanh^2 of the softcap), with 0 in the target's column
   * and in ignored rows. Not for probabilities. */
  flce_status (*exp_rows)(void* self, const flce_rows* rows);
  /* The logits GEMM fused with exp_rows, or with stat_rows if out is NULL. It takes two calls with
   * the same gemm, rows and scratch: fused_logits, which reads no scalars, then fused_statistics.
   * `out`, statistics and losses are complete after the second. z is not written, unless gemm->c is
   * not NULL: then out is NULL, and c gets z + bias in float32. coef not NULL: also
   * row_coefficients without upstream gradients, into coef. No tile is computed whose rows are all
   * beyond the last index that is not -1. `scratch`: facts.fused_row_bytes for each row. Only if
   * facts.fused_row_bytes > 0. */
  flce_status (*fused_logits)(void* self, const flce_gemm* gemm, const flce_rows* rows,
                              void* scratch);
  /* The second call; see fused_logits. */
  flce_status (*fused_statistics)(void* self, const flce_gemm* gemm, const flce_rows* rows,
                                  const void* factor, void* coef, void* scratch);
  /* z and statistics -> rows of E or dz. rows->coef NULL: out = scale * exp(l - c) (1 - tanh^2),
   * and 0 in the target's column if hide_target. Else out = dz by the formula of enum
   * flce_coef_row. z_is_exp: z already holds `scale` * exp(l - c), the result of an earlier call
   * with coef NULL; not with a softcap, probabilities or the entropy's gradient. Ignored rows:
   * zeros. */
  flce_status (*grad_rows)(void* self, const flce_rows* rows, double scale, bool hide_target,
                           bool z_is_exp);

  /* Factors of the rows' gradients, enum flce_coef_row, into coef [FLCE_COEF_ROWS][stat_pitch],
   * which is indexed like stats. Reads stats, target, class_weight, token_weight, temperature,
   * options and scalars of `rows`. factor[0] multiplies upstream->loss; NULL for 1. Ignored rows:
   * 0; out-of-range rows: NaN; absent rows (index -1): nothing is written. `shard`: NULL, or the
   * classes of this rank; `rows` is then as in flce_merge_args. */
  flce_status (*row_coefficients)(void* self, const flce_rows* rows, const flce_shard* shard,
                                  const flce_upstream* upstream, const void* factor, void* coef);
  /* Form dz in float16, which has few bits for a gradient that is small for want of a loss scale:
   * multiplies the rows' coef, except FLCE_COEF_VALID, by the power of two u with u max |dz| of at
   * most 2^12. scale becomes {1/u, 0, 1, 0}, then 1/u `weights` times. */
  flce_status (*scale_coefficients)(void* self, const flce_rows* rows, void* coef, float* scale,
                                    int64_t weights);

  /* out[0] = factor[0] * sum_i values[i], in a fixed order; factor NULL for 1. All in the stat
   * dtype `stat`. `overlaps`: as in prepare. */
  flce_status (*reduce)(void* self, void* out, const void* values, int64_t count,
                        const void* factor, flce_dtype stat, bool overlaps);

  /* out[r] = coef[i] * x[i], where i = index[r], or r if index is NULL. A row of zeros if coef[i]
   * is 0, whatever x holds, or if i is -1. coef [N] stat dtype, NULL for ones; x [N][hidden] dtype;
   * out [rows][out_pitch] dtype, zeros from column `hidden` on. */
  flce_status (*scale_rows)(void* self, const flce_scale_rows_args* call);

  /* dX of a chunk from D, the result of its GEMM, rounded once. For row r of `rows` and its token
   * i: dX[i] = ROW[i] D[r] + TARGET[i] W[y_i] - SMOOTH[i] wsum, with the factors in rows->coef; or
   * dX[i] = D[r] if rows->coef is NULL. Zeros if the target is ignored, NaN if it is out of range;
   * absent rows (index -1) are not written.
   * D may be dX itself if rows->index is NULL and cols equals hidden. scaled_x, unless NULL, gets
   * scale_rows of x by ROW; only with rows->coef. */
  flce_status (*finish_grad_input)(void* self, const flce_grad_input_args* call);

  /* out[cols] = sum_i weights[i] a[i][:], plus out if `accumulate`, in a fixed order. out and
   * weights [rows] in a_dtype's stat dtype, weights NULL for ones; a [rows][pitch] a_dtype. A row
   * of weight 0 adds nothing, whatever it holds. `scratch`: facts.column_sum_bytes. */
  flce_status (*column_sum)(void* self, const flce_column_sum_args* call);

  /* dW's GEMM, c = a^T b (+ c if beta is 1), and partial sums for db in the same pass over a:
   * sums[p][m] = part p of sum_k coef[k] a[k][m], added to sums if adds_sums. The caller adds the
   * facts.bias_parts rows of sums. The order is fixed. coef and sums in stat dtype; coef NULL for
   * ones. A coef of 0 does not hide a NaN in a, which reaches dW anyway. index [k] as in flce_rows,
   * or NULL: where it is -1, a and b hold zeros, and whole tiles beyond the last other index need
   * not be read. Only if facts.bias_parts > 0. */
  flce_status (*grad_weight_gemm)(void* self, const flce_gemm* gemm, const int64_t* index,
                                  const void* coef, void* sums, bool adds_sums);

  /* Sorts the tokens by target[N]: they are grouped by target and ascend within a group. Tokens
   * whose target is ignored or out of range belong to no group. The format of `order` is the
   * backend's own (facts.order_bytes). */
  flce_status (*order_targets)(void* self, const flce_problem* problem, const int64_t* target,
                               void* order);

  /* dW from its accumulator, for each class j: out_j = accum_j - w_j xsum + sum over the tokens i
   * of target j of coef_target[i] x[i], summed in stat dtype and rounded once. accum may be dw
   * itself; then only rows that change are written. coef_target NULL: no target term (form dz).
   * xsum [hidden] stat dtype, NULL: no smoothing term. dw and accum [vocab][hidden]; x
   * [tokens][hidden] dtype. */
  flce_status (*finish_grad_weight)(void* self, const flce_grad_weight_args* call);
  /* The same for db[V]: out_j = accum_j - w_j smooth_total[0] + the sum of coef_target[i] over the
   * tokens i of target j. smooth_total [1] stat dtype is the sum of FLCE_COEF_SMOOTH, or NULL. */
  flce_status (*finish_grad_bias)(void* self, const flce_grad_bias_args* call);
  /* accum[rows][cols] += block[rows][pitch], computed in accum_dtype's stat dtype. For GEMMs that
   * cannot add to the accumulator, and for adding dW to the caller's gradient. */
  flce_status (*add_block)(void* self, const flce_add_block_args* call);
  /* ---- a sharded vocabulary ---- */

  /* out[i]: target[i] as a column of this rank, its own or a substitute. */
  flce_status (*shard_targets)(void* self, const flce_shard_targets_args* call);
  /* The statistics of the rows over this rank's classes (enum flce_shard_stat), from FLCE_STAT_*
   * and, with label smoothing, from `loss`, which the passes have computed with label_smoothing 1,
   * z_loss 0 and no token_weight (flce_enable_partial_sums). Rows that are not valid: anything. */
  flce_status (*pack_statistics)(void* self, const flce_pack_args* call);
  /* Those of all ranks -> statistics, loss and predictions of the whole vocabulary, merged in the
   * order of the ranks, so that all get the same bits, except for OFFSET, INV_SUM, NLL and SLOPE:
   * exp(l - OFFSET) INV_SUM is the probability of this rank's classes in the whole vocabulary; NLL
   * and SLOPE are those of the target or of its substitute. */
  flce_status (*merge_statistics)(void* self, const flce_merge_args* call);
  /* out = the sum of the ranks' partial dX, in the order of the ranks, in the stat dtype, rounded
   * once.
   */
  flce_status (*sum_partial_dx)(void* self, const flce_sum_dx_args* call);

  /* ---- save=samples (flce.h); the stat dtype is float32. Lists that sample_rows did not write for
   * as many classes: FLCE_INVALID_ARGUMENT on the CPU; on CUDA NaN in place of the sums that would
   * read beyond W or the list. ---- */

  /* Draws the lists of a chunk's rows from their E and statistics. */
  flce_status (*sample_rows)(void* self, const flce_sample_rows_args* call);
  /* dX of the computed rows. For row r and its token i: dX[i] = ROW[i] sum_m value_m W[class_m] +
   * TARGET[i] W[y_i] - SMOOTH[i] wsum, over the pairs m of its list, summed in float32 and rounded
   * once. Rows that are not valid: as finish_grad_input. */
  flce_status (*sampled_grad_input)(void* self, const flce_sampled_input_args* call);
  /* Sorts the entries of all lists by class, within a class by row, and computes their factors:
   * ROW[i] value, for the target's entry TARGET[i]. The format of `order` is the backend's own. */
  flce_status (*order_samples)(void* self, const flce_order_samples_args* call);
  /* dW: out_j = sum of factor x[i] over the entries of class j - w_j xsum, plus dw_j if `adds`,
   * summed in float32 in a fixed order and rounded once. */
  flce_status (*sampled_grad_weight)(void* self, const flce_sampled_weight_args* call);
  /* db: out_j = sum of the factors of the entries of class j - w_j smooth_total[0]. */
  flce_status (*sampled_grad_bias)(void* self, const flce_sampled_bias_args* call);

  /* out = in * grad_output[0] * [scalars: INV_DENOM / scale], for each of `number` arrays, at most
   * FLCE_GRADIENTS. The scale is DW_SCALE if `in` is float16, else LOSS_SCALE. scalars NULL: the
   * factor is grad_output[0] alone. Both have the dtype `stat`. Nothing is written if out is in and
   * the factor is 1. */
  flce_status (*scale_grads)(void* self, const flce_scaled* grads, int number,
                             const void* grad_output, const void* scalars, flce_dtype stat);
};

/* Their names, from which the backends' declarations and tables follow: those that every backend
 * has, and those that facts say whether it has. */
#define FLCE_EACH(X, a, b, c, d, e, f) X(a) X(b) X(c) X(d) X(e) X(f)
#define FLCE_BACKEND_FUNCTIONS(X)                                                                \
  FLCE_EACH(X, facts, gemm, fill, cast, prepare, compact_rows)                                   \
  FLCE_EACH(X, blank_rows, stat_rows, exp_rows, grad_rows, row_coefficients, scale_coefficients) \
  FLCE_EACH(X, reduce, scale_rows, finish_grad_input, column_sum, order_targets,                 \
            finish_grad_weight)                                                                  \
  FLCE_EACH(X, finish_grad_bias, add_block, shard_targets, pack_statistics, merge_statistics,    \
            sum_partial_dx)                                                                      \
  FLCE_EACH(X, sample_rows, sampled_grad_input, order_samples, sampled_grad_weight,              \
            sampled_grad_bias, scale_grads)
#define FLCE_FUSED_FUNCTIONS(X) X(fused_logits) X(fused_statistics) X(grad_weight_gemm)

#ifdef __cplusplus
}
#endif
#endif
