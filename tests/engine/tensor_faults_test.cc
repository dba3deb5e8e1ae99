// A fault on any one rank of data 2 x tensor 2 gives one report, or an error, on all ranks.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "tests/engine/tensor_model.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::tensor_faults_test {
namespace {

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

// A rank leaves out a collective, or ends in the middle of a step.
TEST(TensorFaults, ARankThatDoesNotComeIsAnErrorOfAllRanks) {
  Config config = TensorConfig(3, kTensor);
  config.ebb.timeout_seconds = 3;
  for (int rank = 0; rank < kRanks; ++rank) {
    for (const bool ends : {false, true}) {
      SCOPED_TRACE(absl::StrCat("rank ", rank, ends ? " ends" : " leaves out a sum"));
      const std::vector<absl::Status> statuses =
          StatusesOnThreads(kRanks, [&](World world) -> absl::Status {
            EBB_ASSIGN_OR_RETURN(Engine engine,
                                 Engine::Create(world, Device::Cpu(1), TensorModel(), config));
            TensorTrainer trainer(engine);
            EBB_RETURN_IF_ERROR(trainer.Train(0));
            if (world.rank() == rank && ends) return absl::AbortedError("this rank has ended");
            const TensorTrainer::Fault more = [&](BackwardScope&) {
              float value = 1;
              engine.tensor().AllReduce({.data = &value});
            };
            EBB_RETURN_IF_ERROR(trainer.Train(1, world.rank() == rank ? nullptr : more));
            return engine.Report().status();
          });
      for (const absl::Status& status : statuses) EXPECT_FALSE(status.ok());
    }
  }
}

}  // namespace
}  // namespace ebb::testing::tensor_faults_test
