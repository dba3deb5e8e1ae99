// Cross-entropy, and the mean of its losses: kernels.h.
#include <cmath>
#include <cstdint>

#include "ebb/runtime/device/cuda/kernel_launch.h"
#include "ebb/runtime/device/cuda/kernel_thread.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/numbers.h"

namespace ebb::gpt::cuda {

// A block has a row. Rows of a vocabulary such as 50,257 begin anywhere, so the head and the tail
// of a row are taken one number at a time:
//
//   row      [ head | group | group | ... | group | tail ]
// If the vocabulary is cut over ranks, the row's terms are those of all ranks.
template <class T>
struct CrossEntropyKernel {
  static constexpr int kThreads = 512, kWarps = kThreads / kernel::kWarp;
  static constexpr int kWidth = kGroup<T>;
  static constexpr int kMany = 4;  // groups of a thread with loads in flight together
  static constexpr size_t kSharedBytes = (2 * kWarps + 1) * sizeof(float);
  using Arrays = CrossEntropyArrays;

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& a) {
    const int64_t row = thread.block();
    const T* const logits = static_cast<const T*>(a.logits) + row * a.vocabulary;
    const bool is_cut = a.terms.top != nullptr;
    const int target = static_cast<int>(a.targets[row] - a.first_token);
    // The loss scale may be in host memory, so each block reads it once, during the first pass.
    float* const scale = reinterpret_cast<float*>(thread.shared()) + 2 * kWarps;
    if (thread.index() == 0)
      *scale = a.gradient_scale * (a.loss_scale == nullptr ? 1.0f : *a.loss_scale);
    const int count = static_cast<int>(a.vocabulary);
    // Read before the gradient may overwrite it: no thread writes until all have summed.
    const float at_target = is_cut ? a.terms.at_target[row] : LogitAt(logits, target, count);
    Sum all;
    if (is_cut) {
      all = {a.terms.top[row], a.terms.sum[row]};
      thread.Sync();  // the scale has been read
    } else {
      Each(thread, logits, count, [&](const auto& numbers, int) { all.Add(numbers); });
      all = OverThreads(thread, all);
    }
    const float log_sum_exp = all.top + std::log(all.sum);
    if (thread.index() == 0) a.losses[row] = log_sum_exp - at_target;
    if (a.gradient == nullptr) return;

    auto* const gradient = static_cast<T*>(a.gradient) + row * a.vocabulary;
    const float factor = *scale;
    Each(thread, logits, count, [&](auto& numbers, int at) {
      constexpr int kNumbers = sizeof(numbers) / sizeof(float);
      EBB_UNROLL
      for (int i = 0; i < kNumbers; ++i) numbers[i] = Exp(numbers[i] - log_sum_exp);
      // One of the row's groups has the target, if the rank has it.
      if (const int of_group = target - at; 0 <= of_group && of_group < kNumbers) {
        EBB_UNROLL
        for (int i = 0; i < kNumbers; ++i) numbers[i] -= i == of_group ? 1.0f : 0.0f;
      }
      EBB_UNROLL
      for (int i = 0; i < kNumbers; ++i) numbers[i] *= factor;
      StoreAnywhere<T>(numbers, gradient, at);
    });
  }

  // The sum of exp(number - top) over the numbers so far. A NaN stays in the sum, whatever the top
  // is.
  struct Sum {
    float top = -3.0e38f, sum = 0;

    template <int kNumbers>
    EBB_HOST_DEVICE void Add(const float (&numbers)[kNumbers]) {
      float highest = top;
      EBB_UNROLL
      for (int i = 0; i < kNumbers; ++i) highest = numbers[i] > highest ? numbers[i] : highest;
      Raise(highest);
      EBB_UNROLL
      for (int i = 0; i < kNumbers; ++i) sum += Exp(numbers[i] - top);
    }
    EBB_HOST_DEVICE void Raise(float highest) {
      if (highest == top) return;
      sum *= Exp(top - highest);
      top = highest;
    }
  };

  // 0: no column of this rank.
  static EBB_HOST_DEVICE float LogitAt(const T* logits, int column, int count) {
    float number[1] = {};
    if (0 <= column && column < count) Unpack(Load<T, 1>(logits, column), number);
    return number[0];
  }

  // The sum over the row, with the same bits in all its threads.
  template <class Thread>
  EBB_HOST_DEVICE static Sum OverThreads(Thread& thread, Sum mine) {
    auto* const tops = reinterpret_cast<float*>(thread.shared());
    const float top_of_warp = kernel::WarpMax(thread, mine.top);
    if (thread.lane() == 0) tops[thread.warp()] = top_of_warp;
    thread.Sync();
    float top = tops[0];
    for (int w = 1; w < kWarps; ++w) top = tops[w] > top ? tops[w] : top;
    mine.Raise(top);
    float sums[1] = {mine.sum};
    SumOverThreads<kThreads>(thread, sums, tops + kWarps);
    return {top, sums[0]};
  }

  // Calls body(numbers, index of the first) for the thread's groups and single numbers of a row.
  template <class Thread, class Body>
  EBB_HOST_DEVICE static void Each(const Thread& thread, const T* logits, int count,
                                   const Body& body) {
    const int before = static_cast<int>(reinterpret_cast<uintptr_t>(logits) % 16 / sizeof(T));
    const int unaligned = (kWidth - before) % kWidth;
    const int head = unaligned < count ? unaligned : count;
    const int groups = (count - head) / kWidth;
    for (int first = thread.index(); first < groups; first += kMany * kThreads) {
      Group<T, kWidth> loaded[kMany];
      EBB_UNROLL
      for (int m = 0; m < kMany; ++m) {
        const int group = first + m * kThreads;
        if (group < groups) loaded[m] = Load<T, kWidth>(logits, head + group * kWidth);
      }
      EBB_UNROLL
      for (int m = 0; m < kMany; ++m) {
        const int group = first + m * kThreads;
        if (group >= groups) break;
        float numbers[kWidth];
        Unpack(loaded[m], numbers);
        body(numbers, head + group * kWidth);
      }
    }
    const int single = thread.index();
    if (single >= count - groups * kWidth) return;
    const int at = single < head ? single : single + groups * kWidth;
    float number[1];
    Unpack(Load<T, 1>(logits, at), number);
    body(number, at);
  }
};

// The terms of the columns that this rank has. A block has a row.
template <class T>
struct LogitTermsKernel {
  using Whole = CrossEntropyKernel<T>;
  static constexpr int kThreads = Whole::kThreads;
  static constexpr size_t kSharedBytes = Whole::kSharedBytes;
  using Arrays = CrossEntropyArrays;

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& a) {
    const int64_t row = thread.block();
    const T* const logits = static_cast<const T*>(a.logits) + row * a.vocabulary;
    const int count = static_cast<int>(a.vocabulary);
    typename Whole::Sum own;
    Whole::Each(thread, logits, count, [&](const auto& numbers, int) { own.Add(numbers); });
    own = Whole::OverThreads(thread, own);
    if (thread.index() != 0) return;
    a.terms.top[row] = a.terms.own_top[row] = own.top;
    a.terms.sum[row] = own.sum;
    a.terms.at_target[row] =
        Whole::LogitAt(logits, static_cast<int>(a.targets[row] - a.first_token), count);
  }
};

// Sums of exp(logit - own_top) become those of exp(logit - top).
struct LogitSumsKernel {
  static constexpr int kThreads = 256;
  using Arrays = CrossEntropyArrays;
  static int64_t Blocks(int64_t rows) { return Ceil(rows, kThreads); }

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& a) {
    const int64_t row = thread.block() * kThreads + thread.index();
    if (row < a.rows) a.terms.sum[row] *= Exp(a.terms.own_top[row] - a.terms.top[row]);
  }
};

// One block. Its threads take the numbers in turn.
struct MeanKernel {
  static constexpr int kThreads = 1024;
  static constexpr size_t kSharedBytes = kThreads / kernel::kWarp * sizeof(double);
  struct Arrays {
    const float* numbers;
    int64_t count;
    float* mean;
  };

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& a) {
    double sums[1] = {};
    for (int64_t i = thread.index(); i < a.count; i += kThreads) sums[0] += double{a.numbers[i]};
    SumOverThreads<kThreads>(thread, sums, reinterpret_cast<double*>(thread.shared()));
    if (thread.index() == 0) *a.mean = static_cast<float>(sums[0] / static_cast<double>(a.count));
  }
};

cudaError_t LaunchCrossEntropy(cudaStream_t stream, DType dtype, const CrossEntropyArrays& arrays) {
  return WithType(dtype, [&](auto type) {
    using Kernel = CrossEntropyKernel<decltype(type)>;
    return kernel::LaunchKernel<Kernel>(
        stream, {.blocks = arrays.rows, .shared_bytes = Kernel::kSharedBytes}, arrays);
  });
}

cudaError_t LaunchLogitTerms(cudaStream_t stream, DType dtype, const CrossEntropyArrays& arrays) {
  return WithType(dtype, [&](auto type) {
    using Kernel = LogitTermsKernel<decltype(type)>;
    return kernel::LaunchKernel<Kernel>(
        stream, {.blocks = arrays.rows, .shared_bytes = Kernel::kSharedBytes}, arrays);
  });
}

cudaError_t LaunchLogitSums(cudaStream_t stream, const CrossEntropyArrays& arrays) {
  return kernel::LaunchKernel<LogitSumsKernel>(
      stream, {.blocks = LogitSumsKernel::Blocks(arrays.rows)}, arrays);
}

cudaError_t LaunchMean(cudaStream_t stream, const float* numbers, int64_t count, float* mean) {
  return kernel::LaunchKernel<MeanKernel>(stream,
                                          {.blocks = 1, .shared_bytes = MeanKernel::kSharedBytes},
                                          {.numbers = numbers, .count = count, .mean = mean});
}

cudaError_t LoadCrossEntropyKernels(DType dtype) {
  return WithType(dtype, [](auto type) {
    using T = decltype(type);
    return kernel::LoadKernels<CrossEntropyKernel<T>, LogitTermsKernel<T>, LogitSumsKernel,
                               MeanKernel>();
  });
}

}  // namespace ebb::gpt::cuda
