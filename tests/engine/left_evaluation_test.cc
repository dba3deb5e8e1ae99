// An evaluation may end when it has seen enough. Its gathers for units that it never opened may
// still run. They must not overlap later writes.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "ebb/offload/test_hooks.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/sharding/plan.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/gate.h"
#include "tests/offload/scratch.h"

namespace ebb::testing::left_evaluation_test {
namespace {

float WrittenValue(ParameterId parameter, int64_t element) {
  return 0.25f * static_cast<float>((static_cast<int64_t>(parameter) + element) % 7);
}

absl::Status WrittenValues(const Slice& slice, std::span<float> values) {
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = WrittenValue(slice.parameter, slice.begin + static_cast<int64_t>(i));
  return absl::OkStatus();
}

// Every scope of an evaluation shows the written values.
absl::Status ExpectWritten(Engine& engine, const ModelSpec& model) {
  Evaluation evaluation = engine.BeginEvaluation();
  for (const Visit& visit : model.forward) {
    const ForwardScope scope = evaluation.Forward(visit.unit);
    for (ParameterId p : model[visit.unit].parameters) {
      const std::vector<float> shown = Values(scope.parameter(p));
      for (size_t i = 0; i < shown.size(); ++i)
        EXPECT_EQ(shown[i], WrittenValue(p, static_cast<int64_t>(i))) << model[p].name;
    }
  }
  return evaluation.Finish().status();
}

absl::Status LookAtTheFirstUnit(Engine& engine, const ModelSpec& model) {
  Evaluation evaluation = engine.BeginEvaluation();
  evaluation.Forward(model.forward.front().unit).Close();
  return evaluation.Finish().status();
}

struct HeldCase {
  const char* name;
  bool split_master;
  VerifySwap verify;
};

void PrintTo(const HeldCase& held, std::ostream* out) {
  *out << held.name;
}

class LeftEvaluationTest : public ::testing::TestWithParam<HeldCase> {};

TEST_P(LeftEvaluationTest, ItsReadsFromTheDiskAreOverBeforeAnythingIsWritten) {
  const Scratch scratch;
  std::atomic<int64_t> held_from = INT64_MAX;  // of the file of parameters
  Gate gate(
      [&](const IoRequest& request) { return !request.write && request.offset >= held_from; });
  GetOffloadTestHooks().wrap_queue = [&](std::string_view, std::string_view file) {
    return file == "parameters" ? gate.Before() : Gate::WrapQueue();
  };
  const ToyModel toy({.width = 67});
  const ModelSpec& model = toy.spec();
  Config config = OnNvme(ConfigFor({.world = 1, .stage = 3}), scratch.path());
  config.compute = DType::kBFloat16;
  config.ebb.split_master = GetParam().split_master;
  config.ebb.verify_swap = GetParam().verify;
  config.ebb.prefetch_depth = 2;
  const absl::Status status = RunThreads(1, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, Device::Cpu(1), model, config));
    held_from = engine.program().plan().pools.placement.units[1].trainable.front().place.offset;
    EBB_RETURN_IF_ERROR(LookAtTheFirstUnit(engine, model));
    while (gate.held_reads() == 0) std::this_thread::yield();
    // Who does not wait for the reads needs a while to show it.
    std::promise<void> writes;
    std::thread opener([&gate, written = writes.get_future()] {
      written.wait_for(std::chrono::milliseconds(300));
      gate.Open();
    });
    bool writing = false;
    const absl::Status written =
        engine.Write(StateClass::kParameter, [&](const Slice& slice, std::span<float> values) {
          EXPECT_EQ(gate.held_reads(), 0);
          if (!std::exchange(writing, true)) writes.set_value();
          return WrittenValues(slice, values);
        });
    opener.join();
    EBB_RETURN_IF_ERROR(written);
    EBB_RETURN_IF_ERROR(ExpectWritten(engine, model));
    return ExpectWritten(engine, model);
  });
  GetOffloadTestHooks() = {};
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(Ways, LeftEvaluationTest,
                         ::testing::Values(HeldCase{"Parameters", false, VerifySwap::kAll},
                                           HeldCase{"SplitMasters", true, VerifySwap::kStates}),
                         [](const auto& case_info) { return case_info.param.name; });

// For the thread sanitizer.
TEST(LeftEvaluation, ItsGathersAreOverBeforeAnythingIsWritten) {
  constexpr int kWorld = 2, kTurns = 10;
  const ToyModel toy({.width = 200});
  const ModelSpec& model = toy.spec();
  for (const Tier tier : {Tier::kDevice, Tier::kCpu}) {
    Config config = ConfigFor({.world = kWorld, .stage = 3});
    config.zero.offload_param.device = tier;
    config.ebb.prefetch_depth = 3;
    const absl::Status status = RunThreads(kWorld, [&](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, Device::Cpu(1), model, config));
      EBB_ASSIGN_OR_RETURN(Engine other,
                           Engine::Create(world, Device::Cpu(1), model, config, {.name = "other"}));
      EBB_RETURN_IF_ERROR(other.Write(StateClass::kParameter, WrittenValues));
      for (int turn = 0; turn < kTurns; ++turn) {
        EBB_RETURN_IF_ERROR(LookAtTheFirstUnit(engine, model));
        EBB_RETURN_IF_ERROR(engine.Write(StateClass::kParameter, WrittenValues));
        EBB_RETURN_IF_ERROR(LookAtTheFirstUnit(engine, model));
        EBB_RETURN_IF_ERROR(engine.CopyParametersFrom(other));
      }
      return ExpectWritten(engine, model);
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

}  // namespace
}  // namespace ebb::testing::left_evaluation_test
