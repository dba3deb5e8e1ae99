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

namespace ebb {
namespace {

// A farewell is a few bytes: who does not take them now has ended or is stuck.
constexpr std::chrono::milliseconds kFarewell{100};

}  // namespace

absl::StatusOr<std::unique_ptr<Lifeline>> Lifeline::Hold(int rank,
                                                         std::vector<Participant> participants,
                                                         std::vector<Connection> connections,
                                                         std::function<void(int rank)> ended) {
  std::unique_ptr<Lifeline> lifeline(
      new Lifeline(rank, std::move(participants), std::move(connections), std::move(ended)));
  if (!lifeline->stop_.is_open())
    return absl::ResourceExhaustedError(absl::StrCat("eventfd: ", std::strerror(errno)));
  try {
    lifeline->thread_ = std::thread([l = lifeline.get()] { l->Watch(); });
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no thread to watch the other ranks: ", error.what()));
  }
  pthread_setname_np(lifeline->thread_.native_handle(), "ebb-lifeline");
  return lifeline;
}

Lifeline::Lifeline(int rank, std::vector<Participant> participants,
                   std::vector<Connection> connections, std::function<void(int rank)> ended)
    : rank_(rank),
      participants_(std::move(participants)),
      connections_(std::move(connections)),
      processes_(participants_.size()),
      ended_(std::move(ended)),
      stop_(eventfd(0, EFD_CLOEXEC)) {
  polled_.reserve(1 + processes_.size() + connections_.size());
  for (const Participant& other : participants_) {
    const Participant& me = participants_[static_cast<size_t>(rank_)];
    if (other.rank == rank_ || other.pid_namespace != me.pid_namespace) continue;
    // Fails where the kernel or a container does not let us: the connections are left then.
    const long fd = syscall(SYS_pidfd_open, static_cast<pid_t>(other.pid), 0);
    processes_[static_cast<size_t>(other.rank)] = Descriptor(static_cast<int>(fd));
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
    for (const Descriptor& process : processes_)
      polled_.push_back({.fd = process.get(), .events = POLLIN, .revents = 0});
    for (const Connection& connection : connections_)
      polled_.push_back({.fd = connection.fd(), .events = POLLIN, .revents = 0});
    if (poll(polled_.data(), polled_.size(), -1) < 0) continue;
    if (polled_[0].revents != 0) return;
    for (size_t rank = 0; rank < processes_.size(); ++rank) {
      if (polled_[1 + rank].revents == 0) continue;
      processes_[rank] = Descriptor();
      ended_(static_cast<int>(rank));
    }
    for (size_t i = 0; i < connections_.size(); ++i) {
      if (polled_[1 + processes_.size() + i].revents == 0 || HearFrom(i)) continue;
      connections_[i].Close();
    }
  }
}

bool Lifeline::HearFrom(size_t connection) {
  const int rank = static_cast<int>(connection);  // rank 0's are by rank, others have one to rank 0
  for (;;) {
    const absl::StatusOr<std::optional<Message>> message = connections_[connection].TryReceive();
    if (!message.ok()) {
      ended_(rank);
      if (rank_ == 0) PassOn(rank);
      return false;
    }
    if (!message->has_value()) return true;
    if ((*message)->type == MessageType::kGoodbye) return false;
    if ((*message)->type == MessageType::kGone) {
      Unpacker unpacker((*message)->payload);
      const uint64_t gone = unpacker.Number();
      if (unpacker.ok() && gone < participants_.size()) ended_(static_cast<int>(gone));
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
