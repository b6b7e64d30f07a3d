/* The chunks of a call: where the logits of their rows are, what overwrites them, and what is
 * saved. */
#ifndef FLCE_CHUNK_MEMORY_H
#define FLCE_CHUNK_MEMORY_H

#include "core/execution.h"

/* All computed rows, without logits. */
chunk flce_all_rows(const execution* e);

/* Forward: E or dz, if the pass makes any, overwrites the logits. */
chunk flce_chunk_in_place(const execution* e, int64_t first);
/* Forward: the caller's `saved` gets E or z. */
chunk flce_chunk_to_saved(const execution* e, int64_t first);

/* Backward: its logits are computed again, and E or dz overwrites them. */
chunk flce_chunk_recomputed(const execution* e, int64_t first);
/* Backward: `saved` holds its E or z. */
chunk flce_chunk_from_saved(const execution* e, int64_t first);

/* Either pass: the rows whose gradients are computed block by block, without logits; and of these
 * the block of classes from `first_class` on, whose logits E or dz overwrites. */
chunk flce_rows_of_blocks(const execution* e, int64_t first);
chunk flce_block_of(const execution* e, const chunk* rows, int64_t first_class);

/* The chunk's E or dz of `classes` classes from its class `first` on, counted in the chunk; without
 * its logits. */
chunk flce_classes_of(const chunk* c, int64_t first, int64_t classes);

/* In the memory of dW (core/dw_memory.h). With dX first: a chunk of all classes. */
chunk flce_chunk_in_dw(const execution* e, int64_t first);
/* All rows without logits: copies of x, scratch and, with FLCE_BLOCKS_IN_DW, the sum of dX. */
chunk flce_all_rows_in_dw(const execution* e);
/* The block over these rows whose classes begin with `first_class`. */
chunk flce_block_in_dw(const execution* e, const chunk* rows, int64_t first_class);

#endif
