// silu(gate) * up or gelu(gate) * up, one thread per eight outputs. Called through `silu_and_mul.py`, which describes the
// arguments.

#include "activation.cuh"

namespace minisgl {

template <typename T, bool kGelu>
__global__ void silu_and_mul_kernel(const T* gate_up, T* out, int width, int num_blocks) {
  const int64_t row = blockIdx.x / num_blocks;
  const int column = (blockIdx.x % num_blocks * blockDim.x + threadIdx.x) * kVector;
  wait_for_inputs();
  if (column >= width) return;
  const T* gates = gate_up + row * 2 * width + column;
  activate<kGelu>(Vector<T>::load(gates), Vector<T>::load(gates + width)).store(out + row * width + column);
}

#ifndef MINISGL_EMULATE
void silu_and_mul(TensorView gate_up, TensorView out, bool gelu) {
  constexpr int kThreads = 128;
  const int num_tokens = out.size(0), width = out.size(1);
  const int num_blocks = (width / kVector + kThreads - 1) / kThreads;
  with_type(out, [&](auto element) {
    using T = decltype(element);
    const auto kernel = gelu ? silu_and_mul_kernel<T, true> : silu_and_mul_kernel<T, false>;
    launch(kernel, num_tokens * num_blocks, kThreads, out.device(), data<T>(gate_up), data<T>(out), width, num_blocks);
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(silu_and_mul, silu_and_mul);
#endif

}  // namespace minisgl
