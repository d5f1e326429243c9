// Attention of one query token per row over a paged KV pool, on a CPU.
//
// A task is (row, KV head): it reads that head's keys and values once, for all query heads of its group, page by page
// with an online softmax. Sums are float32 whatever the pool's type. Called through `decode_attention.py`, which
// describes the arguments.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

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

inline void store(float* where, float x) { *where = x; }

inline void store(bf16* where, float x) {  // round to nearest, ties to even; NaN stays NaN
  uint32_t wide;
  std::memcpy(&wide, &x, sizeof wide);
  const uint32_t rounded = std::isnan(x) ? (wide | 0x400000u) : wide + 0x7FFFu + ((wide >> 16) & 1u);
  where->bits = static_cast<uint16_t>(rounded >> 16);
}

struct Shape {
  int num_rows, num_kv_heads, group, head_dim, page_size;
  int64_t q_stride;  // elements between the queries of two rows
  int64_t table_stride;  // entries between two lines of the page table
  float scale;
  int window;  // 0: none
};

template <typename T>
void attend(const T* q, const T* k_pool, const T* v_pool, T* out, const int32_t* page_table, const int32_t* slots,
            const int32_t* kv_lens, const Shape& s, int row, int kv_head, std::vector<float>& scratch) {
  const int d = s.head_dim, group = s.group, page_size = s.page_size;
  const int kv_len = kv_lens[row];
  const int begin = s.window > 0 ? std::max(0, kv_len - s.window) : 0;
  const int32_t* pages = page_table + slots[row] * s.table_stride;
  const int64_t token_stride = static_cast<int64_t>(s.num_kv_heads) * d;

  scratch.resize(static_cast<size_t>(2 * group * d + group * page_size + 2 * group + d));
  float* const query = scratch.data();                // (group, d), scaled
  float* const sum = query + group * d;               // (group, d), of weighted values
  float* const weight = sum + group * d;              // (group, page_size)
  float* const highest = weight + group * page_size;  // (group)
  float* const total = highest + group;               // (group)
  float* const wide = total + group;                  // (d), one key or value as float32

  const T* q_row = q + row * s.q_stride + static_cast<int64_t>(kv_head) * group * d;
  for (int i = 0; i < group * d; ++i) query[i] = to_float(q_row[i]) * s.scale;
  std::fill(sum, sum + group * d, 0.0f);
  std::fill(highest, highest + group, -std::numeric_limits<float>::infinity());
  std::fill(total, total + group, 0.0f);

  for (int page = begin / page_size; page * page_size < kv_len; ++page) {
    const int first = std::max(begin - page * page_size, 0);
    const int last = std::min(kv_len - page * page_size, page_size);
    const int64_t base = static_cast<int64_t>(pages[page]) * page_size * token_stride + static_cast<int64_t>(kv_head) * d;
    for (int token = first; token < last; ++token) {
      const T* key = k_pool + base + token * token_stride;
#pragma omp simd
      for (int i = 0; i < d; ++i) wide[i] = to_float(key[i]);
      for (int h = 0; h < group; ++h) {
        const float* mine = query + h * d;
        float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
        for (int i = 0; i < d; ++i) dot += mine[i] * wide[i];
        weight[h * page_size + token] = dot;
      }
    }
    for (int h = 0; h < group; ++h) {
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
    for (int token = first; token < last; ++token) {
      const T* value = v_pool + base + token * token_stride;
#pragma omp simd
      for (int i = 0; i < d; ++i) wide[i] = to_float(value[i]);
      for (int h = 0; h < group; ++h) {
        const float w = weight[h * page_size + token];
        float* const mine = sum + h * d;
#pragma omp simd
        for (int i = 0; i < d; ++i) mine[i] += w * wide[i];
      }
    }
  }
  T* const out_row = out + (static_cast<int64_t>(row) * s.num_kv_heads + kv_head) * group * d;
  for (int h = 0; h < group; ++h)
    for (int i = 0; i < d; ++i) store(out_row + h * d + i, sum[h * d + i] / total[h]);
}

template <typename T>
void run(const void* q, const void* k_pool, const void* v_pool, void* out, const int32_t* page_table,
         const int32_t* slots, const int32_t* kv_lens, const Shape& s) {
  const int num_tasks = s.num_rows * s.num_kv_heads;
#pragma omp parallel
  {
    std::vector<float> scratch;
#pragma omp for schedule(dynamic, 1)
    for (int task = 0; task < num_tasks; ++task)
      attend<T>(static_cast<const T*>(q), static_cast<const T*>(k_pool), static_cast<const T*>(v_pool),
                static_cast<T*>(out), page_table, slots, kv_lens, s, task / s.num_kv_heads, task % s.num_kv_heads,
                scratch);
  }
}

}  // namespace

extern "C" void decode_attention(const void* q, const void* k_pool, const void* v_pool, void* out,
                                 const int32_t* page_table, const int32_t* slots, const int32_t* kv_lens, int is_bf16,
                                 int num_rows, int num_kv_heads, int group, int head_dim, int page_size,
                                 int64_t q_stride, int64_t table_stride, float scale, int window) {
  const Shape shape{num_rows, num_kv_heads, group, head_dim, page_size, q_stride, table_stride, scale, window};
  if (is_bf16)
    run<bf16>(q, k_pool, v_pool, out, page_table, slots, kv_lens, shape);
  else
    run<float>(q, k_pool, v_pool, out, page_table, slots, kv_lens, shape);
}
