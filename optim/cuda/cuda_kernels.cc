#include <algorithm>
#include <cassert>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/optim/cuda/launch.h"
#include "ebb/optim/cuda/matrix_products.h"
#include "ebb/optim/kernels.h"
#include "ebb/optim/stochastic_rounding.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/cuda/context.h"
#include "ebb/runtime/device/cuda/cuda_device.h"
#include "ebb/runtime/device/cuda/error.h"

namespace ebb::optim {
namespace {

class CudaKernels : public Kernels {
 public:
  CudaKernels(std::shared_ptr<CudaContext> context, const Grids& grids)
      : context_(std::move(context)), grids_(grids) {}

  bool enqueues() const override { return true; }

  void Cast(Stream& stream, const void* source, DType source_dtype, void* destination,
            DType destination_dtype, int64_t count, Rounding rounding) override {
    if (source_dtype == destination_dtype) {
      if (source != destination) stream.Copy(destination, source, count * SizeOf(source_dtype));
      return;
    }
    Launch(stream, {.source = source,
                    .source_dtype = source_dtype,
                    .destination = destination,
                    .destination_dtype = destination_dtype,
                    .count = count,
                    .rounding = rounding});
  }

  void CastVia(Stream& stream, const void* source, DType source_dtype, DType via, void* destination,
               DType destination_dtype, int64_t count) override {
    if (via == source_dtype || via == destination_dtype) {
      return Cast(stream, source, source_dtype, destination, destination_dtype, count,
                  Rounding::kNearest);
    }
    Launch(stream, {.source = source,
                    .source_dtype = source_dtype,
                    .via = via,
                    .destination = destination,
                    .destination_dtype = destination_dtype,
                    .count = count});
  }

  void Scale(Stream& stream, const void* source, DType source_dtype, float factor,
             float* destination, int64_t count) override {
    Launch(stream, {.source = source,
                    .source_dtype = source_dtype,
                    .destination = destination,
                    .count = count,
                    .factor = factor});
  }

  void LoadMaster(Stream& stream, const MasterArrays& arrays) override {
    Enqueue(stream, "launching a load of masters",
            [&](cudaStream_t native) { return LaunchLoadMaster(grids_, native, arrays); });
  }

  // One launch for each key of random bits.
  void StoreMaster(Stream& stream, const MasterArrays& arrays) override {
    for (int64_t done = 0; done < arrays.count;) {
      MasterArrays part = arrays;
      part.master += done;
      part.parameter += done;
      part.low += part.low == nullptr ? 0 : done;
      part.rounding.index += done;
      part.count = std::min(arrays.count - done,
                            kRoundingKeyElements - part.rounding.index % kRoundingKeyElements);
      Enqueue(stream, "launching a store of masters",
              [&](cudaStream_t native) { return LaunchStoreMaster(grids_, native, part); });
      done += part.count;
    }
  }

  void Accumulate(Stream& stream, const AccumulateArrays& arrays) override {
    Enqueue(stream, "launching an accumulation",
            [&](cudaStream_t native) { return LaunchAccumulate(grids_, native, arrays); });
  }

  void AccumulateAndSumSquares(Stream& stream, const AccumulateArrays& arrays,
                               std::span<double> blocks, double* sum) override {
    assert(static_cast<int64_t>(blocks.size()) >= NormBlocks(arrays.count));
    Enqueue(stream, "launching the squares of a norm", [&](cudaStream_t native) {
      return LaunchSumSquares(grids_, native, arrays, blocks.data(), sum);
    });
  }

  void SumOfSquares(Stream& stream, const void* gradient, DType dtype, int64_t count,
                    std::span<double> blocks, double* sum) override {
    AccumulateAndSumSquares(stream, {.source = gradient, .source_dtype = dtype, .count = count},
                            blocks, sum);
  }

  void AddTo(Stream& stream, const float* value, double* sum) override {
    Enqueue(stream, "launching an addition",
            [&](cudaStream_t native) { return LaunchAddTo(native, value, sum); });
  }

  void ClearNorms(Stream& stream, std::span<NormSums> sums) override {
    if (!sums.empty()) stream.Zero(sums.data(), static_cast<int64_t>(sums.size_bytes()));
  }

  void SumNorms(Stream& stream, UpdateRule rule, const UpdateArrays& arrays, const UpdateRuns& runs,
                std::span<NormSums> sums) override {
    Enqueue(stream, "launching the norms of parameters", [&](cudaStream_t native) {
      return LaunchSumNorms(grids_, native, rule, arrays, runs, sums);
    });
  }

  void Update(Stream& stream, UpdateRule rule, const UpdateArrays& arrays,
              const UpdateRuns& runs) override {
    Enqueue(stream, "launching an update",
            [&](cudaStream_t native) { return LaunchUpdate(grids_, native, rule, arrays, runs); });
  }

  absl::Status LoadProducts() override {
    if (products_ != nullptr) return absl::OkStatus();
    const CudaCurrent current(context_->ordinal());
    EBB_ASSIGN_OR_RETURN(products_, MatrixProducts::Open());
    return absl::OkStatus();
  }

  // The sum of squares lies behind the sums of its blocks, where no product has been written yet.
  void Orthogonalise(Stream& stream, const NewtonSchulz& rule,
                     const MatrixArrays& arrays) override {
    assert(products_ != nullptr);
    const int64_t count = arrays.rows * arrays.columns;
    const NewtonSchulzScratch scratch(arrays.rows, arrays.columns, SizeOf(arrays.dtype));
    auto* const blocks = reinterpret_cast<double*>(arrays.scratch + scratch.gram);
    auto* const squares = reinterpret_cast<double*>(arrays.scratch + scratch.polynomial);
    SumOfSquares(stream, arrays.matrix, arrays.dtype, count,
                 {blocks, static_cast<size_t>(NormBlocks(count))}, squares);
    Enqueue(stream, "launching the scaling of a matrix", [&](cudaStream_t native) {
      return LaunchNormalise(grids_, native,
                             {.source = arrays.matrix,
                              .source_dtype = arrays.dtype,
                              .destination = IterationStart(rule, arrays),
                              .destination_dtype = arrays.dtype,
                              .count = count,
                              .squares = squares,
                              .epsilon = rule.epsilon});
    });
    Iterate(rule, arrays, [&](const Product& product) {
      Enqueue(stream, "multiplying matrices",
              [&](cudaStream_t native) { return products_->Multiply(native, product); });
    });
  }

 private:
  void Launch(Stream& stream, const CastArrays& arrays) {
    Enqueue(stream, "launching a cast",
            [&](cudaStream_t native) { return LaunchCast(grids_, native, arrays); });
  }

  template <class Launcher>
  void Enqueue(Stream& stream, const char* what, const Launcher& launch) {
    if (context_->failed()) return;
    const CudaCurrent current(context_->ordinal());
    context_->Check(launch(static_cast<cudaStream_t>(stream.view().native)), what, "a stream");
  }

  const std::shared_ptr<CudaContext> context_;
  const Grids grids_;
  std::unique_ptr<MatrixProducts> products_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Kernels>> NewCudaKernels(const Device& device) {
  const auto* const cuda = dynamic_cast<const CudaDevice*>(&device.backend());
  if (cuda == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(device.description(), " is not a device that Device::Cuda made"));
  }
  EBB_RETURN_IF_ERROR(device.status());
  const CudaCurrent current(device.ordinal());
  Grids grids;
  const cudaError_t loaded = LoadKernels(&grids);
  EBB_RETURN_IF_ERROR(
      CudaStatus(loaded, absl::StrCat("loading the kernels onto ", device.description())));
  return std::make_unique<CudaKernels>(cuda->context(), grids);
}

}  // namespace ebb::optim
