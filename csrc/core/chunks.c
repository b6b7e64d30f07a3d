/* The number of rows of a chunk. Pure functions, part of the plan.
 *
 * max_memory is the upper bound. Below it, for 16-bit operands on a GPU, the choice minimizes the
 * modelled time of a loop's GEMMs. The unit of time is one multiply-add at the device's full GEMM
 * rate ("effort"). The model counts three losses: tiles run in waves, and the last wave may not be
 * full; dW is read and written once for each chunk; each chunk has its own launches and small
 * kernels. The constants were fitted to the chunk sizes of nine shapes on an H200
 * (benchmarks/NOTES.md, 2026-11-22, chunks; results/2026-11-22-h200-chunks.json). */
#include "core/chunks.h"

#include <math.h>

enum {
  SMALL_TILE_ROWS = 8, /* for chunks below TILE_ROWS: cuBLASLt and MKL are slow at odd row counts */
  MAX_TRIED = 64,      /* chunk sizes to compare; limited because every call makes a plan */
};

const gemm_tile flce_gemm_tiles[FLCE_GEMM_TILES] = {{128, 256, 1.0},  {256, 128, 1.0},
                                                    {192, 192, 1.0},  {192, 128, 1.02},
                                                    {128, 192, 1.02}, {128, 128, 1.06}};

/* The fixed cost of a chunk (launches and small kernels), 100 us on an H200. A ragged vocabulary
 * costs 50 us more, for the GEMMs of its last columns. */
static const double kChunkEffort = 0x1p35, kRaggedEffort = 0x1p34;

/* The logits GEMM of `rows` rows, in whole tiles of 128 x 192: those of FLCE_SM90 in
 * architectures.h, copied for the model of time and used for every GPU. It has many waves, so the
 * loss in the last one is taken as its mean, half a wave. */
static double logits_effort(const flce_problem* problem, const flce_facts* facts,
                            const chunk_loop* loop, int64_t rows) {
  enum { COLUMNS = 192 };
  double wave = (double)(facts->multiprocessors * TILE_ROWS * COLUMNS);
  double elements = (double)round_up(rows, loop->tile_rows) * (double)problem->shape.vocab;
  return (elements + 0.5 * wave) * (double)loop->hidden;
}

/* dX's GEMM of `rows` rows with its best tile shape and number of splits. Split-K keeps a float32
 * partial result for each split in the GEMM's workspace. */
static double chunk_dx_effort(const flce_problem* problem, const flce_facts* facts,
                              const chunk_loop* loop, int64_t rows) {
  enum { MOST_SPLITS = 3 };
  double best = INFINITY;
  for (int i = 0; i < FLCE_GEMM_TILES; i++) {
    const gemm_tile* tile = &flce_gemm_tiles[i];
    int64_t tiles = ceil_div(rows, tile->rows) * ceil_div(loop->hidden, tile->columns);
    double size = tile->effort * (double)(tile->rows * tile->columns);
    for (int64_t splits = 1; splits <= MOST_SPLITS; splits++) {
      int64_t partials = splits * rows * loop->hidden * flce_size_of(FLCE_F32);
      if (splits > 1 && partials > facts->gemm_workspace_bytes) break;
      int64_t waves = ceil_div(tiles * splits, facts->multiprocessors);
      best = fmin(best, (double)waves * size / (double)splits);
    }
  }
  return best * (double)(facts->multiprocessors * problem->shape.vocab);
}

/* dW's GEMM of `rows` rows. The mainloop hides part of the traffic of dW, more the longer it is.
 * The exposed part is a linear fit to measured GEMMs. Some of it always remains, which counts
 * where dW is large: 4096 x 16384 x 128256 took 1.6 % longer in two chunks than in one and 4 %
 * longer in four (benchmarks/NOTES.md, 2026-11-23). */
static double chunk_dw_effort(const flce_problem* problem, const chunk_loop* loop, int64_t rows) {
  double elements = (double)problem->shape.vocab * (double)loop->hidden;
  double products = elements * (double)rows;
  double moves = elements * 2.0 * (double)flce_size_of(loop->accum_dtype) * kAddsPerByte;
  double hidden_share = 0.58 * products / moves - 0.2;
  double exposed = loop->overlaps_dw ? 1.0 - fmin(fmax(hidden_share, 0.0), 0.88) : 1.0;
  return products + exposed * moves;
}

static double chunk_effort(const flce_problem* problem, const flce_facts* facts,
                           const chunk_loop* loop, int64_t rows) {
  enum { FAST_ELEMENTS = 8 }; /* 16-bit: cuBLASLt's fast kernels need multiples of 16 bytes */
  double effort = kChunkEffort + (problem->shape.vocab % FAST_ELEMENTS > 0 ? kRaggedEffort : 0.0);
  if (loop->makes_logits) effort += logits_effort(problem, facts, loop, rows);
  if (loop->makes_dx) effort += chunk_dx_effort(problem, facts, loop, rows);
  if (loop->makes_dw) effort += chunk_dw_effort(problem, loop, rows);
  return effort;
}

/* The same of a loop whose GEMMs are not those of the model above. */
static double plain_effort(const flce_problem* problem, const chunk_loop* loop, int64_t rows) {
  int64_t v = problem->shape.vocab, h = loop->hidden, size = flce_size_of(loop->dtype);
  double effort = 0.0;
  if (loop->makes_logits) effort += plain_gemm_effort(rows, v, h, size, false);
  if (loop->makes_dx) effort += plain_gemm_effort(rows, h, v, size, false);
  if (loop->makes_dw) effort += plain_gemm_effort(v, h, rows, size, true);
  return effort * (double)problem->shape.rows / (double)rows;
}

bool flce_is_modelled(const flce_facts* facts, flce_dtype dtype) {
  return facts->multiprocessors > 0 && flce_size_of(dtype) == 2;
}

double flce_chunks_effort(const flce_problem* problem, const flce_facts* facts,
                          const chunk_loop* loop, int64_t chunk_rows) {
  if (!flce_is_modelled(facts, loop->dtype)) return plain_effort(problem, loop, chunk_rows);
  int64_t chunks = ceil_div(problem->shape.rows, chunk_rows);
  int64_t last = problem->shape.rows - (chunks - 1) * chunk_rows;
  return (double)(chunks - 1) * chunk_effort(problem, facts, loop, chunk_rows) +
         chunk_effort(problem, facts, loop, last);
}

/* The rows of a chunk if there are `chunks` of about equal size, rounded up to whole tiles. (The
 * rounding may leave fewer chunks.) */
static int64_t equal_chunks(const flce_problem* problem, int64_t chunks, int64_t tile) {
  return min64(round_up(ceil_div(problem->shape.rows, chunks), tile), problem->shape.rows);
}

/* The chunk rows with the least modelled time, among `fewest` to twice as many chunks: still more
 * chunks only cost launches. With prefers_small_chunks, the smallest chunks within 1 % of the least
 * time, and the search goes on until the time exceeds it by 10 %. */
static int64_t fastest_chunks(const flce_problem* problem, const flce_facts* facts,
                              const chunk_loop* loop, int64_t tile, int64_t fewest) {
  const double kTolerance = 1.01, kStopAbove = 1.1;
  const int64_t kMostOfFewest = 2;
  bool small = loop->prefers_small_chunks;
  int64_t rows[MAX_TRIED];
  double effort[MAX_TRIED], least = INFINITY;
  int tried = 0;
  for (int64_t chunks = fewest; tried < MAX_TRIED; chunks++) {
    if (!small && chunks > kMostOfFewest * fewest) break;
    int64_t size = equal_chunks(problem, chunks, tile);
    if (tried > 0 && size == rows[tried - 1]) {
      if (size <= tile) break;
      continue;
    }
    rows[tried] = size;
    effort[tried] = flce_chunks_effort(problem, facts, loop, size);
    least = fmin(least, effort[tried]);
    if (effort[tried++] > kStopAbove * least) break;
  }
  int chosen = 0;
  for (int i = 0; i < tried; i++)
    if (effort[i] <= least * (small ? kTolerance : 1.0) && (small || effort[i] < effort[chosen]))
      chosen = i;
  return rows[chosen];
}

/* The rows of which a chunk should be a multiple, if at most `fit` rows fit the budget. */
static int64_t tile_of(const chunk_loop* loop, int64_t fit) {
  int64_t tile = 1;
  if (fit >= SMALL_TILE_ROWS) tile = SMALL_TILE_ROWS;
  if (fit >= TILE_ROWS) tile = TILE_ROWS;
  return loop->tile_rows > tile && fit >= loop->tile_rows ? loop->tile_rows : tile;
}

/* The most rows of a chunk. With few classes and a large H the scratch of fused_logits and the copy
 * of x may take more of row_bytes than the logits: up to TILE_ROWS rows whose logits alone fit
 * max_memory are allowed all the same. */
static flce_status fitting_rows(const flce_problem* problem, const chunk_loop* loop, int64_t* fit) {
  int64_t of_logits = loop->max_memory / max64(loop->logits_bytes, 1);
  int64_t of_all = loop->max_memory / max64(loop->row_bytes, 1);
  /* With derived.chunk_rows a row of an equal share fits: a rank with more classes must not refuse
   * what the others run. A rank without a class has no logits. */
  if (of_logits < 1 && problem->derived.chunk_rows == 0)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "max_memory: expected at least one row of logits, %lld bytes, got %lld",
                     (long long)loop->logits_bytes, (long long)loop->max_memory);
  *fit = min64(max64(of_all, min64(max64(of_logits, 1), TILE_ROWS)), loop->max_rows);
  return FLCE_OK;
}

flce_status choose_chunk_rows(const flce_problem* problem, const flce_facts* facts,
                              const chunk_loop* loop, int64_t* chunk_rows, int64_t* chunks) {
  *chunk_rows = *chunks = 0;
  if (problem->shape.rows == 0) return FLCE_OK;
  int64_t fit = 0;
  FLCE_TRY(fitting_rows(problem, loop, &fit));
  int64_t tile = tile_of(loop, fit);
  int64_t fewest =
      fit >= problem->shape.rows ? 1 : ceil_div(problem->shape.rows, fit / tile * tile);
  bool modelled = flce_is_modelled(facts, loop->dtype) && tile >= TILE_ROWS &&
                  (loop->makes_dx || loop->prefers_small_chunks);
  *chunk_rows = problem->shape.rows;
  *chunks = 1;
  if (fewest == 1 && !(modelled && loop->prefers_small_chunks)) return FLCE_OK;
  *chunk_rows = modelled ? fastest_chunks(problem, facts, loop, tile, fewest)
                         : equal_chunks(problem, fewest, tile);
  *chunks = ceil_div(problem->shape.rows, *chunk_rows);
  return FLCE_OK;
}
