#include "ebb/runtime/comm/mpi/communicator.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/comm/wait_notice.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

// A rank that leaves waits this long for its messages. Within this time they have been sent, or
// another rank has ended. After a failure other ranks may have failed too, so the wait is shorter.
constexpr std::chrono::milliseconds kLeaving{2000}, kLeavingFailed{200};

}  // namespace

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> MpiCommunicator::Form(
    const std::shared_ptr<MpiEndpoint>& endpoint, StoreGroup& world,
    const CommunicatorOptions& options) {
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<StoreGroup> group, world.Form({.options = options}));
  const uint64_t number = group->number();
  if (kTags * (number + 1) > static_cast<uint64_t>(endpoint->tag_max())) {
    return absl::ResourceExhaustedError(
        absl::StrCat("communicator '", options.name, "' is the ", number,
                     "th of this world, for which this MPI has no tag (its largest is ",
                     endpoint->tag_max(), ")"));
  }
  return std::unique_ptr<CommunicatorBackend>(
      new MpiCommunicator(endpoint, std::move(group), options));
}

MpiCommunicator::MpiCommunicator(std::shared_ptr<MpiEndpoint> endpoint,
                                 std::shared_ptr<StoreGroup> group, CommunicatorOptions options)
    : TaskCommunicator(options.timeout_seconds),
      endpoint_(std::move(endpoint)),
      group_(std::move(group)),
      rank_(group_->rank()),
      options_(std::move(options)),
      announcements_(new std::byte[kPlaces * sizeof(Announcement) * static_cast<size_t>(size())]()),
      pairs_(static_cast<size_t>(size())),
      absent_(static_cast<size_t>(size())),
      messages_(*this, size()),
      operations_(rank_, size(), options_.reduction_group, messages_) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    others_.push_back(peer);
    Expect(peer);
  }
}

MpiCommunicator::~MpiCommunicator() {
  AwaitAllEnded();
  Leave();
}

void MpiCommunicator::Leave() {
  for (const int peer : others_)
    Announce(pairs_[static_cast<size_t>(peer)].goodbye, peer, kGoodbye, {.leaves = true});
  const auto sent = [&] {
    bool complete = messages_.TestAll();
    for (Pair& pair : pairs_) {
      for (MpiMessage& message : pair.outgoing) complete = message.Test() && complete;
      complete = pair.goodbye.Test() && complete;
    }
    return complete;
  };
  const WaitPoint::Deadline deadline =
      WaitPoint::Clock::now() + (failed() ? kLeavingFailed : kLeaving);
  for (Backoff backoff; !sent() && !endpoint().abandoned() && WaitPoint::Clock::now() < deadline;)
    backoff.Pause();
}

void MpiCommunicator::Abort(absl::Status why) {
  store().Fail(AbortStatus(options_, endpoint_->rank(), why));
}

void MpiCommunicator::FailBehindAnother(const Collective& call) {
  store().Fail(LateStatus(options_, RankName(rank_), Summarise(call),
                          "the operation that it had called before"));
}

void MpiCommunicator::FailMismatch(int first, const CallSummary& first_call, int second,
                                   const CallSummary& second_call) {
  store().Fail(
      MismatchStatus(options_, RankName(first), first_call, RankName(second), second_call));
}

std::string MpiCommunicator::RankName(int rank) const {
  return ebb::RankName(group_->world_ranks(), rank);
}

bool MpiCommunicator::Await(const Collective& call, absl::FunctionRef<bool()> condition,
                            absl::FunctionRef<std::vector<int>()> absent,
                            WaitPoint::Deadline deadline) {
  Backoff backoff;
  std::optional<WaitNotice> notice, sending;
  for (;;) {
    if (condition()) return true;
    if (failed()) return false;
    const absl::Status mpi = endpoint().status();
    if (!mpi.ok()) store().Fail(RankFailedStatus(endpoint_->rank(), mpi));
    const WaitPoint::Deadline now = WaitPoint::Clock::now();
    if (now >= deadline) {
      const std::vector<int> late = absent();
      const std::string known = store().CompareCalls(WorldRanksOf(group_->world_ranks(), late));
      store().Fail(LateStatus(options_, RankName(rank_), Summarise(call),
                              RankNames(group_->world_ranks(), late), known));
      return false;
    }
    if (!notice.has_value()) {
      NoticeTimes times = options_.notices;
      notice.emplace(times, now);
      times.first_seconds /= 5;  // the other hosts need this rank's calls to compare
      sending.emplace(times, now);
    }
    if (sending->Take(now).has_value()) store().SendCalls();
    if (const std::optional<double> seconds = notice->Take(now)) {
      const std::vector<int> missing = absent();
      const std::string known = store().CompareCalls(WorldRanksOf(group_->world_ranks(), missing));
      if (!failed() && !missing.empty() && LogsFor(call.kind, rank_, missing)) {
        LogWaiting(
            RankName(rank_), *seconds,
            WaitsInCall(options_, Summarise(call), RankNames(group_->world_ranks(), missing)),
            options_.timeout_seconds, known);
      }
    }
    backoff.Pause();
  }
}

MpiCommunicator::Announcement* MpiCommunicator::AnnouncementOf(int peer, int place) const {
  return reinterpret_cast<Announcement*>(announcements_.get()) + kPlaces * peer + place;
}

void MpiCommunicator::Announce(MpiMessage& message, int peer, int place,
                               const Announcement& announcement) {
  Announcement* const announced = AnnouncementOf(peer, place);
  *announced = announcement;
  endpoint().Send(message, world_rank(peer), data_tag() - 1, announcements_,
                  reinterpret_cast<const std::byte*>(announced), sizeof(Announcement));
}

void MpiCommunicator::Expect(int peer) {
  Pair& pair = pairs_[static_cast<size_t>(peer)];
  pair.here = false;
  endpoint().Receive(pair.incoming, world_rank(peer), data_tag() - 1, announcements_,
                     reinterpret_cast<std::byte*>(AnnouncementOf(peer, kIncoming)),
                     sizeof(Announcement));
}

void MpiCommunicator::Run(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) {
  const int peer[] = {call.peer};
  const std::span<const int> peers =
      IsPointToPoint(call.kind) ? std::span<const int>(peer) : others();
  if (!Meet(call, peers, deadline)) return;
  // A rank that gives up had announced its call before. If no elements follow, for which the others
  // would wait, all ranks meet once more.
  if (Summarise(call).elements == 0) {
    Meet(call, peers, deadline);
  } else {
    operations_.Run(call, deadline, team);
  }
}

bool MpiCommunicator::Meet(const Collective& call, std::span<const int> peers,
                           WaitPoint::Deadline deadline) {
  const CallSummary mine = Summarise(call);
  absent_.assign(peers.begin(), peers.end());
  const auto absent = [&] { return absent_; };
  for (const int peer : peers) {
    Pair& pair = pairs_[static_cast<size_t>(peer)];
    const int which = static_cast<int>(pair.sent++ % 2);
    MpiMessage& outgoing = pair.outgoing[which];
    // The announcement of two meetings ago: the peer has answered it.
    if (!Await(
            call, [&] { return outgoing.Test(); }, absent, deadline))
      return false;
    Announce(outgoing, peer, kOutgoing + which, {.call = mine});
  }
  const auto look = [&] {
    std::erase_if(absent_, [&](int peer) {
      Pair& pair = pairs_[static_cast<size_t>(peer)];
      if (pair.here) return true;
      pair.here = pair.incoming.Test();
      if (!pair.here) return false;
      if (!AnnouncementOf(peer, kIncoming)->leaves) return Fits(mine, peer);
      store().Fail(LeftStatus(options_, RankName(peer), "its communicator was destroyed"));
      return false;
    });
    return absent_.empty() && !failed();
  };
  if (!Await(call, look, absent, deadline)) return false;
  // Every rank compares with the first rank, so all that find a difference find the same one.
  const auto called = [&](int member) -> const CallSummary& {
    return member == rank_ ? mine : AnnouncementOf(member, kIncoming)->call;
  };
  for (int member = 1; member < size() && !IsPointToPoint(call.kind); ++member) {
    if (called(member).fingerprint == called(0).fingerprint) continue;
    FailMismatch(0, called(0), member, called(member));
    return false;
  }
  for (const int peer : peers) Expect(peer);
  return true;
}

bool MpiCommunicator::Fits(const CallSummary& mine, int peer) {
  const CallSummary& theirs = AnnouncementOf(peer, kIncoming)->call;
  // A rank calls in one order. So if one rank wants an exchange and the other a meeting of all,
  // neither will come to the other's call.
  const bool exchanges = IsPointToPoint(mine.kind);
  if (exchanges ? FitForExchange(mine, theirs) : !IsPointToPoint(theirs.kind)) return true;
  const int first = std::min(rank_, peer), second = std::max(rank_, peer);
  FailMismatch(first, first == rank_ ? mine : theirs, second, second == rank_ ? mine : theirs);
  return false;
}

}  // namespace ebb
