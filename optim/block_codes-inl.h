// Vectors of numbers in codes of 8 bits (block_codes.h), once for every SIMD target.
// Included after hwy/foreach_target.h.

// clang-format off
#if defined(EBB_OPTIM_BLOCK_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EBB_OPTIM_BLOCK_CODES_INL_H_
#undef EBB_OPTIM_BLOCK_CODES_INL_H_
#else
#define EBB_OPTIM_BLOCK_CODES_INL_H_
#endif
// clang-format on

#include <cstdint>

#include "ebb/optim/block_codes.h"
#include "ebb/optim/simd-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::optim::HWY_NAMESPACE {

#if EBB_VECTOR_OPS

// The words of a table at these indices.
template <class D, class Index>
HWY_INLINE hn::Vec<D> Lookup(D d, const hn::TFromD<D>* table, Index index) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
  // A gather merges into what its register has. With an explicit zero there it does not wait for
  // the register's last use. A compiler that knows that all lanes are gathered leaves the zero out.
  __mmask16 all = 0xffff;
  asm("" : "+Yk"(all));
  const hn::RebindToSigned<D> integers;
  return hn::BitCast(d, hn::Vec<decltype(integers)>{_mm512_mask_i32gather_epi32(
                            _mm512_setzero_si512(), all, index.raw, table, 4)});
#else
  return hn::GatherIndex(d, table, index);
#endif
}

// The lowest bytes of integers.
template <class Integers>
HWY_INLINE void StoreLowBytes(Integers integers, uint8_t* to) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(integers.raw));
#else
  const hn::RebindToUnsigned<hn::DFromV<Integers>> words;
  const hn::Rebind<uint8_t, decltype(words)> bytes;
  hn::StoreU(hn::TruncateTo(bytes, hn::BitCast(words, integers)), bytes, to);
#endif
}

using FloatTag = hn::ScalableTag<float>;
using FloatVector = hn::Vec<FloatTag>;

// The numbers of one vector of codes.
HWY_INLINE FloatVector DecodeVector(const float* numbers, const uint8_t* codes, float scale) {
  const FloatTag floats;
  const hn::Rebind<int32_t, FloatTag> integers;
  const hn::Rebind<uint8_t, FloatTag> bytes;
  const auto index = hn::PromoteTo(integers, hn::LoadU(bytes, codes));
  return hn::Mul(Lookup(floats, numbers, index), hn::Set(floats, scale));
}

// CodeOf for vectors, without a branch between the two maps.
struct Encoder {
  explicit Encoder(const DynamicMap& map)
      : steps(reinterpret_cast<const int32_t*>(map.steps.data())),
        magnitude(map.negative == 0 ? -1 : 0x7fffffff),
        lowest(-map.negative) {}
  const int32_t* steps;
  int32_t magnitude;  // its bits
  int32_t lowest;     // code
};

HWY_INLINE void EncodeVector(const Encoder& map, FloatVector values, float inverse,
                             uint8_t* codes) {
  const FloatTag floats;
  const hn::Rebind<int32_t, FloatTag> integers;
  const auto quotient = hn::BitCast(integers, hn::Mul(values, hn::Set(floats, inverse)));
  const auto magnitude = hn::Max(hn::And(quotient, hn::Set(integers, map.magnitude)),
                                 hn::Set(integers, DynamicMap::kFirstHalf << 16));
  const auto step =
      hn::Sub(hn::ShiftRight<16>(magnitude), hn::Set(integers, DynamicMap::kFirstHalf));
  const auto word = Lookup(integers, map.steps, step);
  const auto code = hn::ShiftRight<16>(hn::Add(word, magnitude)),
             sign = hn::BroadcastSignBit(quotient);
  // A negative number of the unsigned map has the code 0 here.
  const auto with_sign = hn::Max(hn::Sub(hn::Xor(code, sign), sign), hn::Set(integers, map.lowest));
  StoreLowBytes(with_sign, codes);
}

// Extremes by lane. A positive number is above all negative ones as a signed integer, and below them
// as one without sign.
struct ExtremesOfLanes {
  using Integers = hn::Rebind<int32_t, FloatTag>;
  using Words = hn::Rebind<uint32_t, FloatTag>;
  hn::Vec<Integers> positive = hn::Zero(Integers());
  hn::Vec<Words> negative = hn::Zero(Words());

  HWY_INLINE ExtremesOfLanes() {}  // an implicit one would not be of this target
  HWY_INLINE void Add(FloatVector value) {
    positive = hn::Max(positive, hn::BitCast(Integers(), value));
    negative = hn::Max(negative, hn::BitCast(Words(), value));
  }
  HWY_INLINE Extremes Reduced() const {
    Extremes extremes{.positive =
                          static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(Integers(), positive)))};
    extremes.Add(hn::GetLane(hn::MaxOfLanes(Words(), negative)));
    return extremes;
  }
};

#endif

}  // namespace ebb::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // EBB_OPTIM_BLOCK_CODES_INL_H_
