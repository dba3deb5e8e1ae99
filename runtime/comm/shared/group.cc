#include "ebb/runtime/comm/shared/group.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/shared/world.h"
#include "ebb/runtime/comm/wait_notice.h"
#include "ebb/runtime/device/cores.h"

namespace ebb {
namespace {

using shared::RankRecord;

// An exchange as one word: its number between the two ranks, the peer, and whether this rank
// receives.
constexpr uint64_t kReceives = 1;
uint64_t Word(uint64_t number, int peer) {
  constexpr int kPeerBits = 21;
  return number << kPeerBits | static_cast<uint64_t>(peer + 1) << 1;
}

}  // namespace

SharedGroup::SharedGroup(SharedWorld& world, Place place)
    : world_(world),
      place_(std::move(place)),
      spins_(world.size() <= CoreShare::Cores()),
      exchanges_(place_.members.world_ranks.size()) {
  world_.Add(*this);
}

SharedGroup::~SharedGroup() {
  world_.Remove(*this);
  if (slot_bytes() > 0 && header().users.fetch_sub(1, std::memory_order_acq_rel) == 1)
    world_.Release(place_.offset, place_.layout.bytes());
}

WaitPoint& SharedGroup::point() const {
  return world_.point(header().point);
}

void SharedGroup::Wake() {
  point().Notify();
}

uint64_t SharedGroup::Arrive() {
  const uint64_t meeting = mine().arrived.load(std::memory_order_relaxed) + 1;
  mine().arrived.store(meeting, std::memory_order_seq_cst);
  const uint64_t all = (meeting + 1) / 2 * static_cast<uint64_t>(size());
  const uint64_t arrived =
      header().arrivals[meeting % 2].fetch_add(1, std::memory_order_seq_cst) + 1;
  // A rank that waits for this one in a send or receive looks whether this one has come here.
  if (arrived == all || header().posted.load(std::memory_order_seq_cst) > 0) Wake();
  return meeting;
}

bool SharedGroup::Await(uint64_t meeting, const CallSummary& call, WaitPoint::Deadline deadline) {
  return AwaitMeeting(meeting, options(), &call, deadline).ok();
}

// `call` is none when ranks meet to form groups with the options that they propose. A failure then
// is for good, also for a rank that comes when all the others are there already. Once the ranks have
// come again after they have agreed, a failure does not undo the groups.
absl::Status SharedGroup::AwaitMeeting(uint64_t meeting, const CommunicatorOptions& options,
                                       const CallSummary* call, WaitPoint::Deadline deadline,
                                       bool is_agreed) {
  const std::atomic<uint64_t>& arrivals = header().arrivals[meeting % 2];
  const uint64_t all = (meeting + 1) / 2 * static_cast<uint64_t>(size());
  const auto met = [&] { return arrivals.load(std::memory_order_seq_cst) >= all; };
  if (call != nullptr && met()) return absl::OkStatus();
  const auto left = [&] { return header().left.load(std::memory_order_acquire) - 1; };
  const auto absent = [&] {
    std::vector<int> ranks;
    for (int rank = 0; rank < size(); ++rank) {
      if (record(rank).arrived.load() < meeting) ranks.push_back(rank);
    }
    return ranks;
  };
  Sleep([&] { return met() || left() >= 0; }, deadline, options.notices,
        [&](double seconds) { LogWait(options, call, absent(), seconds); },
        [&] { LookForCycle(absent()); });
  const bool failure_undoes = call == nullptr && !is_agreed;
  if (met() && !(failure_undoes && failed())) return absl::OkStatus();
  if (failed()) return status();
  // A rank that has left had come to this meeting before, or the meeting would not be complete. So
  // that is looked at last.
  if (const int rank = left(); rank >= 0) {
    FailBecauseLeft(rank, call);
  } else {
    FailLate(options, call, absent());
  }
  return status();
}

void SharedGroup::Sleep(absl::FunctionRef<bool()> condition, WaitPoint::Deadline deadline,
                        const NoticeTimes& notices,
                        absl::FunctionRef<void(double seconds)> log_wait,
                        absl::FunctionRef<void()> look) {
  const auto begin = WaitPoint::Clock::now();
  const std::chrono::nanoseconds spin = spins_ ? spin_ : std::chrono::nanoseconds(0);
  AwaitAndLog(
      point(), [&] { return condition() || failed(); }, deadline, spin, notices, log_wait, look);
  constexpr std::chrono::nanoseconds kShortest{1000}, kLongest{30'000};
  const bool slept = WaitPoint::Clock::now() - begin > spin;
  spin_ = slept ? std::max(kShortest, spin_ / 2) : std::min(kLongest, spin_ * 2);
}

void SharedGroup::LookForCycle(std::span<const int> absent) {
  if (lane_ == nullptr || absent.empty()) return;
  const std::vector<int> of_world = members().OfWorld(absent);
  if (const absl::Status apart = lane_->Waits(of_world); !apart.ok()) Fail(apart);
}

void SharedGroup::LogWait(const CommunicatorOptions& options, const CallSummary* call,
                          std::span<const int> absent, double seconds) {
  const std::vector<int> of_world = members().OfWorld(absent);
  const std::string known = world_.CompareCalls(of_world);
  const CollectiveKind kind = call != nullptr ? call->kind : CollectiveKind::kBarrier;
  if (failed() || absent.empty() || !members().Logs(kind, absent)) return;
  const std::string awaited = members().NamesAndHosts(absent);
  if (call != nullptr) return members().LogWait(seconds, *call, awaited, known);
  const int me = rank();
  LogWaiting(members().NamesAndHosts({&me, 1}), seconds,
             absl::StrCat("for ", awaited, " to create communicator '", options.name, "'"),
             options.timeout_seconds, known);
}

void SharedGroup::FailLate(const CommunicatorOptions& options, const CallSummary* call,
                           std::span<const int> absent) {
  const std::string awaited = members().NamesAndHosts(absent);
  if (call == nullptr) return Fail(LateCreationStatus(options, awaited));
  const std::string known = world_.CompareCalls(members().OfWorld(absent));
  Fail(members().Late(*call, awaited, known));
}

bool SharedGroup::AllCalledTheSame(uint64_t meeting) {
  const CallSummary& first = call(0, meeting).summary;
  for (int other = 1; other < size(); ++other) {
    const CallSummary& called = call(other, meeting).summary;
    if (called.fingerprint == first.fingerprint) continue;
    Fail(members().Mismatch(0, first, other, called));
    return false;
  }
  return true;
}

bool SharedGroup::AwaitPeer(const CallSummary& call, WaitPoint::Deadline deadline,
                            absl::FunctionRef<bool()> condition) {
  const int peer = call.peer;
  const auto has_left = [&] { return record(peer).has_left.load(std::memory_order_acquire) != 0; };
  Sleep([&] { return condition() || has_left(); }, deadline, options().notices,
        [&](double seconds) {
          LogWait(options(), &call, {&peer, 1}, seconds);
        },
        [&] {
          LookForCycle({&peer, 1});
        });
  if (condition()) return true;
  if (failed()) return false;
  if (has_left()) {
    FailBecauseLeft(peer, &call);
  } else {
    FailLate(options(), &call, {&peer, 1});
  }
  return false;
}

bool SharedGroup::Exchange(const RankRecord::Call& call, WaitPoint::Deadline deadline,
                           absl::FunctionRef<bool()> send, absl::FunctionRef<bool()> receive) {
  const int peer = call.summary.peer;
  const uint64_t number = ++exchanges_[peer];
  RankRecord &own = mine(), &other = record(peer);
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
      Fail(members().Mismatch(peer, this->call(peer, met + 1).summary, rank(), own.post.summary));
      return false;
    }
    // The receiver compares the calls, because the sender's call stays until the receiver has ended
    // the exchange. The receiver's call does not: the receiver goes on to its next one.
    const bool compares = receives || (posted & kReceives) == 0;
    if (compares && !FitForExchange(own.post.summary, other.post.summary)) {
      const int first = std::min(rank(), peer), second = std::max(rank(), peer);
      Fail(members().Mismatch(first, record(first).post.summary, second,
                              record(second).post.summary));
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

SharedGroup::Reading::Reading(SharedGroup& group) : group_(group) {
  // The increment comes before the look for a failure: either the rank that fails the group sees
  // this reader, or this reader sees the failure.
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

absl::StatusOr<SharedGroup::Place> SharedGroup::Join(
    const Proposal& proposal, const void* attached,
    absl::FunctionRef<void(int rank, const void* attached)> see) {
  const uint64_t number = formed_++;
  const auto half = static_cast<size_t>(number % 2);
  const CommunicatorOptions& options = proposal.options;
  const WaitPoint::Deadline deadline = DeadlineAfter(CreationSeconds(options));
  const std::string packed = Pack(proposal);
  shared::SharedProposal& own = mine().proposals[half];
  std::copy(packed.begin(), packed.end(), own.packed);
  own.bytes = static_cast<uint32_t>(packed.size());
  own.attached = attached;
  EBB_RETURN_IF_ERROR(AwaitMeeting(Arrive(), options, nullptr, deadline));
  std::vector<Proposal> proposals;
  for (int other = 0; other < size(); ++other) {
    const shared::SharedProposal& theirs = record(other).proposals[half];
    proposals.push_back(UnpackProposal({theirs.packed, theirs.bytes}));
  }
  const auto me = static_cast<size_t>(rank());
  EBB_ASSIGN_OR_RETURN(const std::vector<size_t> formed,
                       FormGroup(members().world_ranks, proposals, me));
  Place place;
  place.members.options = proposals[me].options;
  place.members.options.notices = options.notices;
  place.path = absl::StrCat(path(), ".", number, ":", proposal.colour);
  place.layout = shared::GroupLayout(static_cast<int>(formed.size()));
  for (const size_t member : formed) {
    place.members.world_ranks.push_back(members().world_ranks[member]);
    if (!members().hosts.empty()) place.members.hosts.push_back(members().hosts[member]);
  }
  place.members.rank =
      static_cast<int>(std::find(formed.begin(), formed.end(), me) - formed.begin());
  if (place.members.rank == 0) {
    const absl::StatusOr<int64_t> offset =
        MakeMemory(place.layout, static_cast<int>(formed.size()));
    if (offset.ok()) {
      mine().formed[half] = *offset;
    } else {
      Fail(offset.status());  // of all groups that are formed now
    }
  }
  bool sees = false;
  {
    const Reading reading(*this);
    sees = reading.allowed();
    for (size_t i = 0; i < formed.size() && sees; ++i)
      see(static_cast<int>(i), record(static_cast<int>(formed[i])).proposals[half].attached);
  }
  const absl::Status met =
      sees ? AwaitMeeting(Arrive(), options, nullptr, deadline, /*is_agreed=*/true) : status();
  if (!met.ok()) {
    AwaitNoReader();  // so no rank reads the attached object
    return met;
  }
  place.offset = record(static_cast<int>(formed[0])).formed[half];
  absl::StatusOr<Mapping> memory = world_.Map(place.offset, place.layout.bytes());
  if (!memory.ok()) {
    Fail(memory.status());
    return status();
  }
  place.memory = *std::move(memory);
  return place;
}

absl::StatusOr<int64_t> SharedGroup::MakeMemory(const shared::GroupLayout& layout, int ranks) {
  EBB_ASSIGN_OR_RETURN(const int64_t offset, world_.Reserve(layout.bytes()));
  EBB_ASSIGN_OR_RETURN(const Mapping memory, world_.Map(offset, layout.bytes()));
  auto* const made = reinterpret_cast<shared::GroupHeader*>(memory.data());
  made->users.store(ranks);
  made->point = world_.NextPoint();
  return offset;
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

void SharedGroup::Abort(const absl::Status& why) {
  world_.NoteFailure(world_.rank());
  Fail(members().Aborted(why));
}

std::string SharedGroup::HowLeft(int rank) const {
  return std::string(record(rank).how_left,
                     strnlen(record(rank).how_left, shared::kReasonBytesMax));
}

void SharedGroup::FailBecauseLeft(int rank, const CallSummary* call) {
  const int of_world = members().world_rank(rank);
  world_.NoteFailure(of_world);
  Fail(call != nullptr ? members().Left(members().Name(rank), HowLeft(rank))
                       : LeftBeforeCreationStatus(of_world, HowLeft(rank)));
}

void SharedGroup::Leave(const std::string& how) {
  {
    const std::scoped_lock lock(mutex_);
    if (mine().has_left.load() != 0) return;
    how.copy(mine().how_left, shared::kReasonBytesMax - 1);  // zeros follow
    mine().has_left.store(1, std::memory_order_seq_cst);
  }
  int32_t none = 0;
  header().left.compare_exchange_strong(none, rank() + 1, std::memory_order_seq_cst);
  Wake();
}

}  // namespace ebb
