// cuBLASLt's functions, opened when the first ops on a GPU are made
// (runtime/device/opened_library.h), so that a program starts without a CUDA toolkit. Any version
// with the major number of the build's headers works, because all functions used here have existed
// since 12.0.
#pragma once

#include <cublasLt.h>

#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ebb::gpt::cuda {

struct CublasLt {
  decltype(&::cublasLtCreate) Create = nullptr;
  decltype(&::cublasLtDestroy) Destroy = nullptr;
  decltype(&::cublasLtGetStatusString) GetStatusString = nullptr;
  decltype(&::cublasLtMatmulDescCreate) MatmulDescCreate = nullptr;
  decltype(&::cublasLtMatmulDescDestroy) MatmulDescDestroy = nullptr;
  decltype(&::cublasLtMatmulDescSetAttribute) MatmulDescSetAttribute = nullptr;
  decltype(&::cublasLtMatrixLayoutCreate) MatrixLayoutCreate = nullptr;
  decltype(&::cublasLtMatrixLayoutDestroy) MatrixLayoutDestroy = nullptr;
  decltype(&::cublasLtMatmulPreferenceCreate) MatmulPreferenceCreate = nullptr;
  decltype(&::cublasLtMatmulPreferenceDestroy) MatmulPreferenceDestroy = nullptr;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) MatmulPreferenceSetAttribute = nullptr;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) MatmulAlgoGetHeuristic = nullptr;
  decltype(&::cublasLtMatmul) Matmul = nullptr;
};

// kUnavailable says what is missing, or which version does not work.
absl::StatusOr<CublasLt> OpenCublasLt();
// The result of the first call, for the whole life of the process.
absl::StatusOr<const CublasLt*> LoadCublasLt();

// OK for CUBLAS_STATUS_SUCCESS.
absl::Status CublasStatus(const CublasLt& library, cublasStatus_t result, std::string_view what);

}  // namespace ebb::gpt::cuda
