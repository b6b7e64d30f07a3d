/* What is in the memory of dW until dW is written there (plan->dx_first), in the two passes of
 * engine.c, forward_grads_dx_first:
 *
 *   dX    a chunk of rows with all classes: its logits, the result of dX's GEMM, the copies of x
 *   dW    by blocks of classes over all rows, while they fit:
 *
 *         | dW of the blocks before | dW of this block | its logits |  ...  | copies of all rows |
 *
 *         A block of C classes has C rows of dW and N x C logits, so the blocks become smaller
 *         by a constant factor. Where they would be too small, dW of the last classes is made by
 *         chunks of rows in the workspace. */
#ifndef FLCE_DW_MEMORY_H
#define FLCE_DW_MEMORY_H

#include "core/chunks.h"

/* Bytes: the alignment of each matrix there; and what aligning all of them takes at most. */
enum { FLCE_DW_ALIGNMENT = 256, FLCE_DW_PADDING = 6 * FLCE_DW_ALIGNMENT };

/* Bytes of one class's row of dW. */
static inline int64_t flce_dw_class_bytes(const flce_plan* plan) {
  return plan->weight_hidden * flce_size_of(plan->grad_weight_dtype);
}

/* Whether dW is summed in the caller's tensor itself, which this call is the first to write. */
bool flce_dw_is_free(const flce_problem* problem, const flce_plan* plan, flce_dtype accum_dtype);

/* Bytes that a token's row of the chunks of dX takes there. */
int64_t flce_dx_row_bytes(const flce_problem* problem, const flce_facts* facts,
                          const flce_plan* plan);
/* Bytes that a token's row takes at the end of dW while blocks are made over all rows: copies of x
 * and the scratch of fused_exp. */
int64_t flce_copies_row_bytes(const flce_problem* problem, const flce_facts* facts,
                              const flce_plan* plan);

/* The memory that blocks over all rows have. */
typedef struct dw_memory {
  int64_t classes;      /* of all blocks and of those after them: the vocabulary */
  int64_t row;          /* bytes of a row of dW */
  int64_t copies;       /* bytes of the copies of all rows, at the end */
  int64_t logits_class; /* bytes of a class of a block's logits */
} dw_memory;

/* Bytes of fused_exp's scratch for each token's row, for the largest block that `memory` can hold.
 */
int64_t flce_whole_scratch_row(const flce_facts* facts, const dw_memory* memory);

dw_memory flce_memory_of_dw(const flce_problem* problem, const flce_plan* plan);
/* The classes of the block over all rows from class `first` on; 0 if none fits. */
int64_t flce_whole_block_classes(const dw_memory* memory, int64_t first);

#endif
