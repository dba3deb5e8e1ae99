// Views of an engine's memory. They own nothing and are valid until their scope closes; `shape` is
// valid until the engine dies. Contiguous, row-major. A wrong request (a frozen gradient, a foreign
// parameter) gives an empty view: data null, size() 0.
#pragma once

#include <cstdint>
#include <span>
#include <utility>

#include "ebb/runtime/base/dtype.h"

namespace ebb {

// The engine and the name of a view, so that an error can name a wrong as<T>(). The engine sets it;
// views that a trainer makes have none.
struct ViewOrigin {
  uint32_t engine = 0;  // 0: none
  uint32_t shows = 0;
};

// as<T>() calls this if T is not the view's dtype, and returns an empty span. It logs a line with
// the view's name, `wanted` and `there`, and gives the engine's open step or evaluation (or the
// next one) an error. Any thread, also for a view that has outlived its scope or its engine.
void ReportWrongType(const ViewOrigin& origin, DType wanted, DType there);

struct TensorView {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::span<const int64_t> shape = {};
  ViewOrigin origin = {};

  // Elements; a shape of {} with data is a scalar, 1.
  int64_t size() const {
    if (data == nullptr) return 0;
    int64_t elements = 1;
    for (int64_t dimension : shape) elements *= dimension;
    return elements;
  }
  // The elements as T, which must be the dtype: another T is an error that is reported. To ask, use
  // `dtype`; WithNumbers serves code for several dtypes. An empty view gives no elements.
  template <class T>
  std::span<const T> as() const {
    static_assert(kIsNumber<T>, "float, BFloat16, Float16 or int8_t");
    if (data == nullptr) return {};
    if (kDTypeOf<T> != dtype) {
      ReportWrongType(origin, kDTypeOf<T>, dtype);
      return {};
    }
    return {static_cast<const T*>(data), static_cast<size_t>(size())};
  }
};

struct MutableTensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::span<const int64_t> shape = {};
  ViewOrigin origin = {};

  int64_t size() const { return TensorView(*this).size(); }
  template <class T>
  std::span<T> as() const {
    const std::span<const T> elements = TensorView(*this).as<T>();
    return {const_cast<T*>(elements.data()), elements.size()};
  }
  operator TensorView() const { return {data, dtype, shape, origin}; }
};

// Calls `use` with the view's elements as a span of float, BFloat16 or Float16, by dtype, and
// returns its result. For trainers with parameters or gradients of any dtype.
template <class View, class Use>
decltype(auto) WithNumbers(const View& view, Use&& use) {
  switch (view.dtype) {
    case DType::kBFloat16:
      return std::forward<Use>(use)(view.template as<BFloat16>());
    case DType::kFloat16:
      return std::forward<Use>(use)(view.template as<Float16>());
    case DType::kInt8:  // bytes are no numbers
    case DType::kFloat32:
      break;
  }
  return std::forward<Use>(use)(view.template as<float>());
}

}  // namespace ebb
