/* Whether gradients are made by blocks of rows and classes, whether these are in the memory of dW,
 * and the shape of a block. Pure functions, part of the plan.
 *
 * A loop over chunks of all classes reads and writes dW once for each chunk, which is most of its
 * time where max_memory holds few rows. A loop over blocks computes the logits once more, after a
 * pass for the statistics, and reads and writes dW once for many more rows. In the memory of dW
 * (dw_memory.h) most of dW is written once: with dX first, where the pass for the statistics makes
 * dX, too; or after a forward that kept the statistics, with the sum of dX there. The unit of time
 * is that of chunks.c. The constants were fitted to the block shapes of six heads on an H100
 * (benchmarks/NOTES.md, 2026-11-27, blocks). */
#include "core/blocks.h"

#include "core/dw_memory.h"
#include "core/plan_rules.h"

#include <math.h>

enum {
  /* cluster_rows of FLCE_SM90 in architectures.h, copied for the model of time; so is kFusedTile.
   */
  CLUSTER_ROWS = 256,
  /* LEAST_BYTES: below it max_memory bounds a block's logits alone, not its rows of dX and x.
   * LEAST_LOGITS_BYTES: what a block with the fewest rows may have of logits in addition to these
   * rows, within max_memory. Both are half for blocks after those in the memory of dW that make
   * no dX (fastest_in_dw). */
  LEAST_BYTES = 32 << 20,
  LEAST_LOGITS_BYTES = 16 << 20,
  SMALL_ROW_STEP = 8,
};

/* Launches of a block's GEMMs and row pass, 12 us on an H100. */
static const double kBlockEffort = 0x1p32;
/* The part of the row pass's traffic that is not hidden: a block's logits are in the L2 cache. */
static const double kRowPassShare = 0.5;
/* Where the GEMMs are not modelled, both gradients are made in the memory of dW only if that takes
 * less than this share of the time of the other loops: the caches of a CPU are not in the effort,
 * and where it said 0.97 to 0.99 this was up to 4 % slower (one thread, 2026-11-28). */
static const double kClearlyLess = 0.95;

bool flce_may_use_blocks(const flce_problem* problem, const flce_facts* facts,
                         const flce_plan* plan) {
  bool grads = plan->strategy == FLCE_SAVE_GRADS, stats = plan->strategy == FLCE_SAVE_STATS;
  bool asks = facts->asks_block || !problem->memory.bound_is_default;
  bool reads_logits = (grads && (plan->finds_classes || plan->sums_tail)) || plan->is_divergence;
  return asks && (grads || stats) && !reads_logits && !problem->has.logits &&
         makes_gradients(problem, plan) && problem->shape.rows > 0 && problem->shape.vocab > 0;
}

/* What the model and the memory of a block depend on. */
typedef struct block_loop {
  const flce_problem* problem;
  const flce_facts* facts;
  const flce_plan* plan;
  int64_t classes;         /* of all blocks */
  bool makes_dx, makes_dw; /* what the blocks make */
  bool modelled;           /* see flce_is_modelled */
  bool fuses;              /* E of a block comes from fused_exp */
  flce_dtype accum_dtype;  /* of the sum of dW over chunks of rows */
  int64_t fewest_rows;     /* of a block; see choose_dw_sum */
  int64_t least_bytes, least_logits_bytes;
  int64_t copies_row_bytes; /* of a row of the copies of x */
  int64_t row_bytes; /* these and dX in the stat dtype; not logits and fused_exp's small scratch */
  int64_t z_size;    /* bytes of a logit */
  /* In the memory of dW the loop has only the classes after those of blocks over all rows. */
  const struct whole_blocks* whole; /* these blocks; NULL for a loop over all classes */
  int fewest_whole;                 /* at least so many of them */
  int64_t sum_row_bytes;            /* of a row of dX's sum in the memory of dW, or 0 */
} block_loop;

static block_loop loop_of(const flce_problem* problem, const flce_facts* facts,
                          const flce_plan* plan) {
  int64_t size = flce_size_of(plan->dtype), stat = flce_size_of(flce_stat_dtype(plan->dtype));
  /* Not copies_logits_input: `plan` is that of chunks, and blocks skip no rows (choose_gathers). */
  bool copies = problem->shape.rows < problem->shape.tokens || plan->input_pitch != plan->hidden;
  int64_t copies_row_bytes = copies ? plan->input_pitch * size : 0;
  if (problem->wants.grad_weight && copies_weight_input(problem, plan))
    copies_row_bytes += plan->hidden * size;
  int64_t sum = problem->wants.grad_input ? plan->hidden * stat : 0;
  bool fuses = may_fuse_blocks(facts, plan);
  bool wide = facts->gemm_writes_f32 && problem->dtypes.logits != plan->dtype && !fuses;
  return (block_loop){.problem = problem,
                      .facts = facts,
                      .plan = plan,
                      .classes = problem->shape.vocab,
                      .makes_dx = problem->wants.grad_input,
                      .makes_dw = problem->wants.grad_weight,
                      .fuses = fuses,
                      .modelled = flce_is_modelled(facts, plan->dtype),
                      .accum_dtype = narrow_sum_dtype(problem, plan),
                      .fewest_rows = 1,
                      .least_bytes = LEAST_BYTES,
                      .least_logits_bytes = LEAST_LOGITS_BYTES,
                      .row_bytes = copies_row_bytes + sum,
                      .copies_row_bytes = copies_row_bytes,
                      .z_size = wide ? stat : size};
}

/* The time of a GEMM: the least over `shapes`, each in waves of whole tiles. */
static double tiled_effort(const block_loop* loop, const gemm_tile* shapes, int number, int64_t m,
                           int64_t n, int64_t k) {
  double best = INFINITY, units = (double)loop->facts->multiprocessors;
  for (int i = 0; i < number; i++) {
    int64_t tiles = ceil_div(m, shapes[i].rows) * ceil_div(n, shapes[i].columns);
    int64_t waves = ceil_div(tiles, loop->facts->multiprocessors);
    double size = shapes[i].effort * (double)(shapes[i].rows * shapes[i].columns);
    best = fmin(best, (double)waves * size);
  }
  return best * units * (double)k;
}

/* That of Hopper's fused_exp, whose clusters have two tiles along the rows. */
static const gemm_tile kFusedTile = {128, 192, 1.0};

/* The effort of a GEMM with an m x n result of elements of `size` bytes. `sums`: it adds to the
 * result, whose traffic counts in full, as the mainloops of blocks do not hide it. */
static double gemm_effort(const block_loop* loop, int64_t m, int64_t n, int64_t k, int64_t size,
                          bool sums) {
  if (!loop->modelled) return plain_gemm_effort(m, n, k, size, sums);
  double effort = tiled_effort(loop, flce_gemm_tiles, FLCE_GEMM_TILES, m, n, k);
  double moved = (double)m * (double)n * 2.0 * (double)size;
  return sums ? effort + moved * kAddsPerByte : effort;
}

/* E or dz of a block, with its launches. */
static double exp_effort(const block_loop* loop, int64_t rows, int64_t classes) {
  int64_t h = loop->plan->hidden;
  double effort = loop->modelled ? kBlockEffort : 0.0;
  if (loop->fuses && loop->modelled)
    return effort + tiled_effort(loop, &kFusedTile, 1, round_up(rows, CLUSTER_ROWS), classes, h);
  effort += gemm_effort(loop, rows, classes, h, loop->z_size, false);
  if (loop->fuses) return effort;
  double moved =
      (double)rows * (double)classes * (double)(loop->z_size + flce_size_of(loop->plan->dtype));
  return effort + kRowPassShare * moved * (loop->modelled ? kAddsPerByte : kSlowAddsPerByte);
}

static double dw_effort(const block_loop* loop, int64_t rows, int64_t classes, bool sums) {
  if (!loop->makes_dw) return 0.0;
  int64_t size = flce_size_of(loop->accum_dtype);
  return gemm_effort(loop, classes, loop->plan->weight_hidden, rows, size, sums);
}

/* dX of a block, added to its sum over blocks. */
static double dx_effort(const block_loop* loop, int64_t rows, int64_t classes) {
  if (!loop->makes_dx) return 0.0;
  int64_t stat = flce_size_of(flce_stat_dtype(loop->plan->dtype));
  return gemm_effort(loop, rows, loop->plan->hidden, classes, stat, true);
}

static double block_effort(const block_loop* loop, block_shape block) {
  return exp_effort(loop, block.rows, block.classes) + dx_effort(loop, block.rows, block.classes) +
         dw_effort(loop, block.rows, block.classes, true);
}

/* The pass for the statistics, which a loop over chunks of save=grads does not need: there the
 * logits are computed once. */
static double statistics_effort(const block_loop* loop) {
  const flce_problem* problem = loop->problem;
  if (loop->plan->strategy != FLCE_SAVE_GRADS) return 0.0;
  int64_t n = problem->shape.rows, v = problem->shape.vocab, h = loop->plan->hidden;
  return gemm_effort(loop, n, v, h, loop->z_size, false);
}

/* classes[k] and effort[k]: the classes of the first k blocks over all rows, and their time. */
enum { MOST_WHOLE_BLOCKS = 128 };
typedef struct whole_blocks {
  int number;
  int64_t classes[MOST_WHOLE_BLOCKS + 1];
  double effort[MOST_WHOLE_BLOCKS + 1];
} whole_blocks;

/* The logits that are computed once more with FLCE_BLOCKS_IN_DW: those of a chunk of rows and of
 * the classes whose memory has the sum of dX of that chunk and of those after it. */
static double again_effort(const block_loop* loop, const block_shape* block) {
  if (loop->sum_row_bytes == 0) return 0.0;
  double n = (double)loop->problem->shape.rows, rows = (double)block->rows, chunks = ceil(n / rows);
  double unfinished = chunks * n - rows * chunks * (chunks - 1.0) / 2.0; /* rows, of all chunks */
  double classes =
      unfinished * (double)loop->sum_row_bytes / (double)flce_dw_class_bytes(loop->plan);
  return classes / (double)block->classes * exp_effort(loop, block->rows, block->classes);
}

/* The time of the loop, with the number of blocks over all rows that takes the least; sets
 * block->whole_classes to their classes. */
static double loop_effort(const block_loop* loop, block_shape* block) {
  double of_classes =
      (double)ceil_div(loop->problem->shape.rows, block->rows) * block_effort(loop, *block);
  const whole_blocks* whole = loop->whole;
  if (!whole) return (double)ceil_div(loop->classes, block->classes) * of_classes;
  double least = INFINITY;
  for (int k = loop->fewest_whole; k <= whole->number && whole->effort[k] < least; k++) {
    int64_t left = loop->problem->shape.vocab - whole->classes[k];
    double effort = whole->effort[k] + (double)ceil_div(left, block->classes) * of_classes;
    if (effort >= least) continue;
    least = effort;
    block->whole_classes = whole->classes[k];
  }
  return least + again_effort(loop, block);
}

/* `rows`, rounded up to whole tiles where they are more than one, at most all. */
static int64_t whole_tiles(const block_loop* loop, int64_t rows) {
  int64_t tile = loop->fuses ? CLUSTER_ROWS : TILE_ROWS;
  return min64(round_up(rows, rows > tile ? tile : SMALL_ROW_STEP), loop->problem->shape.rows);
}

/* Bound of a block's logits and its rows of dX and x together; max_memory itself bounds the logits.
 */
static int64_t most_bytes(const block_loop* loop) {
  return max64(loop->problem->memory.bound, loop->least_bytes);
}

/* By default dW is summed in 16 bits, by blocks of at least as many rows as the chunks without
 * max_memory have (default_rows), so that it is rounded no more often. Blocks sum in the stat dtype
 * only if chunks of all classes would, and if those rows need more bytes than that sum and than
 * max_memory. */
static void choose_dw_sum(block_loop* loop, int64_t default_rows) {
  const flce_problem* problem = loop->problem;
  flce_dtype stat = flce_stat_dtype(loop->plan->dtype);
  bool widens = problem->dtypes.widens_accum && problem->wants.grad_weight;
  if (!widens || loop->accum_dtype == stat) return;
  int64_t not_widened = ceil_div(problem->shape.rows, FLCE_WIDE_SUM_CHUNKS - 1);
  int64_t rows = whole_tiles(loop, max64(not_widened, default_rows));
  int64_t bytes = rows * loop->row_bytes;
  /* A padded dW has a sum of its own in any dtype. */
  bool padded = loop->plan->hidden != problem->shape.hidden;
  int64_t element = flce_size_of(stat) - (padded ? flce_size_of(loop->accum_dtype) : 0);
  int64_t sum = problem->shape.vocab * loop->plan->weight_hidden * element;
  if (loop->plan->accum_dtype == stat && bytes > max64(sum, most_bytes(loop)))
    loop->accum_dtype = stat;
  else
    loop->fewest_rows = rows;
}

/* The most classes of a block of so many rows; 0 if there are too few. max_memory bounds its logits
 * and, from LEAST_BYTES on, also its rows of dX and x, unless it has the fewest rows. */
static int64_t fitting_classes(const block_loop* loop, int64_t rows) {
  int64_t bound = loop->problem->memory.bound;
  int64_t left = most_bytes(loop) - rows * loop->row_bytes;
  if (rows <= loop->fewest_rows) left = max64(left, loop->least_logits_bytes);
  int64_t steps = min64(left, bound) / (rows * loop->z_size) / FLCE_BLOCK_CLASS_STEP;
  return min64(max64(steps, 0) * FLCE_BLOCK_CLASS_STEP,
               round_up(loop->classes, FLCE_BLOCK_CLASS_STEP));
}

/* The next smaller number of classes worth a try: that whose logits GEMM fills its last wave of
 * tiles. */
static int64_t fewer_classes(const block_loop* loop, int64_t rows, int64_t classes) {
  int64_t units = loop->facts->multiprocessors, columns = loop->fuses ? kFusedTile.columns : 256;
  if (!loop->modelled) return classes / 2 / FLCE_BLOCK_CLASS_STEP * FLCE_BLOCK_CLASS_STEP;
  int64_t of_column = round_up(rows, loop->fuses ? CLUSTER_ROWS : TILE_ROWS) / TILE_ROWS;
  int64_t full_waves = (ceil_div(classes, columns) * of_column - 1) / units;
  return full_waves * units / of_column * columns;
}

/* The numbers of chunks of rows that are tried: 1 to 8, then about an eighth more each time. */
static int64_t next_number(int64_t chunks) {
  return chunks + max64(chunks / 8, 1);
}

/* The blocks of a loop that take the least time, if less than `least`, and more rows than
 * `chunk_rows`. Returns that time, or INFINITY. */
static double fastest_blocks(const block_loop* loop, double least, int64_t chunk_rows,
                             block_shape* block) {
  enum { MOST_CHUNKS = 1024, SIZES = 5 };
  int64_t n = loop->problem->shape.rows;
  double found = INFINITY;
  for (int64_t number = 1; number <= MOST_CHUNKS; number = next_number(number)) {
    int64_t rows = max64(whole_tiles(loop, ceil_div(n, number)), loop->fewest_rows);
    if (rows <= chunk_rows) break;
    int64_t fit = fitting_classes(loop, rows);
    for (int size = 0; size < SIZES && fit >= FLCE_BLOCK_CLASS_STEP; size++) {
      block_shape tried = {.blocks = FLCE_BLOCKS_IN_WORKSPACE, .rows = rows, .classes = fit};
      double effort = loop_effort(loop, &tried);
      if (effort < least) {
        least = found = effort;
        *block = tried;
      }
      fit = fewer_classes(loop, rows, fit);
    }
    if (rows <= max64(SMALL_ROW_STEP, loop->fewest_rows)) break;
  }
  return found;
}

/* ---- in the memory of dW ---- */

/* As flce_memory_of_dw, before there is a plan with blocks: these leave row_bytes and their scratch
 * for each row at the end of dW. */
static dw_memory memory_of(const block_loop* loop, int64_t row_bytes) {
  const flce_plan* plan = loop->plan;
  int64_t n = loop->problem->shape.rows,
          size = loop->fuses ? flce_size_of(plan->dtype) : loop->z_size;
  dw_memory memory = {.classes = loop->problem->shape.vocab,
                      .row = flce_dw_class_bytes(plan),
                      .logits_class = n * size};
  int64_t scratch = loop->fuses ? flce_whole_scratch_row(loop->facts, &memory) : 0;
  memory.row_buffers = n * (row_bytes + scratch);
  return memory;
}

/* Writing E of so many classes to the memory. */
static double writing_effort(const block_loop* loop, int64_t classes) {
  int64_t written = loop->problem->shape.rows * classes * flce_size_of(loop->plan->dtype);
  return (double)written * (loop->modelled ? kAddsPerByte : kSlowAddsPerByte);
}

static void list_whole_blocks(const block_loop* loop, const dw_memory* memory,
                              whole_blocks* whole) {
  int64_t n = loop->problem->shape.rows, first = 0;
  double effort = 0.0;
  int k = 0;
  for (;; k++) {
    whole->classes[k] = first;
    whole->effort[k] = effort;
    int64_t classes = flce_whole_block_classes(memory, first);
    if (classes == 0 || k == MOST_WHOLE_BLOCKS) break;
    effort += exp_effort(loop, n, classes) + dx_effort(loop, n, classes) +
              dw_effort(loop, n, classes, false);
    /* E of blocks in the workspace stays in the cache; that of these, which are larger, does not.
     * With dX first (save=grads), choose_dx_first counts it. */
    if (loop->plan->strategy == FLCE_SAVE_STATS) effort += writing_effort(loop, classes);
    first += classes;
  }
  whole->number = k;
}

/* Blocks over all rows in the memory of dW and, of the other classes, blocks in the workspace,
 * where their rows have no dX. row_bytes: what each row has at the end of dW, without the scratch.
 * Returns the time of all blocks, or INFINITY. */
static double fastest_in_dw(block_loop loop, int64_t row_bytes, const chunk_alternative* chunks,
                            block_shape* block) {
  whole_blocks whole;
  const dw_memory memory = memory_of(&loop, row_bytes);
  loop.row_bytes = loop.copies_row_bytes;
  if (!loop.makes_dx) {
    loop.least_bytes /= 2;
    loop.least_logits_bytes /= 2;
  }
  choose_dw_sum(&loop, chunks->default_rows);
  if (!flce_dw_is_free(loop.problem, loop.plan, loop.accum_dtype)) return INFINITY;
  /* About the classes that are left after the blocks over all rows. */
  int64_t left = (memory.row_buffers + FLCE_BLOCK_CLASS_STEP * memory.logits_class) / memory.row;
  loop.classes = min64(max64(left, FLCE_BLOCK_CLASS_STEP), memory.classes);
  list_whole_blocks(&loop, &memory, &whole);
  if (whole.number < loop.fewest_whole) return INFINITY;
  loop.whole = &whole;
  return fastest_blocks(&loop, INFINITY, 0, block);
}

/* The blocks of dW after a pass for dX. Returns the time of both, or INFINITY. */
static double choose_dx_first(block_loop loop, const chunk_alternative* chunks,
                              block_shape* block) {
  bool one_chunk = chunks->rows >= loop.problem->shape.rows;
  if (one_chunk || isinf(chunks->dx_effort)) return INFINITY;
  loop.makes_dx = false;
  double effort = fastest_in_dw(loop, loop.copies_row_bytes, chunks, block);
  block->blocks = FLCE_BLOCKS_DX_FIRST;
  /* E is written twice, the other loops write it once. */
  return chunks->dx_effort + effort + writing_effort(&loop, loop.classes);
}

/* Whether the backward of `plan` may have FLCE_BLOCKS_IN_DW. */
static bool may_be_in_dw(const flce_plan* plan, const chunk_alternative* chunks) {
  return chunks->dw_is_free && plan->strategy == FLCE_SAVE_STATS;
}

/* The blocks of both gradients after a forward that kept the statistics. Returns their time, or
 * INFINITY. */
static double choose_in_dw(block_loop loop, const chunk_alternative* chunks, block_shape* block) {
  const flce_problem* problem = loop.problem;
  const flce_plan* plan = loop.plan;
  bool one_chunk = chunks->rows >= problem->shape.rows;
  if (one_chunk || !may_be_in_dw(plan, chunks)) return INFINITY;
  bool gathers = problem->shape.rows < problem->shape.tokens; /* as choose_gathers with blocks */
  flce_dx_use use = flce_use_of_dx(problem, plan, gathers);
  int64_t row_bytes = loop.copies_row_bytes;
  if (use == FLCE_DX_HAS_SCALED_X) row_bytes -= plan->hidden * flce_size_of(plan->dtype);
  loop.sum_row_bytes = flce_sum_row_bytes(problem, plan, use);
  loop.fewest_whole = 1;
  double effort = fastest_in_dw(loop, row_bytes + loop.sum_row_bytes, chunks, block);
  block->blocks = FLCE_BLOCKS_IN_DW;
  return effort;
}

/* FLCE_BLOCKS. */
static block_shape asked_block(const block_loop* loop, const chunk_alternative* chunks) {
  const flce_facts* facts = loop->facts;
  int64_t all = round_up(loop->classes, FLCE_BLOCK_CLASS_STEP);
  if (facts->asked_classes == 0) return (block_shape){0};
  block_shape block = {.blocks = FLCE_BLOCKS_IN_WORKSPACE,
                       .rows = min64(facts->asked_rows, loop->problem->shape.rows),
                       .classes = min64(facts->asked_classes, all),
                       .whole_classes = loop->classes};
  if (!facts->asks_dw_memory) return block;
  if (!isinf(chunks->dx_effort)) block.blocks = FLCE_BLOCKS_DX_FIRST;
  if (may_be_in_dw(loop->plan, chunks)) block.blocks = FLCE_BLOCKS_IN_DW;
  return block;
}

void flce_choose_block(const flce_problem* problem, const flce_facts* facts, const flce_plan* plan,
                       const chunk_alternative* chunks, block_shape* block) {
  block_loop loop = loop_of(problem, facts, plan);
  *block = (block_shape){0};
  if (facts->asks_block) {
    *block = asked_block(&loop, chunks);
    return;
  }
  block_shape dx_first = {0}, in_dw = {0};
  double of_dx_first = choose_dx_first(loop, chunks, &dx_first);
  double of_in_dw = choose_in_dw(loop, chunks, &in_dw);
  choose_dw_sum(&loop, chunks->default_rows);
  /* Where chunks would sum dW in the stat dtype and blocks not, chunks are no choice: that sum
   * takes more memory than max_memory saves. */
  bool widens = plan->accum_dtype != loop.accum_dtype;
  double of_chunks = widens ? INFINITY : chunks->effort, statistics = statistics_effort(&loop);
  double least = fastest_blocks(&loop, of_chunks - statistics, chunks->rows, block) + statistics;
  least = fmin(least, of_chunks);
  if (of_dx_first < least) *block = dx_first;
  if (of_in_dw < least * (loop.modelled ? 1.0 : kClearlyLess)) *block = in_dw;
}
