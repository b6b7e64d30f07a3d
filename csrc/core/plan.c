/* flce_plan_make: what follows from the device's facts and the problem, whose `save` is no longer
 * auto (strategy.c). Pure: no allocation, no device call.
 *
 * The order is that of this file. Each part reads what the parts before it have set in the plan:
 *
 *   sizes            the GEMMs' dtype, padded sizes, what a forward reads its logits for
 *   form             what the gradient GEMMs read, E or dz: it decides most of what follows
 *   matrices         who computes the logits (fused_logits or a GEMM), their dtype and pitch, what
 *                    overwrites them and what is saved of them
 *   gradients        dtypes of dX, dW and db: where they are kept and where the GEMMs write them
 *   the sum of dW    over chunks: in which dtype, and by which kernel
 *   chunks           their rows, from the bytes of a row (chunks.c). Over many chunks dW is summed
 *                    in a wider dtype: this part may still change accum_dtype
 *   copies of x      where a chunk's rows of x are copied to
 *
 * From all of these follow the buffers and their offsets (buffers.c), and the costs
 * (plan_counts.c).
 *
 * All of this is done for chunks of all classes first. Where gradients may be made by blocks of
 * rows and classes, flce_plan_checked compares the times of both (blocks.c) and, if blocks are
 * faster, makes the plan again with blocks, block_rows and block_classes set before everything
 * else: hence by_blocks() in each part. */
#include "core/plan.h"

#include "core/blocks.h"
#include "core/buffers.h"
#include "core/dw_memory.h"
#include "core/plan_counts.h"
#include "core/plan_rules.h"

#include "loss.h"

#include <math.h>
#include <string.h>

enum {
  /* The most rows of a chunk of which only statistics are computed, if it is gathered or gradients
   * are made by blocks. Larger chunks would not read W less often, which is read once for every
   * 2048 or 4096 rows anyway, and the copy of x and the scratch stay small. */
  STATISTICS_ROWS = 4096,
  /* Up to so many classes, a chunk's rows of dX and x take as much memory as its logits. Then, if
   * all logits in the GEMMs' dtype have at least SMALL_VOCAB_BYTES, a chunk, the GEMMs' workspace
   * and the TOKEN_BYTES of all tokens take together no more than all logits: no more than an eager
   * loss. Where TOKEN_BYTES are over half of all logits less the workspace, a chunk takes as much
   * as they do. */
  SMALL_VOCAB = 8192,
  SMALL_VOCAB_BYTES = 128 << 20,
  /* About the bytes of a token's statistics, coefficients, target order and index. */
  TOKEN_BYTES = 128,
  /* Bytes of FLCE_BUF_GEMM_PIECE: add_block reads it from the cache. */
  GEMM_PIECE_BYTES = 4 << 20,
  /* max_memory by default, on devices with 8 GiB or more. */
  DEFAULT_BYTES = 1 << 30,
  /* The logits of a chunk by default where no gradients are made and something reads them, on a
   * GPU: LOSS_BYTES, or LOSS_ROWS rows where these take more. More rows save launches alone: there
   * is no dW that each chunk would read and write. */
  LOSS_BYTES = 192 << 20,
  LOSS_ROWS = 512,
};

/* True if a GEMM with operands of plan->dtype can write a result of `dtype`. */
static bool gemm_writes(const flce_plan* plan, const flce_facts* facts, flce_dtype dtype) {
  return dtype == plan->dtype ||
         (dtype == FLCE_F32 && facts->gemm_writes_f32 && flce_size_of(plan->dtype) == 2);
}

/* ---- sizes ---- */

static void choose_sizes(const flce_problem* problem, const flce_facts* facts, flce_plan* plan) {
  plan->dtype =
      problem->dtypes.gemm == FLCE_F16 && !facts->gemm_f16 ? FLCE_F32 : problem->dtypes.gemm;
  plan->hidden = round_up(problem->shape.hidden, facts->hidden_alignment);
  plan->weight_hidden = plan->hidden - problem->shape.frozen_hidden;
  plan->input_pitch = round_up(plan->hidden, facts->input_alignment);
  plan->finds_classes = problem->wants.topk > 0;
  plan->sums_tail = problem->wants.tail;
  plan->is_divergence = problem->divergence.kind != FLCE_NO_DIVERGENCE;
  plan->draws_from_dz =
      plan->is_divergence && problem->sampling.wanted && plan->strategy == FLCE_SAVE_GRADS;
}

/* ---- form ---- */

/* The form of the forward. Label smoothing, the gradients of entropy and class logits from saved E,
 * and top-k need the l of every class, which E gives as c + log E. With a softcap E includes its
 * slope, and does not give l. */
static flce_form choose_form(const flce_problem* problem, const flce_plan* plan) {
  if (plan->strategy == FLCE_SAVE_SAMPLES) return FLCE_FORM_EXP;
  bool differentiates_saved = (problem->wants.entropy_gradient || problem->wants.class_gradient) &&
                              plan->strategy == FLCE_SAVE_LOGITS;
  bool reads_l_from_e =
      problem->loss.label_smoothing > 0.0 || differentiates_saved || problem->wants.topk > 0;
  bool dz = plan->dtype == FLCE_F16 || problem->has.probabilities || problem->wants.tail ||
            plan->is_divergence || (flce_caps_logits(&problem->loss) && reads_l_from_e);
  return dz ? FLCE_FORM_DZ : FLCE_FORM_EXP;
}

/* The form of the forward, and in a backward with gradients that E cannot give: dz. */
static flce_form choose_form_of_pass(const flce_problem* problem, const flce_plan* plan) {
  bool needs_dz = (problem->backward.has_grad_entropy || problem->backward.has_grad_classes) &&
                  plan->strategy != FLCE_SAVE_SAMPLES;
  return needs_dz ? FLCE_FORM_DZ : choose_form(problem, plan);
}

/* True if dz cannot be computed from E: the softcap's slope and probability targets need the logit,
 * and exp(l - TAIL_LSE) of a class in the tail may be large where E has underflowed. */
static bool needs_logits(const flce_problem* problem) {
  return problem->has.probabilities || problem->wants.tail || flce_caps_logits(&problem->loss);
}

/* ---- matrices: logits, E or dz, and what is saved ---- */

/* True if fused_logits produces what the strategy reads: E, only statistics, or float32 logits. dz
 * is a difference that may cancel, so it has to be computed from the same logits as the statistics,
 * or from others that are as exact. */
static bool fused_gemm_serves(const flce_problem* problem, const flce_facts* facts,
                              const flce_plan* plan) {
  bool reads_more_than_statistics = !only_statistics(plan), again = recomputes_logits(plan);
  if (plan->form == FLCE_FORM_EXP) return true; /* it writes E, or only statistics */
  if (plan->strategy == FLCE_SAVE_NOTHING && !reads_more_than_statistics) return true;
  if (plan->z_dtype != FLCE_F32) return false; /* it writes z in float32 alone */
  /* Probability targets may be almost equal to p: dz needs the logits of the statistics. */
  if (again && problem->has.probabilities) return false;
  /* Another GEMM computes the logits that dz is made of, in float32: exact enough. */
  if (again && !reads_more_than_statistics) return true;
  /* With dX first the forward reads logits, too. plan->gemm_adds_bias is one flag for fused_logits,
   * which adds the bias, and for the GEMM that computes the logits again, which then has to. */
  if (again && problem->has.bias && !facts->gemm_adds_bias) return false;
  /* save=logits then keeps E, which a row pass makes from the logits of the statistics. */
  bool saves_e = plan->strategy == FLCE_SAVE_LOGITS && !needs_logits(problem);
  return facts->fused_writes_z && !saves_e;
}

static int64_t aligned_pitch(const flce_problem* problem, const flce_facts* facts,
                             flce_dtype dtype) {
  return round_up(problem->shape.vocab, facts->row_alignment / flce_size_of(dtype));
}

/* The dtypes and leading dimensions of the logits and of what overwrites them; who writes them. */
static void choose_logits_matrix(const flce_problem* problem, const flce_facts* facts,
                                 flce_plan* plan) {
  bool exp_form = plan->form == FLCE_FORM_EXP;
  bool narrow = (exp_form || plan->draws_from_dz) && plan->dtype == FLCE_F16;
  plan->exp_dtype = narrow ? FLCE_BF16 : plan->dtype;
  flce_dtype wanted = narrow ? FLCE_F32 : problem->dtypes.logits;
  plan->z_dtype = gemm_writes(plan, facts, wanted) ? wanted : plan->dtype;
  plan->fuses_rows = facts->fused_row_bytes > 0 && fused_gemm_serves(problem, facts, plan);
  plan->fuses_blocks = by_blocks(plan) && may_fuse_blocks(facts, plan);
  plan->packs = plan->fuses_rows && facts->fused_packs && plan->strategy == FLCE_SAVE_GRADS;
  /* If so, fused_logits writes no logits; the logits buffer, if there is one, holds E. */
  bool makes_e = plan->fuses_rows && exp_form && (!recomputes_logits(plan) || makes_dx_first(plan));
  if (makes_e) plan->z_dtype = plan->exp_dtype;
  plan->z_pitch = aligned_pitch(problem, facts, plan->z_dtype);
  plan->out_pitch = aligned_pitch(problem, facts, plan->dtype);
  bool fused_adds = plan->fuses_rows && !exp_form && !only_statistics(plan);
  bool adds_bias = fused_adds || (facts->gemm_adds_bias && plan->z_dtype == FLCE_F32);
  plan->gemm_adds_bias = problem->has.bias && adds_bias;
}

/* What save=logits keeps: E if the gradients follow from it, also in form dz, because for float16
 * it has half the bytes of float32 logits. */
static void choose_saved(const flce_problem* problem, flce_plan* plan) {
  bool keeps = plan->strategy == FLCE_SAVE_LOGITS;
  if (plan->strategy == FLCE_SAVE_SAMPLES) {
    plan->saved_dtype = FLCE_F32; /* the lists: int32 has its size */
    plan->saved_pitch = flce_sample_pitch(problem->sampling.eps);
  } else {
    plan->saves_exp = plan->form == FLCE_FORM_EXP || !needs_logits(problem);
    plan->saved_dtype = plan->saves_exp ? plan->dtype : plan->z_dtype;
    plan->saved_pitch = plan->saves_exp ? plan->out_pitch : plan->z_pitch;
  }
  plan->z_in_saved = keeps && plan->z_dtype == plan->saved_dtype;
  plan->dz_in_saved = keeps && plan->form == FLCE_FORM_DZ && problem->backward.consumes_saved;
}

void flce_choose_logits(const flce_problem* problem, const flce_facts* facts, flce_plan* plan) {
  choose_sizes(problem, facts, plan);
  plan->form = choose_form_of_pass(problem, plan);
  choose_logits_matrix(problem, facts, plan);
  choose_saved(problem, plan);
}

/* ---- gradients ---- */

static void choose_gathers(const flce_problem* problem, const flce_facts* facts, flce_plan* plan) {
  /* This must not depend on fuses_rows, which depends on the alignment of addresses: forward and
   * backward have to agree on the order of the rows of E. */
  bool skips = flce_is_sharded(problem) ? problem->derived.gathers : facts->skips_rows;
  skips = skips && !by_blocks(plan); /* the GEMMs of a block skip no rows */
  bool forward_exp = choose_form(problem, plan) == FLCE_FORM_EXP;
  plan->gathers = problem->shape.rows < problem->shape.tokens || (skips && forward_exp);
}

/* With save=grads only in float16, where the backward divides by the loss scale
 * (FLCE_SCALAR_LOSS_SCALE). */
static bool backward_reads_statistics(const flce_plan* plan) {
  bool is_scaled = plan->strategy == FLCE_SAVE_GRADS && plan->dtype == FLCE_F16;
  return flce_has_backward(plan->strategy) || is_scaled;
}

static flce_dtype kept_dtype(const flce_plan* plan, flce_dtype dtype) {
  /* With save=grads, float16 gradients are computed before grad_output (a GradScaler's 65536) is
   * known. They are kept in float32, and rounded after they are multiplied by grad_output. */
  return plan->strategy == FLCE_SAVE_GRADS && dtype == FLCE_F16 ? FLCE_F32 : dtype;
}

/* The exception to kept_dtype is dW, the largest gradient. It is kept in float16, times
 * FLCE_SCALAR_DW_SCALE, with which no sum overflows and what underflows is negligible. */
static bool keeps_fp16_dw(const flce_problem* problem, const flce_plan* plan) {
  bool asks_f32 = problem->dtypes.accum != FLCE_F16 && !problem->dtypes.widens_accum;
  return plan->strategy == FLCE_SAVE_GRADS && plan->dtype == FLCE_F16 &&
         problem->wants.grad_weight && problem->dtypes.weight == FLCE_F16 && !asks_f32 &&
         !plan->draws_from_dz;
}

/* With this power of two a sum of `rows` products of at most 2^27 stays within 2^15. */
static int choose_dw_fp16_shift(int64_t rows) {
  int bits = 0;
  while (rows > INT64_C(1) << bits) bits++;
  return -(bits + 12);
}

/* The dtype of dX if the GEMM's result is dX (form dz), so that it is rounded once; else the widest
 * dtype that the GEMM can write. Never directly to float16 if float32 is possible: a backend may
 * sum over V in parts, and a part may overflow where the sum does not. */
static flce_dtype choose_dx_gemm_dtype(const flce_plan* plan, const flce_facts* facts) {
  flce_dtype stat = flce_stat_dtype(plan->dtype);
  if (by_blocks(plan) && !makes_dx_first(plan)) return stat; /* a sum over blocks of classes */
  flce_dtype own = plan->partial_dx_dtype;
  if (plan->form == FLCE_FORM_DZ && own != FLCE_F16 && gemm_writes(plan, facts, own)) return own;
  return gemm_writes(plan, facts, stat) ? stat : plan->dtype;
}

static void choose_gradients(const flce_problem* problem, const flce_facts* facts,
                             flce_plan* plan) {
  plan->keeps_statistics =
      problem->wants.statistics || problem->wants.class_gradient || backward_reads_statistics(plan);
  plan->grad_input_dtype = kept_dtype(plan, problem->dtypes.input);
  bool widens = flce_is_sharded(problem) && problem->shard.wide_terms;
  plan->partial_dx_dtype = widens ? FLCE_F32 : plan->grad_input_dtype;
  plan->dx_gemm_dtype = choose_dx_gemm_dtype(plan, facts);
  plan->dw_fp16_shift =
      keeps_fp16_dw(problem, plan) ? choose_dw_fp16_shift(problem->shape.rows) : 0;
  plan->grad_weight_dtype = problem->backward.adds_grad_weight ? problem->backward.added_dtype
                            : plan->dw_fp16_shift ? FLCE_F16
                                                  : kept_dtype(plan, problem->dtypes.weight);
  plan->grad_bias_dtype = kept_dtype(plan, problem->dtypes.bias);
}

/* ---- the sum of dW over chunks ---- */

/* Rows of FLCE_BUF_GEMM_PIECE for a GEMM with `rows` rows of `columns` whose accumulator has this
 * dtype; 0 where it writes that itself. */
static int64_t gemm_piece_rows(const flce_plan* plan, const flce_facts* facts, flce_dtype dtype,
                               int64_t rows, int64_t columns) {
  if (gemm_writes(plan, facts, dtype)) return 0;
  int64_t fit = GEMM_PIECE_BYTES / (columns * flce_size_of(plan->dtype));
  return min64(rows, max64(fit, TILE_ROWS));
}

/* Sets in which dtype dW is summed over chunks, and how. */
static void sum_dw_in(flce_dtype dtype, const flce_problem* problem, const flce_facts* facts,
                      flce_plan* plan) {
  plan->accum_dtype = dtype;
  /* The kernel that also sums db writes all columns of dW, the frozen ones included. */
  bool makes_both = problem->wants.grad_weight && problem->wants.grad_bias &&
                    problem->shape.frozen_hidden == 0 && !by_blocks(plan);
  plan->bias_parts = makes_both && dtype == plan->dtype ? facts->bias_parts : 0;
  bool sums = !gradients_are_sampled(plan);
  plan->dw_piece_rows =
      sums ? gemm_piece_rows(plan, facts, dtype, problem->shape.vocab, plan->weight_hidden) : 0;
}

static void choose_dw_sum(const flce_problem* problem, const flce_facts* facts, flce_plan* plan) {
  sum_dw_in(narrow_sum_dtype(problem, plan), problem, facts, plan);
}

/* The default of accum_dtype over many chunks. Their number depends on the cost of accumulating, so
 * it is chosen before, for sums in plan->dtype, and not again. The dtype of dW does not change: a
 * compiled graph has to know it, and does not know the number of chunks. */
static void widen_dw_sum(const flce_problem* problem, const flce_facts* facts, flce_plan* plan) {
  bool decided = problem->derived.chunk_rows > 0; /* accum_dtype is that of the equal share */
  bool sums = problem->wants.grad_weight && !gradients_are_sampled(plan);
  int64_t chunks = plan->strategy == FLCE_SAVE_GRADS ? plan->chunks : plan->backward_chunks;
  if (by_blocks(plan)) chunks = ceil_div(problem->shape.rows, plan->block_rows);
  if (problem->dtypes.widens_accum && !decided && sums && chunks >= FLCE_WIDE_SUM_CHUNKS)
    sum_dw_in(flce_stat_dtype(plan->dtype), problem, facts, plan);
}

void flce_choose_dtypes(const flce_problem* problem, const flce_facts* facts, flce_plan* plan) {
  flce_choose_logits(problem, facts, plan);
  choose_gathers(problem, facts, plan);
  choose_gradients(problem, facts, plan);
  choose_dw_sum(problem, facts, plan);
}

/* Where the GEMM of the last chunk's dW is split, see dw_first_classes: near the middle, from a
 * third to two thirds, because both exchanges move as many elements. At H = 1024 `wave_classes`
 * classes are a wave of tiles of 256 x 128, at its multiples several, so the first GEMM has no
 * partial wave; splits elsewhere made dW up to 4 % slower (benchmarks/NOTES.md, 2026-11-27, sums of
 * dX). */
static void choose_dw_split(const flce_problem* problem, const flce_facts* facts, flce_plan* plan) {
  enum { CLASSES_A_MULTIPROCESSOR = 256 * 128 / 1024 };
  bool gathers_sums = sums_partial_dx(problem) && !problem->shard.input_is_sharded;
  bool by_gemm = problem->wants.grad_weight && plan->strategy != FLCE_SAVE_NOTHING &&
                 !gradients_are_sampled(plan) && !by_blocks(plan);
  bool with_db = plan->bias_parts > 0; /* grad_weight_gemm makes dW and db of all classes at once */
  if (!gathers_sums || !by_gemm || with_db || problem->shape.rows == 0) return;
  int64_t half = problem->shape.vocab / 2;
  int64_t wave_classes = facts->multiprocessors * CLASSES_A_MULTIPROCESSOR;
  int64_t step = wave_classes > 0 && half >= wave_classes ? wave_classes : FLCE_BLOCK_CLASS_STEP;
  int64_t first = (half + step / 2) / step * step;
  if (first < problem->shape.vocab) plan->dw_first_classes = first;
}

/* ---- chunks ---- */

/* What the forward's loop and the backward's have in common. */
static chunk_loop any_loop(const flce_problem* problem, const flce_plan* plan) {
  int64_t memory = problem->memory.bound;
  /* Of 1 GiB a divergence takes 768 MiB: 1536 rows of 128256 classes, packed, or 768 of two float32
   * logits. */
  if (plan->is_divergence && problem->memory.bound_is_default) memory -= memory / 4;
  return (chunk_loop){.dtype = plan->dtype,
                      .hidden = plan->hidden,
                      .accum_dtype = plan->accum_dtype,
                      .max_memory = memory,
                      .prefers_small_chunks = problem->memory.bound_is_default,
                      .max_rows = INT64_MAX,
                      .tile_rows = TILE_ROWS,
                      .makes_dx = problem->wants.grad_input,
                      .makes_dw = problem->wants.grad_weight,
                      .overlaps_dw = plan->bias_parts == 0};
}

/* The most rows of a chunk with a small vocabulary, see SMALL_VOCAB. */
static int64_t most_rows(const flce_problem* problem, const flce_facts* facts,
                         const flce_plan* plan) {
  int64_t size = flce_size_of(plan->dtype),
          bytes = problem->shape.rows * problem->shape.vocab * size;
  bool bounded = problem->memory.bound_is_default && facts->multiprocessors > 0 &&
                 plan->strategy == FLCE_SAVE_GRADS && problem->shape.vocab <= SMALL_VOCAB &&
                 bytes >= SMALL_VOCAB_BYTES;
  if (!bounded) return INT64_MAX;
  int64_t row = plan->z_pitch * flce_size_of(plan->z_dtype);
  if (problem->wants.grad_input) row += plan->hidden * flce_size_of(plan->dx_gemm_dtype);
  if (problem->wants.grad_weight) row += plan->input_pitch * size;
  int64_t of_tokens = problem->shape.tokens * TOKEN_BYTES;
  int64_t left = bytes - facts->gemm_workspace_bytes - of_tokens;
  return max64(max64(left, of_tokens) / row, 1);
}

/* Of a call without gradients on a GPU, with the default max_memory. */
static bool makes_only_losses(const flce_problem* problem, const flce_facts* facts,
                              const flce_plan* plan) {
  bool is_gpu = facts->multiprocessors > 0;
  return is_gpu && problem->memory.bound_is_default && !makes_gradients(problem, plan);
}

/* The chunks of dX in the memory of dW. */
static chunk_loop dx_loop(const flce_problem* problem, const flce_facts* facts,
                          const flce_plan* plan) {
  chunk_loop loop = any_loop(problem, plan);
  loop.makes_logits = true;
  loop.makes_dw = false;
  loop.prefers_small_chunks = false;
  loop.max_memory = problem->shape.vocab * flce_dw_class_bytes(plan) - FLCE_DW_PADDING;
  loop.row_bytes = loop.logits_bytes = flce_dx_row_bytes(problem, facts, plan);
  if (plan->fuses_rows) loop.tile_rows = facts->fused_tile_rows;
  return loop;
}

static chunk_loop forward_loop(const flce_problem* problem, const flce_facts* facts,
                               const flce_plan* plan) {
  if (makes_dx_first(plan)) return dx_loop(problem, facts, plan);
  chunk_loop loop = any_loop(problem, plan);
  bool gradients = plan->strategy == FLCE_SAVE_GRADS && !by_blocks(plan);
  loop.makes_logits = true;
  loop.makes_dx &= gradients;
  loop.makes_dw &= gradients;
  loop.max_rows = most_rows(problem, facts, plan);
  loop.row_bytes = plan->z_pitch * flce_size_of(plan->z_dtype);
  /* A teacher's logits have the student's dtype and leading dimension; packed logits replace
   * them. */
  if (problem->divergence.teacher && !problem->divergence.teacher->has.logits && !plan->packs)
    loop.row_bytes *= 2;
  loop.logits_bytes = loop.row_bytes;
  bool has_logits = !plan->fuses_rows || !only_statistics(plan);
  if (has_logits && makes_only_losses(problem, facts, plan))
    loop.max_memory = min64(loop.max_memory, max64(LOSS_BYTES, LOSS_ROWS * loop.row_bytes));
  if (!plan->fuses_rows) return loop;
  loop.tile_rows = facts->fused_tile_rows;
  if (!only_statistics(plan)) return loop;
  if (by_blocks(plan)) {
    loop.max_rows = STATISTICS_ROWS;
    loop.logits_bytes = 0; /* no pass has logits of all classes of a row */
  }
  /* No logits are written: smaller chunks would only save scratch. */
  loop.prefers_small_chunks = false;
  loop.row_bytes = facts->fused_row_bytes;
  if (!plan->gathers) return loop;
  loop.row_bytes += plan->input_pitch * flce_size_of(plan->dtype);
  loop.max_rows = STATISTICS_ROWS;
  return loop;
}

static flce_status choose_forward_chunks(const flce_problem* problem, const flce_facts* facts,
                                         flce_plan* plan) {
  chunk_loop loop = forward_loop(problem, facts, plan);
  FLCE_TRY(choose_chunk_rows(problem, facts, &loop, &plan->chunk_rows, &plan->chunks));
  if (problem->derived.chunk_rows > 0) { /* those of an equal share, or the student's */
    plan->chunk_rows = min64(problem->derived.chunk_rows, problem->shape.rows);
    plan->chunks = problem->shape.rows > 0 ? ceil_div(problem->shape.rows, plan->chunk_rows) : 0;
  }
  if (plan->z_in_saved) {
    plan->chunk_rows = problem->shape.rows;
    plan->chunks = problem->shape.rows > 0;
  }
  return FLCE_OK;
}

static chunk_loop backward_loop(const flce_problem* problem, const flce_plan* plan) {
  chunk_loop loop = any_loop(problem, plan);
  loop.makes_logits = plan->strategy == FLCE_SAVE_STATS;
  if (loop.makes_logits)
    loop.row_bytes = plan->z_pitch * flce_size_of(plan->z_dtype);
  else if (plan->strategy == FLCE_SAVE_LOGITS && plan->form == FLCE_FORM_DZ)
    /* The same chunks where dz overwrites what is saved, so that the bits of a gradient do not
     * depend on whether its graph is kept. */
    loop.row_bytes = plan->out_pitch * flce_size_of(plan->dtype);
  loop.logits_bytes = loop.row_bytes;
  return loop;
}

static flce_status choose_backward_chunks(const flce_problem* problem, const flce_facts* facts,
                                          flce_plan* plan) {
  if (by_blocks(plan)) {
    bool again = plan->strategy == FLCE_SAVE_STATS;
    plan->backward_chunk_rows = again ? plan->block_rows : 0;
    plan->backward_chunks = again ? ceil_div(problem->shape.rows, plan->block_rows) : 0;
    return FLCE_OK;
  }
  chunk_loop loop = backward_loop(problem, plan);
  if (loop.row_bytes > 0)
    return choose_chunk_rows(problem, facts, &loop, &plan->backward_chunk_rows,
                             &plan->backward_chunks);
  bool has_loop = flce_has_backward(plan->strategy) && plan->strategy != FLCE_SAVE_SAMPLES;
  if (has_loop) { /* it allocates nothing: it reads what is saved, or the rank has no class */
    plan->backward_chunk_rows = problem->shape.rows;
    plan->backward_chunks = problem->shape.rows > 0;
  }
  return FLCE_OK;
}

/* ---- copies of x ---- */

/* A chunk's rows of x are copied for the logits GEMM if they are gathered or padded: to
 * FLCE_BUF_SCALED_X where that exists in the same loop, because the copy for dW is written when
 * this one is no longer needed; a loop over blocks needs both. */
static void choose_input_copies(const flce_problem* problem, flce_plan* plan) {
  if (!copies_logits_input(plan)) return;
  bool has_copy = problem->wants.grad_weight && makes_gradients(problem, plan) &&
                  copies_weight_input(problem, plan) && !plan->draws_from_dz && !by_blocks(plan);
  plan->backward_gathered_x = has_copy ? FLCE_BUF_SCALED_X : FLCE_BUF_GATHERED_X;
  plan->gathered_x =
      plan->strategy == FLCE_SAVE_GRADS ? plan->backward_gathered_x : FLCE_BUF_GATHERED_X;
}

/* ---- the plan ---- */

/* The blocks over all rows that begin before class `end`, in the memory of dW. Where it has no room
 * for the sum of dX and a block, blocks of the same shape are in the workspace alone. */
static void choose_whole_classes(const flce_problem* problem, const flce_facts* facts, int64_t end,
                                 flce_plan* plan) {
  plan->whole_row_bytes = flce_whole_row_bytes(problem, facts, plan);
  dw_memory memory = flce_memory_of_dw(problem, plan);
  int64_t first = 0, classes = 0;
  do {
    first += classes;
    classes = first < end ? flce_whole_block_classes(&memory, first) : 0;
  } while (classes > 0);
  plan->whole_classes = first;
  if (first == 0 && plan->blocks == FLCE_BLOCKS_IN_DW) plan->blocks = FLCE_BLOCKS_IN_WORKSPACE;
}

/* The plan with gradients by blocks of this shape, or by chunks of all classes if that is 0. */
static flce_status plan_with_blocks(const flce_problem* problem, const flce_facts* facts,
                                    block_shape block, flce_plan* plan) {
  memset(plan, 0, sizeof *plan);
  plan->strategy = problem->save; /* no longer auto */
  plan->rows = problem->shape.rows;
  plan->block_rows = block.rows;
  plan->block_classes = block.classes;
  plan->blocks = block.blocks;
  flce_choose_dtypes(problem, facts, plan);
  if (uses_dw_memory(plan)) choose_whole_classes(problem, facts, block.whole_classes, plan);
  if (by_blocks(plan) && !makes_dx_first(plan)) {
    int64_t rows = plan->blocks == FLCE_BLOCKS_IN_DW ? plan->rows : plan->block_rows;
    plan->dx_piece_rows = gemm_piece_rows(plan, facts, plan->dx_gemm_dtype, rows, plan->hidden);
  }
  FLCE_TRY(choose_forward_chunks(problem, facts, plan));
  FLCE_TRY(choose_backward_chunks(problem, facts, plan));
  widen_dw_sum(problem, facts, plan);
  choose_dw_split(problem, facts, plan);
  choose_input_copies(problem, plan);
  flce_list_buffers(problem, facts, plan);
  flce_count_plan(problem, facts, plan);
  return FLCE_OK;
}

/* With save=grads the time of logits and dX by chunks in the memory of dW, if that is free. */
static flce_status measure_dx_chunks(const flce_problem* problem, const flce_facts* facts,
                                     const flce_plan* plan, bool dw_is_free, double* effort) {
  *effort = INFINITY;
  chunk_loop loop = dx_loop(problem, facts, plan);
  bool may = dw_is_free && plan->strategy == FLCE_SAVE_GRADS && problem->wants.grad_input;
  if (!may || loop.max_memory < loop.row_bytes) return FLCE_OK;
  int64_t rows, number;
  FLCE_TRY(choose_chunk_rows(problem, facts, &loop, &rows, &number));
  *effort = flce_chunks_effort(problem, facts, &loop, rows);
  return FLCE_OK;
}

/* The loop that makes the gradients by chunks of all classes, in place of blocks: its time, and the
 * rows of its chunks without a max_memory. */
static flce_status measure_chunks(const flce_problem* problem, const flce_facts* facts,
                                  const flce_plan* plan, chunk_alternative* chunks) {
  bool grads = plan->strategy == FLCE_SAVE_GRADS;
  chunk_loop loop = grads ? forward_loop(problem, facts, plan) : backward_loop(problem, plan);
  chunks->rows = grads ? plan->chunk_rows : plan->backward_chunk_rows;
  chunks->effort = flce_chunks_effort(problem, facts, &loop, chunks->rows);
  chunks->dw_is_free =
      !flce_is_sharded(problem) && flce_dw_is_free(problem, plan, narrow_sum_dtype(problem, plan));
  FLCE_TRY(measure_dx_chunks(problem, facts, plan, chunks->dw_is_free, &chunks->dx_effort));
  loop.max_memory = max64(loop.max_memory, DEFAULT_BYTES);
  loop.prefers_small_chunks = true;
  loop.accum_dtype = narrow_sum_dtype(problem, plan);
  int64_t number;
  return choose_chunk_rows(problem, facts, &loop, &chunks->default_rows, &number);
}

flce_status flce_plan_checked(const flce_problem* problem, const flce_facts* facts,
                              flce_plan* plan) {
  block_shape block = {.rows = problem->derived.block_rows,
                       .classes = problem->derived.block_classes};
  if (block.classes > 0) block.blocks = FLCE_BLOCKS_IN_WORKSPACE;
  FLCE_TRY(plan_with_blocks(problem, facts, block, plan));
  if (problem->derived.chunk_rows > 0) return FLCE_OK;
  if (!flce_may_use_blocks(problem, facts, plan)) return FLCE_OK;
  chunk_alternative chunks;
  FLCE_TRY(measure_chunks(problem, facts, plan, &chunks));
  flce_choose_block(problem, facts, plan, &chunks, &block);
  return block.blocks != FLCE_BLOCKS_NONE ? plan_with_blocks(problem, facts, block, plan) : FLCE_OK;
}

flce_status flce_plan_make(const flce_problem* problem, const flce_facts* facts, flce_plan* plan) {
  memset(plan, 0, sizeof *plan);
  FLCE_TRY(flce_check_problem(problem));
  return flce_plan_checked(problem, facts, plan);
}
