// An engine's step as a trainer and its reports see it: the memory of each tier, the bytes between
// tiers and ranks, and all operations as a table. Known before the engine; equal on all ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/config/config.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/state.h"

namespace ebb {

namespace sharding {
struct Plan;
}
struct OptimizerSpec;

// A step with the config's micro-batches. Constant; any thread.
class Program {
 public:
  explicit Program(const sharding::Plan& plan) : plan_(&plan) {}  // borrowed
  explicit Program(std::shared_ptr<const sharding::Plan> plan)
      : owned_(std::move(plan)), plan_(owned_.get()) {}
  Program(Program&&) noexcept = default;
  Program& operator=(Program&&) noexcept = default;

  int shards() const;      // ranks that each unit is cut over: the world, or a shard group of it
  DType gradient() const;  // of BackwardScope::gradient, of parameters in the config's dtype
  int64_t operations() const;  // of a rank, as table() lists them
  int64_t own_bytes() const;   // of RAM that the program itself takes

  // Rows with predicted bytes only. Memory is the fullest rank's, as in PredictMemory below.
  // Traffic and communication are a rank's in a step with updates that the step before has left.
  std::vector<MemoryRow> memory() const;
  std::vector<TrafficRow> traffic() const;
  std::vector<CommunicationRow> communication() const;

  // For people: a line with ranks, stage, rounds, when updates run and why; and a table of all
  // operations, with their streams, bytes, arrays and waits. The table begins with that line. At
  // most three rounds are listed: the middle one stands for all between the first and the last.
  std::string headline() const;
  std::string table() const;

  // The operations and addresses, for Ebb's own tests and benchmarks: the type is not public.
  const sharding::Plan& plan() const { return *plan_; }

 private:
  std::shared_ptr<const sharding::Plan> owned_;  // null: the plan is an engine's
  const sharding::Plan* plan_;
};

// The program of an engine from the model and the config alone, without an engine, a device or a
// disk. With offload_optimizer.ratio "auto" the ratio is what ebb.device_memory asks for, as on the
// CPU; a GPU may offload more. Without `advises` the error of a cap has the total need, but neither
// the need of each class nor a config that would fit, because these take longer to find.
// `optimizer`: EngineOptions::optimizer, of which the states count. Errors: the model's, the
// config's, and kResourceExhausted if a cap of the config's is exceeded.
absl::StatusOr<Program> PredictProgram(const ModelSpec& model, int world, const Config& config,
                                       bool advises = true,
                                       const OptimizerSpec* optimizer = nullptr);

// The program's memory table. An engine on a GPU has 1 MiB more of staging for what ranks tell each
// other from host memory (512 bytes a rank from 2,048 ranks on). With nothing on NVMe it also has 8
// MiB more of staging in host memory: state is read and written through it.
absl::StatusOr<std::vector<MemoryRow>> PredictMemory(const ModelSpec& model, int world,
                                                     const Config& config,
                                                     const OptimizerSpec* optimizer = nullptr);

}  // namespace ebb
