// Views of what the engine holds. They own nothing and are valid until their scope closes; `shape`
// until the engine dies. Contiguous, row-major. A wrong request (a frozen gradient, a foreign
// parameter) gives an empty view: data null, size() 0.
#pragma once

#include <cstdint>
#include <span>

#include "ebb/runtime/config/dtype.h"

namespace ebb {

struct TensorView {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::span<const int64_t> shape = {};

  // Elements; a shape of {} with data is a scalar, 1.
  int64_t size() const {
    if (data == nullptr) return 0;
    int64_t elements = 1;
    for (int64_t dimension : shape) elements *= dimension;
    return elements;
  }
  // The elements as T; empty if T is not the dtype.
  template <class T>
  std::span<const T> as() const {
    static_assert(kIsNumber<T>, "float, BFloat16, Float16 or int8_t");
    if (data == nullptr || kDTypeOf<T> != dtype) return {};
    return {static_cast<const T*>(data), static_cast<size_t>(size())};
  }
};

struct MutableTensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::span<const int64_t> shape = {};

  int64_t size() const { return TensorView(*this).size(); }
  template <class T>
  std::span<T> as() const {
    static_assert(kIsNumber<T>, "float, BFloat16, Float16 or int8_t");
    if (data == nullptr || kDTypeOf<T> != dtype) return {};
    return {static_cast<T*>(data), static_cast<size_t>(size())};
  }
  operator TensorView() const { return {data, dtype, shape}; }
};

}  // namespace ebb
