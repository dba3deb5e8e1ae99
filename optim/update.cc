#include "ebb/optim/update.h"

#include <array>
#include <cassert>
#include <type_traits>

#include "ebb/optim/cast.h"
#include "ebb/optim/scalar_ops.h"
#include "ebb/optim/simd_targets.h"
#include "ebb/optim/update_constants.h"

#ifndef EBB_OPTIM_UPDATE_CONSTANTS_
#define EBB_OPTIM_UPDATE_CONSTANTS_
namespace ebb::optim {

// From this many elements on the caches have lost the first parameters when the last are written,
// so 16-bit ones that are written only go past them: lines that are written whole are then not read
// first, 2 bytes less of traffic per element.
constexpr int64_t kStreamedCount = int64_t{1} << 20;

}  // namespace ebb::optim
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ebb/optim/update.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file again for every target.
#include "ebb/optim/simd-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::optim::HWY_NAMESPACE {

#define EBB_ELEMENT HWY_INLINE
#include "ebb/optim/update_element.inc"
#undef EBB_ELEMENT

// What stands for the parameter's type: where there is none, and where it is half of the master.
struct NoParameter {};
struct SplitMaster {};

// Elements [i, i + the width of Ops), but for the parameter; the new master.
template <class Ops, int kStates, class Constants, class Gradient, class Parameter>
HWY_INLINE typename Ops::Number UpdateAt(const Constants& constants, const UpdateArrays& arrays,
                                         int64_t i) {
  constexpr bool kSplit = std::is_same_v<Parameter, SplitMaster>;
  typename Ops::Number states[kStatesMax] = {};
  for (int s = 0; s < kStates; ++s) states[s] = Ops::Load(arrays.states[s] + i);
  typename Ops::Number master{};
  if constexpr (kSplit) {
    master = Ops::LoadSplit(static_cast<const BFloat16*>(arrays.parameter_in) + i,
                            arrays.master_low + i);
  } else {
    master = Ops::Load(arrays.master + i);
  }
  UpdateElement<Ops>(constants, Ops::Load(static_cast<const Gradient*>(arrays.gradient) + i),
                     master, states);
  if constexpr (kSplit) {
    Ops::StoreLow(master, arrays.master_low + i);
  } else {
    Ops::template Store<Rounding::kNearest>(master, arrays.master + i);
  }
  for (int s = 0; s < kStates; ++s) {
    Ops::template Store<Rounding::kNearest>(states[s], arrays.states[s] + i);
  }
  return master;
}

template <int kStates, class Constants, class Gradient, class Parameter>
void UpdateLoop(const Constants& shared_constants, const UpdateArrays& shared_arrays, int64_t begin,
                int64_t end) {
  // Copies that no store below can alias, so that they stay in registers.
  const Constants constants = shared_constants;
  UpdateArrays arrays = shared_arrays;
  if (arrays.parameter_in == nullptr) arrays.parameter_in = arrays.parameter;
  constexpr bool kSplit = std::is_same_v<Parameter, SplitMaster>;
  using Element = std::conditional_t<kSplit, BFloat16, Parameter>;
  Element* const parameter = static_cast<Element*>(arrays.parameter);
  int64_t i = begin;
#if EBB_VECTOR_OPS
  using Vector = VectorOps<hn::ScalableTag<float>>;
  if constexpr (sizeof(Element) == 2) {
    if (arrays.count >= kStreamedCount && reinterpret_cast<uintptr_t>(parameter + i) % 64 == 0 &&
        !(kSplit && arrays.parameter_in == arrays.parameter)) {
      for (; i + 2 * Vector::kLanes <= end; i += 2 * Vector::kLanes) {
        const auto first =
            UpdateAt<Vector, kStates, Constants, Gradient, Parameter>(constants, arrays, i);
        const auto second = UpdateAt<Vector, kStates, Constants, Gradient, Parameter>(
            constants, arrays, i + Vector::kLanes);
        Vector::template StreamPair<Rounding::kParameter>(first, second, parameter + i);
      }
      hwy::FlushStream();
    }
  }
  for (; i + Vector::kLanes <= end; i += Vector::kLanes) {
    const auto master =
        UpdateAt<Vector, kStates, Constants, Gradient, Parameter>(constants, arrays, i);
    if constexpr (!std::is_same_v<Parameter, NoParameter>) {
      Vector::template Store<Rounding::kParameter>(master, parameter + i);
    }
  }
#endif
  for (; i < end; ++i) {
    const float master =
        UpdateAt<ScalarOps, kStates, Constants, Gradient, Parameter>(constants, arrays, i);
    if constexpr (!std::is_same_v<Parameter, NoParameter>) {
      ScalarOps::Store<Rounding::kParameter>(master, parameter + i);
    }
  }
}

template <int kStates, class Constants, class Gradient>
void UpdateForParameter(const Constants& constants, const UpdateArrays& arrays, int64_t begin,
                        int64_t end) {
  if (arrays.master_low != nullptr) {
    assert(arrays.parameter != nullptr && arrays.parameter_dtype == DType::kBFloat16);
    return UpdateLoop<kStates, Constants, Gradient, SplitMaster>(constants, arrays, begin, end);
  }
  if (arrays.parameter == nullptr) {
    return UpdateLoop<kStates, Constants, Gradient, NoParameter>(constants, arrays, begin, end);
  }
  switch (arrays.parameter_dtype) {
    case DType::kFloat32:
      return UpdateLoop<kStates, Constants, Gradient, float>(constants, arrays, begin, end);
    case DType::kBFloat16:
      return UpdateLoop<kStates, Constants, Gradient, BFloat16>(constants, arrays, begin, end);
    case DType::kFloat16:
      return UpdateLoop<kStates, Constants, Gradient, Float16>(constants, arrays, begin, end);
    case DType::kInt8:
      assert(!"parameters are fp32, bf16 or fp16");
  }
}

template <int kStates, class Constants>
void UpdateRange(const Constants& constants, const UpdateArrays& arrays, int64_t begin,
                 int64_t end) {
  switch (arrays.gradient_dtype) {
    case DType::kFloat32:
      return UpdateForParameter<kStates, Constants, float>(constants, arrays, begin, end);
    case DType::kBFloat16:
      return UpdateForParameter<kStates, Constants, BFloat16>(constants, arrays, begin, end);
    case DType::kFloat16:
      return UpdateForParameter<kStates, Constants, Float16>(constants, arrays, begin, end);
    case DType::kInt8:
      assert(!"gradients are fp32, bf16 or fp16");
  }
}

void Adam(const AdamConstants& constants, const UpdateArrays& arrays, int64_t begin, int64_t end) {
  UpdateRange<2>(constants, arrays, begin, end);
}
void Sgd(const SgdConstants& constants, const UpdateArrays& arrays, int64_t begin, int64_t end) {
  UpdateRange<0>(constants, arrays, begin, end);
}
void SgdWithMomentum(const SgdConstants& constants, const UpdateArrays& arrays, int64_t begin,
                     int64_t end) {
  UpdateRange<1>(constants, arrays, begin, end);
}

}  // namespace ebb::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::optim {
namespace {

HWY_EXPORT(Adam);
HWY_EXPORT(Sgd);
HWY_EXPORT(SgdWithMomentum);

// Elements that are worth waking a thread for: half a megabyte of Adam's traffic. Also a multiple
// of every vector, which keeps aligned arrays aligned in every part.
constexpr int64_t kGrain = 16 * 1024;

constexpr std::array<std::string_view, 2> kAdamStates = {"exp_avg", "exp_avg_sq"};
constexpr std::array<std::string_view, 1> kMomentumState = {"momentum_buffer"};

}  // namespace

std::span<const std::string_view> StateNames(const OptimizerConfig& optimizer) {
  if (optimizer.type != OptimizerType::kSgd) return kAdamStates;
  if (optimizer.momentum != 0) return kMomentumState;
  return {};
}

void Update(ThreadTeam& team, const OptimizerConfig& optimizer, const UpdateArrays& arrays,
            const UpdateScalars& scalars) {
  if (optimizer.type != OptimizerType::kSgd) {
    const AdamConstants constants = AdamConstantsOf(optimizer, scalars);
    team.Run(arrays.count, kGrain, [&](int64_t begin, int64_t end) {
      HWY_DYNAMIC_DISPATCH(Adam)(constants, arrays, begin, end);
    });
    return;
  }
  const SgdConstants constants = SgdConstantsOf(optimizer, scalars);
  team.Run(arrays.count, kGrain, [&](int64_t begin, int64_t end) {
    if (constants.momentum != 0) {
      HWY_DYNAMIC_DISPATCH(SgdWithMomentum)(constants, arrays, begin, end);
    } else {
      HWY_DYNAMIC_DISPATCH(Sgd)(constants, arrays, begin, end);
    }
  });
}

}  // namespace ebb::optim
#endif  // HWY_ONCE
