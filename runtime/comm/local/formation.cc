#include "ebb/runtime/comm/local/formation.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/comm/local/world.h"
#include "ebb/runtime/comm/wait_notice.h"

namespace ebb {
Formation::Formation(LocalWorld& world, std::vector<int> world_ranks)
    : world_(world),
      world_ranks_(std::move(world_ranks)),
      proposals_(world_ranks_.size()),
      joined_(world_ranks_.size(), 0),
      places_(std::vector<Place>()) {}

absl::StatusOr<Formation::Place> Formation::Join(int rank, Proposal proposal) {
  const auto me = static_cast<size_t>(rank);
  const CommunicatorOptions options = proposal.options;
  const WaitPoint::Deadline deadline = DeadlineAfter(CreationSeconds(options));
  int64_t round;
  {
    const std::scoped_lock lock(mutex_);
    if (broken_.load()) return FailBrokenLocked();
    proposals_[me] = std::move(proposal);
    round = ++joined_[me];
    if (++here_ == world_ranks_.size()) {
      here_ = 0;
      places_ = world_.FormGroups(world_ranks_, proposals_);
      complete_.store(round);
      changed_.Notify();
    }
  }
  AwaitAndSay(
      changed_, [&] { return complete_.load() >= round || broken_.load(); }, deadline,
      WaitPoint::kSpin, options.notices,
      [&](double seconds) { SayWaiting(rank, round, options, seconds); });
  const std::scoped_lock lock(mutex_);
  if (complete_.load() >= round) {
    if (!places_.ok()) return places_.status();
    return (*places_)[me];
  }
  if (broken_.load()) return FailBrokenLocked();
  return BreakLocked(LateCreationStatus(options, RankNames(AbsentLocked(round))));
}

std::vector<int> Formation::AbsentLocked(int64_t round) const {
  std::vector<int> absent;
  for (size_t i = 0; i < joined_.size(); ++i) {
    if (joined_[i] < round) absent.push_back(world_ranks_[i]);
  }
  return absent;
}

// The first of those that have come says it.
void Formation::SayWaiting(int rank, int64_t round, const CommunicatorOptions& options,
                           double seconds) {
  const int world_rank = world_ranks_[static_cast<size_t>(rank)];
  std::vector<int> absent;
  bool is_first = false;
  {
    const std::scoped_lock lock(mutex_);
    absent = AbsentLocked(round);
    const auto first = std::find_if(joined_.begin(), joined_.end(),
                                    [&](int64_t joined) { return joined >= round; });
    is_first = first - joined_.begin() == rank;
  }
  const std::string known = world_.CompareCalls(world_rank, absent);
  if (broken_.load() || absent.empty() || !is_first) return;
  LogWaiting(absl::StrCat("rank ", world_rank), seconds,
             WaitsForCreation(options, RankNames(absent)), options.timeout_seconds, known);
}

absl::Status Formation::BreakLocked(absl::Status why) {
  if (!broken_.load()) {
    why_broken_ = std::move(why);
    broken_.store(true);
    changed_.Notify();
  }
  return why_broken_;
}

// A rank that has left is to blame only now that another has needed it.
absl::Status Formation::FailBrokenLocked() {
  if (broken_by_ >= 0) world_.NoteFailure(broken_by_);
  return why_broken_;
}

void Formation::Break(const absl::Status& why) {
  const std::scoped_lock lock(mutex_);
  BreakLocked(why).IgnoreError();
}

void Formation::Leave(int rank, const std::string& how) {
  const std::scoped_lock lock(mutex_);
  if (broken_.load()) return;
  broken_by_ = world_ranks_[static_cast<size_t>(rank)];
  BreakLocked(LeftBeforeCreationStatus(broken_by_, how)).IgnoreError();
}

}  // namespace ebb
