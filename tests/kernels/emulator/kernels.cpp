// The CUDA C++ kernels as functions of a library that runs on a CPU, in bf16. A tensor comes as its address and its
// shape; otherwise the arguments are those of the kernels' functions.

#include "emulate.h"

#include "one_shot.cu"
#include "paged_decode.cu"

using T = __nv_bfloat16;
using Sizes = const int64_t*;
using namespace minisgl;

extern "C" void emulate_paged_decode(const T* q, Sizes q_sizes, const T* k_pool, Sizes pool_sizes, const T* v_pool, Sizes,
                                     const int32_t* indptr, Sizes, const int32_t* pages, Sizes,
                                     const int32_t* last_page_lens, Sizes, const T* prefix_out, Sizes,
                                     const float* prefix_lse, Sizes, T* out, Sizes, float* parts, Sizes part_sizes,
                                     int32_t* arrivals, Sizes, double scale, bool has_prefix) {
  const int num_kv_heads = pool_sizes[2], max_shares = part_sizes[0] / 2;
  const Shape shape{static_cast<int>(q_sizes[0]),
                    num_kv_heads,
                    static_cast<int>(q_sizes[1]) / num_kv_heads,
                    static_cast<int>(std::log2(pool_sizes[1] / kTile)),
                    max_shares,
                    static_cast<float>(scale) * kLog2e};
  const Tensors<T> tensors{q,      k_pool,         v_pool,
                           indptr, pages,          last_page_lens,
                           has_prefix ? prefix_out : nullptr,
                           prefix_lse, out,        parts,
                           arrivals};
  const auto kernel = q_sizes[2] == 64 ? paged_decode_kernel<T, 64> : paged_decode_kernel<T, 128>;
  emulate::launch(kernel, (max_shares * num_kv_heads + kWarps - 1) / kWarps, kWarps * 32, kWarps * kRingBytes, tensors,
                  shape);
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
                                              double part_bytes, double eps) {
  const int num_rows = x_sizes[0], row_vectors = x_sizes[1] / kVector, rows = block_rows;
  const auto kernel = memory_sizes[0] == 2 ? one_shot_add_rms_norm_kernel<T, 2> : one_shot_add_rms_norm_kernel<T, 4>;
  emulate::launch(kernel, (num_rows + rows - 1) / rows, (row_vectors + 31) / 32 * 32, 0, x, residual, weight, normed,
                  num_rows, rows, row_vectors, static_cast<float>(eps), addresses(memory, memory_sizes),
                  static_cast<int64_t>(part_bytes), static_cast<int>(rank), aborted);
}
