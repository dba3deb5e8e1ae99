// Ranks that do not agree on the engine that they create, or on the scopes of a step: every rank
// gets a Status that names the first difference.
#include "ebb/runtime/engine/ranks/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/engine/outcome/exchange.h"
#include "tests/engine/scripted.h"
#include "tests/offload/scratch.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::agreement_test {
namespace {

using ::testing::HasSubstr;

struct Difference {
  std::string name;
  std::function<void(ModelSpec& model, Config& config)> change;  // on one rank
  std::vector<std::string> says;
};

const Difference kDifferences[] = {
    {"ParameterName",
     [](ModelSpec& model, Config&) { model.parameters[2].name = "other"; },
     {"model of rank", "parameter 2"}},
    {"Shape",
     [](ModelSpec& model, Config&) {
       model.parameters[4].shape = {5, 20};
     },
     {"model of rank", "parameter 4"}},
    {"Order",
     [](ModelSpec& model, Config&) { std::swap(model.parameters[5], model.parameters[2]); },
     {"model of rank", "parameter 2"}},
    {"OneParameterMore",
     [](ModelSpec& model, Config&) {
       model.Add(UnitId{4}, {.name = "more", .shape = {3}, .init = Constant(0)});
     },
     {"model of rank", "parameter 9 ('more') on rank", "the end (after 9) on rank"}},
    {"Trainable",
     [](ModelSpec& model, Config&) { model.parameters[3].trainable = true; },
     {"model of rank", "parameter 3"}},
    {"Group",
     [](ModelSpec& model, Config&) { model.parameters[1].group = "norms"; },
     {"model of rank", "parameter 1"}},
    {"CutRows",
     [](ModelSpec& model, Config&) { model.parameters[7].cut_rows = 4; },
     {"model of rank", "parameter 7"}},
    {"UnitName",
     [](ModelSpec& model, Config&) { model.units[1].name = "other"; },
     {"model of rank", "units"}},
    {"Visits",
     [](ModelSpec& model, Config&) { model.forward.pop_back(); },
     {"model of rank", "visits"}},
    {"VisitWithoutGradients",
     [](ModelSpec& model, Config&) { model.forward[5].gradients = false; },
     {"model of rank", "visits"}},
    {"ScopesThatComeInTheDeclaredOrder",
     [](ModelSpec& model, Config&) {
       for (int v = 0; v < kScriptedVisits; ++v) model.AddScope({.visit = v});
       for (int v = kScriptedVisits - 1; v >= 0; --v)
         model.AddScope({.backward = true, .visit = v});
     },
     {"model of rank", "order"}},
    {"Workspace",
     [](ModelSpec& model, Config&) { model.workspace_bytes = 64; },
     {"model of rank", "workspace"}},
    {"Stage",
     [](ModelSpec&, Config& config) { config.zero.stage ^= 1; },
     {"config of rank", "zero_optimization.stage: "}},
    {"DType",
     [](ModelSpec&, Config& config) { config.compute = DType::kBFloat16; },
     {"config of rank", "bf16.enabled: "}},
    {"LearningRate",
     [](ModelSpec&, Config& config) { config.optimizer.learning_rate = 0.5; },
     {"config of rank", "optimizer.params.lr: "}},
    {"Accumulation",
     [](ModelSpec&, Config& config) { config.gradient_accumulation_steps = 2; },
     {"config of rank", "train_batch_size: "}},
    {"ReductionGroup",
     [](ModelSpec&, Config& config) { config.ebb.reduction_group = 1; },
     {"reduction"}},
    {"TimeOut", [](ModelSpec&, Config& config) { config.ebb.timeout_seconds = 30; }, {"time"}},
};

std::vector<Setting> SomeSettings() {
  return {{.world = 2, .stage = 0}, {.world = 3, .stage = 1}, {.world = 2, .stage = 3}};
}

class CreateTest : public ::testing::TestWithParam<Setting> {
 protected:
  // Creates an engine on every rank, one of them with what `change` has made of it.
  static std::vector<absl::Status> Create(int odd,
                                          const std::function<void(ModelSpec&, Config&)>& change) {
    std::vector<absl::Status> statuses(static_cast<size_t>(GetParam().world));
    const absl::Status run = RunThreads(GetParam().world, [&](World world) {
      ModelSpec model = ScriptedModel();
      Config config = ConfigFor(GetParam());
      if (world.rank() == odd) change(model, config);
      return statuses[static_cast<size_t>(world.rank())] =
                 Engine::Create(world, Device::Cpu(), std::move(model), config).status();
    });
    EXPECT_FALSE(run.ok());
    return statuses;
  }
};
INSTANTIATE_TEST_SUITE_P(Cells, CreateTest, ::testing::ValuesIn(SomeSettings()), NameOf);

TEST_P(CreateTest, NamesTheDifferenceOnEveryRank) {
  for (const Difference& difference : kDifferences) {
    for (int odd = 0; odd < GetParam().world; ++odd) {
      SCOPED_TRACE(::testing::Message() << difference.name << " on rank " << odd);
      for (const absl::Status& status : Create(odd, difference.change)) {
        EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
        for (const std::string& part : difference.says) EXPECT_THAT(status, Says(part));
      }
    }
  }
}

TEST(CreateFromNvmeTest, RanksMayReachTheirDisksInDifferentWays) {
  const Scratch scratch;
  const Config config = OnNvme(ConfigFor({.world = 2, .stage = 3}), scratch.path());
  OnThreads(2, [&](World world) {
    Config own = config;
    if (world.rank() == 1) own.ebb.io_backend = IoBackend::kThreads;
    ASSERT_OK(Engine::Create(world, Device::Cpu(), ScriptedModel(), own).status());
  });
}

TEST_P(CreateTest, NamesAnInitialValueThatDiffers) {
  const int odd = GetParam().world - 1;
  const auto seed_by_rank = [](ModelSpec& model, Config&) {
    model.parameters[4].init = Normal(0.5f, /*seed=*/1'000);
  };
  for (const absl::Status& status : Create(odd, seed_by_rank))
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition, "initial value of rank",
                                 "parameter 'base2'"));
}

TEST_P(CreateTest, NamesAnOptimizerThatDiffers) {
  const auto update = [](const UpdateSlice&) { return absl::OkStatus(); };
  const OptimizerSpec usual{.states = {"momentum", "variance"}, .update = update};
  const struct {
    std::optional<OptimizerSpec> optimizer;  // of one rank
    const char* says;
  } kCases[] = {
      {std::nullopt, "EngineOptions::optimizer (not given) on rank"},
      {OptimizerSpec{.states = {"momentum"}, .update = update}, "the end (after 2) on rank"},
      {OptimizerSpec{.states = {"momentum", "mean"}, .update = update}, "first at state 1 ('"},
      {OptimizerSpec{.states = {"variance", "momentum"}, .update = update}, "first at state 0 ('"}};
  for (const auto& different : kCases) {
    for (int odd = 0; odd < GetParam().world; ++odd) {
      const std::vector<absl::Status> statuses =
          StatusesOnThreads(GetParam().world, [&](World world) {
            const std::optional<OptimizerSpec> own =
                world.rank() == odd ? different.optimizer : std::optional(usual);
            return Engine::Create(world, Device::Cpu(1), ScriptedModel(), ConfigFor(GetParam()),
                                  {.optimizer = own})
                .status();
          });
      for (const absl::Status& status : statuses)
        EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition,
                                     "the optimizer of rank ", different.says));
    }
  }
}

// An error that only one rank can see reaches the others with its reason.
TEST_P(CreateTest, AnErrorThatOnlyOneRankCanSeeReachesAll) {
  const int odd = GetParam().world - 1;
  const Difference kFaults[] = {
      {"SizeZero",
       [](ModelSpec& model, Config&) {
         model.parameters[2].shape = {0, 3};
       },
       {"parameter 2 (\"w1\")", "dimension 0"}},
      {"EmptyUnit", [](ModelSpec& model, Config&) { model.AddUnit("empty"); }, {"\"empty\""}},
      {"Batch",
       [](ModelSpec&, Config& config) { config.train_batch_size = 7; },
       {"train_batch_size", "7"}},
      {"Group",
       [](ModelSpec&, Config& config) { config.ebb.parameter_groups["nobody"] = {}; },
       {"parameter_groups.nobody"}},
      {"Cap",
       [](ModelSpec&, Config& config) { config.ebb.device_memory = 1; },
       {"ebb.device_memory is 1 byte a rank", "; no setting fits; the least, "}},
      {"Initialiser",
       [](ModelSpec& model, Config&) {
         model.parameters[7].init = [](const Slice&, std::span<float>) {
           return absl::NotFoundError("no such file");
         };
       },
       {"'w4'", "no such file"}},
      {"LongReason",
       [](ModelSpec& model, Config&) {
         model.parameters[7].init = [](const Slice&, std::span<float>) {
           return absl::NotFoundError(absl::StrCat("from '", std::string(3000, 'p'), "': gone"));
         };
       },
       {"'w4'", absl::StrCat("from '", std::string(3000, 'p'), "': gone")}},
  };
  for (const Difference& fault : kFaults) {
    const std::vector<absl::Status> statuses = Create(odd, fault.change);
    for (const absl::Status& status : statuses) {
      SCOPED_TRACE(fault.name);
      for (const std::string& part : fault.says) EXPECT_THAT(status, Says(part));
    }
    EXPECT_THAT(statuses[0], Says(absl::StrCat("rank ", odd)));
  }
}

TEST_P(CreateTest, ACapThatAllRanksExceedGivesTheAdviceOfAPlanOnEveryRank) {
  const ModelSpec model = ScriptedModel();
  Config config = ConfigFor(GetParam());
  config.ebb.device_memory = 4096;
  const absl::Status alone = PredictMemory(model, GetParam().world, config).status();
  EXPECT_THAT(alone, StatusIs(absl::StatusCode::kResourceExhausted, ": raise it, or take "));
  const std::vector<absl::Status> statuses = StatusesOnThreads(GetParam().world, [&](World world) {
    return Engine::Create(world, Device::Cpu(1), model, config).status();
  });
  for (const absl::Status& status : statuses) EXPECT_EQ(status, alone);
}

// The ranks' agreement, and how often advice was looked for.
class AdvisedStatusTest : public ::testing::Test {
 protected:
  struct Own {
    absl::Status status;
    int64_t cause = 0;
  };
  using Advise = std::function<std::string(int rank, Communicator& communicator)>;

  std::vector<absl::Status> Agreed(const std::vector<Own>& all, const Advise& advise) {
    searches_ = 0;
    std::vector<absl::Status> statuses(all.size());
    const absl::Status run =
        RunThreads(static_cast<int>(all.size()), [&](World world) -> absl::Status {
          Device device = Device::Cpu(1);
          absl::StatusOr<Communicator> communicator = world.NewCommunicator({.name = "advised"});
          if (!communicator.ok()) return communicator.status();
          absl::StatusOr<Stream> stream = device.NewStream("advised");
          if (!stream.ok()) return stream.status();
          const DeviceMirror mirror;
          const size_t rank = static_cast<size_t>(world.rank());
          statuses[rank] = AgreeOnStatus({*communicator, *stream, mirror, world}, all[rank].status,
                                         all[rank].cause, [&] {
                                           ++searches_;
                                           return advise(world.rank(), *communicator);
                                         });
          return absl::OkStatus();
        });
    EXPECT_OK(run);
    return statuses;
  }

  std::atomic<int> searches_{0};
};

TEST_F(AdvisedStatusTest, OneRankOfEachCauseSearchesAndSendsTheAdvice) {
  const absl::Status full = absl::ResourceExhaustedError("full");
  const std::vector<absl::Status> agreed =
      Agreed({{},
              {full, 7},
              {absl::ResourceExhaustedError("host b is full"), 9},
              {full, 7},
              {absl::InvalidArgumentError("wrong")},
              {absl::ResourceExhaustedError("host b is as full"), 9}},
             [](int rank, Communicator&) { return absl::StrCat("ask ", rank); });
  const absl::Status of_b = absl::ResourceExhaustedError("host b is full; ask 2");
  EXPECT_EQ(searches_, 2);
  EXPECT_EQ(agreed[0], absl::ResourceExhaustedError("rank 1: full; ask 1"));
  EXPECT_EQ(agreed[1], absl::ResourceExhaustedError("full; ask 1"));
  EXPECT_EQ(agreed[2], of_b);
  EXPECT_EQ(agreed[3], agreed[1]);
  EXPECT_EQ(agreed[4], absl::InvalidArgumentError("wrong"));
  EXPECT_EQ(agreed[5], of_b);
}

TEST_F(AdvisedStatusTest, WithoutAnErrorOfThatKindNoRankSearches) {
  const Advise none = [](int, Communicator&) { return std::string("ask"); };
  for (const absl::Status& status : Agreed({{{}, 7}, {{}, 7}}, none)) EXPECT_OK(status);
  EXPECT_EQ(Agreed({{{}, 7}, {absl::AbortedError("gone")}}, none)[0],
            absl::AbortedError("rank 1: gone"));
  EXPECT_EQ(searches_, 0);
}

TEST_F(AdvisedStatusTest, ARankThatTheOthersCannotReachKeepsItsError) {
  const absl::Status full = absl::ResourceExhaustedError("full");
  const std::vector<absl::Status> agreed =
      Agreed({{full, 7}, {full, 7}, {}}, [](int, Communicator& communicator) {
        communicator.Abort(absl::DeadlineExceededError("too long"));
        return std::string("ask");
      });
  EXPECT_EQ(agreed[0], absl::ResourceExhaustedError("full; ask"));
  EXPECT_EQ(agreed[1], full);
  EXPECT_EQ(agreed[2], absl::ResourceExhaustedError("rank 0: full"));
}

// Within a step there is room for a part of it: for what failed, and for why, which follows a path.
TEST(ExchangeRecord, HasTheBeginningAndTheEndOfALongError) {
  for (size_t bytes = 0; bytes < 1200; ++bytes) {
    std::string path;
    while (path.size() < bytes) path += "/\xc3\xa4";  // of two bytes each, which no cut may part
    ExchangeRecord record;
    record.SetError(absl::DataLossError(absl::StrCat("'", path, "' has been replaced")));
    const absl::Status status = record.Error("rank 1");
    const std::string message(status.message());
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_TRUE(absl::StartsWith(message, "rank 1: '")) << message;
    EXPECT_TRUE(absl::EndsWith(message, "' has been replaced")) << message;
    size_t characters = 0, letters = 0;
    for (const char c : message) {
      characters += c == '\xc3';
      letters += c == '\xa4';
    }
    EXPECT_EQ(characters, letters) << message;
    if (message.find(" ... ") == message.npos) {
      EXPECT_THAT(message, HasSubstr(path));
    }
  }
}

// The other ranks may have failed because of its error. All ranks get the error of the first
// record.
TEST(ExchangeRecord, KeepsTheNameOfTheRankThatAnErrorIsOf) {
  const auto text_of = [](const char* message) {
    ExchangeRecord record;
    record.SetError(absl::DataLossError(message));
    return std::string(record.Error("rank 0").message());
  };
  EXPECT_EQ(text_of("rank 1: a page is missing"), "rank 1: a page is missing");
  for (const char* named :
       {"rank 12 failed: a page is missing", "rank 1 has left: it",
        "rank 1 has waited 5 s for rank 0", "rank 3 (process 7 on host 'a') has died",
        "rank 1 (world rank 5): a page is missing", "ranks opened different scopes",
        "the ranks have waited 5 s", "rank 1 on host 'a' has waited 5 s for rank 0",
        "the engine has failed: in step 3, at the gather: rank 3 (process 7 on host 'a') has died",
        "in step 3: rank 1 failed: a page is missing", "in step 3: ranks opened different scopes"})
    EXPECT_EQ(text_of(named), named);
  for (const char* own :
       {"a page is missing", "rank: 1", "rank 1", "rank 1 of a matrix", "ranks1",
        "in step 3: a page is missing", "in step 3: a page of rank 1: missing", "in step: rank 1"})
    EXPECT_EQ(text_of(own), absl::StrCat("rank 0: ", own));
}

// Options of ranks that do as declared; with ebb.strict a scope left out is a rank's own error.
constexpr StepOptions kOneRound = {.micro_batches = 1, .may_leave_out = true};

struct Deviation {
  std::string name;
  StepOptions options;  // of one rank, in one step
  Script script;
  std::vector<std::string> says;
};

std::vector<Deviation> Deviations() {
  const auto round = [](const ScriptedTrainer& trainer, Step& step) { trainer.Round(step); };
  const auto forward = [](std::vector<int> units) {
    return [units](const ScriptedTrainer& trainer, Step& step) {
      for (int unit : units) trainer.Forward(step, unit);
      trainer.BackwardAll(step);
    };
  };
  const auto backward = [](std::vector<int> visits) {
    return [visits](const ScriptedTrainer& trainer, Step& step) {
      trainer.ForwardAll(step);
      for (int visit : visits) trainer.Backward(step, visit);
    };
  };
  return {
      {"ForwardLeftOut", kOneRound, forward({0, 1, 2, 4, 0}), {"number 4", "'u3'", "'u4'"}},
      {"ForwardSwapped", kOneRound, forward({0, 3, 2, 1, 4, 0}), {"number 2", "'u1'", "'u3'"}},
      {"BackwardLeftOut", kOneRound, backward({5, 3, 2, 1, 0}), {"number 8", "'u4'", "'u3'"}},
      {"LastLeftOut", kOneRound, backward({5, 4, 3, 2, 1}), {"number 12", "'u0'", "nothing more"}},
      {"MicroBatches",
       {.micro_batches = 2, .may_leave_out = true},
       [](const ScriptedTrainer& trainer, Step& step) {
         for (int r = 0; r < step.rounds(); ++r) trainer.Round(step);
       },
       {"micro_batches", "1 on rank", "2 on rank"}},
      {"Divisor",
       {.micro_batches = 1, .gradient_divisor = 8, .may_leave_out = true},
       round,
       {"gradient_divisor", "8 on rank"}},
      {"LearningRate",
       {.micro_batches = 1, .learning_rate = 0.5, .may_leave_out = true},
       round,
       {"learning_rate", "0.5 on rank"}},
      {"HoldsUpdates",
       {.micro_batches = 1, .hold_updates = true, .may_leave_out = true},
       round,
       {"hold_updates", "2 on rank 0, 3 on rank"}},
      {"MayNotLeaveOut", {.micro_batches = 1}, round, {"may_leave_out", "2 on rank 0, 0 on rank"}},
  };
}

class StepAgreementTest : public ::testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(Cells, StepAgreementTest, ::testing::ValuesIn(WorldsAndStages()), NameOf);

// Either nothing has been updated and the step is as if it had not been, or the engine has failed.
TEST_P(StepAgreementTest, NamesTheFirstDifferenceOnEveryRank) {
  const ModelSpec model = ScriptedModel();
  for (const Setting& setting : At(GetParam(), kNotEarly)) {
    Config config = ConfigFor(setting);
    config.gradient_accumulation_steps = 2;
    const StepOptions one_round = {.micro_batches = 1, .gradient_divisor = 4};
    const ScriptRun agreed =
        RunScript(setting, model, config,
                  [](const ScriptedTrainer& trainer, Step& step) { trainer.Round(step); },
                  {.step = one_round});
    ASSERT_OK(agreed.status);
    for (const Deviation& deviation : Deviations()) {
      const int odd = setting.world - 1;
      SCOPED_TRACE(::testing::Message() << deviation.name << ", " << setting);
      std::vector<absl::Status> differs(static_cast<size_t>(setting.world));
      RunOn(setting, model, config, [&](Engine& engine, ScriptedTrainer& trainer) {
        bool failed = false;
        for (int number = 0; number < 3; ++number) {
          trainer.BeginStep(number, nullptr);
          if (number == 1) {
            const bool is_odd = trainer.rank() == odd;
            Step step = engine.BeginStep(is_odd ? deviation.options : kOneRound);
            if (is_odd) {
              deviation.script(trainer, step);
            } else {
              trainer.Round(step);
            }
            const absl::Status status = differs[static_cast<size_t>(trainer.rank())] =
                FinishAndReport(engine, step);
            failed = status.message().find("the engine has failed") != absl::string_view::npos;
            EXPECT_EQ(engine.Report().status(), status);
          }
          Step step = engine.BeginStep(one_round);
          trainer.Round(step);
          const absl::Status finished = FinishAndReport(engine, step);
          EXPECT_EQ(finished.ok(), !failed || number == 0) << finished;
        }
        if (!failed) {
          EXPECT_EQ(*GatherAll(engine, model, StateClass::kMaster), agreed.masters);
        }
      });
      for (const absl::Status& status : differs) {
        EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition, "rank 0",
                                     absl::StrCat("rank ", odd)));
        for (const std::string& part : deviation.says) EXPECT_THAT(status, Says(part));
      }
    }
  }
}

}  // namespace
}  // namespace ebb::testing::agreement_test
