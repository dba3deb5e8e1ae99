// The kernels as the host sees them: each function enqueues one kernel (LaunchSumSquares a few, one
// after the other) on a stream of the current device and returns what CUDA says of the launch, and
// nothing of what was enqueued before. Nothing else of kernels.cu is named elsewhere, so whoever
// defines these takes its place.
#pragma once

#include <cuda_runtime_api.h>

#include "ebb/optim/cuda/cast_arrays.h"
#include "ebb/optim/master_arrays.h"
#include "ebb/optim/norm.h"
#include "ebb/optim/parameter_norms.h"
#include "ebb/optim/update_runs.h"

namespace ebb::optim {

// The largest grids of one device, in blocks of threads (resident_blocks.h).
struct Grids {
  int cast = 1, accumulate = 1, level = 1;
  int squares[3] = {1, 1, 1};  // with 4, 8 and 16 threads a block of a norm
  int load_master[2] = {1, 1}, store_master[2] = {1, 1};  // of a split one, of a parameter
  int update[kUpdateRules][3] = {};                       // of an UpdateRule and a MasterForm
  int norms[2][3] = {};                                   // of LAMB and of LARS, likewise
};

// Loads all kernels onto the current device. An error where it is older than what this build has
// code for.
cudaError_t LoadKernels(Grids* grids);

// `grids`: of the current device.
cudaError_t LaunchCast(const Grids& grids, cudaStream_t stream, const CastArrays& arrays);
cudaError_t LaunchLoadMaster(const Grids& grids, cudaStream_t stream, const MasterArrays& arrays);
// Elements of one key (kRoundingKeyElements) where the parameter is the master.
cudaError_t LaunchStoreMaster(const Grids& grids, cudaStream_t stream, const MasterArrays& arrays);
cudaError_t LaunchAccumulate(const Grids& grids, cudaStream_t stream,
                             const AccumulateArrays& arrays);
// Of what was written or, without a destination, of the source.
cudaError_t LaunchSumSquares(const Grids& grids, cudaStream_t stream,
                             const AccumulateArrays& arrays, double* blocks, double* sum);
cudaError_t LaunchAddTo(cudaStream_t stream, const float* value, double* sum);
// Adds to `sums`, by the runs' sets.
cudaError_t LaunchSumNorms(const Grids& grids, cudaStream_t stream, UpdateRule rule,
                           const UpdateArrays& arrays, const UpdateRuns& runs,
                           std::span<NormSums> sums);
cudaError_t LaunchUpdate(const Grids& grids, cudaStream_t stream, UpdateRule rule,
                         const UpdateArrays& arrays, const UpdateRuns& runs);

}  // namespace ebb::optim
