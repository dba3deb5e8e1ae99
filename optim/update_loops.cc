#include "ebb/optim/update_loops.h"

#include <algorithm>
#include <cassert>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ebb/optim/update_loops.cc"
#include "ebb/optim/simd_targets.h"
#include "hwy/foreach_target.h"
// This comes after foreach_target.h, which includes this file again for every target.
#include "ebb/optim/checksum-inl.h"
#include "ebb/optim/scalar_ops.h"
#include "ebb/optim/simd-inl.h"
#include "ebb/optim/update_loops-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::optim::HWY_NAMESPACE {

#if EBB_VECTOR_OPS

// The lanes of all arrays' blocks. Among the vectors of one stripe, v counts from the stripe's
// begin. Two vectors of elements fill one vector of low halves.
template <int kStates, MasterForm kForm>
class VectorSums {
  using Vector = VectorOps<hn::ScalableTag<float>>;
  using Pair = hn::Twice<typename Vector::Halves>;

 public:
  HWY_INLINE VectorSums() {}  // an implicit one would not be of this target
  HWY_INLINE void Read(int array, int64_t v, Vector::Number number) {
    read_[array].AddVector(v % checksum::Lanes::kVectors, number);
  }
  HWY_INLINE void Write(int array, int64_t v, Vector::Number number) {
    written_[array].AddVector(v % checksum::Lanes::kVectors, number);
  }
  HWY_INLINE void ReadLow(int64_t v, const uint16_t* low) {
    // Reads both vectors at once, before the first of them is written.
    if (v % 2 == 0) read_[0].AddVector(v / 2, hn::LoadU(Pair(), low));
  }
  HWY_INLINE void WriteLow(int64_t v, Vector::Number master) {
    if (v % 2 == 0) {
      half_ = Vector::LowHalves(master);
    } else {
      written_[0].AddVector(v / 2, hn::Combine(Pair(), Vector::LowHalves(master), half_));
    }
  }

  // For the arrays of fp32 numbers, and for the low halves.
  HWY_INLINE void Scramble() {
    for (int a = kFirst; a <= kStates; ++a) {
      read_[a].Scramble();
      written_[a].Scramble();
    }
  }
  HWY_INLINE void ScrambleLow() {
    read_[0].Scramble();
    written_[0].Scramble();
  }
  // The block that begins at element `begin` is complete.
  void Take(const BlockSums& out, int64_t begin, int64_t end) {
    for (int a = kFirst; a <= kStates; ++a)
      TakeArray(out, a, begin / kBlockElements, (end - begin) * 4);
  }
  void TakeLow(const BlockSums& out, int64_t begin, int64_t end) {
    TakeArray(out, 0, begin / kLowBlockElements, (end - begin) * 2);
  }

 private:
  static constexpr int kFirst = kForm == MasterForm::kWhole ? 0 : 1;  // of fp32 numbers

  void TakeArray(const BlockSums& out, int array, int64_t block, int64_t bytes) {
    out.Read(array)[block] = checksum::SumOfLanes(read_[array], bytes);
    out.Written(array)[block] = checksum::SumOfLanes(written_[array], bytes);
    read_[array] = written_[array] = checksum::Lanes();
  }

  checksum::Lanes read_[1 + kStates], written_[1 + kStates];
  hn::Vec<typename Vector::Halves> half_{};  // the written low halves of the even vector
};

// [begin, end): a multiple of this, from the begin of a block in every array.
constexpr int64_t kSummedStep = 2048;
// Elements: two stripes of fp32 numbers, one of low halves.
constexpr int64_t kLowStripe = 32;

// With the sums a processor looks ahead over fewer elements, and would load their data too late for
// one thread to read at full speed. So data are prefetched, this many elements ahead, as measured
// on a Zen 4; more is slower if an element has more cache lines. Arrays are not read past their
// end.
template <MasterForm kForm>
inline constexpr int64_t kFetchAhead = kForm == MasterForm::kWhole ? 48 : 80;

template <UpdateRule kRule, MasterForm kForm>
void UpdateVectorsAndSum(const ConstantsOf<kRule>& shared_constants,
                         const LoopArrays& shared_arrays, const BlockSums& out, int64_t begin,
                         int64_t end) {
  using Vector = VectorOps<hn::ScalableTag<float>>;
  const ConstantsOf<kRule> constants = shared_constants;
  const LoopArrays arrays = shared_arrays;
  constexpr int kStates = StatesOf(kRule);
  constexpr int64_t kScramble = checksum::kStripesPerScramble * checksum::kStripe / 4;
  static_assert(kSummedStep == 2 * kScramble);
  const bool streams = Streams(shared_arrays, begin);
  VectorSums<kStates, kForm> sums;
  for (int64_t block = begin; block < end; block += kBlockElements) {
    const int64_t block_end = std::min(end, block + kBlockElements);
    for (int64_t step = block; step < block_end; step += kSummedStep) {
      // A local copy stays in registers until the step is done; `sums` would be stored at every
      // stripe.
      VectorSums<kStates, kForm> lanes = sums;
      for (int64_t part = step; part < step + kSummedStep; part += kScramble) {
        for (int64_t i = part; i < part + kScramble; i += kLowStripe) {
          Fetch<kLowStripe, kForm>(arrays, i + kFetchAhead<kForm>);
          for (int s = 0; s < kStates; ++s)
            FetchLines<kLowStripe>(arrays.states[s].numbers() + i + kFetchAhead<kForm>);
          for (int64_t v = 0; v < kLowStripe / Vector::kLanes; v += 2) {
            UpdatePairAt<kRule, kForm>(constants, arrays, streams, i + v * Vector::kLanes, v, lanes,
                                       PlainStates{arrays});
          }
        }
        lanes.Scramble();
      }
      if constexpr (kForm == MasterForm::kSplit) lanes.ScrambleLow();
      sums = lanes;
    }
    sums.Take(out, block, block_end);
    if constexpr (kForm == MasterForm::kSplit) {
      const int64_t low = block / kLowBlockElements * kLowBlockElements;
      if (block_end == end || block_end == low + kLowBlockElements)
        sums.TakeLow(out, low, block_end);
    }
  }
  if (streams) hwy::FlushStream();
}

#endif

template <int kStates>
void SumArrays(const LoopArrays& arrays, uint64_t* (BlockSums::*of)(int) const,
               const BlockSums& out, int64_t begin, int64_t end) {
  const auto sum = [&](int array, const auto* elements, int64_t block_elements) {
    for (int64_t i = begin; i < end; i += block_elements) {
      const int64_t bytes =
          (std::min(end, i + block_elements) - i) * static_cast<int64_t>(sizeof(*elements));
      (out.*of)(array)[i / block_elements] =
          checksum::BlockSum(reinterpret_cast<const std::byte*>(elements + i), bytes);
    }
  };
  if (arrays.master_low != nullptr) {
    sum(0, arrays.master_low, kLowBlockElements);
  } else if (arrays.master != nullptr) {
    sum(0, arrays.master, kBlockElements);
  }
  for (int s = 0; s < kStates; ++s) sum(1 + s, arrays.states[s].numbers(), kBlockElements);
}

// [begin, end): from the begin of a block in every array. Elements that fill no step are the last
// block's; that block is summed before and after its update. So are all blocks if there are no
// vectors.
template <UpdateRule kRule, MasterForm kForm>
void UpdateLoopAndSum(const ConstantsOf<kRule>& constants, const LoopArrays& arrays,
                      const BlockSums& out, int64_t begin, int64_t end) {
  constexpr int kStates = StatesOf(kRule);
  constexpr int64_t kBlock = kForm == MasterForm::kSplit ? kLowBlockElements : kBlockElements;
  int64_t i = begin;
#if EBB_VECTOR_OPS
  i = (end - begin) % kSummedStep == 0 ? end : begin + (end - begin) / kBlock * kBlock;
  UpdateVectorsAndSum<kRule, kForm>(constants, arrays, out, begin, i);
#endif
  for (; i < end; i += kBlock) {
    const int64_t block_end = std::min(end, i + kBlock);
    SumArrays<kStates>(arrays, &BlockSums::Read, out, i, block_end);
    UpdateLoop<kRule, kForm, PlainStates>(constants, arrays, nullptr, i, block_end);
    SumArrays<kStates>(arrays, &BlockSums::Written, out, i, block_end);
  }
}

// Elements [begin, end). `sums`: null, or the destination of the sums.
template <UpdateRule kRule, MasterForm kForm>
void UpdateForm(const ConstantsOf<kRule>& constants, const LoopArrays& arrays,
                const BlockSums* sums, int64_t begin, int64_t end) {
  if (sums != nullptr) {
    UpdateLoopAndSum<kRule, kForm>(constants, arrays, *sums, begin, end);
  } else {
    UpdateLoop<kRule, kForm, PlainStates>(constants, arrays, nullptr, begin, end);
  }
}

void UpdateOnTarget(UpdateRule rule, const UpdateConstants& set, const LoopArrays& arrays,
                    const BlockSums* sums, int64_t begin, int64_t end) {
  WithRule(rule, [&]<UpdateRule kRule>() {
    const auto& constants = ConstantsIn<kRule>(set);
    switch (arrays.form()) {
      case MasterForm::kWhole:
        return UpdateForm<kRule, MasterForm::kWhole>(constants, arrays, sums, begin, end);
      case MasterForm::kSplit:
        return UpdateForm<kRule, MasterForm::kSplit>(constants, arrays, sums, begin, end);
      case MasterForm::kParameter:
        return UpdateForm<kRule, MasterForm::kParameter>(constants, arrays, sums, begin, end);
    }
  });
}

}  // namespace ebb::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::optim {

HWY_EXPORT(UpdateOnTarget);

void UpdateRange(UpdateRule rule, const UpdateConstants& constants, const LoopArrays& arrays,
                 const BlockSums* sums, int64_t begin, int64_t end) {
  assert(arrays.form() == MasterForm::kWhole ||
         (arrays.parameter != nullptr && arrays.parameter_dtype == DType::kBFloat16));
  HWY_DYNAMIC_DISPATCH(UpdateOnTarget)(rule, constants, arrays, sums, begin, end);
}

}  // namespace ebb::optim
#endif  // HWY_ONCE
