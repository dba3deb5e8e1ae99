// Several engines of one world. Each ends with the bits that it has alone, in any order of their
// steps, and every rank's collectives are in the order of its calls.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/engine/watched_world.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::several_engines_test {
namespace {

using Bits = std::vector<uint32_t>;

// One of two trainers in a process, as different as two can be.
struct Trainer {
  ToyOptions options = {};
  int stage = 0;
  DType dtype = DType::kFloat32;
  AsynchronousStep asynchronous = AsynchronousStep::kAuto;

  Config config() const {
    Config config;
    config.micro_batch_size = 1;
    config.gradient_accumulation_steps = 1;
    config.optimizer.learning_rate = 0.01;
    config.zero.stage = stage;
    config.zero.param_persistence_threshold = 0;
    config.compute = dtype;
    config.ebb.asynchronous_step = asynchronous;
    config.ebb.timeout_seconds = 120;
    config.loss_scale.initial_scale_power = 8;
    if (asynchronous == AsynchronousStep::kAuto) {  // early
      config.gradient_clipping = 0;
      config.ebb.check_overflow = false;
    }
    return config;
  }
};

// An engine with its model.
struct Running {
  static absl::StatusOr<Running> Create(const World& world, const Trainer& trainer,
                                        std::string name, const Device& device = Device::Cpu(1)) {
    ToyModel model(trainer.options);
    EBB_ASSIGN_OR_RETURN(
        Engine engine,
        Engine::Create(world, device, model.spec(), trainer.config(), {.name = std::move(name)}));
    return Running{std::move(model), std::move(engine), world.rank()};
  }
  absl::Status Train(int64_t number) { return model.Train(engine, rank, number); }
  absl::StatusOr<double> Evaluate() { return model.Evaluate(engine, rank); }
  void ForwardAll(Step& step, int64_t number) {
    for (int v = 0; v < model.visits(); ++v) model.Forward(step, v, rank, number);
  }
  void BackwardAll(Step& step, int64_t number) {
    for (int v = model.visits(); v-- > 0;) model.Backward(step, v, rank, number);
  }
  absl::StatusOr<Bits> Masters() { return MasterBits(engine, model.spec()); }

  ToyModel model;
  Engine engine;
  int rank;
};

constexpr int kSteps = 3;

// The masters of an engine that trains alone, in the end.
Bits Alone(int world, const Trainer& trainer) {
  std::vector<Bits> bits(static_cast<size_t>(world));
  OnThreads(world, [&](World w) {
    ASSERT_OK_AND_ASSIGN(Running alone, Running::Create(w, trainer, "alone"));
    for (int n = 0; n < kSteps; ++n) ASSERT_OK(alone.Train(n));
    ASSERT_OK_AND_ASSIGN(bits[static_cast<size_t>(w.rank())], alone.Masters());
  });
  return bits[0];
}

using Weave = std::function<absl::Status(const World& world, Running& a, Running& b, int64_t n)>;

absl::Status BothForwardThenBothBackward(const World&, Running& a, Running& b, int64_t n) {
  Step first = a.engine.BeginStep();
  a.ForwardAll(first, n);
  Step second = b.engine.BeginStep();
  b.ForwardAll(second, n);
  a.BackwardAll(first, n);
  b.BackwardAll(second, n);
  EBB_RETURN_IF_ERROR(second.Finish());
  return first.Finish();
}

absl::Status ScopeByScope(const World&, Running& a, Running& b, int64_t n) {
  Step first = a.engine.BeginStep();
  Step second = b.engine.BeginStep();
  const int visits = std::max(a.model.visits(), b.model.visits());
  for (int v = 0; v < visits; ++v) {
    if (v < b.model.visits()) b.model.Forward(second, v, b.rank, n);
    if (v < a.model.visits()) a.model.Forward(first, v, a.rank, n);
  }
  for (int v = visits; v-- > 0;) {
    if (v < a.model.visits()) a.model.Backward(first, v, a.rank, n);
    if (v < b.model.visits()) b.model.Backward(second, v, b.rank, n);
  }
  EBB_RETURN_IF_ERROR(first.Finish());
  return second.Finish();
}

absl::Status EvaluationsWithinSteps(const World&, Running& a, Running& b, int64_t n) {
  Step first = a.engine.BeginStep();
  a.ForwardAll(first, n);
  EBB_RETURN_IF_ERROR(b.Evaluate().status());
  a.BackwardAll(first, n);
  EBB_RETURN_IF_ERROR(b.Train(n));
  Evaluation open = b.engine.BeginEvaluation();
  open.Forward(b.model.unit(0));
  EBB_RETURN_IF_ERROR(first.Finish());
  EBB_RETURN_IF_ERROR(a.Evaluate().status());
  return open.Finish().status();
}

absl::Status OneIsSuspendedInTheOthersStep(const World&, Running& a, Running& b, int64_t n) {
  EBB_RETURN_IF_ERROR(b.Train(n));
  Step first = a.engine.BeginStep();
  a.ForwardAll(first, n);
  EBB_RETURN_IF_ERROR(b.engine.Suspend());
  a.BackwardAll(first, n);
  EBB_RETURN_IF_ERROR(b.engine.Resume());
  return first.Finish();
}

absl::Status AThirdComesAndGoes(const World& world, Running& a, Running& b, int64_t n) {
  Step first = a.engine.BeginStep();
  a.ForwardAll(first, n);
  std::optional<Running> third;
  {
    EBB_ASSIGN_OR_RETURN(Running made,
                         Running::Create(world, {.options = {.seed = 9}, .stage = 3}, "third"));
    third.emplace(std::move(made));
  }
  EBB_RETURN_IF_ERROR(third->Train(0));  // its late updates still run when it goes
  a.BackwardAll(first, n);
  third.reset();
  EBB_RETURN_IF_ERROR(first.Finish());
  return b.Train(n);
}

struct Woven {
  const char* name;
  Weave weave;
};
const Woven kWeaves[] = {{"BothForwardThenBothBackward", BothForwardThenBothBackward},
                         {"ScopeByScope", ScopeByScope},
                         {"EvaluationsWithinSteps", EvaluationsWithinSteps},
                         {"OneIsSuspendedInTheOthersStep", OneIsSuspendedInTheOthersStep},
                         {"AThirdComesAndGoes", AThirdComesAndGoes}};

const Trainer kPairs[][2] = {
    {{.stage = 3, .dtype = DType::kBFloat16}, {.options = {.layers = 3, .seed = 2}, .stage = 0}},
    {{.stage = 1, .asynchronous = AsynchronousStep::kLate},
     {.options = {.layers = 5, .width = 9, .seed = 3},
      .stage = 3,
      .dtype = DType::kFloat16,
      .asynchronous = AsynchronousStep::kLate}},
    {{.options = {.boundaries = true}, .stage = 2, .asynchronous = AsynchronousStep::kOff},
     {.options = {.width = 8, .seed = 4}, .stage = 2, .dtype = DType::kBFloat16}},
};

class SeveralEnginesTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, SeveralEnginesTest, ::testing::Values(1, 2, 4),
                         ::testing::PrintToStringParamName());

TEST_P(SeveralEnginesTest, EachEndsAsIfItWereAlone) {
  for (const auto& pair : kPairs) {
    const Bits alone[2] = {Alone(GetParam(), pair[0]), Alone(GetParam(), pair[1])};
    ASSERT_FALSE(alone[0].empty());
    for (const Woven& woven : kWeaves) {
      SCOPED_TRACE(::testing::Message()
                   << woven.name << ", stages " << pair[0].stage << " and " << pair[1].stage);
      OnThreads(GetParam(), [&](World world) {
        const Device shared = Device::Cpu(2);
        ASSERT_OK_AND_ASSIGN(Running a, Running::Create(world, pair[0], "a", shared));
        ASSERT_OK_AND_ASSIGN(Running b, Running::Create(world, pair[1], "b", shared));
        for (int n = 0; n < kSteps; ++n) ASSERT_OK(woven.weave(world, a, b, n));
        ASSERT_OK_AND_ASSIGN(const Bits first, a.Masters());
        ASSERT_OK_AND_ASSIGN(const Bits second, b.Masters());
        EXPECT_TRUE(first == alone[0]);
        EXPECT_TRUE(second == alone[1]);
      });
    }
  }
}

// If two ranks enqueued the communicators of different engines in different orders, these would
// wait for each other on a GPU. So every call enqueues its own collectives, on the calling thread,
// before the next call.
TEST_P(SeveralEnginesTest, CollectivesAreInTheOrderOfTheCallsOnEveryRank) {
  for (const Woven& woven : kWeaves) {
    SCOPED_TRACE(woven.name);
    std::vector<std::vector<WatchedCalls::Call>> lists(static_cast<size_t>(GetParam()));
    const absl::Status status = RunThreads(GetParam(), [&](World world) -> absl::Status {
      auto calls = std::make_shared<WatchedCalls>();
      const World watched = Watch(world, calls);
      EBB_ASSIGN_OR_RETURN(Running a, Running::Create(watched, kPairs[0][0], "a"));
      EBB_ASSIGN_OR_RETURN(Running b, Running::Create(watched, kPairs[0][1], "b"));
      calls->lists = true;
      for (int n = 0; n < kSteps; ++n) EBB_RETURN_IF_ERROR(woven.weave(watched, a, b, n));
      calls->lists = false;
      for (const WatchedCalls::Call& call : calls->list)
        EXPECT_EQ(call.thread, std::this_thread::get_id()) << call.communicator;
      lists[static_cast<size_t>(world.rank())] = std::move(calls->list);
      return absl::OkStatus();
    });
    ASSERT_OK(status);
    ASSERT_FALSE(lists[0].empty());
    for (const auto& list : lists) EXPECT_TRUE(list == lists[0]);
  }
}

TEST_P(SeveralEnginesTest, ACallEnqueuesItsOwnEnginesCollectivesOnly) {
  OnThreads(GetParam(), [&](World world) {
    auto calls = std::make_shared<WatchedCalls>();
    const World watched = Watch(world, calls);
    const Trainer trainer{.stage = 3};
    ASSERT_OK_AND_ASSIGN(Running a, Running::Create(watched, trainer, "a"));
    ASSERT_OK_AND_ASSIGN(Running b, Running::Create(watched, trainer, "b"));
    calls->lists = true;
    int of[2] = {};
    const auto expect_only = [&](int which) {
      for (const WatchedCalls::Call& call : calls->list)
        EXPECT_TRUE(absl::StartsWith(call.communicator, which == 0 ? "a " : "b "))
            << call.communicator;
      of[which] += static_cast<int>(calls->list.size());
      calls->list.clear();
    };
    Step first = a.engine.BeginStep();
    expect_only(0);
    Step second = b.engine.BeginStep();
    expect_only(1);
    const int visits = a.model.visits();
    for (int s = 0; s < 2 * visits; ++s) {
      const int v = s < visits ? s : 2 * visits - 1 - s;
      for (int which : {0, 1}) {
        Running& running = which == 0 ? a : b;
        Step& step = which == 0 ? first : second;
        s < visits ? running.model.Forward(step, v, running.rank, 0)
                   : running.model.Backward(step, v, running.rank, 0);
        expect_only(which);
      }
    }
    ASSERT_OK(first.Finish());
    expect_only(0);
    ASSERT_OK(second.Finish());
    expect_only(1);
    // Both are the same model: gathers, reductions and an exchange, as many in each. On one rank
    // only the exchange calls a communicator.
    EXPECT_EQ(of[0], of[1]);
    EXPECT_GT(of[0], GetParam() == 1 ? 0 : 2);
    calls->lists = false;
  });
}

// API use: an actor trains, a second engine of frozen parameters generates from it; only one of
// them has its pools at a time.
TEST_P(SeveralEnginesTest, ActorAndRolloutTakeTurns) {
  const Trainer actor{.stage = 2, .dtype = DType::kBFloat16};
  const Bits alone = Alone(GetParam(), actor);
  OnThreads(GetParam(), [&](World world) {
    ASSERT_OK_AND_ASSIGN(Running policy, Running::Create(world, actor, "policy"));
    ASSERT_OK(policy.engine.Suspend());
    ToyModel frozen(actor.options);
    ModelSpec spec = frozen.spec();
    for (ParameterSpec& parameter : spec.parameters) {
      parameter.trainable = false;
      parameter.init = Constant(0);
    }
    const Trainer serving{.stage = 3, .dtype = DType::kBFloat16};
    ASSERT_OK_AND_ASSIGN(
        Engine rollout,
        Engine::Create(world, Device::Cpu(1), spec, serving.config(),
                       {.compute = policy.engine.compute_stream(), .name = "rollout"}));
    std::vector<double> generated, expected;
    for (int n = 0; n < kSteps; ++n) {
      ASSERT_OK(rollout.CopyParametersFrom(policy.engine));
      ASSERT_OK_AND_ASSIGN(generated.emplace_back(), frozen.Evaluate(rollout, world.rank()));
      ASSERT_OK(rollout.Suspend());
      ASSERT_OK(policy.engine.Resume());
      ASSERT_OK_AND_ASSIGN(expected.emplace_back(), policy.Evaluate());
      ASSERT_OK(policy.Train(n));
      ASSERT_OK(policy.engine.Suspend());
      ASSERT_OK(rollout.Resume());
      // Neither holds a device pool while the other has its own.
      uint64_t of_policy = 0, of_rollout = 0;
      for (const MemoryRow& row : policy.engine.memory())
        of_policy += row.tier == Tier::kDevice ? row.current_bytes : 0;
      for (const MemoryRow& row : rollout.memory())
        of_rollout += row.tier == Tier::kDevice ? row.current_bytes : 0;
      EXPECT_EQ(of_policy, 0u);
      EXPECT_GT(of_rollout, 0u);
    }
    EXPECT_EQ(generated, expected);
    EXPECT_NE(generated.front(), generated.back());  // it has followed the training
    ASSERT_OK(policy.engine.Resume());
    ASSERT_OK_AND_ASSIGN(const Bits masters, policy.Masters());
    EXPECT_TRUE(masters == alone);
  });
}

}  // namespace
}  // namespace ebb::testing::several_engines_test
