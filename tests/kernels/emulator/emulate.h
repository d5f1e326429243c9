// CUDA on one CPU thread, as far as the kernels use it, so that their mathematics and their layouts are tested where
// there is no GPU. Every thread of a block is a fiber; one that meets the others waits until they have come. Copies are
// made when they are waited for, so that a kernel that reads too early gets what was there before.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <sched.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#undef __shared__
#define __shared__ static  // one block runs at a time
#undef __launch_bounds__
#define __launch_bounds__(...)

namespace emulate {

struct Copy {
  void* to;
  const void* from;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 17);
  std::deque<std::vector<Copy>> groups{1};
  uint64_t given[4] = {};  // to the others of its warp
  bool done = false;
};

// Threads that wait for each other.
struct Barrier {
  int members = 0, arrived = 0;
  int64_t turn = 0;
};

// Of a cluster all blocks at once, one thread behind the other.
struct Block {
  int first;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Barrier> warps;
  Barrier all;
  ucontext_t scheduler;
  int current = 0;
};

inline Block* block = nullptr;
inline int late = -1;       // a thread that goes on only when no other one can
inline int64_t steps = 0;   // waits that are over, of all threads
inline bool stuck = false;  // the last kernel waited for what never came
inline std::vector<uint4> shared_memory;
inline std::function<void()> body;

inline Fiber& self() { return *block->fibers[block->current]; }

inline void yield() { swapcontext(&self().context, &block->scheduler); }

inline void meet(Barrier& barrier) {
  const int64_t turn = barrier.turn;
  if (++barrier.arrived == barrier.members) {
    barrier.arrived = 0;
    ++barrier.turn;
  }
  while (barrier.turn == turn) yield();
  ++steps;
}
inline void leave(Barrier& barrier) {
  if (--barrier.members > 0 && barrier.arrived == barrier.members) {
    barrier.arrived = 0;
    ++barrier.turn;
  }
}
inline void meet_warp() { meet(block->warps[block->current / 32]); }

inline void fiber_main() {
  body();
  self().done = true;
  ++steps;
  leave(block->warps[block->current / 32]);
  leave(block->all);
  swapcontext(&self().context, &block->scheduler);
}

// What the threads of this warp give each other, from where all of them have made it to where all have read it.
template <typename T>
struct Exchange {
  explicit Exchange(const T& mine) {
    static_assert(sizeof(T) <= sizeof(self().given));
    std::memcpy(self().given, &mine, sizeof(T));
    meet_warp();
  }
  ~Exchange() { meet_warp(); }
  T of_lane(int lane) const {
    T theirs;
    std::memcpy(&theirs, block->fibers[block->current / 32 * 32 + lane]->given, sizeof(T));
    return theirs;
  }
};

template <typename T>
T from_lane(const T& mine, int lane) {
  return Exchange<T>(mine).of_lane(lane);
}

}  // namespace emulate

inline dim3 blockIdx, blockDim, gridDim;
inline struct {
  struct {
    operator int() const { return emulate::block->current % blockDim.x; }
  } x;
} threadIdx;

inline void __syncthreads() { emulate::meet(emulate::block->all); }
inline void __syncwarp() { emulate::meet_warp(); }

template <typename T>
T __shfl_sync(unsigned, T x, int lane) {
  return emulate::from_lane(x, lane);
}
template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return emulate::from_lane(x, emulate::block->current % 32 ^ mask);
}
inline bool __any_sync(unsigned, bool x) {
  for (int mask = 16; mask > 0; mask /= 2) x |= __shfl_xor_sync(0, x, mask);
  return x;
}
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t places) {
  const uint64_t bytes = low | static_cast<uint64_t>(high) << 32;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<uint32_t>(bytes >> (places >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return out;
}
inline float __fdividef(float x, float y) { return x / y; }
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

namespace minisgl {

// Between GPUs, which are processes here.
inline void tell(uint32_t* flag, uint32_t value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
inline uint32_t hear(const uint32_t* flag) {
  sched_yield();
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}

using Pair = uint32_t;

inline void* dynamic_shared() { return emulate::shared_memory.data(); }
inline void copy_async(void* shared, const void* global) { emulate::self().groups.back().push_back({shared, global}); }
inline int add_in_order(int32_t* to, int x) { return (*to += x) - x; }
inline void end_of_copies() { emulate::self().groups.emplace_back(); }
template <int kGroups>
void wait_for_copies() {
  auto& groups = emulate::self().groups;
  while (groups.size() > kGroups + 1) {
    for (const auto& copy : groups.front()) std::memcpy(copy.to, copy.from, 16);
    groups.pop_front();
  }
}

inline uint16_t element(Pair pair, int number) { return static_cast<uint16_t>(pair >> (16 * number)); }
inline Pair pair_of(uint16_t low, uint16_t high) { return low | static_cast<Pair>(high) << 16; }

inline Pair transpose(Pair matrix) {
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
  const emulate::Exchange<Pair> given(matrix);
  // Element (row, column) of the transposed matrix is (column, row) of this one.
  const auto at = [&](int i) { return element(given.of_lane((column + i) * 4 + row / 2), row % 2); };
  return pair_of(at(0), at(1));
}

inline void load(Pair (&out)[4], const void* row, bool transposed) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const void* from = emulate::from_lane(row, 8 * i + lane / 4);
    std::memcpy(&out[i], static_cast<const char*>(from) + lane % 4 * 4, 4);
    if (transposed) out[i] = transpose(out[i]);
  }
}
inline void load_matrices(Pair (&out)[4], const void* row) { load(out, row, false); }
inline void load_matrices_transposed(Pair (&out)[4], const void* row) { load(out, row, true); }

inline void widen_e4m3(uint32_t numbers, Pair& low, Pair& high) {
  for (int i = 0; i < 2; ++i) {
    const __half2_raw two = __nv_cvt_fp8x2_to_halfraw2(static_cast<uint16_t>(numbers >> 16 * i), __NV_E4M3);
    (i ? high : low) = pair_of(two.x, two.y);
  }
}

template <typename T>
float number(uint16_t bits) {
  T x;
  std::memcpy(&x, &bits, 2);
  return static_cast<float>(x);
}

template <typename T>
void multiply(float (&sums)[4], const Pair (&a)[4], Pair b_low, Pair b_high, T) {
  struct Given {
    Pair a[4], b[2];
  };
  const emulate::Exchange<Given> given({{a[0], a[1], a[2], a[3]}, {b_low, b_high}});
  const int row = threadIdx.x % 32 / 4, first = threadIdx.x % 4 * 2;
  for (int k = 0; k < 16; ++k) {
    // Registers 0 and 1 of a have columns 0 to 7, 2 and 3 the others; 0 and 2 have rows 0 to 7. Of b, 0 has rows 0 to 7.
    const int holder = k % 8 / 2, high = k / 8;
    const Given of_rows = given.of_lane(row * 4 + holder);
    const float upper = number<T>(element(of_rows.a[2 * high], k % 2));
    const float lower = number<T>(element(of_rows.a[2 * high + 1], k % 2));
    for (int column = 0; column < 2; ++column) {
      const float x = number<T>(element(given.of_lane((first + column) * 4 + holder).b[high], k % 2));
      sums[column] += upper * x;
      sums[column + 2] += lower * x;
    }
  }
}

}  // namespace minisgl

namespace emulate {

inline size_t shared_vectors;  // of a block
inline char* shared_of(int block) { return reinterpret_cast<char*>(shared_memory.data() + block * shared_vectors); }

// Lets all threads of the running blocks go on as far as they can; `late` only where the others can't. Returns whether
// any is left.
inline bool advance(Block& running, bool of_late) {
  bool any = false;
  for (int i = 0; i < static_cast<int>(running.fibers.size()); ++i) {
    if (running.fibers[i]->done) continue;
    any = true;
    if ((i == late) != of_late) continue;
    running.current = i;
    blockIdx = dim3(running.first + i / blockDim.x);
    swapcontext(&running.scheduler, &running.fibers[i]->context);
  }
  return any;
}

// Run a kernel, cluster after cluster.
template <typename... Params, typename... Args>
void launch_clusters(int cluster, void (*kernel)(Params...), int blocks, int threads, int shared, Args&&... args) {
  shared_vectors = shared / sizeof(uint4) + 1;
  shared_memory.assign(cluster * shared_vectors, make_uint4(~0u, ~0u, ~0u, ~0u));  // NaN, whatever the type
  gridDim = dim3(blocks);
  blockDim = dim3(threads);
  body = [&] { kernel(static_cast<Params>(args)...); };
  stuck = false;
  for (int number = 0; number < blocks && !stuck; number += cluster) {
    Block running;
    running.first = number;
    block = &running;
    running.warps.resize((threads * cluster + 31) / 32);
    running.all.members = threads * cluster;
    for (int i = 0; i < threads * cluster; ++i) {
      ++running.warps[i / 32].members;
      running.fibers.push_back(std::make_unique<Fiber>());
      Fiber& fiber = *running.fibers.back();
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      makecontext(&fiber.context, fiber_main, 0);
    }
    for (bool any = true; any && !stuck;) {
      const int64_t before = steps;
      any = advance(running, false);
      if (steps == before) any = advance(running, true);
      stuck = any && steps == before;
    }
  }
}

template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), int blocks, int threads, int shared, Args&&... args) {
  launch_clusters(1, kernel, blocks, threads, shared, std::forward<Args>(args)...);
}

}  // namespace emulate
