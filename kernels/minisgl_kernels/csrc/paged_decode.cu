// Attention of decode rows over their page lists. Called through `paged_decode.py`, which describes the arguments.
//
// Decode attention is as fast as memory if the copies never pause and all multiprocessors finish together. So the pages
// of all rows are one list of tiles of 16 tokens, and each worker, a warp with one KV head, gets an equal share of that
// list, wherever rows begin and end in it (cf. Osama et al. 2023, Stream-K). A worker's copies run ahead of its sums by a
// ring of tiles, across rows too. A row that ends up with several workers is put together by the one that finishes last.
//
// Scores are S' = K Q' and outputs O' = V' P', so that the 16 tokens of a tile, or 16 dimensions, are the rows of the
// tensor core's products, and a KV head's queries the 8 columns.
//
// A sink is what the sums over a row begin with: in the share that holds the row's first tile, so it counts once.

#include "paged_decode_output.cuh"

namespace minisgl {

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

// The sinks, to base 2, of the two queries of a KV head that a thread keeps sums of.
template <typename T, typename C>
__device__ float2 load_sinks(const Tensors<T, C>& tensors, const Shape& shape, int kv_head) {
  const int query = threadIdx.x % 4 * 2;
  const float* from = tensors.sinks + kv_head * shape.num_queries + query;
  const bool exist = tensors.sinks != nullptr;
  return make_float2(exist && query < shape.num_queries ? from[0] * kLog2e : -INFINITY,
                     exist && query + 1 < shape.num_queries ? from[1] * kLog2e : -INFINITY);
}

// Copies a worker's tiles into its ring, in order.
template <typename T, typename C, int kHeadDim>
struct Loader {
  using Layout = Tile<T, C, kHeadDim>;
  static constexpr int kTileSize = Layout::kSize;  // of keys; as many values lie behind them
  static constexpr int kStages = kRingBytes / (2 * kTileSize * int{sizeof(C)});
  const C *k_pool, *v_pool;  // from this thread's chunk of the first page on
  const int32_t* pages;
  C* ring;
  int page_bits, token_stride, next, end;
  int page_of_lane, page_of_lane_later;  // of the 32 tiles from a multiple of 32 behind the first on, and of those behind

  __device__ Loader(const Tensors<T, C>& tensors, const Shape& shape, int kv_head, C* ring, int begin, int end)
      : pages(tensors.pages), ring(ring), page_bits(shape.page_bits), next(begin), end(end) {
    constexpr int kChunks = Layout::kChunks;
    const int lane = threadIdx.x % 32;
    token_stride = shape.num_kv_heads * kHeadDim;
    const int64_t start = kv_head * kHeadDim + lane % kChunks * Layout::kPerChunk + int64_t{lane / kChunks} * token_stride;
    k_pool = tensors.k_pool + start;
    v_pool = tensors.v_pool + start;
    page_of_lane = page(begin + lane);
    page_of_lane_later = page(begin + 32 + lane);
  }

  __device__ int page(int tile) const { return tile < end ? pages[tile >> page_bits] : 0; }

  __device__ void load_next(int stage, int number) {
    constexpr int kChunks = Layout::kChunks, kTokens = 32 / kChunks;  // that one access of the warp covers
    if (next < end) {
      const int lane = threadIdx.x % 32;
      if (number % 32 == 0 && number > 0) {
        page_of_lane = page_of_lane_later;
        page_of_lane_later = page(next + 32 + lane);
      }
      const int64_t page = __shfl_sync(0xffffffffu, page_of_lane, number % 32);
      const int64_t from = ((page << page_bits) + (next & ((1 << page_bits) - 1))) * kTile * token_stride;
      C* to = ring + stage * 2 * kTileSize;
#pragma unroll
      for (int token = 0; token < kTile; token += kTokens) {
        const int target = Layout::place(token + lane / kChunks, lane % kChunks);
        copy_async(to + target, k_pool + from + token * token_stride);
        copy_async(to + kTileSize + target, v_pool + from + token * token_stride);
      }
      ++next;
    }
    end_of_copies();  // empty at the end, so that the number of groups still says which tile has come
  }
};

template <typename T, typename C, int kHeadDim>
__global__ void __launch_bounds__(kWarps * 32) paged_decode_kernel(const Tensors<T, C> tensors, const Shape shape) {
  using Load = Loader<T, C, kHeadDim>;
  constexpr int kStages = Load::kStages;
  const int warp = threadIdx.x / 32, worker = blockIdx.x * kWarps + warp;
  const int kv_head = worker % shape.num_kv_heads, share = worker / shape.num_kv_heads;
  // The lists, and all keys and values but the rows' last, were there before the kernel ahead began.
  const Shares shares(tensors.indptr[shape.num_rows] << shape.page_bits, shape.max_shares);
  const bool works = share < static_cast<int>(shares.num_shares);
  const int begin = works ? shares.begin(share) : 0, end = works ? shares.begin(share + 1) : 0;
  C* ring = static_cast<C*>(dynamic_shared()) + warp * (kRingBytes / sizeof(C));
  Load loader(tensors, shape, kv_head, ring, begin, end);
  Row<T, C, kHeadDim> row, next_row;
  row.load_place(tensors, shape, row_holding(begin, tensors.indptr, shape));
  next_row.load_place(tensors, shape, row.number + 1);
  const bool early = begin + kStages - 1 <= row.end - (1 << shape.page_bits);
  if (!early) wait_for_inputs();
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) loader.load_next(stage, stage);
  if (early) wait_for_inputs();
  if (!works) return;
  row.load_values(tensors, shape, kv_head);

  const Output<T, C, kHeadDim> output{tensors, shape, kv_head};
  const float2 sinks = load_sinks(tensors, shape, kv_head), no_sinks = make_float2(-INFINITY, -INFINITY);
  SplitRow split[2] = {{-1}, {-1}};
  Attention<T, C, kHeadDim> attention;
  int tile = begin, number = 0;
  while (tile < end) {
    next_row.load_values(tensors, shape, kv_head);
    row.make_factors();
    const int until = row.end < end ? row.end : end;
    attention.start(tile == row.begin ? sinks : no_sinks);
    for (; tile < until; ++tile, ++number) {
      wait_for_copies<kStages - 2>();
      __syncwarp();  // everybody's copies have come, and nobody reads the tile before any more
      loader.load_next((number + kStages - 1) % kStages, number + kStages - 1);
      C* keys = ring + number % kStages * 2 * Load::kTileSize;
      const int rest = row.num_tokens - (tile - row.begin) * kTile;
      const int first = rest > shape.window ? rest - shape.window : 0, last = rest < kTile ? rest : kTile;
      if (first < last) attention.add(row.queries, keys, keys + Load::kTileSize, first, last, shape.score_scale);
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
                  TensorView last_page_lens, TensorView prefix_out, TensorView prefix_lse, TensorView sinks,
                  TensorView out, TensorView parts, TensorView arrivals, double scale, bool has_prefix, bool has_sinks,
                  int window) {
  const int num_heads = q.size(1), head_dim = q.size(2), num_kv_heads = k_pool.size(2);
  int page_bits = 0;
  while ((kTile << page_bits) < k_pool.size(1)) ++page_bits;
  const Shape shape{static_cast<int>(q.size(0)),
                    num_kv_heads,
                    num_heads / num_kv_heads,
                    page_bits,
                    static_cast<int>(parts.size(0)) / 2,
                    static_cast<float>(scale) * kLog2e,
                    window};
  TVM_FFI_ICHECK(k_pool.size(1) == kTile << page_bits) << "a page isn't " << kTile << " tokens times a power of two";
  TVM_FFI_ICHECK((pages.size(0) << page_bits) * shape.max_shares < int64_t{1} << 32) << "the page lists are too long";
  TVM_FFI_ICHECK(shape.num_queries <= kMaxQueries) << "more than " << kMaxQueries << " queries per KV head";
  const int num_blocks = (shape.max_shares * num_kv_heads + kWarps - 1) / kWarps;
  with_types(q, k_pool, [&](auto element, auto cached) {
    using T = decltype(element);
    using C = decltype(cached);
    const auto integers = [](const TensorView& x) { return static_cast<int32_t*>(x.data_ptr()); };
    const auto floats = [](const TensorView& x) { return static_cast<float*>(x.data_ptr()); };
    const Tensors<T, C> tensors{data<T>(q), data<C>(k_pool), data<C>(v_pool), integers(indptr), integers(pages),
                             integers(last_page_lens), has_prefix ? data<T>(prefix_out) : nullptr, floats(prefix_lse),
                             has_sinks ? floats(sinks) : nullptr, data<T>(out), floats(parts), integers(arrivals)};
    const auto run = [&](auto kernel) {
      launch_with_shared(kernel, num_blocks, kWarps * 32, kWarps * kRingBytes, q.device(), tensors, shape);
    };
    if (head_dim == 64) return run(paged_decode_kernel<T, C, 64>);
    TVM_FFI_ICHECK(head_dim == 128) << "head dimension " << head_dim << " isn't compiled";
    run(paged_decode_kernel<T, C, 128>);
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_decode, paged_decode);
#endif

}  // namespace minisgl
