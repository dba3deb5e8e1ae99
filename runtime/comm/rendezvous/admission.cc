#include "ebb/runtime/comm/rendezvous/admission.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/wait_notice.h"
#include "ebb/runtime/config/status_macros.h"

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

}  // namespace

Admission::Admission(const RendezvousOptions& options, Descriptor listener)
    : options_(options),
      listener_(std::move(listener)),
      participants_(static_cast<size_t>(options.size)),
      connections_(static_cast<size_t>(options.size)),
      missing_(options.size - 1) {
  participants_[0] = Me(options);
}

absl::Status Admission::AdmitAll(WaitPoint::Deadline deadline) {
  absl::Status status;
  WaitNotice notice(options_.notices);
  while (status.ok() && missing_ > 0) {
    const WaitPoint::Deadline now = WaitPoint::Clock::now();
    if (const std::optional<double> seconds = notice.Take(now)) LogMissing(*seconds);
    status = now < deadline ? AdmitSome(std::min(deadline, notice.due())) : Late();
  }
  if (!status.ok()) RefuseAll(status, deadline);
  return status;
}

absl::Status Admission::AdmitSome(WaitPoint::Deadline deadline) {
  std::vector<pollfd> polled = {{.fd = listener_.get(), .events = POLLIN, .revents = 0}};
  for (const Connection& connection : unknown_)
    polled.push_back({.fd = connection.fd(), .events = POLLIN, .revents = 0});
  for (const Connection& connection : connections_)  // poll passes over -1
    polled.push_back({.fd = connection.fd(), .events = POLLIN, .revents = 0});
  constexpr int kSliceMilliseconds = 60'000;
  poll(polled.data(), polled.size(), PollMilliseconds(deadline, kSliceMilliseconds));

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
    EBB_ASSIGN_OR_RETURN(const bool is_of_this_build, CheckBuild(connection, **message));
    if (!is_of_this_build) return absl::OkStatus();
    if (const auto candidate = UnpackParticipant((*message)->payload); candidate.ok())
      return Admit(connection, *candidate);
  }
  ++strangers_;
  connection.Close();
  return absl::OkStatus();
}

// False: the connection is a stranger's and has been closed. An error: it is a rank's of this
// launch.
absl::StatusOr<bool> Admission::CheckBuild(Connection& connection, const Message& hello) {
  Unpacker unpacker(hello.payload);
  const std::string launcher = unpacker.Text(), build = unpacker.Text();
  if (!unpacker.ok()) {
    ++strangers_;
    connection.Close();
    return false;
  }
  if (hello.version == kProtocolVersion && build == participants_[0].build) return true;
  absl::Status why = absl::FailedPreconditionError(
      absl::StrCat("a rank that has connected to ", Describe(options_.place),
                   " is of another build: ", build, " with version ", hello.version,
                   " of the protocol; ", Describe(participants_[0]), " is ", participants_[0].build,
                   " with version ", kProtocolVersion, ". All ranks must run the same build"));
  if (launcher == options_.launcher) return why;
  ++strangers_;
  connection.Send(MessageType::kRefusal, PackStatus(why), Soon(kSendPatience)).IgnoreError();
  connection.Close();
  return false;
}

absl::Status Admission::Admit(Connection& connection, const Participant& candidate) {
  const auto refused = [&](std::string text) {
    // It stays among the unknown connections, so that it gets the error with the others.
    return absl::FailedPreconditionError(absl::StrCat(
        "the ranks that meet at ", Describe(options_.place), " do not fit: ", std::move(text)));
  };
  if (candidate.launcher != options_.launcher) {
    return refused(absl::StrCat(Describe(participants_[0]), " was started by ", options_.launcher,
                                ", ", Describe(candidate), " by ", candidate.launcher));
  }
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
  const auto& participant = participants_[static_cast<size_t>(rank)];
  const auto message = connections_[static_cast<size_t>(rank)].TryReceive();
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
  if (strangers_ > 0)
    absl::StrAppend(&text, "; ", strangers_, " connections of other programs have been closed");
  return text;
}

void Admission::LogMissing(double seconds) const {
  LogWaiting("rank 0", seconds,
             absl::StrCat("at ", Describe(options_.place), " for ", MissingRanks()),
             options_.timeout_seconds, "");
}

absl::Status Admission::Late() const {
  return absl::DeadlineExceededError(absl::StrCat("rank 0 has waited ", options_.timeout_seconds,
                                                  " s at ", Describe(options_.place), " for ",
                                                  MissingRanks()));
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
    constexpr int kSliceMilliseconds = 1000;
    if (poll(&polled, 1, PollMilliseconds(end, kSliceMilliseconds)) <= 0) continue;
    Connection connection(Accept(listener_));
    refuse(connection);
  }
}

}  // namespace ebb
