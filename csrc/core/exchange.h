/* What a call exchanges with the other ranks of a sharded vocabulary, as a table of functions. Of
 * one rank they do nothing, so that engine.c has one order of calls for any number of ranks. */
#ifndef FLCE_EXCHANGE_H
#define FLCE_EXCHANGE_H

#include "comm.h"
#include "core/execution.h"

typedef struct exchange {
  /* The backend's prepare: the scalars of all classes, and the order of this rank's targets. */
  flce_status (*prepare)(const execution* e, void* order, bool overlaps);
  /* Lets the passes over this rank's classes make the sums that the ranks exchange. */
  void (*enable_partial_sums)(const execution* e, flce_rows* view);
  /* Begins the all-gather of a chunk's statistics. */
  flce_status (*begin_statistics)(const execution* e, const chunk* c);
  /* Waits for it: statistics and losses of the whole vocabulary. */
  flce_status (*merge_statistics)(const execution* e, const chunk* c);
  /* The backend's row_coefficients, for the rows in the whole vocabulary. */
  flce_status (*row_coefficients)(const execution* e, const chunk* c, const flce_upstream* upstream,
                                  const void* factor);
  /* Begins the all-to-all of dX: the chunks have completed this rank's part of it. */
  flce_status (*begin_partial_dx)(const execution* e);
  /* Waits for it, sums the parts of all ranks, and begins the all-gather of the sums. */
  flce_status (*sum_partial_dx)(const execution* e);
  /* Waits for that. */
  flce_status (*wait_dx)(const execution* e);
  /* The call has failed: no collective may go on with buffers that the caller frees. */
  void (*abandon)(const execution* e);
} exchange;

/* Of a call with a sharded vocabulary. */
typedef struct shard_call {
  const flce_comm* comm;
  unsigned in_flight; /* its collectives that have begun, as flce_comm.abandon takes them */
  flce_shard classes; /* of this rank */
  const flce_problem* caller_problem; /* as the caller gave them */
  const flce_tensors* caller_tensors;
  flce_problem problem; /* e->problem and e->tensors: x of all tokens, targets as columns of this */
  flce_tensors tensors; /* rank */
} shard_call;

/* Sets e->exchange and, if the vocabulary is sharded, points e->shard, e->problem and e->tensors to
 * `shard`, which it fills. Then also begins and completes the all-gather of x, if the call reads
 * it. */
flce_status flce_open_exchange(execution* e, const flce_comm* comm, bool reads_input,
                               shard_call* shard);

#endif
