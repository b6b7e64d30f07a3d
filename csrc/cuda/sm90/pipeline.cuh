/* What the products of Hopper share. Blocks of three warpgroups: the first copies tiles of both
 * operands into a smem of shared memory, the other two take whole tiles of the result by turns, so
 * that one's epilogue runs under the other's products. Two blocks make a cluster and share one
 * operand's tile. Blocks are persistent: a cluster does every so-many-th tile of the result. */
#ifndef FLCE_CUDA_SM90_PIPELINE_CUH
#define FLCE_CUDA_SM90_PIPELINE_CUH

#include "cuda/common/pdl.cuh"
#include "cuda/sm90/ptx.cuh"

enum {
  kDepth = 64, /* of a stage's tiles, in the direction that is summed over */
  kStages = 4,
  kCluster = 2,
  kGroupThreads = 128,
  kBlockThreads = 3 * kGroupThreads,
  kAlignment = 1024, /* of a swizzled tile */
  kInstruction = 16, /* of the depth, that one product takes */
};

/* Named barriers; 0 is __syncthreads. */
enum { kFirstConsumer = 1, kSecondConsumer, kFirstMainloop, kSecondMainloop };

/* The smem's barriers: a stage is full once its bytes have come, and empty once both blocks have
 * read it. */
struct Stages {
  uint32_t full, empty;
};

__device__ __forceinline__ uint32_t aligned_shared_memory() {
  extern __shared__ uint8_t memory[];
  uint32_t base;
  /* Opaque: the compiler keeps one base and adds constants. */
  asm volatile("mov.u32 %0, %1;"
               : "=r"(base)
               : "r"((sm90::shared_address(memory) + kAlignment - 1) & ~(kAlignment - 1u)));
  return base;
}

/* By one thread. A stage is empty once that many of each block have released it. */
__device__ __forceinline__ void init_stages(const Stages& stages, int readers) {
  for (int i = 0; i < kStages; i++) {
    sm90::barrier_init(stages.full + 8 * i, 1);
    sm90::barrier_init(stages.empty + 8 * i, readers * kCluster);
  }
}

/* A place in the smem, and the parity of its passes. */
struct PipelineState {
  int stage, parity;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/* Where the block's tile number `count` begins, for those who wait for full stages. */
__device__ __forceinline__ PipelineState pipeline_state_at(int count, int depth_steps) {
  return {(count * depth_steps) % kStages, ((count * depth_steps) / kStages) & 1};
}

/* Hands the stage back to both blocks' copies, whose bytes lie in both. */
__device__ __forceinline__ void release_stage(const Stages& stages, int stage, int thread) {
  if (thread < kCluster) sm90::barrier_arrive_at(stages.empty + 8 * stage, thread);
}

/* How many of the `count` runs of `length` rows begin with one that an index does not call absent:
 * those that do stand last. By a whole warp. */
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

/* ---- the two groups that make tiles ---- */

__device__ __forceinline__ void wait_for_mainloop(int group) {
  if (group) {
    sm90::named_sync<kSecondMainloop, 2 * kGroupThreads>();
  } else {
    sm90::named_sync<kFirstMainloop, 2 * kGroupThreads>();
  }
}

__device__ __forceinline__ void release_mainloop(int group) {
  if (group) {
    sm90::named_arrive<kFirstMainloop, 2 * kGroupThreads>();
  } else {
    sm90::named_arrive<kSecondMainloop, 2 * kGroupThreads>();
  }
}

__device__ __forceinline__ void sync_consumer(int group) {
  if (group) {
    sm90::named_sync<kSecondConsumer, kGroupThreads>();
  } else {
    sm90::named_sync<kFirstConsumer, kGroupThreads>();
  }
}

/* A thread's part of a tile's result, two products of 64 x 192: [half][4 j + 2 q + e] is column
 * 8 j + 2 (lane % 4) + e of row 64 half + 16 warp + 8 q + lane / 4. */
typedef float Accumulators[2][96];

/* All depth steps of the block's tile number `count`, each by issue(stage, part, accumulates) for
 * its parts of kInstruction; the other group's turn comes once all are issued, if `others`. */
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
    sm90::wgmma_wait<1>();
    if (step > 0) release_stage(stages, last, thread);
    last = state.stage;
    state.advance();
  }
  if (others) release_mainloop(group);
  sm90::wgmma_wait<0>();
  release_stage(stages, last, thread);
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

/* `follows`: whether it may begin while the kernel before it ends, as supports_pdl says. */
static inline void set_launch(Launch* launch, int bytes, int clusters, int follows, void* stream) {
  *launch = {};
  cudaLaunchAttribute* cluster = &launch->attributes[0];
  cluster->id = cudaLaunchAttributeClusterDimension;
  cluster->val.clusterDim.x = kCluster;
  cluster->val.clusterDim.y = cluster->val.clusterDim.z = 1;
  launch->attributes[1] = pdl_attribute(follows);
  launch->config.gridDim = dim3(clusters * kCluster);
  launch->config.blockDim = dim3(kBlockThreads);
  launch->config.dynamicSmemBytes = bytes;
  launch->config.stream = (cudaStream_t)stream;
  launch->config.attrs = launch->attributes;
  launch->config.numAttrs = 1 + (unsigned)follows;
}

/* Clusters of a kernel that a device holds at a time, kept in known[device]; 0 there until asked.
 * Threads that ask at once agree. */
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

/* [rows][columns] bfloat16 or float32, in boxes of 128 swizzled bytes a row; beyond the matrix
 * boxes read zeros and write nothing. */
static inline flce_status make_map(CUtensorMap* map, const void* data, int64_t columns,
                                   int64_t rows, int64_t pitch, int box_rows,
                                   flce_dtype dtype = FLCE_BF16) {
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
