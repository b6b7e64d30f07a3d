/* The choice of blocks of rows and classes, by which gradients are made under a small
 * max_memory. */
#ifndef FLCE_BLOCKS_H
#define FLCE_BLOCKS_H

#include "core/chunks.h"

typedef struct block_shape {
  flce_block_mode blocks;
  int64_t rows, classes; /* as block_rows and block_classes of flce_plan */
  int64_t whole_classes; /* blocks over all rows begin before this class */
} block_shape;

/* Whether the loop that makes the gradients could be one over blocks: nothing but recomputed logits
 * and the rows' statistics is needed, and the caller sets max_memory (or FLCE_BLOCKS is set). */
bool flce_may_use_blocks(const flce_problem* problem, const flce_facts* facts,
                         const flce_plan* plan);

/* The loop over chunks of all classes that blocks would replace, and what depends on such chunks in
 * the loops that use the memory of dW. */
typedef struct chunk_alternative {
  double effort;        /* its modelled time, under the max_memory of the call */
  bool dw_is_free;      /* the memory of dW may hold logits until dW is written there */
  double dx_effort;     /* with dX first, the time of logits and dX; INFINITY if not possible */
  int64_t rows;         /* of a chunk */
  int64_t default_rows; /* of a chunk without max_memory */
} chunk_alternative;

/* *block: the blocks that take the least time within max_memory, or FLCE_BLOCKS_NONE if none take
 * less than the chunks of `plan`. */
void flce_choose_block(const flce_problem* problem, const flce_facts* facts, const flce_plan* plan,
                       const chunk_alternative* chunks, block_shape* block);

#endif
