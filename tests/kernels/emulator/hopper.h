// What `wgmma.cuh` has on Hopper, on one CPU thread. A shared address is a place in the memory of the thread's own block.

#pragma once

#include <cuda.h>

#include <map>

#include "emulate.h"

#undef __cluster_dims__
#define __cluster_dims__(...)
#undef __grid_constant__
#define __grid_constant__

namespace minisgl {

// Two bytes per element, 64 elements per row, chunks of 16 bytes swizzled.
inline char* element_at(uint32_t address, int block) {
  return emulate::shared_of(block) + (address ^ (address >> 7 & 7) << 4);
}

inline uint32_t dynamic_tiles() { return 0; }
inline int rank_in_cluster() { return emulate::block->current / blockDim.x; }
inline void meet_cluster() { emulate::meet(emulate::block->all); }
inline void end_of_barriers() {}
inline void show_to_products() {}
template <int kRegisters>
void give_registers() {}
template <int kRegisters>
void take_registers() {}

struct Phases {
  int arrivals, missing, bytes = 0, number = 0;

  void check() {
    if (missing > 0 || bytes != 0) return;
    missing = arrivals;
    ++number;
  }
};
inline std::map<std::pair<int, uint32_t>, Phases> all_phases;
inline Phases& phases(uint32_t barrier, int block) { return all_phases.at({block, barrier}); }

inline void init_barrier(uint32_t barrier, int arrivals) {
  all_phases[{rank_in_cluster(), barrier}] = Phases{arrivals, arrivals};
}
inline void arrive_at(uint32_t barrier, int block) {
  --phases(barrier, block).missing;
  phases(barrier, block).check();
}
inline void arrive_and_expect(uint32_t barrier, int bytes) {
  phases(barrier, rank_in_cluster()).bytes += bytes;
  arrive_at(barrier, rank_in_cluster());
}
inline void copy_or_zero(uint32_t shared, const void* global, bool inside) {
  static const uint4 zeros = {};
  copy_async(emulate::shared_of(rank_in_cluster()) + shared, inside ? global : &zeros);
}
inline void arrive(uint32_t barrier) { arrive_at(barrier, rank_in_cluster()); }
inline void wait(uint32_t barrier, int parity) {
  while (phases(barrier, rank_in_cluster()).number % 2 == parity) emulate::yield();
  ++emulate::steps;
}

// A tensor's address, elements of a line, lines, and lines of a group, which come part by part, or of a tile.
inline CUtensorMap tensor_map(const void* data, int64_t columns, int64_t lines, int64_t group_lines) {
  return CUtensorMap{{reinterpret_cast<uint64_t>(data), static_cast<uint64_t>(columns), static_cast<uint64_t>(lines),
                      static_cast<uint64_t>(group_lines)}};
}
// Line i of the tile is line `line_of(i)` of the tensor.
template <typename LineOf>
void copy_tile(uint32_t shared, const CUtensorMap& tensor, int column, int tile_lines, uint32_t barrier, int block,
               LineOf line_of) {
  const auto* data = reinterpret_cast<const uint16_t*>(tensor.opaque[0]);
  const int64_t columns = tensor.opaque[1], lines = tensor.opaque[2];
  for (int i = 0; i < tile_lines; ++i) {
    for (int j = 0; j < 64; ++j) {
      const bool inside = line_of(i) < lines && column + j < columns;
      const uint16_t bits = inside ? data[line_of(i) * columns + column + j] : 0;
      std::memcpy(element_at(shared + i * 128 + j * 2, block), &bits, 2);
    }
  }
  phases(barrier, block).bytes -= tile_lines * 128;
  phases(barrier, block).check();
}
inline void copy_lines_to_both(uint32_t shared, const CUtensorMap& tensor, int column, int group, uint32_t barrier) {
  const int64_t group_lines = tensor.opaque[3], parts = group_lines / 8;
  for (int block = 0; block < 2; ++block) {
    copy_tile(shared, tensor, column, 128, barrier, block, [&](int i) {
      const int64_t inner = i % group_lines;
      return (group + i / group_lines) * group_lines + inner % 8 * parts + inner / 8;
    });
  }
}
inline void copy_rows(uint32_t shared, const CUtensorMap& tensor, int column, int row, uint32_t barrier) {
  copy_tile(shared, tensor, column, tensor.opaque[3], barrier, rank_in_cluster(), [&](int i) { return int64_t{row} + i; });
}

inline std::map<int, emulate::Barrier> all_groups;
inline void meet_group(int) {
  emulate::Barrier& barrier = all_groups[emulate::block->current / 128];
  barrier.members = 128;
  emulate::meet(barrier);
}
inline void store_transposed(uint32_t shared, const Pair (&matrices)[4]) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const uint32_t to = emulate::from_lane(shared, 8 * i + lane / 4);
    const Pair part = transpose(matrices[i]);
    std::memcpy(emulate::shared_of(rank_in_cluster()) + to + lane % 4 * 4, &part, 4);
  }
}
inline uint4 load_shared(uint32_t shared) {
  uint4 bits;
  std::memcpy(&bits, emulate::shared_of(rank_in_cluster()) + shared, 16);
  return bits;
}

inline uint64_t describe(uint32_t shared) { return shared >> 4; }
inline void begin_products() { __syncwarp(); }
inline void end_products() {}
template <int kLeft>
void wait_for_products() {
  __syncwarp();
}

template <int kColumns>
struct Product {
  template <typename T>
  static void add(float* sums, uint64_t a, uint64_t b, int has_sums, T) {
    const auto at = [](uint64_t from, int row, int k) {
      T x;
      std::memcpy(&x, element_at((from << 4) + row * 128 + k * 2, rank_in_cluster()), 2);
      return static_cast<float>(x);
    };
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    for (int i = 0; i < kColumns / 2; ++i) {
      const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      float sum = has_sums ? sums[i] : 0.0f;
      for (int k = 0; k < 16; ++k) sum += at(a, row + i / 2 % 2 * 8, k) * at(b, column, k);
      sums[i] = sum;
    }
  }
};

}  // namespace minisgl
