/* The logits product of Hopper with E in its epilogue. Persistent blocks of three warpgroups: the
 * first copies tiles of x and W into a ring of shared memory, the other two take whole tiles of the
 * result by turns, so that one's epilogue runs under the other's products. Two blocks make a
 * cluster: they take neighbouring rows and share the part of W. */
#include "product_epilogue.cuh"

namespace {

enum {
  kDepth = 64, /* columns of x and W in a stage: 128 bytes, a swizzled row */
  kStages = 4,
  kCluster = 2,
  kGroupThreads = 128,
  kBlockThreads = 3 * kGroupThreads,
  kBytesA = kProductRows * kDepth * 2,
  kBytesB = kProductColumns * kDepth * 2,
  kBytesStage = kBytesA + kBytesB,
  kAlignment = 1024, /* of a swizzled tile */
  kBarriers = 2 * kStages + 2,
  kCopyRegisters = 24,
  kProductRegisters = 240,
};

/* Named barriers; 0 is __syncthreads. */
enum { kFirstGroup = 1, kSecondGroup, kFirstTurn, kSecondTurn };

struct product_args {
  product_shape shape;
  product_scratch scratch;
  uint64_t store_policy;
  int depth_steps, row_clusters, column_tiles;
  int group;           /* clusters of rows that go through the columns together */
  int tiles, clusters; /* of all tiles of a cluster, this many at a time */
};

/* Shared memory by address. */
struct Ring {
  uint32_t a, b, e, full, empty, staging;
};

template <bool STORE>
constexpr int shared_bytes() {
  return kAlignment + kStages * kBytesStage + (STORE ? kSlabs * kBytesSlab : 0) + kBarriers * 8;
}

template <bool STORE>
__device__ __forceinline__ Ring open_ring() {
  extern __shared__ uint8_t memory[];
  uint32_t base;
  /* Opaque: the compiler keeps one base and adds constants. */
  asm volatile("mov.u32 %0, %1;"
               : "=r"(base)
               : "r"((sm90::shared_address(memory) + kAlignment - 1) & ~(kAlignment - 1u)));
  Ring ring;
  ring.a = base;
  ring.b = base + kStages * kBytesA;
  ring.e = base + kStages * kBytesStage;
  ring.full = ring.e + (STORE ? kSlabs * kBytesSlab : 0);
  ring.empty = ring.full + kStages * 8;
  ring.staging = ring.empty + kStages * 8;
  return ring;
}

__device__ __forceinline__ void init_barriers(const Ring& ring) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      sm90::barrier_init(ring.full + 8 * i, 1);
      sm90::barrier_init(ring.empty + 8 * i, kCluster);
    }
    for (int i = 0; i < 2; i++) sm90::barrier_init(ring.staging + 8 * i, 1);
    sm90::barrier_init_fence();
  }
  sm90::cluster_sync();
}

/* ---- the walk over tiles, the same for all warps of a cluster ---- */

/* Rows fast within a group, then along the columns. */
__device__ __forceinline__ int row_cluster_of(const product_args& p, int tile, int* column_tile) {
  const int group_tiles = p.group * p.column_tiles;
  const int group = tile / group_tiles, rest = tile - group * group_tiles;
  const int width = min(p.group, p.row_clusters - group * p.group);
  *column_tile = rest / width;
  return group * p.group + rest - *column_tile * width;
}

__device__ __forceinline__ Tile place_of_tile(const product_args& p, int tile, int rank) {
  int column_tile;
  const int row_cluster = row_cluster_of(p, tile, &column_tile);
  return {(row_cluster * kCluster + rank) * kProductRows, column_tile * kProductColumns};
}

/* From `tile` on, the first that this cluster has to do. */
template <bool REPEAT>
__device__ __forceinline__ int seek(const product_args& p, int tile) {
  if constexpr (REPEAT) {
    int column_tile;
    while (tile < p.tiles && !p.scratch.redo[1 + row_cluster_of(p, tile, &column_tile)]) {
      tile += p.clusters;
    }
  }
  return tile;
}

/* ---- the first warpgroup ---- */

template <bool REPEAT>
__device__ __forceinline__ void copy_tiles(const product_args& p, const CUtensorMap* x_map,
                                           const CUtensorMap* w_map, const Ring& ring, int rank) {
  int stage = 0, parity = 1;
  for (int tile = seek<REPEAT>(p, blockIdx.x / kCluster); tile < p.tiles;
       tile = seek<REPEAT>(p, tile + p.clusters)) {
    const Tile at = place_of_tile(p, tile, rank);
    for (int step = 0; step < p.depth_steps; step++) {
      const uint32_t full = ring.full + 8 * stage;
      sm90::barrier_wait(ring.empty + 8 * stage, parity);
      sm90::barrier_arrive_expecting(full, kBytesStage);
      sm90::load_box(ring.a + stage * kBytesA, x_map, full, step * kDepth, at.row);
      sm90::load_box_multicast(ring.b + stage * kBytesB + rank * (kBytesB / kCluster), w_map, full,
                               step * kDepth, at.column + rank * (kProductColumns / kCluster),
                               (1 << kCluster) - 1);
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

/* ---- the other two: products ---- */

__device__ __forceinline__ void wait_for_turn(int group) {
  if (group) {
    sm90::named_sync<kSecondTurn, 2 * kGroupThreads>();
  } else {
    sm90::named_sync<kFirstTurn, 2 * kGroupThreads>();
  }
}

__device__ __forceinline__ void give_turn(int group) {
  if (group) {
    sm90::named_arrive<kFirstTurn, 2 * kGroupThreads>();
  } else {
    sm90::named_arrive<kSecondTurn, 2 * kGroupThreads>();
  }
}

__device__ __forceinline__ void sync_group(int group) {
  if (group) {
    sm90::named_sync<kSecondGroup, kGroupThreads>();
  } else {
    sm90::named_sync<kFirstGroup, kGroupThreads>();
  }
}

/* Hands the stage back to both blocks' copies: W's part lies in both. */
__device__ __forceinline__ void release_stage(const Ring& ring, int stage, int thread) {
  if (thread < kCluster) sm90::barrier_arrive_at(ring.empty + 8 * stage, thread);
}

/* All depth steps of the block's tile number `count`; the other group's turn comes once all are
 * issued, if `others`. */
__device__ __forceinline__ void multiply(const product_args& p, const Ring& ring, int count,
                                         int group, int thread, bool others, Products& acc) {
  const uint32_t a_base = sm90::operand_low(ring.a), b_base = sm90::operand_low(ring.b);
  int stage = (count * p.depth_steps) % kStages, last = 0;
  int parity = ((count * p.depth_steps) / kStages) & 1;
  wait_for_turn(group);
  for (int step = 0; step < p.depth_steps; step++) {
    sm90::barrier_wait(ring.full + 8 * stage, parity);
    const uint32_t a = a_base + stage * (kBytesA >> 4), b = b_base + stage * (kBytesB >> 4);
    sm90::product_fence();
#pragma unroll
    for (int part = 0; part < kDepth / 16; part++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        /* 64 rows of 128 bytes further on, in units of 16. */
        sm90::multiply_64x192x16(acc[half], a + half * 512 + part * 2, b + part * 2,
                                 (step | part) != 0);
      }
    }
    sm90::product_commit();
    sm90::product_wait<1>();
    if (step > 0) release_stage(ring, last, thread);
    last = stage;
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  if (others) give_turn(group);
  sm90::product_wait<0>();
  release_stage(ring, last, thread);
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int i = 0; i < 4 * kParts; i++) asm volatile("" : "+f"(acc[half][i])::"memory");
  }
}

/* ---- the other two: E ---- */

template <Kind KIND, bool STORE, bool REPEAT>
__device__ __forceinline__ void finish_tile(const product_args& p, const CUtensorMap* e_map,
                                            const Ring& ring, int tile, int turn, int group,
                                            int rank, Products& acc) {
  constexpr bool kIsGeneral = KIND == kGeneral;
  Seat seat = {{0, 0}, 0, 0, (int)threadIdx.x % 32, (int)threadIdx.x % kGroupThreads / 32};
  /* Opaque: nothing of this may be computed above the products, which need the registers. */
  asm volatile("" : "+r"(tile), "+r"(seat.lane), "+r"(seat.warp));
  seat.tile = place_of_tile(p, tile, rank);
  seat.first_row = seat.tile.row + seat.warp * 16 + (seat.lane >> 2);
  seat.first_column = seat.tile.column + 2 * (seat.lane & 3);
  TileRows rows;
  if (KIND == kBiased || (kIsGeneral && p.shape.bias)) add_bias(p.shape, seat, acc);
  open_tile_rows<kIsGeneral, REPEAT>(p.shape, p.scratch, seat, rows);
  if constexpr (kIsGeneral) {
    make_zeta(p.shape, rows, acc);
    if (p.scratch.gaps) add_gaps(p.shape, seat, acc, rows);
  }
  hide_columns(p.shape, p.scratch, seat, rows, acc);
  if (kIsGeneral && p.scratch.tops) write_tops(p.shape, p.scratch, seat, acc);
  const bool copies = seat.warp == 0 && seat.lane == 0;
  if constexpr (STORE) sm90::barrier_wait(ring.staging + 8 * group, (turn & 1) ^ (group ^ 1));
#pragma unroll
  for (int slab = 0; slab < kSlabs; slab++) {
    const uint32_t address = ring.e + slab * kBytesSlab;
    exp_slab<STORE, kIsGeneral>(p.shape, p.scratch, address, slab, seat, acc, rows);
    if constexpr (STORE) {
      sm90::copy_fence();
      sync_group(group);
      if (copies)
        sm90::store_box(e_map, address, seat.tile.column + slab * kSlab, seat.tile.row,
                        p.store_policy);
    }
  }
  close_tile_rows<kIsGeneral>(p.shape, p.scratch, seat, acc, rows);
  if (STORE && copies) {
    sm90::store_wait_read();
    sm90::barrier_arrive(ring.staging + 8 * (group ^ 1));
  }
}

template <Kind KIND, bool STORE, bool REPEAT>
__device__ __forceinline__ void make_tiles(const product_args& p, const CUtensorMap* e_map,
                                           const Ring& ring, int group, int rank) {
  const int thread = threadIdx.x % kGroupThreads;
  if (group == 1) give_turn(1);
  int tile = seek<REPEAT>(p, blockIdx.x / kCluster);
  if (group == 1 && tile < p.tiles) tile = seek<REPEAT>(p, tile + p.clusters);
  for (int turn = 0; tile < p.tiles; turn++) {
    const int next = seek<REPEAT>(p, tile + p.clusters);
    Products acc;
    multiply(p, ring, 2 * turn + group, group, thread, next < p.tiles, acc);
    finish_tile<KIND, STORE, REPEAT>(p, e_map, ring, tile, turn, group, rank, acc);
    tile = next < p.tiles ? seek<REPEAT>(p, next + p.clusters) : next;
  }
}

template <Kind KIND, bool STORE, bool REPEAT>
__global__ void __launch_bounds__(kBlockThreads, 1)
    product_sm90(const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap w_map,
                 const __grid_constant__ CUtensorMap e_map,
                 const __grid_constant__ product_args p) {
  if (REPEAT && p.scratch.redo[0] == 0) return;
  const Ring ring = open_ring<STORE>();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0);
  const int rank = sm90::cluster_rank();
  init_barriers(ring);
  if (warpgroup == 0) {
    sm90::shrink_registers<kCopyRegisters>();
    if (threadIdx.x == 0) copy_tiles<REPEAT>(p, &x_map, &w_map, ring, rank);
  } else {
    sm90::grow_registers<kProductRegisters>();
    make_tiles<KIND, STORE, REPEAT>(p, &e_map, ring, warpgroup - 1, rank);
  }
  /* No block may end while the other can still arrive on its barriers or copy into its memory. */
  __syncwarp();
  sm90::cluster_sync();
}

}  // namespace

/* ---- launch ---- */

typedef void (*product_kernel)(const CUtensorMap, const CUtensorMap, const CUtensorMap,
                               const product_args);

enum { kKernels = 12, kMaxDevices = 64 };

/* By STORE + 2 REPEAT + 4 (plain, biased, general). */
static const product_kernel g_kernels[kKernels] = {
    product_sm90<kPlain, false, false>,   product_sm90<kPlain, true, false>,
    product_sm90<kPlain, false, true>,    product_sm90<kPlain, true, true>,
    product_sm90<kBiased, false, false>,  product_sm90<kBiased, true, false>,
    product_sm90<kBiased, false, true>,   product_sm90<kBiased, true, true>,
    product_sm90<kGeneral, false, false>, product_sm90<kGeneral, true, false>,
    product_sm90<kGeneral, false, true>,  product_sm90<kGeneral, true, true>,
};

/* Clusters that a device holds at a time; 0 until asked. Threads that ask at once agree. */
static int g_clusters[kMaxDevices][kKernels];

static cudaLaunchConfig_t launch_config(bool store, int clusters, cudaLaunchAttribute* attribute) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(clusters * kCluster);
  config.blockDim = dim3(kBlockThreads);
  config.dynamicSmemBytes = store ? shared_bytes<true>() : shared_bytes<false>();
  attribute->id = cudaLaunchAttributeClusterDimension;
  attribute->val.clusterDim.x = kCluster;
  attribute->val.clusterDim.y = attribute->val.clusterDim.z = 1;
  config.attrs = attribute;
  config.numAttrs = 1;
  return config;
}

static flce_status clusters_at_once(int device, int which, bool store, int* clusters) {
  if (device < 0 || device >= kMaxDevices) {
    return flce_fail(FLCE_UNSUPPORTED, "device: expected 0 to %d, got %d", kMaxDevices - 1, device);
  }
  *clusters = __atomic_load_n(&g_clusters[device][which], __ATOMIC_RELAXED);
  if (*clusters > 0) return FLCE_OK;
  const void* kernel = (const void*)g_kernels[which];
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = launch_config(store, 1, &attribute);
  FLCE_TRY(check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           (int)config.dynamicSmemBytes),
                      "shared memory of product_sm90"));
  FLCE_TRY(check_cuda(cudaOccupancyMaxActiveClusters(clusters, kernel, &config),
                      "clusters of product_sm90"));
  if (*clusters < 1) return flce_fail(FLCE_UNSUPPORTED, "product_sm90: no cluster fits the device");
  __atomic_store_n(&g_clusters[device][which], *clusters, __ATOMIC_RELAXED);
  return FLCE_OK;
}

/* [rows][columns] bfloat16, in boxes of kDepth swizzled columns; beyond the matrix boxes read zeros
 * and write nothing. */
static flce_status make_map(CUtensorMap* map, const void* data, int64_t columns, int64_t rows,
                            int64_t pitch, int box_rows) {
  typedef decltype(&cuTensorMapEncodeTiled) encode_fn;
  static void* encode; /* the driver's, which is not linked; threads that ask at once agree */
  if (!__atomic_load_n(&encode, __ATOMIC_ACQUIRE)) {
    void* found = NULL;
    cudaDriverEntryPointQueryResult result;
    FLCE_TRY(check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                         cudaEnableDefault, &result),
                        "cuTensorMapEncodeTiled"));
    if (!found) return flce_fail(FLCE_UNSUPPORTED, "the driver has no cuTensorMapEncodeTiled");
    __atomic_store_n(&encode, found, __ATOMIC_RELEASE);
  }
  const cuuint64_t sizes[2] = {(cuuint64_t)columns, (cuuint64_t)rows};
  const cuuint64_t pitches[1] = {(cuuint64_t)pitch * 2};
  const cuuint32_t box[2] = {kDepth, (cuuint32_t)box_rows}, steps[2] = {1, 1};
  const CUresult status = ((encode_fn)__atomic_load_n(&encode, __ATOMIC_ACQUIRE))(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)data, sizes, pitches, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status == CUDA_SUCCESS) return FLCE_OK;
  return flce_fail(FLCE_DEVICE_ERROR, "tensor map of [%lld,%lld], pitch %lld: driver error %d",
                   (long long)rows, (long long)columns, (long long)pitch, (int)status);
}

/* createpolicy's words for evict_first and for none. E of a large chunk comes back from memory in
 * any case; keeping it only drives x and W out. */
static uint64_t store_policy(int64_t bytes) {
  const int64_t large = 256 << 20;
  return bytes >= large ? 0x12F0000000000000u : 0x1000000000000000u;
}

static product_args make_args(const product_shape* shape, const product_scratch* scratch,
                              int64_t e_pitch, int clusters) {
  product_args args = {};
  args.shape = *shape;
  args.scratch = *scratch;
  args.store_policy = store_policy((int64_t)shape->rows * e_pitch * 2);
  args.depth_steps = (int)ceil_div(shape->hidden, kDepth);
  args.row_clusters = (int)ceil_div(shape->rows, kProductClusterRows);
  args.column_tiles = (int)ceil_div(shape->vocab, kProductColumns);
  /* x of a group stays in the cache while W passes by. */
  args.group = (int)min_of(shape->hidden >= 1024 ? 8 : 16, args.row_clusters);
  args.tiles = args.row_clusters * args.column_tiles;
  args.clusters = (int)min_of(clusters, args.tiles);
  return args;
}

flce_status launch_product_sm90(void* stream, int device, const product_shape* shape,
                                const product_scratch* scratch, const void* x, const void* w,
                                void* e, int64_t e_pitch, bool repeat) {
  const bool store = e != NULL;
  const int kind = shape->general ? 2 : shape->bias ? 1 : 0;
  const int which = store + 2 * repeat + 4 * kind;
  int clusters;
  FLCE_TRY(clusters_at_once(device, which, store, &clusters));
  product_args args = make_args(shape, scratch, e_pitch, clusters);
  CUtensorMap x_map, w_map, e_map;
  FLCE_TRY(make_map(&x_map, x, shape->hidden, shape->rows, shape->hidden, kProductRows));
  FLCE_TRY(
      make_map(&w_map, w, shape->hidden, shape->vocab, shape->hidden, kProductColumns / kCluster));
  e_map = x_map;
  if (store) FLCE_TRY(make_map(&e_map, e, shape->vocab, shape->rows, e_pitch, kProductRows));
  cudaLaunchAttribute attribute;
  cudaLaunchConfig_t config = launch_config(store, args.clusters, &attribute);
  config.stream = (cudaStream_t)stream;
  void* arguments[] = {&x_map, &w_map, &e_map, &args};
  return check_cuda(cudaLaunchKernelExC(&config, (const void*)g_kernels[which], arguments),
                    "product_sm90");
}
