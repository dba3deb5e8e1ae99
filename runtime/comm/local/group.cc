#include "ebb/runtime/comm/local/group.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/comm/local/world.h"
#include "ebb/runtime/comm/wait_notice.h"
#include "ebb/runtime/device/cpu/core_share.h"

namespace ebb {
namespace {

// Ranks come to a meeting together when each has a core, and a sleeper's waking costs more than the
// whole meeting. With more ranks than cores, spinning would keep from its core the very rank that
// is waited for.
constexpr std::chrono::microseconds kMeetingSpin{5};

}  // namespace

LocalGroup::LocalGroup(LocalWorld& world, CommunicatorOptions options, std::vector<int> world_ranks)
    : world_(world),
      options_(std::move(options)),
      world_ranks_(std::move(world_ranks)),
      spin_(size() <= CoreShare::Cores() ? kMeetingSpin : kMeetingSpin * 0),
      seats_(world_ranks_.size()),
      splits_(world, world_ranks_) {}

bool LocalGroup::Meet(int rank, WaitPoint::Deadline deadline) {
  const uint64_t meeting = seat(rank).meetings.load(std::memory_order_relaxed) + 1;
  seat(rank).meetings.store(meeting, std::memory_order_seq_cst);
  if (arrivals_.fetch_add(1, std::memory_order_acq_rel) + 1 ==
      meeting * static_cast<uint64_t>(size())) {
    met_.store(meeting, std::memory_order_release);
    meeting_.Notify();
    return true;
  }
  if (posted_.load(std::memory_order_seq_cst) > 0) FailIfAwaitedByAnExchange(rank);
  const auto met = [&] { return met_.load(std::memory_order_acquire) >= meeting; };
  AwaitAndSay(
      meeting_, [&] { return met() || failed() || left_.load(std::memory_order_acquire) >= 0; },
      deadline, spin_, options_.notices,
      [&](double seconds) { SayWaiting(rank, Absent(meeting), seconds); });
  // A rank that has left came to this meeting before, or it would not be complete: so look at that
  // last.
  if (met()) return true;
  if (failed()) return false;
  if (const int left = left_.load(std::memory_order_acquire); left >= 0) {
    FailBecauseLeft(left);
  } else {
    const std::vector<int> absent = Absent(meeting);
    const int world_rank = world_ranks_[static_cast<size_t>(rank)];
    FailLate(rank, seat(rank).call, RankNames(world_ranks_, absent),
             world_.CompareCalls(world_rank, WorldRanksOf(world_ranks_, absent)));
  }
  return false;
}

bool LocalGroup::AllCalledTheSame() {
  for (int rank = 1; rank < size(); ++rank) {
    if (seat(rank).fingerprint == seat(0).fingerprint) continue;
    FailMismatch(0, rank);
    return false;
  }
  return true;
}

bool LocalGroup::Exchange(int rank, WaitPoint::Deadline deadline,
                          absl::FunctionRef<void(const Collective& peer_call)> copy) {
  Seat& mine = seat(rank);
  const int peer = mine.call.peer;
  Seat& other = seat(peer);
  std::unique_lock lock(exchange_mutex_);
  if (failed()) return false;
  if (other.posted && other.call.peer == rank) {
    if (!FitForExchange(Summarise(mine.call), Summarise(other.call))) {
      FailMismatch(rank, peer);
      return false;
    }
    other.taken = true;
    lock.unlock();
    copy(other.call);
    lock.lock();
    other.posted = false;
    other.taken = false;
    posted_.fetch_sub(1, std::memory_order_relaxed);
    other.exchanged.store(true, std::memory_order_release);
    other.own.Notify();
    return true;
  }
  mine.posted = true;
  mine.exchanged.store(false, std::memory_order_relaxed);
  posted_.fetch_add(1, std::memory_order_seq_cst);
  FailIfPeerIsAtACollective(rank);
  lock.unlock();

  const auto exchanged = [&] { return mine.exchanged.load(std::memory_order_acquire); };
  AwaitAndSay(
      mine.own,
      [&] { return exchanged() || failed() || other.left.load(std::memory_order_acquire); },
      deadline, spin_, options_.notices,
      [&](double seconds) {
        SayWaiting(rank, {&peer, 1}, seconds);
      });
  lock.lock();
  if (mine.taken) {
    lock.unlock();
    mine.own.Await(exchanged);
    return true;
  }
  if (exchanged()) return true;
  mine.posted = false;
  posted_.fetch_sub(1, std::memory_order_relaxed);
  lock.unlock();
  if (failed()) return false;
  if (other.left.load(std::memory_order_acquire)) {
    FailBecauseLeft(peer);
  } else {
    FailLate(rank, mine.call, RankName(peer));
  }
  return false;
}

// A rank calls in one order. One that is at a meeting can never come to the peer that waits for it
// in a send or receive, and that peer never to the meeting. Either of the two may be the one that
// comes second and sees it.
void LocalGroup::FailIfAwaitedByAnExchange(int rank) {
  const std::scoped_lock lock(exchange_mutex_);
  for (int other = 0; other < size(); ++other) {
    if (seat(other).posted && !seat(other).taken && seat(other).call.peer == rank)
      FailMismatch(rank, other);
  }
}

void LocalGroup::FailIfPeerIsAtACollective(int rank) {
  const int peer = seat(rank).call.peer;
  const Reading reading(*this);
  if (reading.allowed() && seat(peer).meetings.load(std::memory_order_seq_cst) >
                               seat(rank).meetings.load(std::memory_order_relaxed)) {
    FailMismatch(peer, rank);
  }
}

void LocalGroup::FailMismatch(int first, int second) {
  Fail(MismatchStatus(options_, RankName(first), Summarise(seat(first).call), RankName(second),
                      Summarise(seat(second).call)));
}

LocalGroup::Reading::Reading(LocalGroup& group) : group_(group) {
  // Before the look at failed_: a rank that fails the group sees this reader or this reader sees the
  // failure.
  group_.readers_.fetch_add(1, std::memory_order_seq_cst);
  allowed_ = !group_.failed();
}

LocalGroup::Reading::~Reading() {
  if (group_.readers_.fetch_sub(1, std::memory_order_seq_cst) == 1 && group_.failed())
    group_.meeting_.Notify();
}

void LocalGroup::AwaitNoReader() {
  meeting_.Await([&] { return readers_.load(std::memory_order_seq_cst) == 0; });
}

void LocalGroup::Fail(absl::Status why) {
  {
    const std::scoped_lock lock(status_mutex_);
    if (!status_.ok()) return;
    status_ = why;
    failed_.store(true, std::memory_order_seq_cst);
  }
  splits_.Break(why);
  WakeAll();
}

absl::Status LocalGroup::status() const {
  if (!failed()) return absl::OkStatus();
  const std::scoped_lock lock(status_mutex_);
  return status_;
}

void LocalGroup::Leave(int rank, const std::string& how) {
  {
    const std::scoped_lock lock(status_mutex_);
    if (seat(rank).left.load(std::memory_order_relaxed)) return;
    seat(rank).how_left = how;
    seat(rank).left.store(true, std::memory_order_release);
    int nobody = -1;
    left_.compare_exchange_strong(nobody, rank, std::memory_order_acq_rel);
  }
  splits_.Leave(rank, how);
  WakeAll();
}

void LocalGroup::FailBecauseLeft(int rank) {
  world_.NoteFailure(world_ranks_[static_cast<size_t>(rank)]);
  std::string how;
  {
    const std::scoped_lock lock(status_mutex_);
    how = seat(rank).how_left;
  }
  // Where the world has failed, the rank may have left for that before this group has heard of it.
  const absl::Status failed = world_.status();
  Fail(failed.ok() ? LeftStatus(options_, RankName(rank), how) : failed);
}

void LocalGroup::FailLate(int rank, const Collective& call, const std::string& for_what,
                          const std::string& more) {
  const absl::Status late = LateStatus(options_, RankName(rank), Summarise(call), for_what);
  Fail(more.empty() ? late : absl::Status(late.code(), absl::StrCat(late.message(), ": ", more)));
}

void LocalGroup::WakeAll() {
  meeting_.Notify();
  for (Seat& seat : seats_) {
    seat.own.Notify();
    seat.turns.Wake();
  }
}

std::string LocalGroup::RankName(int rank) const {
  return ebb::RankName(world_ranks_, rank);
}

std::vector<int> LocalGroup::Absent(uint64_t meeting) {
  std::vector<int> absent;
  for (int rank = 0; rank < size(); ++rank) {
    if (seat(rank).meetings.load(std::memory_order_relaxed) < meeting) absent.push_back(rank);
  }
  return absent;
}

void LocalGroup::SayWaiting(int rank, std::span<const int> absent, double seconds) {
  const std::string known = world_.CompareCalls(world_ranks_[static_cast<size_t>(rank)],
                                                WorldRanksOf(world_ranks_, absent));
  const Collective& call = seat(rank).call;
  if (failed() || absent.empty() || !SpeaksFor(call.kind, rank, absent)) return;
  LogWaiting(RankName(rank), seconds,
             WaitsInCall(options_, Summarise(call), RankNames(world_ranks_, absent)),
             options_.timeout_seconds, known);
}

}  // namespace ebb
