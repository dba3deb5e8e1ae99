#include "ebb/optim/cuda/matrix_products.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"

namespace ebb::optim {
namespace {

// The library returns CUBLAS_VERSION.
LibraryVersion AskVersion(void* get_version) {
  const auto code =
      static_cast<int>(reinterpret_cast<decltype(&::cublasLtGetVersion)>(get_version)());
  return {code / 10000, code / 100 % 100, code % 100};
}

// cuBLASLt's matrices are column-major. Read that way, a row-major c = a b is c' = b' a'.
struct Side {
  MatrixView view;
  int64_t rows = 0, columns = 0;  // row-major

  bool is_transposed() const { return view.column_stride != 1; }
  // A matrix of one column has two strides of 1.
  int64_t stride() const {
    return std::max(height(), is_transposed() ? view.column_stride : view.row_stride);
  }
  // The memory's, column-major.
  int64_t height() const { return is_transposed() ? rows : columns; }
  int64_t width() const { return is_transposed() ? columns : rows; }
};

}  // namespace

absl::StatusOr<std::unique_ptr<MatrixProducts>> MatrixProducts::Open() {
  EBB_ASSIGN_OR_RETURN(
      const OpenedLibrary opened,
      OpenedLibrary::Open({.name = "cuBLASLt",
                           .file = absl::StrCat("libcublasLt.so.", CUBLAS_VER_MAJOR),
                           .needed_for = "Muon on a GPU",
                           .instead = "choose another optimizer",
                           .oldest = {.major = CUBLAS_VER_MAJOR, .minor = 0, .patch = 0},
                           .version_function = "cublasLtGetVersion",
                           .version = &AskVersion}));
  std::unique_ptr<MatrixProducts> products(new MatrixProducts(opened));
  EBB_RETURN_IF_ERROR(products->library_.found());
  if (products->library_.Create(&products->handle_) == CUBLAS_STATUS_SUCCESS) return products;
  products->handle_ = nullptr;
  return absl::UnavailableError("cublasLtCreate failed, which Muon on a GPU needs");
}

MatrixProducts::~MatrixProducts() {
  for (const auto& [shape, of] : described_) {
    if (of.product != nullptr) library_.DescDestroy(of.product);
    for (const cublasLtMatrixLayout_t layout : {of.left, of.right, of.out})
      if (layout != nullptr) library_.LayoutDestroy(layout);
  }
  if (handle_ != nullptr) library_.Destroy(handle_);
}

cublasStatus_t MatrixProducts::Describe(const Shape& shape, const Product& product,
                                        Described& described) const {
  const auto [left_height, left_width, left_stride, right_height, right_width, right_stride,
              out_stride, left_is_transposed, right_is_transposed, is_half] = shape;
  const cudaDataType_t type = is_half != 0 ? CUDA_R_16BF : CUDA_R_32F;
  cublasStatus_t status = library_.DescCreate(&described.product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  const auto transpose = [&](cublasLtMatmulDescAttributes_t side, int64_t is_transposed) {
    const int32_t operation = is_transposed != 0 ? CUBLAS_OP_T : CUBLAS_OP_N;
    if (status == CUBLAS_STATUS_SUCCESS)
      status = library_.DescSetAttribute(described.product, side, &operation, sizeof(operation));
  };
  transpose(CUBLASLT_MATMUL_DESC_TRANSA, left_is_transposed);
  transpose(CUBLASLT_MATMUL_DESC_TRANSB, right_is_transposed);
  const auto lay_out = [&](cublasLtMatrixLayout_t& layout, int64_t height, int64_t width,
                           int64_t stride) {
    if (status == CUBLAS_STATUS_SUCCESS)
      status = library_.LayoutCreate(&layout, type, static_cast<uint64_t>(height),
                                     static_cast<uint64_t>(width), stride);
  };
  lay_out(described.left, left_height, left_width, left_stride);
  lay_out(described.right, right_height, right_width, right_stride);
  lay_out(described.out, product.columns, product.rows, out_stride);
  return status;
}

cudaError_t MatrixProducts::Multiply(cudaStream_t stream, const Product& product) {
  const Side a{product.a, product.rows, product.depth},
      b{product.b, product.depth, product.columns};
  const Shape shape = {b.height(),
                       b.width(),
                       b.stride(),
                       a.height(),
                       a.width(),
                       a.stride(),
                       std::max(product.columns, product.out.row_stride),
                       b.is_transposed() ? 1 : 0,
                       a.is_transposed() ? 1 : 0,
                       product.dtype == DType::kBFloat16 ? 1 : 0};
  const auto [found, is_new] = described_.try_emplace(shape);
  Described& of = found->second;
  if (is_new && Describe(shape, product, of) != CUBLAS_STATUS_SUCCESS) return cudaErrorNotSupported;
  const bool adds = product.c.data != nullptr;
  const float beta = adds ? product.beta : 0;
  const cublasStatus_t status = library_.Matmul(
      handle_, of.product, &product.alpha, product.b.data, of.left, product.a.data, of.right, &beta,
      adds ? product.c.data : product.out.data, of.out, product.out.data, of.out,
      /*algo=*/nullptr, /*workspace=*/nullptr, /*workspaceSizeInBytes=*/0, stream);
  return status == CUBLAS_STATUS_SUCCESS ? cudaSuccess : cudaErrorNotSupported;
}

}  // namespace ebb::optim
