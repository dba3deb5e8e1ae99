// An order that has no room on one rank: the engine goes on with its present order, and no call
// shows that it was asked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "tests/engine/scripted_orders.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/scratch.h"
#include "tests/offload/test_overrides.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::reorder_refused_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kLargeBytes = 4096 * kBoundaryBytes;

class ReorderRefusedTest : public ::testing::Test {
 protected:
  ~ReorderRefusedTest() override { TestOverrides() = {}; }

  // Rank 1 finds no room on its disk for another byte, after both have begun.
  void RefuseFor(Engine& engine, const ScriptedTrainer& trainer, const Order& order) const {
    ASSERT_EQ(engine.Agree(absl::OkStatus()), absl::OkStatus());
    if (trainer.rank() == 1)
      TestOverrides().reserve = [](std::string_view path) {
        return path.find("rank1") != std::string_view::npos ? ENOSPC : 0;
      };
    ASSERT_EQ(engine.Agree(absl::OkStatus()), absl::OkStatus());
    const absl::Status full = Reorder(engine, order);
    EXPECT_THAT(full, StatusIs(absl::StatusCode::kResourceExhausted, "cannot reserve"));
  }

  // Expects that a refusal changes nothing in training by steps with these options.
  void ExpectUnchangedBy(const Config& config, const Order& refused, StepOptions options) const {
    const Order order = AsScripted(kBoundaryBytes);
    const auto run = [&](bool asks) {
      return EndOf(
          kTwoRanks, config, order, order,
          [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
            for (const int64_t number : {0, 1})
              EBB_RETURN_IF_ERROR(Train(engine, order, trainer, number));
            if (asks) RefuseFor(engine, trainer, refused);
            return absl::OkStatus();
          },
          options);
    };
    const std::vector<Ended> right = run(false), asked = run(true);
    ExpectSame(right, asked);
  }

  Order Longer() const { return Repeated(kLargeBytes); }

  const Scratch scratch_;
  Config config_ = WithAllOnDisk(kTwoRanks, scratch_.path());
};

TEST_F(ReorderRefusedTest, StepsGoOn) {
  ExpectUnchangedBy(config_, Shuffled(kLargeBytes), kExactStep);
}

// Such steps have a plan of their own, and each visit's gradient has its own memory.
TEST_F(ReorderRefusedTest, HeldStepsOfFewerVisitsGoOn) {
  config_.ebb.reduce_at = ReduceAt::kStep;
  StepOptions held = kExactStep;
  held.hold_updates = true;
  ExpectUnchangedBy(config_, Longer(), held);
}

TEST_F(ReorderRefusedTest, ScopesShowBoundariesOfTheirOwnOrder) {
  const Order order = AsScripted(kBoundaryBytes);
  RunOn(kTwoRanks, order.model, config_, [&](Engine& engine, ScriptedTrainer& trainer) {
    RefuseFor(engine, trainer, Longer());
    EXPECT_EQ(engine.model().forward.size(), order.model.forward.size());
    trainer.BeginStep(0, nullptr);
    Step step = engine.BeginStep(kExactStep);
    ForwardScope scope = step.Forward(UnitId{0});
    EXPECT_EQ(scope.output(0).size() * static_cast<int64_t>(sizeof(float)), kBoundaryBytes);
  });
}

std::string CountsOf(Engine& engine) {
  std::string text;
  for (const TrafficRow& row : engine.traffic())
    absl::StrAppend(&text, std::string(Name(row.state)), " ", std::string(Name(row.tier)), " ",
                    row.predicted_bytes, " ", row.bytes, "\n");
  for (const CommunicationRow& row : engine.communication())
    absl::StrAppend(&text, std::string(row.operation), " ", row.predicted_bytes, " ", row.bytes,
                    "\n");
  return text;
}

// A step of other rounds than the config's has a plan of its own, which goes.
TEST_F(ReorderRefusedTest, TheLastStepsCountsStay) {
  config_.gradient_accumulation_steps = 3;
  const Order order = AsScripted(kBoundaryBytes);
  RunOn(kTwoRanks, order.model, config_, [&](Engine& engine, ScriptedTrainer& trainer) {
    ASSERT_OK(
        Train(engine, order, trainer, 0, nullptr, {.micro_batches = 2, .gradient_divisor = 4}));
    ASSERT_OK(engine.Report().status());
    const std::string counts = CountsOf(engine);
    EXPECT_THAT(counts, HasSubstr("activation nvme"));
    RefuseFor(engine, trainer, Longer());
    EXPECT_EQ(CountsOf(engine), counts);
  });
}

std::string PeaksOf(Engine& engine) {
  std::string text;
  for (const MemoryRow& row : engine.memory())
    absl::StrAppend(&text, std::string(Name(row.state)), " ", std::string(Name(row.tier)), " ",
                    row.peak_bytes, "\n");
  return text;
}

TEST_F(ReorderRefusedTest, BoundariesWithoutAFileAreFoundBeforeAnyMemoryIsTaken) {
  config_.zero.offload_optimizer.device = Tier::kCpu;
  config_.ebb.offload_gradients = Tier::kDevice;
  const Order order = AsScripted();
  RunOn(kTwoRanks, order.model, config_, [&](Engine& engine, ScriptedTrainer& trainer) {
    ASSERT_OK(Train(engine, order, trainer, 0));
    const std::string peaks = PeaksOf(engine);
    const absl::Status refused = Reorder(engine, Shuffled(kLargeBytes));
    EXPECT_THAT(refused, StatusIs(absl::StatusCode::kInvalidArgument, "created without a file"));
    EXPECT_EQ(PeaksOf(engine), peaks);
    ASSERT_OK(Train(engine, order, trainer, 1));
  });
}

// Errors count the trainer's visits and events, and name its units. They never show the parts of a
// unit with several dtypes.
TEST(ReorderRefused, ErrorsAreOfTheTrainersOwnOrder) {
  OnThreads(1, [](World world) {
    ToyModel toy({.own_dtypes = true});
    Config config = ConfigFor({.world = 1});
    config.compute = DType::kBFloat16;
    ASSERT_OK_AND_ASSIGN(Engine engine, Engine::Create(world, Device::Cpu(1), toy.spec(), config));
    const ModelSpec divided = engine.model();
    const size_t units = toy.spec().units.size();
    EXPECT_GT(divided.units.size(), units);
    const auto expect = [&](const ModelSpec& model, const std::string& said) {
      const absl::Status refused = engine.Reorder(model.forward, model.order);
      EXPECT_THAT(refused, StatusIs(absl::StatusCode::kInvalidArgument, said));
      EXPECT_THAT(refused, Says(std::string(Validate(model).message())));
    };
    ModelSpec wrong = toy.spec();
    for (int v = 0; v < 2; ++v) wrong.AddScope({.visit = v});
    wrong.AddScope({.visit = 0});
    expect(wrong, "event 4 of ModelSpec::order");
    wrong = toy.spec();
    wrong.forward.push_back({.unit = static_cast<UnitId>(units)});  // the first part
    expect(wrong, absl::StrCat(units));
    wrong = toy.spec();
    wrong.forward.erase(wrong.forward.begin() + 1);
    expect(wrong, "layer1");

    // The order that an engine shows is one to come back to.
    ASSERT_OK(engine.Reorder(toy.spec().forward));
    ASSERT_OK(engine.Reorder(divided.forward, divided.order));
    ASSERT_OK(toy.Train(engine, world.rank(), 0));
    ASSERT_OK(engine.Reorder(divided.forward));  // without order: parts open with their unit
    ASSERT_OK(toy.Train(engine, world.rank(), 1));
    std::vector<Visit> unlike = divided.forward;  // the visit to a part, and that to its unit
    for (Visit& visit : unlike) visit.backward = static_cast<size_t>(visit.unit) < units;
    EXPECT_EQ(engine.Reorder(unlike).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(engine.Reorder(std::vector<Visit>(1, Visit{.unit = UnitId{1000}})).code(),
              absl::StatusCode::kInvalidArgument);
  });
}

}  // namespace
}  // namespace ebb::testing::reorder_refused_test
