#include "ebb/runtime/comm/rendezvous/rendezvous.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/name_view.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/wait_notice.h"

namespace ebb {
namespace {

// How long a process that does not read may hold up the ranks.
constexpr std::chrono::seconds kSendPatience{2};
// How long rank 0 stays after an error, to report it to ranks that are still on their way.
constexpr std::chrono::seconds kRefusing{2};
constexpr size_t kUnknownMax = 4096;

WaitPoint::Deadline Soon(std::chrono::seconds patience) {
  return WaitPoint::Clock::now() + patience;
}

constexpr std::chrono::milliseconds kBetweenAttempts{20};
// The other ranks wait a little longer than rank 0, so that rank 0 can send them which rank is
// missing.
constexpr double kGraceSeconds = 0.5;
// How long the process that listens in rank 0's place may take to answer another rank 0.
constexpr std::chrono::seconds kOccupantPatience{1};
// How long rank 0's message to itself may be on its way.
constexpr std::chrono::seconds kProbePatience{2};
// How long another rank waits for the welcome. Rank 0 welcomes each rank at once, also while others
// are missing; a process that accepts connections and closes them for so long is another program.
constexpr std::chrono::seconds kWelcomePatience{5};

// A hello must fit what a stranger may send (Connection::kPayloadBytesMaxOfStranger).
constexpr size_t kReasonBytesMax = 1024;

uint64_t NewNonce() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

// How this process introduces itself.
Participant Me(const RendezvousOptions& options) {
  Participant me = Myself(options.rank, options.size, options.launcher);
  if (!options.host_name.empty()) me.host_name = options.host_name;
  me.without_mpi = options.without_mpi.substr(0, kReasonBytesMax);
  return me;
}

// Rank 0's part of a rendezvous until all ranks are there: it admits ranks and turns away processes
// that are no ranks of this world.
class Admission {
 public:
  Admission(const RendezvousOptions& options, Descriptor listener);

  // Waits until every rank has said hello. On an error, all ranks that are there have been sent it.
  // Rank 0 listens on its own host, so it is an error at once if the place is on another one.
  absl::Status AdmitAll(WaitPoint::Deadline deadline);

  std::vector<Participant> TakeParticipants() && { return std::move(participants_); }
  std::vector<Connection> TakeConnections() && { return std::move(connections_); }

 private:
  absl::Status CheckPlace(WaitPoint::Deadline deadline);
  absl::Status AdmitSome(WaitPoint::Deadline deadline);
  absl::Status ReceiveHello(Connection& connection);
  void RefuseStranger(Connection& connection, std::string_view launcher, const Message& hello);
  absl::Status CheckConnected(int rank);
  absl::Status CheckBuild(std::string_view build, uint16_t version) const;
  absl::Status Admit(Connection& connection, const Participant& candidate);
  std::string RankNames(bool have_come) const;
  std::string MissingRanks() const;
  void LogMissing(double seconds) const;
  absl::Status Late() const;
  void RefuseAll(const absl::Status& why, WaitPoint::Deadline deadline);

  const RendezvousOptions options_;
  Descriptor listener_;
  std::vector<Participant> participants_;  // by rank; valid where a connection is open
  std::vector<Connection> connections_;    // by rank
  std::vector<Connection> unknown_;        // processes that have not said hello yet
  const std::string probe_ = Packer().Add(NewNonce()).Take();
  bool probe_has_come_ = false;
  int refused_connections_ = 0;
  std::string strangers_;  // the last rank of another job that has come; empty if none has
  int missing_;
};

Admission::Admission(const RendezvousOptions& options, Descriptor listener)
    : options_(options),
      listener_(std::move(listener)),
      participants_(static_cast<size_t>(options.size)),
      connections_(static_cast<size_t>(options.size)),
      missing_(options.size - 1) {
  participants_[0] = Me(options);
}

absl::Status Admission::AdmitAll(WaitPoint::Deadline deadline) {
  absl::Status status = CheckPlace(deadline);
  WaitNotice notice(options_.notices);
  while (status.ok() && missing_ > 0) {
    const WaitPoint::Deadline now = WaitPoint::Clock::now();
    if (const std::optional<double> seconds = notice.Take(now)) LogMissing(*seconds);
    status = now < deadline ? AdmitSome(std::min(deadline, notice.due())) : Late();
  }
  if (!status.ok()) RefuseAll(status, deadline);
  return status;
}

// Behind NAT, no device has the address of the place, but a message to the place arrives here. The
// message may come through proxies, so only its content shows its sender. A connection alone
// shows nothing, because another program may listen there.
absl::Status Admission::CheckPlace(WaitPoint::Deadline deadline) {
  if (options_.listener != nullptr || IsOfThisHost(options_.place, deadline))
    return absl::OkStatus();
  if (absl::StatusOr<Descriptor> socket = Connect(options_.place, deadline); socket.ok()) {
    Connection probe(*std::move(socket));
    const WaitPoint::Deadline soon = std::min(deadline, Soon(kProbePatience));
    probe.Send(MessageType::kProbe, probe_, soon).IgnoreError();
    while (!probe_has_come_ && WaitPoint::Clock::now() < soon) EBB_RETURN_IF_ERROR(AdmitSome(soon));
    if (probe_has_come_) return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "the ranks are to meet at ", Describe(options_.place),
      ", but rank 0 listens on another host: ", NameAndHostOf(participants_[0]),
      " has the addresses ", AddressesOfThisHost(),
      ". Set MASTER_ADDR to one of them on all ranks, or start rank 0 on the other host. If rank 0 "
      "is behind NAT, set MASTER_ADDR=0.0.0.0 for rank 0 alone"));
}

absl::Status Admission::AdmitSome(WaitPoint::Deadline deadline) {
  std::vector<pollfd> polled = {{.fd = listener_.get(), .events = POLLIN, .revents = 0}};
  for (const Connection& connection : unknown_)
    polled.push_back({.fd = connection.fd(), .events = POLLIN, .revents = 0});
  for (const Connection& connection : connections_)  // poll passes over -1
    polled.push_back({.fd = connection.fd(), .events = POLLIN, .revents = 0});
  poll(polled.data(), polled.size(), PollMilliseconds(deadline));

  const size_t unknown_count = unknown_.size();
  for (size_t rank = 0; rank < connections_.size(); ++rank) {
    if (polled[1 + unknown_count + rank].revents != 0)
      EBB_RETURN_IF_ERROR(CheckConnected(static_cast<int>(rank)));
  }
  for (size_t i = 0; i < unknown_count; ++i) {
    if (polled[1 + i].revents != 0) EBB_RETURN_IF_ERROR(ReceiveHello(unknown_[i]));
  }
  std::erase_if(unknown_, [](const Connection& connection) { return !connection.is_open(); });
  if (polled[0].revents != 0) {
    for (Descriptor socket = Accept(listener_); socket.is_open(); socket = Accept(listener_)) {
      if (unknown_.size() < kUnknownMax) unknown_.emplace_back(std::move(socket));
    }
  }
  return absl::OkStatus();
}

// The message of a process that has not said hello. Only an error of a rank is an error.
absl::Status Admission::ReceiveHello(Connection& connection) {
  absl::StatusOr<std::optional<Message>> message = connection.TryReceive();
  if (message.ok() && !message->has_value()) return absl::OkStatus();
  if (message.ok() && (*message)->type == MessageType::kHello) {
    const Message& hello = **message;
    std::string launcher, build;
    if (Unpacker(hello.payload).Read(launcher, build)) {
      if (!MayBeOfOneJob(launcher, options_.launcher)) {
        RefuseStranger(connection, launcher, hello);
        return absl::OkStatus();
      }
      EBB_RETURN_IF_ERROR(CheckBuild(build, hello.version));
      if (const auto candidate = UnpackParticipant(hello.payload); candidate.ok())
        return Admit(connection, *candidate);
    }
  }
  if (message.ok() && (*message)->type == MessageType::kProbe && (*message)->payload == probe_) {
    probe_has_come_ = true;
  } else {
    ++refused_connections_;
  }
  connection.Close();
  return absl::OkStatus();
}

// A rank of another job, which has been given the same place. `hello` may be of another version.
void Admission::RefuseStranger(Connection& connection, std::string_view launcher,
                               const Message& hello) {
  const auto candidate = UnpackParticipant(hello.payload);
  const bool is_readable = hello.version == kProtocolVersion && candidate.ok();
  strangers_ = absl::StrCat(is_readable ? Describe(*candidate) : "a rank", " of another job (",
                            NameView(launcher), ")");
  connection
      .Send(MessageType::kRefusal,
            PackStatus(absl::FailedPreconditionError(absl::StrCat(
                Describe(options_.place), " is the meeting place of another job: ",
                Describe(participants_[0]), ", started by ", options_.launcher, ", has refused ",
                strangers_, ". Give each job a MASTER_PORT of its own"))),
            Soon(kSendPatience))
      .IgnoreError();
  connection.Close();
}

absl::Status Admission::CheckBuild(std::string_view build, uint16_t version) const {
  if (version == kProtocolVersion && build == participants_[0].build) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("a rank that has connected to ", Describe(options_.place),
                   " is of another build: ", NameView(build), " with version ", version,
                   " of the protocol; ", Describe(participants_[0]), " is ", participants_[0].build,
                   " with version ", kProtocolVersion, ". All ranks must run the same build"));
}

absl::Status Admission::Admit(Connection& connection, const Participant& candidate) {
  const auto refused = [&](std::string text) {
    // The connection stays among the unknown ones, so that it gets the error with the others.
    const bool has_port = options_.place.name.empty();
    return absl::FailedPreconditionError(absl::StrCat(
        "the ranks that meet at ", Describe(options_.place), " do not fit: ", std::move(text),
        has_port ? ". If two jobs meet there, give each a MASTER_PORT of its own" : ""));
  };
  if (candidate.size != options_.size) {
    return refused(absl::StrCat(Describe(participants_[0]), " is one of ", options_.size,
                                " ranks, ", Describe(candidate), " one of ", candidate.size));
  }
  if (candidate.rank < 0 || candidate.rank >= options_.size) {
    return refused(
        absl::StrCat(Describe(candidate), " is none of the ranks 0 to ", options_.size - 1));
  }
  const auto rank = static_cast<size_t>(candidate.rank);
  if (rank == 0 || connections_[rank].is_open()) {
    return refused(absl::StrCat("two processes say that they are the same rank: ",
                                Describe(participants_[rank]), " and ", Describe(candidate)));
  }
  if (!connection.Send(MessageType::kWelcome, "", Soon(kSendPatience)).ok()) {
    connection.Close();  // it may come again
    return absl::OkStatus();
  }
  connection.Trust();
  participants_[rank] = candidate;
  connections_[rank] = std::exchange(connection, Connection());
  --missing_;
  return absl::OkStatus();
}

// A rank that waits for the table sends nothing, so its connection has closed.
absl::Status Admission::CheckConnected(int rank) {
  const auto& participant = participants_[rank];
  const auto message = connections_[rank].TryReceive();
  if (message.ok() && !message->has_value()) return absl::OkStatus();
  if (message.ok() && (*message)->type == MessageType::kRefusal)
    return UnpackStatus((*message)->payload);
  return absl::UnavailableError(
      absl::StrCat(Describe(participant), " has ended before all ranks had connected"));
}

// "rank 2, rank 5": the first few that have come, or that are missing.
std::string Admission::RankNames(bool have_come) const {
  constexpr int kNamed = 8;
  std::string names;
  int count = 0;
  for (size_t rank = 1; rank < connections_.size(); ++rank) {
    if (connections_[rank].is_open() != have_come || ++count > kNamed) continue;
    absl::StrAppend(&names, names.empty() ? "" : ", ", "rank ", rank);
  }
  if (count > kNamed) absl::StrAppend(&names, " and ", count - kNamed, " more");
  return names;
}

std::string Admission::MissingRanks() const {
  std::string text = absl::StrCat(RankNames(/*have_come=*/false), " of ", options_.size, " ranks");
  if (const std::string here = RankNames(/*have_come=*/true); !here.empty())
    absl::StrAppend(&text, " (here: ", here, ")");
  if (refused_connections_ > 0)
    absl::StrAppend(&text, "; ", refused_connections_,
                    " connections of other programs have been closed");
  if (!strangers_.empty()) absl::StrAppend(&text, "; ", strangers_, " was refused");
  return text;
}

void Admission::LogMissing(double seconds) const {
  LogWaiting(NameAndHostOf(participants_[0]), seconds,
             absl::StrCat("at ", Describe(options_.place), " for ", MissingRanks()),
             options_.timeout_seconds, "");
}

absl::Status Admission::Late() const {
  return absl::DeadlineExceededError(
      absl::StrCat(NameAndHostOf(participants_[0]), " has waited ", options_.timeout_seconds,
                   " s at ", Describe(options_.place), " for ", MissingRanks()));
}

void Admission::RefuseAll(const absl::Status& why, WaitPoint::Deadline deadline) {
  const std::string refusal = PackStatus(why);
  int refused_count = 0;
  const auto refuse = [&](Connection& connection) {
    if (!connection.is_open()) return;
    connection.Send(MessageType::kRefusal, refusal, Soon(kSendPatience)).IgnoreError();
    connection.Close();
    ++refused_count;
  };
  for (Connection& connection : connections_) refuse(connection);
  for (Connection& connection : unknown_) refuse(connection);
  unknown_.clear();
  // Ranks that come in a moment would otherwise wait for a rank that has gone.
  const WaitPoint::Deadline end = std::min(Soon(kRefusing), deadline);
  while (refused_count < options_.size - 1 && WaitPoint::Clock::now() < end) {
    pollfd polled = {.fd = listener_.get(), .events = POLLIN, .revents = 0};
    if (poll(&polled, 1, PollMilliseconds(end)) <= 0) continue;
    Connection connection(Accept(listener_));
    refuse(connection);
  }
}

}  // namespace

Rendezvous::Rendezvous(const RendezvousOptions& options)
    : options_(options),
      deadline_(DeadlineAfter(options.timeout_seconds + (options.rank == 0 ? 0 : kGraceSeconds))) {}

absl::StatusOr<Rendezvous> Rendezvous::Join(const RendezvousOptions& options) {
  Rendezvous rendezvous(options);
  EBB_RETURN_IF_ERROR(options.rank == 0 ? rendezvous.JoinAsRankZero()
                                        : rendezvous.JoinAsOtherRank());
  return rendezvous;
}

absl::Status Rendezvous::JoinAsRankZero() {
  absl::StatusOr<Descriptor> listener = options_.listener != nullptr
                                            ? std::move(*options_.listener)
                                            : Listen(options_.place, options_.one_host, deadline_);
  if (listener.status().code() == absl::StatusCode::kAlreadyExists) {
    // A process listens there: another rank 0 of this world, which can pass on the error, or a
    // stranger.
    absl::StatusOr<Descriptor> socket = Connect(options_.place, deadline_);
    if (socket.ok()) {
      Connection occupant(*std::move(socket));
      const WaitPoint::Deadline soon = WaitPoint::Clock::now() + kOccupantPatience;
      const std::string hello = Pack(Me(options_));
      if (occupant.Send(MessageType::kHello, hello, soon).ok()) {
        const absl::StatusOr<Message> answer = occupant.Receive(soon);
        if (answer.ok() && answer->type == MessageType::kRefusal)
          return UnpackStatus(answer->payload);
      }
    }
    return absl::AlreadyExistsError(
        absl::StrCat(listener.status().message(),
                     ": another program uses it. Set MASTER_ADDR and MASTER_PORT to a free address "
                     "and port, the same on all ranks"));
  }
  if (!listener.ok()) {
    const Participant me = Me(options_);
    return absl::Status(listener.status().code(),
                        absl::StrCat(Describe(me), ": ", listener.status().message()));
  }
  Admission admission(options_, *std::move(listener));
  EBB_RETURN_IF_ERROR(admission.AdmitAll(deadline_));
  participants_ = std::move(admission).TakeParticipants();
  connections_ = std::move(admission).TakeConnections();
  nonce_ = NewNonce();
  Packer table;
  table.Add(nonce_);
  for (const Participant& participant : participants_) table.Add(Pack(participant));
  const std::string packed = table.Take();
  for (Connection& connection : connections_) {
    // A rank that does not receive it has ended, and the store notices that.
    if (connection.is_open()) connection.Send(MessageType::kTable, packed, deadline_).IgnoreError();
  }
  return absl::OkStatus();
}

absl::Status Rendezvous::FromRankZero(const absl::Status& error) const {
  return absl::Status(
      error.code(), absl::StrCat(NameAndHostOf(Me(options_)), " has waited for rank 0 at ",
                                 Describe(options_.place), " for up to ", options_.timeout_seconds,
                                 " s: ", error.message()));
}

absl::Status Rendezvous::NotWelcomed(const absl::Status& error) const {
  return absl::AlreadyExistsError(
      absl::StrCat(NameAndHostOf(Me(options_)), " has connected to ", Describe(options_.place),
                   ", but rank 0 has not answered there: ", error.message(),
                   ". If another program uses this address, set MASTER_ADDR and MASTER_PORT to a "
                   "free address and port, the same on all ranks. If not, rank 0 has stalled"));
}

void Rendezvous::LogWait(double seconds, const absl::Status& last) const {
  LogWaiting(NameAndHostOf(Me(options_)), seconds,
             absl::StrCat("for rank 0 at ", Describe(options_.place)), options_.timeout_seconds,
             {last.message().data(), last.message().size()});
}

absl::Status Rendezvous::JoinAsOtherRank() {
  const std::string hello = Pack(Me(options_));
  absl::Status last;
  WaitPoint::Deadline patience = WaitPoint::kNever;  // for a process that accepts and closes
  WaitNotice notice(options_.notices);
  for (;;) {
    if (const std::optional<double> seconds = notice.Take()) LogWait(*seconds, last);
    absl::StatusOr<Descriptor> socket = Connect(options_.place, std::min(deadline_, notice.due()));
    last = socket.status();
    // Connect may have ended only because a line in the log was due.
    const bool goes_on = absl::IsDeadlineExceeded(last) && WaitPoint::Clock::now() < deadline_;
    if (socket.ok()) {
      Connection connection(*std::move(socket));
      connection.Trust();
      // A failed send shows when nothing is received, and only the receive says why.
      connection.Send(MessageType::kHello, hello, deadline_).IgnoreError();
      const absl::StatusOr<Message> answer =
          connection.Receive(std::min(deadline_, WaitPoint::Clock::now() + kWelcomePatience));
      if (answer.ok() && answer->type == MessageType::kWelcome) {
        connections_.push_back(std::move(connection));
        break;
      }
      if (answer.ok() && answer->type == MessageType::kRefusal)
        return UnpackStatus(answer->payload);
      last = answer.ok() ? absl::DataLossError("the answer is not Ebb's") : answer.status();
      if (absl::IsDeadlineExceeded(last) || absl::IsDataLoss(last)) return NotWelcomed(last);
      if (patience == WaitPoint::kNever) patience = WaitPoint::Clock::now() + kWelcomePatience;
      if (WaitPoint::Clock::now() >= patience) return NotWelcomed(last);
    } else {
      patience = WaitPoint::kNever;
    }
    if (goes_on) continue;
    // No process listens there yet, or it has just stopped: rank 0 may still come.
    if (last.code() != absl::StatusCode::kUnavailable) return FromRankZero(last);
    if (WaitPoint::Clock::now() + kBetweenAttempts >= deadline_) {
      return FromRankZero(absl::DeadlineExceededError(last.message()));
    }
    std::this_thread::sleep_for(kBetweenAttempts);
  }
  return ReceiveTable();
}

// Rank 0 logs which ranks are missing. This rank logs it only if the wait is very long.
absl::Status Rendezvous::ReceiveTable() {
  WaitNotice notice({.first_seconds = options_.notices.interval_seconds,
                     .interval_seconds = options_.notices.interval_seconds});
  absl::StatusOr<Message> table = connections_[0].Receive(std::min(deadline_, notice.due()));
  while (absl::IsDeadlineExceeded(table.status()) && WaitPoint::Clock::now() < deadline_) {
    if (const std::optional<double> seconds = notice.Take())
      LogWait(*seconds, absl::UnavailableError("not all ranks have connected to it yet"));
    table = connections_[0].Receive(std::min(deadline_, notice.due()));
  }
  if (!table.ok()) return FromRankZero(table.status());
  if (table->type == MessageType::kRefusal) return UnpackStatus(table->payload);
  return ReadTable(table->payload);
}

absl::Status Rendezvous::ReadTable(std::string_view payload) {
  Unpacker table(payload);
  nonce_ = table.Number();
  for (int rank = 0; rank < options_.size; ++rank) {
    EBB_ASSIGN_OR_RETURN(Participant participant, UnpackParticipant(table.Text()));
    participants_.push_back(std::move(participant));
  }
  return table.ok() ? absl::OkStatus() : absl::DataLossError("a table that cannot be read");
}

}  // namespace ebb
