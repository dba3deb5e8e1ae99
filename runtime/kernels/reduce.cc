#include "ebb/runtime/kernels/reduce.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>

#include "ebb/runtime/device/cpu/copy.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ebb/runtime/kernels/reduce.cc"
#include "hwy/foreach_target.h"
// These come after foreach_target.h, which includes this file again for every target.
#include "hwy/cache_control.h"
#include "hwy/highway.h"

// A kernel's arguments; one definition for all targets.
#ifndef EBB_RUNTIME_KERNELS_REDUCE_CC_
#define EBB_RUNTIME_KERNELS_REDUCE_CC_
namespace ebb {
namespace {

struct ReduceArguments {
  const void* const* inputs = nullptr;
  int inputs_count = 0;
  int group = 0;
  float scale = 1;
  void* destination = nullptr;
  bool past_caches = false;
};

inline constexpr uint32_t kQuietNan = 0x7fc00000;

// One element at a time, for the ends that fill no vector: the same operations in the same order as
// in the vectors.
template <ReduceOp kOp>
float Combine(float so_far, float next) {
  if constexpr (kOp == ReduceOp::kSum) return so_far + next;
  const bool better = kOp == ReduceOp::kMax ? next > so_far : next < so_far;
  return better || next != next ? next : so_far;
}

template <class T>
T Rounded(float value) {
  if constexpr (std::is_same_v<T, int8_t>) {
    return static_cast<int8_t>(std::nearbyint(std::clamp(value, -128.0f, 127.0f)));
  } else {
    return T(value != value ? std::bit_cast<float>(kQuietNan) : value);
  }
}

template <class T, ReduceOp kOp>
void ReduceElement(const ReduceArguments& a, int64_t i) {
  const auto input = [&](int r) {
    return static_cast<float>(static_cast<const T*>(a.inputs[r])[i]);
  };
  float total = 0;
  for (int first = 0; first < a.inputs_count; first += a.group) {
    float partial = input(first);
    for (int r = first + 1; r < first + a.group; ++r) partial = Combine<kOp>(partial, input(r));
    total = first == 0 ? partial : Combine<kOp>(total, partial);
  }
  static_cast<T*>(a.destination)[i] = Rounded<T>(total * a.scale);
}

}  // namespace
}  // namespace ebb
#endif  // EBB_RUNTIME_KERNELS_REDUCE_CC_

HWY_BEFORE_NAMESPACE();
namespace ebb::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;
using Vector = hn::Vec<Floats>;
using Words = hn::RebindToUnsigned<Floats>;
using Integers = hn::RebindToSigned<Floats>;

HWY_INLINE Vector WithoutPayload(Vector v) {
  return hn::IfThenElse(hn::IsNaN(v), hn::BitCast(Floats(), hn::Set(Words(), kQuietNan)), v);
}

template <class Tag, class V, class Lane>
HWY_INLINE void StoreLanes(Tag tag, V v, Lane* to, bool past_caches) {
  // On x86 hn::Stream rounds shorter vectors up to 16 bytes.
  if (hn::MaxLanes(tag) * sizeof(Lane) >= 16 && past_caches) {
    hn::Stream(v, tag, to);
  } else {
    hn::StoreU(v, tag, to);
  }
}

HWY_INLINE Vector Load(const float* from) {
  return hn::LoadU(Floats(), from);
}
HWY_INLINE void Store(Vector v, float* to, bool past_caches) {
  StoreLanes(Floats(), WithoutPayload(v), to, past_caches);
}

HWY_INLINE Vector Load(const BFloat16* from) {
  const hn::Rebind<uint16_t, Floats> half;
  const auto bits = hn::LoadU(half, reinterpret_cast<const uint16_t*>(from));
  return hn::BitCast(Floats(), hn::ShiftLeft<16>(hn::PromoteTo(Words(), bits)));
}
HWY_INLINE void Store(Vector v, BFloat16* to, bool past_caches) {
  const hn::Rebind<uint16_t, Floats> half;
  const auto bits = hn::BitCast(Words(), WithoutPayload(v));
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(Words(), 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(Words(), 0x7fff))));
  StoreLanes(half, hn::DemoteTo(half, hn::BitCast(Integers(), rounded)),
             reinterpret_cast<uint16_t*>(to), past_caches);
}

HWY_INLINE Vector Load(const Float16* from) {
#if HWY_TARGET <= HWY_AVX2 && HWY_ARCH_X86
  const hn::Rebind<hwy::float16_t, Floats> half;
  return hn::PromoteTo(Floats(), hn::LoadU(half, reinterpret_cast<const hwy::float16_t*>(from)));
#else
  HWY_ALIGN float lanes[hn::MaxLanes(Floats())];
  for (size_t k = 0; k < hn::Lanes(Floats()); ++k) lanes[k] = static_cast<float>(from[k]);
  return hn::Load(Floats(), lanes);
#endif
}
HWY_INLINE void Store(Vector v, Float16* to, bool past_caches) {
#if HWY_TARGET <= HWY_AVX2 && HWY_ARCH_X86
  const hn::Rebind<hwy::float16_t, Floats> half;
  const hn::Rebind<uint16_t, Floats> bits;
  StoreLanes(bits, hn::BitCast(bits, hn::DemoteTo(half, WithoutPayload(v))),
             reinterpret_cast<uint16_t*>(to), past_caches);
#else
  // Only conversion instructions are known to round as in dtype.h; Highway's substitutes for them
  // are not.
  HWY_ALIGN float lanes[hn::MaxLanes(Floats())];
  hn::Store(WithoutPayload(v), Floats(), lanes);
  for (size_t k = 0; k < hn::Lanes(Floats()); ++k) to[k] = Float16(lanes[k]);
  (void)past_caches;
#endif
}

HWY_INLINE Vector Load(const int8_t* from) {
  const hn::Rebind<int8_t, Floats> quarter;
  return hn::ConvertTo(Floats(), hn::PromoteTo(Integers(), hn::LoadU(quarter, from)));
}
HWY_INLINE void Store(Vector v, int8_t* to, bool) {
  const hn::Rebind<int8_t, Floats> quarter;
  const Vector clamped = hn::Min(hn::Max(v, hn::Set(Floats(), -128.0f)), hn::Set(Floats(), 127.0f));
  hn::StoreU(hn::DemoteTo(quarter, hn::NearestInt(clamped)), quarter, to);
}

template <ReduceOp kOp>
HWY_INLINE Vector CombineLanes(Vector so_far, Vector next) {
  if constexpr (kOp == ReduceOp::kSum) return hn::Add(so_far, next);
  const auto better = kOp == ReduceOp::kMax ? hn::Gt(next, so_far) : hn::Lt(next, so_far);
  return hn::IfThenElse(hn::Or(better, hn::IsNaN(next)), next, so_far);
}

template <class T, ReduceOp kOp>
void ReduceLoop(const ReduceArguments& a, int64_t begin, int64_t end) {
  T* const destination = static_cast<T*>(a.destination);
  const auto lanes = static_cast<int64_t>(hn::Lanes(Floats()));
  const Vector scale = hn::Set(Floats(), a.scale);
  int64_t i = begin;
  if (a.past_caches) {  // such stores must be aligned
    for (; i < end && reinterpret_cast<uintptr_t>(destination + i) % 64 != 0; ++i)
      ReduceElement<T, kOp>(a, i);
  }
  for (; i + 2 * lanes <= end; i += 2 * lanes) {
    Vector total0 = scale, total1 = scale;
    for (int first = 0; first < a.inputs_count; first += a.group) {
      const T* input = static_cast<const T*>(a.inputs[first]) + i;
      Vector partial0 = Load(input), partial1 = Load(input + lanes);
      for (int r = first + 1; r < first + a.group; ++r) {
        input = static_cast<const T*>(a.inputs[r]) + i;
        partial0 = CombineLanes<kOp>(partial0, Load(input));
        partial1 = CombineLanes<kOp>(partial1, Load(input + lanes));
      }
      total0 = first == 0 ? partial0 : CombineLanes<kOp>(total0, partial0);
      total1 = first == 0 ? partial1 : CombineLanes<kOp>(total1, partial1);
    }
    Store(hn::Mul(total0, scale), destination + i, a.past_caches);
    Store(hn::Mul(total1, scale), destination + i + lanes, a.past_caches);
  }
  for (; i < end; ++i) ReduceElement<T, kOp>(a, i);
  // Streaming stores are not ordered by the release stores that later publish the data.
  if (a.past_caches) hwy::FlushStream();
}

template <class T>
void ReduceAs(ReduceOp op, const ReduceArguments& a, int64_t begin, int64_t end) {
  switch (op) {
    case ReduceOp::kSum:
      return ReduceLoop<T, ReduceOp::kSum>(a, begin, end);
    case ReduceOp::kMax:
      return ReduceLoop<T, ReduceOp::kMax>(a, begin, end);
    case ReduceOp::kMin:
      return ReduceLoop<T, ReduceOp::kMin>(a, begin, end);
  }
}

void ReduceRange(const Reduction& reduction, const ReduceArguments& a, int64_t begin, int64_t end) {
  switch (reduction.dtype) {
    case DType::kFloat32:
      return ReduceAs<float>(reduction.op, a, begin, end);
    case DType::kBFloat16:
      return ReduceAs<BFloat16>(reduction.op, a, begin, end);
    case DType::kFloat16:
      return ReduceAs<Float16>(reduction.op, a, begin, end);
    case DType::kInt8:
      return ReduceAs<int8_t>(reduction.op, a, begin, end);
  }
}

}  // namespace ebb::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb {
namespace {

HWY_EXPORT(ReduceRange);

constexpr int64_t kGrain = 32 * 1024;  // elements; a multiple of every vector and cache line

}  // namespace

void Reduce(ThreadTeam& team, const Reduction& reduction, std::span<const void* const> inputs,
            void* destination, int64_t count, int64_t together_bytes) {
  const auto inputs_count = static_cast<int>(inputs.size());
  assert(inputs_count > 0 && (reduction.group == 0 || inputs_count % reduction.group == 0));
  const bool in_place = std::find(inputs.begin(), inputs.end(), destination) != inputs.end();
  const int64_t bytes = std::max(together_bytes, count * SizeOf(reduction.dtype));
  const ReduceArguments arguments = {.inputs = inputs.data(),
                                     .inputs_count = inputs_count,
                                     .group = reduction.group == 0 ? inputs_count : reduction.group,
                                     .scale = reduction.scale,
                                     .destination = destination,
                                     // In place the lines are in the caches already.
                                     .past_caches = !in_place && bytes >= kStreamingCopyBytes};
  team.Run(count, kGrain, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(ReduceRange)(reduction, arguments, begin, end);
  });
}

}  // namespace ebb
#endif  // HWY_ONCE
