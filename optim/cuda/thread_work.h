// The work of one thread of each CUDA kernel, given its number in the grid.
//
//   array    [ head | 4 | 4 | 4 | ... | 4 | tail ]
//
// Neighbouring threads take neighbouring groups of four numbers, each loaded and stored in one
// access of 16 bytes (8 for 16-bit types). Then they take the head and the tail, one number at a
// time. Groups have four numbers even if some arrays have 16 bits, because a warp's accesses of 8
// bytes are 256 bytes without gaps. With groups of eight numbers, an fp32 array would need two
// accesses, and each would touch every 32-byte sector and use half of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "ebb/optim/cuda/cast_arrays.h"
#include "ebb/optim/cuda/numbers.h"
#include "ebb/optim/norm.h"
#include "ebb/optim/split_master.h"
#include "ebb/optim/stochastic_rounding.h"
#include "ebb/optim/update_arrays.h"

namespace ebb::optim::cuda {

inline constexpr int kGroup = 4;

struct Cut {
  int64_t head = 0, groups = 0, count = 0;

  EBB_HOST_DEVICE int64_t Group(int64_t g) const { return head + kGroup * g; }
  EBB_HOST_DEVICE int64_t singles() const { return count - kGroup * groups; }
  EBB_HOST_DEVICE int64_t Single(int64_t s) const { return s < head ? s : s + kGroup * groups; }
};

struct Array {
  const void* data = nullptr;  // null: absent, so always aligned
  int64_t size = 4;            // of a number
};

inline bool GroupsAligned(const Array& array, int64_t head) {
  const auto address = reinterpret_cast<uintptr_t>(array.data) + head * array.size;
  return array.data == nullptr || address % static_cast<uintptr_t>(kGroup * array.size) == 0;
}

// If no head aligns the groups of all arrays, there are no groups.
inline Cut CutFor(int64_t count, std::initializer_list<Array> arrays) {
  for (int64_t head = 0; head < std::min<int64_t>(kGroup, count); ++head) {
    if (std::all_of(arrays.begin(), arrays.end(),
                    [&](const Array& array) { return GroupsAligned(array, head); })) {
      return {.head = head, .groups = (count - head) / kGroup, .count = count};
    }
  }
  return {.count = count};
}

// Calls body.At<kWidth, kMany>(first, stride) so that the threads together see every element once:
// numbers [first + m * stride, + kWidth) for m in [0, kMany). The loads of these numbers are in
// flight together.
template <int kMany, class Body>
EBB_HOST_DEVICE void Walk(const Cut& cut, int64_t thread, int64_t threads, Body&& body) {
  int64_t group = thread;
  if constexpr (kMany > 1) {
    for (; group + (kMany - 1) * threads < cut.groups; group += kMany * threads)
      body.template At<kGroup, kMany>(cut.Group(group), kGroup * threads);
  }
  for (; group < cut.groups; group += threads) body.template At<kGroup, 1>(cut.Group(group), 0);
  const int64_t singles = cut.singles();
  for (int64_t single = thread; single < singles; single += threads)
    body.template At<1, 1>(cut.Single(single), 0);
}

// For a source and a destination.
template <class Arrays>
Cut CutForBoth(const Arrays& arrays) {
  return CutFor(arrays.count, {{arrays.source, SizeOf(arrays.source_dtype)},
                               {arrays.destination, SizeOf(arrays.destination_dtype)}});
}

// Loads numbers [first, first + kWidth) of an array, and as many each `stride` further on. All
// loads are in flight before the first number is used.
template <int kWidth, int kTimes>
EBB_HOST_DEVICE void LoadAll(const void* array, int64_t size, int64_t first, int64_t stride,
                             Packed<kWidth> (&loaded)[kTimes]) {
  for (int m = 0; m < kTimes; ++m) loaded[m] = Load<kWidth>(array, size, first + m * stride);
}

struct CastWork {
  static constexpr int kMany = 4;
  const CastArrays& arrays;

  static Cut CutOf(const CastArrays& arrays) { return CutForBoth(arrays); }

  template <int kWidth, int kTimes>
  EBB_HOST_DEVICE void At(int64_t first, int64_t stride) const {
    Packed<kWidth> loaded[kTimes];
    LoadAll(arrays.source, SizeOf(arrays.source_dtype), first, stride, loaded);
    for (int m = 0; m < kTimes; ++m) {
      float numbers[kWidth];
      Unpack(loaded[m], arrays.source_dtype, numbers);
      if (arrays.factor != 1) {
        for (float& number : numbers) number = Ops::Mul(number, arrays.factor);
      }
      if (arrays.via != DType::kFloat32)
        Unpack(Pack(numbers, arrays.via, Rounding::kNearest), arrays.via, numbers);
      Store(Pack(numbers, arrays.destination_dtype, arrays.rounding), arrays.destination,
            SizeOf(arrays.destination_dtype), first + m * stride);
    }
  }
};

struct NormaliseWork {
  static constexpr int kMany = 1;
  const NormaliseArrays& arrays;
  float factor;

  explicit EBB_HOST_DEVICE NormaliseWork(const NormaliseArrays& of)
      : arrays(of), factor(NormFactorOf(of)) {}

  static Cut CutOf(const NormaliseArrays& arrays) { return CutForBoth(arrays); }
  static EBB_HOST_DEVICE float NormFactorOf(const NormaliseArrays& of) {
    const double norm = sqrt(*of.squares), least = of.epsilon;
    return static_cast<float>(1 / (norm > least ? norm : least));
  }

  template <int kWidth, int kTimes>
  EBB_HOST_DEVICE void At(int64_t first, int64_t stride) const {
    Packed<kWidth> loaded[kTimes];
    LoadAll(arrays.source, SizeOf(arrays.source_dtype), first, stride, loaded);
    for (int m = 0; m < kTimes; ++m) {
      float numbers[kWidth];
      Unpack(loaded[m], arrays.source_dtype, numbers);
      for (float& number : numbers) number = Ops::Mul(number, factor);
      Store(Pack(numbers, arrays.destination_dtype, Rounding::kNearest), arrays.destination,
            SizeOf(arrays.destination_dtype), first + m * stride);
    }
  }
};

// For a split master, or a parameter that is the master.
inline Cut CutForMaster(const MasterArrays& arrays) {
  return CutFor(arrays.count, {{arrays.master, 4}, {arrays.parameter, 2}, {arrays.low, 2}});
}

// Numbers [at, at + kWidth) of a split master.
template <int kWidth>
EBB_HOST_DEVICE void JoinMasters(const Packed<kWidth>& parameters, const Packed<kWidth>& low,
                                 float (&masters)[kWidth]) {
  for (int i = 0; i < kWidth; ++i) {
    BFloat16 parameter;
    parameter.bits = parameters.Half(i);
    masters[i] = JoinMaster(parameter, low.Half(i));
  }
}

template <bool kSplit>
struct LoadMasterWork {
  static constexpr int kMany = 4;
  const MasterArrays& arrays;

  static Cut CutOf(const MasterArrays& arrays) { return CutForMaster(arrays); }

  template <int kWidth, int kTimes>
  EBB_HOST_DEVICE void At(int64_t first, int64_t stride) const {
    Packed<kWidth> parameter[kTimes], low[kTimes] = {};
    LoadAll(arrays.parameter, 2, first, stride, parameter);
    if constexpr (kSplit) LoadAll(arrays.low, 2, first, stride, low);
    for (int m = 0; m < kTimes; ++m) {
      float masters[kWidth];
      if constexpr (kSplit) {
        JoinMasters(parameter[m], low[m], masters);
      } else {
        Unpack(parameter[m], DType::kBFloat16, masters);
      }
      Store(Pack(masters, DType::kFloat32, Rounding::kNearest), arrays.master, 4,
            first + m * stride);
    }
  }
};

template <bool kSplit>
struct StoreMasterWork {
  static constexpr int kMany = 4;
  const MasterArrays& arrays;
  RoundingKey key = {};

  EBB_HOST_DEVICE explicit StoreMasterWork(const MasterArrays& of) : arrays(of) {
    if constexpr (!kSplit) key = RoundingKeyOf(of.rounding, of.step);
  }
  static Cut CutOf(const MasterArrays& arrays) { return CutForMaster(arrays); }

  template <int kWidth, int kTimes>
  EBB_HOST_DEVICE void At(int64_t first, int64_t stride) const {
    Packed<kWidth> packed[kTimes];
    LoadAll(arrays.master, 4, first, stride, packed);
    for (int m = 0; m < kTimes; ++m) {
      const int64_t at = first + m * stride;
      float masters[kWidth];
      Unpack(packed[m], DType::kFloat32, masters);
      Packed<kWidth> low = {};
      for (int i = 0; i < kWidth; ++i) {
        if constexpr (kSplit) {
          low.SetHalf(i, LowHalf(masters[i]));
        } else {
          const auto index = static_cast<uint32_t>(arrays.rounding.index + at + i);
          masters[i] = RoundStochastically(masters[i], RandomBits(key, index));
        }
      }
      if constexpr (kSplit) Store(low, arrays.low, 2, at);
      Store(Pack(masters, DType::kBFloat16, Rounding::kParameter), arrays.parameter, 2, at);
    }
  }
};

// The sum of the old number, if it counts, and the source, as it is written.
template <int kWidth>
EBB_HOST_DEVICE Packed<kWidth> Sum(const AccumulateArrays& arrays, const Packed<kWidth>& source,
                                   const Packed<kWidth>& present) {
  float sum[kWidth] = {}, numbers[kWidth];
  Unpack(source, arrays.source_dtype, numbers);
  if (arrays.add) Unpack(present, arrays.destination_dtype, sum);
  // Also 0 + source for a first contribution, so that it has the bits of an addition to zeros.
  for (int i = 0; i < kWidth; ++i) sum[i] = Ops::Add(sum[i], numbers[i]);
  return Pack(sum, arrays.destination_dtype, Rounding::kNearest);
}

struct AccumulateWork {
  static constexpr int kMany = 4;
  const AccumulateArrays& arrays;

  static Cut CutOf(const AccumulateArrays& arrays) { return CutForBoth(arrays); }

  template <int kWidth, int kTimes>
  EBB_HOST_DEVICE void At(int64_t first, int64_t stride) const {
    const int64_t source_size = SizeOf(arrays.source_dtype);
    const int64_t size = SizeOf(arrays.destination_dtype);
    Packed<kWidth> source[kTimes], present[kTimes] = {};
    for (int m = 0; m < kTimes; ++m) {
      source[m] = Load<kWidth>(arrays.source, source_size, first + m * stride);
      if (arrays.add) present[m] = Load<kWidth>(arrays.destination, size, first + m * stride);
    }
    for (int m = 0; m < kTimes; ++m)
      Store(Sum(arrays, source[m], present[m]), arrays.destination, size, first + m * stride);
  }
};

// Four threads share a block of norm.h's sum. If there are too few blocks to fill a device, eight
// or sixteen threads share one. Thread `part` of them has the kLanes lanes from kLanes * part on,
// and these lanes' elements of every 16. So each thread's accesses are groups, and each lane sees
// its elements in ascending order, for any number of threads.
inline constexpr int kNormLanes = 16;

template <int kLanes>
struct SquaresWork {
  static constexpr int kParts = kNormLanes / kLanes;
  // Numbers of a thread with loads in flight together. An SM then has as many bytes in flight
  // as in a copy, with half of the threads.
  static constexpr int kNumbers = 32;
  static constexpr int kSteps = kNumbers / kLanes;  // of 16 elements
  static_assert(kGroup % kLanes == 0 && kNormBlock % (kSteps * kNormLanes) == 0);
  const AccumulateArrays& arrays;  // without a destination: the source's squares

  // Blocks begin at multiples of 1,024 elements, so all are aligned if one is.
  static bool Aligned(const AccumulateArrays& arrays) {
    return GroupsAligned({arrays.source, SizeOf(arrays.source_dtype)}, 0) &&
           GroupsAligned({arrays.destination, SizeOf(arrays.destination_dtype)}, 0);
  }

  EBB_HOST_DEVICE void Part(int64_t block, int part, bool groups_aligned,
                            double (&lanes)[kLanes]) const {
    const int64_t begin = block * kNormBlock;
    const int64_t left = arrays.count - begin;
    int64_t at = begin + kLanes * part;
    if (groups_aligned && left >= kNormBlock) {
      for (int step = 0; step < kNormBlock / kNormLanes; step += kSteps, at += kSteps * kNormLanes)
        Take<kLanes, kSteps>(at, lanes);
      return;
    }
    const int64_t end = left < kNormBlock ? arrays.count : begin + kNormBlock;
    for (; at < end; at += kNormLanes) {
      for (int i = 0; i < kLanes; ++i) {
        double lane[1] = {lanes[i]};
        if (at + i < end) Take<1, 1>(at + i, lane);
        lanes[i] = lane[0];
      }
    }
  }

 private:
  template <int kWidth, int kTimes>
  EBB_HOST_DEVICE void Take(int64_t first, double (&lanes)[kWidth]) const {
    const int64_t source_size = SizeOf(arrays.source_dtype);
    const int64_t size = SizeOf(arrays.destination_dtype);
    const bool writes = arrays.destination != nullptr;
    Packed<kWidth> source[kTimes], present[kTimes] = {};
    for (int m = 0; m < kTimes; ++m) {
      source[m] = Load<kWidth>(arrays.source, source_size, first + m * kNormLanes);
      if (writes && arrays.add)
        present[m] = Load<kWidth>(arrays.destination, size, first + m * kNormLanes);
    }
    for (int m = 0; m < kTimes; ++m) {
      float numbers[kWidth];
      if (writes) {
        const Packed<kWidth> written = Sum(arrays, source[m], present[m]);
        Store(written, arrays.destination, size, first + m * kNormLanes);
        Unpack(written, arrays.destination_dtype, numbers);
      } else {
        Unpack(source[m], arrays.source_dtype, numbers);
      }
      for (int i = 0; i < kWidth; ++i) lanes[i] = AddSquare(lanes[i], double{numbers[i]});
    }
  }
};

// norm.h's tree over the lanes of a block's threads: the upper half of the parts is added to the
// lower, and so on, until part 0 has the block's sum in its own lanes.
template <int kLanes>
EBB_HOST_DEVICE void AddPart(double (&lanes)[kLanes], const double (&upper)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) lanes[i] += upper[i];
}
template <int kLanes>
EBB_HOST_DEVICE double AddLanes(const double (&lanes)[kLanes]) {
  if constexpr (kLanes == 1) {
    return lanes[0];
  } else if constexpr (kLanes == 2) {
    return lanes[0] + lanes[1];
  } else {
    static_assert(kLanes == 4);
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
  }
}

// A level of norm.h's sums above the elements. Sixteen threads add 1,024 sums, one thread for each
// lane. All levels lie in one array; this level's sums are `stride` apart. The sum of 1,024 sums
// replaces the first of them, which other threads do not read.
struct LevelWork {
  static constexpr int kLoads = 16;  // loads of a thread that are in flight together

  double* sums = nullptr;
  int64_t count = 0;
  int64_t stride = 1;

  EBB_HOST_DEVICE int64_t blocks() const { return (count + kNormBlock - 1) / kNormBlock; }
  EBB_HOST_DEVICE LevelWork Above() const { return {sums, blocks(), stride * kNormBlock}; }

  EBB_HOST_DEVICE double Lane(int64_t block, int lane) const {
    const int64_t begin = block * kNormBlock;
    const int64_t end = count - begin < kNormBlock ? count : begin + kNormBlock;
    double sum = 0;
    int64_t at = begin + lane;
    for (; at + (kLoads - 1) * kNormLanes < end; at += kLoads * kNormLanes) {
      double loaded[kLoads];
      for (int m = 0; m < kLoads; ++m) loaded[m] = sums[(at + m * kNormLanes) * stride];
      for (int m = 0; m < kLoads; ++m) sum += loaded[m];
    }
    for (; at < end; at += kNormLanes) sum += sums[at * stride];
    return sum;
  }
  // Called once all lanes have been summed.
  EBB_HOST_DEVICE void Put(int64_t block, double sum) const {
    sums[block * kNormBlock * stride] = sum;
  }
};

}  // namespace ebb::optim::cuda
