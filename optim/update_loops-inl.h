// The update of one vector of elements, or of two, once for every SIMD target: what the loops of
// update_loops.cc and encoded_update.cc share. Included after hwy/foreach_target.h.

// clang-format off
#if defined(EBB_OPTIM_UPDATE_LOOPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EBB_OPTIM_UPDATE_LOOPS_INL_H_
#undef EBB_OPTIM_UPDATE_LOOPS_INL_H_
#else
#define EBB_OPTIM_UPDATE_LOOPS_INL_H_
#endif
// clang-format on

#include <cstdint>

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

// The loops below are compiled for every rule and form of the master, but not for every pair of
// dtypes, which would take the compiler minutes. They check the dtypes of gradient and parameter at
// every two vectors, which costs less than 1 ns.
//
// Calls load(gradient) with the gradient's type.
template <class Load>
HWY_INLINE void WithGradient(const LoopArrays& arrays, const Load& load) {
  if (arrays.gradient_dtype == DType::kBFloat16)
    return load(static_cast<const BFloat16*>(arrays.gradient));
  if (arrays.gradient_dtype == DType::kFloat16)
    return load(static_cast<const Float16*>(arrays.gradient));
  load(static_cast<const float*>(arrays.gradient));
}

// Calls store(parameter) with the parameter's type, unless the master is the parameter.
template <MasterForm kForm, class Store>
HWY_INLINE void WithParameter(const LoopArrays& arrays, const Store& store) {
  if (kForm != MasterForm::kWhole || arrays.parameter_dtype == DType::kBFloat16)
    return store(static_cast<BFloat16*>(arrays.parameter));
  if (arrays.parameter_dtype == DType::kFloat16)
    return store(static_cast<Float16*>(arrays.parameter));
  if (arrays.parameter != nullptr) store(static_cast<float*>(arrays.parameter));
}

// An empty visitor of the numbers that an update reads and writes.
struct NoSums {
  template <class Number>
  HWY_INLINE void Read(int, int64_t, const Number&) {}
  template <class Number>
  HWY_INLINE void Write(int, int64_t, const Number&) {}
  HWY_INLINE void ReadLow(int64_t, const uint16_t*) {}
  template <class Number>
  HWY_INLINE void WriteLow(int64_t, const Number&) {}
};

// States that the arrays have as fp32 numbers.
struct PlainStates {
  static constexpr int64_t kFetchAhead = 0;
  const LoopArrays& arrays;
  const RoundingKey* keys = nullptr;
  template <class Ops>
  HWY_INLINE typename Ops::Number Load(int s, int64_t i) const {
    return Ops::Load(arrays.states[s].numbers() + i);
  }
  template <class Ops>
  HWY_INLINE void Store(int s, int64_t i, typename Ops::Number number) const {
    Ops::template Store<Rounding::kNearest>(number, arrays.states[s].numbers() + i);
  }
};

// Updates elements [i, i + the width of Ops) except for the parameter, and returns the new master.
// `sums` sees them as vector v of a stripe.
template <UpdateRule kRule, class Ops, MasterForm kForm, class Sums, class States>
HWY_INLINE typename Ops::Number UpdateAt(const ConstantsOf<kRule>& constants,
                                         const LoopArrays& arrays, typename Ops::Number gradient,
                                         int64_t i, int64_t v, Sums& sums, States&& kept) {
  constexpr int kStates = StatesOf(kRule);
  typename Ops::Number states[kStatesMax] = {};
  for (int s = 0; s < kStates; ++s) {
    states[s] = kept.template Load<Ops>(s, i);
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
  UpdateElement<kRule, Ops>(constants, gradient, master, states);
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
    kept.template Store<Ops>(s, i, states[s]);
  }
  return master;
}

#if EBB_VECTOR_OPS

// Whether the parameters from `begin` on are written past the caches.
inline bool Streams(const LoopArrays& arrays, int64_t begin) {
  if (arrays.parameter_dtype == DType::kFloat32 || arrays.count < kStreamedCount) return false;
  if (arrays.form() != MasterForm::kWhole && arrays.parameter_in == arrays.parameter) return false;
  return reinterpret_cast<uintptr_t>(static_cast<BFloat16*>(arrays.parameter) + begin) % 64 == 0;
}

// Updates two vectors of elements, from i on.
template <UpdateRule kRule, MasterForm kForm, class Sums, class States>
HWY_INLINE void UpdatePairAt(const ConstantsOf<kRule>& constants, const LoopArrays& arrays,
                             bool streams, int64_t i, int64_t v, Sums& sums, States&& kept) {
  using Vector = VectorOps<hn::ScalableTag<float>>;
  typename Vector::Number first{}, second{};
  WithGradient(arrays, [&](const auto* gradient) HWY_ATTR {
    first = Vector::Load(gradient + i);
    second = Vector::Load(gradient + i + Vector::kLanes);
  });
  first = UpdateAt<kRule, Vector, kForm>(constants, arrays, first, i, v, sums, kept);
  second = UpdateAt<kRule, Vector, kForm>(constants, arrays, second, i + Vector::kLanes, v + 1,
                                          sums, kept);
  WithParameter<kForm>(arrays, [&](auto* parameter) HWY_ATTR {
    if constexpr (sizeof(*parameter) == 2) {
      if (streams)
        return Vector::template StreamPair<Rounding::kParameter>(first, second, parameter + i);
    }
    Vector::template Store<Rounding::kParameter>(first, parameter + i);
    Vector::template Store<Rounding::kParameter>(second, parameter + i + Vector::kLanes);
  });
}

// Prefetches the lines of kElements elements.
template <int64_t kElements, class T>
HWY_INLINE void FetchLines(const T* from) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < kElements; i += kLine) hwy::Prefetch(from + i);
}

// Prefetches the inputs, but for states, of the kElements elements from `at` on.
template <int64_t kElements, MasterForm kForm>
HWY_INLINE void Fetch(const LoopArrays& arrays, int64_t at) {
  if constexpr (kForm == MasterForm::kWhole) {
    FetchLines<kElements>(arrays.master + at);
  } else {
    FetchLines<kElements>(static_cast<const BFloat16*>(arrays.parameter_in) + at);
  }
  if constexpr (kForm == MasterForm::kSplit) FetchLines<kElements>(arrays.master_low + at);
  if (arrays.gradient_dtype == DType::kFloat32) {
    FetchLines<kElements>(static_cast<const float*>(arrays.gradient) + at);
  } else {
    FetchLines<kElements>(static_cast<const BFloat16*>(arrays.gradient) + at);
  }
}

#endif

// Elements [begin, end). `keys`: of the states' random bits, for States that use them.
template <UpdateRule kRule, MasterForm kForm, class States>
void UpdateLoop(const ConstantsOf<kRule>& shared_constants, const LoopArrays& shared_arrays,
                const RoundingKey* keys, int64_t begin, int64_t end) {
  // Copies that no store below can alias, so that they stay in registers.
  const ConstantsOf<kRule> constants = shared_constants;
  const LoopArrays arrays = shared_arrays;
  const States kept{arrays, keys};
  int64_t i = begin;
  NoSums none;
#if EBB_VECTOR_OPS
  constexpr int64_t kPair = 2 * VectorOps<hn::ScalableTag<float>>::kLanes;
  const bool streams = Streams(shared_arrays, begin);
  for (; i + kPair <= end; i += kPair) {
    if constexpr (States::kFetchAhead > 0) {
      Fetch<kPair, kForm>(arrays, i + States::kFetchAhead);
      kept.template Fetch<kPair, StatesOf(kRule)>(i + States::kFetchAhead);
    }
    UpdatePairAt<kRule, kForm>(constants, arrays, streams, i, 0, none, kept);
  }
  if (streams) hwy::FlushStream();
#endif
  for (; i < end; ++i) {
    float number = 0;
    WithGradient(arrays,
                 [&](const auto* gradient) HWY_ATTR { number = ScalarOps::Load(gradient + i); });
    number = UpdateAt<kRule, ScalarOps, kForm>(constants, arrays, number, i, 0, none, kept);
    WithParameter<kForm>(arrays, [&](auto* parameter) HWY_ATTR {
      ScalarOps::Store<Rounding::kParameter>(number, parameter + i);
    });
  }
}

}  // namespace ebb::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // EBB_OPTIM_UPDATE_LOOPS_INL_H_
