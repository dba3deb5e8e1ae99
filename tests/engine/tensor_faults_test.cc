// A fault on any one rank of data 2 x tensor 2 gives one report, or an error, on all ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <latch>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "tests/engine/tensor_model.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::tensor_faults_test {
namespace {

using ::testing::ContainsRegex;

constexpr int kRanks = 4, kTensor = 2, kSteps = 3;

struct Outcome {
  std::vector<absl::StatusOr<StepReport>> reports;
  std::vector<Vector> masters;
};

// `fault`: of that rank, in the second step.
std::vector<Outcome> Train(const Config& config, int rank, const TensorTrainer::Fault& fault) {
  std::vector<Outcome> outcomes(kRanks);
  OnThreads(kRanks, [&](World world) -> absl::Status {
    Outcome& outcome = outcomes[static_cast<size_t>(world.rank())];
    EBB_ASSIGN_OR_RETURN(Engine engine,
                         Engine::Create(world, Device::Cpu(1), TensorModel(), config));
    TensorTrainer trainer(engine);
    for (int step = 0; step < kSteps; ++step) {
      const bool fails = world.rank() == rank && step == 1;
      trainer.Train(step, fails ? fault : nullptr).IgnoreError();
      outcome.reports.push_back(engine.Report());
    }
    for (const TensorRole role : {kUp, kGain}) {
      Vector& whole = outcome.masters.emplace_back(
          static_cast<size_t>(Elements(WholeShape(engine.model()[Of(0, role)]))));
      EBB_RETURN_IF_ERROR(engine.Gather(Of(0, role), StateClass::kMaster, whole));
    }
    return absl::OkStatus();
  });
  return outcomes;
}

Config HalfConfig() {
  Config config = TensorConfig(2, kTensor);
  config.compute = DType::kFloat16;
  config.loss_scale.initial_scale_power = 8;
  config.loss_scale.hysteresis = 1;
  return config;
}

// In a block of its own, and in a parameter that is whole.
TEST(TensorFaults, ANanOfAnyRankSkipsTheStepOnAllRanks) {
  for (int rank = 0; rank < kRanks; ++rank) {
    for (const TensorRole role : {kUp, kDown, kGain, kDownBias}) {
      SCOPED_TRACE(absl::StrCat("rank ", rank, ", parameter ", static_cast<int>(role)));
      const std::vector<Outcome> outcomes = Train(HalfConfig(), rank, [role](BackwardScope& scope) {
        scope.gradient(Of(0, role)).as<Float16>()[0] =
            Float16(std::numeric_limits<float>::quiet_NaN());
      });
      for (const Outcome& outcome : outcomes) {
        for (int step = 0; step < kSteps; ++step) {
          ASSERT_OK(outcome.reports[step].status());
          EXPECT_EQ(outcome.reports[step]->applied, step != 1);
          EXPECT_EQ(outcome.reports[step]->loss_scale, outcomes[0].reports[step]->loss_scale);
        }
        EXPECT_EQ(outcome.masters, outcomes[0].masters);
      }
    }
  }
}

TEST(TensorFaults, AWrongRequestOfAnyRankIsTheErrorOfAllRanks) {
  for (int rank = 0; rank < kRanks; ++rank) {
    SCOPED_TRACE(rank);
    for (const Outcome& outcome : Train(TensorConfig(3, kTensor), rank,
                                        [](BackwardScope& scope) { scope.gradient(Of(1, kUp)); })) {
      ASSERT_OK(outcome.reports[0].status());
      EXPECT_THAT(outcome.reports[1], Says("'block1.up'", "does not hold it"));
      EXPECT_OK(outcome.reports[2].status());  // the engine goes on
    }
  }
}

TEST(TensorFaults, GradientsOfReplicasThatDifferAreNamed) {
  for (int rank = 0; rank < kRanks; ++rank) {
    SCOPED_TRACE(rank);
    for (const Outcome& outcome : Train(TensorConfig(1, kTensor), rank, [](BackwardScope& scope) {
           scope.gradient(Of(0, kGain)).as<float>()[0] += 1;
         }))
      EXPECT_THAT(outcome.reports[1], Says("'block0 [whole]'"));
  }
}

// A step, or an evaluation, in which rank r adds losses[r], if it has one.
std::vector<absl::Status> AddLosses(const std::vector<std::optional<float>>& losses,
                                    bool evaluates) {
  return StatusesOnThreads(kRanks, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, Device::Cpu(1), TensorModel(),
                                                       TensorConfig(3, kTensor)));
    const std::optional<float>& given = losses[static_cast<size_t>(world.rank())];
    float loss = given.value_or(0);
    if (evaluates) {
      Evaluation evaluation = engine.BeginEvaluation();
      for (int b = 0; b < kBlocks; ++b) evaluation.Forward(UnitId{b});
      if (given) evaluation.AddLoss({.data = &loss});
      return evaluation.Finish().status();
    }
    Step step = engine.BeginStep({.may_leave_out = true});
    if (given) step.AddLoss({.data = &loss});
    step.Backward(UnitId{0});
    EBB_RETURN_IF_ERROR(step.Finish());
    return engine.Report().status();
  });
}

// Calls between steps are of all ranks, so they are compared and named over all of them.
TEST(TensorFaults, AnotherCallOfOneRankIsTheSameErrorOnAllRanks) {
  for (int rank = 1; rank < kRanks; ++rank) {
    SCOPED_TRACE(rank);
    const std::vector<absl::Status> statuses =
        StatusesOnThreads(kRanks, [&](World world) -> absl::Status {
          EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, Device::Cpu(1), TensorModel(),
                                                             TensorConfig(3, kTensor)));
          return world.rank() == rank
                     ? engine.Suspend()
                     : engine.SetTrainingState({.finished_steps = 1, .applied_steps = 1});
        });
    for (const absl::Status& status : statuses) {
      EXPECT_THAT(status, Says("SetTrainingState", "Suspend", absl::StrCat("rank ", rank)));
      EXPECT_EQ(status, statuses[0]);
    }
  }
}

// Their layers exchange parts of what they compute, so other samples need not differ anywhere else.
TEST(TensorFaults, OtherLossesOfTensorRanksAreAnErrorOfAllRanks) {
  for (const bool evaluates : {false, true}) {
    SCOPED_TRACE(evaluates);
    for (const absl::Status& status : AddLosses({1, 1, 2, 3}, evaluates))
      EXPECT_THAT(status, Says("losses of tensor ranks 0 and 1 differ", "2 on rank 2, 3 on rank 3",
                               "data_rank()"));
    constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
    for (const float other : {0.0f, kNan}) {
      for (const absl::Status& status : AddLosses({1, other, 2, 2}, evaluates))
        EXPECT_THAT(status, Says("losses of tensor ranks 0 and 1 differ"));
    }
    for (const absl::Status& status : AddLosses({1, std::nullopt, kNan, kNan}, evaluates))
      EXPECT_OK(status);
  }
}

// `fault`: of `rank` in its second step; null: that rank ends. `others`: of the other ranks there.
std::vector<absl::Status> TrainApart(int rank, const TensorTrainer::Fault& fault,
                                     absl::FunctionRef<void(Engine&)> others) {
  Config config = TensorConfig(3, kTensor);
  config.ebb.timeout_seconds = 3;
  return StatusesOnThreads(kRanks, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Engine engine,
                         Engine::Create(world, Device::Cpu(1), TensorModel(), config));
    TensorTrainer trainer(engine);
    EBB_RETURN_IF_ERROR(trainer.Train(0));
    const bool is_other = world.rank() != rank;
    if (!is_other && fault == nullptr) return absl::AbortedError("this rank has ended");
    const TensorTrainer::Fault of_others = [&](BackwardScope&) { others(engine); };
    EBB_RETURN_IF_ERROR(trainer.Train(1, is_other ? of_others : fault));
    return engine.Report().status();
  });
}

void SumOne(Engine& engine) {
  float value = 1;
  engine.tensor().AllReduce({.data = &value});
}

TEST(TensorFaults, ARankThatEndsIsAnErrorOfAllRanks) {
  for (int rank = 0; rank < kRanks; ++rank) {
    SCOPED_TRACE(rank);
    for (const absl::Status& status : TrainApart(rank, nullptr, [](Engine&) {}))
      EXPECT_FALSE(status.ok());
  }
}

TEST(TensorFaults, ACollectiveThatARankLeavesOutIsNamedOnAllRanks) {
  for (int rank = 0; rank < kRanks; ++rank) {
    SCOPED_TRACE(rank);
    for (const absl::Status& status : TrainApart(
             rank, [](BackwardScope&) {}, SumOne))
      EXPECT_THAT(status, Says("TensorAxis::AllReduce", absl::StrCat("rank ", rank)));
  }
}

// The other tensor rank of its data rank waits for it, and a data rank waits for that one.
TEST(TensorFaults, ARankThatStallsIsNamedOnAllOtherRanks) {
  Config config = TensorConfig(3, kTensor);
  config.gradient_accumulation_steps = 2;
  config.ebb.timeout_seconds = 3;
  for (int rank = 0; rank < kRanks; ++rank) {
    SCOPED_TRACE(rank);
    std::latch others_returned(kRanks - 1);
    const std::vector<absl::Status> statuses =
        StatusesOnThreads(kRanks, [&](World world) -> absl::Status {
          EBB_ASSIGN_OR_RETURN(Engine engine,
                               Engine::Create(world, Device::Cpu(1), TensorModel(), config));
          TensorTrainer trainer(engine);
          const bool stalls = world.rank() == rank;
          const absl::Cleanup returned = [&] {
            if (!stalls) others_returned.count_down();
          };
          EBB_RETURN_IF_ERROR(trainer.Train(0, stalls
                                                   ? [&](BackwardScope&) { others_returned.wait(); }
                                                   : TensorTrainer::Fault()));
          return engine.Report().status();
        });
    for (int other = 0; other < kRanks; ++other) {
      if (other == rank) continue;
      EXPECT_FALSE(statuses[other].ok());
      // The awaited rank waits for it, or is it.
      EXPECT_THAT(std::string(statuses[other].message()),
                  ContainsRegex(absl::StrCat("for (world rank ", rank, "|rank ", rank,
                                             " in|rank [01] .world rank ", rank, ".)")));
    }
  }
}

}  // namespace
}  // namespace ebb::testing::tensor_faults_test
