/* Row passes by clusters of blocks that keep a row in shared memory: each logit and each target
 * probability is read once, from the sums to the gradient. */
#ifndef FLCE_CUDA_CLUSTER_ROWS_CUH
#define FLCE_CUDA_CLUSTER_ROWS_CUH

#include "common.cuh"

/* What a pass makes of its rows. */
enum ClusterPass { kSumsOnly, kGradientsOnly, kSumsAndGradients };

/* Where the coefficients of kSumsAndGradients go, and their factor. */
typedef struct cluster_coef {
  const void* factor; /* [1], or NULL */
  void* coef;         /* [FLCE_COEF_ROWS][stat_pitch] */
} cluster_coef;

/* Sets `done` and queues the pass where a kernel, the device and the row's size allow it; else
 * nothing is queued. kGradientsOnly is grad_rows with r->coef. */
flce_status cuda_cluster_rows(void* self, const flce_rows* r, const cluster_coef* made,
                              ClusterPass pass, bool* done);

#endif
