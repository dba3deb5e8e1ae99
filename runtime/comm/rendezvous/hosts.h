// Which ranks share a host, and whether the hosts are alike: a pure function, the same on all
// ranks.
//
//   host 0   | 0 | 1 | 2 |        even: every host has as many ranks, numbered host by host
//   host 1   | 3 | 4 | 5 |
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/comm/rendezvous/participant.h"

namespace ebb {

struct Hosts {
  // By host in the order of the hosts' first ranks, then by rank.
  std::vector<std::vector<int>> ranks;
  bool is_even = false;

  int count() const { return static_cast<int>(ranks.size()); }
  // For even hosts.
  int ranks_per_host() const { return static_cast<int>(ranks[0].size()); }
  // The ranks that share a host with `rank`.
  const std::vector<int>& With(int rank) const;
};

// By host name.
Hosts FindHosts(const std::vector<Participant>& participants);
// "2 hosts (node1, node2)".
std::string DescribeHosts(const std::vector<Participant>& participants);

bool ShareMemory(const std::vector<Participant>& participants);

// kUnimplemented; names the hosts.
absl::Status CpuRanksNeedMpi(const std::vector<Participant>& participants);

}  // namespace ebb
