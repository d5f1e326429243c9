// Norms of queries and keys, rotation and KV store. Called through `norm_rope_store.py`, which describes the arguments.
//
// A head is the work of head_dim / 16 neighbouring threads, each of which holds eight elements of its lower half and
// the eight of its upper half that they turn together with.

#include "common.cuh"

namespace minisgl {

struct Heads {
  int num_heads, num_kv_heads;
  int num_blocks;  // that a token's heads take
};

// C is the pool's type: T, or e4m3.
template <typename T, typename C, int kHeadDim, bool kHasNorms>
__global__ void norm_rope_store_kernel(const T* qkv, const T* q_norm, const T* k_norm, const T* rope,
                                       const int32_t* out_loc, T* q_out, C* k_pool, C* v_pool, int64_t qkv_stride,
                                       Heads heads, float eps, float inverse_k_scale, float inverse_v_scale) {
  constexpr int kLanes = kHeadDim / (2 * kVector), kHalf = kHeadDim / 2;
  const int64_t token = blockIdx.x / heads.num_blocks;
  const int head = blockIdx.x % heads.num_blocks * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  const int low = threadIdx.x % kLanes * kVector;
  const bool is_q = head < heads.num_heads, is_v = head >= heads.num_heads + heads.num_kv_heads;
  const int kv_head = head - heads.num_heads - (is_v ? heads.num_kv_heads : 0);
  const bool exists = head < heads.num_heads + 2 * heads.num_kv_heads;

  Vector<T> weight_1, weight_2;
  if (kHasNorms && !is_v) {
    weight_1 = Vector<T>::load((is_q ? q_norm : k_norm) + low);
    weight_2 = Vector<T>::load((is_q ? q_norm : k_norm) + low + kHalf);
  }
  wait_for_inputs();
  if (!exists) return;  // with all threads of its head, so that no sum waits for them

  const T* source = qkv + token * qkv_stride + head * kHeadDim + low;
  Vector<T> out_1 = Vector<T>::load(source), out_2 = Vector<T>::load(source + kHalf);
  Vector<T> cosines, sines;
  if (!is_v) {
    const T* angles = rope + token * 2 * kHeadDim + low;
    cosines = Vector<T>::load(angles);
    sines = Vector<T>::load(angles + 3 * kHalf);
  }
  int64_t place = (token * heads.num_heads + head) * kHeadDim + low;
  if (!is_q) place = (int64_t{out_loc[token]} * heads.num_kv_heads + kv_head) * kHeadDim + low;
  float x_1[kVector], x_2[kVector];
  out_1.widen_to(x_1);
  out_2.widen_to(x_2);
  float factor = 1.0f;
  if (kHasNorms) {  // values too, whose sum nobody needs: a sum takes all threads of a warp
    const float squares = sum_over_lanes<kLanes>(sum_of_squares(x_1) + sum_of_squares(x_2));
    factor = rsqrtf(squares / kHeadDim + eps);
  }
  if (!is_v) {
    if (kHasNorms) {
      scale<T>(x_1, factor, weight_1).widen_to(x_1);
      scale<T>(x_2, factor, weight_2).widen_to(x_2);
    }
    float cos[kVector], sin[kVector], turned[kVector];
    cosines.widen_to(cos);
    sines.widen_to(sin);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      turned[i] = x_1[i] * cos[i] - x_2[i] * sin[i];
      x_2[i] = x_2[i] * cos[i] + x_1[i] * sin[i];
    }
    out_1 = Vector<T>::round(turned);
    out_2 = Vector<T>::round(x_2);
  }
  if constexpr (std::is_same_v<T, C>) {
    T* target = (is_q ? q_out : is_v ? v_pool : k_pool) + place;
    out_1.store(target);
    out_2.store(target + kHalf);
  } else if (is_q) {
    out_1.store(q_out + place);
    out_2.store(q_out + place + kHalf);
  } else {
    C* target = (is_v ? v_pool : k_pool) + place;
    const float factor = is_v ? inverse_v_scale : inverse_k_scale;
    store_e4m3(out_1, factor, target);
    store_e4m3(out_2, factor, target + kHalf);
  }
}

#ifndef MINISGL_EMULATE
template <typename T, typename C, int kHeadDim>
auto pick(bool has_norms) {
  return has_norms ? norm_rope_store_kernel<T, C, kHeadDim, true> : norm_rope_store_kernel<T, C, kHeadDim, false>;
}

void norm_rope_store(TensorView qkv, TensorView q_norm, TensorView k_norm, TensorView rope, TensorView out_loc,
                     TensorView q, TensorView k_pool, TensorView v_pool, double eps, bool has_norms,
                     double inverse_k_scale, double inverse_v_scale) {
  constexpr int kThreads = 128;
  const int num_tokens = q.size(0), head_dim = q.size(2);
  Heads heads{static_cast<int>(q.size(1)), static_cast<int>(k_pool.size(2))};
  const int total = heads.num_heads + 2 * heads.num_kv_heads, per_block = kThreads * 2 * kVector / head_dim;
  heads.num_blocks = (total + per_block - 1) / per_block;
  with_types(q, k_pool, [&](auto element, auto cached) {
    using T = decltype(element);
    using C = decltype(cached);
    const auto run = [&](auto kernel) {
      launch(kernel, num_tokens * heads.num_blocks, kThreads, q.device(), data<T>(qkv), data<T>(q_norm), data<T>(k_norm),
             data<T>(rope), static_cast<const int32_t*>(out_loc.data_ptr()), data<T>(q), data<C>(k_pool),
             data<C>(v_pool), qkv.stride(0), heads, eps, inverse_k_scale, inverse_v_scale);
    };
    if (head_dim == 64) return run(pick<T, C, 64>(has_norms));
    if (head_dim == 128) return run(pick<T, C, 128>(has_norms));
    TVM_FFI_ICHECK(head_dim == 256) << "head dimension " << head_dim << " isn't compiled";
    run(pick<T, C, 256>(has_norms));
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(norm_rope_store, norm_rope_store);
#endif

}  // namespace minisgl
