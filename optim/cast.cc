#include "ebb/optim/cast.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "ebb/optim/scalar_ops.h"
#include "ebb/optim/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ebb/optim/cast.cc"
#include "hwy/foreach_target.h"
// This comes after foreach_target.h, which includes this file again for every target.
#include "ebb/optim/simd-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::optim::HWY_NAMESPACE {

template <Rounding kRounding, class Source, class Destination>
void CastLoop(const void* untyped_source, void* untyped_destination, int64_t begin, int64_t end) {
  const Source* source = static_cast<const Source*>(untyped_source);
  Destination* destination = static_cast<Destination*>(untyped_destination);
  int64_t i = begin;
#if EBB_VECTOR_OPS
  using Vector = VectorOps<hn::ScalableTag<float>>;
  for (; i + Vector::kLanes <= end; i += Vector::kLanes) {
    Vector::template Store<kRounding>(Vector::Load(source + i), destination + i);
  }
#endif
  for (; i < end; ++i) ScalarOps::Store<kRounding>(ScalarOps::Load(source + i), destination + i);
}

template <Rounding kRounding, class Source>
void CastFrom(const void* source, void* destination, DType destination_dtype, int64_t begin,
              int64_t end) {
  switch (destination_dtype) {
    case DType::kFloat32:
      return CastLoop<kRounding, Source, float>(source, destination, begin, end);
    case DType::kBFloat16:
      return CastLoop<kRounding, Source, BFloat16>(source, destination, begin, end);
    case DType::kFloat16:
      return CastLoop<kRounding, Source, Float16>(source, destination, begin, end);
    case DType::kInt8:
      assert(!"casts are between fp32, bf16 and fp16");
  }
}

template <Rounding kRounding>
void CastRange(const void* source, DType source_dtype, void* destination, DType destination_dtype,
               int64_t begin, int64_t end) {
  switch (source_dtype) {
    case DType::kFloat32:
      return CastFrom<kRounding, float>(source, destination, destination_dtype, begin, end);
    case DType::kBFloat16:
      return CastFrom<kRounding, BFloat16>(source, destination, destination_dtype, begin, end);
    case DType::kFloat16:
      return CastFrom<kRounding, Float16>(source, destination, destination_dtype, begin, end);
    case DType::kInt8:
      assert(!"casts are between fp32, bf16 and fp16");
  }
}

void CastNearest(const void* source, DType source_dtype, void* destination, DType destination_dtype,
                 int64_t begin, int64_t end) {
  CastRange<Rounding::kNearest>(source, source_dtype, destination, destination_dtype, begin, end);
}
void CastParameter(const void* source, DType source_dtype, void* destination,
                   DType destination_dtype, int64_t begin, int64_t end) {
  CastRange<Rounding::kParameter>(source, source_dtype, destination, destination_dtype, begin, end);
}

}  // namespace ebb::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::optim {
namespace {

HWY_EXPORT(CastNearest);
HWY_EXPORT(CastParameter);

constexpr int64_t kGrain = 64 * 1024;  // elements: a quarter to half a megabyte

// Bytes are the numbers 0 to 255.
template <class Source, class Destination>
void CastBytes(const void* source, void* destination, int64_t begin, int64_t end) {
  std::transform(static_cast<const Source*>(source) + begin,
                 static_cast<const Source*>(source) + end,
                 static_cast<Destination*>(destination) + begin,
                 [](Source value) { return static_cast<Destination>(value); });
}

}  // namespace

void Cast(ThreadTeam& team, const void* source, DType source_dtype, void* destination,
          DType destination_dtype, int64_t count, Rounding rounding) {
  if (source_dtype == destination_dtype) {
    if (source == destination) return;
    const int64_t size = SizeOf(source_dtype);
    team.Run(count, kGrain, [&](int64_t begin, int64_t end) {
      std::memcpy(static_cast<char*>(destination) + begin * size,
                  static_cast<const char*>(source) + begin * size,
                  static_cast<size_t>((end - begin) * size));
    });
    return;
  }
  team.Run(count, kGrain, [&](int64_t begin, int64_t end) {
    if (source_dtype == DType::kInt8) {
      CastBytes<uint8_t, float>(source, destination, begin, end);
    } else if (destination_dtype == DType::kInt8) {
      CastBytes<float, uint8_t>(source, destination, begin, end);
    } else if (rounding == Rounding::kNearest) {
      HWY_DYNAMIC_DISPATCH(CastNearest)
      (source, source_dtype, destination, destination_dtype, begin, end);
    } else {
      HWY_DYNAMIC_DISPATCH(CastParameter)
      (source, source_dtype, destination, destination_dtype, begin, end);
    }
  });
}

}  // namespace ebb::optim
#endif  // HWY_ONCE
