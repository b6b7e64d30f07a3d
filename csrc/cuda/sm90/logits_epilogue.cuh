/* The math of the fused logits GEMM's epilogue: from a tile of z in a consumer warpgroup's
 * accumulators to E or z in staging memory, in the layout of a swizzled TMA store, and to the sums
 * of each row. Barriers and TMA stores are in logits_gemm.cu. */
#ifndef FLCE_CUDA_SM90_LOGITS_EPILOGUE_CUH
#define FLCE_CUDA_SM90_LOGITS_EPILOGUE_CUH

#include "cuda/fused/architectures.cuh"
#include "cuda/sm90/pipeline.cuh"

constexpr flce_logits_gemm_sizes kSizes = flce_architectures[FLCE_SM90].logits;

enum {
  kTileRows = (int)kSizes.tile_rows,
  kTileColumns = (int)kSizes.tile_columns,
  kClusterRows = (int)kSizes.cluster_rows,
  kSlab = 64, /* columns of E in one TMA store: 128 bytes, one swizzled line */
  kSlabs = kTileColumns / kSlab,
  kBytesSlab = kTileRows * kSlab * 2,
  /* z uses the same staging memory, kLogitRows rows at a time. */
  kLogitRows = kTileRows / 2,
  kLogitBox = 32, /* columns of z in one TMA store: 128 bytes */
  kBytesLogitBox = kLogitRows * kLogitBox * 4,
  kParts = kTileColumns / 8, /* parts of 8 columns; a thread has two neighbouring columns of each */
};

/* The accumulator of a thread's row q, 0 to 3 (half q / 2 of the tile, row q % 2 of the fragment
 * there), in column e of part j. */
__device__ __forceinline__ float& acc_at(Accumulators& acc, int q, int j, int e) {
  return acc[q >> 1][4 * j + 2 * (q & 1) + e];
}

/* Rows from a thread's first row to its row q. */
__device__ __forceinline__ constexpr int row_step(int q) {
  return (q >> 1) * 64 + (q & 1) * 8;
}

struct Tile {
  int row, column; /* of its first element */
};

/* A thread's fragment of a tile: which rows and columns it holds. */
struct Fragment {
  Tile tile;
  int first_row;    /* its row 0; row q is row_step(q) further on */
  int first_column; /* its column 0; the others are 8 j + e further on */
  int lane, warp;   /* lane of the warp, warp of the warpgroup */
};

/* Offsets k, factors and a thread's partial sums of its four rows. */
struct TileRows {
  float offset[4], sum[4]; /* sum: of 2^(log2_l - k) */
  /* for the general and the soft kernels */
  float scale[4], weighted_gap[4], weight_sum[4], entropy_sum[4];
  /* kExpTopsResult: the largest E in bfloat16 of the thread's even columns and of its odd ones */
  uint32_t exp_top[4];
};

/* Shared addresses of the bias and the class weights of a tile's columns; both are 0 beyond the
 * vocabulary. */
struct ColumnValues {
  uint32_t bias, weight;
};

/* z += bias. */
__device__ __forceinline__ void add_bias(const ColumnValues& columns, const Fragment& frag,
                                         Accumulators& acc) {
  const uint32_t at = columns.bias + 8 * (frag.lane & 3);
#pragma unroll
  for (int j = 0; j < kParts; j++) {
    float b[2];
    sm90::load_shared(at + 32 * j, b);
#pragma unroll
    for (int q = 0; q < 4; q++) {
#pragma unroll
      for (int e = 0; e < 2; e++) acc_at(acc, q, j, e) += b[e];
    }
  }
}

/* The shared address of a thread's two columns of part j in row q, 0 or 1, of one half (64 rows) of
 * the tile in staging memory: boxes of kLogitBox columns with the 128-byte swizzle of TMA. */
__device__ __forceinline__ uint32_t staged_at(uint32_t address, const Fragment& frag, int j,
                                              int q) {
  const int line = frag.lane >> 2; /* row modulo 8, by which 16-byte chunks are swizzled */
  const uint32_t row = address + (frag.warp * 16 + line) * 128 + (frag.lane & 1) * 8;
  const int chunk = (j % 4) * 2 + ((frag.lane & 3) >> 1);
  return row + (j / 4) * kBytesLogitBox + ((chunk ^ line) << 4) + q * 8 * 128;
}

/* Writes one half of the tile's z to staging memory. */
__device__ __forceinline__ void stage_logits(uint32_t address, const Fragment& frag,
                                             const float* acc) {
#pragma unroll
  for (int j = 0; j < kParts; j++) {
#pragma unroll
    for (int q = 0; q < 2; q++) {
      sm90::store_shared(staged_at(address, frag, j, q), acc[4 * j + 2 * q],
                         acc[4 * j + 2 * q + 1]);
    }
  }
}

/* Overwrites one half of the teacher's z in staging memory by packed logits. acc:
 * log2_l. */
template <bool RETRY>
__device__ __forceinline__ void stage_packed(uint32_t address, const fused_params& params,
                                             const fused_scratch& s, const Fragment& frag, int half,
                                             const TileRows& rows, const float* acc) {
#pragma unroll
  for (int q = 0; q < 2; q++) {
    const int row = min(frag.first_row + row_step(2 * half + q), params.rows - 1);
    PackedRow packed = s.packing[row];
    if (RETRY) packed = packed_row_from(packed, rows.offset[2 * half + q], s.top[row]);
#pragma unroll
    for (int j = 0; j < kParts; j++) {
      const uint32_t at = staged_at(address, frag, j, q);
      float values[2];
      sm90::load_shared(at, values);
      pack_classes(packed, {acc[4 * j + 2 * q], acc[4 * j + 2 * q + 1]}, values);
      sm90::store_shared(at, values[0], values[1]);
    }
  }
}

/* Kinds whose rows have a factor of z of their own. */
template <Kind KIND>
constexpr bool kScalesRows = KIND == kGeneral || KIND == kScaled;

/* Replaces z by log2_l. */
template <Kind KIND>
__device__ __forceinline__ void make_log2_logits(const fused_params& params, const TileRows& rows,
                                                 Accumulators& acc) {
#pragma unroll
  for (int j = 0; j < kParts; j++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
      for (int q = 0; q < 4; q++) {
        float& z = acc_at(acc, q, j, e);
        z = KIND == kScaled ? rows.scale[q] * z : general_log2_logit(params, rows.scale[q], z);
      }
    }
  }
}

/* Adds the sums of label smoothing. They include the target, so this precedes hide_columns. */
__device__ __forceinline__ void add_weighted_gaps(const ColumnValues& columns, const Fragment& frag,
                                                  Accumulators& acc, TileRows& rows) {
  const uint32_t at = columns.weight + 8 * (frag.lane & 3);
#pragma unroll
  for (int j = 0; j < kParts; j++) {
    float w[2];
    sm90::load_shared(at + 32 * j, w);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if (w[e] == 0) continue; /* also where the logit is inf or NaN */
#pragma unroll
      for (int q = 0; q < 4; q++) {
        rows.weighted_gap[q] += w[e] * (acc_at(acc, q, j, e) - (rows.offset[q] - kAboveTarget));
      }
    }
  }
}

/* A type that loads two neighbouring elements of a row in one access. */
template <typename T>
struct PairOf {
  using type = uint32_t;
};
template <>
struct PairOf<float> {
  using type = float2;
};
template <>
struct PairOf<double> {
  using type = double2;
};

/* Two neighbouring elements of a row, 0 beyond its end. PAIRED: every pair is aligned to its
 * size. */
template <typename T, bool PAIRED>
__device__ __forceinline__ typename PairOf<T>::type load_pair(const T* row, int column, int vocab) {
  using Pair = typename PairOf<T>::type;
  if (PAIRED && column + 1 < vocab) return *(const Pair*)(row + column);
  Pair pair = {};
#pragma unroll
  for (int e = 0; e < 2; e++) {
    if (column + e < vocab) ((T*)&pair)[e] = row[column + e];
  }
  return pair;
}

/* Adds t and t z of two of a thread's rows of the tile. A t of 0 adds nothing, even where z is inf
 * or NaN. */
template <typename T, bool PAIRED>
__device__ __forceinline__ void add_probabilities_of(const fused_params& params,
                                                     const Fragment& frag, int half,
                                                     const float* acc, TileRows& rows) {
  /* Parts whose loads are in flight together, as many as the registers allow. */
  constexpr int kBatch = sizeof(T) == 8 ? 2 : sizeof(T) == 2 && PAIRED ? 12 : 6;
  const T* t[2];
#pragma unroll
  for (int q = 0; q < 2; q++) {
    const int row = min(frag.first_row + row_step(2 * half + q), params.rows - 1);
    t[q] = (const T*)params.probabilities + row * params.probabilities_pitch;
  }
#pragma unroll
  for (int first = 0; first < kParts; first += kBatch) {
    /* This branch also keeps the loads of the next batch below it: the registers do not hold two
     * batches. */
    if (frag.first_column + 8 * first >= params.vocab) return;
    typename PairOf<T>::type raw[kBatch][2];
#pragma unroll
    for (int j = 0; j < kBatch; j++) {
#pragma unroll
      for (int q = 0; q < 2; q++) {
        const int column = frag.first_column + 8 * (first + j);
        raw[j][q] = load_pair<T, PAIRED>(t[q], column, params.vocab);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch * 4; i++) {
      const int j = i / 4, q = i / 2 % 2, e = i % 2;
      const float value = (float)to_stat(((const T*)&raw[j][q])[e]);
      float &weight_sum = rows.weight_sum[2 * half + q],
            &weighted_gap = rows.weighted_gap[2 * half + q];
      weight_sum += value;
      if (value != 0) weighted_gap = fmaf(value, acc[4 * (first + j) + 2 * q + e], weighted_gap);
    }
  }
}

template <typename T>
__device__ __forceinline__ void add_probabilities_as(const fused_params& params,
                                                     const Fragment& frag, const Accumulators& acc,
                                                     TileRows& rows) {
  const bool paired =
      params.probabilities_pitch % 2 == 0 && is_aligned(params.probabilities, 2 * sizeof(T));
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (paired) {
      add_probabilities_of<T, true>(params, frag, half, acc[half], rows);
    } else {
      add_probabilities_of<T, false>(params, frag, half, acc[half], rows);
    }
  }
}

__device__ __forceinline__ void add_probabilities(const fused_params& params, const Fragment& frag,
                                                  const Accumulators& acc, TileRows& rows) {
  switch (params.probabilities_dtype) {
    case FLCE_F64:
      return add_probabilities_as<double>(params, frag, acc, rows);
    case FLCE_F32:
      return add_probabilities_as<float>(params, frag, acc, rows);
    case FLCE_BF16:
      return add_probabilities_as<__nv_bfloat16>(params, frag, acc, rows);
    case FLCE_F16:
      return add_probabilities_as<__half>(params, frag, acc, rows);
  }
}

/* Saves the target's logit to scratch.target and replaces it by -inf: its E is 0, and the row's
 * sums lack it. `at`: the target's column in the tile. */
__device__ __forceinline__ void take_target(const fused_scratch& s, int row, int at, int q,
                                            Accumulators& acc) {
  /* Predicated moves: indexing by a run-time value would put the accumulators into local memory. */
  float z = 0;
  const int index = (at >> 3) * 2 + (at & 1);
#pragma unroll
  for (int j = 0; j < kParts; j++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      asm volatile(
          "{\n.reg .pred hit;\nsetp.eq.s32 hit, %2, %3;\n@hit mov.f32 %0, %1;\n"
          "@hit mov.f32 %1, 0fFF800000;\n}"
          : "+f"(z), "+f"(acc_at(acc, q, j, e))
          : "r"(index), "r"(2 * j + e));
    }
  }
  s.target[row] = z;
}

/* Loads the offsets and scales of the thread's rows and clears its sums. RETRY: the offset that
 * scratch.top gives. */
template <Kind KIND, bool RETRY>
__device__ __forceinline__ void open_tile_rows(const fused_params& params, const fused_scratch& s,
                                               const Fragment& frag, TileRows& rows) {
#pragma unroll
  for (int q = 0; q < 4; q++) {
    const int row = frag.first_row + row_step(q);
    const bool inside = row < params.rows;
    rows.sum[q] = rows.weighted_gap[q] = rows.weight_sum[q] = rows.entropy_sum[q] = rows.scale[q] =
        0;
    rows.exp_top[q] = 0;
    rows.offset[q] = kBlankRow;
    if (inside) rows.offset[q] = RETRY ? offset_of(s, row) : __ldg(s.offset + row);
    if (kScalesRows<KIND> && inside) rows.scale[q] = __ldg(s.scale + row);
  }
}

/* Hides the targets. Sets the logits of blank rows to 0, because x may hold anything there, so that
 * E is 0 and not NaN. Sets columns beyond the vocabulary, which TMA loads fill with zeros, to -inf,
 * so that they add nothing. */
__device__ __forceinline__ void hide_columns(const fused_params& params, const fused_scratch& s,
                                             const Fragment& frag, const TileRows& rows,
                                             Accumulators& acc) {
#pragma unroll
  for (int q = 0; q < 4; q++) {
    const int row = frag.first_row + row_step(q);
    if (row < params.rows) {
      const int hit = __ldg(s.column + row) - frag.tile.column;
      const bool mine = ((hit >> 1) & 3) == (frag.lane & 3);
      if ((unsigned)hit < (unsigned)kTileColumns && mine) take_target(s, row, hit, q, acc);
    }
    if (rows.offset[q] == kBlankRow) {
#pragma unroll
      for (int j = 0; j < kParts; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) acc_at(acc, q, j, e) = 0;
      }
    }
  }
  if (frag.tile.column + kTileColumns <= params.vocab) return;
#pragma unroll
  for (int j = 0; j < kParts; j++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if (frag.first_column + 8 * j + e >= params.vocab) {
#pragma unroll
        for (int q = 0; q < 4; q++) acc_at(acc, q, j, e) = -INFINITY;
      }
    }
  }
}

/* Writes one number of the tile for row q. `value` is the same in the four lanes that share the
 * row. */
__device__ __forceinline__ void write_number(float* values, const fused_params& params,
                                             const Fragment& frag, int q, float value) {
  const int row = frag.first_row + row_step(q);
  if ((frag.lane & 3) != 0 || row >= params.rows) return;
  values[(int64_t)(frag.tile.column / kTileColumns) * params.rows + row] = value;
}

/* Sum and maximum over the four lanes that share a row. */
__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

__device__ __forceinline__ float row_top(Accumulators& acc, int q) {
  float top = -INFINITY;
#pragma unroll
  for (int j = 0; j < kParts; j++) {
    top = fmaxf(top, fmaxf(acc_at(acc, q, j, 0), acc_at(acc, q, j, 1)));
  }
  return quad_max(top);
}

/* Writes the largest log2_l of each row in this tile and its lowest column. */
__device__ __forceinline__ void write_tops(const fused_params& params, const fused_scratch& s,
                                           const Fragment& frag, Accumulators& acc) {
#pragma unroll
  for (int q = 0; q < 4; q++) {
    const float top = row_top(acc, q);
    int column = INT32_MAX;
#pragma unroll
    for (int j = kParts - 1; j >= 0; j--) {
#pragma unroll
      for (int e = 1; e >= 0; e--) {
        if (acc_at(acc, q, j, e) == top) column = frag.first_column + 8 * j + e;
      }
    }
    column = min(column, __shfl_xor_sync(0xffffffffu, column, 1));
    column = min(column, __shfl_xor_sync(0xffffffffu, column, 2));
    write_number(s.tops, params, frag, q, top);
    write_number((float*)s.columns, params, frag, q, __int_as_float(column));
  }
}

/* E of 8 of a thread's accumulators, two rows by four columns: v[2 q + e] for the first part, v[4 +
 * 2 q + e] for the next one. Adds them to the sums; the curve's slope multiplies v alone. */
template <Kind KIND>
__device__ __forceinline__ void exp_parts(const fused_params& params, const fused_scratch& s,
                                          const float* acc, int half, TileRows& rows,
                                          float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int q = half * 2 + ((i >> 1) & 1);
    v[i] = exp2_fast(kScalesRows<KIND> ? acc[i] - rows.offset[q]
                                       : fmaf(acc[i], params.scale, -rows.offset[q]));
    rows.sum[q] += v[i];
  }
  if constexpr (KIND != kGeneral) return;
  if (s.entropy_sums) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int q = half * 2 + ((i >> 1) & 1);
      const float from = rows.offset[q] - kAboveTarget;
      /* 0 where log2_l is -inf */
      rows.entropy_sum[q] += v[i] * fmaxf(acc[i] - from, -largest_finite(from));
    }
  }
  if (params.curve != FLCE_LINE) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int q = half * 2 + ((i >> 1) & 1);
      v[i] *= cap_slope(params.curve, __fdividef(acc[i], rows.scale[q]));
    }
  }
}

/* The shared address that a lane gives to stmatrix for a thread's eight values: in one half (64
 * rows) of a slab, whose 16-byte chunks are swizzled by the row modulo 8. */
__device__ __forceinline__ uint32_t matrices_at(uint32_t slab, const Fragment& frag, int part,
                                                int half) {
  const uint32_t line = slab + (frag.warp * 16 + (frag.lane & 15)) * 128;
  const int chunk = part * 2 + (frag.lane >> 4);
  return line + half * 64 * 128 + ((chunk ^ (frag.lane & 7)) << 4);
}

/* The larger of two pairs of bfloat16 that are not negative, whose bits ascend with their values.
 */
__device__ __forceinline__ uint32_t larger_pair(uint32_t a, uint32_t b) {
  return __vmaxu2(a, b);
}

/* The larger one of a pair, over the four lanes that share a row. */
__device__ __forceinline__ float largest_exp(uint32_t pair) {
  pair = larger_pair(pair, __shfl_xor_sync(0xffffffffu, pair, 1));
  pair = larger_pair(pair, __shfl_xor_sync(0xffffffffu, pair, 2));
  return __uint_as_float(max(pair << 16, pair & 0xffff0000u));
}

/* Makes E of one slab of columns: adds its sums and, if RESULT stores E, writes it to staging
 * memory in the swizzled layout of the TMA store. */
template <FusedResult RESULT, Kind KIND>
__device__ __forceinline__ void exp_slab(const fused_params& params, const fused_scratch& s,
                                         uint32_t address, int slab, const Fragment& frag,
                                         const Accumulators& acc, TileRows& rows) {
#pragma unroll
  for (int part = 0; part < kSlab / 16; part++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float v[8];
      exp_parts<KIND>(params, s, &acc[half][(slab * (kSlab / 16) + part) * 8], half, rows, v);
      if constexpr (stores_exp(RESULT)) {
        const uint32_t packed[4] = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                                    pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
        sm90::store_matrices(matrices_at(address, frag, part, half), packed);
        if constexpr (RESULT == kExpTopsResult) {
#pragma unroll
          for (int i = 0; i < 4; i++) {
            uint32_t& top = rows.exp_top[half * 2 + i % 2];
            top = larger_pair(top, packed[i]);
          }
        }
      }
    }
  }
}

/* Writes the tile's sums of each row. If a row's sum exceeds the limit, records the row's largest
 * log2_l and flags its row cluster: the GEMM computes it again from that offset. A NaN is no such
 * case. */
template <Kind KIND, FusedResult RESULT>
__device__ __forceinline__ void close_tile_rows(const fused_params& params, const fused_scratch& s,
                                                const Fragment& frag, Accumulators& acc,
                                                TileRows& rows) {
  constexpr bool kIsGeneral = KIND == kGeneral, kIsSoft = KIND == kSoft;
  const float limit = KIND == kScaled && s.packing ? kPackedTileLimit : kTileLimit;
  bool beyond = false;
#pragma unroll
  for (int q = 0; q < 4; q++) {
    rows.sum[q] = quad_sum(rows.sum[q]);
    beyond |= rows.sum[q] > limit;
    write_number(s.sums, params, frag, q, rows.sum[q]);
    if constexpr (RESULT == kExpTopsResult)
      write_number(s.exp_tops, params, frag, q, largest_exp(rows.exp_top[q]));
    if (kIsSoft || (kIsGeneral && s.tile_weighted_gaps))
      write_number(s.tile_weighted_gaps, params, frag, q, quad_sum(rows.weighted_gap[q]));
    if constexpr (kIsSoft)
      write_number(s.weight_sums, params, frag, q, quad_sum(rows.weight_sum[q]));
    if (kIsGeneral && s.entropy_sums)
      write_number(s.entropy_sums, params, frag, q, quad_sum(rows.entropy_sum[q]));
  }
  if (!__any_sync(0xffffffffu, beyond)) return;
#pragma unroll
  for (int q = 0; q < 4; q++) {
    const float top = row_top(acc, q) * (kScalesRows<KIND> ? 1 : params.scale);
    const int row = frag.first_row + row_step(q);
    if (rows.sum[q] > limit && (frag.lane & 3) == 0 && row < params.rows) {
      atomicMax(s.top + row, ordered_of(top));
      s.retry[0] = 1;
      s.retry[1 + row / kClusterRows] = 1;
    }
  }
}

#endif
