// What an engine does in a step, as a trainer and its reports look at it: what each tier holds, what moves between
// tiers and ranks, and all operations as a table. Known before there is an engine, and the same on every rank.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/config/dtype.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/state.h"

namespace ebb {

namespace sharding {
struct Plan;
}

// Of a step with the config's micro-batches. Does not change; any thread.
class Program {
 public:
  explicit Program(std::shared_ptr<const sharding::Plan> plan) : plan_(std::move(plan)) {}
  Program(Program&&) noexcept = default;
  Program& operator=(Program&&) noexcept = default;

  int shards() const;      // ranks that each unit is cut over: the world, or a shard group of it
  DType gradient() const;  // of what BackwardScope::gradient gives
  int64_t operations() const;  // of a rank, as table() lists them
  int64_t own_bytes() const;   // of RAM that the program itself takes

  // Rows with predicted bytes only. Memory is that of the fullest rank, as PredictMemory below; traffic and
  // communication are those of a rank in a step with the updates that the step before has left.
  std::vector<MemoryRow> memory() const;
  std::vector<TrafficRow> traffic() const;
  std::vector<CommunicationRow> communication() const;
  // Host memory beside that: what state passes through when a call asks for it, where anything is on NVMe. (An engine
  // on a GPU always has as much.)
  int64_t state_staging_bytes() const;

  // For people: a line that says ranks, stage, rounds, when updates run and why; and a table of all operations, with
  // their streams, bytes and addresses, and what each comes after. The first line of the table is that line. Three
  // rounds are listed at most: the one in the middle stands for all between the first and the last.
  std::string headline() const;
  std::string table() const;

  // The instructions and addresses themselves, for Ebb's own tests and benchmarks: the type is not public.
  const sharding::Plan& plan() const { return *plan_; }

 private:
  std::shared_ptr<const sharding::Plan> plan_;
};

// The program of an engine from the model and the config alone: no engine, no device, no disk. Of
// offload_optimizer.ratio "auto" it has what ebb.device_memory asks for, as an engine on the
// CPU does; one on a GPU may offload more. Not advises: the error of a cap says what is needed, without
// the classes and what would fit, which takes longer to find than the program. Errors: the model's, the config's, and
// kResourceExhausted where a cap of the config's is exceeded.
absl::StatusOr<Program> PredictProgram(const ModelSpec& model, int world, const Config& config,
                                       bool advises = true);

// Its memory table. An engine on a GPU has 1 MiB more of staging,
// through which ranks tell each other what lies in host memory (512 bytes a rank from 2,048 ranks on). On a GPU, or
// with anything on NVMe, it has 8 MiB more of staging in host memory, through which state is read and written.
absl::StatusOr<std::vector<MemoryRow>> PredictMemory(const ModelSpec& model, int world,
                                                     const Config& config);

}  // namespace ebb
