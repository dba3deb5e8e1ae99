#include "ebb/runtime/comm/mpi/group.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/comm/wait_notice.h"

namespace ebb {
namespace {

std::vector<int> AllBut(int rank, size_t size) {
  std::vector<int> others;
  for (int other = 0; other < static_cast<int>(size); ++other) {
    if (other != rank) others.push_back(other);
  }
  return others;
}

}  // namespace

MpiGroup::MpiGroup(MpiWorld& world, Place place)
    : world_(world),
      place_(std::move(place)),
      hosts_(FindHosts(world.HostsOf(place_.world_ranks))),
      others_(AllBut(place_.rank, place_.world_ranks.size())),
      farewells_(place_.world_ranks.size()) {
  calls_ = std::make_unique<Letters>(*this, kTags * id(), sizeof(CallSummary));
  proposals_ = std::make_unique<Letters>(*this, kTags * id() + 1, MpiWorld::kProposalBytes);
  world_.Register(*this);
}

MpiGroup::~MpiGroup() {
  world_.Forget(*this);
}

bool MpiGroup::SetFailed(const absl::Status& why) {
  {
    const std::scoped_lock lock(mutex_);
    if (!status_.ok()) return false;
    status_ = why;
    failed_.store(true, std::memory_order_release);
  }
  place_.node->Fail(why);
  turns_.Wake();
  return true;
}

absl::Status MpiGroup::status() const {
  if (!failed()) return absl::OkStatus();
  const std::scoped_lock lock(mutex_);
  return status_;
}

void MpiGroup::Fail(const absl::Status& why) {
  if (!SetFailed(why)) return;
  if (id() == 0) {
    world_.FailAllHere(why);
    if (world_.TellStar(why)) return;
  }
  for (const int other : others_)
    world_.Tell(world_rank(other), Notice::Of(Notice::Kind::kFailure, id(), why));
}

void MpiGroup::Hear(int world_rank, const Notice& notice) {
  const absl::Status why(static_cast<absl::StatusCode>(notice.code), notice.text);
  switch (notice.kind) {
    case Notice::Kind::kFailure:
      SetFailed(why);
      return;
    case Notice::Kind::kBroken: {
      const std::scoped_lock lock(mutex_);
      if (broken_.ok()) broken_ = why;
      return;
    }
    case Notice::Kind::kFarewell:
      HearFarewell(world_rank, notice);
      return;
    case Notice::Kind::kCalls:
      return;  // the world's
  }
}

void MpiGroup::SayWaiting(std::span<const int> absent, double seconds,
                          const Letters::Waits& waits) {
  const std::string known = world_.CompareCalls(WorldRanksOf(place_.world_ranks, absent));
  if (failed() || absent.empty() || !SpeaksFor(waits.kind, rank(), absent)) return;
  LogWaiting(RankName(rank()), seconds, waits.text(RankNames(absent)),
             waits.options.timeout_seconds, known);
}

void MpiGroup::FailLate(const Collective& call, std::string_view for_whom) {
  Fail(LateStatus(options(), RankName(rank()), Summarise(call), for_whom));
}

void MpiGroup::FailMismatch(int first, const CallSummary& first_call, int second,
                            const CallSummary& second_call) {
  Fail(MismatchStatus(options(), RankName(first), first_call, RankName(second), second_call));
}

void MpiGroup::FailBecauseLeft(int rank) {
  std::string how;
  {
    const std::scoped_lock lock(mutex_);
    how = farewells_[static_cast<size_t>(rank)]->how;
  }
  Fail(LeftStatus(options(), RankName(rank), how));
}

std::string MpiGroup::RankName(int rank) const {
  return ebb::RankName(place_.world_ranks, rank);
}

std::string MpiGroup::RankNames(std::span<const int> ranks) const {
  return ebb::RankNames(place_.world_ranks, ranks);
}

void MpiGroup::Leave(const std::string& how) {
  {
    const std::scoped_lock lock(mutex_);
    if (std::exchange(left_, true)) return;
  }
  Notice notice = Notice::Of(Notice::Kind::kFarewell, id(), absl::UnavailableError(how));
  for (const int other : others_) {
    notice.calls = calls_->sent(other);
    notice.proposals = proposals_->sent(other);
    world_.Tell(world_rank(other), notice);
  }
}

bool MpiGroup::HasLeft(int peer, const Letters& letters, uint64_t received) const {
  const std::scoped_lock lock(mutex_);
  const std::optional<Farewell>& farewell = farewells_[static_cast<size_t>(peer)];
  return farewell.has_value() &&
         (&letters == calls_.get() ? farewell->calls : farewell->proposals) <= received;
}

void MpiGroup::HearFarewell(int world_rank, const Notice& notice) {
  const std::scoped_lock lock(mutex_);
  const auto found = std::find(place_.world_ranks.begin(), place_.world_ranks.end(), world_rank);
  if (found == place_.world_ranks.end()) return;
  farewells_[static_cast<size_t>(found - place_.world_ranks.begin())] = {
      .calls = notice.calls, .proposals = notice.proposals, .how = notice.text};
}

}  // namespace ebb
