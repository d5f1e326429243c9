// Residual addition and RMS norm, one block per row, into the type of the input or into FP8.

#pragma once

#include "block.cuh"

namespace minisgl {

// Each thread holds kVectors vectors of its row, a block's width apart. C is what the normalised sum is in: T, or FP8.
template <typename T, typename C, int kVectors, bool kHasResidual>
__global__ void add_rms_norm_kernel(const T* x, T* residual, const T* weight, C* normed, float* scales,
                                    int64_t x_stride, int size, float eps) {
  const int64_t row = blockIdx.x;
  int columns[kVectors];
  Vector<T> weights[kVectors], summed[kVectors], added[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    columns[v] = (v * blockDim.x + threadIdx.x) * kVector;
    if (columns[v] < size) weights[v] = Vector<T>::load(weight + columns[v]);
  }
  wait_for_inputs();
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (columns[v] >= size) continue;
    summed[v] = Vector<T>::load(x + row * x_stride + columns[v]);
    if (kHasResidual) added[v] = Vector<T>::load(residual + row * size + columns[v]);
  }
  float squares = 0.0f, values[kVectors][kVector];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (columns[v] >= size) continue;
    summed[v].widen_to(values[v]);
    if (kHasResidual) {
      float more[kVector];
      added[v].widen_to(more);
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[v][i] += more[i];
      summed[v] = Vector<T>::round(values[v]);
      summed[v].store(residual + row * size + columns[v]);
      summed[v].widen_to(values[v]);
    }
    squares += sum_of_squares(values[v]);
  }
  const float factor = rsqrtf(sum_over_block(squares) / size + eps);
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    if (columns[v] < size) summed[v] = scale<T>(values[v], factor, weights[v]);
  if constexpr (std::is_same_v<T, C>) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (columns[v] < size) summed[v].store(normed + row * size + columns[v]);
  } else {
    store_row_e4m3(summed, columns, size, normed + row * size, scales + row);
  }
}

#ifndef MINISGL_EMULATE
template <typename T, typename C>
void run_add_rms_norm(TensorView x, TensorView residual, TensorView weight, TensorView normed, float* scales,
                      double eps, bool has_residual) {
  const int num_tokens = x.size(0), size = x.size(1);
  const int num_vectors = size / kVector;
  // At most two vectors a thread up to 8,192 elements: few warps have to meet, and all loads are in flight at once.
  const int per_thread = num_vectors <= 256 ? 1 : num_vectors <= 1024 ? 2 : 4;
  const int threads = ((num_vectors + per_thread - 1) / per_thread + 31) / 32 * 32;
  const auto run = [&](auto kernel) {
    launch(kernel, num_tokens, threads, x.device(), data<T>(x), data<T>(residual), data<T>(weight), data<C>(normed),
           scales, x.stride(0), size, eps);
  };
  if (per_thread == 1)
    run(has_residual ? add_rms_norm_kernel<T, C, 1, true> : add_rms_norm_kernel<T, C, 1, false>);
  else if (per_thread == 2)
    run(has_residual ? add_rms_norm_kernel<T, C, 2, true> : add_rms_norm_kernel<T, C, 2, false>);
  else
    run(has_residual ? add_rms_norm_kernel<T, C, 4, true> : add_rms_norm_kernel<T, C, 4, false>);
}
#endif

}  // namespace minisgl
