/* Copies of a row into shared memory that a thread makes for itself, vector by vector: they need
 * no registers on their way, and no barrier. */
#ifndef FLCE_CUDA_STAGE_CUH
#define FLCE_CUDA_STAGE_CUH

#include "row.cuh"

enum { kGroups = 4 }; /* of copies, which are waited for one after the other */

/* Stands for the type of target probabilities where the targets are classes. */
using NoTargets = char;
template <typename T>
constexpr bool kIsSoft = sizeof(T) > 1;

template <int BYTES>
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  const unsigned to = (unsigned)__cvta_generic_to_shared(shared);
  const size_t from = __cvta_generic_to_global(global);
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES)
                 : "memory");
  }
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until at most `newer` groups (0 .. kGroups - 1) of this thread's copies are under way. */
__device__ __forceinline__ void wait_copies(int newer) {
  static_assert(kGroups == 4, "a case for each number");
  switch (newer) {
    case 3:
      asm volatile("cp.async.wait_group 3;" ::: "memory");
      break;
    case 2:
      asm volatile("cp.async.wait_group 2;" ::: "memory");
      break;
    case 1:
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      break;
    default:
      asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
}

/* A row of z and of t. */
template <typename Z, typename T>
struct Source {
  const Z* z;
  const T* t;
  int lead;
  bool t_aligned; /* with the vectors of z */
  Place place;
};

template <typename Z, typename T>
__device__ __forceinline__ Source<Z, T> open_source(const flce_rows& r, int64_t index) {
  constexpr int kBytes = kVec<Z> * (int)sizeof(T);
  Source<Z, T> source = {};
  source.place.kind = kRowAbsent;
  if (index >= r.rows) return source;
  source.place = place_of(r, index);
  source.z = (const Z*)r.z + index * r.z_pitch;
  source.lead = lead_of(source.z);
  if constexpr (kIsSoft<T>) {
    source.t = (const T*)r.probabilities + source.place.at * r.probabilities_pitch;
    source.t_aligned = is_aligned(source.t - source.lead, kBytes < 16 ? kBytes : 16);
  }
  return source;
}

/* The block's part of a row in its shared memory: `slots` vectors of z, then those of t. */
template <typename Z, typename T>
struct Stage {
  Vec<Z, kVec<Z>>* z;
  T* t;
  int first; /* the row's vector in slot 0 */
};

template <typename Z>
__device__ __forceinline__ int slot_of(int tile, int u) {
  return threadIdx.x + (tile * kUnroll<Z> + u) * blockDim.x;
}

/* Logits at the row's ends come element by element, those beyond them as -inf. */
template <typename Z, typename T>
__device__ __forceinline__ void stage_vector(const Stage<Z, T>& stage, const Source<Z, T>& source,
                                             int vocab, int slot) {
  constexpr int N = kVec<Z>, kBytes = N * (int)sizeof(T);
  const int col = column_of<Z>(stage.first + slot, source.lead);
  const bool inside = col >= 0 && col + N <= vocab;
  if (inside) {
    copy_async<16>(stage.z + slot, source.z + col);
  } else {
    load_columns<true>(source.z, col, vocab, stage.z[slot]);
  }
  if constexpr (kIsSoft<T>) {
    if (!inside || !source.t_aligned) return;
#pragma unroll
    for (int begin = 0; begin < kBytes; begin += 16) {
      copy_async<(kBytes < 16 ? kBytes : 16)>((char*)(stage.t + slot * N) + begin,
                                              (const char*)(source.t + col) + begin);
    }
  }
}

/* The targets of a tile's vectors that stage_vector leaves out: those at the row's ends, and all of
 * a row whose targets do not begin where a vector of its logits does. Loads before stores: each
 * waits its full time. */
template <typename Z, typename T>
__device__ __forceinline__ void stage_odd_targets(const Stage<Z, T>& stage,
                                                  const Source<Z, T>& source, int vocab, int tile) {
  constexpr int N = kVec<Z>;
  const int begin = column_of<Z>(stage.first + slot_of<Z>(tile, 0), source.lead);
  const int end = begin + ((kUnroll<Z> - 1) * (int)blockDim.x + 1) * N;
  if (source.t_aligned && begin >= 0 && end <= vocab) return;
  Vec<T, N> raw[kUnroll<Z>];
#pragma unroll
  for (int u = 0; u < kUnroll<Z>; u++) {
    const int col = column_of<Z>(stage.first + slot_of<Z>(tile, u), source.lead);
#pragma unroll
    for (int e = 0; e < N; e++) {
      raw[u].at[e] = (unsigned)(col + e) < (unsigned)vocab ? source.t[col + e] : from_stat<T>(0.0f);
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll<Z>; u++) {
    const int col = column_of<Z>(stage.first + slot_of<Z>(tile, u), source.lead);
    if (source.t_aligned && col >= 0 && col + N <= vocab) continue; /* under way */
    ((Vec<T, N>*)stage.t)[slot_of<Z>(tile, u)] = raw[u];
  }
}

template <typename Z, typename T>
__device__ __forceinline__ void stage_tile(const Stage<Z, T>& stage, const Source<Z, T>& source,
                                           int vocab, int tile) {
  if (source.place.kind != kRowValid) return;
#pragma unroll
  for (int u = 0; u < kUnroll<Z>; u++) stage_vector(stage, source, vocab, slot_of<Z>(tile, u));
  if constexpr (kIsSoft<T>) stage_odd_targets(stage, source, vocab, tile);
}

/* Tiles of the groups before `group`. */
__device__ __forceinline__ int tiles_before(int group, int tiles) {
  return tiles * group / kGroups;
}

/* Begins the copies of a whole row, kGroups groups of them. */
template <typename Z, typename T>
__device__ __forceinline__ void stage_row(const Stage<Z, T>& stage, const Source<Z, T>& source,
                                          int vocab, int tiles) {
  for (int group = 0; group < kGroups; group++) {
    for (int tile = tiles_before(group, tiles); tile < tiles_before(group + 1, tiles); tile++) {
      stage_tile(stage, source, vocab, tile);
    }
    commit_copies();
  }
}

#endif
