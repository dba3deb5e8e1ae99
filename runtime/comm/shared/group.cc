#include "ebb/runtime/comm/shared/group.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/comm/shared/world.h"
#include "ebb/runtime/comm/wait_notice.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/cpu/core_share.h"

namespace ebb {
namespace {

using shared::GroupSeat;

// An exchange as one word: its number between the two ranks, the peer, and whether this rank
// receives.
constexpr uint64_t kReceives = 1;
uint64_t Word(uint64_t number, int peer) {
  constexpr int kPeerBits = 21;
  return number << kPeerBits | static_cast<uint64_t>(peer + 1) << 1;
}

template <size_t kBytes>
void WriteText(char (&to)[kBytes], absl::string_view text) {
  const size_t bytes = std::min(text.size(), kBytes - 1);
  std::copy_n(text.data(), bytes, to);
  to[bytes] = '\0';
}

template <size_t kBytes>
std::string ReadText(const char (&from)[kBytes]) {
  return std::string(from, strnlen(from, kBytes));
}

}  // namespace

absl::StatusOr<SharedGroup::Place> SharedGroup::Form(SharedWorld& world, StoreGroup& parent,
                                                     const Proposal& proposal) {
  EBB_RETURN_IF_ERROR(world.status());
  // As much as all ranks of the parent need, because this rank does not know yet who its members
  // are.
  const int64_t bytes = shared::GroupLayout(parent.size()).bytes(), mine = world.Reserve(bytes);
  absl::StatusOr<std::shared_ptr<StoreGroup>> ranks = parent.Form(proposal, mine);
  if (!ranks.ok() || (*ranks)->memory() != mine) world.Release(mine, bytes);
  EBB_RETURN_IF_ERROR(ranks.status());
  const shared::GroupLayout layout((*ranks)->size());
  absl::StatusOr<Mapping> memory = world.Map((*ranks)->memory(), layout.bytes());
  // The others have the communicator.
  if (!memory.ok()) world.Fail(RankFailedStatus(world.rank(), memory.status()));
  EBB_RETURN_IF_ERROR(memory.status());
  return Place{.options = proposal.options,
               .ranks = *std::move(ranks),
               .layout = layout,
               .bytes = bytes,
               .memory = *std::move(memory)};
}

SharedGroup::SharedGroup(SharedWorld& world, Place place)
    : world_(world),
      place_(std::move(place)),
      spins_(world.size() <= CoreShare::Cores()),
      exchanges_(static_cast<size_t>(size())) {
  world_.Add(*this);
}

SharedGroup::~SharedGroup() {
  world_.Remove(*this);
  if (header().gone.fetch_add(1, std::memory_order_acq_rel) + 1 == size())
    world_.Release(place_.ranks->memory(), place_.bytes);
}

WaitPoint& SharedGroup::point() const {
  return world_.point(place_.ranks->number());
}

void SharedGroup::Wake() {
  point().Notify();
}

std::string SharedGroup::RankName(int rank) const {
  return ebb::RankName(world_ranks(), rank);
}

uint64_t SharedGroup::Arrive() {
  const uint64_t meeting = next();
  mine().arrived.store(meeting, std::memory_order_seq_cst);
  const uint64_t all = (meeting + 1) / 2 * static_cast<uint64_t>(size());
  if (header().arrivals[meeting % 2].fetch_add(1, std::memory_order_seq_cst) + 1 == all) Wake();
  return meeting;
}

bool SharedGroup::Await(uint64_t meeting, const CallSummary& call, WaitPoint::Deadline deadline) {
  const std::atomic<uint64_t>& arrivals = header().arrivals[meeting % 2];
  const uint64_t all = (meeting + 1) / 2 * static_cast<uint64_t>(size());
  const auto met = [&] { return arrivals.load(std::memory_order_seq_cst) >= all; };
  if (met()) return true;
  const auto left = [&] { return header().left.load(std::memory_order_acquire) - 1; };
  const auto absent = [&] {
    std::vector<int> ranks;
    for (int rank = 0; rank < size(); ++rank) {
      if (seat(rank).arrived.load() < meeting) ranks.push_back(rank);
    }
    return ranks;
  };
  if (header().posted.load(std::memory_order_seq_cst) > 0) FailIfAwaited(call, meeting);
  Sleep([&] { return met() || left() >= 0; }, deadline,
        [&](double seconds) { SayWaiting(call, absent(), seconds); });
  // A rank that has left had come to this meeting before, or the meeting would not be complete. So
  // that is looked at last.
  if (met()) return true;
  if (failed()) return false;
  if (left() >= 0) return FailBecauseLeft(left());
  FailLate(call, absent());
  return false;
}

void SharedGroup::Sleep(absl::FunctionRef<bool()> condition, WaitPoint::Deadline deadline,
                        absl::FunctionRef<void(double seconds)> say) {
  const auto begin = WaitPoint::Clock::now();
  const std::chrono::nanoseconds spin = spins_ ? spin_ : std::chrono::nanoseconds(0);
  AwaitAndSay(
      point(), [&] { return condition() || failed(); }, deadline, spin, options().notices, say);
  constexpr std::chrono::nanoseconds kShortest{1000}, kLongest{30'000};
  const bool slept = WaitPoint::Clock::now() - begin > spin;
  spin_ = slept ? std::max(kShortest, spin_ / 2) : std::min(kLongest, spin_ * 2);
}

void SharedGroup::SayWaiting(const CallSummary& call, std::span<const int> absent, double seconds) {
  const std::string known = world_.CompareCalls(WorldRanksOf(world_ranks(), absent));
  if (failed() || absent.empty() || !SpeaksFor(call.kind, rank(), absent)) return;
  LogWaiting(RankName(rank()), seconds,
             WaitsInCall(options(), call, RankNames(world_ranks(), absent)),
             options().timeout_seconds, known);
}

void SharedGroup::FailLate(const CallSummary& call, std::span<const int> absent) {
  const std::string known = world_.CompareCalls(WorldRanksOf(world_ranks(), absent));
  Fail(LateStatus(options(), RankName(rank()), call, RankNames(world_ranks(), absent), known));
}

bool SharedGroup::AllCalledTheSame(uint64_t meeting) {
  const CallSummary& first = call(0, meeting).summary;
  for (int other = 1; other < size(); ++other) {
    const CallSummary& called = call(other, meeting).summary;
    if (called.fingerprint == first.fingerprint) continue;
    FailMismatch(0, first, other, called);
    return false;
  }
  return true;
}

bool SharedGroup::AwaitPeer(const CallSummary& call, WaitPoint::Deadline deadline,
                            absl::FunctionRef<bool()> condition) {
  const int peer = call.peer;
  const auto has_left = [&] { return seat(peer).has_left.load(std::memory_order_acquire) != 0; };
  Sleep([&] { return condition() || has_left(); }, deadline,
        [&](double seconds) {
          SayWaiting(call, {&peer, 1}, seconds);
        });
  if (condition()) return true;
  if (failed()) return false;
  if (has_left()) return FailBecauseLeft(peer);
  FailLate(call, {&peer, 1});
  return false;
}

bool SharedGroup::Exchange(const GroupSeat::Call& call, WaitPoint::Deadline deadline,
                           absl::FunctionRef<bool()> send, absl::FunctionRef<bool()> receive) {
  const int peer = call.summary.peer;
  const uint64_t number = ++exchanges_[static_cast<size_t>(peer)];
  GroupSeat &own = mine(), &other = seat(peer);
  const uint64_t met = own.arrived.load();
  own.post = call;
  own.post_meeting = met;
  own.sent.store(0);
  own.taken.store(0);
  const bool receives = call.summary.kind == CollectiveKind::kReceive;
  own.posted.store(Word(number, peer) | (receives ? kReceives : 0), std::memory_order_seq_cst);
  header().posted.fetch_add(1, std::memory_order_seq_cst);
  Wake();
  const auto is_over = [&] { return own.acknowledged.load() == Word(number, peer); };
  const auto is_at_a_collective = [&] { return other.arrived.load() > met; };
  uint64_t posted = 0;
  const auto came = [&] {
    posted = other.posted.load();
    return (posted & ~kReceives) == Word(number, rank());
  };
  if (!AwaitPeer(own.post.summary, deadline,
                 [&] { return came() || is_over() || is_at_a_collective(); }))
    return false;
  const bool is_there = came();
  // A receiver that has taken the elements goes on.
  if (!is_over()) {
    // A rank calls in one order. So the peer cannot have passed its next meeting, which needs this
    // rank, and it never comes here.
    if (!is_there) {
      FailMismatch(peer, this->call(peer, met + 1).summary, rank(), own.post.summary);
      return false;
    }
    // The receiver compares the calls, because the sender's call stays until the receiver has ended
    // the exchange. The receiver's call does not: the receiver goes on to its next one.
    const bool compares = receives || (posted & kReceives) == 0;
    if (compares && !FitForExchange(own.post.summary, other.post.summary)) {
      const int first = std::min(rank(), peer), second = std::max(rank(), peer);
      FailMismatch(first, seat(first).post.summary, second, seat(second).post.summary);
      return false;
    }
    if (receives) {
      if (!receive()) return false;
      other.acknowledged.store(Word(number, rank()), std::memory_order_seq_cst);
    } else if (!send() || !AwaitPeer(own.post.summary, deadline, is_over)) {
      return false;
    }
  }
  own.posted.store(0, std::memory_order_seq_cst);
  header().posted.fetch_sub(1, std::memory_order_relaxed);
  Wake();
  return true;
}

// For a rank that has come to a meeting of all: a peer that waits for it in a send or receive never
// comes to that meeting. Of the two ranks, the one that comes second sees it.
void SharedGroup::FailIfAwaited(const CallSummary& call, uint64_t meeting) {
  for (int peer = 0; peer < size(); ++peer) {
    const uint64_t next = exchanges_[static_cast<size_t>(peer)] + 1;
    // A rank that has come to the meeting may have gone on already.
    if ((seat(peer).posted.load(std::memory_order_seq_cst) & ~kReceives) == Word(next, rank()) &&
        seat(peer).post_meeting < meeting)
      FailMismatch(rank(), call, peer, seat(peer).post.summary);
  }
}

SharedGroup::Reading::Reading(SharedGroup& group) : group_(group) {
  // This comes before the look for a failure: either the rank that fails the group sees this
  // reader, or this reader sees the failure.
  if (group_.world_.is_threads()) group_.header().readers.fetch_add(1, std::memory_order_seq_cst);
  allowed_ = !group_.failed();
}

SharedGroup::Reading::~Reading() {
  if (group_.world_.is_threads() &&
      group_.header().readers.fetch_sub(1, std::memory_order_seq_cst) == 1 && group_.failed())
    group_.Wake();
}

void SharedGroup::AwaitNoReader() {
  point().Await([&] { return header().readers.load(std::memory_order_seq_cst) == 0; });
}

bool SharedGroup::failed() const {
  return header().failure.is_set() || world_.failed();
}

absl::Status SharedGroup::status() const {
  if (!failed()) return absl::OkStatus();
  const std::scoped_lock lock(mutex_);
  if (status_.ok()) status_ = header().failure.is_set() ? header().failure.Get() : world_.status();
  return status_;
}

void SharedGroup::Fail(const absl::Status& why) {
  if (!failed()) header().failure.TrySet(why);
  // The first rank to fail it may have been killed before it woke the others.
  Wake();
}

void SharedGroup::FailBehindAnother(const CallSummary& call) {
  Fail(LateStatus(options(), RankName(rank()), call, "the operation that it had called before"));
}

void SharedGroup::FailMismatch(int first, const CallSummary& first_call, int second,
                               const CallSummary& second_call) {
  Fail(MismatchStatus(options(), RankName(first), first_call, RankName(second), second_call));
}

bool SharedGroup::FailBecauseLeft(int rank) {
  world_.store().NoteFailure(world_rank(rank));
  Fail(LeftStatus(options(), RankName(rank), ReadText(seat(rank).how_left)));
  return false;
}

void SharedGroup::Leave(const std::string& how) {
  {
    const std::scoped_lock lock(mutex_);
    if (mine().has_left.load() != 0) return;
    WriteText(mine().how_left, how);
    mine().has_left.store(1, std::memory_order_seq_cst);
  }
  int32_t none = 0;
  header().left.compare_exchange_strong(none, rank() + 1, std::memory_order_seq_cst);
  Wake();
  place_.ranks->Leave();
}

}  // namespace ebb
