#include "ebb/optim/split_master.h"

#include "ebb/optim/scalar_ops.h"
#include "ebb/optim/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ebb/optim/split_master.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file again for every target.
#include "ebb/optim/simd-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::optim::HWY_NAMESPACE {

void SplitRange(const float* master, uint16_t* parameter, uint16_t* low, int64_t begin,
                int64_t end) {
  int64_t i = begin;
#if EBB_VECTOR_OPS
  using Vector = VectorOps<hn::ScalableTag<float>>;
  for (; i + Vector::kLanes <= end; i += Vector::kLanes) {
    Vector::StoreSplit(Vector::Load(master + i), parameter + i, low + i);
  }
#endif
  for (; i < end; ++i) ScalarOps::StoreSplit(master[i], parameter + i, low + i);
}

void JoinRange(const uint16_t* parameter, const uint16_t* low, float* master, int64_t begin,
               int64_t end) {
  int64_t i = begin;
#if EBB_VECTOR_OPS
  using Vector = VectorOps<hn::ScalableTag<float>>;
  for (; i + Vector::kLanes <= end; i += Vector::kLanes) {
    Vector::Store<Rounding::kNearest>(Vector::LoadSplit(parameter + i, low + i), master + i);
  }
#endif
  for (; i < end; ++i) master[i] = ScalarOps::LoadSplit(parameter + i, low + i);
}

}  // namespace ebb::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::optim {
namespace {

HWY_EXPORT(SplitRange);
HWY_EXPORT(JoinRange);

constexpr int64_t kGrain = 64 * 1024;  // elements: half a megabyte

}  // namespace

void Split(ThreadTeam& team, const float* master, uint16_t* parameter_bf16, uint16_t* low,
           int64_t count) {
  team.Run(count, kGrain, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(SplitRange)(master, parameter_bf16, low, begin, end);
  });
}

void Join(ThreadTeam& team, const uint16_t* parameter_bf16, const uint16_t* low, float* master,
          int64_t count) {
  team.Run(count, kGrain, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(JoinRange)(parameter_bf16, low, master, begin, end);
  });
}

}  // namespace ebb::optim
#endif  // HWY_ONCE
