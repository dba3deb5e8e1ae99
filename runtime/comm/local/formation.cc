#include "ebb/runtime/comm/local/formation.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/comm/local/world.h"

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
  changed_.Await([&] { return complete_.load() >= round || broken_.load(); }, deadline);
  const std::scoped_lock lock(mutex_);
  if (complete_.load() >= round) {
    if (!places_.ok()) return places_.status();
    return (*places_)[me];
  }
  if (broken_.load()) return FailBrokenLocked();
  return BreakLocked(LateCreationStatus(options, Absent(round)));
}

std::string Formation::Absent(int64_t round) const {
  std::string names;
  for (size_t i = 0; i < joined_.size(); ++i) {
    if (joined_[i] < round)
      absl::StrAppend(&names, names.empty() ? "" : ", ", "rank ", world_ranks_[i]);
  }
  return names;
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
