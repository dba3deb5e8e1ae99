// The seconds of each kind of operation in a rank's steps, such as "update": as a timeline has
// measured them, beside those of a simulation.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/sharding/report/simulate.h"

namespace ebb::bench {

class OperationTimes {
 public:
  // Takes rank 0's steps from the timeline's file, counted from 1, without the first one or two of
  // each turn of `turn` steps and without the whole first turn.
  absl::Status AddMeasured(const std::string& trace, int64_t turn, int64_t skipped);
  // A step in the steady state of sharding::Simulate(plan, ...).
  void AddSimulated(const sharding::Plan& plan, const sharding::Simulated& step);
  // The medians of all steps, for operations that take at least `least` seconds of one.
  void Print(double least) const;

 private:
  using Samples = std::map<std::string, std::vector<double>>;  // by operation

  static void Add(const std::map<std::string, double>& step, Samples& samples);

  Samples measured_, simulated_;
};

}  // namespace ebb::bench
