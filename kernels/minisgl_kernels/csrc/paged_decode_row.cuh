// What a warp of `paged_decode.cu` does with the tiles of a row: one KV head's attention over them.

#pragma once

#include "paged_decode_tile.cuh"

namespace minisgl {

constexpr int kMaxQueries = 8;  // of a KV head
constexpr int kWarps = 8;
constexpr int kRingBytes = 24576;  // of a warp
constexpr int kMinTiles = 8;       // of a worker: less isn't worth putting together again
constexpr float kLog2e = 1.4426950408889634f;

struct Shape {
  int num_rows, num_kv_heads, num_queries;  // queries per KV head
  int page_bits;      // log2 of a page's tiles
  int max_shares;     // into which the list of tiles is divided; with that list's length, below 2^32
  float score_scale;  // with log2(e), since weights are powers of two
  int window;         // how many of its last tokens a row sees
};

template <typename T, typename C>
struct Tensors {
  const T* q;
  const C *k_pool, *v_pool;
  const int32_t *indptr, *pages, *last_page_lens;
  const T* prefix_out;      // of another part of the rows' keys, to be joined; or null
  const float* prefix_lse;  // (num_heads, num_rows), natural logarithms
  const float* sinks;       // (num_heads), scores of one more key whose value is zero; or null
  T* out;
  float* parts;             // (2 * max_shares, num_kv_heads, num_queries, head_dim + 4): output, log-sum-exp, padding
  int32_t* arrivals;        // (num_rows, num_kv_heads), zeros
};

// The list's first tile of each share; shares differ by one tile at most.
struct Shares {
  uint32_t num_tiles, num_shares;

  __device__ Shares(uint32_t num_tiles, uint32_t max_shares) : num_tiles(num_tiles) {
    const uint32_t worthwhile = (num_tiles + kMinTiles - 1) / kMinTiles;
    num_shares = worthwhile < max_shares ? worthwhile : max_shares;
  }
  __device__ int begin(uint32_t share) const { return share * num_tiles / num_shares; }
  __device__ int holding(uint32_t tile) const { return ((tile + 1) * num_shares - 1) / num_tiles; }
};

// What a warp needs of a row. It is loaded a row ahead: while copies fill the memory's queues, an answer takes long.
template <typename T, typename C, int kHeadDim>
struct Row {
  using Layout = Tile<T, C, kHeadDim>;
  static constexpr int kSteps = kHeadDim / 16;
  int number, begin, end, num_tokens;  // its tiles in the list, and tokens in them
  Pair queries[kSteps][2];             // Q' as the product's right side
  Pair prefix[kSteps][2];              // the prefix's output where this thread will write
  float prefix_lse;                    // of query lane / 4

  __device__ void load_place(const Tensors<T, C>& tensors, const Shape& shape, int row) {
    number = row;
    if (row >= shape.num_rows) return;
    begin = tensors.indptr[row] << shape.page_bits;
    end = tensors.indptr[row + 1] << shape.page_bits;
    num_tokens = (end - begin - (1 << shape.page_bits)) * kTile + tensors.last_page_lens[row];
  }

  __device__ void load_values(const Tensors<T, C>& tensors, const Shape& shape, int kv_head) {
    const int lane = threadIdx.x % 32, query = lane / 4;
    const bool exists = number < shape.num_rows && query < shape.num_queries;
    const int64_t head = (int64_t{number} * shape.num_kv_heads + kv_head) * shape.num_queries + query;
    const bool has_prefix = exists && tensors.prefix_out != nullptr;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t from = head * kHeadDim + Layout::dimension(step, half);
        queries[step][half] = exists ? *reinterpret_cast<const Pair*>(tensors.q + from) : 0;
        prefix[step][half] = has_prefix ? *reinterpret_cast<const Pair*>(tensors.prefix_out + from) : 0;
      }
    }
    const int64_t head_in_row = kv_head * shape.num_queries + query;
    prefix_lse = has_prefix ? tensors.prefix_lse[head_in_row * shape.num_rows + number] : -INFINITY;
  }

  // Once the queries have come, and are needed.
  __device__ void make_factors() {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half) queries[step][half] = Layout::as_factors(queries[step][half]);
  }
};

// The weight of a prefix beside other keys, both by their log-sum-exps, to base e and to base 2.
__device__ inline float prefix_weight(float prefix_lse, float lse) {
  // Infinite: it saw no key.
  return fabsf(prefix_lse) < INFINITY ? __fdividef(1.0f, 1.0f + exp2f(lse - prefix_lse * kLog2e)) : 0.0f;
}

// One KV head's attention over the tiles of one row.
template <typename T, typename C, int kHeadDim>
struct Attention {
  using Layout = Tile<T, C, kHeadDim>;
  using Factor = typename Layout::Factor;
  static constexpr int kSteps = kHeadDim / 16;
  float out[kSteps][4];      // O', 16 dimensions x 8 queries each, weighted by 2^(score - highest)
  float highest[2], sum[2];  // of this thread's two queries; the sum is over this thread's tokens

  // As if this thread's two queries had seen nothing but their sinks so far, where these aren't minus infinity.
  __device__ void start(float2 sinks) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[step][i] = 0.0f;
    const bool counts = threadIdx.x % 32 < 4;  // one of the threads that have the same queries
    highest[0] = sinks.x;
    highest[1] = sinks.y;
    sum[0] = counts && sinks.x > -INFINITY ? 1.0f : 0.0f;
    sum[1] = counts && sinks.y > -INFINITY ? 1.0f : 0.0f;
  }

  // Take in a tile, of whose tokens [first, last) count, at least one.
  __device__ void add(const Pair (&queries)[kSteps][2], const C* keys, C* values, int first, int last,
                      float score_scale) {
    float scores[4] = {}, more[4] = {};  // two chains of products, which take turns
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      Pair a[2][4];
      Layout::load_keys(a, keys, step);
      multiply(scores, a[0], queries[step][0], queries[step][1], Factor{});
      multiply(more, a[1], queries[step + 1][0], queries[step + 1][1], Factor{});
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] = (scores[i] + more[i]) * score_scale;
    if (last - first < kTile) forget_others(scores, values, first, last);

    float factor[2];
    bool changed = false;
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const float top = fmaxf(highest[column], max_over_rows(fmaxf(scores[column], scores[column + 2])));
      changed |= top != highest[column];
      factor[column] = exp2f(highest[column] - top);
      highest[column] = top;
      scores[column] = exp2f(scores[column] - top);
      scores[column + 2] = exp2f(scores[column + 2] - top);
      sum[column] = sum[column] * factor[column] + scores[column] + scores[column + 2];
    }
    if (__any_sync(0xffffffffu, changed)) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[step][i] *= factor[i % 2];
    }
    const Pair weights_low = transpose(pack<Factor>(scores[0], scores[1]));
    const Pair weights_high = transpose(pack<Factor>(scores[2], scores[3]));
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      Pair a[2][4];
      Layout::load_values(a, values, step);
      multiply(out[step], a[0], weights_low, weights_high, Factor{});
      multiply(out[step + 1], a[1], weights_low, weights_high, Factor{});
    }
  }

  // The last page's unused places may hold anything, NaN too; tokens before the window are numbers.
  __device__ void forget_others(float (&scores)[4], C* values, int first, int last) {
    const int lane = threadIdx.x % 32;
    constexpr int kChunks = Layout::kChunks;
    for (int i = last * kChunks + lane; i < kTile * kChunks; i += 32)
      *reinterpret_cast<uint4*>(values + i * Layout::kPerChunk) = make_uint4(0, 0, 0, 0);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = lane / 4 + i / 2 * 8;
      if (token < first || token >= last) scores[i] = -INFINITY;
    }
  }

  // Divide by the sums; returns this thread's two queries' log-sum-exps, to base 2.
  __device__ float2 finish() {
    float lse[2];
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const float total = sum_over_rows(sum[column]);
      const float factor = total > 0.0f ? __fdividef(1.0f, total) : 0.0f;  // 0: all its tiles lay behind the row's last token
      lse[column] = highest[column] + log2f(total);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        out[step][column] *= factor;
        out[step][column + 2] *= factor;
      }
    }
    return make_float2(lse[0], lse[1]);
  }
};

}  // namespace minisgl
