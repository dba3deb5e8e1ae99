// Converts a master that is kept in another form to and from fp32, for a trainer's own optimizer.
#pragma once

#include <cstdint>

#include "ebb/optim/update_arrays.h"
#include "ebb/runtime/config/dtype.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb::optim {

// Arrays that do not overlap.
struct MasterArrays {
  float* master = nullptr;
  BFloat16* parameter = nullptr;
  uint16_t* low = nullptr;  // a split master's lower halves; null: the parameter is the master
  int64_t count = 0;
  // The place of the first element and of the step, for random bits if the parameter is the master.
  RoundingPlace rounding = {};
  int64_t step = 0;
};

// Rebuilds the master: 8 bytes moved per element for a split one, otherwise 6.
void LoadMaster(ThreadTeam& team, const MasterArrays& arrays);
// The reverse: Split (split_master.h) or RoundStochastically.
void StoreMaster(ThreadTeam& team, const MasterArrays& arrays);

}  // namespace ebb::optim
