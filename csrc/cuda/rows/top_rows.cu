/* top_classes: the classes of each row with the largest logits, a block for each row.
 *
 * The columns are divided into groups, whose maxima a pass over the row makes or the fused logits
 * GEMM has written. The count-th largest maximum is a threshold that at least `count` columns reach
 * and, unless many are nearly equal, few more. They are in the groups whose maximum reaches it, and
 * only these groups are read. The block sorts the columns that reach the threshold. Where they are
 * too many, the threshold is raised by bisection, with a pass over the row for each bit. */
#include "cuda/backend.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/rows/row_launch.cuh"
#include "cuda/rows/top_rows.cuh"

#include <cub/block/block_scan.cuh>
#include <type_traits>

enum {
  /* Small thread blocks, of which a multiprocessor holds kTopBlocks: one reads its row while others
   * search, collect and sort. */
  kTopThreads = 256,
  kTopBlocks = 4,
  kGroups = 16 * kTopThreads, /* at most; more than unit_groups wants for the largest topk */
  kCapacity = 2048,           /* candidates that are sorted; a power of two */
};
static_assert(FLCE_CANDIDATES(FLCE_MOST_TOPK) <= kCapacity, "the candidates fit");
static_assert(FLCE_SEARCHED_TILES <= kGroups, "the tiles' maxima fit");

/* A row's values and how they become keys, which ascend with l. EXP: the values are E, at least 0;
 * the target's column, where E is 0, is added as a candidate by its own key. */
template <typename T, bool EXP>
struct KeyedRow {
  const T* values;
  const void* bias; /* stat dtype, or NULL */
  int vocab;
  bool falls;          /* l falls where the value rises */
  int target;          /* EXP: its column */
  uint32_t target_key; /* EXP: of its E, which `values` do not have */
};

/* Ascends with the float; NaN is above all others or, with its sign set, below. */
__device__ __forceinline__ uint32_t key_of(float v) {
  const uint32_t bits = __float_as_uint(v);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

template <typename T, bool EXP>
__device__ __forceinline__ uint32_t key_at(const KeyedRow<T, EXP>& row, T raw, int col) {
  if constexpr (EXP) return __float_as_uint((float)to_stat(raw));
  float v = (float)to_stat(raw);
  if (row.bias) v = (float)(to_stat(raw) + ((const stat_t<T>*)row.bias)[col]);
  return key_of(row.falls ? -v : v);
}

/* Calls visit(keys, column) with the keys of a vector of columns, the first of which is `first`. */
template <typename T, bool EXP, typename Visit>
__device__ __forceinline__ void visit_vector(const KeyedRow<T, EXP>& row,
                                             const Vec<T, kVec<T>>& raw, int first, Visit visit) {
  uint32_t keys[kVec<T>];
#pragma unroll
  for (int e = 0; e < kVec<T>; e++) keys[e] = key_at(row, raw.at[e], first + e);
  visit(keys, first);
}

/* The same with that of one column. */
template <typename T, bool EXP, typename Visit>
__device__ __forceinline__ void visit_column(const KeyedRow<T, EXP>& row, int col, Visit visit) {
  const uint32_t keys[1] = {key_at(row, row.values[col], col)};
  visit(keys, col);
}

/* What a thread reads at a time, a unit: a vector of columns where the row is aligned, else, and at
 * the row's end, one column. */
template <typename T, bool EXP>
struct Units {
  int vectors, count;

  __device__ explicit Units(const KeyedRow<T, EXP>& row)
      : vectors(is_aligned(row.values, 16) ? row.vocab / kVec<T> : 0),
        count(vectors + row.vocab - vectors * kVec<T>) {}

  /* Calls visit(keys, column) with the keys of unit u, whose vector is `raw`. */
  template <typename Visit>
  __device__ __forceinline__ void visit(const KeyedRow<T, EXP>& row, int u,
                                        const Vec<T, kVec<T>>& raw, Visit visit) const {
    constexpr int N = kVec<T>;
    if (u < vectors) {
      visit_vector(row, raw, u * N, visit);
    } else {
      visit_column(row, vectors * N + u - vectors, visit);
    }
  }

  /* Calls visit(keys, column) for the units first, first + step, ... */
  template <typename Visit>
  __device__ __forceinline__ void each(const KeyedRow<T, EXP>& row, int first, int step,
                                       Visit visit_keys) const {
    constexpr int kLoads = 4;
    for (int u = first; u < count; u += kLoads * step) {
      Vec<T, kVec<T>> raw[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; i++) {
        if (u + i * step < vectors)
          load_vec<false>(row.values + (int64_t)(u + i * step) * kVec<T>, raw[i]);
      }
#pragma unroll
      for (int i = 0; i < kLoads; i++) {
        if (u + i * step < count) visit(row, u + i * step, raw[i], visit_keys);
      }
    }
  }
};

/* Groups of units: unit u belongs to group u modulo their number, a multiple of the block's size.
 */
template <typename T, bool EXP>
struct UnitGroups {
  int count;

  /* Writes the largest key of each group. */
  __device__ __forceinline__ void find_tops(const KeyedRow<T, EXP>& row, uint32_t* tops) const {
    for (int g = threadIdx.x; g < count; g += kTopThreads) tops[g] = 0;
    int next = threadIdx.x; /* a thread's units go to its groups in order */
    Units<T, EXP>(row).each(row, threadIdx.x, kTopThreads, [&](const auto& keys, int) {
      uint32_t top = keys[0];
      for (uint32_t key : keys) top = max(top, key);
      tops[next] = max(tops[next], top);
      next += kTopThreads;
      if (next >= count) next = threadIdx.x;
    });
  }

  /* Calls visit(keys, column) with the keys of the listed groups, by all threads of the block. A
   * warp reads a group. */
  template <typename Visit>
  __device__ __forceinline__ void each(const KeyedRow<T, EXP>& row, const uint16_t* list,
                                       int listed, Visit visit) const {
    const int lane = threadIdx.x % kWarp;
    for (int i = threadIdx.x / kWarp; i < listed; i += kTopThreads / kWarp)
      Units<T, EXP>(row).each(row, list[i] + lane * count, kWarp * count, visit);
  }
};

/* Groups that are the column tiles of the fused logits GEMM, which has written their maxima. Its
 * rows of E are aligned. */
struct TileGroups {
  int count, columns; /* of tiles; of a tile */
  const float* tops;  /* [count][rows]: fused_scratch.exp_tops */
  int rows;

  using Value = __nv_bfloat16;

  __device__ __forceinline__ void find_tops(const KeyedRow<Value, true>&, uint32_t* keys) const {
    for (int g = threadIdx.x; g < count; g += kTopThreads)
      keys[g] = __float_as_uint(tops[(int64_t)g * rows + blockIdx.x]);
  }

  /* A thread reads a vector of a listed tile. */
  template <typename Visit>
  __device__ __forceinline__ void each(const KeyedRow<Value, true>& row, const uint16_t* list,
                                       int listed, Visit visit) const {
    constexpr int N = kVec<Value>;
    const int vectors = columns / N;
    for (int i = threadIdx.x; i < listed * vectors; i += kTopThreads) {
      const int first = list[i / vectors] * columns + i % vectors * N;
      if (first + N <= row.vocab) {
        Vec<Value, N> raw;
        load_vec<false>(row.values + first, raw);
        visit_vector(row, raw, first, visit);
      } else {
        for (int col = first; col < row.vocab; col++) visit_column(row, col, visit);
      }
    }
  }
};

/* The largest threshold that at least `count` keys reach; count_from(t): how many reach t. The keys
 * of E in bfloat16 are multiples of 2^16, so their lower bits are not searched. */
template <typename T, bool EXP, typename Count>
__device__ __forceinline__ uint32_t bisect(int count, Count count_from) {
  constexpr int kLowest = EXP && std::is_same<T, __nv_bfloat16>::value ? 16 : 0;
  uint32_t threshold = 0;
  for (int bit = 31; bit >= kLowest; bit--) {
    const uint32_t trial = threshold | 1u << bit;
    if (count_from(trial) >= count) threshold = trial;
  }
  return threshold;
}

/* The sum of `own` over the block's threads. */
__device__ __forceinline__ int block_count(int own, int* scratch) {
  own = __reduce_add_sync(0xffffffffu, own);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = own;
  __syncthreads();
  int sum = 0;
  for (int warp = 0; warp < kTopThreads / kWarp; warp++) sum += scratch[warp];
  __syncthreads();
  return sum;
}

/* A candidate as one number: the larger the key, and then the lower the column, the larger. */
__device__ __forceinline__ uint64_t candidate_of(uint32_t key, int col) {
  return (uint64_t)key << 32 | (uint32_t)~col;
}

struct TopMemory {
  uint32_t groups[kGroups]; /* the largest key of each */
  uint16_t list[kGroups];   /* groups whose maximum reaches the threshold */
  uint64_t candidates[kCapacity];
  int scratch[kMaxWarps];
  int listed, found;
};

/* A key that at least `count` columns reach: the count-th largest of the groups' maxima, which it
 * writes to memory.groups. 0 where fewer groups have a column. */
template <typename T, bool EXP, typename Groups>
__device__ __forceinline__ uint32_t threshold_of(const KeyedRow<T, EXP>& row, int count,
                                                 const Groups& groups, TopMemory& memory) {
  groups.find_tops(row, memory.groups);
  __syncthreads();
  return bisect<T, EXP>(count, [&](uint32_t trial) {
    int own = 0;
    for (int g = threadIdx.x; g < groups.count; g += kTopThreads) own += memory.groups[g] >= trial;
    return block_count(own, memory.scratch);
  });
}

/* Collects the columns that reach `threshold`; returns how many there are, of which at most
 * kCapacity are in memory.candidates. */
template <typename T, bool EXP, typename Groups>
__device__ __forceinline__ int collect(const KeyedRow<T, EXP>& row, uint32_t threshold,
                                       const Groups& groups, TopMemory& memory) {
  const bool with_target = EXP && row.target_key >= threshold;
  if (threadIdx.x == 0) {
    memory.listed = 0;
    memory.found = with_target;
    if (with_target) memory.candidates[0] = candidate_of(row.target_key, row.target);
  }
  __syncthreads();
  for (int g = threadIdx.x; g < groups.count; g += kTopThreads) {
    if (memory.groups[g] >= threshold) memory.list[atomicAdd(&memory.listed, 1)] = (uint16_t)g;
  }
  __syncthreads();
  groups.each(row, memory.list, memory.listed, [&](const auto& keys, int col) {
    for (uint32_t key : keys) {
      const bool wanted = key >= threshold && !(EXP && col == row.target);
      const int place = wanted ? atomicAdd(&memory.found, 1) : kCapacity;
      if (place < kCapacity) memory.candidates[place] = candidate_of(key, col);
      col++;
    }
  });
  __syncthreads();
  return memory.found;
}

/* The same with the largest threshold that `count` columns reach, and of those that equal it only
 * the lowest, so that `count` are collected. */
template <typename T, bool EXP, typename Groups>
__device__ __forceinline__ void collect_exactly(const KeyedRow<T, EXP>& row, int count,
                                                const Groups& groups, TopMemory& memory) {
  using Scan = cub::BlockScan<int, kTopThreads>;
  __shared__ typename Scan::TempStorage scan;
  const uint32_t threshold = bisect<T, EXP>(count, [&](uint32_t trial) {
    int own = EXP && threadIdx.x == 0 && row.target_key >= trial;
    Units<T, EXP>(row).each(row, threadIdx.x, kTopThreads, [&](const auto& keys, int) {
      for (uint32_t key : keys) own += key >= trial;
    });
    return block_count(own, memory.scratch);
  });
  int found = threshold == 0xffffffffu ? 0 : collect(row, threshold + 1, groups, memory);
  __syncthreads();
  for (int first = 0; first < row.vocab && found < count; first += kTopThreads) {
    const int col = first + (int)threadIdx.x;
    const bool is_target = EXP && col == row.target;
    const uint32_t key = col >= row.vocab ? 0
                         : is_target      ? row.target_key
                                          : key_at(row, row.values[col], col);
    const bool equal = col < row.vocab && key == threshold;
    int place, total;
    Scan(scan).ExclusiveSum((int)equal, place, total);
    if (equal && found + place < count)
      memory.candidates[found + place] = candidate_of(threshold, col);
    found += total;
    __syncthreads(); /* the next scan writes `scan` */
  }
}

/* Sorts the first `size` candidates, a power of two, in descending order. */
__device__ __forceinline__ void sort_candidates(uint64_t* candidates, int size) {
  for (int width = 2; width <= size; width *= 2) {
    for (int step = width / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < size / 2; i += kTopThreads) {
        const int low = 2 * i - i % step, high = low + step;
        const uint64_t a = candidates[low], b = candidates[high];
        const bool descends = (low & width) == 0;
        if ((a < b) == descends) {
          candidates[low] = b;
          candidates[high] = a;
        }
      }
    }
  }
  __syncthreads();
}

/* The target's E, which its column does not hold, follows from the statistics. */
template <typename T, bool EXP>
__device__ __forceinline__ KeyedRow<T, EXP> open_keyed_row(const flce_rows& r, int64_t row,
                                                           int64_t at) {
  KeyedRow<T, EXP> keyed = {};
  keyed.vocab = (int)r.vocab;
  if constexpr (!EXP) {
    keyed.values = (const T*)r.z + row * r.z_pitch;
    keyed.bias = r.bias;
    keyed.falls = !(r.options.logit_scale > 0);
    return keyed;
  }
  using S = stat_t<T>;
  const S* stats = (const S*)r.stats + at;
  const S l = stats[FLCE_STAT_LSE * r.stat_pitch] - stats[FLCE_STAT_NLL * r.stat_pitch];
  const S e = exp(l - stats[FLCE_STAT_OFFSET * r.stat_pitch]);
  keyed.values = (const T*)r.out + row * r.out_pitch;
  keyed.target = (int)r.target[at];
  keyed.target_key = __float_as_uint((float)to_stat(from_stat<T>(e)));
  return keyed;
}

template <typename T, bool EXP, typename Groups>
__global__ void __launch_bounds__(kTopThreads, kTopBlocks)
    top_classes(const __grid_constant__ flce_rows r, const __grid_constant__ Groups groups) {
  __shared__ TopMemory memory;
  pdl_wait();
  const RowRef ref = row_ref_of(r, blockIdx.x);
  if (ref.kind == kRowAbsent) return;
  const int count = (int)r.classes.count, wanted = min(count, (int)r.vocab);
  int64_t* ids = r.classes.ids + ref.at * count;
  const bool valid = ref.kind == kRowValid;
  for (int k = (valid ? wanted : 0) + (int)threadIdx.x; k < count; k += kTopThreads) ids[k] = -1;
  if (!valid) return;
  const KeyedRow<T, EXP> row = open_keyed_row<T, EXP>(r, blockIdx.x, ref.at);
  const uint32_t threshold = threshold_of(row, wanted, groups, memory);
  int found = collect(row, threshold, groups, memory);
  if (found > kCapacity) {
    collect_exactly(row, wanted, groups, memory);
    found = wanted;
  }
  int size = 2;
  while (size < found) size *= 2;
  for (int i = found + (int)threadIdx.x; i < size; i += kTopThreads) memory.candidates[i] = 0;
  sort_candidates(memory.candidates, size);
  for (int k = threadIdx.x; k < wanted; k += kTopThreads)
    ids[k] = r.classes.first + (uint32_t)~(uint32_t)memory.candidates[k];
}

/* At least twice the classes that are wanted, so that few other columns reach the threshold. */
static int unit_groups(const flce_rows* r) {
  const int64_t groups_of_thread = ceil_div(2 * r->classes.count, kTopThreads);
  return (int)min_of(kGroups, groups_of_thread * kTopThreads);
}

template <typename T, bool EXP, typename Groups>
static flce_status launch(void* self, const flce_rows* r, const Groups& groups) {
  return launch_dependent(self, top_classes<T, EXP, Groups>, (unsigned)r->rows, kTopThreads,
                          "top_classes", *r, groups);
}

flce_status launch_top_classes(void* self, const flce_rows* r) {
  FLCE_WITH_TYPE(r->z_dtype, T,
                 { FLCE_TRY((launch<T, false>(self, r, UnitGroups<T, false>{unit_groups(r)}))); });
  return FLCE_OK;
}

flce_status launch_top_classes_of_exp(void* self, const flce_rows* r, const ExpTops& tops) {
  using T = __nv_bfloat16;
  if (r->out_dtype != FLCE_BF16) return no_row_kernel(r, "top_classes of exp rows");
  if (!tops.values) return launch<T, true>(self, r, UnitGroups<T, true>{unit_groups(r)});
  return launch<T, true>(self, r, TileGroups{tops.tiles, tops.columns, tops.values, (int)r->rows});
}
