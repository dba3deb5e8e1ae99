// The work of one thread of an update, or of the norms before it: thread_work.h for arrays of
// several runs. Each thread reads the constants of its runs.
#pragma once

#include <bit>
#include <cstdint>

#include "ebb/optim/block_codes.h"
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
                                          StateOf(arrays, 0),
                                          StateOf(arrays, 1),
                                          StateOf(arrays, 2),
                                          {arrays.parameter, parameter}});
    // With a head, a group could have elements of two runs.
    return runs.runs.empty() || cut.head == 0 ? cut : Cut{.count = arrays.count};
  }

  template <int kWidth, int>
  EBB_HOST_DEVICE void At(int64_t at, int64_t) {
    float states[kStatesMax][kWidth] = {};
    for (int s = 0; s < kStates; ++s)
      Unpack(Load<kWidth>(arrays.states[s].codes, 4, at), DType::kFloat32, states[s]);
    Update(at, states);
    for (int s = 0; s < kStates; ++s) {
      Store(Pack(states[s], DType::kFloat32, Rounding::kNearest), arrays.states[s].codes, 4, at);
    }
  }

  // Elements [at, at + kWidth), which are in one run, but for the memory of their states.
  template <int kWidth>
  EBB_HOST_DEVICE void Update(int64_t at, float (&states)[kStatesMax][kWidth]) {
    if (at < begin || at >= end) Enter(at);
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

    float gradient[kWidth], master[kWidth];
    Unpack(packed_gradient, arrays.gradient_dtype, gradient);
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
  static Array StateOf(const UpdateArrays& arrays, int s) {
    if (s >= kStates) return {};
    return {arrays.states[s].codes, arrays.states[s].encoding.code_bytes()};
  }
  EBB_HOST_DEVICE void Take(const UpdateConstants& set) { constants = ConstantsIn<kRule>(set); }

  EBB_HOST_DEVICE void Enter(int64_t at) {
    const UpdateRun* const table = runs.runs.data();
    const int64_t run = RunOf(runs, at);
    begin = run == 0 ? 0 : table[run - 1].end - runs.begin;
    end = table[run].end - runs.begin;
    Take(runs.constants.data()[table[run].set]);
  }
};

// A dynamic map (block_codes.h), wherever its tables are.
struct MapTables {
  const float* numbers;
  const uint32_t* steps;
  int32_t negative;
};

// A warp updates a block of kScaleBlock elements with states of any encoding. Lane `lane` has two
// groups of four, so that neighbouring lanes take neighbouring groups. Between Update and Encode the
// lanes find the extremes of the whole block.
template <UpdateRule kRule, MasterForm kForm>
struct EncodedUpdateWork {
  static constexpr int kLanes = 32, kGroups = kScaleBlock / (kLanes * kGroup);
  static_assert(kScaleBlock == kLanes * kGroups * kGroup);
  static constexpr int kStates = StatesOf(kRule);

  UpdateWork<kRule, kForm> work;
  const MapTables* maps;  // the signed one and the unsigned one
  bool groups_aligned;
  RoundingKey keys[kStatesMax] = {};
  float states[kGroups][kStatesMax][kGroup] = {};  // after the update

  EBB_HOST_DEVICE EncodedUpdateWork(const UpdateArrays& arrays, const UpdateRuns& runs,
                                    const MapTables* tables, bool aligned)
      : work(arrays, runs), maps(tables), groups_aligned(aligned) {
    EBB_UNROLL
    for (int s = 0; s < kStates; ++s)
      keys[s] = RoundingKeyOf(arrays.rounding, runs.constants.data()->step, s);
  }

  // Blocks begin at multiples of 256 elements, so all groups are aligned if the first is.
  static bool Aligned(const UpdateArrays& arrays, const UpdateRuns& runs) {
    const Cut cut = UpdateWork<kRule, kForm>::CutOf(arrays, runs);
    return cut.head == 0 && (cut.groups > 0 || arrays.count < kGroup);
  }

  EBB_HOST_DEVICE void Update(int64_t block, int lane, Extremes (&extremes)[kStatesMax]) {
    EBB_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      const int64_t at = First(block, g, lane);
      if (groups_aligned && at + kGroup <= work.arrays.count) {
        UpdateGroup<kGroup>(at, g, 0, extremes);
      } else {
        EBB_UNROLL
        for (int i = 0; i < kGroup; ++i) {
          if (at + i < work.arrays.count) UpdateGroup<1>(at + i, g, i, extremes);
        }
      }
    }
  }

  // `extremes`: of the block.
  EBB_HOST_DEVICE void Encode(int64_t block, int lane, const Extremes (&extremes)[kStatesMax]) {
    EBB_UNROLL
    for (int s = 0; s < kStates; ++s) {
      const StateArray& state = work.arrays.states[s];
      const bool has_signs = state.encoding.map == Encoding::Map::kDynamic8;
      const float scale = ScaleOf(extremes[s], has_signs);
      if (IsDynamic(state.encoding) && lane == 0) state.scales[block] = scale;
      EBB_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        const int64_t at = First(block, g, lane);
        if (groups_aligned && at + kGroup <= work.arrays.count) {
          EncodeGroup<kGroup>(at, g, 0, s, scale);
        } else {
          EBB_UNROLL
          for (int i = 0; i < kGroup; ++i) {
            if (at + i < work.arrays.count) EncodeGroup<1>(at + i, g, i, s, scale);
          }
        }
      }
    }
  }

 private:
  static EBB_HOST_DEVICE int64_t First(int64_t block, int group, int lane) {
    return block * kScaleBlock + (group * kLanes + lane) * kGroup;
  }
  EBB_HOST_DEVICE const MapTables& MapOf(const StateArray& state) const {
    return maps[state.encoding.map == Encoding::Map::kDynamic8 ? 0 : 1];
  }

  template <int kWidth>
  EBB_HOST_DEVICE void DecodeGroup(const StateArray& state, int64_t at,
                                   float (&numbers)[kWidth]) const {
    if (!IsDynamic(state.encoding)) {
      const DType dtype = state.encoding.dtype;
      return Unpack(Load<kWidth>(state.codes, SizeOf(dtype), at), dtype, numbers);
    }
    const auto* const codes = static_cast<const uint8_t*>(state.codes) + at;
    const float scale = state.scales[at / kScaleBlock];
    const MapTables& map = MapOf(state);
    uint32_t word = 0;
    if constexpr (kWidth == kGroup) {
      kernel::Read<kGroup>(codes, &word);
    } else {
      word = *codes;
    }
    EBB_UNROLL
    for (int i = 0; i < kWidth; ++i)
      numbers[i] = Ops::Mul(map.numbers[(word >> (8 * i)) & 0xff], scale);
  }

  // Elements [at, at + kWidth), which are those from `i` on of the lane's group.
  template <int kWidth>
  EBB_HOST_DEVICE void UpdateGroup(int64_t at, int group, int i, Extremes (&extremes)[kStatesMax]) {
    float numbers[kStatesMax][kWidth] = {};
    EBB_UNROLL
    for (int s = 0; s < kStates; ++s) DecodeGroup(work.arrays.states[s], at, numbers[s]);
    work.Update(at, numbers);
    EBB_UNROLL
    for (int s = 0; s < kStates; ++s) {
      EBB_UNROLL
      for (int k = 0; k < kWidth; ++k) {
        states[group][s][i + k] = numbers[s][k];
        extremes[s].Add(std::bit_cast<uint32_t>(numbers[s][k]));
      }
    }
  }

  template <int kWidth>
  EBB_HOST_DEVICE void EncodeGroup(int64_t at, int group, int i, int s, float scale) const {
    const StateArray& state = work.arrays.states[s];
    float numbers[kWidth];
    EBB_UNROLL
    for (int k = 0; k < kWidth; ++k) numbers[k] = states[group][s][i + k];
    if (!IsDynamic(state.encoding)) {
      const DType dtype = state.encoding.dtype;
      if (dtype == DType::kBFloat16 && work.arrays.round_states_stochastically) {
        EBB_UNROLL
        for (int k = 0; k < kWidth; ++k) {
          const auto index = static_cast<uint32_t>(work.arrays.rounding.index + at + k);
          numbers[k] = RoundStochastically(numbers[k], RandomBits(keys[s], index));
        }
      }
      return Store(Pack(numbers, dtype, Rounding::kNearest), state.codes, SizeOf(dtype), at);
    }
    const MapTables& map = MapOf(state);
    const float inverse = HasCodes(scale) ? Ops::Div(1, scale) : 0;
    uint32_t word = 0;
    EBB_UNROLL
    for (int k = 0; k < kWidth; ++k) {
      const uint8_t code = HasCodes(scale)
                               ? CodeOf(map.steps, map.negative, Ops::Mul(numbers[k], inverse))
                               : uint8_t{0};
      word |= uint32_t{code} << (8 * k);
    }
    auto* const codes = static_cast<uint8_t*>(state.codes) + at;
    if constexpr (kWidth == kGroup) {
      kernel::Write<kGroup>(&word, codes);
    } else {
      *codes = static_cast<uint8_t>(word);
    }
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
