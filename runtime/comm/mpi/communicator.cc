#include "ebb/runtime/comm/mpi/communicator.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/comm/wait_notice.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

// What a rank has sent is on its way within this time, or another rank has ended. Of those that have failed, others
// may have.
constexpr std::chrono::milliseconds kLeaving{2000}, kLeavingFailed{200};

std::string Pack(const Proposal& proposal) {
  return Packer()
      .Add(proposal.options.name)
      .Add(static_cast<uint64_t>(int64_t{proposal.options.reduction_group}))
      .Add(std::bit_cast<uint64_t>(proposal.options.timeout_seconds))
      .Add(static_cast<uint64_t>(int64_t{proposal.colour}))
      .Add(static_cast<uint64_t>(int64_t{proposal.key}))
      .Take();
}

Proposal Unpack(std::string_view text) {
  Unpacker unpacker(text);
  Proposal proposal;
  proposal.options.name = unpacker.Text();
  proposal.options.reduction_group = static_cast<int>(unpacker.Number());
  proposal.options.timeout_seconds = std::bit_cast<double>(unpacker.Number());
  proposal.colour = static_cast<int>(unpacker.Number());
  proposal.key = static_cast<int>(unpacker.Number());
  return proposal;
}

Store::Round RoundOf(const MpiWorld::Parent& parent) {
  return {.name = absl::StrCat(parent.name, ".", parent.rounds), .members = parent.world_ranks};
}

}  // namespace

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> MpiCommunicator::Form(
    const std::shared_ptr<MpiWorld>& world, MpiWorld::Parent& parent, const Proposal& proposal) {
  EBB_RETURN_IF_ERROR(world->status());
  const CommunicatorOptions& wanted = proposal.options;
  Store::Round round = RoundOf(parent);
  ++parent.rounds;
  round.timeout_seconds = CreationSeconds(wanted);
  round.notices = wanted.notices;
  round.what = absl::StrCat("to create communicator '", wanted.name, "'");
  EBB_ASSIGN_OR_RETURN(const Store::Gathered gathered,
                       world->store().Gather(round, Pack(proposal)));
  if (gathered.outcome == Store::Gathered::Outcome::kLate)
    return LateCreationStatus(wanted, RankNames(gathered.absent));
  if (gathered.outcome == Store::Gathered::Outcome::kLeft)
    return LeftBeforeCreationStatus(gathered.absent[0], "its communicator or World was destroyed");
  std::vector<Proposal> proposals;
  for (const std::string& text : gathered.texts) proposals.push_back(Unpack(text));
  EBB_ASSIGN_OR_RETURN(const auto groups, FormGroups(parent.world_ranks, proposals));
  const int id = static_cast<int>(gathered.number);
  if (MpiWorld::kTags * (gathered.number + 1) > static_cast<uint64_t>(world->port().tag_max())) {
    return absl::ResourceExhaustedError(
        absl::StrCat("communicator '", wanted.name, "' is the ", id,
                     "th of this world, for which this MPI has no tag (its largest is ",
                     world->port().tag_max(), ")"));
  }
  for (const std::vector<size_t>& members : groups) {
    MpiWorld::Parent self;
    for (const size_t member : members) self.world_ranks.push_back(parent.world_ranks[member]);
    const auto me = std::find(self.world_ranks.begin(), self.world_ranks.end(), world->rank());
    if (me == self.world_ranks.end()) continue;
    const int rank = static_cast<int>(me - self.world_ranks.begin());
    self.name = absl::StrCat(id, ":", self.world_ranks[0]);
    return std::unique_ptr<CommunicatorBackend>(
        new MpiCommunicator(world, id, std::move(self), rank, wanted));
  }
  return absl::InternalError("a rank is in none of the groups that it has proposed");
}

MpiCommunicator::MpiCommunicator(std::shared_ptr<MpiWorld> world, int id, MpiWorld::Parent self,
                                 int rank, CommunicatorOptions options)
    : TaskCommunicator(options.timeout_seconds),
      world_(std::move(world)),
      id_(id),
      self_(std::move(self)),
      rank_(rank),
      options_(std::move(options)),
      letters_(new std::byte[3 * sizeof(Letter) * self_.world_ranks.size()]()),
      pairs_(self_.world_ranks.size()),
      absent_(self_.world_ranks.size()),
      messages_(*this, size()),
      operations_(rank_, size(), options_.reduction_group, messages_) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    others_.push_back(peer);
    Expect(peer);
  }
  world_->Register(self_.name, *this);
}

MpiCommunicator::~MpiCommunicator() {
  AwaitAllEnded();
  Leave();
  world_->Forget(self_.name);
}

void MpiCommunicator::Leave() {
  world_->store().LeaveRound(RoundOf(self_));
  const MessageMemory memory(new std::byte[sizeof(Letter)]());
  auto* const letter = reinterpret_cast<Letter*>(memory.get());
  letter->has_left = 1;
  letter->told = world_->told();
  const absl::Status failure = status();
  letter->code = static_cast<int32_t>(failure.code());
  const absl::string_view text =
      failure.ok() ? "its communicator was destroyed" : failure.message();
  std::copy_n(text.data(), std::min(text.size(), Letter::kTextBytesMax - 1), letter->text);
  std::vector<MpiMessage> last(others_.size());
  for (size_t i = 0; i < others_.size(); ++i) {
    port().Send(last[i], world_rank(others_[i]), data_tag() - 1, memory, memory.get(),
                sizeof(Letter));
  }
  const auto sent = [&] {
    bool complete = messages_.TestAll();
    for (MpiMessage& message : last) complete = message.Test() && complete;
    for (Pair& pair : pairs_) {
      for (MpiMessage& message : pair.outgoing) complete = message.Test() && complete;
    }
    return complete;
  };
  const WaitPoint::Deadline deadline =
      WaitPoint::Clock::now() + (failed() ? kLeavingFailed : kLeaving);
  for (Patience patience; !sent() && !port().abandoned() && WaitPoint::Clock::now() < deadline;)
    patience.Pause();
}

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> MpiCommunicator::Split(int colour, int key,
                                                                            std::string_view name) {
  EBB_RETURN_IF_ERROR(status());
  return Form(world_, self_, {.options = options_.OfPart(name), .colour = colour, .key = key});
}

absl::Status MpiCommunicator::status() const {
  if (!failed_.load(std::memory_order_acquire)) return absl::OkStatus();
  const std::scoped_lock lock(mutex_);
  return status_;
}

void MpiCommunicator::Abort(absl::Status why) {
  Fail(AbortStatus(options_, world_->rank(), why));
}

void MpiCommunicator::SetFailed(const absl::Status& why) {
  const std::scoped_lock lock(mutex_);
  if (!status_.ok()) return;
  status_ = why;
  failed_.store(true, std::memory_order_release);
}

void MpiCommunicator::Fail(const absl::Status& why) {
  if (failed()) return;
  world_->CountFailure();  // before any thread of this rank can act on it
  SetFailed(why);
  world_->TellFailure(self_.name, why);
}

void MpiCommunicator::FailBehindAnother(const Collective& call) {
  Fail(LateStatus(options_, RankName(rank_), Summarise(call),
                  "the operation that it had called before"));
}

void MpiCommunicator::FailMismatch(int first, const CallSummary& first_call, int second,
                                   const CallSummary& second_call) {
  Fail(MismatchStatus(options_, RankName(first), first_call, RankName(second), second_call));
}

std::string MpiCommunicator::RankName(int rank) const {
  return ebb::RankName(self_.world_ranks, rank);
}

bool MpiCommunicator::Await(const Collective& call, absl::FunctionRef<bool()> condition,
                            absl::FunctionRef<std::vector<int>()> absent,
                            WaitPoint::Deadline deadline) {
  Patience patience;
  std::optional<WaitNotice> notice, telling;
  for (;;) {
    if (condition()) return true;
    if (failed()) return false;
    const absl::Status mpi = port().status();
    if (!mpi.ok()) world_->Fail(RankFailedStatus(world_->rank(), mpi));
    const WaitPoint::Deadline now = WaitPoint::Clock::now();
    if (now >= deadline) {
      const std::vector<int> late = absent();
      const std::string known = world_->store().CompareCalls(WorldRanksOf(self_.world_ranks, late));
      Fail(LateStatus(options_, RankName(rank_), Summarise(call),
                      RankNames(self_.world_ranks, late), known));
      return false;
    }
    if (!notice.has_value()) {
      NoticeTimes times = options_.notices;
      notice.emplace(times, now);
      times.first_seconds /= 5;  // the other hosts need them to compare
      telling.emplace(times, now);
    }
    if (telling->Take(now).has_value()) world_->store().TellCalls();
    if (const std::optional<double> seconds = notice->Take(now)) {
      const std::vector<int> missing = absent();
      const std::string known =
          world_->store().CompareCalls(WorldRanksOf(self_.world_ranks, missing));
      if (!failed() && !missing.empty() && SpeaksFor(call.kind, rank_, missing)) {
        LogWaiting(RankName(rank_), *seconds,
                   WaitsInCall(options_, Summarise(call), RankNames(self_.world_ranks, missing)),
                   options_.timeout_seconds, known);
      }
    }
    patience.Pause();
  }
}

MpiCommunicator::Letter* MpiCommunicator::LetterOf(int peer, int which) const {
  return reinterpret_cast<Letter*>(letters_.get()) + 3 * peer + which;
}

void MpiCommunicator::Expect(int peer) {
  Pair& pair = pairs_[static_cast<size_t>(peer)];
  pair.here = false;
  port().Receive(pair.incoming, world_rank(peer), data_tag() - 1, letters_,
                 reinterpret_cast<std::byte*>(LetterOf(peer, 0)), sizeof(Letter));
}

bool MpiCommunicator::Run(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) {
  const int peer[] = {call.peer};
  const std::span<const int> peers =
      IsPointToPoint(call.kind) ? std::span<const int>(peer) : others();
  return Meet(call, peers, deadline) && operations_.Run(call, deadline, team);
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
    // The letter of two meetings ago: the peer has answered it.
    if (!Await(
            call, [&] { return outgoing.Test(); }, absent, deadline))
      return false;
    Letter* const letter = LetterOf(peer, 1 + which);
    letter->call = mine;
    letter->told = world_->told();
    // The text is of use to a last letter only; its size is every letter's, as MPI checks that what comes fits.
    port().Send(outgoing, world_rank(peer), data_tag() - 1, letters_,
                reinterpret_cast<const std::byte*>(letter), offsetof(Letter, text));
  }
  const auto look = [&] {
    std::erase_if(absent_, [&](int peer) {
      Pair& pair = pairs_[static_cast<size_t>(peer)];
      if (!pair.here) {
        pair.here =
            pair.incoming.Test() && world_->HasHeard(world_rank(peer), LetterOf(peer, 0)->told);
        if (pair.here && !Read(mine, peer)) return false;
      }
      return pair.here;
    });
    return absent_.empty() && !failed();
  };
  if (!Await(call, look, absent, deadline)) return false;
  // Every rank compares with the first, so all that find a difference find the same.
  const auto called = [&](int member) -> const CallSummary& {
    return member == rank_ ? mine : LetterOf(member, 0)->call;
  };
  for (int member = 1; member < size() && !IsPointToPoint(call.kind); ++member) {
    if (called(member).fingerprint == called(0).fingerprint) continue;
    FailMismatch(0, called(0), member, called(member));
    return false;
  }
  for (const int peer : peers) Expect(peer);
  return true;
}

bool MpiCommunicator::Read(const CallSummary& mine, int peer) {
  const Letter& letter = *LetterOf(peer, 0);
  if (letter.has_left != 0) {
    const std::string text(letter.text, strnlen(letter.text, Letter::kTextBytesMax));
    Fail(letter.code == 0 ? LeftStatus(options_, RankName(peer), text)
                          : absl::Status(static_cast<absl::StatusCode>(letter.code), text));
    return false;
  }
  // A rank calls in one order, so of two that want to exchange something and to meet all others the one will never
  // come to the other's.
  const bool exchanges = IsPointToPoint(mine.kind);
  if (exchanges ? FitForExchange(mine, letter.call) : !IsPointToPoint(letter.call.kind))
    return true;
  const int first = std::min(rank_, peer), second = std::max(rank_, peer);
  FailMismatch(first, first == rank_ ? mine : letter.call, second,
               second == rank_ ? mine : letter.call);
  return false;
}

}  // namespace ebb
