#include "ebb/runtime/comm/rendezvous/socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/rendezvous/address.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/trace/standard_streams.h"

namespace ebb {
namespace {

constexpr int kSocketFlags = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;

absl::Status Error(absl::StatusCode code, const MeetingPlace& place, absl::string_view what,
                   int error) {
  return absl::Status(code, absl::StrCat(Describe(place), ": ", what, ": ", std::strerror(error)));
}

void SetOption(const Descriptor& socket, int level, int option, int value) {
  setsockopt(socket.get(), level, option, &value, sizeof(value));
}

// Options that make a connection prompt, and make it notice that the peer's host has vanished. They
// are harmless where they have no effect.
void Tune(const Descriptor& socket) {
  SetOption(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  SetOption(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(socket, IPPROTO_TCP, TCP_KEEPIDLE, 1);
  SetOption(socket, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  SetOption(socket, IPPROTO_TCP, TCP_KEEPCNT, 5);
}

absl::StatusOr<Descriptor> ListenAt(const MeetingPlace& place, const Address& address) {
  Descriptor socket(::socket(address.family(), kSocketFlags, 0));
  if (!socket.is_open()) return Error(absl::StatusCode::kInternal, place, "no socket", errno);
  if (address.family() != AF_UNIX) SetOption(socket, SOL_SOCKET, SO_REUSEADDR, 1);
  if (address.family() == AF_INET6) SetOption(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0);
  if (bind(socket.get(), address.get(), address.bytes) != 0 ||
      listen(socket.get(), SOMAXCONN) != 0) {
    const absl::StatusCode code = errno == EADDRINUSE ? absl::StatusCode::kAlreadyExists
                                                      : absl::StatusCode::kFailedPrecondition;
    return Error(code, place, "rank 0 cannot listen there", errno);
  }
  return socket;
}

bool IsOfThisUser(const Descriptor& socket) {
  ucred peer = {};
  socklen_t bytes = sizeof(peer);
  return getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 &&
         peer.uid == geteuid();
}

absl::StatusOr<Descriptor> ConnectTo(const MeetingPlace& place, const Address& address,
                                     WaitPoint::Deadline deadline) {
  Descriptor socket(::socket(address.family(), kSocketFlags, 0));
  if (!socket.is_open()) return Error(absl::StatusCode::kInternal, place, "no socket", errno);
  int error = connect(socket.get(), address.get(), address.bytes) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    constexpr int kAttemptMilliseconds = 3000;  // for a host that drops packets
    pollfd poll_for = {.fd = socket.get(), .events = POLLOUT, .revents = 0};
    socklen_t bytes = sizeof(error);
    if (poll(&poll_for, 1, PollMilliseconds(deadline, kAttemptMilliseconds)) != 1) {
      error = ETIMEDOUT;
    } else {
      getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &bytes);
    }
  }
  if (error != 0) return Error(absl::StatusCode::kUnavailable, place, "cannot connect", error);
  if (address.family() == AF_UNIX) {
    if (!IsOfThisUser(socket)) {
      return absl::PermissionDeniedError(
          absl::StrCat(Describe(place), " belongs to another user's process"));
    }
  } else {
    Tune(socket);
  }
  return socket;
}

}  // namespace

std::string Describe(const MeetingPlace& place) {
  if (!place.name.empty()) return absl::StrCat("the socket '@", place.name, "'");
  return absl::StrCat("host '", place.host, "', port ", place.port);
}

Descriptor::Descriptor(int fd) : fd_(AboveStandardStreams(fd)) {}

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

int PollMilliseconds(WaitPoint::Deadline deadline, int milliseconds_max) {
  if (deadline == WaitPoint::kNever) return milliseconds_max;
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - WaitPoint::Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, milliseconds_max));
}

namespace {

absl::StatusOr<std::vector<Address>> AddressesToListenAt(const MeetingPlace& place, bool one_host,
                                                         WaitPoint::Deadline deadline) {
  if (!place.name.empty()) return Resolve(place, deadline);
  std::vector<Address> addresses = LiteralAddresses(place);
  // A name may resolve differently on other hosts: here it may name the loopback device, or not
  // exist yet.
  if (addresses.empty() && one_host) {
    EBB_ASSIGN_OR_RETURN(addresses, Resolve(place, deadline));
  }
  if (!addresses.empty() && addresses[0].is_loopback()) return addresses;
  return LiteralAddresses({.host = "::,0.0.0.0", .port = place.port, .name = ""});
}

}  // namespace

absl::StatusOr<Descriptor> Listen(const MeetingPlace& place, bool one_host,
                                  WaitPoint::Deadline deadline) {
  EBB_ASSIGN_OR_RETURN(const std::vector<Address> addresses,
                       AddressesToListenAt(place, one_host, deadline));
  absl::Status first;
  for (const Address& address : addresses) {
    absl::StatusOr<Descriptor> listener = ListenAt(place, address);
    if (listener.ok() || listener.status().code() == absl::StatusCode::kAlreadyExists)
      return listener;
    if (first.ok()) first = listener.status();
  }
  return first;
}

int PortOf(const Descriptor& listener) {
  sockaddr_storage own = {};
  socklen_t bytes = sizeof(own);
  getsockname(listener.get(), reinterpret_cast<sockaddr*>(&own), &bytes);
  return ntohs(own.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(own).sin6_port
                                         : reinterpret_cast<const sockaddr_in&>(own).sin_port);
}

Descriptor Accept(const Descriptor& listener) {
  Descriptor socket(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!socket.is_open()) return socket;
  sockaddr_storage own = {};
  socklen_t bytes = sizeof(own);
  getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &bytes);
  if (own.ss_family != AF_UNIX) {
    Tune(socket);
  } else if (!IsOfThisUser(socket)) {
    return Descriptor();
  }
  return socket;
}

absl::StatusOr<Descriptor> Connect(const MeetingPlace& place, WaitPoint::Deadline deadline) {
  EBB_ASSIGN_OR_RETURN(const std::vector<Address> addresses, Resolve(place, deadline));
  absl::Status last = absl::UnavailableError(absl::StrCat(Describe(place), ": no address"));
  for (const Address& address : addresses) {
    absl::StatusOr<Descriptor> socket = ConnectTo(place, address, deadline);
    if (socket.ok()) return socket;
    last = socket.status();
  }
  return last;
}

}  // namespace ebb
