/* flce: fused linear + cross entropy. The interface of the C core, callable without torch.
 *
 * Symbols: N tokens, H hidden size, V vocabulary; x[N,H] input, W[V,H] linear weight, b[V] bias,
 * y[N] target; z = x W^T + b; l = softcap(logit_scale z) / temperature the logits that the loss
 * sees (l = z without these options); p softmax(l); nll = lse(l) - l_y; g the upstream gradient of
 * a row. Matrices are row-major; a "pitch" is the number of ELEMENTS from one row to the next.
 *
 * Flow: flce_plan_make() decides everything that can be decided from sizes (it is pure), the caller
 * allocates what the plan lists, flce_forward()/flce_backward() run the one chunk loop over a
 * backend's table of functions.
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

/* ---- status ---- */

typedef enum flce_status {
  FLCE_OK = 0,
  FLCE_INVALID_ARGUMENT,    /* the caller's sizes, types or budget cannot be served */
  FLCE_TARGET_OUT_OF_RANGE, /* a target is neither in [0, V) nor ignore_index (CPU only: the GPU
                               marks the row with NaN) */
  FLCE_UNSUPPORTED,         /* no kernel for this combination */
  FLCE_GEMM_FAILED,         /* the matrix-product library refused */
  FLCE_DEVICE_ERROR,        /* a launch or a driver call failed */
} flce_status;

/* A constant word for a status. */
const char* flce_status_name(flce_status status);

/* Keeps a printf-formatted sentence for this thread and returns `status`; flce_last_error() reads
 * it back. The sentence names the argument, what was expected and what came. */
flce_status flce_fail(flce_status status, const char* format, ...)
    __attribute__((format(printf, 2, 3)));
const char* flce_last_error(void);

/* FLCE_POISON=1, for tests: outputs and workspaces hold NaN before a call writes to them, and the
 * CPU's GEMM reads what AMX would read behind a row. */
bool flce_poisons(void);

/* Returns from the calling function when `call` does not give FLCE_OK. */
#define FLCE_TRY(call)                                        \
  do {                                                        \
    flce_status flce_try_status_ = (call);                    \
    if (flce_try_status_ != FLCE_OK) return flce_try_status_; \
  } while (0)

/* ---- types ---- */

typedef enum flce_dtype { FLCE_F64, FLCE_F32, FLCE_BF16, FLCE_F16 } flce_dtype;

/* Bytes of one element. */
int64_t flce_size_of(flce_dtype dtype);
const char* flce_dtype_name(flce_dtype dtype);

/* The type of row statistics, losses and sums over tokens: F64 for F64, F32 for every other dtype
 * ("stat dtype"). */
flce_dtype flce_stat_dtype(flce_dtype dtype);

typedef enum flce_reduction { FLCE_NONE, FLCE_MEAN, FLCE_SUM } flce_reduction;

/* What the forward keeps for the backward. */
typedef enum flce_save {
  FLCE_SAVE_NOTHING, /* no gradient wanted: statistics only */
  FLCE_SAVE_LOGITS,  /* exp(z - c), N x V; the backward is two GEMMs */
  FLCE_SAVE_GRADS,   /* the gradients themselves, for grad_output 1; the backward scales them */
  FLCE_SAVE_STATS,   /* row statistics; the backward computes the logits again, chunk by chunk */
} flce_save;
const char* flce_save_name(flce_save save);

/* What the gradient GEMMs read.
 * EXP: E_ij = exp(l_ij - c_i) (times 1 - tanh^2 with a softcap) with the target's column 0; the row
 * factors go into x and dX, the target term is added exactly. Never a cancellation, and grad_output
 * needs no pass over N x V. DZ: the gradient of z, rounded once. For float16, whose range cannot
 * hold E, and where the gradient is no row factor times E: probability targets, softcap with
 * smoothing, the entropy's gradient. */
typedef enum flce_form { FLCE_FORM_EXP, FLCE_FORM_DZ } flce_form;

/* What the loss is, beside its tensors. */
typedef struct flce_loss {
  int64_t ignore_index;   /* of class targets */
  double label_smoothing; /* s */
  double logit_scale;     /* multiplies z; 1 for none */
  double softcap;         /* C: C tanh(logit_scale z / C); 0 for none */
  double temperature;     /* divides after the softcap, in all rows; 1 for none */
  double z_loss;          /* adds z_loss lse^2 to a row's loss */
} flce_loss;

typedef struct flce_problem {
  int64_t tokens, hidden, vocab;
  int64_t weight_rows; /* of W, b, dW, db and class weights as given, and columns of probabilities:
                          rows from vocab on are padding, never read, with gradient 0 */
  int64_t rows; /* to compute: tokens, or a bound of the number that are not ignored. Where it is
                   less than tokens, or facts.skips_rows, they are gathered (compact_rows) */
  flce_dtype dtype; /* that the products are to be computed in: autocast's, else that of x and W */
  flce_dtype input_dtype;  /* of x as given, and of dX */
  flce_dtype weight_dtype; /* of W as given, and of dW unless it is added */
  flce_dtype bias_dtype;   /* of b as given, and of db */
  flce_dtype accum_dtype;  /* dW is summed over chunks in this type: dtype or the stat dtype */
  flce_dtype logits_dtype; /* asked for: the stat dtype (exact) or dtype (rounded as eagerly) */
  flce_reduction reduction;
  flce_save save;
  bool want_grad_input, want_grad_weight, want_grad_bias;
  bool adds_grad_weight;  /* the backward adds dW to what the caller's grad_weight holds, and leaves
                             its padding alone. Not for save=grads, whose forward makes dW */
  flce_dtype added_dtype; /* of that grad_weight: weight_dtype, or F32 beside a 16-bit one */
  bool has_bias, has_class_weight;
  bool has_probabilities;  /* the targets are probabilities, not classes */
  bool bf16_probabilities; /* in bfloat16, and each row begins at a multiple of 16 bytes */
  bool wants_entropy;      /* its gradient too, where there is one to make after the forward */
  bool wants_predictions;
  bool wants_statistics; /* stats and scalars, by the caller; a backward gets them without */
  bool has_temperature;  /* one for each row */
  bool unaligned;        /* x or W does not begin at a multiple of 16 bytes */
  bool weight_unaligned; /* nor does FLCE_BUF_SAVED or the grad_weight that dW is added to */
  flce_loss loss;
  int64_t max_memory; /* bytes: bound of the logits buffer, whole or chunk */
  bool saves_memory;  /* nobody asked for that bound: the smallest chunks whose predicted time is
                         within 1 % of the best are taken, else the fastest that fit */
} flce_problem;

/* What the plan has to know of a device and of its backend. */
typedef struct flce_facts {
  bool gemm_writes_f32; /* 16-bit operands can give a 32-bit result */
  bool gemm_adds_bias;  /* to a float32 result, at no cost */
  bool gemm_f16;        /* float16 operands are worth using; else they are widened to float32 */
  int64_t product_row_bytes; /* scratch of product_rows and product_dz for each of their rows; 0
                                where they do not serve the problem */
  int64_t product_tile_rows; /* that product_rows takes at a time, where it serves */
  bool product_gives_z;      /* where it serves, also where z is to be written: that pays */
  bool product_gives_dz;     /* product_dz serves the problem's probabilities */
  bool skips_rows; /* product_rows passes over what lies beyond the rows that compact_rows finds:
                      finding them pays, however many. By sizes and dtypes alone */
  int64_t weight_parts;         /* rows of weight_product's sums; 0 where that does not serve */
  int64_t multiprocessors;      /* that make a product's tiles side by side; 0 where they need none
                                   of the plan's care */
  /* Alignments; 0 or 1: none is needed. */
  int64_t row_alignment;   /* bytes: rows of logits, E and dz begin at multiples of it, and zeros
                              follow the columns of E and dz up to the next */
  int64_t input_alignment; /* elements: A of the logits GEMM is read up to the next multiple of it
                              behind the H elements of a row: a row of x whose H is none is copied,
                              zeros behind it */
  int64_t hidden_alignment; /* elements: GEMMs are slow where H is no multiple of it: x and W are
                               copied with zeros up to the next one */
  int64_t gemm_workspace_bytes; /* scratch of one GEMM */
  int64_t order_bytes;          /* scratch and result of order_targets for N tokens */
  int64_t compact_bytes;        /* scratch and result of compact_rows for N tokens */
  int64_t column_sum_bytes;     /* scratch of column_sum for V or H columns, whichever is more */
} flce_facts;

/* ---- plan ---- */

/* Every buffer that a call holds. The F_/B_ lifetimes are bits: forward workspace, backward
 * workspace, kept between. */
typedef enum flce_buffer_id {
  FLCE_BUF_LOSS,
  FLCE_BUF_ROW_LOSS,    /* [N] stat dtype, where the loss is reduced */
  FLCE_BUF_STATS,       /* [FLCE_STAT_ROWS][N] stat dtype: enum flce_stat_row */
  FLCE_BUF_SCALARS,     /* [FLCE_SCALAR_COUNT] stat dtype: enum flce_scalar. Both are outputs where
                           the plan keeps_statistics, else workspace */
  FLCE_BUF_SAVED,       /* E or z of the logits strategy, [rows][saved_pitch] saved_dtype */
  FLCE_BUF_PREDICTIONS, /* [N] int64 */
  FLCE_BUF_GRAD_INPUT,  /* [N][H] grad_input_dtype */
  FLCE_BUF_GRAD_WEIGHT, /* [V][H] grad_weight_dtype; none where dW is added to the caller's */
  FLCE_BUF_GRAD_BIAS,   /* [V] grad_bias_dtype */
  FLCE_BUF_ROUNDED, /* save=grads in float16: the gradients as handed over, beside the wide ones */
  FLCE_BUF_INPUT_CAST,    /* x in dtype, [N][plan's hidden]; where either is not as given */
  FLCE_BUF_WEIGHT_CAST,   /* likewise W, [V][plan's hidden] */
  FLCE_BUF_BIAS_CAST,     /* b in stat dtype */
  FLCE_BUF_LOGITS,        /* a chunk of logits, overwritten by E or dz */
  FLCE_BUF_COEF,          /* [FLCE_COEF_ROWS][N] stat dtype: enum flce_coef_row */
  FLCE_BUF_INDEX,         /* of the rows to compute, where they are gathered */
  FLCE_BUF_GATHERED_X,    /* the chunk's rows of x as A of the logits GEMM, [chunk][input_pitch]
                             dtype, where they are copied and not in SCALED_X */
  FLCE_BUF_GATHERED_COEF, /* what weighs their rows of E in db, [chunk] stat dtype */
  FLCE_BUF_DX_ROWS, /* E W of a chunk where dX's own memory cannot hold it, [chunk][H] stat dtype */
  FLCE_BUF_SCALED_X, /* coef * x of a chunk (form dz: the valid rows of x, if not x itself),
                        [chunk][H] dtype */
  FLCE_BUF_DW_ACCUM, /* dW summed in accum_dtype where that is not its own type or hidden is not H,
                        [V][plan's hidden] */
  FLCE_BUF_DW_BLOCK, /* a block of V rows of one chunk's dW where the GEMM cannot write accum_dtype
                      */
  FLCE_BUF_DB_ACCUM, /* [V] stat dtype */
  FLCE_BUF_DB_PARTS, /* [plan's weight_parts][V] stat dtype: sums of weight_product */
  FLCE_BUF_SMOOTH, /* [2 H + 1] stat dtype, label smoothing: sum_j w_j W_j, sum_i c_i x_i, sum_i c_i
                      (c = coef_smooth) */
  FLCE_BUF_ORDER,  /* tokens ordered by target */
  FLCE_BUF_COLUMN_SUM, /* scratch */
  FLCE_BUF_PRODUCT,    /* scratch of product_rows or product_dz for a chunk */
  FLCE_BUF_GEMM,       /* scratch */
  FLCE_BUF_COUNT
} flce_buffer_id;

enum { FLCE_IN_FORWARD = 1, FLCE_IN_BACKWARD = 2, FLCE_OUTPUT = 4 };

typedef struct flce_buffer {
  int64_t bytes;  /* 0: not needed */
  int64_t offset; /* in the forward's or the backward's workspace; -1 for a FLCE_OUTPUT, which the
                     caller allocates */
  unsigned lifetime; /* FLCE_IN_* bits */
} flce_buffer;

typedef struct flce_plan {
  flce_save save;
  flce_form form;
  flce_dtype dtype; /* of the GEMM operands, of E and dz */
  int64_t rows;     /* computed: flce_problem.rows */
  int64_t hidden;   /* H as GEMMs have it: problem's, or more with zeros behind it; the pitch of x, W
                       and of every [][H] buffer of the workspace */
  int64_t input_pitch; /* of a chunk's rows of x as A of the logits GEMM: `hidden`, or more */
  bool gathers;     /* rows are computed in the order of FLCE_BUF_INDEX, */
  flce_buffer_id gathered_x, backward_gathered_x; /* a chunk's rows of x copied here */
  bool fuses_rows;            /* the forward's statistics come from product_rows, and none of its
                                 logits are written but in form dz, where a pass needs them */
  bool makes_dz;              /* with fuses_rows: product_dz leaves dz, and no pass needs logits; */
  int dz_shift;               /* times 2^dz_shift */
  bool holds_weight;          /* dW in float16 before grad_output is known: enum flce_scalar */
  int64_t weight_parts;       /* of db, where dW and db come from weight_product; else 0 */
  int64_t chunk_rows, chunks; /* of the logits GEMM */
  int64_t backward_chunk_rows, backward_chunks; /* of the backward's loop; 0 for save=grads */
  flce_dtype z_dtype;                           /* of FLCE_BUF_LOGITS as the GEMM writes it */
  flce_dtype saved_dtype;                       /* of FLCE_BUF_SAVED: dtype for E, z_dtype for z */
  bool gemm_adds_bias;                          /* or product_rows: then no row pass does */
  bool saves_exp;                               /* FLCE_BUF_SAVED holds E, else z */
  bool z_in_saved;                              /* the logits GEMM writes there itself */
  bool keeps_statistics;                        /* somebody reads them after the forward */
  int64_t z_pitch, out_pitch, saved_pitch; /* elements of z_dtype, of dtype (E, dz), of saved_dtype.
                                              Columns of E and dz from vocab to out_pitch are 0 */
  flce_dtype grad_input_dtype, grad_weight_dtype, grad_bias_dtype;
  flce_dtype
      dx_gemm_dtype; /* of E W as its GEMM writes it: into dX itself where that has this type */
  flce_dtype accum_dtype;
  int64_t
      dw_block_rows; /* of FLCE_BUF_DW_BLOCK; 0 when the GEMM adds into the accumulator itself */
  flce_buffer buffers[FLCE_BUF_COUNT];
  int64_t forward_workspace_bytes, backward_workspace_bytes;
  int64_t forward_peak_bytes, backward_peak_bytes, peak_bytes; /* over the inputs */
  int64_t forward_gemms, backward_gemms;
} flce_plan;

/* FLCE_INVALID_ARGUMENT names the number that is out of its range. */
flce_status flce_check_loss(const flce_loss* loss);

/* Pure: no allocation, no device call. Errors: FLCE_INVALID_ARGUMENT (a budget below one row of
 * logits, a strategy that cannot serve the reduction). */
flce_status flce_plan_make(const flce_problem* problem, const flce_facts* facts, flce_plan* plan);

/* Writes the plan as text, at most `size` bytes with the terminating 0; returns the length that it
 * needs without it. */
int64_t flce_plan_text(const flce_plan* plan, char* text, int64_t size);

/* ---- backend table ---- */

enum flce_stat_row {
  FLCE_STAT_LSE,     /* logsumexp of the row's l */
  FLCE_STAT_NLL,     /* class targets: lse - l_y, exact also when tiny; probabilities: 0 */
  FLCE_STAT_OFFSET,  /* c_i: E_ij = exp(l_ij - c_i) */
  FLCE_STAT_INV_SUM, /* 1 / sum_j exp(l_ij - c_i), the target included */
  FLCE_STAT_ENTROPY, /* -sum_j p_j log p_j where it is wanted, else 0 */
  FLCE_STAT_SLOPE,   /* class targets: 1 - tanh^2 of the target's softcap, 1 without; else 0 */
  FLCE_STAT_MASS,    /* probabilities: sum_j w_j q_j, q = (1-s) t + s/V; class targets: 0 */
  FLCE_STAT_ROWS
};

enum flce_scalar {
  FLCE_SCALAR_VALID,     /* rows that are not ignored */
  FLCE_SCALAR_INV_DENOM, /* mean: 1 / num_items, else 1 / sum of class weights (or count) over valid
                            rows, 0 where num_items or the count is 0; no mean: 1. NaN where more
                            rows are valid than problem->rows */
  FLCE_SCALAR_WEIGHT_TOTAL, /* sum of class weights over vocab, vocab without them */
  FLCE_SCALAR_UNIT,    /* u, INV_DENOM times a power of two, with u * (bound of |dz|) in
                          (2^13, 2^14]: float16 gradients made before grad_output is known are held
                          times u. The bound is the product of max |class weight|,
                          max |token weight| / temperature over valid rows, |logit_scale|, and
                          1 + 128 z_loss Z_SHARE (an lse of 64) */
  FLCE_SCALAR_INPUT_UNIT,  /* v: where dW is held in float16, the power of two with v max |x| in
                              (2^12, 2^13], x of valid rows; else 1 */
  FLCE_SCALAR_WEIGHT_UNIT, /* u v 2^flce_held_shift(rows): what dW is then held times, at most 2^15;
                              else u */
  FLCE_SCALAR_Z_SHARE, /* what z-loss has beside INV_DENOM. mean with class weights and without
                          num_items: (sum of class weights over valid rows) / count; else 1 */
  FLCE_SCALAR_COUNT
};

/* The exponent of the factor of dW's GEMM where its result is held in float16: the sum of so many
 * terms of at most 2^27 stays within 2^15. */
static inline int flce_held_shift(int64_t rows) {
  int bits = 0;
  while (rows > INT64_C(1) << bits) bits++;
  return -(bits + 12);
}

/* The gradient of a row, with k = token_weight_i g, a_i = logit_scale / (temperature
 * temperature_i), slope_j = 1 - tanh^2(logit_scale z_j / softcap) (1 without softcap), A = (1-s)
 * w_y
 * + s/V sum(w) (probabilities: MASS), r = k (A + 2 z_loss Z_SHARE lse) + g_lse, m = lse - entropy:
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
typedef struct flce_gemm {
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
} flce_gemm;

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
  int64_t z_columns;         /* stat_rows and product_rows leave zeros in z behind the columns of the
                                vocabulary up to this many */
  const void* bias;          /* [V] stat dtype, or NULL */
  const int64_t* target;     /* NULL with probabilities */
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
  void* stats;        /* [FLCE_STAT_ROWS][stat_pitch] stat dtype */
  int64_t stat_pitch; /* = N */
  void* loss; /* stat dtype: token_weight (nll-part + z_loss Z_SHARE lse^2), not divided, with
                 nll-part = (1-s) w_y nll + s/V sum_j w_j (lse - l_j), or for probabilities
                 sum_j w_j q_j (lse - l_j), q = (1-s) t + s/V; 0 for ignored rows */
  int64_t* predictions; /* the lowest column of the largest l, or NULL */
  const void* scalars;  /* [FLCE_SCALAR_COUNT] stat dtype */
  const void* input_unit; /* for row_coefficients: [1] stat dtype, or NULL for 1 */
  const void* coef;     /* [FLCE_COEF_ROWS][stat_pitch], or NULL */
  const void* wsum; /* product_rows with smoothing: sum_j w_j W_j where that is known already, and
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

/* The caller's memory. Outputs that the plan does not list (bytes 0) may be NULL. */
typedef struct flce_tensors flce_tensors;
struct flce_tensors {
  const void* input;         /* [N][H] input_dtype */
  const void* linear_weight; /* [weight_rows][H] weight_dtype */
  const void* linear_bias;   /* [weight_rows] bias_dtype, or NULL */
  const int64_t* target;     /* [N], or NULL with probabilities */
  const void* probabilities; /* [N][weight_rows] probabilities_dtype, or NULL */
  flce_dtype probabilities_dtype;
  const void* class_weight; /* [weight_rows] stat dtype, or NULL */
  const void* token_weight; /* [N] stat dtype, or NULL */
  const void* temperature;  /* [N] stat dtype, or NULL */
  const void* num_items;    /* [1] stat dtype, or NULL; read by the forward with FLCE_MEAN */
  void* loss;               /* [1], or [N] for FLCE_NONE; stat dtype */
  void* stats;              /* [FLCE_STAT_ROWS][N]; written by the forward, read by the backward;
                               not looked at unless the plan keeps_statistics */
  void* scalars;            /* [FLCE_SCALAR_COUNT]; likewise */
  void* saved;              /* save=logits: [rows][saved_pitch]; likewise */
  void* predictions;        /* [N] int64 */
  void* grad_input;         /* written by the forward for save=grads, else by the backward */
  void* grad_weight;        /* [weight_rows][H]; added to where the problem says so */
  void* grad_bias;          /* [weight_rows] */
  const void* grad_output;  /* backward: [1], or [N] for FLCE_NONE; stat dtype */
  const void* grad_lse;     /* backward: [N] stat dtype, or NULL for 0 */
  const void* grad_entropy; /* likewise */
  void* workspace; /* plan->forward_workspace_bytes or plan->backward_workspace_bytes, 256-byte
                      aligned */
  /* save=grads: NULL, or sets loss and grad_*, which the forward asks for once, where it can behind
   * its first product: a device works while its caller allocates. */
  flce_status (*provide)(void* provider, flce_tensors* tensors);
  void* provider;
};

/* Functions of a backend. `self` is the table's own. All but `facts` queue work in order; none
 * waits for a device. A dtype or pointer combination without a kernel gives FLCE_UNSUPPORTED, never
 * silence. Sizes may be 0: nothing is done. */
typedef struct flce_backend {
  const char* name;
  void* self;
  const char* (*last_error)(
      void); /* the sentence of this thread's last failure in the backend's own library */

  flce_status (*facts)(void* self, const flce_problem* problem, flce_facts* facts);
  flce_status (*gemm)(void* self, const flce_gemm* gemm, void* workspace, int64_t workspace_bytes);
  flce_status (*fill)(void* self, void* data, int byte, int64_t bytes);
  /* out[rows][out_pitch] = in[rows][in_pitch], `cols` of each row, and zeros behind them in out. */
  flce_status (*cast)(void* self, void* out, flce_dtype out_dtype, int64_t out_pitch,
                      const void* in, flce_dtype in_dtype, int64_t in_pitch, int64_t rows,
                      int64_t cols);

  /* tensors' target, class_weight, token_weight, temperature, num_items -> tensors->scalars, where
   * `holds_weight` of input, too; and order_targets, unless `order` is NULL. `beside`: what this call queued last is the
   * backend's own, or began behind it, and touches none of these: they may run at the same time.
   * CPU: FLCE_TARGET_OUT_OF_RANGE names row, value and range, and FLCE_INVALID_ARGUMENT says so
   * where more rows are valid than problem->rows, before this writes. CUDA: nothing is
   * checked here; INV_DENOM is NaN in the second case. */
  flce_status (*prepare)(void* self, const flce_problem* problem, const flce_tensors* tensors,
                         void* order, bool holds_weight, bool beside);

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
   * facts.product_row_bytes for each row. Only where facts say so. */
  flce_status (*product_rows)(void* self, const flce_gemm* gemm, const flce_rows* rows,
                              void* scratch);
  flce_status (*product_statistics)(void* self, const flce_gemm* gemm, const flce_rows* rows,
                                    const void* factor, void* coef, void* scratch);
  /* The two and grad_rows in one: statistics, coef and out = 2^shift dz, whose p is the softmax of
   * logits rounded by 7e-4 at the most; statistics and losses are of exact ones. rows as
   * product_rows takes them, with bfloat16 probabilities and out_dtype. Only where facts say so. */
  flce_status (*product_dz)(void* self, const flce_gemm* gemm, const flce_rows* rows,
                            const void* factor, void* coef, int shift, void* scratch);
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
   * `beside`: as prepare has it. */
  flce_status (*reduce)(void* self, void* out, const void* values, int64_t count,
                        const void* factor, flce_dtype stat, bool beside);

  /* out[r] = coef[i] * x[i], i = index[r], or r where index is NULL; a row of zeros where coef is
   * 0, whatever x holds, or i is -1. coef NULL for ones. x: [][hidden] dtype; out: [][out_pitch],
   * zeros behind `hidden`. coef: stat dtype. */
  flce_status (*scale_rows)(void* self, void* out, int64_t out_pitch, const void* x,
                            flce_dtype dtype, const void* coef, const int64_t* index, int64_t rows,
                            int64_t hidden);

  /* dX[i] = ROW[i] D[r] + TARGET[i] W[y_i] - SMOOTH[i] wsum of rows->coef, one rounding, for row r
   * of `rows` and i as its vectors have it; with rows->coef NULL dX[i] = D[r]. D may be dX itself
   * where rows->index is NULL. A row of zeros where the target is ignored, of NaN where it is out
   * of range, nothing for an index of -1. wsum [H] stat dtype or NULL; W [V][H] dtype. scaled_x not
   * NULL, with coef: also scale_rows of x by ROW into it. dX has `cols` elements a row, all else
   * `hidden`. */
  flce_status (*finish_grad_input)(void* self, void* dx, flce_dtype dx_dtype, const void* d,
                                   flce_dtype d_dtype, const void* w, flce_dtype dtype,
                                   const flce_rows* rows, const void* wsum, const void* x,
                                   void* scaled_x, int64_t hidden, int64_t cols);

  /* out[cols] (stat dtype) = [accumulate: out +] sum_i weights[i] a[i][:], in a fixed order;
   * weights NULL for ones. A row whose weight is 0 adds nothing, whatever it holds. */
  flce_status (*column_sum)(void* self, void* out, const void* a, flce_dtype a_dtype, int64_t pitch,
                            int64_t rows, int64_t cols, const void* weights, bool accumulate,
                            void* scratch);

  /* The GEMM of dW, c (+)= a^T b, and from the same reading of a sums[p][m] (+)= part p of
   * sum_k coef[k] a[k][m]: the column sums are the sums of facts.weight_parts such rows. Stat
   * dtype; coef NULL for ones; a weight of 0 does not hide a NaN, which dW has there too. A fixed
   * order. index [k] as rows' is, or NULL: where it is -1 a and b hold zeros, and whole tiles
   * beyond the last other need not be read. Only where facts say so. */
  flce_status (*weight_product)(void* self, const flce_gemm* gemm, const int64_t* index,
                                const void* coef, void* sums, bool adds_sums);

  /* target[N] -> order: tokens grouped by target, ascending within a group; ignored and
   * out-of-range ones left out. The format is the backend's own (facts.order_bytes). */
  flce_status (*order_targets)(void* self, const flce_problem* problem, const int64_t* target,
                               void* order);

  /* dW and db from their accumulators: out_j = accum_j - w_j xsum + sum over the tokens of target j
   * of coef_target[i] x[i], summed in stat dtype, rounded once; accum may be out itself, then only
   * rows that change are touched. coef_target NULL: no target term (form dz). xsum [H] NULL: no
   * smoothing term. x [N][H] dtype. */
  flce_status (*finish_grad_weight)(void* self, void* dw, flce_dtype dw_dtype, const void* accum,
                                    flce_dtype accum_dtype, const void* x, flce_dtype dtype,
                                    const void* coef_target, const void* order, int64_t tokens,
                                    const void* xsum, const void* class_weight, int64_t vocab,
                                    int64_t hidden);
  /* The same for db[V]: smooth_total [1] stat dtype (sum of coef_smooth) or NULL. */
  flce_status (*finish_grad_bias)(void* self, void* db, flce_dtype db_dtype, const void* accum,
                                  flce_dtype stat, const void* coef_target, const void* order,
                                  int64_t tokens, const void* smooth_total,
                                  const void* class_weight, int64_t vocab);
  /* accum[rows][cols] += block[rows][pitch], summed in accum's stat dtype: for GEMMs that cannot
   * add into the accumulator, and for a sum that is added to the caller's. */
  flce_status (*add_block)(void* self, void* accum, flce_dtype accum_dtype, const void* block,
                           flce_dtype dtype, int64_t pitch, int64_t rows, int64_t cols);
  /* out = in * grad_output[0] * [scalars: inv_denom / unit] of each of `number`, at most
   * FLCE_GRADIENTS, arrays: nothing is written where out is in and the factor is 1. The unit is
   * WEIGHT_UNIT of float16 arrays, else UNIT. scalars NULL: the factor is grad_output[0] alone.
   * Both stat dtype. */
  flce_status (*scale_grads)(void* self, const flce_scaled* grads, int number,
                             const void* grad_output, const void* scalars, flce_dtype stat);
} flce_backend;

/* ---- engine ---- */

flce_status flce_forward(const flce_backend* backend, const flce_problem* problem,
                         const flce_plan* plan, const flce_tensors* tensors);
flce_status flce_backward(const flce_backend* backend, const flce_problem* problem,
                          const flce_plan* plan, const flce_tensors* tensors);
/* FLCE_INVALID_ARGUMENT where the plan leaves nothing for a backward to do; which asks itself. */
flce_status flce_check_backward(const flce_plan* plan);

/* GEMMs that the engine has asked backends for since the process began. */
int64_t flce_gemm_count(void);

/* Cross entropy on logits that the caller holds: z[N][V] with stats, scalars, loss and the other
 * tensors as above; the forward reads the logits once, and so does the backward, which writes
 * dz[N][V] in z's dtype. Of the problem tokens, vocab, dtype, reduction, loss, wants_* and has_*
 * are read, and weight_rows and rows, which are vocab and tokens; tensors->input holds z,
 * tensors->grad_input dz; workspace: flce_cross_entropy_workspace_bytes(). */
int64_t flce_cross_entropy_workspace_bytes(const flce_problem* problem);
flce_status flce_cross_entropy_forward(const flce_backend* backend, const flce_problem* problem,
                                       const flce_tensors* tensors);
flce_status flce_cross_entropy_backward(const flce_backend* backend, const flce_problem* problem,
                                        const flce_tensors* tensors);

/* ---- backends ---- */

/* Elements of bfloat16 that an AMX tile has in a row, and its product takes at a time. */
enum { FLCE_AMX_DEPTH = 32 };

/* CPU: compiled into the module. The GEMM and the thread pool are the caller's (op.cpp passes
 * torch's). */
typedef void (*flce_range_fn)(int64_t begin, int64_t end, void* context);
typedef struct flce_cpu {
  flce_status (*gemm)(void* context, const flce_gemm* gemm);
  void (*parallel_for)(int64_t begin, int64_t end, int64_t grain, flce_range_fn fn, void* context);
  void* gemm_context;
} flce_cpu;
/* Fills `backend` with self = cpu, which must outlive it. */
void flce_cpu_backend(flce_cpu* cpu, flce_backend* backend);
/* "scalar", "avx2" or "avx512": what the row passes use here; FLCE_CPU_VARIANT overrides it for
 * tests. */
const char* flce_cpu_variant(void);

/* CUDA: exported by libflce_cuda.so, looked up by name. */
typedef struct flce_cuda {
  int device;
  void* stream;    /* cudaStream_t */
  bool allow_tf32; /* float32 products may use TF32 */
} flce_cuda;
typedef flce_status (*flce_cuda_backend_fn)(flce_cuda* cuda,
                                            flce_backend* backend); /* "flce_cuda_backend" */
typedef const char* (*flce_cuda_describe_fn)(
    void); /* "flce_cuda_describe": build and device facts, a line each */

#ifdef __cplusplus
}
#endif
#endif
