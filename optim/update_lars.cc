#include "ebb/optim/update_loops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ebb/optim/update_lars.cc"
#include "ebb/optim/simd_targets.h"
#include "hwy/foreach_target.h"
// This comes after foreach_target.h, which includes this file again for every target.
#include "ebb/optim/update_loops-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::optim::HWY_NAMESPACE {

void Lars(UpdateRule rule, const UpdateConstants& constants, const LoopArrays& arrays,
          const BlockSums* sums, int64_t begin, int64_t end) {
  switch (rule) {
    case UpdateRule::kLars:
      return UpdateRange<UpdateRule::kLars>(constants.lars, arrays, sums, begin, end);
    case UpdateRule::kLarsWithMomentum:
      return UpdateRange<UpdateRule::kLarsWithMomentum>(constants.lars, arrays, sums, begin, end);
    default:
      assert(!"a rule of another family");
  }
}

}  // namespace ebb::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::optim {

HWY_EXPORT(Lars);

void UpdateRangeByLars(UpdateRule rule, const UpdateConstants& constants, const LoopArrays& arrays,
                       const BlockSums* sums, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(Lars)(rule, constants, arrays, sums, begin, end);
}

}  // namespace ebb::optim
#endif  // HWY_ONCE
