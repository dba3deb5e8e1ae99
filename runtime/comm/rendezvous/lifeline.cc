#include "ebb/runtime/comm/rendezvous/lifeline.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/device/thread_limit.h"

namespace ebb {
namespace {

// A farewell is a few bytes: a rank that does not take them now has ended or is stuck.
constexpr std::chrono::milliseconds kFarewell{100};

// Not open where the kernel or a container does not let us.
Descriptor OpenProcess(int64_t pid) {
  const long fd = syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0);
  return Descriptor(static_cast<int>(fd));
}

}  // namespace

std::optional<ParentProcess> ParentProcess::Find() {
  const pid_t pid = getppid();
  if (pid == 0) return std::nullopt;  // of another process namespace
  Descriptor process = OpenProcess(pid);
  // Else it has ended in between, and the id may mean another one.
  if (!process.is_open() || getppid() != pid) return std::nullopt;
  return ParentProcess{.pid = pid, .process = std::move(process)};
}

absl::StatusOr<std::unique_ptr<Lifeline>> Lifeline::Hold(int rank,
                                                         std::vector<Participant> participants,
                                                         std::vector<Connection> connections,
                                                         Descriptor launcher, Ends ends) {
  std::unique_ptr<Lifeline> lifeline(new Lifeline(
      rank, std::move(participants), std::move(connections), std::move(launcher), std::move(ends)));
  if (!lifeline->stop_.is_open())
    return absl::ResourceExhaustedError(absl::StrCat("eventfd: ", std::strerror(errno)));
  try {
    lifeline->thread_ = std::thread([l = lifeline.get()] { l->Watch(); });
  } catch (const std::system_error& error) {
    return NoThread("no thread to watch the other ranks", error);
  }
  pthread_setname_np(lifeline->thread_.native_handle(), "ebb-lifeline");
  return lifeline;
}

Lifeline::Lifeline(int rank, std::vector<Participant> participants,
                   std::vector<Connection> connections, Descriptor launcher, Ends ends)
    : rank_(rank),
      participants_(std::move(participants)),
      connections_(std::move(connections)),
      processes_(participants_.size()),
      launcher_(std::move(launcher)),
      ends_(std::move(ends)),
      stop_(eventfd(0, EFD_CLOEXEC)) {
  polled_.reserve(2 + processes_.size() + connections_.size());
  for (const Participant& other : participants_) {
    const Participant& me = participants_[static_cast<size_t>(rank_)];
    if (other.rank == rank_ || other.pid_namespace != me.pid_namespace) continue;
    processes_[static_cast<size_t>(other.rank)] =
        OpenProcess(other.pid);  // or connections are left
  }
}

Lifeline::~Lifeline() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    // An eventfd takes what fits its counter.
    if (write(stop_.get(), &one, sizeof(one)) == sizeof(one)) thread_.join();
  }
  for (Connection& connection : connections_) {
    if (connection.is_open())
      connection.Send(MessageType::kGoodbye, "", WaitPoint::Clock::now() + kFarewell).IgnoreError();
  }
}

void Lifeline::Watch() {
  for (;;) {
    polled_.assign(1, {.fd = stop_.get(), .events = POLLIN, .revents = 0});
    polled_.push_back({.fd = launcher_.get(), .events = POLLIN, .revents = 0});
    for (const Descriptor& process : processes_)
      polled_.push_back({.fd = process.get(), .events = POLLIN, .revents = 0});
    for (const Connection& connection : connections_)
      polled_.push_back({.fd = connection.fd(), .events = POLLIN, .revents = 0});
    if (poll(polled_.data(), polled_.size(), -1) < 0) continue;
    if (polled_[0].revents != 0) return;
    if (polled_[1].revents != 0) {
      launcher_ = Descriptor();
      ends_.of_launcher();
    }
    for (size_t rank = 0; rank < processes_.size(); ++rank) {
      if (polled_[2 + rank].revents == 0) continue;
      processes_[rank] = Descriptor();
      ends_.of_rank(static_cast<int>(rank));
    }
    for (size_t i = 0; i < connections_.size(); ++i) {
      if (polled_[2 + processes_.size() + i].revents == 0 || HearFrom(i)) continue;
      connections_[i].Close();
    }
  }
}

bool Lifeline::HearFrom(size_t connection) {
  const int rank = static_cast<int>(connection);  // rank 0's are by rank, others have one to rank 0
  for (;;) {
    const absl::StatusOr<std::optional<Message>> message = connections_[connection].TryReceive();
    if (!message.ok()) {
      ends_.of_rank(rank);
      if (rank_ == 0) PassOn(rank);
      return false;
    }
    if (!message->has_value()) return true;
    if ((*message)->type == MessageType::kGoodbye) return false;
    if ((*message)->type == MessageType::kGone) {
      Unpacker unpacker((*message)->payload);
      const uint64_t gone = unpacker.Number();
      if (unpacker.ok() && gone < participants_.size()) ends_.of_rank(static_cast<int>(gone));
    }
  }
}

void Lifeline::PassOn(int gone) {
  const std::string payload = Packer().Add(static_cast<uint64_t>(gone)).Take();
  for (size_t rank = 0; rank < connections_.size(); ++rank) {
    if (static_cast<int>(rank) == gone || !connections_[rank].is_open()) continue;
    connections_[rank]
        .Send(MessageType::kGone, payload, WaitPoint::Clock::now() + kFarewell)
        .IgnoreError();
  }
}

}  // namespace ebb
