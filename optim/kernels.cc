#include "ebb/optim/kernels.h"

#include <algorithm>
#include <cstddef>

#include "ebb/runtime/device/thread_team.h"

namespace ebb::optim {
namespace {

// The functions of cast.h, norm.h and update.h on the stream's team.
class CpuKernels : public Kernels {
 public:
  bool enqueues() const override { return false; }

  void Cast(Stream& stream, const void* source, DType source_dtype, void* destination,
            DType destination_dtype, int64_t count, Rounding rounding) override {
    optim::Cast(stream.team(), source, source_dtype, destination, destination_dtype, count,
                rounding);
  }

  void CastVia(Stream& stream, const void* source, DType source_dtype, DType via, void* destination,
               DType destination_dtype, int64_t count) override {
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
                          optim::Cast(alone_, from + at * SizeOf(source_dtype), source_dtype,
                                      rounded, via, part, Rounding::kNearest);
                          optim::Cast(alone_, rounded, via, to + at * SizeOf(destination_dtype),
                                      destination_dtype, part, Rounding::kNearest);
                        }
                      });
  }

  void Scale(Stream& stream, const void* source, DType source_dtype, float factor,
             float* destination, int64_t count) override {
    optim::Cast(stream.team(), source, source_dtype, destination, DType::kFloat32, count,
                Rounding::kNearest);
    constexpr int64_t kGrain = 64 * 1024;  // elements: half a megabyte
    stream.team().Run(count, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) destination[i] *= factor;
    });
  }

  void LoadMaster(Stream& stream, const MasterArrays& arrays) override {
    optim::LoadMaster(stream.team(), arrays);
  }

  void StoreMaster(Stream& stream, const MasterArrays& arrays) override {
    optim::StoreMaster(stream.team(), arrays);
  }

  void Accumulate(Stream& stream, const AccumulateArrays& arrays) override {
    optim::Accumulate(stream.team(), arrays);
  }

  void AccumulateAndSumSquares(Stream& stream, const AccumulateArrays& arrays,
                               std::span<double> blocks, double* sum) override {
    *sum = optim::AccumulateAndSumSquares(stream.team(), arrays, blocks);
  }

  void SumOfSquares(Stream& stream, const void* gradient, DType dtype, int64_t count,
                    std::span<double> blocks, double* sum) override {
    *sum = optim::SumOfSquares(stream.team(), gradient, dtype, count, blocks);
  }

  void AddTo(Stream&, const float* value, double* sum) override { *sum += double{*value}; }

  void ClearNorms(Stream&, std::span<NormSums> sums) override {
    std::fill(sums.begin(), sums.end(), NormSums());
  }

  void SumNorms(Stream& stream, UpdateRule rule, const UpdateArrays& arrays, const UpdateRuns& runs,
                std::span<NormSums> sums) override {
    ForEachRun(arrays, runs, [&](const UpdateArrays& part, const UpdateConstants& constants) {
      const auto set = static_cast<size_t>(&constants - runs.constants.data());
      optim::SumNorms(stream.team(), rule, part, constants, sums[set]);
    });
  }

  void Update(Stream& stream, UpdateRule rule, const UpdateArrays& arrays,
              const UpdateRuns& runs) override {
    ForEachRun(arrays, runs, [&](const UpdateArrays& part, const UpdateConstants& constants) {
      optim::Update(stream.team(), rule, part, constants);
    });
  }

  void Orthogonalise(Stream& stream, const NewtonSchulz& rule,
                     const MatrixArrays& arrays) override {
    optim::Orthogonalise(stream.team(), rule, arrays);
  }

 private:
  ThreadTeam alone_{1};  // for a thread that casts alone
};

}  // namespace

absl::StatusOr<std::unique_ptr<Kernels>> Kernels::For(const Device& device) {
  switch (device.kind()) {
    case DeviceKind::kCpu:
      return std::make_unique<CpuKernels>();
    case DeviceKind::kCuda:
      return NewCudaKernels(device);
  }
  return absl::InternalError("a device of no known kind");
}

}  // namespace ebb::optim
