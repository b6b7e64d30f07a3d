/* flce_plan_make: what follows from the device's facts and the problem, whose `save` is no longer
 * auto (strategy.c): form, dtypes, kernels of the row passes, buffers and their offsets. Pure: no
 * allocation, no device call. The number of rows of a chunk is chosen in chunks.c. */
#include "core/plan.h"

#include "core/plan_counts.h"
#include "core/plan_rules.h"

#include "backend.h"
#include "loss.h"

#include <math.h>
#include <string.h>

enum {
  /* Bytes: the alignment of a buffer in the workspace. */
  ALIGNMENT = 256,
  /* The most rows of a gathered chunk of which only statistics are computed. Larger chunks would
   * not read W less often, which is read once for every 2048 or 4096 rows anyway, and the copy of x
   * stays small. */
  GATHERED_ROWS = 4096,
  /* Up to so many classes, a chunk's rows of dX and x take as much memory as its logits. Then, if
   * all logits in the GEMMs' dtype have at least SMALL_VOCAB_BYTES, a chunk takes no more than
   * these: no more than an eager loss. With so few classes that the tokens' own TOKEN_BYTES are
   * most of that, it takes as much as they do. */
  SMALL_VOCAB = 8192,
  SMALL_VOCAB_BYTES = 128 << 20,
  /* About the bytes of a token's statistics, coefficients, target order and index. */
  TOKEN_BYTES = 128,
  /* Bytes of FLCE_BUF_DW_BLOCK: add_block reads it from the cache. */
  DW_BLOCK_BYTES = 4 << 20,
};

/* True if a GEMM with operands of plan->dtype can write a result of `dtype`. */
static bool gemm_writes(const flce_plan* plan, const flce_facts* facts, flce_dtype dtype) {
  return dtype == plan->dtype ||
         (dtype == FLCE_F32 && facts->gemm_writes_f32 && flce_size_of(plan->dtype) == 2);
}

/* True if the backward writes dz from what is saved to a buffer of its own. */
static bool stores_dz(const flce_plan* plan) {
  return plan->save == FLCE_SAVE_LOGITS && plan->form == FLCE_FORM_DZ && !plan->dz_in_saved;
}

/* True if what is saved are logits. */
static bool stores_z(const flce_plan* plan) {
  return plan->save == FLCE_SAVE_LOGITS && !plan->saves_exp;
}

/* ---- chunks ---- */

/* The most rows of a chunk with a small vocabulary, see SMALL_VOCAB. */
static int64_t most_rows(const flce_problem* problem, const flce_facts* facts,
                         const flce_plan* plan) {
  int64_t size = flce_size_of(plan->dtype), bytes = problem->rows * problem->vocab * size;
  bool bounded = problem->saves_memory && facts->multiprocessors > 0 &&
                 plan->save == FLCE_SAVE_GRADS && problem->vocab <= SMALL_VOCAB &&
                 bytes >= SMALL_VOCAB_BYTES;
  if (!bounded) return INT64_MAX;
  int64_t row = plan->z_pitch * flce_size_of(plan->z_dtype);
  if (problem->want_grad_input) row += plan->hidden * flce_size_of(plan->dx_gemm_dtype);
  if (problem->want_grad_weight) row += plan->input_pitch * size;
  int64_t of_tokens = problem->tokens * TOKEN_BYTES;
  int64_t left = bytes - facts->gemm_workspace_bytes - of_tokens;
  return max64(max64(left, of_tokens) / row, 1);
}

static chunk_loop forward_loop(const flce_problem* problem, const flce_facts* facts,
                               const flce_plan* plan) {
  bool gradients = plan->save == FLCE_SAVE_GRADS;
  chunk_loop loop = {.row_bytes = plan->z_pitch * flce_size_of(plan->z_dtype),
                     .max_rows = most_rows(problem, facts, plan),
                     .tile_rows = TILE_ROWS,
                     .makes_logits = true,
                     .makes_dx = problem->want_grad_input && gradients,
                     .makes_dw = problem->want_grad_weight && gradients,
                     .overlaps_dw = plan->bias_parts == 0};
  /* A teacher's logits have the student's dtype and leading dimension; packed logits replace
   * them. */
  if (problem->teacher && !problem->teacher->gives_logits && !plan->packs) loop.row_bytes *= 2;
  loop.logits_bytes = loop.row_bytes;
  if (!plan->fuses_rows) return loop;
  loop.tile_rows = facts->fused_tile_rows;
  if (!only_statistics(plan)) return loop;
  loop.row_bytes = facts->fused_row_bytes;
  if (!plan->gathers) return loop;
  loop.row_bytes += plan->input_pitch * flce_size_of(plan->dtype);
  loop.max_rows = GATHERED_ROWS;
  return loop;
}

static flce_status choose_chunks(const flce_problem* caller, const flce_facts* facts,
                                 flce_plan* plan) {
  flce_problem problem = *caller;
  problem.hidden = plan->hidden;
  problem.accum_dtype = plan->accum_dtype;
  chunk_loop forward = forward_loop(&problem, facts, plan);
  /* With fused_logits and statistics only, no logits are written: smaller chunks would only save
   * scratch. */
  problem.saves_memory &= !only_statistics(plan) || !plan->fuses_rows;
  /* Of 1 GiB a divergence takes 768 MiB: 1536 rows of 128256 classes, packed, or 768 of two float32
   * logits. */
  if (plan->compares && caller->saves_memory) problem.max_memory -= problem.max_memory / 4;
  FLCE_TRY(
      choose_chunk_rows(&problem, facts, &forward, plan->dtype, &plan->chunk_rows, &plan->chunks));
  if (caller->chunk_rows > 0) {
    plan->chunk_rows = min64(caller->chunk_rows, problem.rows);
    plan->chunks = problem.rows > 0 ? ceil_div(problem.rows, plan->chunk_rows) : 0;
  }
  if (plan->z_in_saved) {
    plan->chunk_rows = problem.rows;
    plan->chunks = problem.rows > 0;
  }
  plan->backward_chunk_rows = plan->backward_chunks = 0;
  problem.saves_memory = caller->saves_memory;
  chunk_loop backward = {.max_rows = INT64_MAX,
                         .tile_rows = TILE_ROWS,
                         .makes_logits = plan->save == FLCE_SAVE_STATS,
                         .makes_dx = problem.want_grad_input,
                         .makes_dw = problem.want_grad_weight,
                         .overlaps_dw = plan->bias_parts == 0};
  if (plan->save == FLCE_SAVE_STATS)
    backward.row_bytes = plan->z_pitch * flce_size_of(plan->z_dtype);
  else if (plan->save == FLCE_SAVE_LOGITS && plan->form == FLCE_FORM_DZ)
    /* The same chunks where dz overwrites what is saved, so that the bits of a gradient do not
     * depend on whether its graph is kept. */
    backward.row_bytes = plan->out_pitch * flce_size_of(plan->dtype);
  backward.logits_bytes = backward.row_bytes;
  if (backward.row_bytes > 0)
    return choose_chunk_rows(&problem, facts, &backward, plan->dtype, &plan->backward_chunk_rows,
                             &plan->backward_chunks);
  bool has_loop = flce_has_backward(plan->save) && plan->save != FLCE_SAVE_SAMPLES;
  if (has_loop) { /* it allocates nothing: it reads what is saved, or the rank has no class */
    plan->backward_chunk_rows = problem.rows;
    plan->backward_chunks = problem.rows > 0;
  }
  return FLCE_OK;
}

static flce_dtype kept_dtype(const flce_problem* problem, flce_dtype dtype) {
  /* With save=grads, float16 gradients are computed before grad_output (a GradScaler's 65536) is
   * known. They are kept in float32, and rounded after they are multiplied by grad_output. */
  return problem->save == FLCE_SAVE_GRADS && dtype == FLCE_F16 ? FLCE_F32 : dtype;
}

/* The exception to kept_dtype is dW, the largest gradient. It is kept in float16, times
 * FLCE_SCALAR_DW_SCALE, with which no sum overflows and what underflows is negligible. */
static bool keeps_fp16_dw(const flce_problem* problem, const flce_plan* plan) {
  bool asks_f32 = problem->accum_dtype != FLCE_F16 && !problem->widens_sum;
  return plan->save == FLCE_SAVE_GRADS && plan->dtype == FLCE_F16 && problem->want_grad_weight &&
         problem->weight_dtype == FLCE_F16 && !asks_f32 && !plan->draws;
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
  flce_dtype own = plan->partial_dx_dtype;
  if (plan->form == FLCE_FORM_DZ && own != FLCE_F16 && gemm_writes(plan, facts, own)) return own;
  return gemm_writes(plan, facts, stat) ? stat : plan->dtype;
}

/* The form of the forward. The entropy's gradient takes l from E, as l - c = log E, and the largest
 * logits are found by E, except where E includes the softcap's slope. */
static flce_form choose_form(const flce_problem* problem, flce_dtype dtype) {
  if (problem->save == FLCE_SAVE_SAMPLES) return FLCE_FORM_EXP;
  bool later_dz =
      (problem->entropy_gradient || problem->class_gradient) && problem->save == FLCE_SAVE_LOGITS;
  bool slope_of_all = problem->loss.label_smoothing > 0.0 || later_dz || problem->topk > 0;
  bool dz = dtype == FLCE_F16 || problem->has_probabilities || problem->wants_tail ||
            problem->divergence != FLCE_NO_DIVERGENCE ||
            (flce_caps_logits(&problem->loss) && slope_of_all);
  return dz ? FLCE_FORM_DZ : FLCE_FORM_EXP;
}

/* True if dz cannot be computed from E: the softcap's slope and probability targets need the logit,
 * and exp(l - TAIL_LSE) of a class in the tail may be large where E has underflowed. */
static bool needs_logits(const flce_problem* problem) {
  return problem->has_probabilities || problem->wants_tail || flce_caps_logits(&problem->loss);
}

/* What save=logits keeps: E if the gradients follow from it, also in form dz, because for float16
 * it has half the bytes of float32 logits. */
static void choose_saved(const flce_problem* problem, flce_plan* plan) {
  if (plan->save == FLCE_SAVE_SAMPLES) {
    plan->saved_dtype = FLCE_F32; /* the lists: int32 has its size */
    plan->saved_pitch = flce_sample_pitch(problem->gradient_eps);
    return;
  }
  plan->saves_exp = plan->form == FLCE_FORM_EXP || !needs_logits(problem);
  plan->saved_dtype = plan->saves_exp ? plan->dtype : plan->z_dtype;
  plan->saved_pitch = plan->saves_exp ? plan->out_pitch : plan->z_pitch;
}

/* With save=grads only in float16, where the backward divides by the loss scale
 * (FLCE_SCALAR_LOSS_SCALE). */
static bool backward_reads_statistics(const flce_plan* plan) {
  bool is_scaled = plan->save == FLCE_SAVE_GRADS && plan->dtype == FLCE_F16;
  return flce_has_backward(plan->save) || is_scaled;
}

static int64_t aligned_pitch(const flce_problem* problem, const flce_facts* facts,
                             flce_dtype dtype) {
  return round_up(problem->vocab, facts->row_alignment / flce_size_of(dtype));
}

/* True if fused_logits produces what the strategy reads: E, float32 logits, or only statistics.
 * dz is a difference that may cancel, so it has to be computed from the same logits as the
 * statistics. With save=stats the backward recomputes the logits with another GEMM. That is
 * accurate enough if they are not rounded (float32), except for probability targets, which may be
 * almost equal to p. */
static bool fused_gemm_serves(const flce_problem* problem, const flce_facts* facts,
                              const flce_plan* plan) {
  bool reads_z = !only_statistics(plan);
  if (plan->form == FLCE_FORM_EXP || (plan->save == FLCE_SAVE_NOTHING && !reads_z)) return true;
  if (plan->z_dtype != FLCE_F32) return false;
  if (plan->save == FLCE_SAVE_STATS && !reads_z) return !problem->has_probabilities;
  bool gives_e = plan->save == FLCE_SAVE_LOGITS && !needs_logits(problem);
  return facts->fused_writes_z && !gives_e;
}

/* The dtypes and leading dimensions of the logits, of what overwrites them, and of what is saved.
 */
static void choose_matrices(const flce_problem* problem, const flce_facts* facts, flce_plan* plan) {
  bool exp_form = plan->form == FLCE_FORM_EXP;
  bool narrow = (exp_form || plan->draws) && plan->dtype == FLCE_F16;
  plan->exp_dtype = narrow ? FLCE_BF16 : plan->dtype;
  flce_dtype wanted = narrow ? FLCE_F32 : problem->logits_dtype;
  plan->z_dtype = gemm_writes(plan, facts, wanted) ? wanted : plan->dtype;
  plan->fuses_rows = facts->fused_row_bytes > 0 && fused_gemm_serves(problem, facts, plan);
  plan->packs = plan->fuses_rows && facts->fused_packs && plan->save == FLCE_SAVE_GRADS;
  /* fused_logits then writes no logits; the logits buffer, if there is one, holds E. */
  bool makes_e = plan->fuses_rows && exp_form && plan->save != FLCE_SAVE_STATS;
  if (makes_e) plan->z_dtype = plan->exp_dtype;
  plan->z_pitch = aligned_pitch(problem, facts, plan->z_dtype);
  plan->out_pitch = aligned_pitch(problem, facts, plan->dtype);
  bool fused_adds = plan->fuses_rows && !exp_form && !only_statistics(plan);
  bool adds_bias = fused_adds || (facts->gemm_adds_bias && plan->z_dtype == FLCE_F32);
  plan->gemm_adds_bias = problem->has_bias && adds_bias;
  choose_saved(problem, plan);
  plan->z_in_saved = plan->save == FLCE_SAVE_LOGITS && plan->z_dtype == plan->saved_dtype;
}

/* Sets in which dtype dW is summed over chunks, and how. */
static void sum_dw_in(flce_dtype dtype, const flce_problem* problem, const flce_facts* facts,
                      flce_plan* plan) {
  plan->accum_dtype = dtype;
  /* The kernel that also sums db writes all columns of dW, the frozen ones included. */
  bool makes_both =
      problem->want_grad_weight && problem->want_grad_bias && problem->frozen_hidden == 0;
  plan->bias_parts = makes_both && dtype == plan->dtype ? facts->bias_parts : 0;
  plan->dw_block_rows = 0;
  if (draws_samples(plan) || gemm_writes(plan, facts, dtype)) return;
  int64_t block = DW_BLOCK_BYTES / (plan->weight_hidden * flce_size_of(plan->dtype));
  plan->dw_block_rows = min64(problem->vocab, block < TILE_ROWS ? TILE_ROWS : block);
}

static void choose_dw_sum(const flce_problem* problem, const flce_facts* facts, flce_plan* plan) {
  flce_dtype stat = flce_stat_dtype(plan->dtype);
  bool wide = problem->accum_dtype == stat || plan->grad_weight_dtype == stat;
  sum_dw_in(wide ? stat : plan->dtype, problem, facts, plan);
}

/* The default of accum_dtype over many chunks. Their number depends on the cost of accumulating, so
 * it is chosen before, for `dtype`, and not again. The dtype of dW does not change: a compiled
 * graph has to know it, and does not know the number of chunks. */
static void widen_dw_sum(const flce_problem* problem, const flce_facts* facts, flce_plan* plan) {
  bool decided = problem->chunk_rows > 0; /* accum_dtype is that of the equal share */
  bool sums = problem->want_grad_weight && !draws_samples(plan);
  int64_t chunks = plan->save == FLCE_SAVE_GRADS ? plan->chunks : plan->backward_chunks;
  if (problem->widens_sum && !decided && sums && chunks >= FLCE_WIDE_SUM_CHUNKS)
    sum_dw_in(flce_stat_dtype(plan->dtype), problem, facts, plan);
}

/* The form of the forward, and in a backward with gradients that E cannot give: dz. */
static flce_form choose_form_of_pass(const flce_problem* problem, flce_dtype dtype) {
  bool needs_dz = (problem->has_grad_entropy || problem->has_grad_classes) &&
                  problem->save != FLCE_SAVE_SAMPLES;
  return needs_dz ? FLCE_FORM_DZ : choose_form(problem, dtype);
}

void flce_choose_logits(const flce_problem* problem, const flce_facts* facts, flce_plan* plan) {
  plan->dtype = problem->dtype == FLCE_F16 && !facts->gemm_f16 ? FLCE_F32 : problem->dtype;
  plan->hidden = round_up(problem->hidden, facts->hidden_alignment);
  plan->weight_hidden = plan->hidden - problem->frozen_hidden;
  plan->input_pitch = round_up(plan->hidden, facts->input_alignment);
  plan->finds_classes = problem->topk > 0;
  plan->sums_tail = problem->wants_tail;
  plan->compares = problem->divergence != FLCE_NO_DIVERGENCE;
  plan->draws = plan->compares && problem->sampled && plan->save == FLCE_SAVE_GRADS;
  plan->form = choose_form_of_pass(problem, plan->dtype);
  choose_matrices(problem, facts, plan);
  plan->dz_in_saved =
      problem->consumes_saved && plan->save == FLCE_SAVE_LOGITS && plan->form == FLCE_FORM_DZ;
}

void flce_choose_dtypes(const flce_problem* problem, const flce_facts* facts, flce_plan* plan) {
  flce_choose_logits(problem, facts, plan);
  /* This must not depend on fuses_rows, which depends on the alignment of addresses: forward and
   * backward have to agree on the order of the rows of E. */
  bool skips = flce_is_sharded(problem) ? problem->gathers : facts->skips_rows;
  bool forward_exp = choose_form(problem, plan->dtype) == FLCE_FORM_EXP;
  plan->gathers = problem->rows < problem->tokens || (skips && forward_exp);
  plan->keeps_statistics =
      problem->wants_statistics || problem->class_gradient || backward_reads_statistics(plan);
  plan->grad_input_dtype = kept_dtype(problem, problem->input_dtype);
  bool widens = flce_is_sharded(problem) && problem->wide_terms;
  plan->partial_dx_dtype = widens ? FLCE_F32 : plan->grad_input_dtype;
  plan->dw_fp16_shift = keeps_fp16_dw(problem, plan) ? choose_dw_fp16_shift(problem->rows) : 0;
  plan->grad_weight_dtype = problem->adds_grad_weight ? problem->added_dtype
                            : plan->dw_fp16_shift     ? FLCE_F16
                                                      : kept_dtype(problem, problem->weight_dtype);
  plan->grad_bias_dtype = kept_dtype(problem, problem->bias_dtype);
  plan->dx_gemm_dtype = choose_dx_gemm_dtype(plan, facts);
  choose_dw_sum(problem, facts, plan);
}

static void add_buffer(flce_plan* plan, flce_buffer_id id, unsigned lifetime, int64_t bytes) {
  plan->buffers[id].bytes = bytes;
  plan->buffers[id].lifetime = bytes > 0 ? lifetime : 0;
  plan->buffers[id].offset = -1;
}

static void list_outputs(const flce_problem* problem, flce_plan* plan) {
  int64_t n = problem->tokens, h = problem->hidden, v = problem->weight_rows;
  int64_t width = flce_grad_weight_cols(problem);
  int64_t stat = flce_size_of(flce_stat_dtype(plan->dtype));
  unsigned kept = FLCE_OUTPUT | FLCE_IN_FORWARD | FLCE_IN_BACKWARD;
  unsigned gradient = plan->save == FLCE_SAVE_GRADS ? kept : FLCE_OUTPUT | FLCE_IN_BACKWARD;
  bool gradients = plan->save != FLCE_SAVE_NOTHING;
  add_buffer(plan, FLCE_BUF_LOSS, kept, (problem->reduction == FLCE_NONE ? n : 1) * stat);
  unsigned statistics = plan->keeps_statistics ? kept : FLCE_IN_FORWARD;
  add_buffer(plan, FLCE_BUF_STATS, statistics, FLCE_STAT_ROWS * n * stat);
  add_buffer(plan, FLCE_BUF_SCALARS, statistics, FLCE_SCALAR_COUNT * stat);
  if (plan->save == FLCE_SAVE_LOGITS || plan->save == FLCE_SAVE_SAMPLES)
    add_buffer(plan, FLCE_BUF_SAVED, kept,
               problem->rows * plan->saved_pitch * flce_size_of(plan->saved_dtype));
  if (problem->wants_predictions)
    add_buffer(plan, FLCE_BUF_PREDICTIONS, kept, n * (int64_t)sizeof(int64_t));
  if (problem->topk > 0)
    add_buffer(plan, FLCE_BUF_CLASSES, kept, n * problem->row_classes * (int64_t)sizeof(int64_t));
  add_buffer(plan, FLCE_BUF_CLASS_LOGITS, kept, n * problem->row_classes * stat);
  int64_t rounded = 0;
  if (gradients && problem->want_grad_input) {
    int64_t elements = flce_input_rows(problem) * h;
    add_buffer(plan, FLCE_BUF_GRAD_INPUT, gradient,
               elements * flce_size_of(plan->grad_input_dtype));
    if (plan->grad_input_dtype != problem->input_dtype)
      rounded += elements * flce_size_of(problem->input_dtype);
  }
  if (gradients && problem->want_grad_weight && !problem->adds_grad_weight) {
    add_buffer(plan, FLCE_BUF_GRAD_WEIGHT, gradient,
               v * width * flce_size_of(plan->grad_weight_dtype));
    if (plan->grad_weight_dtype != problem->weight_dtype)
      rounded += v * width * flce_size_of(problem->weight_dtype);
  }
  if (gradients && problem->want_grad_bias) {
    add_buffer(plan, FLCE_BUF_GRAD_BIAS, gradient, v * flce_size_of(plan->grad_bias_dtype));
    if (plan->grad_bias_dtype != problem->bias_dtype)
      rounded += v * flce_size_of(problem->bias_dtype);
  }
  add_buffer(plan, FLCE_BUF_ROUNDED, FLCE_OUTPUT | FLCE_IN_BACKWARD, rounded);
}

/* True if the B operand of dW's GEMM is a copy of x: scaled, gathered, with zeros in ignored rows,
 * or aligned. */
static bool copies_x(const flce_problem* problem, const flce_plan* plan) {
  return plan->form == FLCE_FORM_EXP || plan->gathers || !problem->has_probabilities ||
         problem->unaligned || plan->dw_fp16_shift != 0;
}

/* The buffer for the copy of a chunk's rows of x for the logits GEMM. It is FLCE_BUF_SCALED_X where
 * that exists in the same loop: the copy for dW is written when this one is no longer needed. */
static void list_copied_x(const flce_problem* problem, flce_plan* plan) {
  bool recomputes_logits = plan->save == FLCE_SAVE_STATS;
  bool has_copy = problem->want_grad_weight && makes_gradients(problem) &&
                  copies_x(problem, plan) && !plan->draws;
  flce_buffer_id gradients = has_copy ? FLCE_BUF_SCALED_X : FLCE_BUF_GATHERED_X;
  plan->gathered_x = plan->save == FLCE_SAVE_GRADS ? gradients : FLCE_BUF_GATHERED_X;
  plan->backward_gathered_x = gradients;
  bool in_forward = plan->gathered_x == FLCE_BUF_GATHERED_X;
  bool in_backward = recomputes_logits && gradients == FLCE_BUF_GATHERED_X;
  int64_t most = in_forward ? plan->chunk_rows : 0;
  if (in_backward && plan->backward_chunk_rows > most) most = plan->backward_chunk_rows;
  add_buffer(plan, FLCE_BUF_GATHERED_X,
             (in_forward ? FLCE_IN_FORWARD : 0) | (in_backward ? FLCE_IN_BACKWARD : 0),
             most * plan->input_pitch * flce_size_of(plan->dtype));
}

/* Of what forward and backward both need in their workspaces. */
static unsigned both_passes(const flce_plan* plan) {
  return FLCE_IN_FORWARD | (flce_has_backward(plan->save) ? FLCE_IN_BACKWARD : 0);
}

static void list_forward_workspace(const flce_problem* problem, const flce_facts* facts,
                                   flce_plan* plan) {
  int64_t n = problem->tokens, h = plan->hidden, v = problem->vocab;
  flce_dtype stat_dtype = flce_stat_dtype(plan->dtype);
  int64_t stat = flce_size_of(stat_dtype), e = flce_size_of(plan->dtype);
  unsigned both = both_passes(plan);
  bool stored_dz = stores_dz(plan);
  bool recomputes_logits = plan->save == FLCE_SAVE_STATS;
  bool keeps_no_logits = plan->z_in_saved || problem->gives_logits || plan->packs ||
                         (plan->fuses_rows && only_statistics(plan));
  int64_t z_row = plan->z_pitch * flce_size_of(plan->z_dtype);
  int64_t forward_bytes = keeps_no_logits ? 0 : plan->chunk_rows * z_row;
  int64_t backward_bytes = stored_dz           ? plan->backward_chunk_rows * plan->out_pitch * e
                           : recomputes_logits ? plan->backward_chunk_rows * z_row
                                               : 0;
  add_buffer(
      plan, FLCE_BUF_LOGITS,
      (forward_bytes > 0 ? FLCE_IN_FORWARD : 0) | (backward_bytes > 0 ? FLCE_IN_BACKWARD : 0),
      forward_bytes > backward_bytes ? forward_bytes : backward_bytes);
  if (plan->fuses_rows)
    add_buffer(plan, FLCE_BUF_FUSED, FLCE_IN_FORWARD, plan->chunk_rows * facts->fused_row_bytes);
  if (plan->gathers) add_buffer(plan, FLCE_BUF_INDEX, both, facts->compact_bytes);
  if (plan->gathers || plan->input_pitch != h) list_copied_x(problem, plan);
  if (problem->reduction != FLCE_NONE)
    add_buffer(plan, FLCE_BUF_ROW_LOSS, FLCE_IN_FORWARD, n * stat);
  bool padded = h != problem->hidden;
  if (padded || problem->input_dtype != plan->dtype)
    add_buffer(plan, FLCE_BUF_INPUT_CAST, both, n * h * e);
  if (padded || problem->weight_dtype != plan->dtype)
    add_buffer(plan, FLCE_BUF_WEIGHT_CAST, both, v * h * e);
  if (problem->has_bias && problem->bias_dtype != stat_dtype)
    add_buffer(
        plan, FLCE_BUF_BIAS_CAST,
        recomputes_logits || (stores_z(plan) && !plan->gemm_adds_bias) ? both : FLCE_IN_FORWARD,
        v * stat);
  add_buffer(plan, FLCE_BUF_GEMM, both, facts->gemm_workspace_bytes);
  if (problem->teacher) add_buffer(plan, FLCE_BUF_TEACHER, FLCE_IN_FORWARD, problem->teacher_bytes);
}

/* What the GEMMs of the gradients of a chunk of `rows` rows need. */
static void list_gradient_gemms(const flce_problem* problem, flce_plan* plan, unsigned where,
                                int64_t rows) {
  int64_t h = plan->hidden, v = problem->vocab, e = flce_size_of(plan->dtype);
  int64_t stat = flce_size_of(flce_stat_dtype(plan->dtype));
  int64_t accum = flce_size_of(plan->accum_dtype);
  bool padded = h != problem->hidden;
  bool own_dx = plan->dx_gemm_dtype != plan->partial_dx_dtype || plan->gathers || padded;
  if (problem->want_grad_input && own_dx)
    add_buffer(plan, FLCE_BUF_DX_ROWS, where, rows * h * flce_size_of(plan->dx_gemm_dtype));
  if (problem->want_grad_weight) {
    if (copies_x(problem, plan))
      add_buffer(plan, FLCE_BUF_SCALED_X, where, rows * plan->input_pitch * e);
    if (plan->accum_dtype != plan->grad_weight_dtype || padded)
      add_buffer(plan, FLCE_BUF_DW_ACCUM, where, v * plan->weight_hidden * accum);
    add_buffer(plan, FLCE_BUF_DW_BLOCK, where, plan->dw_block_rows * plan->weight_hidden * e);
  }
  if (!problem->want_grad_bias) return;
  add_buffer(plan, FLCE_BUF_DB_ACCUM, where, v * stat);
  add_buffer(plan, FLCE_BUF_DB_PARTS, where, plan->bias_parts * v * stat);
  if (plan->gathers && plan->form == FLCE_FORM_EXP)
    add_buffer(plan, FLCE_BUF_GATHERED_COEF, where, rows * stat);
}

static void list_gradient_workspace(const flce_problem* problem, const flce_facts* facts,
                                    flce_plan* plan) {
  if (!makes_gradients(problem)) return;
  int64_t stat = flce_size_of(flce_stat_dtype(plan->dtype));
  bool in_forward = plan->save == FLCE_SAVE_GRADS, samples = draws_samples(plan);
  unsigned where = in_forward ? FLCE_IN_FORWARD : FLCE_IN_BACKWARD;
  int64_t rows = in_forward ? plan->chunk_rows : plan->backward_chunk_rows;
  bool exp_form = plan->form == FLCE_FORM_EXP;
  bool smooth = exp_form && problem->loss.label_smoothing > 0.0;
  bool of_classes = problem->want_grad_weight || problem->want_grad_bias;
  add_buffer(plan, FLCE_BUF_COEF, where, FLCE_COEF_ROWS * problem->tokens * stat);
  if (plan->dtype == FLCE_F16 && !exp_form && !in_forward)
    add_buffer(plan, FLCE_BUF_DZ_SCALE, where, (4 + (problem->want_grad_bias ? rows : 0)) * stat);
  if (smooth) add_buffer(plan, FLCE_BUF_SMOOTH, where, (2 * plan->hidden + 1) * stat);
  if (smooth || (problem->want_grad_bias && !samples))
    add_buffer(plan, FLCE_BUF_COLUMN_SUM, where, facts->column_sum_bytes);
  if (samples && of_classes) add_buffer(plan, FLCE_BUF_SAMPLE_ORDER, where, facts->sample_bytes);
  if (plan->draws)
    add_buffer(plan, FLCE_BUF_SAMPLES, where,
               problem->rows * flce_sample_pitch(problem->gradient_eps) * (int64_t)sizeof(int32_t));
  if (samples) return;
  if (exp_form && of_classes) add_buffer(plan, FLCE_BUF_ORDER, where, facts->order_bytes);
  list_gradient_gemms(problem, plan, where, rows);
}

/* What the exchanges of a sharded vocabulary need (shards.c). */
static void list_shard_workspace(const flce_problem* problem, flce_plan* plan) {
  if (!flce_is_sharded(problem)) return;
  int64_t n = problem->tokens, ranks = problem->ranks;
  int64_t stat = flce_size_of(flce_stat_dtype(plan->dtype));
  bool grads = plan->save == FLCE_SAVE_GRADS, samples = plan->save == FLCE_SAVE_SAMPLES;
  unsigned both = both_passes(plan);
  int64_t rows = grads || samples ? plan->chunk_rows : problem->rows;
  int64_t parts = flce_shard_stat_count(problem) * rows * stat;
  if (problem->input_is_sharded)
    add_buffer(plan, FLCE_BUF_SHARD_INPUT, both,
               n * problem->hidden * flce_size_of(problem->input_dtype));
  add_buffer(plan, FLCE_BUF_SHARD_TARGET, both, n * (int64_t)sizeof(int64_t));
  add_buffer(plan, FLCE_BUF_SHARD_SCALARS, FLCE_IN_FORWARD, FLCE_SCALAR_COUNT * stat);
  add_buffer(plan, FLCE_BUF_SHARD_STATS, FLCE_IN_FORWARD, ranks * parts);
  if (problem->teacher)
    add_buffer(plan, FLCE_BUF_DIVERGENCE, FLCE_IN_FORWARD,
               (1 + ranks) * FLCE_DIVERGENCE_SUMS * plan->chunk_rows * stat);
  if (!makes_gradients(problem) || !sums_input(problem)) return;
  unsigned where = grads ? FLCE_IN_FORWARD : FLCE_IN_BACKWARD;
  int64_t block = summed_elements(problem) * flce_size_of(plan->partial_dx_dtype);
  bool widens = plan->partial_dx_dtype != plan->grad_input_dtype;
  if (problem->input_is_sharded || n % ranks != 0 || widens)
    add_buffer(plan, FLCE_BUF_PARTIAL_DX, where, ranks * block);
  add_buffer(plan, FLCE_BUF_RECEIVED_DX, where, ranks * block);
}

/* Buffers that forward and backward both have come first, so that their offsets are the same in
 * both workspaces. */
static void assign_offsets(flce_plan* plan) {
  int64_t in_both = 0;
  for (int pass = 0; pass < 3; pass++) {
    unsigned wanted = pass == 0   ? FLCE_IN_FORWARD | FLCE_IN_BACKWARD
                      : pass == 1 ? FLCE_IN_FORWARD
                                  : FLCE_IN_BACKWARD;
    int64_t next = in_both;
    for (int id = 0; id < FLCE_BUF_COUNT; id++) {
      flce_buffer* buffer = &plan->buffers[id];
      if (buffer->bytes == 0 || buffer->lifetime != wanted) continue;
      buffer->offset = next;
      next += round_up(buffer->bytes, ALIGNMENT);
    }
    if (pass == 0) in_both = plan->forward_workspace_bytes = plan->backward_workspace_bytes = next;
    if (pass == 1) plan->forward_workspace_bytes = next;
    if (pass == 2) plan->backward_workspace_bytes = next;
  }
  if (!flce_has_backward(plan->save)) plan->backward_workspace_bytes = 0;
  plan->forward_peak_bytes = plan->forward_workspace_bytes;
  plan->backward_peak_bytes = plan->backward_workspace_bytes;
  for (int id = 0; id < FLCE_BUF_COUNT; id++) {
    const flce_buffer* buffer = &plan->buffers[id];
    if (!(buffer->lifetime & FLCE_OUTPUT)) continue;
    if (buffer->lifetime & FLCE_IN_FORWARD) plan->forward_peak_bytes += buffer->bytes;
    if (buffer->lifetime & FLCE_IN_BACKWARD) plan->backward_peak_bytes += buffer->bytes;
  }
  if (plan->save == FLCE_SAVE_NOTHING) plan->backward_peak_bytes = 0;
  plan->peak_bytes = plan->forward_peak_bytes > plan->backward_peak_bytes
                         ? plan->forward_peak_bytes
                         : plan->backward_peak_bytes;
}

flce_status flce_plan_make(const flce_problem* problem, const flce_facts* facts, flce_plan* plan) {
  memset(plan, 0, sizeof *plan);
  FLCE_TRY(flce_check_problem(problem));
  return flce_plan_checked(problem, facts, plan);
}

flce_status flce_plan_checked(const flce_problem* problem, const flce_facts* facts,
                              flce_plan* plan) {
  memset(plan, 0, sizeof *plan);
  plan->save = problem->save;
  plan->rows = problem->rows;
  flce_choose_dtypes(problem, facts, plan);
  FLCE_TRY(choose_chunks(problem, facts, plan));
  widen_dw_sum(problem, facts, plan);
  list_outputs(problem, plan);
  list_forward_workspace(problem, facts, plan);
  list_gradient_workspace(problem, facts, plan);
  list_shard_workspace(problem, plan);
  assign_offsets(plan);
  flce_count_plan(problem, facts, plan);
  return FLCE_OK;
}

int64_t flce_cross_entropy_workspace_bytes(const flce_problem* problem) {
  return FLCE_COEF_ROWS * problem->tokens * flce_size_of(flce_stat_dtype(problem->dtype));
}
