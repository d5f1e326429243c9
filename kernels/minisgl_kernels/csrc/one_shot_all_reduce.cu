// The sum of a small tensor over the GPUs of a group in one kernel, which reads the other GPUs' memory. Called through
// `one_shot.py`, which describes the arguments.
//
// Block b of each rank sums the same part of the tensor, and works with the blocks b of the other ranks alone: it puts
// its rank's part where the others can read it, tells them, waits until all have told it, and adds up what they put
// there, in the order of ranks, so that all ranks get equal bits. Each block counts its calls. Calls alternate between
// two places for a part: by the time a rank comes to call n + 2, all have told it of call n + 1, and so have read what
// it put there for call n.

#include "common.cuh"

namespace minisgl {

constexpr int kMaxRanks = 8;
constexpr int kMaxBlocks = 128;
constexpr int kAllReduceThreads = 512;

// The beginning of each rank's memory; behind it are the parts, two for each block.
struct Header {
  uint32_t told[kMaxBlocks][kMaxRanks];  // written by the others: how many calls of theirs have put their part
  uint32_t calls[kMaxBlocks];            // written and read by this rank alone
};

struct Peers {
  char* memory[kMaxRanks];

  __device__ Header* header(int rank) const { return reinterpret_cast<Header*>(memory[rank]); }
  template <typename T>
  __device__ T* part(int rank, int block, int place, int64_t part_bytes) const {
    return reinterpret_cast<T*>(memory[rank] + sizeof(Header) + (2 * block + place) * part_bytes);
  }
};

#ifndef MINISGL_EMULATE
__device__ inline void tell(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ inline uint32_t hear(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
#endif

// Until the flag has come to `value`, or the host says that a rank is gone.
__device__ inline void wait_for(const uint32_t* flag, uint32_t value, const volatile int* aborted) {
  for (unsigned looks = 1; static_cast<int32_t>(hear(flag) - value) < 0; ++looks)
    if (looks % 1024 == 0 && *aborted) return;
}

template <typename T, int kRanks>
__global__ void __launch_bounds__(kAllReduceThreads)
    one_shot_all_reduce_kernel(const T* x, T* out, int num_vectors, int block_vectors, Peers peers, int64_t part_bytes,
                               int rank, const int* aborted) {
  constexpr int kBatch = kRanks <= 2 ? 4 : kRanks <= 4 ? 2 : 1;  // vectors in flight per rank
  const int block = blockIdx.x, thread = threadIdx.x;
  const int begin = block * block_vectors;
  const int end = begin + block_vectors < num_vectors ? begin + block_vectors : num_vectors;
  wait_for_inputs();

  Header* own = peers.header(rank);
  const uint32_t call = own->calls[block] + 1;
  T* mine = peers.part<T>(rank, block, call % 2, part_bytes);
  for (int i = begin + thread; i < end; i += kAllReduceThreads)
    Vector<T>::load(x + int64_t{kVector} * i).store(mine + int64_t{kVector} * (i - begin));
  __syncthreads();
  if (thread < kRanks && thread != rank) {
    tell(&peers.header(thread)->told[block][rank], call);
    wait_for(&own->told[block][thread], call, aborted);
  }
  __syncthreads();
  if (thread == 0) own->calls[block] = call;

  const T* parts[kRanks];
#pragma unroll
  for (int r = 0; r < kRanks; ++r) parts[r] = peers.part<T>(r, block, call % 2, part_bytes);
  for (int first = begin + thread; first < end; first += kBatch * kAllReduceThreads) {
    Vector<T> loaded[kBatch][kRanks];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = first + b * kAllReduceThreads;
#pragma unroll
      for (int r = 0; r < kRanks; ++r)
        if (i < end) loaded[b][r] = Vector<T>::load(parts[r] + int64_t{kVector} * (i - begin));
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = first + b * kAllReduceThreads;
      if (i >= end) continue;
      float sum[kVector], more[kVector];
      loaded[b][0].widen_to(sum);
#pragma unroll
      for (int r = 1; r < kRanks; ++r) {
        loaded[b][r].widen_to(more);
#pragma unroll
        for (int k = 0; k < kVector; ++k) sum[k] += more[k];
      }
      Vector<T>::round(sum).store(out + int64_t{kVector} * i);
    }
  }
}

#ifndef MINISGL_EMULATE
inline void check(cudaError_t error) { TVM_FFI_ICHECK(error == cudaSuccess) << cudaGetErrorString(error); }

// Memory for the header and `parts_bytes` of parts, zeroed. `handle`, 64 bytes on the host, gets what other processes
// open it by.
int64_t peer_memory_allocate(int64_t parts_bytes, int64_t device, TensorView handle) {
  tvm::ffi::CUDADeviceGuard guard(device);
  const size_t bytes = sizeof(Header) + parts_bytes;
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes));
  check(cudaMemset(memory, 0, bytes));
  check(cudaDeviceSynchronize());
  static_assert(sizeof(cudaIpcMemHandle_t) == 64);
  check(cudaIpcGetMemHandle(static_cast<cudaIpcMemHandle_t*>(handle.data_ptr()), memory));
  return reinterpret_cast<int64_t>(memory);
}

int64_t peer_memory_open(int64_t device, TensorView handle) {
  tvm::ffi::CUDADeviceGuard guard(device);
  void* memory = nullptr;
  check(cudaIpcOpenMemHandle(&memory, *static_cast<cudaIpcMemHandle_t*>(handle.data_ptr()),
                             cudaIpcMemLazyEnablePeerAccess));
  return reinterpret_cast<int64_t>(memory);
}

void peer_memory_close(int64_t device, int64_t memory) {
  tvm::ffi::CUDADeviceGuard guard(device);
  check(cudaIpcCloseMemHandle(reinterpret_cast<void*>(memory)));
}

void peer_memory_free(int64_t device, int64_t memory) {
  tvm::ffi::CUDADeviceGuard guard(device);
  check(cudaFree(reinterpret_cast<void*>(memory)));
}

void one_shot_all_reduce(TensorView x, TensorView out, TensorView memory, TensorView aborted, int64_t rank,
                         int64_t num_blocks, int64_t part_bytes) {
  const int64_t num_vectors = x.numel() / kVector, block_vectors = (num_vectors + num_blocks - 1) / num_blocks;
  const int num_ranks = memory.size(0);
  TVM_FFI_ICHECK(num_blocks <= kMaxBlocks && block_vectors * 16 <= part_bytes) << "the tensor is too large";
  Peers peers = {};
  for (int r = 0; r < num_ranks; ++r)
    peers.memory[r] = reinterpret_cast<char*>(static_cast<const int64_t*>(memory.data_ptr())[r]);
  with_type(x, [&](auto element) {
    using T = decltype(element);
    const auto run = [&](auto kernel) {
      launch(kernel, num_blocks, kAllReduceThreads, x.device(), data<T>(x), data<T>(out), num_vectors, block_vectors,
             peers, part_bytes, rank, static_cast<const int*>(aborted.data_ptr()));
    };
    switch (num_ranks) {
      case 2: return run(one_shot_all_reduce_kernel<T, 2>);
      case 4: return run(one_shot_all_reduce_kernel<T, 4>);
      case 8: return run(one_shot_all_reduce_kernel<T, 8>);
      default: TVM_FFI_ICHECK(false) << "groups of 2, 4 and 8 ranks are compiled";
    }
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(peer_memory_allocate, peer_memory_allocate);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(peer_memory_open, peer_memory_open);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(peer_memory_close, peer_memory_close);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(peer_memory_free, peer_memory_free);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(one_shot_all_reduce, one_shot_all_reduce);
#endif

}  // namespace minisgl
