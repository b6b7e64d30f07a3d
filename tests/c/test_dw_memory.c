/* Where the matrices of blocks in the memory of dW are (core/dw_memory.h), and what a block of
 * classes takes of the workspace: in plans of drawn problems for the GPUs that have a name and the
 * CPU. Nothing runs here. */
#include "core/chunk_memory.h"
#include "core/dw_memory.h"
#include "core/plan_rules.h"
#include "gpu.h"
#include "test.h"

#include <stdio.h>

enum {
  DRAWS = 30000,
  LEAST_DX_FIRST = 2000,
  LEAST_IN_DW = 1000,
  LEAST_WHOLE = 2000,
  MOST_RANGES = 8
};

static int64_t dx_first, in_dw, with_sum, with_whole_blocks;

static bool one_in(int64_t count) {
  return test_random() % (uint64_t)count == 0;
}

static int64_t one_of(int64_t least, int64_t most) {
  return least + (int64_t)(test_random() % (uint64_t)(most - least + 1));
}

/* Up to 2^bits, small numbers as often as large ones; often a multiple of 64 or next to one. */
static int64_t size_of(int bits) {
  int64_t size = one_of(1, INT64_C(1) << one_of(0, bits));
  return one_in(2) ? size : max64(round_up(size, 64) + one_of(-1, 1), 1);
}

static flce_problem draw(void) {
  flce_problem p = {.shape.tokens = size_of(18), .shape.hidden = size_of(13)};
  flce_dtype dtype = (flce_dtype)one_of(FLCE_F64, FLCE_F16), stat = flce_stat_dtype(dtype);
  if (one_in(2)) p.shape.hidden = round_up(p.shape.hidden, 16);
  p.shape.vocab = size_of(17);
  p.shape.weight_rows = p.shape.vocab + (one_in(4) ? one_of(1, 300) : 0);
  p.shape.frozen_hidden = one_in(6) && p.shape.hidden > 8 ? 8 : 0;
  p.dtypes.gemm = dtype;
  p.dtypes.input = p.dtypes.weight = p.dtypes.bias = one_in(6) ? stat : dtype;
  if (one_in(6)) p.dtypes.weight = stat;
  p.dtypes.accum = one_in(4) ? stat : dtype;
  p.dtypes.widens_accum = p.dtypes.accum == dtype && one_in(2);
  p.dtypes.logits = one_in(2) ? dtype : stat;
  p.reduction = FLCE_MEAN;
  p.save = one_in(2) ? FLCE_SAVE_GRADS : FLCE_SAVE_STATS;
  p.wants.grad_weight = true;
  p.wants.grad_input = p.save == FLCE_SAVE_GRADS || !one_in(6);
  p.wants.grad_bias = p.has.bias = one_in(3);
  p.wants.entropy = one_in(6);
  p.wants.predictions = one_in(6);
  p.has.probabilities = one_in(4);
  p.has.unaligned_operand = one_in(6);
  p.loss = (flce_loss){.ignore_index = -100, .logit_scale = 1.0, .temperature = 1.0};
  p.loss.softcap = one_in(6) ? 30.0 : 0.0;
  p.loss.label_smoothing = one_in(6) ? 0.1 : 0.0;
  p.shape.rows = p.has.probabilities || !one_in(3) ? p.shape.tokens : one_of(1, p.shape.tokens);
  int64_t row = p.shape.vocab * flce_size_of(stat) + 128;
  p.memory.bound = row * size_of(9);
  return p;
}

/* ---- ranges of bytes ---- */

typedef struct range {
  const char* name;
  const char* start;
  int64_t bytes;
} range;

typedef struct ranges {
  range all[MOST_RANGES];
  int count;
} ranges;

static void add(ranges* r, const char* name, const void* start, int64_t bytes) {
  if (start && bytes > 0) r->all[r->count++] = (range){name, start, bytes};
}

static void add_matrix(ranges* r, const char* name, const chunk_matrix* m, int64_t rows) {
  add(r, name, m->data, rows * m->pitch * flce_size_of(m->dtype));
}

/* All of them are within dW, and no two share a byte. */
static void check_ranges(const execution* e, const ranges* r) {
  const flce_problem* p = e->problem;
  const char* dw = e->tensors->grad_weight;
  int64_t bytes =
      p->shape.vocab * flce_grad_weight_cols(p) * flce_size_of(e->plan->grad_weight_dtype);
  CHECK(bytes <= e->plan->buffers[FLCE_BUF_GRAD_WEIGHT].bytes, "dW has fewer bytes");
  for (const range* a = r->all; a < r->all + r->count; a++) {
    CHECK(a->start >= dw && a->start + a->bytes <= dw + bytes,
          "%s [%lld, %lld) of %lld bytes of dW: %lld rows, H %lld, V %lld, %s, %s", a->name,
          (long long)(a->start - dw), (long long)(a->start - dw + a->bytes), (long long)bytes,
          (long long)p->shape.rows, (long long)p->shape.hidden, (long long)p->shape.vocab,
          flce_dtype_name(e->plan->dtype), e->backend->name);
    CHECK((a->start - dw) % FLCE_DW_ALIGNMENT == 0 || a->start == dw, "%s is not aligned", a->name);
    for (const range* b = r->all; b < a; b++)
      CHECK(a->start + a->bytes <= b->start || b->start + b->bytes <= a->start,
            "%s and %s overlap: %lld rows, H %lld, V %lld, %s, %s", a->name, b->name,
            (long long)p->shape.rows, (long long)p->shape.hidden, (long long)p->shape.vocab,
            flce_dtype_name(e->plan->dtype), e->backend->name);
  }
}

/* ---- the two passes ---- */

static int64_t x_bytes(const execution* e, const chunk* c, int64_t pitch) {
  return c->rows * pitch * flce_size_of(e->plan->dtype);
}

/* z and out are one matrix; where there is no z, out is E. */
static void add_logits(ranges* r, const chunk* c) {
  if (c->z.data) {
    CHECK(!c->out.data || c->out.data == c->z.data, "E is not in place of z");
    add_matrix(r, "logits", &c->z, c->rows);
  } else {
    add_matrix(r, "E", &c->out, c->rows);
  }
}

static void check_dx_chunk(const execution* e, const flce_facts* facts, int64_t first) {
  const flce_plan* plan = e->plan;
  const chunk c = flce_chunk_in_dw(e, first);
  ranges r = {0};
  add_logits(&r, &c);
  CHECK(r.count == 1, "a chunk without logits");
  CHECK(has_dx_rows(e->problem, plan) == (c.dx_rows != NULL), "rows of dX");
  CHECK(copies_logits_input(plan) == (c.copied_x != NULL), "the copy of x");
  add(&r, "dx_rows", c.dx_rows, c.rows * plan->hidden * flce_size_of(plan->dx_gemm_dtype));
  add(&r, "copied_x", c.copied_x, x_bytes(e, &c, plan->input_pitch));
  if (plan->fuses_rows) add(&r, "fused_scratch", c.fused_scratch, c.rows * facts->fused_row_bytes);
  check_ranges(e, &r);
}

/* Column sums of a block for db: their scratch has its size from facts that know of no blocks. */
static void check_column_sum(const execution* e, const flce_facts* facts, int64_t rows,
                             int64_t classes) {
  if (!e->problem->wants.grad_bias || facts->multiprocessors == 0) return;
  flce_dtype dtype = e->plan->dtype;
  int64_t bytes =
      flce_row_splits(rows, classes, dtype) * classes * flce_size_of(flce_stat_dtype(dtype));
  int64_t has = e->plan->buffers[FLCE_BUF_COLUMN_SUM].bytes;
  CHECK(bytes <= has,
        "sums of %lld rows of %lld classes take %lld bytes, the scratch has %lld: %lld rows, H "
        "%lld, V %lld, %s, %s",
        (long long)rows, (long long)classes, (long long)bytes, (long long)has,
        (long long)e->problem->shape.rows, (long long)e->problem->shape.hidden,
        (long long)e->problem->shape.vocab, flce_dtype_name(dtype), e->backend->name);
}

/* The sum of dX, at the end of dW or in the tensor of dX, and the scaled x, which that may hold. */
static void add_rows(ranges* r, const execution* e, const chunk* block) {
  const flce_plan* plan = e->plan;
  bool sums = plan->blocks == FLCE_BLOCKS_IN_DW && e->problem->wants.grad_input;
  const void* dx = e->tensors->grad_input;
  int64_t sum = block->rows * plan->hidden * flce_size_of(plan->dx_gemm_dtype);
  int64_t scaled = x_bytes(e, block, plan->hidden);
  int64_t dx_bytes = plan->buffers[FLCE_BUF_GRAD_INPUT].bytes;
  CHECK(sums == (block->dx_rows != NULL), "the sum of dX");
  CHECK(copies_weight_input(e->problem, plan) == (block->scaled_x != NULL), "the scaled x");
  bool sum_in_dx = sums && block->dx_rows == dx, x_in_dx = sums && block->scaled_x == dx;
  CHECK(!(sum_in_dx && x_in_dx) && !((sum_in_dx || x_in_dx) && plan->gathers), "what is in dX");
  CHECK(!sum_in_dx || sum <= dx_bytes, "dX has no room for its sum");
  CHECK(!x_in_dx || scaled <= dx_bytes, "dX has no room for the scaled x");
  if (!sum_in_dx) add(r, "sum of dX", block->dx_rows, sum);
  if (!x_in_dx) add(r, "scaled_x", block->scaled_x, scaled);
}

static void check_whole_blocks(const execution* e, const flce_facts* facts) {
  const flce_plan* plan = e->plan;
  if (plan->whole_classes == 0) return;
  with_whole_blocks++;
  const chunk rows = flce_all_rows_in_dw(e);
  int64_t first = 0;
  while (first < plan->whole_classes) {
    const chunk block = flce_block_in_dw(e, &rows, first);
    CHECK(block.classes > 0 && block.first_class == first, "a block of no class");
    if (block.classes <= 0) return;
    ranges r = {0};
    add(&r, "dW", e->tensors->grad_weight, (first + block.classes) * flce_dw_class_bytes(plan));
    add_logits(&r, &block);
    CHECK(r.count == 2, "a block without logits");
    CHECK(copies_logits_input(plan) == (block.copied_x != NULL), "the copy of x");
    add_rows(&r, e, &block);
    add(&r, "copied_x", block.copied_x, x_bytes(e, &block, plan->input_pitch));
    if (plan->fuses_blocks)
      add(&r, "fused_scratch", block.fused_scratch,
          block.rows * fused_exp_row_bytes(facts, e->problem->shape.vocab, block.classes));
    check_ranges(e, &r);
    check_column_sum(e, facts, block.rows, block.classes);
    first += block.classes;
  }
  CHECK(first == plan->whole_classes, "%lld whole classes, planned %lld", (long long)first,
        (long long)plan->whole_classes);
}

/* The chunks of rows after these blocks: dW of the free classes does not reach the sums that are
 * not finished, and a class more would, or all are free. */
static void check_free_classes(const execution* e) {
  const flce_plan* plan = e->plan;
  const flce_problem* p = e->problem;
  const char* dx = e->tensors->grad_input;
  int64_t before = plan->whole_classes, row = flce_dw_class_bytes(plan);
  int64_t step = max64(plan->block_rows, plan->rows / 20 / plan->block_rows * plan->block_rows);
  for (int64_t first = 0; first < plan->rows; first += step) {
    const chunk c = flce_rows_of_blocks(e, first);
    int64_t free_classes = flce_free_classes(p, plan, first);
    CHECK(free_classes >= before && free_classes <= p->shape.vocab, "%lld classes are free",
          (long long)free_classes);
    before = free_classes;
    CHECK(p->wants.grad_input == (c.dx_rows != NULL), "the sum of a chunk");
    bool in_dx = flce_use_of_dx(p, plan, plan->gathers) == FLCE_DX_HAS_SUM;
    if (in_dx || !p->wants.grad_input) {
      CHECK(free_classes == p->shape.vocab, "no sum is in dW");
      CHECK(!in_dx || (const char*)c.dx_rows ==
                          dx + first * plan->hidden * flce_size_of(plan->grad_input_dtype),
            "the sum in dX");
      continue;
    }
    with_sum++;
    int64_t written = free_classes * row, left = (char*)c.dx_rows - (char*)e->tensors->grad_weight;
    CHECK(written <= left, "dW reaches the sum of row %lld", (long long)first);
    CHECK(free_classes == p->shape.vocab || written + FLCE_BLOCK_CLASS_STEP * row > left,
          "a block more of dW would be free");
  }
}

static void check_plan(const flce_backend* backend, const flce_problem* p) {
  flce_plan plan;
  flce_facts facts = {0};
  if (backend->facts(backend->self, p, &facts) != FLCE_OK) return;
  flce_status status = flce_plan_call(backend, p, &plan);
  CHECK(status == FLCE_OK, "%s", flce_last_error());
  if (status != FLCE_OK || !by_blocks(&plan)) return;
  /* Offsets alone are read of it: no byte of this dW is touched. */
  flce_tensors tensors = {.grad_weight = (void*)(intptr_t)(1 << 20),
                          .grad_input = (void*)(intptr_t)(INT64_C(1) << 59),
                          .workspace = (void*)(intptr_t)(INT64_C(1) << 60)};
  execution e = {.backend = backend,
                 .pass = p->save == FLCE_SAVE_GRADS ? FLCE_IN_FORWARD : FLCE_IN_BACKWARD,
                 .problem = p,
                 .plan = &plan,
                 .tensors = &tensors,
                 .stat = flce_stat_dtype(plan.dtype)};
  for (int64_t j = plan.whole_classes; j < p->shape.vocab; j += plan.block_classes)
    check_column_sum(&e, &facts, plan.block_rows, min64(p->shape.vocab - j, plan.block_classes));
  if (plan.blocks == FLCE_BLOCKS_IN_DW) {
    in_dw++;
    CHECK(plan.whole_classes > 0, "blocks in the memory of dW without one there");
    check_whole_blocks(&e, &facts);
    check_free_classes(&e);
  }
  if (plan.blocks != FLCE_BLOCKS_DX_FIRST) return;
  dx_first++;
  check_dx_chunk(&e, &facts, 0);
  check_dx_chunk(&e, &facts, (plan.chunks - 1) * plan.chunk_rows);
  check_whole_blocks(&e, &facts);
}

/* The scratch of fused_exp for a block holds what fused_logits takes for as many classes and no
 * output but statistics. */
static void test_scratch_of_blocks(void) {
  flce_gpu gpu;
  flce_backend b;
  CHECK_OK(flce_find_gpu("h100", &gpu));
  flce_gpu_backend(&gpu, &b);
  for (int draws = 0; draws < 2000; draws++) {
    flce_problem p = draw();
    p.dtypes.gemm = FLCE_BF16;
    p.shape.tokens = p.shape.rows = 4096;
    p.shape.hidden = 1024;
    p.has.probabilities = p.has.unaligned_operand = p.wants.entropy = p.wants.predictions = false;
    flce_facts all = {0}, own = {0};
    CHECK_OK(b.facts(b.self, &p, &all));
    int64_t vocab = p.shape.vocab, classes = one_of(1, vocab);
    p.shape.vocab = p.shape.weight_rows = classes;
    p.loss.label_smoothing = 0.0;
    CHECK_OK(b.facts(b.self, &p, &own));
    int64_t taken = fused_exp_row_bytes(&all, vocab, classes);
    CHECK(own.fused_row_bytes > 0 && own.fused_row_bytes <= taken,
          "%lld of %lld classes: %lld, %lld", (long long)classes, (long long)vocab,
          (long long)own.fused_row_bytes, (long long)taken);
  }
}

int main(void) {
  test_seed(31);
  int named;
  const flce_gpu* gpus = flce_gpus(&named);
  flce_gpu all[16];
  flce_cpu cpu = test_cpu(1);
  flce_backend backends[17];
  flce_cpu_backend(&cpu, &backends[0]);
  for (int k = 0; k < named; k++) {
    all[k] = gpus[k];
    flce_gpu_backend(&all[k], &backends[1 + k]);
  }
  test_scratch_of_blocks();
  for (int draws = 0; draws < DRAWS; draws++) {
    flce_problem p = draw();
    char blocks[64];
    snprintf(blocks, sizeof blocks, "%s%lldx%lld", one_in(2) ? "in_dw:" : "",
             (long long)size_of(16), (long long)round_up(size_of(14), 64));
    test_set_variable("FLCE_BLOCKS", one_in(2) ? NULL : blocks);
    check_plan(&backends[one_of(0, named)], &p);
  }
  test_set_variable("FLCE_BLOCKS", NULL);
  CHECK(dx_first >= LEAST_DX_FIRST, "%lld plans with dX first", (long long)dx_first);
  CHECK(in_dw >= LEAST_IN_DW && with_sum >= LEAST_IN_DW,
        "%lld plans with both gradients in the memory of dW, %lld chunks with a sum there",
        (long long)in_dw, (long long)with_sum);
  CHECK(with_whole_blocks >= LEAST_WHOLE, "%lld with blocks over all rows",
        (long long)with_whole_blocks);
  return test_verdict();
}
