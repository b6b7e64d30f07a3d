/* GPUs that have a name, and plans for GPUs that need not be there. */
#include "environment.h"
#include "gpu.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* capability, multiprocessors, memory in whole GiB as CUDA reports it, and from NVIDIA's data
 * sheets the dense bfloat16 multiply-adds a second (half of the FLOPs there) and the bandwidth. SXM
 * where there is one; a100: 80 GB. */
#define GIB ((int64_t)1 << 30)
static const flce_gpu gpus[] = {
    {"a100", 80, 108, 79 * GIB, 156e12, 2.039e12},
    {"b200", 100, 148, 178 * GIB, 1125e12, 8e12},
    {"h100", 90, 132, 79 * GIB, 494.5e12, 3.35e12},
    {"h200", 90, 132, 139 * GIB, 494.5e12, 4.8e12},
    {"rtx4090", 89, 128, 23 * GIB, 82.6e12, 1.008e12},
};
enum { GPUS = sizeof gpus / sizeof *gpus };

const flce_gpu* flce_gpus(int* count) {
  *count = GPUS;
  return gpus;
}

/* Reads "capability,multiprocessors,memory". */
static bool read_numbers(const char* text, flce_gpu* gpu) {
  const int64_t most = (int64_t)1 << 50; /* of any of them; plans multiply them by little */
  int end = -1;
  *gpu = (flce_gpu){.name = "numbers"};
  int count = sscanf(text, "%" SCNd64 ",%" SCNd64 ",%" SCNd64 "%n", &gpu->capability,
                     &gpu->multiprocessors, &gpu->memory, &end);
  return count == 3 && text[end] == 0 && gpu->capability >= 80 && gpu->capability < 1000 &&
         gpu->multiprocessors >= 1 && gpu->multiprocessors <= 1 << 16 && gpu->memory >= 8 &&
         gpu->memory <= most;
}

flce_status flce_find_gpu(const char* text, flce_gpu* gpu) {
  char names[128] = "";
  size_t used = 0;
  for (int i = 0; i < GPUS; i++) {
    used += (size_t)snprintf(names + used, sizeof names - used, "%s, ", gpus[i].name);
    if (strcmp(text, gpus[i].name) != 0) continue;
    *gpu = gpus[i];
    return FLCE_OK;
  }
  if (read_numbers(text, gpu)) return FLCE_OK;
  return flce_fail(FLCE_INVALID_ARGUMENT,
                   "device: expected a CPU or CUDA device that is present, %sor numbers "
                   "(compute capability from 80 on, multiprocessors, bytes of memory), got %s",
                   names, text);
}

static flce_status facts_of_gpu(void* self, const flce_problem* problem, flce_facts* facts) {
  const flce_gpu* gpu = self;
  return flce_gpu_facts(gpu, flce_architecture_of(gpu->capability),
                        flce_variable_text(FLCE_VARIABLE_KERNEL), problem, facts);
}

void flce_gpu_backend(flce_gpu* gpu, flce_backend* backend) {
  *backend = (flce_backend){
      .name = gpu->name, .self = gpu, .last_error = flce_last_error, .facts = facts_of_gpu};
}
