// Runs a test body once for every SIMD target that this machine runs and the kernels are compiled
// for, including the one without vectors.
#pragma once

#include <cstdint>

#include "ebb/optim/simd_targets.h"
#include "gtest/gtest.h"
#include "hwy/highway.h"
#include "hwy/targets.h"
#include "numbers.h"

namespace ebb::optim {

template <class Body>
void ForEveryTarget(Body body) {
  const int64_t supported = (hwy::SupportedTargets() | HWY_STATIC_TARGET) & HWY_TARGETS;
  for (int64_t rest = supported; rest != 0; rest &= rest - 1) {
    const int64_t target = rest & -rest;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SCOPED_TRACE(hwy::TargetName(target));
    body();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace ebb::optim
