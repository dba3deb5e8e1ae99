// cuBLASLt's functions, opened when the first ops on a GPU are made
// (runtime/device/opened_library.h), so that a program starts without a CUDA toolkit. Any version
// with the major number of the build's headers works, because all functions used here have existed
// since 12.0.
#pragma once

#include <cublasLt.h>

#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/device/opened_library.h"

namespace ebb::gpt::cuda {

struct CublasLt : LibraryFunctions {
  using LibraryFunctions::LibraryFunctions;
  decltype(&::cublasLtCreate) Create = Find("cublasLtCreate");
  decltype(&::cublasLtDestroy) Destroy = Find("cublasLtDestroy");
  decltype(&::cublasLtGetStatusString) GetStatusString = Find("cublasLtGetStatusString");
  decltype(&::cublasLtMatmulDescCreate) MatmulDescCreate = Find("cublasLtMatmulDescCreate");
  decltype(&::cublasLtMatmulDescDestroy) MatmulDescDestroy = Find("cublasLtMatmulDescDestroy");
  decltype(&::cublasLtMatmulDescSetAttribute) MatmulDescSetAttribute =
      Find("cublasLtMatmulDescSetAttribute");
  decltype(&::cublasLtMatrixLayoutCreate) MatrixLayoutCreate = Find("cublasLtMatrixLayoutCreate");
  decltype(&::cublasLtMatrixLayoutDestroy) MatrixLayoutDestroy =
      Find("cublasLtMatrixLayoutDestroy");
  decltype(&::cublasLtMatmulPreferenceCreate) MatmulPreferenceCreate =
      Find("cublasLtMatmulPreferenceCreate");
  decltype(&::cublasLtMatmulPreferenceDestroy) MatmulPreferenceDestroy =
      Find("cublasLtMatmulPreferenceDestroy");
  decltype(&::cublasLtMatmulPreferenceSetAttribute) MatmulPreferenceSetAttribute =
      Find("cublasLtMatmulPreferenceSetAttribute");
  decltype(&::cublasLtMatmulAlgoGetHeuristic) MatmulAlgoGetHeuristic =
      Find("cublasLtMatmulAlgoGetHeuristic");
  decltype(&::cublasLtMatmul) Matmul = Find("cublasLtMatmul");
};

// kUnavailable says what is missing, or which version does not work.
absl::StatusOr<CublasLt> OpenCublasLt();
// The result of the first call, for the whole life of the process.
absl::StatusOr<const CublasLt*> LoadCublasLt();

// OK for CUBLAS_STATUS_SUCCESS.
absl::Status CublasStatus(const CublasLt& library, cublasStatus_t result, std::string_view what);

}  // namespace ebb::gpt::cuda
