/* What a sharded vocabulary adds to a call. For one rank these functions do nothing, or call
 * the backend's function of the same name, so that callers have one order of calls for any
 * number of ranks. */
#ifndef FLCE_SHARDS_H
#define FLCE_SHARDS_H

#include "comm.h"
#include "core/execution.h"

/* Of a call with a sharded vocabulary: execution.shard. */
typedef struct shard_call {
  const flce_comm* comm;
  unsigned in_flight; /* its collectives that have begun, as flce_comm.abandon takes them */
  const flce_problem* caller_problem; /* as the caller gave it */
  const flce_tensors* caller_tensors; /* the same */
  flce_problem problem;               /* e->problem: targets are columns of this rank */
  flce_tensors tensors;               /* e->tensors: x of all tokens, targets as above */
  /* The scalars of this rank's classes: FLCE_BUF_SHARD_SCALARS. A divergence's teacher has the
   * call's own here, as it has no loss, which alone would read others. */
  const void* local_scalars;
} shard_call;

/* Fills e->shard, which has `comm`, and points e->problem and e->tensors to its copies. Begins and
 * completes the all-gather of x, if the call reads it. Does nothing where e->shard is NULL. */
flce_status flce_open_shard(execution* e, bool reads_input);
/* Returns `status`, that of the call, and after a failure abandons the collectives in flight, whose
 * buffers the caller frees. Every call ends here. */
flce_status flce_close_shard(const execution* e, flce_status status);
/* The backend's prepare: for all classes, and for this rank's. */
flce_status flce_prepare(const execution* e, void* order, bool may_overlap);
/* The rows for the passes over this rank's classes: these compute the sums that the ranks exchange.
 */
flce_rows flce_local_rows(const execution* e, const chunk* c);
/* The backend's row_coefficients: in the whole vocabulary. */
flce_status flce_row_coefficients(const execution* e, const chunk* c, const flce_upstream* upstream,
                                  const void* factor);
/* Begins the all-gather of a chunk's statistics. */
flce_status flce_begin_all_gather_statistics(const execution* e, const chunk* c);
/* Waits for it: statistics and losses of the whole vocabulary. */
flce_status flce_wait_all_gather_statistics(const execution* e, const chunk* c);
/* The backend's divergence_rows, with the sums over all classes. */
flce_status flce_divergence_rows(const execution* e, const chunk* c, flce_divergence_args* call);
/* Begins the all-to-all of dX, after its last chunk: this rank's term of it is complete. */
flce_status flce_begin_all_to_all_dx(const execution* e);
/* Waits for it, sums the terms of all ranks and, unless dX is sharded by tokens, begins the
 * all-gather of the sums. */
flce_status flce_sum_dx(const execution* e);
/* Waits for that all-gather. */
flce_status flce_wait_all_gather_dx(const execution* e);

#endif
