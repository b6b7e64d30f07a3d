/* The choice of blocks of rows and classes, by which gradients are made under a small
 * max_memory. */
#ifndef FLCE_BLOCKS_H
#define FLCE_BLOCKS_H

#include "core/chunks.h"

/* Classes of a block are a multiple: rows of its logits, E and dz then start at multiples of every
 * device's row_alignment. */
enum { FLCE_BLOCK_CLASS_STEP = 64 };

typedef struct block_shape {
  int64_t rows, classes; /* 0: chunks of all classes */
} block_shape;

/* Whether the loop that makes the gradients could be one over blocks: nothing but recomputed logits
 * and the rows' statistics is needed, and the caller sets max_memory (or FLCE_BLOCKS is set). */
bool flce_may_use_blocks(const flce_problem* problem, const flce_facts* facts,
                         const flce_plan* plan);

/* The loop over chunks of all classes that blocks would replace. */
typedef struct chunks_in_place {
  double effort;        /* its modelled time, under the max_memory of the call */
  int64_t rows;         /* of a chunk */
  int64_t default_rows; /* of a chunk without max_memory */
} chunks_in_place;

/* *block: the shape whose loop takes the least time within max_memory, or 0 if none takes less than
 * the chunks of `plan`. */
void flce_choose_block(const flce_problem* problem, const flce_facts* facts, const flce_plan* plan,
                       const chunks_in_place* chunks, block_shape* block);

#endif
