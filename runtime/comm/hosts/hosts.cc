#include "ebb/runtime/comm/hosts/hosts.h"

#include <algorithm>

namespace ebb {

Hosts FindHosts(std::span<const int> host_of) {
  Hosts hosts;
  std::vector<int> seen;
  for (size_t rank = 0; rank < host_of.size(); ++rank) {
    const auto found = std::find(seen.begin(), seen.end(), host_of[rank]);
    const auto index = static_cast<size_t>(found - seen.begin());
    if (found == seen.end()) {
      seen.push_back(host_of[rank]);
      hosts.ranks.emplace_back();
    }
    hosts.ranks[index].push_back(static_cast<int>(rank));
  }
  int next = 0;
  hosts.is_grid = true;
  for (const std::vector<int>& ranks : hosts.ranks) {
    hosts.is_grid = hosts.is_grid && ranks.size() == hosts.ranks[0].size();
    for (const int rank : ranks) hosts.is_grid = hosts.is_grid && rank == next++;
  }
  return hosts;
}

}  // namespace ebb
