/* What the plan needs of a GPU that need not be there: its numbers, the facts that follow from
 * them, and the sizes that the kernels of csrc/cuda and these facts share; those of an
 * architecture's own kernels are in architectures.h. No CUDA: the CUDA library and the module both
 * compile core/gpu_facts.c. */
#ifndef FLCE_GPU_H
#define FLCE_GPU_H

#include "architectures.h"
#include "backend.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct flce_gpu {
  const char* name;
  int64_t capability,  /* compute capability: 90 for 9.0 */
      multiprocessors, /* on which the sizes of chunks depend */
      memory;          /* bytes */
  /* The vendor's numbers, for estimates of times; 0 if they are not known. */
  double multiply_adds; /* a second, dense, of bfloat16 operands in float32 sums */
  double bandwidth;     /* of the memory, bytes a second */
} flce_gpu;

/* The GPUs that have a name, and how many they are. */
const flce_gpu* flce_gpus(int* count);

/* The GPU of that name, or of numbers as text: "capability,multiprocessors,memory", such as
 * "90,132,85899345920". FLCE_INVALID_ARGUMENT for other text. */
flce_status flce_find_gpu(const char* text, flce_gpu* gpu);

/* The facts of the CUDA backend on that GPU. The scratch of CUB in order_bytes, compact_bytes and
 * sample_bytes is an estimate, because it depends on CUB's version: the CUDA backend replaces these
 * three. `architecture`: the GPU's row of architectures.h, NULL for none. `kernel`: FLCE_KERNEL,
 * NULL for "auto": which of its kernels run. FLCE_UNSUPPORTED beyond the limits of flce_check_order
 * and of order_samples. */
flce_status flce_gpu_facts(const flce_gpu* gpu, const flce_architecture* architecture,
                           const char* kernel, const flce_problem* problem, flce_facts* facts);

/* A backend with facts and no other function, for flce_plan_call. */
void flce_gpu_backend(flce_gpu* gpu, flce_backend* backend);

/* ---- sizes of the kernels ---- */

#define FLCE_LOG2E 1.4426950408889634
/* Of cuda/rows/packed_rows.cuh. */
enum { FLCE_PACKED_ROW_FLOATS = 8 };

enum {
  FLCE_MAX_VOCAB = 1 << 30,  /* columns of a row of logits, which kernels count in 32 bits */
  FLCE_COLUMN_THREADS = 128, /* column_sum: threads of a block, 16 bytes of a row each */
  FLCE_COLUMN_BLOCKS = 1024,
  FLCE_COUNTED_TOKENS =
      8192, /* order_targets sorts so many without CUB, in 32 KiB of shared memory */
  FLCE_ORDER_ALIGNMENT = 256, /* bytes, of the arrays in the results of the three sorts */
  FLCE_SEARCHED_TILES = 4096, /* top_classes: the most tiles whose maxima fit in shared memory */
};

static inline int64_t flce_ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
static inline int64_t flce_order_aligned(int64_t bytes) {
  return flce_ceil_div(bytes, FLCE_ORDER_ALIGNMENT) * FLCE_ORDER_ALIGNMENT;
}

static inline flce_status flce_check_order(int64_t tokens, int64_t vocab) {
  if (tokens <= INT32_MAX && vocab <= INT32_MAX) return FLCE_OK;
  return flce_fail(FLCE_UNSUPPORTED,
                   "tokens, vocab: expected at most %d of each on CUDA, got %lld and %lld",
                   INT32_MAX, (long long)tokens, (long long)vocab);
}

/* facts.bias_parts: rows of the partial sums of grad_weight_gemm; 0 without that kernel. */
static inline int64_t flce_bias_parts(const flce_weight_gemm_sizes* gemm, int64_t hidden) {
  if (gemm->tile_columns == 0) return 0;
  int64_t tiles = flce_ceil_div(hidden, gemm->tile_columns);
  return tiles < gemm->most_bias_parts ? tiles : gemm->most_bias_parts;
}

/* Whether top_classes searches for `count` classes of a row by the largest E of each of the logits
 * GEMM's `tiles` column tiles. With fewer tiles many columns would reach the count-th largest of
 * them. */
static inline bool flce_searches_tiles(int64_t count, int64_t tiles) {
  return count > 0 && 2 * count <= tiles && tiles <= FLCE_SEARCHED_TILES;
}

/* column_sum: columns of a thread block. */
static inline int64_t flce_column_tile(flce_dtype dtype) {
  return FLCE_COLUMN_THREADS * (16 / flce_size_of(dtype));
}

/* column_sum: the number of row ranges that are summed separately. It depends on sizes only, and so
 * does the order of a sum. It gives about FLCE_COLUMN_BLOCKS thread blocks, more than are resident
 * at once, and few enough that the partial sums are small compared with the matrix. */
static inline int64_t flce_row_splits(int64_t rows, int64_t cols, flce_dtype dtype) {
  const int64_t kRowsAtLeast = 32;
  int64_t tiles = flce_ceil_div(cols, flce_column_tile(dtype));
  int64_t wanted = flce_ceil_div(FLCE_COLUMN_BLOCKS, tiles);
  int64_t most = flce_ceil_div(rows, kRowsAtLeast);
  int64_t splits = wanted < most ? wanted : most;
  return splits > 1 ? splits : 1;
}

/* The most partial sums of up to `rows` rows of up to `cols` columns: a block of classes has fewer
 * columns than the vocabulary, but its splits may be more by a larger factor. */
static inline int64_t flce_most_column_parts(int64_t rows, int64_t cols, flce_dtype dtype) {
  int64_t tile = flce_column_tile(dtype), of_rows = flce_row_splits(rows, 1, dtype) * cols;
  int64_t of_blocks = (FLCE_COLUMN_BLOCKS + flce_ceil_div(cols, tile)) * tile;
  return of_rows < of_blocks ? of_rows : of_blocks;
}

/* compact_rows: bytes of the index before CUB's scratch: [tokens] int64 rows, and their count. */
static inline int64_t flce_index_bytes(int64_t tokens) {
  return flce_order_aligned((tokens + 1) * (int64_t)sizeof(int64_t));
}

/* order_samples: every list has slots for its target and for the most samples. Slots without an
 * entry get the key vocab, so they are last in the order. */
static inline int64_t flce_sample_slots(double eps) {
  return flce_most_samples(eps) + 1;
}

/* A class whose entries cross a boundary of a piece is summed in two steps (sampled_grads.cu), so
 * no warp adds more than a piece. At most about kPieces pieces, to bound their sums. */
static inline int64_t flce_sample_piece(int64_t count) {
  const int64_t kPieces = 2048, kLeast = 256;
  int64_t size = flce_ceil_div(count, kPieces);
  return size > kLeast ? size : kLeast;
}

/* The memory of order_samples before CUB's scratch: four arrays of uint32 for all slots, the
 * classes' starts, two rows of `hidden` sums for each piece. */
typedef struct flce_sample_sizes {
  int64_t count, pieces;                        /* slots of all lists; pieces of them */
  int64_t array_bytes, starts_bytes, sum_bytes; /* aligned */
} flce_sample_sizes;

static inline flce_sample_sizes flce_sample_sizes_of(int64_t rows, double eps, int64_t vocab,
                                                     int64_t hidden) {
  flce_sample_sizes s;
  s.count = rows * flce_sample_slots(eps);
  s.pieces = flce_ceil_div(s.count, flce_sample_piece(s.count));
  s.array_bytes = flce_order_aligned(4 * s.count);
  s.starts_bytes = flce_order_aligned(4 * (vocab + 1));
  s.sum_bytes = flce_order_aligned(8 * s.pieces * hidden);
  return s;
}

#ifdef __cplusplus
}
#endif
#endif
