// The kernels as the host calls them. Each function enqueues one kernel (LaunchSumSquares a few,
// one after the other) on a stream of the current device. The function returns CUDA's error for
// this launch, not for earlier work. A test that defines these functions replaces kernels.cu,
// because other files use only these functions of it.
#pragma once

#include <cuda_runtime_api.h>

#include "ebb/optim/cuda/cast_arrays.h"
#include "ebb/optim/norm.h"
#include "ebb/optim/parameter_norms.h"
#include "ebb/optim/split_master.h"
#include "ebb/optim/update_runs.h"

namespace ebb::optim {

// The largest grids of one device, in blocks of threads (resident_blocks.h).
struct Grids {
  int cast = 1, accumulate = 1, level = 1, normalise = 1;
  int squares[3] = {1, 1, 1};  // with 4, 8 and 16 threads for each block of a norm
  int load_master[2] = {1, 1}, store_master[2] = {1, 1};  // for a split master, for a parameter
  int update[kUpdateRules][3] = {};                       // for each UpdateRule and MasterForm
  int encoded_update[kUpdateRules][3] = {};  // likewise, for states of other encodings than fp32
  int norms[2][3] = {};                      // for LAMB and for LARS, likewise
};

// Loads all kernels onto the current device. An error if the device is older than this build's
// code.
cudaError_t LoadKernels(Grids* grids);

// `grids`: of the current device.
cudaError_t LaunchCast(const Grids& grids, cudaStream_t stream, const CastArrays& arrays);
cudaError_t LaunchNormalise(const Grids& grids, cudaStream_t stream, const NormaliseArrays& arrays);
cudaError_t LaunchLoadMaster(const Grids& grids, cudaStream_t stream, const MasterArrays& arrays);
// Elements with one key (kRoundingKeyElements) if the parameter is the master.
cudaError_t LaunchStoreMaster(const Grids& grids, cudaStream_t stream, const MasterArrays& arrays);
cudaError_t LaunchAccumulate(const Grids& grids, cudaStream_t stream,
                             const AccumulateArrays& arrays);
// Sums the written numbers or, without a destination, the source.
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
