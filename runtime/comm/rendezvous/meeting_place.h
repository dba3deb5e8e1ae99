// Where ranks find each other.
#pragma once

#include <string>

namespace ebb {

// An address that all ranks know before they know each other.
struct MeetingPlace {
  // A name or an address, IPv4 or IPv6, or several addresses with commas in between.
  std::string host;
  int port = 0;
  // Ranks of one host may meet at a name instead, in the abstract namespace of Unix sockets: no
  // port that others may have, no file that stays behind, no other user.
  std::string name;
};
// "host 'node1', port 29500" or "the socket '@ebb-...'".
std::string Describe(const MeetingPlace& place);

}  // namespace ebb
