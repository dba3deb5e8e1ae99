// An optimizer of the trainer's, as updates call it: slice by slice of each sub-group. Missing fp32
// values are made for the call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "ebb/optim/kernels.h"
#include "ebb/optim/update_arrays.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/runtime/engine/core.h"
#include "ebb/runtime/engine/optimizer_spec.h"
#include "ebb/runtime/engine/outcome/step_scalars.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/plan.h"

namespace ebb {

class OwnOptimizer {
 public:
  // All arguments but the plan outlive it. `slice`: the number of this rank's slice of every unit.
  OwnOptimizer(const OptimizerSpec& spec, const ModelSpec& model, const Config& config,
               const sharding::Plan& plan, int slice);

  // The work on one sub-group.
  struct Work {
    int sub_group = 0;
    optim::UpdateArrays arrays;
    std::span<std::byte* const> states;
    float *gradient = nullptr,
          *master = nullptr;  // staging of one slice; master: if no whole master is kept
  };
  absl::Status Update(const Work& of, const StepConstants& constants, const StepScalars& scalars,
                      optim::Kernels& kernels, Stream& stream) const;

 private:
  struct Piece {
    Slice slice;
    const ParameterSpec* parameter = nullptr;
    const ParameterGroupConfig* group = nullptr;  // null: none of the config's
    int64_t at = 0;                               // element of the sub-group
  };

  const OptimizerSpec& spec_;
  std::vector<std::vector<Piece>> pieces_;  // by sub-group
};

// Whether the trainer's optimizer enqueues updates on the device: the host calls it once it knows
// that they are due.
bool OwnOptimizerEnqueues(const Core& core);

}  // namespace ebb
