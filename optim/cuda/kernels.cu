// The kernels. Each thread gets its numbers (thread_work.h); the work of several threads together
// is here. Memory bounds all kernels; cast.h, norm.h and update.h state the bytes per element.
#include <cuda_runtime.h>

#include "ebb/optim/block_codes.h"
#include "ebb/optim/cuda/launch.h"
#include "ebb/optim/cuda/thread_work.h"
#include "ebb/optim/cuda/update_work.h"
#include "ebb/runtime/device/cuda/resident_blocks.h"

namespace ebb::optim {
namespace {

using cuda::Cut;

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kLevelThreads = 1024;  // of the block that adds the last levels of a norm
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

template <UpdateRule kRule, MasterForm kForm>
__global__ void __launch_bounds__(kThreads)
    UpdateKernel(const UpdateArrays arrays, const Cut cut, const UpdateRuns runs) {
  using Work = cuda::UpdateWork<kRule, kForm>;
  if (!runs.constants.data()->apply) return;
  cuda::Walk<Work::kMany>(cut, Thread(), Threads(), Work(arrays, runs));
}

__device__ const DynamicMap kMaps[2] = {DynamicMapOf(true), DynamicMapOf(false)};

// States of any encoding. A warp takes a block of elements, and its threads share what they find of
// the block's extremes. The maps' tables are in shared memory, because neighbouring threads look up
// unrelated places.
template <UpdateRule kRule, MasterForm kForm>
__global__ void __launch_bounds__(kThreads)
    EncodedUpdateKernel(const UpdateArrays arrays, bool groups_aligned, const UpdateRuns runs) {
  using Work = cuda::EncodedUpdateWork<kRule, kForm>;
  __shared__ float numbers[2][256];
  __shared__ uint32_t steps[2][DynamicMap::kSteps];
  if (!runs.constants.data()->apply) return;
  for (int map = 0; map < 2; ++map) {
    for (int i = static_cast<int>(threadIdx.x); i < DynamicMap::kSteps; i += kThreads) {
      steps[map][i] = kMaps[map].steps.data()[i];
      if (i < 256) numbers[map][i] = kMaps[map].numbers.data()[i];
    }
  }
  __syncthreads();
  const cuda::MapTables tables[2] = {{numbers[0], steps[0], kMaps[0].negative},
                                     {numbers[1], steps[1], kMaps[1].negative}};
  Work work(arrays, runs, tables, groups_aligned);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t blocks = (arrays.count + kScaleBlock - 1) / kScaleBlock;
  for (int64_t block = Thread() / kWarp; block < blocks; block += Threads() / kWarp) {
    Extremes extremes[kStatesMax];
    work.Update(block, lane, extremes);
    for (int s = 0; s < Work::kStates; ++s) {
      if (!IsDynamic(arrays.states[s].encoding)) continue;
#pragma unroll
      for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        const uint32_t positive = __shfl_xor_sync(kAllLanes, extremes[s].positive, distance);
        const uint32_t negative = __shfl_xor_sync(kAllLanes, extremes[s].negative, distance);
        extremes[s].positive = max(extremes[s].positive, positive);
        extremes[s].negative = max(extremes[s].negative, negative);
      }
    }
    work.Encode(block, lane, extremes);
  }
}

__device__ uint64_t& LimbOf(NormSums& sums, int limb) {
  return limb < ExactSum::kLimbs ? sums.parameter.limbs[limb]
                                 : sums.direction.limbs[limb - ExactSum::kLimbs];
}

// Adds a warp's sums of a run to the total, with one addition for each limb. The order does not
// matter, because limbs are integers.
__device__ void AddNorms(NormSums& own, NormSums& sums, int lane) {
  __syncwarp();
  for (int limb = lane; limb < 2 * ExactSum::kLimbs; limb += kWarp) {
    uint64_t& piece = LimbOf(own, limb);
    if (piece != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&LimbOf(sums, limb)),
                static_cast<unsigned long long>(piece));
    }
    piece = 0;
  }
  __syncwarp();
}

// A warp takes a range of blocks, and adds up its part of each run in shared memory.
template <UpdateRule kRule, MasterForm kForm>
__global__ void __launch_bounds__(kThreads)
    SumNormsKernel(const UpdateArrays arrays, const UpdateRuns runs, NormSums* sums) {
  __shared__ NormSums of_warps[kThreads / kWarp];
  if (!runs.constants.data()->apply) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  NormSums& own = of_warps[threadIdx.x / kWarp];
  for (int limb = lane; limb < 2 * ExactSum::kLimbs; limb += kWarp) LimbOf(own, limb) = 0;
  __syncwarp();
  const int64_t blocks = (arrays.count + kExactBlock - 1) / kExactBlock;
  const int64_t warps = Threads() / kWarp, each = (blocks + warps - 1) / warps;
  const int64_t first = Thread() / kWarp * each;
  const int64_t last = first + each < blocks ? first + each : blocks;
  if (first >= last) return;
  cuda::NormWork<kRule, kForm> work(arrays, runs, first);
  for (int64_t block = first; block < last; ++block) {
    if (!work.Has(block)) {
      AddNorms(own, sums[work.set], lane);
      work.Enter(block);
    }
    double parameter, direction;
    work.Lane(block, lane, parameter, direction);
#pragma unroll
    for (unsigned distance = kWarp / 2; distance > 0; distance /= 2) {
      parameter += __shfl_down_sync(kAllLanes, parameter, distance);
      direction += __shfl_down_sync(kAllLanes, direction, distance);
    }
    if (lane != 0) continue;
    ForEachLimbOf(parameter, [&](int limb, uint64_t piece) { own.parameter.limbs[limb] += piece; });
    ForEachLimbOf(direction, [&](int limb, uint64_t piece) { own.direction.limbs[limb] += piece; });
  }
  AddNorms(own, sums[work.set], lane);
}

// A warp takes as many blocks as it has parts of threads. All threads of the warp stay to the end,
// because the shuffles need them.
template <int kLanes>
__global__ void __launch_bounds__(kThreads)
    SumBlocksKernel(const AccumulateArrays arrays, bool groups_aligned, double* blocks) {
  using Work = cuda::SquaresWork<kLanes>;
  constexpr int kBlocksOfWarp = kWarp / Work::kParts;
  const int64_t count = NormBlocks(arrays.count);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t first = Thread() / kWarp * kBlocksOfWarp; first < count;
       first += Threads() / kWarp * kBlocksOfWarp) {
    const int64_t block = first + lane / Work::kParts;
    const int part = lane % Work::kParts;
    double lanes[kLanes] = {};
    if (block < count) Work{arrays}.Part(block, part, groups_aligned, lanes);
#pragma unroll
    for (unsigned distance = Work::kParts / 2; distance > 0; distance /= 2) {
      double upper[kLanes];
#pragma unroll
      for (int i = 0; i < kLanes; ++i) upper[i] = __shfl_down_sync(kAllLanes, lanes[i], distance);
      cuda::AddPart(lanes, upper);
    }
    if (part == 0 && block < count) blocks[block] = cuda::AddLanes(lanes);
  }
}

// All threads of the warp stay to the end, because the shuffles, which add norm.h's tree, need
// them.
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

// Adds the levels that are small enough for one block of threads, one after the other.
__global__ void __launch_bounds__(kLevelThreads)
    AddLevelsKernel(cuda::LevelWork level, double* sum) {
  for (; level.count > 1; level = level.Above()) {
    AddLevel(level, threadIdx.x, kLevelThreads);
    __syncthreads();  // all threads see what each has put
  }
  if (threadIdx.x == 0) *sum = level.count == 0 ? 0 : level.sums[0];
}

__global__ void AddToKernel(const float* value, double* sum) {
  *sum += double{*value};
}

// Uses cudaLaunchKernelEx, because it returns the error of this launch, and <<<>>> does not.
template <class... Parameters, class... Arguments>
cudaError_t LaunchBlocks(cudaStream_t stream, int64_t blocks, int threads,
                         void (*kernel)(Parameters...), const Arguments&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = static_cast<unsigned>(threads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

// Launches as many threads as there is work for, in at most `blocks_max` blocks.
template <class... Parameters, class... Arguments>
cudaError_t Launch(cudaStream_t stream, int64_t threads, int blocks_max,
                   void (*kernel)(Parameters...), const Arguments&... arguments) {
  const int64_t blocks =
      std::clamp<int64_t>((threads + kThreads - 1) / kThreads, 1, std::max(blocks_max, 1));
  return LaunchBlocks(stream, blocks, kThreads, kernel, arguments...);
}

template <int kLanes>
cudaError_t LaunchSumBlocks(cudaStream_t stream, int blocks_max, const AccumulateArrays& arrays,
                            double* blocks) {
  using Work = cuda::SquaresWork<kLanes>;
  return Launch(stream, NormBlocks(arrays.count) * Work::kParts, blocks_max,
                &SumBlocksKernel<kLanes>, arrays, Work::Aligned(arrays), blocks);
}

int64_t ThreadsFor(const Cut& cut) {
  return std::max(cut.groups, cut.singles());
}

template <class Work, class Arrays>
cudaError_t LaunchEach(cudaStream_t stream, int blocks_max, const Arrays& arrays) {
  if (arrays.count == 0) return cudaSuccess;
  const Cut cut = Work::CutOf(arrays);
  return Launch(stream, ThreadsFor(cut), blocks_max, &EachElementKernel<Work, Arrays>, arrays, cut);
}

// The rules that take states of other encodings.
template <UpdateRule kRule>
constexpr bool kHasEncodedStates = StatesOf(kRule) > 0 && !TakesNorms(kRule);

template <UpdateRule kRule, MasterForm kForm>
cudaError_t LaunchEncodedUpdateOf(const Grids& grids, cudaStream_t stream,
                                  const UpdateArrays& arrays, const UpdateRuns& runs) {
  const int64_t blocks = (arrays.count + kScaleBlock - 1) / kScaleBlock;
  const int blocks_max = grids.encoded_update[static_cast<int>(kRule)][static_cast<int>(kForm)];
  const bool aligned = cuda::EncodedUpdateWork<kRule, kForm>::Aligned(arrays, runs);
  return Launch(stream, blocks * kWarp, blocks_max, &EncodedUpdateKernel<kRule, kForm>, arrays,
                aligned, runs);
}

template <UpdateRule kRule, MasterForm kForm>
cudaError_t LaunchUpdateOf(const Grids& grids, cudaStream_t stream, const UpdateArrays& arrays,
                           const UpdateRuns& runs) {
  if (arrays.count == 0) return cudaSuccess;
  if (!HasFp32States(kRule, arrays)) {
    if constexpr (kHasEncodedStates<kRule>)
      return LaunchEncodedUpdateOf<kRule, kForm>(grids, stream, arrays, runs);
    return cudaErrorInvalidValue;
  }
  const Cut cut = cuda::UpdateWork<kRule, kForm>::CutOf(arrays, runs);
  const int blocks_max = grids.update[static_cast<int>(kRule)][static_cast<int>(kForm)];
  return Launch(stream, ThreadsFor(cut), blocks_max, &UpdateKernel<kRule, kForm>, arrays, cut,
                runs);
}

template <UpdateRule kRule>
cudaError_t LaunchUpdateOf(const Grids& grids, cudaStream_t stream, const UpdateArrays& arrays,
                           const UpdateRuns& runs) {
  switch (arrays.form()) {
    case MasterForm::kWhole:
      return LaunchUpdateOf<kRule, MasterForm::kWhole>(grids, stream, arrays, runs);
    case MasterForm::kSplit:
      return LaunchUpdateOf<kRule, MasterForm::kSplit>(grids, stream, arrays, runs);
    case MasterForm::kParameter:
      return LaunchUpdateOf<kRule, MasterForm::kParameter>(grids, stream, arrays, runs);
  }
  return cudaErrorInvalidValue;
}

template <UpdateRule kRule, MasterForm kForm>
cudaError_t LaunchSumNormsOf(int blocks_max, cudaStream_t stream, const UpdateArrays& arrays,
                             const UpdateRuns& runs, NormSums* sums) {
  const int64_t blocks = (arrays.count + kExactBlock - 1) / kExactBlock;
  if (blocks == 0) return cudaSuccess;
  return Launch(stream, blocks * kWarp, blocks_max, &SumNormsKernel<kRule, kForm>, arrays, runs,
                sums);
}

template <UpdateRule kRule>
cudaError_t LaunchSumNormsOf(const int (&blocks_max)[3], cudaStream_t stream,
                             const UpdateArrays& arrays, const UpdateRuns& runs, NormSums* sums) {
  const int blocks = blocks_max[static_cast<int>(arrays.form())];
  switch (arrays.form()) {
    case MasterForm::kWhole:
      return LaunchSumNormsOf<kRule, MasterForm::kWhole>(blocks, stream, arrays, runs, sums);
    case MasterForm::kSplit:
      return LaunchSumNormsOf<kRule, MasterForm::kSplit>(blocks, stream, arrays, runs, sums);
    case MasterForm::kParameter:
      return LaunchSumNormsOf<kRule, MasterForm::kParameter>(blocks, stream, arrays, runs, sums);
  }
  return cudaErrorInvalidValue;
}

// Keeps the first error.
class Loader {
 public:
  template <class... Parameters>
  void Load(void (*kernel)(Parameters...), int* blocks, int threads = kThreads) {
    if (result_ != cudaSuccess) return;
    result_ = LoadAndCountResident(reinterpret_cast<const void*>(kernel), threads, blocks);
  }
  template <UpdateRule kRule>
  void LoadUpdates(Grids* grids) {
    auto& blocks = grids->update[static_cast<int>(kRule)];
    Load(&UpdateKernel<kRule, MasterForm::kWhole>, &blocks[static_cast<int>(MasterForm::kWhole)]);
    Load(&UpdateKernel<kRule, MasterForm::kSplit>, &blocks[static_cast<int>(MasterForm::kSplit)]);
    Load(&UpdateKernel<kRule, MasterForm::kParameter>,
         &blocks[static_cast<int>(MasterForm::kParameter)]);
  }
  template <UpdateRule kRule>
  void LoadEncodedUpdates(Grids* grids) {
    if constexpr (kHasEncodedStates<kRule>) {
      auto& blocks = grids->encoded_update[static_cast<int>(kRule)];
      Load(&EncodedUpdateKernel<kRule, MasterForm::kWhole>,
           &blocks[static_cast<int>(MasterForm::kWhole)]);
      Load(&EncodedUpdateKernel<kRule, MasterForm::kSplit>,
           &blocks[static_cast<int>(MasterForm::kSplit)]);
      Load(&EncodedUpdateKernel<kRule, MasterForm::kParameter>,
           &blocks[static_cast<int>(MasterForm::kParameter)]);
    }
  }
  template <UpdateRule kRule>
  void LoadNorms(int (&blocks)[3]) {
    Load(&SumNormsKernel<kRule, MasterForm::kWhole>, &blocks[static_cast<int>(MasterForm::kWhole)]);
    Load(&SumNormsKernel<kRule, MasterForm::kSplit>, &blocks[static_cast<int>(MasterForm::kSplit)]);
    Load(&SumNormsKernel<kRule, MasterForm::kParameter>,
         &blocks[static_cast<int>(MasterForm::kParameter)]);
  }
  cudaError_t result() const { return result_; }

 private:
  cudaError_t result_ = cudaSuccess;
};

}  // namespace

cudaError_t LoadKernels(Grids* grids) {
  Loader loader;
  loader.Load(&EachElementKernel<cuda::CastWork, CastArrays>, &grids->cast);
  loader.Load(&EachElementKernel<cuda::NormaliseWork, NormaliseArrays>, &grids->normalise);
  loader.Load(&EachElementKernel<cuda::LoadMasterWork<true>, MasterArrays>, &grids->load_master[0]);
  loader.Load(&EachElementKernel<cuda::LoadMasterWork<false>, MasterArrays>,
              &grids->load_master[1]);
  loader.Load(&EachElementKernel<cuda::StoreMasterWork<true>, MasterArrays>,
              &grids->store_master[0]);
  loader.Load(&EachElementKernel<cuda::StoreMasterWork<false>, MasterArrays>,
              &grids->store_master[1]);
  loader.Load(&EachElementKernel<cuda::AccumulateWork, AccumulateArrays>, &grids->accumulate);
  loader.Load(&SumBlocksKernel<4>, &grids->squares[0]);
  loader.Load(&SumBlocksKernel<2>, &grids->squares[1]);
  loader.Load(&SumBlocksKernel<1>, &grids->squares[2]);
  loader.Load(&AddLevelKernel, &grids->level);
  for (int rule = 0; rule < kUpdateRules; ++rule) {
    WithRule(static_cast<UpdateRule>(rule), [&]<UpdateRule kRule>() {
      loader.LoadUpdates<kRule>(grids);
      loader.LoadEncodedUpdates<kRule>(grids);
    });
  }
  loader.LoadNorms<UpdateRule::kLamb>(grids->norms[0]);
  loader.LoadNorms<UpdateRule::kLars>(grids->norms[1]);
  int always_one = 0;
  loader.Load(&AddLevelsKernel, &always_one, kLevelThreads);
  loader.Load(&AddToKernel, &always_one, 1);
  return loader.result();
}

cudaError_t LaunchCast(const Grids& grids, cudaStream_t stream, const CastArrays& arrays) {
  return LaunchEach<cuda::CastWork>(stream, grids.cast, arrays);
}

cudaError_t LaunchNormalise(const Grids& grids, cudaStream_t stream,
                            const NormaliseArrays& arrays) {
  return LaunchEach<cuda::NormaliseWork>(stream, grids.normalise, arrays);
}

cudaError_t LaunchLoadMaster(const Grids& grids, cudaStream_t stream, const MasterArrays& arrays) {
  return arrays.low != nullptr
             ? LaunchEach<cuda::LoadMasterWork<true>>(stream, grids.load_master[0], arrays)
             : LaunchEach<cuda::LoadMasterWork<false>>(stream, grids.load_master[1], arrays);
}

cudaError_t LaunchStoreMaster(const Grids& grids, cudaStream_t stream, const MasterArrays& arrays) {
  return arrays.low != nullptr
             ? LaunchEach<cuda::StoreMasterWork<true>>(stream, grids.store_master[0], arrays)
             : LaunchEach<cuda::StoreMasterWork<false>>(stream, grids.store_master[1], arrays);
}

cudaError_t LaunchAccumulate(const Grids& grids, cudaStream_t stream,
                             const AccumulateArrays& arrays) {
  return LaunchEach<cuda::AccumulateWork>(stream, grids.accumulate, arrays);
}

cudaError_t LaunchSumSquares(const Grids& grids, cudaStream_t stream,
                             const AccumulateArrays& arrays, double* blocks, double* sum) {
  cuda::LevelWork level = {.sums = blocks, .count = NormBlocks(arrays.count)};
  if (level.count > 0) {
    // The fewest threads for each block of numbers that give every SM twice its resident blocks.
    const auto fills = [&](int parts, int resident) {
      return level.count * parts >= int64_t{2} * resident * kThreads;
    };
    const cudaError_t result = fills(cuda::SquaresWork<4>::kParts, grids.squares[0])
                                   ? LaunchSumBlocks<4>(stream, grids.squares[0], arrays, blocks)
                               : fills(cuda::SquaresWork<2>::kParts, grids.squares[1])
                                   ? LaunchSumBlocks<2>(stream, grids.squares[1], arrays, blocks)
                                   : LaunchSumBlocks<1>(stream, grids.squares[2], arrays, blocks);
    if (result != cudaSuccess) return result;
  }
  // Levels that need more than one block of threads: shards of more than 2^26 elements.
  for (; level.blocks() * cuda::kNormLanes > kLevelThreads; level = level.Above()) {
    const cudaError_t result =
        Launch(stream, level.blocks() * cuda::kNormLanes, grids.level, &AddLevelKernel, level);
    if (result != cudaSuccess) return result;
  }
  return LaunchBlocks(stream, 1, kLevelThreads, &AddLevelsKernel, level, sum);
}

cudaError_t LaunchAddTo(cudaStream_t stream, const float* value, double* sum) {
  return LaunchBlocks(stream, 1, 1, &AddToKernel, value, sum);
}

cudaError_t LaunchSumNorms(const Grids& grids, cudaStream_t stream, UpdateRule rule,
                           const UpdateArrays& arrays, const UpdateRuns& runs,
                           std::span<NormSums> sums) {
  if (rule == UpdateRule::kLamb) {
    return LaunchSumNormsOf<UpdateRule::kLamb>(grids.norms[0], stream, arrays, runs, sums.data());
  }
  return LaunchSumNormsOf<UpdateRule::kLars>(grids.norms[1], stream, arrays, runs, sums.data());
}

cudaError_t LaunchUpdate(const Grids& grids, cudaStream_t stream, UpdateRule rule,
                         const UpdateArrays& arrays, const UpdateRuns& runs) {
  return WithRule(
      rule, [&]<UpdateRule kRule>() { return LaunchUpdateOf<kRule>(grids, stream, arrays, runs); });
}

}  // namespace ebb::optim
