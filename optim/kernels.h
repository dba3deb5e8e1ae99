// The step's arithmetic on a device's memory, in the order of its streams: casts, accumulation, the
// squares of the norm, the optimizer's update.
//
// cast.h, norm.h and update.h define the results. For finite numbers the bits are the same on every
// device; a NaN is a NaN on every device. The time of the computation differs:
//
//   CPU   a call computes on the calling thread with stream.team() and has ended when it returns:
//         call it in a task of the stream
//   CUDA  a call enqueues on stream.view(), allocates nothing and never waits. The device must
//         reach every pointer. Memory is read and written when the stream gets there. A failed
//         launch fails the device (Device::status); later calls then do nothing
//
// One object serves all streams of its device; on CUDA one thread at a time enqueues on a stream.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/optim/cast.h"
#include "ebb/optim/newton_schulz.h"
#include "ebb/optim/norm.h"
#include "ebb/optim/parameter_norms.h"
#include "ebb/optim/split_master.h"
#include "ebb/optim/update.h"
#include "ebb/optim/update_constants.h"
#include "ebb/optim/update_runs.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/stream.h"

namespace ebb::optim {

class Kernels {
 public:
  // On CUDA it also loads the kernels. Otherwise the first launch would load them, and might wait
  // for the device. kUnimplemented: this build has no CUDA.
  static absl::StatusOr<std::unique_ptr<Kernels>> For(const Device& device);
  virtual ~Kernels() = default;

  // True: calls return before the work has run.
  virtual bool enqueues() const = 0;

  // Bytes per element of Cast and CastVia: the source's read, the destination's written.
  virtual void Cast(Stream& stream, const void* source, DType source_dtype, void* destination,
                    DType destination_dtype, int64_t count, Rounding rounding) = 0;
  // Rounds to `via` first, to nearest both times: for sums in a wider type than the type that is
  // sent.
  virtual void CastVia(Stream& stream, const void* source, DType source_dtype, DType via,
                       void* destination, DType destination_dtype, int64_t count) = 0;

  // Before and after a trainer's own optimizer: the gradient as fp32 times `factor`, and the master
  // as fp32 where it is kept in another form (split_master.h).
  virtual void Scale(Stream& stream, const void* source, DType source_dtype, float factor,
                     float* destination, int64_t count) = 0;
  virtual void LoadMaster(Stream& stream, const MasterArrays& arrays) = 0;
  virtual void StoreMaster(Stream& stream, const MasterArrays& arrays) = 0;

  virtual void Accumulate(Stream& stream, const AccumulateArrays& arrays) = 0;
  // `blocks`: scratch of NormBlocks(count); *sum is overwritten.
  virtual void AccumulateAndSumSquares(Stream& stream, const AccumulateArrays& arrays,
                                       std::span<double> blocks, double* sum) = 0;
  virtual void SumOfSquares(Stream& stream, const void* gradient, DType dtype, int64_t count,
                            std::span<double> blocks, double* sum) = 0;
  // *sum += *value.
  virtual void AddTo(Stream& stream, const float* value, double* sum) = 0;

  // Call it before updates by a rule that takes norms: `sums` begin as zeros. Each run adds to the
  // sums with the number of its set of constants. Nothing is added if the constants say not to
  // apply.
  virtual void ClearNorms(Stream& stream, std::span<NormSums> sums) = 0;
  virtual void SumNorms(Stream& stream, UpdateRule rule, const UpdateArrays& arrays,
                        const UpdateRuns& runs, std::span<NormSums> sums) = 0;

  // One pass, and on CUDA one launch, for any number of runs. The update reads the rule's constants
  // when it runs, and writes nothing if they say not to apply. On CUDA put them into device memory,
  // because every thread reads them.
  virtual void Update(Stream& stream, UpdateRule rule, const UpdateArrays& arrays,
                      const UpdateRuns& runs) = 0;
  // Before the first Orthogonalise: opens what it needs. kUnavailable: cuBLASLt is missing.
  virtual absl::Status LoadProducts() { return absl::OkStatus(); }
  // Muon's iteration (newton_schulz.h). On the CPU the bits are the same for every team; on CUDA they
  // are cuBLAS's.
  virtual void Orthogonalise(Stream& stream, const NewtonSchulz& rule,
                             const MatrixArrays& arrays) = 0;
  // For elements that all have the same options.
  void Update(Stream& stream, const OptimizerConfig& optimizer, const UpdateArrays& arrays,
              const UpdateConstants* constants) {
    Update(stream, UpdateRuleOf(optimizer), arrays, {.constants = {constants, 1}});
  }
};

// Kernels::For a device from Device::Cuda.
absl::StatusOr<std::unique_ptr<Kernels>> NewCudaKernels(const Device& device);

}  // namespace ebb::optim
