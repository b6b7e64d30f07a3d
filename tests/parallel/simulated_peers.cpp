/* csrc/cuda/peers.cu on a simulated CUDA runtime: ranks whose queued operations run in random
 * orders, on few hardware queues or as the branches of captured graphs. Every collective has to
 * end, and every rank has to receive what its peers have written for that collective. Compiled and
 * run by test_peers.py, without a GPU. */
#include "cuda_stubs.h"

#include <stdio.h>
#include <string.h>

#include <random>
#include <vector>

enum { kMostRanks = 8, kCollectives = 3, kStreamsOfRank = 32 };

enum Kind { kNothing, kSet, kTake, kCopy, kFill, kCheck };

struct Operation {
  Kind kind;
  int stream;             /* of its rank */
  std::vector<int> after; /* numbers of the rank's operations that end before it begins */
  uint32_t* flag;         /* kSet, kTake */
  uint32_t value;         /* kSet, kTake; of the collective: kFill, kCheck */
  char* to;               /* kCopy, kFill; what kCheck reads */
  const char* from;       /* kCopy */
  size_t bytes;
};

/* What a rank has queued. The handle of a stream or event is its number and the rank's. */
struct Rank {
  std::vector<Operation> queued;
  int last[kStreamsOfRank];  /* number of a stream's last operation, -1 for none */
  std::vector<int> recorded; /* by event: the operation that it stands for, -1 for none */
  int streams;
};

static Rank g_ranks[kMostRanks];
static int g_rank; /* that queues now */

static Rank& rank_now() {
  return g_ranks[g_rank];
}

static int stream_of(const void* handle) {
  return (int)(intptr_t)handle; /* 0: the caller's */
}

static void queue(const void* stream, Operation made) {
  Rank& rank = rank_now();
  made.stream = stream_of(stream);
  int& last = rank.last[made.stream];
  if (last >= 0) made.after.push_back(last);
  last = (int)rank.queued.size();
  rank.queued.push_back(made);
}

static CUresult write_value(CUstream stream, CUdeviceptr flag, cuuint32_t value, unsigned) {
  queue(stream, {kSet, 0, {}, (uint32_t*)flag, value, NULL, NULL, 0});
  return CUDA_SUCCESS;
}

static CUresult wait_value(CUstream stream, CUdeviceptr flag, cuuint32_t value, unsigned) {
  queue(stream, {kTake, 0, {}, (uint32_t*)flag, value, NULL, NULL, 0});
  return CUDA_SUCCESS;
}

extern "C" {
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = (cudaStream_t)(intptr_t)++rank_now().streams;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  rank_now().recorded.push_back(-1);
  *event = (cudaEvent_t)(intptr_t)rank_now().recorded.size();
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult*) {
  const bool waits = strcmp(name, "cuStreamWaitValue32") == 0;
  *function = waits ? (void*)wait_value : (void*)write_value;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  rank_now().recorded[(intptr_t)event - 1] = rank_now().last[stream_of(stream)];
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const int before = rank_now().recorded[(intptr_t)event - 1];
  queue(stream, {kNothing, 0, {}, NULL, 0, NULL, NULL, 0});
  if (before >= 0) rank_now().queued.back().after.push_back(before);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  queue(stream, {kCopy, 0, {}, NULL, 0, (char*)to, (const char*)from, bytes});
  return cudaSuccess;
}
}

/* ---- the ranks' memory ---- */

enum { kBytes = 8 }; /* of a rank's block */

static uint32_t g_flags[kMostRanks][2 * kMostRanks];
static char g_data[kMostRanks][kBytes], g_received[kMostRanks][kMostRanks * kBytes];
static int g_wrong;

static char block_of(int rank, uint32_t collective) {
  return (char)(1 + rank + kMostRanks * (int)collective);
}

/* Queues the collectives of a rank: it writes its block, begins, waits, and reads. */
static void queue_collectives(int rank, int ranks) {
  flce_peers peers = {};
  peers.ranks = ranks;
  peers.rank = rank;
  for (int r = 0; r < ranks; r++) {
    peers.data[r] = g_data[r];
    peers.flags[r] = g_flags[r];
  }
  flce_cuda cuda = {};
  cuda.device = rank; /* each has streams of its own */
  g_rank = rank;
  for (uint32_t c = 0; c < kCollectives; c++) {
    queue(NULL, {kFill, 0, {}, NULL, c, g_data[rank], NULL, kBytes});
    flce_cuda_peers_begin(&cuda, &peers, FLCE_ALL_GATHER_INPUT, g_received[rank], 0, kBytes);
    flce_cuda_peers_wait(&cuda, FLCE_ALL_GATHER_INPUT);
    queue(NULL, {kCheck, 0, {}, NULL, c, g_received[rank], NULL, kBytes});
  }
}

static bool can_run(const Operation& op) {
  return op.kind != kTake || *op.flag == op.value;
}

static void run(const Operation& op, int rank, int ranks) {
  if (op.kind == kSet) *op.flag = op.value;
  if (op.kind == kCopy) memcpy(op.to, op.from, op.bytes);
  if (op.kind == kFill) memset(op.to, block_of(rank, op.value), op.bytes);
  for (int peer = 0; op.kind == kCheck && peer < ranks; peer++)
    for (size_t i = 0; peer != rank && i < op.bytes; i++)
      g_wrong += op.to[(size_t)peer * op.bytes + i] != block_of(peer, op.value);
}

/* ---- orders ---- */

static std::mt19937 g_random(1);

static int below(size_t count) {
  return (int)(g_random() % count);
}

/* The rank's operations by hardware queue: each stream has one, and `queues` of them exist. */
static std::vector<std::vector<int>> by_stream(const Rank& rank, int queues) {
  std::vector<std::vector<int>> found(queues);
  for (size_t k = 0; k < rank.queued.size(); k++)
    found[rank.queued[k].stream % queues].push_back((int)k);
  return found;
}

/* All of them in one queue, in a random order that keeps what each is after: a replayed graph. */
static std::vector<std::vector<int>> as_graph(const Rank& rank) {
  std::vector<std::vector<int>> found(1);
  std::vector<bool> placed(rank.queued.size());
  while (found[0].size() < rank.queued.size()) {
    std::vector<int> ready;
    for (size_t k = 0; k < rank.queued.size(); k++) {
      bool is_ready = !placed[k];
      for (int before : rank.queued[k].after) is_ready = is_ready && placed[before];
      if (is_ready) ready.push_back((int)k);
    }
    const int next = ready[below(ready.size())];
    placed[next] = true;
    found[0].push_back(next);
  }
  return found;
}

/* Runs what all ranks have queued: the first operation of a queue that can run, chosen at random,
 * until none is left. `queues` 0: as graphs. Whether all have ended. */
static bool all_end(int ranks, int queues) {
  std::vector<std::vector<int>> queue_at;
  std::vector<int> owner;
  for (int r = 0; r < ranks; r++)
    for (auto& one : queues ? by_stream(g_ranks[r], queues) : as_graph(g_ranks[r])) {
      queue_at.push_back(one);
      owner.push_back(r);
    }
  std::vector<size_t> next(queue_at.size(), 0);
  std::vector<std::vector<bool>> ended(ranks);
  for (int r = 0; r < ranks; r++) ended[r].resize(g_ranks[r].queued.size());
  for (;;) {
    std::vector<int> ready;
    bool is_left = false;
    for (size_t q = 0; q < queue_at.size(); q++) {
      if (next[q] == queue_at[q].size()) continue;
      is_left = true;
      const Operation& op = g_ranks[owner[q]].queued[queue_at[q][next[q]]];
      bool is_ready = can_run(op);
      for (int before : op.after) is_ready = is_ready && ended[owner[q]][before];
      if (is_ready) ready.push_back((int)q);
    }
    if (!is_left || ready.empty()) return !is_left;
    const int q = ready[below(ready.size())], number = queue_at[q][next[q]++];
    run(g_ranks[owner[q]].queued[number], owner[q], ranks);
    ended[owner[q]][number] = true;
  }
}

int main() {
  enum { kRounds = 300 };
  const int queues[] = {0, 1, 2, 3, 8};
  for (int r = 0; r < kMostRanks; r++)
    for (int& last : g_ranks[r].last) last = -1;
  for (int ranks = 2; ranks <= kMostRanks; ranks++)
    for (int of_rank : queues)
      for (int round = 0; round < kRounds; round++) {
        for (int r = 0; r < ranks; r++) {
          g_ranks[r].queued.clear();
          for (int& last : g_ranks[r].last) last = -1;
          for (int& event : g_ranks[r].recorded) event = -1;
          queue_collectives(r, ranks);
        }
        const bool ended = all_end(ranks, of_rank);
        if (ended && g_wrong == 0) continue;
        printf("%d ranks, %d hardware queues (0: graphs), round %d: %s, %d wrong bytes\n", ranks,
               of_rank, round, ended ? "all end" : "a deadlock", g_wrong);
        return 1;
      }
  return 0;
}
