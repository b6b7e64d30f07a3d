/* reduce and column_sum: sums in a fixed order, which depends on sizes only. */
#include "cuda/backend.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/reductions.cuh"
#include "cuda/common/vectors.cuh"

enum { kThreads = 256, kSumThreads = 1024 };

/* ---- the sum of a vector ---- */

/* One block. It reads before pdl_wait: if it overlaps the previous kernel (PDL), that kernel does
 * not write what it reads. */
template <typename S>
__global__ void __launch_bounds__(kSumThreads)
    reduce_values(S* out, const S* values, int64_t count, const S* factor) {
  __shared__ double scratch[kMaxWarps];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kSumThreads) sum += (double)values[i];
  sum = block_sum(sum, scratch);
  if (factor) sum *= (double)factor[0];
  pdl_wait();
  if (threadIdx.x == 0) out[0] = (S)sum;
}

flce_status cuda_reduce(void* self, void* out, const void* values, int64_t count,
                        const void* factor, flce_dtype stat, bool may_overlap) {
  FLCE_WITH_STAT(stat, S, {
    FLCE_TRY(launch_overlapping(self, reduce_values<S>, 1, kSumThreads, "reduce", may_overlap,
                                (S*)out, (const S*)values, count, (const S*)factor));
  });
  return FLCE_OK;
}

/* ---- column sums ---- */

enum { kColumnThreads = FLCE_COLUMN_THREADS, kBatch = 8 };

template <typename T, int N>
__device__ __forceinline__ void load_row_part(const T* row, int64_t col, int64_t cols,
                                              Vec<T, N>& v) {
  if (col + N <= cols) {
    load_vec<true>(row + col, v);
  } else {
#pragma unroll
    for (int e = 0; e < N; e++) v.at[e] = col + e < cols ? row[col + e] : from_stat<T>(0.0f);
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kColumnThreads, sizeof(T) == 8 ? 1 : 8)
    column_partials(const T* a, int64_t pitch, int64_t rows, int64_t cols, int64_t rows_per_split,
                    const stat_t<T>* weights, stat_t<T>* partials) {
  using S = stat_t<T>;
  const int64_t col = ((int64_t)blockIdx.x * kColumnThreads + threadIdx.x) * N;
  if (col >= cols) return;
  const int64_t begin = blockIdx.y * rows_per_split;
  const int64_t end = begin + rows_per_split < rows ? begin + rows_per_split : rows;
  S sum[N] = {};
  for (int64_t first = begin; first < end; first += kBatch) {
    /* All loads are issued before the first conversion, which waits for its own load. */
    S w[kBatch];
    Vec<T, N> raw[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; b++) {
      const int64_t i = first + b;
      w[b] = i < end ? (weights ? weights[i] : (S)1) : (S)0;
      load_row_part(a + (i < end ? i : begin) * pitch, col, cols, raw[b]);
    }
#pragma unroll
    for (int b = 0; b < kBatch; b++) {
      if (w[b] == 0) continue;
      S v[N];
      unpack(raw[b], v);
#pragma unroll
      for (int e = 0; e < N; e++) sum[e] += w[b] * v[e];
    }
  }
#pragma unroll
  for (int e = 0; e < N; e++) {
    if (col + e < cols) partials[blockIdx.y * cols + col + e] = sum[e];
  }
}

/* Sums the partials [splits][cols] over splits. A block does kWarp columns; each of its warps sums
 * some of the splits, then the warps' sums are added in the order of warps. */
template <typename S>
__global__ void __launch_bounds__(kThreads)
    add_partials(S* out, const S* partials, int64_t splits, int64_t cols, bool accumulate) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ S sums[kWarps][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t col = (int64_t)blockIdx.x * kWarp + lane;
  S sum = 0;
  if (col < cols) {
#pragma unroll 4
    for (int64_t split = warp; split < splits; split += kWarps) sum += partials[split * cols + col];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || col >= cols) return;
  for (int other = 1; other < kWarps; other++) sum += sums[other][lane];
  out[col] = accumulate ? out[col] + sum : sum;
}

template <typename T>
static void launch_partials(cudaStream_t stream, const void* a, int64_t pitch, int64_t rows,
                            int64_t cols, int64_t splits, const void* weights, void* scratch) {
  const int64_t rows_per_split = ceil_div(rows, splits);
  const bool aligned = is_aligned(a, 16) && pitch * sizeof(T) % 16 == 0;
  constexpr int N = 16 / sizeof(T);
  const dim3 grid((unsigned)ceil_div(cols, kColumnThreads * (aligned ? N : 1)), (unsigned)splits);
  auto kernel = aligned ? column_partials<T, N> : column_partials<T, 1>;
  kernel<<<grid, kColumnThreads, 0, stream>>>((const T*)a, pitch, rows, cols, rows_per_split,
                                              (const stat_t<T>*)weights, (stat_t<T>*)scratch);
}

flce_status cuda_column_sum(void* self, const flce_column_sum_args* call) {
  if (call->cols == 0) return FLCE_OK;
  FLCE_TRY(check_grid(call->cols, "column_sum"));
  const flce_dtype stat = flce_stat_dtype(call->a_dtype);
  if (call->rows == 0) {
    return call->accumulate ? FLCE_OK
                            : cuda_fill(self, call->out, 0, call->cols * flce_size_of(stat));
  }
  const int64_t splits = flce_row_splits(call->rows, call->cols, call->a_dtype);
  FLCE_WITH_TYPE(call->a_dtype, T,
                 launch_partials<T>(stream_of(self), call->a, call->pitch, call->rows, call->cols,
                                    splits, call->weights, call->scratch));
  FLCE_LAUNCHED("column_sum");
  FLCE_WITH_STAT(stat, S, {
    add_partials<<<(unsigned)ceil_div(call->cols, kWarp), kThreads, 0, stream_of(self)>>>(
        (S*)call->out, (const S*)call->scratch, splits, call->cols, call->accumulate);
  });
  FLCE_LAUNCHED("column_sum");
  return FLCE_OK;
}
