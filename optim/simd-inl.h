// ScalarOps for vectors, once for every SIMD target: the same operations and conversions, bit for
// bit. Included after hwy/foreach_target.h. EBB_VECTOR_OPS is set if this target has vectors.

// clang-format off
#if defined(EBB_OPTIM_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EBB_OPTIM_SIMD_INL_H_
#undef EBB_OPTIM_SIMD_INL_H_
#else
#define EBB_OPTIM_SIMD_INL_H_
#endif
// clang-format on

#include <cstdint>

#include "ebb/optim/cast.h"
#include "ebb/optim/scalar_ops.h"
#include "ebb/runtime/base/dtype.h"
#include "hwy/highway.h"

#undef EBB_VECTOR_OPS
#if HWY_NATIVE_FMA && !HWY_HAVE_SCALABLE
#define EBB_VECTOR_OPS 1
#else
#define EBB_VECTOR_OPS 0
#endif

#if EBB_VECTOR_OPS

HWY_BEFORE_NAMESPACE();
namespace ebb::optim::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// D: the tag of an fp32 vector.
template <class D>
struct VectorOps {
  using Number = hn::Vec<D>;
  using Bits = hn::Rebind<uint32_t, D>;
  using Halves = hn::Rebind<uint16_t, D>;
  static constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(D()));

  static HWY_INLINE Number Set(float value) { return hn::Set(D(), value); }
  static HWY_INLINE Number Add(Number a, Number b) { return hn::Add(a, b); }
  static HWY_INLINE Number Sub(Number a, Number b) { return hn::Sub(a, b); }
  static HWY_INLINE Number Mul(Number a, Number b) { return hn::Mul(a, b); }
  static HWY_INLINE Number Fma(Number a, Number b, Number c) { return hn::MulAdd(a, b, c); }
  static HWY_INLINE Number Div(Number a, Number b) { return hn::Div(a, b); }
  static HWY_INLINE Number Sqrt(Number a) { return hn::Sqrt(a); }
  static HWY_INLINE Number Sign(Number a) {
    const auto unless_positive = hn::IfThenElse(hn::Lt(a, hn::Zero(D())), Set(-1), a);
    return hn::IfThenElse(hn::Gt(a, hn::Zero(D())), Set(1), unless_positive);
  }
  static HWY_INLINE Number ZeroIfNegative(Number a) {
    return hn::IfThenElse(hn::Lt(a, hn::Zero(D())), hn::Zero(D()), a);
  }

  static HWY_INLINE Number Load(const float* from) { return hn::LoadU(D(), from); }
  static HWY_INLINE Number Load(const BFloat16* from) {
    const auto half = hn::PromoteTo(Bits(), hn::LoadU(Halves(), &from->bits));
    return hn::BitCast(D(), hn::ShiftLeft<16>(half));
  }
  static HWY_INLINE Number Load(const Float16* from) {
    const auto half = hn::LoadU(Halves(), &from->bits);
    const hn::Rebind<hwy::float16_t, D> float16;
    const auto wide = hn::BitCast(Bits(), hn::PromoteTo(D(), hn::BitCast(float16, half)));
    // The instruction makes a signaling NaN quiet, but Float16's conversion keeps it signaling. So
    // the bit is removed again.
    const auto kind = hn::And(hn::PromoteTo(Bits(), half), hn::Set(Bits(), 0x7e00u));
    const auto unquiet = hn::VecFromMask(Bits(), hn::Eq(kind, hn::Set(Bits(), 0x7c00u)));
    const auto quiet_bit = hn::And(unquiet, hn::Set(Bits(), 0x400000u));
    return hn::BitCast(D(), hn::AndNot(quiet_bit, wide));
  }

  template <Rounding kRounding>
  static HWY_INLINE void Store(Number value, float* to) {
    hn::StoreU(value, D(), to);
  }
  template <Rounding kRounding>
  static HWY_INLINE void Store(Number value, BFloat16* to) {
    hn::StoreU(ToHalves<kRounding>(value, to), Halves(), &to->bits);
  }
  template <Rounding kRounding>
  static HWY_INLINE void Store(Number value, Float16* to) {
    hn::StoreU(ToHalves<kRounding>(value, to), Halves(), &to->bits);
  }
  // Stores two vectors past the caches, to 16-bit numbers that are aligned to the two vectors
  // together. hwy::FlushStream() ends a run of these stores.
  template <Rounding kRounding, class T>
  static HWY_INLINE void StreamPair(Number first, Number second, T* to) {
    const hn::Twice<Halves> pair;
    const auto upper = ToHalves<kRounding>(second, to);
    hn::Stream(hn::Combine(pair, upper, ToHalves<kRounding>(first, to)), pair, &to->bits);
  }

  // A split master (split_master.h).
  static HWY_INLINE Number LoadSplit(const BFloat16* parameter, const uint16_t* low) {
    const hn::Rebind<int32_t, D> integers;
    const hn::Rebind<int16_t, D> signed_halves;
    const auto upper =
        hn::ShiftLeft<16>(hn::PromoteTo(Bits(), hn::LoadU(Halves(), &parameter->bits)));
    const auto carry =
        hn::PromoteTo(integers, hn::BitCast(signed_halves, hn::LoadU(Halves(), low)));
    return hn::BitCast(D(), hn::Add(upper, hn::BitCast(Bits(), carry)));
  }
  static HWY_INLINE hn::Vec<Halves> LowHalves(Number value) {
    const auto cut = hn::And(hn::BitCast(Bits(), value), hn::Set(Bits(), 0xffffu));
    return UpperHalves(cut);
  }
  static HWY_INLINE void StoreLow(Number value, uint16_t* low) {
    hn::StoreU(LowHalves(value), Halves(), low);
  }

  // For the elements from this index on (stochastic_rounding.h).
  static HWY_INLINE Number RoundAtRandom(Number value, const RoundingKey& key, uint32_t index) {
    const Bits bits;
    // The Iota has a constant start, because one with a variable start is stored lane by lane.
    auto x = hn::Xor(hn::Add(hn::Iota(bits, 0), hn::Set(bits, index)), hn::Set(bits, key.before));
    x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), hn::Set(bits, 0x7feb352du));
    x = hn::Xor(x, hn::Set(bits, key.between));
    x = hn::Mul(hn::Xor(x, hn::ShiftRight<15>(x)), hn::Set(bits, 0x846ca68bu));
    x = hn::ShiftRight<16>(hn::Xor(x, hn::ShiftRight<16>(x)));
    const auto sum = hn::Add(hn::BitCast(bits, value), x);
    const auto cut = hn::BitCast(D(), hn::AndNot(hn::Set(bits, 0xffffu), sum));
    return hn::IfThenElse(hn::IsNaN(value), value, cut);
  }

 private:
  // The pointer's type chooses the rounding's type.
  template <Rounding kRounding>
  static HWY_INLINE hn::Vec<Halves> ToHalves(Number value, const Float16*) {
    const hn::Rebind<hwy::float16_t, D> float16;
    return hn::BitCast(Halves(), hn::DemoteTo(float16, value));
  }
  template <Rounding kRounding>
  static HWY_INLINE hn::Vec<Halves> ToHalves(Number value, const BFloat16*) {
    const Bits bits;
    const auto u = hn::BitCast(bits, value);
    auto bias = hn::Set(bits, 0x8000u);
    if constexpr (kRounding == Rounding::kNearest) {
      bias = hn::Add(hn::And(hn::ShiftRight<16>(u), hn::Set(bits, 1u)), hn::Set(bits, 0x7fffu));
    }
    const auto rounded = hn::ShiftRight<16>(hn::Add(u, bias));
    const auto quiet = hn::Or(hn::ShiftRight<16>(u), hn::Set(bits, 0x40u));
    const auto is_nan = hn::RebindMask(bits, hn::IsNaN(value));
    return UpperHalves(hn::IfThenElse(is_nan, quiet, rounded));
  }
  // Values are below 2^16, so this narrowing never saturates.
  static HWY_INLINE hn::Vec<Halves> UpperHalves(hn::Vec<Bits> value) {
    const hn::Rebind<int32_t, D> integers;
    return hn::DemoteTo(Halves(), hn::BitCast(integers, value));
  }
};

}  // namespace ebb::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // EBB_VECTOR_OPS
#endif  // EBB_OPTIM_SIMD_INL_H_
