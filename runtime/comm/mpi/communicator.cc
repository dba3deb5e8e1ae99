#include "ebb/runtime/comm/mpi/communicator.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/wait_notice.h"

namespace ebb {
namespace {

// Large enough for the network's bandwidth, and small enough in a large communicator.
int64_t SlotBytes(int64_t slots) {
  constexpr int64_t kLargest = int64_t{512} << 10, kSmallest = int64_t{64} << 10;
  constexpr int64_t kTogether = int64_t{32} << 20;
  return std::clamp(kTogether / slots / kSmallest * kSmallest, kSmallest, kLargest);
}

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
    : TaskCommunicator({std::move(options), group->world_ranks(), group->rank(), group->hosts()},
                       group->store().calls(), group->name()),
      endpoint_(std::move(endpoint)),
      group_(std::move(group)),
      announcements_(new Announcements[size()]()),
      pairs_(static_cast<size_t>(size())),
      absent_(static_cast<size_t>(size())),
      slot_bytes_(SlotBytes(int64_t{kWays * kSlots} * size())),
      // Not initialised, so that slots that are never used take no pages.
      slots_(new std::byte[kWays * kSlots * size() * slot_bytes_]),
      messages_(static_cast<size_t>(kWays * kSlots * size())) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    others_.push_back(peer);
    Expect(peer);
  }
}

MpiCommunicator::~MpiCommunicator() {
  AwaitAllEnded();
  Leave();
}

void MpiCommunicator::Leave() {
  for (const int peer : others_) {
    announcements_[peer].goodbye.leaves = true;
    Announce(pairs_[peer].goodbye, peer, announcements_[peer].goodbye);
  }
  const auto sent = [&] {
    bool complete = true;
    for (MpiMessage& message : messages_) complete = message.Test() && complete;
    for (Pair& pair : pairs_) complete = pair.outgoing.Test() && pair.goodbye.Test() && complete;
    return complete;
  };
  endpoint_->AwaitSent(sent);
}

void MpiCommunicator::Abort(absl::Status why) {
  Fail(members().Aborted(why));
}

bool MpiCommunicator::Await(const Collective& call, absl::FunctionRef<bool()> condition,
                            absl::FunctionRef<std::vector<int>()> absent,
                            WaitPoint::Deadline deadline) {
  Backoff backoff;
  std::optional<WaitNotice> notice, sending;
  for (;;) {
    if (condition()) return true;
    if (failed()) return false;
    const WaitPoint::Deadline now = WaitPoint::Clock::now();
    if (now >= deadline) {
      const std::vector<int> late = absent();
      const std::string known = store().CompareCalls(members().OfWorld(late));
      Fail(members().Late(Summarise(call), members().NamesAndHosts(late), known));
      return false;
    }
    if (!notice.has_value()) {
      NoticeTimes times = members().options.notices;
      notice.emplace(times, now);
      times.first_seconds /= 5;  // the other hosts need this rank's calls to compare
      sending.emplace(times, now);
    }
    if (sending->Take(now).has_value()) {
      const std::vector<int> missing = members().OfWorld(absent());
      if (lane() != nullptr && !missing.empty()) lane()->Waits(missing).IgnoreError();
      store().SendCalls();
    }
    if (const std::optional<double> seconds = notice->Take(now)) {
      const std::vector<int> missing = absent();
      const std::string known = store().CompareCalls(members().OfWorld(missing));
      if (!failed() && !missing.empty() && members().Logs(call.kind, missing))
        members().LogWait(*seconds, Summarise(call), members().NamesAndHosts(missing), known);
    }
    backoff.Pause();
  }
}

// `announcement`: in announcements_.
void MpiCommunicator::Announce(MpiMessage& message, int peer, const Announcement& announcement) {
  endpoint_->Send(message, world_rank(peer), data_tag() - 1, announcements_,
                  reinterpret_cast<const std::byte*>(&announcement), sizeof(announcement));
}

void MpiCommunicator::Expect(int peer) {
  Pair& pair = pairs_[peer];
  pair.here = false;
  endpoint_->Receive(pair.incoming, world_rank(peer), data_tag() - 1, announcements_,
                     reinterpret_cast<std::byte*>(&announcements_[peer].incoming),
                     sizeof(Announcement));
}

void MpiCommunicator::Run(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) {
  const int peer[] = {call.peer};
  const std::span<const int> peers =
      IsPointToPoint(call.kind) ? std::span<const int>(peer) : others_;
  if (!Meet(call, peers, deadline)) return;
  // A rank that gives up had announced its call before. If no elements follow, for which the others
  // would wait, all ranks meet once more.
  if (ElementsOf(call) == 0) {
    Meet(call, peers, deadline);
  } else {
    RunStaged(call, deadline, team);
  }
}

bool MpiCommunicator::Meet(const Collective& call, std::span<const int> peers,
                           WaitPoint::Deadline deadline) {
  const CallSummary mine = Summarise(call);
  absent_.assign(peers.begin(), peers.end());
  const auto absent = [&] { return absent_; };
  for (const int peer : peers) {
    MpiMessage& outgoing = pairs_[peer].outgoing;
    // The peer has waited for the last announcement since the end of the meeting before it.
    if (!Await(
            call, [&] { return outgoing.Test(); }, absent, deadline))
      return false;
    announcements_[peer].outgoing.call = mine;
    Announce(outgoing, peer, announcements_[peer].outgoing);
  }
  const auto look = [&] {
    std::erase_if(absent_, [&](int peer) {
      Pair& pair = pairs_[peer];
      if (pair.here) return true;
      pair.here = pair.incoming.Test();
      if (!pair.here) return false;
      if (!announcements_[peer].incoming.leaves) return Fits(mine, peer);
      Fail(members().Left(members().Name(peer), "its communicator was destroyed"));
      return false;
    });
    return absent_.empty() && !failed();
  };
  if (!Await(call, look, absent, deadline)) return false;
  // Every rank compares with the first rank, so all that find a difference find the same one.
  const auto called = [&](int member) -> const CallSummary& {
    return member == rank() ? mine : announcements_[member].incoming.call;
  };
  for (int member = 1; member < size() && !IsPointToPoint(call.kind); ++member) {
    if (called(member).fingerprint == called(0).fingerprint) continue;
    Fail(members().Mismatch(0, called(0), member, called(member)));
    return false;
  }
  for (const int peer : peers) Expect(peer);
  return true;
}

bool MpiCommunicator::Fits(const CallSummary& mine, int peer) {
  const CallSummary& theirs = announcements_[peer].incoming.call;
  // A rank calls in one order. So if one rank wants an exchange and the other a meeting of all,
  // neither will come to the other's call.
  const bool exchanges = IsPointToPoint(mine.kind);
  if (exchanges ? FitForExchange(mine, theirs) : !IsPointToPoint(theirs.kind)) return true;
  const int first = std::min(rank(), peer), second = std::max(rank(), peer);
  Fail(members().Mismatch(first, first == rank() ? mine : theirs, second,
                          second == rank() ? mine : theirs));
  return false;
}

bool MpiCommunicator::RunSteps(const StagedMovement& movement, WaitPoint::Deadline deadline) {
  const Collective& call = movement.call();
  const int64_t steps = movement.steps();
  for (int64_t step = 0; step < std::min<int64_t>(kSlots, steps); ++step) Expect(movement, step);
  constexpr int64_t kAhead = kSlots - 1;
  for (int64_t step = 0; step < steps + kAhead; ++step) {
    if (step < steps && !Send(movement, step, deadline)) return false;
    const int64_t arrived = step - kAhead;
    if (arrived < 0) continue;
    if (!AwaitSlots(kReceived, arrived, call, deadline)) return false;
    movement.Consume(arrived, [&](int peer, int64_t) { return Slot(kReceived, peer, arrived); });
    if (arrived + kSlots < steps) Expect(movement, arrived + kSlots);
  }
  for (int64_t step = std::max<int64_t>(0, steps - kSlots); step < steps; ++step) {
    if (!AwaitSlots(kSent, step, call, deadline)) return false;
  }
  return true;
}

void MpiCommunicator::Expect(const StagedMovement& movement, int64_t step) {
  for (const int peer : others_) {
    const int64_t bytes = movement.ReceivedBytes(peer, step);
    if (bytes == 0) continue;
    endpoint_->Receive(messages_[SlotOf(kReceived, peer, step)], world_rank(peer), data_tag(),
                       slots_, Slot(kReceived, peer, step), bytes);
  }
}

bool MpiCommunicator::Send(const StagedMovement& movement, int64_t step,
                           WaitPoint::Deadline deadline) {
  if (!AwaitSlots(kSent, step, movement.call(), deadline)) return false;
  const std::byte* common = nullptr;
  for (const int peer : others_) {
    const int64_t bytes = movement.SentBytes(peer, step);
    if (bytes == 0) continue;
    const std::byte* slot = common;
    if (slot == nullptr) {
      std::byte* const filled = Slot(kSent, peer, step);
      movement.Fill(peer, step, filled);
      slot = filled;
      if (movement.same_for_all()) common = slot;
    }
    endpoint_->Send(messages_[SlotOf(kSent, peer, step)], world_rank(peer), data_tag(), slots_,
                    slot, bytes, /*to_be_taken=*/true);
  }
  return true;
}

bool MpiCommunicator::AwaitSlots(Way way, int64_t step, const Collective& call,
                                 WaitPoint::Deadline deadline) {
  const auto message = [&](int peer) -> MpiMessage& { return messages_[SlotOf(way, peer, step)]; };
  const auto all = [&] {
    bool complete = true;
    for (const int peer : others_) complete = message(peer).Test() && complete;
    return complete;
  };
  const auto absent = [&] {
    std::vector<int> late;
    for (const int peer : others_) {
      if (message(peer).is_under_way()) late.push_back(peer);
    }
    return late;
  };
  return Await(call, all, absent, deadline);
}

}  // namespace ebb
