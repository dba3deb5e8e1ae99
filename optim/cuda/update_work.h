// The work of one thread of an update, or of the norms before it: thread_work.h for arrays of
// several runs. Each thread reads the constants of its runs.
#pragma once

#include <cstdint>

#include "ebb/optim/cuda/thread_work.h"
#include "ebb/optim/parameter_norms.h"
#include "ebb/optim/update_runs.h"

namespace ebb::optim::cuda {

#define EBB_ELEMENT EBB_HOST_DEVICE
#include "ebb/optim/update_element.inc"
#undef EBB_ELEMENT

// The run of element `at` of the arrays: the first run that ends after it.
EBB_HOST_DEVICE int64_t RunOf(const UpdateRuns& runs, int64_t at) {
  const UpdateRun* const table = runs.runs.data();
  int64_t run = 0;
  for (auto last = static_cast<int64_t>(runs.runs.size()) - 1; run < last;) {
    const int64_t middle = (run + last) / 2;
    if (table[middle].end - runs.begin > at) {
      last = middle;
    } else {
      run = middle + 1;
    }
  }
  return run;
}

template <UpdateRule kRule, MasterForm kForm>
struct UpdateWork {
  static constexpr bool kWhole = kForm == MasterForm::kWhole, kSplit = kForm == MasterForm::kSplit;
  static constexpr int kMany = 1;  // its arrays alone give enough loads
  static constexpr int kStates = StatesOf(kRule);

  const UpdateArrays& arrays;
  const UpdateRuns& runs;
  RoundingKey key = {};  // for parameters that are the master
  // The thread's present run: elements [begin, end) of the arrays.
  int64_t begin = 0, end = 0;
  ConstantsOf<kRule> constants;

  EBB_HOST_DEVICE UpdateWork(const UpdateArrays& of, const UpdateRuns& with)
      : arrays(of), runs(with) {
    if constexpr (kForm == MasterForm::kParameter)
      key = RoundingKeyOf(arrays.rounding, runs.constants.data()->step);
    if (!runs.runs.empty()) return;
    end = arrays.count;
    Take(*runs.constants.data());
  }

  static Cut CutOf(const UpdateArrays& arrays, const UpdateRuns& runs) {
    static_assert(kRunMultiple % kGroup == 0);
    const int64_t parameter = SizeOf(arrays.parameter_dtype);
    const Cut cut = CutFor(arrays.count, {{kWhole ? arrays.master : nullptr, 4},
                                          {kSplit ? arrays.master_low : nullptr, 2},
                                          {kWhole ? nullptr : arrays.parameter_in, parameter},
                                          {arrays.gradient, SizeOf(arrays.gradient_dtype)},
                                          {kStates > 0 ? arrays.states[0].codes : nullptr, 4},
                                          {kStates > 1 ? arrays.states[1].codes : nullptr, 4},
                                          {kStates > 2 ? arrays.states[2].codes : nullptr, 4},
                                          {arrays.parameter, parameter}});
    // With a head, a group could have elements of two runs.
    return runs.runs.empty() || cut.head == 0 ? cut : Cut{.count = arrays.count};
  }

  template <int kWidth, int>
  EBB_HOST_DEVICE void At(int64_t at, int64_t) {
    if (at < begin || at >= end) Enter(at);
    Packed<kWidth> packed_states[kStatesMax] = {};
    for (int s = 0; s < kStates; ++s)
      packed_states[s] = Load<kWidth>(arrays.states[s].codes, 4, at);
    Packed<kWidth> whole = {}, low = {};
    if constexpr (kWhole) {
      whole = Load<kWidth>(arrays.master, 4, at);
    } else {
      const void* const before =
          arrays.parameter_in == nullptr ? arrays.parameter : arrays.parameter_in;
      whole = Load<kWidth>(before, 2, at);
    }
    if constexpr (kSplit) low = Load<kWidth>(arrays.master_low, 2, at);
    const Packed<kWidth> packed_gradient =
        Load<kWidth>(arrays.gradient, SizeOf(arrays.gradient_dtype), at);

    float gradient[kWidth], master[kWidth], states[kStatesMax][kWidth];
    Unpack(packed_gradient, arrays.gradient_dtype, gradient);
    for (int s = 0; s < kStatesMax; ++s) Unpack(packed_states[s], DType::kFloat32, states[s]);
    if constexpr (kSplit) {
      JoinMasters(whole, low, master);
    } else {
      Unpack(whole, kWhole ? DType::kFloat32 : DType::kBFloat16, master);
    }

    for (int i = 0; i < kWidth; ++i) {
      float element[kStatesMax];
      for (int s = 0; s < kStatesMax; ++s) element[s] = states[s][i];
      UpdateElement<kRule, Ops>(constants, gradient[i], master[i], element);
      for (int s = 0; s < kStates; ++s) states[s][i] = element[s];
      if constexpr (kForm == MasterForm::kParameter) {
        const auto index = static_cast<uint32_t>(arrays.rounding.index + at + i);
        master[i] = RoundStochastically(master[i], RandomBits(key, index));
      }
    }

    for (int s = 0; s < kStates; ++s)
      Store(Pack(states[s], DType::kFloat32, Rounding::kNearest), arrays.states[s].codes, 4, at);
    if constexpr (kSplit) {
      for (int i = 0; i < kWidth; ++i) low.SetHalf(i, LowHalf(master[i]));
      Store(low, arrays.master_low, 2, at);
    }
    if constexpr (!kWhole) {
      Store(Pack(master, DType::kBFloat16, Rounding::kParameter), arrays.parameter, 2, at);
    } else {
      Store(Pack(master, DType::kFloat32, Rounding::kNearest), arrays.master, 4, at);
      if (arrays.parameter != nullptr) {
        Store(Pack(master, arrays.parameter_dtype, Rounding::kParameter), arrays.parameter,
              SizeOf(arrays.parameter_dtype), at);
      }
    }
  }

 private:
  EBB_HOST_DEVICE void Take(const UpdateConstants& set) { constants = ConstantsIn<kRule>(set); }

  EBB_HOST_DEVICE void Enter(int64_t at) {
    const UpdateRun* const table = runs.runs.data();
    const int64_t run = RunOf(runs, at);
    begin = run == 0 ? 0 : table[run - 1].end - runs.begin;
    end = table[run].end - runs.begin;
    Take(runs.constants.data()[table[run].set]);
  }
};

// A warp sums a block of parameter_norms.h; lane `lane` has two of its elements.
template <UpdateRule kRule, MasterForm kForm>
struct NormWork {
  static constexpr int kLanes = 32;
  static_assert(kExactBlock == 2 * kLanes);

  const UpdateArrays& arrays;
  const UpdateRuns& runs;
  // The block's run: blocks up to `end` of the arrays.
  int64_t end = 0, set = 0;
  ConstantsOf<kRule> constants;

  EBB_HOST_DEVICE NormWork(const UpdateArrays& of, const UpdateRuns& with, int64_t first_block)
      : arrays(of), runs(with) {
    Enter(first_block);
  }

  // Whether a later block is in the same run.
  EBB_HOST_DEVICE bool Has(int64_t block) const { return block * kExactBlock < end; }
  EBB_HOST_DEVICE void Enter(int64_t block) {
    if (runs.runs.empty()) {
      end = arrays.count;
    } else {
      const UpdateRun& run = runs.runs.data()[RunOf(runs, block * kExactBlock)];
      end = run.end - runs.begin;
      set = run.set;
    }
    constants = ConstantsIn<kRule>(runs.constants.data()[set]);
  }

  EBB_HOST_DEVICE void Lane(int64_t block, int lane, double& parameter, double& direction) const {
    parameter = direction = 0;
    for (int64_t at = block * kExactBlock + lane; at < (block + 1) * kExactBlock; at += kLanes) {
      if (at >= arrays.count) return;
      float master[1], gradient[1], states[kStatesMax] = {};
      for (int s = 0; s < StatesOfNorms(kRule); ++s)
        states[s] = static_cast<const float*>(arrays.states[s].codes)[at];
      if constexpr (kForm == MasterForm::kWhole) {
        master[0] = arrays.master[at];
      } else {
        const void* const before =
            arrays.parameter_in == nullptr ? arrays.parameter : arrays.parameter_in;
        const Packed<1> packed = Load<1>(before, 2, at);
        if constexpr (kForm == MasterForm::kSplit) {
          JoinMasters(packed, Load<1>(arrays.master_low, 2, at), master);
        } else {
          Unpack(packed, DType::kBFloat16, master);
        }
      }
      Unpack(Load<1>(arrays.gradient, SizeOf(arrays.gradient_dtype), at), arrays.gradient_dtype,
             gradient);
      const double u = Direction<Ops>(constants, gradient[0], master[0], states);
      parameter = AddSquare(parameter, double{master[0]});
      direction = AddSquare(direction, u);
    }
  }
};

}  // namespace ebb::optim::cuda
