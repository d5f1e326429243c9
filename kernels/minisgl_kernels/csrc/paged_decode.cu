// Attention of decode rows over their page lists. Called through `paged_decode.py`, which describes the arguments.
//
// Decode attention is as fast as memory if the copies never pause and all multiprocessors finish together. So the pages
// of all rows are one list of tiles of 16 tokens, and each worker, a warp with one KV head, gets an equal share of that
// list, wherever rows begin and end in it (cf. Osama et al. 2023, Stream-K). A worker's copies run ahead of its sums by a
// ring of tiles, across rows too. A row that ends up with several workers is put together by the one that finishes last.
//
// Scores are S' = K Q' and outputs O' = V' P', so that the 16 tokens of a tile, or 16 dimensions, are the rows of the
// tensor core's products, and a KV head's queries the 8 columns.

#include "warp.cuh"

namespace minisgl {

constexpr int kTile = 16;       // tokens
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
};

template <typename T>
struct Tensors {
  const T *q, *k_pool, *v_pool;
  const int32_t *indptr, *pages, *last_page_lens;
  const T* prefix_out;      // of another part of the rows' keys, to be joined; or null
  const float* prefix_lse;  // (num_heads, num_rows), natural logarithms
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

// Chunks of 16 bytes of a tile's row change places, so that 8 rows' same chunks lie in different banks.
template <int kHeadDim>
__device__ int place(int token, int chunk) {
  return token * kHeadDim + ((chunk ^ (token % 8)) * kVector);
}

// What a warp needs of a row. It is loaded a row ahead: while copies fill the memory's queues, an answer takes long.
template <typename T, int kHeadDim>
struct Row {
  static constexpr int kSteps = kHeadDim / 16;
  int number, begin, end, num_tokens;  // its tiles in the list, and tokens in them
  Pair queries[kSteps][2];             // Q' as the product's right side
  Pair prefix[kSteps][2];              // the prefix's output where this thread will write
  float prefix_lse;                    // of query lane / 4

  __device__ void load_place(const Tensors<T>& tensors, const Shape& shape, int row) {
    number = row;
    if (row >= shape.num_rows) return;
    begin = tensors.indptr[row] << shape.page_bits;
    end = tensors.indptr[row + 1] << shape.page_bits;
    num_tokens = (end - begin - (1 << shape.page_bits)) * kTile + tensors.last_page_lens[row];
  }

  __device__ void load_values(const Tensors<T>& tensors, const Shape& shape, int kv_head) {
    const int lane = threadIdx.x % 32, query = lane / 4;
    const bool exists = number < shape.num_rows && query < shape.num_queries;
    const int64_t head = (int64_t{number} * shape.num_kv_heads + kv_head) * shape.num_queries + query;
    const int64_t at = head * kHeadDim + lane % 4 * 2;
    const bool has_prefix = exists && tensors.prefix_out != nullptr;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t from = at + step * 16 + half * 8;
        queries[step][half] = exists ? *reinterpret_cast<const Pair*>(tensors.q + from) : 0;
        prefix[step][half] = has_prefix ? *reinterpret_cast<const Pair*>(tensors.prefix_out + from) : 0;
      }
    }
    const int64_t head_in_row = kv_head * shape.num_queries + query;
    prefix_lse = has_prefix ? tensors.prefix_lse[head_in_row * shape.num_rows + number] : -INFINITY;
  }
};

// The weight of a prefix beside other keys, both by their log-sum-exps, to base e and to base 2.
__device__ inline float prefix_weight(float prefix_lse, float lse) {
  // Infinite: it saw no key.
  return fabsf(prefix_lse) < INFINITY ? __fdividef(1.0f, 1.0f + exp2f(lse - prefix_lse * kLog2e)) : 0.0f;
}

// One KV head's attention over the tiles of one row.
template <typename T, int kHeadDim>
struct Attention {
  static constexpr int kSteps = kHeadDim / 16;
  float out[kSteps][4];      // O', 16 dimensions x 8 queries each, weighted by 2^(score - highest)
  float highest[2], sum[2];  // of this thread's two queries; the sum is over this thread's tokens

  __device__ void start() {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[step][i] = 0.0f;
    highest[0] = highest[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
  }

  // Take in a tile, of which the first `num_tokens` count, at least one.
  __device__ void add(const Pair (&queries)[kSteps][2], const T* keys, T* values, int num_tokens, float score_scale) {
    const int lane = threadIdx.x % 32;
    float scores[4] = {}, more[4] = {};  // two chains of products, which take turns
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Pair a[4];
      load_matrices(a, keys + place<kHeadDim>(lane % 16, 2 * step + lane / 16));
      multiply(step % 2 ? more : scores, a, queries[step][0], queries[step][1], T{});
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] = (scores[i] + more[i]) * score_scale;
    if (num_tokens < kTile) forget_rest(scores, values, num_tokens);

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
    const Pair weights_low = transpose(pack<T>(scores[0], scores[1]));
    const Pair weights_high = transpose(pack<T>(scores[2], scores[3]));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Pair a[4];
      load_matrices_transposed(a, values + place<kHeadDim>(lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
      multiply(out[step], a, weights_low, weights_high, T{});
    }
  }

  // The last page's unused places may hold anything, NaN too.
  __device__ void forget_rest(float (&scores)[4], T* values, int num_tokens) {
    const int lane = threadIdx.x % 32;
    constexpr int kChunks = kHeadDim / kVector;
    for (int i = num_tokens * kChunks + lane; i < kTile * kChunks; i += 32)
      *reinterpret_cast<uint4*>(values + i * kVector) = make_uint4(0, 0, 0, 0);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (lane / 4 + i / 2 * 8 >= num_tokens) scores[i] = -INFINITY;
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

// The row that holds a tile: as many as end before it. All lanes of the warp get it.
__device__ inline int row_holding(int tile, const int32_t* indptr, const Shape& shape) {
  const int lane = threadIdx.x % 32;
  int ended = 0;
#pragma unroll 8
  for (int row = lane; row < shape.num_rows; row += 32) ended += (indptr[row + 1] << shape.page_bits) <= tile;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) ended += __shfl_xor_sync(0xffffffffu, ended, offset);
  return ended;
}

// Copies a worker's tiles into its ring, in order.
template <typename T, int kHeadDim>
struct Loader {
  static constexpr int kTileSize = kTile * kHeadDim;  // of keys; as many values lie behind them
  static constexpr int kStages = kRingBytes / (2 * kTileSize * int{sizeof(T)});
  const T *k_pool, *v_pool;  // from this thread's chunk of the first page on
  const int32_t* pages;
  T* ring;
  int page_bits, token_stride, next, end;
  int page_of_lane, page_of_lane_later;  // of the 32 tiles from a multiple of 32 behind the first on, and of those behind

  __device__ Loader(const Tensors<T>& tensors, const Shape& shape, int kv_head, T* ring, int begin, int end)
      : pages(tensors.pages), ring(ring), page_bits(shape.page_bits), next(begin), end(end) {
    constexpr int kChunks = kHeadDim / kVector;
    const int lane = threadIdx.x % 32;
    token_stride = shape.num_kv_heads * kHeadDim;
    const int64_t start = kv_head * kHeadDim + lane % kChunks * kVector + int64_t{lane / kChunks} * token_stride;
    k_pool = tensors.k_pool + start;
    v_pool = tensors.v_pool + start;
    page_of_lane = page(begin + lane);
    page_of_lane_later = page(begin + 32 + lane);
  }

  __device__ int page(int tile) const { return tile < end ? pages[tile >> page_bits] : 0; }

  __device__ void load_next(int stage, int number) {
    constexpr int kChunks = kHeadDim / kVector, kTokens = 32 / kChunks;  // that one access of the warp covers
    if (next < end) {
      const int lane = threadIdx.x % 32;
      if (number % 32 == 0 && number > 0) {
        page_of_lane = page_of_lane_later;
        page_of_lane_later = page(next + 32 + lane);
      }
      const int64_t page = __shfl_sync(0xffffffffu, page_of_lane, number % 32);
      const int64_t from = ((page << page_bits) + (next & ((1 << page_bits) - 1))) * kTile * token_stride;
      T* to = ring + stage * 2 * kTileSize;
#pragma unroll
      for (int token = 0; token < kTile; token += kTokens) {
        const int target = place<kHeadDim>(token + lane / kChunks, lane % kChunks);
        copy_async(to + target, k_pool + from + token * token_stride);
        copy_async(to + kTileSize + target, v_pool + from + token * token_stride);
      }
      ++next;
    }
    end_of_copies();  // empty at the end, so that the number of groups still says which tile has come
  }
};

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kWarps * 32) paged_decode_kernel(const Tensors<T> tensors, const Shape shape) {
  using Load = Loader<T, kHeadDim>;
  constexpr int kStages = Load::kStages;
  const int warp = threadIdx.x / 32, worker = blockIdx.x * kWarps + warp;
  const int kv_head = worker % shape.num_kv_heads, share = worker / shape.num_kv_heads;
  // The lists, and all keys and values but the rows' last, were there before the kernel ahead began.
  const Shares shares(tensors.indptr[shape.num_rows] << shape.page_bits, shape.max_shares);
  const bool works = share < static_cast<int>(shares.num_shares);
  const int begin = works ? shares.begin(share) : 0, end = works ? shares.begin(share + 1) : 0;
  Row<T, kHeadDim> row, next_row;
  row.load_place(tensors, shape, row_holding(begin, tensors.indptr, shape));
  next_row.load_place(tensors, shape, row.number + 1);
  T* ring = static_cast<T*>(dynamic_shared()) + warp * (kRingBytes / sizeof(T));
  Load loader(tensors, shape, kv_head, ring, begin, end);
  const bool early = begin + kStages - 1 <= row.end - (1 << shape.page_bits);
  if (!early) wait_for_inputs();
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) loader.load_next(stage, stage);
  if (early) wait_for_inputs();
  if (!works) return;
  row.load_values(tensors, shape, kv_head);

  const Output<T, kHeadDim> output{tensors, shape, kv_head, reinterpret_cast<float*>(ring)};
  SplitRow split[2] = {{-1}, {-1}};
  Attention<T, kHeadDim> attention;
  int tile = begin, number = 0;
  while (tile < end) {
    next_row.load_values(tensors, shape, kv_head);
    const int until = row.end < end ? row.end : end;
    attention.start();
    for (; tile < until; ++tile, ++number) {
      wait_for_copies<kStages - 2>();
      __syncwarp();  // everybody's copies have come, and nobody reads the tile before any more
      loader.load_next((number + kStages - 1) % kStages, number + kStages - 1);
      T* keys = ring + number % kStages * 2 * Load::kTileSize;
      const int rest = row.num_tokens - (tile - row.begin) * kTile;
      if (rest > 0)
        attention.add(row.queries, keys, keys + Load::kTileSize, rest < kTile ? rest : kTile, shape.score_scale);
    }
    const float2 lse = attention.finish();
    if (begin <= row.begin && row.end <= end) {
      output.write(row, attention, lse);
    } else {
      const int first_share = shares.holding(row.begin);
      const SplitRow part{row.number, first_share, shares.holding(row.end - 1), shares.begin(first_share) == row.begin};
      output.write_part(part.slot(share), attention, lse);
      if (begin < row.begin)
        split[1] = part;
      else
        split[0] = part;
    }
    row = next_row;
    next_row.load_place(tensors, shape, row.number + 1);
  }
  output.arrive(split);
}

#ifndef MINISGL_EMULATE
void paged_decode(TensorView q, TensorView k_pool, TensorView v_pool, TensorView indptr, TensorView pages,
                  TensorView last_page_lens, TensorView prefix_out, TensorView prefix_lse, TensorView out,
                  TensorView parts, TensorView arrivals, double scale, bool has_prefix) {
  const int num_heads = q.size(1), head_dim = q.size(2), num_kv_heads = k_pool.size(2);
  int page_bits = 0;
  while ((kTile << page_bits) < k_pool.size(1)) ++page_bits;
  const Shape shape{static_cast<int>(q.size(0)),
                    num_kv_heads,
                    num_heads / num_kv_heads,
                    page_bits,
                    static_cast<int>(parts.size(0)) / 2,
                    static_cast<float>(scale) * kLog2e};
  TVM_FFI_ICHECK(k_pool.size(1) == kTile << page_bits) << "a page isn't " << kTile << " tokens times a power of two";
  TVM_FFI_ICHECK((pages.size(0) << page_bits) * shape.max_shares < int64_t{1} << 32) << "the page lists are too long";
  TVM_FFI_ICHECK(shape.num_queries <= kMaxQueries) << "more than " << kMaxQueries << " queries per KV head";
  const int num_blocks = (shape.max_shares * num_kv_heads + kWarps - 1) / kWarps;
  with_type(q, [&](auto element) {
    using T = decltype(element);
    const auto integers = [](const TensorView& x) { return static_cast<int32_t*>(x.data_ptr()); };
    const auto floats = [](const TensorView& x) { return static_cast<float*>(x.data_ptr()); };
    const Tensors<T> tensors{data<T>(q), data<T>(k_pool), data<T>(v_pool), integers(indptr), integers(pages),
                             integers(last_page_lens), has_prefix ? data<T>(prefix_out) : nullptr, floats(prefix_lse),
                             data<T>(out), floats(parts), integers(arrivals)};
    const auto run = [&](auto kernel) {
      launch_with_shared(kernel, num_blocks, kWarps * 32, kWarps * kRingBytes, q.device(), tensors, shape);
    };
    if (head_dim == 64) return run(paged_decode_kernel<T, 64>);
    TVM_FFI_ICHECK(head_dim == 128) << "head dimension " << head_dim << " isn't compiled";
    run(paged_decode_kernel<T, 128>);
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_decode, paged_decode);
#endif

}  // namespace minisgl
