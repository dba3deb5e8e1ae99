#include "ebb/optim/master_arrays.h"

#include "ebb/optim/cast.h"
#include "ebb/optim/split_master.h"
#include "ebb/optim/stochastic_rounding.h"

namespace ebb::optim {

void LoadMaster(ThreadTeam& team, const MasterArrays& arrays) {
  if (arrays.low != nullptr) {
    Join(team, arrays.parameter, arrays.low, arrays.master, arrays.count);
  } else {
    Cast(team, arrays.parameter, DType::kBFloat16, arrays.master, DType::kFloat32, arrays.count,
         Rounding::kNearest);
  }
}

void StoreMaster(ThreadTeam& team, const MasterArrays& arrays) {
  if (arrays.low != nullptr) {
    Split(team, arrays.master, arrays.parameter, arrays.low, arrays.count);
  } else {
    RoundStochastically(team, arrays.master, arrays.parameter, arrays.count, arrays.rounding,
                        arrays.step);
  }
}

}  // namespace ebb::optim
