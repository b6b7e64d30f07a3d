/* What the two WGMMA kernels (logits_gemm.cu, grad_weight_gemm.cu) share: the warp-specialised
 * pipeline, its barriers, the mainloop and the launch. What only one of them needs (tile schedule,
 * operands, epilogue) belongs in its own file, PTX wrappers in ptx.cuh.
 *
 * A thread block has three warpgroups. The first is the producer: one thread issues TMA loads of
 * both operands into kStages pipeline stages in shared memory. The other two are consumers and work
 * ping-pong: each computes whole output tiles, and one runs its epilogue while the other is in its
 * mainloop. Two blocks form a cluster, whose two tiles share one operand; the loads of that operand
 * are multicast. Kernels are persistent: a cluster computes every n-th output tile, where n is the
 * number of clusters launched. */
#ifndef FLCE_CUDA_SM90_PIPELINE_CUH
#define FLCE_CUDA_SM90_PIPELINE_CUH

#include "cuda/common/pdl.cuh"
#include "cuda/sm90/ptx.cuh"

enum {
  kDepth = 64, /* k elements of one pipeline stage */
  kStages = 4,
  kCluster = 2,
  kWarpgroupThreads = 128,
  kBlockThreads = 3 * kWarpgroupThreads,
  kAlignment = 1024, /* bytes; required of a tile with 128-byte swizzle */
  kInstruction = 16, /* k elements of one WGMMA instruction */
};

/* Named barriers (bar.sync); number 0 is __syncthreads. k*Consumer synchronises the threads of one
 * consumer warpgroup. k*Mainloop lets that warpgroup enter its mainloop. */
enum { kFirstConsumer = 1, kSecondConsumer, kFirstMainloop, kSecondMainloop };

/* Shared addresses of the stages' mbarriers: kStages of each kind, 8 bytes apart. A full barrier
 * completes when the bytes of the stage have arrived (expect-tx). An empty barrier completes when
 * the readers in both blocks of the cluster have released the stage. */
struct Stages {
  uint32_t full, empty;
};

/* The first multiple of kAlignment in dynamic shared memory. */
__device__ __forceinline__ uint32_t aligned_shared_memory() {
  extern __shared__ uint8_t memory[];
  uint32_t base;
  /* The asm hides the value from the compiler, which then keeps one base register and adds
   * constants. */
  asm volatile("mov.u32 %0, %1;"
               : "=r"(base)
               : "r"((sm90::shared_address(memory) + kAlignment - 1) & ~(kAlignment - 1u)));
  return base;
}

/* Called by one thread. A stage is empty after `readers` arrivals from each block of the
 * cluster. */
__device__ __forceinline__ void init_stages(const Stages& stages, int readers) {
  for (int i = 0; i < kStages; i++) {
    sm90::barrier_init(stages.full + 8 * i, 1);
    sm90::barrier_init(stages.empty + 8 * i, readers * kCluster);
  }
}

/* Position in the ring of stages, and the mbarrier parity to wait for there. The parity flips with
 * each pass through the ring. */
struct PipelineState {
  int stage, parity;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/* The state at which a consumer begins tile number `count` of its block, every tile taking
 * `depth_steps` stages. The number of stages before it may exceed 32 bits: the product is taken
 * modulo 2^32, of which two passes through the ring are a divisor. */
__host__ __device__ constexpr PipelineState pipeline_state_at(int count, int depth_steps) {
  const uint32_t position = (uint32_t)count * (uint32_t)depth_steps % (2 * kStages);
  return {(int)(position % kStages), (int)(position / kStages)};
}
static_assert((kStages & (kStages - 1)) == 0, "2 kStages has to divide 2^32");
/* 5 (2^30 + 1) steps, beyond 2^32: 5 more than a number of whole passes. */
static_assert(pipeline_state_at((1 << 30) + 1, 5).stage == 5 % kStages, "");
static_assert(pipeline_state_at((1 << 30) + 1, 5).parity == 5 / kStages % 2, "");

/* Releases a stage to the producers of both blocks, because each producer's multicast loads write
 * to the shared memory of both. `thread` is the index within the calling warpgroup or warp: threads
 * 0 and 1 arrive, one at each block. */
__device__ __forceinline__ void release_stage(const Stages& stages, int stage, int thread) {
  if (thread < kCluster) sm90::barrier_arrive_at(stages.empty + 8 * stage, thread);
}

/* Number of the `count` runs of `length` rows whose first row is present, i.e. has an index >= 0.
 * Absent rows are last in the index, so these are the first runs. Without an index all are present.
 * Called by a whole warp. */
__device__ __forceinline__ int runs_present(const int64_t* index, int length, int count) {
  if (!index) return count;
  int present = 0;
  for (int first = 0; first < count; first += 32) {
    const int run = first + threadIdx.x % 32;
    const bool begins = run < count && index[(int64_t)run * length] >= 0;
    present += __popc(__ballot_sync(0xffffffffu, begins));
  }
  return present;
}

/* ---- consumer warpgroups ---- */

/* Ping-pong: blocks until the other consumer warpgroup calls release_mainloop. Of the barrier's 256
 * threads half wait and half arrive. */
__device__ __forceinline__ void wait_for_mainloop(int group) {
  if (group) {
    sm90::named_sync<kSecondMainloop, 2 * kWarpgroupThreads>();
  } else {
    sm90::named_sync<kFirstMainloop, 2 * kWarpgroupThreads>();
  }
}

/* Lets the other consumer warpgroup enter its mainloop. */
__device__ __forceinline__ void release_mainloop(int group) {
  if (group) {
    sm90::named_arrive<kFirstMainloop, 2 * kWarpgroupThreads>();
  } else {
    sm90::named_arrive<kSecondMainloop, 2 * kWarpgroupThreads>();
  }
}

/* Synchronises the threads of one consumer warpgroup. */
__device__ __forceinline__ void sync_consumer(int group) {
  if (group) {
    sm90::named_sync<kSecondConsumer, kWarpgroupThreads>();
  } else {
    sm90::named_sync<kFirstConsumer, kWarpgroupThreads>();
  }
}

/* A thread's accumulators of an output tile of 128 x 192, two m64n192 WGMMA fragments: [half][4 j +
 * 2 q + e] is column 8 j + 2 (lane % 4) + e of row 64 half + 16 warp + 8 q + lane / 4. */
typedef float Accumulators[2][96];

/* The mainloop of tile number `count` of the block: `steps` stages. issue(stage, part, accumulates)
 * issues the WGMMAs of one part of kInstruction k elements; `accumulates` is false for the first
 * part, which overwrites acc. As soon as all WGMMAs are issued, the other consumer warpgroup may
 * begin its mainloop; `others` says that it has a tile left and waits for this. */
template <typename Issue>
__device__ __forceinline__ void mainloop(const Stages& stages, int steps, int count, int group,
                                         int thread, bool others, Accumulators& acc,
                                         const Issue& issue) {
  PipelineState state = pipeline_state_at(count, steps);
  int last = 0;
  wait_for_mainloop(group);
  for (int step = 0; step < steps; step++) {
    sm90::barrier_wait(stages.full + 8 * state.stage, state.parity);
    sm90::wgmma_fence();
#pragma unroll
    for (int part = 0; part < kDepth / kInstruction; part++) {
      issue(state.stage, part, (step | part) != 0);
    }
    sm90::wgmma_commit();
    /* The WGMMAs of the stage before have completed: it can be released. */
    sm90::wgmma_wait<1>();
    if (step > 0) release_stage(stages, last, thread);
    last = state.stage;
    state.advance();
  }
  if (others) release_mainloop(group);
  sm90::wgmma_wait<0>();
  release_stage(stages, last, thread);
  /* WGMMA writes acc asynchronously: the compiler must not move reads of it above the wait. */
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int i = 0; i < 96; i++) asm volatile("" : "+f"(acc[half][i])::"memory");
  }
}

/* ---- launch ---- */

struct Launch {
  cudaLaunchConfig_t config;
  cudaLaunchAttribute attributes[2];
};

/* `use_pdl`: launch with PDL, so that the kernel may start while the one before it ends; only where
 * supports_pdl allows it. `bytes` of dynamic shared memory. */
static inline void set_launch(Launch* launch, int bytes, int clusters, bool use_pdl, void* stream) {
  *launch = {};
  cudaLaunchAttribute* cluster = &launch->attributes[0];
  cluster->id = cudaLaunchAttributeClusterDimension;
  cluster->val.clusterDim.x = kCluster;
  cluster->val.clusterDim.y = cluster->val.clusterDim.z = 1;
  launch->attributes[1] = pdl_attribute(use_pdl);
  launch->config.gridDim = dim3(clusters * kCluster);
  launch->config.blockDim = dim3(kBlockThreads);
  launch->config.dynamicSmemBytes = bytes;
  launch->config.stream = (cudaStream_t)stream;
  launch->config.attrs = launch->attributes;
  launch->config.numAttrs = 1 + (unsigned)use_pdl;
}

/* Number of clusters of a kernel that a device runs at a time. Cached in known[device], where 0
 * means not queried yet; threads that query at the same time store the same value. */
static inline flce_status clusters_at_once(const void* kernel, const char* name, int bytes,
                                           int device, int (&known)[kMaxDevices], int* clusters) {
  FLCE_TRY(check_device(device));
  *clusters = __atomic_load_n(&known[device], __ATOMIC_RELAXED);
  if (*clusters > 0) return FLCE_OK;
  Launch launch;
  set_launch(&launch, bytes, 1, 0, NULL);
  FLCE_TRY(check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), name));
  FLCE_TRY(check_cuda(cudaOccupancyMaxActiveClusters(clusters, kernel, &launch.config), name));
  if (*clusters < 1) return flce_fail(FLCE_UNSUPPORTED, "%s: no cluster fits the device", name);
  __atomic_store_n(&known[device], *clusters, __ATOMIC_RELAXED);
  return FLCE_OK;
}

/* TMA tensor map of a row-major [rows][columns] matrix of 16-bit elements (bfloat16; also used for
 * float16, because only bits are copied) or float32, `pitch` elements a row. A box is 128 bytes
 * wide and `box_rows` high, with 128-byte swizzle. Outside the matrix loads give zeros and stores
 * write nothing. */
static inline flce_status make_map(CUtensorMap* map, const void* data, int64_t columns,
                                   int64_t rows, int64_t pitch, int box_rows,
                                   flce_dtype dtype = FLCE_BF16) {
  typedef decltype(&cuTensorMapEncodeTiled) encode_fn;
  /* libcuda is not linked. Threads that look the function up at once store the same value. */
  static void* encode;
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
  const int64_t size = flce_size_of(dtype);
  const cuuint64_t pitches[1] = {(cuuint64_t)(pitch * size)};
  const cuuint32_t box[2] = {(cuuint32_t)(128 / size), (cuuint32_t)box_rows}, steps[2] = {1, 1};
  const CUresult status = ((encode_fn)__atomic_load_n(&encode, __ATOMIC_ACQUIRE))(
      map, size == 4 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
      (void*)data, sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status == CUDA_SUCCESS) return FLCE_OK;
  return flce_fail(FLCE_DEVICE_ERROR, "tensor map of [%lld,%lld], pitch %lld: driver error %d",
                   (long long)rows, (long long)columns, (long long)pitch, (int)status);
}

#endif
