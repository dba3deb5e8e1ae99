// Parameters of one engine into another: every value, whatever cuts, keeps and rounds it on either
// side.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <functional>

#include "absl/strings/match.h"
#include "ebb/runtime/base/status_macros.h"
#include "tests/engine/copy_side.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/engine/watched_world.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::copy_parameters_test {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// Rounds like an update: to bf16 half away from zero, to fp16 to the nearest.
float Rounded(float value, DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return std::bit_cast<float>((std::bit_cast<uint32_t>(value) + 0x8000u) & 0xffff0000u);
    case DType::kFloat16:
      return static_cast<float>(Float16(value));
    default:
      return value;
  }
}

// The parameters that scopes show.
absl::StatusOr<ParameterValues> Shown(Engine& engine, const ModelSpec& model) {
  ParameterValues shown(model.parameters.size());
  Evaluation evaluation = engine.BeginEvaluation();
  for (const Visit& visit : model.forward) {
    const ForwardScope scope = evaluation.Forward(visit.unit);
    for (ParameterId p : model[visit.unit].parameters)
      shown[static_cast<size_t>(p)] = Values(scope.parameter(p));
  }
  EBB_RETURN_IF_ERROR(evaluation.Finish().status());
  return shown;
}

absl::StatusOr<std::vector<float>> StatesOf(Engine& engine) {
  std::vector<float> states;
  for (const char* state : {"exp_avg", "exp_avg_sq"}) {
    EBB_RETURN_IF_ERROR(engine.Read(
        StateClass::kOptimizer,
        [&](const Slice&, std::span<const float> values) {
          states.insert(states.end(), values.begin(), values.end());
          return absl::OkStatus();
        },
        state));
  }
  return states;
}

// The source's values, by parameter of the destination.
absl::StatusOr<ParameterValues> Expected(Engine& source, const Side& from, const Side& to) {
  EBB_ASSIGN_OR_RETURN(const ParameterValues values,
                       GatherAll(source, from.model, StateClass::kMaster));
  ParameterValues expected;
  for (const ParameterSpec& parameter : to.model.parameters) {
    for (size_t p = 0; p < values.size(); ++p) {
      if (from.model.parameters[p].name != parameter.name) continue;
      expected.push_back(values[p]);
      if (parameter.trainable) continue;
      for (float& value : expected.back()) value = Rounded(value, to.dtype);
    }
  }
  return expected;
}

absl::Status CopyAndCompare(const World& world, const Side& from, const Side& to) {
  EBB_ASSIGN_OR_RETURN(Engine source, from.Create(world, "source"));
  EBB_ASSIGN_OR_RETURN(Engine destination, to.Create(world, "destination"));
  // Values that use all fp32 bits, of which 16-bit dtypes lose some, and an update that still runs.
  EBB_RETURN_IF_ERROR(source.Write(StateClass::kMaster, Normal(0.7f, 99)));
  EBB_RETURN_IF_ERROR(Train(source, from.model, world.rank()));
  const bool trains = to.model.parameters.back().trainable || to.model.parameters[0].trainable;
  if (trains) EBB_RETURN_IF_ERROR(Train(destination, to.model, world.rank()));
  if (from.suspended) EBB_RETURN_IF_ERROR(source.Suspend());
  if (to.suspended) EBB_RETURN_IF_ERROR(destination.Suspend());
  EBB_ASSIGN_OR_RETURN(const std::vector<float> states, StatesOf(destination));

  EBB_RETURN_IF_ERROR(destination.CopyParametersFrom(source));

  EBB_ASSIGN_OR_RETURN(const Snapshot kept, TakeSnapshot(source, from.model));
  EBB_ASSIGN_OR_RETURN(const ParameterValues expected, Expected(source, from, to));
  EBB_ASSIGN_OR_RETURN(const ParameterValues masters,
                       GatherAll(destination, to.model, StateClass::kMaster));
  EXPECT_TRUE(masters == expected);
  ParameterValues in_scopes = expected;
  for (std::vector<float>& values : in_scopes) {
    for (float& value : values) value = Rounded(value, to.dtype);
  }
  if (!to.suspended) {
    EBB_ASSIGN_OR_RETURN(const ParameterValues at_once,
                         GatherAll(destination, to.model, StateClass::kParameter));
    EXPECT_TRUE(at_once == in_scopes);
  }
  if (to.suspended) EBB_RETURN_IF_ERROR(destination.Resume());
  EBB_ASSIGN_OR_RETURN(const ParameterValues shown, Shown(destination, to.model));
  EXPECT_TRUE(shown == in_scopes);
  EBB_ASSIGN_OR_RETURN(const ParameterValues parameters,
                       GatherAll(destination, to.model, StateClass::kParameter));
  EXPECT_TRUE(parameters == in_scopes);
  EBB_ASSIGN_OR_RETURN(const std::vector<float> states_after, StatesOf(destination));
  EXPECT_TRUE(states == states_after);
  // Nothing has happened to the source.
  if (from.suspended) EBB_RETURN_IF_ERROR(source.Resume());
  EBB_ASSIGN_OR_RETURN(const Snapshot source_after, TakeSnapshot(source, from.model));
  EXPECT_EQ(kept, source_after);
  return absl::OkStatus();
}

class CopyParametersTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, CopyParametersTest, ::testing::Values(1, 2, 4),
                         ::testing::PrintToStringParamName());

TEST_P(CopyParametersTest, EveryValueArrives) {
  const int world = GetParam();
  const ModelSpec kSources[] = {ScriptedModel(), Inverted()};
  const ModelSpec kDestinations[] = {Served(), ScriptedModel(), Inverted()};
  int number = 0;
  for (int pair = 0; pair < 16; ++pair) {
    for (int from_number = 0; from_number < 3; ++from_number) {
      for (int to_number = 0; to_number < 3; ++to_number) {
        // Every two of the stages and the dtypes.
        if (!Full() && to_number != (from_number + pair) % 3) continue;
        ++number;
        const DType from_dtype = kDTypes[from_number], to_dtype = kDTypes[to_number];
        Side from{.model = kSources[number % 2],
                  .setting = {.world = world, .stage = pair % 4},
                  .dtype = from_dtype,
                  .suspended = number % 5 == 0};
        Side to{.model = kDestinations[number % 3],
                .setting = {.world = world, .stage = pair / 4},
                .dtype = to_dtype,
                .suspended = number % 7 == 0,
                .persistent = number % 11 == 0 ? 150 : 0};
        if (world == 4 && from.setting.stage > 0 && number % 3 == 0) from.shard_group = 2;
        if (world > 1 && to.setting.stage > 0 && number % 4 == 0) to.shard_group = world / 2;
        SCOPED_TRACE(::testing::Message() << from.setting << ", " << std::string(Name(from_dtype))
                                          << ", group " << from.shard_group << " to " << to.setting
                                          << ", " << std::string(Name(to_dtype)) << ", group "
                                          << to.shard_group << ", case " << number);
        const absl::Status status =
            RunThreads(world, [&](World w) { return CopyAndCompare(w, from, to); });
        ASSERT_OK(status);
        ASSERT_FALSE(HasFailure());
      }
    }
  }
}

// Training goes on from copied values as from written ones.
TEST_P(CopyParametersTest, TrainingGoesOnFromTheCopy) {
  for (int stage = 0; stage <= 3; ++stage) {
    SCOPED_TRACE(stage);
    const Side from{.model = ScriptedModel(), .setting = {.world = GetParam(), .stage = 3 - stage}};
    const Side to{.model = ScriptedModel(),
                  .setting = {.world = GetParam(), .stage = stage},
                  .dtype = DType::kBFloat16};
    OnThreads(GetParam(), [&](World world) {
      ASSERT_OK_AND_ASSIGN(Engine source, from.Create(world, "source"));
      ASSERT_OK(source.Write(StateClass::kMaster, Normal(0.7f, 99)));
      Snapshot ends[2];
      for (const bool copies : {false, true}) {
        ASSERT_OK_AND_ASSIGN(Engine destination, to.Create(world, "destination"));
        ASSERT_OK(Train(destination, to.model, world.rank()));
        ASSERT_OK(copies ? destination.CopyParametersFrom(source)
                         : destination.Write(StateClass::kMaster, Normal(0.7f, 99)));
        for (int n = 0; n < 2; ++n) ASSERT_OK(Train(destination, to.model, world.rank()));
        ASSERT_OK_AND_ASSIGN(ends[copies], TakeSnapshot(destination, to.model));
      }
      EXPECT_EQ(ends[0], ends[1]);
    });
  }
}

// Values half-way between two of bf16, which go away from zero.
TEST_P(CopyParametersTest, HalvesAreRoundedAwayFromZero) {
  const Initialiser halves = [](const Slice& slice, std::span<float> values) {
    for (size_t i = 0; i < values.size(); ++i) {
      const uint32_t sign = i % 2 == 0 ? 0 : 0x80000000u;
      const uint32_t step = static_cast<uint32_t>(slice.begin + static_cast<int64_t>(i)) % 128;
      values[i] = std::bit_cast<float>(sign | 0x3f800000u | step << 16 | 0x8000u);
    }
    return absl::OkStatus();
  };
  for (const ModelSpec& model : {Served(), ScriptedModel()}) {
    // All of it sent, where there is more than one rank: cut another way.
    const Side from{.model = ScriptedModel(), .setting = {.world = GetParam(), .stage = 3}};
    const Side to{.model = model,
                  .setting = {.world = GetParam(), .stage = 3},
                  .dtype = DType::kBFloat16,
                  .shard_group = 1};
    OnThreads(GetParam(), [&](World world) {
      ASSERT_OK_AND_ASSIGN(Engine source, from.Create(world, "source"));
      ASSERT_OK_AND_ASSIGN(Engine destination, to.Create(world, "destination"));
      ASSERT_OK(source.Write(StateClass::kMaster, halves));
      ASSERT_OK(destination.CopyParametersFrom(source));
      ASSERT_OK_AND_ASSIGN(const ParameterValues shown, Shown(destination, to.model));
      ASSERT_OK_AND_ASSIGN(const ParameterValues values,
                           GatherAll(source, from.model, StateClass::kMaster));
      for (size_t q = 0; q < shown.size(); ++q) {
        for (size_t p = 0; p < values.size(); ++p) {
          if (from.model.parameters[p].name != to.model.parameters[q].name) continue;
          for (size_t i = 0; i < shown[q].size(); ++i)
            EXPECT_EQ(shown[q][i], Rounded(values[p][i], DType::kBFloat16));
          // Not one of them is a number of bf16.
          EXPECT_NE(shown[q], values[p]);
        }
      }
    });
  }
}

constexpr ParameterId kLarge{0};
constexpr size_t kLargeElements = 1501 * 2003;

ModelSpec LargeModel() {
  ModelSpec model;
  const UnitId unit = model.AddUnit("large");
  model.Add(unit, {.name = "w", .shape = {1501, 2003}, .init = Normal(1, 1)});
  model.Add(unit, {.name = "b", .shape = {77}, .init = Constant(3)});
  model.forward.push_back({.unit = unit});
  return model;
}

// An update of so much memory takes longer than anything that the copy begins with.
TEST_P(CopyParametersTest, TheSourcesUpdatesComeFirst) {
  const Side from{.model = LargeModel(), .setting = {.world = GetParam(), .stage = 3}};
  const Side to{.model = LargeModel(),
                .setting = {.world = GetParam(), .stage = GetParam() == 1 ? 0 : 2}};
  OnThreads(GetParam(), [&](World world) {
    ASSERT_OK_AND_ASSIGN(Engine source, from.Create(world, "source"));
    ASSERT_OK_AND_ASSIGN(Engine destination, to.Create(world, "destination"));
    ASSERT_OK(Train(source, from.model, world.rank()));
    ASSERT_OK(destination.CopyParametersFrom(source));
    std::vector<float> here(kLargeElements), there(kLargeElements);
    ASSERT_OK(destination.Gather(kLarge, StateClass::kMaster, here));
    ASSERT_OK(source.Gather(kLarge, StateClass::kMaster, there));
    EXPECT_TRUE(here == there);
  });
}

TEST(CopyParameters, StagingIsBoundedCountedAndGivenBack) {
  const ModelSpec model = LargeModel();
  // Half of each rank's slice is another rank's there: 6 MB of fp32, in two rounds.
  const Side from{.model = model, .setting = {.world = 2, .stage = 1}};
  Side to{.model = model, .setting = {.world = 2, .stage = 1}, .shard_group = 1};
  for (ParameterSpec& parameter : to.model.parameters) parameter.init = Constant(0);
  OnThreads(2, [&](World world) {
    ASSERT_OK_AND_ASSIGN(Engine source, from.Create(world, "source"));
    ASSERT_OK_AND_ASSIGN(Engine destination, to.Create(world, "destination"));
    ASSERT_OK(destination.CopyParametersFrom(source));
    bool counted = false;
    for (const MemoryRow& row : destination.memory()) {
      if (row.state != StateClass::kStaging || row.tier != Tier::kCpu) continue;
      counted = true;
      EXPECT_EQ(row.peak_bytes, uint64_t{8} << 20);
      EXPECT_EQ(row.current_bytes, 0u);
    }
    EXPECT_TRUE(counted);
    std::vector<float> here(kLargeElements), there(kLargeElements);
    ASSERT_OK(source.Gather(kLarge, StateClass::kMaster, there));
    ASSERT_OK(destination.Gather(kLarge, StateClass::kMaster, here));
    EXPECT_TRUE(here == there);
  });
}

TEST(CopyParameters, OtherParametersOfTheSourceAreLeftOut) {
  Side from{.model = ScriptedModel(), .setting = {.world = 2, .stage = 3}};
  from.model.Add(UnitId{4}, {.name = "head", .shape = {40}, .init = Constant(1)});
  const Side to{.model = Served(), .setting = {.world = 2, .stage = 3}, .dtype = DType::kBFloat16};
  const absl::Status status =
      RunThreads(2, [&](World world) { return CopyAndCompare(world, from, to); });
  EXPECT_OK(status);
}

// Refusals of CopyParametersFrom, before anything is copied, and failures on the way.

// Runs `copy` with two engines on every rank; each rank's status, and the destination's masters are
// those from before.
std::vector<absl::Status> Refused(
    const Side& from, const Side& to,
    const std::function<absl::Status(Engine& destination, Engine& source, int rank)>& copy) {
  const int world = from.setting.world;
  std::vector<absl::Status> statuses(static_cast<size_t>(world));
  OnThreads(world, [&](World w) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Engine source, from.Create(w, "source"));
    EBB_ASSIGN_OR_RETURN(Engine destination, to.Create(w, "destination"));
    EBB_ASSIGN_OR_RETURN(const Snapshot before, TakeSnapshot(destination, to.model));
    EBB_RETURN_IF_ERROR(source.Write(StateClass::kMaster, Constant(5)));
    statuses[static_cast<size_t>(w.rank())] = copy(destination, source, w.rank());
    EBB_ASSIGN_OR_RETURN(const Snapshot after, TakeSnapshot(destination, to.model));
    EXPECT_EQ(before, after);
    return Train(destination, to.model, w.rank());  // and it works on
  });
  return statuses;
}

const Side kPlain{.model = ScriptedModel(), .setting = {.world = 2, .stage = 3}};

absl::Status Copy(Engine& destination, Engine& source, int) {
  return destination.CopyParametersFrom(source);
}

TEST(CopyRefusal, AMissingNameIsRefusedBeforeAnythingIsCopied) {
  Side to = kPlain;
  to.model.Add(UnitId{4}, {.name = "head", .shape = {40}, .init = Constant(1)});
  for (const absl::Status& status : Refused(kPlain, to, Copy))
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument, "'head'"));
}

TEST(CopyRefusal, AnotherShapeIsRefused) {
  Side to = kPlain;
  to.model.parameters[2].shape = {10, 13};
  for (const absl::Status& status : Refused(kPlain, to, Copy))
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument, "'w1'", "[13, 10]"));
}

TEST(CopyRefusal, FromItselfIsRefused) {
  for (const absl::Status& status : Refused(kPlain, kPlain, [](Engine&destination, Engine&, int) {
         return destination.CopyParametersFrom(destination);
       })) {
    EXPECT_THAT(status, Says("itself"));
  }
}

TEST(CopyRefusal, NotWhileTheDestinationIsInAStep) {
  for (const absl::Status& status :
       Refused(kPlain, kPlain, [](Engine&destination, Engine&source, int) {
         const Step step = destination.BeginStep({.hold_updates = true});
         return destination.CopyParametersFrom(source);
       })) {
    EXPECT_THAT(status, Says("'destination'", "alive"));
  }
}

TEST(CopyRefusal, NotWhileTheSourceIsInAnEvaluation) {
  for (const absl::Status& status :
       Refused(kPlain, kPlain, [](Engine&destination, Engine&source, int) {
         const Evaluation evaluation = source.BeginEvaluation();
         return destination.CopyParametersFrom(source);
       })) {
    EXPECT_THAT(status, Says("'source'", "alive"));
  }
}

// A rank alone sees the error, and every rank has it.
TEST(CopyRefusal, AnErrorOfOneRankIsEveryRanks) {
  Side whole = kPlain;
  whole.setting.stage = 0;  // its evaluations begin without a gather
  const std::vector<absl::Status> statuses =
      Refused(whole, kPlain, [](Engine& destination, Engine& source, int rank) {
        // Written values spread over the ranks when the first scope opens, which is collective.
        EBB_RETURN_IF_ERROR(source.BeginEvaluation().Finish().status());
        Evaluation evaluation = source.BeginEvaluation();
        if (rank == 0) evaluation = {};
        return destination.CopyParametersFrom(source);
      });
  EXPECT_THAT(statuses[0], Says("rank 1", "alive"));
  EXPECT_THAT(statuses[1], Says("alive"));
}

// Any one collective fails on one rank: all ranks have the error, and the destination's values are
// the old ones or all the new ones, unless it says that it has failed.
TEST(CopyRefusal, AFailureOnTheWayIsEveryRanks) {
  Side to = kPlain;
  to.setting.stage = 2;
  to.shard_group =
      1;  // so that half of everything is sent, and parameters that are kept whole follow
  for (const WatchedCalls::Fault fault : {WatchedCalls::kRefuse, WatchedCalls::kAbort}) {
    bool failed = true;
    int64_t call = 0;
    std::atomic<int> in_the_middle{0};
    for (; failed; ++call) {
      SCOPED_TRACE(::testing::Message() << "call " << call << ", fault " << int{fault});
      ASSERT_LT(call, 100);
      std::vector<absl::Status> statuses(2);
      const absl::Status run = RunThreads(2, [&](World world) -> absl::Status {
        auto calls = std::make_shared<WatchedCalls>();
        calls->fault = fault;
        const World watched = Watch(world, calls);
        EBB_ASSIGN_OR_RETURN(Engine source, kPlain.Create(watched, "source"));
        EBB_ASSIGN_OR_RETURN(Engine destination, to.Create(watched, "destination"));
        EBB_RETURN_IF_ERROR(source.Write(StateClass::kMaster, Constant(5)));
        if (world.rank() == 1) calls->fail_at = calls->calls + call;
        absl::Status& status = statuses[static_cast<size_t>(world.rank())];
        status = destination.CopyParametersFrom(source);
        calls->fail_at = -1;
        const bool ended = absl::StrContains(status.message(), "ended in the middle");
        in_the_middle += ended;
        if (ended) {
          EXPECT_EQ(destination.BeginStep().Finish(), status);
          return absl::OkStatus();
        }
        return destination.Read(StateClass::kMaster,
                                [&](const Slice& slice, std::span<const float> values) {
                                  for (const float value : values)
                                    EXPECT_EQ(value == 5, status.ok()) << slice.name;
                                  return absl::OkStatus();
                                });
      });
      // A destination that failed before anything was copied cannot be read either.
      if (!run.ok()) {
        EXPECT_THAT(run, Says(kInjected));
      }
      EXPECT_EQ(statuses[0].ok(), statuses[1].ok()) << statuses[0] << "\n" << statuses[1];
      failed = !statuses[1].ok();
      if (!failed) continue;
      for (const absl::Status& status : statuses) EXPECT_THAT(status, Says(kInjected));
    }
    EXPECT_GT(call, 8);
    EXPECT_GT(in_the_middle, 0);
  }
}

TEST(CopyRefusal, EnginesOfDifferentWorldsAreRefused) {
  const Side side{.model = ScriptedModel(), .setting = {.world = 1}};
  absl::StatusOr<Engine> source = side.Create(World::Single(), "source");
  absl::StatusOr<Engine> destination = side.Create(World::Single(), "destination");
  ASSERT_OK(source);
  ASSERT_OK(destination);
  const absl::Status status = destination->CopyParametersFrom(*source);
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition, "different worlds"));
}

}  // namespace
}  // namespace ebb::testing::copy_parameters_test
