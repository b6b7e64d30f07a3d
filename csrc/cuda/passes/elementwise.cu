/* fill, cast, add_block and scale_grads: elementwise passes over whole arrays. */
#include "cuda/backend.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/vectors.cuh"

#include <type_traits>

enum { kThreads = 256 };

/* Blocks of kThreads threads for `count` elements, N elements a thread. The last thread's N may
 * reach beyond the end. */
template <int N>
static flce_status vector_grid(int64_t count, const char* what, unsigned* blocks) {
  const int64_t needed = ceil_div(count, (int64_t)kThreads * N);
  FLCE_TRY(check_grid(needed, what));
  *blocks = (unsigned)needed;
  return FLCE_OK;
}

/* load_part and store_part: min(N, count - begin) elements from `begin` on, by a vector access if
 * `aligned` and all N exist. load_part sets the others to 0. */
template <int N, typename T, typename S>
__device__ __forceinline__ void load_part(const T* data, int64_t begin, int64_t count, bool aligned,
                                          S (&v)[N]) {
  if (aligned && begin + N <= count) {
    Vec<T, N> raw;
    load_vec<true>(data + begin, raw);
    unpack(raw, v);
  } else {
#pragma unroll
    for (int e = 0; e < N; e++) v[e] = begin + e < count ? (S)to_stat(data[begin + e]) : (S)0;
  }
}

template <int N, typename T, typename S>
__device__ __forceinline__ void store_part(T* data, int64_t begin, int64_t count, bool aligned,
                                           const S (&v)[N]) {
  if (aligned && begin + N <= count) {
    store_as(data + begin, v);
  } else {
#pragma unroll
    for (int e = 0; e < N; e++) {
      if (begin + e < count) data[begin + e] = from_stat<T>(v[e]);
    }
  }
}

template <typename Out, typename In>
__global__ void cast_elements(Out* out, const In* in, int64_t count, bool aligned) {
  constexpr int N = 8;
  const int64_t begin = ((int64_t)blockIdx.x * kThreads + threadIdx.x) * N;
  stat_t<In> v[N];
  load_part(in, begin, count, aligned, v);
  store_part(out, begin, count, aligned, v);
}

template <typename Accum, typename T>
__global__ void add_elements(Accum* accum, const T* block, int64_t count, bool aligned) {
  constexpr int N = 8;
  const int64_t begin = ((int64_t)blockIdx.x * kThreads + threadIdx.x) * N;
  stat_t<Accum> sum[N], v[N];
  load_part(accum, begin, count, aligned, sum);
  load_part(block, begin, count, aligned, v);
#pragma unroll
  for (int e = 0; e < N; e++) sum[e] += v[e];
  store_part(accum, begin, count, aligned, sum);
}

template <typename Out, typename In, typename S>
__device__ __forceinline__ void scale_array(Out* out, const In* in, int64_t count, bool aligned,
                                            S factor) {
  constexpr int N = 8;
  if ((const void*)out == (const void*)in && factor == 1) return;
  const int64_t step = (int64_t)gridDim.x * kThreads * N;
  for (int64_t begin = ((int64_t)blockIdx.x * kThreads + threadIdx.x) * N; begin < count;
       begin += step) {
    S v[N];
    load_part(in, begin, count, aligned, v);
#pragma unroll
    for (int e = 0; e < N; e++) v[e] *= factor;
    store_part(out, begin, count, aligned, v);
  }
}

/* Arrays with the same in_dtype and out_dtype: the argument of one launch. */
typedef struct scaled_arrays {
  flce_scaled array[FLCE_GRADIENTS];
  int number;   /* of arrays */
  bool aligned; /* out and in of every array start at multiples of 16 bytes */
} scaled_arrays;

template <typename Out, typename In, typename S>
__global__ void scale_elements(const __grid_constant__ scaled_arrays arrays, const S* grad_output,
                               const S* scalars) {
  pdl_wait();
  S factor = grad_output[0];
  const int scale = std::is_same_v<In, __half> ? FLCE_SCALAR_DW_SCALE : FLCE_SCALAR_LOSS_SCALE;
  if (scalars) factor *= scalars[FLCE_SCALAR_INV_DENOM] / scalars[scale];
  for (int which = 0; which < arrays.number; which++) {
    const flce_scaled& a = arrays.array[which];
    scale_array((Out*)a.out, (const In*)a.in, a.count, arrays.aligned, factor);
  }
}

flce_status cuda_fill(void* self, void* data, int byte, int64_t bytes) {
  if (bytes == 0) return FLCE_OK;
  return check_cuda(cudaMemsetAsync(data, byte, (size_t)bytes, stream_of(self)), "fill");
}

/* ---- cast and add_block with different pitches: one thread block for each row ---- */

/* Copies `cols` elements of each row and zero-fills the rest up to out_pitch. */
template <typename U>
__global__ void __launch_bounds__(kThreads)
    copy_rows(U* out, int64_t out_pitch, const U* in, int64_t in_pitch, int64_t cols) {
  out += blockIdx.x * out_pitch;
  in += blockIdx.x * in_pitch;
  for (int64_t i = threadIdx.x; i < out_pitch; i += kThreads) out[i] = i < cols ? in[i] : U{};
}

/* Like copy_rows, with a conversion from in_dtype to S to out_dtype. S can represent both. */
template <typename S>
__global__ void __launch_bounds__(kThreads)
    cast_rows(void* out, flce_dtype out_dtype, int64_t out_pitch, const void* in,
              flce_dtype in_dtype, int64_t in_pitch, int64_t cols) {
  for (int64_t i = threadIdx.x; i < out_pitch; i += kThreads) {
    S v[1] = {0};
    if (i < cols) load_any<S, 1>(in, in_dtype, blockIdx.x * in_pitch + i, v);
    store_any<S, 1>(out, out_dtype, blockIdx.x * out_pitch + i, v);
  }
}

template <typename U>
static void launch_copy(void* self, void* out, int64_t out_bytes, const void* in, int64_t in_bytes,
                        int64_t rows, int64_t col_bytes) {
  constexpr int64_t size = sizeof(U);
  copy_rows<U><<<(unsigned)rows, kThreads, 0, stream_of(self)>>>(
      (U*)out, out_bytes / size, (const U*)in, in_bytes / size, col_bytes / size);
}

/* copy_rows with the largest element of 2 to 16 bytes that divides all addresses and sizes. */
static void copy_bytes(void* self, void* out, int64_t out_bytes, const void* in, int64_t in_bytes,
                       int64_t rows, int64_t col_bytes) {
  const uint64_t all =
      (uintptr_t)out | (uintptr_t)in | (uint64_t)(out_bytes | in_bytes | col_bytes);
  const auto launch = all % 16 == 0  ? launch_copy<uint4>
                      : all % 8 == 0 ? launch_copy<uint2>
                      : all % 4 == 0 ? launch_copy<uint32_t>
                                     : launch_copy<uint16_t>;
  launch(self, out, out_bytes, in, in_bytes, rows, col_bytes);
}

flce_status cuda_cast(void* self, const flce_cast_args* call) {
  const int64_t count = call->rows * call->cols, out_size = flce_size_of(call->out_dtype),
                in_size = flce_size_of(call->in_dtype);
  if (call->rows == 0 || call->out_pitch == 0) return FLCE_OK;
  if (call->out_pitch != call->cols || call->in_pitch != call->cols) {
    FLCE_TRY(check_grid(call->rows, "cast"));
    const bool wide = out_size == 8 || in_size == 8;
    const auto cast = wide ? cast_rows<double> : cast_rows<float>;
    if (call->out_dtype == call->in_dtype) {
      copy_bytes(self, call->out, call->out_pitch * out_size, call->in, call->in_pitch * in_size,
                 call->rows, call->cols * in_size);
    } else {
      cast<<<(unsigned)call->rows, kThreads, 0, stream_of(self)>>>(
          call->out, call->out_dtype, call->out_pitch, call->in, call->in_dtype, call->in_pitch,
          call->cols);
    }
    FLCE_LAUNCHED("cast");
    return FLCE_OK;
  }
  unsigned blocks;
  FLCE_TRY(vector_grid<8>(count, "cast", &blocks));
  const bool aligned = both_aligned(call->out, call->in);
  FLCE_WITH_TYPE(call->out_dtype, Out, FLCE_WITH_TYPE(call->in_dtype, In, {
                   cast_elements<<<blocks, kThreads, 0, stream_of(self)>>>(
                       (Out*)call->out, (const In*)call->in, count, aligned);
                 }));
  FLCE_LAUNCHED("cast");
  return FLCE_OK;
}

/* accum[rows][cols] += block[rows][pitch], one thread block for each row. */
template <typename S>
__global__ void __launch_bounds__(kThreads)
    add_rows(void* accum, flce_dtype accum_dtype, const void* block, flce_dtype dtype,
             int64_t pitch, int64_t cols) {
  for (int64_t i = threadIdx.x; i < cols; i += kThreads) {
    S sum[1], v[1];
    load_any<S, 1>(accum, accum_dtype, blockIdx.x * cols + i, sum);
    load_any<S, 1>(block, dtype, blockIdx.x * pitch + i, v);
    sum[0] += v[0];
    store_any<S, 1>(accum, accum_dtype, blockIdx.x * cols + i, sum);
  }
}

flce_status cuda_add_block(void* self, const flce_add_block_args* call) {
  const int64_t count = call->rows * call->cols;
  if (count == 0) return FLCE_OK;
  if (call->pitch != call->cols) {
    FLCE_TRY(check_grid(call->rows, "add_block"));
    FLCE_WITH_STAT(flce_stat_dtype(call->accum_dtype), S, {
      add_rows<S><<<(unsigned)call->rows, kThreads, 0, stream_of(self)>>>(
          call->accum, call->accum_dtype, call->block, call->dtype, call->pitch, call->cols);
    });
    FLCE_LAUNCHED("add_block");
    return FLCE_OK;
  }
  unsigned blocks;
  FLCE_TRY(vector_grid<8>(count, "add_block", &blocks));
  const bool aligned = both_aligned(call->accum, call->block);
  FLCE_WITH_TYPE(call->accum_dtype, Accum, FLCE_WITH_TYPE(call->dtype, T, {
                   add_elements<<<blocks, kThreads, 0, stream_of(self)>>>(
                       (Accum*)call->accum, (const T*)call->block, count, aligned);
                 }));
  FLCE_LAUNCHED("add_block");
  return FLCE_OK;
}

/* `first` and the arrays directly after it that have its dtypes and its alignment. */
static scaled_arrays alike(const flce_scaled* first, const flce_scaled* end) {
  scaled_arrays arrays = {};
  arrays.aligned = both_aligned(first->out, first->in);
  for (const flce_scaled* a = first; a < end; a++) {
    if (a->out_dtype != first->out_dtype || a->in_dtype != first->in_dtype) break;
    if (both_aligned(a->out, a->in) != arrays.aligned) break;
    arrays.array[arrays.number++] = *a;
  }
  return arrays;
}

static flce_status scale_alike(void* self, const scaled_arrays& arrays, const void* grad_output,
                               const void* scalars, flce_dtype stat) {
  int64_t count = 0;
  for (int which = 0; which < arrays.number; which++) {
    count = max_of(count, arrays.array[which].count);
  }
  if (count == 0) return FLCE_OK;
  int device, processors;
  FLCE_TRY(check_cuda(cudaGetDevice(&device), "scale_grads"));
  FLCE_TRY(check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
                      "scale_grads"));
  /* At most one wave of blocks: if the factor is 1 in place, the kernel is only launch overhead. */
  const int64_t needed = ceil_div(count, (int64_t)kThreads * 8);
  const unsigned blocks = (unsigned)min_of(needed, (int64_t)processors * (2048 / kThreads));
  const flce_scaled& first = arrays.array[0];
  FLCE_WITH_STAT(stat, S, FLCE_WITH_TYPE(first.out_dtype, Out, FLCE_WITH_TYPE(first.in_dtype, In, {
                                           FLCE_TRY(launch_dependent(
                                               self, scale_elements<Out, In, S>, blocks, kThreads,
                                               "scale_grads", arrays, (const S*)grad_output,
                                               (const S*)scalars));
                                         })));
  return FLCE_OK;
}

flce_status cuda_scale_grads(void* self, const flce_scaled* grads, int number,
                             const void* grad_output, const void* scalars, flce_dtype stat) {
  for (const flce_scaled *grad = grads, *end = grads + number; grad < end;) {
    const scaled_arrays arrays = alike(grad, end);
    FLCE_TRY(scale_alike(self, arrays, grad_output, scalars, stat));
    grad += arrays.number;
  }
  return FLCE_OK;
}
