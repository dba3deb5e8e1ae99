// Inputs of a step's updates beside their arrays, and the constants that follow from them for each
// set of options (UpdateTable). Updates read the constants in the control block.
#pragma once

#include <cstdint>

#include "ebb/optim/schedule.h"
#include "ebb/optim/update.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/engine/outcome/control_block.h"
#include "ebb/runtime/engine/outcome/step_rates.h"
#include "ebb/runtime/engine/updates/update_table.h"

namespace ebb {

struct StepScalars {
  bool apply = false;
  float gradient_factor = 1;
  int64_t step = 1;
  optim::ScheduledRates rates = {};  // of the ungrouped parameters
  bool rate_of_step = false;         // StepOptions::learning_rate is given: the rate of all groups
  int parity = 0;                    // of the step that the StepRates are of
};

// By parity, and by whether updates come before their step's verdict. Early ones are set as the
// step begins, the others with the verdict, each in the order of the reduce stream.
class StepConstants {
 public:
  // All borrowed. `own_optimizer`: updates are the trainer's.
  StepConstants(const Config& config, const UpdateTable& table, const ControlBlock& control,
                bool own_optimizer)
      : config_(config), table_(table), control_(control), rates_(config, own_optimizer) {}

  StepRates& rates() { return rates_; }

  // Also sets the constants; copies on the device follow later. If the step is not applied, the
  // constants make an update write nothing.
  void Set(int parity, bool early, const StepScalars& scalars);
  const StepScalars& of(int parity, bool early) const { return scalars_[parity][early ? 1 : 0]; }
  // The schedule scales each set's own learning rate, unless the step sets the rate itself.
  optim::UpdateScalars ScalarsOf(const UpdateTable::Set& set, const StepScalars& scalars) const;
  // With the step's weight decay.
  OptimizerConfig OptimizerOf(const UpdateTable::Set& set, const StepScalars& scalars) const;
  double LearningRateOf(const ParameterGroupConfig* group, const StepScalars& scalars) const;

 private:
  const Config& config_;
  const UpdateTable& table_;
  const ControlBlock& control_;
  StepRates rates_;
  StepScalars scalars_[2][2];
};

}  // namespace ebb
