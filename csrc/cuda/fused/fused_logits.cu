/* Host side of the backend functions fused_logits, fused_statistics and fused_exp: lays out their
 * scratch, fills their parameters and launches the three kernels: row_offsets.cu, the
 * architecture's logits GEMM, tile_statistics.cu. Whether they are used at all is decided in
 * core/gpu_facts.c. */
#include "cuda/backend.cuh"
#include "cuda/fused/architectures.cuh"
#include "cuda/rows/row_launch.cuh"
#include "loss.h"

/* core/gpu_facts.c counts the same arrays. */
fused_scratch fused_scratch_of(void* memory, const flce_logits_gemm_sizes* sizes,
                               const flce_rows* r) {
  const int64_t rows = r->rows, size = tiles_of(sizes, r->vocab) * rows;
  float* next = (float*)memory;
  const auto take = [&next](bool wanted, int64_t count) {
    float* taken = wanted ? next : NULL;
    if (wanted) next += count;
    return taken;
  };
  fused_scratch s;
  s.packing = (PackedRow*)take(r->teacher, rows * FLCE_PACKED_ROW_FLOATS);
  s.sums = take(true, size);
  const bool smooth = r->options.label_smoothing > 0, soft = !r->target;
  s.tile_weighted_gaps = take(soft || (smooth && !r->wsum), size);
  s.row_weighted_gaps = take(!soft && smooth && r->wsum, rows);
  s.weight_sums = take(soft, size);
  s.entropy_sums = take(r->wants_entropy, size);
  s.tops = take(r->predictions, size);
  s.columns = (int*)take(r->predictions, size);
  const bool searches = r->finds_classes && r->out;
  s.exp_tops =
      take(searches && flce_searches_tiles(r->classes.count, tiles_of(sizes, r->vocab)), size);
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

/* A call of fused_logits and of fused_statistics. */
struct FusedCall {
  const flce_cuda* cuda;
  const architecture_kernels* kernels;
  const flce_logits_gemm_sizes* sizes;
  fused_params params;
  fused_scratch scratch;
};

static flce_status open_call(void* self, const flce_gemm* g, const flce_rows* r, void* scratch,
                             FusedCall* call) {
  call->cuda = (const flce_cuda*)self;
  FLCE_TRY(find_kernels(call->cuda->device, &call->kernels));
  call->sizes = &call->kernels->row->logits;
  call->params = fused_params_of(g, r);
  call->scratch = fused_scratch_of(scratch, call->sizes, r);
  return FLCE_OK;
}

static FusedResult result_of(const FusedCall* call, const flce_gemm* g, const flce_rows* r) {
  if (r->teacher) return kPackedResult;
  if (g->c) return kLogitResult;
  if (!r->out) return kNoResult;
  return call->scratch.exp_tops ? kExpTopsResult : kExpResult;
}

/* `retry`: only the tiles whose sums went beyond their limit. z does not depend on an offset and is
 * not written again; packed logits do. */
static flce_status run_logits_gemm(const FusedCall* call, const flce_gemm* g, const flce_rows* r,
                                   bool retry) {
  void* out = g->c ? g->c : r->out;
  const int64_t pitch = g->c ? g->pitch_c : r->out_pitch;
  FusedResult result = result_of(call, g, r);
  if (retry && result == kLogitResult) result = kNoResult;
  return call->kernels->logits_gemm(call->cuda->stream, call->cuda->device, &call->params,
                                    &call->scratch, g->a, g->b, result, out, pitch, retry);
}

/* The teacher's z again in the row clusters that the student's retry computes, because packed
 * logits have overwritten it. Returns at once if there are none. */
static flce_status repeat_teacher(const FusedCall* student, const flce_fused_call* teacher) {
  const flce_gemm* g = &teacher->gemm;
  const fused_params params = fused_params_of(g, &teacher->rows);
  fused_scratch s = fused_scratch_of(teacher->scratch, student->sizes, &teacher->rows);
  s.retry = student->scratch.retry;
  return student->kernels->logits_gemm(student->cuda->stream, student->cuda->device, &params, &s,
                                       g->a, g->b, kLogitResult, g->c, g->pitch_c, true);
}

flce_status cuda_fused_logits(void* self, const flce_gemm* g, const flce_rows* r, void* scratch) {
  if (r->rows == 0) return FLCE_OK;
  FLCE_TRY(check_rows(r, "fused_logits"));
  FusedCall call;
  FLCE_TRY(open_call(self, g, r, scratch, &call));
  FLCE_TRY(launch_row_offsets(self, call.sizes, g, r, &call.params, &call.scratch));
  return run_logits_gemm(&call, g, r, false);
}

flce_status cuda_fused_exp(void* self, const flce_gemm* g, const flce_rows* r, void* scratch) {
  if (r->rows == 0 || r->vocab == 0) return FLCE_OK;
  FLCE_TRY(check_rows(r, "fused_exp"));
  FusedCall call;
  FLCE_TRY(open_call(self, g, r, scratch, &call));
  FLCE_TRY(launch_known_offsets(self, call.sizes, r, &call.params, &call.scratch));
  return run_logits_gemm(&call, g, r, false);
}

flce_status cuda_fused_statistics(void* self, const flce_gemm* g, const flce_rows* r,
                                  const void* factor, void* coef, void* scratch) {
  if (r->rows == 0) return FLCE_OK;
  FusedCall call;
  FLCE_TRY(open_call(self, g, r, scratch, &call));
  if (r->teacher) FLCE_TRY(repeat_teacher(&call, r->teacher));
  FLCE_TRY(run_logits_gemm(&call, g, r, true));
  return launch_tile_statistics(self, tiles_of(call.sizes, r->vocab), r, &call.params,
                                &call.scratch, factor, coef);
}
