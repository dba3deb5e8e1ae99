// Requests for state that cannot be met: a Status on every rank that says what is wrong and what is
// right, and no change.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ebb/runtime/config/status_macros.h"
#include "tests/engine/snapshot.h"

namespace ebb::testing::state_refusal_test {
namespace {

using ::testing::HasSubstr;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
constexpr absl::StatusCode kPrecondition = absl::StatusCode::kFailedPrecondition;

absl::Status Ignore(const Slice&, std::span<const float>) {
  return absl::OkStatus();
}

class StateRefusalTest : public ::testing::TestWithParam<Setting> {
 protected:
  void Run(const std::function<absl::Status(Engine& engine, ScriptedTrainer& trainer)>& body) {
    for (const Setting& setting : At(GetParam(), kTimings))
      RunOn(setting, model_, ConfigFor(setting), body);
  }
  ModelSpec model_ = ScriptedModel();
};
INSTANTIATE_TEST_SUITE_P(Cells, StateRefusalTest, ::testing::ValuesIn(WorldsAndStages()), NameOf);

TEST_P(StateRefusalTest, NamesTheError) {
  struct Refusal {
    std::function<absl::Status(Engine& engine)> request;
    absl::StatusCode code;
    const char* what;
  };
  std::vector<float> whole(11 * 9), small(3);
  const Refusal refusals[] = {
      {[](Engine& e) { return e.Read(StateClass::kOptimizer, Ignore, "velocity"); }, kInvalid,
       "no state 'velocity'; it has exp_avg, exp_avg_sq"},
      {[](Engine& e) { return e.Write(StateClass::kOptimizer, Constant(0)); }, kInvalid,
       "no state ''; it has exp_avg, exp_avg_sq"},
      {[](Engine& e) { return e.Write(StateClass::kMaster, {}); }, kInvalid,
       "without a source of values"},
      {[](Engine& e) { return e.Read(StateClass::kGather, Ignore); }, kInvalid,
       "'gather' cannot be read or written; parameter, master, gradient and optimizer can"},
      {[](Engine& e) { return e.Write(StateClass::kWorkspace, Constant(0)); }, kInvalid,
       "'workspace' cannot be read or written"},
      {[](Engine& e) { return e.Read(StateClass::kGradient, Ignore); }, kPrecondition,
       "between Step::Reduce and Step::Finish only"},
      {[](Engine& e) { return e.Write(StateClass::kGradient, Constant(0)); }, kPrecondition,
       "between Step::Reduce and Step::Finish only"},
      {[](Engine& e) {
         return e.Read(StateClass::kMaster, [](const Slice&, std::span<const float>) {
           return absl::DataLossError("the disk is full");
         });
       },
       absl::StatusCode::kDataLoss, "the disk is full"},
      {[&](Engine& e) {
         std::vector<float> own(whole.size());
         return e.Gather(ParameterId{99}, StateClass::kMaster, own);
       },
       kInvalid, "Gather of parameter 99: the model has 9"},
      {[&](Engine& e) {
         std::vector<float> own(whole.size());
         return e.Gather(ParameterId{-1}, StateClass::kMaster, own);
       },
       kInvalid, "Gather of parameter -1"},
      {[&](Engine& e) {
         std::vector<float> own(small.size());
         return e.Gather(ParameterId{0}, StateClass::kMaster, own);
       },
       kInvalid, "Gather of 'embedding' into 3 elements: it has 99"},
      {[&](Engine& e) {
         std::vector<float> own(whole.size());
         return e.Gather(ParameterId{0}, StateClass::kOptimizer, own);
       },
       kInvalid, "Gather takes kMaster or kParameter"},
      {[&](Engine& e) {
         std::vector<float> own(whole.size());
         return e.Gather(ParameterId{0}, StateClass::kMaster, own, /*root=*/3);
       },
       kInvalid, "Gather to root 3 in a world of"},
  };
  Run([&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
    EBB_ASSIGN_OR_RETURN(const Snapshot before, TakeSnapshot(engine, model_));
    for (const Refusal& refusal : refusals) {
      const absl::Status status = refusal.request(engine);
      EXPECT_EQ(status.code(), refusal.code) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(refusal.what));
    }
    EXPECT_EQ(*TakeSnapshot(engine, model_), before);
    return TrainStep(engine, trainer, 1);
  });
}

// A buffer that is too small on one rank is an error on all ranks, without a wait for that rank.
TEST_P(StateRefusalTest, AGatherWithoutRoomOnOneRankFailsOnAll) {
  const int culprit = GetParam().world - 1;
  Run([&](Engine& engine, ScriptedTrainer& trainer) {
    std::vector<float> whole(trainer.rank() == culprit ? 98 : 99);
    const absl::Status status = engine.Gather(ParameterId{0}, StateClass::kMaster, whole);
    EXPECT_EQ(status.code(), kInvalid) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("into 98 elements: it has 99"));
    return TrainStep(engine, trainer, 0);
  });
}

TEST_P(StateRefusalTest, GatherToARootLeavesTheOthersAlone) {
  Run([&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    for (const StateClass what : {StateClass::kMaster, StateClass::kParameter}) {
      EBB_ASSIGN_OR_RETURN(const ParameterValues everywhere, GatherAll(engine, model_, what));
      for (int root = 0; root < GetParam().world; ++root) {
        for (size_t p = 0; p < everywhere.size(); ++p) {
          const bool receives = trainer.rank() == root;
          std::vector<float> whole(receives ? everywhere[p].size() : 0);
          EBB_RETURN_IF_ERROR(
              engine.Gather(ParameterId{static_cast<int32_t>(p)}, what, whole, root));
          EXPECT_EQ(whole, receives ? everywhere[p] : std::vector<float>());
          whole.clear();
          const auto append = [&](const Slice& piece, std::span<const float> values) {
            EXPECT_EQ(piece.name, model_.parameters[p].name);
            EXPECT_EQ(piece.begin, std::ssize(whole));
            EXPECT_EQ(piece.end - piece.begin, std::ssize(values));
            whole.insert(whole.end(), values.begin(), values.end());
            return absl::OkStatus();
          };
          EBB_RETURN_IF_ERROR(
              engine.Gather(ParameterId{static_cast<int32_t>(p)}, what, append, root));
          EXPECT_EQ(whole, receives ? everywhere[p] : std::vector<float>());
        }
      }
    }
    return absl::OkStatus();
  });
}

TEST_P(StateRefusalTest, AnErrorOfASinkIsTheErrorOfItsRank) {
  Run([&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    int pieces = 0;
    const auto refuse = [&](const Slice&, std::span<const float>) {
      ++pieces;
      return absl::CancelledError("enough");
    };
    const absl::Status status =
        engine.Gather(ParameterId{0}, StateClass::kMaster, refuse, /*root=*/0);
    EXPECT_EQ(pieces, trainer.rank() == 0 ? 1 : 0);
    EXPECT_EQ(status, trainer.rank() == 0 ? absl::CancelledError("enough") : absl::OkStatus());
    return TrainStep(engine, trainer, 0);
  });
}

// For all classes but gradients, while a Step or Evaluation is alive. Reading and gathering are
// legal then.
TEST_P(StateRefusalTest, NothingIsWrittenInsideAStepOrEvaluation) {
  Run([&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const Snapshot before, TakeSnapshot(engine, model_));
    const auto refuse = [&] {
      for (const absl::Status& status :
           {engine.Write(StateClass::kMaster, Constant(0)),
            engine.Write(StateClass::kParameter, Constant(0)),
            engine.Write(StateClass::kOptimizer, Constant(1), "exp_avg")}) {
        EXPECT_EQ(status.code(), kPrecondition) << status;
        EXPECT_THAT(std::string(status.message()),
                    HasSubstr("Write while a Step or Evaluation is alive"));
      }
      EXPECT_EQ(*TakeSnapshot(engine, model_), before);
    };
    {
      Step step = engine.BeginStep();
      refuse();
      trainer.ForwardAll(step);
      refuse();
    }
    {
      Evaluation evaluation = engine.BeginEvaluation();
      evaluation.Forward(UnitId{0});
      refuse();
    }
    EXPECT_EQ(*TakeSnapshot(engine, model_), before);
    return TrainStep(engine, trainer, 0);
  });
}

// It may have failed after some slices, and on one rank only: the ranks stay together, and a Write
// that succeeds makes it good.
TEST_P(StateRefusalTest, AWriteThatFailsAtItsSourceOnOneRankCanBeRepeated) {
  const int culprit = GetParam().world - 1;
  Run([&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    const Initialiser fails = [&](const Slice& slice, std::span<float> values) {
      if (trainer.rank() == culprit && slice.name >= "norm")
        return absl::DataLossError("cut short");
      return Constant(0.5f)(slice, values);
    };
    const absl::Status status = engine.Write(StateClass::kMaster, fails);
    EXPECT_EQ(status.ok(), trainer.rank() != culprit) << status;
    EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
    EBB_RETURN_IF_ERROR(engine.Write(StateClass::kMaster, Constant(0.25f)));
    ParameterValues quarter;
    for (const ParameterSpec& parameter : model_.parameters)
      quarter.emplace_back(static_cast<size_t>(Elements(parameter.shape)), 0.25f);
    trainer.BeginStep(1, &quarter);
    Step step = engine.BeginStep();
    trainer.Round(step);
    return step.Finish();
  });
}

TEST(MovedFromEngineTest, RefusesEverything) {
  const ModelSpec model = ScriptedModel();
  absl::StatusOr<Engine> made =
      Engine::Create(World::Single(), Device::Cpu(), model, ConfigFor({}));
  ASSERT_TRUE(made.ok()) << made.status();
  Engine from = *std::move(made);
  const Engine to = std::move(from);
  std::vector<float> whole(11 * 9);
  for (const absl::Status& status :
       {from.BeginStep().Finish(), from.BeginEvaluation().Finish().status(), from.Report().status(),
        from.Read(StateClass::kMaster, Ignore), from.Write(StateClass::kMaster, Constant(0)),
        from.Gather(ParameterId{0}, StateClass::kMaster, whole)}) {
    EXPECT_EQ(status.code(), kPrecondition) << status;
  }
  EXPECT_TRUE(from.memory().empty());
  EXPECT_TRUE(from.communication().empty());
  EXPECT_TRUE(from.optimizer_states(ParameterId{0}).empty());
  EXPECT_FALSE(to.memory().empty());
  EXPECT_EQ(to.optimizer_states(ParameterId{0}).size(), 2u);
  for (const int no_parameter : {-1, static_cast<int>(model.parameters.size())})
    EXPECT_TRUE(to.optimizer_states(static_cast<ParameterId>(no_parameter)).empty());
}

}  // namespace
}  // namespace ebb::testing::state_refusal_test
