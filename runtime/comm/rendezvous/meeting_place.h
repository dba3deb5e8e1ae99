// Where ranks find each other.
#pragma once

#include <string>

namespace ebb {

// An address that all ranks know before they know each other.
struct MeetingPlace {
  // A name, an IPv4 or IPv6 address, or several addresses with commas in between.
  std::string host;
  int port = 0;
  // Ranks of one host may meet at a name in the abstract namespace of Unix sockets. It needs no
  // port, leaves no file, and admits no other user.
  std::string name;
};
// "host 'node1', port 29500" or "the socket '@ebb-...'".
std::string Describe(const MeetingPlace& place);

}  // namespace ebb
