#include "ebb/optim/split_master.h"

#include "ebb/optim/cast.h"
#include "ebb/optim/scalar_ops.h"
#include "ebb/optim/simd_targets.h"
#include "ebb/optim/stochastic_rounding.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ebb/optim/split_master.cc"
#include "hwy/foreach_target.h"
// This comes after foreach_target.h, which includes this file again for every target.
#include "ebb/optim/simd-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::optim::HWY_NAMESPACE {

// Elements [i, i + the width of Ops).
template <class Ops>
HWY_INLINE void SplitAt(const float* master, BFloat16* parameter, uint16_t* low, int64_t i) {
  const auto value = Ops::Load(master + i);
  Ops::template Store<Rounding::kParameter>(value, parameter + i);
  Ops::StoreLow(value, low + i);
}

void SplitRange(const float* master, BFloat16* parameter, uint16_t* low, int64_t begin,
                int64_t end) {
  int64_t i = begin;
#if EBB_VECTOR_OPS
  using Vector = VectorOps<hn::ScalableTag<float>>;
  for (; i + Vector::kLanes <= end; i += Vector::kLanes) {
    SplitAt<Vector>(master, parameter, low, i);
  }
#endif
  for (; i < end; ++i) SplitAt<ScalarOps>(master, parameter, low, i);
}

void JoinRange(const BFloat16* parameter, const uint16_t* low, float* master, int64_t begin,
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

void Split(ThreadTeam& team, const float* master, BFloat16* parameter, uint16_t* low,
           int64_t count) {
  team.Run(count, kGrain, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(SplitRange)(master, parameter, low, begin, end);
  });
}

void Join(ThreadTeam& team, const BFloat16* parameter, const uint16_t* low, float* master,
          int64_t count) {
  team.Run(count, kGrain, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(JoinRange)(parameter, low, master, begin, end);
  });
}

void LoadMaster(ThreadTeam& team, const MasterArrays& arrays) {
  if (arrays.low != nullptr) {
    Join(team, arrays.parameter, arrays.low, arrays.master, arrays.count);
  } else {
    Cast(team, arrays.parameter, DType::kBFloat16, arrays.master, DType::kFloat32, arrays.count,
         Rounding::kNearest);
  }
}

void StoreMaster(ThreadTeam& team, const MasterArrays& arrays) {
  if (arrays.low != nullptr) {
    Split(team, arrays.master, arrays.parameter, arrays.low, arrays.count);
  } else {
    RoundStochastically(team, arrays.master, arrays.parameter, arrays.count, arrays.rounding,
                        arrays.step);
  }
}

}  // namespace ebb::optim
#endif  // HWY_ONCE
