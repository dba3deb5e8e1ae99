// With which options each element of this rank's shards is updated. Neighbours with the same options
// are a run, and runs beside each other that follow one rule are updated together, by one kernel.
//
//   shard   [ weights        | biases | weights          | padding ]
//   runs    [ set 0          | set 1  | set 0                      ]   a set of constants each
//   parts   [ AdamW                                                ]
//
// Laid out once; the runs are copied to where updates read them (control_block.h).
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

// Of a group's parameters: the group's own optimizer or the config's, with what the group changes.
// Groups that the config does not name have no options of their own.
OptimizerConfig OptimizerOf(const Config& config, const std::string& group);
// What the states of these parameters begin with: Adagrad's sum, its only state, with the value that
// the config gives, and all others with 0.
float InitialState(const Config& config, const std::string& group);

class UpdateTable {
 public:
  // What the constants of a run are computed from, and by the step.
  struct Set {
    const ParameterGroupConfig* group = nullptr;  // of the config that it was made with, or none
    OptimizerConfig optimizer = {};               // with what the group changes
    double lr_factor = 1;
    // The one parameter that it is of, where its optimizer takes norms.
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
  // `slice`: which of every unit is this rank's. `rounds_stochastically`: parts end with the elements of a key.
  UpdateTable(const ModelSpec& model, const Config& config, const sharding::Plan& plan, int slice,
              bool rounds_stochastically);

  std::span<const Set> sets() const { return sets_; }
  std::span<const optim::UpdateRun> runs() const { return runs_; }  // of all units
  // In order; with stochastic rounding each within the elements of one key.
  std::span<const Part> parts(int unit) const { return parts_[static_cast<size_t>(unit)]; }
  // Those runs of a part that elements [begin, end) of it are in.
  struct Runs {
    int64_t first = 0, count = 0;
  };
  Runs RunsIn(const Part& part, int64_t begin, int64_t end) const;
  // By which alone elements [begin, end) of a unit's shard are updated, with all of `states` states, so that one pass
  // over them can take their checksums, too. Null: there is no such set.
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
