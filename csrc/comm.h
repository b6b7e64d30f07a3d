/* The engine's view of the ranks that divide a vocabulary: the collectives of one group. The
 * binding fills the table from torch.distributed, the tests from threads and memcpy. */
#ifndef FLCE_COMM_H
#define FLCE_COMM_H

#include "flce.h"

#ifdef __cplusplus
extern "C" {
#endif

/* all_gather and all_to_all begin a collective after the work that the backend has queued so far,
 * and return without waiting. Work that is queued after wait() of the same id runs after the
 * collective. One collective of each id can be in flight at a time. Neither buffer may be touched
 * in between; they do not overlap. */
struct flce_comm {
  void* self; /* the first argument of every function */
  /* The memory from which the collectives of this id have to send, of at least `bytes` bytes, valid
   * until the next call for the id; *memory NULL: they send from any memory. With such memory a
   * collective leaves this rank's own block of recv unwritten; a caller that reads it has to copy
   * it there. */
  flce_status (*send_buffer)(void* self, flce_collective_id id, int64_t bytes, void** memory);
  /* recv [ranks][bytes] gets `send` [bytes] of every rank, by rank. */
  flce_status (*all_gather)(void* self, flce_collective_id id, void* recv, const void* send,
                            int64_t bytes);
  /* send [ranks][bytes]: block r goes to rank r. recv [ranks][bytes]: what came, by rank. */
  flce_status (*all_to_all)(void* self, flce_collective_id id, void* recv, const void* send,
                            int64_t bytes);
  flce_status (*wait)(void* self, flce_collective_id id);
  /* What the engine calls last in a call that fails while collectives are in flight: those with bit
   * `id` in `in_flight`, which have been asked to begin, and whose wait() has not succeeded. They
   * may go on after the call, whose buffers the caller may then free or reuse: the table keeps
   * their memory until they have ended, or lets what is queued from now on run after them. The last
   * error message stays as it is. */
  void (*abandon)(void* self, unsigned in_flight);
};

#ifdef __cplusplus
}
#endif
#endif
