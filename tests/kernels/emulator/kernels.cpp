// The CUDA C++ kernels as functions of a library that runs on a CPU, in bf16. A tensor comes as its address and its
// sizes, which its strides and the size of an element follow; otherwise the arguments are those of the kernels' functions.

#include "emulate.h"
#include "hopper.h"

#include "activate_fp8.cu"
#include "add_rms_norm.cu"
#include "add_rms_norm_fp8.cu"
#include "grouped_product.cu"
#include "norm_rope_store.cu"
#include "one_shot.cu"
#include "paged_decode.cu"
#include "silu_and_mul.cu"
#include "widen_pages.cu"

using T = __nv_bfloat16;
using Sizes = const int64_t*;
using namespace minisgl;

constexpr int kStrides = 4;  // where they begin
constexpr int kItemSize = 8;  // where the bytes of an element are

// See `emulate.h`.
extern "C" void emulate_late(double thread) { emulate::late = static_cast<int>(thread); }
extern "C" bool emulate_stuck() { return emulate::stuck; }

extern "C" void emulate_add_rms_norm(const T* x, Sizes x_sizes, T* residual, Sizes, const T* weight, Sizes, T* normed,
                                     Sizes, double eps, bool has_residual) {
  const int size = x_sizes[1], threads = (size / kVector + 63) / 64 * 32;
  const auto kernel = has_residual ? add_rms_norm_kernel<T, T, 2, true> : add_rms_norm_kernel<T, T, 2, false>;
  emulate::launch(kernel, x_sizes[0], threads, 0, x, residual, weight, normed, nullptr, x_sizes[kStrides], size, eps);
}

extern "C" void emulate_add_rms_norm_fp8(const T* x, Sizes x_sizes, T* residual, Sizes, const T* weight, Sizes,
                                         __nv_fp8_e4m3* values, Sizes, float* scales, Sizes, double eps,
                                         bool has_residual) {
  using C = __nv_fp8_e4m3;
  const int size = x_sizes[1], threads = (size / kVector + 63) / 64 * 32;
  const auto kernel = has_residual ? add_rms_norm_kernel<T, C, 2, true> : add_rms_norm_kernel<T, C, 2, false>;
  emulate::launch(kernel, x_sizes[0], threads, 0, x, residual, weight, values, scales, x_sizes[kStrides], size, eps);
}

extern "C" void emulate_activate_fp8(const T* gate_up, Sizes, __nv_fp8_e4m3* values, Sizes sizes, float* scales, Sizes,
                                     bool gelu) {
  const int width = sizes[1], threads = (width / kVector + 63) / 64 * 32;
  const auto kernel = gelu ? activate_fp8_kernel<T, 2, true> : activate_fp8_kernel<T, 2, false>;
  emulate::launch(kernel, sizes[0], threads, 0, gate_up, values, scales, width);
}

extern "C" void emulate_silu_and_mul(const T* gate_up, Sizes, T* out, Sizes sizes, bool gelu) {
  constexpr int kThreads = 32;
  const int width = sizes[1], num_blocks = (width / kVector + kThreads - 1) / kThreads;
  const auto kernel = gelu ? silu_and_mul_kernel<T, true> : silu_and_mul_kernel<T, false>;
  emulate::launch(kernel, sizes[0] * num_blocks, kThreads, 0, gate_up, out, width, num_blocks);
}

template <typename C, int kHeadDim>
void norm_rope_store(const T* qkv, Sizes qkv_sizes, const T* q_norm, const T* k_norm, const T* rope,
                     const int32_t* out_loc, T* q, Sizes q_sizes, void* k_pool, Sizes pool_sizes, void* v_pool, double eps,
                     bool has_norms, double inverse_k_scale, double inverse_v_scale) {
  constexpr int kThreads = 32, kPerBlock = kThreads * 2 * kVector / kHeadDim;
  Heads heads{static_cast<int>(q_sizes[1]), static_cast<int>(pool_sizes[2])};
  heads.num_blocks = (heads.num_heads + 2 * heads.num_kv_heads + kPerBlock - 1) / kPerBlock;
  const auto kernel =
      has_norms ? norm_rope_store_kernel<T, C, kHeadDim, true> : norm_rope_store_kernel<T, C, kHeadDim, false>;
  emulate::launch(kernel, q_sizes[0] * heads.num_blocks, kThreads, 0, qkv, q_norm, k_norm, rope, out_loc, q,
                  static_cast<C*>(k_pool), static_cast<C*>(v_pool), qkv_sizes[kStrides], heads, eps, inverse_k_scale,
                  inverse_v_scale);
}

extern "C" void emulate_norm_rope_store(const T* qkv, Sizes qkv_sizes, const T* q_norm, Sizes, const T* k_norm, Sizes,
                                        const T* rope, Sizes, const int32_t* out_loc, Sizes, T* q, Sizes q_sizes,
                                        void* k_pool, Sizes pool_sizes, void* v_pool, Sizes, double eps,
                                        bool has_norms, double inverse_k_scale, double inverse_v_scale) {
  const auto run = [&](auto function) {
    function(qkv, qkv_sizes, q_norm, k_norm, rope, out_loc, q, q_sizes, k_pool, pool_sizes, v_pool, eps, has_norms,
             inverse_k_scale, inverse_v_scale);
  };
  const auto run_dim = [&](auto cached) {
    using C = decltype(cached);
    if (q_sizes[2] == 64) return run(norm_rope_store<C, 64>);
    q_sizes[2] == 128 ? run(norm_rope_store<C, 128>) : run(norm_rope_store<C, 256>);
  };
  pool_sizes[kItemSize] == 1 ? run_dim(__nv_fp8_e4m3{}) : run_dim(T{});
}

extern "C" void emulate_paged_decode(const T* q, Sizes q_sizes, const void* k_pool, Sizes pool_sizes, const void* v_pool,
                                     Sizes, const int32_t* indptr, Sizes, const int32_t* pages, Sizes,
                                     const int32_t* last_page_lens, Sizes, const T* prefix_out, Sizes,
                                     const float* prefix_lse, Sizes, const float* sinks, Sizes, T* out, Sizes,
                                     float* parts, Sizes part_sizes, int32_t* arrivals, Sizes, double scale,
                                     bool has_prefix, bool has_sinks, double window) {
  const int num_kv_heads = pool_sizes[2], max_shares = part_sizes[0] / 2;
  const Shape shape{static_cast<int>(q_sizes[0]),
                    num_kv_heads,
                    static_cast<int>(q_sizes[1]) / num_kv_heads,
                    static_cast<int>(std::log2(pool_sizes[1] / kTile)),
                    max_shares,
                    static_cast<float>(scale) * kLog2e,
                    static_cast<int>(window)};
  const auto run = [&](auto cached) {
    using C = decltype(cached);
    const Tensors<T, C> tensors{q,       static_cast<const C*>(k_pool), static_cast<const C*>(v_pool),
                                indptr,  pages,                         last_page_lens,
                                has_prefix ? prefix_out : nullptr,
                                prefix_lse, has_sinks ? sinks : nullptr,
                                out,     parts,                         arrivals};
    const auto kernel = q_sizes[2] == 64 ? paged_decode_kernel<T, C, 64> : paged_decode_kernel<T, C, 128>;
    emulate::launch(kernel, (max_shares * num_kv_heads + kWarps - 1) / kWarps, kWarps * 32, kWarps * kRingBytes, tensors,
                    shape);
  };
  pool_sizes[kItemSize] == 1 ? run(__nv_fp8_e4m3{}) : run(T{});
}

extern "C" void emulate_widen_pages(const __nv_fp8_e4m3* k_pool, Sizes pool_sizes, const __nv_fp8_e4m3* v_pool, Sizes,
                                    const int32_t* pages, Sizes page_sizes, T* k_out, Sizes, T* v_out, Sizes,
                                    double max_blocks) {
  const int num_entries = page_sizes[0], page_size = pool_sizes[1] * pool_sizes[2] * pool_sizes[3];
  const int num_pairs = std::min(num_entries, static_cast<int>(max_blocks) / 2);
  emulate::launch(widen_pages_kernel<T>, 2 * num_pairs, kWidenThreads, 0, k_pool, v_pool, pages, k_out, v_out,
                  num_entries, page_size);
}

static Peers addresses(const int64_t* memory, Sizes sizes) {
  Peers peers = {};
  for (int r = 0; r < sizes[0]; ++r) peers.memory[r] = reinterpret_cast<char*>(memory[r]);
  return peers;
}

extern "C" void emulate_one_shot_all_reduce(const T* x, Sizes x_sizes, T* out, Sizes, const int64_t* memory,
                                            Sizes memory_sizes, const int* aborted, Sizes, double rank, double blocks,
                                            double part_bytes) {
  const int num_vectors = x_sizes[0] / kVector, num_blocks = blocks;
  const int block_vectors = (num_vectors + num_blocks - 1) / num_blocks;
  const auto kernel = memory_sizes[0] == 2 ? one_shot_all_reduce_kernel<T, 2> : one_shot_all_reduce_kernel<T, 4>;
  emulate::launch(kernel, (num_vectors + block_vectors - 1) / block_vectors, kAllReduceThreads, 0, x, out, num_vectors,
                  block_vectors, addresses(memory, memory_sizes), static_cast<int64_t>(part_bytes),
                  static_cast<int>(rank), aborted);
}

extern "C" void emulate_one_shot_add_rms_norm(const T* x, Sizes x_sizes, T* residual, Sizes, const T* weight, Sizes,
                                              T* normed, Sizes, const int64_t* memory, Sizes memory_sizes,
                                              const int* aborted, Sizes, double rank, double block_rows,
                                              double part_bytes, double offset, double eps) {
  const int num_rows = x_sizes[0], row_vectors = x_sizes[1] / kVector, rows = block_rows;
  const auto kernel = memory_sizes[0] == 2 ? one_shot_add_rms_norm_kernel<T, 2> : one_shot_add_rms_norm_kernel<T, 4>;
  emulate::launch(kernel, (num_rows + rows - 1) / rows, (row_vectors + 31) / 32 * 32, 0, x, residual, weight, normed,
                  num_rows, rows, row_vectors, static_cast<float>(eps), addresses(memory, memory_sizes),
                  static_cast<int64_t>(part_bytes), static_cast<int64_t>(offset), static_cast<int>(rank), aborted);
}

extern "C" void emulate_grouped_product(double num_processors, const T* x, Sizes x_sizes, const T* weight, Sizes weight_sizes,
                                        const T* bias, Sizes, T* out, Sizes, const int32_t* members,
                                        Sizes member_sizes, const int32_t* blocks, Sizes block_sizes,
                                        const int32_t* num_blocks, Sizes, bool is_first, bool has_bias, double alpha,
                                        double limit) {
  const int num_experts = weight_sizes[0], size_n = weight_sizes[1], size_k = weight_sizes[2];
  const Routed routed{members, blocks, num_blocks, static_cast<int>(member_sizes[kStrides]),
                      static_cast<int>(block_sizes[kStrides])};
  const auto kernel = is_first ? grouped_product_kernel<T, true> : grouped_product_kernel<T, false>;
  emulate::launch_clusters(2, kernel, static_cast<int>(num_processors) / 2 * 2, kProductThreads, kSharedBytes, x,
                           tensor_map(x, size_k, x_sizes[0], 8),
                           tensor_map(weight, size_k, int64_t{num_experts} * size_n,
                                      is_first ? kGroupLines<true> : kGroupLines<false>),
                           has_bias ? bias : nullptr, out, routed, size_n, size_k, static_cast<float>(alpha),
                           static_cast<float>(limit));
}
