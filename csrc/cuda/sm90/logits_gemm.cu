/* The logits product of Hopper with E, or the rows' sums and z, in its epilogue. A cluster's two
 * tiles of the result are those of neighbouring rows, which share the part of W. */
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/logits_epilogue.cuh"

namespace {

enum {
  kBytesA = kProductRows * kDepth * 2,
  kBytesB = kProductColumns * kDepth * 2,
  kBytesStage = kBytesA + kBytesB,
  kBytesColumns = kProductColumns * 4, /* of a number each */
  kBarriers = 2 * kStages + 2,
  kCopyRegisters = 24,
  kProductRegisters = 240,
};

struct product_args {
  product_shape shape;
  product_scratch scratch;
  uint64_t store_policy;
  void* out;
  int64_t pitch;
  int depth_steps, row_clusters, column_tiles;
  int group;    /* clusters of rows that go through the columns together */
  int clusters; /* that run at a time */
};

/* What there is to do, known once the rows are counted. */
struct Walk {
  int row_clusters, tiles; /* a tile of a cluster is one of each of its blocks */
};

/* Shared memory by address. */
struct Ring {
  uint32_t a, b, e, columns, staging;
  Stages stages;
};

/* Numbers of columns: two kinds, for each group's tile and its next one. */
constexpr int shared_bytes(ProductResult result) {
  return kAlignment + kStages * kBytesStage + (result != kNoResult ? kSlabs * kBytesSlab : 0) +
         8 * kBytesColumns + kBarriers * 8;
}

template <ProductResult RESULT>
__device__ __forceinline__ Ring open_ring() {
  const uint32_t base = aligned_shared_memory();
  Ring ring;
  ring.a = base;
  ring.b = base + kStages * kBytesA;
  ring.e = base + kStages * kBytesStage;
  ring.columns = ring.e + (RESULT != kNoResult ? kSlabs * kBytesSlab : 0);
  ring.stages.full = ring.columns + 8 * kBytesColumns;
  ring.stages.empty = ring.stages.full + kStages * 8;
  ring.staging = ring.stages.empty + kStages * 8;
  return ring;
}

/* The memory for results is handed on by the thread that knows what its copies have read; with z by
 * all that wrote there, which racecheck can follow. */
template <ProductResult RESULT>
__device__ __forceinline__ void init_barriers(const Ring& ring) {
  if (threadIdx.x == 0) {
    init_stages(ring.stages, 1);
    const int arrivals = RESULT == kLogitResult ? kGroupThreads : 1;
    for (int i = 0; i < 2; i++) sm90::barrier_init(ring.staging + 8 * i, arrivals);
    sm90::barrier_init_fence();
  }
  sm90::cluster_sync();
}

/* ---- the walk over tiles, the same for all warps of a cluster ---- */

/* Rows fast within a group, then along the columns. */
__device__ __forceinline__ int row_cluster_of(const product_args& p, const Walk& walk, int tile,
                                              int* column_tile) {
  const int group_tiles = p.group * p.column_tiles;
  const int group = tile / group_tiles, rest = tile - group * group_tiles;
  const int width = min(p.group, walk.row_clusters - group * p.group);
  *column_tile = rest / width;
  return group * p.group + rest - *column_tile * width;
}

__device__ __forceinline__ Tile place_of_tile(const product_args& p, const Walk& walk, int tile,
                                              int rank) {
  int column_tile;
  const int row_cluster = row_cluster_of(p, walk, tile, &column_tile);
  return {(row_cluster * kCluster + rank) * kProductRows, column_tile * kProductColumns};
}

/* From `tile` on, the first that this cluster has to do. */
template <bool REPEAT>
__device__ __forceinline__ int seek(const product_args& p, const Walk& walk, int tile) {
  if constexpr (REPEAT) {
    int column_tile;
    while (tile < walk.tiles && !p.scratch.redo[1 + row_cluster_of(p, walk, tile, &column_tile)]) {
      tile += p.clusters;
    }
  }
  return tile;
}

/* ---- the first warpgroup ---- */

template <bool REPEAT>
__device__ __forceinline__ void copy_tiles(const product_args& p, const CUtensorMap* x_map,
                                           const CUtensorMap* w_map, const Ring& ring,
                                           const Walk& walk, int rank) {
  Turn turn = {0, 1};
  for (int tile = seek<REPEAT>(p, walk, blockIdx.x / kCluster); tile < walk.tiles;
       tile = seek<REPEAT>(p, walk, tile + p.clusters)) {
    const Tile at = place_of_tile(p, walk, tile, rank);
    for (int step = 0; step < p.depth_steps; step++) {
      const uint32_t full = ring.stages.full + 8 * turn.stage;
      sm90::barrier_wait(ring.stages.empty + 8 * turn.stage, turn.parity);
      sm90::barrier_arrive_expecting(full, kBytesStage);
      sm90::load_box(ring.a + turn.stage * kBytesA, x_map, full, step * kDepth, at.row);
      sm90::load_box_multicast(ring.b + turn.stage * kBytesB + rank * (kBytesB / kCluster), w_map,
                               full, step * kDepth, at.column + rank * (kProductColumns / kCluster),
                               (1 << kCluster) - 1);
      turn.advance();
    }
  }
}

/* ---- the other two ---- */

template <bool HALF>
__device__ __forceinline__ void multiply(const product_args& p, const Ring& ring, int count,
                                         int group, int thread, bool others, Products& acc) {
  const uint32_t a_base = sm90::operand_low(ring.a), b_base = sm90::operand_low(ring.b);
  multiply_tile(ring.stages, p.depth_steps, count, group, thread, others, acc,
                [&](int stage, int part, bool accumulates) {
                  const uint32_t a = a_base + stage * (kBytesA >> 4) + part * 2;
                  const uint32_t b = b_base + stage * (kBytesB >> 4) + part * 2;
#pragma unroll
                  for (int half = 0; half < 2; half++) {
                    /* 64 rows of 128 bytes further on, in units of 16. */
                    sm90::multiply_64x192x16<false, HALF>(acc[half], a + half * 512, b,
                                                          accumulates);
                  }
                });
}

/* Bias and weights of the tile's columns into shared memory. Before the group waits for its turn:
 * the loads are done by then, and the barrier shows them to all of its warps. Two places by turns:
 * a slow warp may still read those of the tile before. */
template <Kind KIND>
__device__ __forceinline__ ColumnNumbers place_columns(const product_args& p, const Ring& ring,
                                                       const Walk& walk, int tile, int turn,
                                                       int group, int thread) {
  const uint32_t place = ring.columns + (2 * group + (turn & 1)) * 2 * kBytesColumns;
  const ColumnNumbers numbers = {place, place + kBytesColumns};
  if (KIND == kPlain || (KIND == kSoft && !p.shape.bias)) return numbers;
  const int first = place_of_tile(p, walk, tile, 0).column;
  for (int at = thread; at < kProductColumns; at += kGroupThreads) {
    const int column = first + at;
    const bool inside = column < p.shape.vocab;
    if (p.shape.bias) {
      sm90::store_shared(numbers.bias + 4 * at, inside ? __ldg(p.shape.bias + column) : 0.f);
    }
    if (KIND == kGeneral && p.scratch.gaps) {
      const bool weighs = inside && p.shape.class_weight;
      const float weight = weighs ? __ldg(p.shape.class_weight + column) : inside ? 1.f : 0.f;
      sm90::store_shared(numbers.weight + 4 * at, weight);
    }
  }
  return numbers;
}

/* By the group whose turn it is with the memory for results, which it hands on. */
__device__ __forceinline__ void copy_logits(const product_args& p, const CUtensorMap* z_map,
                                            const Ring& ring, const Seat& seat, int group,
                                            const Products& acc) {
  const bool copies = seat.warp == 0 && seat.lane == 0;
  static_assert(kProductColumns / kLogitBox * kBytesLogitBox == kSlabs * kBytesSlab, "same memory");
#pragma unroll
  for (int half = 0; half < 2; half++) {
    stage_logits(ring.e, seat, acc[half]);
    sm90::copy_fence();
    sync_group(group);
    if (copies) {
      for (int box = 0; box < kProductColumns / kLogitBox; box++) {
        sm90::store_box(z_map, ring.e + box * kBytesLogitBox, seat.tile.column + box * kLogitBox,
                        seat.tile.row + half * kLogitRows, p.store_policy);
      }
      sm90::store_wait_read();
    }
    if (half == 0) sync_group(group);
  }
  sm90::barrier_arrive(ring.staging + 8 * (group ^ 1));
}

template <Kind KIND, ProductResult RESULT, bool REPEAT>
__device__ __forceinline__ void finish_tile(const product_args& p, const CUtensorMap* out_map,
                                            const Ring& ring, const Walk& walk,
                                            ColumnNumbers numbers, int tile, int turn, int group,
                                            int rank, Products& acc) {
  constexpr bool kIsGeneral = KIND == kGeneral, kStore = RESULT == kExpResult;
  Seat seat = {{0, 0}, 0, 0, (int)threadIdx.x % 32, (int)threadIdx.x % kGroupThreads / 32};
  /* Opaque: nothing of this may be computed above the products, which need the registers. */
  asm volatile("" : "+r"(tile), "+r"(seat.lane), "+r"(seat.warp));
  seat.tile = place_of_tile(p, walk, tile, rank);
  seat.first_row = seat.tile.row + seat.warp * 16 + (seat.lane >> 2);
  seat.first_column = seat.tile.column + 2 * (seat.lane & 3);
  TileRows rows;
  if (KIND == kBiased || (KIND != kPlain && p.shape.bias)) add_bias(numbers, seat, acc);
  if constexpr (RESULT == kLogitResult) {
    sm90::barrier_wait(ring.staging + 8 * group, (turn & 1) ^ (group ^ 1));
    copy_logits(p, out_map, ring, seat, group, acc);
  }
  open_tile_rows<kIsGeneral, REPEAT>(p.shape, p.scratch, seat, rows);
  if constexpr (kIsGeneral) {
    make_zeta(p.shape, rows, acc);
    if (p.scratch.gaps) add_gaps(numbers, seat, acc, rows);
  }
  if constexpr (KIND == kSoft) add_probabilities(p.shape, seat, acc, rows);
  hide_columns(p.shape, p.scratch, seat, rows, acc);
  if (kIsGeneral && p.scratch.tops) write_tops(p.shape, p.scratch, seat, acc);
  const bool copies = seat.warp == 0 && seat.lane == 0;
  if constexpr (kStore) sm90::barrier_wait(ring.staging + 8 * group, (turn & 1) ^ (group ^ 1));
#pragma unroll
  for (int slab = 0; slab < kSlabs; slab++) {
    const uint32_t address = ring.e + slab * kBytesSlab;
    exp_slab<kStore, kIsGeneral>(p.shape, p.scratch, address, slab, seat, acc, rows);
    if constexpr (kStore) {
      sm90::copy_fence();
      sync_group(group);
      if (copies)
        sm90::store_box(out_map, address, seat.tile.column + slab * kSlab, seat.tile.row,
                        p.store_policy);
    }
  }
  close_tile_rows<kIsGeneral, KIND == kSoft>(p.shape, p.scratch, seat, acc, rows);
  if (!kStore || !copies) return;
  sm90::store_wait_read();
  sm90::barrier_arrive(ring.staging + 8 * (group ^ 1));
}

template <Kind KIND, ProductResult RESULT, bool REPEAT, bool HALF>
__device__ __forceinline__ void make_tiles(const product_args& p, const CUtensorMap* out_map,
                                           const Ring& ring, const Walk& walk, int group,
                                           int rank) {
  const int thread = threadIdx.x % kGroupThreads;
  if (group == 1) give_turn(1);
  int tile = seek<REPEAT>(p, walk, blockIdx.x / kCluster);
  if (group == 1 && tile < walk.tiles) tile = seek<REPEAT>(p, walk, tile + p.clusters);
  for (int turn = 0; tile < walk.tiles; turn++) {
    const int next = seek<REPEAT>(p, walk, tile + p.clusters);
    const ColumnNumbers numbers = place_columns<KIND>(p, ring, walk, tile, turn, group, thread);
    Products acc;
    multiply<HALF>(p, ring, 2 * turn + group, group, thread, next < walk.tiles, acc);
    finish_tile<KIND, RESULT, REPEAT>(p, out_map, ring, walk, numbers, tile, turn, group, rank,
                                      acc);
    tile = next < walk.tiles ? seek<REPEAT>(p, walk, next + p.clusters) : next;
  }
}

/* Zeros in the rows from `first` on, which no tile computes, and in their padding: the GEMMs of dX
 * and dW may read that, and no output is left undefined. By the threads of both groups. */
__device__ __forceinline__ void blank_rows(const product_args& p, int first, int vector) {
  const int vectors = (p.shape.columns + vector - 1) / vector;
  for (int row = first + blockIdx.x; row < p.shape.rows; row += gridDim.x) {
    uint4* out = (uint4*)p.out + row * (p.pitch / vector);
    for (int at = threadIdx.x - kGroupThreads; at < vectors; at += 2 * kGroupThreads) {
      out[at] = make_uint4(0, 0, 0, 0);
    }
  }
}

/* HALF: x and W are float16. */
template <Kind KIND, ProductResult RESULT, bool REPEAT, bool HALF = false>
__global__ void __launch_bounds__(kBlockThreads, 1)
    product_sm90(const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap w_map,
                 const __grid_constant__ CUtensorMap out_map,
                 const __grid_constant__ product_args p) {
  follow_kernels();
  if (REPEAT && p.scratch.redo[0] == 0) return;
  const Ring ring = open_ring<RESULT>();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0);
  const int rank = sm90::cluster_rank();
  const int present = runs_present(p.shape.index, kProductClusterRows, p.row_clusters);
  const Walk walk = {present, present * p.column_tiles};
  init_barriers<RESULT>(ring);
  if (warpgroup == 0) {
    sm90::shrink_registers<kCopyRegisters>();
    if (threadIdx.x == 0) copy_tiles<REPEAT>(p, &x_map, &w_map, ring, walk, rank);
  } else {
    sm90::grow_registers<kProductRegisters>();
    make_tiles<KIND, RESULT, REPEAT, HALF>(p, &out_map, ring, walk, warpgroup - 1, rank);
    if (RESULT != kNoResult && !REPEAT) {
      blank_rows(p, walk.row_clusters * kProductClusterRows, RESULT == kExpResult ? 8 : 4);
    }
  }
  /* No block may end while the other can still arrive on its barriers or copy into its memory. */
  __syncwarp();
  sm90::cluster_sync();
}

}  // namespace

/* ---- launch ---- */

typedef void (*product_kernel)(const CUtensorMap, const CUtensorMap, const CUtensorMap,
                               const product_args);

enum {
  kLogitKernel = 12,
  kSoftKernel,
  kSoftLogitKernel = 15,
  kHalfKernel,
  kHalfLogitKernel = 18,
  kHalfSoftKernel,
  kHalfSoftLogitKernel = 21,
  kKernels
};

/* By E + 2 REPEAT + 4 (plain, biased, general); then the one that gives z, those of probabilities
 * by REPEAT, and theirs that gives z. float16 is always in form dz, so of it no kernel gives E: the
 * general ones and those of probabilities, by REPEAT, and theirs that give z. */
static const product_kernel g_kernels[kKernels] = {
    product_sm90<kPlain, kNoResult, false>,
    product_sm90<kPlain, kExpResult, false>,
    product_sm90<kPlain, kNoResult, true>,
    product_sm90<kPlain, kExpResult, true>,
    product_sm90<kBiased, kNoResult, false>,
    product_sm90<kBiased, kExpResult, false>,
    product_sm90<kBiased, kNoResult, true>,
    product_sm90<kBiased, kExpResult, true>,
    product_sm90<kGeneral, kNoResult, false>,
    product_sm90<kGeneral, kExpResult, false>,
    product_sm90<kGeneral, kNoResult, true>,
    product_sm90<kGeneral, kExpResult, true>,
    product_sm90<kGeneral, kLogitResult, false>,
    product_sm90<kSoft, kNoResult, false>,
    product_sm90<kSoft, kNoResult, true>,
    product_sm90<kSoft, kLogitResult, false>,
    product_sm90<kGeneral, kNoResult, false, true>,
    product_sm90<kGeneral, kNoResult, true, true>,
    product_sm90<kGeneral, kLogitResult, false, true>,
    product_sm90<kSoft, kNoResult, false, true>,
    product_sm90<kSoft, kNoResult, true, true>,
    product_sm90<kSoft, kLogitResult, false, true>,
};

static int kernel_of(const product_shape* shape, ProductResult result, bool repeat) {
  const bool soft = shape->probabilities != NULL;
  if (shape->half) {
    if (result == kLogitResult) return soft ? kHalfSoftLogitKernel : kHalfLogitKernel;
    return (soft ? kHalfSoftKernel : kHalfKernel) + repeat;
  }
  if (result == kLogitResult) return soft ? kSoftLogitKernel : kLogitKernel;
  if (soft) return kSoftKernel + repeat;
  const int kind = shape->general ? 2 : shape->bias ? 1 : 0;
  return (result == kExpResult ? 1 : 0) + 2 * repeat + 4 * kind;
}

static int g_clusters[kKernels][kMaxDevices];

/* E of a large chunk comes back from memory in any case; keeping it only drives x and W out. */
static uint64_t store_policy(int64_t bytes) {
  const int64_t large = 256 << 20;
  return bytes >= large ? sm90::kEvictFirst : sm90::kNoPolicy;
}

static product_args make_args(const product_shape* shape, const product_scratch* scratch,
                              ProductResult result, void* out, int64_t pitch, int clusters) {
  product_args args = {};
  args.shape = *shape;
  args.scratch = *scratch;
  args.out = out;
  args.pitch = pitch;
  args.store_policy = store_policy((int64_t)shape->rows * pitch * (result == kLogitResult ? 4 : 2));
  args.depth_steps = (int)ceil_div(shape->hidden, kDepth);
  args.row_clusters = (int)ceil_div(shape->rows, kProductClusterRows);
  args.column_tiles = (int)ceil_div(shape->vocab, kProductColumns);
  /* x of a group stays in the cache while W passes by. */
  args.group = (int)min_of(shape->hidden >= 1024 ? 8 : 16, args.row_clusters);
  args.clusters = (int)min_of(clusters, (int64_t)args.row_clusters * args.column_tiles);
  return args;
}

flce_status launch_product_sm90(void* stream, int device, const product_shape* shape,
                                const product_scratch* scratch, const void* x, const void* w,
                                ProductResult result, void* out, int64_t pitch, bool repeat) {
  if (repeat && result == kLogitResult) result = kNoResult;
  const int which = kernel_of(shape, result, repeat);
  const void* kernel = (const void*)g_kernels[which];
  const int bytes = shared_bytes(result);
  int clusters;
  FLCE_TRY(clusters_at_once(kernel, "product_sm90", bytes, device, g_clusters[which], &clusters));
  product_args args = make_args(shape, scratch, result, out, pitch, clusters);
  CUtensorMap x_map, w_map, out_map;
  FLCE_TRY(make_map(&x_map, x, shape->hidden, shape->rows, shape->hidden, kProductRows));
  FLCE_TRY(
      make_map(&w_map, w, shape->hidden, shape->vocab, shape->hidden, kProductColumns / kCluster));
  out_map = x_map;
  if (result == kExpResult) {
    FLCE_TRY(make_map(&out_map, out, shape->columns, shape->rows, pitch, kProductRows));
  } else if (result == kLogitResult) {
    FLCE_TRY(make_map(&out_map, out, shape->columns, shape->rows, pitch, kLogitRows, FLCE_F32));
  }
  int follows;
  FLCE_TRY(can_follow(device, &follows));
  Launch launch;
  set_launch(&launch, bytes, args.clusters, follows, stream);
  void* arguments[] = {&x_map, &w_map, &out_map, &args};
  return check_cuda(cudaLaunchKernelExC(&launch.config, kernel, arguments), "product_sm90");
}
