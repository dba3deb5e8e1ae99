// State that a call asks for between steps: where elements of a rank's slice live, and operations
// that bring them to the host and back. Made run by run: a shard has up to millions of runs.
//
//   file      | block | block | block | block |      whole blocks pass through the staging: a write
//   values        |...................|              first reads those that it covers in part
//
// State that the host reaches is not moved: it is read and written where it lives.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "ebb/sharding/op_list.h"
#include "ebb/sharding/placement.h"
#include "ebb/sharding/plan.h"

namespace ebb::sharding {

struct StateArray {
  StateClass what{};
  int unit = 0;
  bool trainable = true;
  int state = 0;  // number of the optimizer's state
  friend bool operator==(const StateArray&, const StateArray&) = default;
};

// Elements [begin, end) of a rank's slice of an array.
struct StateRange {
  StateArray array;
  int64_t begin = 0, end = INT64_MAX;

  int64_t count() const { return end - begin; }
};

// Elements that lie together.
struct StateRun {
  int64_t begin = 0, end = 0;
  // Places: the parameters and low halves of split masters, or codes and the scales of their blocks.
  // Otherwise one, and a count of 0.
  std::array<Operand, 2> stored = {};

  int64_t count() const { return end - begin; }
  bool is_split() const { return stored[1].encoding == kLowHalves; }
  bool has_scales() const { return stored[1].count > 0 && !is_split(); }
  friend bool operator==(const StateRun&, const StateRun&) = default;
};

// The most that one run takes, with the bytes that fill the first and last block of each place.
inline constexpr int64_t kStateStagingBytes = int64_t{4} << 20;
inline constexpr int64_t kRunElements = (kStateStagingBytes - 4 * kSwapAlignment) /
                                        SizeOf(DType::kFloat32) / kCutElements * kCutElements;

// The runs of a range, in order; `shard`: the number of the rank's slice.
std::vector<StateRun> RunsOf(const Plan& plan, int shard, const StateRange& range,
                             int64_t elements_max = kRunElements);
// The unit's parameters are copies of masters in another dtype, or elsewhere.
inline bool CastsMasters(const Decisions& decisions, int unit) {
  return decisions.writes_parameters(unit) && !decisions.reads_parameters(unit);
}

// A run and where the host finds it: in its place, or in the staging.
struct StagedRun {
  StagedRun(const StateRun& of, const Place& staging, bool reaches_device);

  bool is_staged() const { return staged[0] || staged[1]; }
  // The parts that are staged each by itself.
  int parts() const { return joined ? 1 : 2; }

  StateRun run;
  std::array<Place, 2> host = {};
  std::array<bool, 2> staged = {};
  // Codes and scales have a block of the file in common, so they pass together, with what lies
  // between them.
  bool joined = false;
};

// All operations of one list may run at once.
OpList LowerStateRead(const StagedRun& run);
// Reads the blocks of the disk that a coming write covers in part.
OpList LowerStateEdges(const StagedRun& run);
OpList LowerStateWrite(const StagedRun& run);
// From where the host finds a run's parameters to this rank's slice on the device.
OpList LowerStateUpload(const Plan& plan, const StateArray& array, const StagedRun& run);

// Units in the order of their updates, then the units without one.
std::vector<int> UnitsByUpdate(const Plan& plan);
// One operation for each unit, in that order, about all of this rank's masters, frozen parameters
// and states. `has_second_places`: masters and states on NVMe stay where they are during the
// operation. An operation before them, for all units, waits until they are there.
OpList LowerAsyncRead(const Plan& plan, int shard, bool has_second_places);

// The unit from all ranks' slices, alone.
OpList LowerGather(const Plan& plan, int unit);
// Fills what all ranks keep whole of a unit from their slices of it.
struct SpreadClasses {
  bool masters = false, parameters = false, states = false;
};
OpList LowerSpread(const Plan& plan, int unit, const SpreadClasses& classes);

}  // namespace ebb::sharding
