/* All-gather and all-to-all by the copy engines of GPUs that can read each other's memory: unlike
 * NCCL's kernels they occupy no multiprocessor. Exported by libflce_cuda.so (cuda/peers.cu), called
 * by the binding. */
#ifndef FLCE_PEERS_H
#define FLCE_PEERS_H

#include "flce.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { FLCE_MOST_PEERS = 16 };

/* Memory for one collective on every rank, at addresses of this process, mapped by all. A rank
 * sends from its own `data`. `flags`: [2][ranks] uint32, 0 at first: [0][r] "rank r has written its
 * data", [1][r] "rank r has copied this rank's data". */
typedef struct flce_peers {
  int ranks, rank; /* ranks 0: there is no such memory */
  void* data[FLCE_MOST_PEERS];
  void* flags[FLCE_MOST_PEERS];
} flce_peers;

/* Starts copying, into recv [ranks][bytes], the `bytes` bytes at `offset` of every other rank's
 * data, after the work queued on cuda->stream of every rank. This rank's own block is not written:
 * a copy within a GPU is a kernel, which would wait for a multiprocessor. Collectives of different
 * ids can be in flight at a time. */
typedef flce_status (*flce_cuda_peers_begin_fn)(const flce_cuda* cuda, const flce_peers* peers,
                                                flce_collective_id id, void* recv, int64_t offset,
                                                int64_t bytes);
/* Work queued on cuda->stream after this call runs when the copies are complete and all ranks have
 * copied this rank's data. After a begin that failed it runs when what that has queued is complete,
 * which may wait for other ranks. */
typedef flce_status (*flce_cuda_peers_wait_fn)(const flce_cuda* cuda, flce_collective_id id);

#ifdef __cplusplus
}
#endif
#endif
