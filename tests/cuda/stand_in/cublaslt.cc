// cuBLASLt's part: the functions that products of gpt and of Muon use, found by their names.
// Products are sums in ascending order of k, by fused multiply-adds in fp32. Products that the real
// library does not offer are not offered here either, so that their replacements are tested.
#include <cublasLt.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "ebb/runtime/base/dtype.h"
#include "graph.h"
#include "order.h"
#include "state.h"

namespace {

using ebb::BFloat16;
using ebb::Float16;
using namespace ebb::stand_in;  // the file's own

struct Description {
  bool a_transposed = false, b_transposed = false;
  uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  void *bias = nullptr, *aux = nullptr;
  int64_t aux_stride = 0;
  int32_t bias_type = -1;
};
struct Layout {
  cudaDataType_t type = CUDA_R_32F;
  int64_t rows = 0, columns = 0, stride = 0;  // column-major
};

float Get(const void* data, cudaDataType_t type, int64_t index) {
  if (type == CUDA_R_16BF) return static_cast<float>(static_cast<const BFloat16*>(data)[index]);
  if (type == CUDA_R_16F) return static_cast<float>(static_cast<const Float16*>(data)[index]);
  return static_cast<const float*>(data)[index];
}
void Put(void* data, cudaDataType_t type, int64_t index, float value) {
  if (type == CUDA_R_16BF) {
    static_cast<BFloat16*>(data)[index] = BFloat16(value);
  } else if (type == CUDA_R_16F) {
    static_cast<Float16*>(data)[index] = Float16(value);
  } else {
    static_cast<float*>(data)[index] = value;
  }
}

constexpr double kTanhScale = 0.7978845608028654;  // sqrt(2 / pi)
double Gelu(double x) {
  return 0.5 * x * (1 + std::tanh(kTanhScale * (x + 0.044715 * x * x * x)));
}
double GeluSlope(double x) {
  const double t = std::tanh(kTanhScale * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * kTanhScale * (1 + 3 * 0.044715 * x * x);
}

struct Call {
  Description description;
  Layout a, b, c;
  const void *a_data, *b_data, *added;
  void* c_data;
  float alpha, beta;
};

// An operand in fp32, as `outer` vectors of `depth` elements; element (o, k) lies at o *
// outer_stride + k * depth_stride.
std::vector<float> Vectors(const void* data, cudaDataType_t type, int64_t outer, int64_t depth,
                           int64_t outer_stride, int64_t depth_stride) {
  std::vector<float> vectors;
  vectors.reserve(static_cast<size_t>(outer * depth));
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t k = 0; k < depth; ++k)
      vectors.push_back(Get(data, type, o * outer_stride + k * depth_stride));
  }
  return vectors;
}

void Compute(const Call& call) {
  const Description& x = call.description;
  const int64_t depth = x.a_transposed ? call.a.rows : call.a.columns;
  const std::vector<float> a =
      Vectors(call.a_data, call.a.type, call.c.rows, depth, x.a_transposed ? call.a.stride : 1,
              x.a_transposed ? 1 : call.a.stride);
  const std::vector<float> b =
      Vectors(call.b_data, call.b.type, call.c.columns, depth, x.b_transposed ? 1 : call.b.stride,
              x.b_transposed ? call.b.stride : 1);
  const auto vector = [depth](const std::vector<float>& of, int64_t index) {
    return of.data() + index * depth;
  };
  const bool gelu =
      x.epilogue == CUBLASLT_EPILOGUE_GELU_AUX || x.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
  const bool bias =
      x.epilogue == CUBLASLT_EPILOGUE_BIAS || x.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
  for (int64_t column = 0; column < call.c.columns; ++column) {
    for (int64_t row = 0; row < call.c.rows; ++row) {
      float sum = 0;
      for (int64_t k = 0; k < depth; ++k)
        sum = std::fma(vector(a, row)[k], vector(b, column)[k], sum);
      const int64_t at = column * call.c.stride + row;
      sum *= call.alpha;
      if (call.beta != 0) sum = std::fma(call.beta, Get(call.added, call.c.type, at), sum);
      if (bias) sum += Get(x.bias, static_cast<cudaDataType_t>(x.bias_type), row);
      const int64_t aux = column * x.aux_stride + row;
      if (gelu) {
        Put(x.aux, call.c.type, aux, sum);
        sum = static_cast<float>(Gelu(sum));
      } else if (x.epilogue == CUBLASLT_EPILOGUE_DGELU) {
        sum = static_cast<float>(sum * GeluSlope(Get(x.aux, call.c.type, aux)));
      }
      Put(call.c_data, call.c.type, at, sum);
    }
  }
  if (x.epilogue != CUBLASLT_EPILOGUE_BGRADB) return;
  for (int64_t column = 0; column < call.c.columns; ++column) {
    float sum = 0;
    for (int64_t k = 0; k < depth; ++k) sum += vector(b, column)[k];
    Put(x.bias, call.c.type, column, sum);
  }
}

int64_t SizeOfType(int32_t type) {
  return type == CUDA_R_32F ? 4 : 2;
}
int64_t BytesOf(const Layout& layout) {
  return ((layout.columns - 1) * layout.stride + layout.rows) * SizeOfType(layout.type);
}

void NoteCall(cudaStream_t stream, const Call& call, const Touched& workspace) {
  const Description& x = call.description;
  const int64_t size = SizeOfType(call.c.type);
  const bool sums = x.epilogue == CUBLASLT_EPILOGUE_BGRADB;
  const int64_t aux = ((call.c.columns - 1) * x.aux_stride + call.c.rows) * size;
  const int64_t bias = sums ? call.c.columns * size : call.c.rows * SizeOfType(x.bias_type);
  const Touched touched[] = {Reads(call.a_data, BytesOf(call.a)),
                             Reads(call.b_data, BytesOf(call.b)),
                             Reads(call.added, call.beta != 0 ? BytesOf(call.c) : 0),
                             Writes(call.c_data, BytesOf(call.c)),
                             {x.aux, static_cast<size_t>(x.aux == nullptr ? 0 : aux),
                              x.epilogue != CUBLASLT_EPILOGUE_DGELU},
                             {x.bias, static_cast<size_t>(x.bias == nullptr ? 0 : bias), sums},
                             workspace};
  NoteKernel(stream, "cublasLtMatmul", touched);
}

template <class Made, class Handle>
cublasStatus_t Give(Handle* handle, Made made) {
  *handle = reinterpret_cast<Handle>(new Made(made));
  Count(Thing::kProduct, 1);
  return CUBLAS_STATUS_SUCCESS;
}
template <class Made, class Handle>
cublasStatus_t TakeBack(Handle handle) {
  delete reinterpret_cast<Made*>(handle);
  Count(Thing::kProduct, -1);
  return CUBLAS_STATUS_SUCCESS;
}
template <class Made, class Handle>
Made& Of(Handle handle) {
  return *reinterpret_cast<Made*>(handle);
}
template <class Made, class Handle>
const Made& OfConst(Handle handle) {
  return *reinterpret_cast<const Made*>(handle);
}

// Whether it is a kernel's first launch; `algorithm` and the call identify the kernel.
bool LoadsNow(const Call& call, int algorithm) {
  return LoadsProductNow({call.description.epilogue, call.description.a_transposed,
                          call.description.b_transposed, call.a.type, call.c.type, call.c.rows,
                          call.c.columns, algorithm});
}

bool Offers(const Description& x, const Layout& a, const Layout& b, const Layout& c) {
  if (a.type != b.type) return false;
  if (c.type != a.type && c.type != CUDA_R_32F) return false;
  const bool has_aux = (x.epilogue & 128) != 0;
  if (has_aux && (c.type != a.type || x.aux_stride % 8 != 0)) return false;
  // Rows of 16 bits begin at even addresses only if strides are even.
  if (x.epilogue == CUBLASLT_EPILOGUE_BGRADB && c.type != CUDA_R_32F && c.rows % 8 != 0)
    return false;
  return true;
}

// False for products that the heuristic accepts and cublasLtMatmul then refuses: a bias with
// another dtype than the result.
bool Runs(const Description& x, const Layout& c) {
  const bool bias =
      x.epilogue == CUBLASLT_EPILOGUE_BIAS || x.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
  return !bias || x.bias_type == c.type;
}

}  // namespace

extern "C" {

size_t cublasLtGetVersion() {
  return CublasLtVersion() != 0 ? static_cast<size_t>(CublasLtVersion()) : CUBLAS_VERSION;
}
cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  if (const int code = Injected("cublasLtCreate")) return static_cast<cublasStatus_t>(code);
  Count(Thing::kHandle, 1);
  return Give(handle, 0);
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  Count(Thing::kHandle, -1);
  return TakeBack<int>(handle);
}
const char* cublasLtGetStatusString(cublasStatus_t) {
  return "an error of the stand-in";
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* description, cublasComputeType_t type,
                                        cudaDataType_t scale) {
  if (type != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_INVALID_VALUE;
  return Give(description, Description());
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
  return TakeBack<Description>(description);
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  Description& x = Of<Description>(description);
  const auto as = [&](auto& to) {
    if (bytes != sizeof(to)) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(&to, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
  };
  int32_t operation = 0;
  cublasStatus_t result;
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      result = as(operation);
      x.a_transposed = operation == CUBLAS_OP_T;
      return result;
    case CUBLASLT_MATMUL_DESC_TRANSB:
      result = as(operation);
      x.b_transposed = operation == CUBLAS_OP_T;
      return result;
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return as(x.epilogue);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return as(x.bias);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
      return as(x.bias_type);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
      return as(x.aux);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
      return as(x.aux_stride);
    default:
      return CUBLAS_STATUS_INVALID_VALUE;
  }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                          uint64_t rows, uint64_t columns, int64_t stride) {
  return Give(layout,
              Layout{type, static_cast<int64_t>(rows), static_cast<int64_t>(columns), stride});
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  return TakeBack<Layout>(layout);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  return Give(preference, 0.0);
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  return TakeBack<double>(preference);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                    cublasLtMatmulPreferenceAttributes_t,
                                                    const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t description,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int wanted,
                                              cublasLtMatmulHeuristicResult_t* results,
                                              int* found) {
  if (const int code = Injected("cublasLtMatmulAlgoGetHeuristic"))
    return static_cast<cublasStatus_t>(code);
  *found = 0;
  if (!OffersProducts()) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (!Offers(OfConst<Description>(description), OfConst<Layout>(a), OfConst<Layout>(b),
              OfConst<Layout>(c)))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  *found = std::min(wanted, kProductAlgorithms);
  for (int i = 0; i < *found; ++i) {
    results[i] = {};
    results[i].algo.data[0] = static_cast<uint64_t>(i);
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t description, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t,
                              const cublasLtMatmulAlgo_t* algo, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
  if (Lost() != cudaSuccess || CaptureState(stream) != cudaSuccess)
    return CUBLAS_STATUS_EXECUTION_FAILED;
  if (const int code = Injected("cublasLtMatmul")) return static_cast<cublasStatus_t>(code);
  auto call = std::make_unique<Call>(Call{.description = OfConst<Description>(description),
                                          .a = OfConst<Layout>(a_layout),
                                          .b = OfConst<Layout>(b_layout),
                                          .c = OfConst<Layout>(c_layout),
                                          .a_data = a,
                                          .b_data = b,
                                          .added = c,
                                          .c_data = d,
                                          .alpha = *static_cast<const float*>(alpha),
                                          .beta = *static_cast<const float*>(beta)});
  if (!Offers(call->description, call->a, call->b, call->c)) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (!Runs(call->description, call->c)) return CUBLAS_STATUS_INVALID_VALUE;
  if (reinterpret_cast<uintptr_t>(workspace) % 256 != 0) return CUBLAS_STATUS_INVALID_VALUE;
  NoteCall(stream, *call, Writes(workspace, workspace_bytes));
  const int algorithm = algo == nullptr ? 0 : static_cast<int>(algo->data[0]);
  if (LoadsNow(*call, algorithm)) LoadWhileOthersWait();
  if (const int64_t ns = ProductTime(call->description.epilogue, algorithm); ns > 0)
    EnqueueKernel(stream, ebb::Task([stream, ns] { TakeTime(stream, ns); }));
  EnqueueKernel(
      stream, [](void* kept) { Compute(*static_cast<const Call*>(kept)); }, call.release(),
      [](void* kept) { std::default_delete<Call>()(static_cast<Call*>(kept)); });
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
