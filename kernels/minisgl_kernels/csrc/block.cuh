// What the threads of a block find out together about a row that they share.

#pragma once

#include "common.cuh"

namespace minisgl {

constexpr float kLargestE4m3 = 448.0f, kSmallestMax = 1e-12f;  // as in fp8.py

// Sum over the block; every thread gets it.
__device__ inline float sum_over_block(float x) {
  __shared__ float of_warp[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  x = sum_over_lanes<32>(x);
  if (lane == 0) of_warp[warp] = x;
  __syncthreads();
  return sum_over_lanes<32>(lane < blockDim.x / 32 ? of_warp[lane] : 0.0f);
}

// The largest of the block's numbers, none of them negative; every thread gets it.
__device__ inline float max_over_block(float x) {
  __shared__ float of_warp[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  if (lane == 0) of_warp[warp] = x;
  __syncthreads();
  x = lane < blockDim.x / 32 ? of_warp[lane] : 0.0f;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// A row in FP8 by one scale. Each thread holds some vectors of it, and gives the column of each; the row ends at `size`.
template <typename T, int kVectors>
__device__ void store_row_e4m3(const Vector<T> (&row)[kVectors], const int (&columns)[kVectors], int size,
                               __nv_fp8_e4m3* to, float* to_scale) {
  float largest = kSmallestMax;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (columns[v] >= size) continue;
    float x[kVector];
    row[v].widen_to(x);
#pragma unroll
    for (int i = 0; i < kVector; ++i) largest = fmaxf(largest, fabsf(x[i]));
  }
  largest = max_over_block(largest);
  if (threadIdx.x == 0) *to_scale = largest / kLargestE4m3;
  const float factor = kLargestE4m3 / largest;
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    if (columns[v] < size) store_e4m3(row[v], factor, to + columns[v]);
}

}  // namespace minisgl
