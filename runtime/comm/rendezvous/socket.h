// Where ranks find each other, and the byte streams between ranks that have not met yet.
#pragma once

#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/rendezvous/meeting_place.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

// Addresses at which other hosts may reach this host, in the form of MeetingPlace::host; its name
// if it has none.
std::string AddressesOfThisHost();

// An open file; never standard input, output or error. It is closed with this object.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd);
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();

  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// All sockets are non-blocking, and programs that this one starts do not inherit them. The socket
// is not open to the network if the place is a loopback address, or names one and all ranks are on
// `one_host`. kAlreadyExists: another process listens there.
absl::StatusOr<Descriptor> Listen(const MeetingPlace& place, bool one_host,
                                  WaitPoint::Deadline deadline);
// From now on the socket fails once its peer's host has acknowledged nothing for a tenth of
// `timeout_seconds`, but at least 1 s and at most a minute. TCP's keep-alive alone does not notice
// a host without power or network while bytes wait to be acknowledged. Probes show such a host on
// an idle connection, but their number (TCP_KEEPCNT) does not count any more.
void FailWhenUnreachable(int socket, double timeout_seconds);
// The port of a listener on a network.
int PortOf(const Descriptor& listener);
// A connection that waits at `listener`; not open if there is none.
Descriptor Accept(const Descriptor& listener);
// Whether a device of this host has an address of the place. A Unix socket, and a name that does not
// resolve at once, count as this host's.
bool IsOfThisHost(const MeetingPlace& place, WaitPoint::Deadline deadline);
// One attempt at every address of the place; waits for its name to resolve. A name that does not
// exist may exist in a moment, like the names of a cluster's services. So it is asked for until the
// deadline. kUnavailable: no process listens there yet. kDeadlineExceeded: the name still does not
// exist, or no server has answered.
absl::StatusOr<Descriptor> Connect(const MeetingPlace& place, WaitPoint::Deadline deadline);

// The poll(2) time-out until `deadline`, at most `milliseconds_max`: a minute, after which the caller
// looks again.
int PollMilliseconds(WaitPoint::Deadline deadline, int milliseconds_max = 60'000);

}  // namespace ebb
