// How tiles of `paged_decode.cu` lie in shared memory, and how a warp takes them from there for the tensor core's products.

#pragma once

#include "warp.cuh"

namespace minisgl {

constexpr int kTile = 16;  // tokens

// Keys or values of a tile. T is the type of queries and results; C is the pool's, which is T or e4m3.
//
// e4m3 becomes fp16, which holds all its numbers, two for one instruction. A register as it comes from shared memory has
// four numbers, so a product's 16 dimensions come in another order: where 16-bit numbers have the neighbours 2 * j and
// 2 * j + 1 and, 8 behind them, another two, e4m3 has the four neighbours from 4 * j on; and where those have dimensions j
// and j + 8, it has 2 * j and 2 * j + 1.
template <typename T, typename C, int kHeadDim>
struct Tile {
  static constexpr bool kWidens = !std::is_same_v<T, C>;
  static constexpr int kPerChunk = 16 / sizeof(C), kChunks = kHeadDim / kPerChunk;
  static constexpr int kSize = kTile * kHeadDim;
  using Factor = std::conditional_t<kWidens, __half, T>;  // what products take

  // Chunks of 16 bytes of a row change places, so that 8 rows' same chunks lie in different banks.
  __device__ static int place(int token, int chunk) {
    constexpr int kRows = kChunks < 8 ? 8 / kChunks : 1;  // that lie side by side in all banks
    return token * kHeadDim + (chunk ^ (token / kRows % (8 / kRows))) * kPerChunk;
  }

  // Keys as a product's left side, for 16 dimensions from 16 * step on and the 16 behind them.
  __device__ static void load_keys(Pair (&out)[2][4], const C* keys, int step) {
    const int lane = threadIdx.x % 32;
    if constexpr (kWidens) {
      Pair bytes[4];
      load_matrices(bytes, keys + place(lane % 16, step + lane / 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) widen_e4m3(bytes[i], out[i / 2][i % 2], out[i / 2][i % 2 + 2]);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) load_matrices(out[i], keys + place(lane % 16, 2 * (step + i) + lane / 16));
    }
  }

  // Values, transposed, in the same way.
  __device__ static void load_values(Pair (&out)[2][4], const C* values, int step) {
    const int lane = threadIdx.x % 32;
    if constexpr (kWidens) {
      Pair bytes[4];
      load_matrices_transposed(bytes, values + place(lane % 16, step + lane / 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // they have two dimensions of a token, then those of the next
        Pair* const pairs = out[i / 2] + i % 2 * 2;
        widen_e4m3(__byte_perm(bytes[i], 0, 0x3120), pairs[0], pairs[1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        load_matrices_transposed(out[i], values + place(lane % 8 + lane / 16 * 8, 2 * (step + i) + lane / 8 % 2));
    }
  }

  // The first of the two dimensions that this thread has of a query, on a product's right side.
  __device__ static int dimension(int step, int half) {
    const int j = threadIdx.x % 4;
    return step * 16 + (kWidens ? j * 4 + half * 2 : half * 8 + j * 2);
  }

  // The dimension that this thread has of a result, in the upper or lower half of a product's rows.
  __device__ static int row_dimension(int step, int half) {
    const int j = threadIdx.x % 32 / 4;
    return step * 16 + (kWidens ? j * 2 + half : half * 8 + j);
  }

  // Results of both halves of a product's rows, transposed, to pairs as queries have them.
  __device__ static void pair_up(Pair (&pairs)[2]) {
    if constexpr (kWidens) {
      const Pair even = pairs[0], odd = pairs[1];
      pairs[0] = __byte_perm(even, odd, 0x5410);
      pairs[1] = __byte_perm(even, odd, 0x7632);
    }
  }

  __device__ static Pair as_factors(Pair pair) {
    if constexpr (std::is_same_v<T, Factor>) {
      return pair;
    } else {
      constexpr float kMost = 65504.0f;
      const float2 x = widen(reinterpret_cast<const typename Vector<T>::Pair&>(pair));
      return pack<Factor>(fminf(fmaxf(x.x, -kMost), kMost), fminf(fmaxf(x.y, -kMost), kMost));
    }
  }
};

}  // namespace minisgl
