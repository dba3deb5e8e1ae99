#include "ebb/runtime/comm/rendezvous/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/un.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "ebb/runtime/comm/rendezvous/kept.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/machine.h"
#include "ebb/runtime/device/thread_limit.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

constexpr std::chrono::milliseconds kBetweenQuestions{250};  // spares the name server

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

// One question to the name servers, on a thread of its own: nothing can interrupt it, and servers
// that do not answer block it until the resolver's own time-outs.
class Question {
 public:
  Question(std::string host, int port)
      : thread_([this, host = std::move(host), port] {
          answer_ = Ask(host, port, 0);
          answered_.store(true, std::memory_order_release);
          point_.Notify();
        }) {}
  ~Question() { thread_.join(); }

  bool has_ended() const { return answered_.load(std::memory_order_acquire); }
  bool Wait(WaitPoint::Deadline deadline) {
    return point_.Await([this] { return has_ended(); }, deadline);
  }
  Answer& answer() { return answer_; }

 private:
  Answer answer_;
  std::atomic<bool> answered_{false};
  WaitPoint point_;
  std::thread thread_;  // last, because the thread uses the other members
};

absl::StatusOr<Answer> AskInTime(const MeetingPlace& place, WaitPoint::Deadline deadline) {
  Kept<Question>::RemoveEnded();
  std::shared_ptr<Question> question;
  try {
    question = std::make_shared<Question>(place.host, place.port);
  } catch (const std::system_error& error) {
    return NoThread("no thread to resolve a host's name", error);
  }
  if (question->Wait(deadline)) return std::move(question->answer());
  Kept<Question>::Add(std::move(question));
  return absl::DeadlineExceededError(
      absl::StrCat(Describe(place), ": no name server has answered"));
}

}  // namespace

bool Address::is_loopback() const {
  if (family() == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(storage);
    return ntohl(v4.sin_addr.s_addr) >> 24 == 127;
  }
  return family() == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr);
}

std::vector<Address> LiteralAddresses(const MeetingPlace& place) {
  std::vector<Address> all;
  if (place.host.empty()) return all;
  for (const absl::string_view host : absl::StrSplit(place.host, ',')) {
    for (Address& address : Ask(std::string(host), place.port, AI_NUMERICHOST).addresses)
      all.push_back(std::move(address));
  }
  return all;
}

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
    const bool is_late =
        deadline != WaitPoint::kNever && WaitPoint::Clock::now() + kBetweenQuestions >= deadline;
    if (is_late) return absl::DeadlineExceededError(why);
    if (first) LogInfo(absl::StrCat(why, "; trying again until the time limit"));
    std::this_thread::sleep_for(kBetweenQuestions);
  }
}

}  // namespace ebb
