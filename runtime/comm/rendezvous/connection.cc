#include "ebb/runtime/comm/rendezvous/connection.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"

namespace ebb {
namespace {

constexpr uint32_t kMagic = 0x21626245;  // "Ebb!"
// In the byte order of all hosts that Ebb runs on.
struct Header {
  uint32_t magic = kMagic;
  uint16_t version = kProtocolVersion;
  MessageType type = MessageType::kHello;
  uint32_t payload_bytes = 0;
};
static_assert(sizeof(Header) == 12 && std::endian::native == std::endian::little);

absl::Status Closed() {
  return absl::UnavailableError("the other side has closed the connection");
}

absl::Status CannotReceive(int error) {
  const std::string why = absl::StrCat("cannot receive: ", std::strerror(error));
  const bool is_unreachable = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
  return is_unreachable ? absl::AbortedError(why) : absl::UnavailableError(why);
}

}  // namespace

absl::Status Connection::Send(MessageType type, std::string_view payload,
                              WaitPoint::Deadline deadline) {
  if (!is_open()) return Closed();
  const Header header = {.type = type, .payload_bytes = static_cast<uint32_t>(payload.size())};
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes.append(payload);
  size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t n = send(fd(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n >= 0) {
      sent += static_cast<size_t>(n);
    } else if (errno == EAGAIN) {
      if (WaitPoint::Clock::now() >= deadline)
        return absl::DeadlineExceededError("the other side does not read");
      pollfd poll_for = {.fd = fd(), .events = POLLOUT, .revents = 0};
      poll(&poll_for, 1, PollMilliseconds(deadline));
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
    if (WaitPoint::Clock::now() >= deadline)
      return absl::DeadlineExceededError("the other side has not answered");
    pollfd poll_for = {.fd = fd(), .events = POLLIN, .revents = 0};
    poll(&poll_for, 1, PollMilliseconds(deadline));
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
      return CannotReceive(errno);
    }
  }
}

absl::StatusOr<std::optional<Message>> Connection::Parse() {
  // The part of the magic number that has come must be right, because another program may send less
  // than twelve bytes.
  Header header;
  if (std::memcmp(received_.data(), &kMagic, std::min(received_.size(), sizeof(kMagic))) != 0)
    return absl::DataLossError("the other side does not speak Ebb's protocol");
  if (received_.size() < sizeof(header)) return std::optional<Message>();
  std::memcpy(&header, received_.data(), sizeof(header));
  if (header.version != kProtocolVersion && header.type != MessageType::kHello) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the other side speaks version ", header.version, " of Ebb's protocol, this one ",
        kProtocolVersion, ": all ranks must run the same version of Ebb"));
  }
  if (header.payload_bytes > payload_bytes_max_) {
    return absl::DataLossError(
        absl::StrCat("the other side announces a message of ", header.payload_bytes, " bytes"));
  }
  const size_t bytes = sizeof(header) + header.payload_bytes;
  if (received_.size() < bytes) return std::optional<Message>();
  Message message = {.type = header.type,
                     .payload = received_.substr(sizeof(header), header.payload_bytes),
                     .version = header.version};
  received_.erase(0, bytes);
  return std::optional<Message>(std::move(message));
}

}  // namespace ebb
