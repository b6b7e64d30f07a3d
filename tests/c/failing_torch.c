/* Preloaded (LD_PRELOAD) into a process of tests/core/test_faults.py. The allocations of torch's
 * CPU allocator and the GEMMs that the binding asks torch for are counted, the one numbered
 * `fails_at` fails, and what has not been freed is known. Only the allocator's library is watched:
 * others, such as oneDNN, which aborts where it gets no memory, allocate by the same function. */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 4096 };

static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER;
static volatile int64_t g_alive; /* addresses in g_addresses; read without the lock by free */
static void* g_addresses[MOST];
static int64_t g_count, g_fails_at;
static bool g_counts;

extern void __libc_free(void*);
extern void* __libc_memalign(size_t alignment, size_t size);

/* From now on allocations are counted, from 0; number `fails_at` fails, -1 for none. */
void memory_watch(int64_t fails_at) {
  pthread_mutex_lock(&g_lock);
  g_count = 0, g_fails_at = fails_at, g_counts = true;
  pthread_mutex_unlock(&g_lock);
}

/* The number of allocations since memory_watch, which ends here. */
int64_t memory_count(void) {
  pthread_mutex_lock(&g_lock);
  g_counts = false;
  int64_t count = g_count;
  pthread_mutex_unlock(&g_lock);
  return count;
}

/* Allocations made while counting that have not been freed. */
int64_t memory_alive(void) {
  return g_alive;
}

static bool is_torchs(const void* caller) {
  Dl_info info;
  return dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, "libc10.so");
}

int posix_memalign(void** memory, size_t alignment, size_t size) {
  bool watched = g_counts && is_torchs(__builtin_return_address(0)), fails = false;
  if (watched) {
    pthread_mutex_lock(&g_lock);
    fails = g_count++ == g_fails_at;
    pthread_mutex_unlock(&g_lock);
  }
  if (fails) return ENOMEM;
  *memory = __libc_memalign(alignment, size);
  if (!*memory) return ENOMEM;
  if (!watched) return 0;
  pthread_mutex_lock(&g_lock);
  if (g_alive < MOST) g_addresses[g_alive++] = *memory;
  pthread_mutex_unlock(&g_lock);
  return 0;
}

void free(void* memory) {
  if (g_alive > 0 && memory) {
    pthread_mutex_lock(&g_lock);
    for (int64_t k = 0; k < g_alive; k++)
      if (g_addresses[k] == memory) {
        g_addresses[k] = g_addresses[--g_alive];
        break;
      }
    pthread_mutex_unlock(&g_lock);
  }
  __libc_free(memory);
}

/* ---- GEMMs ---- */

static int64_t g_gemms, g_gemm_fails_at = -1;

/* As memory_watch and memory_count. */
void gemm_watch(int64_t fails_at) {
  g_gemms = 0, g_gemm_fails_at = fails_at;
}

int64_t gemm_count(void) {
  return g_gemms;
}

/* torch's function of this name: its library is loaded by Python, outside of the global scope. */
static void* of_torch(const char* name) {
  void* library = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  void* function = library ? dlsym(library, name) : NULL;
  if (!function) abort();
  return function;
}

int32_t aoti_torch_cpu_mm_out(void* out, void* a, void* b) {
  int32_t (*function)(void*, void*, void*) = of_torch("aoti_torch_cpu_mm_out");
  return g_gemms++ == g_gemm_fails_at ? 1 : function(out, a, b);
}

int32_t aoti_torch_cpu_addmm_out(void* out, void* c, void* a, void* b, double beta, double alpha) {
  int32_t (*function)(void*, void*, void*, void*, double, double) =
      of_torch("aoti_torch_cpu_addmm_out");
  return g_gemms++ == g_gemm_fails_at ? 1 : function(out, c, a, b, beta, alpha);
}
