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
#include "stage.cuh"

#include <cooperative_groups.h>

namespace cg = cooperative_groups;

/* As many as spill nothing beside another block. */
constexpr int cluster_threads(size_t z_size) {
  return z_size == 2 ? 384 : 512;
}

enum {
  kClusterBlocks = 2, /* on an SM: the copies of one hide the sums of the other */
  kMaxCluster = 8     /* blocks of a cluster that every device accepts */
};

typedef struct cluster_args {
  row_args a;
  cluster_coef made;
  int tiles; /* of a thread, of kUnroll vectors each */
  ClusterPass pass;
} cluster_args;

/* ---- sums ---- */

/* A block's part of a row's sums, in units of its own: top is -inf and offset 0 where all l are. */
template <typename S>
struct Part {
  S top;
  RowSums<S> sums;
  Best<S> best;
};

/* Adds one tile of l to the sums, with its weights where there are any. */
template <typename Z, typename T, typename S = stat_t<Z>>
__device__ __forceinline__ void add_tile(const cluster_args& p, const Row<Z>& row,
                                         const Stage<Z, T>& stage, int tile, Running<S>& run,
                                         RowSums<S>& sums, Best<S>& best) {
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
    if (r.predictions) best = {highest, column_holding(row, highest, first, l)};
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

/* The block's sums of its part, in every thread of its first warp. */
template <typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ Part<S> block_part(const row_args& a, const Running<S>& run,
                                              RowSums<S> sums, Best<S> best, S* scratch) {
  Part<S> part;
  part.top = block_max(run.top, scratch);
  sums.offset = part.top == -infinity_of(S(0)) ? 0 : part.top;
  settle<kGeneral>(run, sums, S(1));
  add_up<kGeneral>(a, sums, scratch);
  if (a.r.predictions) {
    best = block_best(best, scratch);
    best.value = __shfl_sync(0xffffffffu, best.value, 0);
    best.column = __shfl_sync(0xffffffffu, best.column, 0);
  }
  part.sums = sums;
  part.best = best;
  return part;
}

/* The row's sums from those of its blocks, in their order; leaves the best of all in `best`. */
template <typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ RowSums<S> merge_parts(const Row<Z>& row, const Part<S>* parts,
                                                  int blocks, Best<S>& best) {
  S c = -infinity_of(S(0));
  for (int block = 0; block < blocks; block++) c = fmax(c, parts[block].top);
  if (row.target >= 0) c = fmax(c, row.l_target);
  RowSums<S> total = {};
  best = no_best<S>();
  for (int block = 0; block < blocks; block++) {
    RowSums<S> sums = parts[block].sums;
    const Running<S> run = {parts[block].top, sums.offset};
    sums.offset = c;
    settle<kGeneral>(run, sums, S(1));
    total.rest += sums.rest;
    total.gap += sums.gap;
    total.mass += sums.mass;
    total.spread += sums.spread;
    best = better_of(best, parts[block].best);
  }
  total.offset = total.gap_from = total.spread_from = c;
  return total;
}

/* What one thread of each block makes of the row's sums: `stats` and `coef` for its own block, and
 * in the first block what the pass returns. */
template <typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ void end_row(const cluster_args& p, const Row<Z>& row, int64_t at,
                                        const RowSums<S>& sums, Best<S> best, S* table) {
  const flce_rows& r = p.a.r;
  const bool writes = blockIdx.y == 0;
  if (writes && r.predictions) r.predictions[at] = prediction_of(row, best);
  if (!writes && p.pass == kSumsOnly) return;
  const RowStats<S> stats = write_statistics<kGeneral>(p.a, row, at, sums, writes);
  if (p.pass == kSumsOnly) return;
  const S* factor = (const S*)p.made.factor;
  const flce_upstream upstream = {};
  S coef[FLCE_COEF_ROWS];
  coefficients_of(r, upstream, at, factor ? factor[0] : (S)1, scale_of(p.a, S(0)), stats, coef);
#pragma unroll
  for (int which = 0; which < FLCE_STAT_ROWS; which++) table[which] = stats.of[which];
#pragma unroll
  for (int which = 0; which < FLCE_COEF_ROWS; which++) {
    table[FLCE_STAT_ROWS + which] = coef[which];
    if (writes) ((S*)p.made.coef)[which * r.stat_pitch + at] = coef[which];
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
__global__ void __launch_bounds__(cluster_threads(sizeof(Z)), kClusterBlocks)
    cluster_rows(const __grid_constant__ cluster_args p) {
#if __CUDA_ARCH__ >= 900
  using S = stat_t<Z>;
  extern __shared__ uint4 memory[];
  __shared__ S scratch[kMaxWarps];
  __shared__ S table[FLCE_STAT_ROWS + FLCE_COEF_ROWS];
  /* Of two rows: a block may send its part of the next one while another still reads this one's;
   * the barrier between keeps it from going further. */
  __shared__ Part<S> inbox[2][kMaxCluster];
  const cg::cluster_group cluster = cg::this_cluster();
  const flce_rows& r = p.a.r;
  const int slots = p.tiles * kUnroll<Z> * (int)blockDim.x, vocab = (int)r.vocab;
  const Stage<Z, T> stage = {(Vec<Z, kVec<Z>>*)memory, (T*)(memory + slots),
                             (int)blockIdx.y * slots};
  Source<Z, T> next = open_source<Z, T>(r, blockIdx.x);
  stage_row(stage, next, vocab, p.tiles);
  cluster.sync(); /* a block's shared memory may be written once it runs */
  int turn = 0;
  for (int64_t index = blockIdx.x; index < r.rows; index += gridDim.x) {
    const Place place = next.place;
    const int lead = next.lead;
    Out* out = (Out*)r.out + index * r.out_pitch;
    next = open_source<Z, T>(r, index + gridDim.x);
    if (place.kind != kRowValid) {
      blank_row<Out>(p, out, place, lead, stage);
      stage_row(stage, next, vocab, p.tiles);
      continue;
    }
    Row<Z> row = open_walk<kGeneral, Z>(p.a, index, place.at);
    RowTables<S> tables = tables_at<S>(r, place.at);
    if (p.pass != kGradientsOnly) {
      read_target<kGeneral, sizeof(Z) == 2>(row);
      Running<S> run = {-infinity_of(S(0)), 0};
      RowSums<S> sums = {};
      Best<S> best = no_best<S>();
      for (int group = 0; group < kGroups; group++) {
        wait_copies(p.pass == kSumsOnly ? kGroups - 1 : kGroups - 1 - group);
        const int end = tiles_before(group + 1, p.tiles);
        for (int tile = tiles_before(group, p.tiles); tile < end; tile++) {
          add_tile(p, row, stage, tile, run, sums, best);
          if (p.pass == kSumsOnly) stage_tile(stage, next, vocab, tile);
        }
        if (p.pass == kSumsOnly) commit_copies();
      }
      const Part<S> part = block_part<Z>(p.a, run, sums, best, scratch);
      if (threadIdx.x < cluster.num_blocks()) {
        *cluster.map_shared_rank(&inbox[turn][blockIdx.y], threadIdx.x) = part;
      }
      /* Also separates the reads of z from the writes below, which in place and with Out half of Z
       * cover logits of other blocks. */
      cluster.sync();
      sums = merge_parts(row, inbox[turn], cluster.num_blocks(), best);
      turn ^= 1;
      if (threadIdx.x == 0) end_row(p, row, place.at, sums, best, table);
      if (p.pass == kSumsOnly) continue;
      __syncthreads();
      tables = {table, table + FLCE_STAT_ROWS, 1};
    } else {
      wait_copies(0);
      cluster.sync(); /* for the same reason */
    }
    const GradRow<S> g = open_grad_row<kGeneral>(p.a, row, tables, 1.0, false, false);
    for (int group = 0; group < kGroups; group++) {
      const int end = tiles_before(group + 1, p.tiles);
      for (int tile = tiles_before(group, p.tiles); tile < end; tile++) {
        write_tile(out, row, g, stage, tile);
        stage_tile(stage, next, vocab, tile);
      }
      commit_copies();
    }
  }
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
  const int most_threads = cluster_threads(16 / logits);
  const int64_t vectors = ceil_div(vocab + logits - 1, logits);
  for (int blocks = 1; blocks <= kMaxCluster; blocks *= 2) {
    const int64_t part = ceil_div(vectors, blocks);
    const int64_t tiles = ceil_div(part, most_threads * unroll);
    const int threads = threads_for(ceil_div(part, tiles * unroll), most_threads);
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

enum { kStaticBytes = 2048 }; /* at least the kernel's own, and what the system keeps of a block */

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
  if (!kernel || !choose_shape(r->vocab, logits, logits * (z_bytes + t_bytes), device.shared,
                               device.most, &shape)) {
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
