/* The choice of blocks of rows and classes, by which gradients are made under a small
 * max_memory. */
#ifndef FLCE_BLOCKS_H
#define FLCE_BLOCKS_H

#include "core/chunks.h"

typedef struct block_shape {
  int64_t rows, classes; /* 0: chunks of all classes */
  bool dx_first;         /* as in flce_plan */
  int64_t whole_classes; /* blocks over all rows begin before this class */
} block_shape;

/* Whether the loop that makes the gradients could be one over blocks: nothing but recomputed logits
 * and the rows' statistics is needed, and the caller sets max_memory (or FLCE_BLOCKS is set). */
bool flce_may_use_blocks(const flce_problem* problem, const flce_facts* facts,
                         const flce_plan* plan);

/* The loop over chunks of all classes that blocks would replace; and the pass of dX first, after
 * which blocks make dW alone. */
typedef struct chunk_alternative {
  double effort;        /* its modelled time, under the max_memory of the call */
  double dx_effort;     /* that of logits and dX in the memory of dW; INFINITY if that is in use */
  int64_t rows;         /* of a chunk */
  int64_t default_rows; /* of a chunk without max_memory */
} chunk_alternative;

/* *block: the blocks that take the least time within max_memory, or 0 if none take less than the
 * chunks of `plan`. */
void flce_choose_block(const flce_problem* problem, const flce_facts* facts, const flce_plan* plan,
                       const chunk_alternative* chunks, block_shape* block);

#endif
