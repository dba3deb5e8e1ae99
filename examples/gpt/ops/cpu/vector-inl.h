// Loads and stores of fp32, bf16 and fp16 as vectors of fp32, and loops over them; included once
// for every SIMD target.
#if defined(EBB_GPT_VECTOR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EBB_GPT_VECTOR_INL_H_
#undef EBB_GPT_VECTOR_INL_H_
#else
#define EBB_GPT_VECTOR_INL_H_
#endif

#include <cstdint>

#include "ebb/runtime/base/dtype.h"
#include "hwy/highway.h"

// Defines the function `name`, which calls the one of the best target.
#undef GPT_DISPATCH
#define GPT_DISPATCH(name, parameters, ...)  \
  HWY_EXPORT(name);                          \
  void name parameters {                     \
    HWY_DYNAMIC_DISPATCH(name)(__VA_ARGS__); \
  }

HWY_BEFORE_NAMESPACE();
namespace ebb::gpt::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Full = hn::ScalableTag<float>;
using One = hn::CappedTag<float, 1>;

template <class D>
HWY_INLINE hn::Vec<D> LoadAs(D d, const float* p) {
  return hn::LoadU(d, p);
}
template <class D>
HWY_INLINE hn::Vec<D> LoadAs(D d, const BFloat16* p) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<uint32_t, D> d32;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
}
template <class D>
HWY_INLINE hn::Vec<D> LoadAs([[maybe_unused]] D d, const Float16* p) {
  const hn::Rebind<hwy::float16_t, D> d16;
  return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
}

template <class D>
HWY_INLINE void StoreAs(D d, hn::Vec<D> v, float* p) {
  hn::StoreU(v, d, p);
}
// Nearest, ties to even; a NaN stays a NaN.
template <class D>
HWY_INLINE void StoreAs([[maybe_unused]] D d, hn::Vec<D> v, BFloat16* p) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<uint32_t, D> d32;
  const auto u = hn::BitCast(d32, v);
  const auto high = hn::ShiftRight<16>(u);
  const auto even = hn::And(high, hn::Set(d32, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(u, hn::Set(d32, 0x7fff)), even));
  const auto quiet = hn::Or(high, hn::Set(d32, 0x40));
  const auto bits = hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(v)), quiet, rounded);
  hn::StoreU(hn::TruncateTo(d16, bits), d16, reinterpret_cast<uint16_t*>(p));
}
template <class D>
HWY_INLINE void StoreAs([[maybe_unused]] D d, hn::Vec<D> v, Float16* p) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128  // Highway's own conversion truncates
  float values[hn::MaxLanes(D())];
  hn::StoreU(v, d, values);
  for (size_t i = 0; i < hn::Lanes(d); ++i) p[i] = Float16(values[i]);
#else
  const hn::Rebind<hwy::float16_t, D> d16;
  hn::StoreU(hn::DemoteTo(d16, v), d16, reinterpret_cast<hwy::float16_t*>(p));
#endif
}

// body(tag, i) for whole vectors from 0, then for single elements up to n.
template <class Body>
HWY_INLINE void ForEach(int64_t n, const Body& body) {
  const Full full;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(full));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) body(full, i);
  for (; i < n; ++i) body(One(), i);
}

// The sum over i of value(tag, i), in an order that depends only on n and the vector length.
template <class Value>
HWY_INLINE float Sum(int64_t n, const Value& value) {
  const Full full;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(full));
  auto even = hn::Zero(full), odd = hn::Zero(full);
  int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    even = hn::Add(even, value(full, i));
    odd = hn::Add(odd, value(full, i + lanes));
  }
  if (i + lanes <= n) even = hn::Add(even, value(full, i)), i += lanes;
  float sum = hn::GetLane(hn::SumOfLanes(full, hn::Add(even, odd)));
  for (; i < n; ++i) sum += hn::GetLane(value(One(), i));
  return sum;
}

// Calls body with a null pointer of the type that `dtype` names: one switch for each call instead
// of one for each element.
template <class Body>
HWY_INLINE void WithType(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(static_cast<float*>(nullptr));
    case DType::kBFloat16:
      return body(static_cast<BFloat16*>(nullptr));
    case DType::kFloat16:
      return body(static_cast<Float16*>(nullptr));
    case DType::kInt8:
      return;
  }
}

// data = beta * data + value. With beta 0 the old contents are not read, because they may be NaN.
template <class D, class T>
HWY_INLINE void StoreTo(D d, hn::Vec<D> value, T* data, float beta) {
  StoreAs(d, beta == 0 ? value : hn::MulAdd(hn::Set(d, beta), LoadAs(d, data), value), data);
}

}  // namespace ebb::gpt::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
