// Suspend and Resume, of which the matrix shows that they change no bit ("between"): the calls that a
// suspended engine still answers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <bit>
#include <cstring>
#include <fstream>
#include <limits>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/backend.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/engine/watched_world.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::suspension_test {
namespace {

class SuspensionTest : public ::testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(Cells, SuspensionTest,
                         ::testing::ValuesIn(WorldsAndStages({.world = 4, .stage = 1})), NameOf);

TEST_P(SuspensionTest, StateIsReadWrittenAndGatheredMeanwhile) {
  const ModelSpec model = ScriptedModel();
  Config config = ConfigFor(GetParam());
  config.compute = DType::kBFloat16;
  RunOn(GetParam(), model, config, [&](Engine& engine, ScriptedTrainer& trainer) {
    ASSERT_OK(TrainStep(engine, trainer, 0));
    ASSERT_OK_AND_ASSIGN(const Snapshot before, TakeSnapshot(engine, model));
    ASSERT_OK(engine.Suspend());
    ASSERT_OK_AND_ASSIGN(const Snapshot meanwhile, TakeSnapshot(engine, model));
    EXPECT_EQ(meanwhile, before);
    ASSERT_OK(engine.Write(StateClass::kMaster, Constant(0.375f)));
    ASSERT_OK(engine.Resume());
    Evaluation evaluation = engine.BeginEvaluation();
    for (const Visit& visit : model.forward) {
      const ForwardScope scope = evaluation.Forward(visit.unit);
      for (ParameterId p : model[visit.unit].parameters) {
        const std::vector<float> values = Values(scope.parameter(p));
        EXPECT_EQ(values, std::vector<float>(values.size(), 0.375f)) << model[p].name;
        EXPECT_FALSE(values.empty());
      }
    }
    ASSERT_OK(evaluation.Finish().status());
  });
}

TEST_P(SuspensionTest, OnceMoreIsTheSame) {
  const ModelSpec model = ScriptedModel();
  RunOn(GetParam(), model, ConfigFor(GetParam()), [&](Engine& engine, ScriptedTrainer& trainer) {
    ASSERT_OK(engine.Resume());
    ASSERT_OK(engine.Suspend());
    const std::vector<MemoryRow> suspended = engine.memory();
    ASSERT_OK(engine.Suspend());
    for (size_t i = 0; i < suspended.size(); ++i)
      EXPECT_EQ(engine.memory()[i].current_bytes, suspended[i].current_bytes);
    ASSERT_OK(engine.Resume());
    ASSERT_OK(engine.Resume());
    ASSERT_OK(TrainStep(engine, trainer, 0));
  });
}

// Off the declared order, collectives use pointers of their own.
TEST_P(SuspensionTest, AStepOffTheDeclaredOrderFindsTheNewPools) {
  const ModelSpec model = ScriptedModel();
  std::vector<Snapshot> ends[2];
  for (const bool suspends : {false, true}) {
    ends[suspends].resize(static_cast<size_t>(GetParam().world));
    RunOn(GetParam(), model, ConfigFor(GetParam()), [&](Engine& engine, ScriptedTrainer& trainer) {
      ASSERT_OK(TrainStep(engine, trainer, 0));
      if (suspends) {
        ASSERT_OK(engine.Suspend());
        ASSERT_OK(engine.Resume());
      }
      trainer.BeginStep(1, nullptr);
      Step step = engine.BeginStep(kExactStep);
      for (int unit : {3, 0, 1, 2, 4}) trainer.Forward(step, unit);
      trainer.BackwardAll(step);
      ASSERT_OK(step.Finish());
      ASSERT_OK_AND_ASSIGN(ends[suspends][static_cast<size_t>(trainer.rank())],
                           TakeSnapshot(engine, model));
    });
  }
  EXPECT_EQ(ends[0], ends[1]);
}

// Refusals of a suspended engine, and of Suspend and Resume, and failures on the way.

class SuspensionRefusalTest : public ::testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(Cells, SuspensionRefusalTest,
                         ::testing::ValuesIn(WorldsAndStages({.world = 4, .stage = 2})), NameOf);

void ExpectSuspended(const absl::Status& status) {
  EXPECT_THAT(status,
              StatusIs(absl::StatusCode::kFailedPrecondition, "the engine 'policy' is suspended"));
}

TEST_P(SuspensionRefusalTest, StepsAndEvaluationsAreRefusedUntilResume) {
  const ModelSpec model = ScriptedModel();
  RunOn(GetParam(), model, ConfigFor(GetParam()),
        [&](Engine& engine, ScriptedTrainer& trainer) {
          ASSERT_OK(TrainStep(engine, trainer, 0));
          ASSERT_OK_AND_ASSIGN(const StepReport report, engine.Report());
          ASSERT_OK(engine.Suspend());
          EXPECT_OK(engine.Report());  // of the step before

          Evaluation evaluation = engine.BeginEvaluation();
          EXPECT_EQ(evaluation.Forward(UnitId{0}).parameter(ParameterId{0}).data, nullptr);
          ExpectSuspended(evaluation.Finish().status());
          EXPECT_OK(engine.Report());

          Step step = engine.BeginStep({.hold_updates = true});
          EXPECT_EQ(step.Forward(UnitId{0}).parameter(ParameterId{0}).data, nullptr);
          BackwardScope backward = step.Backward(UnitId{0});
          EXPECT_EQ(backward.gradient(ParameterId{0}).data, nullptr);
          EXPECT_TRUE(backward.micro_batches().empty());
          backward.Close();
          ExpectSuspended(step.Reduce());
          ExpectSuspended(step.Finish());
          ExpectSuspended(engine.Report().status());
          Step late = engine.BeginStep();
          { const Step dropped = engine.BeginStep(); }

          ASSERT_OK(engine.Resume());
          ASSERT_OK_AND_ASSIGN(const StepReport same, engine.Report());
          EXPECT_EQ(same.gradient_norm, report.gradient_norm);
          ASSERT_OK(TrainStep(engine, trainer, 1));
          ExpectSuspended(late.Finish());
          ASSERT_OK_AND_ASSIGN(const StepReport next, engine.Report());
          EXPECT_EQ(next.step, 2);
        },
        {.name = "policy"});
}

// A step or evaluation that is alive is left as it is, and ends with the bits of one undisturbed.
TEST_P(SuspensionRefusalTest, NotWhileAStepOrEvaluationIsAlive) {
  const ModelSpec model = ScriptedModel();
  std::vector<Snapshot> ends[2];
  for (const bool disturbed : {false, true}) {
    ends[disturbed].resize(static_cast<size_t>(GetParam().world));
    RunOn(GetParam(), model, ConfigFor(GetParam()), [&](Engine& engine, ScriptedTrainer& trainer) {
      const auto refused = [&] {
        if (!disturbed) return;
        for (const absl::Status& status : {engine.Suspend(), engine.Resume()})
          EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition, "alive"));
      };
      Evaluation evaluation = engine.BeginEvaluation();
      refused();
      evaluation.Forward(UnitId{0});
      refused();
      ASSERT_OK(evaluation.Finish().status());
      trainer.BeginStep(0, nullptr);
      Step step = engine.BeginStep(kExactStep);
      refused();
      trainer.ForwardAll(step);
      refused();
      trainer.BackwardAll(step);
      refused();
      ASSERT_OK(step.Finish());
      ASSERT_OK_AND_ASSIGN(ends[disturbed][static_cast<size_t>(trainer.rank())],
                           TakeSnapshot(engine, model));
    });
  }
  EXPECT_EQ(ends[0], ends[1]);
}

// Whichever collective fails on one rank, every rank gets a Status, and is suspended or is not.
TEST(SuspensionRefusal, AFailureOnTheWayIsEveryRanks) {
  const Setting setting{.world = 2, .stage = 3};
  const ModelSpec model = ScriptedModel();
  for (const WatchedCalls::Fault fault : {WatchedCalls::kRefuse, WatchedCalls::kAbort}) {
    bool failed = true;
    int64_t call = 0;
    for (; failed; ++call) {
      SCOPED_TRACE(::testing::Message() << "call " << call << ", fault " << int{fault});
      ASSERT_LT(call, 50);
      std::vector<absl::Status> statuses(2);
      std::barrier trained(2);
      const absl::Status run = RunThreads(2, [&](World world) -> absl::Status {
        auto calls = std::make_shared<WatchedCalls>();
        calls->fault = fault;
        EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(Watch(world, calls), Device::Cpu(1),
                                                           model, ConfigFor(setting)));
        ScriptedTrainer trainer(model, world.rank());
        EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
        trained.arrive_and_wait();
        if (world.rank() == 1) calls->fail_at = calls->calls + call;
        statuses[static_cast<size_t>(world.rank())] = engine.Suspend();
        calls->fail_at = -1;
        return absl::OkStatus();
      });
      ASSERT_OK(run);
      EXPECT_EQ(statuses[0].ok(), statuses[1].ok()) << statuses[0] << "\n" << statuses[1];
      failed = !statuses[1].ok();
      if (!failed) continue;
      for (const absl::Status& status : statuses) EXPECT_THAT(status, Says(kInjected));
    }
    EXPECT_GT(call, 3);  // a barrier on each communicator, and the records
  }
}

TEST(SuspensionRefusal, AFailedEngineRefusesOnEveryRank) {
  const Setting setting{.world = 2, .stage = 3};
  EngineOptions options;
  options.optimizer = OptimizerSpec{
      .states = {}, .update = [](const UpdateSlice&) { return absl::DataLossError("broken"); }};
  const ModelSpec model = ScriptedModel();
  RunOn(
      setting, model, ConfigFor(setting),
      [&](Engine& engine, ScriptedTrainer& trainer) {
        // Updates run late, so this step may not know yet.
        TrainStep(engine, trainer, 0).IgnoreError();
        for (const absl::Status& status : {engine.Suspend(), engine.Resume()}) {
          EXPECT_FALSE(status.ok());
          EXPECT_THAT(status, Says("broken"));
        }
      },
      options);
}

TEST(SuspensionRefusal, AnEngineThatWasMovedFromRefuses) {
  const Setting setting{.world = 1};
  RunOn(setting, ScriptedModel(), ConfigFor(setting), [](Engine& engine, ScriptedTrainer&) {
    Engine taken = std::move(engine);
    EXPECT_FALSE(engine.Suspend().ok());
    EXPECT_FALSE(engine.Resume().ok());
    EXPECT_FALSE(engine.CopyParametersFrom(taken).ok());
    EXPECT_FALSE(taken.CopyParametersFrom(engine).ok());
    ASSERT_OK(taken.Suspend());
  });
}

// Memory that Suspend gives back and Resume takes again: in the ledger, from the system, and on all
// ranks or on none.

class SuspensionMemoryTest : public ::testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(Cells, SuspensionMemoryTest,
                         ::testing::ValuesIn(WorldsAndStages({.world = 1, .stage = 0})), NameOf);

// The rows of one tier, and only these.
std::vector<MemoryRow> RowsOf(const Engine& engine, Tier tier) {
  std::vector<MemoryRow> rows = engine.memory();
  std::erase_if(rows, [&](const MemoryRow& row) { return row.tier != tier; });
  return rows;
}

TEST_P(SuspensionMemoryTest, GivesThePoolsBackAndTakesThemAgain) {
  ModelSpec model = ScriptedModel(/*boundary_bytes=*/512);
  model.workspace_bytes = 5000;
  Config config = ConfigFor(GetParam());
  config.compute = DType::kBFloat16;
  RunOn(GetParam(), model, config, [&](Engine& engine, ScriptedTrainer& trainer) {
    ASSERT_OK(TrainStep(engine, trainer, 0));
    const std::vector<MemoryRow> before = RowsOf(engine, Tier::kDevice);
    EXPECT_TRUE(RowsOf(engine, Tier::kCpu).empty());
    for (int n = 0; n < 2; ++n) {
      ASSERT_OK(engine.Suspend());
      for (const MemoryRow& row : RowsOf(engine, Tier::kDevice)) {
        EXPECT_EQ(row.current_bytes, 0u) << Name(row.state);
        EXPECT_GT(row.peak_bytes, 0u);
        EXPECT_EQ(row.peak_bytes, row.predicted_bytes);
      }
      std::vector<std::string> kept;
      for (const MemoryRow& row : RowsOf(engine, Tier::kCpu)) {
        kept.emplace_back(Name(row.state));
        for (const MemoryRow& device : before) {
          if (device.state != row.state) continue;
          EXPECT_EQ(row.current_bytes, device.current_bytes);
          EXPECT_EQ(row.peak_bytes, device.current_bytes);
          EXPECT_EQ(row.predicted_bytes, device.current_bytes);
        }
      }
      EXPECT_THAT(kept, ::testing::ElementsAre("parameter", "master", "optimizer"));
      ASSERT_OK(engine.Resume());
      const std::vector<MemoryRow> after = RowsOf(engine, Tier::kDevice);
      EXPECT_EQ(after.size(), before.size());
      for (size_t i = 0; i < std::min(after.size(), before.size()); ++i) {
        EXPECT_EQ(after[i].current_bytes, before[i].current_bytes) << Name(after[i].state);
        EXPECT_EQ(after[i].peak_bytes, before[i].peak_bytes) << Name(after[i].state);
      }
      for (const MemoryRow& row : RowsOf(engine, Tier::kCpu)) EXPECT_EQ(row.current_bytes, 0u);
      ASSERT_OK(TrainStep(engine, trainer, n + 1));
    }
  });
}

int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * 4096;
}

TEST(SuspensionMemory, TheSystemHasTheMemoryAgain) {
  constexpr int64_t kBytes = int64_t{64} << 20;
  ModelSpec model = ScriptedModel();
  model.workspace_bytes = kBytes;
  const Setting setting{.world = 1};
  RunOn(setting, model, ConfigFor(setting), [&](Engine& engine, ScriptedTrainer& trainer) {
    std::memset(engine.workspace().data, 1, static_cast<size_t>(kBytes));
    const int64_t full = ResidentBytes();
    ASSERT_OK(engine.Suspend());
    EXPECT_LE(ResidentBytes(), full - kBytes * 3 / 4);
    EXPECT_EQ(engine.workspace().data, nullptr);
    ASSERT_OK(engine.Resume());
    EXPECT_EQ(engine.workspace().size(), kBytes);
    ASSERT_OK(TrainStep(engine, trainer, 0));
  });
}

// A CPU with as much memory as a test says.
class LimitedCpu : public DeviceBackend {
 public:
  explicit LimitedCpu(const int64_t& bytes_max) : bytes_max_(bytes_max) {}

  DeviceKind kind() const override { return DeviceKind::kCpu; }
  std::string description() const override { return "a limited CPU"; }
  absl::StatusOr<std::unique_ptr<StreamBackend>> NewStream(std::string_view name,
                                                           int tasks_max) override {
    return cpu_.backend().NewStream(name, tasks_max);
  }
  std::unique_ptr<StreamBackend> CallerStream() override { return cpu_.backend().CallerStream(); }
  absl::StatusOr<std::unique_ptr<EventBackend>> NewEvent() override {
    return cpu_.backend().NewEvent();
  }
  absl::StatusOr<Buffer> Allocate(int64_t bytes, std::string_view what) override {
    if (bytes > bytes_max_) return absl::ResourceExhaustedError("this machine is full");
    return cpu_.Allocate(bytes, what);
  }

 private:
  Device cpu_ = Device::Cpu(1);
  const int64_t& bytes_max_;
};

TEST_P(SuspensionMemoryTest, ResumesOnAllRanksOrOnNone) {
  const int world = GetParam().world;
  const ModelSpec model = ScriptedModel();
  OnThreads(world, [&](World w) {
    int64_t bytes_max = std::numeric_limits<int64_t>::max();
    ASSERT_OK_AND_ASSIGN(Engine engine,
                         Engine::Create(w, Device(std::make_shared<LimitedCpu>(bytes_max)), model,
                                        ConfigFor(GetParam()), {.name = "policy"}));
    ScriptedTrainer trainer(model, w.rank());
    ASSERT_OK(TrainStep(engine, trainer, 0));
    ASSERT_OK_AND_ASSIGN(const Snapshot before, TakeSnapshot(engine, model));
    ASSERT_OK(engine.Suspend());
    if (w.rank() + 1 == world) bytes_max = 100;
    const absl::Status full = engine.Resume();
    EXPECT_THAT(full, StatusIs(absl::StatusCode::kResourceExhausted, "this machine is full"));
    for (const MemoryRow& row : RowsOf(engine, Tier::kDevice))
      EXPECT_EQ(row.current_bytes, 0u) << Name(row.state);
    EXPECT_THAT(engine.BeginStep().Finish(), Says("is suspended"));
    bytes_max = std::numeric_limits<int64_t>::max();
    ASSERT_OK(engine.Resume());
    ASSERT_OK_AND_ASSIGN(const Snapshot after, TakeSnapshot(engine, model));
    EXPECT_EQ(before, after);
    ASSERT_OK(TrainStep(engine, trainer, 1));
  });
}

}  // namespace
}  // namespace ebb::testing::suspension_test
