#include "ebb/runtime/comm/rendezvous/socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
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
#include <future>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/rendezvous/kept.h"
#include "ebb/runtime/device/machine.h"
#include "ebb/runtime/device/thread_limit.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/runtime/trace/standard_streams.h"

namespace ebb {
namespace {

constexpr std::chrono::milliseconds kBetweenQuestions{250};  // spares the name server

// Where a socket is: what a MeetingPlace means on this host.
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

// The addresses, or getaddrinfo's error.
struct Answer {
  int error = 0;
  std::vector<Address> addresses;
};

Answer Ask(const std::string& host, int port, int flags) {
  addrinfo hints = {};
  hints.ai_flags = flags;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  Answer answer;
  answer.error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (answer.error != 0) return answer;
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    Address& address = answer.addresses.emplace_back();
    std::memcpy(&address.storage, info->ai_addr, info->ai_addrlen);
    address.bytes = info->ai_addrlen;
  }
  freeaddrinfo(found);
  return answer;
}

// A question to the name servers, on a thread of its own: nothing can interrupt it, and servers that
// do not answer block it until the resolver's own time-outs. The future waits for its thread.
struct Question {
  std::future<Answer> answer;
  bool has_ended() const {
    return answer.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
};

absl::StatusOr<Answer> AskInTime(const MeetingPlace& place, WaitPoint::Deadline deadline) {
  Kept<Question>::RemoveEnded();
  const auto question = std::make_shared<Question>();
  try {
    question->answer = std::async(std::launch::async, &Ask, place.host, place.port, 0);
  } catch (const std::system_error& error) {
    return NoThread("no thread to resolve a host's name", error);
  }
  if (question->answer.wait_until(deadline) == std::future_status::ready)
    return question->answer.get();
  Kept<Question>::Add(question);
  return absl::DeadlineExceededError(
      absl::StrCat(Describe(place), ": no name server has answered"));
}

// The addresses of a place that names one or several addresses with commas in between. Empty for
// a name.
std::vector<Address> LiteralAddresses(const MeetingPlace& place) {
  std::vector<Address> all;
  if (place.host.empty()) return all;
  for (const absl::string_view host : absl::StrSplit(place.host, ',')) {
    for (Address& address : Ask(std::string(host), place.port, AI_NUMERICHOST).addresses)
      all.push_back(std::move(address));
  }
  return all;
}

absl::StatusOr<std::vector<Address>> Resolve(const MeetingPlace& place,
                                             WaitPoint::Deadline deadline) {
  if (!place.name.empty()) {
    EBB_ASSIGN_OR_RETURN(const Address address, NamedAddress(place));
    return std::vector<Address>{address};
  }
  std::vector<Address> literal = LiteralAddresses(place);
  if (!literal.empty()) return literal;
  for (bool first = true;; first = false) {
    EBB_ASSIGN_OR_RETURN(Answer answer, AskInTime(place, deadline));
    if (answer.error == 0) return std::move(answer.addresses);
    const std::string why = absl::StrCat(
        Describe(place), ": the name cannot be resolved: ", gai_strerror(answer.error));
    if (WaitPoint::Clock::now() + kBetweenQuestions >= deadline)
      return absl::DeadlineExceededError(why);
    if (first) LogInfo(absl::StrCat(why, "; trying again until the time limit"));
    std::this_thread::sleep_for(kBetweenQuestions);
  }
}

constexpr int kSocketFlags = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;

absl::Status Error(absl::StatusCode code, const MeetingPlace& place, absl::string_view what,
                   int error) {
  return absl::Status(code, absl::StrCat(Describe(place), ": ", what, ": ", std::strerror(error)));
}

void SetOption(int socket, int level, int option, int value) {
  setsockopt(socket, level, option, &value, sizeof(value));
}

// Options that make a connection prompt, and make it notice within 6 s that the peer's host has
// vanished; after FailWhenUnreachable, in its time. They are harmless where they have no effect.
void Tune(const Descriptor& socket) {
  SetOption(socket.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  SetOption(socket.get(), SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(socket.get(), IPPROTO_TCP, TCP_KEEPIDLE, 1);
  SetOption(socket.get(), IPPROTO_TCP, TCP_KEEPINTVL, 1);
  SetOption(socket.get(), IPPROTO_TCP, TCP_KEEPCNT, 5);
}

absl::StatusOr<Descriptor> ListenAt(const MeetingPlace& place, const Address& address) {
  Descriptor socket(::socket(address.family(), kSocketFlags, 0));
  if (!socket.is_open()) return Error(absl::StatusCode::kInternal, place, "no socket", errno);
  if (address.family() != AF_UNIX) SetOption(socket.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (address.family() == AF_INET6) SetOption(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
  if (bind(socket.get(), address.get(), address.bytes) != 0 ||
      listen(socket.get(), SOMAXCONN) != 0) {
    const absl::StatusCode code = errno == EADDRINUSE ? absl::StatusCode::kAlreadyExists
                                                      : absl::StatusCode::kFailedPrecondition;
    return Error(code, place, "rank 0 cannot listen there", errno);
  }
  return socket;
}

// Whether a socket may have it. If this host has no such family, it has no such address.
bool IsOfADevice(Address address) {
  if (address.family() == AF_INET6) {
    reinterpret_cast<sockaddr_in6&>(address.storage).sin6_port = 0;
  } else {
    reinterpret_cast<sockaddr_in&>(address.storage).sin_port = 0;
  }
  const Descriptor socket(::socket(address.family(), kSocketFlags, 0));
  return socket.is_open() && bind(socket.get(), address.get(), address.bytes) == 0;
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

std::string AddressesOfThisHost() {
  std::vector<std::string> texts;
  ifaddrs* interfaces = nullptr;
  if (getifaddrs(&interfaces) != 0) return HostName();
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* each = interfaces; each != nullptr; each = each->ifa_next) {
      if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != family ||
          (each->ifa_flags & IFF_LOOPBACK) != 0 || (each->ifa_flags & IFF_UP) == 0)
        continue;
      const socklen_t bytes = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      char text[NI_MAXHOST] = {};
      if (getnameinfo(each->ifa_addr, bytes, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) != 0)
        continue;
      // A link-local address means nothing without the name of this host's device.
      if (std::strchr(text, '%') == nullptr) texts.emplace_back(text);
    }
  }
  freeifaddrs(interfaces);
  return texts.empty() ? HostName() : absl::StrJoin(texts, ",");
}

std::string Describe(const MeetingPlace& place) {
  if (!place.name.empty()) return absl::StrCat("the socket '@", place.name, "'");
  return absl::StrCat("host '", place.host, "', port ", place.port);
}

Descriptor::Descriptor(int fd) : fd_(AboveStandardStreams(fd)) {}

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

int PollMilliseconds(WaitPoint::Deadline deadline, int milliseconds_max) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - WaitPoint::Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, milliseconds_max));
}

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

void FailWhenUnreachable(int socket, double timeout_seconds) {
  const double seconds = std::clamp(timeout_seconds / 10, 1.0, 60.0);
  SetOption(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(seconds * 1000));
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

bool IsOfThisHost(const MeetingPlace& place, WaitPoint::Deadline deadline) {
  if (!place.name.empty()) return true;
  constexpr std::chrono::seconds kAtOnce{1};  // for the name servers
  const WaitPoint::Deadline soon = std::min(deadline, WaitPoint::Clock::now() + kAtOnce);
  std::vector<Address> addresses = LiteralAddresses(place);
  if (addresses.empty()) {
    const absl::StatusOr<Answer> answer = AskInTime(place, soon);
    if (!answer.ok() || answer->error != 0) {
      LogWarning(absl::StrCat(Describe(place),
                              ": this name has no address here, so it is not known "
                              "whether the other ranks can find rank 0 there"));
      return true;
    }
    addresses = answer->addresses;
  }
  return std::any_of(addresses.begin(), addresses.end(), &IsOfADevice);
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
