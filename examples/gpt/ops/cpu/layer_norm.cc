#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/layer_norm.cc"
#include <algorithm>
#include <cmath>

#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::gpt::cpu::HWY_NAMESPACE {

constexpr float kEpsilon = 1e-5f;

template <class T>
void NormRowsOf(const NormArrays& a, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(a.weight);
  const T* bias = static_cast<const T*>(a.bias);
  for (int64_t r = begin; r < end; ++r) {
    const T* x = static_cast<const T*>(a.input) + r * a.width;
    if (a.residual != nullptr) {
      const T* residual = static_cast<const T*>(a.residual) + r * a.width;
      T* sum = static_cast<T*>(a.sum) + r * a.width;
      ForEach(a.width, [&](auto d, int64_t i) HWY_ATTR {
        StoreAs(d, hn::Add(LoadAs(d, x + i), LoadAs(d, residual + i)), sum + i);
      });
      x = sum;  // statistics of the stored sum, which backward reads
    }
    const float mean =
        Sum(a.width, [&](auto d, int64_t i) HWY_ATTR { return LoadAs(d, x + i); }) / a.width;
    const float variance = Sum(a.width,
                               [&](auto d, int64_t i) HWY_ATTR {
                                 const auto centred = hn::Sub(LoadAs(d, x + i), hn::Set(d, mean));
                                 return hn::Mul(centred, centred);
                               }) /
                           a.width;
    const float scale = 1.0f / std::sqrt(variance + kEpsilon);
    a.mean[r] = mean;
    a.reciprocal_deviation[r] = scale;
    T* y = static_cast<T*>(a.output) + r * a.width;
    ForEach(a.width, [&](auto d, int64_t i) HWY_ATTR {
      const auto normal = hn::Mul(hn::Sub(LoadAs(d, x + i), hn::Set(d, mean)), hn::Set(d, scale));
      StoreAs(d, hn::MulAdd(normal, LoadAs(d, weight + i), LoadAs(d, bias + i)), y + i);
    });
  }
}

// With n the normalised input and g = weight * output gradient: input gradient = scale * (g -
// mean(g) - n * mean(g n)).
template <class T>
void NormBackwardRowsOf(const NormBackwardArrays& a, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(a.weight);
  for (int64_t r = begin; r < end; ++r) {
    const T* x = static_cast<const T*>(a.input) + r * a.width;
    const T* dy = static_cast<const T*>(a.output_gradient) + r * a.width;
    const float mean = a.mean[r], scale = a.reciprocal_deviation[r];
    const auto normal = [&](auto d, int64_t i) HWY_ATTR {
      return hn::Mul(hn::Sub(LoadAs(d, x + i), hn::Set(d, mean)), hn::Set(d, scale));
    };
    const auto weighted = [&](auto d, int64_t i) HWY_ATTR {
      return hn::Mul(LoadAs(d, weight + i), LoadAs(d, dy + i));
    };
    const float mean_g = Sum(a.width, weighted) / a.width;
    const float mean_gn =
        Sum(a.width,
            [&](auto d, int64_t i) HWY_ATTR { return hn::Mul(weighted(d, i), normal(d, i)); }) /
        a.width;
    T* dx = static_cast<T*>(a.input_gradient) + r * a.width;
    const T* residual = a.residual_gradient == nullptr
                            ? nullptr
                            : static_cast<const T*>(a.residual_gradient) + r * a.width;
    ForEach(a.width, [&](auto d, int64_t i) HWY_ATTR {
      const auto centred = hn::Sub(weighted(d, i), hn::Set(d, mean_g));
      auto gradient =
          hn::Mul(hn::NegMulAdd(normal(d, i), hn::Set(d, mean_gn), centred), hn::Set(d, scale));
      if (residual != nullptr) gradient = hn::Add(gradient, LoadAs(d, residual + i));
      StoreAs(d, gradient, dx + i);
    });
  }
}

template <class T>
void NormBackwardColumnsOf(const NormBackwardArrays& a, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(a.input) + begin;
  const T* dy = static_cast<const T*>(a.output_gradient) + begin;
  ForEach(end - begin, [&](auto d, int64_t i) HWY_ATTR {
    auto weight = hn::Zero(d), bias = hn::Zero(d);
    for (int64_t r = 0; r < a.rows; ++r) {
      const auto g = LoadAs(d, dy + r * a.width + i);
      const auto centred = hn::Sub(LoadAs(d, x + r * a.width + i), hn::Set(d, a.mean[r]));
      weight = hn::MulAdd(g, hn::Mul(centred, hn::Set(d, a.reciprocal_deviation[r])), weight);
      bias = hn::Add(bias, g);
    }
    WithType(a.weight_gradient.dtype, [&]<class G>(G*) HWY_ATTR {
      StoreTo(d, weight, static_cast<G*>(a.weight_gradient.data) + begin + i,
              a.weight_gradient.beta);
    });
    WithType(a.bias_gradient.dtype, [&]<class G>(G*) HWY_ATTR {
      StoreTo(d, bias, static_cast<G*>(a.bias_gradient.data) + begin + i, a.bias_gradient.beta);
    });
  });
}

void NormRows(DType dtype, const NormArrays& arrays, int64_t begin, int64_t end) {
  WithType(dtype, [&]<class T>(T*) { NormRowsOf<T>(arrays, begin, end); });
}
void NormBackwardRows(DType dtype, const NormBackwardArrays& arrays, int64_t begin, int64_t end) {
  WithType(dtype, [&]<class T>(T*) { NormBackwardRowsOf<T>(arrays, begin, end); });
}
void NormBackwardColumns(DType dtype, const NormBackwardArrays& arrays, int64_t begin,
                         int64_t end) {
  WithType(dtype, [&]<class T>(T*) { NormBackwardColumnsOf<T>(arrays, begin, end); });
}

}  // namespace ebb::gpt::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::gpt::cpu {
GPT_DISPATCH(NormRows, (DType dtype, const NormArrays& arrays, int64_t begin, int64_t end), dtype,
             arrays, begin, end)
GPT_DISPATCH(NormBackwardRows,
             (DType dtype, const NormBackwardArrays& arrays, int64_t begin, int64_t end), dtype,
             arrays, begin, end)
GPT_DISPATCH(NormBackwardColumns,
             (DType dtype, const NormBackwardArrays& arrays, int64_t begin, int64_t end), dtype,
             arrays, begin, end)
}  // namespace ebb::gpt::cpu
#endif
