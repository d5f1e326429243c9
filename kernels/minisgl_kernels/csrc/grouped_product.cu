// The matrix product of `fused_moe` for many rows per expert. Called through `grouped_product.py`, which describes the
// arguments.
//
// Blocks of a cluster share what they load, so that little is carried from the L2 cache, which is what bounds the product.
// A team of two has the same lines of the weight, each with its half of up to 320 rows of an expert, by 256 columns; a team
// of four has twice the columns, and the blocks of the same half the same rows. The weight's lines are the rows of the
// tensor cores' products, and tokens their columns, of which there may be any multiple of 8: little is computed for nothing.
//
// Of a block's warps four load, stage by stage, and twice four multiply 128 lines each.

#include "wgmma.cuh"

namespace minisgl {

constexpr int kLines = 256, kHalf = 160, kDepth = 64;  // of a block: lines of the weight, rows, depth of a stage
constexpr int kBlocks = 4;  // of a cluster
constexpr int kStages = 4, kProductThreads = 3 * 128;
constexpr int kWeightBytes = kLines * kDepth * 2, kStageBytes = kWeightBytes + kHalf * kDepth * 2;
constexpr int kOutputBytes = 8 << 10;  // that a group of warps writes at a time
constexpr int kSharedBytes = kStages * (kStageBytes + 2 * sizeof(uint64_t)) + 2 * kOutputBytes;

struct Routed {
  const int32_t *members, *blocks, *num_blocks;  // see `moe_routing.Routing`
  int member_stride, block_stride;
};

// A block's team, which is a cluster or half of one, and its place there: whose lines, and whose rows.
struct Team {
  int parts;  // of a tile's lines: 1 or 2
  int number, num_teams, part, half;

  __device__ explicit Team(int parts) : parts(parts) {
    const int block = blockIdx.x % (2 * parts);
    number = blockIdx.x / (2 * parts), num_teams = gridDim.x / (2 * parts);
    part = block / 2, half = block % 2;
  }
  // Sets of blocks of the cluster.
  __device__ uint32_t same_lines() const { return 3u << (rank_in_cluster() & ~1); }
  __device__ uint32_t same_rows() const { return parts == 2 ? 5u << half : 1u << rank_in_cluster(); }
  // The blocks that hear of what this one has read: itself, the one with the same lines, and the one with the same rows.
  __device__ void tell(uint32_t barrier) const {
    const int lane = threadIdx.x % 32;
    if (lane <= parts) arrive_at(barrier, rank_in_cluster() ^ lane);
  }
};

struct ProductTile {
  int num_rows, expert, rank, first_row, line;  // num_rows: 0 behind the last tile
  int begin, end;  // this block's rows of the tile
  int half;  // rows of a block, a multiple of 8; the second one has what is left

  __device__ ProductTile(int number, int num_tiles, int num_columns, const Routed& routed, const Team& team) {
    num_rows = 0;
    if (number >= num_tiles) return;
    const int32_t* block = routed.blocks + number / num_columns;
    num_rows = block[0];
    expert = block[routed.block_stride];
    rank = block[2 * routed.block_stride];
    first_row = block[3 * routed.block_stride];
    line = (number % num_columns * team.parts + team.part) * kLines;
    half = (num_rows + 15) / 16 * 8;
    const int middle = half < num_rows ? half : num_rows;
    begin = team.half == 0 ? 0 : middle;
    end = team.half == 0 ? middle : num_rows;
  }
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

// Rows that stand together, and so are copied at a time: those of the first product are gathered.
template <bool kFirst>
constexpr int kBoxRows = kFirst ? 1 : 8;

// Fills the stages. Of a tile's lines and rows each block asks for the half that the other one, who needs them too, doesn't.
template <bool kFirst>
__device__ void load(const CUtensorMap& rows, const CUtensorMap& weight, const Routed& routed, Stages stages,
                     const Team& team, int size_n, int size_k, int num_columns, int num_tiles) {
  constexpr int kRows = kBoxRows<kFirst>, kBoxes = kHalf / kRows / 4;  // of each of the four warps, at most
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const auto box = [&](int i) { return (i * 4 + warp) * team.parts + team.part; };
  for (int number = team.number; number < num_tiles; number += team.num_teams) {
    const ProductTile tile(number, num_tiles, num_columns, routed, team);
    const int num_boxes = (tile.end - tile.begin + kRows - 1) / kRows;
    const int32_t* members = routed.members + int64_t{tile.expert} * routed.member_stride + tile.rank + tile.begin;
    int sources[(kBoxes + 31) / 32];
#pragma unroll
    for (int i = lane; i < kBoxes; i += 32)
      if (box(i) < num_boxes) sources[i / 32] = kFirst ? members[box(i)] : tile.first_row + tile.begin + box(i) * kRows;
    const int line = tile.expert * size_n + tile.line + team.half * (kLines / 2);
    for (int k = 0; k < size_k; k += kDepth) {
      wait(stages.empty(), stages.parity ^ 1);
      if (warp == 0 && lane == 0) {
        arrive_and_expect(stages.full(), kWeightBytes + num_boxes * kRows * kDepth * 2);
        copy_lines(stages.weight() + team.half * (kWeightBytes / 2), weight, k, line / kGroupLines<kFirst>, stages.full(),
                   team.same_lines());
      }
#pragma unroll
      for (int i = lane; i < kBoxes; i += 32)
        if (box(i) < num_boxes)
          copy_rows(stages.rows() + box(i) * kRows * 128, rows, k, sources[i / 32], stages.full(), team.same_rows());
      stages.advance();
    }
  }
}

// The products of a tile, of this group's 128 lines. While those of a stage run, the next ones are given.
template <typename T, int kColumns>
__device__ void multiply(float (&sums)[2][kHalf / 2], Stages& stages, const Team& team, int group, int size_k) {
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
    if (k > 0) team.tell(before);
    before = stages.empty();
    stages.advance();
  }
  wait_for_products<0>();
  team.tell(before);
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
__global__ void __cluster_dims__(kBlocks) __launch_bounds__(kProductThreads, 1)
    grouped_product_kernel(const __grid_constant__ CUtensorMap rows, const __grid_constant__ CUtensorMap weight,
                           const T* bias, T* out, Routed routed, int parts, int size_n, int size_k, float alpha,
                           float limit) {
  const Team team(parts);
  const uint32_t output = dynamic_tiles() + kStages * kStageBytes;
  Stages stages{dynamic_tiles(), output + 2 * kOutputBytes};
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // the same in a warp, so that the compiler sees it
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(stages.barriers + i * 16, 1);  // who says what comes
      init_barrier(stages.barriers + i * 16 + 8, (1 + parts) * 2 * 4);  // warps that multiply, of all that share
    }
    end_of_barriers();
  }
  meet_cluster();
  wait_for_inputs();
  const int num_columns = (size_n + parts * kLines - 1) / (parts * kLines), num_tiles = *routed.num_blocks * num_columns;
  if (group == 2) {
    give_registers<40>();
    load<kFirst>(rows, weight, routed, stages, team, size_n, size_k, num_columns, num_tiles);
  } else {
    take_registers<232>();
    ProductTile tile(team.number, num_tiles, num_columns, routed, team);
    for (int number = team.number; number < num_tiles; number += team.num_teams) {
      const ProductTile next(number + team.num_teams, num_tiles, num_columns, routed, team);
      float sums[2][kHalf / 2];
      switch (tile.half / 8) {
#define CASE(n) \
  case n: multiply<T, 8 * n>(sums, stages, team, group, size_k); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10)
        CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(16) CASE(17) CASE(18) CASE(19) CASE(20)
#undef CASE
      }
      write<T, kFirst>(sums, output + group * kOutputBytes, out,
                       bias == nullptr ? nullptr : bias + int64_t{tile.expert} * size_n, tile.first_row + tile.begin,
                       tile.end - tile.begin, tile.line + group * 128, size_n, alpha, limit);
      tile = next;
    }
  }
  __syncwarp();
  meet_cluster();  // others may still copy to this block's memory, and arrive at its barriers
}

// Parts of a team's lines: two, if not many of the second ones would be behind the last line.
inline int num_parts(int size_n) {
  const int num_tiles = (size_n + kLines - 1) / kLines;
  return num_tiles % 2 == 0 || num_tiles > 16 ? 2 : 1;
}

#ifndef MINISGL_EMULATE
// Describes a tensor to the tensor memory accelerator, innermost dimension first.
template <typename T, int kDims>
CUtensorMap describe(const TensorView& tensor, const cuuint64_t (&sizes)[kDims], const cuuint64_t (&strides)[kDims - 1],
                     const cuuint32_t (&box)[kDims]) {
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
  const CUresult error = encode(&map, type, kDims, data<T>(tensor), sizes, strides, box, steps,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TVM_FFI_ICHECK(error == CUDA_SUCCESS) << "cuTensorMapEncodeTiled: error " << static_cast<int>(error);
  return map;
}

template <typename T, bool kFirst>
CUtensorMap describe_rows(const TensorView& x) {
  const cuuint64_t size_k = x.size(1), num_rows = x.size(0);
  return describe<T, 2>(x, {size_k, num_rows}, {size_k * sizeof(T)}, {kDepth, kBoxRows<kFirst>});
}

// Elements of a line, lines with the same part in eight pairs (or eight lines), the two parts, and groups of both.
template <typename T, bool kFirst>
CUtensorMap describe_lines(const TensorView& weight) {
  constexpr int kGroup = kGroupLines<kFirst>, kOfPair = kGroup / 8;
  const cuuint64_t size_k = weight.size(2), line = size_k * sizeof(T);
  const cuuint64_t num_groups = static_cast<cuuint64_t>(weight.size(0)) * weight.size(1) / kGroup;
  return describe<T, 4>(weight, {size_k, 8, kOfPair, num_groups}, {kOfPair * line, line, kGroup * line},
                        {kDepth, 8, kOfPair, kLines / 2 / kGroup});
}

// How many clusters run at a time: where a GPU's groups of processors aren't multiples of a cluster, not all do.
template <typename T, bool kFirst>
int num_clusters() {
  static const int num = [] {
    const auto kernel = grouped_product_kernel<T, kFirst>;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kBlocks);
    config.blockDim = dim3(kProductThreads);
    config.dynamicSmemBytes = kSharedBytes;
    int found = 0;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&found, kernel, &config);
    TVM_FFI_ICHECK(error == cudaSuccess && found > 0) << "clusters don't run here: " << cudaGetErrorString(error);
    return found;
  }();
  return num;
}

void grouped_product(TensorView x, TensorView weight, TensorView bias, TensorView out, TensorView members,
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
    launch_with_shared(grouped_product_kernel<T, kFirst>, num_clusters<T, kFirst>() * kBlocks, kProductThreads,
                       kSharedBytes, x.device(), describe_rows<T, kFirst>(x), describe_lines<T, kFirst>(weight),
                       has_bias ? data<T>(bias) : nullptr, data<T>(out), routed, num_parts(size_n), size_n, size_k,
                       static_cast<float>(alpha), static_cast<float>(limit));
  };
  with_type(x, [&](auto element) { is_first ? run(element, std::true_type{}) : run(element, std::false_type{}); });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_product, grouped_product);
#endif

}  // namespace minisgl
