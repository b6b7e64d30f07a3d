/* Shared by the row passes: choice of kernels and path, and rows that are filled or padded. */
#include "cpu/row_pass.h"

flce_status flce_cpu_make_row_pass(const flce_rows* rows, bool writes, row_pass* pass) {
  flce_dtype stat = flce_stat_dtype(rows->z_dtype);
  *pass = (row_pass){
      .rows = rows,
      .dtype = rows->z_dtype,
      .stat = stat,
      .general = flce_maps_logits(&rows->options) || rows->temperature || rows->probabilities};
  FLCE_TRY(flce_cpu_row_kernels(rows->z_dtype, &pass->kernels));
  FLCE_TRY(flce_cpu_row_kernels(stat, &pass->l_kernels));
  FLCE_TRY(flce_cpu_block_kernels(stat, rows->z_dtype, &pass->z_blocks));
  FLCE_TRY(flce_cpu_block_kernels(stat, stat, &pass->l_blocks));
  if (!writes) return FLCE_OK;
  if (rows->out_dtype != rows->z_dtype)
    return flce_fail(FLCE_UNSUPPORTED, "CPU row pass: expected out in the logits' %s, got %s",
                     flce_dtype_name(rows->z_dtype), flce_dtype_name(rows->out_dtype));
  if (rows->out == rows->z && rows->out_pitch != rows->z_pitch)
    return flce_fail(FLCE_UNSUPPORTED, "CPU row pass in place: expected out_pitch %lld, got %lld",
                     (long long)rows->z_pitch, (long long)rows->out_pitch);
  return FLCE_OK;
}

void flce_cpu_fill_row(const row_pass* pass, int64_t r, double value) {
  flce_fill(row_out(pass, r), pass->dtype, value, pass->rows->vocab);
}

void flce_cpu_pad_row(const row_pass* pass, void* row, int64_t columns) {
  int64_t vocab = pass->rows->vocab;
  if (columns > vocab)
    flce_fill(flce_at(row, pass->dtype, vocab), pass->dtype, 0.0, columns - vocab);
}
