/* Backend functions of a sharded vocabulary: shard_targets, pack_statistics, merge_statistics and
 * sum_partial_dx. The merge of a row is in merge.h. */
#include "cpu/row_pass.h"
#include "loss.h"
#include "merge.h"

flce_status flce_cpu_shard_targets(void* self, const flce_shard_targets_args* call) {
  (void)self;
  for (int64_t i = 0; i < call->tokens; i++)
    call->out[i] = flce_shard_column(call, call->target[i]);
  return FLCE_OK;
}

typedef struct shard_pass {
  row_pass pass;
  const flce_pack_args* pack;
  const flce_merge_args* merge;
} shard_pass;

/* l of a column of this rank, without the row's temperature: it does not change which is largest.
 */
static double logit_of(const flce_pack_args* call, flce_dtype stat, int64_t i, int64_t column) {
  double z = call->bias ? flce_load(call->bias, stat, column) : 0.0;
  for (int64_t h = 0; h < call->hidden; h++)
    z += flce_load(call->x, call->dtype, i * call->hidden + h) *
         flce_load(call->w, call->dtype, column * call->hidden + h);
  const flce_loss* options = &call->rows->options;
  flce_logit_map map = flce_logit_map_of(options, options->temperature);
  return map.outer_scale * flce_capped(map.curve, map.inner_scale * z);
}

static void pack_row(const shard_pass* job, int64_t r) {
  const flce_pack_args* call = job->pack;
  const flce_rows* rows = call->rows;
  flce_dtype stat = job->pass.stat;
  int64_t i = flce_row_index(rows, r);
  if (flce_row_kind_at(rows, i) != FLCE_ROW_VALID) return;
  double values[FLCE_SHARD_STATS] = {[FLCE_SHARD_STAT_LSE] = -INFINITY,
                                     [FLCE_SHARD_STAT_NLL] = -1.0,
                                     [FLCE_SHARD_STAT_TOP] = -INFINITY,
                                     [FLCE_SHARD_STAT_TAIL] = -INFINITY};
  if (call->shard.count > 0) {
    values[FLCE_SHARD_STAT_LSE] = row_stat(&job->pass, FLCE_STAT_LSE, i);
    if (flce_holds_class(&call->shard, rows->target[i]))
      values[FLCE_SHARD_STAT_NLL] = row_stat(&job->pass, FLCE_STAT_NLL, i);
    values[FLCE_SHARD_STAT_ENTROPY] = row_stat(&job->pass, FLCE_STAT_ENTROPY, i);
    values[FLCE_SHARD_STAT_TAIL] = row_stat(&job->pass, FLCE_STAT_TAIL_LSE, i);
    if (rows->options.label_smoothing > 0.0) {
      values[FLCE_SHARD_STAT_SMOOTHING] =
          flce_load(rows->loss, stat, i) * (double)call->shard.count;
      values[FLCE_SHARD_STAT_WEIGHT] = flce_load(call->scalars, stat, FLCE_SCALAR_WEIGHT_TOTAL);
    }
    if (rows->predictions) {
      values[FLCE_SHARD_STAT_TOP] = logit_of(call, stat, i, rows->predictions[i]);
      values[FLCE_SHARD_STAT_COLUMN] = (double)(call->shard.first + rows->predictions[i]);
    }
  }
  for (int k = 0; k < call->count; k++)
    flce_store(call->shard_stats, stat, k * rows->rows + r, values[k]);
}

static void pack_range(int64_t begin, int64_t end, void* context) {
  for (int64_t r = begin; r < end; r++) pack_row(context, r);
}

flce_status flce_cpu_pack_statistics(void* self, const flce_pack_args* call) {
  const flce_rows* rows = call->rows;
  shard_pass job = {
      .pass = {.rows = rows, .dtype = rows->z_dtype, .stat = flce_stat_dtype(rows->z_dtype)},
      .pack = call};
  flce_cpu_parallel(self, rows->rows, rows->predictions ? call->hidden : FLCE_SHARD_STATS,
                    pack_range, &job);
  return FLCE_OK;
}

/* Row r: a statistic of this rank's classes becomes that of the whole vocabulary. */
static void merge_row(const shard_pass* job, int64_t r) {
  const flce_merge_args* call = job->merge;
  const flce_rows* rows = call->rows;
  flce_dtype stat = job->pass.stat;
  int64_t i = flce_row_index(rows, r), pitch = rows->stat_pitch;
  flce_row_kind kind = flce_row_kind_at(rows, i);
  if (kind == FLCE_ROW_ABSENT) return;
  if (kind != FLCE_ROW_VALID) {
    flce_cpu_blank_stats(rows, stat, i, kind == FLCE_ROW_OUT_OF_RANGE ? NAN : 0.0);
    return;
  }
  flce_merged merged = flce_merge_row(call, stat, r);
  double lse = flce_shard_stat_at(call, stat, call->rank, FLCE_SHARD_STAT_LSE, r);
  double fraction = exp(-flce_lse_minus_shard(&merged, lse)), inv_sum = 0.0, nll = merged.nll;
  if (lse != -INFINITY)
    inv_sum = row_stat(&job->pass, FLCE_STAT_INV_SUM, i) * fraction;
  else /* all l of this rank are -inf, or it has none: exp(l - 0) is 0 */
    flce_store(rows->stats, stat, FLCE_STAT_OFFSET * pitch + i, 0.0);
  if (call->shard.count == 0) {
    flce_store(rows->stats, stat, FLCE_STAT_SLOPE * pitch + i, 0.0);
    flce_store(rows->stats, stat, FLCE_STAT_WEIGHT_SUM * pitch + i, 0.0);
  } else if (!flce_holds_class(&call->shard, rows->target[i])) {
    nll = flce_merged_nll(&merged, lse, row_stat(&job->pass, FLCE_STAT_NLL, i));
  }
  flce_store(rows->stats, stat, FLCE_STAT_LSE * pitch + i, merged.largest + merged.log_ratio);
  flce_store(rows->stats, stat, FLCE_STAT_NLL * pitch + i, nll);
  flce_store(rows->stats, stat, FLCE_STAT_INV_SUM * pitch + i, inv_sum);
  flce_store(rows->stats, stat, FLCE_STAT_ENTROPY * pitch + i,
             rows->wants_entropy ? merged.entropy : 0.0);
  flce_store(rows->stats, stat, FLCE_STAT_TAIL_LSE * pitch + i, merged.tail);
  flce_store(rows->loss, stat, i, flce_merged_loss(rows, stat, i, &merged));
  if (rows->predictions) rows->predictions[i] = merged.prediction;
}

static void merge_range(int64_t begin, int64_t end, void* context) {
  for (int64_t r = begin; r < end; r++) merge_row(context, r);
}

flce_status flce_cpu_merge_statistics(void* self, const flce_merge_args* call) {
  const flce_rows* rows = call->rows;
  shard_pass job = {
      .pass = {.rows = rows, .dtype = rows->z_dtype, .stat = flce_stat_dtype(rows->z_dtype)},
      .merge = call};
  flce_cpu_parallel(self, rows->rows, FLCE_SHARD_STATS * call->ranks, merge_range, &job);
  return FLCE_OK;
}

static void sum_range(int64_t begin, int64_t end, void* context) {
  const flce_sum_dx_args* call = context;
  bool wide = call->dtype == FLCE_F64;
  for (int64_t i = begin; i < end; i++) {
    double sum = 0.0;
    for (int64_t r = 0; r < call->ranks; r++) {
      double term = r == call->rank ? flce_load(call->own, call->dtype, i)
                                    : flce_load(call->received, call->dtype, r * call->count + i);
      sum = wide ? sum + term : (double)((float)sum + (float)term);
    }
    flce_store(call->out, call->out_dtype, i, sum);
    if (call->copy) flce_store(call->copy, call->out_dtype, i, sum);
  }
}

flce_status flce_cpu_sum_partial_dx(void* self, const flce_sum_dx_args* call) {
  flce_cpu_parallel(self, call->count, call->ranks, sum_range, (void*)call);
  return FLCE_OK;
}
