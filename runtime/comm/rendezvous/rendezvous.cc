#include "ebb/runtime/comm/rendezvous/rendezvous.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/rendezvous/admission.h"
#include "ebb/runtime/comm/wait_notice.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

constexpr std::chrono::milliseconds kBetweenAttempts{20};
// The other ranks wait a little longer than rank 0, so that rank 0 can send them which rank is
// missing.
constexpr double kGraceSeconds = 0.5;
// How long the process that listens in rank 0's place may take to answer another rank 0.
constexpr std::chrono::seconds kOccupantPatience{1};
// How long another rank waits for the welcome. Rank 0 welcomes each rank at once, also while others
// are missing; a process that accepts connections and closes them for so long is a stranger.
constexpr std::chrono::seconds kWelcomePatience{5};

uint64_t NewNonce() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

}  // namespace

Participant Me(const RendezvousOptions& options) {
  Participant me = Myself(options.rank, options.size, options.launcher);
  if (!options.host_name.empty()) me.host_name = options.host_name;
  return me;
}

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
      error.code(),
      absl::StrCat("rank ", options_.rank, " has waited for rank 0 at ", Describe(options_.place),
                   " for up to ", options_.timeout_seconds, " s: ", error.message()));
}

absl::Status Rendezvous::NotWelcomed(const absl::Status& error) const {
  return absl::Status(
      error.code(),
      absl::StrCat(
          "rank ", options_.rank, " has connected to ", Describe(options_.place),
          ", but rank 0 has not answered there: ", error.message(),
          ". If another program uses this address, set MASTER_ADDR and MASTER_PORT to a free "
          "address and port, the same on all ranks. If not, rank 0 has stalled"));
}

void Rendezvous::LogWait(double seconds, const absl::Status& last) const {
  LogWaiting(absl::StrCat("rank ", options_.rank), seconds,
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
    // It only was time for a line in the log.
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
