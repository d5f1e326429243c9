// What a warp does as one on Ampere and later: asynchronous copies into shared memory, matrices of 8 x 8 elements from
// there, and their products on the tensor cores. The layouts of fragments are those of the PTX manual, "Matrix Fragments
// for mma.m16n8k16".

#pragma once

#include "common.cuh"

namespace minisgl {

// 8 x 8 matrices of 16-bit elements: thread l holds elements 2 * (l % 4) and the next of row l / 4, as one register.
using Pair = uint32_t;

#ifndef MINISGL_EMULATE
__device__ inline void* dynamic_shared() {
  extern __shared__ uint4 bytes[];
  return bytes;
}

// 16 bytes from global to shared memory; done when `wait_for_copies` says so.
__device__ inline void copy_async(void* shared, const void* global) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}

// Makes a group of this thread's copies since the last call.
__device__ inline void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most the last `kGroups` groups are still under way.
template <int kGroups>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Returns what was there before. What this warp wrote before its last meeting comes before it, for whoever sees it; what
// others wrote before theirs can be read behind it.
__device__ inline int add_in_order(int32_t* to, int x) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(x) : "memory");
  return before;
}

// Four matrices; threads 8 * i to 8 * i + 7 name the rows of matrix i.
__device__ inline void load_matrices(Pair (&out)[4], const void* row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

// The same, each matrix transposed.
__device__ inline void load_matrices_transposed(Pair (&out)[4], const void* row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

__device__ inline Pair transpose(Pair matrix) {
  Pair out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(matrix));
  return out;
}

// Four e4m3 numbers as fp16, the first two in `low`.
__device__ inline void widen_e4m3(uint32_t numbers, Pair& low, Pair& high) {
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(low), "=r"(high)
      : "r"(numbers));
}

// sums (16 x 8, float) += a (16 x 16) * b (16 x 8).
__device__ inline void multiply(float (&sums)[4], const Pair (&a)[4], Pair b_low, Pair b_high, __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}
__device__ inline void multiply(float (&sums)[4], const Pair (&a)[4], Pair b_low, Pair b_high, __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}
#endif

template <typename T>
__device__ Pair pack(float low, float high) {
  typename Vector<T>::Pair pair;
  narrow(make_float2(low, high), pair);
  return *reinterpret_cast<const Pair*>(&pair);
}

// Over the threads that hold the same columns of a 16 x 8 result; each of them gets it.
__device__ inline float max_over_rows(float x) {
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}
__device__ inline float sum_over_rows(float x) {
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

}  // namespace minisgl
