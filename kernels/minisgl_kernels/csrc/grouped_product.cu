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
constexpr int kBoxBytes = 8 * kDepth * 2;  // of eight rows
constexpr int kOutputBytes = 8 << 10;  // that a group of warps writes at a time
constexpr int kSharedBytes = kStages * (kStageBytes + 2 * sizeof(uint64_t)) + 2 * kOutputBytes;

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

  __device__ int begin() const { return rank_in_cluster() == 0 ? 0 : middle(); }
  __device__ int end() const { return rank_in_cluster() == 0 ? middle() : num_rows; }
  __device__ int middle() const { return half < num_rows ? half : num_rows; }
};

// Stage after stage of shared memory, in the same order for those who load and those who multiply. Behind them is what
// is written, and then the barriers.
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

// Lines of the weight that stand together in it, and that a tile has in another order: for the first product the gates
// of eight pairs before their ups.
template <bool kFirst>
constexpr int kGroupLines = kFirst ? 16 : 8;

// The copies of rows are there, but for those of the last `kLeft` stages.
template <int kLeft>
__device__ void announce(uint32_t full) {
  wait_for_copies<kLeft>();
  show_to_products();
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(full);
}

// Fills the stages: half of the weight's lines, which both blocks get, and this block's rows. Those of the first product
// are gathered, 16 bytes by each thread; those of the second one stand together, and one thread asks for eight at a time.
template <typename T, bool kFirst>
__device__ void load(const T* x, const CUtensorMap& rows, const CUtensorMap& weight, const Routed& routed, Stages stages,
                     int size_n, int size_k, int num_columns, int num_tiles) {
  constexpr int kRows = 16;  // that the threads copy at a time
  const int thread = threadIdx.x % 128, block = rank_in_cluster();
  const int row = thread / 8, chunk = thread % 8;
  const uint32_t place = row * 128 + (chunk ^ row % 8) * 16;
  uint32_t before = 0;  // the barrier of the stage whose gathered rows aren't announced yet
  for (int number = blockIdx.x / 2; number < num_tiles; number += gridDim.x / 2) {
    const ProductTile tile(number, num_tiles, num_columns, routed);
    const int begin = tile.begin(), num_rows = tile.end() - begin, num_boxes = (num_rows + 7) / 8;
    uint32_t sources[kHalf / kRows];  // vectors of x
    if (kFirst) {
      const int32_t* members = routed.members + int64_t{tile.expert} * routed.member_stride + tile.rank + begin;
#pragma unroll
      for (int i = 0; i < kHalf / kRows; ++i) {
        const uint32_t source = i * kRows + row < num_rows ? members[i * kRows + row] : 0;
        sources[i] = source * (size_k / kVector) + chunk;
      }
    }
    const int line = tile.expert * size_n + tile.line + block * (kLines / 2);
    for (int k = 0; k < size_k; k += kDepth) {
      wait(stages.empty(), stages.parity ^ 1);
      if (thread == 0) {
        arrive_and_expect(stages.full(), kWeightBytes + (kFirst ? 0 : num_boxes * kBoxBytes));
        copy_lines_to_both(stages.weight() + block * (kWeightBytes / 2), weight, k, line / kGroupLines<kFirst>,
                           stages.full());
        for (int i = 0; !kFirst && i < num_boxes; ++i)
          copy_rows(stages.rows() + i * kBoxBytes, rows, k, tile.first_row + begin + i * 8, stages.full());
      }
      if (kFirst) {
        const bool inside = k + chunk * kVector < size_k;
        const auto* from = reinterpret_cast<const Vector<T>*>(x + k);
#pragma unroll
        for (int i = 0; i < kHalf / kRows; ++i)
          if (i * kRows < num_rows)
            copy_or_zero(stages.rows() + i * kRows * 128 + place, from + sources[i], inside && i * kRows + row < num_rows);
        end_of_copies();
        // Those who multiply hear of these rows a stage later, when the next one's copies are on their way.
        if (before != 0) announce<1>(before);
        before = stages.full();
      }
      stages.advance();
    }
  }
  if (before != 0) announce<0>(before);
}

// The products of a tile, of this group's 128 lines. While those of a stage run, the next ones are given.
template <typename T, int kColumns>
__device__ void multiply(float (&sums)[2][kHalf / 2], Stages& stages, int group, int size_k) {
  const int lane = threadIdx.x % 32;
  uint32_t before = 0;  // where to tell that the stage before was read
  for (int k = 0; k < size_k; k += kDepth) {
    wait(stages.full(), stages.parity);
    const uint64_t lines = describe(stages.weight() + group * 128 * 128), rows = describe(stages.rows());
    begin_products();
#pragma unroll
    for (int j = 0; j < kDepth / 16; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        Product<kColumns>::add(sums[i], lines + i * (64 * 128 >> 4) + j * 2, rows + j * 2, k | j, T{});
    }
    end_products();
    wait_for_products<1>();
    if (k > 0 && lane < 2) arrive_at(before, lane);
    before = stages.empty();
    stages.advance();
  }
  wait_for_products<0>();
  if (lane < 2) arrive_at(before, lane);
}

__device__ inline float activate(float gate, float up, float alpha, float limit) {
  if (alpha == 0.0f) return __fdividef(gate, 1.0f + __expf(-gate)) * up;
  gate = fminf(gate, limit);
  up = fminf(fmaxf(up, -limit), limit);
  return __fdividef(gate, 1.0f + __expf(-alpha * gate)) * (up + 1.0f);
}

// Writes what the group of warps has multiplied, 128 lines of the tile by `num_rows` rows, through shared memory, so that
// a row's part goes out as a whole.
template <typename T, bool kFirst>
__device__ void write(const float (&sums)[2][kHalf / 2], uint32_t shared, T* out, const T* bias, int64_t first_row,
                      int num_rows, int line, int size_n, float alpha, float limit) {
  constexpr int kWidth = kFirst ? 64 : 128, kChunks = kWidth / kVector, kRows = kOutputBytes / 2 / kWidth;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, thread = threadIdx.x % 128;
  const int width = kFirst ? size_n / 2 : size_n, column = kFirst ? line / 2 : line;
  float shifts[2][2] = {};
  if (bias != nullptr) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int pair = line + i / 2 * 64 + warp * 16, mine = kFirst ? lane / 4 * 2 + i % 2 : lane / 4 + i % 2 * 8;
      if (pair + mine < size_n) shifts[i / 2][i % 2] = static_cast<float>(bias[pair + mine]);
    }
  }
  // Eight rows of 16 bytes each: for the first product of matrices i % 2 and rows i / 2, for the second one of the halves
  // i % 2 of matrices i / 2.
  const int matrix = lane / 8;
  const int chunk = kFirst ? matrix % 2 * 4 + warp : matrix / 2 * 8 + warp * 2 + matrix % 2;
  const uint32_t place = (lane % 8) * (2 * kWidth) + (chunk ^ lane % 8) * 16;
#pragma unroll
  for (int first = 0; first < kHalf; first += kRows) {
    if (first >= num_rows) break;
    meet_group(threadIdx.x / 128);  // what was here before has been read
#pragma unroll
    for (int j = first / 8; j < (first + kRows) / 8 && j < kHalf / 8; j += kFirst ? 2 : 1) {
      Pair matrices[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (kFirst) {
          const float* x = sums[i % 2] + 4 * (j + i / 2);
          const float gate = shifts[i % 2][0], up = shifts[i % 2][1];
          matrices[i] = pack<T>(activate(x[0] + gate, x[2] + up, alpha, limit),
                                activate(x[1] + gate, x[3] + up, alpha, limit));
        } else {
          const float* x = sums[i / 2] + 4 * j + i % 2 * 2;
          matrices[i] = pack<T>(x[0] + shifts[i / 2][i % 2], x[1] + shifts[i / 2][i % 2]);
        }
      }
      const int row = j * 8 - first + (kFirst ? matrix / 2 * 8 : 0);
      store_transposed(shared + row * (2 * kWidth) + place, matrices);
    }
    meet_group(threadIdx.x / 128);
#pragma unroll
    for (int i = 0; i < kRows * kChunks / 128; ++i) {
      const int row = (i * 128 + thread) / kChunks, part = thread % kChunks;
      if (first + row < num_rows && column + part * kVector < width)
        *reinterpret_cast<uint4*>(out + (first_row + first + row) * width + column + part * kVector) =
            load_shared(shared + row * (2 * kWidth) + (part ^ row % 8) * 16);
    }
  }
}

template <typename T, bool kFirst>
__global__ void __cluster_dims__(2) __launch_bounds__(kProductThreads, 1)
    grouped_product_kernel(const T* x, const __grid_constant__ CUtensorMap rows, const __grid_constant__ CUtensorMap weight,
                           const T* bias, T* out, Routed routed, int size_n, int size_k, float alpha, float limit) {
  const uint32_t output = dynamic_tiles() + kStages * kStageBytes;
  Stages stages{dynamic_tiles(), output + 2 * kOutputBytes};
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // the same in a warp, so that the compiler sees it
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(stages.barriers + i * 16, kFirst ? 1 + 4 : 1);  // who says what comes, and warps that gather rows
      init_barrier(stages.barriers + i * 16 + 8, 2 * 2 * 4);       // warps that multiply, of both blocks
    }
    end_of_barriers();
  }
  meet_cluster();
  wait_for_inputs();
  const int num_columns = (size_n + kLines - 1) / kLines, num_tiles = *routed.num_blocks * num_columns;
  if (group == 2) {
    give_registers<56>();
    // A thread alone, or all of them: one that only followed could miss a whole turn of the stages, and wait for ever.
    if (kFirst || threadIdx.x % 128 == 0)
      load<T, kFirst>(x, rows, weight, routed, stages, size_n, size_k, num_columns, num_tiles);
  } else {
    take_registers<224>();
    ProductTile tile(blockIdx.x / 2, num_tiles, num_columns, routed);
    for (int number = blockIdx.x / 2; number < num_tiles; number += gridDim.x / 2) {
      const ProductTile next(number + gridDim.x / 2, num_tiles, num_columns, routed);
      const int begin = tile.begin(), num_rows = tile.end() - begin;
      float sums[2][kHalf / 2];
      switch ((num_rows + 7) / 8) {
        case 0:  // the stages come all the same
#define CASE(n) \
  case n: multiply<T, 8 * n>(sums, stages, group, size_k); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10)
        CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(16) CASE(17) CASE(18) CASE(19) CASE(20)
#undef CASE
      }
      write<T, kFirst>(sums, output + group * kOutputBytes, out,
                       bias == nullptr ? nullptr : bias + int64_t{tile.expert} * size_n, tile.first_row + begin, num_rows,
                       tile.line + group * 128, size_n, alpha, limit);
      tile = next;
    }
  }
  __syncwarp();
  meet_cluster();  // the other block may still copy to this one's memory, and arrive at its barriers
}

#ifndef MINISGL_EMULATE
// Describes a tensor, innermost dimension first, and the tiles that are copied of it.
template <typename T, int kDims>
CUtensorMap describe(const TensorView& tensor, const cuuint64_t (&sizes)[kDims], const cuuint64_t (&strides)[kDims - 1],
                     const cuuint32_t (&tile)[kDims]) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    TVM_FFI_ICHECK(error == cudaSuccess && function != nullptr) << "the driver has no cuTensorMapEncodeTiled";
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  CUtensorMap map;
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const auto type = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult error = encode(&map, type, kDims, data<T>(tensor), sizes, strides, tile, steps,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TVM_FFI_ICHECK(error == CUDA_SUCCESS) << "cuTensorMapEncodeTiled: error " << static_cast<int>(error);
  return map;
}

template <typename T>
CUtensorMap describe_rows(const TensorView& x) {
  const cuuint64_t size_k = x.size(1), num_rows = x.size(0);
  return describe<T, 2>(x, {size_k, num_rows}, {size_k * sizeof(T)}, {kDepth, 8});
}

// Elements of a line, lines with the same part in eight pairs (or eight lines), the two parts, and groups of both.
template <typename T, bool kFirst>
CUtensorMap describe_lines(const TensorView& weight) {
  constexpr int kGroup = kGroupLines<kFirst>, kParts = kGroup / 8;
  const cuuint64_t size_k = weight.size(2), line = size_k * sizeof(T);
  const cuuint64_t num_groups = static_cast<cuuint64_t>(weight.size(0)) * weight.size(1) / kGroup;
  return describe<T, 4>(weight, {size_k, 8, kParts, num_groups}, {kParts * line, line, kGroup * line},
                        {kDepth, 8, kParts, kLines / 2 / kGroup});
}

void grouped_product(int num_processors, TensorView x, TensorView weight, TensorView bias, TensorView out, TensorView members,
                     TensorView blocks, TensorView num_blocks, bool is_first, bool has_bias, double alpha,
                     double limit) {
  const auto integers = [](const TensorView& x) { return static_cast<const int32_t*>(x.data_ptr()); };
  const Routed routed{integers(members), integers(blocks), integers(num_blocks), static_cast<int>(members.stride(0)),
                      static_cast<int>(blocks.stride(0))};
  const int size_n = weight.size(1), size_k = weight.size(2);
  TVM_FFI_ICHECK(size_k % kVector == 0 && size_n % kVector == 0) << "lines must be multiples of 16 bytes";
  const auto run = [&](auto element, auto first) {
    using T = decltype(element);
    constexpr bool kFirst = decltype(first)::value;
    const CUtensorMap rows = kFirst ? CUtensorMap{} : describe_rows<T>(x);  // the first product gathers its rows
    launch_with_shared(grouped_product_kernel<T, kFirst>, num_processors / 2 * 2, kProductThreads, kSharedBytes, x.device(),
                       data<T>(x), rows, describe_lines<T, kFirst>(weight),
                       has_bias ? data<T>(bias) : nullptr, data<T>(out), routed, size_n, size_k,
                       static_cast<float>(alpha), static_cast<float>(limit));
  };
  with_type(x, [&](auto element) { is_first ? run(element, std::true_type{}) : run(element, std::false_type{}); });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_product, grouped_product);
#endif

}  // namespace minisgl
