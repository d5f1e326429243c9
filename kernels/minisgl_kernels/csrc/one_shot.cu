// The sum of a small tensor over the GPUs of a group in one kernel, which reads the other GPUs' memory; alone, or with
// the residual addition and RMS norm that follow it in a model. Called through `one_shot.py`, which describes the
// arguments.
//
// Block b of each rank sums the same part of the tensor, and works with the blocks b of the other ranks alone: it puts
// its rank's part where the others can read it, tells them, waits until all have told it, and adds up what they put
// there, in the order of ranks, so that all ranks get equal bits. Each block counts its calls. Calls alternate between
// two places for a part: by the time a rank comes to call n + 2, all have told it of call n + 1, and so have read what
// it put there for call n. Nothing is put anywhere where the tensor already is in memory that the others can read; then
// its owner alternates.

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
static_assert(sizeof(Header) == 4608, "one_shot.py counts on it");

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

// Puts this block's vectors where the other ranks read them, unless x is there, and waits until all have done so. Returns
// which of the two places they are in.
template <typename T, int kRanks>
__device__ int put_and_meet(const T* x, int num_vectors, bool is_there, const Peers& peers, int64_t part_bytes, int rank,
                            const int* aborted) {
  const int block = blockIdx.x, thread = threadIdx.x;
  Header* own = peers.header(rank);
  const uint32_t call = own->calls[block] + 1;
  if (!is_there) {
    T* mine = peers.part<T>(rank, block, call % 2, part_bytes);
    for (int i = thread; i < num_vectors; i += blockDim.x)
      Vector<T>::load(x + int64_t{kVector} * i).store(mine + int64_t{kVector} * i);
  }
  __syncthreads();
  if (thread < kRanks && thread != rank) {
    tell(&peers.header(thread)->told[block][rank], call);
    wait_for(&own->told[block][thread], call, aborted);
  }
  __syncthreads();
  if (thread == 0) own->calls[block] = call;
  return call % 2;
}

// What each rank put at a vector.
template <typename T, int kRanks>
struct Loaded {
  Vector<T> of_rank[kRanks];

  __device__ void load(const T* const (&parts)[kRanks], int64_t vector) {
#pragma unroll
    for (int r = 0; r < kRanks; ++r) of_rank[r] = Vector<T>::load(parts[r] + kVector * vector);
  }
  __device__ Vector<T> sum() const {
    float sum[kVector], more[kVector];
    of_rank[0].widen_to(sum);
#pragma unroll
    for (int r = 1; r < kRanks; ++r) {
      of_rank[r].widen_to(more);
#pragma unroll
      for (int k = 0; k < kVector; ++k) sum[k] += more[k];
    }
    return Vector<T>::round(sum);
  }
};

template <typename T, int kRanks>
__global__ void __launch_bounds__(kAllReduceThreads)
    one_shot_all_reduce_kernel(const T* x, T* out, int num_vectors, int block_vectors, Peers peers, int64_t part_bytes,
                               int rank, const int* aborted) {
  constexpr int kBatch = kRanks <= 2 ? 4 : kRanks <= 4 ? 2 : 1;  // vectors in flight per rank
  const int begin = blockIdx.x * block_vectors;
  const int count = num_vectors - begin < block_vectors ? num_vectors - begin : block_vectors;
  x += int64_t{kVector} * begin;
  out += int64_t{kVector} * begin;
  wait_for_inputs();
  const int place = put_and_meet<T, kRanks>(x, count, false, peers, part_bytes, rank, aborted);
  const T* parts[kRanks];
#pragma unroll
  for (int r = 0; r < kRanks; ++r) parts[r] = peers.part<T>(r, blockIdx.x, place, part_bytes);
  for (int first = threadIdx.x; first < count; first += kBatch * kAllReduceThreads) {
    Loaded<T, kRanks> loaded[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = first + b * kAllReduceThreads;
      if (i < count) loaded[b].load(parts, i);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = first + b * kAllReduceThreads;
      if (i < count) loaded[b].sum().store(out + int64_t{kVector} * i);
    }
  }
}

// One vector of a row per thread; a block has `block_rows` rows, and loads one while it works on the row before. `offset`
// says where in each rank's memory its x is, if it is there.
template <typename T, int kRanks>
__global__ void __launch_bounds__(1024)
    one_shot_add_rms_norm_kernel(const T* x, T* residual, const T* weight, T* normed, int num_rows, int block_rows,
                                 int row_vectors, float eps, Peers peers, int64_t part_bytes, int64_t offset, int rank,
                                 const int* aborted) {
  __shared__ float of_warp[2][32];  // in turn, so that no row overwrites what another one still reads
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  const int begin = blockIdx.x * block_rows;
  const int count = num_rows - begin < block_rows ? num_rows - begin : block_rows;
  const int64_t row_size = int64_t{kVector} * row_vectors, column = int64_t{kVector} * threadIdx.x;
  const bool has_column = threadIdx.x < row_vectors;
  Vector<T> weights, added;
  if (has_column) weights = Vector<T>::load(weight + column);
  x += begin * row_size;
  residual += begin * row_size + column;
  normed += begin * row_size + column;
  wait_for_inputs();
  if (has_column) added = Vector<T>::load(residual);
  const bool is_there = offset >= 0;
  const int place = put_and_meet<T, kRanks>(x, count * row_vectors, is_there, peers, part_bytes, rank, aborted);

  const T* parts[kRanks];
#pragma unroll
  for (int r = 0; r < kRanks; ++r)
    parts[r] = is_there ? reinterpret_cast<const T*>(peers.memory[r] + offset) + begin * row_size
                        : peers.part<T>(r, blockIdx.x, place, part_bytes);
  Loaded<T, kRanks> loaded;
  if (has_column) loaded.load(parts, threadIdx.x);
  for (int row = 0; row < count; ++row) {
    float values[kVector], more[kVector], squares = 0.0f;
    if (has_column) {
      loaded.sum().widen_to(values);
      added.widen_to(more);
      if (row + 1 < count) {
        loaded.load(parts, int64_t{row_vectors} * (row + 1) + threadIdx.x);
        added = Vector<T>::load(residual + (row + 1) * row_size);
      }
#pragma unroll
      for (int k = 0; k < kVector; ++k) values[k] += more[k];
      const Vector<T> summed = Vector<T>::round(values);
      summed.store(residual + row * row_size);
      summed.widen_to(values);
      squares = sum_of_squares(values);
    }
    squares = sum_over_lanes<32>(squares);
    if (lane == 0) of_warp[row % 2][warp] = squares;
    __syncthreads();
    const float total = sum_over_lanes<32>(lane < num_warps ? of_warp[row % 2][lane] : 0.0f);
    const float factor = rsqrtf(total / row_size + eps);
    if (has_column) scale<T>(values, factor, weights).store(normed + row * row_size);
  }
}

#ifndef MINISGL_EMULATE
inline void check(cudaError_t error) { TVM_FFI_ICHECK(error == cudaSuccess) << cudaGetErrorString(error); }

// Zeroed memory that begins with a header. `handle`, 64 bytes on the host, gets what other processes open it by.
int64_t peer_memory_allocate(int64_t bytes, int64_t device, TensorView handle) {
  tvm::ffi::CUDADeviceGuard guard(device);
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

inline Peers addresses(const TensorView& memory) {
  Peers peers = {};
  for (int r = 0; r < memory.size(0); ++r)
    peers.memory[r] = reinterpret_cast<char*>(static_cast<const int64_t*>(memory.data_ptr())[r]);
  return peers;
}

// Calls `function` with the number of ranks as a type.
template <typename Function>
void with_ranks(int num_ranks, Function&& function) {
  switch (num_ranks) {
    case 2: return function(std::integral_constant<int, 2>{});
    case 4: return function(std::integral_constant<int, 4>{});
    case 8: return function(std::integral_constant<int, 8>{});
    default: TVM_FFI_ICHECK(false) << "groups of 2, 4 and 8 ranks are compiled";
  }
}

void one_shot_all_reduce(TensorView x, TensorView out, TensorView memory, TensorView aborted, int64_t rank,
                         int64_t num_blocks, int64_t part_bytes) {
  const int64_t num_vectors = x.numel() / kVector, block_vectors = (num_vectors + num_blocks - 1) / num_blocks;
  TVM_FFI_ICHECK(num_blocks <= kMaxBlocks && block_vectors * 16 <= part_bytes) << "the tensor is too large";
  with_type(x, [&](auto element) {
    using T = decltype(element);
    with_ranks(memory.size(0), [&](auto ranks) {
      launch(one_shot_all_reduce_kernel<T, ranks>, (num_vectors + block_vectors - 1) / block_vectors, kAllReduceThreads,
             x.device(), data<T>(x), data<T>(out), num_vectors, block_vectors, addresses(memory), part_bytes, rank,
             static_cast<const int*>(aborted.data_ptr()));
    });
  });
}

void one_shot_add_rms_norm(TensorView x, TensorView residual, TensorView weight, TensorView normed, TensorView memory,
                           TensorView aborted, int64_t rank, int64_t block_rows, int64_t part_bytes, int64_t offset,
                           double eps) {
  const int64_t num_rows = x.size(0), row_vectors = x.size(1) / kVector;
  const int64_t num_blocks = (num_rows + block_rows - 1) / block_rows;
  const bool fits = offset >= 0 || block_rows * row_vectors * 16 <= part_bytes;
  TVM_FFI_ICHECK(num_blocks <= kMaxBlocks && row_vectors <= 1024 && fits)
      << "the tensor is too large";
  with_type(x, [&](auto element) {
    using T = decltype(element);
    with_ranks(memory.size(0), [&](auto ranks) {
      launch(one_shot_add_rms_norm_kernel<T, ranks>, num_blocks, (row_vectors + 31) / 32 * 32, x.device(), data<T>(x),
             data<T>(residual), data<T>(weight), data<T>(normed), num_rows, block_rows, row_vectors, eps,
             addresses(memory), part_bytes, offset, rank, static_cast<const int*>(aborted.data_ptr()));
    });
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(peer_memory_allocate, peer_memory_allocate);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(peer_memory_open, peer_memory_open);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(peer_memory_close, peer_memory_close);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(peer_memory_free, peer_memory_free);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(one_shot_all_reduce, one_shot_all_reduce);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(one_shot_add_rms_norm, one_shot_add_rms_norm);
#endif

}  // namespace minisgl
