/* flce_gpu_facts: the facts of the CUDA backend from a GPU's numbers, without CUDA. They decide
 * where an architecture's own GEMMs are used, by sizes, dtypes, its row of architectures.h,
 * FLCE_KERNEL and measured limits. */
#include "gpu.h"
#include "loss.h"

#include <math.h>
#include <string.h>

static int64_t most_of(int64_t a, int64_t b) {
  return a > b ? a : b;
}

/* ---- an architecture's own GEMMs ---- */

/* Upper bound of the arrays [tiles of V][rows] that fused_scratch_of lays out. */
static int64_t number_count(const flce_problem* p, int64_t tiles) {
  const bool soft = p->has.probabilities;
  return 1 + (soft || p->loss.label_smoothing > 0) + soft + p->wants.entropy +
         2 * p->wants.predictions + flce_searches_tiles(flce_candidates(p->wants.topk), tiles);
}

/* Bytes of fused_scratch for each row: those arrays, up to six vectors [rows], the
 * PackedRow of a divergence, and `retry`, which has 1 + ceil(rows / 256) elements, at most two a
 * row. */
static int64_t scratch_row_bytes(const flce_logits_gemm_sizes* gemm, const flce_problem* p) {
  const int64_t tiles = flce_ceil_div(p->shape.vocab, gemm->tile_columns);
  return 4 * (number_count(p, tiles) * tiles + 8 +
              (p->divergence.teacher ? FLCE_PACKED_ROW_FLOATS : 0));
}

/* FLCE_KERNEL: "auto": chosen by the measured limits below. "gemm": cuBLASLt and separate row
 * passes. "fused": the architecture's own kernels wherever they work, also where others are faster.
 */
typedef enum kernel_choice { AUTO_KERNEL, GEMM_KERNEL, FUSED_KERNEL } kernel_choice;

static flce_status read_choice(const char* text, kernel_choice* choice) {
  const bool is_auto = !text || !*text || strcmp(text, "auto") == 0;
  *choice = is_auto ? AUTO_KERNEL : strcmp(text, "fused") == 0 ? FUSED_KERNEL : GEMM_KERNEL;
  if (*choice != GEMM_KERNEL || strcmp(text, "gemm") == 0) return FLCE_OK;
  return flce_fail(FLCE_INVALID_ARGUMENT,
                   "FLCE_KERNEL: expected \"auto\", \"gemm\" or \"fused\", got \"%s\"", text);
}

/* Whether an architecture's own GEMMs can run. Depends on dtypes and sizes alone, so that a forward
 * and its backward agree. */
static bool suits_own_gemms(const flce_problem* p) {
  const bool is_16_bit = p->dtypes.gemm == FLCE_BF16 || p->dtypes.gemm == FLCE_F16;
  if (!is_16_bit) return false; /* they are compiled for operands of these two dtypes */
  /* Their rows and columns are of type int, also when rounded up to whole tiles. */
  return p->shape.vocab <= FLCE_MAX_VOCAB && p->shape.tokens <= INT32_MAX / 2;
}

/* Finding the valid rows takes about 40 us, 2 % of a step with kLeast logits. Gathering their x
 * takes as long as a GEMM with about twenty classes. Both are paid even where an unaligned address
 * or FLCE_KERNEL then prevents every kernel from skipping rows. */
static bool is_worth_finding_rows(const flce_problem* p) {
  const double kLeast = 1 << 27;
  const int64_t kLeastVocab = 8192;
  return !p->has.probabilities && p->shape.vocab >= kLeastVocab &&
         (double)p->shape.tokens * (double)p->shape.vocab >= kLeast;
}

/* Whether l is a positive factor times z and nothing but the loss is computed of it. */
static bool has_scaled_logits(const flce_problem* p) {
  const flce_loss* o = &p->loss;
  const bool rises = (float)(o->logit_scale / o->temperature * FLCE_LOG2E) > 0;
  return rises && !flce_caps_logits(o) && o->label_smoothing == 0 && !p->wants.entropy &&
         !p->wants.predictions;
}

/* Whether the fused logits GEMM implements this loss, in one of the versions that enum Kind of
 * cuda/rows/row.cuh names. */
static bool suits_fused_gemm(const flce_problem* p) {
  if (p->has.unaligned_operand) return false; /* TMA reads from multiples of 16 bytes */
  if (!p->has.probabilities) return true;     /* kGeneral, the general version, has every option */
  /* kSoft, the version for probabilities, has no other option than a bias. */
  return has_scaled_logits(p) && !p->has.class_weight && !p->has.temperature;
}

/* Whether kScaled, the version whose l is a factor of each row times z, implements one of a
 * divergence's two logits GEMMs. It alone packs the logits of both; it is for class targets and has
 * no other option than a bias. */
static bool suits_packing_kernel(const flce_problem* p) {
  return has_scaled_logits(p) && !p->has.probabilities;
}

/* Whether the fused kernels run both logits GEMMs of a divergence, and the student's packs the
 * logits of both. `always`: wherever they can, also where cuBLASLt is faster. */
static bool suits_packing(const flce_logits_gemm_sizes* gemm, const flce_problem* p, bool always) {
  const flce_problem* t = p->divergence.teacher;
  if (!t || t->has.logits) return false; /* there is no GEMM of a teacher */
  if (flce_is_sharded(p)) return false;  /* the ranks exchange the statistics of both first */
  if (!suits_own_gemms(t) || !suits_fused_gemm(t)) return false; /* the teacher's is not fused */
  if (!suits_packing_kernel(p) || !suits_packing_kernel(t)) return false; /* one has an option */
  return always || t->shape.hidden >= gemm->least_hidden; /* the teacher's GEMM writes z */
}

/* Sets the facts of the architecture's own GEMMs, fused_*, skips_rows, bias_parts. They are 0 or
 * false where it has none, or FLCE_KERNEL or the problem rules them out; skips_rows does not depend
 * on FLCE_KERNEL. */
static flce_status own_gemm_facts(const flce_architecture* a, const char* kernel,
                                  const flce_problem* p, flce_facts* facts) {
  facts->fused_row_bytes = facts->fused_tile_rows = facts->bias_parts = 0;
  facts->skips_rows = facts->fused_writes_z = facts->fused_packs = false;
  kernel_choice choice;
  FLCE_TRY(read_choice(kernel, &choice));
  if (!a || !suits_own_gemms(p)) return FLCE_OK;
  const bool is_bf16 = p->dtypes.gemm == FLCE_BF16, always = choice == FUSED_KERNEL;
  facts->skips_rows = a->skips_rows && is_bf16 && is_worth_finding_rows(p);
  if (choice == GEMM_KERNEL) return FLCE_OK;
  if (is_bf16 && !p->backward.has_unaligned)
    facts->bias_parts = flce_bias_parts(&a->weight, p->shape.hidden);
  const flce_logits_gemm_sizes* gemm = &a->logits;
  if (gemm->tile_columns > 0 && suits_fused_gemm(p) &&
      (always || p->shape.rows >= gemm->least_rows)) {
    facts->fused_row_bytes = scratch_row_bytes(gemm, p);
    facts->fused_tile_rows = gemm->cluster_rows;
    facts->fused_writes_z = always || p->shape.hidden >= gemm->least_hidden;
    facts->fused_packs = facts->fused_writes_z && suits_packing(gemm, p, always);
  }
  return FLCE_OK;
}

/* ---- scratch ---- */

/* Bytes of cuBLASLt's workspace. NVIDIA recommends 32 MiB from Hopper on, 8 MiB before. It takes at
 * most an eighth of max_memory. The GEMMs of a small problem need less: split-K keeps at most
 * kPartials partial results. */
static int64_t gemm_workspace(const flce_problem* p, int64_t capability) {
  const int64_t mib = 1 << 20, kPartials = 16;
  int64_t cap = (capability >= 90 ? 32 : 8) * mib;
  if (!p->memory.bound_is_default && p->memory.bound / 8 < cap)
    cap = most_of(p->memory.bound / 8 / 256 * 256, mib);
  const double most =
      fmax((double)p->shape.tokens * (double)p->shape.vocab,
           (double)p->shape.hidden * fmax((double)p->shape.tokens, (double)p->shape.vocab));
  const double wanted = most * (double)(kPartials * flce_size_of(flce_stat_dtype(p->dtypes.gemm)));
  if (wanted >= (double)cap) return cap;
  return most_of(mib, flce_ceil_div((int64_t)wanted, 256) * 256);
}

static int64_t column_sum_bytes(int64_t rows, int64_t cols, flce_dtype dtype) {
  if (rows == 0 || cols == 0) return 0;
  return flce_row_splits(rows, cols, dtype) * cols * flce_size_of(flce_stat_dtype(dtype));
}

/* Scratch of the three uses of column_sum: E [N][V] or a block of it, W [V][H] and x [N][H]. */
static int64_t column_sum_scratch(const flce_problem* p) {
  const int64_t e = flce_most_column_parts(p->shape.tokens, p->shape.vocab, p->dtypes.gemm) *
                    flce_size_of(flce_stat_dtype(p->dtypes.gemm));
  const int64_t w = column_sum_bytes(p->shape.vocab, p->shape.hidden, p->dtypes.gemm);
  const int64_t x = column_sum_bytes(p->shape.tokens, p->shape.hidden, p->dtypes.gemm);
  return most_of(e, most_of(w, x));
}

/* CUB's radix sort of `count` pairs of 4 + 4 bytes: a copy of both arrays, and for each block of a
 * pass 256 counters. */
static int64_t sort_scratch(int64_t count) {
  const int64_t kBlock = 4096, kPasses = 4;
  return 8 * count + 1024 * (flce_ceil_div(count, kBlock) + kPasses);
}

/* CUB's selection: a state of 16 bytes for each block. */
static int64_t select_scratch(int64_t tokens) {
  const int64_t kBlock = 1024, kFirst = 32;
  return 16 * (flce_ceil_div(tokens, kBlock) + kFirst);
}

static int64_t order_bytes(int64_t tokens) {
  const int64_t array = flce_order_aligned(4 * tokens);
  return tokens <= FLCE_COUNTED_TOKENS ? 2 * array : 4 * array + sort_scratch(tokens);
}

static flce_status sample_bytes(const flce_problem* p, int64_t* bytes) {
  const flce_sample_sizes s = flce_sample_sizes_of(p->shape.rows, p->sampling.eps, p->shape.vocab,
                                                   flce_ceil_div(p->shape.hidden, 8) * 8);
  if (s.count > INT32_MAX)
    return flce_fail(FLCE_UNSUPPORTED,
                     "gradient_eps: expected at most %d samples of all rows, got up to %lld; take "
                     "a larger one",
                     INT32_MAX, (long long)s.count);
  *bytes = 4 * s.array_bytes + s.starts_bytes + s.sum_bytes + sort_scratch(s.count);
  return FLCE_OK;
}

/* ---- facts ---- */

/* The problem with H rounded up to `alignment`. If that changes H, x and W are copied to the
 * workspace, where they are aligned. dW and the saved rows are not copied, so
 * backward.has_unaligned stays. */
static flce_problem pad_hidden(const flce_problem* problem, int64_t alignment) {
  flce_problem padded = *problem;
  padded.shape.hidden = flce_ceil_div(problem->shape.hidden, alignment) * alignment;
  if (padded.shape.hidden != problem->shape.hidden) padded.has.unaligned_operand = false;
  return padded;
}

flce_status flce_gpu_facts(const flce_gpu* gpu, const flce_architecture* architecture,
                           const char* kernel, const flce_problem* caller_problem,
                           flce_facts* facts) {
  flce_facts_of_type(false, caller_problem->dtypes.gemm, facts);
  const flce_problem padded = pad_hidden(caller_problem, facts->hidden_alignment),
                     *problem = &padded;
  facts->multiprocessors = gpu->multiprocessors;
  facts->gemm_workspace_bytes = gemm_workspace(problem, gpu->capability);
  facts->column_sum_bytes = column_sum_scratch(problem);
  facts->compact_bytes = facts->sample_bytes = 0;
  FLCE_TRY(flce_check_order(problem->shape.tokens, problem->shape.vocab));
  facts->order_bytes = order_bytes(problem->shape.tokens);
  if (flce_is_sampled(problem)) FLCE_TRY(sample_bytes(problem, &facts->sample_bytes));
  FLCE_TRY(own_gemm_facts(architecture, kernel, problem, facts));
  /* Rows may be gathered. */
  if (problem->shape.rows < problem->shape.tokens || facts->skips_rows || problem->derived.gathers)
    facts->compact_bytes =
        flce_index_bytes(problem->shape.tokens) + select_scratch(problem->shape.tokens);
  return FLCE_OK;
}
