// Where a socket is: what a MeetingPlace means on this host.
#pragma once

#include <sys/socket.h>

#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/rendezvous/meeting_place.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

struct Address {
  sockaddr_storage storage = {};
  socklen_t bytes = 0;

  int family() const { return storage.ss_family; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  bool is_loopback() const;
};

// Of a place whose host is an address, or several with commas in between, not a name; else none.
std::vector<Address> LiteralAddresses(const MeetingPlace& place);

// By which other hosts may reach this one, in the form of MeetingPlace::host; its name if it has none.
std::string AddressesOfThisHost();

// All of this host's: a name may resolve here to another one than elsewhere.
std::vector<Address> AnyAddresses(int port);

// Of any place. A name that does not exist may do so in a moment, as those of a cluster's services
// do, and is asked for until then. kDeadlineExceeded: it still does not, or nobody has answered.
absl::StatusOr<std::vector<Address>> Resolve(const MeetingPlace& place,
                                             WaitPoint::Deadline deadline);

}  // namespace ebb
