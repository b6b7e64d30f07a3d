/* Collectives by copy engines (peers.h). Each rank copies from the others' memory; flags in that
 * memory, written and waited for by the streams themselves, say when it may. No kernel runs, so the
 * exchange neither waits for a multiprocessor nor takes one. */
#include "peers.h"

#include <cuda.h>
#include <pthread.h>

#include "cuda/common/types.cuh"

enum Flag { kWritten, kCopied };

enum { kMostStreams = 3 };

/* The streams of an id: one for what GEMMs hide, several for x, for which a call waits. These copy
 * at the same time, each from its own peers: where ranks are not in phase, two read from one peer
 * and get half of its link each, while links to others are idle. A GPU has 8 hardware queues by
 * default: with more streams in all, GEMMs might wait behind copies. */
static int most_streams(flce_collective_id id) {
  return id == FLCE_ALL_GATHER_INPUT ? kMostStreams : 1;
}

/* What the collectives of one id run on; created once for each device and never destroyed. */
struct CopyStreams {
  cudaStream_t streams[kMostStreams];
  cudaEvent_t begin, ends[kMostStreams];
  bool exist;
};

static CopyStreams g_streams[kMaxDevices][FLCE_COLLECTIVES];
static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER; /* guards g_streams */

static flce_status create_event(cudaEvent_t* made) {
  return check_cuda(cudaEventCreateWithFlags(made, cudaEventDisableTiming), "peers");
}

static flce_status create_streams(flce_collective_id id, CopyStreams* made) {
  int least, greatest;
  FLCE_TRY(check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "peers"));
  FLCE_TRY(create_event(&made->begin));
  for (int k = 0; k < most_streams(id); k++) {
    FLCE_TRY(check_cuda(
        cudaStreamCreateWithPriority(&made->streams[k], cudaStreamNonBlocking, greatest), "peers"));
    FLCE_TRY(create_event(&made->ends[k]));
  }
  made->exist = true;
  return FLCE_OK;
}

static flce_status copy_streams(const flce_cuda* cuda, flce_collective_id id, CopyStreams* found) {
  FLCE_TRY(check_device(cuda->device));
  CopyStreams* copies = &g_streams[cuda->device][id];
  pthread_mutex_lock(&g_lock);
  flce_status status = FLCE_OK;
  if (!copies->exist) status = create_streams(id, copies);
  *found = *copies;
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

static int used_streams(const flce_peers* peers, flce_collective_id id) {
  return peers->ranks - 1 < most_streams(id) ? peers->ranks - 1 : most_streams(id);
}

/* A collective: recv [ranks][bytes] gets `bytes` bytes of every peer's memory from `offset` on. */
struct Exchange {
  const flce_peers* peers;
  int streams; /* used_streams */
  void* recv;
  int64_t offset, bytes;
};

/* Queues the copy of a peer's block, which the peer allows, and of whose end it learns. */
static flce_status queue_copy(cudaStream_t stream, const Exchange& exchange, int peer) {
  const flce_peers* peers = exchange.peers;
  FLCE_TRY(take_flag(stream, flag_at(peers, peers->rank, kWritten, peer)));
  FLCE_TRY(check_cuda(cudaMemcpyAsync((char*)exchange.recv + peer * exchange.bytes,
                                      (const char*)peers->data[peer] + exchange.offset,
                                      (size_t)exchange.bytes, cudaMemcpyDefault, stream),
                      "peers"));
  return set_flag(stream, flag_at(peers, peer, kCopied, peers->rank), 1);
}

/* Queues the copies of a collective. Every rank begins with other peers, and a peer's flags are
 * written and taken by one stream in every collective, hence in the order of collectives.
 *
 * A GPU has few hardware queues, so operations of one stream may wait behind those of another that
 * were queued before. Hence the order here: what a rank waits for in one loop, every rank has
 * queued in the loops before. With each stream's operations queued at once, ranks could wait for
 * each other in a circle. */
static flce_status queue_copies(const CopyStreams& copies, const Exchange& exchange) {
  const flce_peers* peers = exchange.peers;
  const int rank = peers->rank, ranks = peers->ranks, used = exchange.streams;
  const auto peer_at = [=](int step) { return (rank + step) % ranks; };
  const auto stream_at = [&](int step) { return copies.streams[(step - 1) % used]; };
  for (int k = 0; k < used; k++)
    FLCE_TRY(check_cuda(cudaStreamWaitEvent(copies.streams[k], copies.begin, 0), "peers"));
  for (int step = 1; step < ranks; step++)
    FLCE_TRY(set_flag(stream_at(step), flag_at(peers, peer_at(step), kWritten, rank), 1));
  for (int step = 1; step < ranks; step++)
    FLCE_TRY(queue_copy(stream_at(step), exchange, peer_at(step)));
  for (int step = 1; step < ranks; step++)
    FLCE_TRY(take_flag(stream_at(step), flag_at(peers, rank, kCopied, peer_at(step))));
  return FLCE_OK;
}

extern "C" FLCE_EXPORT flce_status flce_cuda_peers_begin(const flce_cuda* cuda,
                                                         const flce_peers* peers,
                                                         flce_collective_id id, void* recv,
                                                         int64_t offset, int64_t bytes) {
  CopyStreams copies;
  FLCE_TRY(copy_streams(cuda, id, &copies));
  FLCE_TRY(check_cuda(cudaEventRecord(copies.begin, (cudaStream_t)cuda->stream), "peers"));
  const int used = used_streams(peers, id);
  flce_status status = queue_copies(copies, {peers, used, recv, offset, bytes});
  /* After a failure too: a wait must not be for the copies of the collective before. */
  for (int k = 0; k < used; k++) {
    const cudaError_t recorded = cudaEventRecord(copies.ends[k], copies.streams[k]);
    if (status == FLCE_OK) status = check_cuda(recorded, "peers");
    cudaGetLastError(); /* as check_cuda, which would replace the message of a failure before */
  }
  return status;
}

extern "C" FLCE_EXPORT flce_status flce_cuda_peers_wait(const flce_cuda* cuda,
                                                        const flce_peers* peers,
                                                        flce_collective_id id) {
  CopyStreams copies;
  FLCE_TRY(copy_streams(cuda, id, &copies));
  for (int k = 0; k < used_streams(peers, id); k++)
    FLCE_TRY(
        check_cuda(cudaStreamWaitEvent((cudaStream_t)cuda->stream, copies.ends[k], 0), "peers"));
  return FLCE_OK;
}
