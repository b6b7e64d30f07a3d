/* Decides where the sm_90a kernels are used: facts about a problem, from its sizes and dtypes, the
 * device's capability, FLCE_KERNEL and measured limits. No kernel is launched here. */
#include "cuda/backend.cuh"
#include "cuda/sm90/fused_logits.cuh"
#include "loss.h"

#include <stdlib.h>
#include <string.h>

/* Upper bound of the arrays [tiles of V][rows] that fused_scratch_of lays out. */
static int64_t number_count(const flce_problem* p) {
  const bool soft = p->has_probabilities;
  return 1 + (soft || p->loss.label_smoothing > 0) + soft + p->wants_entropy +
         2 * p->wants_predictions;
}

/* Bytes of fused_scratch for each row: those arrays, up to six vectors [rows], and `retry`, which
 * has 1 + ceil(rows / 256) elements, at most two a row. */
static int64_t scratch_row_bytes(int64_t vocab, int64_t numbers) {
  return 4 * (numbers * tiles_of(vocab) + 8);
}

/* FLCE_KERNEL: "auto": chosen by the measured limits below. "gemm": cuBLASLt and separate row
 * passes. "fused": the sm_90a kernels wherever they work, also where others are faster. */
enum KernelChoice { kAutoKernel, kGemmKernel, kFusedKernel };

static flce_status asked_kernel(KernelChoice* choice) {
  const char* text = getenv("FLCE_KERNEL");
  const bool is_auto = !text || !*text || strcmp(text, "auto") == 0;
  *choice = is_auto ? kAutoKernel : strcmp(text, "fused") == 0 ? kFusedKernel : kGemmKernel;
  if (*choice != kGemmKernel || strcmp(text, "gemm") == 0) return FLCE_OK;
  return flce_fail(FLCE_INVALID_ARGUMENT,
                   "FLCE_KERNEL: expected \"auto\", \"gemm\" or \"fused\", got \"%s\"", text);
}

/* Depends on dtypes and sizes alone, so that a forward and its backward agree. */
static bool suits_sm90(const flce_problem* p) {
  return (p->dtype == FLCE_BF16 || p->dtype == FLCE_F16) && p->vocab <= kMaxVocab &&
         p->tokens <= INT32_MAX / 2;
}

/* Finding the valid rows takes about 40 us, 2 % of a step with kLeast logits. Gathering their x
 * takes as long as a GEMM with about twenty classes. Both are paid even where an unaligned address
 * or FLCE_KERNEL then prevents every kernel from skipping rows. */
static bool is_worth_finding_rows(const flce_problem* p) {
  const double kLeast = 1 << 27;
  const int64_t kLeastVocab = 8192;
  return !p->has_probabilities && p->vocab >= kLeastVocab &&
         (double)p->tokens * (double)p->vocab >= kLeast;
}

/* Least H at which the fused GEMM also serves where z has to be written. With a smaller k its
 * mainloop is too short to hide the stores of z and the sums of the epilogue. Speed of a cuBLASLt
 * GEMM and a row pass relative to it: 1.06x at H = 768, 1.00x at 1024, 0.95x at 2048. */
constexpr int64_t kLeastHidden = 1024;

/* Least rows: a cluster always computes 256. Time of a step (H = 4096, V = 128256) over its three
 * bare GEMMs, with this kernel and with cuBLASLt and a row pass: 64 rows 1.34x and 1.08x, 128 rows
 * 1.23x and 1.09x, 192 rows 1.06x and 1.04x, 256 rows 1.05x and 1.08x (benchmarks/NOTES.md,
 * 2026-11-22). */
constexpr int64_t kLeastRows = 193;

/* Whether the fused kernels implement this loss. With probabilities they implement no other
 * option. */
static bool suits_fused_gemm(const flce_problem* p) {
  const flce_loss* o = &p->loss;
  const bool rises = (float)(o->logit_scale / o->temperature * kLog2eExact) > 0;
  const bool others = o->label_smoothing > 0 || flce_caps_logits(o) || !rises ||
                      p->has_class_weight || p->has_temperature || p->wants_entropy ||
                      p->wants_predictions;
  return !p->unaligned && !(p->has_probabilities && others);
}

flce_status cuda_sm90_facts(int capability, const flce_problem* p, flce_facts* facts) {
  facts->fused_row_bytes = facts->fused_tile_rows = facts->bias_parts = 0;
  facts->skips_rows = facts->fused_writes_z = false;
  KernelChoice choice;
  FLCE_TRY(asked_kernel(&choice));
  if (capability != 90 || !suits_sm90(p)) return FLCE_OK;
  const bool is_bf16 = p->dtype == FLCE_BF16, always = choice == kFusedKernel;
  facts->skips_rows = is_bf16 && is_worth_finding_rows(p);
  if (choice == kGemmKernel) return FLCE_OK;
  if (is_bf16 && !p->weight_unaligned) facts->bias_parts = cuda_bias_parts(p->hidden);
  if (suits_fused_gemm(p) && (always || p->rows >= kLeastRows)) {
    facts->fused_row_bytes = scratch_row_bytes(p->vocab, number_count(p));
    facts->fused_tile_rows = kClusterRows;
    facts->fused_writes_z = always || p->hidden >= kLeastHidden;
  }
  return FLCE_OK;
}
