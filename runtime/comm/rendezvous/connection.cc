#include "ebb/runtime/comm/rendezvous/connection.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

constexpr uint32_t kMagic = 0x21626245;  // "Ebb!"
constexpr size_t kHeaderBytes = 12;
constexpr int kPollSliceMilliseconds = 60'000;

void Append(std::string& bytes, uint64_t number, int width) {
  for (int i = 0; i < width; ++i) bytes.push_back(static_cast<char>(number >> (8 * i)));
}

uint64_t Read(const char* from, int width) {
  uint64_t number = 0;
  for (int i = 0; i < width; ++i)
    number |= static_cast<uint64_t>(static_cast<unsigned char>(from[i])) << (8 * i);
  return number;
}

bool IsDue(WaitPoint::Deadline deadline) {
  return deadline != WaitPoint::kNever && WaitPoint::Clock::now() >= deadline;
}

absl::Status Closed() {
  return absl::UnavailableError("the other side has closed the connection");
}

}  // namespace

absl::Status Connection::Send(MessageType type, std::string_view payload,
                              WaitPoint::Deadline deadline) {
  if (!is_open()) return Closed();
  std::string bytes;
  Append(bytes, kMagic, 4);
  Append(bytes, kProtocolVersion, 2);
  Append(bytes, static_cast<uint64_t>(type), 2);
  Append(bytes, payload.size(), 4);
  bytes.append(payload);
  size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t n = send(fd(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n >= 0) {
      sent += static_cast<size_t>(n);
    } else if (errno == EAGAIN) {
      if (IsDue(deadline)) return absl::DeadlineExceededError("the other side does not read");
      pollfd poll_for = {.fd = fd(), .events = POLLOUT, .revents = 0};
      poll(&poll_for, 1, PollMilliseconds(deadline, kPollSliceMilliseconds));
    } else if (errno != EINTR) {
      return absl::UnavailableError(absl::StrCat("cannot send: ", std::strerror(errno)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Message> Connection::Receive(WaitPoint::Deadline deadline) {
  for (;;) {
    EBB_ASSIGN_OR_RETURN(std::optional<Message> message, TryReceive());
    if (message.has_value()) return *std::move(message);
    if (IsDue(deadline)) return absl::DeadlineExceededError("the other side has not answered");
    pollfd poll_for = {.fd = fd(), .events = POLLIN, .revents = 0};
    poll(&poll_for, 1, PollMilliseconds(deadline, kPollSliceMilliseconds));
  }
}

absl::StatusOr<std::optional<Message>> Connection::TryReceive() {
  for (;;) {
    EBB_ASSIGN_OR_RETURN(std::optional<Message> message, Parse());
    if (message.has_value()) return message;
    if (!is_open()) return Closed();
    char buffer[4096];
    const ssize_t n = recv(fd(), buffer, sizeof(buffer), 0);
    if (n > 0) {
      received_.append(buffer, static_cast<size_t>(n));
    } else if (n == 0) {
      return Closed();
    } else if (errno == EAGAIN) {
      return std::optional<Message>();
    } else if (errno != EINTR) {
      return absl::UnavailableError(absl::StrCat("cannot receive: ", std::strerror(errno)));
    }
  }
}

absl::StatusOr<std::optional<Message>> Connection::Parse() {
  // The part of the magic number that has come must be right: a stranger may send less than twelve
  // bytes.
  const size_t magic_bytes = std::min<size_t>(received_.size(), 4);
  for (size_t i = 0; i < magic_bytes; ++i) {
    if (static_cast<unsigned char>(received_[i]) != (kMagic >> (8 * i) & 0xff))
      return absl::DataLossError("the other side does not speak Ebb's protocol");
  }
  if (received_.size() < kHeaderBytes) return std::optional<Message>();
  const auto version = static_cast<uint16_t>(Read(received_.data() + 4, 2));
  const auto type = static_cast<MessageType>(Read(received_.data() + 6, 2));
  if (version != kProtocolVersion && type != MessageType::kHello) {
    return absl::FailedPreconditionError(
        absl::StrCat("the other side speaks version ", version, " of Ebb's protocol, this one ",
                     kProtocolVersion, ": all ranks must run the same version of Ebb"));
  }
  const uint64_t payload_bytes = Read(received_.data() + 8, 4);
  if (payload_bytes > payload_bytes_max_) {
    return absl::DataLossError(
        absl::StrCat("the other side announces a message of ", payload_bytes, " bytes"));
  }
  if (received_.size() < kHeaderBytes + payload_bytes) return std::optional<Message>();
  Message message = {
      .type = type, .payload = received_.substr(kHeaderBytes, payload_bytes), .version = version};
  received_.erase(0, kHeaderBytes + payload_bytes);
  return std::optional<Message>(std::move(message));
}

}  // namespace ebb
