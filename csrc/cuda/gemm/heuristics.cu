/* The choice of a GEMM's algorithm among the candidates of cuBLASLt's heuristic. In order: the
 * rules below, the heuristic's first candidate. Nothing is timed in a call, and the choice is the
 * same in every process. */
#include "cuda/gemm/gemm.cuh"

enum { kCandidates = 16 };

/* What rules and exclusions read of an algorithm's configuration. */
typedef struct gemm_algorithm {
  int64_t tile, stages, cluster, splits, reduction;
} gemm_algorithm;

typedef struct gemm_candidate {
  cublasLtMatmulAlgo_t algo; /* as cuBLASLt takes it */
  gemm_algorithm algorithm;  /* of it */
} gemm_candidate;

/* The algorithms that may run a GEMM, in the order of cuBLASLt's heuristic. */
typedef struct gemm_candidates {
  int count;
  gemm_candidate list[kCandidates];
} gemm_candidates;

/* ---- rules ---- */

typedef enum gemm_kind {
  kAnyKind,
  kLogits,          /* z = x W^T */
  kGradInput,       /* dX */
  kGradWeight,      /* dW with beta 0 */
  kGradWeightAdded, /* dW with beta 1 */
} gemm_kind;

/* If all conditions hold, the first candidate with the given tile, stages and cluster is taken. sm
 * and the dtypes always have to match; in all other fields 0 means any. */
typedef struct gemm_rule {
  int sm; /* 90 for 9.0 */
  gemm_kind kind;
  int dtype, c_dtype;                                                       /* an flce_dtype */
  int64_t min_rows, max_rows, min_hidden, max_hidden, min_vocab, max_vocab; /* inclusive */
  int64_t tile, stages, cluster;
} gemm_rule;

/* The rules. The first one applies whose conditions hold and whose configuration is among the
 * candidates. The last line ends the table.
 *
 * Each has the measurement that justifies it, on an H200 with cuBLASLt 13: times relative to the
 * best candidate's, mean and worst over GEMMs with the rule, then mean and worst with the
 * heuristic's first candidate. Unless said otherwise these are 7 to 32 GEMMs of the benchmark's
 * shapes and chunks, 768 <= H <= 4096 (benchmarks/results/2026-11-21-h200-gemms.json). */
static const gemm_rule kRules[] = {
    /* sm, kind, dtype, c_dtype, rows, hidden, vocab (from, to), tile, stages, cluster */
    /* Logits: 1.00, 1.02 and 1.11, 1.17. */
    {90, kLogits, FLCE_BF16, FLCE_F32, 1024, 0, 768, 4096, 32000, 0, CUBLASLT_MATMUL_TILE_176x128,
     0, CUBLASLT_CLUSTER_SHAPE_1x2x1},
    /* dW, with seven more shapes, 2560 <= H <= 8192 (2026-11-22-h200-gemms.json): 1.00, 1.02 and
     * 1.08, 1.23. Of 64, 128 and 256 rows at H = 4096 (2026-11-22-h200-short-gemms.json): 1.00 and
     * 1.15, 1.27. */
    {90, kGradWeight, FLCE_BF16, FLCE_BF16, 64, 0, 768, 8192, 32000, 0,
     CUBLASLT_MATMUL_TILE_128x160, 0, 0},
    /* dW added to C, the same shapes: 1.00, 1.03 and 1.09, 1.27. Of 512 and 768 rows at
     * 1536 <= H <= 4096 (2026-11-22-h200-short-gemms.json): 1.01, 1.05 and 1.24, 1.31. */
    {90, kGradWeightAdded, FLCE_BF16, FLCE_BF16, 512, 0, 768, 8192, 32000, 0,
     CUBLASLT_MATMUL_TILE_128x160, 0, 0},
    /* dX at H = 4096 and 2048: 1.01, 1.04 and 1.02, 1.07. */
    {90, kGradInput, FLCE_BF16, FLCE_F32, 1024, 0, 4096, 4096, 32000, 0,
     CUBLASLT_MATMUL_TILE_128x256, 0, CUBLASLT_CLUSTER_SHAPE_2x1x1},
    {90, kGradInput, FLCE_BF16, FLCE_F32, 1024, 0, 2048, 2048, 32000, 0,
     CUBLASLT_MATMUL_TILE_128x256, 0, CUBLASLT_CLUSTER_SHAPE_2x1x1},
    /* dX at H = 1024: 1.00 and 1.04, without the time of split-K's reduction kernel. */
    {90, kGradInput, FLCE_BF16, FLCE_F32, 1024, 0, 1024, 1024, 32000, 0,
     CUBLASLT_MATMUL_TILE_128x128, 0, CUBLASLT_CLUSTER_SHAPE_2x1x1},
    {0, kAnyKind, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
};

static gemm_kind kind_of(const gemm_key* key) {
  if (key->transpose_a) return key->accumulate ? kGradWeightAdded : kGradWeight;
  return key->transpose_b ? kLogits : kGradInput;
}

static bool within(int64_t value, int64_t from, int64_t to) {
  return value >= from && (to == 0 || value <= to);
}

/* A rule for bfloat16 also applies to float16, which has the same kernels. */
static bool is_like(int64_t rule_dtype, int64_t dtype) {
  return rule_dtype == dtype || (rule_dtype == FLCE_BF16 && dtype == FLCE_F16);
}

static bool holds(const gemm_rule* rule, int sm, const gemm_key* key) {
  const gemm_kind kind = kind_of(key);
  if (rule->sm != sm || (rule->kind != kAnyKind && rule->kind != kind)) return false;
  if (!is_like(rule->dtype, key->dtype) || !is_like(rule->c_dtype, key->c_dtype)) return false;
  /* Logits: m, n, k = rows, vocab, hidden. dX: rows, hidden, vocab. dW: vocab, hidden, rows. */
  const int64_t rows = key->transpose_a ? key->k : key->m;
  const int64_t hidden = kind == kLogits ? key->k : key->n;
  const int64_t vocab = key->transpose_a ? key->m : kind == kLogits ? key->n : key->k;
  return within(rows, rule->min_rows, rule->max_rows) &&
         within(hidden, rule->min_hidden, rule->max_hidden) &&
         within(vocab, rule->min_vocab, rule->max_vocab);
}

static bool is_configured(const gemm_algorithm* a, const gemm_rule* rule) {
  return (rule->tile == 0 || rule->tile == a->tile) &&
         (rule->stages == 0 || rule->stages == a->stages) &&
         (rule->cluster == 0 || rule->cluster == a->cluster);
}

/* The index of the candidate that is taken. */
static int choice_of(const gemm_device* device, const gemm_key* key, const gemm_candidates* found) {
  for (const gemm_rule* rule = kRules; rule->sm != 0; rule++) {
    if (!holds(rule, device->sm, key)) continue;
    for (int i = 0; i < found->count; i++) {
      if (is_configured(&found->list[i].algorithm, rule)) return i;
    }
  }
  return 0;
}

/* ---- candidates ---- */

/* How split-K may add its partial sums. In 16 bits it would round once for each split. */
static uint32_t exact_schemes(const gemm_key* key) {
  const bool wide = key->c_dtype == FLCE_F32 || key->c_dtype == FLCE_F64;
  return CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | (wide ? CUBLASLT_REDUCTION_SCHEME_INPLACE : 0);
}

static cublasStatus_t set_preferences(const lt_functions* lt, const gemm_key* key, uint32_t schemes,
                                      cublasLtMatmulPreference_t preference) {
  const uint64_t workspace = (uint64_t)key->workspace_bytes;
  const uint32_t align_a = (uint32_t)key->align_a, align_b = (uint32_t)key->align_b;
  const uint32_t align_c = (uint32_t)key->align_c, align_d = (uint32_t)key->align_d;
  const struct {
    cublasLtMatmulPreferenceAttributes_t attribute;
    const void* value;
    size_t size;
  } settings[] = {
      {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace)},
      {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof(schemes)},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &align_b, sizeof(align_b)},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &align_a, sizeof(align_a)},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &align_c, sizeof(align_c)},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &align_d, sizeof(align_d)},
  };
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
  for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++) {
    if (status != CUBLAS_STATUS_SUCCESS) break;
    status =
        lt->preference_set(preference, settings[i].attribute, settings[i].value, settings[i].size);
  }
  return status;
}

/* An attribute that an older library does not know is 0. */
static gemm_algorithm describe(const lt_functions* lt, const cublasLtMatmulAlgo_t* algo) {
  gemm_algorithm a = {};
  const struct {
    cublasLtMatmulAlgoConfigAttributes_t attribute;
    size_t size;
    int64_t* value;
  } attributes[] = {
      {CUBLASLT_ALGO_CONFIG_TILE_ID, sizeof(uint32_t), &a.tile},
      {CUBLASLT_ALGO_CONFIG_STAGES_ID, sizeof(uint32_t), &a.stages},
      {CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, sizeof(uint16_t), &a.cluster},
      {CUBLASLT_ALGO_CONFIG_SPLITK_NUM, sizeof(int32_t), &a.splits},
      {CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, sizeof(uint32_t), &a.reduction},
  };
  for (size_t i = 0; i < sizeof(attributes) / sizeof(attributes[0]); i++) {
    uint32_t value = 0; /* a 16-bit attribute fills the low bytes */
    size_t written = 0;
    if (lt->algo_get(algo, attributes[i].attribute, &value, attributes[i].size, &written) ==
        CUBLAS_STATUS_SUCCESS) {
      *attributes[i].value = (int32_t)value;
    }
  }
  return a;
}

/* True if split-K may leave out the last of the k products. A tile has `step` of them.
 * cuBLASLt 12.8 to 13.2 leaves out the rest, k % step, if the splits divide the number of whole
 * tiles, k / step, and are more than the rest. Seen with a step of 64, the others are excluded to
 * be safe (github.com/facebookexperimental/triton/pull/2767; benchmarks/NOTES.md, 2026-11-23). */
static bool loses_products(const gemm_key* key, const gemm_algorithm* a) {
  for (int64_t step = 16; step <= 128 && a->splits > 1; step *= 2) {
    const int64_t rest = key->k % step;
    if (rest != 0 && rest < a->splits && key->k / step % a->splits == 0) return true;
  }
  return false;
}

/* True if split-K would round partial sums to 16 bits. set_preferences excludes this already; the
 * check holds also if a library version interprets the preferences differently. */
static bool rounds_partial_sums(const gemm_key* key, const gemm_algorithm* a) {
  const bool narrow = key->c_dtype == FLCE_BF16 || key->c_dtype == FLCE_F16;
  const int64_t in_c_dtype =
      CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE | CUBLASLT_REDUCTION_SCHEME_INPLACE;
  return narrow && a->splits != 1 && (a->reduction & in_c_dtype) != 0;
}

static void add_candidate(const gemm_device* device, const gemm_key* key,
                          const cublasLtMatmulHeuristicResult_t* result, gemm_candidates* found) {
  if (result->state != CUBLAS_STATUS_SUCCESS) return;
  if ((int64_t)result->workspaceSize > key->workspace_bytes) return;
  const gemm_candidate c = {result->algo, describe(&device->lt, &result->algo)};
  if (rounds_partial_sums(key, &c.algorithm) || loses_products(key, &c.algorithm)) return;
  found->list[found->count++] = c;
}

static cublasStatus_t query_candidates(const gemm_device* device, const gemm_key* key,
                                       const gemm_descriptors* d, uint32_t schemes,
                                       gemm_candidates* found) {
  const lt_functions* lt = &device->lt;
  cublasLtMatmulPreference_t preference = NULL;
  cublasLtMatmulHeuristicResult_t results[kCandidates];
  int given = 0;
  found->count = 0;
  cublasStatus_t status = lt->preference_create(&preference);
  if (status == CUBLAS_STATUS_SUCCESS) status = set_preferences(lt, key, schemes, preference);
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = lt->heuristic(device->handle, d->product, d->first, d->second, d->result, d->result,
                           preference, kCandidates, results, &given);
  }
  if (preference) lt->preference_destroy(preference);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  for (int i = 0; i < given; i++) add_candidate(device, key, &results[i], found);
  return CUBLAS_STATUS_SUCCESS;
}

/* At least one candidate, else CUBLAS_STATUS_NOT_SUPPORTED. */
static cublasStatus_t list_candidates(const gemm_device* device, const gemm_key* key,
                                      const gemm_descriptors* d, gemm_candidates* found) {
  cublasStatus_t status = query_candidates(device, key, d, exact_schemes(key), found);
  if (status == CUBLAS_STATUS_SUCCESS &&
      found->count == 0) { /* none is exact and fits the workspace */
    status = query_candidates(device, key, d, CUBLASLT_REDUCTION_SCHEME_NONE, found);
  }
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  return found->count > 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

/* ---- the choice ---- */

cublasStatus_t choose_algorithm(const gemm_device* device, const gemm_key* key,
                                const gemm_descriptors* d, cublasLtMatmulAlgo_t* algo) {
  gemm_candidates found;
  const cublasStatus_t status = list_candidates(device, key, d, &found);
  if (status == CUBLAS_STATUS_SUCCESS) *algo = found.list[choice_of(device, key, &found)].algo;
  return status;
}
