// Kernels of the CPU: the functions of cast.h, norm.h and update.h on the stream's team.
#pragma once

#include "ebb/optim/kernels.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb::optim {

class CpuKernels : public Kernels {
 public:
  bool enqueues() const override { return false; }
  void Cast(Stream& stream, const void* source, DType source_dtype, void* destination,
            DType destination_dtype, int64_t count, Rounding rounding) override;
  void CastVia(Stream& stream, const void* source, DType source_dtype, DType via, void* destination,
               DType destination_dtype, int64_t count) override;
  void Scale(Stream& stream, const void* source, DType source_dtype, float factor,
             float* destination, int64_t count) override;
  void LoadMaster(Stream& stream, const MasterArrays& arrays) override;
  void StoreMaster(Stream& stream, const MasterArrays& arrays) override;
  void Accumulate(Stream& stream, const AccumulateArrays& arrays) override;
  void AccumulateAndSumSquares(Stream& stream, const AccumulateArrays& arrays,
                               std::span<double> blocks, double* sum) override;
  void SumOfSquares(Stream& stream, const void* gradient, DType dtype, int64_t count,
                    std::span<double> blocks, double* sum) override;
  void AddTo(Stream& stream, const float* value, double* sum) override;
  void ClearNorms(Stream& stream, std::span<NormSums> sums) override;
  void SumNorms(Stream& stream, UpdateRule rule, const UpdateArrays& arrays, const UpdateRuns& runs,
                std::span<NormSums> sums) override;
  void Update(Stream& stream, UpdateRule rule, const UpdateArrays& arrays,
              const UpdateRuns& runs) override;

 private:
  ThreadTeam alone_{1};  // for a thread that casts alone
};

}  // namespace ebb::optim
