/* Host side of the row kernels' launches: checks, block size and parameters. */
#ifndef FLCE_CUDA_ROWS_ROW_LAUNCH_CUH
#define FLCE_CUDA_ROWS_ROW_LAUNCH_CUH

#include "cuda/rows/row.cuh"

static inline flce_status check_rows(const flce_rows* r, const char* what) {
  if (r->vocab > kMaxVocab) {
    return flce_fail(FLCE_UNSUPPORTED, "%s: at most %d columns, got %lld", what, kMaxVocab,
                     (long long)r->vocab);
  }
  return check_grid(r->rows, what);
}

/* Threads for one tile a row, at most kRowThreads, in whole warps. */
static inline int row_threads(const flce_rows* r) {
  const int64_t logits = 16; /* of a thread in one tile: kUnroll vectors; 8 of float64 */
  return threads_for(ceil_div(r->vocab, logits), kRowThreads);
}

/* The refusal of a pair of dtypes that has no kernel. */
static inline flce_status no_row_kernel(const flce_rows* r, const char* what) {
  return flce_fail(FLCE_UNSUPPORTED, "%s: no CUDA kernel from %s to %s", what,
                   flce_dtype_name(r->z_dtype), flce_dtype_name(r->out_dtype));
}

static inline row_args make_args(const flce_rows* r) {
  const flce_loss* o = &r->options;
  const flce_logit_map map = flce_logit_map_of(o, o->temperature);
  row_args args;
  args.r = *r;
  args.scale = o->logit_scale / o->temperature;
  args.scale_f32 = (float)args.scale;
  args.curve = map.curve;
  args.inner_scale = map.inner_scale;
  args.outer_scale = map.outer_scale;
  args.hard = 1 - o->label_smoothing;
  args.per_class = o->label_smoothing / (double)r->vocab;
  args.weighted = o->label_smoothing > 0 || !r->target;
  return args;
}

#endif
