// State that is read beside later steps. It is the state of the step before, whatever the steps do
// meanwhile, and they train to the bits that they have without it.
#include <gtest/gtest.h>

#include <cerrno>
#include <condition_variable>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "tests/engine/scripted.h"
#include "tests/offload/scratch.h"
#include "tests/offload/test_overrides.h"
#include "tests/status.h"

namespace ebb::testing::async_reads_test {
namespace {

using ReadStatus = std::shared_future<absl::Status>;

// Values that a rank was given, by class, state and parameter.
class Given {
 public:
  explicit Given(const ModelSpec& model) : model_(model) {}

  void Add(StateClass what, std::string_view state, const Slice& slice,
           std::span<const float> values) {
    EXPECT_LE(values.size_bytes(), size_t{4} << 20);
    EXPECT_EQ(static_cast<int64_t>(values.size()), slice.end - slice.begin);
    EXPECT_EQ(slice.name, model_[slice.parameter].name);
    std::vector<float>& all =
        values_[{what, std::string(state), static_cast<int>(slice.parameter)}];
    constexpr float kNotGiven = -12345;
    all.resize(static_cast<size_t>(Elements(slice.shape)), kNotGiven);
    std::copy(values.begin(), values.end(), all.begin() + slice.begin);
  }
  friend bool operator==(const Given& one, const Given& other) {
    return one.values_ == other.values_;
  }
  size_t size() const { return values_.size(); }

 private:
  const ModelSpec& model_;
  std::map<std::tuple<StateClass, std::string, int>, std::vector<float>> values_;
};

// Closed at first.
class Gate {
 public:
  void Open() {
    const std::scoped_lock lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void Pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

struct Cell {
  const char* name;
  Setting setting;
  DType compute = DType::kFloat32;
  Tier states = Tier::kDevice;
  bool split = false;
};
void PrintTo(const Cell& cell, std::ostream* out) {
  *out << cell.name;
}

class AsyncReadsTest : public ::testing::TestWithParam<Cell> {
 protected:
  void Run(const std::function<absl::Status(Engine& engine, ScriptedTrainer& trainer)>& body) {
    const Cell& cell = GetParam();
    Config config = ConfigFor(cell.setting);
    config.compute = cell.compute;
    config.loss_scale.initial_scale_power = 4;
    config.ebb.split_master = cell.split;
    config.gradient_accumulation_steps = 2;
    config.zero.offload_param.buffer_count = buffers_;
    if (cell.states == Tier::kNvme) config = OnNvme(config, scratch_.path());
    if (cell.states == Tier::kCpu) config.zero.offload_optimizer.device = Tier::kCpu;
    RunOn(cell.setting, model_, config, body);
  }
  absl::StatusOr<Given> ReadNow(Engine& engine) const {
    Given given(model_);
    for (const auto& [what, state] :
         {std::pair(StateClass::kMaster, ""), std::pair(StateClass::kOptimizer, "exp_avg"),
          std::pair(StateClass::kOptimizer, "exp_avg_sq")}) {
      EBB_RETURN_IF_ERROR(engine.Read(
          what,
          [&](const Slice& slice, std::span<const float> values) {
            given.Add(what, state, slice, values);
            return absl::OkStatus();
          },
          state));
    }
    return given;
  }
  // Begins with the first value when `gate` is open.
  static StateReader Into(Given& given, Gate& gate, bool in_step = false) {
    return {.take =
                [&](StateClass what, std::string_view state, const Slice& slice,
                    std::span<const float> values) {
                  gate.Pass();
                  given.Add(what, state, slice, values);
                  return absl::OkStatus();
                },
            .close = nullptr,
            .commit = nullptr,
            .may_begin_in_step = in_step};
  }

  const ModelSpec model_ = ScriptedModel();
  int64_t buffers_ = 5;  // units whose parameters on NVMe are in RAM at a time
  Scratch scratch_;
};
constexpr DType kHalf = DType::kBFloat16;
constexpr Timing kEarly = Timing::kEarly, kLate = Timing::kLate, kOff = Timing::kOff;
INSTANTIATE_TEST_SUITE_P(
    Cells, AsyncReadsTest,
    ::testing::Values(Cell{"whole_states_off", {2, 0, kOff}}, Cell{"shards", {3, 3, kEarly}, kHalf},
                      Cell{"half", {2, 1, kLate}, DType::kFloat16},
                      Cell{"split", {2, 3, kLate}, kHalf, Tier::kDevice, true},
                      Cell{"in_ram_early", {1, 3, kEarly}, DType::kFloat32, Tier::kCpu},
                      Cell{"on_disk", {2, 3, kLate}, kHalf, Tier::kNvme},
                      Cell{"on_disk_off", {1, 1, kOff}, DType::kFloat32, Tier::kNvme},
                      Cell{"on_disk_early", {2, 3, kEarly}, DType::kFloat32, Tier::kNvme},
                      Cell{"on_disk_split", {2, 2, kLate}, kHalf, Tier::kNvme, true}),
    [](const auto& cell) { return std::string(cell.param.name); });

TEST_P(AsyncReadsTest, GiveTheLastStepAndChangeNoBitOfTheNextOnes) {
  std::vector<Snapshot> expected(static_cast<size_t>(GetParam().setting.world));
  std::vector<std::optional<Given>> now(expected.size());  // read between steps
  for (const auto& [beside, in_step] :
       {std::pair(false, false), std::pair(true, false), std::pair(true, true)}) {
    Run([&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
      const auto rank = static_cast<size_t>(trainer.rank());
      for (int step = 0; step < 2; ++step) EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, step));
      Given given(model_);
      Gate gate;
      ReadStatus read;
      if (beside) {
        EBB_ASSIGN_OR_RETURN(read, engine.ReadAsync(Into(given, gate, in_step)));
      } else {
        EBB_ASSIGN_OR_RETURN(Given at_once, ReadNow(engine));
        EXPECT_GT(at_once.size(), 0u);
        now[rank].emplace(std::move(at_once));
      }
      EXPECT_EQ(engine.IsReadingAsync(), beside);
      trainer.BeginStep(2, nullptr);
      Step step = engine.BeginStep(kExactStep);
      for (int round = 0; round < step.rounds(); ++round) trainer.Round(step);
      // If Finish waits for updates, the updates wait for the reads.
      if (GetParam().setting.timing == kOff) gate.Open();
      const absl::Status finished = step.Finish();
      gate.Open();
      EBB_RETURN_IF_ERROR(finished);
      EBB_RETURN_IF_ERROR(engine.Report().status());
      for (int number = 3; number < 5; ++number)
        EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, number));
      EBB_ASSIGN_OR_RETURN(Snapshot at_end, TakeSnapshot(engine, model_));
      if (!beside) {
        expected[rank] = std::move(at_end);
        return absl::OkStatus();
      }
      EBB_RETURN_IF_ERROR(read.get());
      EXPECT_TRUE(given == *now[rank]);
      EXPECT_EQ(at_end, expected[rank]);
      return absl::OkStatus();
    });
  }
}

// If the reads would come behind a step's first work, they run without a step when AsyncReadBegin
// asks for that, when the step is dropped, and when any other call reads the state.
TEST_P(AsyncReadsTest, BeginAlsoWithoutAnotherStep) {
  const std::function<absl::Status(Engine&)> ways[] = {
      [](Engine& engine) { return engine.AsyncReadBegin()(); },
      [](Engine& engine) {
        engine.AwaitAsyncRead();
        return absl::OkStatus();
      },
      [](Engine& engine) {
        const Step dropped = engine.BeginStep(kExactStep);
        return absl::OkStatus();
      },
      [](Engine& engine) { return engine.training_state().status(); },
      [](Engine& engine) {
        return engine.Read(StateClass::kMaster,
                           [](const Slice&, std::span<const float>) { return absl::OkStatus(); });
      },
      [](Engine& engine) { return engine.Suspend().ok() ? engine.Resume() : engine.Suspend(); }};
  std::vector<std::optional<Given>> first(static_cast<size_t>(GetParam().setting.world));
  for (const auto& way : ways) {
    Run([&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
      for (int step = 0; step < 2; ++step) EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, step));
      Given given(model_);
      Gate gate;
      gate.Open();
      EBB_ASSIGN_OR_RETURN(const ReadStatus read, engine.ReadAsync(Into(given, gate, true)));
      EBB_RETURN_IF_ERROR(way(engine));
      EBB_RETURN_IF_ERROR(engine.AsyncReadBegin()());
      EBB_RETURN_IF_ERROR(read.get());
      std::optional<Given>& expected = first[static_cast<size_t>(trainer.rank())];
      if (!expected.has_value())
        expected.emplace(std::move(given));
      else
        EXPECT_TRUE(given == *expected);
      return TrainStep(engine, trainer, 2);
    });
  }
  // The engine's end does the remaining reads.
  std::vector<ReadStatus> read(static_cast<size_t>(GetParam().setting.world));
  Run([&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
    StateReader reader{.take = nullptr, .close = nullptr, .commit = nullptr};
    reader.may_begin_in_step = true;
    EBB_ASSIGN_OR_RETURN(read[static_cast<size_t>(trainer.rank())],
                         engine.ReadAsync(std::move(reader)));
    return absl::OkStatus();
  });
  for (const ReadStatus& of_rank : read) EXPECT_OK(of_rank.get());
}

TEST_P(AsyncReadsTest, CannotBeWaitedForInTheStepThatStartsThem) {
  buffers_ = 1;  // so that a step does not do all carried updates when it begins
  Run([&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
    Given given(model_);
    Gate gate;
    gate.Open();
    EBB_ASSIGN_OR_RETURN(const ReadStatus read, engine.ReadAsync(Into(given, gate, true)));
    const bool carried =
        GetParam().states == Tier::kNvme && !GetParam().split && GetParam().setting.timing == kLate;
    const std::function<absl::Status()> begin = engine.AsyncReadBegin();
    if (carried) {
      EXPECT_EQ(std::async(std::launch::async, begin).get().code(),
                absl::StatusCode::kFailedPrecondition);
    }
    trainer.BeginStep(1, nullptr);
    Step step = engine.BeginStep(kExactStep);
    if (carried) {
      EXPECT_EQ(engine.AsyncReadBegin()().code(), absl::StatusCode::kFailedPrecondition);
    }
    for (int round = 0; round < step.rounds(); ++round) trainer.Round(step);
    EXPECT_OK(std::async(std::launch::async, begin).get());
    EBB_RETURN_IF_ERROR(engine.AsyncReadBegin()());
    EBB_RETURN_IF_ERROR(read.get());
    EBB_RETURN_IF_ERROR(step.Finish());
    return engine.Report().status();
  });
}

// Masters and states on NVMe have a second place, so that no update waits until theirs are read.
// Each save begins where the one before has left them.
TEST_P(AsyncReadsTest, DoNotDelayStepsIfStatesAreOnTheDisk) {
  if (GetParam().states != Tier::kNvme || GetParam().split) GTEST_SKIP();
  std::vector<Snapshot> expected(static_cast<size_t>(GetParam().setting.world));
  for (const bool beside : {false, true}) {
    Run([&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
      for (int save = 0; save < 4; ++save) {
        EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 4 * save));
        EBB_ASSIGN_OR_RETURN(const Given now, ReadNow(engine));
        Given given(model_);
        Gate gate;
        ReadStatus read;
        if (beside) {
          EBB_ASSIGN_OR_RETURN(read, engine.ReadAsync(Into(given, gate)));
        }
        for (int step = 1; step < 4; ++step)
          EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 4 * save + step));
        gate.Open();
        if (!beside) continue;
        EBB_RETURN_IF_ERROR(read.get());
        EXPECT_TRUE(given == now) << "save " << save;
      }
      EBB_ASSIGN_OR_RETURN(Snapshot snapshot, TakeSnapshot(engine, model_));
      Snapshot& at_end = expected[static_cast<size_t>(trainer.rank())];
      if (beside) {
        EXPECT_EQ(snapshot, at_end);
      } else {
        at_end = std::move(snapshot);
      }
      return absl::OkStatus();
    });
  }
}

TEST_P(AsyncReadsTest, DelayUpdatesIfTheDiskHasNoRoom) {
  if (GetParam().states != Tier::kNvme || GetParam().split) GTEST_SKIP();
  TestOverrides().reserve = [](std::string_view path) {
    return path.find("saved-states") != std::string_view::npos ? ENOSPC : 0;
  };
  Run([&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
    for (int save = 0; save < 2; ++save) {
      EBB_ASSIGN_OR_RETURN(const Given now, ReadNow(engine));
      Given given(model_);
      Gate gate;
      gate.Open();
      EBB_ASSIGN_OR_RETURN(const ReadStatus read, engine.ReadAsync(Into(given, gate)));
      EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, save + 1));
      EBB_RETURN_IF_ERROR(read.get());
      EXPECT_TRUE(given == now);
    }
    return absl::OkStatus();
  });
  TestOverrides().reserve = nullptr;
}

TEST_P(AsyncReadsTest, GoOnBesideEvaluationsAndSuspension) {
  Run([&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
    EBB_ASSIGN_OR_RETURN(const Given now, ReadNow(engine));
    for (const bool suspends : {false, true}) {
      Given given(model_);
      Gate gate;
      if (suspends) gate.Open();  // as that waits for it
      EBB_ASSIGN_OR_RETURN(const ReadStatus read, engine.ReadAsync(Into(given, gate)));
      if (suspends) {
        EBB_RETURN_IF_ERROR(engine.Suspend());
        EBB_RETURN_IF_ERROR(engine.Resume());
      }
      Evaluation evaluation = engine.BeginEvaluation();
      for (int walk = 0; walk < 2; ++walk)
        for (int unit : kScriptedUnits) trainer.Look(evaluation.Forward(UnitId{unit}), unit);
      EBB_RETURN_IF_ERROR(evaluation.Finish().status());
      gate.Open();
      EBB_RETURN_IF_ERROR(read.get());
      EXPECT_TRUE(given == now);
    }
    return TrainStep(engine, trainer, 1);
  });
}

TEST_P(AsyncReadsTest, GoOnBesideScopesOutsideTheOrder) {
  Run([&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
    EBB_ASSIGN_OR_RETURN(const Given now, ReadNow(engine));
    Given given(model_);
    Gate gate;
    EBB_ASSIGN_OR_RETURN(const ReadStatus read, engine.ReadAsync(Into(given, gate)));
    {
      trainer.BeginStep(1, nullptr);
      StepOptions held = kExactStep;
      held.hold_updates = true;
      Step step = engine.BeginStep(held);
      ForwardOf(trainer, step, {0, 1, 1});
    }  // dropped
    gate.Open();
    EBB_RETURN_IF_ERROR(read.get());
    EXPECT_TRUE(given == now);
    return TrainStep(engine, trainer, 1);
  });
}

TEST_P(AsyncReadsTest, AnErrorOfOneRankIsThatOfAll) {
  const int last = GetParam().setting.world - 1;
  Run([&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 0));
    bool closed = false;
    absl::Status agreed;
    StateReader reader = {.take = [&](StateClass, std::string_view, const Slice&,
                                      std::span<const float>) -> absl::Status {
                            return trainer.rank() == last ? absl::DataLossError("the disk is gone")
                                                          : absl::OkStatus();
                          },
                          .close =
                              [&] {
                                closed = true;
                                return absl::OkStatus();
                              },
                          .commit =
                              [&](const absl::Status& status) {
                                agreed = status;
                                return absl::OkStatus();
                              }};
    EBB_ASSIGN_OR_RETURN(const ReadStatus read, engine.ReadAsync(std::move(reader)));
    EBB_RETURN_IF_ERROR(TrainStep(engine, trainer, 1));
    EXPECT_EQ(read.get().code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(agreed, read.get());
    EXPECT_EQ(closed, trainer.rank() != last);
    if (GetParam().setting.world > 1 && trainer.rank() != last) {
      EXPECT_NE(read.get().message().find(absl::StrCat("rank ", last)), std::string::npos);
    }
    // If one rank cannot commit, no rank commits.
    engine.AwaitAsyncRead();
    EXPECT_FALSE(engine.IsReadingAsync());
    EBB_ASSIGN_OR_RETURN(
        const ReadStatus second,
        engine.ReadAsync({.take = nullptr, .close = nullptr, .commit = [&](const absl::Status&) {
                            return trainer.rank() == 0 ? absl::UnavailableError("no name")
                                                       : absl::OkStatus();
                          }}));
    EXPECT_EQ(second.get().code(), absl::StatusCode::kUnavailable);
    return TrainStep(engine, trainer, 2);
  });
}

TEST_P(AsyncReadsTest, RefuseAnEngineThatIsSuspendedOrInAStep) {
  Run([&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    {
      Step step = engine.BeginStep(kExactStep);
      EXPECT_EQ(engine.ReadAsync({}).status().code(), absl::StatusCode::kFailedPrecondition);
    }
    EBB_RETURN_IF_ERROR(engine.Suspend());
    EXPECT_EQ(engine.ReadAsync({}).status().code(), absl::StatusCode::kFailedPrecondition);
    EBB_RETURN_IF_ERROR(engine.Resume());
    return TrainStep(engine, trainer, 0);
  });
}

}  // namespace
}  // namespace ebb::testing::async_reads_test
