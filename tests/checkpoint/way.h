// Ways to train the toy model, for tests of checkpoints: any of them can load what any other one
// saves.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <source_location>
#include <string>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/checkpoint.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/ranks.h"

namespace ebb::testing {

struct Way {
  int world = 1, stage = 0;
  Tier tier = Tier::kDevice;  // of all classes that may leave the device at its stage
  DType compute = DType::kFloat32;
  bool stochastic_rounding = false;
  int shard_group = 0, reduction_group = 0;
  Timing timing = Timing::kLate;  // of updates; kEarly neither clips nor looks for overflows
  int64_t prefetch_depth = 1, coalesce_bytes = 0;
  int hpz = 1;  // zero_hpz_partition_size
  int micro_batches = 1;
  ReduceAt reduce_at = ReduceAt::kRound;
  bool own_dtypes = false;  // ToyOptions::own_dtypes
  OptimizerStates states = OptimizerStates::kFloat32;
  OptimizerType optimizer = OptimizerType::kAdamW;
  bool warms_up = false;  // the learning rate rises until after the last step of a test
};

// A run's swap files are in the folder for temporary files.
inline Config ConfigOf(const Way& way) {
  Config config = ConfigFor({.world = way.world, .stage = way.stage, .timing = way.timing});
  config.compute = way.compute;
  config.ebb.reduce_at = way.reduce_at;
  config.loss_scale.initial_scale_power = 8;
  config.ebb.stochastic_rounding = way.stochastic_rounding;
  config.ebb.shard_group = way.shard_group;
  config.ebb.reduction_group = way.reduction_group;
  config.ebb.prefetch_depth = way.prefetch_depth;
  config.ebb.coalesce_bytes = way.coalesce_bytes;
  config.zero.hpz_partition_size = way.hpz;
  config.gradient_accumulation_steps = way.micro_batches;
  if (way.warms_up) {
    config.scheduler.type = SchedulerType::kWarmup;
    config.scheduler.warmup_max_lr = 0.01;
    config.scheduler.warmup_num_steps = 10;
  }
  config.optimizer.type = way.optimizer;
  config.optimizer.momentum = way.optimizer == OptimizerType::kMuon ? 0.75 : 0;
  config.optimizer.states = way.states;
  config.optimizer.min_8bit_size = 100;  // of the toy's parameters some
  config.zero.offload_param.max_in_cpu = 0;
  if (way.stage > 0) config.zero.offload_optimizer.device = way.tier;
  if (way.stage == 3) config.zero.offload_param.device = way.tier;
  config.zero.offload_optimizer.nvme_paths =
      config.zero.offload_param.nvme_paths = {::testing::TempDir()};
  return config;
}

// An engine and the model of it on each rank.
using WayBody = std::function<absl::Status(Engine& engine, ToyModel& model, int rank)>;

inline absl::Status RunRank(World world, const Way& way, const WayBody& body,
                            ToyOptions options = {.groups = true}) {
  options.own_dtypes |= way.own_dtypes;
  ToyModel model(options);
  EBB_ASSIGN_OR_RETURN(Engine engine,
                       Engine::Create(world, Device::Cpu(1), model.spec(), ConfigOf(way)));
  return body(engine, model, world.rank());
}
inline absl::Status RunWay(const Way& way, const WayBody& body,
                           ToyOptions options = {.groups = true}) {
  return RunThreads(way.world, [&](World world) { return RunRank(world, way, body, options); });
}

// Fails the test where a rank of RunWay fails. A body may also assert, and return nothing.
template <class Body>
void OnWay(const Way& way, const ToyOptions& options, const Body& body,
           std::source_location at = std::source_location::current()) {
  ExpectOk(RunWay(
               way,
               [&](Engine& engine, ToyModel& model, int rank) {
                 return StatusOfRank(body, engine, model, rank);
               },
               options),
           at);
}
template <class Body>
void OnWay(const Way& way, const Body& body,
           std::source_location at = std::source_location::current()) {
  OnWay(way, {.groups = true}, body, at);
}

// Steps [from, to), each of so many micro-batches as the engine was created for.
inline absl::Status Train(Engine& engine, ToyModel& model, int rank, int from, int to) {
  for (int step = from; step < to; ++step) EBB_RETURN_IF_ERROR(model.Train(engine, rank, step, {}));
  return absl::OkStatus();
}

// Trains for so many steps, then saves.
inline void TrainAndSave(const Way& way, int steps, const std::string& folder,
                         const ToyOptions& model_options = {.groups = true}) {
  OnWay(way, model_options, [&](Engine& engine, ToyModel& model, int rank) -> absl::Status {
    EBB_RETURN_IF_ERROR(Train(engine, model, rank, 0, steps));
    return SaveCheckpoint(engine, folder).status();
  });
}

// Collective: all ranks see `expected`.
inline void ExpectMasters(Engine& engine, const ToyModel& model, const ParameterValues& expected,
                          StateClass state = StateClass::kMaster) {
  ASSERT_OK_AND_ASSIGN(const ParameterValues values, GatherAll(engine, model.spec(), state));
  EXPECT_EQ(values, expected);
}

// Collective: the whole masters, on rank 0.
inline absl::Status KeepMasters(Engine& engine, const ToyModel& model, int rank,
                                ParameterValues& into) {
  EBB_ASSIGN_OR_RETURN(ParameterValues masters,
                       GatherAll(engine, model.spec(), StateClass::kMaster));
  if (rank == 0) into = std::move(masters);
  return absl::OkStatus();
}

}  // namespace ebb::testing
