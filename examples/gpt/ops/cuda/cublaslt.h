// cuBLASLt's functions, found when the first product on a GPU is made: those that the program has
// already, else the library's of the dynamic linker's path. So a program starts where there is no
// CUDA toolkit.
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

// The same for the whole life of the process. kUnavailable says what is missing.
absl::StatusOr<const CublasLt*> LoadCublasLt();

// OK for CUBLAS_STATUS_SUCCESS.
absl::Status CublasStatus(const CublasLt& library, cublasStatus_t result, std::string_view what);

}  // namespace ebb::gpt::cuda
