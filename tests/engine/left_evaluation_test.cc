// An evaluation may end when it has seen enough. What it has under way then for units that it never
// opened must not meet what is written next.
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ebb/offload/io_queue.h"
#include "ebb/offload/test_hooks.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/sharding/plan.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/scratch.h"

namespace ebb::testing {
namespace {

// Reads of the file of parameters, from some byte on, that the disk does not get yet.
class HeldReads {
 public:
  HeldReads() {
    GetOffloadTestHooks().wrap_queue = [this](std::string_view, std::string_view file) {
      return [this, file = std::string(file)](IoListener& listener,
                                              const ShardFile::Options::MakeQueue& make)
                 -> absl::StatusOr<std::unique_ptr<IoQueue>> {
        EBB_ASSIGN_OR_RETURN(std::unique_ptr<IoQueue> inner, make(listener));
        return std::make_unique<Queue>(*this, file == "parameters", std::move(inner));
      };
    };
  }
  ~HeldReads() { GetOffloadTestHooks() = {}; }

  void Hold(int64_t from) {
    const std::lock_guard lock(mutex_);
    from_ = from;
  }
  void Release() {
    const std::lock_guard lock(mutex_);
    from_ = INT64_MAX;
    for (const auto& [queue, request] : held_) queue->Submit({&request, 1});
    held_.clear();
    changed_.notify_all();
  }
  void AwaitOne() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !held_.empty(); });
  }
  // Until they are released, or for the while that who does not wait for them needs to show it.
  void AwaitReleaseOrAWhile() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::milliseconds(300), [&] { return held_.empty(); });
  }
  bool holds() {
    const std::lock_guard lock(mutex_);
    return !held_.empty();
  }

 private:
  class Queue final : public IoQueue {
   public:
    Queue(HeldReads& reads, bool parameters, std::unique_ptr<IoQueue> inner)
        : reads_(reads), parameters_(parameters), inner_(std::move(inner)) {}
    void Submit(std::span<IoRequest* const> requests) override {
      for (IoRequest* request : requests) {
        if (!parameters_ || request->write || !reads_.Keep(*inner_, request))
          inner_->Submit({&request, 1});
      }
    }
    std::string description() const override { return inner_->description(); }

   private:
    HeldReads& reads_;
    const bool parameters_;
    std::unique_ptr<IoQueue> inner_;
  };

  bool Keep(IoQueue& queue, IoRequest* request) {
    const std::lock_guard lock(mutex_);
    if (request->offset < from_) return false;
    held_.emplace_back(&queue, request);
    changed_.notify_all();
    return true;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t from_ = INT64_MAX;
  std::vector<std::pair<IoQueue*, IoRequest*>> held_;
};

float WrittenValue(ParameterId parameter, int64_t element) {
  return 0.25f * static_cast<float>((static_cast<int64_t>(parameter) + element) % 7);
}

absl::Status WrittenValues(const Slice& slice, std::span<float> values) {
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = WrittenValue(slice.parameter, slice.begin + static_cast<int64_t>(i));
  return absl::OkStatus();
}

// Every scope of an evaluation shows what was written.
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
  HeldReads reads;
  const ToyModel toy({.width = 67});
  const ModelSpec& model = toy.spec();
  Config config = OnNvme(ConfigFor({.world = 1, .stage = 3}), scratch.path());
  config.compute = DType::kBFloat16;
  config.ebb.split_master = GetParam().split_master;
  config.ebb.verify_swap = GetParam().verify;
  config.ebb.prefetch_depth = 2;
  const absl::Status status = RunThreads(1, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, Device::Cpu(1), model, config));
    reads.Hold(engine.plan().pools.homes.units[1].trainable.front().home.offset);
    EBB_RETURN_IF_ERROR(LookAtTheFirstUnit(engine, model));
    reads.AwaitOne();
    std::thread releaser([&] {
      reads.AwaitReleaseOrAWhile();
      reads.Release();
    });
    const absl::Status written =
        engine.Write(StateClass::kParameter, [&](const Slice& slice, std::span<float> values) {
          EXPECT_FALSE(reads.holds());
          reads.Release();
          return WrittenValues(slice, values);
        });
    releaser.join();
    EBB_RETURN_IF_ERROR(written);
    EBB_RETURN_IF_ERROR(ExpectWritten(engine, model));
    return ExpectWritten(engine, model);
  });
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
}  // namespace ebb::testing
