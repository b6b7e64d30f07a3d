/* Implements rank_threads.h: the collectives, and the part of a model that each rank has. */
#include "rank_threads.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static bool meet(group* all) {
  pthread_mutex_lock(&all->mutex);
  int round = all->rounds;
  if (++all->waiting == all->ranks) {
    all->waiting = 0;
    all->rounds++;
    pthread_cond_broadcast(&all->all_here);
  }
  while (round == all->rounds && all->ended == 0) pthread_cond_wait(&all->all_here, &all->mutex);
  bool met = round != all->rounds;
  pthread_mutex_unlock(&all->mutex);
  return met;
}

static void end(group* all) {
  pthread_mutex_lock(&all->mutex);
  all->ended++;
  pthread_cond_broadcast(&all->all_here);
  pthread_mutex_unlock(&all->mutex);
}

/* The blocks received are NaN until the wait, which copies what the send buffers then hold: neither
 * buffer may be touched in between. */
static flce_status begin(member* own, flce_collective_id id, transfer given) {
  transfer* mine = &own->all->transfers[id][own->rank];
  if (mine->flies) return flce_fail(FLCE_DEVICE_ERROR, "collective %d is in flight", (int)id);
  *mine = given;
  mine->flies = true;
  for (int r = 0; r < own->all->ranks; r++) {
    char* block = given.recv + r * given.bytes;
    bool sends = block >= given.sent && block < given.sent + given.bytes;
    if (r != own->rank || !(sends || own->buffers[id])) memset(block, 0xff, (size_t)given.bytes);
  }
  own->collectives++;
  return FLCE_OK;
}

static flce_status all_gather(void* self, flce_collective_id id, void* recv, const void* send,
                              int64_t bytes) {
  return begin(self, id, (transfer){.sent = send, .recv = recv, .bytes = bytes});
}

static flce_status all_to_all(void* self, flce_collective_id id, void* recv, const void* send,
                              int64_t bytes) {
  return begin(self, id, (transfer){.sent = send, .recv = recv, .bytes = bytes, .to_all = true});
}

/* Memory of the table, full of NaN. */
static flce_status send_buffer(void* self, flce_collective_id id, int64_t bytes, void** memory) {
  member* own = self;
  *memory = NULL;
  if (!own->all->has_buffers) return FLCE_OK;
  free(own->buffers[id]);
  *memory = own->buffers[id] = malloc((size_t)bytes + 1);
  memset(*memory, 0xff, (size_t)bytes);
  return FLCE_OK;
}

/* Both ends wait for all ranks: no rank may change what another has not copied yet. */
static flce_status wait_for(void* self, flce_collective_id id) {
  member* own = self;
  group* all = own->all;
  transfer* mine = &all->transfers[id][own->rank];
  if (!mine->flies) return flce_fail(FLCE_DEVICE_ERROR, "nothing to wait for");
  if (!meet(all)) return flce_fail(FLCE_DEVICE_ERROR, "a rank has ended before a collective");
  for (int r = 0; r < all->ranks; r++) {
    const transfer* other = &all->transfers[id][r];
    if (other->bytes != mine->bytes) atomic_fetch_add(&all->unequal, 1);
    const char* from = other->sent + (mine->to_all ? own->rank * mine->bytes : 0);
    char* to = mine->recv + r * mine->bytes;
    bool keeps = r == own->rank && (own->buffers[id] || to == from);
    if (!keeps) memcpy(to, from, (size_t)mine->bytes);
  }
  if (!meet(all)) return flce_fail(FLCE_DEVICE_ERROR, "a rank has ended in a collective");
  mine->flies = false;
  return FLCE_OK;
}

/* Only after a failure, which is noted where it occurs. */
static void abandon(void* self, unsigned in_flight) {
  (void)self, (void)in_flight;
}

static void* run_rank(void* context) {
  rank_call* call = context;
  call->r = run_all(&call->s, &call->m, 1);
  end(call->own.all);
  return NULL;
}

void free_rank(rank_call* call) {
  free_run(&call->r);
  for (int id = 0; id < FLCE_COLLECTIVES; id++) free(call->own.buffers[id]);
}

static void* elements(void* data, flce_dtype dtype, int64_t count) {
  return (char*)data + count * flce_size_of(dtype);
}

/* The teacher of a rank, whose problem is `own`: its rows of W, or all columns of its logits. */
static void open_teacher(rank_call* call, const flce_problem* own, const flce_tensors* whole) {
  flce_problem* teacher = &call->teacher;
  *teacher = *own->divergence.teacher;
  teacher->shard.ranks = own->shard.ranks;
  teacher->shard.rank = own->shard.rank;
  teacher->shard.classes = own->shard.classes;
  teacher->shard.first_class = own->shard.first_class;
  teacher->shape.weight_rows = own->shape.weight_rows;
  teacher->shape.vocab = own->shape.vocab;
  call->s.problem.divergence.teacher = teacher;
  if (teacher->has.logits)
    teacher->shape.first_logit = own->shard.first_class;
  else
    call->m.teacher.linear_weight = elements((void*)whole->linear_weight, teacher->dtypes.weight,
                                             own->shard.first_class * teacher->shape.hidden);
}

/* The setting of a rank with the rows [first, end) of W, and the model from these rows on. */
static void open_rank(rank_call* call, group* all, int rank, const setting* s, const model* m,
                      int64_t first, int64_t end) {
  const flce_problem* p = &s->problem;
  int64_t cols = flce_grad_weight_cols(p);
  *call = (rank_call){.own = {.all = all, .rank = rank}, .s = *s, .m = *m};
  call->comm = (flce_comm){&call->own, send_buffer, all_gather, all_to_all, wait_for, abandon};
  flce_problem* own = &call->s.problem;
  own->shard.ranks = all->ranks;
  own->shard.rank = rank;
  own->shard.classes = p->shape.vocab;
  own->shard.first_class = first < p->shape.vocab ? first : p->shape.vocab;
  own->shape.weight_rows = end - first;
  own->shape.vocab = (end < p->shape.vocab ? end : p->shape.vocab) - own->shard.first_class;
  call->s.comm = &call->comm;
  if (own->divergence.teacher) open_teacher(call, own, &m->teacher);
  int64_t rows = flce_input_rows(own);
  if (own->shard.input_is_sharded)
    call->m.x = elements(m->x, p->dtypes.input, rank * rows * p->shape.hidden);
  call->m.w = elements(m->w, p->dtypes.weight, first * p->shape.hidden);
  call->m.bias = elements(m->bias, p->dtypes.bias, first);
  call->m.start = elements(m->start, p->backward.added_dtype, first * cols);
  call->m.dw = m->dw + first * cols, call->m.dw_size = m->dw_size + first * cols;
  call->m.db = m->db + first, call->m.db_size = m->db_size + first;
  if (own->shard.input_is_sharded) {
    call->m.dx = m->dx + rank * rows * p->shape.hidden;
    call->m.dx_size = m->dx_size + rank * rows * p->shape.hidden;
  }
}

void run_threads(const setting* s, const model* m, int ranks, const int64_t* ends, group* all,
                 rank_call* calls) {
  pthread_t threads[MOST_RANKS];
  *all = (group){.ranks = ranks,
                 .has_buffers = ranks == 4,
                 .mutex = PTHREAD_MUTEX_INITIALIZER,
                 .all_here = PTHREAD_COND_INITIALIZER};
  for (int r = 0; r < ranks; r++)
    open_rank(&calls[r], all, r, s, m, r > 0 ? ends[r - 1] : 0, ends[r]);
  for (int r = 0; r < ranks; r++) pthread_create(&threads[r], NULL, run_rank, &calls[r]);
  for (int r = 0; r < ranks; r++) pthread_join(threads[r], NULL);
  CHECK(all->unequal == 0, "%d blocks of a collective differ in size", all->unequal);
}
