/* PTX wrappers for sm_90a, one instruction a function: TMA loads and stores, mbarriers with
 * expect-tx, named barriers, WGMMA, setmaxnreg, ldmatrix and stmatrix (PTX ISA 8). No tile shapes
 * and no policy here; pipeline.cuh builds on it. Pointers to shared memory are 32-bit shared
 * addresses. */
#ifndef FLCE_CUDA_SM90_PTX_CUH
#define FLCE_CUDA_SM90_PTX_CUH

#include <cuda.h>
#include <stdint.h>

namespace sm90 {

/* ---- blocks and clusters ---- */

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

/* ---- shared memory by address ---- */

__device__ __forceinline__ void store_shared(uint32_t shared, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared), "f"(value) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t shared, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(first), "f"(second)
               : "memory");
}

__device__ __forceinline__ void load_shared(uint32_t shared, float (&v)[2]) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(shared));
}

__device__ __forceinline__ void load_shared(uint32_t shared, uint32_t (&v)[4]) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(shared)
               : "memory");
}

/* ---- mbarriers, by shared address ---- */

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

/* Makes initialised mbarriers visible to the cluster and to TMA. */
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrives and adds `bytes` to the transaction count that TMA loads have to complete. */
__device__ __forceinline__ void barrier_arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/* Arrives at the same barrier in block `rank` of the cluster. Without .release.cluster, which is
 * compiled to a device-wide fence before every arrival. The arrival needs no release: it only says
 * that shared memory has been read, by WGMMAs that have completed or into registers that have been
 * used. */
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

/* Spins until the phase of that parity has completed. On a fresh barrier parity 1 returns at
 * once. */
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

/* ---- named barriers ---- */

template <int ID, int THREADS>
__device__ __forceinline__ void named_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

template <int ID, int THREADS>
__device__ __forceinline__ void named_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

/* ---- TMA: a 2D box of a matrix, by its first column and row ---- */

/* Load into this block's shared memory; `barrier` counts the bytes. */
__device__ __forceinline__ void load_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier,
                                         int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}

/* The same with an L2 cache policy. */
__device__ __forceinline__ void load_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier,
                                         int column, int row, uint64_t cache_policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(cache_policy)
      : "memory");
}

/* Load into the same shared address of every block in the mask `blocks`. In each of them the
 * mbarrier at the same address counts the bytes. */
__device__ __forceinline__ void load_box_multicast(uint32_t shared, const CUtensorMap* map,
                                                   uint32_t barrier, int column, int row,
                                                   uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(blocks)
      : "memory");
}

/* L2 cache policies as createpolicy encodes them: evict_first, and the default. */
constexpr uint64_t kEvictFirst = 0x12F0000000000000u, kNoPolicy = 0x1000000000000000u;

/* Store from shared memory, committed as a bulk group of its own. */
__device__ __forceinline__ void store_box(const CUtensorMap* map, uint32_t shared, int column,
                                          int row, uint64_t cache_policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint"
      " [%0, {%2, %3}], [%1], %4;" ::"l"(map),
      "r"(shared), "r"(column), "r"(row), "l"(cache_policy)
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until the TMA stores of this thread have read their shared memory, which may then be
 * overwritten. Global memory may not be written yet. */
__device__ __forceinline__ void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/* Makes this thread's writes to shared memory visible to TMA (the async proxy). */
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- WGMMA ---- */

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Low word of the WGMMA descriptor of a K-major operand with 128-byte swizzle: a line of 128 bytes
 * holds 64 k elements of one row, and the next eight rows begin 1024 bytes further on. Add 2 to
 * advance k by 16 elements (32 bytes, in units of 16). */
__device__ __forceinline__ uint32_t operand_low(uint32_t shared) {
  return ((shared & 0x3ffff) >> 4) | (1u << 16);
}
/* High word of both kinds: 128-byte swizzle, stride of 1024 bytes. */
constexpr uint32_t kOperandHigh = 0x40000040;

/* Low word for an MN-major operand with 128-byte swizzle: a line of 128 bytes holds 64 elements
 * along m or n of one k. Eight lines (8 of k) make 1024 bytes, and the next 64 elements along m or
 * n begin `step` bytes further on. Add 128 to advance k by 16 (16 lines, in units of 16 bytes). */
__device__ __forceinline__ uint32_t mn_major_operand_low(uint32_t shared, uint32_t step) {
  return ((shared & 0x3ffff) >> 4) | (step >> 4 << 16);
}

/* wgmma.mma_async m64n192k16 with float32 accumulators, for operands of TYPE, "bf16" or "f16". */
#define FLCE_WGMMA_64X192X16(TYPE)                                                                 \
  asm volatile(                                                                                    \
      "{\n.reg .pred accumulates;\n.reg .b64 a, b;\nsetp.ne.b32 accumulates, %98, 0;\n"            \
      "mov.b64 a, {%96, %99};\nmov.b64 b, {%97, %99};\n"                                           \
      "wgmma.mma_async.sync.aligned.m64n192k16.f32." TYPE "." TYPE                                 \
      " {"                                                                                         \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "                                         \
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "                               \
      "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "                               \
      "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                               \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "                               \
      "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, "                               \
      "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "                               \
      "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95},"                               \
      " a, b, accumulates, 1, 1, %100, %100;\n}"                                                   \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), \
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), \
        "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), \
        "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), \
        "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), \
        "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), \
        "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])                            \
      : "r"(a), "r"(b), "r"(accumulates), "r"(kOperandHigh), "n"((int)MN_MAJOR))

/* d = a b, or d += a b if `accumulates`: m64n192k16, with a and b given by descriptors. Elements
 * are bfloat16, or float16 where HALF. Both operands are K-major (64 rows of a, 192 rows of b, 16
 * columns of each), or both MN-major (16 rows; 64 columns of a, 192 of b). */
template <bool MN_MAJOR, bool HALF = false>
__device__ __forceinline__ void wgmma_64x192x16(float (&d)[96], uint32_t a, uint32_t b,
                                                int accumulates) {
  if constexpr (HALF) {
    FLCE_WGMMA_64X192X16("f16");
  } else {
    FLCE_WGMMA_64X192X16("bf16");
  }
}
#undef FLCE_WGMMA_64X192X16

/* ---- registers, stmatrix and ldmatrix ---- */

/* setmaxnreg: COUNT registers a thread from here on. Called by all warps of a warpgroup. */
template <int COUNT>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* stmatrix: four 8x8 matrices of 16-bit elements. Each lane gives the shared address of one row. */
__device__ __forceinline__ void store_matrices(uint32_t shared, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

/* The same, transposed: each lane gives the address of one column of its matrix. */
__device__ __forceinline__ void store_matrices_trans(uint32_t shared, const uint32_t (&m)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
      "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
      : "memory");
}

/* ldmatrix: the inverse of store_matrices_trans. */
__device__ __forceinline__ void load_matrices_trans(uint32_t shared, uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared)
               : "memory");
}

}  // namespace sm90

#endif
