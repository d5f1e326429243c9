// silu(gate) * up or gelu(gate) * up in FP8, one block per row, which has one scale. Called through `activate_fp8.py`,
// which describes the arguments.

#include "activation.cuh"
#include "block.cuh"

namespace minisgl {

// Each thread holds kVectors vectors of its row, a block's width apart.
template <typename T, int kVectors, bool kGelu>
__global__ void activate_fp8_kernel(const T* gate_up, __nv_fp8_e4m3* values, float* scales, int width) {
  const int64_t row = blockIdx.x;
  const T* gates = gate_up + row * 2 * width;
  int columns[kVectors];
  Vector<T> gate[kVectors], up[kVectors];
  wait_for_inputs();
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    columns[v] = (v * blockDim.x + threadIdx.x) * kVector;
    if (columns[v] >= width) continue;
    gate[v] = Vector<T>::load(gates + columns[v]);
    up[v] = Vector<T>::load(gates + width + columns[v]);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    if (columns[v] < width) gate[v] = activate<kGelu>(gate[v], up[v]);
  store_row_e4m3(gate, columns, width, values + row * width, scales + row);
}

#ifndef MINISGL_EMULATE
void activate_fp8(TensorView gate_up, TensorView values, TensorView scales, bool gelu) {
  const int num_tokens = values.size(0), width = values.size(1), num_vectors = width / kVector;
  const int per_thread = num_vectors <= 512 ? 1 : num_vectors <= 1024 ? 2 : 4;
  const int threads = ((num_vectors + per_thread - 1) / per_thread + 31) / 32 * 32;
  with_type(gate_up, [&](auto element) {
    using T = decltype(element);
    const auto run = [&](auto kernel) {
      launch(kernel, num_tokens, threads, values.device(), data<T>(gate_up), data<__nv_fp8_e4m3>(values),
             static_cast<float*>(scales.data_ptr()), width);
    };
    if (per_thread == 1)
      run(gelu ? activate_fp8_kernel<T, 1, true> : activate_fp8_kernel<T, 1, false>);
    else if (per_thread == 2)
      run(gelu ? activate_fp8_kernel<T, 2, true> : activate_fp8_kernel<T, 2, false>);
    else
      run(gelu ? activate_fp8_kernel<T, 4, true> : activate_fp8_kernel<T, 4, false>);
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(activate_fp8, activate_fp8);
#endif

}  // namespace minisgl
