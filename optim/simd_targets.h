// The SIMD targets that the kernels of this folder are compiled for; included before any Highway
// header.
//
// A target without a fused multiply-add instruction runs the scalar loop with std::fma, so one such
// target is enough. Vectors of a length that is unknown to the compiler have no advantage here.
#pragma once

// With a sanitizer each target takes the compiler minutes. All targets have the same loops, so
// those of AVX2 represent those of AVX-512.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define EBB_TARGETS_LEFT_OUT (HWY_AVX3 | HWY_AVX3_DL)
#else
#define EBB_TARGETS_LEFT_OUT 0
#endif

#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | EBB_TARGETS_LEFT_OUT)
