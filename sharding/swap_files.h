// The extents of a rank's swap files. A step writes or reads an extent in one transfer.
//
//   states file      | master | state 0 | state 1 | master | ...     an extent each, of a sub-group
//                    | gradients, sub-group by sub-group | ...       likewise, as updates read them
//                    | boundary | boundary | ...                     all micro-batches of a round
//   parameters file  | sub-group | sub-group | frozen | ...          an extent each
#pragma once

#include <cstdint>
#include <vector>

#include "ebb/sharding/plan.h"

namespace ebb::sharding {

struct SwapExtent {
  StateClass what{};
  int unit = 0;
  Place place;
  int64_t bytes = 0;  // without the fill of the last block
  bool is_state =
      false;  // of the optimizer's: also masters, and parameters that are masters or halves of them
  bool trainable = true;
};

struct SwapFiles {
  std::vector<SwapExtent> extents;
  // By sub-group: its master (0 bytes if it has none beside the parameter), and each state. Empty
  // if they do not live on the disk.
  struct Array {
    Place place;
    int64_t bytes = 0;
  };
  std::vector<std::vector<Array>> sub_groups;
  int64_t sub_group_elements_max = 0;  // of sub-groups on the disk
};

SwapFiles LayOutSwapFiles(const Plan& plan);

}  // namespace ebb::sharding
