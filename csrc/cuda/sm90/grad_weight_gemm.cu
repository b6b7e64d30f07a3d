/* The GEMM of dW, dW (+)= E^T x, in bfloat16, with the sums of db: kernel and launch. The two
 * output tiles of a cluster are neighbours along H and share the tile of E. db needs sum_i coef_i
 * E_ij of each class; three idle warps of the producer warpgroup make it from the stages of E in
 * shared memory. The blocks that compute the same classes divide the tokens among them. */
#include "cuda/backend.cuh"
#include "cuda/common/vectors.cuh"
#include "cuda/fused/architectures.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace {

constexpr flce_weight_gemm_sizes kSizes = flce_architectures[FLCE_SM90].weight;

enum {
  kWeightRows = 192, /* classes of an output tile */
  kWeightColumns = (int)kSizes.tile_columns,
  kBlocks = kWeightRows / 64,    /* 64-class blocks of a stage of E */
  kPanels = kWeightColumns / 64, /* 64-element panels of a stage of x */
  kBytesPanel = kDepth * 128,    /* bytes of 64 columns of an operand's stage */
  kBytesE = kBlocks * kBytesPanel,
  kBytesX = kPanels * kBytesPanel,
  kBytesSlab = kWeightRows * 128,
  kBytesTile = kPanels * kBytesSlab,
  kBytesStage = kBytesE + kBytesX,
  kBarriers = 2 * kStages + 3,
  kSharedBytes = kAlignment + kStages * kBytesStage + kBytesTile + kBarriers * 8,
  kSumWarps = kBlocks, /* warps 1 to 3 of the producer warpgroup; warp 0 issues TMA */
  kSumRegisters = 56,
  kConsumerRegisters = 224,
};

/* Kernel parameters. dW is [rows][..], one row a class; E has `tokens` rows of `rows` classes;
 * `depth_steps` stages cover the tokens. `sums` is [parts][rows]. `adds`: dW += E^T x, else =;
 * `adds_sums`: likewise for `sums`. */
struct grad_weight_gemm_args {
  const int64_t* index;
  const float* coef;
  float* sums;
  int rows, tokens, depth_steps;
  int column_clusters; /* column tiles of dW, in pairs */
  int tiles, clusters;
  int parts; /* parts of a class's sum */
  bool adds, adds_sums;
};

/* Shared addresses: the stages of E (e) and x (x), and the staged output tile (tile). `ready` is
 * one mbarrier for each consumer warpgroup: the tile before has left the staged tile, and if dW is
 * added to, its old values have been loaded there. `taken` is one mbarrier: the TMA stores have
 * read the staged tile. */
struct SmemLayout {
  uint32_t e, x, tile;
  uint32_t ready, taken; /* mbarriers */
  Stages stages;
};

__device__ __forceinline__ SmemLayout smem_layout() {
  SmemLayout smem;
  smem.e = aligned_shared_memory();
  smem.x = smem.e + kStages * kBytesE;
  smem.tile = smem.x + kStages * kBytesX;
  smem.stages.full = smem.tile + kBytesTile;
  smem.stages.empty = smem.stages.full + kStages * 8;
  smem.ready = smem.stages.empty + kStages * 8;
  smem.taken = smem.ready + 16;
  return smem;
}

__device__ __forceinline__ void init_barriers(const SmemLayout& smem, int readers) {
  if (threadIdx.x == 0) {
    init_stages(smem.stages, readers);
    for (uint32_t i = smem.ready; i <= smem.taken; i += 8) sm90::barrier_init(i, 1);
    sm90::barrier_init_fence();
  }
  sm90::cluster_sync();
}

/* Row and column of a tile's first element in dW, and the part of the classes' sums that is made
 * with this tile; none if part >= args.parts. */
struct Tile {
  int row, column, part;
};

/* Tiles run along H first, so that E is read from memory once. */
__device__ __forceinline__ Tile tile_at(const grad_weight_gemm_args& p, int tile, int rank) {
  const int row = tile / p.column_clusters;
  const int part = (tile - row * p.column_clusters) * kCluster + rank;
  return {row * kWeightRows, part * kWeightColumns, part};
}

/* ---- producer: TMA loads ---- */

/* Loads one stage: each block loads half of the tokens of E, multicast to both, and its own x. */
__device__ __forceinline__ void load_stage(const SmemLayout& smem, int stage,
                                           const CUtensorMap* e_map, const CUtensorMap* x_map,
                                           const Tile& at, int token, int rank) {
  const uint32_t full = smem.stages.full + 8 * stage;
  const int half = rank * (kDepth / kCluster);
  sm90::barrier_arrive_expecting(full, kBytesStage);
#pragma unroll
  for (int block = 0; block < kBlocks; block++) {
    sm90::load_box_multicast(smem.e + stage * kBytesE + block * kBytesPanel + half * 128, e_map,
                             full, at.row + 64 * block, token + half, (1 << kCluster) - 1);
  }
#pragma unroll
  for (int panel = 0; panel < kPanels; panel++) {
    sm90::load_box(smem.x + stage * kBytesX + panel * kBytesPanel, x_map, full,
                   at.column + 64 * panel, token);
  }
}

__device__ __forceinline__ void producer_loop(const grad_weight_gemm_args& p,
                                              const CUtensorMap* e_map, const CUtensorMap* x_map,
                                              const CUtensorMap* w_map, const SmemLayout& smem,
                                              int steps, int rank) {
  PipelineState state = {0, 1};
  int count = 0;
  for (int tile = blockIdx.x / kCluster; tile < p.tiles; tile += p.clusters, count++) {
    const Tile at = tile_at(p, tile, rank);
    for (int step = 0; step < steps; step++) {
      sm90::barrier_wait(smem.stages.empty + 8 * state.stage, state.parity);
      load_stage(smem, state.stage, e_map, x_map, at, step * kDepth, rank);
      state.advance();
    }
    /* The old values of dW are loaded here, while the consumers still work on the last stages.
     * Before, the TMA stores of the previous tile must have read the staged tile. */
    sm90::barrier_wait(smem.taken, (count & 1) ^ 1);
    const uint32_t ready = smem.ready + 8 * (count & 1);
    sm90::barrier_arrive_expecting(ready, p.adds ? kBytesTile : 0);
    for (int slab = 0; p.adds && slab < kPanels; slab++) {
      sm90::load_box(smem.tile + slab * kBytesSlab, w_map, ready, at.column + slab * 64, at.row);
    }
  }
}

/* ---- producer: sums of db ---- */

/* Layout of the sums: a warp reads four lines (tokens) of a 64-class block at a time, eight lanes a
 * line; a lane has the same kSumColumns classes in every line that it reads. A stage is read in two
 * halves, lines 0 to 3 and 4 to 7 of every eight, because the swizzle repeats after eight lines. */
enum { kSumColumns = 8, kSumLines = kDepth / 8 };

/* coef of a lane's tokens in one half of the stage that begins with `token`. Past the last token E
 * is 0. */
__device__ __forceinline__ void load_factors(const grad_weight_gemm_args& p, int token, int half,
                                             int lane, float (&factor)[kSumLines]) {
#pragma unroll
  for (int i = 0; i < kSumLines; i++) {
    const int at = token + 8 * i + 4 * half + (lane >> 3);
    factor[i] = at >= p.tokens ? 0.f : p.coef ? __ldg(p.coef + at) : 1.f;
  }
}

/* Adds factor times E of one half of a stage; `panel` is the shared address of 64 classes of E. */
__device__ __forceinline__ void add_lines(uint32_t panel, int half, int lane,
                                          const float (&factor)[kSumLines],
                                          float (&sum)[kSumColumns]) {
  const int first = 4 * half + (lane >> 3);
  const uint32_t at = panel + first * 128 + (((lane & 7) ^ first) << 4);
#pragma unroll
  for (int i = 0; i < kSumLines; i++) {
    uint32_t e[kSumColumns / 2];
    sm90::load_shared(at + i * 1024, e);
#pragma unroll
    for (int pair = 0; pair < kSumColumns / 2; pair++) {
      sum[2 * pair] = fmaf(factor[i], __uint_as_float(e[pair] << 16), sum[2 * pair]);
      sum[2 * pair + 1] =
          fmaf(factor[i], __uint_as_float(e[pair] & 0xffff0000u), sum[2 * pair + 1]);
    }
  }
}

/* Writes a warp's sums, or adds them to those of earlier chunks. Each of the first eight lanes has
 * kSumColumns classes. */
__device__ __forceinline__ void write_sums(const grad_weight_gemm_args& p, const Tile& at,
                                           int column, int lane, float (&sum)[kSumColumns]) {
  const int row = at.row + column;
  float* total = p.sums + (int64_t)at.part * p.rows + row;
  float before[kSumColumns];
#pragma unroll
  for (int i = 0; i < kSumColumns; i++) {
    before[i] = p.adds_sums && lane < 8 && row + i < p.rows ? total[i] : 0.f;
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 8);
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 16);
  }
#pragma unroll
  for (int i = 0; i < kSumColumns; i++) {
    if (lane < 8 && row + i < p.rows) total[i] = before[i] + sum[i];
  }
}

/* Sums 64 classes of each of the block's tiles, by one warp. The p.parts blocks that have the same
 * classes each take every p.parts-th stage: the sums of a stage take a warp about as long as the
 * WGMMAs of a stage, and a warp may lag by at most kStages. */
__device__ __forceinline__ void sum_columns(const grad_weight_gemm_args& p, const SmemLayout& smem,
                                            int steps, int block, int rank) {
  const int lane = threadIdx.x % 32;
  PipelineState state = {0, 0};
  for (int tile = blockIdx.x / kCluster; tile < p.tiles; tile += p.clusters) {
    const Tile at = tile_at(p, tile, rank);
    const bool sums = at.part < p.parts;
    int next = sums ? at.part : steps;
    float sum[kSumColumns] = {}, factor[kSumLines];
    for (int step = 0; step < steps; step++) {
      const bool mine = step == next;
      if (mine) load_factors(p, step * kDepth, 0, lane, factor);
      sm90::barrier_wait(smem.stages.full + 8 * state.stage, state.parity);
      if (mine) {
        const uint32_t panel = smem.e + state.stage * kBytesE + block * kBytesPanel;
        add_lines(panel, 0, lane, factor, sum);
        load_factors(p, step * kDepth, 1, lane, factor);
        add_lines(panel, 1, lane, factor, sum);
        /* The asm keeps all reads of the stage before its release. */
#pragma unroll
        for (int i = 0; i < kSumColumns; i++) asm volatile("" : "+f"(sum[i])::"memory");
        next += p.parts;
      }
      __syncwarp();
      release_stage(smem.stages, state.stage, lane);
      state.advance();
    }
    if (sums) write_sums(p, at, 64 * block + kSumColumns * (lane & 7), lane, sum);
  }
}

/* ---- consumer warpgroups ---- */

/* Computes the transposed tile, x^T E: a row of Accumulators is a column of dW. Its 64 x 192 WGMMAs
 * read less shared memory than the 64 x 128 ones of E^T x would. */
__device__ __forceinline__ void multiply(const SmemLayout& smem, int steps, int count, int group,
                                         int thread, bool others, Accumulators& acc) {
  const uint32_t e_base = sm90::mn_major_operand_low(smem.e, kBytesPanel);
  const uint32_t x_base = sm90::mn_major_operand_low(smem.x, kBytesPanel);
  mainloop(smem.stages, steps, count, group, thread, others, acc,
           [&](int stage, int part, bool accumulates) {
             /* 16 tokens are 16 lines of 128 bytes, in units of 16 bytes. */
             const uint32_t e = e_base + stage * (kBytesE >> 4) + part * 128;
             const uint32_t x = x_base + stage * (kBytesX >> 4) + part * 128;
#pragma unroll
             for (int panel = 0; panel < kPanels; panel++) {
               sm90::wgmma_64x192x16<true>(acc[panel], x + panel * (kBytesPanel >> 4), e,
                                           accumulates);
             }
           });
}

/* Adds the accumulators to a 16 x 16 block of the staged tile, or replaces it; ldmatrix and
 * stmatrix transpose. */
__device__ __forceinline__ void put_part(uint32_t address, bool adds, const float* v) {
  float sum[8];
#pragma unroll
  for (int i = 0; i < 8; i++) sum[i] = v[i];
  if (adds) {
    uint32_t old[4];
    sm90::load_matrices_trans(address, old);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sum[2 * i] += __uint_as_float(old[i] << 16);
      sum[2 * i + 1] += __uint_as_float(old[i] & 0xffff0000u);
    }
  }
  const uint32_t packed[4] = {pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]),
                              pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7])};
  sm90::store_matrices_trans(address, packed);
}

/* Adds a tile to the staged old values, or replaces them, and stores it to dW by TMA. Releases the
 * staged tile when the TMA stores have read it. */
__device__ __forceinline__ void epilogue(const grad_weight_gemm_args& p, const CUtensorMap* w_map,
                                         const SmemLayout& smem, const Tile& at, int count,
                                         int group, const Accumulators& acc) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroupThreads / 32;
  /* The row and the 16-byte chunk of a 16 x 16 block whose address this lane gives to ldmatrix and
   * stmatrix; chunks are swizzled by the row modulo 8. */
  const int row = (lane >> 4) * 8 + (lane & 7), chunk = 2 * warp + ((lane >> 3) & 1);
  const uint32_t address = smem.tile + row * 128 + ((chunk ^ (lane & 7)) << 4);
  sm90::barrier_wait(smem.ready + 8 * group, (count >> 1) & 1);
#pragma unroll
  for (int panel = 0; panel < kPanels; panel++) {
#pragma unroll
    for (int part = 0; part < kWeightRows / 16; part++) {
      put_part(address + panel * kBytesSlab + part * 16 * 128, p.adds, &acc[panel][part * 8]);
    }
  }
  sm90::async_proxy_fence();
  sync_consumer(group);
  if (warp == 0 && lane == 0) {
#pragma unroll
    for (int slab = 0; slab < kPanels; slab++) {
      sm90::store_box(w_map, smem.tile + slab * kBytesSlab, at.column + slab * 64, at.row,
                      sm90::kNoPolicy);
    }
    sm90::store_wait_read();
    sm90::barrier_arrive(smem.taken);
  }
}

__device__ __forceinline__ void consumer_loop(const grad_weight_gemm_args& p,
                                              const CUtensorMap* w_map, const SmemLayout& smem,
                                              int steps, int group, int rank) {
  const int thread = threadIdx.x % kWarpgroupThreads;
  if (group == 1) release_mainloop(1);
  int count = group;
  for (int tile = blockIdx.x / kCluster + group * p.clusters; tile < p.tiles;
       tile += 2 * p.clusters, count += 2) {
    Accumulators acc;
    multiply(smem, steps, count, group, thread, tile + p.clusters < p.tiles, acc);
    epilogue(p, w_map, smem, tile_at(p, tile, rank), count, group, acc);
  }
}

__global__ void __launch_bounds__(kBlockThreads, 1)
    grad_weight_gemm_sm90(const __grid_constant__ CUtensorMap e_map,
                          const __grid_constant__ CUtensorMap x_map,
                          const __grid_constant__ CUtensorMap w_map,
                          const __grid_constant__ grad_weight_gemm_args p) {
  const SmemLayout smem = smem_layout();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int warpgroup = warp / (kWarpgroupThreads / 32);
  const int rank = sm90::cluster_rank();
  pdl_wait();
  /* At least one stage, which holds zeros where no row is present: dW must be written. */
  const int steps = max(1, runs_present(p.index, kDepth, p.depth_steps));
  init_barriers(smem, 1 + kSumWarps);
  if (warpgroup == 0) {
    sm90::shrink_registers<kSumRegisters>();
    if (threadIdx.x == 0) producer_loop(p, &e_map, &x_map, &w_map, smem, steps, rank);
    if (warp > 0) sum_columns(p, smem, steps, warp - 1, rank);
  } else {
    sm90::grow_registers<kConsumerRegisters>();
    consumer_loop(p, &w_map, smem, steps, warpgroup - 1, rank);
  }
  /* A block must not exit while the other can still arrive on its mbarriers or multicast into its
   * shared memory. */
  __syncwarp();
  sm90::cluster_sync();
}

}  // namespace

/* ---- launch ---- */

static int g_clusters[kMaxDevices];

flce_status launch_grad_weight_gemm_sm90(void* stream, int device, const flce_gemm* g,
                                         const int64_t* index, const void* coef, void* sums,
                                         bool adds_sums) {
  const void* kernel = (const void*)grad_weight_gemm_sm90;
  int clusters;
  FLCE_TRY(clusters_at_once(kernel, "grad_weight_gemm_sm90", kSharedBytes, device, g_clusters,
                            &clusters));
  grad_weight_gemm_args args = {};
  args.index = index;
  args.coef = (const float*)coef;
  args.sums = (float*)sums;
  args.rows = (int)g->m;
  args.tokens = (int)g->k;
  args.depth_steps = (int)ceil_div(g->k, kDepth);
  args.column_clusters = (int)ceil_div(g->n, kCluster * kWeightColumns);
  args.tiles = (int)ceil_div(g->m, kWeightRows) * args.column_clusters;
  args.clusters = (int)min_of(clusters, args.tiles);
  args.parts = (int)flce_bias_parts(&kSizes, g->n);
  args.adds = g->beta != 0;
  args.adds_sums = adds_sums;
  CUtensorMap e_map, x_map, w_map;
  FLCE_TRY(make_map(&e_map, g->a, g->m, g->k, g->pitch_a, kDepth / kCluster));
  FLCE_TRY(make_map(&x_map, g->b, g->n, g->k, g->pitch_b, kDepth));
  FLCE_TRY(make_map(&w_map, g->c, g->n, g->m, g->pitch_c, kWeightRows));
  int use_pdl;
  FLCE_TRY(supports_pdl(device, &use_pdl));
  Launch launch;
  set_launch(&launch, kSharedBytes, args.clusters, use_pdl, stream);
  void* arguments[] = {&e_map, &x_map, &w_map, &args};
  return check_cuda(cudaLaunchKernelExC(&launch.config, kernel, arguments),
                    "grad_weight_gemm_sm90");
}
