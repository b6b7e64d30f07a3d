/* csrc/cuda/peers.cu on a CUDA runtime that only notes what is queued, and of which one call fails:
 * whichever of a begin's operations cannot be queued, the wait after it is for all that are. Prints
 * how many calls have failed. Compiled and run by test_peers.py, without a GPU. */
#include "cuda_stubs.h"

#include <stdio.h>
#include <string.h>

enum { kRanks = 6 };

static int g_call, g_fails_at = -1; /* of the calls in a begin: the next, and which fails */
/* Operations on the copy stream, and how many of them the caller's stream waits for. */
static int g_queued, g_waited;
static int g_events;       /* how many have been created */
static int g_event[2];     /* g_queued at its last record; their addresses are handles */
static char g_copy_stream; /* its address is the handle; the caller's is NULL */

static bool is_copy_stream(const void* stream) {
  return stream == &g_copy_stream;
}

static bool fails() {
  return g_call++ == g_fails_at;
}

/* A call that queues an operation on a stream; whether it works. */
static bool queue(const void* stream) {
  if (fails()) return false;
  g_queued += is_copy_stream(stream);
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
  *stream = (cudaStream_t)&g_copy_stream;
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
  if (!is_copy_stream(stream)) return result(!fails());
  *(int*)handle = g_queued;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned) {
  if (is_copy_stream(stream)) return result(queue(stream));
  g_waited = *(const int*)handle;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t stream) {
  return result(queue(stream));
}
}

/* Runs a collective of which the runtime's call number `call` fails; whether its begin failed. */
static bool begin_fails(int call) {
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
  flce_cuda_peers_wait(&cuda, FLCE_ALL_GATHER_INPUT);
  return status != FLCE_OK;
}

int main() {
  int calls = 0;
  for (bool failed = true; failed; calls += failed) {
    failed = begin_fails(calls);
    if (g_waited != g_queued) {
      printf("call %d fails: the wait is for %d of %d operations\n", calls, g_waited, g_queued);
      return 1;
    }
  }
  printf("%d\n", calls);
  return 0;
}
