// The kernels: threads given their numbers (thread_work.h), and what they do together. All are bound
// by memory, so the grids are as large as the device keeps running at once and their threads walk on
// from there; bytes per element are said in cast.h, norm.h and update.h.
#include <cuda_runtime.h>

#include "ebb/optim/cuda/launch.h"
#include "ebb/optim/cuda/thread_work.h"

namespace ebb::optim {
namespace {

using cuda::Cut;

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kLevelThreads = 1024;  // of the one block that adds the last levels of a norm
constexpr int kBlocksMax = 148 * 8;  // 2,048 threads on each processor of the largest device
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ int64_t Thread() {
  return int64_t{blockIdx.x} * kThreads + threadIdx.x;
}
__device__ int64_t Threads() {
  return int64_t{gridDim.x} * kThreads;
}

template <class Work, class Arrays>
__global__ void __launch_bounds__(kThreads) EachElementKernel(const Arrays arrays, const Cut cut) {
  cuda::Walk<Work::kMany>(cut, Thread(), Threads(), Work{arrays});
}

template <UpdateRule kRule, bool kSplit>
__global__ void __launch_bounds__(kThreads)
    UpdateKernel(const UpdateArrays arrays, const Cut cut, const UpdateConstants* constants) {
  using Work = cuda::UpdateWork<kRule, kSplit>;
  // They may be the host's memory: once a block, all words at once.
  constexpr int kWords = sizeof(UpdateConstants) / sizeof(uint32_t);
  static_assert(kWords * sizeof(uint32_t) == sizeof(UpdateConstants) && kWords <= kThreads);
  __shared__ UpdateConstants shared;
  if (threadIdx.x < kWords) {
    reinterpret_cast<uint32_t*>(&shared)[threadIdx.x] =
        reinterpret_cast<const uint32_t*>(constants)[threadIdx.x];
  }
  __syncthreads();
  if (!shared.apply) return;
  const typename Work::Constants mine = Work::Of(shared);
  cuda::Walk<Work::kMany>(cut, Thread(), Threads(), Work{arrays, mine});
}

__device__ void AddUpperQuarter(double (&lanes)[cuda::kGroup], int distance) {
  double upper[cuda::kGroup];
  for (int i = 0; i < cuda::kGroup; ++i)
    upper[i] = __shfl_down_sync(kAllLanes, lanes[i], static_cast<unsigned>(distance));
  cuda::AddQuarter(lanes, upper);
}

// A warp takes as many blocks as it has fours of threads, and all of it stays for the shuffles.
__global__ void __launch_bounds__(kThreads)
    SumBlocksKernel(const AccumulateArrays arrays, bool groups_aligned, double* blocks) {
  constexpr int kBlocksOfWarp = kWarp / cuda::kQuarters;
  const int64_t count = NormBlocks(arrays.count);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t first = Thread() / kWarp * kBlocksOfWarp; first < count;
       first += Threads() / kWarp * kBlocksOfWarp) {
    const int64_t block = first + lane / cuda::kQuarters;
    const int quarter = lane % cuda::kQuarters;
    double lanes[cuda::kGroup] = {};
    if (block < count) cuda::SquaresWork{arrays}.Quarter(block, quarter, groups_aligned, lanes);
    AddUpperQuarter(lanes, 2);
    AddUpperQuarter(lanes, 1);
    if (quarter == 0 && block < count) blocks[block] = cuda::AddLanes(lanes);
  }
}

// As threads of a warp all of which stay for the shuffles, which add norm.h's tree.
__device__ void AddLevel(const cuda::LevelWork& level, int64_t thread, int64_t threads) {
  constexpr int kBlocksOfWarp = kWarp / cuda::kNormLanes;
  const int64_t count = level.blocks();
  const int lane = static_cast<int>(thread % cuda::kNormLanes);
  for (int64_t first = thread / kWarp * kBlocksOfWarp; first < count;
       first += threads / kWarp * kBlocksOfWarp) {
    const int64_t block = first + thread % kWarp / cuda::kNormLanes;
    double sum = block < count ? level.Lane(block, lane) : 0;
    for (unsigned distance = cuda::kNormLanes / 2; distance > 0; distance /= 2)
      sum += __shfl_down_sync(kAllLanes, sum, distance, cuda::kNormLanes);
    if (lane == 0 && block < count) level.Put(block, sum);
  }
}

__global__ void __launch_bounds__(kThreads) AddLevelKernel(const cuda::LevelWork level) {
  AddLevel(level, Thread(), Threads());
}

// What is few enough for one block of threads, level after level.
__global__ void __launch_bounds__(kLevelThreads)
    AddLevelsKernel(cuda::LevelWork level, double* sum) {
  for (; level.count > 1; level = level.Above()) {
    AddLevel(level, threadIdx.x, kLevelThreads);
    __syncthreads();  // and what its threads have put is seen by all of them
  }
  if (threadIdx.x == 0) *sum = level.count == 0 ? 0 : level.sums[0];
}

__global__ void AddToKernel(const float* value, double* sum) {
  *sum += double{*value};
}

// cudaLaunchKernelEx and not <<<>>>, whose errors are only seen mixed with those of others.
template <class... Parameters, class... Arguments>
cudaError_t Launch(cudaStream_t stream, int64_t threads, int block, void (*kernel)(Parameters...),
                   const Arguments&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim =
      static_cast<unsigned>(std::clamp<int64_t>((threads + block - 1) / block, 1, kBlocksMax));
  config.blockDim = static_cast<unsigned>(block);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

int64_t ThreadsFor(const Cut& cut) {
  return std::max(cut.groups, cut.singles());
}

template <class Work, class Arrays>
cudaError_t LaunchEach(cudaStream_t stream, const Arrays& arrays) {
  if (arrays.count == 0) return cudaSuccess;
  const Cut cut = Work::CutOf(arrays);
  return Launch(stream, ThreadsFor(cut), kThreads, &EachElementKernel<Work, Arrays>, arrays, cut);
}

template <UpdateRule kRule, bool kSplit>
cudaError_t LaunchUpdateOf(cudaStream_t stream, const UpdateArrays& arrays,
                           const UpdateConstants* constants) {
  if (arrays.count == 0) return cudaSuccess;
  const Cut cut = cuda::UpdateWork<kRule, kSplit>::CutOf(arrays);
  return Launch(stream, ThreadsFor(cut), kThreads, &UpdateKernel<kRule, kSplit>, arrays, cut,
                constants);
}

template <UpdateRule kRule>
cudaError_t LaunchUpdateOf(cudaStream_t stream, const UpdateArrays& arrays,
                           const UpdateConstants* constants) {
  return arrays.master_low == nullptr ? LaunchUpdateOf<kRule, false>(stream, arrays, constants)
                                      : LaunchUpdateOf<kRule, true>(stream, arrays, constants);
}

template <class... Kernels>
cudaError_t Load(Kernels*... kernels) {
  cudaError_t result = cudaSuccess;
  cudaFuncAttributes attributes;
  ((result = result == cudaSuccess ? cudaFuncGetAttributes(&attributes, kernels) : result), ...);
  return result;
}

}  // namespace

cudaError_t LoadKernels() {
  return Load(&EachElementKernel<cuda::CastWork, CastArrays>,
              &EachElementKernel<cuda::AccumulateWork, AccumulateArrays>, &SumBlocksKernel,
              &AddLevelKernel, &AddLevelsKernel, &AddToKernel,
              &UpdateKernel<UpdateRule::kAdam, false>, &UpdateKernel<UpdateRule::kAdam, true>,
              &UpdateKernel<UpdateRule::kSgd, false>, &UpdateKernel<UpdateRule::kSgd, true>,
              &UpdateKernel<UpdateRule::kSgdWithMomentum, false>,
              &UpdateKernel<UpdateRule::kSgdWithMomentum, true>);
}

cudaError_t LaunchCast(cudaStream_t stream, const CastArrays& arrays) {
  return LaunchEach<cuda::CastWork>(stream, arrays);
}

cudaError_t LaunchAccumulate(cudaStream_t stream, const AccumulateArrays& arrays) {
  return LaunchEach<cuda::AccumulateWork>(stream, arrays);
}

cudaError_t LaunchSumSquares(cudaStream_t stream, const AccumulateArrays& arrays, double* blocks,
                             double* sum) {
  cuda::LevelWork level = {.sums = blocks, .count = NormBlocks(arrays.count)};
  if (level.count > 0) {
    const cudaError_t result =
        Launch(stream, level.count * cuda::kQuarters, kThreads, &SumBlocksKernel, arrays,
               cuda::SquaresWork::Aligned(arrays), blocks);
    if (result != cudaSuccess) return result;
  }
  // More than one block of threads adds at once: shards of more than 2^26 elements.
  for (; level.blocks() * cuda::kNormLanes > kLevelThreads; level = level.Above()) {
    const cudaError_t result =
        Launch(stream, level.blocks() * cuda::kNormLanes, kThreads, &AddLevelKernel, level);
    if (result != cudaSuccess) return result;
  }
  return Launch(stream, kLevelThreads, kLevelThreads, &AddLevelsKernel, level, sum);
}

cudaError_t LaunchAddTo(cudaStream_t stream, const float* value, double* sum) {
  return Launch(stream, 1, 1, &AddToKernel, value, sum);
}

cudaError_t LaunchUpdate(cudaStream_t stream, UpdateRule rule, const UpdateArrays& arrays,
                         const UpdateConstants* constants) {
  switch (rule) {
    case UpdateRule::kAdam:
      return LaunchUpdateOf<UpdateRule::kAdam>(stream, arrays, constants);
    case UpdateRule::kSgd:
      return LaunchUpdateOf<UpdateRule::kSgd>(stream, arrays, constants);
    case UpdateRule::kSgdWithMomentum:
      return LaunchUpdateOf<UpdateRule::kSgdWithMomentum>(stream, arrays, constants);
  }
  return cudaErrorInvalidValue;
}

}  // namespace ebb::optim
