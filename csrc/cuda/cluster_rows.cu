/* Row passes that read a row once and keep it. The blocks of a cluster share a row: each copies its
 * part into shared memory, sums it up, tells the others its sums, and makes the gradient of what it
 * holds. A thread uses only what it has copied itself, so that a slot is free for the next row as
 * soon as its gradient is made, and the copies of one row run beside the writes of the one before.
 */
#include "cluster_rows.cuh"

#include "backend.cuh"
#include "coefficients.cuh"
#include "grad_row.cuh"
#include "launch.cuh"
#include "sm90.cuh"
#include "stage.cuh"

enum {
  kMaxRows = 1 << 30,    /* counted in 32 bits */
  kClusterThreads = 384, /* of a block: as many as spill nothing beside another one */
  kClusterBlocks = 2,    /* on an SM: the copies of one hide the sums of the other */
  kBlockWarps = 16,      /* at least its warps; a power of two is addressed in fewer registers */
  kMaxCluster = 8        /* blocks of a cluster that every device accepts */
};

typedef struct cluster_args {
  row_args a;
  cluster_coef made;
  int tiles; /* of a thread, of kUnroll vectors each */
  ClusterPass pass;
} cluster_args;

/* ---- sums ---- */

/* The sums of some of a row's columns, in units of their own. */
template <typename S>
struct alignas(16) Part {
  S top; /* the largest l, which offset and references are; 0 where it is -inf */
  S rest, gap, mass, spread;
  int column; /* the lowest that holds `top` */
  int unused[2];
};

template <typename S>
__device__ __forceinline__ Part<S> no_part() {
  Part<S> part = {};
  part.top = -infinity_of(S(0));
  part.column = INT32_MAX;
  return part;
}

/* Adds one tile of l to the sums, with its weights where there are any. */
template <typename Z, typename T, typename S = stat_t<Z>>
__device__ __forceinline__ void add_tile(const cluster_args& p, const Row<Z>& row,
                                         const Stage<Z, T>& stage, int tile, Running<S>& run,
                                         RowSums<S>& sums, int& column) {
  constexpr int N = kVec<Z>;
  const flce_rows& r = p.a.r;
  const int first = stage.first + slot_of<Z>(tile, 0);
  S l[kUnroll<Z>][N];
  {
    Vec<Z, N> raw[kUnroll<Z>];
#pragma unroll
    for (int u = 0; u < kUnroll<Z>; u++) raw[u] = stage.z[slot_of<Z>(tile, u)];
    tile_logits<sizeof(Z) == 2>(row, raw, first, l);
  }
  const S highest = fmax(run.top, tile_max(l));
  if (highest > run.top) {
    if (r.predictions) column = column_holding(row, highest, first, l);
    raise_top<kGeneral>(run, sums, highest, S(1));
  }
#pragma unroll
  for (int u = 0; u < kUnroll<Z>; u++) {
    if (p.a.weighted) {
      const int col = column_of<Z>(first + u * blockDim.x, row.lead);
      S w[N];
      load_weights(row, col, w);
      if constexpr (kIsSoft<T>) {
        S t[N];
        unpack(((const Vec<T, N>*)stage.t)[slot_of<Z>(tile, u)], t);
#pragma unroll
        for (int e = 0; e < N; e++) w[e] *= fma(row.hard, t[e], row.share);
      }
      add_weighed_gaps(row, col, l[u], run.shift, w, sums);
    }
    add_exps(l[u], run.shift, r.wants_entropy, sums);
  }
}

/* This thread's part of a row, whose tiles of the next row it copies behind it where nobody needs
 * this one's again. */
template <typename Z, typename T, typename S = stat_t<Z>>
__device__ __forceinline__ Part<S> thread_part(const cluster_args& p, const Row<Z>& row,
                                               const Stage<Z, T>& stage, const Source<Z, T>& next) {
  Running<S> run = {-infinity_of(S(0)), 0};
  RowSums<S> sums = {};
  int column = INT32_MAX;
  for (int group = 0; group < kGroups; group++) {
    wait_copies(p.pass == kSumsOnly ? kGroups - 1 : kGroups - 1 - group);
    const int end = tiles_before(group + 1, p.tiles);
    for (int tile = tiles_before(group, p.tiles); tile < end; tile++) {
      add_tile(p, row, stage, tile, run, sums, column);
      if (p.pass == kSumsOnly) stage_tile(stage, next, row.vocab, tile);
    }
    if (p.pass == kSumsOnly) commit_copies();
  }
  return {run.top, sums.rest, sums.gap, sums.mass, sums.spread, column, {}};
}

/* The sums of the lanes' parts with a common offset, in every lane. */
template <typename S>
__device__ __forceinline__ RowSums<S> sum_lanes(const row_args& a, const Part<S>& part, S offset) {
  RowSums<S> sums = {};
  sums.offset = offset;
  sums.rest = part.rest;
  sums.gap = part.gap;
  sums.mass = part.mass;
  sums.spread = part.spread;
  const Running<S> run = {part.top, part.top == -infinity_of(S(0)) ? 0 : part.top};
  settle<kGeneral>(run, sums, S(1));
  sums.rest = warp_sum(sums.rest);
  if (a.weighted) {
    sums.gap = warp_sum(sums.gap);
    sums.mass = warp_sum(sums.mass);
  }
  if (a.r.wants_entropy) sums.spread = warp_sum(sums.spread);
  return sums;
}

template <typename S>
__device__ __forceinline__ Best<S> best_of_lanes(const row_args& a, const Part<S>& part, S top) {
  if (!a.r.predictions) return {top, INT32_MAX};
  const int column = part.top == top ? part.column : INT32_MAX;
  return {top, __reduce_min_sync(0xffffffffu, column)};
}

/* The lanes' parts as one, in every lane. */
template <typename S>
__device__ __forceinline__ Part<S> merge_lanes(const row_args& a, const Part<S>& part) {
  const S top = warp_max(part.top);
  const RowSums<S> sums = sum_lanes(a, part, top == -infinity_of(S(0)) ? 0 : top);
  const Best<S> best = best_of_lanes(a, part, top);
  return {top, sums.rest, sums.gap, sums.mass, sums.spread, best.column, {}};
}

/* ---- what the blocks of a cluster tell each other ---- */

/* Of two rows in turns: a block may send its part of the next one while another still reads this
 * one's. It gets no further, as it needs the part that the other sends when it has read. */
template <typename S>
struct Exchange {
  Part<S> warps[2][kBlockWarps];
  Part<S> blocks[2][kMaxCluster];
  uint64_t arrived[2]; /* barriers that count the bytes of `blocks` */
};

template <typename S>
__device__ __forceinline__ void open_exchange(Exchange<S>& exchange) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) sm90::barrier_init(sm90::shared_address(&exchange.arrived[i]), 1);
    sm90::barrier_init_fence();
  }
  sm90::cluster_sync(); /* a block's shared memory may be written once it runs */
}

/* Sends this block's part to all, itself too, and returns the part of the block `lane`. For the
 * first warp, after a barrier of the block behind its last access to the row's logits.
 *
 * In place, and with Out half of Z, the gradients that a block writes afterwards cover logits of
 * other blocks. It has all parts by then, and each was sent when the sender's reads were over:
 * the values of copies and loads had arrived in its shared memory before the barrier. A read that
 * is over cannot see a later write, and nothing written to global memory is handed over, so that
 * no fence is needed, which would wait for the stores of the row before.
 *
 * A barrier's next phase is armed before this block sends, so before anyone can be a turn ahead;
 * bytes that arrive before it is armed count all the same. */
template <typename S>
__device__ __forceinline__ Part<S> exchange_parts(Exchange<S>& exchange, int turn,
                                                  const Part<S>& part) {
  const int lane = threadIdx.x, blocks = gridDim.y, side = turn % 2;
  const uint32_t arrived = sm90::shared_address(&exchange.arrived[side]);
  if (lane == 0) sm90::barrier_arrive_expecting(arrived, blocks * (int)sizeof(Part<S>));
  __syncwarp();
  if (lane < blocks) {
    const uint32_t mine = sm90::shared_address(&exchange.blocks[side][blockIdx.y]);
    const uint32_t to = sm90::address_at(mine, lane), barrier = sm90::address_at(arrived, lane);
#pragma unroll
    for (int i = 0; i < (int)sizeof(Part<S>) / 16; i++) {
      sm90::send_words(to + 16 * i, ((const uint4*)&part)[i], barrier);
    }
  }
  sm90::barrier_wait(arrived, turn / 2 % 2);
  return lane < blocks ? exchange.blocks[side][lane] : no_part<S>();
}

/* ---- the end of a row ---- */

/* What one thread of a block keeps of a row beside its registers, for itself and, `gradient`, for
 * the others. Of two rows in turns, as those may be behind. */
template <typename S>
struct Kept {
  S l_target;
  RowFactors<S> factors;
  RowSums<S> sums;
  Best<S> best;
  S coef[FLCE_COEF_ROWS];
  GradRow<S> gradient;
};

/* Reads what the row's end needs, while the row's copies are under way. */
template <typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ void prepare_end(const cluster_args& p, Row<Z> row, int64_t at,
                                            Kept<S>& kept) {
  const flce_rows& r = p.a.r;
  if (p.pass == kGradientsOnly) {
    const RowTables<S> tables = tables_at<S>(r, at);
    kept.gradient = open_grad_row<kGeneral>(p.a, row, tables, 1.0, false, false);
    return;
  }
  read_target<kGeneral, sizeof(Z) == 2>(row);
  kept.l_target = row.l_target;
  if (p.pass == kSumsOnly) return;
  const S* factor = (const S*)p.made.factor;
  const flce_upstream upstream = {};
  kept.factors = factors_of(r, upstream, at, factor ? factor[0] : (S)1, scale_of(p.a, S(0)));
}

/* The row's sums from the parts of its blocks, a lane each, and its gradient from those. */
template <typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ void end_sums(const cluster_args& p, Row<Z> row, const Part<S>& part,
                                         Kept<S>& kept) {
  row.l_target = kept.l_target;
  const S top = warp_max(part.top);
  const S c = row.target >= 0 ? fmax(top, row.l_target) : top;
  const RowSums<S> sums = sum_lanes(p.a, part, c);
  const Best<S> best = best_of_lanes(p.a, part, top);
  if (threadIdx.x != 0) return;
  kept.sums = sums;
  kept.best = best;
  if (p.pass == kSumsOnly) return;
  const RowEnd<S> end = end_of<kGeneral>(row, sums.offset, sums.rest);
  const RowStats<S> stats = statistics_of<kGeneral>(p.a, row, sums, end);
  S coef[FLCE_COEF_ROWS];
  coefficients_of(p.a.r, kept.factors, stats, coef);
  const RowTables<S> tables = {stats.of, coef, 1};
  kept.gradient = open_grad_row<kGeneral>(p.a, row, tables, 1.0, false, false);
#pragma unroll
  for (int which = 0; which < FLCE_COEF_ROWS; which++) kept.coef[which] = coef[which];
}

/* What the pass returns of a row beside its gradient; by the thread that kept it, when no other
 * waits for it. */
template <typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ void write_end(const cluster_args& p, int64_t index,
                                          const Kept<S>& kept) {
  const flce_rows& r = p.a.r;
  const int64_t at = vectors_at(r, index); /* again, as all of the row: registers are dear */
  Row<Z> row = open_walk<kGeneral, Z>(p.a, index, at);
  row.l_target = kept.l_target;
  if (r.predictions) r.predictions[at] = prediction_of(row, kept.best);
  write_statistics<kGeneral>(p.a, row, at, kept.sums);
  if (p.pass == kSumsOnly) return;
#pragma unroll
  for (int which = 0; which < FLCE_COEF_ROWS; which++) {
    ((S*)p.made.coef)[which * r.stat_pitch + at] = kept.coef[which];
  }
}

/* ---- gradient ---- */

/* Writes one tile of gradients. */
template <typename Out, typename Z, typename T, typename S = stat_t<Z>>
__device__ __forceinline__ void write_tile(Out* out, const Row<Z>& row, const GradRow<S>& g,
                                           const Stage<Z, T>& stage, int tile) {
  constexpr int N = kVec<Z>;
#pragma unroll
  for (int u = 0; u < kUnroll<Z>; u++) {
    const int slot = slot_of<Z>(tile, u);
    const int col = column_of<Z>(stage.first + slot, row.lead);
    S share[N] = {}, v[N];
    if (g.weighted) {
#pragma unroll
      for (int e = 0; e < N; e++) share[e] = g.smooth;
      if constexpr (kIsSoft<T>) {
        S t[N];
        unpack(((const Vec<T, N>*)stage.t)[slot], t);
#pragma unroll
        for (int e = 0; e < N; e++) share[e] = fma(g.soft, t[e], share[e]);
      }
      weigh_shares(row, col, share);
    }
    general_gradients<Out>(row, g, false, stage.z[slot], col, share, v);
    put_target(g, row.target - col, v);
    Vec<Out, N> packed;
    pack(v, packed);
    store_columns(out, col, row.vocab, packed);
  }
}

/* What the pass leaves of a row that has no logits: this block's part. */
template <typename Out, typename Z, typename T, typename S = stat_t<Z>>
__device__ __forceinline__ void blank_row(const cluster_args& p, Out* out, Place place, int lead,
                                          const Stage<Z, T>& stage) {
  constexpr int N = kVec<Z>;
  const flce_rows& r = p.a.r;
  const S value = blank_of<S>(place);
  if (p.pass != kGradientsOnly && blockIdx.y == 0) write_no_statistics<S>(r, place);
  if (p.pass == kSumsOnly) return;
  if (p.pass == kSumsAndGradients && blockIdx.y == 0 && threadIdx.x == 0 && place.at >= 0) {
    for (int which = 0; which < FLCE_COEF_ROWS; which++) {
      ((S*)p.made.coef)[which * r.stat_pitch + place.at] = value;
    }
  }
  Vec<Out, N> v;
#pragma unroll
  for (int e = 0; e < N; e++) v.at[e] = from_stat<Out>(value);
  for (int slot = threadIdx.x; slot < p.tiles * kUnroll<Z> * (int)blockDim.x; slot += blockDim.x) {
    store_columns(out, column_of<Z>(stage.first + slot, lead), (int)r.vocab, v);
  }
}

/* ---- the kernel ---- */

/* Clusters are along y; those along x take the rows in turns. */
template <typename Z, typename Out, typename T>
__global__ void __launch_bounds__(kClusterThreads, kClusterBlocks)
    cluster_rows(const __grid_constant__ cluster_args p) {
#if __CUDA_ARCH__ >= 900
  using S = stat_t<Z>;
  extern __shared__ uint4 memory[];
  __shared__ Exchange<S> exchange;
  __shared__ Kept<S> both[2];
  const flce_rows& r = p.a.r;
  const int slots = p.tiles * kUnroll<Z> * (int)blockDim.x, vocab = (int)r.vocab;
  const Stage<Z, T> stage = {(Vec<Z, kVec<Z>>*)memory, (T*)(memory + slots),
                             (int)blockIdx.y * slots};
  Source<Z, T> next = open_source<Z, T>(r, blockIdx.x);
  stage_row(stage, next, vocab, p.tiles);
  open_exchange(exchange);
  int turn = 0;
  for (int index = blockIdx.x; index < r.rows; index += gridDim.x) {
    const Place place = next.place;
    const int lead = next.lead;
    Out* out = (Out*)r.out + index * r.out_pitch;
    next = open_source<Z, T>(r, index + gridDim.x);
    if (place.kind != kRowValid) {
      blank_row<Out>(p, out, place, lead, stage);
      stage_row(stage, next, vocab, p.tiles);
      continue;
    }
    const Row<Z> row = open_walk<kGeneral, Z>(p.a, index, place.at);
    Kept<S>& kept = both[turn % 2];
    if (threadIdx.x == 0) prepare_end(p, row, place.at, kept);
    Part<S>* warps = exchange.warps[turn % 2];
    if (p.pass == kGradientsOnly) {
      wait_copies(0);
    } else {
      const Part<S> part = merge_lanes(p.a, thread_part(p, row, stage, next));
      if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = part;
    }
    __syncthreads();
    if (threadIdx.x < kWarp) {
      Part<S> part = no_part<S>();
      if (p.pass != kGradientsOnly) {
        if (threadIdx.x < blockDim.x / kWarp) part = warps[threadIdx.x];
        part = merge_lanes(p.a, part);
      }
      part = exchange_parts(exchange, turn, part);
      if (p.pass != kGradientsOnly) end_sums(p, row, part, kept);
    }
    turn++;
    if (p.pass != kSumsOnly) {
      __syncthreads();
      const GradRow<S> g = kept.gradient;
      for (int group = 0; group < kGroups; group++) {
        const int end = tiles_before(group + 1, p.tiles);
        for (int tile = tiles_before(group, p.tiles); tile < end; tile++) {
          write_tile(out, row, g, stage, tile);
          stage_tile(stage, next, vocab, tile);
        }
        commit_copies();
      }
    }
    if (p.pass != kGradientsOnly && blockIdx.y == 0 && threadIdx.x == 0)
      write_end<Z>(p, index, kept);
  }
  sm90::cluster_sync(); /* a block stays while another may send to it */
#endif
}

/* ---- launch ---- */

typedef void (*cluster_kernel)(const cluster_args);

template <typename Z, typename Out>
static cluster_kernel kernel_for(const flce_rows* r) {
  if (r->target) return cluster_rows<Z, Out, NoTargets>;
  switch (r->probabilities_dtype) {
    case FLCE_F32:
      return cluster_rows<Z, Out, float>;
    case FLCE_BF16:
      return cluster_rows<Z, Out, __nv_bfloat16>;
    case FLCE_F16:
      return cluster_rows<Z, Out, __half>;
    default:
      return NULL;
  }
}

/* NULL where there is none. Sums alone have no type to write. */
static cluster_kernel choose_kernel(const flce_rows* r, ClusterPass pass) {
  const flce_dtype z = r->z_dtype, out = pass == kSumsOnly ? z : r->out_dtype;
  if (z == FLCE_F32 && out == FLCE_F32) return kernel_for<float, float>(r);
  if (z == FLCE_F32 && out == FLCE_BF16) return kernel_for<float, __nv_bfloat16>(r);
  if (z == FLCE_F32 && out == FLCE_F16) return kernel_for<float, __half>(r);
  if (z == FLCE_BF16 && out == z) return kernel_for<__nv_bfloat16, __nv_bfloat16>(r);
  if (z == FLCE_F16 && out == z) return kernel_for<__half, __half>(r);
  return NULL;
}

typedef struct cluster_shape {
  int blocks, threads, tiles;
  int64_t bytes; /* of a block's shared memory */
} cluster_shape;

/* The smallest cluster whose blocks leave room for others beside them, else the largest one where
 * that holds a row; false where none does. `most` is what a block may have, `shared` what it may
 * have beside another; `logits` of a vector and `vector_bytes` with its targets. */
static bool choose_shape(int64_t vocab, int64_t logits, int64_t vector_bytes, int64_t shared,
                         int64_t most, cluster_shape* shape) {
  const int64_t unroll = 16 / logits; /* kUnroll: 16 logits of a thread */
  const int64_t vectors = ceil_div(vocab + logits - 1, logits);
  for (int blocks = 1; blocks <= kMaxCluster; blocks *= 2) {
    const int64_t part = ceil_div(vectors, blocks);
    const int64_t tiles = ceil_div(part, kClusterThreads * unroll);
    const int threads = threads_for(ceil_div(part, tiles * unroll), kClusterThreads);
    const int64_t bytes = tiles * unroll * threads * vector_bytes;
    *shape = {blocks, threads, (int)tiles, bytes};
    if (bytes <= (blocks == kMaxCluster ? most : shared)) return true;
  }
  return false;
}

/* What a device has for it. */
typedef struct cluster_device {
  int device;
  int64_t shared, most;
} cluster_device;

enum { kStaticBytes = 3072 }; /* at least the kernel's own, and what the system keeps of a block */

static flce_status find_device(cluster_device* found) {
  int major = 0, per_block = 0, per_processor = 0;
  FLCE_TRY(check_cuda(cudaGetDevice(&found->device), "cluster_rows"));
  const struct {
    int* value;
    cudaDeviceAttr which;
  } wanted[] = {{&major, cudaDevAttrComputeCapabilityMajor},
                {&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                {&per_processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor}};
  for (const auto& fact : wanted) {
    FLCE_TRY(
        check_cuda(cudaDeviceGetAttribute(fact.value, fact.which, found->device), "cluster_rows"));
  }
  found->most = major >= 9 ? per_block - kStaticBytes : 0;
  found->shared = major >= 9 ? per_processor / kClusterBlocks - kStaticBytes : 0;
  return FLCE_OK;
}

/* Prepares the kernel and asks how many of its clusters run at once; 0 where it cannot, as in code
 * that was compiled for an older device. */
static flce_status ask_clusters(cluster_kernel kernel, const cudaLaunchConfig_t* config,
                                const cluster_device* device, int* clusters) {
  const char* what = "cluster_rows: attributes";
  cudaFuncAttributes attributes;
  *clusters = 0;
  FLCE_TRY(check_cuda(cudaFuncGetAttributes(&attributes, kernel), what));
  if (attributes.ptxVersion < 90) return FLCE_OK;
  /* Always the same limit: another thread may be about to launch the kernel with more. */
  FLCE_TRY(check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)device->most),
      what));
  FLCE_TRY(check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                           cudaSharedmemCarveoutMaxShared),
                      what));
  if (cudaOccupancyMaxActiveClusters(clusters, kernel, config) != cudaSuccess) {
    cudaGetLastError(); /* the passes that read twice serve */
    *clusters = 0;
  }
  return FLCE_OK;
}

/* A cluster for each place there is takes rows until none is left. Counted in every chunk, mostly
 * for what was counted last. */
static flce_status count_clusters(cluster_kernel kernel, const cudaLaunchConfig_t* config,
                                  const cluster_shape* shape, const cluster_device* device,
                                  int* clusters) {
  static thread_local cluster_kernel known_kernel = NULL;
  static thread_local cluster_shape known = {0, 0, 0, 0};
  static thread_local int known_device = -1, known_clusters = 0;
  if (kernel != known_kernel || device->device != known_device || shape->blocks != known.blocks ||
      shape->threads != known.threads || shape->bytes != known.bytes) {
    known_kernel = NULL;
    FLCE_TRY(ask_clusters(kernel, config, device, &known_clusters));
    known_kernel = kernel;
    known = *shape;
    known_device = device->device;
  }
  *clusters = known_clusters;
  return FLCE_OK;
}

flce_status cuda_cluster_rows(void* self, const flce_rows* r, const cluster_coef* made,
                              ClusterPass pass, bool* done) {
  *done = false;
  cluster_device device;
  cluster_shape shape;
  FLCE_TRY(check_rows(r, "cluster_rows"));
  FLCE_TRY(find_device(&device));
  const cluster_kernel kernel = choose_kernel(r, pass);
  const int64_t z_bytes = flce_size_of(r->z_dtype), logits = 16 / z_bytes;
  const int64_t t_bytes = r->target ? 0 : flce_size_of(r->probabilities_dtype);
  if (!kernel || r->rows > kMaxRows ||
      !choose_shape(r->vocab, logits, logits * (z_bytes + t_bytes), device.shared, device.most,
                    &shape)) {
    return FLCE_OK;
  }
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = attribute.val.clusterDim.z = 1;
  attribute.val.clusterDim.y = shape.blocks;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((unsigned)r->rows, (unsigned)shape.blocks);
  config.blockDim = dim3((unsigned)shape.threads);
  config.dynamicSmemBytes = (size_t)shape.bytes;
  config.stream = stream_of(self);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters;
  FLCE_TRY(count_clusters(kernel, &config, &shape, &device, &clusters));
  if (clusters == 0) return FLCE_OK;
  config.gridDim.x = (unsigned)min_of(r->rows, clusters);
  const cluster_args args = {make_args(r), made ? *made : cluster_coef{NULL, NULL}, shape.tiles,
                             pass};
  FLCE_TRY(check_cuda(cudaLaunchKernelEx(&config, kernel, args), "cluster_rows"));
  *done = true;
  return FLCE_OK;
}

flce_status cuda_dz_rows(void* self, const flce_rows* r, const void* factor, void* coef) {
  if (r->rows == 0 || r->vocab == 0) return FLCE_OK;
  const cluster_coef made = {factor, coef};
  bool done;
  FLCE_TRY(cuda_cluster_rows(self, r, &made, kSumsAndGradients, &done));
  if (done) return FLCE_OK;
  const flce_upstream upstream = {NULL, 0, NULL, NULL};
  flce_rows with_coef = *r;
  with_coef.coef = coef;
  FLCE_TRY(cuda_stat_rows(self, r));
  FLCE_TRY(cuda_row_coefficients(self, r, &upstream, factor, coef));
  return cuda_grad_rows(self, &with_coef, 1.0, false, false);
}
