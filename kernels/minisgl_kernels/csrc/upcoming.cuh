// The beginning of the weight that is multiplied next, brought into the L2 cache while a small kernel runs: around it,
// and in its launch gaps, the memory would idle. `upcoming.py` says which bytes.

#pragma once

#include "common.cuh"

namespace minisgl {

// The first `row_bytes` bytes of each of `num_rows` rows; no rows: nothing is known of what comes. The address and the
// numbers of bytes are multiples of 16.
struct Upcoming {
  const char* begin;
  int64_t row_stride_bytes;
  int num_rows, row_bytes;

  Upcoming(int64_t address, int64_t num_rows, int64_t row_stride_bytes, int64_t row_bytes)
      : begin(reinterpret_cast<const char*>(address)),
        row_stride_bytes(row_stride_bytes),
        num_rows(num_rows),
        row_bytes(row_bytes) {}
};

#ifndef MINISGL_EMULATE
// Nobody waits for them, and nothing tells when they have come.
__device__ inline void prefetch_into_l2(const char* begin, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const size_t address = __cvta_generic_to_global(begin);
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
#endif
}
#endif

// All threads of a grid call it, before they wait for their inputs: weights don't change. Neighbouring rows go to
// different blocks, so that all multiprocessors ask for as much.
__device__ inline void prefetch(const Upcoming& upcoming) {
  const int64_t num_blocks = gridDim.x, num_threads = num_blocks * blockDim.x;
  for (int64_t row = threadIdx.x * num_blocks + blockIdx.x; row < upcoming.num_rows; row += num_threads)
    prefetch_into_l2(upcoming.begin + row * upcoming.row_stride_bytes, upcoming.row_bytes);
}

// How many blocks to launch where the work needs `blocks`. A multiprocessor takes long to ask for all of the bytes, so
// each gets a block; those without work end behind `prefetch`.
inline int blocks_to_prefetch(int blocks, const Upcoming& upcoming) {
  constexpr int kMultiprocessors = 132;  // of an H100 or H200
  return upcoming.num_rows > 0 && blocks < kMultiprocessors ? kMultiprocessors : blocks;
}

}  // namespace minisgl
