/* The GPU architectures that have GEMMs of their own, a row each: the numbers that the plan's facts
 * and the kernels share. csrc/cuda/fused/architectures.cu has their kernels, by the same index. No
 * CUDA here. On a GPU without a row, or where a row has no kernel, cuBLASLt and the row kernels do
 * all. */
#ifndef FLCE_ARCHITECTURES_H
#define FLCE_ARCHITECTURES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The fused logits GEMM: fused_logits of backend.h. Without a kernel all are 0. */
typedef struct flce_logits_gemm_sizes {
  int64_t tile_rows, tile_columns, /* tokens and classes of an output tile */
      cluster_rows,                /* tokens that are always computed together */
      least_rows,                  /* fewer take longer than with cuBLASLt and a row pass */
      least_hidden;                /* so too a smaller H where z has to be written */
} flce_logits_gemm_sizes;

/* dW's GEMM with the sums of db: grad_weight_gemm of backend.h. Without a kernel both are 0. */
typedef struct flce_weight_gemm_sizes {
  int64_t tile_columns, /* elements of H of an output tile */
      most_bias_parts;  /* partial sums of a class's db: so many column tiles make one each */
} flce_weight_gemm_sizes;

typedef struct flce_architecture {
  int64_t capability; /* 90 for compute capability 9.0 */
  flce_logits_gemm_sizes logits;
  flce_weight_gemm_sizes weight;
  bool skips_rows; /* the fused logits GEMM skips tiles of absent rows: facts.skips_rows */
} flce_architecture;

/* The indices of the rows. */
enum { FLCE_SM90, FLCE_ARCHITECTURES };

#ifdef __cplusplus
#define FLCE_CONSTANT static constexpr
#else
#define FLCE_CONSTANT static const
#endif

FLCE_CONSTANT flce_architecture flce_architectures[FLCE_ARCHITECTURES] = {
    /* FLCE_SM90. least_rows: time of a step (H = 4096, V = 128256) over its three bare GEMMs, with
     * this kernel and with cuBLASLt and a row pass: 64 rows 1.34x and 1.08x, 128 rows 1.23x and
     * 1.09x, 192 rows 1.06x and 1.04x, 256 rows 1.05x and 1.08x (benchmarks/NOTES.md, 2026-11-22).
     * least_hidden: with a smaller k the mainloop is too short to hide the stores of z and the sums
     * of the epilogue. Speed of a cuBLASLt GEMM and a row pass relative to it: 1.06x at H = 768,
     * 1.00x at 1024, 0.95x at 2048. */
    {.capability = 90,
     .logits = {.tile_rows = 128,
                .tile_columns = 192,
                .cluster_rows = 256,
                .least_rows = 193,
                .least_hidden = 1024},
     .weight = {.tile_columns = 128, .most_bias_parts = 8},
     .skips_rows = true},
};

/* The row of a GPU; NULL if there is none. */
static inline const flce_architecture* flce_architecture_of(int64_t capability) {
  for (int i = 0; i < FLCE_ARCHITECTURES; i++)
    if (flce_architectures[i].capability == capability) return &flce_architectures[i];
  return NULL;
}

#endif
