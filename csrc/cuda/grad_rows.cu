/* The row pass of the backward: gradient rows from logits, or from exp rows. One block walks one
 * row. */
#include "backend.cuh"
#include "grad_row.cuh"
#include "launch.cuh"

template <typename Z, typename Out, Kind KIND>
__global__ void __launch_bounds__(kRowThreads, row_blocks(sizeof(Z), KIND))
    grad_rows(const __grid_constant__ row_args p, double scale, bool hide_target, bool z_is_exp) {
  using S = stat_t<Z>;
  constexpr int N = kVec<Z>;
  const flce_rows& r = p.r;
  Out* out = (Out*)r.out + (int64_t)blockIdx.x * r.out_pitch;
  const Place place = place_of(r, blockIdx.x);
  if (place.kind != kRowValid) {
    fill_row(out, (int)r.vocab, from_stat<Out>(blank_of<S>(place)));
    return;
  }
  const Row<Z> row = open_walk<KIND, Z>(p, blockIdx.x, place.at);
  const GradRow<S> g =
      open_grad_row<KIND>(p, row, tables_at<S>(r, place.at), scale, hide_target, z_is_exp);
  for (int first = 0; first < row.vectors; first += kUnroll<Z> * blockDim.x) {
    const int mine = first + threadIdx.x;
    Vec<Z, N> raw[kUnroll<Z>];
    load_tile<true>(row.z, row.lead, row.vocab, mine, raw);
    /* In place with Out half of Z a tile's gradients cover logits of tiles up to it, of other
     * threads too; with equal sizes a thread overwrites only what it has read itself. */
    if constexpr (sizeof(Out) != sizeof(Z)) __syncthreads();
#pragma unroll
    for (int u = 0; u < kUnroll<Z>; u++) {
      const int col = column_of<Z>(mine + u * blockDim.x, row.lead);
      Vec<Out, N> packed;
      grad_vector<KIND>(r, row, g, z_is_exp, raw[u], col, packed);
      store_columns(out, col, row.vocab, packed);
    }
  }
}

/* ---- launch ---- */

typedef void (*grad_kernel)(const row_args, double, bool, bool);

/* A plain one's target column and row factor are all of the gradient. */
static Kind backward_kind(const flce_rows* r, bool z_is_exp) {
  const bool terms = r->coef && (r->options.label_smoothing > 0 || r->wants_entropy || !r->target);
  if (terms || r->options.softcap > 0) return kGeneral;
  if (r->temperature && !z_is_exp) return kGeneral;
  return z_is_exp ? kExp : r->bias ? kBiased : kPlain;
}

/* NULL where there is none: z that holds exp has the type of what it becomes. Its bias is in it. */
template <typename Z, typename Out>
static grad_kernel grad_kernel_of(Kind kind, bool z_is_exp) {
  if (z_is_exp && sizeof(Z) != sizeof(Out)) return NULL;
  if constexpr (sizeof(Z) == sizeof(Out)) {
    if (kind == kExp) return grad_rows<Z, Out, kExp>;
  }
  return kind == kPlain    ? grad_rows<Z, Out, kPlain>
         : kind == kBiased ? grad_rows<Z, Out, kBiased>
                           : grad_rows<Z, Out, kGeneral>;
}

flce_status cuda_grad_rows(void* self, const flce_rows* r, double scale, bool hide_target,
                           bool z_is_exp) {
  if (r->rows == 0 || r->vocab == 0) return FLCE_OK;
  if (z_is_exp && (r->options.softcap > 0 || !r->target)) {
    return flce_fail(FLCE_UNSUPPORTED,
                     "grad_rows: no gradient from exp rows with a softcap or probabilities");
  }
  const flce_dtype z = r->z_dtype, out = r->out_dtype;
  const Kind kind = backward_kind(r, z_is_exp);
  grad_kernel kernel = NULL;
  if (z == out) {
    FLCE_WITH_TYPE(z, T, kernel = (grad_kernel_of<T, T>(kind, z_is_exp)));
  } else if (z == FLCE_F32 && out == FLCE_BF16) {
    kernel = grad_kernel_of<float, __nv_bfloat16>(kind, z_is_exp);
  } else if (z == FLCE_F32 && out == FLCE_F16) {
    kernel = grad_kernel_of<float, __half>(kind, z_is_exp);
  }
  if (!kernel) return no_row_kernel(r, z_is_exp ? "grad_rows of exp rows" : "grad_rows");
  FLCE_TRY(check_rows(r, "grad_rows"));
  kernel<<<(unsigned)r->rows, row_threads(r), 0, stream_of(self)>>>(make_args(r), scale,
                                                                    hide_target, z_is_exp);
  FLCE_LAUNCHED("grad_rows");
  return FLCE_OK;
}
