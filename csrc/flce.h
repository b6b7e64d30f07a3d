/* flce: fused linear + cross entropy. The interface of the C core, callable without torch.
 *
 * Symbols: N tokens, H hidden size, V vocabulary; x[N,H] input, W[V,H] linear weight, b[V] bias,
 * y[N] target; z = x W^T + b; l = softcap(logit_scale z) / temperature the logits that the loss
 * sees (l = z without these options); p softmax(l); nll = lse(l) - l_y; g the upstream gradient of
 * a row. Matrices are row-major; a "pitch" is the number of ELEMENTS from one row to the next.
 *
 * Flow: flce_plan_make() decides everything that can be decided from sizes (it is pure), the caller
 * allocates what the plan lists, flce_forward()/flce_backward() run the one chunk loop over a
 * backend's table of functions (backend.h).
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

typedef struct flce_backend flce_backend; /* the table of backend.h */
typedef struct flce_gemm flce_gemm;       /* a product that it is asked for */

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

/* FLCE_POISON=1, for tests: outputs and workspaces are filled with NaN before use, and the CPU's
 * bfloat16 GEMM gives what it would on AMX, where oneDNN reads A beyond its k columns. */
bool flce_poisons(void);
enum {
  FLCE_POISON_FLOAT = 0xff, /* each byte of a NaN of every dtype */
  FLCE_POISON_INT = 0x7f    /* each byte of integers, of which -1 has a meaning */
};

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
  bool has_probabilities; /* the targets are probabilities, not classes */
  bool wants_entropy;     /* its gradient too, where there is one to make after the forward */
  bool wants_predictions;
  bool wants_statistics; /* stats and scalars, by the caller; a backward gets them without */
  bool has_temperature;  /* one for each row */
  bool unaligned;        /* x or W does not begin at a multiple of 16 bytes */
  bool weight_unaligned; /* nor does FLCE_BUF_SAVED or the grad_weight that dW is added to */
  flce_loss loss;
  int64_t max_memory; /* bytes: bound of the logits buffer, whole or chunk */
  bool saves_memory;  /* max_memory is the default: take the smallest chunks whose predicted time is
                         within 1 % of the best (16-bit operands on a GPU), else the fastest that
                         fit */
} flce_problem;

/* What the plan has to know of a device and of its backend. */
typedef struct flce_facts {
  bool gemm_writes_f32;    /* 16-bit operands can give a 32-bit result */
  bool gemm_adds_bias;     /* to a float32 result, at no cost */
  bool gemm_f16;           /* float16 operands are worth using; else they are widened to float32 */
  int64_t fused_row_bytes; /* scratch of fused_logits for each of its rows; 0 where it does not
                                serve the problem */
  int64_t fused_tile_rows; /* that fused_logits takes at a time, where it serves */
  bool fused_writes_z;     /* where it serves, also where z is to be written: that pays */
  bool skips_rows;    /* fused_logits passes over what lies beyond the rows that compact_rows finds:
                         finding them pays, however many. By sizes and dtypes alone */
  int64_t bias_parts; /* rows of grad_weight_gemm's sums; 0 where that does not serve */
  int64_t multiprocessors; /* for wave quantization in chunks.c; 0 where that does not matter */
  /* Alignments; 0 or 1: none is needed. */
  int64_t row_alignment;    /* bytes: rows of logits, E and dz begin at multiples of it, and zeros
                               follow the columns of E and dz up to the next */
  int64_t input_alignment;  /* elements: the logits GEMM may read a row of A up to the next multiple
                               of it. Where H is not a multiple, rows of x are copied and
                               zero-padded */
  int64_t hidden_alignment; /* elements: where H is not a multiple of it, x and W are copied and
                               zero-padded to the next one, which makes fast GEMMs */
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
  FLCE_BUF_DX_ROWS,  /* E W of a chunk where dX's own memory cannot hold it, [chunk][plan's hidden]
                        dx_gemm_dtype */
  FLCE_BUF_SCALED_X, /* coef * x of a chunk (form dz: the valid rows of x, if not x itself, times
                        FLCE_SCALAR_INPUT_UNIT), or the same as GATHERED_X; [chunk][input_pitch]
                        dtype */
  FLCE_BUF_DW_ACCUM, /* dW summed in accum_dtype where that is not its own type or hidden is not H,
                        [V][plan's hidden] */
  FLCE_BUF_DW_BLOCK, /* a block of V rows of one chunk's dW where the GEMM cannot write accum_dtype
                      */
  FLCE_BUF_DB_ACCUM, /* [V] stat dtype */
  FLCE_BUF_DB_PARTS, /* [plan's bias_parts][V] stat dtype: sums of grad_weight_gemm */
  FLCE_BUF_SMOOTH, /* [2 H + 1] stat dtype, label smoothing: sum_j w_j W_j, sum_i c_i x_i, sum_i c_i
                      (c = coef_smooth) */
  FLCE_BUF_ORDER,  /* tokens ordered by target */
  FLCE_BUF_COLUMN_SUM, /* scratch */
  FLCE_BUF_FUSED,      /* scratch of fused_logits for a chunk */
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
  int64_t hidden; /* problem's H, zero-padded to hidden_alignment: the leading dimension of x, W and
                     every [][H] buffer of the workspace */
  int64_t input_pitch; /* leading dimension of a chunk's rows of x in the logits GEMM, zero-padded
                          to input_alignment: `hidden`, or more */
  bool gathers;        /* rows are computed in the order of FLCE_BUF_INDEX */
  flce_buffer_id gathered_x, backward_gathered_x; /* where a chunk's rows of x are copied to, if
                                                     they are gathered or padded */
  bool fuses_rows;            /* the forward's statistics come from fused_logits, and none of its
                                 logits are written but in form dz, where a pass needs them */
  bool holds_weight;          /* dW in float16 before grad_output is known: enum flce_scalar */
  int64_t bias_parts;         /* of db, where dW and db come from grad_weight_gemm; else 0 */
  int64_t chunk_rows, chunks; /* of the logits GEMM */
  int64_t backward_chunk_rows, backward_chunks; /* of the backward's loop; 0 for save=grads */
  flce_dtype z_dtype;                           /* of FLCE_BUF_LOGITS as the GEMM writes it */
  flce_dtype saved_dtype;                       /* of FLCE_BUF_SAVED: dtype for E, z_dtype for z */
  bool gemm_adds_bias;                          /* or fused_logits: then no row pass does */
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

/* ---- engine ---- */

/* The caller's memory. Outputs that the plan does not list (bytes 0) may be NULL. */
typedef struct flce_tensors {
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
} flce_tensors;

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

/* Elements of bfloat16 in a row of an AMX tile: the step of a product along k. */
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
