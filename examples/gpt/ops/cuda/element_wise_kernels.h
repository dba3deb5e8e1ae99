// Passes over the elements of activations: kernels.h.
#pragma once

#include <cmath>
#include <cstdint>

#include "ebb/runtime/device/cuda/kernel_thread.h"
#include "ops/cuda/numbers.h"

namespace ebb::gpt::cuda {

// gelu(x) = x / 2 * (1 + tanh(z)) = x * sigmoid(2 z), z = sqrt(2 / pi) * (x + 0.044715 x^3): one
// exponential, one division. Where the exponential is infinite, the sigmoid is 0.
inline constexpr float kRootTwoOverPi = 0.7978845608028654f;
inline constexpr float kCubic = 0.044715f;

EBB_HOST_DEVICE float SigmoidOfTwoZ(float x) {
  const float inner = x * std::fma(x * x, kCubic, 1.0f);
  const float one_more = 1.0f + std::exp(inner * (-2 * kRootTwoOverPi));
#if defined(__CUDA_ARCH__)
  float sigmoid;  // within 1 ulp, and a fraction of the division's instructions
  asm("rcp.approx.f32 %0, %1;" : "=f"(sigmoid) : "f"(one_more));
  return sigmoid;
#else
  return 1.0f / one_more;
#endif
}

struct GeluElement {
  static constexpr int kInputs = 1, kOutputs = 1;
  static EBB_HOST_DEVICE void At(const float (&in)[1], float (&out)[1]) {
    out[0] = in[0] * SigmoidOfTwoZ(in[0]);
  }
};

// In: x, the output's gradient. Out: the output, the input's gradient. gelu'(x) = s + x s (1 - s) *
// 2 z'(x), s = sigmoid(2 z), z' = sqrt(2 / pi) * (1 + 3 * 0.044715 x^2)
struct GeluBackwardElement {
  static constexpr int kInputs = 2, kOutputs = 2;
  static EBB_HOST_DEVICE void At(const float (&in)[2], float (&out)[2]) {
    const float x = in[0], s = SigmoidOfTwoZ(x), value = x * s;
    const float slope = std::fma(x * x, 6 * kRootTwoOverPi * kCubic, 2 * kRootTwoOverPi);
    // 1 - s is 0 where the slope of a large x overflows.
    const float bend = s == 1.0f || s == 0.0f ? 0.0f : value * (1.0f - s) * slope;
    out[0] = value;
    out[1] = (s + bend) * in[1];
  }
};

struct AddElement {
  static constexpr int kInputs = 2, kOutputs = 1;
  static EBB_HOST_DEVICE void At(const float (&in)[2], float (&out)[1]) { out[0] = in[0] + in[1]; }
};

// A block takes a stretch of kThreads * kMany groups, so many loads of each array are in flight.
// The last block also takes the rest that fills no group.
template <class T, int kWidth, class Element>
struct ElementWiseKernel {
  static constexpr int kThreads = 256;
  static constexpr int kMany = 4;
  static constexpr int kInputs = Element::kInputs, kOutputs = Element::kOutputs;

  struct Arrays {
    const void* inputs[kInputs];
    void* outputs[kOutputs];
    int64_t count;
  };
  static int64_t Blocks(int64_t count) { return Ceil(count, int64_t{kThreads} * kMany * kWidth); }

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& a) {
    const int64_t groups = a.count / kWidth;
    const int64_t first = thread.block() * kThreads * kMany + thread.index();
    Group<T, kWidth> loaded[kInputs][kMany];
    EBB_UNROLL
    for (int i = 0; i < kInputs; ++i) {
      EBB_UNROLL
      for (int m = 0; m < kMany; ++m) {
        const int64_t group = first + m * kThreads;
        if (group < groups) loaded[i][m] = Load<T, kWidth>(a.inputs[i], group * kWidth);
      }
    }
    EBB_UNROLL
    for (int m = 0; m < kMany; ++m) {
      const int64_t group = first + m * kThreads;
      if (group >= groups) break;
      Group<T, kWidth> in[kInputs];
      EBB_UNROLL
      for (int i = 0; i < kInputs; ++i) in[i] = loaded[i][m];
      Compute(in, a, group * kWidth);
    }
    const int64_t left = groups * kWidth + thread.index();
    if (thread.block() == thread.blocks() - 1 && left < a.count) {
      Group<T, 1> in[kInputs];
      for (int i = 0; i < kInputs; ++i) in[i] = Load<T, 1>(a.inputs[i], left);
      Compute(in, a, left);
    }
  }

 private:
  template <int kNumbers>
  EBB_HOST_DEVICE static void Compute(const Group<T, kNumbers> (&groups)[kInputs], const Arrays& a,
                                      int64_t at) {
    float in[kInputs][kNumbers], out[kOutputs][kNumbers];
    EBB_UNROLL
    for (int i = 0; i < kInputs; ++i) Unpack(groups[i], in[i]);
    EBB_UNROLL
    for (int n = 0; n < kNumbers; ++n) {
      float of_element[kInputs], to[kOutputs];
      EBB_UNROLL
      for (int i = 0; i < kInputs; ++i) of_element[i] = in[i][n];
      Element::At(of_element, to);
      EBB_UNROLL
      for (int o = 0; o < kOutputs; ++o) out[o][n] = to[o];
    }
    EBB_UNROLL
    for (int o = 0; o < kOutputs; ++o) Store(Pack<T>(out[o]), a.outputs[o], at);
  }
};

}  // namespace ebb::gpt::cuda
