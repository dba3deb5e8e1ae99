#include "ebb/runtime/comm/rendezvous/socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

constexpr int kSocketFlags = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;

struct Address {
  sockaddr_storage storage = {};
  socklen_t bytes = 0;

  int family() const { return storage.ss_family; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  bool is_loopback() const {
    if (family() == AF_INET) {
      const auto& v4 = reinterpret_cast<const sockaddr_in&>(storage);
      return ntohl(v4.sin_addr.s_addr) >> 24 == 127;
    }
    return family() == AF_INET6 &&
           IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr);
  }
};

absl::Status Error(absl::StatusCode code, const MeetingPlace& place, absl::string_view what,
                   int error) {
  return absl::Status(code, absl::StrCat(Describe(place), ": ", what, ": ", std::strerror(error)));
}

absl::StatusOr<Address> NamedAddress(const MeetingPlace& place) {
  Address address;
  auto& unix_address = reinterpret_cast<sockaddr_un&>(address.storage);
  unix_address.sun_family = AF_UNIX;
  if (place.name.size() + 1 > sizeof(unix_address.sun_path)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the socket name '", place.name, "' is too long"));
  }
  // A first byte of zero is what makes the name abstract.
  std::memcpy(unix_address.sun_path + 1, place.name.data(), place.name.size());
  address.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + place.name.size());
  return address;
}

absl::StatusOr<std::vector<Address>> Resolve(const MeetingPlace& place) {
  if (!place.name.empty()) {
    EBB_ASSIGN_OR_RETURN(const Address address, NamedAddress(place));
    return std::vector<Address>{address};
  }
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(place.host.c_str(), std::to_string(place.port).c_str(), &hints, &found);
  if (error != 0) {
    const absl::StatusCode code =
        error == EAI_AGAIN ? absl::StatusCode::kUnavailable : absl::StatusCode::kNotFound;
    return absl::Status(code, absl::StrCat(Describe(place),
                                           ": the name cannot be resolved: ", gai_strerror(error)));
  }
  std::vector<Address> addresses;
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    Address& address = addresses.emplace_back();
    std::memcpy(&address.storage, info->ai_addr, info->ai_addrlen);
    address.bytes = info->ai_addrlen;
  }
  freeaddrinfo(found);
  return addresses;
}

// Every address of this host: a name may resolve here to another one than elsewhere.
std::vector<Address> AnyAddresses(int port) {
  std::vector<Address> addresses(2);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(addresses[0].storage);
  v6.sin6_family = AF_INET6;
  v6.sin6_addr = in6addr_any;
  v6.sin6_port = htons(static_cast<uint16_t>(port));
  addresses[0].bytes = sizeof(v6);
  auto& v4 = reinterpret_cast<sockaddr_in&>(addresses[1].storage);
  v4.sin_family = AF_INET;
  v4.sin_port = htons(static_cast<uint16_t>(port));
  addresses[1].bytes = sizeof(v4);
  return addresses;
}

void SetOption(const Descriptor& socket, int level, int option, int value) {
  setsockopt(socket.get(), level, option, &value, sizeof(value));
}

// Options that make a connection prompt and notice a peer's host that has vanished; harmless where
// they mean nothing.
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
    constexpr int kAttemptMilliseconds = 3000;  // a host that drops packets must not take all time
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

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

int PollMilliseconds(WaitPoint::Deadline deadline, int milliseconds_max) {
  if (deadline == WaitPoint::kNever) return milliseconds_max;
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - WaitPoint::Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, milliseconds_max));
}

absl::StatusOr<Descriptor> Listen(const MeetingPlace& place, bool one_host) {
  EBB_ASSIGN_OR_RETURN(std::vector<Address> addresses, Resolve(place));
  const bool only_here =
      place.name.empty() && one_host && !addresses.empty() && addresses[0].is_loopback();
  if (place.name.empty() && !only_here) addresses = AnyAddresses(place.port);
  absl::Status first;
  for (const Address& address : addresses) {
    absl::StatusOr<Descriptor> listener = ListenAt(place, address);
    if (listener.ok() || listener.status().code() == absl::StatusCode::kAlreadyExists)
      return listener;
    if (first.ok()) first = listener.status();
  }
  return first;
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
  EBB_ASSIGN_OR_RETURN(const std::vector<Address> addresses, Resolve(place));
  absl::Status last = absl::UnavailableError(absl::StrCat(Describe(place), ": no address"));
  for (const Address& address : addresses) {
    absl::StatusOr<Descriptor> socket = ConnectTo(place, address, deadline);
    if (socket.ok()) return socket;
    last = socket.status();
  }
  return last;
}

}  // namespace ebb
