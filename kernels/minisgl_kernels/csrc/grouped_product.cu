// The matrix product of `fused_moe` for many rows per expert. Called through `grouped_product.py`, which describes the
// arguments.
//
// Two blocks of a cluster share each tile of weights, which arrives in both at once, so that less is carried from the L2
// cache. A cluster takes up to 320 rows of an expert, half of them in each block, by 256 columns. The weight's lines are
// the rows of the tensor cores' products, and tokens their columns, of which there may be any multiple of 8: little is
// computed for nothing.
//
// Of a block's warps four load, stage by stage, and twice four multiply 128 lines each.

#include "wgmma.cuh"

namespace minisgl {

constexpr int kLines = 256, kHalf = 160, kDepth = 64;  // of a tile: lines of the weight, rows of a block, depth of a stage
constexpr int kStages = 4, kProductThreads = 3 * 128;
constexpr int kWeightBytes = kLines * kDepth * 2, kStageBytes = kWeightBytes + kHalf * kDepth * 2;
constexpr int kSharedBytes = kStages * (kStageBytes + 2 * sizeof(uint64_t));

struct Routed {
  const int32_t *members, *blocks, *num_blocks;  // see `moe_routing.Routing`
  int member_stride, block_stride;
};

struct ProductTile {
  int num_rows, expert, rank, first_row, line;  // num_rows: 0 behind the last tile
  int half;  // rows of a block, a multiple of 8; the second one has what is left

  __device__ ProductTile(int number, int num_tiles, int num_columns, const Routed& routed) {
    num_rows = 0;
    if (number >= num_tiles) return;
    const int32_t* block = routed.blocks + number / num_columns;
    num_rows = block[0];
    expert = block[routed.block_stride];
    rank = block[2 * routed.block_stride];
    first_row = block[3 * routed.block_stride];
    line = number % num_columns * kLines;
    half = (num_rows + 15) / 16 * 8;
  }

  __device__ int begin() const { return rank_in_cluster() * half; }
  __device__ int end() const { return rank_in_cluster() == 0 && half < num_rows ? half : num_rows; }
};

// Stage after stage of shared memory, in the same order for those who load and those who multiply.
struct Stages {
  uint32_t shared, barriers;
  int index = 0, parity = 0;

  __device__ uint32_t weight() const { return shared + index * kStageBytes; }
  __device__ uint32_t rows() const { return weight() + kWeightBytes; }
  __device__ uint32_t full() const { return barriers + index * 16; }
  __device__ uint32_t empty() const { return barriers + index * 16 + 8; }
  __device__ void advance() {
    if (++index == kStages) index = 0, parity ^= 1;
  }
};

// Fills the stages: half of the weight's lines, which both blocks get, and this block's rows.
template <typename T, bool kFirst>
__device__ void load(const T* x, const CUtensorMap& weight, const Routed& routed, Stages stages, int size_n, int size_k,
                     int num_columns, int num_tiles) {
  constexpr int kRows = 16;  // that the threads copy at a time, 16 bytes each
  const int thread = threadIdx.x % 128, block = rank_in_cluster();
  const int row = thread / 8, chunk = thread % 8;
  const uint32_t place = row * 128 + (chunk ^ row % 8) * 16;
  for (int number = blockIdx.x / 2; number < num_tiles; number += gridDim.x / 2) {
    const ProductTile tile(number, num_tiles, num_columns, routed);
    const int begin = tile.begin(), num_rows = tile.end() - begin;
    const T* sources[kHalf / kRows];
#pragma unroll
    for (int i = 0; i < kHalf / kRows; ++i) {
      int64_t source = tile.first_row + begin + i * kRows + row;
      if (kFirst) {
        const bool inside = i * kRows + row < num_rows;
        const int32_t* members = routed.members + int64_t{tile.expert} * routed.member_stride + tile.rank + begin;
        source = inside ? members[i * kRows + row] : 0;
      }
      sources[i] = x + source * size_k + chunk * kVector;
    }
    for (int k = 0; k < size_k; k += kDepth) {
      wait(stages.empty(), stages.parity ^ 1);
      if (thread == 0) {
        arrive_and_expect(stages.full(), kWeightBytes);
        const int line = tile.line + block * (kLines / 2);
        copy_tile_to_both(stages.weight() + block * (kWeightBytes / 2), weight, k, tile.expert * size_n + line,
                          stages.full());
      }
      const bool inside = k + chunk * kVector < size_k;
#pragma unroll
      for (int i = 0; i < kHalf / kRows; ++i)
        if (i * kRows + row < num_rows)
          copy_or_zero(stages.rows() + i * kRows * 128 + place, inside ? sources[i] + k : x, inside);
      arrive_after_copies(stages.full());
      stages.advance();
    }
  }
}

template <typename T, int kColumns>
__device__ void multiply(float (&sums)[2][kHalf / 2], uint64_t lines, uint64_t rows, int has_sums) {
  begin_products();
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      Product<kColumns>::add(sums[i], lines + i * (64 * 128 >> 4) + k * 2, rows + k * 2, has_sums | k, T{});
  }
  end_products();
}

__device__ inline float activate(float gate, float up, float alpha, float limit) {
  if (alpha == 0.0f) return __fdividef(gate, 1.0f + __expf(-gate)) * up;
  gate = fminf(gate, limit);
  up = fminf(fmaxf(up, -limit), limit);
  return __fdividef(gate, 1.0f + __expf(-alpha * gate)) * (up + 1.0f);
}

// Exchanges `low` of a thread with the bit for `high` of its neighbour without: then each has both of one kind.
template <typename X>
__device__ void exchange(X& low, X& high, int bit) {
  const bool upper = threadIdx.x & bit;
  const X other = __shfl_xor_sync(0xffffffffu, upper ? low : high, bit);
  (upper ? low : high) = other;
}

// Writes what the group of warps has multiplied: 128 lines of the tile by up to `num_rows` rows.
template <typename T, bool kFirst>
__device__ void write(float (&sums)[2][kHalf / 2], T* out, const T* bias, int64_t first_row, int num_rows, int line,
                      int size_n, float alpha, float limit) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int width = kFirst ? size_n / 2 : size_n;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int first_line = line + i * 64 + warp * 16;  // of the warp
    float shift[2] = {};
    if (bias != nullptr) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int mine = first_line + lane / 4 + 8 * j;
        if (mine < size_n) shift[j] = static_cast<float>(bias[mine]);
      }
    }
    // The quarter of a row of the warp's 16 lines, or 8 activated ones, that this thread writes.
    const int quarter = lane / 8 % 2 * 2 + lane / 16;
    const int column = (kFirst ? first_line / 2 : first_line) + quarter * (kFirst ? 2 : 4);
#pragma unroll
    for (int j = 0; j < kHalf / 8; ++j) {
      if (j * 8 >= num_rows) break;
      float* x = sums[i] + 4 * j;
      float low[2] = {x[0] + shift[0], x[1] + shift[0]}, high[2] = {x[2] + shift[1], x[3] + shift[1]};
      // Of lines l and l + 1, one has this thread, one its neighbour, both for two rows. Now both lines of one row.
      exchange(low[0], low[1], 4);
      exchange(high[0], high[1], 4);
      const int row = j * 8 + lane % 4 * 2 + lane / 4 % 2;
      T* to = out + (first_row + row) * width + column;
      const bool inside = row < num_rows && column < width;
      if (kFirst) {
        float a = activate(low[0], low[1], alpha, limit), b = activate(high[0], high[1], alpha, limit);
        exchange(a, b, 8);
        typename Vector<T>::Pair pair;
        narrow(make_float2(a, b), pair);
        if (inside) *reinterpret_cast<typename Vector<T>::Pair*>(to) = pair;
      } else {
        typename Vector<T>::Pair pairs[2];
        narrow(make_float2(low[0], low[1]), pairs[0]);
        narrow(make_float2(high[0], high[1]), pairs[1]);
        uint2 bits = *reinterpret_cast<uint2*>(pairs);
        exchange(bits.x, bits.y, 8);
        if (inside) *reinterpret_cast<uint2*>(to) = bits;
      }
    }
  }
}

template <typename T, bool kFirst>
__global__ void __cluster_dims__(2) __launch_bounds__(kProductThreads, 1)
    grouped_product_kernel(const T* x, const __grid_constant__ CUtensorMap weight, const T* bias, T* out, Routed routed,
                           int size_n, int size_k, float alpha, float limit) {
  Stages stages{dynamic_tiles(), dynamic_tiles() + kStages * kStageBytes};
  const int group = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(stages.barriers + i * 16, 1 + 128);         // the weight, and threads that copy rows
      init_barrier(stages.barriers + i * 16 + 8, 2 * 2 * 4);  // warps that multiply, of both blocks
    }
    end_of_barriers();
  }
  meet_cluster();
  wait_for_inputs();
  const int num_columns = (size_n + kLines - 1) / kLines, num_tiles = *routed.num_blocks * num_columns;
  if (group == 2) {
    give_registers<40>();
    load<T, kFirst>(x, weight, routed, stages, size_n, size_k, num_columns, num_tiles);
  } else {
    take_registers<232>();
    ProductTile tile(blockIdx.x / 2, num_tiles, num_columns, routed);
    for (int number = blockIdx.x / 2; number < num_tiles; number += gridDim.x / 2) {
      const ProductTile next(number + gridDim.x / 2, num_tiles, num_columns, routed);
      float sums[2][kHalf / 2];
      for (int k = 0; k < size_k; k += kDepth) {
        wait(stages.full(), stages.parity);
        see_copies();
        const uint64_t lines = describe(stages.weight() + group * 128 * 128), rows = describe(stages.rows());
        switch (tile.half / 8) {
#define CASE(n) \
  case n: multiply<T, 8 * n>(sums, lines, rows, k); break;
          CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10)
          CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(16) CASE(17) CASE(18) CASE(19) CASE(20)
#undef CASE
        }
        if (threadIdx.x % 32 < 2) arrive_at(stages.empty(), threadIdx.x % 32);
        stages.advance();
      }
      const int begin = tile.begin(), num_rows = tile.end() - begin;
      write<T, kFirst>(sums, out, bias == nullptr ? nullptr : bias + int64_t{tile.expert} * size_n,
                       tile.first_row + begin, num_rows, tile.line + group * 128, size_n, alpha, limit);
      tile = next;
    }
  }
  __syncwarp();
  meet_cluster();  // the other block may still copy to this one's memory, and arrive at its barriers
}

#ifndef MINISGL_EMULATE
// Describes the lines of the weight to the tensor memory accelerator.
template <typename T>
CUtensorMap describe_lines(const TensorView& weight) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    TVM_FFI_ICHECK(error == cudaSuccess && function != nullptr) << "the driver has no cuTensorMapEncodeTiled";
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  CUtensorMap map;
  const cuuint64_t size_k = weight.size(2), sizes[2] = {size_k, static_cast<cuuint64_t>(weight.size(0) * weight.size(1))};
  const cuuint64_t strides[1] = {size_k * sizeof(T)};
  const cuuint32_t box[2] = {kDepth, kLines / 2}, steps[2] = {1, 1};
  const auto type = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult error = encode(&map, type, 2, data<T>(weight), sizes, strides, box, steps,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TVM_FFI_ICHECK(error == CUDA_SUCCESS) << "cuTensorMapEncodeTiled: error " << static_cast<int>(error);
  return map;
}

void grouped_product(int num_processors, TensorView x, TensorView weight, TensorView bias, TensorView out, TensorView members,
                     TensorView blocks, TensorView num_blocks, bool is_first, bool has_bias, double alpha,
                     double limit) {
  const auto integers = [](const TensorView& x) { return static_cast<const int32_t*>(x.data_ptr()); };
  const Routed routed{integers(members), integers(blocks), integers(num_blocks), static_cast<int>(members.stride(0)),
                      static_cast<int>(blocks.stride(0))};
  const int size_n = weight.size(1), size_k = weight.size(2);
  TVM_FFI_ICHECK(size_k % kVector == 0 && size_n % kVector == 0) << "lines must be multiples of 16 bytes";
  with_type(x, [&](auto element) {
    using T = decltype(element);
    const auto kernel = is_first ? grouped_product_kernel<T, true> : grouped_product_kernel<T, false>;
    launch_with_shared(kernel, num_processors / 2 * 2, kProductThreads, kSharedBytes, x.device(), data<T>(x),
                       describe_lines<T>(weight), has_bias ? data<T>(bias) : nullptr, data<T>(out), routed, size_n,
                       size_k, static_cast<float>(alpha), static_cast<float>(limit));
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_product, grouped_product);
#endif

}  // namespace minisgl
