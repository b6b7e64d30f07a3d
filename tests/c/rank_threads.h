/* Ranks that divide the vocabulary, as threads whose collectives copy memory. */
#ifndef FLCE_TEST_RANK_THREADS_H
#define FLCE_TEST_RANK_THREADS_H

#include "engine_case.h"

#include <pthread.h>

enum { MOST_RANKS = 8 };

/* A collective in flight: what a rank sends, and where it receives. */
typedef struct transfer {
  const char* sent;
  char* recv;
  int64_t bytes;
  bool to_all; /* block r of what is sent goes to rank r; else all ranks get the same */
  bool flies;
} transfer;

/* What the ranks share: a barrier that fails once a rank has ended, and their transfers. */
typedef struct group {
  int ranks;
  pthread_mutex_t mutex;
  pthread_cond_t all_here;
  int waiting, rounds, ended;
  bool has_buffers; /* the collectives send from memory of their own */
  transfer transfers[FLCE_COLLECTIVES][MOST_RANKS];
  _Atomic int unequal; /* collectives whose sizes differ between ranks */
} group;

typedef struct member {
  group* all;
  int rank;
  void* buffers[FLCE_COLLECTIVES];
  int collectives;
} member;

/* One rank's call: its setting and its view of the model. */
typedef struct rank_call {
  member own;
  flce_comm comm;
  setting s;
  flce_problem teacher; /* that of s.problem, of this rank */
  model m;
  run r;
} rank_call;

/* Runs the setting on ranks whose rows of W end at `ends`, each in a thread. */
void run_threads(const setting* s, const model* m, int ranks, const int64_t* ends, group* all,
                 rank_call* calls);

void free_rank(rank_call* call);

#endif
