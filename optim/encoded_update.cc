#include <algorithm>
#include <cassert>

#include "ebb/optim/update_loops.h"
#include "ebb/optim/update_runs.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ebb/optim/encoded_update.cc"
#include "ebb/optim/simd_targets.h"
#include "hwy/foreach_target.h"
// This comes after foreach_target.h, which includes this file again for every target.
#include "ebb/optim/block_codes-inl.h"
#include "ebb/optim/update_loops-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ebb::optim::HWY_NAMESPACE {

// Codes take time, so the processor looks ahead over few elements. Their data are prefetched this
// many elements ahead.
constexpr int64_t kEncodedAhead = 2 * kScaleBlock;

// States of bf16. They are rounded at random if there are keys.
struct HalfStates {
  static constexpr int64_t kFetchAhead = kEncodedAhead;
  const LoopArrays& arrays;
  const RoundingKey* keys = nullptr;

  template <int64_t kElements, int kStates>
  HWY_INLINE void Fetch(int64_t at) const {
    for (int s = 0; s < kStates; ++s)
      FetchLines<kElements>(static_cast<const BFloat16*>(arrays.states[s].codes) + at);
  }

  template <class Ops>
  HWY_INLINE typename Ops::Number Load(int s, int64_t i) const {
    return Ops::Load(static_cast<const BFloat16*>(arrays.states[s].codes) + i);
  }
  template <class Ops>
  HWY_INLINE void Store(int s, int64_t i, typename Ops::Number number) const {
    if (keys != nullptr) {
      const auto index = static_cast<uint32_t>(arrays.rounding.index + i);
      number = Ops::RoundAtRandom(number, keys[s], index);
    }
    Ops::template Store<Rounding::kNearest>(number,
                                            static_cast<BFloat16*>(arrays.states[s].codes) + i);
  }
};

#if EBB_VECTOR_OPS

// States of 8 bits while a block is updated. Its new numbers wait in a buffer, because their scale
// is known only after the block. They are encoded while the next block is updated: each vector
// before its place in the buffer is used again.
template <int kStates>
class BlockStates {
 public:
  explicit BlockStates(const LoopArrays& arrays) {
    for (int s = 0; s < kStates; ++s) {
      const StateArray& state = arrays.states[s];
      codes_[s] = static_cast<uint8_t*>(state.codes);
      scales_[s] = state.scales;
      maps_[s] = &DynamicMapFor(state.encoding);
      numbers_[s] = maps_[s]->numbers.data();
    }
  }

  void Begin(int64_t block) {
    for (int s = 0; s < kStates; ++s) scale_[s] = scales_[s][block];
  }
  HWY_INLINE void Fetch(int64_t at) const {
    for (int s = 0; s < kStates; ++s) hwy::Prefetch(codes_[s] + at);
  }
  template <class Ops>
  HWY_INLINE FloatVector Load(int s, int64_t i) const {
    return DecodeVector(numbers_[s], codes_[s] + i, scale_[s]);
  }
  template <class Ops>
  HWY_INLINE void Store(int s, int64_t i, FloatVector number) {
    extremes_[s].Add(number);
    hn::Store(number, FloatTag(), updated_[s] + (i & kInBlock));
  }
  // All numbers of the block are stored.
  void End(int64_t block) {
    for (int s = 0; s < kStates; ++s) {
      const float scale = ScaleOf(extremes_[s].Reduced(), maps_[s]->negative != 0);
      extremes_[s] = ExtremesOfLanes();
      scales_[s][block] = scale;
      encodes_[s] = HasCodes(scale);
      if (encodes_[s]) {
        inverse_[s] = InverseOf(scale);
      } else {
        std::fill_n(codes_[s] + block * kScaleBlock, kScaleBlock, uint8_t{0});
      }
    }
  }
  // A vector of the block that has ended last.
  HWY_INLINE void EncodeAt(int64_t i) const {
    for (int s = 0; s < kStates; ++s) {
      if (!encodes_[s]) continue;
      const auto numbers = hn::Load(FloatTag(), updated_[s] + (i & kInBlock));
      EncodeVector(Encoder(*maps_[s]), numbers, inverse_[s], codes_[s] + i);
    }
  }

 private:
  static constexpr int64_t kInBlock = kScaleBlock - 1;  // bits of an index

  uint8_t* codes_[kStates];
  float* scales_[kStates];
  const DynamicMap* maps_[kStates];
  const float* numbers_[kStates];
  float scale_[kStates], inverse_[kStates];
  bool encodes_[kStates] = {};  // otherwise the block's codes are those of 0
  ExtremesOfLanes extremes_[kStates];
  alignas(64) float updated_[kStates][kScaleBlock];
};

// Whole blocks [begin, end).
template <UpdateRule kRule, MasterForm kForm>
void UpdateBlocks(const ConstantsOf<kRule>& shared_constants, const LoopArrays& shared_arrays,
                  int64_t begin, int64_t end) {
  constexpr int64_t kLanes = VectorOps<hn::ScalableTag<float>>::kLanes;
  static_assert(kScaleBlock % (2 * kLanes) == 0);
  // Copies that no store below can alias, so that they stay in registers.
  const ConstantsOf<kRule> constants = shared_constants;
  const LoopArrays arrays = shared_arrays;
  const bool streams = Streams(shared_arrays, begin);
  BlockStates<StatesOf(kRule)> states(shared_arrays);
  NoSums none;
  for (int64_t at = begin; at < end; at += kScaleBlock) {
    states.Begin(at / kScaleBlock);
    for (int64_t i = at; i < at + kScaleBlock; i += 2 * kLanes) {
      Fetch<2 * kLanes, kForm>(arrays, i + kEncodedAhead);
      states.Fetch(i + kEncodedAhead);
      states.EncodeAt(i - kScaleBlock);
      states.EncodeAt(i - kScaleBlock + kLanes);
      UpdatePairAt<kRule, kForm>(constants, arrays, streams, i, 0, none, states);
    }
    states.End(at / kScaleBlock);
  }
  for (int64_t i = end - kScaleBlock; i < end; i += kLanes) states.EncodeAt(i);
  if (streams) hwy::FlushStream();
}

#endif

// Whether all of the rule's states have encodings for which `are` is true.
template <class Are>
bool All(UpdateRule rule, const LoopArrays& arrays, const Are& are) {
  return std::all_of(arrays.states, arrays.states + StatesOf(rule),
                     [&](const StateArray& state) { return are(state.encoding); });
}

template <UpdateRule kRule, MasterForm kForm>
int64_t UpdateForm(const UpdateConstants& set, const LoopArrays& arrays, const RoundingKey* keys,
                   int64_t begin, int64_t end) {
  const auto& constants = ConstantsIn<kRule>(set);
  if (All(kRule, arrays, [](const Encoding& of) { return of == Encoding(DType::kBFloat16); })) {
    UpdateLoop<kRule, kForm, HalfStates>(
        constants, arrays, arrays.round_states_stochastically ? keys : nullptr, begin, end);
    return end;
  }
#if EBB_VECTOR_OPS
  end -= (end - begin) % kScaleBlock;
  if (begin < end && All(kRule, arrays, [](const Encoding& of) { return IsDynamic(of); })) {
    UpdateBlocks<kRule, kForm>(constants, arrays, begin, end);
    return end;
  }
#endif
  return begin;
}

// Updates elements in one pass if their states have one kind of encoding. Returns the end of what
// it has updated.
int64_t UpdateInOnePass(UpdateRule rule, const UpdateConstants& set, const LoopArrays& arrays,
                        const RoundingKey* keys, int64_t begin, int64_t end) {
  int64_t updated = begin;
  WithRule(rule, [&]<UpdateRule kRule>() {
    if constexpr (StatesOf(kRule) > 0 && !TakesNorms(kRule)) {
      using enum MasterForm;
      switch (arrays.form()) {
        case kWhole:
          updated = UpdateForm<kRule, kWhole>(set, arrays, keys, begin, end);
          break;
        case kSplit:
          updated = UpdateForm<kRule, kSplit>(set, arrays, keys, begin, end);
          break;
        case kParameter:
          updated = UpdateForm<kRule, kParameter>(set, arrays, keys, begin, end);
          break;
      }
    }
  });
  return updated;
}

}  // namespace ebb::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebb::optim {

HWY_EXPORT(UpdateInOnePass);

EncodedUpdate::EncodedUpdate(UpdateRule rule, const UpdateArrays& arrays,
                             const UpdateConstants& constants)
    : rule_(rule), constants_(constants), arrays_(arrays, constants.step) {
  assert(!TakesNorms(rule));
  for (int s = 0; s < StatesOf(rule); ++s)
    keys_[s] = RoundingKeyOf(arrays.rounding, constants.step, s);
}

void EncodedUpdate::Update(int64_t begin, int64_t end) const {
  begin = HWY_DYNAMIC_DISPATCH(UpdateInOnePass)(rule_, constants_, arrays_, keys_, begin, end);
  float numbers[kStatesMax][kScaleBlock];
  const int states = StatesOf(rule_);
  LoopArrays block = arrays_;
  for (int64_t at = begin; at < end; at += kScaleBlock) {
    const UpdateArrays encoded = PartOf(arrays_, at, std::min<int64_t>(kScaleBlock, end - at));
    static_cast<UpdateArrays&>(block) = encoded;
    for (int s = 0; s < states; ++s) {
      if (encoded.states[s].is_fp32()) continue;
      DecodeAlone(encoded.states[s], numbers[s], block.count);
      block.states[s] = {.codes = numbers[s]};
    }
    UpdateRange(rule_, constants_, block, nullptr, 0, block.count);
    for (int s = 0; s < states; ++s) {
      if (encoded.states[s].is_fp32()) continue;
      EncodeAlone(numbers[s], encoded.states[s], block.count,
                  encoded.round_states_stochastically ? &keys_[s] : nullptr,
                  encoded.rounding.index);
    }
  }
}

}  // namespace ebb::optim
#endif  // HWY_ONCE
