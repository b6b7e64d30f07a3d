/* scale_rows and finish_grad_input: the row-wise passes over [rows][H] around the gradient GEMMs.
 * They write the scaled rows of x that dW's GEMM reads, and dX from the result of its GEMM. */
#include "cuda/backend.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/row_status.cuh"
#include "cuda/common/vectors.cuh"

/* One thread block for each row. N is 8 if every row of every matrix is 16-byte aligned, else 1. */
template <typename S, int N>
__global__ void scale_rows(void* out, int64_t out_pitch, const void* x, flce_dtype dtype,
                           const S* coef, const int64_t* index, int64_t hidden) {
  pdl_wait();
  const int64_t i = index ? index[blockIdx.x] : blockIdx.x;
  const S c = i < 0 ? (S)0 : coef ? coef[i] : (S)1;
  for (int64_t h = (int64_t)threadIdx.x * N; h < out_pitch; h += (int64_t)blockDim.x * N) {
    S v[N] = {};
    if (c != 0 && h < hidden) load_any<S, N>(x, dtype, i * hidden + h, v);
#pragma unroll
    for (int e = 0; e < N; e++) v[e] *= c;
    store_any<S, N>(out, dtype, (int64_t)blockIdx.x * out_pitch + h, v);
  }
}

/* The arguments of finish_grad_input (backend.h). */
typedef struct grad_input_args {
  flce_rows r;
  void *dx, *scaled_x;
  const void *d, *w, *x, *wsum;
  flce_dtype dx_dtype, d_dtype, dtype;
  int64_t hidden, /* elements of a row of D, W, x, scaled_x and wsum */
      cols;       /* elements of a row of dX */
} grad_input_args;

/* v = elements [h, h + N) of a valid row of dX, from that row of D and the target's row of W. */
template <typename T, int N, typename S = stat_t<T>>
__device__ __forceinline__ void grad_input_part(const grad_input_args& p, int64_t at,
                                                const RowFactors<S>& factors, int64_t h,
                                                S (&v)[N]) {
  Vec<T, N> raw = {};
  if (p.r.coef) load_vec<false>((const T*)p.w + p.r.target[at] * p.hidden + h, raw);
  load_any<S, N>(p.d, p.d_dtype, (int64_t)blockIdx.x * p.hidden + h, v);
  if (!p.r.coef) return;
  S w[N];
  unpack(raw, w);
#pragma unroll
  for (int e = 0; e < N; e++) v[e] = factors.row * v[e] + factors.target * w[e];
  if (p.wsum) {
#pragma unroll
    for (int e = 0; e < N; e++) v[e] -= factors.smooth * ((const S*)p.wsum)[h + e];
  }
}

/* One thread block for each row. The latency of loads dominates, so all are issued before the first
 * use of one. */
template <typename T, int N, typename S = stat_t<T>>
__global__ void finish_grad_input(const __grid_constant__ grad_input_args p) {
  pdl_wait();
  const RowRef ref = row_ref_of(p.r, blockIdx.x);
  const bool is_there = ref.kind != kRowAbsent, scales = p.scaled_x && is_there;
  RowFactors<S> factors = {};
  if (is_there) factors = factors_of<S>(p.r, ref.at);
  for (int64_t h = (int64_t)threadIdx.x * N; h < p.hidden; h += (int64_t)blockDim.x * N) {
    Vec<T, N> raw = {};
    if (scales) load_vec<false>((const T*)p.x + ref.at * p.hidden + h, raw);
    S v[N];
    if (ref.kind == kRowValid) {
      grad_input_part<T, N>(p, ref.at, factors, h, v);
    } else {
#pragma unroll
      for (int e = 0; e < N; e++) v[e] = blank_of<S>(ref);
    }
    if (is_there && h < p.cols) store_any<S, N>(p.dx, p.dx_dtype, ref.at * p.cols + h, v);
    if (!p.scaled_x) continue;
    unpack(raw, v);
#pragma unroll
    for (int e = 0; e < N; e++) v[e] = factors.row == 0 ? 0 : v[e] * factors.row;
    store_any<S, N>(p.scaled_x, p.dtype, (int64_t)blockIdx.x * p.hidden + h, v);
  }
}

flce_status cuda_scale_rows(void* self, const flce_scale_rows_args* call) {
  if (call->rows == 0 || call->hidden == 0) return FLCE_OK;
  FLCE_TRY(check_grid(call->rows, "scale_rows"));
  const bool aligned =
      call->hidden % 8 == 0 && call->out_pitch % 8 == 0 && both_aligned(call->out, call->x);
  const int threads = threads_for(ceil_div(call->out_pitch, aligned ? 8 : 1), 512);
  FLCE_WITH_STAT(flce_stat_dtype(call->dtype), S, {
    auto kernel = aligned ? scale_rows<S, 8> : scale_rows<S, 1>;
    FLCE_TRY(launch_dependent(self, kernel, (unsigned)call->rows, threads, "scale_rows", call->out,
                              call->out_pitch, call->x, call->dtype, (const S*)call->coef,
                              call->index, call->hidden));
  });
  return FLCE_OK;
}

flce_status cuda_finish_grad_input(void* self, const flce_grad_input_args* call) {
  if (call->rows->rows == 0 || call->hidden == 0) return FLCE_OK;
  FLCE_TRY(check_grid(call->rows->rows, "finish_grad_input"));
  if (call->rows->coef && !call->rows->target) {
    return flce_fail(FLCE_UNSUPPORTED, "finish_grad_input: no target terms with probabilities");
  }
  if (call->dx == call->d && (call->rows->index || call->hidden != call->cols)) {
    return flce_fail(FLCE_UNSUPPORTED, "finish_grad_input: expected rows in ref to stay there");
  }
  const grad_input_args args = {*call->rows,   call->dx,    call->scaled_x, call->d,
                                call->w,       call->x,     call->wsum,     call->dx_dtype,
                                call->d_dtype, call->dtype, call->hidden,   call->cols};
  const bool aligned = call->hidden % 8 == 0 && call->cols % 8 == 0 &&
                       both_aligned(call->dx, call->d) && is_aligned(call->w, 16) &&
                       (!call->scaled_x || both_aligned(call->scaled_x, call->x));
  const int threads = threads_for(ceil_div(call->hidden, aligned ? 8 : 1), 512);
  FLCE_WITH_TYPE(call->dtype, T, {
    auto kernel = aligned ? finish_grad_input<T, 8> : finish_grad_input<T, 1>;
    FLCE_TRY(launch_dependent(self, kernel, (unsigned)call->rows->rows, threads,
                              "finish_grad_input", args));
  });
  return FLCE_OK;
}
