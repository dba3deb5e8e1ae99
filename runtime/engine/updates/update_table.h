// The options of each element of this rank's shards in updates. Neighbours with the same options
// are a run. Adjacent runs with one rule are updated together, by one kernel.
//
//   shard   [ weights        | biases | weights          | padding ]
//   runs    [ set 0          | set 1  | set 0                      ]   a set of constants each
//   parts   [ AdamW                                                ]
//
// Laid out once; runs are copied to where updates read them (control_block.h).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ebb/optim/update_constants.h"
#include "ebb/optim/update_runs.h"
#include "ebb/runtime/config/config.h"
#include "ebb/sharding/plan.h"

namespace ebb {

// Options of a group's parameters: the group's own optimizer, or the config's with the changes of
// the group. Groups that the config does not name have no options of their own.
OptimizerConfig OptimizerOf(const Config& config, const std::string& group);
// First values of these parameters' states: Adagrad's sum, its only state, has the config's value,
// and all others 0.
float InitialState(const Config& config, const std::string& group);

class UpdateTable {
 public:
  // The inputs of a run's constants, beside the step's.
  struct Set {
    const ParameterGroupConfig* group = nullptr;  // of the config it was made with, or none
    OptimizerConfig optimizer = {};               // with the changes of the group
    double lr_factor = 1;
    // The only parameter of the set, if its optimizer takes norms.
    std::optional<ParameterId> parameter = {};
  };
  // Elements [begin, end) of a unit's shard, and the runs that hold them. The ends of runs are
  // counted from the shard's begin.
  struct Part {
    int64_t begin = 0, end = 0;
    optim::UpdateRule rule{};
    int64_t first_run = 0, runs = 0;  // of runs()
  };

  UpdateTable() = default;
  // `slice`: of every unit, this rank's. `rounds_stochastically`: parts end with a key's elements.
  UpdateTable(const ModelSpec& model, const Config& config, const sharding::Plan& plan, int slice,
              bool rounds_stochastically);

  std::span<const Set> sets() const { return sets_; }
  std::span<const optim::UpdateRun> runs() const { return runs_; }  // of all units
  // In order; with stochastic rounding a part is within the elements of one key.
  std::span<const Part> parts(int unit) const { return parts_[static_cast<size_t>(unit)]; }
  // The runs of a part that hold its elements [begin, end).
  struct Runs {
    int64_t first = 0, count = 0;
  };
  Runs RunsIn(const Part& part, int64_t begin, int64_t end) const;
  // The only set that updates elements [begin, end) of a unit's shard, with all of `states` states.
  // So one pass can take checksums too. Null: there is no such set.
  const Set* OnlySetOf(int unit, int64_t begin, int64_t end, int states) const;

 private:
  int64_t SetOf(const Config& config, const ParameterSpec& spec, ParameterId parameter);
  void AddRuns(const ModelSpec& model, const Config& config, const sharding::Section& section,
               int64_t begin, int64_t elements);
  void AddParts(bool rounds_stochastically, int64_t first_run, int64_t begin,
                std::vector<Part>& parts) const;

  std::vector<Set> sets_;
  std::vector<optim::UpdateRun> runs_;
  std::vector<std::vector<Part>> parts_;  // by unit
};

}  // namespace ebb
