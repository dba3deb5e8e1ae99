// One cell of the bitwise matrix: a world and a configuration that trains the toy model for a few
// steps, one with an overflow on one rank. It collects everything that must not change by a bit.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/ebb.h"
#include "tests/engine/toy_model.h"

namespace ebb::testing {

enum Axis : int {
  kWorld,
  kStage,
  kDType,
  kRounds,  // micro-batches a step, and of them a round
  kReduceAt,
  kPrefetch,
  kCoalesce,
  kUpdate,       // auto: early where checks are off. held: every other step holds its updates
  kChecks,       // on: gradients are clipped, and one step overflows
  kPersistence,  // mixed: at stage 3 some units stay gathered
  kReshard,
  kBoundaries,      // the engine or the trainer keeps activations
  kCommunication,   // dtype; other: fp16, or bf16 where fp16 is the compute dtype
  kAccumulation,    // dtype
  kReductionGroup,  // ranks; half: of the world, where that is even
  kShardGroup,      // likewise; at stage 0 the world
  kModel,           // frozen first: backward ends before the first visit
  kBetween,         // the call after each step
  kSize,            // of a unit; large: shards of several sub-groups
  kParameters,      // tier, at stage 3
  kOptimizer,       // tier of masters and moments, from stage 1 on
  kGradients,       // tier of reduced gradients; follow: the optimizer
  kActivations,     // tier of boundaries, where they are the engine's
  kFasterShare,     // the part of parameters and states that a faster tier keeps
  kSubGroups,       // at most so many elements
  kMasters,         // split; none, with stochastic rounding: bf16 only
  kDisk,            // what moves data to and from it
  kRule,            // of the optimizer
  kReports,         // which steps' are asked for; last: on a GPU steps run ahead of their verdicts
  kSecondary,       // ranks that hold secondary shards (hpZ); some are there with 2 of 4 at stage 3
  kStates,          // of the optimizer
  kAxes
};
struct AxisLevels {
  std::string_view name;
  std::vector<std::string_view> levels;
};
std::span<const AxisLevels> Axes();
std::vector<int> LevelCounts();

struct Cell {
  std::array<int, kAxes> levels = {};

  int& operator[](Axis axis) { return levels[static_cast<size_t>(axis)]; }
  int operator[](Axis axis) const { return levels[static_cast<size_t>(axis)]; }
  friend auto operator<=>(const Cell&, const Cell&) = default;

  int world() const { return (*this)[kWorld] + 1; }
  // Rounds with a reduction each. Their sums are added afterwards, which may change bits.
  int reductions() const;
  int shard_group() const;  // ranks; 0: the world
  bool has_secondary() const;
  bool updates_matrices() const;
  Tier parameter_tier() const;
  Tier optimizer_tier() const;
  Config MakeConfig(const std::string& nvme_path = "/unused") const;
  ToyOptions MakeModel() const;
  std::string Describe() const;

  // The simplest cell that must agree with this one bit for bit, by DESIGN.md's "Same bits": the
  // same world, micro-batches, dtypes, reduction group, checks and reductions; stage 0, nothing
  // ahead, grouped, overlapped or kept; and one round if that gives the same sums.
  Cell Reference() const;
  // Whether another cell runs the very same thing: the settings that differ have no meaning here.
  bool IsRedundant() const;
};

// All settings by chance.
Cell RandomCell(uint64_t seed);
// Parameters and states on NVMe, updated early: what so many settings have to agree on for, chance
// rarely draws. The rest by chance.
Cell RandomEarlyCell(uint64_t seed);

// The state after training, as bits, and the reports.
struct Outcome {
  struct Step {
    int number = 0;
    bool applied = false;
    int64_t skipped_steps = 0;
    double loss = 0, gradient_norm = 0, loss_scale = 0, learning_rate = 0;
    friend bool operator==(const Step&, const Step&) = default;
  };
  std::vector<std::string> arrays;           // masters, parameters and the optimizer's states ...
  std::vector<std::vector<uint32_t>> state;  // ... by element
  std::vector<Step> steps;                   // with a report that was asked for
  double evaluation = 0;                     // loss after the last step
};
inline constexpr int kMatrixSteps = 4;

// `device`: of each rank. `deterministic_reduce`: the config's.
absl::StatusOr<Outcome> RunCell(
    const Cell& cell,
    const std::function<absl::StatusOr<Device>()>& device =
        [] { return Device::Cpu(/*threads=*/1); },
    bool deterministic_reduce = false);
// The first thing that differs, for people; "" if nothing does.
std::string FirstDifference(const Outcome& outcome, const Outcome& reference);

}  // namespace ebb::testing
