// matrix_product.h's products on a GPU, by cuBLASLt, which is opened when it is first needed. Sums
// are fp32, in an order that cuBLASLt chooses: the same for one shape, device and version.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/optim/matrix_product.h"
#include "ebb/runtime/device/opened_library.h"

namespace ebb::optim {

class MatrixProducts {
 public:
  // For the current device. kUnavailable: there is no cuBLASLt that works.
  static absl::StatusOr<std::unique_ptr<MatrixProducts>> Open();
  ~MatrixProducts();
  MatrixProducts(const MatrixProducts&) = delete;
  MatrixProducts& operator=(const MatrixProducts&) = delete;

  // Enqueues the product, from one thread at a time. Both halves of a symmetric result are computed.
  cudaError_t Multiply(cudaStream_t stream, const Product& product);

 private:
  struct Library : LibraryFunctions {
    using LibraryFunctions::LibraryFunctions;
    decltype(&::cublasLtCreate) Create = Find("cublasLtCreate");
    decltype(&::cublasLtDestroy) Destroy = Find("cublasLtDestroy");
    decltype(&::cublasLtMatmulDescCreate) DescCreate = Find("cublasLtMatmulDescCreate");
    decltype(&::cublasLtMatmulDescDestroy) DescDestroy = Find("cublasLtMatmulDescDestroy");
    decltype(&::cublasLtMatmulDescSetAttribute) DescSetAttribute =
        Find("cublasLtMatmulDescSetAttribute");
    decltype(&::cublasLtMatrixLayoutCreate) LayoutCreate = Find("cublasLtMatrixLayoutCreate");
    decltype(&::cublasLtMatrixLayoutDestroy) LayoutDestroy = Find("cublasLtMatrixLayoutDestroy");
    decltype(&::cublasLtMatmul) Matmul = Find("cublasLtMatmul");
  };
  explicit MatrixProducts(const OpenedLibrary& opened) : library_(opened) {}

  // A product's shape: rows, columns and strides of the three matrices, which are transposed, and
  // the type.
  using Shape = std::array<int64_t, 10>;
  // The library's descriptions of it, which are made once.
  struct Described {
    cublasLtMatmulDesc_t product = nullptr;
    cublasLtMatrixLayout_t left = nullptr, right = nullptr, out = nullptr;
  };
  cublasStatus_t Describe(const Shape& shape, const Product& product, Described& described) const;

  const Library library_;
  cublasLtHandle_t handle_ = nullptr;
  std::map<Shape, Described> described_;
};

}  // namespace ebb::optim
