// Attention of one query token per row over a paged KV pool, on a CPU.
//
// A task is a row, or some of its KV heads where there are fewer rows than threads. It reads its pages once, in the order
// in which they lie in memory (all heads of a token are neighbours), with an online softmax over pages. Sums are float32
// whatever the pool's type. Called through `decode_attention.py`, which describes the arguments.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <omp.h>

namespace {

inline float to_float(float x) { return x; }

struct bf16 {
  uint16_t bits;
};

inline float to_float(bf16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Sign, four bits of exponent with a bias of 7, three of mantissa; all but the sign ones is NaN, and nothing is infinite.
struct e4m3 {
  uint8_t bits;
};

inline float to_float(e4m3 x) {
  const uint32_t magnitude = x.bits & 0x7Fu, sign = (x.bits & 0x80u) << 24;
  const uint32_t normal = ((magnitude << 20) + (120u << 23)) | sign;  // a float's bias is 127
  float value;
  std::memcpy(&value, &normal, sizeof value);
  if (magnitude < 8) value = static_cast<float>(static_cast<int>(magnitude)) * (sign ? -0x1p-9f : 0x1p-9f);
  return magnitude == 0x7Fu ? std::numeric_limits<float>::quiet_NaN() : value;
}

inline void store(float* where, float x) { *where = x; }

inline void store(bf16* where, float x) {  // round to nearest, ties to even; NaN stays NaN
  uint32_t wide;
  std::memcpy(&wide, &x, sizeof wide);
  const uint32_t rounded = std::isnan(x) ? (wide | 0x400000u) : wide + 0x7FFFu + ((wide >> 16) & 1u);
  where->bits = static_cast<uint16_t>(rounded >> 16);
}

struct Arguments {
  const void *q, *k_pool, *v_pool;
  void* out;
  const int32_t *page_table, *slots, *kv_lens;
  int num_rows, num_kv_heads, group, head_dim, page_size;
  int64_t q_stride;      // elements between the queries of two rows
  int64_t table_stride;  // entries between two lines of the page table
  float scale;
  int window;          // 0: none
  const float* sinks;  // (num_kv_heads * group), or null
};

// T is the type of queries and results, C that of the pool; DIM is the head dimension, or 0 where it is known at run time
// only.
template <typename T, typename C, int DIM>
void attend(const Arguments& a, int row, int first_head, int last_head, std::vector<float>& scratch) {
  const int d = DIM ? DIM : a.head_dim;
  const int group = a.group, page_size = a.page_size, num_heads = (last_head - first_head) * group;
  const int kv_len = a.kv_lens[row];
  const int begin = a.window > 0 ? std::max(0, kv_len - a.window) : 0;
  const int32_t* const pages = a.page_table + a.slots[row] * a.table_stride;
  const int64_t token_stride = static_cast<int64_t>(a.num_kv_heads) * d;
  const int64_t first_query = static_cast<int64_t>(first_head) * group * d;

  scratch.resize(static_cast<size_t>(2 * num_heads * d + num_heads * page_size + 2 * num_heads));
  float* const query = scratch.data();                     // (num_heads, d), scaled
  float* const sum = query + num_heads * d;                // (num_heads, d), of weighted values
  float* const weight = sum + num_heads * d;               // (num_heads, page_size)
  float* const highest = weight + num_heads * page_size;   // (num_heads)
  float* const total = highest + num_heads;                // (num_heads)

  const T* const q_row = static_cast<const T*>(a.q) + row * a.q_stride + first_query;
  for (int i = 0; i < num_heads * d; ++i) query[i] = to_float(q_row[i]) * a.scale;
  std::fill(sum, sum + num_heads * d, 0.0f);
  if (a.sinks) {  // a key that was seen first, with nothing to add to the sum of values
    std::copy_n(a.sinks + first_head * group, num_heads, highest);
    std::fill(total, total + num_heads, 1.0f);
  } else {
    std::fill(highest, highest + num_heads, -std::numeric_limits<float>::infinity());
    std::fill(total, total + num_heads, 0.0f);
  }

  for (int page = begin / page_size; page * page_size < kv_len; ++page) {
    const int first = std::max(begin - page * page_size, 0);
    const int last = std::min(kv_len - page * page_size, page_size);
    const int64_t base = static_cast<int64_t>(pages[page]) * page_size * token_stride;
    const C* const keys = static_cast<const C*>(a.k_pool) + base;
    const C* const values = static_cast<const C*>(a.v_pool) + base;

    for (int token = first; token < last; ++token)
      for (int kv_head = first_head; kv_head < last_head; ++kv_head) {
        const C* const key = keys + token * token_stride + static_cast<int64_t>(kv_head) * d;
        for (int g = 0; g < group; ++g) {
          const int h = (kv_head - first_head) * group + g;
          const float* const mine = query + h * d;
          float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
          for (int i = 0; i < d; ++i) dot += mine[i] * to_float(key[i]);
          weight[h * page_size + token] = dot;
        }
      }
    for (int h = 0; h < num_heads; ++h) {
      float* const w = weight + h * page_size;
      float peak = highest[h];
      for (int token = first; token < last; ++token) peak = std::max(peak, w[token]);
      const float shrink = std::exp(highest[h] - peak);
      float added = 0.0f;
#pragma omp simd reduction(+ : added)
      for (int token = first; token < last; ++token) {
        w[token] = std::exp(w[token] - peak);
        added += w[token];
      }
      if (shrink != 1.0f) {
        float* const mine = sum + h * d;
#pragma omp simd
        for (int i = 0; i < d; ++i) mine[i] *= shrink;
      }
      highest[h] = peak;
      total[h] = total[h] * shrink + added;
    }
    for (int token = first; token < last; ++token)
      for (int kv_head = first_head; kv_head < last_head; ++kv_head) {
        const C* const value = values + token * token_stride + static_cast<int64_t>(kv_head) * d;
        for (int g = 0; g < group; ++g) {
          const int h = (kv_head - first_head) * group + g;
          const float w = weight[h * page_size + token];
          float* const mine = sum + h * d;
#pragma omp simd
          for (int i = 0; i < d; ++i) mine[i] += w * to_float(value[i]);
        }
      }
  }
  T* const out_row = static_cast<T*>(a.out) + static_cast<int64_t>(row) * token_stride * group + first_query;
  for (int h = 0; h < num_heads; ++h)
    for (int i = 0; i < d; ++i) store(out_row + h * d + i, sum[h * d + i] / total[h]);
}

template <typename T, typename C, int DIM>
void run(const Arguments& a) {
  const int wanted = (2 * omp_get_max_threads() + a.num_rows - 1) / std::max(1, a.num_rows);
  const int splits = std::max(1, std::min(wanted - 1, a.num_kv_heads));
  const int heads = (a.num_kv_heads + splits - 1) / splits;
  const int num_tasks = a.num_rows * splits;
#pragma omp parallel
  {
    std::vector<float> scratch;
#pragma omp for schedule(dynamic, 1)
    for (int task = 0; task < num_tasks; ++task) {
      const int first = task % splits * heads, last = std::min(first + heads, a.num_kv_heads);
      if (first < last) attend<T, C, DIM>(a, task / splits, first, last, scratch);
    }
  }
}

template <typename T, typename C>
void run_dim(const Arguments& a) {
  switch (a.head_dim) {
    case 64: return run<T, C, 64>(a);
    case 96: return run<T, C, 96>(a);
    case 128: return run<T, C, 128>(a);
    case 256: return run<T, C, 256>(a);
    default: return run<T, C, 0>(a);
  }
}

}  // namespace

extern "C" void decode_attention(const void* q, const void* k_pool, const void* v_pool, void* out,
                                 const int32_t* page_table, const int32_t* slots, const int32_t* kv_lens, int is_bf16,
                                 int pool_is_e4m3, int num_rows, int num_kv_heads, int group, int head_dim, int page_size,
                                 int64_t q_stride, int64_t table_stride, float scale, int window,
                                 const float* sinks) {
  const Arguments arguments{q,     k_pool,   v_pool,    out,      page_table,   slots, kv_lens, num_rows, num_kv_heads,
                            group, head_dim, page_size, q_stride, table_stride, scale, window,  sinks};
  if (pool_is_e4m3)
    is_bf16 ? run_dim<bf16, e4m3>(arguments) : run_dim<float, e4m3>(arguments);
  else
    is_bf16 ? run_dim<bf16, bf16>(arguments) : run_dim<float, float>(arguments);
}
