#include "ebb/optim/update_loops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ebb/optim/update_rmsprop.cc"
#include "ebb/optim/simd_targets.h"
#include "hwy/foreach_target.h"
// This comes after foreach_target.h, which includes this file again for every target.
#include "ebb/optim/update_loops-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::optim::HWY_NAMESPACE {

void Rmsprop(UpdateRule rule, const UpdateConstants& constants, const LoopArrays& arrays,
             const BlockSums* sums, int64_t begin, int64_t end) {
  switch (rule) {
    case UpdateRule::kRmsprop:
      return UpdateRange<UpdateRule::kRmsprop>(constants.rmsprop, arrays, sums, begin, end);
    case UpdateRule::kRmspropWithMomentum:
      return UpdateRange<UpdateRule::kRmspropWithMomentum>(constants.rmsprop, arrays, sums, begin,
                                                           end);
    case UpdateRule::kCenteredRmsprop:
      return UpdateRange<UpdateRule::kCenteredRmsprop>(constants.rmsprop, arrays, sums, begin, end);
    case UpdateRule::kCenteredRmspropWithMomentum:
      return UpdateRange<UpdateRule::kCenteredRmspropWithMomentum>(constants.rmsprop, arrays, sums,
                                                                   begin, end);
    default:
      assert(!"a rule of another family");
  }
}

}  // namespace ebb::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::optim {

HWY_EXPORT(Rmsprop);

void UpdateRangeByRmsprop(UpdateRule rule, const UpdateConstants& constants,
                          const LoopArrays& arrays, const BlockSums* sums, int64_t begin,
                          int64_t end) {
  HWY_DYNAMIC_DISPATCH(Rmsprop)(rule, constants, arrays, sums, begin, end);
}

}  // namespace ebb::optim
#endif  // HWY_ONCE
