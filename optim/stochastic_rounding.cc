#include "ebb/optim/stochastic_rounding.h"

#include <algorithm>

#include "ebb/optim/scalar_ops.h"
#include "ebb/optim/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ebb/optim/stochastic_rounding.cc"
#include "hwy/foreach_target.h"
// This comes after foreach_target.h, which includes this file again for every target.
#include "ebb/optim/simd-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::optim::HWY_NAMESPACE {

// Elements [i, i + the width of Ops). `first`: the index of the array's first element.
template <class Ops>
HWY_INLINE void RoundAt(const float* values, BFloat16* parameter, const RoundingKey& key,
                        int64_t first, int64_t i) {
  const auto rounded =
      Ops::RoundAtRandom(Ops::Load(values + i), key, static_cast<uint32_t>(first + i));
  Ops::template Store<Rounding::kParameter>(rounded, parameter + i);
}

void RoundRange(const float* values, BFloat16* parameter, const RoundingKey& shared_key,
                int64_t first, int64_t begin, int64_t end) {
  const RoundingKey key = shared_key;  // no store below can alias the copy
  int64_t i = begin;
#if EBB_VECTOR_OPS
  using Vector = VectorOps<hn::ScalableTag<float>>;
  for (; i + Vector::kLanes <= end; i += Vector::kLanes)
    RoundAt<Vector>(values, parameter, key, first, i);
#endif
  for (; i < end; ++i) RoundAt<ScalarOps>(values, parameter, key, first, i);
}

}  // namespace ebb::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::optim {
namespace {

HWY_EXPORT(RoundRange);

constexpr int64_t kGrain = 64 * 1024;  // elements: a third of a megabyte

}  // namespace

void RoundStochastically(ThreadTeam& team, const float* values, BFloat16* parameter, int64_t count,
                         const RoundingPlace& place, int64_t step) {
  for (int64_t done = 0; done < count;) {
    const int64_t first = place.index + done;
    const int64_t part =
        std::min(count - done, kRoundingKeyElements - first % kRoundingKeyElements);
    const RoundingKey key = RoundingKeyOf({.unit = place.unit, .index = first}, step);
    team.Run(part, kGrain, [&](int64_t begin, int64_t end) {
      HWY_DYNAMIC_DISPATCH(RoundRange)(values + done, parameter + done, key, first, begin, end);
    });
    done += part;
  }
}

}  // namespace ebb::optim
#endif  // HWY_ONCE
