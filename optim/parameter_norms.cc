#include "ebb/optim/parameter_norms.h"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cmath>

#include "ebb/optim/update_loops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ebb/optim/parameter_norms.cc"
#include "ebb/optim/simd_targets.h"
#include "hwy/foreach_target.h"
// This comes after foreach_target.h, which includes this file again for every target.
#include "ebb/optim/scalar_ops.h"
#include "ebb/optim/simd-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::optim::HWY_NAMESPACE {

#define EBB_ELEMENT HWY_INLINE
#include "ebb/optim/update_element.inc"
#undef EBB_ELEMENT

constexpr int64_t kNormLanes = 32;

struct BlockNorms {
  double parameter, direction;
};

// For elements [i, i + the width of Ops): they are read, and updated in registers only.
template <UpdateRule kRule, class Ops, class Gradient, MasterForm kForm>
HWY_INLINE typename Ops::Number DirectionAt(const ConstantsOf<kRule>& constants,
                                            const LoopArrays& arrays, int64_t i,
                                            typename Ops::Number& master) {
  typename Ops::Number states[kStatesMax] = {};
  for (int s = 0; s < StatesOfNorms(kRule); ++s)
    states[s] = Ops::Load(arrays.states[s].numbers() + i);
  if constexpr (kForm == MasterForm::kSplit) {
    master = Ops::LoadSplit(static_cast<const BFloat16*>(arrays.parameter_in) + i,
                            arrays.master_low + i);
  } else if constexpr (kForm == MasterForm::kParameter) {
    master = Ops::Load(static_cast<const BFloat16*>(arrays.parameter_in) + i);
  } else {
    master = Ops::Load(arrays.master + i);
  }
  return Direction<Ops>(constants, Ops::Load(static_cast<const Gradient*>(arrays.gradient) + i),
                        master, states);
}

inline double AddNormLanes(double (&lanes)[kNormLanes]) {
  for (int64_t width = kNormLanes / 2; width >= 1; width /= 2) {
    for (int64_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  return lanes[0];
}

template <UpdateRule kRule, class Gradient, MasterForm kForm>
BlockNorms NormsOfBlock(const ConstantsOf<kRule>& constants, const LoopArrays& arrays,
                        int64_t begin, int64_t end) {
  double parameter[kNormLanes] = {}, direction[kNormLanes] = {};
  int64_t i = begin;
#if EBB_VECTOR_OPS
  const hn::CappedTag<double, kNormLanes> wide;
  using Vector = VectorOps<hn::Rebind<float, decltype(wide)>>;
  if (end - begin == kExactBlock) {
    static_assert(kExactBlock == 2 * kNormLanes);
    for (int64_t lane = 0; lane < kNormLanes; lane += Vector::kLanes) {
      typename Vector::Number first_master, second_master;
      const auto first =
          DirectionAt<kRule, Vector, Gradient, kForm>(constants, arrays, i + lane, first_master);
      const auto second = DirectionAt<kRule, Vector, Gradient, kForm>(
          constants, arrays, i + kNormLanes + lane, second_master);
      const auto square = [&](const auto& of_first, const auto& of_second, double* to) {
        const auto a = hn::PromoteTo(wide, of_first), b = hn::PromoteTo(wide, of_second);
        // The square of an fp32 number has no rounding in fp64.
        hn::StoreU(hn::MulAdd(b, b, hn::Mul(a, a)), wide, to + lane);
      };
      square(first_master, second_master, parameter);
      square(first, second, direction);
    }
    i = end;
  }
#endif
  for (; i < end; ++i) {
    float master;
    const double u = DirectionAt<kRule, ScalarOps, Gradient, kForm>(constants, arrays, i, master);
    const int64_t lane = (i - begin) % kNormLanes;
    parameter[lane] = std::fma(double{master}, double{master}, parameter[lane]);
    direction[lane] = std::fma(u, u, direction[lane]);
  }
  return {.parameter = AddNormLanes(parameter), .direction = AddNormLanes(direction)};
}

// Blocks [first, last) of the arrays, which begin with a block.
template <UpdateRule kRule, class Gradient, MasterForm kForm>
void NormsOfBlocks(const ConstantsOf<kRule>& shared_constants, const LoopArrays& shared_arrays,
                   int64_t first, int64_t last, NormSums& sums) {
  const ConstantsOf<kRule> constants = shared_constants;
  const LoopArrays arrays = shared_arrays;
  for (int64_t block = first; block < last; ++block) {
    const BlockNorms norms = NormsOfBlock<kRule, Gradient, kForm>(
        constants, arrays, block * kExactBlock, std::min((block + 1) * kExactBlock, arrays.count));
    Add(norms.parameter, sums.parameter);
    Add(norms.direction, sums.direction);
  }
}

template <UpdateRule kRule, class Gradient>
void NormsOfForm(const ConstantsOf<kRule>& constants, const LoopArrays& arrays, int64_t first,
                 int64_t last, NormSums& sums) {
  switch (arrays.form()) {
    case MasterForm::kWhole:
      return NormsOfBlocks<kRule, Gradient, MasterForm::kWhole>(constants, arrays, first, last,
                                                                sums);
    case MasterForm::kSplit:
      return NormsOfBlocks<kRule, Gradient, MasterForm::kSplit>(constants, arrays, first, last,
                                                                sums);
    case MasterForm::kParameter:
      return NormsOfBlocks<kRule, Gradient, MasterForm::kParameter>(constants, arrays, first, last,
                                                                    sums);
  }
}

template <UpdateRule kRule>
void NormsOfRule(const ConstantsOf<kRule>& constants, const LoopArrays& arrays, int64_t first,
                 int64_t last, NormSums& sums) {
  switch (arrays.gradient_dtype) {
    case DType::kFloat32:
      return NormsOfForm<kRule, float>(constants, arrays, first, last, sums);
    case DType::kBFloat16:
      return NormsOfForm<kRule, BFloat16>(constants, arrays, first, last, sums);
    case DType::kFloat16:
      return NormsOfForm<kRule, Float16>(constants, arrays, first, last, sums);
    case DType::kInt8:
      assert(!"gradients are fp32, bf16 or fp16");
  }
}

// LARS takes the same norms with and without momentum.
void RangeNorms(UpdateRule rule, const UpdateConstants& constants, const LoopArrays& arrays,
                int64_t first, int64_t last, NormSums& sums) {
  if (rule == UpdateRule::kLamb)
    return NormsOfRule<UpdateRule::kLamb>(constants.lamb, arrays, first, last, sums);
  NormsOfRule<UpdateRule::kLars>(constants.lars, arrays, first, last, sums);
}

}  // namespace ebb::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::optim {
namespace {

HWY_EXPORT(RangeNorms);

constexpr int64_t kGrainBlocks = 256;  // 16,384 elements

void AddLimbs(const ExactSum& part, ExactSum& sum) {
  for (int i = 0; i < ExactSum::kLimbs; ++i) {
    if (part.limbs[i] == 0) continue;
    std::atomic_ref<uint64_t>(sum.limbs[i]).fetch_add(part.limbs[i], std::memory_order_relaxed);
  }
}

}  // namespace

void SumNorms(ThreadTeam& team, UpdateRule rule, const UpdateArrays& arrays,
              const UpdateConstants& constants, NormSums& sums) {
  assert(TakesNorms(rule));
  assert(arrays.states[0].is_fp32() && arrays.states[1].is_fp32());
  if (!constants.apply) return;
  const LoopArrays in_loops(arrays, constants.step);
  team.Run((arrays.count + kExactBlock - 1) / kExactBlock, kGrainBlocks,
           [&](int64_t first, int64_t last) {
             NormSums part = {};
             HWY_DYNAMIC_DISPATCH(RangeNorms)(rule, constants, in_loops, first, last, part);
             AddLimbs(part.parameter, sums.parameter);
             AddLimbs(part.direction, sums.direction);
           });
}

double TrustRatio(const OptimizerConfig& optimizer, double parameter_squares,
                  double direction_squares) {
  const auto counts = [](double squares) { return squares > 0 && std::isfinite(squares); };
  if (!counts(parameter_squares) || !counts(direction_squares)) return 1;
  const double parameter = std::sqrt(parameter_squares), direction = std::sqrt(direction_squares);
  if (optimizer.type == OptimizerType::kLamb)
    return std::clamp(parameter / direction, optimizer.min_coefficient, optimizer.max_coefficient);
  return optimizer.trust_coefficient * parameter /
         (direction + optimizer.weight_decay * parameter + optimizer.epsilon);
}

}  // namespace ebb::optim
#endif  // HWY_ONCE
