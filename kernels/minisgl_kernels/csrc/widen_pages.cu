// Pages of an e4m3 pool in another type. Called through `widen_pages.py`, which describes the arguments.

#include "common.cuh"

namespace minisgl {

constexpr int kWidenThreads = 256;
constexpr int kLoads = 8;  // of eight numbers each, that a thread has under way

template <typename T>
__device__ Vector<T> widen(uint2 numbers) {
  float x[kVector];
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    const auto two = static_cast<__nv_fp8x2_storage_t>((i < 2 ? numbers.x : numbers.y) >> i % 2 * 16);
    const float2 pair = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
  return Vector<T>::round(x);
}

// Two blocks, for keys and for values, take every `gridDim.x / 2`-th entry of the list, 32 at a time, which the lanes of
// each warp look at together.
template <typename T>
__global__ void __launch_bounds__(kWidenThreads)
    widen_pages_kernel(const __nv_fp8_e4m3* k_pool, const __nv_fp8_e4m3* v_pool, const int32_t* pages, T* k_out, T* v_out,
                       int num_entries, int page_size) {
  const bool is_v = blockIdx.x % 2;
  const __nv_fp8_e4m3* const pool = is_v ? v_pool : k_pool;
  T* const out = is_v ? v_out : k_out;
  const int stride = gridDim.x / 2;
  wait_for_inputs();
  for (int first = blockIdx.x / 2; first < num_entries; first += 32 * stride) {
    const int entry = first + threadIdx.x % 32 * stride;
    const int before = entry < num_entries ? pages[entry > 0 ? entry - 1 : 0] : -1;
    int page = entry < num_entries ? pages[entry] : -1;
    if (page == before && entry > 0) page = -1;
#pragma unroll 1
    for (int lane = 0; lane < 32; ++lane) {
      const int64_t start = int64_t{__shfl_sync(0xffffffffu, page, lane)} * page_size;
      if (start < 0) continue;
      for (int at = threadIdx.x * kVector; at < page_size; at += kLoads * kWidenThreads * kVector) {
        uint2 numbers[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const int from = at + i * kWidenThreads * kVector;
          if (from < page_size) numbers[i] = *reinterpret_cast<const uint2*>(pool + start + from);
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const int to = at + i * kWidenThreads * kVector;
          if (to < page_size) widen<T>(numbers[i]).store(out + start + to);
        }
      }
    }
  }
}

#ifndef MINISGL_EMULATE
void widen_pages(TensorView k_pool, TensorView v_pool, TensorView pages, TensorView k_out, TensorView v_out,
                 int64_t max_blocks) {
  const int num_entries = pages.size(0), page_size = k_pool.size(1) * k_pool.size(2) * k_pool.size(3);
  TVM_FFI_ICHECK(page_size % kVector == 0) << "a page isn't a multiple of " << kVector << " numbers";
  TVM_FFI_ICHECK(k_pool.dtype().code == kDLFloat8_e4m3fn) << "the pool isn't e4m3";
  const int num_pairs = num_entries < max_blocks / 2 ? num_entries : static_cast<int>(max_blocks / 2);
  with_type(k_out, [&](auto element) {
    using T = decltype(element);
    using C = __nv_fp8_e4m3;
    launch(widen_pages_kernel<T>, 2 * num_pairs, kWidenThreads, k_pool.device(), data<C>(k_pool), data<C>(v_pool),
           static_cast<const int32_t*>(pages.data_ptr()), data<T>(k_out), data<T>(v_out), num_entries, page_size);
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(widen_pages, widen_pages);
#endif

}  // namespace minisgl
