// Functions for softmaxes; included once for every SIMD target.
#if defined(EBB_GPT_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EBB_GPT_SOFTMAX_INL_H_
#undef EBB_GPT_SOFTMAX_INL_H_
#else
#define EBB_GPT_SOFTMAX_INL_H_
#endif

#include <algorithm>
#include <limits>

#include "hwy/contrib/math/math-inl.h"
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

}  // namespace ebb::gpt::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
