#include "ebb/optim/update.h"

#include <algorithm>
#include <cassert>
#include <cstddef>

#include "ebb/optim/update_constants.h"
#include "ebb/optim/update_loops.h"

namespace ebb::optim {
namespace {

// The fewest elements that are worth waking a thread: half a megabyte of Adam's traffic. It is also
// a multiple of every vector, so aligned arrays are aligned in every part.
constexpr int64_t kGrain = 16 * 1024;
static_assert(kGrain % kScaleBlock == 0);

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
    case UpdateRule::kMuonMomentum:
    case UpdateRule::kMuon:
      return kMomentumState;
  }
  return {};
}

bool IsNeverNegative(std::string_view state) {
  return state == kAdamStates[1] || state == kAdagradStates[0] || state == kRmspropStates[0];
}

namespace {

// Runs over a team, in parts of a multiple of `grain`.
void Run(ThreadTeam& team, int64_t grain, UpdateRule rule, const UpdateArrays& arrays,
         const UpdateConstants& constants, const BlockSums* sums) {
  assert((arrays.form() != MasterForm::kParameter && !arrays.round_states_stochastically) ||
         arrays.rounding.index % kRoundingKeyElements + arrays.count <= kRoundingKeyElements);
  if (!HasFp32States(rule, arrays)) {
    assert(sums == nullptr);
    const EncodedUpdate update(rule, arrays, constants);
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
