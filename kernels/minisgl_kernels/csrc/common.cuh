// What the layer kernels share: 16-byte accesses to bf16 and fp16, rounding as the models' reference code does it, and
// launches that overlap with the kernel before.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#ifndef MINISGL_EMULATE
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>
#endif

#include <cstdint>
#include <type_traits>
#include <utility>

namespace minisgl {

constexpr int kVector = 8;  // elements in 16 bytes

__device__ inline float2 widen(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
__device__ inline float2 widen(__half2 pair) { return __half22float2(pair); }
__device__ inline void narrow(float2 pair, __nv_bfloat162& out) { out = __float22bfloat162_rn(pair); }
__device__ inline void narrow(float2 pair, __half2& out) { out = __float22half2_rn(pair); }

// Eight elements as they are in memory. All pointers to them are multiples of 16 bytes.
template <typename T>
struct alignas(16) Vector {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  Pair pairs[kVector / 2];

  __device__ static Vector load(const T* from) {
    const uint4 bits = *reinterpret_cast<const uint4*>(from);
    return *reinterpret_cast<const Vector*>(&bits);
  }
  __device__ static Vector round(const float (&x)[kVector]) {
    Vector out;
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) narrow(make_float2(x[2 * i], x[2 * i + 1]), out.pairs[i]);
    return out;
  }
  __device__ void store(T* to) const { *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(this); }
  __device__ void widen_to(float (&x)[kVector]) const {
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      const float2 pair = widen(pairs[i]);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
};

// Multiples of 1 / factor, the largest ones for what lies beyond them; 8 bytes at a multiple of 8.
template <typename T>
__device__ void store_e4m3(const Vector<T>& from, float factor, __nv_fp8_e4m3* to) {
  float x[kVector];
  from.widen_to(x);
  __nv_fp8x2_storage_t pairs[kVector / 2];
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i)
    pairs[i] = __nv_cvt_float2_to_fp8x2(make_float2(x[2 * i] * factor, x[2 * i + 1] * factor), __NV_SATFINITE, __NV_E4M3);
  *reinterpret_cast<uint2*>(to) = make_uint2(pairs[0] | uint32_t{pairs[1]} << 16, pairs[2] | uint32_t{pairs[3]} << 16);
}

// x = round(round(x * factor) * weight): the norm is rounded before it is scaled.
template <typename T>
__device__ Vector<T> scale(float (&x)[kVector], float factor, const Vector<T>& weight) {
  float w[kVector];
  weight.widen_to(w);
#pragma unroll
  for (int i = 0; i < kVector; ++i) x[i] *= factor;
  Vector<T>::round(x).widen_to(x);
#pragma unroll
  for (int i = 0; i < kVector; ++i) x[i] *= w[i];
  return Vector<T>::round(x);
}

__device__ inline float sum_of_squares(const float (&x)[kVector]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVector; ++i) sum += x[i] * x[i];
  return sum;
}

// Sum over groups of `kLanes` neighbouring threads; every thread of a group gets it.
template <int kLanes>
__device__ float sum_over_lanes(float x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// Programmatic dependent launch: wait for what the kernel ahead writes (only weights may be read before), then let the
// next kernel come as soon as there is room for it.
__device__ inline void wait_for_inputs() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#ifndef MINISGL_EMULATE
using tvm::ffi::TensorView;

// With `shared` bytes of dynamic shared memory per block.
template <typename... Params, typename... Args>
void launch_with_shared(void (*kernel)(Params...), int blocks, int threads, int shared, DLDevice device,
                        Args&&... args) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  config.attrs = &attribute;
  config.numAttrs = 1;
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  cudaError_t error = cudaSuccess;
  if (shared > 0) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error == cudaSuccess)
    error = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(std::forward<Args>(args))...);
  TVM_FFI_ICHECK(error == cudaSuccess) << cudaGetErrorString(error);
}

template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), int blocks, int threads, DLDevice device, Args&&... args) {
  launch_with_shared(kernel, blocks, threads, 0, device, std::forward<Args>(args)...);
}

template <typename T>
T* data(const TensorView& x) {
  TVM_FFI_ICHECK(reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0) << "a tensor doesn't begin at a multiple of 16 bytes";
  return static_cast<T*>(x.data_ptr());
}

// Calls `function` with a value of the tensor's element type.
template <typename Function>
void with_type(const TensorView& x, Function&& function) {
  const DLDataType type = x.dtype();
  if (type.code == kDLBfloat && type.bits == 16) return function(__nv_bfloat16{});
  TVM_FFI_ICHECK(type.code == kDLFloat && type.bits == 16) << "only bfloat16 and float16 are compiled";
  function(__half{});
}

// The same with a value of a KV pool's type besides, which is x's or e4m3.
template <typename Function>
void with_types(const TensorView& x, const TensorView& pool, Function&& function) {
  const bool is_e4m3 = pool.dtype().code == kDLFloat8_e4m3fn;
  TVM_FFI_ICHECK(is_e4m3 || (pool.dtype().code == x.dtype().code && pool.dtype().bits == 16)) << "the KV pool's type isn't compiled";
  with_type(x, [&](auto element) { is_e4m3 ? function(element, __nv_fp8_e4m3{}) : function(element, element); });
}
#endif

}  // namespace minisgl
