/* The engine's view of the ranks that divide a vocabulary: the collectives of one group. The
 * binding fills the table from torch.distributed, the tests from threads and memcpy. */
#ifndef FLCE_COMM_H
#define FLCE_COMM_H

#include "flce.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What is exchanged; one collective of each can be in flight at a time. */
typedef enum flce_slot {
  FLCE_SLOT_INPUT,      /* x of a rank's tokens */
  FLCE_SLOT_STATISTICS, /* parts of the rows' statistics */
  FLCE_SLOT_TERMS,      /* a rank's terms of dX */
  FLCE_SLOT_SUMS,       /* dX of the tokens that a rank has summed */
  FLCE_SLOTS
} flce_slot;

/* gather and exchange begin a collective after the work that the backend has queued so far, and
 * return without waiting. Work that is queued after wait() of the same slot runs after the
 * collective. Neither buffer may be touched in between; they do not overlap. */
struct flce_comm {
  void* self; /* the first argument of every function */
  /* The memory from which the slot's collectives have to send, of at least `bytes` bytes, valid
   * until the next call for the slot; *memory NULL: they send from any memory. With such memory a
   * collective does not write this rank's own block of recv: the caller does. */
  flce_status (*place)(void* self, flce_slot slot, int64_t bytes, void** memory);
  /* recv [ranks][bytes] gets `send` [bytes] of every rank, by rank. */
  flce_status (*gather)(void* self, flce_slot slot, void* recv, const void* send, int64_t bytes);
  /* send [ranks][bytes]: block r goes to rank r. recv [ranks][bytes]: what came, by rank. */
  flce_status (*exchange)(void* self, flce_slot slot, void* recv, const void* send, int64_t bytes);
  flce_status (*wait)(void* self, flce_slot slot);
};

#ifdef __cplusplus
}
#endif
#endif
