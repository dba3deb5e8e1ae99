// The passes of update.h over elements, once for every SIMD target and for every rule that a file
// beside this one instantiates. Included after hwy/foreach_target.h.

// clang-format off
#if defined(EBB_OPTIM_UPDATE_LOOPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EBB_OPTIM_UPDATE_LOOPS_INL_H_
#undef EBB_OPTIM_UPDATE_LOOPS_INL_H_
#else
#define EBB_OPTIM_UPDATE_LOOPS_INL_H_
#endif
// clang-format on

#include <algorithm>
#include <cassert>
#include <type_traits>

#include "ebb/optim/checksum-inl.h"
#include "ebb/optim/scalar_ops.h"
#include "ebb/optim/simd-inl.h"
#include "ebb/optim/update_loops.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::optim::HWY_NAMESPACE {

#define EBB_ELEMENT HWY_INLINE
#include "ebb/optim/update_element.inc"
#undef EBB_ELEMENT

// Types in place of the parameter's type: there is no parameter, it is half of the master, or it is
// the master.
struct NoParameter {};
struct SplitMaster {};
struct OwnMaster {};

template <class Parameter>
inline constexpr MasterForm kFormOf =
    std::is_same_v<Parameter, SplitMaster> ? MasterForm::kSplit
    : std::is_same_v<Parameter, OwnMaster> ? MasterForm::kParameter
                                           : MasterForm::kWhole;
template <class Parameter>
using ElementOf = std::conditional_t<kFormOf<Parameter> == MasterForm::kWhole, Parameter, BFloat16>;

// Sees the numbers that an update reads and writes; this one does nothing.
struct NoSums {
  template <class Number>
  HWY_INLINE void Read(int, int64_t, const Number&) {}
  template <class Number>
  HWY_INLINE void Write(int, int64_t, const Number&) {}
  HWY_INLINE void ReadLow(int64_t, const uint16_t*) {}
  template <class Number>
  HWY_INLINE void WriteLow(int64_t, const Number&) {}
};

// Updates elements [i, i + the width of Ops) except for the parameter, and returns the new master.
// `sums` sees them as vector v of a stripe.
template <UpdateRule kRule, class Ops, class Gradient, class Parameter, class Sums>
HWY_INLINE typename Ops::Number UpdateAt(const ConstantsOf<kRule>& constants,
                                         const LoopArrays& arrays, int64_t i, int64_t v,
                                         Sums& sums) {
  constexpr int kStates = StatesOf(kRule);
  constexpr MasterForm kForm = kFormOf<Parameter>;
  typename Ops::Number states[kStatesMax] = {};
  for (int s = 0; s < kStates; ++s) {
    states[s] = Ops::Load(arrays.states[s] + i);
    sums.Read(1 + s, v, states[s]);
  }
  typename Ops::Number master{};
  if constexpr (kForm == MasterForm::kSplit) {
    master = Ops::LoadSplit(static_cast<const BFloat16*>(arrays.parameter_in) + i,
                            arrays.master_low + i);
    sums.ReadLow(v, arrays.master_low + i);
  } else if constexpr (kForm == MasterForm::kParameter) {
    master = Ops::Load(static_cast<const BFloat16*>(arrays.parameter_in) + i);
  } else {
    master = Ops::Load(arrays.master + i);
    sums.Read(0, v, master);
  }
  UpdateElement<kRule, Ops>(constants, Ops::Load(static_cast<const Gradient*>(arrays.gradient) + i),
                            master, states);
  if constexpr (kForm == MasterForm::kSplit) {
    Ops::StoreLow(master, arrays.master_low + i);
    sums.WriteLow(v, master);
  } else if constexpr (kForm == MasterForm::kParameter) {
    master =
        Ops::RoundAtRandom(master, arrays.key, static_cast<uint32_t>(arrays.rounding.index + i));
  } else {
    Ops::template Store<Rounding::kNearest>(master, arrays.master + i);
    sums.Write(0, v, master);
  }
  for (int s = 0; s < kStates; ++s) {
    sums.Write(1 + s, v, states[s]);
    Ops::template Store<Rounding::kNearest>(states[s], arrays.states[s] + i);
  }
  return master;
}

template <UpdateRule kRule, class Gradient, class Parameter>
void UpdateLoop(const ConstantsOf<kRule>& shared_constants, const LoopArrays& shared_arrays,
                int64_t begin, int64_t end) {
  // Copies that no store below can alias, so that they stay in registers.
  const ConstantsOf<kRule> constants = shared_constants;
  const LoopArrays arrays = shared_arrays;
  using Element = ElementOf<Parameter>;
  Element* const parameter = static_cast<Element*>(arrays.parameter);
  int64_t i = begin;
  NoSums none;
#if EBB_VECTOR_OPS
  using Vector = VectorOps<hn::ScalableTag<float>>;
  if constexpr (sizeof(Element) == 2) {
    if (arrays.count >= kStreamedCount && reinterpret_cast<uintptr_t>(parameter + i) % 64 == 0 &&
        !(kFormOf<Parameter> != MasterForm::kWhole && arrays.parameter_in == arrays.parameter)) {
      for (; i + 2 * Vector::kLanes <= end; i += 2 * Vector::kLanes) {
        const auto first =
            UpdateAt<kRule, Vector, Gradient, Parameter>(constants, arrays, i, 0, none);
        const auto second = UpdateAt<kRule, Vector, Gradient, Parameter>(
            constants, arrays, i + Vector::kLanes, 0, none);
        Vector::template StreamPair<Rounding::kParameter>(first, second, parameter + i);
      }
      hwy::FlushStream();
    }
  }
  for (; i + Vector::kLanes <= end; i += Vector::kLanes) {
    const auto master = UpdateAt<kRule, Vector, Gradient, Parameter>(constants, arrays, i, 0, none);
    if constexpr (!std::is_same_v<Parameter, NoParameter>) {
      Vector::template Store<Rounding::kParameter>(master, parameter + i);
    }
  }
#endif
  for (; i < end; ++i) {
    const float master =
        UpdateAt<kRule, ScalarOps, Gradient, Parameter>(constants, arrays, i, 0, none);
    if constexpr (!std::is_same_v<Parameter, NoParameter>) {
      ScalarOps::Store<Rounding::kParameter>(master, parameter + i);
    }
  }
}

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

// With the sums a processor sees fewer elements at once. It would load their data so late that one
// thread no longer reads at full speed. So data are prefetched, this many elements ahead, as
// measured on a Zen 4; more is slower where an element has more lines. Nothing is read past an
// array's end.
template <MasterForm kForm>
inline constexpr int64_t kFetchAhead = kForm == MasterForm::kWhole ? 48 : 80;

template <class T>
HWY_INLINE void FetchStripes(const T* from) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < kLowStripe; i += kLine) hwy::Prefetch(from + i);
}

// Prefetches the inputs of the kLowStripe elements from `at` on.
template <int kStates, class Gradient, MasterForm kForm>
HWY_INLINE void Fetch(const LoopArrays& arrays, int64_t at) {
  for (int s = 0; s < kStates; ++s) FetchStripes(arrays.states[s] + at);
  if constexpr (kForm == MasterForm::kWhole) {
    FetchStripes(arrays.master + at);
  } else {
    FetchStripes(static_cast<const BFloat16*>(arrays.parameter_in) + at);
  }
  if constexpr (kForm == MasterForm::kSplit) FetchStripes(arrays.master_low + at);
  FetchStripes(static_cast<const Gradient*>(arrays.gradient) + at);
}

template <UpdateRule kRule, class Gradient, class Parameter, bool kStreams>
void UpdateVectorsAndSum(const ConstantsOf<kRule>& shared_constants,
                         const LoopArrays& shared_arrays, const BlockSums& out, int64_t begin,
                         int64_t end) {
  using Vector = VectorOps<hn::ScalableTag<float>>;
  const ConstantsOf<kRule> constants = shared_constants;
  const LoopArrays arrays = shared_arrays;
  constexpr int kStates = StatesOf(kRule);
  constexpr MasterForm kForm = kFormOf<Parameter>;
  using Element = ElementOf<Parameter>;
  Element* const parameter = static_cast<Element*>(arrays.parameter);
  constexpr int64_t kScramble = checksum::kStripesPerScramble * checksum::kStripe / 4;
  static_assert(kSummedStep == 2 * kScramble);
  VectorSums<kStates, kForm> sums;
  for (int64_t block = begin; block < end; block += kBlockElements) {
    const int64_t block_end = std::min(end, block + kBlockElements);
    for (int64_t step = block; step < block_end; step += kSummedStep) {
      // A local copy stays in registers until the step is done; `sums` would be stored at every
      // stripe.
      VectorSums<kStates, kForm> lanes = sums;
      for (int64_t part = step; part < step + kSummedStep; part += kScramble) {
        for (int64_t i = part; i < part + kScramble; i += kLowStripe) {
          Fetch<kStates, Gradient, kForm>(arrays, i + kFetchAhead<kForm>);
          for (int64_t v = 0; v < kLowStripe / Vector::kLanes; v += 2) {
            const int64_t at = i + v * Vector::kLanes;
            const auto first =
                UpdateAt<kRule, Vector, Gradient, Parameter>(constants, arrays, at, v, lanes);
            const auto second = UpdateAt<kRule, Vector, Gradient, Parameter>(
                constants, arrays, at + Vector::kLanes, v + 1, lanes);
            if constexpr (kStreams) {
              Vector::template StreamPair<Rounding::kParameter>(first, second, parameter + at);
            } else if constexpr (!std::is_same_v<Parameter, NoParameter>) {
              Vector::template Store<Rounding::kParameter>(first, parameter + at);
              Vector::template Store<Rounding::kParameter>(second, parameter + at + Vector::kLanes);
            }
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
  if constexpr (kStreams) hwy::FlushStream();
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
  for (int s = 0; s < kStates; ++s) sum(1 + s, arrays.states[s], kBlockElements);
}

// [begin, end): from the begin of a block in every array. Elements that fill no step are the last
// block's; that block is summed before and after its update. So are all blocks if there are no
// vectors.
template <UpdateRule kRule, class Gradient, class Parameter>
void UpdateLoopAndSum(const ConstantsOf<kRule>& constants, const LoopArrays& arrays,
                      const BlockSums& out, int64_t begin, int64_t end) {
  constexpr int kStates = StatesOf(kRule);
  constexpr MasterForm kForm = kFormOf<Parameter>;
  constexpr int64_t kBlock = kForm == MasterForm::kSplit ? kLowBlockElements : kBlockElements;
  int64_t i = begin;
#if EBB_VECTOR_OPS
  using Element = ElementOf<Parameter>;
  const int64_t summed =
      (end - begin) % kSummedStep == 0 ? end : begin + (end - begin) / kBlock * kBlock;
  bool streams = false;
  if constexpr (sizeof(Element) == 2) {
    streams = arrays.count >= kStreamedCount &&
              reinterpret_cast<uintptr_t>(static_cast<Element*>(arrays.parameter) + i) % 64 == 0 &&
              !(kForm != MasterForm::kWhole && arrays.parameter_in == arrays.parameter);
    if (streams) {
      UpdateVectorsAndSum<kRule, Gradient, Parameter, true>(constants, arrays, out, i, summed);
    }
  }
  if (!streams) {
    UpdateVectorsAndSum<kRule, Gradient, Parameter, false>(constants, arrays, out, i, summed);
  }
  i = summed;
#endif
  for (; i < end; i += kBlock) {
    const int64_t block_end = std::min(end, i + kBlock);
    SumArrays<kStates>(arrays, &BlockSums::Read, out, i, block_end);
    UpdateLoop<kRule, Gradient, Parameter>(constants, arrays, i, block_end);
    SumArrays<kStates>(arrays, &BlockSums::Written, out, i, block_end);
  }
}

// Elements [begin, end). `sums`: null, or the destination of the sums.
template <UpdateRule kRule, class Gradient, class Parameter>
void UpdatePart(const ConstantsOf<kRule>& constants, const LoopArrays& arrays,
                const BlockSums* sums, int64_t begin, int64_t end) {
  if (sums != nullptr) {
    UpdateLoopAndSum<kRule, Gradient, Parameter>(constants, arrays, *sums, begin, end);
  } else {
    UpdateLoop<kRule, Gradient, Parameter>(constants, arrays, begin, end);
  }
}

template <UpdateRule kRule, class Gradient>
void UpdateForParameter(const ConstantsOf<kRule>& constants, const LoopArrays& arrays,
                        const BlockSums* sums, int64_t begin, int64_t end) {
  if (arrays.form() != MasterForm::kWhole) {
    assert(arrays.parameter != nullptr && arrays.parameter_dtype == DType::kBFloat16);
    return arrays.form() == MasterForm::kSplit
               ? UpdatePart<kRule, Gradient, SplitMaster>(constants, arrays, sums, begin, end)
               : UpdatePart<kRule, Gradient, OwnMaster>(constants, arrays, sums, begin, end);
  }
  if (arrays.parameter == nullptr) {
    return UpdatePart<kRule, Gradient, NoParameter>(constants, arrays, sums, begin, end);
  }
  switch (arrays.parameter_dtype) {
    case DType::kFloat32:
      return UpdatePart<kRule, Gradient, float>(constants, arrays, sums, begin, end);
    case DType::kBFloat16:
      return UpdatePart<kRule, Gradient, BFloat16>(constants, arrays, sums, begin, end);
    case DType::kFloat16:
      return UpdatePart<kRule, Gradient, Float16>(constants, arrays, sums, begin, end);
    case DType::kInt8:
      assert(!"parameters are fp32, bf16 or fp16");
  }
}

template <UpdateRule kRule>
void UpdateRange(const ConstantsOf<kRule>& constants, const LoopArrays& arrays,
                 const BlockSums* sums, int64_t begin, int64_t end) {
  switch (arrays.gradient_dtype) {
    case DType::kFloat32:
      return UpdateForParameter<kRule, float>(constants, arrays, sums, begin, end);
    case DType::kBFloat16:
      return UpdateForParameter<kRule, BFloat16>(constants, arrays, sums, begin, end);
    case DType::kFloat16:
      return UpdateForParameter<kRule, Float16>(constants, arrays, sums, begin, end);
    case DType::kInt8:
      assert(!"gradients are fp32, bf16 or fp16");
  }
}

}  // namespace ebb::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // EBB_OPTIM_UPDATE_LOOPS_INL_H_
