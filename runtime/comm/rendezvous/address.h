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

// The addresses of a place that names one or several addresses with commas in between. Empty for
// a name.
std::vector<Address> LiteralAddresses(const MeetingPlace& place);

// Addresses at which other hosts may reach this host, in the form of MeetingPlace::host; its name
// if it has none.
std::string AddressesOfThisHost();

// For any place. A name that does not exist may exist in a moment, like the names of a cluster's
// services. So it is asked for until the deadline. kDeadlineExceeded: it still does not exist, or
// no server has answered.
absl::StatusOr<std::vector<Address>> Resolve(const MeetingPlace& place,
                                             WaitPoint::Deadline deadline);

}  // namespace ebb
