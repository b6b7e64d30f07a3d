/* Collectives by copy engines (peers.h). Each rank copies from the others' memory; flags in that
 * memory, written and waited for by the streams themselves, say when it may. No kernel runs, so the
 * exchange neither waits for a multiprocessor nor takes one. */
#include "peers.h"

#include <cuda.h>
#include <pthread.h>

#include "cuda/common/types.cuh"

enum Flag { kWritten, kCopied };

/* What the collectives of one id run on; created once for each device and never destroyed. */
struct CopyStream {
  cudaStream_t stream;
  cudaEvent_t begin, end;
};

static CopyStream g_streams[kMaxDevices][FLCE_COLLECTIVES];
static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER; /* guards g_streams */

static flce_status create_stream(CopyStream* copies) {
  int least, greatest;
  FLCE_TRY(check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "peers"));
  FLCE_TRY(check_cuda(
      cudaStreamCreateWithPriority(&copies->stream, cudaStreamNonBlocking, greatest), "peers"));
  FLCE_TRY(check_cuda(cudaEventCreateWithFlags(&copies->begin, cudaEventDisableTiming), "peers"));
  return check_cuda(cudaEventCreateWithFlags(&copies->end, cudaEventDisableTiming), "peers");
}

static flce_status copy_stream(const flce_cuda* cuda, flce_collective_id id, CopyStream* result) {
  FLCE_TRY(check_device(cuda->device));
  CopyStream* copies = &g_streams[cuda->device][id];
  pthread_mutex_lock(&g_lock);
  flce_status status = FLCE_OK;
  if (!copies->end) status = create_stream(copies); /* `end` is the last that it creates */
  *result = *copies;
  pthread_mutex_unlock(&g_lock);
  return status;
}

/* Stores the address of a driver function in *cached; the driver library is not linked. */
static flce_status load_driver_function(const char* name, void** cached) {
  if (__atomic_load_n(cached, __ATOMIC_ACQUIRE)) return FLCE_OK;
  void* found = NULL;
  cudaDriverEntryPointQueryResult result;
  FLCE_TRY(check_cuda(
      cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result), name));
  if (!found) return flce_fail(FLCE_UNSUPPORTED, "the driver has no %s", name);
  __atomic_store_n(cached, found, __ATOMIC_RELEASE);
  return FLCE_OK;
}

static CUdeviceptr flag_at(const flce_peers* peers, int owner, Flag flag, int rank) {
  return (CUdeviceptr)peers->flags[owner] + sizeof(uint32_t) * (flag * peers->ranks + rank);
}

static flce_status set_flag(cudaStream_t stream, CUdeviceptr flag, uint32_t value) {
  static void* function;
  FLCE_TRY(load_driver_function("cuStreamWriteValue32", &function));
  const auto write = (decltype(&cuStreamWriteValue32))function;
  const CUresult status = write((CUstream)stream, flag, value, CU_STREAM_WRITE_VALUE_DEFAULT);
  if (status == CUDA_SUCCESS) return FLCE_OK;
  return flce_fail(FLCE_DEVICE_ERROR, "cuStreamWriteValue32: driver error %d", (int)status);
}

/* Waits for the flag, and clears it for the next collective: a captured graph may be replayed. */
static flce_status take_flag(cudaStream_t stream, CUdeviceptr flag) {
  static void* function;
  FLCE_TRY(load_driver_function("cuStreamWaitValue32", &function));
  const auto wait = (decltype(&cuStreamWaitValue32))function;
  const CUresult status = wait((CUstream)stream, flag, 1, CU_STREAM_WAIT_VALUE_EQ);
  if (status == CUDA_SUCCESS) return set_flag(stream, flag, 0);
  return flce_fail(FLCE_DEVICE_ERROR, "cuStreamWaitValue32: driver error %d", (int)status);
}

/* Queues the copies of a collective on the copy stream. This rank tells all peers that its data are
 * written before it waits for theirs, and waits for the peers' copies after its own: so no ranks
 * wait for each other in a circle. */
static flce_status queue_copies(const CopyStream& copies, const flce_cuda* cuda,
                                const flce_peers* peers, void* recv, int64_t offset,
                                int64_t bytes) {
  const int rank = peers->rank, ranks = peers->ranks;
  FLCE_TRY(check_cuda(cudaEventRecord(copies.begin, (cudaStream_t)cuda->stream), "peers"));
  FLCE_TRY(check_cuda(cudaStreamWaitEvent(copies.stream, copies.begin, 0), "peers"));
  for (int step = 1; step < ranks; step++) {
    const int peer = (rank + step) % ranks;
    FLCE_TRY(set_flag(copies.stream, flag_at(peers, peer, kWritten, rank), 1));
  }
  for (int step = 1; step < ranks; step++) { /* no two ranks begin with the same peer */
    const int peer = (rank + step) % ranks;
    FLCE_TRY(take_flag(copies.stream, flag_at(peers, rank, kWritten, peer)));
    const char* from = (const char*)peers->data[peer] + offset;
    FLCE_TRY(check_cuda(cudaMemcpyAsync((char*)recv + peer * bytes, from, (size_t)bytes,
                                        cudaMemcpyDefault, copies.stream),
                        "peers"));
    FLCE_TRY(set_flag(copies.stream, flag_at(peers, peer, kCopied, rank), 1));
  }
  for (int peer = 0; peer < ranks; peer++) {
    if (peer != rank) FLCE_TRY(take_flag(copies.stream, flag_at(peers, rank, kCopied, peer)));
  }
  return FLCE_OK;
}

extern "C" FLCE_EXPORT flce_status flce_cuda_peers_begin(const flce_cuda* cuda,
                                                         const flce_peers* peers,
                                                         flce_collective_id id, void* recv,
                                                         int64_t offset, int64_t bytes) {
  CopyStream copies;
  FLCE_TRY(copy_stream(cuda, id, &copies));
  const flce_status status = queue_copies(copies, cuda, peers, recv, offset, bytes);
  /* After a failure too: the next wait would otherwise be for the collective before alone. */
  const cudaError_t recorded = cudaEventRecord(copies.end, copies.stream);
  if (status == FLCE_OK) return check_cuda(recorded, "peers");
  cudaGetLastError(); /* as check_cuda, which would replace the message of the failure */
  return status;
}

extern "C" FLCE_EXPORT flce_status flce_cuda_peers_wait(const flce_cuda* cuda,
                                                        flce_collective_id id) {
  CopyStream copies;
  FLCE_TRY(copy_stream(cuda, id, &copies));
  return check_cuda(cudaStreamWaitEvent((cudaStream_t)cuda->stream, copies.end, 0), "peers");
}
