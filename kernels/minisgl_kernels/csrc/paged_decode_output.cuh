// What a warp of `paged_decode.cu` writes: whole rows, and parts of rows, which the warp that comes last puts together.

#pragma once

#include "paged_decode_row.cuh"

namespace minisgl {

// A row that several shares hold tiles of.
struct SplitRow {
  int number, first_share, last_share;
  bool starts_in_first;  // with the share's first tile

  // Where a share's part lies: slot 0 for what begins with the share, slot 1 for what ends with it.
  __device__ int slot(int share) const { return 2 * share + (share == first_share && !starts_in_first ? 1 : 0); }
};

// What the warps of one KV head write.
template <typename T, typename C, int kHeadDim>
struct Output {
  using Layout = Tile<T, C, kHeadDim>;
  const Tensors<T, C>& tensors;
  const Shape& shape;
  int kv_head;

  // All of the row was this warp's.
  __device__ void write(const Row<T, C, kHeadDim>& row, const Attention<T, C, kHeadDim>& attention, float2 lse) const {
    const int lane = threadIdx.x % 32, query = lane / 4;
    // This thread writes for another query than those of its columns.
    const float lse_even = __shfl_sync(0xffffffffu, lse.x, query / 2);
    const float lse_odd = __shfl_sync(0xffffffffu, lse.y, query / 2);
    const float weight = prefix_weight(row.prefix_lse, query % 2 ? lse_odd : lse_even);
    const int64_t head = (int64_t{row.number} * shape.num_kv_heads + kv_head) * shape.num_queries + query;
    T* to = tensors.out + head * kHeadDim;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      Pair pairs[2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        pairs[half] = transpose(pack<T>(attention.out[step][2 * half], attention.out[step][2 * half + 1]));
      Layout::pair_up(pairs);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Pair pair = pairs[half];
        if (weight != 0.0f) {
          using Values = typename Vector<T>::Pair;
          const float2 own = widen(reinterpret_cast<const Values&>(pair));
          const float2 other = widen(reinterpret_cast<const Values&>(row.prefix[step][half]));
          pair = pack<T>(own.x + (other.x - own.x) * weight, own.y + (other.y - own.y) * weight);
        }
        if (query < shape.num_queries) *reinterpret_cast<Pair*>(to + Layout::dimension(step, half)) = pair;
      }
    }
  }

  // This warp had a part of the row.
  __device__ void write_part(int slot, const Attention<T, C, kHeadDim>& attention, float2 lse) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const int query = lane % 4 * 2 + column;
      if (query >= shape.num_queries) continue;
      float* to = part(slot, query);
      if (lane < 4) to[kHeadDim] = column ? lse.y : lse.x;
#pragma unroll
      for (int step = 0; step < kHeadDim / 16; ++step) {
        to[Layout::row_dimension(step, 0)] = attention.out[step][column];
        to[Layout::row_dimension(step, 1)] = attention.out[step][column + 2];
      }
    }
  }

  // This warp has written its parts, one in each slot where there is one; who comes last to a row puts it together.
  __device__ void arrive(const SplitRow (&rows)[2]) const {
    if (rows[0].number < 0 && rows[1].number < 0) return;
    const int lane = threadIdx.x % 32;
    __syncwarp();
    const int mine = lane == 0 ? rows[0].number : lane == 1 ? rows[1].number : -1;
    int32_t* counter = tensors.arrivals + int64_t{mine} * shape.num_kv_heads + kv_head;
    const int arrived = mine < 0 ? 0 : add_in_order(counter, 1);
    __syncwarp();
    const int arrived_first = __shfl_sync(0xffffffffu, arrived, 0), arrived_last = __shfl_sync(0xffffffffu, arrived, 1);
    SplitRow row = rows[0];
    int before = arrived_first;
#pragma unroll 1
    for (int slot = 0; slot < 2; ++slot) {
      if (row.number >= 0 && before == row.last_share - row.first_share) {
        if (lane == slot) *counter = 0;
        if (shape.num_queries <= kFewQueries)
          join<kFewQueries>(row);
        else
          join<kMaxQueries>(row);
      }
      row = rows[1];
      before = arrived_last;
    }
  }

 private:
  static constexpr int kPartSize = kHeadDim + 4, kPerLane = kHeadDim / 32, kFewQueries = 2;
  static constexpr float kLowest = -3.0e38f;

  // A lane's dimensions of a query.
  template <typename U>
  struct alignas(kPerLane * sizeof(U)) PerLane {
    U of[kPerLane];
  };
  template <typename U>
  __device__ static auto dimensions(U* query) {
    using Dimensions = std::conditional_t<std::is_const_v<U>, const PerLane<std::remove_const_t<U>>, PerLane<U>>;
    return reinterpret_cast<Dimensions*>(query) + threadIdx.x % 32;
  }

  __device__ float* part(int slot, int query) const {
    return tensors.parts + ((int64_t{slot} * shape.num_kv_heads + kv_head) * shape.num_queries + query) * kPartSize;
  }

  // What a lane has of a share's part, or of the prefix, of up to `kQueries` queries.
  template <typename U, int kQueries>
  struct Piece {
    PerLane<U> out[kQueries];
    float lse[kQueries];
  };

  // The pieces of `kParts` shares from `share` on; those behind the row's last one count nothing.
  template <int kQueries, int kParts>
  __device__ void load_parts(const SplitRow& row, int share, Piece<float, kQueries> (&pieces)[kParts]) const {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
#pragma unroll
      for (int query = 0; query < kQueries; ++query) {
        pieces[i].out[query] = {};
        pieces[i].lse[query] = -INFINITY;
        if (query >= shape.num_queries || share + i > row.last_share) continue;
        const float* from = part(row.slot(share + i), query);
        pieces[i].out[query] = *dimensions(from);
        pieces[i].lse[query] = from[kHeadDim];
      }
    }
  }

  template <int kQueries>
  __device__ void load_prefix(int64_t row, Piece<T, kQueries>& piece) const {
#pragma unroll
    for (int query = 0; query < kQueries; ++query) {
      piece.lse[query] = -INFINITY;
      if (query >= shape.num_queries || tensors.prefix_out == nullptr) continue;
      const int64_t head = kv_head * shape.num_queries + query;
      piece.lse[query] = tensors.prefix_lse[head * shape.num_rows + row];
      piece.out[query] = *dimensions(tensors.prefix_out + (row * num_heads() + head) * kHeadDim);
    }
  }

  __device__ int64_t num_heads() const { return int64_t{shape.num_kv_heads} * shape.num_queries; }

  // In the order of the shares, whoever does it. One warp does it alone, at the end, when all others wait for it: so it
  // works on all queries at once, and loads as many parts ahead as its registers hold.
  template <int kQueries>
  __device__ void join(const SplitRow& row) const {
    constexpr int kParts = kMaxQueries / kQueries;
    Piece<float, kQueries> parts[kParts], next[kParts], later[kParts];
    load_parts(row, row.first_share, next);
    load_parts(row, row.first_share + kParts, later);
    float highest[kQueries], total[kQueries] = {}, sums[kQueries][kPerLane] = {};
#pragma unroll
    for (int query = 0; query < kQueries; ++query) highest[query] = kLowest;  // shares before a window have -infinity
#pragma unroll 1
    for (int share = row.first_share; share <= row.last_share; share += kParts) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        parts[i] = next[i];
        next[i] = later[i];
      }
      load_parts(row, share + 2 * kParts, later);
#pragma unroll
      for (int query = 0; query < kQueries; ++query) {
        float top = highest[query];
#pragma unroll
        for (int i = 0; i < kParts; ++i) top = fmaxf(top, parts[i].lse[query]);
        const float factor = exp2f(highest[query] - top);
        highest[query] = top;
        total[query] *= factor;
#pragma unroll
        for (int k = 0; k < kPerLane; ++k) sums[query][k] *= factor;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          const float weight = exp2f(parts[i].lse[query] - top);
          total[query] += weight;
#pragma unroll
          for (int k = 0; k < kPerLane; ++k) sums[query][k] += weight * parts[i].out[query].of[k];
        }
      }
    }
    Piece<T, kQueries> prefix;
    load_prefix(row.number, prefix);
    const int64_t first_head = row.number * num_heads() + kv_head * shape.num_queries;
#pragma unroll
    for (int query = 0; query < kQueries; ++query) {
      if (query >= shape.num_queries) break;
      const float weight = prefix_weight(prefix.lse[query], highest[query] + log2f(total[query]));
      PerLane<T> joined;
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
        float x = __fdividef(sums[query][k], total[query]);
        if (weight != 0.0f) x += (static_cast<float>(prefix.out[query].of[k]) - x) * weight;
        joined.of[k] = static_cast<T>(x);
      }
      *dimensions(tensors.out + (first_head + query) * kHeadDim) = joined;
    }
  }
};

}  // namespace minisgl
