// Passes over the elements of activations, and sums of columns: kernels.h.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ebb/runtime/device/cuda/kernel_launch.h"
#include "ebb/runtime/device/cuda/kernel_thread.h"
#include "ops/cuda/kernels.h"
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

// A warp has a row.
template <class T, int kWidth>
struct AddBiasKernel {
  static constexpr int kThreads = 256, kWarps = kThreads / kernel::kWarp;
  static constexpr int kMany = 4;  // groups of a lane with loads in flight together
  using Arrays = AddBiasArrays;

  static int64_t Blocks(int64_t rows) { return Ceil(rows, kWarps); }

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& a) {
    const int64_t row = thread.block() * kWarps + thread.warp();
    if (row >= a.rows) return;
    constexpr int kStride = kernel::kWarp * kWidth;
    for (int64_t first = thread.lane() * kWidth; first < a.width; first += kMany * kStride) {
      Group<T, kWidth> inputs[kMany], biases[kMany], residuals[kMany];
      EBB_UNROLL
      for (int m = 0; m < kMany; ++m) {
        const int64_t column = first + m * kStride;
        if (column >= a.width) break;
        inputs[m] = Load<T, kWidth>(a.input, row * a.width + column);
        biases[m] = Load<T, kWidth>(a.bias, column);
        residuals[m] = Load<T, kWidth>(a.residual, row * a.width + column);
      }
      EBB_UNROLL
      for (int m = 0; m < kMany; ++m) {
        const int64_t column = first + m * kStride;
        if (column >= a.width) break;
        float sum[kWidth], bias[kWidth], residual[kWidth];
        Unpack(inputs[m], sum);
        Unpack(biases[m], bias);
        Unpack(residuals[m], residual);
        EBB_UNROLL
        for (int i = 0; i < kWidth; ++i) sum[i] = sum[i] + bias[i] + residual[i];
        Store(Pack<T>(sum), a.output, row * a.width + column);
      }
    }
  }
};

// Sums of columns. First pass: a block sums one part of the rows for 32 neighbouring groups of columns. Its warps
// take the rows in turn, and their sums are added in the order of the warps.
template <class T, int kWidth>
struct ColumnSumsKernel {
  static constexpr int kThreads = 256, kWarps = kThreads / kernel::kWarp;
  static constexpr int kColumns = kernel::kWarp * kWidth;  // of a block
  static constexpr int kMany = 4;                          // rows with loads in flight together
  static constexpr size_t kSharedBytes = kWarps * kColumns * sizeof(float);

  struct Arrays {
    const void* matrix;
    int64_t rows, columns;
    float* partials;  // [parts, columns]
    int64_t parts;
  };
  static int64_t Blocks(int64_t columns, int64_t parts) { return parts * Ceil(columns, kColumns); }

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& a) {
    const int64_t part = thread.block() % a.parts;
    const int64_t first_column = thread.block() / a.parts * kColumns;
    const int64_t end = a.rows * (part + 1) / a.parts;
    const int64_t column = first_column + thread.lane() * kWidth;
    float sums[kWidth] = {};
    if (column < a.columns) {
      for (int64_t row = a.rows * part / a.parts + thread.warp(); row < end;
           row += kMany * kWarps) {
        Group<T, kWidth> loaded[kMany];
        EBB_UNROLL
        for (int m = 0; m < kMany; ++m) {
          if (row + m * kWarps < end)
            loaded[m] = Load<T, kWidth>(a.matrix, (row + m * kWarps) * a.columns + column);
        }
        EBB_UNROLL
        for (int m = 0; m < kMany; ++m) {
          if (row + m * kWarps >= end) break;
          float numbers[kWidth];
          Unpack(loaded[m], numbers);
          EBB_UNROLL
          for (int i = 0; i < kWidth; ++i) sums[i] += numbers[i];
        }
      }
    }
    auto* const shared = reinterpret_cast<float*>(thread.shared());  // [warps, columns]
    EBB_UNROLL
    for (int i = 0; i < kWidth; ++i)
      shared[thread.warp() * kColumns + thread.lane() * kWidth + i] = sums[i];
    thread.Sync();
    for (int c = thread.index(); c < kColumns && first_column + c < a.columns; c += kThreads) {
      float sum = shared[c];
      for (int w = 1; w < kWarps; ++w) sum += shared[w * kColumns + c];
      a.partials[part * a.columns + first_column + c] = sum;
    }
  }
};

// Second pass: adds the parts of one or two targets, with as many threads for each column as there
// are warps.
struct AddPartsKernel {
  static constexpr int kThreads = 256, kWarps = kThreads / kernel::kWarp;
  static constexpr size_t kSharedBytes = kThreads * sizeof(float);

  using Arrays = PartsToAdd;
  static int64_t Blocks(int64_t columns, int targets) {
    return targets * Ceil(columns, kernel::kWarp);
  }

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& a) {
    const int64_t which = thread.block() % a.targets_count;
    const int64_t column = thread.block() / a.targets_count * kernel::kWarp + thread.lane();
    float sum = 0;
    if (column < a.columns) {
      for (int64_t part = thread.warp(); part < a.parts; part += kWarps)
        sum += a.partials[(part * a.targets_count + which) * a.columns + column];
    }
    auto* const shared = reinterpret_cast<float*>(thread.shared());  // [warps, 32]
    shared[thread.index()] = sum;
    thread.Sync();
    if (thread.warp() > 0 || column >= a.columns) return;
    float total[1] = {sum};
    for (int w = 1; w < kWarps; ++w) total[0] += shared[w * kernel::kWarp + thread.lane()];
    StoreTarget(total, which == 0 ? a.targets[0] : a.targets[1], column);
  }
};

namespace {

constexpr int64_t kPartsMax = 256, kRowsOfPart = 128;

template <class Element, class T>
cudaError_t LaunchElements(cudaStream_t stream, const void* const (&inputs)[Element::kInputs],
                           void* const (&outputs)[Element::kOutputs], int64_t count) {
  bool aligned = true;
  const auto launch = [&](auto which) {
    using Kernel = decltype(which);
    typename Kernel::Arrays arrays = {.inputs = {}, .outputs = {}, .count = count};
    std::copy(std::begin(inputs), std::end(inputs), arrays.inputs);
    std::copy(std::begin(outputs), std::end(outputs), arrays.outputs);
    return kernel::LaunchKernel<Kernel>(stream, {.blocks = Kernel::Blocks(count)}, arrays);
  };
  for (const void* array : inputs) aligned = aligned && Aligned<T, kGroup<T>>(array, 0);
  for (const void* array : outputs) aligned = aligned && Aligned<T, kGroup<T>>(array, 0);
  return aligned ? launch(ElementWiseKernel<T, kGroup<T>, Element>())
                 : launch(ElementWiseKernel<T, 1, Element>());
}

}  // namespace

cudaError_t LaunchGelu(cudaStream_t stream, DType dtype, const void* input, void* output,
                       int64_t count) {
  return WithType(dtype, [&](auto type) {
    return LaunchElements<GeluElement, decltype(type)>(stream, {input}, {output}, count);
  });
}

cudaError_t LaunchGeluBackward(cudaStream_t stream, DType dtype, const void* input, void* output,
                               void* gradient, int64_t count) {
  return WithType(dtype, [&](auto type) {
    return LaunchElements<GeluBackwardElement, decltype(type)>(stream, {input, gradient},
                                                               {output, gradient}, count);
  });
}

cudaError_t LaunchAdd(cudaStream_t stream, DType dtype, const void* a, const void* b, void* sum,
                      int64_t count) {
  return WithType(dtype, [&](auto type) {
    return LaunchElements<AddElement, decltype(type)>(stream, {a, b}, {sum}, count);
  });
}

cudaError_t LaunchAddBias(cudaStream_t stream, DType dtype, const AddBiasArrays& arrays) {
  return WithType(dtype, [&](auto type) {
    using T = decltype(type);
    const auto launch = [&](auto which) {
      using Kernel = decltype(which);
      return kernel::LaunchKernel<Kernel>(stream, {.blocks = Kernel::Blocks(arrays.rows)}, arrays);
    };
    return RowsAreAligned<T>(arrays.width,
                             {arrays.input, arrays.bias, arrays.residual, arrays.output})
               ? launch(AddBiasKernel<T, kGroup<T>>())
               : launch(AddBiasKernel<T, 1>());
  });
}

int64_t ColumnSumsParts(int64_t rows) {
  return std::clamp<int64_t>(Ceil(rows, kRowsOfPart), 1, kPartsMax);
}

cudaError_t LaunchColumnSums(cudaStream_t stream, DType dtype, const void* matrix, int64_t rows,
                             int64_t columns, float* partials, const Target& sums) {
  const int64_t parts = ColumnSumsParts(rows);
  const cudaError_t result = WithType(dtype, [&](auto type) {
    using T = decltype(type);
    const auto launch = [&](auto which) {
      using Kernel = decltype(which);
      return kernel::LaunchKernel<Kernel>(
          stream, {.blocks = Kernel::Blocks(columns, parts), .shared_bytes = Kernel::kSharedBytes},
          {.matrix = matrix,
           .rows = rows,
           .columns = columns,
           .partials = partials,
           .parts = parts});
    };
    return RowsAreAligned<T>(columns, {matrix}) ? launch(ColumnSumsKernel<T, kGroup<T>>())
                                                : launch(ColumnSumsKernel<T, 1>());
  });
  if (result != cudaSuccess) return result;
  return LaunchAddParts(stream, {.partials = partials,
                                 .parts = parts,
                                 .columns = columns,
                                 .targets_count = 1,
                                 .targets = {sums}});
}

cudaError_t LaunchAddParts(cudaStream_t stream, const PartsToAdd& arrays) {
  return kernel::LaunchKernel<AddPartsKernel>(
      stream,
      {.blocks = AddPartsKernel::Blocks(arrays.columns, arrays.targets_count),
       .shared_bytes = AddPartsKernel::kSharedBytes},
      arrays);
}

cudaError_t LoadElementWiseKernels(DType dtype) {
  return WithType(dtype, [](auto type) {
    using T = decltype(type);
    return kernel::LoadKernels<
        ElementWiseKernel<T, kGroup<T>, GeluElement>, ElementWiseKernel<T, 1, GeluElement>,
        ElementWiseKernel<T, kGroup<T>, GeluBackwardElement>,
        ElementWiseKernel<T, 1, GeluBackwardElement>, ElementWiseKernel<T, kGroup<T>, AddElement>,
        ElementWiseKernel<T, 1, AddElement>, AddBiasKernel<T, kGroup<T>>, AddBiasKernel<T, 1>,
        ColumnSumsKernel<T, kGroup<T>>, ColumnSumsKernel<T, 1>, AddPartsKernel>();
  });
}

}  // namespace ebb::gpt::cuda
