/* The fused logits GEMM, z = x W^T, with E (or z) and the rows' sums made in its epilogue: kernel,
 * tile schedule and launch. The math of the epilogue is in logits_epilogue.cuh, the pipeline in
 * pipeline.cuh. The two output tiles of a cluster are neighbours along the rows and share the tile
 * of W. */
#include "cuda/sm90/logits_epilogue.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace {

static_assert(kClusterRows == kCluster * kTileRows, "a cluster's tiles are neighbours");

enum {
  kBytesA = kTileRows * kDepth * 2,
  kBytesB = kTileColumns * kDepth * 2,
  kBytesStage = kBytesA + kBytesB,
  kBytesColumns = kTileColumns * 4, /* one float for each column of a tile */
  kBarriers = 2 * kStages + 4,
  kProducerRegisters = 24,
  kConsumerRegisters = 240,
};

/* Kernel parameters. `pitch`: elements of a row of `out`. `depth_steps`: pipeline stages of a tile.
 * `row_clusters`, `column_tiles`: tiles of the whole result, rows by kClusterRows. */
struct logits_gemm_args {
  fused_params params;
  fused_scratch scratch;
  uint64_t store_policy;
  void* out;
  int64_t pitch;
  int depth_steps, row_clusters, column_tiles;
  /* size of a group of row clusters that go through the columns together: their x stays in L2 */
  int group;
  int clusters; /* clusters launched */
};

/* Size of the work, which the kernel knows once it has counted the present rows. */
struct TileSchedule {
  /* row clusters that are present, and tiles: a tile here is the pair of output tiles of a
   * cluster */
  int row_clusters, tiles;
};

/* Shared addresses: the stages of x (a) and W (b), staging memory for E or z (e), ColumnValues
 * (columns), the two mbarriers that pass the staging memory between the consumer warpgroups
 * (staging), and a transaction barrier of each for its loads of the teacher's z (loaded). */
struct SmemLayout {
  uint32_t a, b, e, columns, staging, loaded;
  Stages stages;
};

/* Eight arrays of column values: bias and weight, for each consumer warpgroup, for its current and
 * its next tile. */
constexpr int shared_bytes(FusedResult result) {
  return kAlignment + kStages * kBytesStage + (result != kNoResult ? kSlabs * kBytesSlab : 0) +
         8 * kBytesColumns + kBarriers * 8;
}

template <FusedResult RESULT>
__device__ __forceinline__ SmemLayout smem_layout() {
  const uint32_t base = aligned_shared_memory();
  SmemLayout smem;
  smem.a = base;
  smem.b = base + kStages * kBytesA;
  smem.e = base + kStages * kBytesStage;
  smem.columns = smem.e + (RESULT != kNoResult ? kSlabs * kBytesSlab : 0);
  smem.stages.full = smem.columns + 8 * kBytesColumns;
  smem.stages.empty = smem.stages.full + kStages * 8;
  smem.staging = smem.stages.empty + kStages * 8;
  smem.loaded = smem.staging + 2 * 8;
  return smem;
}

/* The staging memory is passed to the other consumer warpgroup by one arrival of the thread that
 * knows that its TMA stores have read it. With z all threads that wrote there arrive, because
 * racecheck can follow that. */
template <FusedResult RESULT>
__device__ __forceinline__ void init_barriers(const SmemLayout& smem) {
  if (threadIdx.x == 0) {
    init_stages(smem.stages, 1);
    const int arrivals = RESULT == kLogitResult ? kWarpgroupThreads : 1;
    for (int i = 0; i < 2; i++) {
      sm90::barrier_init(smem.staging + 8 * i, arrivals);
      sm90::barrier_init(smem.loaded + 8 * i, 1);
    }
    sm90::barrier_init_fence();
  }
  sm90::cluster_sync();
}

/* ---- the schedule over tiles, the same for all warps of a cluster ---- */

/* Row cluster and column tile of a tile: within a group of p.group row clusters the row changes
 * fastest, then the column. */
__device__ __forceinline__ int row_cluster_of(const logits_gemm_args& p,
                                              const TileSchedule& schedule, int tile,
                                              int* column_tile) {
  const int group_tiles = p.group * p.column_tiles;
  const int group = tile / group_tiles, rest = tile - group * group_tiles;
  const int width = min(p.group, schedule.row_clusters - group * p.group);
  *column_tile = rest / width;
  return group * p.group + rest - *column_tile * width;
}

__device__ __forceinline__ Tile tile_at(const logits_gemm_args& p, const TileSchedule& schedule,
                                        int tile, int rank) {
  int column_tile;
  const int row_cluster = row_cluster_of(p, schedule, tile, &column_tile);
  return {(row_cluster * kCluster + rank) * kTileRows, column_tile * kTileColumns};
}

/* The first of tile, tile + p.clusters, ... that this cluster has to compute: with RETRY only
 * tiles of flagged row clusters. */
template <bool RETRY>
__device__ __forceinline__ int seek(const logits_gemm_args& p, const TileSchedule& schedule,
                                    int tile) {
  if constexpr (RETRY) {
    int column_tile;
    while (tile < schedule.tiles &&
           !p.scratch.retry[1 + row_cluster_of(p, schedule, tile, &column_tile)]) {
      tile += p.clusters;
    }
  }
  return tile;
}

/* ---- producer ---- */

/* TMA loads, by one thread: its own block's tile of x, and half of the shared tile of W, multicast
 * to both blocks. */
template <bool RETRY>
__device__ __forceinline__ void producer_loop(const logits_gemm_args& p, const CUtensorMap* x_map,
                                              const CUtensorMap* w_map, const SmemLayout& smem,
                                              const TileSchedule& schedule, int rank) {
  PipelineState state = {0, 1};
  for (int tile = seek<RETRY>(p, schedule, blockIdx.x / kCluster); tile < schedule.tiles;
       tile = seek<RETRY>(p, schedule, tile + p.clusters)) {
    const Tile at = tile_at(p, schedule, tile, rank);
    for (int step = 0; step < p.depth_steps; step++) {
      const uint32_t full = smem.stages.full + 8 * state.stage;
      sm90::barrier_wait(smem.stages.empty + 8 * state.stage, state.parity);
      sm90::barrier_arrive_expecting(full, kBytesStage);
      sm90::load_box(smem.a + state.stage * kBytesA, x_map, full, step * kDepth, at.row);
      sm90::load_box_multicast(smem.b + state.stage * kBytesB + rank * (kBytesB / kCluster), w_map,
                               full, step * kDepth, at.column + rank * (kTileColumns / kCluster),
                               (1 << kCluster) - 1);
      state.advance();
    }
  }
}

/* ---- consumer warpgroups ---- */

template <bool HALF>
__device__ __forceinline__ void multiply(const logits_gemm_args& p, const SmemLayout& smem,
                                         int count, int group, int thread, bool others,
                                         Accumulators& acc) {
  const uint32_t a_base = sm90::operand_low(smem.a), b_base = sm90::operand_low(smem.b);
  mainloop(smem.stages, p.depth_steps, count, group, thread, others, acc,
           [&](int stage, int part, bool accumulates) {
             const uint32_t a = a_base + stage * (kBytesA >> 4) + part * 2;
             const uint32_t b = b_base + stage * (kBytesB >> 4) + part * 2;
#pragma unroll
             for (int half = 0; half < 2; half++) {
               /* Rows 64 to 127 begin 64 x 128 bytes further on, in units of 16 bytes. */
               sm90::wgmma_64x192x16<false, HALF>(acc[half], a + half * 512, b, accumulates);
             }
           });
}

/* Loads bias and class weights of the tile's columns into shared memory. Called before the
 * warpgroup waits for its mainloop: the loads finish meanwhile, and that named barrier makes them
 * visible to all of its warps. Two buffers, used alternately, because a slow warp may still read
 * those of the tile before. */
template <Kind KIND>
__device__ __forceinline__ ColumnValues load_column_values(const logits_gemm_args& p,
                                                           const SmemLayout& smem,
                                                           const TileSchedule& schedule, int tile,
                                                           int iteration, int group, int thread) {
  const uint32_t address = smem.columns + (2 * group + (iteration & 1)) * 2 * kBytesColumns;
  const ColumnValues columns = {address, address + kBytesColumns};
  if (KIND == kPlain || !(KIND == kBiased || KIND == kGeneral || p.params.bias)) return columns;
  const int first = tile_at(p, schedule, tile, 0).column;
  for (int at = thread; at < kTileColumns; at += kWarpgroupThreads) {
    const int column = first + at;
    const bool inside = column < p.params.vocab;
    if (p.params.bias) {
      sm90::store_shared(columns.bias + 4 * at, inside ? __ldg(p.params.bias + column) : 0.f);
    }
    if (KIND == kGeneral && p.scratch.tile_weighted_gaps) {
      const bool weighs = inside && p.params.class_weight;
      const float weight = weighs ? __ldg(p.params.class_weight + column) : inside ? 1.f : 0.f;
      sm90::store_shared(columns.weight + 4 * at, weight);
    }
  }
  return columns;
}

/* Starts the TMA stores of 64 staged rows, and waits until they have read the staging memory. */
__device__ __forceinline__ void store_staged(const logits_gemm_args& p, const CUtensorMap* z_map,
                                             const SmemLayout& smem, int column, int row) {
  for (int box = 0; box < kTileColumns / kLogitBox; box++) {
    sm90::store_box(z_map, smem.e + box * kBytesLogitBox, column + box * kLogitBox, row,
                    p.store_policy);
  }
  sm90::store_wait_read();
}

/* Writes z through the staging memory, 64 rows at a time. Called by the consumer warpgroup that
 * owns the staging memory; passes it to the other one at the end. */
__device__ __forceinline__ void store_logits(const logits_gemm_args& p, const CUtensorMap* z_map,
                                             const SmemLayout& smem, const Fragment& frag,
                                             int group, const Accumulators& acc) {
  const bool stores = frag.warp == 0 && frag.lane == 0;
  static_assert(kTileColumns / kLogitBox * kBytesLogitBox == kSlabs * kBytesSlab, "same memory");
#pragma unroll
  for (int half = 0; half < 2; half++) {
    stage_logits(smem.e, frag, acc[half]);
    sm90::async_proxy_fence();
    sync_consumer(group);
    if (stores) store_staged(p, z_map, smem, frag.tile.column, frag.tile.row + half * kLogitRows);
    /* The second half overwrites the first, whose TMA stores must have read it. */
    if (half == 0) sync_consumer(group);
  }
  sm90::barrier_arrive(smem.staging + 8 * (group ^ 1));
}

/* Replaces the teacher's z in global memory by packed logits, through the staging memory, 64 rows
 * at a time: two phases of `loaded` for each tile. Called by the consumer warpgroup that owns the
 * staging memory; passes it to the other one at the end. */
template <bool RETRY>
__device__ __forceinline__ void pack_logits(const logits_gemm_args& p, const CUtensorMap* z_map,
                                            const SmemLayout& smem, const Fragment& frag, int group,
                                            const TileRows& rows, const Accumulators& acc) {
  const bool issues_tma = frag.warp == 0 && frag.lane == 0;
  const uint32_t loaded = smem.loaded + 8 * group;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = frag.tile.row + half * kLogitRows;
    if (issues_tma) {
      sm90::barrier_arrive_expecting(loaded, kTileColumns / kLogitBox * kBytesLogitBox);
      for (int box = 0; box < kTileColumns / kLogitBox; box++) {
        sm90::load_box(smem.e + box * kBytesLogitBox, z_map, loaded,
                       frag.tile.column + box * kLogitBox, row, p.store_policy);
      }
    }
    sm90::barrier_wait(loaded, half);
    stage_packed<RETRY>(smem.e, p.params, p.scratch, frag, half, rows, acc[half]);
    sm90::async_proxy_fence();
    sync_consumer(group);
    if (issues_tma) store_staged(p, z_map, smem, frag.tile.column, row);
  }
  if (issues_tma) sm90::barrier_arrive(smem.staging + 8 * (group ^ 1));
}

template <Kind KIND, FusedResult RESULT, bool RETRY>
__device__ __forceinline__ void epilogue(const logits_gemm_args& p, const CUtensorMap* out_map,
                                         const SmemLayout& smem, const TileSchedule& schedule,
                                         ColumnValues columns, int tile, int iteration, int group,
                                         int rank, Accumulators& acc) {
  constexpr bool kStore = stores_exp(RESULT);
  Fragment frag = {{0, 0}, 0, 0, (int)threadIdx.x % 32, (int)threadIdx.x % kWarpgroupThreads / 32};
  /* The asm hides these values from the compiler, which must not compute anything from them before
   * the mainloop: the accumulators need the registers. */
  asm volatile("" : "+r"(tile), "+r"(frag.lane), "+r"(frag.warp));
  frag.tile = tile_at(p, schedule, tile, rank);
  frag.first_row = frag.tile.row + frag.warp * 16 + (frag.lane >> 2);
  frag.first_column = frag.tile.column + 2 * (frag.lane & 3);
  TileRows rows;
  if (KIND == kBiased || (KIND != kPlain && p.params.bias)) add_bias(columns, frag, acc);
  if constexpr (RESULT == kLogitResult) {
    sm90::barrier_wait(smem.staging + 8 * group, (iteration & 1) ^ (group ^ 1));
    store_logits(p, out_map, smem, frag, group, acc);
  }
  open_tile_rows<KIND, RETRY>(p.params, p.scratch, frag, rows);
  if constexpr (kScalesRows<KIND>) {
    make_log2_logits<KIND>(p.params, rows, acc);
    if (KIND == kGeneral && p.scratch.tile_weighted_gaps)
      add_weighted_gaps(columns, frag, acc, rows);
  }
  if constexpr (KIND == kSoft) add_probabilities(p.params, frag, acc, rows);
  if constexpr (RESULT == kPackedResult) {
    sm90::barrier_wait(smem.staging + 8 * group, (iteration & 1) ^ (group ^ 1));
    pack_logits<RETRY>(p, out_map, smem, frag, group, rows, acc);
  }
  hide_columns(p.params, p.scratch, frag, rows, acc);
  if (KIND == kGeneral && p.scratch.tops) write_tops(p.params, p.scratch, frag, acc);
  const bool stores = frag.warp == 0 && frag.lane == 0;
  if constexpr (kStore) sm90::barrier_wait(smem.staging + 8 * group, (iteration & 1) ^ (group ^ 1));
#pragma unroll
  for (int slab = 0; slab < kSlabs; slab++) {
    const uint32_t address = smem.e + slab * kBytesSlab;
    exp_slab<RESULT, KIND>(p.params, p.scratch, address, slab, frag, acc, rows);
    if constexpr (kStore) {
      sm90::async_proxy_fence();
      sync_consumer(group);
      if (stores)
        sm90::store_box(out_map, address, frag.tile.column + slab * kSlab, frag.tile.row,
                        p.store_policy);
    }
  }
  close_tile_rows<KIND, RESULT>(p.params, p.scratch, frag, acc, rows);
  if (!kStore || !stores) return;
  sm90::store_wait_read();
  sm90::barrier_arrive(smem.staging + 8 * (group ^ 1));
}

/* Warpgroup 0 computes the 1st, 3rd, ... of the cluster's tiles, warpgroup 1 the others. */
template <Kind KIND, FusedResult RESULT, bool RETRY, bool HALF>
__device__ __forceinline__ void consumer_loop(const logits_gemm_args& p, const CUtensorMap* out_map,
                                              const SmemLayout& smem, const TileSchedule& schedule,
                                              int group, int rank) {
  const int thread = threadIdx.x % kWarpgroupThreads;
  if (group == 1) release_mainloop(1);
  int tile = seek<RETRY>(p, schedule, blockIdx.x / kCluster);
  if (group == 1 && tile < schedule.tiles) tile = seek<RETRY>(p, schedule, tile + p.clusters);
  for (int iteration = 0; tile < schedule.tiles; iteration++) {
    const int next = seek<RETRY>(p, schedule, tile + p.clusters);
    const ColumnValues columns =
        load_column_values<KIND>(p, smem, schedule, tile, iteration, group, thread);
    Accumulators acc;
    multiply<HALF>(p, smem, 2 * iteration + group, group, thread, next < schedule.tiles, acc);
    epilogue<KIND, RESULT, RETRY>(p, out_map, smem, schedule, columns, tile, iteration, group, rank,
                                  acc);
    tile = next < schedule.tiles ? seek<RETRY>(p, schedule, next + p.clusters) : next;
  }
}

/* Writes zeros to the rows from `first` on, which no tile computes, and to their padding columns:
 * the GEMMs of dX and dW may read them, and no output may be left undefined. By the threads of both
 * consumer warpgroups. `vector`: elements in 16 bytes. */
__device__ __forceinline__ void zero_skipped_rows(const logits_gemm_args& p, int first,
                                                  int vector) {
  const int vectors = (p.params.columns + vector - 1) / vector;
  for (int row = first + blockIdx.x; row < p.params.rows; row += gridDim.x) {
    uint4* out = (uint4*)p.out + row * (p.pitch / vector);
    for (int at = threadIdx.x - kWarpgroupThreads; at < vectors; at += 2 * kWarpgroupThreads) {
      out[at] = make_uint4(0, 0, 0, 0);
    }
  }
}

/* HALF: x and W are float16, else bfloat16. RETRY: only the row clusters that scratch.retry
 * flags. */
template <Kind KIND, FusedResult RESULT, bool RETRY, bool HALF = false>
__global__ void __launch_bounds__(kBlockThreads, 1)
    logits_gemm_sm90(const __grid_constant__ CUtensorMap x_map,
                     const __grid_constant__ CUtensorMap w_map,
                     const __grid_constant__ CUtensorMap out_map,
                     const __grid_constant__ logits_gemm_args p) {
  pdl_wait();
  if (RETRY && p.scratch.retry[0] == 0) return;
  const SmemLayout smem = smem_layout<RESULT>();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
  const int rank = sm90::cluster_rank();
  const int present = runs_present(p.params.index, kClusterRows, p.row_clusters);
  const TileSchedule schedule = {present, present * p.column_tiles};
  init_barriers<RESULT>(smem);
  if (warpgroup == 0) {
    sm90::shrink_registers<kProducerRegisters>();
    if (threadIdx.x == 0) producer_loop<RETRY>(p, &x_map, &w_map, smem, schedule, rank);
  } else {
    sm90::grow_registers<kConsumerRegisters>();
    consumer_loop<KIND, RESULT, RETRY, HALF>(p, &out_map, smem, schedule, warpgroup - 1, rank);
    if (RESULT != kNoResult && !RETRY) {
      zero_skipped_rows(p, schedule.row_clusters * kClusterRows, stores_exp(RESULT) ? 8 : 4);
    }
  }
  /* A block must not exit while the other can still arrive on its mbarriers or multicast into its
   * shared memory. */
  __syncwarp();
  sm90::cluster_sync();
}

}  // namespace

/* ---- launch ---- */

typedef void (*logits_gemm_kernel)(const CUtensorMap, const CUtensorMap, const CUtensorMap,
                                   const logits_gemm_args);

/* By half, kernel, result and overflow retry. Only kScaled has a retry that writes z: of a teacher,
 * whose z packed logits have overwritten. float16 has no kernels without options. */
#define LOGITS_GEMM(KIND, RESULT, HALF) \
  {logits_gemm_sm90<KIND, RESULT, false, HALF>, logits_gemm_sm90<KIND, RESULT, true, HALF>}
#define LOGITS_GEMM_ONCE(KIND, HALF) {logits_gemm_sm90<KIND, kLogitResult, false, HALF>}
#define LOGITS_GEMM_EXP(KIND, HALF) \
  LOGITS_GEMM(KIND, kExpResult, HALF), LOGITS_GEMM(KIND, kExpTopsResult, HALF)
#define LOGITS_GEMM_OPTIONS(HALF)                                                     \
  {LOGITS_GEMM(kGeneral, kNoResult, HALF), LOGITS_GEMM_EXP(kGeneral, HALF),           \
   LOGITS_GEMM_ONCE(kGeneral, HALF)},                                                 \
      {LOGITS_GEMM(kSoft, kNoResult, HALF), {}, {}, LOGITS_GEMM_ONCE(kSoft, HALF)}, { \
    {}, {}, {}, LOGITS_GEMM(kScaled, kLogitResult, HALF),                             \
        LOGITS_GEMM(kScaled, kPackedResult, HALF)                                     \
  }
enum KernelKind {
  kPlainKernel,
  kBiasedKernel,
  kGeneralKernel,
  kSoftKernel,
  kScaledKernel,
  kKernelKinds
};
static const logits_gemm_kernel g_kernels[2][kKernelKinds][kFusedResults][2] = {
    {{LOGITS_GEMM(kPlain, kNoResult, false), LOGITS_GEMM_EXP(kPlain, false)},
     {LOGITS_GEMM(kBiased, kNoResult, false), LOGITS_GEMM_EXP(kBiased, false)},
     LOGITS_GEMM_OPTIONS(false)},
    {{}, {}, LOGITS_GEMM_OPTIONS(true)}};
static int g_clusters[2][kKernelKinds][kFusedResults][2][kMaxDevices];

static KernelKind kind_of(const fused_params* params, FusedResult result) {
  if (params->probabilities) return kSoftKernel;
  if (params->scaled && result >= kLogitResult) return kScaledKernel;
  return params->general || params->half ? kGeneralKernel
         : params->bias                  ? kBiasedKernel
                                         : kPlainKernel;
}

/* The result of a chunk of 256 MiB or more leaves L2 before it is read, so keeping it there would
 * only drive out x and W. */
static uint64_t store_policy(int64_t bytes) {
  const int64_t large = 256 << 20;
  return bytes >= large ? sm90::kEvictFirst : sm90::kNoPolicy;
}

static logits_gemm_args make_logits_gemm_args(const fused_params* params,
                                              const fused_scratch* scratch, FusedResult result,
                                              void* out, int64_t pitch, int clusters) {
  logits_gemm_args args = {};
  args.params = *params;
  args.scratch = *scratch;
  args.out = out;
  args.pitch = pitch;
  args.store_policy = store_policy((int64_t)params->rows * pitch * (stores_exp(result) ? 2 : 4));
  args.depth_steps = (int)ceil_div(params->hidden, kDepth);
  args.row_clusters = (int)ceil_div(params->rows, kClusterRows);
  args.column_tiles = (int)ceil_div(params->vocab, kTileColumns);
  /* The x of a group stays in L2 while the tiles of W pass. */
  args.group = (int)min_of(params->hidden >= 1024 ? 8 : 16, args.row_clusters);
  args.clusters = (int)min_of(clusters, (int64_t)args.row_clusters * args.column_tiles);
  return args;
}

flce_status launch_logits_gemm_sm90(void* stream, int device, const fused_params* params,
                                    const fused_scratch* scratch, const void* x, const void* w,
                                    FusedResult result, void* out, int64_t pitch, bool retry) {
  const int half = params->half, kind = kind_of(params, result);
  const void* kernel = (const void*)g_kernels[half][kind][result][retry];
  const int bytes = shared_bytes(result);
  int clusters;
  FLCE_TRY(clusters_at_once(kernel, "logits_gemm_sm90", bytes, device,
                            g_clusters[half][kind][result][retry], &clusters));
  logits_gemm_args args = make_logits_gemm_args(params, scratch, result, out, pitch, clusters);
  CUtensorMap x_map, w_map, out_map;
  FLCE_TRY(make_map(&x_map, x, params->hidden, params->rows, params->hidden, kTileRows));
  FLCE_TRY(
      make_map(&w_map, w, params->hidden, params->vocab, params->hidden, kTileColumns / kCluster));
  out_map = x_map;
  if (stores_exp(result)) {
    FLCE_TRY(make_map(&out_map, out, params->columns, params->rows, pitch, kTileRows));
  } else if (result != kNoResult) {
    FLCE_TRY(make_map(&out_map, out, params->columns, params->rows, pitch, kLogitRows, FLCE_F32));
  }
  int use_pdl;
  FLCE_TRY(supports_pdl(device, &use_pdl));
  Launch launch;
  set_launch(&launch, bytes, args.clusters, use_pdl, stream);
  void* arguments[] = {&x_map, &w_map, &out_map, &args};
  return check_cuda(cudaLaunchKernelExC(&launch.config, kernel, arguments), "logits_gemm_sm90");
}
