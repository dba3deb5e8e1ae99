// The SIMD targets that the kernels of ops/cpu are compiled for; included before any Highway
// header.
//
// A target without a fused multiply-add instruction runs the scalar loop with std::fma, so one such
// target is enough. Vectors of a length that the compiler does not know gain nothing here.
#pragma once

#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
