#include "ebb/optim/norm.h"

#include <algorithm>
#include <cassert>
#include <cmath>

#include "ebb/optim/cast.h"
#include "ebb/optim/scalar_ops.h"
#include "ebb/optim/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ebb/optim/norm.cc"
#include "hwy/foreach_target.h"
// This comes after foreach_target.h, which includes this file again for every target.
#include "ebb/optim/simd-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::optim::HWY_NAMESPACE {

constexpr int64_t kLanes = 16;  // by the sum's definition, for vectors of any length

// The element at source; with a destination, the number that is written there.
template <class Ops, bool kSum, class Source, class Destination>
HWY_INLINE typename Ops::Number Take(const Source* source, Destination* destination, bool add) {
  if (destination == nullptr) return Ops::Load(source);
  // Also 0 + source for a first contribution, so that it has the bits of an addition to zeros.
  const auto sum = Ops::Add(add ? Ops::Load(destination) : Ops::Set(0), Ops::Load(source));
  Ops::template Store<Rounding::kNearest>(sum, destination);
  return kSum ? Ops::Load(destination) : sum;
}

inline double AddLanes(double (&lanes)[kLanes]) {
  for (int64_t width = kLanes / 2; width >= 1; width /= 2) {
    for (int64_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  return lanes[0];
}

// One block of the sum's definition. destination: null to leave the source unchanged.
template <bool kSum, class Source, class Destination>
double Block(const Source* source, Destination* destination, bool add, int64_t count) {
  double lanes[kLanes] = {};
  int64_t i = 0;
#if EBB_VECTOR_OPS
  const hn::CappedTag<double, kLanes> wide;
  using Vector = VectorOps<hn::Rebind<float, decltype(wide)>>;
  constexpr int64_t kVectors = kLanes / Vector::kLanes;
  hn::Vec<decltype(wide)> sums[kVectors];
  for (auto& sum : sums) sum = hn::Zero(wide);
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t v = 0; v < kVectors; ++v) {
      const int64_t at = i + v * Vector::kLanes;
      const auto value =
          Take<Vector, kSum>(source + at, destination == nullptr ? nullptr : destination + at, add);
      if constexpr (kSum) {
        const auto promoted = hn::PromoteTo(wide, value);
        sums[v] = hn::MulAdd(promoted, promoted, sums[v]);
      }
    }
  }
  for (int64_t v = 0; v < kVectors; ++v) hn::StoreU(sums[v], wide, lanes + v * Vector::kLanes);
#endif
  for (; i < count; ++i) {
    const double value =
        Take<ScalarOps, kSum>(source + i, destination == nullptr ? nullptr : destination + i, add);
    if constexpr (kSum) lanes[i % kLanes] = std::fma(value, value, lanes[i % kLanes]);
  }
  return AddLanes(lanes);
}

// The levels above the elements, each at the front of the memory of the level below.
double AddLevels(double* sums, int64_t count) {
  for (; count > 1; count = NormBlocks(count)) {
    for (int64_t begin = 0; begin < count; begin += kNormBlock) {
      double lanes[kLanes] = {};
      const int64_t end = std::min(begin + kNormBlock, count);
      int64_t i = begin;
      for (; i + kLanes <= end; i += kLanes) {
        for (int64_t j = 0; j < kLanes; ++j) lanes[j] += sums[i + j];
      }
      for (int64_t j = 0; i + j < end; ++j) lanes[j] += sums[i + j];
      sums[begin / kNormBlock] = AddLanes(lanes);
    }
  }
  return count == 0 ? 0 : sums[0];
}

// Blocks [first, last) of the arrays; their sums go to `sums` unless it is null.
template <class Source, class Destination>
void Blocks(const AccumulateArrays& arrays, int64_t first, int64_t last, double* sums) {
  const Source* source = static_cast<const Source*>(arrays.source);
  Destination* destination = static_cast<Destination*>(arrays.destination);
  for (int64_t block = first; block < last; ++block) {
    const int64_t begin = block * kNormBlock;
    const int64_t count = std::min(kNormBlock, arrays.count - begin);
    Destination* to = destination == nullptr ? nullptr : destination + begin;
    if (sums != nullptr) {
      sums[block] = Block<true>(source + begin, to, arrays.add, count);
    } else {
      Block<false>(source + begin, to, arrays.add, count);
    }
  }
}

template <class Source>
void BlocksFrom(const AccumulateArrays& arrays, int64_t first, int64_t last, double* sums) {
  switch (arrays.destination_dtype) {
    case DType::kFloat32:
      return Blocks<Source, float>(arrays, first, last, sums);
    case DType::kBFloat16:
      return Blocks<Source, BFloat16>(arrays, first, last, sums);
    case DType::kFloat16:
      return Blocks<Source, Float16>(arrays, first, last, sums);
    case DType::kInt8:
      assert(!"gradients are fp32, bf16 or fp16");
  }
}

void BlockRange(const AccumulateArrays& arrays, int64_t first, int64_t last, double* sums) {
  switch (arrays.source_dtype) {
    case DType::kFloat32:
      return BlocksFrom<float>(arrays, first, last, sums);
    case DType::kBFloat16:
      return BlocksFrom<BFloat16>(arrays, first, last, sums);
    case DType::kFloat16:
      return BlocksFrom<Float16>(arrays, first, last, sums);
    case DType::kInt8:
      assert(!"gradients are fp32, bf16 or fp16");
  }
}

}  // namespace ebb::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::optim {
namespace {

HWY_EXPORT(BlockRange);
HWY_EXPORT(AddLevels);

constexpr int64_t kGrainBlocks = 32;  // 128 KiB of fp32

void RunBlocks(ThreadTeam& team, const AccumulateArrays& arrays, double* sums) {
  team.Run(NormBlocks(arrays.count), kGrainBlocks, [&](int64_t first, int64_t last) {
    HWY_DYNAMIC_DISPATCH(BlockRange)(arrays, first, last, sums);
  });
}

double SumBlocks(ThreadTeam& team, const AccumulateArrays& arrays, std::span<double> blocks) {
  const int64_t count = NormBlocks(arrays.count);
  assert(static_cast<int64_t>(blocks.size()) >= count);
  RunBlocks(team, arrays, blocks.data());
  return AddBlocks(blocks.first(static_cast<size_t>(count)));
}

}  // namespace

double SumOfSquares(ThreadTeam& team, const void* gradient, DType dtype, int64_t count,
                    std::span<double> blocks) {
  return SumBlocks(team, {.source = gradient, .source_dtype = dtype, .count = count}, blocks);
}

double AddBlocks(std::span<double> blocks) {
  return HWY_DYNAMIC_DISPATCH(AddLevels)(blocks.data(), static_cast<int64_t>(blocks.size()));
}

void Accumulate(ThreadTeam& team, const AccumulateArrays& arrays) {
  RunBlocks(team, arrays, nullptr);
}

double AccumulateAndSumSquares(ThreadTeam& team, const AccumulateArrays& arrays,
                               std::span<double> blocks) {
  return SumBlocks(team, arrays, blocks);
}

}  // namespace ebb::optim
#endif  // HWY_ONCE
