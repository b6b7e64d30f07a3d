/* What surrounds the gradient GEMMs: rows scaled before them, and the exact target terms, smoothing
 * and the one rounding after them. */
#include "convert.h"
#include "cpu.h"

#include <math.h>
#include <string.h>

/* ---- tokens by target ---- */

/* order: [0] the count, [1 .. count] keys target << 32 | token, ascending; then as much again, for
 * the sort. */
enum { TOKEN_BITS = 32, DIGIT_BITS = 11 };

int64_t flce_cpu_order_bytes(int64_t tokens) {
  return (1 + 2 * tokens) * (int64_t)sizeof(int64_t);
}

static int64_t key_target(int64_t key) {
  return key >> TOKEN_BITS;
}
static int64_t key_token(int64_t key) {
  return key & (((int64_t)1 << TOKEN_BITS) - 1);
}

/* Radix sort by the target's digits, lowest first. It is stable and the keys come in the order of
 * the tokens, so the tokens need no pass. */
static void sort_keys(int64_t* keys, int64_t* spare, int64_t count, int64_t vocab) {
  enum { DIGITS = 1 << DIGIT_BITS };
  int64_t *from = keys, *to = spare;
  for (int shift = TOKEN_BITS; (vocab - 1) >> (shift - TOKEN_BITS) > 0; shift += DIGIT_BITS) {
    int64_t next[DIGITS] = {0};
    for (int64_t k = 0; k < count; k++) next[(from[k] >> shift) & (DIGITS - 1)]++;
    for (int64_t digit = 0, start = 0; digit < DIGITS; digit++) {
      int64_t size = next[digit];
      next[digit] = start;
      start += size;
    }
    for (int64_t k = 0; k < count; k++) to[next[(from[k] >> shift) & (DIGITS - 1)]++] = from[k];
    int64_t* swap = from;
    from = to;
    to = swap;
  }
  if (from != keys) memcpy(keys, from, (size_t)count * sizeof *keys);
}

flce_status flce_cpu_order_targets(void* self, const flce_problem* problem, const int64_t* target,
                                   void* order) {
  (void)self;
  if (problem->tokens > UINT32_MAX || problem->vocab > INT32_MAX)
    return flce_fail(FLCE_UNSUPPORTED,
                     "expected tokens < 2^32 and vocab < 2^31 on the CPU, got %lld, %lld",
                     (long long)problem->tokens, (long long)problem->vocab);
  int64_t* keys = (int64_t*)order + 1;
  int64_t count = 0;
  for (int64_t i = 0; i < problem->tokens; i++) {
    int64_t y = target[i];
    if (y == problem->loss.ignore_index || y < 0 || y >= problem->vocab) continue;
    keys[count++] = y << TOKEN_BITS | i;
  }
  sort_keys(keys, keys + problem->tokens, count, problem->vocab);
  *(int64_t*)order = count;
  return FLCE_OK;
}

/* The first key of `target` or beyond. */
static int64_t first_key(const int64_t* keys, int64_t count, int64_t target) {
  int64_t low = 0, high = count;
  while (low < high) {
    int64_t middle = low + (high - low) / 2;
    if (key_target(keys[middle]) < target)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

static int64_t segment_end(const int64_t* keys, int64_t count, int64_t begin, int64_t target) {
  while (begin < count && key_target(keys[begin]) == target) begin++;
  return begin;
}

/* ---- rows of x and dX ---- */

typedef struct scale_rows_job {
  const flce_block_kernels* kernels;
  void* out;
  const void *x, *coef;
  const int64_t* index;
  flce_dtype dtype, stat;
  int64_t out_pitch, hidden;
} scale_rows_job;

static void scale_rows_range(int64_t begin, int64_t end, void* context) {
  const scale_rows_job* job = context;
  flce_sums sums;
  int64_t size = flce_size_of(job->dtype);
  size_t bytes = (size_t)(job->hidden * size);
  for (int64_t r = begin; r < end; r++) {
    int64_t i = job->index ? job->index[r] : r;
    double coef = i < 0 ? 0.0 : job->coef ? flce_load(job->coef, job->stat, i) : 1.0;
    void* out = flce_at(job->out, job->dtype, r * job->out_pitch);
    memset((char*)out + bytes, 0, (size_t)(job->out_pitch * size) - bytes);
    if (coef == 0.0) {
      memset(out, 0, bytes);
      continue;
    }
    const void* x = flce_const_at(job->x, job->dtype, i * job->hidden);
    if (!job->coef) {
      memcpy(out, x, bytes);
      continue;
    }
    for (int64_t h = 0, next; h < job->hidden; h = next) {
      next = flce_block_end(h, job->hidden);
      job->kernels->scaled(&sums, coef, flce_const_at(x, job->dtype, h), next - h);
      job->kernels->narrow(flce_at(out, job->dtype, h), &sums, next - h);
    }
  }
}

flce_status flce_cpu_scale_rows(void* self, void* out, int64_t out_pitch, const void* x,
                                flce_dtype dtype, const void* coef, const int64_t* index,
                                int64_t rows, int64_t hidden) {
  scale_rows_job job = {.out = out,
                        .out_pitch = out_pitch,
                        .x = x,
                        .coef = coef,
                        .index = index,
                        .dtype = dtype,
                        .stat = flce_stat_dtype(dtype),
                        .hidden = hidden};
  FLCE_TRY(flce_cpu_block_kernels(job.stat, dtype, &job.kernels));
  flce_cpu_parallel(self, rows, hidden, scale_rows_range, &job);
  return FLCE_OK;
}

typedef struct grad_input_job {
  const flce_block_kernels *dx_kernels, *d_kernels, *w_kernels, *stat_kernels;
  void* dx;
  const void *d, *w, *wsum;
  flce_dtype dx_dtype, d_dtype, dtype, stat;
  const flce_rows* rows;
  int64_t hidden, cols; /* of D, W and wsum; of dX */
} grad_input_job;

/* dX[i] from row r of D. */
static void grad_input_row(const grad_input_job* job, int64_t r, int64_t i) {
  const flce_rows* rows = job->rows;
  int64_t pitch = rows->stat_pitch, hidden = job->hidden, cols = job->cols;
  double row = 1.0, target = 0.0, smooth = 0.0;
  if (rows->coef) {
    row = flce_load(rows->coef, job->stat, FLCE_COEF_ROW * pitch + i);
    target = flce_load(rows->coef, job->stat, FLCE_COEF_TARGET * pitch + i);
    smooth = flce_load(rows->coef, job->stat, FLCE_COEF_SMOOTH * pitch + i);
  }
  int64_t w_row = rows->coef && rows->target ? rows->target[i] : -1;
  flce_sums sums;
  for (int64_t h = 0, next; h < cols; h = next) {
    next = flce_block_end(h, cols);
    int64_t count = next - h;
    job->d_kernels->scaled(&sums, row, flce_const_at(job->d, job->d_dtype, r * hidden + h), count);
    if (w_row >= 0)
      job->w_kernels->axpy(&sums, target, flce_const_at(job->w, job->dtype, w_row * hidden + h),
                           count);
    if (rows->coef && job->wsum)
      job->stat_kernels->axpy(&sums, -smooth, flce_const_at(job->wsum, job->stat, h), count);
    job->dx_kernels->narrow(flce_at(job->dx, job->dx_dtype, i * cols + h), &sums, count);
  }
}

static void grad_input_range(int64_t begin, int64_t end, void* context) {
  const grad_input_job* job = context;
  for (int64_t r = begin; r < end; r++) {
    int64_t i = flce_row_place(job->rows, r);
    flce_row_kind kind = flce_row_kind_at(job->rows, i);
    if (kind == FLCE_ROW_VALID)
      grad_input_row(job, r, i);
    else if (kind != FLCE_ROW_NONE)
      flce_fill(flce_at(job->dx, job->dx_dtype, i * job->cols), job->dx_dtype,
                kind == FLCE_ROW_IGNORED ? 0.0 : NAN, job->cols);
  }
}

flce_status flce_cpu_finish_grad_input(void* self, void* dx, flce_dtype dx_dtype, const void* d,
                                       flce_dtype d_dtype, const void* w, flce_dtype dtype,
                                       const flce_rows* rows, const void* wsum, const void* x,
                                       void* scaled_x, int64_t hidden, int64_t cols) {
  grad_input_job job = {.dx = dx,
                        .d = d,
                        .w = w,
                        .wsum = wsum,
                        .dx_dtype = dx_dtype,
                        .d_dtype = d_dtype,
                        .dtype = dtype,
                        .stat = flce_stat_dtype(dtype),
                        .rows = rows,
                        .hidden = hidden,
                        .cols = cols};
  if (dx == d && rows->index)
    return flce_fail(FLCE_UNSUPPORTED, "grad_input: expected rows in their own order in place");
  if (dx == d && hidden != cols)
    return flce_fail(FLCE_UNSUPPORTED,
                     "grad_input: expected rows of one size in place, got %lld and %lld",
                     (long long)hidden, (long long)cols);
  if (dx == d && dx_dtype != d_dtype)
    return flce_fail(FLCE_UNSUPPORTED, "grad_input: expected %s in place, got %s",
                     flce_dtype_name(d_dtype), flce_dtype_name(dx_dtype));
  FLCE_TRY(flce_cpu_block_kernels(job.stat, dx_dtype, &job.dx_kernels));
  FLCE_TRY(flce_cpu_block_kernels(job.stat, d_dtype, &job.d_kernels));
  FLCE_TRY(flce_cpu_block_kernels(job.stat, dtype, &job.w_kernels));
  FLCE_TRY(flce_cpu_block_kernels(job.stat, job.stat, &job.stat_kernels));
  flce_cpu_parallel(self, rows->rows, hidden, grad_input_range, &job);
  if (!scaled_x) return FLCE_OK;
  const void* coef = flce_const_at(rows->coef, job.stat, FLCE_COEF_ROW * rows->stat_pitch);
  return flce_cpu_scale_rows(self, scaled_x, hidden, x, dtype, coef, rows->index, rows->rows,
                             hidden);
}

/* ---- rows of dW ---- */

typedef struct grad_weight_job {
  const flce_block_kernels *dw_kernels, *accum_kernels, *x_kernels, *stat_kernels;
  void* dw;
  const void *accum, *x, *coef_target, *xsum, *class_weight;
  flce_dtype dw_dtype, accum_dtype, dtype, stat;
  const int64_t* keys;
  int64_t count, hidden;
} grad_weight_job;

/* Columns [h, next) of row j; its tokens are keys [begin, end). */
static void grad_weight_block(const grad_weight_job* job, int64_t j, int64_t begin, int64_t end,
                              int64_t h, int64_t next) {
  int64_t count = next - h, hidden = job->hidden;
  flce_sums sums;
  memset(&sums, 0, (size_t)(count * flce_size_of(job->stat)));
  for (int64_t k = begin; k < end; k++) {
    int64_t token = key_token(job->keys[k]);
    double coef = flce_load(job->coef_target, job->stat, token);
    if (coef == 0.0) continue;
    job->x_kernels->axpy(&sums, coef, flce_const_at(job->x, job->dtype, token * hidden + h), count);
  }
  if (job->xsum) {
    double weight = job->class_weight ? flce_load(job->class_weight, job->stat, j) : 1.0;
    job->stat_kernels->axpy(&sums, -weight, flce_const_at(job->xsum, job->stat, h), count);
  }
  job->accum_kernels->axpy(&sums, 1.0, flce_const_at(job->accum, job->accum_dtype, j * hidden + h),
                           count);
  job->dw_kernels->narrow(flce_at(job->dw, job->dw_dtype, j * hidden + h), &sums, count);
}

/* Every row: [begin, end) are rows. */
static void all_rows_range(int64_t begin, int64_t end, void* context) {
  const grad_weight_job* job = context;
  int64_t k = first_key(job->keys, job->count, begin);
  for (int64_t j = begin; j < end; j++) {
    int64_t last = segment_end(job->keys, job->count, k, j);
    for (int64_t h = 0, next; h < job->hidden; h = next) {
      next = flce_block_end(h, job->hidden);
      grad_weight_block(job, j, k, last, h, next);
    }
    k = last;
  }
}

/* Rows with tokens: index (column block) * count + key, which balances over tokens. The part in
 * which the first key of a row lies does that row, so one thread sums it, in order. */
static void target_rows_range(int64_t begin, int64_t end, void* context) {
  const grad_weight_job* job = context;
  for (int64_t index = begin; index < end; index++) {
    int64_t k = index % job->count, h = index / job->count * FLCE_BLOCK;
    int64_t j = key_target(job->keys[k]);
    if (k > 0 && key_target(job->keys[k - 1]) == j) continue;
    grad_weight_block(job, j, k, segment_end(job->keys, job->count, k, j), h,
                      flce_block_end(h, job->hidden));
  }
}

flce_status flce_cpu_finish_grad_weight(void* self, void* dw, flce_dtype dw_dtype,
                                        const void* accum, flce_dtype accum_dtype, const void* x,
                                        flce_dtype dtype, const void* coef_target,
                                        const void* order, int64_t tokens, const void* xsum,
                                        const void* class_weight, int64_t vocab, int64_t hidden) {
  (void)tokens;
  bool in_place = dw == accum;
  if (in_place && dw_dtype != accum_dtype)
    return flce_fail(FLCE_UNSUPPORTED, "grad_weight: expected %s in place, got %s",
                     flce_dtype_name(accum_dtype), flce_dtype_name(dw_dtype));
  grad_weight_job job = {.dw = dw,
                         .accum = accum,
                         .x = x,
                         .coef_target = coef_target,
                         .xsum = xsum,
                         .class_weight = class_weight,
                         .dw_dtype = dw_dtype,
                         .accum_dtype = accum_dtype,
                         .dtype = dtype,
                         .stat = flce_stat_dtype(dtype),
                         .hidden = hidden};
  if (coef_target) {
    job.count = *(const int64_t*)order;
    job.keys = (const int64_t*)order + 1;
  }
  FLCE_TRY(flce_cpu_block_kernels(job.stat, dw_dtype, &job.dw_kernels));
  FLCE_TRY(flce_cpu_block_kernels(job.stat, accum_dtype, &job.accum_kernels));
  FLCE_TRY(flce_cpu_block_kernels(job.stat, dtype, &job.x_kernels));
  FLCE_TRY(flce_cpu_block_kernels(job.stat, job.stat, &job.stat_kernels));
  if (in_place && !xsum)
    flce_cpu_parallel(self, job.count * flce_blocks(hidden), FLCE_BLOCK, target_rows_range, &job);
  else
    flce_cpu_parallel(self, vocab, hidden, all_rows_range, &job);
  return FLCE_OK;
}

flce_status flce_cpu_finish_grad_bias(void* self, void* db, flce_dtype db_dtype, const void* accum,
                                      flce_dtype stat, const void* coef_target, const void* order,
                                      int64_t tokens, const void* smooth_total,
                                      const void* class_weight, int64_t vocab) {
  (void)self;
  (void)tokens;
  const int64_t* keys = coef_target ? (const int64_t*)order + 1 : NULL;
  int64_t count = coef_target ? *(const int64_t*)order : 0;
  double smooth = smooth_total ? flce_load(smooth_total, stat, 0) : 0.0;
  for (int64_t j = 0, k = 0; j < vocab; j++) {
    double sum = flce_load(accum, stat, j);
    for (; k < count && key_target(keys[k]) == j; k++)
      sum += flce_load(coef_target, stat, key_token(keys[k]));
    if (smooth_total) sum -= smooth * (class_weight ? flce_load(class_weight, stat, j) : 1.0);
    flce_store(db, db_dtype, j, sum);
  }
  return FLCE_OK;
}
