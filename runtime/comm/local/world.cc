#include "ebb/runtime/comm/local/world.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/comm/local/communicator.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

std::vector<int> AllRanks(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

LocalWorld::LocalWorld(int size)
    : size_(size),
      records_(std::make_unique<CallRecord[]>(static_cast<size_t>(size))),
      communicators_(*this, AllRanks(size)),
      how_left_(static_cast<size_t>(size)) {
  if (size == 1) return;
  std::vector<CallRecord*> records;
  for (int rank = 0; rank < size; ++rank) records.push_back(&records_[static_cast<size_t>(rank)]);
  for (int rank = 0; rank < size; ++rank)
    calls_.push_back(std::make_unique<CallOrder>(rank, records));
}

std::string LocalWorld::CompareCalls(int rank, std::span<const int> others) {
  const CallOrder* const order = calls(rank);
  if (order == nullptr) return "";
  if (const absl::Status apart = order->Check(); !apart.ok()) Fail(rank, apart);
  return order->Describe(others);
}

absl::StatusOr<std::vector<Formation::Place>> LocalWorld::FormGroups(
    std::span<const int> world_ranks, std::span<const Proposal> proposals) {
  EBB_ASSIGN_OR_RETURN(const std::vector<std::vector<size_t>> members,
                       ebb::FormGroups(world_ranks, proposals));
  std::vector<Formation::Place> places(world_ranks.size());
  for (const std::vector<size_t>& indices : members) {
    std::vector<int> ranks;
    for (const size_t i : indices) ranks.push_back(world_ranks[i]);
    auto group = std::make_shared<LocalGroup>(*this, proposals[0].options, std::move(ranks));
    for (size_t i = 0; i < indices.size(); ++i)
      places[indices[i]] = {.group = group, .rank = static_cast<int>(i)};

    const std::scoped_lock lock(mutex_);
    EBB_RETURN_IF_ERROR(status_);
    for (int rank = 0; rank < group->size(); ++rank) {
      const std::string& how =
          how_left_[static_cast<size_t>(group->world_ranks()[static_cast<size_t>(rank)])];
      if (!how.empty()) group->Leave(rank, how);
    }
    std::erase_if(groups_, [](const std::weak_ptr<LocalGroup>& old) { return old.expired(); });
    groups_.push_back(group);
  }
  return places;
}

std::vector<std::shared_ptr<LocalGroup>> LocalWorld::Groups() {
  std::vector<std::shared_ptr<LocalGroup>> alive;
  for (const std::weak_ptr<LocalGroup>& group : groups_) {
    if (auto locked = group.lock()) alive.push_back(std::move(locked));
  }
  return alive;
}

void LocalWorld::Fail(int rank, const absl::Status& why) {
  NoteFailure(rank);
  const absl::Status status = RankFailedStatus(rank, why);
  std::vector<std::shared_ptr<LocalGroup>> groups;
  {
    const std::scoped_lock lock(mutex_);
    if (status_.ok()) status_ = status;
    groups = Groups();
  }
  // First: a rank that hears of it in a group may leave, which would look like the cause.
  communicators_.Break(status);
  for (const auto& group : groups) group->Fail(status);
}

absl::Status LocalWorld::status() const {
  const std::scoped_lock lock(mutex_);
  return status_;
}

void LocalWorld::Leave(int rank, const std::string& how) {
  std::vector<std::shared_ptr<LocalGroup>> groups;
  {
    const std::scoped_lock lock(mutex_);
    how_left_[static_cast<size_t>(rank)] = how;
    groups = Groups();
  }
  for (const auto& group : groups) {
    const auto& members = group->world_ranks();
    const auto found = std::find(members.begin(), members.end(), rank);
    if (found != members.end()) group->Leave(static_cast<int>(found - members.begin()), how);
  }
  communicators_.Leave(rank, how);
}

void LocalWorld::NoteFailure(int rank) {
  const std::scoped_lock lock(mutex_);
  if (std::find(failures_.begin(), failures_.end(), rank) == failures_.end())
    failures_.push_back(rank);
}

std::vector<int> LocalWorld::failures() const {
  const std::scoped_lock lock(mutex_);
  return failures_;
}

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> LocalRank::NewCommunicator(
    const CommunicatorOptions& options) {
  EBB_ASSIGN_OR_RETURN(Formation::Place place,
                       world_->communicators().Join(rank_, {.options = options}));
  return std::make_unique<LocalCommunicator>(world_, std::move(place));
}

}  // namespace ebb
