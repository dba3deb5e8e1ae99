#include "ebb/runtime/comm/node/group.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/comm/wait_notice.h"
#include "ebb/runtime/device/cpu/core_share.h"

namespace ebb {
namespace {

std::vector<int> Named(const NodeWorld& world, const std::vector<int>& world_ranks) {
  std::vector<int> named;
  for (const int rank : world_ranks) named.push_back(world.named_rank(rank));
  return named;
}

}  // namespace

NodeGroup::NodeGroup(std::shared_ptr<NodeWorld> world, node::Board::Place place)
    : world_(std::move(world)),
      options_(std::move(place.options)),
      world_ranks_(std::move(place.world_ranks)),
      named_ranks_(Named(*world_, world_ranks_)),
      rank_(place.rank),
      offset_(place.offset),
      layout_(place.layout),
      memory_(std::move(place.memory)),
      // The first is the boards'. Which one it is only has to be the same on all members.
      point_(1 + static_cast<int>((offset_ / 4096) % (node::kWaitPoints - 1))),
      spins_(world_->size() <= CoreShare::Cores()) {
  splits_ = std::make_unique<node::Board>(
      *world_, world_ranks_, rank_,
      reinterpret_cast<node::BoardSeat*>(memory_.data() + layout_.board()), &header().broken,
      [this] { return status(); }, [this](int other) { return &seat(other).farewell; });
}

NodeGroup::~NodeGroup() {
  if (header().users.fetch_sub(1, std::memory_order_acq_rel) == 1)
    world_->file().Release(offset_, layout_.bytes());
}

void NodeGroup::WakeOthers() {
  for (int other = 0; other < size(); ++other) {
    if (other != rank_) Wake(other);
  }
}

void NodeGroup::Leave(const std::string& how) {
  node::SayFarewell(seat(rank_).farewell, how);
  WakeOthers();
  // Ranks that would form a part of this communicator sleep elsewhere.
  for (int other = 0; other < size(); ++other) world_->point(world_rank(other), 0).Notify();
}

absl::Status NodeGroup::status() {
  if (!failed()) return absl::OkStatus();
  const std::scoped_lock lock(mutex_);
  if (status_.ok()) status_ = header().failure.is_set() ? header().failure.Get() : world_->status();
  return status_;
}

void NodeGroup::Fail(const absl::Status& why) {
  if (!failed()) header().failure.TrySet(why);
  // The first rank to fail it may have been killed before it has woken any.
  for (int rank = 0; rank < size(); ++rank) {
    Wake(rank);
    world_->point(world_rank(rank), 0).Notify();
  }
}

void NodeGroup::SayWaiting(const Collective& call, std::span<const int> absent, double seconds) {
  const std::string known = world_->CompareCalls(WorldRanksOf(named_ranks_, absent));
  if (failed() || absent.empty() || !SpeaksFor(call.kind, rank_, absent)) return;
  {
    const std::scoped_lock lock(mutex_);
    const WaitPoint::Deadline now = WaitPoint::Clock::now();
    if (now < said_until_) return;
    said_until_ = now + std::chrono::duration_cast<WaitPoint::Clock::duration>(
                            std::chrono::duration<double>(options_.notices.first_seconds / 2));
  }
  LogWaiting(RankName(rank_), seconds,
             WaitsInCall(options_, Summarise(call), RankNames(named_ranks_, absent)),
             options_.timeout_seconds, known);
}

void NodeGroup::FailLate(const Collective& call, const std::string& for_what,
                         const std::string& more) {
  const absl::Status late = LateStatus(options_, RankName(rank_), Summarise(call), for_what);
  Fail(more.empty() ? late : absl::Status(late.code(), absl::StrCat(late.message(), ": ", more)));
}

void NodeGroup::FailLate(const Collective& call, std::span<const int> absent) {
  FailLate(call, RankNames(named_ranks_, absent),
           world_->CompareCalls(WorldRanksOf(named_ranks_, absent)));
}

void NodeGroup::FailMismatch(int first, const CallSummary& first_call, int second,
                             const CallSummary& second_call) {
  Fail(MismatchStatus(options_, RankName(first), first_call, RankName(second), second_call));
}

bool NodeGroup::Missed(int rank, const Collective& call) {
  if (failed()) return false;
  if (HasLeft(rank)) {
    const bool said = seat(rank).farewell.left.load(std::memory_order_acquire) != 0;
    Fail(LeftStatus(options_, RankName(rank),
                    said ? seat(rank).farewell.how : "its process has ended"));
  } else {
    FailLate(call, {&rank, 1});
  }
  return false;
}

std::string NodeGroup::RankName(int rank) const {
  return ebb::RankName(named_ranks_, rank);
}

}  // namespace ebb
