/* compact_rows and blank_rows: the index of the rows to compute, and the results of the others. */
#include "cuda/backend.cuh"
#include "cuda/common/row_status.cuh"
#include "cuda/common/vectors.cuh"
#include "cuda/passes/target_order.cuh"

#include <cub/device/device_select.cuh>
#include <thrust/iterator/counting_iterator.h>

enum { kThreads = 256, kRowsPerBlock = kThreads / kWarp };

/* ---- the index of the rows to compute ---- */

struct IsCounted {
  const int64_t* target;
  int64_t ignore_index;
  __host__ __device__ bool operator()(int64_t i) const { return target[i] != ignore_index; }
};

/* Writes the selected tokens to `index`, ascending, because CUB's selection is stable, and their
 * count to index[tokens]. With scratch NULL it only sets *scratch_bytes. */
static flce_status select_tokens(int64_t* index, void* scratch, size_t* scratch_bytes,
                                 int64_t tokens, IsCounted is_counted, cudaStream_t stream) {
  return check_cuda(
      cub::DeviceSelect::If(scratch, *scratch_bytes, thrust::counting_iterator<int64_t>(0), index,
                            index + tokens, (int)tokens, is_counted, stream),
      "compact_rows: select");
}

/* Called in every call, so the last answer is cached, as in cuda_order_bytes. */
flce_status cuda_compact_bytes(int64_t tokens, int64_t* bytes) {
  static thread_local int64_t known_tokens = -1, known_bytes = 0;
  static thread_local int known_device = -1;
  int device;
  FLCE_TRY(check_cuda(cudaGetDevice(&device), "compact_bytes"));
  if (device != known_device || tokens != known_tokens) {
    FLCE_TRY(flce_check_order(tokens, 0));
    size_t scratch_bytes = 0;
    FLCE_TRY(select_tokens(NULL, NULL, &scratch_bytes, tokens, IsCounted{NULL, 0}, NULL));
    known_bytes = flce_index_bytes(tokens) + (int64_t)scratch_bytes;
    known_device = device;
    known_tokens = tokens;
  }
  *bytes = known_bytes;
  return FLCE_OK;
}

flce_status cuda_compact_rows(void* self, const flce_problem* problem, const int64_t* target,
                              void* index) {
  const int64_t tokens = problem->shape.tokens;
  if (tokens == 0) return FLCE_OK;
  int64_t bytes;
  FLCE_TRY(cuda_compact_bytes(tokens, &bytes));
  const size_t list_bytes = (size_t)tokens * sizeof(int64_t);
  FLCE_TRY(check_cuda(cudaMemsetAsync(index, 0xff, list_bytes, stream_of(self)), "compact_rows"));
  size_t scratch_bytes = (size_t)(bytes - flce_index_bytes(tokens));
  return select_tokens((int64_t*)index, (char*)index + flce_index_bytes(tokens), &scratch_bytes,
                       tokens, IsCounted{target, problem->loss.ignore_index}, stream_of(self));
}

/* ---- rows that are not computed ---- */

template <typename S>
__global__ void __launch_bounds__(kThreads)
    blank_vectors(const __grid_constant__ flce_rows r, int64_t bound) {
  const int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x;
  S value;
  if (i < r.rows && is_left_out(r, i, bound, &value)) write_blank(r, i, value);
}

/* Writes the rows of dX that compact_rows leaves out. Each row of dX has a warp, which first tests
 * whether it is one; most often none is, and a thread block for each of 8192 rows would take 16 us
 * to find that, not 3. N: elements of a store. */
template <typename S, int N>
__global__ void __launch_bounds__(kThreads)
    blank_grad_input(const __grid_constant__ flce_rows r, int64_t bound, void* dx,
                     flce_dtype dx_dtype, int64_t hidden) {
  const int64_t i = (int64_t)blockIdx.x * kRowsPerBlock + threadIdx.x / kWarp;
  S value;
  if (i >= r.rows || !is_left_out(r, i, bound, &value)) return;
  for (int64_t h = (int64_t)(threadIdx.x % kWarp) * N; h < hidden; h += kWarp * N) {
    S v[N];
#pragma unroll
    for (int e = 0; e < N; e++) v[e] = value;
    store_any<S, N>(dx, dx_dtype, i * hidden + h, v);
  }
}

static flce_status blank_grad_input_rows(void* self, const flce_rows* r, int64_t bound, void* dx,
                                         flce_dtype dx_dtype, int64_t hidden) {
  if (hidden == 0) return FLCE_OK;
  const int64_t blocks = ceil_div(r->rows, kRowsPerBlock);
  FLCE_TRY(check_grid(blocks, "blank_rows"));
  const bool aligned = hidden % 8 == 0 && is_aligned(dx, 16);
  FLCE_WITH_STAT(flce_stat_dtype(r->z_dtype), S, {
    auto kernel = aligned ? blank_grad_input<S, 8> : blank_grad_input<S, 1>;
    kernel<<<(unsigned)blocks, kThreads, 0, stream_of(self)>>>(*r, bound, dx, dx_dtype, hidden);
  });
  FLCE_LAUNCHED("blank_rows");
  return FLCE_OK;
}

flce_status cuda_blank_rows(void* self, const flce_rows* r, int64_t bound, void* dx,
                            flce_dtype dx_dtype, int64_t hidden) {
  if (r->rows == 0) return FLCE_OK;
  if (dx) return blank_grad_input_rows(self, r, bound, dx, dx_dtype, hidden);
  const int64_t blocks = ceil_div(r->rows, kThreads);
  FLCE_TRY(check_grid(blocks, "blank_rows"));
  FLCE_WITH_STAT(flce_stat_dtype(r->z_dtype), S, {
    blank_vectors<S><<<(unsigned)blocks, kThreads, 0, stream_of(self)>>>(*r, bound);
  });
  FLCE_LAUNCHED("blank_rows");
  return FLCE_OK;
}