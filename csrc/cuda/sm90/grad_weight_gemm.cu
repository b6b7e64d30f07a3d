/* dW (+)= E^T x of Hopper. A cluster's two tiles of dW are neighbours in H, which share the part of
 * E. The classes' weighted sums of E over the tokens, which db wants, are made from the same copies
 * of E by warps that have nothing to copy; the blocks of a class divide its tokens among them. */
#include "cuda/backend.cuh"
#include "cuda/common/vectors.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace {

enum {
  kWeightRows = 192,             /* of a tile of dW: classes */
  kWeightColumns = 128,          /* and elements of H */
  kMostParts = 8,                /* of a column's sum, each made beside other columns of dW */
  kBlocks = kWeightRows / 64,    /* of 64 classes */
  kPanels = kWeightColumns / 64, /* of 64 elements of H */
  kBytesPanel = kDepth * 128,    /* 64 columns of an operand's stage */
  kBytesE = kBlocks * kBytesPanel,
  kBytesX = kPanels * kBytesPanel,
  kBytesSlab = kWeightRows * 128,
  kBytesTile = kPanels * kBytesSlab,
  kBytesStage = kBytesE + kBytesX,
  kBarriers = 2 * kStages + 3,
  kSharedBytes = kAlignment + kStages * kBytesStage + kBytesTile + kBarriers * 8,
  kSumWarps = kBlocks, /* of the first warpgroup, after the one that copies */
  kSumRegisters = 56,
  kConsumerRegisters = 224,
};

struct grad_weight_gemm_args {
  const int64_t* index;
  const float* coef;
  float* sums;
  int rows, tokens, depth_steps;
  int column_clusters; /* of dW */
  int tiles, clusters;
  int parts; /* of the sums */
  bool adds, adds_sums;
};

struct SmemLayout {
  uint32_t e, x, tile;
  uint32_t ready, taken; /* the staged tile's old values have come, for each group; its new ones
                            have gone */
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

/* First row and column of dW, and the part of the sums that is made there; from `parts` on none. */
struct Tile {
  int row, column, part;
};

/* Along H first: E passes once. */
__device__ __forceinline__ Tile tile_at(const grad_weight_gemm_args& p, int tile, int rank) {
  const int row = tile / p.column_clusters;
  const int part = (tile - row * p.column_clusters) * kCluster + rank;
  return {row * kWeightRows, part * kWeightColumns, part};
}

/* ---- the first warpgroup: copies ---- */

/* A stage of E by halves of its tokens, one for each block to bring into both. */
__device__ __forceinline__ void copy_stage(const SmemLayout& smem, int stage,
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
      copy_stage(smem, state.stage, e_map, x_map, at, step * kDepth, rank);
      state.advance();
    }
    /* The last stages are still to be multiplied: time enough for the old values to come. */
    sm90::barrier_wait(smem.taken, (count & 1) ^ 1);
    const uint32_t ready = smem.ready + 8 * (count & 1);
    sm90::barrier_arrive_expecting(ready, p.adds ? kBytesTile : 0);
    for (int slab = 0; p.adds && slab < kPanels; slab++) {
      sm90::load_box(smem.tile + slab * kBytesSlab, w_map, ready, at.column + slab * 64, at.row);
    }
  }
}

/* ---- the first warpgroup: sums ---- */

/* A warp takes four lines of a panel at a time, eight lanes each, of which every one has eight
 * columns in all lines that it meets. By halves of a stage: lines 0 to 3 of every eight, which is
 * where the swizzle repeats, and the other four. */
enum { kSumColumns = 8, kSumLines = kDepth / 8 };

/* Factors of a lane's tokens in a half of the stage that begins with `token`. Beyond the tokens E
 * is 0. */
__device__ __forceinline__ void load_factors(const grad_weight_gemm_args& p, int token, int half,
                                             int lane, float (&factor)[kSumLines]) {
#pragma unroll
  for (int i = 0; i < kSumLines; i++) {
    const int at = token + 8 * i + 4 * half + (lane >> 3);
    factor[i] = at >= p.tokens ? 0.f : p.coef ? __ldg(p.coef + at) : 1.f;
  }
}

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

/* Adds a warp's sums to those of chunks before; its first eight lanes have eight columns each. */
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

/* Sums of 64 columns of each of the block's tiles, by one warp. Of the blocks that have the same
 * columns each takes every p.parts-th stage: a warp needs about as long for it as its products do,
 * and may be late by the length of the smem. */
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
        /* All is read before it can be added, and added before the stage is handed back. */
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

/* ---- the other two ---- */

/* The transposed tile: Accumulators has a row for each of dW's columns. Accumulators of 64 x 192
 * read less shared memory than those of 64 x 128 that the tile as it lies would take. */
__device__ __forceinline__ void multiply(const SmemLayout& smem, int steps, int count, int group,
                                         int thread, bool others, Accumulators& acc) {
  const uint32_t e_base = sm90::mn_major_operand_low(smem.e, kBytesPanel);
  const uint32_t x_base = sm90::mn_major_operand_low(smem.x, kBytesPanel);
  mainloop(smem.stages, steps, count, group, thread, others, acc,
           [&](int stage, int part, bool accumulates) {
             /* 16 tokens are 16 lines of 128 bytes, in units of 16. */
             const uint32_t e = e_base + stage * (kBytesE >> 4) + part * 128;
             const uint32_t x = x_base + stage * (kBytesX >> 4) + part * 128;
#pragma unroll
             for (int panel = 0; panel < kPanels; panel++) {
               sm90::wgmma_64x192x16<true>(acc[panel], x + panel * (kBytesPanel >> 4), e,
                                           accumulates);
             }
           });
}

/* Adds to 16 rows of 16 columns in shared memory, or replaces them. */
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

__device__ __forceinline__ void epilogue(const grad_weight_gemm_args& p, const CUtensorMap* w_map,
                                         const SmemLayout& smem, const Tile& at, int count,
                                         int group, const Accumulators& acc) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
  /* Of 16 rows and 16 columns: those of the lane's address, swizzled by the row. */
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
  sm90::copy_fence();
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
  const int thread = threadIdx.x % kGroupThreads;
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
  const int warpgroup = warp / (kGroupThreads / 32);
  const int rank = sm90::cluster_rank();
  pdl_wait();
  /* One at least, of zeros where no row is present: dW is made of something. */
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
  /* No block may end while the other can still arrive on its barriers or copy into its memory. */
  __syncwarp();
  sm90::cluster_sync();
}

}  // namespace

/* ---- launch ---- */

static int g_clusters[kMaxDevices];

int64_t cuda_bias_parts(int64_t hidden) {
  return min_of(ceil_div(hidden, kWeightColumns), kMostParts);
}

flce_status cuda_grad_weight_gemm(void* self, const flce_gemm* g, const int64_t* index,
                                  const void* coef, void* sums, bool adds_sums) {
  const flce_cuda* cuda = (const flce_cuda*)self;
  const void* kernel = (const void*)grad_weight_gemm_sm90;
  if (g->m == 0 || g->n == 0) return FLCE_OK;
  if (g->k == 0) {
    const int64_t bytes = adds_sums ? 0 : cuda_bias_parts(g->n) * g->m * (int64_t)sizeof(float);
    FLCE_TRY(cuda_fill(self, sums, 0, bytes));
    return cuda_gemm(self, g, NULL, 0);
  }
  int clusters;
  FLCE_TRY(clusters_at_once(kernel, "grad_weight_gemm_sm90", kSharedBytes, cuda->device, g_clusters,
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
  args.parts = (int)cuda_bias_parts(g->n);
  args.adds = g->beta != 0;
  args.adds_sums = adds_sums;
  CUtensorMap e_map, x_map, w_map;
  FLCE_TRY(make_map(&e_map, g->a, g->m, g->k, g->pitch_a, kDepth / kCluster));
  FLCE_TRY(make_map(&x_map, g->b, g->n, g->k, g->pitch_b, kDepth));
  FLCE_TRY(make_map(&w_map, g->c, g->n, g->m, g->pitch_c, kWeightRows));
  int follows;
  FLCE_TRY(supports_pdl(cuda->device, &follows));
  Launch launch;
  set_launch(&launch, kSharedBytes, args.clusters, follows, cuda->stream);
  void* arguments[] = {&e_map, &x_map, &w_map, &args};
  return check_cuda(cudaLaunchKernelExC(&launch.config, kernel, arguments),
                    "grad_weight_gemm_sm90");
}
