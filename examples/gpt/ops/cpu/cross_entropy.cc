#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/cross_entropy.cc"
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
void CrossEntropyRowsOf(const CrossEntropyArrays& a, int64_t begin, int64_t end) {
  const float scale = a.gradient_scale * (a.loss_scale == nullptr ? 1.0f : *a.loss_scale);
  for (int64_t r = begin; r < end; ++r) {
    const float* logits = static_cast<const float*>(a.logits) + r * a.vocabulary;
    const float top = RowMax(logits, a.vocabulary);
    const float target = logits[a.targets[r]];  // read before the gradient may overwrite it
    const float sum = Sum(a.vocabulary, [&](auto d, int64_t i) HWY_ATTR {
      return ExpOrNan(d, hn::Sub(hn::LoadU(d, logits + i), hn::Set(d, top)));
    });
    const float log_sum_exp = top + std::log(sum);
    a.losses[r] = log_sum_exp - target;
    if (a.gradient == nullptr) continue;
    T* gradient = static_cast<T*>(a.gradient) + r * a.vocabulary;
    ForEach(a.vocabulary, [&](auto d, int64_t i) HWY_ATTR {
      const auto probability =
          ExpOrNan(d, hn::Sub(hn::LoadU(d, logits + i), hn::Set(d, log_sum_exp)));
      StoreAs(d, hn::Mul(probability, hn::Set(d, scale)), gradient + i);
    });
    const float at_target = (std::exp(target - log_sum_exp) - 1) * scale;
    gradient[a.targets[r]] = static_cast<T>(at_target);
  }
}

void CrossEntropyRows(DType dtype, const CrossEntropyArrays& arrays, int64_t begin, int64_t end) {
  WithType(dtype, [&](auto* type) {
    CrossEntropyRowsOf<std::remove_pointer_t<decltype(type)>>(arrays, begin, end);
  });
}

}  // namespace ebb::gpt::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::gpt::cpu {
HWY_EXPORT(CrossEntropyRows);
void CrossEntropyRows(DType dtype, const CrossEntropyArrays& arrays, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(CrossEntropyRows)(dtype, arrays, begin, end);
}
}  // namespace ebb::gpt::cpu
#endif
