// Residual addition and RMS norm into FP8, by one scale for each row. Called through `add_rms_norm.py`, which describes the
// arguments.

#include "add_rms_norm.cuh"

#ifndef MINISGL_EMULATE
namespace minisgl {

void add_rms_norm_fp8(TensorView x, TensorView residual, TensorView weight, TensorView values, TensorView scales,
                      double eps, bool has_residual) {
  with_type(x, [&](auto element) {
    run_add_rms_norm<decltype(element), __nv_fp8_e4m3>(x, residual, weight, values,
                                                       static_cast<float*>(scales.data_ptr()), eps, has_residual);
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_rms_norm_fp8, add_rms_norm_fp8);

}  // namespace minisgl
#endif
