#include "ebb/optim/block_codes.h"

#include <algorithm>
#include <cassert>

#include "ebb/optim/cast.h"
#include "ebb/optim/scalar_ops.h"
#include "ebb/optim/simd_targets.h"
#include "ebb/optim/update_runs.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ebb/optim/block_codes.cc"
#include "hwy/foreach_target.h"
// This comes after foreach_target.h, which includes this file again for every target.
#include "ebb/optim/simd-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::optim::HWY_NAMESPACE {

// Asks for one line after the other.
class Fetcher {
 public:
  explicit Fetcher(Ahead ahead) : at_(ahead.data()), end_(ahead.data() + ahead.size()) {}
  HWY_INLINE void Next() {
    if (at_ >= end_) return;
    hwy::Prefetch(at_);
    at_ += 64;
  }

 private:
  const std::byte *at_, *end_;
};

#if EBB_VECTOR_OPS

// The words of a table at these indices.
template <class D, class Index>
HWY_INLINE hn::Vec<D> Lookup(D d, const hn::TFromD<D>* table, Index index) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
  // A gather writes over what its register has. With an explicit zero there it does not wait for the
  // gather before it.
  const hn::RebindToSigned<D> integers;
  return hn::BitCast(d, hn::Vec<decltype(integers)>{_mm512_mask_i32gather_epi32(
                            _mm512_setzero_si512(), 0xffff, index.raw, table, 4)});
#else
  return hn::GatherIndex(d, table, index);
#endif
}

#endif

// Elements of one block.
void DecodeBlock(const DynamicMap& map, const uint8_t* codes, float scale, float* values,
                 int64_t count, [[maybe_unused]] Fetcher& fetcher) {
  const float* const numbers = map.numbers.data();
  int64_t i = 0;
#if EBB_VECTOR_OPS
  const hn::ScalableTag<float> floats;
  const hn::Rebind<int32_t, decltype(floats)> integers;
  const hn::Rebind<uint8_t, decltype(floats)> bytes;
  const auto lanes = static_cast<int64_t>(hn::Lanes(floats));
  const auto scales = hn::Set(floats, scale);
  for (; i + lanes <= count; i += lanes) {
    fetcher.Next();
    const auto index = hn::PromoteTo(integers, hn::LoadU(bytes, codes + i));
    hn::StoreU(hn::Mul(Lookup(floats, numbers, index), scales), floats, values + i);
  }
#endif
  for (; i < count; ++i) values[i] = numbers[codes[i]] * scale;
}

Extremes ExtremesOf(const float* values, int64_t count) {
  Extremes extremes;
  int64_t i = 0;
#if EBB_VECTOR_OPS
  const hn::ScalableTag<float> floats;
  const hn::Rebind<int32_t, decltype(floats)> integers;
  const hn::Rebind<uint32_t, decltype(floats)> bits;
  const auto lanes = static_cast<int64_t>(hn::Lanes(floats));
  // A positive number is above all negative ones as a signed integer, and below them as one without
  // sign.
  auto positive = hn::Zero(integers);
  auto negative = hn::Zero(bits);
  for (; i + lanes <= count; i += lanes) {
    const auto value = hn::LoadU(floats, values + i);
    positive = hn::Max(positive, hn::BitCast(integers, value));
    negative = hn::Max(negative, hn::BitCast(bits, value));
  }
  extremes.positive = static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(integers, positive)));
  extremes.Add(hn::GetLane(hn::MaxOfLanes(bits, negative)));
#endif
  for (; i < count; ++i) extremes.Add(std::bit_cast<uint32_t>(values[i]));
  return extremes;
}

template <bool kHasSigns>
void EncodeBlock(const DynamicMap& map, const float* values, float inverse, uint8_t* codes,
                 int64_t count, [[maybe_unused]] Fetcher& fetcher) {
  const uint32_t* const steps = map.steps.data();
  int64_t i = 0;
#if EBB_VECTOR_OPS
  const hn::ScalableTag<float> floats;
  const hn::Rebind<int32_t, decltype(floats)> integers;
  const hn::Rebind<uint8_t, decltype(floats)> bytes;
  const auto lanes = static_cast<int64_t>(hn::Lanes(floats));
  const auto inverses = hn::Set(floats, inverse);
  [[maybe_unused]] const auto lowest = hn::Set(integers, -map.negative);
  for (; i + lanes <= count; i += lanes) {
    fetcher.Next();
    const auto quotient = hn::BitCast(integers, hn::Mul(hn::LoadU(floats, values + i), inverses));
    auto magnitude = quotient;
    if constexpr (kHasSigns) magnitude = hn::And(quotient, hn::Set(integers, 0x7fffffff));
    magnitude = hn::Max(magnitude, hn::Set(integers, DynamicMap::kFirstHalf << 16));
    const auto step =
        hn::Sub(hn::ShiftRight<16>(magnitude), hn::Set(integers, DynamicMap::kFirstHalf));
    const auto word = Lookup(integers, reinterpret_cast<const int32_t*>(steps), step);
    auto code = hn::ShiftRight<16>(hn::Add(word, magnitude));
    if constexpr (kHasSigns) {
      const auto sign = hn::BroadcastSignBit(quotient);
      code = hn::Max(hn::Sub(hn::Xor(code, sign), sign), lowest);
      code = hn::And(code, hn::Set(integers, 0xff));
    }
    hn::StoreU(hn::DemoteTo(bytes, code), bytes, codes + i);
  }
#endif
  for (; i < count; ++i) codes[i] = CodeOf(steps, map.negative, values[i] * inverse);
}

void DecodeBlocks(const StateArray& array, float* values, int64_t count, Ahead ahead) {
  Fetcher fetcher(ahead);
  const DynamicMap& map = DynamicMapFor(array.encoding);
  const auto* const codes = static_cast<const uint8_t*>(array.codes);
  for (int64_t i = 0; i < count; i += kScaleBlock) {
    DecodeBlock(map, codes + i, array.scales[i / kScaleBlock], values + i,
                std::min<int64_t>(kScaleBlock, count - i), fetcher);
  }
}

void EncodeBlocks(const float* values, const StateArray& array, int64_t count, Ahead ahead) {
  Fetcher fetcher(ahead);
  const DynamicMap& map = DynamicMapFor(array.encoding);
  auto* const codes = static_cast<uint8_t*>(array.codes);
  for (int64_t i = 0; i < count; i += kScaleBlock) {
    const int64_t of_block = std::min<int64_t>(kScaleBlock, count - i);
    const float scale = ScaleOf(ExtremesOf(values + i, of_block), map.negative != 0);
    array.scales[i / kScaleBlock] = scale;
    if (HasCodes(scale)) {
      const auto encode = map.negative != 0 ? &EncodeBlock<true> : &EncodeBlock<false>;
      encode(map, values + i, InverseOf(scale), codes + i, of_block, fetcher);
    } else {
      std::fill_n(codes + i, of_block, uint8_t{0});
    }
  }
}

// Numbers [i, i + the width of Ops) of an array of bf16.
template <class Ops>
HWY_INLINE void RoundStateAt(const float* values, BFloat16* numbers, const RoundingKey* rounding,
                             int64_t index, int64_t i) {
  auto value = Ops::Load(values + i);
  if (rounding != nullptr)
    value = Ops::RoundAtRandom(value, *rounding, static_cast<uint32_t>(index + i));
  Ops::template Store<Rounding::kNearest>(value, numbers + i);
}

void DecodeHalves(const BFloat16* numbers, float* values, int64_t count, Ahead ahead) {
  Fetcher fetcher(ahead);
  int64_t i = 0;
#if EBB_VECTOR_OPS
  using Vector = VectorOps<hn::ScalableTag<float>>;
  for (; i + Vector::kLanes <= count; i += Vector::kLanes) {
    fetcher.Next();
    Vector::Store<Rounding::kNearest>(Vector::Load(numbers + i), values + i);
  }
#endif
  for (; i < count; ++i) values[i] = ScalarOps::Load(numbers + i);
}

void EncodeHalves(const float* values, BFloat16* numbers, const RoundingKey* rounding,
                  int64_t index, int64_t count, Ahead ahead) {
  Fetcher fetcher(ahead);
  int64_t i = 0;
#if EBB_VECTOR_OPS
  using Vector = VectorOps<hn::ScalableTag<float>>;
  for (; i + Vector::kLanes <= count; i += Vector::kLanes) {
    fetcher.Next();
    RoundStateAt<Vector>(values, numbers, rounding, index, i);
  }
#endif
  for (; i < count; ++i) RoundStateAt<ScalarOps>(values, numbers, rounding, index, i);
}

}  // namespace ebb::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::optim {
namespace {

HWY_EXPORT(DecodeBlocks);
HWY_EXPORT(EncodeBlocks);
HWY_EXPORT(DecodeHalves);
HWY_EXPORT(EncodeHalves);

constexpr int64_t kGrain = 64 * 1024;  // elements: a third of a megabyte

}  // namespace

void DecodeAlone(const StateArray& array, float* values, int64_t count, Ahead ahead) {
  if (IsDynamic(array.encoding))
    return HWY_DYNAMIC_DISPATCH(DecodeBlocks)(array, values, count, ahead);
  assert(array.encoding == Encoding(DType::kBFloat16));
  HWY_DYNAMIC_DISPATCH(DecodeHalves)
  (static_cast<const BFloat16*>(array.codes), values, count, ahead);
}

void EncodeAlone(const float* values, const StateArray& array, int64_t count,
                 const RoundingKey* rounding, int64_t index, Ahead ahead) {
  if (IsDynamic(array.encoding))
    return HWY_DYNAMIC_DISPATCH(EncodeBlocks)(values, array, count, ahead);
  assert(array.encoding == Encoding(DType::kBFloat16));
  HWY_DYNAMIC_DISPATCH(EncodeHalves)
  (values, static_cast<BFloat16*>(array.codes), rounding, index, count, ahead);
}

void Decode(ThreadTeam& team, const StateArray& array, float* values, int64_t count) {
  assert(IsDynamic(array.encoding) || array.encoding.is_number());
  if (!IsDynamic(array.encoding)) {
    return Cast(team, array.codes, array.encoding.dtype, values, DType::kFloat32, count,
                Rounding::kNearest);
  }
  team.Run(count, kGrain, [&](int64_t begin, int64_t end) {
    DecodeAlone(PartOf(array, begin), values + begin, end - begin);
  });
}

void Encode(ThreadTeam& team, const float* values, const StateArray& array, int64_t count) {
  assert(IsDynamic(array.encoding) || array.encoding.is_number());
  if (!IsDynamic(array.encoding)) {
    return Cast(team, values, DType::kFloat32, array.codes, array.encoding.dtype, count,
                Rounding::kNearest);
  }
  team.Run(count, kGrain, [&](int64_t begin, int64_t end) {
    EncodeAlone(values + begin, PartOf(array, begin), end - begin);
  });
}

}  // namespace ebb::optim
#endif  // HWY_ONCE
