/* What is in the memory of dW until dW is written there (uses_dw_memory). In names, `whole` is
 * short for a block over all rows: it has whole columns of the logits.
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
 *   dX    of the other classes, by chunks of rows, each by blocks in the workspace. When dX of a
 *         chunk is finished, dW may be written to the memory of its sum. The blocks of a chunk
 *         also make dW of those classes whose memory is free when it begins (flce_free_classes):
 *
 *         | dW of all chunks so far | dW of the later of them | ... | sum of dX of the others |
 *
 *   dW    that is missing: of each of these classes, the part of the chunks before its memory was
 *         free, from logits that are computed once more.
 *
 * The sum is in the tensor of dX instead, if both have one dtype; else the scaled copy of x is in
 * that tensor, where it fits (flce_use_of_dx). */
#ifndef FLCE_DW_MEMORY_H
#define FLCE_DW_MEMORY_H

#include "core/chunks.h"

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
/* What the tensor of dX holds with FLCE_BLOCKS_IN_DW: the sum until dX is finished, or the scaled
 * copy of x while blocks over all rows are made. Nothing if rows are gathered, because blank_rows
 * has already written dX of the rows that are left out. `gathers`: that of the plan with these
 * blocks; while they are chosen, `plan` is still that of chunks. */
typedef enum flce_dx_use { FLCE_DX_UNUSED, FLCE_DX_HAS_SUM, FLCE_DX_HAS_SCALED_X } flce_dx_use;
flce_dx_use flce_use_of_dx(const flce_problem* problem, const flce_plan* plan, bool gathers);

/* Bytes of a token's row of the sum of dX over blocks, if that is at the end of dW; else 0. */
int64_t flce_sum_row_bytes(const flce_problem* problem, const flce_plan* plan, flce_dx_use use);
/* Bytes that a token's row takes at the end of dW while blocks are made over all rows: copies of x,
 * the scratch of fused_exp and, with FLCE_BLOCKS_IN_DW, the sum of dX. */
int64_t flce_whole_row_bytes(const flce_problem* problem, const flce_facts* facts,
                             const flce_plan* plan);
/* Bytes from the start of dW to the sum of dX, which is the last thing in dW. */
int64_t flce_sum_offset(const flce_problem* problem, const flce_plan* plan);
/* The end of the classes whose dW may be written when dX of the first `rows` rows is finished: a
 * multiple of FLCE_BLOCK_CLASS_STEP, or all. */
int64_t flce_free_classes(const flce_problem* problem, const flce_plan* plan, int64_t rows);

/* The memory that blocks over all rows have. */
typedef struct dw_memory {
  int64_t classes;      /* the vocabulary, of which these blocks have the first classes */
  int64_t row;          /* bytes of a row of dW */
  int64_t row_buffers;  /* bytes at the end: rows x whole_row_bytes */
  int64_t logits_class; /* bytes of a class of a block's logits */
} dw_memory;

/* Bytes of fused_exp's scratch for each token's row, for the largest block that `memory` can hold.
 */
int64_t flce_whole_scratch_row(const flce_facts* facts, const dw_memory* memory);

dw_memory flce_memory_of_dw(const flce_problem* problem, const flce_plan* plan);
/* The classes of the block over all rows from class `first` on; 0 if none fits. */
int64_t flce_whole_block_classes(const dw_memory* memory, int64_t first);

#endif
