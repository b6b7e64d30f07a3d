/* Where the kernels of this folder serve: facts about a problem, by its sizes and dtypes, the
 * device, FLCE_KERNEL and measured limits. */
#include "cuda/backend.cuh"
#include "cuda/sm90/fused_logits.cuh"
#include "loss.h"

#include <stdlib.h>
#include <string.h>

/* Tiles' numbers of each row at the most: fused_scratch_of takes them. */
static int64_t number_count(const flce_problem* p) {
  const bool soft = p->has_probabilities;
  return 1 + (soft || p->loss.label_smoothing > 0) + soft + p->wants_entropy +
         2 * p->wants_predictions;
}

/* Of fused_scratch: the numbers, the five vectors, and redo, which has at most two elements more
 * than one a row. */
static int64_t scratch_row_bytes(int64_t vocab, int64_t numbers) {
  return 4 * (numbers * tiles_of(vocab) + 8);
}

/* FLCE_KERNEL: "auto", by measured limits; "gemm": cuBLASLt and separate row passes; "fused": the
 * kernels of sm_90 wherever they can serve, also where others are faster. */
enum KernelChoice { kAutoKernel, kGemmKernel, kFusedKernel };

static flce_status asked_kernel(KernelChoice* choice) {
  const char* text = getenv("FLCE_KERNEL");
  const bool is_auto = !text || !*text || strcmp(text, "auto") == 0;
  *choice = is_auto ? kAutoKernel : strcmp(text, "fused") == 0 ? kFusedKernel : kGemmKernel;
  if (*choice != kGemmKernel || strcmp(text, "gemm") == 0) return FLCE_OK;
  return flce_fail(FLCE_INVALID_ARGUMENT,
                   "FLCE_KERNEL: expected \"auto\", \"gemm\" or \"fused\", got \"%s\"", text);
}

/* By dtypes and sizes alone: the same in a forward and its backward. */
static bool suits_sm90(const flce_problem* p) {
  return (p->dtype == FLCE_BF16 || p->dtype == FLCE_F16) && p->vocab <= kMaxVocab &&
         p->tokens <= INT32_MAX / 2;
}
/* To find the rows takes some 40 us, 2 % of a step of kLeast logits; to gather x, what a product of
 * some twenty classes takes. Both also where an address or FLCE_KERNEL then lets nothing skip. */
static bool is_worth_finding_rows(const flce_problem* p) {
  const double kLeast = 1 << 27;
  const int64_t kLeastVocab = 8192;
  return !p->has_probabilities && p->vocab >= kLeastVocab &&
         (double)p->tokens * (double)p->vocab >= kLeast;
}

/* A product over fewer does not hide what it takes to write z and to make the sums beside it: at
 * 768 a product and a pass are 1.06 times as fast, at 1024 as fast, at 2048 0.95 times. */
constexpr int64_t kLeastHidden = 1024;

/* A cluster always computes 256 rows. A step (H = 4096, V = 128256) over the three GEMMs alone, by
 * this product and by cuBLASLt with a row pass: 64 rows 1.34x and 1.08x, 128 rows 1.23x and 1.09x,
 * 192 rows 1.06x and 1.04x, 256 rows 1.05x and 1.08x (benchmarks/NOTES.md, 2026-11-22). */
constexpr int64_t kLeastRows = 193;

/* Whether the product's kernels have what the loss needs: beside probabilities little else. */
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
