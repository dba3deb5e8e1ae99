#include "ebb/optim/update.h"

#include <algorithm>
#include <cassert>
#include <cstddef>

#include "ebb/optim/block_codes.h"
#include "ebb/optim/update_constants.h"
#include "ebb/optim/update_loops.h"
#include "ebb/optim/update_runs.h"

namespace ebb::optim {
namespace {

// The fewest elements that are worth waking a thread: half a megabyte of Adam's traffic. It is also
// a multiple of every vector, so aligned arrays are aligned in every part.
constexpr int64_t kGrain = 16 * 1024;

using Names = std::span<const std::string_view>;
constexpr std::string_view kAdamStates[] = {"exp_avg", "exp_avg_sq"};
constexpr std::string_view kAdagradStates[] = {"sum"};
constexpr std::string_view kMomentumState[] = {"momentum_buffer"};
constexpr std::string_view kRmspropStates[] = {"square_avg", "momentum_buffer", "grad_avg"};
constexpr std::string_view kCenteredStates[] = {"square_avg", "grad_avg"};

}  // namespace

std::span<const std::string_view> StateNames(const OptimizerConfig& optimizer) {
  switch (UpdateRuleOf(optimizer)) {
    case UpdateRule::kAdam:
    case UpdateRule::kLamb:
      return kAdamStates;
    case UpdateRule::kSgd:
    case UpdateRule::kLars:
      break;
    case UpdateRule::kSgdWithMomentum:
    case UpdateRule::kLarsWithMomentum:
      return kMomentumState;
    case UpdateRule::kLion:
      return Names(kAdamStates).first(1);
    case UpdateRule::kAdagrad:
      return kAdagradStates;
    case UpdateRule::kRmsprop:
      return Names(kRmspropStates).first(1);
    case UpdateRule::kRmspropWithMomentum:
      return Names(kRmspropStates).first(2);
    case UpdateRule::kCenteredRmsprop:
      return kCenteredStates;
    case UpdateRule::kCenteredRmspropWithMomentum:
      return kRmspropStates;
  }
  return {};
}

bool IsNeverNegative(std::string_view state) {
  return state == kAdamStates[1] || state == kAdagradStates[0] || state == kRmspropStates[0];
}

namespace {

// Updates elements with states of other encodings, chunk by chunk: states are decoded into the
// first cache, updated there by the loops for fp32, and encoded from there. While a chunk's states
// are decoded and encoded, the inputs of the next chunk come from memory.
class ChunkedUpdate {
 public:
  ChunkedUpdate(UpdateRule rule, const UpdateArrays& arrays, const UpdateConstants& constants)
      : rule_(rule), constants_(constants), in_loops_(arrays, constants.step) {
    assert(!TakesNorms(rule));
    for (int s = 0; s < StatesOf(rule); ++s)
      keys_[s] = RoundingKeyOf(arrays.rounding, constants.step, s);
  }

  // Elements [begin, end).
  void Update(int64_t begin, int64_t end) const {
    alignas(64) float numbers[kStatesMax][kChunk];
    const int states = StatesOf(rule_);
    LoopArrays chunk = in_loops_;
    for (int64_t at = begin; at < end; at += kChunk) {
      const UpdateArrays encoded = PartOf(in_loops_, at, std::min(kChunk, end - at));
      static_cast<UpdateArrays&>(chunk) = encoded;
      const int64_t next = at + chunk.count, next_count = std::min(kChunk, end - next);
      for (int s = 0; s < states; ++s) {
        if (encoded.states[s].is_fp32()) continue;
        DecodeAlone(encoded.states[s], numbers[s], chunk.count, Input(s, next, next_count));
        chunk.states[s] = {.codes = numbers[s]};
      }
      UpdateRange(rule_, constants_, chunk, nullptr, 0, chunk.count);
      for (int s = 0; s < states; ++s) {
        if (encoded.states[s].is_fp32()) continue;
        EncodeAlone(numbers[s], encoded.states[s], chunk.count,
                    encoded.round_states_stochastically ? &keys_[s] : nullptr,
                    encoded.rounding.index, Input(states + s, next, next_count));
      }
    }
  }

 private:
  static constexpr int64_t kChunk = 512;
  static_assert(kChunk % kScaleBlock == 0 && kGrain % kChunk == 0);

  // Elements of one of the inputs; those that need no decoding first, because a rule with one state
  // fetches two.
  Ahead Input(int number, int64_t begin, int64_t count) const {
    const LoopArrays& of = in_loops_;
    const auto part = [&](const void* array, int64_t size) -> Ahead {
      if (array == nullptr || count <= 0) return {};
      return {static_cast<const std::byte*>(array) + begin * size,
              static_cast<size_t>(count * size)};
    };
    const bool whole = of.form() == MasterForm::kWhole;
    if (number == 0) return whole ? part(of.master, 4) : part(of.parameter_in, 2);
    if (number == 1) return part(of.gradient, SizeOf(of.gradient_dtype));
    if (number == 2 && of.form() == MasterForm::kSplit) return part(of.master_low, 2);
    if (number - 2 >= StatesOf(rule_)) return {};
    const StateArray& state = of.states[number - 2];
    return part(state.codes, state.encoding.code_bytes());
  }

  const UpdateRule rule_;
  const UpdateConstants& constants_;
  const LoopArrays in_loops_;
  RoundingKey keys_[kStatesMax] = {};
};

// Runs over a team, in parts of a multiple of `grain`.
void Run(ThreadTeam& team, int64_t grain, UpdateRule rule, const UpdateArrays& arrays,
         const UpdateConstants& constants, const BlockSums* sums) {
  assert((arrays.form() != MasterForm::kParameter && !arrays.round_states_stochastically) ||
         arrays.rounding.index % kRoundingKeyElements + arrays.count <= kRoundingKeyElements);
  if (!HasFp32States(rule, arrays)) {
    assert(sums == nullptr);
    const ChunkedUpdate update(rule, arrays, constants);
    return team.Run(arrays.count, grain,
                    [&](int64_t begin, int64_t end) { update.Update(begin, end); });
  }
  const LoopArrays in_loops(arrays, constants.step);
  team.Run(arrays.count, grain, [&](int64_t begin, int64_t end) {
    UpdateRange(rule, constants, in_loops, sums, begin, end);
  });
}

}  // namespace

void Update(ThreadTeam& team, UpdateRule rule, const UpdateArrays& arrays,
            const UpdateConstants& constants) {
  if (constants.apply) Run(team, kGrain, rule, arrays, constants, nullptr);
}

void Update(ThreadTeam& team, const OptimizerConfig& optimizer, const UpdateArrays& arrays,
            const UpdateScalars& scalars) {
  Update(team, UpdateRuleOf(optimizer), arrays, UpdateConstantsOf(optimizer, scalars));
}

UpdateChecksums UpdateAndSum(ThreadTeam& team, const OptimizerConfig& optimizer,
                             const UpdateArrays& arrays, const UpdateScalars& scalars,
                             std::span<uint64_t> scratch) {
  static_assert(kGrain % kBlockElements == 0);
  assert(static_cast<int64_t>(scratch.size()) >= UpdateChecksumScratch(arrays.count));
  const bool split = arrays.form() == MasterForm::kSplit;
  const BlockSums sums{.blocks = scratch.data(),
                       .stride = ChecksumBlocks(arrays.count * int64_t{sizeof(float)})};
  Run(team, split ? std::max(kGrain, kLowBlockElements) : kGrain, UpdateRuleOf(optimizer), arrays,
      UpdateConstantsOf(optimizer, scalars), &sums);
  UpdateChecksums checksums;
  const int states = static_cast<int>(StateNames(optimizer).size());
  for (int a = arrays.form() == MasterForm::kParameter ? 1 : 0; a <= states; ++a) {
    const int64_t bytes = arrays.count * (a == 0 && split ? 2 : 4);
    const auto blocks = static_cast<size_t>(ChecksumBlocks(bytes));
    checksums.read[a] = ChecksumFromBlocks({sums.Read(a), blocks}, bytes);
    checksums.written[a] = ChecksumFromBlocks({sums.Written(a), blocks}, bytes);
  }
  return checksums;
}

}  // namespace ebb::optim
