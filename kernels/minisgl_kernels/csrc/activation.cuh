// The gated activations of MLPs, eight at a time, rounded as the models' reference code does it.

#pragma once

#include "common.cuh"

namespace minisgl {

// silu(gate) * up or gelu(gate) * up.
template <bool kGelu, typename T>
__device__ Vector<T> activate(const Vector<T>& gate, const Vector<T>& up) {
  float x[kVector], y[kVector];
  gate.widen_to(x);
  up.widen_to(y);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    // 0.5 * (1 + tanh(y)) = 1 / (1 + exp(-2 * y)), with y = sqrt(2 / pi) * (x + 0.044715 * x^3).
    const float exponent = kGelu ? x[i] * (1.5957691f + 0.07135481f * x[i] * x[i]) : x[i];
    x[i] = __fdividef(x[i], 1.0f + __expf(-exponent));
  }
  Vector<T>::round(x).widen_to(x);
#pragma unroll
  for (int i = 0; i < kVector; ++i) x[i] *= y[i];
  return Vector<T>::round(x);
}

}  // namespace minisgl
