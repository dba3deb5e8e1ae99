// The kernels' part: all functions of optim/cuda/launch.h, so that nothing else of the real one is
// linked.
#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <span>
#include <vector>

#include "ebb/optim/cast.h"
#include "ebb/optim/cuda/launch.h"
#include "ebb/optim/cuda/thread_work.h"
#include "ebb/optim/norm.h"
#include "ebb/optim/split_master.h"
#include "ebb/runtime/device/thread_team.h"
#include "order.h"
#include "state.h"

namespace ebb::optim {
namespace {

using stand_in::EnqueueKernel;
using stand_in::Reads;
using stand_in::Touched;
using stand_in::Writes;

// Never destroyed, because streams may outlive static objects here.
ThreadTeam& Team() {
  static auto* const team = new ThreadTeam(1);
  return *team;
}

cudaError_t NoteLaunch(const char* function, cudaStream_t stream,
                       std::span<const Touched> touched) {
  if (stand_in::Lost() != cudaSuccess) return stand_in::Lost();
  if (const int code = stand_in::Injected(function)) return static_cast<cudaError_t>(code);
  stand_in::NoteKernel(stream, function, touched);
  return cudaSuccess;
}

// `kernel` holds copies of the arguments, as a launch does.
template <class Kernel>
cudaError_t Launch(const char* function, cudaStream_t stream,
                   std::initializer_list<Touched> touched, Kernel kernel) {
  const cudaError_t result = NoteLaunch(function, stream, touched);
  if (result == cudaSuccess) EnqueueKernel(stream, Task(kernel));
  return result;
}

Touched SourceOf(const AccumulateArrays& arrays) {
  return Reads(arrays.source, arrays.count * SizeOf(arrays.source_dtype));
}
Touched DestinationOf(const AccumulateArrays& arrays) {
  if (arrays.destination == nullptr) return {};
  return Writes(arrays.destination, arrays.count * SizeOf(arrays.destination_dtype));
}

void CastTwice(const CastArrays& arrays) {
  constexpr int64_t kBlock = 1024;
  alignas(64) std::byte rounded[kBlock * sizeof(float)];
  const auto* const from = static_cast<const std::byte*>(arrays.source);
  auto* const to = static_cast<std::byte*>(arrays.destination);
  for (int64_t at = 0; at < arrays.count; at += kBlock) {
    const int64_t count = std::min(kBlock, arrays.count - at);
    Cast(Team(), from + at * SizeOf(arrays.source_dtype), arrays.source_dtype, rounded, arrays.via,
         count, Rounding::kNearest);
    Cast(Team(), rounded, arrays.via, to + at * SizeOf(arrays.destination_dtype),
         arrays.destination_dtype, count, arrays.rounding);
  }
}

}  // namespace

cudaError_t LoadKernels(Grids* grids) {
  const int blocks = stand_in::ResidentBlocks();
  grids->cast = grids->accumulate = grids->level = grids->normalise = blocks;
  for (int& squares : grids->squares) squares = blocks;
  std::fill_n(grids->load_master, 2, blocks);
  std::fill_n(grids->store_master, 2, blocks);
  for (auto& of_rule : grids->update) std::fill_n(of_rule, 3, blocks);
  for (auto& of_rule : grids->encoded_update) std::fill_n(of_rule, 3, blocks);
  for (auto& of_rule : grids->norms) std::fill_n(of_rule, 3, blocks);
  return static_cast<cudaError_t>(stand_in::Injected("LoadKernels"));
}

cudaError_t LaunchCast(const Grids& grids, cudaStream_t stream, const CastArrays& arrays) {
  if (grids.cast != stand_in::ResidentBlocks()) return cudaErrorInvalidConfiguration;
  const std::initializer_list<Touched> touched = {
      Reads(arrays.source, arrays.count * SizeOf(arrays.source_dtype)),
      Writes(arrays.destination, arrays.count * SizeOf(arrays.destination_dtype))};
  return Launch("LaunchCast", stream, touched, [arrays] {
    if (arrays.via == DType::kFloat32) {
      Cast(Team(), arrays.source, arrays.source_dtype, arrays.destination, arrays.destination_dtype,
           arrays.count, arrays.rounding);
      for (int64_t i = 0; i < arrays.count && arrays.factor != 1; ++i)
        static_cast<float*>(arrays.destination)[i] *= arrays.factor;
    } else {
      CastTwice(arrays);
    }
  });
}

cudaError_t LaunchNormalise(const Grids& grids, cudaStream_t stream,
                            const NormaliseArrays& arrays) {
  if (grids.normalise != stand_in::ResidentBlocks()) return cudaErrorInvalidConfiguration;
  const std::initializer_list<Touched> touched = {
      Reads(arrays.source, arrays.count * SizeOf(arrays.source_dtype)),
      Reads(arrays.squares, sizeof(double)),
      Writes(arrays.destination, arrays.count * SizeOf(arrays.destination_dtype))};
  return Launch("LaunchNormalise", stream, touched, [arrays] {
    const cuda::Cut cut = cuda::NormaliseWork::CutOf(arrays);
    cuda::Walk<1>(cut, /*thread=*/0, /*threads=*/1, cuda::NormaliseWork(arrays));
  });
}

namespace {

cudaError_t LaunchMaster(const char* function, int blocks, cudaStream_t stream,
                         const MasterArrays& arrays, void (*run)(ThreadTeam&, const MasterArrays&),
                         Touched (*of_master)(const void*, int64_t),
                         Touched (*of_kept)(const void*, int64_t)) {
  if (blocks != stand_in::ResidentBlocks()) return cudaErrorInvalidConfiguration;
  const int64_t halves = arrays.count * int64_t{sizeof(BFloat16)};
  return Launch(function, stream,
                {of_master(arrays.master, 2 * halves), of_kept(arrays.parameter, halves),
                 of_kept(arrays.low, arrays.low == nullptr ? 0 : halves)},
                [run, arrays] { run(Team(), arrays); });
}

}  // namespace

cudaError_t LaunchLoadMaster(const Grids& grids, cudaStream_t stream, const MasterArrays& arrays) {
  return LaunchMaster("LaunchLoadMaster", grids.load_master[arrays.low == nullptr], stream, arrays,
                      &LoadMaster, &Writes<int64_t>, &Reads<int64_t>);
}

cudaError_t LaunchStoreMaster(const Grids& grids, cudaStream_t stream, const MasterArrays& arrays) {
  return LaunchMaster("LaunchStoreMaster", grids.store_master[arrays.low == nullptr], stream,
                      arrays, &StoreMaster, &Reads<int64_t>, &Writes<int64_t>);
}

cudaError_t LaunchAccumulate(const Grids& grids, cudaStream_t stream,
                             const AccumulateArrays& arrays) {
  if (grids.accumulate != stand_in::ResidentBlocks()) return cudaErrorInvalidConfiguration;
  return Launch("LaunchAccumulate", stream, {SourceOf(arrays), DestinationOf(arrays)},
                [arrays] { Accumulate(Team(), arrays); });
}

cudaError_t LaunchSumSquares(const Grids& grids, cudaStream_t stream,
                             const AccumulateArrays& arrays, double* blocks, double* sum) {
  for (const int squares : grids.squares) {
    if (squares != stand_in::ResidentBlocks()) return cudaErrorInvalidConfiguration;
  }
  const auto scratch = static_cast<size_t>(NormBlocks(arrays.count)) * sizeof(double);
  const std::initializer_list<Touched> touched = {SourceOf(arrays), DestinationOf(arrays),
                                                  Writes(blocks, scratch),
                                                  Writes(sum, sizeof(double))};
  return Launch("LaunchSumSquares", stream, touched, [arrays, blocks, sum] {
    const auto count = static_cast<size_t>(NormBlocks(arrays.count));
    *sum = AccumulateAndSumSquares(Team(), arrays, {blocks, count});
  });
}

cudaError_t LaunchAddTo(cudaStream_t stream, const float* value, double* sum) {
  return Launch("LaunchAddTo", stream, {Reads(value, sizeof(float)), Writes(sum, sizeof(double))},
                [value, sum] { *sum += double{*value}; });
}

namespace {

// Larger than a task's room.
struct UpdateArguments {
  UpdateRule rule;
  UpdateArrays arrays;
  UpdateRuns runs;
};

void RunUpdate(void* given) {
  const auto& arguments = *static_cast<const UpdateArguments*>(given);
  ForEachRun(arguments.arrays, arguments.runs,
             [&](const UpdateArrays& part, const UpdateConstants& constants) {
               Update(Team(), arguments.rule, part, constants);
             });
}

}  // namespace

namespace {

struct NormArguments {
  UpdateArguments of;
  NormSums* sums;
};

void RunSumNorms(void* given) {
  const auto& [of, sums] = *static_cast<const NormArguments*>(given);
  ForEachRun(of.arrays, of.runs, [&](const UpdateArrays& part, const UpdateConstants& constants) {
    SumNorms(Team(), of.rule, part, constants, sums[&constants - of.runs.constants.data()]);
  });
}

// Reads that an update and its norms have in common.
std::vector<Touched> ReadsOf(UpdateRule rule, const UpdateArrays& arrays, const UpdateRuns& runs) {
  const int64_t count = arrays.count, fp32 = count * int64_t{sizeof(float)};
  const bool reads_parameter = arrays.form() != MasterForm::kWhole;
  std::vector<Touched> touched = {
      Reads(runs.constants.data(), runs.constants.size_bytes()),
      Reads(runs.runs.data(), runs.runs.size_bytes()),
      Reads(arrays.gradient, count * SizeOf(arrays.gradient_dtype)),
      Reads(arrays.parameter, reads_parameter ? count * int64_t{sizeof(BFloat16)} : 0),
      Reads(arrays.master, arrays.master == nullptr ? 0 : fp32),
      Reads(arrays.master_low, arrays.master_low == nullptr ? 0 : count * int64_t{2})};
  for (int s = 0; s < StatesOfNorms(rule); ++s)
    touched.push_back(Reads(arrays.states[s].codes, fp32));
  return touched;
}

}  // namespace

cudaError_t LaunchSumNorms(const Grids& grids, cudaStream_t stream, UpdateRule rule,
                           const UpdateArrays& arrays, const UpdateRuns& runs,
                           std::span<NormSums> sums) {
  if (grids.norms[rule == UpdateRule::kLamb ? 0 : 1][static_cast<int>(arrays.form())] !=
      stand_in::ResidentBlocks())
    return cudaErrorInvalidConfiguration;
  std::vector<Touched> touched = ReadsOf(rule, arrays, runs);
  touched.push_back(Writes(sums.data(), sums.size_bytes()));
  if (const cudaError_t result = NoteLaunch("LaunchSumNorms", stream, touched);
      result != cudaSuccess)
    return result;
  EnqueueKernel(stream, &RunSumNorms, new NormArguments{{rule, arrays, runs}, sums.data()},
                [](void* given) { delete static_cast<NormArguments*>(given); });
  return cudaSuccess;
}

cudaError_t LaunchUpdate(const Grids& grids, cudaStream_t stream, UpdateRule rule,
                         const UpdateArrays& arrays, const UpdateRuns& runs) {
  const auto& blocks = HasFp32States(rule, arrays) ? grids.update : grids.encoded_update;
  if (blocks[static_cast<int>(rule)][static_cast<int>(arrays.form())] != stand_in::ResidentBlocks())
    return cudaErrorInvalidConfiguration;
  const int64_t count = arrays.count, fp32 = count * int64_t{sizeof(float)};
  const auto codes = [&](int s) {
    const StateArray& state = arrays.states[s];
    return Writes(state.codes, state.codes == nullptr ? 0 : count * state.encoding.code_bytes());
  };
  const auto scales = [&](int s) {
    const StateArray& state = arrays.states[s];
    const int64_t of_codes = count * state.encoding.code_bytes();
    return Writes(state.scales,
                  state.scales == nullptr ? 0 : state.encoding.bytes(count) - of_codes);
  };
  const std::initializer_list<Touched> touched = {
      Reads(runs.constants.data(), runs.constants.size_bytes()),
      Reads(runs.runs.data(), runs.runs.size_bytes()),
      Reads(arrays.gradient, count * SizeOf(arrays.gradient_dtype)),
      Reads(arrays.parameter_in,
            arrays.parameter_in == nullptr ? 0 : count * int64_t{sizeof(BFloat16)}),
      Writes(arrays.parameter,
             arrays.parameter == nullptr ? 0 : count * SizeOf(arrays.parameter_dtype)),
      Writes(arrays.master, arrays.master == nullptr ? 0 : fp32),
      Writes(arrays.master_low, arrays.master_low == nullptr ? 0 : count * int64_t{2}),
      codes(0),
      codes(1),
      codes(2),
      scales(0),
      scales(1),
      scales(2)};
  if (const cudaError_t result = NoteLaunch("LaunchUpdate", stream, touched); result != cudaSuccess)
    return result;
  EnqueueKernel(stream, &RunUpdate, new UpdateArguments{rule, arrays, runs},
                [](void* given) { delete static_cast<UpdateArguments*>(given); });
  return cudaSuccess;
}

}  // namespace ebb::optim
