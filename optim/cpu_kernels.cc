#include "ebb/optim/cpu_kernels.h"

#include <algorithm>
#include <cstddef>

namespace ebb::optim {

void CpuKernels::Cast(Stream& stream, const void* source, DType source_dtype, void* destination,
                      DType destination_dtype, int64_t count, Rounding rounding) {
  optim::Cast(stream.team(), source, source_dtype, destination, destination_dtype, count, rounding);
}

void CpuKernels::CastVia(Stream& stream, const void* source, DType source_dtype, DType via,
                         void* destination, DType destination_dtype, int64_t count) {
  if (via == source_dtype || via == destination_dtype) {
    return optim::Cast(stream.team(), source, source_dtype, destination, destination_dtype, count,
                       Rounding::kNearest);
  }
  constexpr int64_t kBlock = 1024, kGrainBlocks = 16;
  const auto* const from = static_cast<const std::byte*>(source);
  auto* const to = static_cast<std::byte*>(destination);
  stream.team().Run((count + kBlock - 1) / kBlock, kGrainBlocks,
                    [&](int64_t begin_block, int64_t end_block) {
                      alignas(64) std::byte rounded[kBlock * sizeof(float)];
                      const int64_t end = std::min(end_block * kBlock, count);
                      for (int64_t at = begin_block * kBlock; at < end; at += kBlock) {
                        const int64_t part = std::min(kBlock, end - at);
                        optim::Cast(alone_, from + at * SizeOf(source_dtype), source_dtype, rounded,
                                    via, part, Rounding::kNearest);
                        optim::Cast(alone_, rounded, via, to + at * SizeOf(destination_dtype),
                                    destination_dtype, part, Rounding::kNearest);
                      }
                    });
}

void CpuKernels::Scale(Stream& stream, const void* source, DType source_dtype, float factor,
                       float* destination, int64_t count) {
  optim::Cast(stream.team(), source, source_dtype, destination, DType::kFloat32, count,
              Rounding::kNearest);
  constexpr int64_t kGrain = 64 * 1024;  // elements: half a megabyte
  stream.team().Run(count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) destination[i] *= factor;
  });
}

void CpuKernels::LoadMaster(Stream& stream, const MasterArrays& arrays) {
  optim::LoadMaster(stream.team(), arrays);
}

void CpuKernels::StoreMaster(Stream& stream, const MasterArrays& arrays) {
  optim::StoreMaster(stream.team(), arrays);
}

void CpuKernels::Accumulate(Stream& stream, const AccumulateArrays& arrays) {
  optim::Accumulate(stream.team(), arrays);
}

void CpuKernels::AccumulateAndSumSquares(Stream& stream, const AccumulateArrays& arrays,
                                         std::span<double> blocks, double* sum) {
  *sum = optim::AccumulateAndSumSquares(stream.team(), arrays, blocks);
}

void CpuKernels::SumOfSquares(Stream& stream, const void* gradient, DType dtype, int64_t count,
                              std::span<double> blocks, double* sum) {
  *sum = optim::SumOfSquares(stream.team(), gradient, dtype, count, blocks);
}

void CpuKernels::AddTo(Stream&, const float* value, double* sum) {
  *sum += double{*value};
}

void CpuKernels::ClearNorms(Stream&, std::span<NormSums> sums) {
  std::fill(sums.begin(), sums.end(), NormSums());
}

void CpuKernels::SumNorms(Stream& stream, UpdateRule rule, const UpdateArrays& arrays,
                          const UpdateRuns& runs, std::span<NormSums> sums) {
  ForEachRun(arrays, runs, [&](const UpdateArrays& part, const UpdateConstants& constants) {
    const auto set = static_cast<size_t>(&constants - runs.constants.data());
    optim::SumNorms(stream.team(), rule, part, constants, sums[set]);
  });
}

void CpuKernels::Update(Stream& stream, UpdateRule rule, const UpdateArrays& arrays,
                        const UpdateRuns& runs) {
  ForEachRun(arrays, runs, [&](const UpdateArrays& part, const UpdateConstants& constants) {
    optim::Update(stream.team(), rule, part, constants);
  });
}

}  // namespace ebb::optim
