// Residual addition and RMS norm. Called through `add_rms_norm.py`, which describes the arguments.

#include "add_rms_norm.cuh"

#ifndef MINISGL_EMULATE
namespace minisgl {

void add_rms_norm(TensorView x, TensorView residual, TensorView weight, TensorView normed, double eps,
                  bool has_residual) {
  with_type(x, [&](auto element) {
    using T = decltype(element);
    run_add_rms_norm<T, T>(x, residual, weight, normed, nullptr, eps, has_residual);
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_rms_norm, add_rms_norm);

}  // namespace minisgl
#endif
