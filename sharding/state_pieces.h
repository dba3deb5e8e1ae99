// State that is asked for between steps: where elements of a rank's slice live, and the instructions that bring
// them to where the host computes and back. Made run by run, as a shard has up to millions of them.
//
//   file      | block | block | block | block |      whole blocks pass through the staging: before a write
//   values        |...................|              those that it covers in part are read
//
// What the host reaches is not moved: it is read and written where it lives.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "ebb/sharding/homes.h"
#include "ebb/sharding/instructions.h"
#include "ebb/sharding/plan.h"

namespace ebb::sharding {

struct StateArray {
  StateClass what{};
  int unit = 0;
  bool trainable = true;
  int state = 0;  // of the optimizer's
  friend bool operator==(const StateArray&, const StateArray&) = default;
};

// Elements [begin, end) of a rank's slice of an array.
struct StateRange {
  StateArray array;
  int64_t begin = 0, end = INT64_MAX;

  int64_t count() const { return end - begin; }
};

// Those that lie together.
struct StateRun {
  int64_t begin = 0, end = 0;
  // Of split masters the parameters and the low halves; else one, and a count of 0.
  std::array<Operand, 2> homes = {};

  int64_t count() const { return end - begin; }
  bool is_split() const { return homes[1].count > 0; }
  friend bool operator==(const StateRun&, const StateRun&) = default;
};

// Of one run, at most: with what fills the first and the last block of each of its homes.
inline constexpr int64_t kStateStagingBytes = int64_t{4} << 20;
inline constexpr int64_t kRunElements = (kStateStagingBytes - 4 * kSwapAlignment) /
                                        SizeOf(DType::kFloat32) / kCutElements * kCutElements;

// Of a range, in order; `shard`: which slice is the rank's.
std::vector<StateRun> RunsOf(const Plan& plan, int shard, const StateRange& range,
                             int64_t elements_max = kRunElements);
// Parameters are copies of masters in another dtype.
inline bool CastsMasters(const Decisions& decisions) {
  return decisions.writes_parameters() && !decisions.reads_parameters();
}

// A run and where the host finds it: at home, or in the staging.
struct StagedRun {
  StagedRun(const StateRun& of, const Place& staging, bool reaches_device);

  bool is_staged() const { return staged[0] || staged[1]; }

  StateRun run;
  std::array<Place, 2> host = {};
  std::array<bool, 2> staged = {};
};

// All instructions of one fragment may run at once.
Fragment LowerStateRead(const StagedRun& run);
// Of what a write is about to go to, the blocks of the disk that it covers in part.
Fragment LowerStateEdges(const StagedRun& run);
Fragment LowerStateWrite(const StagedRun& run);
// From where the host finds the parameters of a run to this rank's slice on the device.
Fragment LowerStateUpload(const Plan& plan, const StateArray& array, const StagedRun& run);

// One instruction for each of these units: all masters, frozen parameters and states of this rank's.
// `has_second_places`: masters and states on NVMe stay where they are however long the instruction takes. One that comes
// first, for all units, waits until they are there.
Fragment LowerAsyncRead(const Plan& plan, int shard, std::span<const int> units,
                        bool has_second_places);

// The unit from all ranks' slices, alone.
Fragment LowerGather(const Plan& plan, int unit);
// To what all ranks keep whole of a unit, from their slices of it.
struct SpreadClasses {
  bool masters = false, parameters = false, states = false;
};
Fragment LowerSpread(const Plan& plan, int unit, const SpreadClasses& classes);

}  // namespace ebb::sharding
