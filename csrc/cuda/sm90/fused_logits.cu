/* Host side of the backend functions fused_logits and fused_statistics: lays out their scratch,
 * fills their parameters and launches the three kernels (row_offsets.cu, logits_gemm.cu,
 * tile_statistics.cu). Whether they are used at all is decided in
 * core/gpu_facts.c. */
#include "cuda/backend.cuh"
#include "cuda/rows/row_launch.cuh"
#include "cuda/sm90/fused_logits.cuh"
#include "loss.h"

/* core/gpu_facts.c counts the same arrays. */
fused_scratch fused_scratch_of(void* memory, const flce_rows* r) {
  const int64_t rows = r->rows, size = tiles_of(r->vocab) * rows;
  float* next = (float*)memory;
  const auto take = [&next](bool wanted, int64_t count) {
    float* taken = wanted ? next : NULL;
    if (wanted) next += count;
    return taken;
  };
  fused_scratch s;
  s.packed = (PackedRow*)take(r->teacher, rows * FLCE_PACKED_ROW_FLOATS);
  s.sums = take(true, size);
  const bool smooth = r->options.label_smoothing > 0, soft = !r->target;
  s.tile_weighted_gaps = take(soft || (smooth && !r->wsum), size);
  s.row_weighted_gaps = take(!soft && smooth && r->wsum, rows);
  s.weight_sums = take(soft, size);
  s.entropy_sums = take(r->wants_entropy, size);
  s.tops = take(r->predictions, size);
  s.columns = (int*)take(r->predictions, size);
  s.offset = take(true, rows);
  s.scale = take(true, rows);
  s.target = take(true, rows);
  s.column = (int*)take(true, rows);
  s.top = (int*)take(true, rows);
  s.retry = (int*)next;
  return s;
}

/* The specialised kernels need scale > 0: a negative one makes the smallest z the largest l and
 * makes hidden logits (-inf) +inf, and 0 makes them NaN. */
static fused_params fused_params_of(const flce_gemm* g, const flce_rows* r) {
  const row_args args = make_args(r);
  fused_params params = {};
  const flce_loss* o = &r->options;
  params.rows = (int)r->rows;
  params.vocab = (int)r->vocab;
  params.hidden = (int)g->k;
  params.columns = (int)(g->c ? r->z_columns : r->out_columns);
  params.half = g->dtype == FLCE_F16;
  params.scale = (float)(args.outer_scale * kLog2eExact);
  const bool needs_general = (o->label_smoothing > 0 && !r->wsum) || flce_caps_logits(o) ||
                             !(params.scale > 0) || r->wants_entropy || r->predictions;
  params.general =
      needs_general || r->temperature || (r->target && g->c) || (r->target && params.half);
  params.scaled = !needs_general && o->label_smoothing == 0;
  params.inner_scale = (float)args.inner_scale;
  params.curve = args.curve;
  params.bias = (const float*)r->bias;
  params.class_weight = (const float*)r->class_weight;
  params.index = r->index;
  params.probabilities = r->probabilities;
  params.probabilities_dtype = r->probabilities_dtype;
  params.probabilities_pitch = r->probabilities_pitch;
  return params;
}

/* What the epilogue writes, to which memory and with which pitch (elements). */
static FusedResult result_of(const flce_gemm* g, const flce_rows* r, void** out, int64_t* pitch) {
  *out = g->c ? g->c : r->out;
  *pitch = g->c ? g->pitch_c : r->out_pitch;
  return r->teacher ? kPackedResult : g->c ? kLogitResult : r->out ? kExpResult : kNoResult;
}

/* `retry`: only the tiles whose sums went beyond their limit. z does not depend on an offset and is
 * not written again; packed logits do. */
static flce_status run_logits_gemm(void* self, const flce_gemm* g, const flce_rows* r,
                                   const fused_params* params, const fused_scratch* s, bool retry) {
  const flce_cuda* cuda = (const flce_cuda*)self;
  void* out;
  int64_t pitch;
  FusedResult result = result_of(g, r, &out, &pitch);
  if (retry && result == kLogitResult) result = kNoResult;
  return launch_logits_gemm_sm90(cuda->stream, cuda->device, params, s, g->a, g->b, result, out,
                                 pitch, retry);
}

/* The teacher's z again in the row clusters that the student's retry computes, because packed
 * logits have overwritten it. Returns at once if there are none. */
static flce_status repeat_teacher(void* self, const flce_fused_call* teacher,
                                  const fused_scratch* student) {
  const flce_cuda* cuda = (const flce_cuda*)self;
  const flce_gemm* g = &teacher->gemm;
  const fused_params params = fused_params_of(g, &teacher->rows);
  fused_scratch s = fused_scratch_of(teacher->scratch, &teacher->rows);
  s.retry = student->retry;
  return launch_logits_gemm_sm90(cuda->stream, cuda->device, &params, &s, g->a, g->b, kLogitResult,
                                 g->c, g->pitch_c, true);
}

flce_status cuda_fused_logits(void* self, const flce_gemm* g, const flce_rows* r, void* scratch) {
  if (r->rows == 0) return FLCE_OK;
  FLCE_TRY(check_rows(r, "fused_logits"));
  const fused_params params = fused_params_of(g, r);
  const fused_scratch s = fused_scratch_of(scratch, r);
  FLCE_TRY(launch_row_offsets(self, g, r, &params, &s));
  return run_logits_gemm(self, g, r, &params, &s, false);
}

flce_status cuda_fused_statistics(void* self, const flce_gemm* g, const flce_rows* r,
                                  const void* factor, void* coef, void* scratch) {
  if (r->rows == 0) return FLCE_OK;
  const fused_params params = fused_params_of(g, r);
  const fused_scratch s = fused_scratch_of(scratch, r);
  if (r->teacher) FLCE_TRY(repeat_teacher(self, r->teacher, &s));
  FLCE_TRY(run_logits_gemm(self, g, r, &params, &s, true));
  return launch_tile_statistics(self, r, &params, &s, factor, coef);
}
