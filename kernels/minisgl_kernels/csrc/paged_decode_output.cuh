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
template <typename T, int kHeadDim>
struct Output {
  const Tensors<T>& tensors;
  const Shape& shape;
  int kv_head;
  float* ring;  // the warp's shared memory

  // All of the row was this warp's.
  __device__ void write(const Row<T, kHeadDim>& row, const Attention<T, kHeadDim>& attention, float2 lse) const {
    const int lane = threadIdx.x % 32, query = lane / 4;
    // This thread writes for another query than those of its columns.
    const float lse_even = __shfl_sync(0xffffffffu, lse.x, query / 2);
    const float lse_odd = __shfl_sync(0xffffffffu, lse.y, query / 2);
    const float weight = prefix_weight(row.prefix_lse, query % 2 ? lse_odd : lse_even);
    const int64_t head = (int64_t{row.number} * shape.num_kv_heads + kv_head) * shape.num_queries + query;
    T* to = tensors.out + head * kHeadDim + lane % 4 * 2;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Pair pair = transpose(pack<T>(attention.out[step][2 * half], attention.out[step][2 * half + 1]));
        if (weight != 0.0f) {
          using Values = typename Vector<T>::Pair;
          const float2 own = widen(reinterpret_cast<const Values&>(pair));
          const float2 other = widen(reinterpret_cast<const Values&>(row.prefix[step][half]));
          pair = pack<T>(own.x + (other.x - own.x) * weight, own.y + (other.y - own.y) * weight);
        }
        if (query < shape.num_queries) *reinterpret_cast<Pair*>(to + step * 16 + half * 8) = pair;
      }
    }
  }

  // This warp had a part of the row.
  __device__ void write_part(int slot, const Attention<T, kHeadDim>& attention, float2 lse) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const int query = lane % 4 * 2 + column;
      if (query >= shape.num_queries) continue;
      float* to = part(slot, query);
      if (lane < 4) to[kHeadDim] = column ? lse.y : lse.x;
#pragma unroll
      for (int step = 0; step < kHeadDim / 16; ++step) {
        to[step * 16 + lane / 4] = attention.out[step][column];
        to[step * 16 + lane / 4 + 8] = attention.out[step][column + 2];
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
        join(row);
      }
      row = rows[1];
      before = arrived_last;
    }
  }

 private:
  static constexpr int kPartSize = kHeadDim + 4;

  __device__ float* part(int slot, int query) const {
    return tensors.parts + ((int64_t{slot} * shape.num_kv_heads + kv_head) * shape.num_queries + query) * kPartSize;
  }

  // In the order of the shares, whoever does it. Parts come through the ring in chunks, whose ways overlap.
  __device__ void join(const SplitRow& row) const {
    constexpr int kPerLane = kHeadDim / 32, kChunk = 8, kAhead = 5;
    constexpr uint32_t kAll = 0xffffffffu;
    static_assert(kAhead * kChunk * kPartSize * sizeof(float) <= kRingBytes);
    const int lane = threadIdx.x % 32, num_shares = row.last_share - row.first_share + 1;
    int next = 0, next_part = 0, next_query = 0;
    const auto load_next = [&] {
      if (next_query < shape.num_queries) {
        float* to = ring + next++ % kAhead * (kChunk * kPartSize) + lane * 4;
#pragma unroll 1
        for (int i = 0; i < kChunk && next_part < num_shares; ++i, ++next_part, to += kPartSize) {
          const float* from = part(row.slot(row.first_share + next_part), next_query) + lane * 4;
          if (lane * 4 < kHeadDim) copy_async(to, from);
          if (lane == 0) copy_async(to + kHeadDim, from + kHeadDim);
        }
        if (next_part == num_shares) next_part = 0, ++next_query;
      }
      end_of_copies();
    };
#pragma unroll 1
    for (int i = 0; i < kAhead - 1; ++i) load_next();
    const int64_t head = (int64_t{row.number} * shape.num_kv_heads + kv_head) * shape.num_queries;
    int number = 0;
#pragma unroll 1
    for (int query = 0; query < shape.num_queries; ++query) {
      const int64_t at = (head + query) * kHeadDim + lane * kPerLane;
      T prefix[kPerLane];
      float prefix_lse = -INFINITY, highest = -INFINITY, total = 0.0f, sums[kPerLane] = {};
      if (tensors.prefix_out != nullptr) {
        prefix_lse = tensors.prefix_lse[int64_t{kv_head * shape.num_queries + query} * shape.num_rows + row.number];
#pragma unroll
        for (int k = 0; k < kPerLane; ++k) prefix[k] = tensors.prefix_out[at + k];
      }
#pragma unroll 1
      for (int first = 0; first < num_shares; first += kChunk, ++number) {
        wait_for_copies<kAhead - 2>();
        __syncwarp();
        load_next();
        const float* chunk = ring + number % kAhead * (kChunk * kPartSize);
        const int size = num_shares - first < kChunk ? num_shares - first : kChunk;
        const float lse = lane < size ? chunk[lane * kPartSize + kHeadDim] : -INFINITY;
        float top = fmaxf(highest, lse);
#pragma unroll
        for (int offset = kChunk / 2; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(kAll, top, offset));
        top = __shfl_sync(kAll, top, 0);
        const float factor = exp2f(highest - top), weight = exp2f(lse - top);
        highest = top;
        total *= factor;
#pragma unroll
        for (int k = 0; k < kPerLane; ++k) sums[k] *= factor;
        for (int i = 0; i < size; ++i) {
          const float of_part = __shfl_sync(kAll, weight, i);
          total += of_part;
#pragma unroll
          for (int k = 0; k < kPerLane; ++k) sums[k] += of_part * chunk[i * kPartSize + lane * kPerLane + k];
        }
      }
      const float of_prefix = prefix_weight(prefix_lse, highest + log2f(total));
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
        float x = __fdividef(sums[k], total);
        if (of_prefix != 0.0f) x += (static_cast<float>(prefix[k]) - x) * of_prefix;
        tensors.out[at + k] = static_cast<T>(x);
      }
    }
    wait_for_copies<0>();  // so that another join finds the ring empty
    __syncwarp();
  }
};

}  // namespace minisgl
