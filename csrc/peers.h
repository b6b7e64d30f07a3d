/* Collectives by the copy engines of GPUs that can read each other's memory: unlike a
 * collective's kernel they take no multiprocessor from the GEMMs. Exported by libflce_cuda.so
 * (cuda/peers.cu), called by the binding. */
#ifndef FLCE_PEERS_H
#define FLCE_PEERS_H

#include "flce.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { FLCE_MOST_PEERS = 16 };

/* Memory of a slot on every rank, at addresses of this process, mapped by all. A rank sends from
 * its own `data`. `flags`: [2][ranks] uint32, 0 at first: [0][r] "rank r has written its data",
 * [1][r] "rank r has copied this rank's data". */
typedef struct flce_peers {
  int ranks, rank;
  void* data[FLCE_MOST_PEERS];
  void* flags[FLCE_MOST_PEERS];
} flce_peers;

/* Begins to copy `bytes` bytes at `offset` of every other rank's data to recv [ranks][bytes], after
 * what is queued on cuda->stream on every rank. (A copy within a GPU is a kernel, which would wait
 * for a multiprocessor.) `lane`: collectives with different ones can be in flight
 * at a time; below FLCE_PEER_LANES. */
enum { FLCE_PEER_LANES = 4 };
typedef flce_status (*flce_cuda_peers_begin_fn)(const flce_cuda* cuda, const flce_peers* peers,
                                                int lane, void* recv, int64_t offset,
                                                int64_t bytes);
/* Work queued on cuda->stream after this call runs when the copies are complete, and when all ranks
 * have copied this rank's data. */
typedef flce_status (*flce_cuda_peers_wait_fn)(const flce_cuda* cuda, int lane);

#ifdef __cplusplus
}
#endif
#endif
