/* Collectives by copy engines (peers.h). Each rank copies from the others' memory; flags in that
 * memory, written and waited for by the streams themselves, say when it may. No kernel runs, so the
 * exchange neither waits for a multiprocessor nor takes one. */
#include "peers.h"

#include <cuda.h>
#include <pthread.h>

#include "cuda/common/types.cuh"

enum Flag { kWritten, kCopied };

enum { kMaxStreams = 3 };

/* How many streams copy for an id: several for x, which nothing hides, one for each other id. With
 * one stream, ranks that begin at different times may copy from the same peer, at half of its speed
 * each, while other peers send nothing. The six streams of the four ids and the caller's share 8
 * hardware queues by default; with more, GEMMs would wait behind copies more often. */
static int streams_of(flce_collective_id id) {
  return id == FLCE_ALL_GATHER_INPUT ? kMaxStreams : 1;
}

/* The streams and events of one id on one device; created once and never destroyed. */
struct CopyStreams {
  cudaStream_t streams[kMaxStreams];
  /* begin: of the call's work before; written: this rank's flags are set; copied: of a
   * stream's copies; ends: of all that a stream does. The first stream's end is after the others'
   * copies, but after a failure it may not be. */
  cudaEvent_t begin, written, copied[kMaxStreams], ends[kMaxStreams];
  bool created;
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
  FLCE_TRY(create_event(&made->written));
  for (int k = 0; k < streams_of(id); k++) {
    FLCE_TRY(check_cuda(
        cudaStreamCreateWithPriority(&made->streams[k], cudaStreamNonBlocking, greatest), "peers"));
    FLCE_TRY(create_event(&made->copied[k]));
    FLCE_TRY(create_event(&made->ends[k]));
  }
  made->created = true;
  return FLCE_OK;
}

static flce_status copy_streams(const flce_cuda* cuda, flce_collective_id id, CopyStreams* found) {
  FLCE_TRY(check_device(cuda->device));
  CopyStreams* copies = &g_streams[cuda->device][id];
  pthread_mutex_lock(&g_lock);
  flce_status status = FLCE_OK;
  if (!copies->created) status = create_streams(id, copies);
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
  return peers->ranks - 1 < streams_of(id) ? peers->ranks - 1 : streams_of(id);
}

/* A collective: recv [ranks][bytes] gets `bytes` bytes of every peer's memory from `offset` on. */
struct Exchange {
  const flce_peers* peers;
  int streams; /* used_streams */
  void* recv;
  int64_t offset, bytes;
};

/* Queues: wait until the peer has written its block, copy it, tell the peer that it is copied. */
static flce_status queue_copy(cudaStream_t stream, const Exchange& exchange, int peer) {
  const flce_peers* peers = exchange.peers;
  FLCE_TRY(take_flag(stream, flag_at(peers, peers->rank, kWritten, peer)));
  FLCE_TRY(check_cuda(cudaMemcpyAsync((char*)exchange.recv + peer * exchange.bytes,
                                      (const char*)peers->data[peer] + exchange.offset,
                                      (size_t)exchange.bytes, cudaMemcpyDefault, stream),
                      "peers"));
  return set_flag(stream, flag_at(peers, peer, kCopied, peers->rank), 1);
}

/* `stream` waits for what `before` has been recorded after. */
static flce_status wait_for(cudaStream_t stream, cudaEvent_t before) {
  return check_cuda(cudaStreamWaitEvent(stream, before, 0), "peers");
}

static flce_status record(cudaEvent_t event, cudaStream_t stream) {
  return check_cuda(cudaEventRecord(event, stream), "peers");
}

/* Queues the copies of a collective. Rank r copies from r + 1, r + 2, ..., so that ranks begin with
 * different peers.
 *
 * The first stream sets all flags before any stream waits for one, and waits for the peers' copies
 * after all copies of its own. So no rank waits for another in a circle, whichever streams share a
 * hardware queue (CUDA_DEVICE_MAX_CONNECTIONS may be 1), and in whatever order a captured graph's
 * branches run. */
static flce_status queue_copies(const CopyStreams& copies, const Exchange& exchange) {
  const flce_peers* peers = exchange.peers;
  const int rank = peers->rank, ranks = peers->ranks, used = exchange.streams;
  const auto peer_at = [=](int step) { return (rank + step) % ranks; };
  const cudaStream_t first = copies.streams[0];
  FLCE_TRY(wait_for(first, copies.begin));
  for (int step = 1; step < ranks; step++)
    FLCE_TRY(set_flag(first, flag_at(peers, peer_at(step), kWritten, rank), 1));
  FLCE_TRY(record(copies.written, first));
  for (int k = 1; k < used; k++) FLCE_TRY(wait_for(copies.streams[k], copies.written));
  for (int step = 1; step < ranks; step++)
    FLCE_TRY(queue_copy(copies.streams[(step - 1) % used], exchange, peer_at(step)));
  for (int k = 1; k < used; k++) {
    FLCE_TRY(record(copies.copied[k], copies.streams[k]));
    FLCE_TRY(wait_for(first, copies.copied[k]));
  }
  for (int step = 1; step < ranks; step++)
    FLCE_TRY(take_flag(first, flag_at(peers, rank, kCopied, peer_at(step))));
  return FLCE_OK;
}

extern "C" FLCE_EXPORT flce_status flce_cuda_peers_begin(const flce_cuda* cuda,
                                                         const flce_peers* peers,
                                                         flce_collective_id id, void* recv,
                                                         int64_t offset, int64_t bytes) {
  CopyStreams copies;
  FLCE_TRY(copy_streams(cuda, id, &copies));
  FLCE_TRY(record(copies.begin, (cudaStream_t)cuda->stream));
  const int used = used_streams(peers, id);
  flce_status status = queue_copies(copies, {peers, used, recv, offset, bytes});
  /* After a failure too: peers_wait would otherwise wait for the collective before alone. */
  for (int k = 0; k < used; k++) {
    const cudaError_t recorded = cudaEventRecord(copies.ends[k], copies.streams[k]);
    if (status == FLCE_OK)
      status = check_cuda(recorded, "peers");
    else
      cudaGetLastError(); /* as check_cuda, which would replace the message of the failure */
  }
  return status;
}

extern "C" FLCE_EXPORT flce_status flce_cuda_peers_wait(const flce_cuda* cuda,
                                                        const flce_peers* peers,
                                                        flce_collective_id id) {
  CopyStreams copies;
  FLCE_TRY(copy_streams(cuda, id, &copies));
  for (int k = 0; k < used_streams(peers, id); k++)
    FLCE_TRY(wait_for((cudaStream_t)cuda->stream, copies.ends[k]));
  return FLCE_OK;
}
