// What groups of four warps and clusters of blocks do on Hopper: products of matrices in shared memory, copies of
// tiles by the tensor memory accelerator, and the barriers that both go by. See the PTX manual, "Asynchronous Warpgroup
// Level Matrix Instructions" and "mbarrier".

#pragma once

#include <cuda.h>

#include "common.cuh"
#include "warp.cuh"

#ifndef MINISGL_EMULATE
namespace minisgl {

// Where dynamic shared memory begins: a multiple of 1024 bytes.
__device__ inline uint32_t dynamic_tiles() {
  extern __shared__ __align__(1024) uint8_t tiles[];
  return static_cast<uint32_t>(__cvta_generic_to_shared(tiles));
}

// A barrier in shared memory, by its address.
__device__ inline void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void arrive_and_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// At the same barrier of a block of the cluster. It says that products have read; of writes, which would take long to
// reach the other block, it says nothing.
__device__ inline void arrive_at(uint32_t barrier, int block) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(block)
      : "memory");
}
// Until the phase of this parity is over.
__device__ inline void wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred over;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
      "@!over bra again;\n}" ::"r"(barrier), "r"(parity)
      : "memory");
}

// Before the first meeting of the blocks.
__device__ inline void end_of_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline int rank_in_cluster() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline void meet_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Copies a tile of a tensor to the same place in a set of the cluster's blocks, of which each one's barrier hears. Of four
// dimensions, the tile has all of the inner two and begins at `first` of its first one and `last` of its last one.
__device__ inline void copy_lines(uint32_t shared, const CUtensorMap& tensor, int first, int last, uint32_t barrier,
                                  uint32_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, "
      "%3, %4}], [%5], %6;" ::"r"(shared),
      "l"(&tensor), "r"(first), "r"(0), "r"(last), "r"(barrier), "h"(static_cast<uint16_t>(blocks))
      : "memory");
}
__device__ inline void copy_rows(uint32_t shared, const CUtensorMap& tensor, int first, int row, uint32_t barrier,
                                 uint32_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
      "[%4], %5;" ::"r"(shared),
      "l"(&tensor), "r"(first), "r"(row), "r"(barrier), "h"(static_cast<uint16_t>(blocks))
      : "memory");
}

// Registers of each thread of this group of warps from here on, fewer or more than it began with.
template <int kRegisters>
__device__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The four warps of a group, which is one of those that multiply.
__device__ inline void meet_group(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

// Four transposed matrices of 8 x 8 elements, each lane giving the place of one of the 32 rows that are written.
__device__ inline void store_transposed(uint32_t shared, const Pair (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(matrices[0]),
               "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}
__device__ inline uint4 load_shared(uint32_t shared) {
  uint4 bits;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "r"(shared)
               : "memory");
  return bits;
}

// Rows of 64 elements of two bytes, swizzled by 128 bytes.
__device__ inline uint64_t describe(uint32_t shared) {
  return uint64_t{(shared & 0x3ffff) >> 4} | uint64_t{1} << 16 | uint64_t{64} << 32 | uint64_t{1} << 62;
}

// Products of the warps' group that add to registers: first `begin_products`, then `Product`s, then `end_products`. They
// are done when `wait_for_products` says so, which leaves the last `kLeft` such sets running.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kLeft>
__device__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// sums (64 x kColumns, float) = a (64 x 16) * b (kColumns x 16)' + sums, or without them. Of the 16 rows of a warp thread l
// has in sums[4 * i] elements 8 * i + 2 * (l % 4) and the next of row l / 4, and then of row l / 4 + 8.
template <int kColumns>
struct Product;

#define SUMS(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define NAMES_8 "%0, %1, %2, %3"
#define NAMES_16 NAMES_8 ", %4, %5, %6, %7"
#define NAMES_24 NAMES_16 ", %8, %9, %10, %11"
#define NAMES_32 NAMES_24 ", %12, %13, %14, %15"
#define NAMES_40 NAMES_32 ", %16, %17, %18, %19"
#define NAMES_48 NAMES_40 ", %20, %21, %22, %23"
#define NAMES_56 NAMES_48 ", %24, %25, %26, %27"
#define NAMES_64 NAMES_56 ", %28, %29, %30, %31"
#define NAMES_72 NAMES_64 ", %32, %33, %34, %35"
#define NAMES_80 NAMES_72 ", %36, %37, %38, %39"
#define NAMES_88 NAMES_80 ", %40, %41, %42, %43"
#define NAMES_96 NAMES_88 ", %44, %45, %46, %47"
#define NAMES_104 NAMES_96 ", %48, %49, %50, %51"
#define NAMES_112 NAMES_104 ", %52, %53, %54, %55"
#define NAMES_120 NAMES_112 ", %56, %57, %58, %59"
#define NAMES_128 NAMES_120 ", %60, %61, %62, %63"
#define NAMES_136 NAMES_128 ", %64, %65, %66, %67"
#define NAMES_144 NAMES_136 ", %68, %69, %70, %71"
#define NAMES_152 NAMES_144 ", %72, %73, %74, %75"
#define NAMES_160 NAMES_152 ", %76, %77, %78, %79"
#define SUMS_8 SUMS(0)
#define SUMS_16 SUMS_8, SUMS(4)
#define SUMS_24 SUMS_16, SUMS(8)
#define SUMS_32 SUMS_24, SUMS(12)
#define SUMS_40 SUMS_32, SUMS(16)
#define SUMS_48 SUMS_40, SUMS(20)
#define SUMS_56 SUMS_48, SUMS(24)
#define SUMS_64 SUMS_56, SUMS(28)
#define SUMS_72 SUMS_64, SUMS(32)
#define SUMS_80 SUMS_72, SUMS(36)
#define SUMS_88 SUMS_80, SUMS(40)
#define SUMS_96 SUMS_88, SUMS(44)
#define SUMS_104 SUMS_96, SUMS(48)
#define SUMS_112 SUMS_104, SUMS(52)
#define SUMS_120 SUMS_112, SUMS(56)
#define SUMS_128 SUMS_120, SUMS(60)
#define SUMS_136 SUMS_128, SUMS(64)
#define SUMS_144 SUMS_136, SUMS(68)
#define SUMS_152 SUMS_144, SUMS(72)
#define SUMS_160 SUMS_152, SUMS(76)

#define PRODUCT(columns, type, name, a, b, adds)                                                                     \
  static __device__ void add(float* sums, uint64_t x, uint64_t y, int has_sums, type) {                              \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " adds ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns   \
                 "k16.f32." name "." name " {" NAMES_##columns "}, " a ", " b ", adds, 1, 1, 0, 0;\n}"               \
                 : SUMS_##columns                                                                                    \
                 : "l"(x), "l"(y), "r"(has_sums));                                                                   \
  }
#define PRODUCTS(columns, a, b, adds)                      \
  template <>                                              \
  struct Product<columns> {                                \
    PRODUCT(columns, __nv_bfloat16, "bf16", a, b, adds)    \
    PRODUCT(columns, __half, "f16", a, b, adds)            \
  };
PRODUCTS(8, "%4", "%5", "%6")
PRODUCTS(16, "%8", "%9", "%10")
PRODUCTS(24, "%12", "%13", "%14")
PRODUCTS(32, "%16", "%17", "%18")
PRODUCTS(40, "%20", "%21", "%22")
PRODUCTS(48, "%24", "%25", "%26")
PRODUCTS(56, "%28", "%29", "%30")
PRODUCTS(64, "%32", "%33", "%34")
PRODUCTS(72, "%36", "%37", "%38")
PRODUCTS(80, "%40", "%41", "%42")
PRODUCTS(88, "%44", "%45", "%46")
PRODUCTS(96, "%48", "%49", "%50")
PRODUCTS(104, "%52", "%53", "%54")
PRODUCTS(112, "%56", "%57", "%58")
PRODUCTS(120, "%60", "%61", "%62")
PRODUCTS(128, "%64", "%65", "%66")
PRODUCTS(136, "%68", "%69", "%70")
PRODUCTS(144, "%72", "%73", "%74")
PRODUCTS(152, "%76", "%77", "%78")
PRODUCTS(160, "%80", "%81", "%82")

#undef PRODUCTS
#undef PRODUCT
#undef SUMS

}  // namespace minisgl
#endif
