/* order_samples: sorts the entries of all lists by class with CUB, computes their factors, and
 * finds where each class begins. */
#include "cuda/samples/sample_order.cuh"

#include "cuda/backend.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/row_status.cuh"
#include "cuda/common/sorted_keys.cuh"

enum { kOrderThreads = 256 };

flce_status cuda_sample_bytes(const flce_problem* problem, int64_t* bytes) {
  const sample_order o =
      view_sample_order(NULL, problem->shape.rows, problem->sampling.eps, problem->shape.vocab,
                        ceil_div(problem->shape.hidden, 8) * 8);
  int64_t scratch;
  FLCE_TRY(sort_pairs_bytes(o.count, problem->shape.vocab, &scratch));
  *bytes = o.bytes + scratch;
  return FLCE_OK;
}

/* A thread for each slot of each list. */
__global__ void __launch_bounds__(kOrderThreads)
    make_sample_keys(sample_order o, const int32_t* lists, int pitch, int slots, uint32_t vocab) {
  const int64_t position = (int64_t)blockIdx.x * kOrderThreads + threadIdx.x;
  if (position >= o.count) return;
  const int slot = (int)(position % slots);
  const int2* list = (const int2*)(lists + position / slots * pitch);
  const int2 head = list[0];
  const bool used = slot == 0 ? head.x >= 0 : slot <= head.y;
  const uint32_t key = (uint32_t)list[slot].x;
  o.keys_in[position] = !used ? vocab : key < vocab ? key : 0; /* entry_at makes it NaN */
  o.slots_in[position] = (uint32_t)position;
}

/* The factor of the sorted entry at `position` and its token; a thread for each. */
__device__ __forceinline__ int2 entry_at(const sample_order& o, const flce_rows& r,
                                         const int32_t* lists, float eps, int pitch, int slots,
                                         int64_t position) {
  const int64_t where = o.slots[position], row = where / slots;
  const int slot = (int)(where % slots);
  const int64_t token = vectors_at(r, row), at = token < 0 ? 0 : token;
  const int2 pair = ((const int2*)(lists + row * pitch))[slot];
  float factor = slot == 0
                     ? ((const float*)r.coef)[FLCE_COEF_TARGET * r.stat_pitch + at]
                     : factor_of_values(r, at) * value_of_pair(r, at, eps, __int_as_float(pair.y));
  if ((uint32_t)pair.x >= r.vocab || token < 0) factor = NAN; /* not what sample_rows writes */
  return make_int2((int)at, __float_as_int(factor));
}

/* Threads 0 to count - 1 write the entries, the next vocab + 1 where the classes begin. */
__global__ void __launch_bounds__(kOrderThreads)
    make_sample_entries(sample_order o, const __grid_constant__ flce_rows r, const int32_t* lists,
                        float eps, int pitch, int slots) {
  const int64_t position = (int64_t)blockIdx.x * kOrderThreads + threadIdx.x;
  if (position < o.count) {
    if (o.keys[position] >= r.vocab) return;
    o.entries[position] = entry_at(o, r, lists, eps, pitch, slots, position);
    return;
  }
  const int64_t j = position - o.count;
  if (j <= r.vocab) o.starts[j] = (uint32_t)lower_bound(o.keys, o.count, (uint32_t)j);
}

flce_status cuda_order_samples(void* self, const flce_order_samples_args* call) {
  const flce_rows* r = call->rows;
  const sample_order o = view_sample_order(call->order, r->rows, call->eps, r->vocab, call->hidden);
  const int pitch = (int)flce_sample_pitch(call->eps), slots = (int)flce_sample_slots(call->eps);
  if (o.count > 0) {
    make_sample_keys<<<(unsigned)ceil_div(o.count, kOrderThreads), kOrderThreads, 0,
                       stream_of(self)>>>(o, call->lists, pitch, slots, (uint32_t)r->vocab);
    FLCE_LAUNCHED("order_samples");
    /* Stable: slots, and with them rows, ascend within a class. */
    const sorted_pairs pairs = {o.keys_in, o.keys, o.slots_in, o.slots};
    FLCE_TRY(sort_pairs(&pairs, o.scratch, o.count, r->vocab, stream_of(self)));
  }
  const unsigned blocks = (unsigned)ceil_div(o.count + r->vocab + 1, kOrderThreads);
  make_sample_entries<<<blocks, kOrderThreads, 0, stream_of(self)>>>(
      o, *r, call->lists, (float)call->eps, pitch, slots);
  FLCE_LAUNCHED("order_samples");
  return FLCE_OK;
}
