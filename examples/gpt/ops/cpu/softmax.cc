#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/softmax.cc"
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "cpu_targets.h"
#include "hwy/foreach_target.h"  // after cpu_targets.h, before highway.h
#include "hwy/highway.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/softmax-inl.h"
#include "ops/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::gpt::cpu::HWY_NAMESPACE {

template <class T>
void SoftmaxOf(const SoftmaxArrays& a) {
  T* probabilities = static_cast<T*>(a.probabilities);
  for (int64_t r = 0; r < a.rows; ++r) {
    float* scores = a.scores + r * a.columns;
    T* row = probabilities + r * a.columns;
    const int64_t seen = std::min(a.columns, a.visible + r);
    const float top = RowMax(scores, seen) * a.scale;
    const float sum = Sum(seen, [&](auto d, int64_t i) HWY_ATTR {
      const auto e =
          ExpOrNan(d, hn::MulSub(hn::LoadU(d, scores + i), hn::Set(d, a.scale), hn::Set(d, top)));
      hn::StoreU(e, d, scores + i);
      return e;
    });
    a.log_sum_exp[r] = top + std::log(sum);
    const float share = 1 / sum;
    ForEach(seen, [&](auto d, int64_t i) HWY_ATTR {
      StoreAs(d, hn::Mul(hn::LoadU(d, scores + i), hn::Set(d, share)), row + i);
    });
    ForEach(a.columns - seen,
            [&](auto d, int64_t i) HWY_ATTR { StoreAs(d, hn::Zero(d), row + seen + i); });
  }
}

template <class T>
void SoftmaxBackwardOf(const SoftmaxBackwardArrays& b) {
  const SoftmaxArrays& a = b.forward;
  T* probabilities = static_cast<T*>(a.probabilities);
  T* gradients = static_cast<T*>(b.score_gradients);
  for (int64_t r = 0; r < a.rows; ++r) {
    const int64_t first = r * a.columns, seen = std::min(a.columns, a.visible + r);
    ForEach(seen, [&](auto d, int64_t c) HWY_ATTR {
      const int64_t i = first + c;
      const auto score = hn::LoadU(d, a.scores + i);
      const auto p =
          ExpOrNan(d, hn::MulSub(score, hn::Set(d, a.scale), hn::Set(d, a.log_sum_exp[r])));
      const auto centred =
          hn::Sub(hn::LoadU(d, b.probability_gradients + i), hn::Set(d, b.row_dots[r]));
      StoreAs(d, p, probabilities + i);
      StoreAs(d, hn::Mul(hn::Mul(p, hn::Set(d, a.scale)), centred), gradients + i);
    });
    ForEach(a.columns - seen, [&](auto d, int64_t c) HWY_ATTR {
      StoreAs(d, hn::Zero(d), probabilities + first + seen + c);
      StoreAs(d, hn::Zero(d), gradients + first + seen + c);
    });
  }
}

void Softmax(DType dtype, const SoftmaxArrays& arrays) {
  WithType(dtype, [&](auto* type) { SoftmaxOf<std::remove_pointer_t<decltype(type)>>(arrays); });
}
void SoftmaxBackward(DType dtype, const SoftmaxBackwardArrays& arrays) {
  WithType(dtype,
           [&](auto* type) { SoftmaxBackwardOf<std::remove_pointer_t<decltype(type)>>(arrays); });
}
void RowDots(DType dtype, Block a, Block b, int64_t rows, int64_t columns, float* dots) {
  WithType(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int64_t r = 0; r < rows; ++r) {
      const T *x = static_cast<const T*>(a.data) + r * a.stride,
              *y = static_cast<const T*>(b.data) + r * b.stride;
      dots[r] = Sum(columns, [&](auto d, int64_t i)
                                 HWY_ATTR { return hn::Mul(LoadAs(d, x + i), LoadAs(d, y + i)); });
    }
  });
}

}  // namespace ebb::gpt::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::gpt::cpu {
HWY_EXPORT(Softmax);
HWY_EXPORT(SoftmaxBackward);
HWY_EXPORT(RowDots);
void Softmax(DType dtype, const SoftmaxArrays& arrays) {
  HWY_DYNAMIC_DISPATCH(Softmax)(dtype, arrays);
}
void SoftmaxBackward(DType dtype, const SoftmaxBackwardArrays& arrays) {
  HWY_DYNAMIC_DISPATCH(SoftmaxBackward)(dtype, arrays);
}
void RowDots(DType dtype, Block a, Block b, int64_t rows, int64_t columns, float* dots) {
  HWY_DYNAMIC_DISPATCH(RowDots)(dtype, a, b, rows, columns, dots);
}
}  // namespace ebb::gpt::cpu
#endif
