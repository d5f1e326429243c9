// The CUDA C++ kernels as functions of a library that runs on a CPU, in bf16. A tensor comes as its address and its
// shape; otherwise the arguments are those of the kernels' functions.

#include "emulate.h"

#include "one_shot_all_reduce.cu"
#include "paged_decode.cu"

using T = __nv_bfloat16;
using Sizes = const int64_t*;
using namespace minisgl;

extern "C" void emulate_paged_decode(const T* q, Sizes q_sizes, const T* k_pool, Sizes pool_sizes, const T* v_pool, Sizes,
                                     const int32_t* indptr, Sizes, const int32_t* pages, Sizes,
                                     const int32_t* last_page_lens, Sizes, const T* prefix_out, Sizes,
                                     const float* prefix_lse, Sizes, T* out, Sizes, float* partial_out, Sizes,
                                     float* partial_lse, Sizes partial_sizes, int32_t* arrivals, Sizes, double scale,
                                     bool has_prefix) {
  const int num_kv_heads = pool_sizes[2], max_shares = partial_sizes[0] / 2;
  const Shape shape{static_cast<int>(q_sizes[0]),
                    num_kv_heads,
                    static_cast<int>(q_sizes[1]) / num_kv_heads,
                    static_cast<int>(pool_sizes[1]) / kTile,
                    max_shares,
                    static_cast<float>(scale) * kLog2e};
  const Tensors<T> tensors{q,   k_pool,      v_pool,      indptr,  pages, last_page_lens, has_prefix ? prefix_out : nullptr,
                           prefix_lse, out, partial_out, partial_lse, arrivals};
  const auto kernel = q_sizes[2] == 64 ? paged_decode_kernel<T, 64> : paged_decode_kernel<T, 128>;
  emulate::launch(kernel, (max_shares * num_kv_heads + kWarps - 1) / kWarps, kWarps * 32, kWarps * kRingBytes, tensors,
                  shape);
}

extern "C" void emulate_one_shot_all_reduce(const T* x, Sizes x_sizes, T* out, Sizes, const int64_t* memory,
                                            Sizes memory_sizes, const int* aborted, Sizes, double rank, double blocks,
                                            double part_bytes) {
  const int num_vectors = x_sizes[0] / kVector, num_blocks = blocks, num_ranks = memory_sizes[0];
  Peers peers = {};
  for (int r = 0; r < num_ranks; ++r) peers.memory[r] = reinterpret_cast<char*>(memory[r]);
  const auto kernel = num_ranks == 2 ? one_shot_all_reduce_kernel<T, 2> : one_shot_all_reduce_kernel<T, 4>;
  emulate::launch(kernel, num_blocks, kAllReduceThreads, 0, x, out, num_vectors,
                  (num_vectors + num_blocks - 1) / num_blocks, peers, static_cast<int64_t>(part_bytes),
                  static_cast<int>(rank), aborted);
}
