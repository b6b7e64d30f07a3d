/* What is in the memory of dW until dW is written there (uses_dw_memory).
 *
 * FLCE_BLOCKS_DX_FIRST, the two passes of engine.c, forward_grads_dx_first:
 *
 *   dX    a chunk of rows with all classes: its logits, the result of dX's GEMM, the copies of x
 *   dW    by blocks of classes over all rows, while they fit:
 *
 *         | dW of the blocks before | dW of this block | its logits |  ...  | copies of all rows |
 *
 *         A block of C classes has C rows of dW and N x C logits, so the blocks become smaller
 *         by a constant factor. Where they would be too small, dW of the last classes is made by
 *         chunks of rows in the workspace.
 *
 * FLCE_BLOCKS_IN_DW, the three passes of engine.c, backward_stats_in_dw:
 *
 *   both  of the first classes, by such blocks, whose parts of dX are summed:
 *
 *         | dW of the blocks before | dW of this block | its logits | ... | copies | sum of dX |
 *
 *   rest  of the classes after them, by blocks of a chunk of rows in the workspace. At the end
 *         of the chunk its dX is finished, and its sum leaves. Of the classes whose memory the
 *         chunks before have left (flce_free_classes) the blocks make dW, too:
 *
 *         | dW | dW of the chunks since its memory is free | ... | sum of the chunks to come |
 *
 *   dW    that is missing, of the chunks before, from logits that are computed once more.
 *
 * The tensor of dX holds the sum, if it has its dtype, or the scaled copy of x (flce_use_of_dx). */
#ifndef FLCE_DW_MEMORY_H
#define FLCE_DW_MEMORY_H

#include "core/chunks.h"

/* Of an output tile of dW's GEMM, TILE_ROWS classes high: the largest of chunks.c. */
enum { DW_TILE_COLUMNS = 256 };

/* Bytes: the alignment of each matrix there; and what aligning all of them takes at most. */
enum { FLCE_DW_ALIGNMENT = 256, FLCE_DW_PADDING = 8 * FLCE_DW_ALIGNMENT };

/* Bytes of one class's row of dW. */
static inline int64_t flce_dw_class_bytes(const flce_plan* plan) {
  return plan->weight_hidden * flce_size_of(plan->grad_weight_dtype);
}

/* Whether dW is summed in the caller's tensor itself, which this call is the first to write. */
bool flce_dw_is_free(const flce_problem* problem, const flce_plan* plan, flce_dtype accum_dtype);

/* Bytes that a token's row of the chunks of dX takes there. */
int64_t flce_dx_row_bytes(const flce_problem* problem, const flce_facts* facts,
                          const flce_plan* plan);
/* What the tensor of dX holds while blocks over all rows are made, with FLCE_BLOCKS_IN_DW. Nothing
 * if the plan gathers rows, because the dX of those in no chunk is in it (blank_rows). */
typedef enum flce_dx_use { FLCE_DX_UNUSED, FLCE_DX_HAS_SUM, FLCE_DX_HAS_SCALED_X } flce_dx_use;
flce_dx_use flce_use_of_dx(const flce_problem* problem, const flce_plan* plan, bool gathers);

/* Bytes of a token's row of the sum of dX over blocks, if that is at the end of dW. */
int64_t flce_sum_row_bytes(const flce_problem* problem, const flce_plan* plan, flce_dx_use use);
/* Bytes that a token's row takes at the end of dW while blocks are made over all rows: copies of x,
 * the scratch of fused_exp and, with FLCE_BLOCKS_IN_DW, the sum of dX. */
int64_t flce_whole_row_bytes(const flce_problem* problem, const flce_facts* facts,
                             const flce_plan* plan);
/* Bytes from the start of dW to that sum, which ends with dW. */
int64_t flce_sum_offset(const flce_problem* problem, const flce_plan* plan);
/* The end of the classes whose dW may be written when dX of the first `rows` rows is finished: a
 * multiple of FLCE_BLOCK_CLASS_STEP, or all. */
int64_t flce_free_classes(const flce_problem* problem, const flce_plan* plan, int64_t rows);

/* The memory that blocks over all rows have. */
typedef struct dw_memory {
  int64_t classes;      /* of all blocks and of those after them: the vocabulary */
  int64_t row;          /* bytes of a row of dW */
  int64_t row_buffers;  /* bytes of what all rows have at the end: copies of x, the sum of dX */
  int64_t logits_class; /* bytes of a class of a block's logits */
  int64_t wave_tiles;   /* plan->wave_tiles */
  int64_t tile_columns; /* output tiles of dW's GEMM over the columns of dW */
} dw_memory;

/* Bytes of fused_exp's scratch for each token's row, for the largest block that `memory` can hold.
 */
int64_t flce_whole_scratch_row(const flce_facts* facts, const dw_memory* memory);

dw_memory flce_memory_of_dw(const flce_problem* problem, const flce_plan* plan);
/* plan->wave_tiles: where the GEMMs are modelled and dW has whole tiles of DW_TILE_COLUMNS. */
int64_t flce_wave_tiles(const flce_facts* facts, const flce_plan* plan);
/* The classes of the block over all rows from class `first` on; 0 if none fits. With wave_tiles, as
 * many as fill whole waves of dW's GEMM, which takes as long for a part of a wave. */
int64_t flce_whole_block_classes(const dw_memory* memory, int64_t first);

#endif
