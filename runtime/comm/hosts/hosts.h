// Which ranks share a host, and whether they form a grid: a pure function, the same on all ranks.
//
//   host 0   | 0 | 1 | 2 |        a grid: every host has as many ranks, numbered host by host; the
//   host 1   | 3 | 4 | 5 |        ranks that cross hosts are those of a column
#pragma once

#include <span>
#include <vector>

namespace ebb {

struct Hosts {
  // By host in the order of their first ranks, then ranks in their order.
  std::vector<std::vector<int>> ranks;
  bool is_grid = false;

  int count() const { return static_cast<int>(ranks.size()); }
  // Of a grid.
  int width() const { return static_cast<int>(ranks[0].size()); }
};

// `host_of`: equal for ranks that share a host.
Hosts FindHosts(std::span<const int> host_of);

}  // namespace ebb
