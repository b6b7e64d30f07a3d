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
 * Flow: flce_plan_call() decides everything that follows from sizes, without side effects. The
 * caller allocates the buffers that the plan lists. flce_forward() and flce_backward() then run a
 * loop over chunks of rows, or loops over blocks of rows and classes, which call the functions of a
 * backend's table (backend.h).
 */
#ifndef FLCE_H
#define FLCE_H

#include "problem.h"

#ifdef __cplusplus
extern "C" {
#endif

#define FLCE_VERSION "0.1.0"
#define FLCE_EXPORT __attribute__((visibility("default")))

typedef struct flce_backend flce_backend; /* backend.h: the functions of a device */
typedef struct flce_gemm flce_gemm;       /* backend_args.h: the arguments of a GEMM */
typedef struct flce_comm flce_comm;       /* comm.h: the collectives of a group of ranks */

/* ---- plan ---- */

/* Every buffer of a call: its outputs, and the parts of its workspaces. [N][H] are its dimensions;
 * a name after them is its dtype, a field of flce_plan unless it says otherwise. */
typedef enum flce_buffer_id {
  FLCE_BUF_LOSS,     /* [1], or [N] for FLCE_NONE, stat dtype */
  FLCE_BUF_ROW_LOSS, /* [N] stat dtype: the losses of the rows, if they are reduced */
  /* [FLCE_STAT_COUNT][N] stat dtype: enum flce_stat_row. An output if the plan keeps_statistics,
   * else part of the workspace. */
  FLCE_BUF_STATS,
  /* [FLCE_SCALAR_COUNT] stat dtype: enum flce_scalar. An output if the plan keeps_statistics, else
   * part of the workspace. */
  FLCE_BUF_SCALARS,
  /* [rows][saved_pitch]: save=logits keeps E or z in it, saved_dtype; save=samples the lists,
   * int32. */
  FLCE_BUF_SAVED,
  FLCE_BUF_PREDICTIONS,  /* [N] int64 */
  FLCE_BUF_CLASSES,      /* [N][wants.row_classes] int64, with topk */
  FLCE_BUF_CLASS_LOGITS, /* [N][wants.row_classes] stat dtype */
  FLCE_BUF_GRAD_INPUT,   /* [N][H] grad_input_dtype */
  /* [shape.weight_rows][H - shape.frozen_hidden] grad_weight_dtype. Absent if dW is added to the
     caller's. */
  FLCE_BUF_GRAD_WEIGHT,
  FLCE_BUF_GRAD_BIAS, /* [shape.weight_rows] grad_bias_dtype */
  /* save=grads in float16: the gradients in their final dtype, for those of the three above that
   * are kept in float32 until grad_output is known. */
  FLCE_BUF_ROUNDED,
  /* [N][plan's hidden] dtype: x, if its dtype or its hidden size differs from the plan's. */
  FLCE_BUF_INPUT_CAST,
  /* [V][plan's hidden] dtype: W, if its dtype or its hidden size differs from the plan's. */
  FLCE_BUF_WEIGHT_CAST,
  FLCE_BUF_BIAS_CAST, /* [V] stat dtype: b, if it has another dtype */
  /* [chunk][z_pitch] z_dtype: logits of a chunk, or [block_rows][block_classes] of a block,
   * overwritten by E or dz. This buffer and those of a chunk's rows below do not exist for the
   * chunks and blocks that are in the memory of dW (plan->blocks). */
  FLCE_BUF_LOGITS,
  /* [FLCE_DZ_SCALE_NUMBERS + chunk] float32, of a backward in form dz and float16: what
   * scale_coefficients writes; with FLCE_BLOCKS_IN_DW for all rows. */
  FLCE_BUF_DZ_SCALE,
  FLCE_BUF_COEF,  /* [FLCE_COEF_COUNT][N] stat dtype: enum flce_coef_row */
  FLCE_BUF_INDEX, /* int64: the rows to compute, if they are gathered (compact_rows) */
  /* [chunk][input_pitch] dtype: the chunk's rows of x as the A operand of the logits GEMM, if they
   * are copied and the copy is not in FLCE_BUF_SCALED_X. */
  FLCE_BUF_GATHERED_X,
  FLCE_BUF_GATHERED_COEF, /* [chunk] stat dtype: weights of the gathered rows of E in db */
  /* [chunk][plan's hidden] dx_gemm_dtype: E W of a chunk, if the GEMM cannot write it to dX, or
   * summed over blocks of classes. */
  FLCE_BUF_DX_ROWS,
  /* The B operand of dW's GEMM, [chunk][plan's hidden] dtype. Form exp: coef * x. Form dz: the
   * valid rows of x times FLCE_SCALAR_INPUT_SCALE, if x itself cannot be the operand. Before, it
   * may hold the A operand of the logits GEMM, as FLCE_BUF_GATHERED_X does: [chunk][input_pitch].
   */
  FLCE_BUF_SCALED_X,
  /* [V][weight_hidden] accum_dtype: the sum of dW over chunks, if dW has another dtype or the
   * plan's hidden is not H. */
  FLCE_BUF_DW_ACCUM,
  /* [dw_piece_rows][weight_hidden] or [dx_piece_rows][plan's hidden] dtype: some rows of the result
   * of a GEMM that cannot write the dtype of its accumulator. */
  FLCE_BUF_GEMM_PIECE,
  FLCE_BUF_DB_ACCUM, /* [V] stat dtype: the sum of db over chunks */
  FLCE_BUF_DB_PARTS, /* [bias_parts][V] stat dtype: partial sums of db by grad_weight_gemm */
  /* [2 H + 1] stat dtype, H the plan's hidden, for label smoothing: sum_j w_j W_j, sum_i c_i x_i,
   * sum_i c_i, where c is FLCE_COEF_SMOOTH. */
  FLCE_BUF_SMOOTH,
  FLCE_BUF_ORDER,   /* tokens sorted by target (order_targets) */
  FLCE_BUF_SAMPLES, /* [rows][flce_sample_pitch()] int32: the lists, if the plan draws_from_dz */
  FLCE_BUF_SAMPLE_ORDER, /* the sampled entries ordered by class (order_samples) */
  FLCE_BUF_COLUMN_SUM,   /* scratch of column_sum */
  /* Scratch of fused_logits for a chunk. If the plan packs, it begins with how each row is packed,
   * which divergence_rows reads. */
  FLCE_BUF_FUSED,
  FLCE_BUF_GEMM_WORKSPACE, /* scratch of a GEMM */
  FLCE_BUF_TEACHER,        /* a divergence: the workspace of its teacher */
  /* [1 + R][FLCE_DIVERGENCE_SUMS][chunk] stat dtype, if the vocabulary is sharded: of a chunk's
   * rows this rank's sums, then those of all; and those of the ranks. */
  FLCE_BUF_DIVERGENCE,
  /* The vocabulary is sharded (core/shards.c). R ranks, P flce_shard_stat_count(). */
  FLCE_BUF_SHARD_INPUT,   /* [N][H] dtypes.input: x of all tokens, if the caller's is sharded */
  FLCE_BUF_SHARD_TARGET,  /* [N] int64: the targets as columns of this rank */
  FLCE_BUF_SHARD_SCALARS, /* [FLCE_SCALAR_COUNT] stat dtype: the scalars of this rank's classes */
  /* [R][P][chunk] stat dtype: the ranks' statistics of a chunk's rows; [R][P][rows] where those of
   * all rows are exchanged at once. */
  FLCE_BUF_SHARD_STATS,
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

/* From so many chunks on dW is summed in the stat dtype, unless the caller says otherwise. A 16-bit
 * sum is rounded once for each chunk: over 8, 16, 32 and 86 chunks the error of the gradients of
 * rare classes is 1.5, 2, 3 and 9 times that of one chunk, and over hundreds, where a chunk adds
 * less than half a unit of the sum's last digit, these gradients lose up to 40 % (docs/memory.md).
 * A float32 accumulator takes 4 V H bytes. */
enum { FLCE_WIDE_SUM_CHUNKS = 16 };

/* How gradients are made under a small max_memory (engine.c): by chunks of all classes, or by
 * blocks of rows and classes. */
typedef enum flce_block_mode {
  FLCE_BLOCKS_NONE,
  FLCE_BLOCKS_IN_WORKSPACE,
  /* The others use that the memory of dW is free until dW is written there (core/dw_memory.h). */
  FLCE_BLOCKS_DX_FIRST, /* save=grads: dX by chunks of all classes, then dW by blocks */
  FLCE_BLOCKS_IN_DW,    /* save=stats: dX and dW by blocks, most of them over all rows */
} flce_block_mode;

/* All decisions for one problem on one device. Pitches are in elements. */
typedef struct flce_plan {
  /* What the forward keeps for the backward: flce_problem.save, or what auto has become. */
  flce_strategy strategy;
  flce_form form;   /* what the gradient GEMMs read */
  flce_dtype dtype; /* of the GEMM operands and of dz */
  /* Of E, and of a dz that samples are drawn from: dtype, but bfloat16 where samples are drawn from
   * it for float16, whose range cannot hold E. */
  flce_dtype exp_dtype;
  int64_t rows; /* to compute: flce_problem.shape.rows */
  /* H, zero-padded to hidden_alignment: the leading dimension of x, W and every [][H] buffer of the
   * workspace. */
  int64_t hidden;
  int64_t weight_hidden; /* columns of dW: hidden - shape.frozen_hidden */
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
  flce_block_mode blocks;
  int64_t block_rows, block_classes; /* of a block in the workspace; 0 without blocks */
  /* In the memory of dW: the first classes, whose blocks are over all rows, so that their dW is
   * written once. The other classes have blocks in the workspace. */
  int64_t whole_classes;
  int64_t whole_row_bytes; /* at the end of dW for each row, of its copies of x and its sum of dX */
  bool fuses_blocks;       /* fused_exp makes E of a block; its logits are in no memory */
  flce_dtype z_dtype;      /* of FLCE_BUF_LOGITS when the logits GEMM writes it */
  flce_dtype saved_dtype;  /* of FLCE_BUF_SAVED: dtype for E, z_dtype for z */
  bool gemm_adds_bias;     /* the logits GEMM or fused_logits adds b; the row passes do not */
  bool saves_exp;          /* save=logits: FLCE_BUF_SAVED holds E, else z */
  bool dz_in_saved;        /* the backward overwrites FLCE_BUF_SAVED with dz */
  bool z_in_saved;         /* the logits GEMM writes to FLCE_BUF_SAVED, not to FLCE_BUF_LOGITS */
  bool keeps_statistics;   /* stats and scalars are read after the forward */
  bool finds_classes;      /* the forward reads its logits or E to find each row's largest */
  bool sums_tail;          /* the forward reads its logits to sum those of each row's tail */
  /* A sampled divergence: the forward draws each row's list from its dz and gathers the gradients
   * by the lists; save=grads. */
  bool draws_from_dz;
  bool is_divergence; /* the forward reads its logits and a teacher's */
  /* A divergence whose fused_logits overwrites the teacher's z by the logits of both, packed
   * (flce_rows.teacher in backend_args.h). */
  bool packs;
  int64_t z_pitch, /* of the logits, elements of z_dtype */
      out_pitch,   /* of E and dz, elements of dtype; columns from vocab on are 0 */
      saved_pitch; /* of FLCE_BUF_SAVED, elements of saved_dtype, or int32 of the lists */
  flce_dtype grad_input_dtype, /* of FLCE_BUF_GRAD_INPUT */
      partial_dx_dtype,        /* of dX before it is summed over the ranks */
      grad_weight_dtype,       /* of FLCE_BUF_GRAD_WEIGHT, or of the caller's grad_weight */
      grad_bias_dtype;         /* of FLCE_BUF_GRAD_BIAS */
  /* The result of dX's GEMM. It goes directly to dX if that has this dtype and the same rows and
   * columns, else to FLCE_BUF_DX_ROWS. */
  flce_dtype dx_gemm_dtype;
  flce_dtype accum_dtype; /* in which dW is summed over chunks */
  /* Rows of dW's GEMM, and of dX's, that FLCE_BUF_GEMM_PIECE holds; 0 if the GEMM writes its
   * accumulator itself. */
  int64_t dw_piece_rows, dx_piece_rows;
  /* Where ranks gather their sums of dX: the classes of the first of two GEMMs of the last chunk's
   * dW. The ranks' terms of dX are exchanged during that one, the sums during the other. 0: it is
   * not split. */
  int64_t dw_first_classes;
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

/* The numbers of rows that save=auto distinguishes, by the memory of their logits. */
typedef enum flce_row_range {
  /* All logits fit memory.bound at once, and what save=logits keeps of them fits its bound, which
   * is memory.bound or memory.kept. */
  FLCE_ROWS_OF_ONE_CHUNK,
  FLCE_ROWS_TO_KEEP, /* only the latter */
  FLCE_ROWS_BEYOND,  /* neither, or only the former */
  FLCE_ROW_RANGES
} flce_row_range;

/* What save=auto is: the strategy of the first range whose most_rows the rows do not exceed. They
 * ascend; the last is INT64_MAX. */
typedef struct flce_strategies {
  struct {
    int64_t most_rows;
    flce_strategy strategy;
  } ranges[FLCE_ROW_RANGES]; /* by flce_row_range */
} flce_strategies;

/* Pure. The strategies of a problem whose `rows` are not read; all are the same unless save is
 * auto. */
void flce_choose_strategies(const flce_problem* problem, const flce_facts* facts,
                            flce_strategies* strategies);

/* The strategy where neither rows nor facts decide it, else FLCE_SAVE_AUTO. */
flce_save flce_known_strategy(const flce_problem* problem);

/* Graphs choose by the same limits: with_strategy of flce/fakes.py. */
static inline flce_strategy flce_strategy_of(const flce_strategies* strategies, int64_t rows) {
  int range = 0;
  while (rows > strategies->ranges[range].most_rows) range++;
  return strategies->ranges[range].strategy;
}

/* A rank's problem if the classes were divided equally: what the ranks have to agree on is decided
 * for it. The problem itself if the vocabulary is not sharded. */
flce_problem flce_equal_share(const flce_problem* problem);

/* Sets shape.vocab and, where the vocabulary is sharded, shard.first_class and shard.classes, from
 * the `start` and `vocab` of VocabParallel, -1 for None, and valid_vocab, or FLCE_ABSENT. A group
 * of one rank becomes no group. */
flce_status flce_find_classes(flce_problem* problem, int64_t start, int64_t vocab,
                              int64_t valid_vocab);

/* FLCE_INVALID_ARGUMENT if a parameter of the loss is out of its range; the message names it. */
flce_status flce_check_loss(const flce_problem* problem);

/* Checks targets in host memory: FLCE_TARGET_OUT_OF_RANGE if one is neither ignore_index nor from 0
 * to classes - 1. *valid, unless `valid` is NULL: the number of targets that are not ignored. */
flce_status flce_check_targets(const flce_problem* problem, const int64_t* target, int64_t classes,
                               int64_t* valid);

/* FLCE_INVALID_ARGUMENT for `items` 0 with valid rows, whose mean would divide by 0. */
flce_status flce_check_items(double items, int64_t valid);

/* The facts of the backend for `problem`, and the plan, whose strategy is chosen if `save` is auto.
 * Where the vocabulary is sharded, what the ranks have to agree on (the chunks of the forward, the
 * order of its rows) is decided for a rank with an equal share of the classes. No allocation. */
flce_status flce_plan_call(const flce_backend* backend, const flce_problem* problem,
                           flce_plan* plan);
/* For flce.plan: the plan of forward and backward together; it is never executed. A divergence with
 * save=stats or FLCE_NONE: the backward is a second call, with save=grads and FLCE_SUM, whose
 * forward makes the gradients. With wants.class_gradient the backward is planned with
 * backward.has_grad_classes. */
flce_status flce_plan_step(const flce_backend* backend, const flce_problem* problem,
                           flce_plan* plan);

/* Pure: no allocation, no device call. FLCE_INVALID_ARGUMENT if a size, dtype or parameter is out
 * of its range, if memory.bound is below one row of logits, or if `save` does not support the
 * reduction. */
flce_status flce_plan_make(const flce_problem* problem, const flce_facts* facts, flce_plan* plan);

/* Writes the plan as text, at most `size` bytes including the terminating 0. Returns the length of
 * the whole text without the 0, as snprintf does. */
int64_t flce_plan_text(const flce_plan* plan, char* text, int64_t size);
/* The same as a JSON object: the fields of flce.Plan but `text` and `sampled_time`; a collective is
 * [kind, calls of the forward, calls of the backward, bytes received]. */
int64_t flce_plan_json(const flce_plan* plan, char* text, int64_t size);

/* Pure. Sets the fields of a plan that depend neither on rows nor on sizes of buffers: form,
 * dtypes, leading dimensions. plan->strategy is set. */
void flce_choose_dtypes(const flce_problem* problem, const flce_facts* facts, flce_plan* plan);

/* FLCE_INVALID_ARGUMENT if a size, dtype or option is out of its range, or if options that exclude
 * each other are combined. */
flce_status flce_check_problem(const flce_problem* problem);
/* The part of it that says what excludes problem->save, also for one that has been auto. */
flce_status flce_check_save(const flce_problem* problem);

/* ---- engine ---- */

/* The caller's memory. Outputs that the plan does not list (bytes 0) may be NULL. Shapes are those
 * of the caller's tensors, stat dtype that of the plan's dtype. */
typedef struct flce_tensors {
  const void* input;              /* [flce_input_rows()][H] dtypes.input */
  const void* linear_weight;      /* [shape.weight_rows][H] dtypes.weight */
  const void* linear_bias;        /* [shape.weight_rows] dtypes.bias, or NULL */
  const int64_t* target;          /* [N], or NULL with probabilities */
  const void* probabilities;      /* [N][shape.weight_rows] probabilities_dtype, or NULL */
  flce_dtype probabilities_dtype; /* of `probabilities` */
  const void* class_weight; /* [shape.weight_rows], sharded [shard.classes], stat dtype; or NULL */
  const void* token_weight; /* [N] stat dtype, or NULL */
  const void* temperature;  /* [N] stat dtype, or NULL */
  const void* num_items;    /* [1] stat dtype, or NULL; read by the forward with FLCE_MEAN */
  const int64_t* seed;      /* [1], save=samples: of the draw, read by the forward */
  /* Of a divergence: the teacher's, of which input, linear_weight, linear_bias and temperature are
   * read. */
  const struct flce_tensors* teacher;
  void* loss; /* [1], or [N] for FLCE_NONE; stat dtype */
  /* [FLCE_STAT_COUNT][N] stat dtype. Written by the forward, read by the backward. NULL is
   * allowed unless the plan keeps_statistics: they are then in the workspace. */
  void* stats;
  /* [FLCE_SCALAR_COUNT] stat dtype. Written by the forward, read by the backward. NULL is
   * allowed unless the plan keeps_statistics: they are then in the workspace. */
  void* scalars;
  /* [rows][saved_pitch]. With save=logits and save=samples written by the forward, read by the
   * backward. */
  void* saved;
  void* predictions; /* [N] int64 */
  /* [N][wants.row_classes]: indices of classes, ignore_index for none. Read, but with topk written
   * by the forward: the classes of this rank with the largest logits, the lowest first of equal
   * ones; -1 beyond the number of classes, and in rows that are not valid. */
  int64_t* classes;
  /* [N][wants.row_classes] stat dtype, written by the forward, and read by a backward with
   * backward.has_grad_classes: z of the classes, with the bias; 0 where there is none or the row is
   * ignored, and for other ranks' classes. */
  void* class_logits;
  /* [flce_input_rows()][H] plan->grad_input_dtype. Written by the forward for save=grads, else by
   * the backward. */
  void* grad_input;
  /* [shape.weight_rows][flce_grad_weight_cols()] plan->grad_weight_dtype. Written when grad_input
   * is; with backward.adds_grad_weight dW is added to its contents. */
  void* grad_weight;
  void* grad_bias; /* [shape.weight_rows] plan->grad_bias_dtype; written when grad_input is */
  const void* grad_output;  /* backward: [1], or [N] for FLCE_NONE; stat dtype */
  const void* grad_lse;     /* backward: [N] stat dtype, or NULL for 0 */
  const void* grad_entropy; /* backward: [N] stat dtype, or NULL for 0 */
  const void* grad_tail;    /* backward: [N] stat dtype, of TAIL_LSE; NULL for 0 */
  const void*
      grad_classes; /* backward: [N][wants.row_classes] stat dtype, of class_logits; or NULL */
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
/* FLCE_INVALID_ARGUMENT unless flce_has_backward(plan->strategy). flce_backward() calls it too. */
flce_status flce_check_backward(const flce_plan* plan);

/* GEMMs that the engine has requested from backends since the process started. */
int64_t flce_gemm_count(void);

/* Cross entropy of given logits z[N][V]. tensors->input is z, tensors->grad_input is dz[N][V] in
 * z's dtype, tensors->workspace has flce_cross_entropy_workspace_bytes(); the other tensors are as
 * above. The forward and the backward each read the logits once. Of the problem they read
 * shape.tokens, vocab, weight_rows (= vocab) and rows (= tokens), dtypes.gemm, reduction, loss,
 * wants and has. */
int64_t flce_cross_entropy_workspace_bytes(const flce_problem* problem);
flce_status flce_cross_entropy_forward(const flce_backend* backend, const flce_problem* problem,
                                       const flce_tensors* tensors);
flce_status flce_cross_entropy_backward(const flce_backend* backend, const flce_problem* problem,
                                        const flce_tensors* tensors);

/* ---- backends ---- */

/* bfloat16 elements in a row of an AMX tile: the step of a GEMM along k. */
enum { FLCE_AMX_DEPTH = 32 };

/* The CPU backend is part of the module. The caller provides the GEMM and the thread pool;
 * binding/device.cpp passes torch's. */
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
  int device;         /* CUDA device index; has to be the current device of the calling thread */
  void* stream;       /* cudaStream_t: all work is queued here */
  bool allow_tf32;    /* float32 GEMMs may use TF32 */
  const char* kernel; /* FLCE_KERNEL; NULL: "auto" */
} flce_cuda;
/* Exported as "flce_cuda_backend": fills `backend` with self = cuda, which must outlive it. */
typedef flce_status (*flce_cuda_backend_fn)(flce_cuda* cuda, flce_backend* backend);
/* Exported as "flce_cuda_describe": describes the build and the device, one line each. */
typedef const char* (*flce_cuda_describe_fn)(void);
/* Exported as "flce_cuda_headers": FLCE_HEADERS of its build, a digest of csrc's headers. */
typedef uint64_t (*flce_cuda_headers_fn)(void);

#ifdef __cplusplus
}
#endif
#endif
