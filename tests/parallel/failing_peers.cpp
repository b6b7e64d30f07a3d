/* csrc/cuda/peers.cu on a CUDA runtime that only notes what is queued, and of which one call fails:
 * whichever of a begin's operations cannot be queued, the wait after it is for all that are. Prints
 * how many calls have failed. Compiled and run by test_peers.py, without a GPU. */
#include "cuda_stubs.h"

#include <stdio.h>
#include <string.h>

enum { kRanks = 6, kStreams = 3 }; /* a stream has one peer, the others two */

struct Event {
  int stream = kStreams; /* of which it was recorded last; kStreams for the caller's and none */
  int recorded = 0;      /* operations on that stream at its last record */
};

static int g_call, g_fails_at = -1; /* of the calls of one begin */
/* By stream: operations on it, and how many of them the caller's stream waits for. */
static int g_queued[kStreams + 1], g_waited[kStreams + 1];
static int g_streams, g_events; /* how many have been created */
static Event g_event[2 + 2 * kStreams];
static char g_stream[kStreams]; /* their addresses are handles */

static int index_of(const void* stream) {
  const char* handle = (const char*)stream;
  bool is_copy_stream = handle >= g_stream && handle < g_stream + kStreams;
  return is_copy_stream ? (int)(handle - g_stream) : kStreams;
}

static bool fails() {
  return g_call++ == g_fails_at;
}

/* The result of a call that queues an operation on a stream. */
static bool queue(const void* stream) {
  if (fails()) return false;
  const int index = index_of(stream);
  if (index < kStreams) g_queued[index]++;
  return true;
}

static cudaError_t result(bool works) {
  return works ? cudaSuccess : cudaErrorUnknown;
}

static CUresult write_value(CUstream stream, CUdeviceptr, cuuint32_t, unsigned) {
  return queue(stream) ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

extern "C" {
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = (cudaStream_t)&g_stream[g_streams++];
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = (cudaEvent_t)&g_event[g_events++];
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult*) {
  *function = (void*)write_value; /* cuStreamWaitValue32 has the same parameters */
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  Event* event = (Event*)handle;
  event->stream = index_of(stream);
  if (event->stream == kStreams) return result(!fails());
  event->recorded = g_queued[event->stream];
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned) {
  const Event* event = (const Event*)handle;
  if (index_of(stream) < kStreams) return result(queue(stream));
  g_waited[event->stream] = event->recorded;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t stream) {
  return result(queue(stream));
}
}

/* A collective of which call `fails_at` fails: whether its begin has failed. */
static bool fails_at(int call) {
  static char memory[kRanks][64];
  flce_peers peers = {};
  peers.ranks = kRanks;
  for (int rank = 0; rank < kRanks; rank++) peers.data[rank] = peers.flags[rank] = memory[rank];
  const flce_cuda cuda = {};
  g_call = 0;
  g_fails_at = call;
  const flce_status status =
      flce_cuda_peers_begin(&cuda, &peers, FLCE_ALL_GATHER_INPUT, memory, 0, 8);
  g_fails_at = -1;
  flce_cuda_peers_wait(&cuda, &peers, FLCE_ALL_GATHER_INPUT);
  return status != FLCE_OK;
}

int main() {
  int calls = 0;
  for (bool failed = true; failed; calls += failed) {
    failed = fails_at(calls);
    for (int k = 0; k < kStreams; k++) {
      if (g_waited[k] == g_queued[k]) continue;
      printf("call %d fails: stream %d: the wait is for %d of %d operations\n", calls, k,
             g_waited[k], g_queued[k]);
      return 1;
    }
  }
  printf("%d\n", calls);
  return 0;
}
