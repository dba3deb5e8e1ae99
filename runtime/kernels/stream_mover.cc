#include "ebb/runtime/kernels/stream_mover.h"

#include <algorithm>
#include <cassert>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/cuda/context.h"
#include "ebb/runtime/device/cuda/error.h"
#include "ebb/runtime/kernels/reduce_launch.h"

namespace ebb {
namespace {

ReduceArrays::Combine CombineOf(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return ReduceArrays::Combine::kSum;
    case ReduceOp::kMax:
      return ReduceArrays::Combine::kMax;
    case ReduceOp::kMin:
      return ReduceArrays::Combine::kMin;
  }
  return ReduceArrays::Combine::kSum;
}

ReduceArrays ArraysOf(const Reduction& reduction, int inputs, void* destination, int64_t count) {
  return {.destination = destination,
          .count = count,
          .inputs_count = inputs,
          .group = reduction.group == 0 ? inputs : reduction.group,
          .scale = reduction.scale,
          .dtype = reduction.dtype,
          .combine = CombineOf(reduction.op)};
}

}  // namespace

static_assert(StreamMover::kInputsMax == ReduceArrays::kInputsMax);

absl::StatusOr<std::shared_ptr<const ReduceGrids>> StreamMover::Load(const Device& device) {
  const CudaCurrent current(device.ordinal());
  auto grids = std::make_shared<ReduceGrids>();
  cudaError_t loaded = current.result();
  if (loaded == cudaSuccess) loaded = LoadReductions(grids.get());
  EBB_RETURN_IF_ERROR(CudaStatus(
      loaded, absl::StrCat("loading the kernels of reductions onto ", device.description())));
  return grids;
}

void StreamMover::Copy(void* destination, const void* source, int64_t bytes, int64_t) {
  if (failed_.ok() && destination != source) stream_.Copy(destination, source, bytes);
}

void StreamMover::Reduce(const Reduction& reduction, std::span<const void* const> inputs,
                         void* destination, int64_t count, int64_t) {
  assert(inputs.size() <= kInputsMax);
  ReduceArrays arrays = ArraysOf(reduction, static_cast<int>(inputs.size()), destination, count);
  std::copy(inputs.begin(), inputs.end(), arrays.inputs);
  Launch(arrays);
}

void StreamMover::ReduceRow(const Reduction& reduction, const void* first, int64_t stride,
                            int inputs, void* destination, int64_t count) {
  ReduceArrays arrays = ArraysOf(reduction, inputs, destination, count);
  arrays.inputs[0] = first;
  arrays.stride = stride;
  Launch(arrays);
}

void StreamMover::Scale(const ScaleArrays& arrays) {
  Launch([&] {
    return LaunchScale(grids_, static_cast<cudaStream_t>(stream_.view().native), arrays);
  });
}

void StreamMover::Launch(const ReduceArrays& arrays) {
  Launch([&] {
    return LaunchReduce(grids_, static_cast<cudaStream_t>(stream_.view().native), arrays);
  });
}

void StreamMover::Launch(absl::FunctionRef<int()> launch) {
  if (!status().ok()) return;
  const CudaCurrent current(device_.ordinal());
  cudaError_t launched = current.result();
  if (launched == cudaSuccess) launched = static_cast<cudaError_t>(launch());
  if (launched == cudaSuccess) return;
  failed_ = CudaStatus(launched,
                       absl::StrCat("launching a reduction's kernel on ", device_.description()));
}

}  // namespace ebb
