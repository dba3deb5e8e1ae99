#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/softmax.cc"
#include "hwy/foreach_target.h"
// These come after foreach_target.h, which includes this file again for every target.
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "ops/cpu/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::gpt::cpu::HWY_NAMESPACE {

// Highway's Exp makes 0 of NaN, but a broken number must reach the loss. For x <= 0, as in
// softmaxes.
template <class D>
HWY_INLINE hn::Vec<D> ExpOrNan(D d, hn::Vec<D> x) {
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x));
}

// The largest number of a row. The search may skip NaNs, because ExpOrNan finds them.
HWY_INLINE float RowMax(const float* row, int64_t n) {
  const Full d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  auto top = hn::Set(d, -std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) top = hn::Max(top, hn::LoadU(d, row + i));
  float result = hn::GetLane(hn::MaxOfLanes(d, top));
  for (; i < n; ++i) result = std::max(result, row[i]);
  return result;
}

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

// The sum of exp(logit - top) over a row.
HWY_INLINE float SumOfExponentials(const float* logits, int64_t n, float top) {
  return Sum(n, [&](auto d, int64_t i) HWY_ATTR {
    return ExpOrNan(d, hn::Sub(hn::LoadU(d, logits + i), hn::Set(d, top)));
  });
}

void LogitTermsRows(const CrossEntropyArrays& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const float* logits = static_cast<const float*>(a.logits) + r * a.vocabulary;
    const float top = RowMax(logits, a.vocabulary);
    const int64_t target = a.targets[r] - a.first_token;
    a.terms.top[r] = a.terms.own_top[r] = top;
    a.terms.sum[r] = SumOfExponentials(logits, a.vocabulary, top);
    a.terms.at_target[r] = 0 <= target && target < a.vocabulary ? logits[target] : 0.0f;
  }
}

template <class T>
void CrossEntropyRowsOf(const CrossEntropyArrays& a, int64_t begin, int64_t end) {
  const float scale = a.gradient_scale * (a.loss_scale == nullptr ? 1.0f : *a.loss_scale);
  for (int64_t r = begin; r < end; ++r) {
    const float* logits = static_cast<const float*>(a.logits) + r * a.vocabulary;
    const bool is_cut = a.terms.top != nullptr;
    const int64_t column = a.targets[r] - a.first_token;
    const float top = is_cut ? a.terms.top[r] : RowMax(logits, a.vocabulary);
    // Read before the gradient may overwrite it.
    const float target = is_cut ? a.terms.at_target[r] : logits[column];
    const float sum = is_cut ? a.terms.sum[r] : SumOfExponentials(logits, a.vocabulary, top);
    const float log_sum_exp = top + std::log(sum);
    a.losses[r] = log_sum_exp - target;
    if (a.gradient == nullptr) continue;
    T* gradient = static_cast<T*>(a.gradient) + r * a.vocabulary;
    ForEach(a.vocabulary, [&](auto d, int64_t i) HWY_ATTR {
      const auto probability =
          ExpOrNan(d, hn::Sub(hn::LoadU(d, logits + i), hn::Set(d, log_sum_exp)));
      StoreAs(d, hn::Mul(probability, hn::Set(d, scale)), gradient + i);
    });
    if (column < 0 || column >= a.vocabulary) continue;  // another rank has it
    const float at_target = (std::exp(target - log_sum_exp) - 1) * scale;
    gradient[column] = static_cast<T>(at_target);
  }
}

void Softmax(DType dtype, const SoftmaxArrays& arrays) {
  WithType(dtype, [&]<class T>(T*) { SoftmaxOf<T>(arrays); });
}
void SoftmaxBackward(DType dtype, const SoftmaxBackwardArrays& arrays) {
  WithType(dtype, [&]<class T>(T*) { SoftmaxBackwardOf<T>(arrays); });
}
void RowDots(DType dtype, Block a, Block b, int64_t rows, int64_t columns, float* dots) {
  WithType(dtype, [&]<class T>(T*) {
    for (int64_t r = 0; r < rows; ++r) {
      const T *x = static_cast<const T*>(a.data) + r * a.stride,
              *y = static_cast<const T*>(b.data) + r * b.stride;
      dots[r] = Sum(columns, [&](auto d, int64_t i)
                                 HWY_ATTR { return hn::Mul(LoadAs(d, x + i), LoadAs(d, y + i)); });
    }
  });
}
void CrossEntropyRows(DType dtype, const CrossEntropyArrays& arrays, int64_t begin, int64_t end) {
  WithType(dtype, [&]<class T>(T*) { CrossEntropyRowsOf<T>(arrays, begin, end); });
}

}  // namespace ebb::gpt::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::gpt::cpu {
GPT_DISPATCH(Softmax, (DType dtype, const SoftmaxArrays& arrays), dtype, arrays)
GPT_DISPATCH(SoftmaxBackward, (DType dtype, const SoftmaxBackwardArrays& arrays), dtype, arrays)
GPT_DISPATCH(RowDots, (DType dtype, Block a, Block b, int64_t rows, int64_t columns, float* dots),
             dtype, a, b, rows, columns, dots)
GPT_DISPATCH(LogitTermsRows, (const CrossEntropyArrays& arrays, int64_t begin, int64_t end), arrays,
             begin, end)
GPT_DISPATCH(CrossEntropyRows,
             (DType dtype, const CrossEntropyArrays& arrays, int64_t begin, int64_t end), dtype,
             arrays, begin, end)
}  // namespace ebb::gpt::cpu
#endif
