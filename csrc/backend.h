/* What the engine asks of a device: the table of functions that the CPU and CUDA fill, and their
 * arguments. Symbols are those of flce.h. */
#ifndef FLCE_BACKEND_H
#define FLCE_BACKEND_H

#include "flce.h"

#ifdef __cplusplus
extern "C" {
#endif

enum flce_stat_row {
  FLCE_STAT_LSE,        /* logsumexp of the row's l */
  FLCE_STAT_NLL,        /* class targets: lse - l_y, exact also when tiny; probabilities: 0 */
  FLCE_STAT_OFFSET,     /* c_i: E_ij = exp(l_ij - c_i) */
  FLCE_STAT_INV_SUM,    /* 1 / sum_j exp(l_ij - c_i), the target included */
  FLCE_STAT_ENTROPY,    /* -sum_j p_j log p_j where it is wanted, else 0 */
  FLCE_STAT_SLOPE,      /* class targets: 1 - tanh^2 of the target's softcap, 1 without; else 0 */
  FLCE_STAT_WEIGHT_SUM, /* probabilities: sum_j w_j q_j, q = (1-s) t + s/V; class targets: 0 */
  FLCE_STAT_ROWS
};

enum flce_scalar {
  FLCE_SCALAR_VALID,     /* rows that are not ignored */
  FLCE_SCALAR_INV_DENOM, /* mean: 1 / num_items, else 1 / sum of class weights (or count) over valid
                            rows, 0 where num_items or the count is 0; no mean: 1. NaN where more
                            rows are valid than problem->rows */
  FLCE_SCALAR_WEIGHT_TOTAL, /* sum of class weights over vocab, vocab without them */
  FLCE_SCALAR_UNIT,         /* u, INV_DENOM times a power of two, with u * (bound of |dz|) in
                               (2^13, 2^14]: float16 gradients made before grad_output is known are held
                               times u. The bound is the product of max |class weight|,
                               max |token weight| / temperature over valid rows, |logit_scale|, and
                               1 + 128 z_loss Z_SHARE (an lse of 64) */
  FLCE_SCALAR_INPUT_UNIT,   /* v: where dW is held in float16, the power of two with v max |x| in
                               (2^12, 2^13], x of valid rows; else 1 */
  FLCE_SCALAR_WEIGHT_UNIT,  /* u v 2^flce_held_shift(rows), the factor of the dW that is held in
                               float16, whose elements are then at most 2^15; else u */
  FLCE_SCALAR_Z_SHARE,      /* z-loss's factor over INV_DENOM. mean with class weights and without
                               num_items: (sum of class weights over valid rows) / count; else 1 */
  FLCE_SCALAR_COUNT
};

/* Bounds of UNIT and INPUT_UNIT, powers of two whose product a float holds. Beyond them are sums of
 * weights below 2^-66, and x below float16's least number. */
enum { FLCE_MAX_UNIT_EXPONENT = 80, FLCE_MAX_INPUT_EXPONENT = 40 };

/* The exponent of the factor of dW's GEMM where its result is held in float16: the sum of so many
 * terms of at most 2^27 stays within 2^15. */
static inline int flce_held_shift(int64_t rows) {
  int bits = 0;
  while (rows > INT64_C(1) << bits) bits++;
  return -(bits + 12);
}

/* The gradient of a row, with k = token_weight_i g, a_i = logit_scale / (temperature
 * temperature_i), slope_j = 1 - tanh^2(logit_scale z_j / softcap) (1 without softcap),
 * A = (1-s) w_y + s/V sum(w) (probabilities: WEIGHT_SUM), r = k (A + 2 z_loss Z_SHARE lse) + g_lse,
 * m = lse - entropy:
 *   dz_j = slope_j (exp(l_j - c) (ROW + ENTROPY (m - l_j)) - SMOOTH w_j - SOFT w_j t_j)
 *          + [j = y] ( TARGET - slope_y exp(l_y - c) ROW )
 * where g = grad_output * factor[0], and g_lse, g_entropy are not multiplied by factor. */
enum flce_coef_row {
  FLCE_COEF_ROW,     /* a r inv_sum: what multiplies exp(l - c) */
  FLCE_COEF_TARGET,  /* class targets: a slope_y (r p_y - k (1-s) w_y), without cancellation: the
                        target's own column but for smoothing's and the entropy's part */
  FLCE_COEF_SMOOTH,  /* a k s/V */
  FLCE_COEF_VALID,   /* input_unit, 0 for ignored rows: what multiplies x in form dz */
  FLCE_COEF_ENTROPY, /* a g_entropy inv_sum */
  FLCE_COEF_SOFT,    /* probabilities: a k (1-s); class targets: 0 */
  FLCE_COEF_ROWS
};

/* C[m,n] = 2^shift op(A) op(B) + beta C, row-major; op transposes where the flag is set (then A is
 * stored [k,m], B [n,k]). beta is 0 or 1; with 0 C is not read. */
struct flce_gemm {
  int64_t m, n, k;
  bool transpose_a, transpose_b;
  const void* a;
  const void* b;
  void* c;
  int64_t pitch_a, pitch_b, pitch_c;
  flce_dtype dtype;   /* of A and B */
  flce_dtype c_dtype; /* of C */
  double beta;
  int shift;
  const void* bias; /* [n] c_dtype, added to every row of C; or NULL. Only where facts say so */
};

/* One chunk of rows for the row passes. A computed row r of the chunk is row r of z and out. Its
 * vectors (target, stats, loss, token_weight, ...) are taken at r where `index` is NULL, with
 * pointers already advanced to the chunk's first row; else at index[r], with pointers to row 0, and
 * index[r] = -1 stands for no row: zeros in out, nothing else. z of a column has `bias` added; all
 * row passes see that. Rows whose target is ignore_index: statistics 0, prediction -1 and rows of
 * zeros, whatever z holds (NaN too). Rows whose target is out of range: NaN, prediction -1. */
typedef struct flce_rows {
  int64_t rows, vocab;
  const int64_t* index; /* [rows], or NULL */
  const void* z;        /* [rows][z_pitch] z_dtype */
  flce_dtype z_dtype;
  int64_t z_pitch;
  int64_t z_columns;     /* stat_rows and fused_logits leave zeros in z behind the columns of the
                            vocabulary up to this many */
  const void* bias;      /* [V] stat dtype, or NULL */
  const int64_t* target; /* NULL with probabilities */
  const void* probabilities; /* t, [][probabilities_pitch] probabilities_dtype, which leave no row
                                ignored; NULL with classes */
  flce_dtype probabilities_dtype;
  int64_t probabilities_pitch;
  const void* class_weight; /* w, [V] stat dtype, or NULL for ones */
  const void* token_weight; /* stat dtype, or NULL for ones */
  const void* temperature;  /* temperature_i, stat dtype, or NULL for ones */
  flce_loss options;
  bool wants_entropy;
  void* out; /* [rows][out_pitch] out_dtype; may be z itself: then an out row starts where its z row
                starts */
  flce_dtype out_dtype;
  int64_t out_pitch;
  int64_t out_columns; /* that are written: behind those of the vocabulary zeros */
  void* stats;         /* [FLCE_STAT_ROWS][stat_pitch] stat dtype */
  int64_t stat_pitch;  /* = N */
  void* loss; /* stat dtype: token_weight (nll-part + z_loss Z_SHARE lse^2), not divided, with
                 nll-part = (1-s) w_y nll + s/V sum_j w_j (lse - l_j), or for probabilities
                 sum_j w_j q_j (lse - l_j), q = (1-s) t + s/V; 0 for ignored rows */
  int64_t* predictions;   /* the lowest column of the largest l, or NULL */
  const void* scalars;    /* [FLCE_SCALAR_COUNT] stat dtype */
  const void* input_unit; /* for row_coefficients: [1] stat dtype, or NULL for 1 */
  const void* coef;       /* [FLCE_COEF_ROWS][stat_pitch], or NULL */
  const void* wsum; /* fused_logits with smoothing: sum_j w_j W_j where that is known already, and
                       z has neither bias nor softcap; [H] stat dtype. Or NULL */
} flce_rows;

/* Upstream gradients, stat dtype, placed as the vectors of flce_rows are. */
typedef struct flce_upstream {
  const void* loss; /* of a row's loss (loss_stride 1) or of all (loss_stride 0); NULL for 1 */
  int64_t loss_stride;
  const void* lse;     /* NULL for 0 */
  const void* entropy; /* NULL for 0 */
} flce_upstream;

enum { FLCE_GRADIENTS = 3 }; /* dX, dW, db */

/* A gradient that the forward made, and where it goes. */
typedef struct flce_scaled {
  void* out;
  const void* in;
  flce_dtype out_dtype, in_dtype;
  int64_t count;
} flce_scaled;

/* Arguments of the functions of the same names, which say what they mean. */

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
  const void* x;            /* [tokens][hidden] dtype */
  const void* coef_target;  /* [tokens] stat dtype, or NULL */
  const void* order;        /* of order_targets; read where coef_target is not NULL */
  const void* xsum;         /* [hidden] stat dtype, or NULL */
  const void* class_weight; /* [vocab] stat dtype, or NULL for ones */
  flce_dtype dw_dtype;      /* of dw */
  flce_dtype accum_dtype;   /* of accum */
  flce_dtype dtype;         /* of x */
  int64_t tokens;           /* rows of x */
  int64_t vocab;            /* rows of dw */
  int64_t hidden;           /* columns of x, accum and dw */
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

/* Functions of a backend. `self` is the table's own. All but `facts` queue work in order; none
 * waits for a device. A dtype or pointer combination without a kernel gives FLCE_UNSUPPORTED, never
 * silence. Sizes may be 0: nothing is done. */
struct flce_backend {
  const char* name;
  void* self;
  const char* (*last_error)(
      void); /* the sentence of this thread's last failure in the backend's own library */

  flce_status (*facts)(void* self, const flce_problem* problem, flce_facts* facts);
  flce_status (*gemm)(void* self, const flce_gemm* gemm, void* workspace, int64_t workspace_bytes);
  flce_status (*fill)(void* self, void* data, int byte, int64_t bytes);
  /* out[rows][out_pitch] = in[rows][in_pitch], `cols` of each row, and zeros behind them in out. */
  flce_status (*cast)(void* self, const flce_cast_args* call);

  /* tensors' target, class_weight, token_weight, temperature, num_items -> tensors->scalars, where
   * `holds_weight` of input, too; and order_targets, unless `order` is NULL. `overlaps`: the kernel
   * that this call queued last is the backend's own and touches none of these: both may run at the
   * same time. CPU: FLCE_TARGET_OUT_OF_RANGE names row, value and range, and
   * FLCE_INVALID_ARGUMENT says so where more rows are valid than problem->rows, before this writes.
   * CUDA: nothing is checked here; INV_DENOM is NaN in the second case. */
  flce_status (*prepare)(void* self, const flce_problem* problem, const flce_tensors* tensors,
                         void* order, bool holds_weight, bool overlaps);

  /* target[N] -> index[problem->rows], the first elements of `index` (facts.compact_bytes): the
   * rows that are not ignored, ascending, then -1. */
  flce_status (*compact_rows)(void* self, const flce_problem* problem, const int64_t* target,
                              void* index);
  /* What compact_rows leaves out, of `rows`, which has index NULL and all N rows: ignored ones get
   * what an ignored row of the row passes has; where scalars[VALID] > bound all others get NaN,
   * else they are left alone. Writes stats, loss (unless NULL) and predictions (unless NULL); with
   * dx those rows of dx [N][H] instead. */
  flce_status (*blank_rows)(void* self, const flce_rows* rows, int64_t bound, void* dx,
                            flce_dtype dx_dtype, int64_t hidden);

  /* z -> statistics, loss, predictions; reads each logit once on a device. */
  flce_status (*stat_rows)(void* self, const flce_rows* rows);
  /* The same, and out = E = exp(l - c) (1 - tanh^2 of the softcap), the target's column and ignored
   * rows 0. Not for probabilities. */
  flce_status (*exp_rows)(void* self, const flce_rows* rows);
  /* The logits GEMM and on its z what exp_rows does, or stat_rows where out is NULL, in two calls
   * with the same arguments, of which the first reads no scalars: `out` is complete, and statistics
   * and losses are written, with the second. c is not written, but in float32 where it is not NULL
   * and out is: then it gets z + bias. coef not NULL: also row_coefficients without upstream
   * gradients. Whole tiles beyond the last index that is not -1 cost no product. `scratch`:
   * facts.fused_row_bytes for each row. Only where facts say so. */
  flce_status (*fused_logits)(void* self, const flce_gemm* gemm, const flce_rows* rows,
                              void* scratch);
  flce_status (*fused_statistics)(void* self, const flce_gemm* gemm, const flce_rows* rows,
                                  const void* factor, void* coef, void* scratch);
  /* z and statistics -> gradient rows. coef NULL: out = scale * exp(l - c) (1 - tanh^2), target
   * column 0 when `hide_target`. Else out = dz as enum flce_coef_row has it. z_is_exp: z holds
   * `scale` * exp(l - c) already (an out of an earlier call with coef NULL; not with a softcap,
   * probabilities or the entropy's gradient). Ignored rows: zeros. */
  flce_status (*grad_rows)(void* self, const flce_rows* rows, double scale, bool hide_target,
                           bool z_is_exp);

  /* Per-row factors for the gradient, from rows->stats, target, class_weight, token_weight,
   * temperature, options and scalars, into coef [FLCE_COEF_ROWS][stat_pitch], placed as stats are.
   * factor[0] multiplies upstream->loss, NULL for 1. Ignored rows: 0; out-of-range rows: NaN; an
   * index of -1: nothing is written. */
  flce_status (*row_coefficients)(void* self, const flce_rows* rows, const flce_upstream* upstream,
                                  const void* factor, void* coef);

  /* out[0] = factor[0] * sum_i values[i], in a fixed order; factor NULL for 1. All stat dtype.
   * `overlaps`: as prepare has it. */
  flce_status (*reduce)(void* self, void* out, const void* values, int64_t count,
                        const void* factor, flce_dtype stat, bool overlaps);

  /* out[r] = coef[i] * x[i], i = index[r], or r where index is NULL; a row of zeros where coef is
   * 0, whatever x holds, or i is -1. coef NULL for ones. x: [][hidden] dtype; out: [][out_pitch],
   * zeros behind `hidden`. coef: stat dtype. */
  flce_status (*scale_rows)(void* self, const flce_scale_rows_args* call);

  /* dX[i] = ROW[i] D[r] + TARGET[i] W[y_i] - SMOOTH[i] wsum of rows->coef, one rounding, for row r
   * of `rows` and i as its vectors have it; with rows->coef NULL dX[i] = D[r]. D may be dX itself
   * where rows->index is NULL and `cols` is `hidden`. A row of zeros where the target is ignored,
   * of NaN where it is out of range, nothing for an index of -1. wsum [H] stat dtype or NULL; W
   * [V][H] dtype. scaled_x not NULL, with coef: also scale_rows of x by ROW into it. dX has `cols`
   * elements a row, all else `hidden`. */
  flce_status (*finish_grad_input)(void* self, const flce_grad_input_args* call);

  /* out[cols] (stat dtype) = [accumulate: out +] sum_i weights[i] a[i][:], in a fixed order;
   * weights NULL for ones. A row whose weight is 0 adds nothing, whatever it holds. */
  flce_status (*column_sum)(void* self, const flce_column_sum_args* call);

  /* The GEMM of dW, c (+)= a^T b, and from the same reading of a sums[p][m] (+)= part p of
   * sum_k coef[k] a[k][m]: the column sums are the sums of facts.bias_parts such rows. Stat
   * dtype; coef NULL for ones; a weight of 0 does not hide a NaN, which dW has there too. A fixed
   * order. index [k] as rows' is, or NULL: where it is -1 a and b hold zeros, and whole tiles
   * beyond the last other need not be read. Only where facts say so. */
  flce_status (*grad_weight_gemm)(void* self, const flce_gemm* gemm, const int64_t* index,
                                  const void* coef, void* sums, bool adds_sums);

  /* target[N] -> order: tokens grouped by target, ascending within a group; ignored and
   * out-of-range ones left out. The format is the backend's own (facts.order_bytes). */
  flce_status (*order_targets)(void* self, const flce_problem* problem, const int64_t* target,
                               void* order);

  /* dW and db from their accumulators: out_j = accum_j - w_j xsum + sum over the tokens of target j
   * of coef_target[i] x[i], summed in stat dtype, rounded once; accum may be out itself, then only
   * rows that change are touched. coef_target NULL: no target term (form dz). xsum [H] NULL: no
   * smoothing term. x [N][H] dtype. */
  flce_status (*finish_grad_weight)(void* self, const flce_grad_weight_args* call);
  /* The same for db[V]: smooth_total [1] stat dtype (sum of coef_smooth) or NULL. */
  flce_status (*finish_grad_bias)(void* self, const flce_grad_bias_args* call);
  /* accum[rows][cols] += block[rows][pitch], summed in accum's stat dtype: for GEMMs that cannot
   * add into the accumulator, and for a sum that is added to the caller's. */
  flce_status (*add_block)(void* self, const flce_add_block_args* call);
  /* out = in * grad_output[0] * [scalars: inv_denom / unit] of each of `number`, at most
   * FLCE_GRADIENTS, arrays: nothing is written where out is in and the factor is 1. The unit is
   * WEIGHT_UNIT of float16 arrays, else UNIT. scalars NULL: the factor is grad_output[0] alone.
   * Both stat dtype. */
  flce_status (*scale_grads)(void* self, const flce_scaled* grads, int number,
                             const void* grad_output, const void* scalars, flce_dtype stat);
};

#ifdef __cplusplus
}
#endif
#endif
