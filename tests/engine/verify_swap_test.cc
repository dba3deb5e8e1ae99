// A swap file that another program has changed between two steps, or between a write and a read.
// The step that reads it ends with a Status that says so, on every rank, before its bytes are used
// (ebb.verify_swap).
#include "tests/engine/verify_swap.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "tests/offload/scratch.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::verify_swap::verify_swap_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const Cell kCells[] = {
    {.name = "late"},
    {.name = "early", .timing = Timing::kEarly},
    {.name = "fp32", .compute = DType::kFloat32},
    {.name = "split_lamb", .split = true, .optimizer = OptimizerType::kLamb},
    {.name = "without_masters", .without_masters = true},
    {.name = "without_masters_own_optimizer", .without_masters = true, .own = true},
    {.name = "of_two_groups", .groups = true},
    {.name = "without_io_uring", .threads = true},
    {.name = "two_ranks_lars", .world = 2, .optimizer = OptimizerType::kLars},
    {.name = "two_ranks_off", .world = 2, .timing = Timing::kOff},
};

std::string NameOfCell(const ::testing::TestParamInfo<Cell>& cell) {
  return cell.param.name;
}

class VerifySwapTest : public ::testing::TestWithParam<Cell> {
 protected:
  void SetUp() override { MadeFiles::Watch(); }
  Config MakeConfig() const { return ConfigFor(GetParam(), scratch_.path()); }
  int culprit() const { return GetParam().world - 1; }
  // `text`: the error on the rank that owns the file. Others are told its beginning and its end.
  void ExpectFailure(const Trained& run, const std::string& text) {
    for (size_t rank = 0; rank < run.statuses.size(); ++rank) {
      const absl::Status& status = run.statuses[rank];
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kDataLoss, "the engine has failed",
                                   "of unit '", "reload the model"));
      if (static_cast<int>(rank) != culprit()) continue;
      EXPECT_THAT(status, Says(text, "ebb.verify_swap", "The disk returns wrong data"));
    }
    EXPECT_THAT(scratch_.Entries(), ::testing::IsEmpty());
  }

  Scratch scratch_;
};

INSTANTIATE_TEST_SUITE_P(Cells, VerifySwapTest, ::testing::ValuesIn(kCells), NameOfCell);

TEST_P(VerifySwapTest, UnchangedFilesAgree) {
  Config config = MakeConfig();
  std::vector<uint32_t> expected;
  for (const VerifySwap verify : {VerifySwap::kOff, VerifySwap::kStates, VerifySwap::kAll}) {
    config.ebb.verify_swap = verify;
    const Trained run =
        Train(GetParam(), config, 2, 4, [](const std::string&, const sharding::Plan&) {});
    for (const absl::Status& status : run.statuses) EXPECT_OK(status);
    if (expected.empty()) expected = run.masters;
    EXPECT_FALSE(run.masters.empty());
    EXPECT_EQ(run.masters, expected);
  }
}

// Wherever it is in the file.
TEST_P(VerifySwapTest, AFlippedBitOfTheStatesEndsTheTraining) {
  for (const double place : {0.0, 0.3, 0.55, 0.9}) {
    SCOPED_TRACE(place);
    std::string file;
    const Trained run =
        Train(GetParam(), MakeConfig(), 2, 5, [&](const std::string& path, const sharding::Plan&) {
          file = FileOf(path, culprit(), "states");
          const int64_t blocks = DataBytes(file) / 4096;
          FlipBit(file, static_cast<int64_t>(static_cast<double>(blocks) * place) * 4096 + 21);
        });
    // A late update finds it when its step has finished.
    EXPECT_LE(run.steps_done, 3);
    ExpectFailure(run, file);
  }
}

// Nor is it shown, copied to another engine, or saved beside steps.
TEST_P(VerifySwapTest, AFlippedBitOfTheMastersIsFoundByEachRead) {
  const Cell& cell = GetParam();
  for (const std::string_view way : {"gathered", "copied", "read beside steps"}) {
    SCOPED_TRACE(way);
    setenv("EBB_IO_URING", cell.threads ? "0" : "1", /*overwrite=*/1);
    std::string file;
    std::vector<absl::Status> found(static_cast<size_t>(cell.world));
    OnThreads(cell.world, [&](World world) -> absl::Status {
      ToyModel model(ModelOf(cell));
      Config config = MakeConfig();
      absl::StatusOr<Engine> engine =
          Engine::Create(world, Device::Cpu(1), model.spec(), config, OptionsFor(cell));
      if (!engine.ok()) return engine.status();
      if (absl::Status trained = model.Train(*engine, world.rank(), 0); !trained.ok())
        return trained;
      if (auto bits = MasterBits(*engine, model.spec()); !bits.ok()) return bits.status();
      engine->traffic();
      if (world.rank() == culprit()) {
        file = FileOf(scratch_.path(), culprit(), cell.without_masters ? "parameters" : "states");
        const int64_t bytes = DataBytes(file);
        for (int64_t at = 21; at < bytes; at += 4096) FlipBit(file, at);
      }
      Config on_device = testing::ConfigFor({.world = cell.world, .stage = 3});
      on_device.compute = cell.compute;
      absl::StatusOr<Engine> other =
          Engine::Create(world, Device::Cpu(1), model.spec(), on_device, {.name = "other"});
      if (!other.ok()) return other.status();
      absl::Status& seen = found[static_cast<size_t>(world.rank())];
      if (way == "gathered") seen = MasterBits(*engine, model.spec()).status();
      if (way == "copied") seen = other->CopyParametersFrom(*engine);
      if (way == "read beside steps") {
        const auto take = [](auto...) { return absl::OkStatus(); };
        const auto read = engine->ReadAsync({.take = take, .close = nullptr, .commit = nullptr});
        if (!read.ok()) return read.status();
        seen = read->get();
      }
      return absl::OkStatus();
    });
    for (const absl::Status& of_rank : found)
      EXPECT_THAT(of_rank, StatusIs(absl::StatusCode::kDataLoss, cell.without_masters
                                                                     ? "the parameter of unit '"
                                                                     : "the master of unit '"));
  }
}

// The optimizer's states before anything was written there.
TEST_P(VerifySwapTest, AFlippedBitOfTheFirstMomentsEndsTheTraining) {
  if (GetParam().own) GTEST_SKIP() << "has no moments";
  const Trained run =
      Train(GetParam(), MakeConfig(), 0, 3, [&](const std::string& path, const sharding::Plan&) {
        const std::string file = FileOf(path, culprit(), "states");
        FlipBit(file, DataBytes(file) - 4096);
      });
  EXPECT_LE(run.steps_done, 1);
  ExpectFailure(run, "optimizer of unit '");
}

// Where they are masters or half of them, they are states.
TEST_P(VerifySwapTest, AFlippedBitOfTheParametersEndsTheTrainingWhereTheyAreVerified) {
  const bool are_states = GetParam().split || GetParam().without_masters;
  for (const double place : {0.0, 0.4, 0.7}) {
    SCOPED_TRACE(place);
    const auto tamper = [&](const std::string& path, const sharding::Plan&) {
      const std::string file = FileOf(path, culprit(), "parameters");
      const int64_t blocks = DataBytes(file) / 4096;
      FlipBit(file, static_cast<int64_t>(static_cast<double>(blocks) * place) * 4096 + 1);
    };
    Config config = MakeConfig();
    config.ebb.verify_swap = are_states ? VerifySwap::kStates : VerifySwap::kAll;
    const Trained run = Train(GetParam(), config, 2, 5, tamper);
    EXPECT_LE(run.steps_done, 3);
    ExpectFailure(run, "parameter of unit '");
  }
}

TEST_P(VerifySwapTest, WithoutChecksumsAFlippedBitGoesUnnoticed) {
  Config config = MakeConfig();
  config.ebb.verify_swap = VerifySwap::kOff;
  const Trained run =
      Train(GetParam(), config, 2, 4, [&](const std::string& path, const sharding::Plan&) {
        FlipBit(FileOf(path, culprit(), "states"), 1);
      });
  for (const absl::Status& status : run.statuses) EXPECT_OK(status);
}

// Data that pass through the disk in every step.
Cell PassingThrough(Cell cell, bool rounds) {
  cell.gradients = cell.boundaries = true;
  cell.rounds = rounds;
  return cell;
}

TEST_P(VerifySwapTest, GradientsAndActivationsThatAreLeftAloneAgree) {
  for (const bool rounds : {false, true}) {
    const Cell cell = PassingThrough(GetParam(), rounds);
    std::vector<uint32_t> expected;
    for (const VerifySwap verify : {VerifySwap::kOff, VerifySwap::kAll}) {
      Config config = ConfigFor(cell, scratch_.path());
      config.ebb.verify_swap = verify;
      const Trained run =
          Train(cell, config, 2, 4, [](const std::string&, const sharding::Plan&) {});
      for (const absl::Status& status : run.statuses) EXPECT_OK(status);
      if (expected.empty()) expected = run.masters;
      EXPECT_FALSE(run.masters.empty());
      EXPECT_EQ(run.masters, expected);
    }
  }
}

// Unit 0 has two visits, so its gradient is read and added to.
TEST_P(VerifySwapTest, AFlippedBitOfTheGradientsEndsTheTrainingWhereAllIsVerified) {
  for (const bool rounds : {false, true}) {
    const Cell cell = PassingThrough(GetParam(), rounds);
    Config config = ConfigFor(cell, scratch_.path());
    config.ebb.verify_swap = VerifySwap::kAll;
    for (const int unit : {0, 2}) {
      SCOPED_TRACE(unit);
      FlipAtRead flip(culprit());
      const Trained run =
          Train(cell, config, 2, 5, [&](const std::string&, const sharding::Plan& plan) {
            const sharding::Table& table = plan.table;
            const int row = table.Find(sharding::Purpose::kGradientShard, unit);
            flip.Arm(table.PlaceOf(row, table[row].elements - 1).offset);
          });
      EXPECT_NE(flip.path(), "");
      EXPECT_LE(run.steps_done, 3);
      ExpectFailure(run, "the gradient of unit 'layer" + std::to_string(unit));
      ExpectFailure(run, flip.path());
    }
  }
}

TEST_P(VerifySwapTest, AFlippedBitOfTheActivationsEndsTheTrainingWhereAllIsVerified) {
  const Cell cell = PassingThrough(GetParam(), /*rounds=*/GetParam().world > 1);
  Config config = ConfigFor(cell, scratch_.path());
  config.ebb.verify_swap = VerifySwap::kAll;
  for (const int visit : {0, 1}) {
    SCOPED_TRACE(visit);
    FlipAtRead flip(culprit());
    const Trained run =
        Train(cell, config, 2, 5, [&](const std::string&, const sharding::Plan& plan) {
          const int row = plan.table.Find(sharding::Purpose::kOutputAway, visit);
          ASSERT_GT(plan.table[row].elements, 0);
          flip.Arm(plan.table.PlaceOf(row).offset + 67 * SizeOf(cell.compute) - 1);
        });
    EXPECT_NE(flip.path(), "");
    EXPECT_EQ(run.steps_done, 2);
    ExpectFailure(run, "the activation of unit 'layer" + std::to_string(visit));
    ExpectFailure(run, flip.path());
  }
}

TEST(VerifySwap, GradientsAndActivationsHaveNoSumsWithStates) {
  const Cell cell = PassingThrough({.name = ""}, /*rounds=*/true);
  for (const bool activation : {false, true}) {
    const Scratch scratch;
    FlipAtRead flip(0);
    const Trained run = Train(cell, ConfigFor(cell, scratch.path()), 2, 4,
                              [&](const std::string&, const sharding::Plan& plan) {
                                using enum sharding::Purpose;
                                const int row =
                                    plan.table.Find(activation ? kOutputAway : kGradientShard);
                                flip.Arm(plan.table.PlaceOf(row).offset);
                              });
    EXPECT_NE(flip.path(), "");
    EXPECT_OK(run.statuses.front());
  }
}

// Gradients are also read by the trainer, between Reduce and Finish.
TEST(VerifySwap, GradientsAreVerifiedWhenReadOffThePlan) {
  Cell cell{.name = "", .timing = Timing::kOff, .gradients = true};
  for (const bool flips : {false, true}) {
    const Scratch scratch;
    Config config = ConfigFor(cell, scratch.path());
    config.ebb.verify_swap = VerifySwap::kAll;
    FlipAtRead flip(0);
    const absl::Status status = RunThreads(1, [&](World world) -> absl::Status {
      ToyModel model(ModelOf(cell));
      absl::StatusOr<Engine> engine =
          Engine::Create(world, Device::Cpu(/*threads=*/1), model.spec(), config);
      if (!engine.ok()) return engine.status();
      const sharding::Table& table = engine->program().plan().table;
      const int64_t gradient =
          table.PlaceOf(table.Find(sharding::Purpose::kGradientShard)).offset + 1;
      Step step = engine->BeginStep({.hold_updates = true});
      for (int v = 0; v < model.visits(); ++v) model.Forward(step, v, 0, 0);
      for (int v = model.visits(); v-- > 0;) model.Backward(step, v, 0, 0);
      if (absl::Status reduced = step.Reduce(); !reduced.ok()) return reduced;
      if (flips) flip.Arm(gradient);
      const absl::Status read =
          engine->Read(StateClass::kGradient,
                       [](const Slice&, std::span<const float>) { return absl::OkStatus(); });
      const absl::Status finished = step.Finish();
      return read.ok() ? finished : read;
    });
    EXPECT_EQ(flip.path().empty(), !flips);
    EXPECT_EQ(status.code(), flips ? absl::StatusCode::kDataLoss : absl::StatusCode::kOk) << status;
    if (!flips) continue;
    EXPECT_THAT(status, Says("the gradient of unit 'layer0'", flip.path()));
  }
}

// Values from outside are no changes from outside.
TEST(VerifySwap, WritesThroughTheEngineAgree) {
  for (const Cell& cell : {Cell{.name = ""}, Cell{.name = "", .split = true},
                           Cell{.name = "", .without_masters = true}}) {
    const Scratch scratch;
    Config config = ConfigFor(cell, scratch.path());
    config.ebb.verify_swap = VerifySwap::kAll;
    OnThreads(1, [&](World world) -> absl::Status {
      ToyModel model(ModelOf(cell));
      absl::StatusOr<Engine> engine =
          Engine::Create(world, Device::Cpu(/*threads=*/1), model.spec(), config);
      if (!engine.ok()) return engine.status();
      const auto value = [](const Slice& slice, std::span<float> values) {
        for (size_t i = 0; i < values.size(); ++i)
          values[i] = static_cast<float>((slice.begin + static_cast<int64_t>(i)) % 7) * 0.01f;
        return absl::OkStatus();
      };
      const auto sink = [](const Slice&, std::span<const float>) { return absl::OkStatus(); };
      for (int number = 0; number < 4; ++number) {
        if (absl::Status own = model.Train(*engine, 0, number); !own.ok()) return own;
        for (const char* name : {"exp_avg", "exp_avg_sq"}) {
          if (absl::Status own = engine->Write(StateClass::kOptimizer, value, name); !own.ok())
            return own;
        }
        if (absl::Status own = engine->Write(StateClass::kMaster, value); !own.ok()) return own;
        if (number == 2) continue;
        if (absl::Status own = engine->Read(StateClass::kMaster, sink); !own.ok()) return own;
        if (absl::Status own = model.Evaluate(*engine, 0).status(); !own.ok()) return own;
      }
      return absl::OkStatus();
    });
  }
}

// Changed bytes do not get into a checkpoint, and a skipped step does not pass them on.
TEST(VerifySwap, ReadsAndSkippedStepsFindItToo) {
  for (const bool skips : {false, true}) {
    const Scratch scratch;
    const Cell cell{.name = ""};
    const Config config = ConfigFor(cell, scratch.path());
    const absl::Status status = RunThreads(1, [&](World world) -> absl::Status {
      ToyModel model(ModelOf(cell));
      absl::StatusOr<Engine> engine =
          Engine::Create(world, Device::Cpu(/*threads=*/1), model.spec(), config);
      if (!engine.ok()) return engine.status();
      if (absl::Status own = model.Train(*engine, 0, 0); !own.ok()) return own;
      const auto sink = [](const Slice&, std::span<const float>) { return absl::OkStatus(); };
      if (absl::Status own = engine->Read(StateClass::kMaster, sink); !own.ok()) return own;
      FlipBit(FileOf(scratch.path(), 0, "states"), 1);
      if (!skips) return engine->Read(StateClass::kMaster, sink);
      // Late updates of step 2 run in step 3.
      for (int number = 1; number < 4; ++number) {
        if (absl::Status own = model.Train(*engine, 0, number, {}, /*blow_up=*/number == 1);
            !own.ok())
          return own;
      }
      return absl::OkStatus();
    });
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  }
}

}  // namespace
}  // namespace ebb::testing::verify_swap::verify_swap_test
