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
#include "ebb/optim/block_codes-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::optim::HWY_NAMESPACE {

// Elements of one block.
void DecodeBlock(const DynamicMap& map, const uint8_t* codes, float scale, float* values,
                 int64_t count) {
  int64_t i = 0;
#if EBB_VECTOR_OPS
  constexpr auto kLanes = static_cast<int64_t>(hn::MaxLanes(FloatTag()));
  for (; i + kLanes <= count; i += kLanes)
    hn::StoreU(DecodeVector(map.numbers.data(), codes + i, scale), FloatTag(), values + i);
#endif
  for (; i < count; ++i) values[i] = map.numbers[codes[i]] * scale;
}

Extremes ExtremesOf(const float* values, int64_t count) {
  Extremes extremes;
  int64_t i = 0;
#if EBB_VECTOR_OPS
  constexpr auto kLanes = static_cast<int64_t>(hn::MaxLanes(FloatTag()));
  ExtremesOfLanes lanes;
  for (; i + kLanes <= count; i += kLanes) lanes.Add(hn::LoadU(FloatTag(), values + i));
  extremes = lanes.Reduced();
#endif
  for (; i < count; ++i) extremes.Add(std::bit_cast<uint32_t>(values[i]));
  return extremes;
}

void EncodeBlock(const DynamicMap& map, const float* values, float inverse, uint8_t* codes,
                 int64_t count) {
  int64_t i = 0;
#if EBB_VECTOR_OPS
  constexpr auto kLanes = static_cast<int64_t>(hn::MaxLanes(FloatTag()));
  const Encoder encoder(map);
  for (; i + kLanes <= count; i += kLanes)
    EncodeVector(encoder, hn::LoadU(FloatTag(), values + i), inverse, codes + i);
#endif
  for (; i < count; ++i) codes[i] = CodeOf(map.steps.data(), map.negative, values[i] * inverse);
}

void DecodeBlocks(const StateArray& array, float* values, int64_t count) {
  const DynamicMap& map = DynamicMapFor(array.encoding);
  const auto* const codes = static_cast<const uint8_t*>(array.codes);
  for (int64_t i = 0; i < count; i += kScaleBlock) {
    DecodeBlock(map, codes + i, array.scales[i / kScaleBlock], values + i,
                std::min<int64_t>(kScaleBlock, count - i));
  }
}

void EncodeBlocks(const float* values, const StateArray& array, int64_t count) {
  const DynamicMap& map = DynamicMapFor(array.encoding);
  auto* const codes = static_cast<uint8_t*>(array.codes);
  for (int64_t i = 0; i < count; i += kScaleBlock) {
    const int64_t of_block = std::min<int64_t>(kScaleBlock, count - i);
    const float scale = ScaleOf(ExtremesOf(values + i, of_block), map.negative != 0);
    array.scales[i / kScaleBlock] = scale;
    if (HasCodes(scale)) {
      EncodeBlock(map, values + i, InverseOf(scale), codes + i, of_block);
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

void DecodeHalves(const BFloat16* numbers, float* values, int64_t count) {
  int64_t i = 0;
#if EBB_VECTOR_OPS
  using Vector = VectorOps<hn::ScalableTag<float>>;
  for (; i + Vector::kLanes <= count; i += Vector::kLanes) {
    Vector::Store<Rounding::kNearest>(Vector::Load(numbers + i), values + i);
  }
#endif
  for (; i < count; ++i) values[i] = ScalarOps::Load(numbers + i);
}

void EncodeHalves(const float* values, BFloat16* numbers, const RoundingKey* rounding,
                  int64_t index, int64_t count) {
  int64_t i = 0;
#if EBB_VECTOR_OPS
  using Vector = VectorOps<hn::ScalableTag<float>>;
  for (; i + Vector::kLanes <= count; i += Vector::kLanes) {
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

void DecodeAlone(const StateArray& array, float* values, int64_t count) {
  if (IsDynamic(array.encoding)) return HWY_DYNAMIC_DISPATCH(DecodeBlocks)(array, values, count);
  assert(array.encoding == Encoding(DType::kBFloat16));
  HWY_DYNAMIC_DISPATCH(DecodeHalves)
  (static_cast<const BFloat16*>(array.codes), values, count);
}

void EncodeAlone(const float* values, const StateArray& array, int64_t count,
                 const RoundingKey* rounding, int64_t index) {
  if (IsDynamic(array.encoding)) return HWY_DYNAMIC_DISPATCH(EncodeBlocks)(values, array, count);
  assert(array.encoding == Encoding(DType::kBFloat16));
  HWY_DYNAMIC_DISPATCH(EncodeHalves)
  (values, static_cast<BFloat16*>(array.codes), rounding, index, count);
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
