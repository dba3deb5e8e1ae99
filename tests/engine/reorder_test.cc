// Another order of scopes for an engine that has trained. It goes on with the bits, the memory and
// the traffic of an engine that was created with that order and given the same state.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <future>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "tests/engine/scripted_orders.h"
#include "tests/offload/made_files.h"
#include "tests/offload/scratch.h"
#include "tests/status.h"
#include "tests/trace/trace_events.h"

namespace ebb::testing::reorder_test {
namespace {

// The state that a rank goes on from.
struct Saved {
  std::vector<std::pair<std::string, ParameterValues>> arrays;  // the masters; states by name
  TrainingState training;
};

absl::StatusOr<Saved> Save(Engine& engine, const ModelSpec& model) {
  Saved saved;
  for (const char* name : {"", "exp_avg", "exp_avg_sq"}) {
    const StateClass what = *name == '\0' ? StateClass::kMaster : StateClass::kOptimizer;
    EBB_ASSIGN_OR_RETURN(ParameterValues values, ReadSlices(engine, model, what, name));
    saved.arrays.emplace_back(name, std::move(values));
  }
  EBB_ASSIGN_OR_RETURN(saved.training, engine.training_state());
  return saved;
}

absl::Status Load(Engine& engine, const Saved& saved) {
  for (const auto& [name, values] : saved.arrays) {
    const auto source = [&values](const Slice& slice, std::span<float> into) {
      const std::vector<float>& of = values[static_cast<size_t>(slice.parameter)];
      std::copy(of.begin() + slice.begin, of.begin() + slice.end, into.begin());
      return absl::OkStatus();
    };
    const StateClass what = name.empty() ? StateClass::kMaster : StateClass::kOptimizer;
    EBB_RETURN_IF_ERROR(engine.Write(what, source, name));
  }
  return engine.SetTrainingState(saved.training);
}

struct Cell {
  Setting setting;
  Tier tier = Tier::kDevice;
};
std::string NameOfCell(const ::testing::TestParamInfo<Cell>& info) {
  return absl::StrCat("World", info.param.setting.world, "Stage", info.param.setting.stage,
                      std::string(Name(info.param.tier)));
}
std::vector<Cell> Cells() {
  std::vector<Cell> cells;
  for (const Tier tier : {Tier::kDevice, Tier::kCpu, Tier::kNvme})
    for (const Setting& setting : WorldsAndStages({.world = 1, .stage = 1}))
      if (tier == Tier::kDevice || setting.stage > 0) cells.push_back({setting, tier});
  return cells;
}

class ReorderTest : public ::testing::TestWithParam<Cell> {
 protected:
  Config ConfigOf(Setting setting) const {
    Config config = ConfigFor(setting);
    if (GetParam().tier != Tier::kDevice) config = OnNvme(config, scratch_.path());
    if (GetParam().tier == Tier::kCpu) {
      if (setting.stage == 3) config.zero.offload_param.device = Tier::kCpu;
      config.zero.offload_optimizer.device = Tier::kCpu;
    }
    config.ebb.verify_swap = VerifySwap::kAll;
    return config;
  }

  Scratch scratch_;
};
INSTANTIATE_TEST_SUITE_P(Cells, ReorderTest, ::testing::ValuesIn(Cells()), NameOfCell);

TEST_P(ReorderTest, GoesOnAsAnEngineThatWasCreatedSo) {
  int at = 0;
  for (const Order& order : {Shuffled(), Nested(), Repeated()}) {
    Setting setting = GetParam().setting;
    setting.timing = kTimings[(at + setting.stage) % 3];
    Config config = ConfigOf(setting);
    config.gradient_accumulation_steps = 1 + at % 2;
    config.ebb.prefetch_depth = at;
    ++at;
    SCOPED_TRACE(::testing::Message() << setting << ", " << order.name);
    const Order before = AsScripted();
    std::vector<Saved> saved(static_cast<size_t>(setting.world));
    RunOn(setting, before.model, config, [&](Engine& engine, ScriptedTrainer& trainer) {
      for (const int64_t number : {0, 1}) ASSERT_OK(Train(engine, before, trainer, number));
      ASSERT_OK_AND_ASSIGN(saved[static_cast<size_t>(trainer.rank())], Save(engine, before.model));
    });
    const std::vector<Ended> created =
        EndOf(setting, config, order, order, [&](Engine& engine, ScriptedTrainer& trainer) {
          return Load(engine, saved[static_cast<size_t>(trainer.rank())]);
        });
    // Updates that the second step has left to the third are done on the way.
    const std::vector<Ended> reordered =
        EndOf(setting, config, before, order,
              [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
                for (const int64_t number : {0, 1})
                  EBB_RETURN_IF_ERROR(Train(engine, before, trainer, number));
                EBB_RETURN_IF_ERROR(Reorder(engine, order));
                EBB_ASSIGN_OR_RETURN(const StepReport report, engine.Report());
                EXPECT_EQ(report.step, 2);
                return absl::OkStatus();
              });
    ExpectSame(created, reordered);
  }
}

TEST_P(ReorderTest, ReorderingAndBackChangesNothing) {
  const Setting setting = GetParam().setting;
  const Config config = ConfigOf(setting);
  const Order order = AsScripted();
  const auto run = [&](bool reorders) {
    return EndOf(setting, config, order, order,
                 [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
                   for (const int64_t number : {0, 1})
                     EBB_RETURN_IF_ERROR(Train(engine, order, trainer, number));
                   if (!reorders) return absl::OkStatus();
                   EBB_RETURN_IF_ERROR(Reorder(engine, Nested()));
                   EBB_RETURN_IF_ERROR(Reorder(engine, Repeated()));
                   return Reorder(engine, order);
                 });
  };
  ExpectSame(run(false), run(true));
}

// None of them changes anything: the next step is the same as without them.
TEST_P(ReorderTest, AnOrderThatIsRefusedLeavesTheEngineAsItWas) {
  const Setting setting = GetParam().setting;
  const Config config = ConfigOf(setting);
  const Order order = AsScripted();
  const auto refused = [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
    const auto expect = [](const absl::Status& status, absl::StatusCode code,
                           std::string_view why) {
      EXPECT_THAT(status, StatusIs(code, std::string(why)));
    };
    std::vector<Visit> missing = order.model.forward;
    missing.erase(missing.begin() + 3);
    expect(engine.Reorder(missing), absl::StatusCode::kInvalidArgument, "u3");
    // The order of one rank is wrong, and all ranks get its error.
    Order wrong = Nested();
    if (trainer.rank() == setting.world - 1) wrong.model.order.pop_back();
    expect(Reorder(engine, wrong), absl::StatusCode::kInvalidArgument, "u0");
    if (setting.world > 1) {
      expect(Reorder(engine, trainer.rank() == 0 ? Shuffled() : order),
             absl::StatusCode::kFailedPrecondition,
             "Reorder: the order of rank 1 differs from rank 0's: first at visit 0 (unit 'u3') on "
             "rank 0 and visit 0 (unit 'u0') on rank 1");
      expect(Reorder(engine, trainer.rank() == 0 ? Shuffled() : Nested()),
             absl::StatusCode::kFailedPrecondition,
             "first at the number of visits (6) on rank 0 and the number of visits (5) on rank 1");
    }
    return absl::OkStatus();
  };
  const auto run = [&](bool asks) {
    return EndOf(setting, config, order, order,
                 [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
                   for (const int64_t number : {0, 1})
                     EBB_RETURN_IF_ERROR(Train(engine, order, trainer, number));
                   return asks ? refused(engine, trainer) : absl::OkStatus();
                 });
  };
  ExpectSame(run(false), run(true));
}

TEST(ReorderCallTest, OrdersThatDifferInAnEventSaySo) {
  const Order order = Nested();
  RunOn(kTwoRanks, order.model, ConfigFor(kTwoRanks),
        [&](Engine& engine, ScriptedTrainer& trainer) {
          std::vector<ScopeEvent> events = order.model.order;
          if (trainer.rank() == 1) {  // the recompute of visit 4 is left out
            events.erase(events.begin() + 11, events.begin() + 13);
          }
          const absl::Status status = engine.Reorder(order.model.forward, events);
          EXPECT_THAT(status, Says("first at event 11 (Recompute of unit 'u1' opens) on rank 0 and "
                                   "event 11 (Backward of unit 'u1' opens) on rank 1"));
          ASSERT_OK(Train(engine, order, trainer, 0));
        });
}

TEST(ReorderCallTest, BelongsBetweenSteps) {
  RunOn(kTwoRanks, ScriptedModel(), ConfigFor(kTwoRanks),
        [&](Engine& engine, ScriptedTrainer& trainer) {
          const auto expect_refused = [&](std::string_view why) {
            const absl::Status status = Reorder(engine, Shuffled());
            EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition, std::string(why)));
          };
          trainer.BeginStep(0, nullptr);
          Step step = engine.BeginStep(kExactStep);
          expect_refused("Reorder while a Step or Evaluation of the engine is alive");
          trainer.Round(step);
          ASSERT_OK(FinishAndReport(engine, step));
          ASSERT_OK(engine.Suspend());
          expect_refused("Reorder of a suspended engine: call Resume first");
          ASSERT_OK(engine.Resume());
          ASSERT_OK(TrainStep(engine, trainer, 1));
        });
}

TEST(ReorderCallTest, RanksThatMakeAnotherCallGetAnError) {
  const absl::Status status =
      RunEngines(kTwoRanks, ScriptedModel(), ConfigFor(kTwoRanks),
                 [&](Engine& engine, ScriptedTrainer& trainer) {
                   return trainer.rank() == 0 ? Reorder(engine, Shuffled()) : engine.Suspend();
                 });
  EXPECT_THAT(status, Says("rank 0 calls Reorder, rank 1 calls Suspend"));
}

TEST(ReorderCallTest, ReportAndCountsAreOfTheLastStepUntilTheNext) {
  RunOn(kTwoRanks, ScriptedModel(), ConfigFor(kTwoRanks),
        [&](Engine& engine, ScriptedTrainer& trainer) {
          ASSERT_OK(Train(engine, AsScripted(), trainer, 0));
          ASSERT_OK_AND_ASSIGN(const StepReport report, engine.Report());
          const auto gathered = [&] {
            const CommunicationRow row = engine.communication().front();
            EXPECT_EQ(row.bytes, row.predicted_bytes);
            return row.bytes;
          };
          const uint64_t before = gathered();
          EXPECT_GT(before, 0u);
          ASSERT_OK(Reorder(engine, Nested()));
          EXPECT_EQ(gathered(), before);
          ASSERT_OK_AND_ASSIGN(const StepReport after, engine.Report());
          EXPECT_EQ(after.step, report.step);
          ASSERT_OK(Train(engine, Nested(), trainer, 1));
          ASSERT_OK(engine.Report().status());
          EXPECT_NE(gathered(), before);
        });
}

TEST(ReorderCallTest, EarlierWritesAreSeenAfterIt) {
  RunOn(kTwoRanks, ScriptedModel(), ConfigFor(kTwoRanks),
        [&](Engine& engine, ScriptedTrainer& trainer) {
          ASSERT_OK(engine.Write(StateClass::kParameter, Constant(2.5f)));
          const Order order = Shuffled();
          ASSERT_OK(Reorder(engine, order));
          ParameterValues shown;
          for (const ParameterSpec& parameter : order.model.parameters)
            shown.emplace_back(static_cast<size_t>(Elements(parameter.shape)), 2.5f);
          ASSERT_OK(Train(engine, order, trainer, 0, &shown));
        });
}

// Each visit of an evaluation reads what the one before has written, and writes elsewhere.
TEST(ReorderCallTest, EvaluationsHandOnOutputsInTheNewOrder) {
  ModelSpec model;
  for (const char* name : {"a", "b", "c"}) {
    const UnitId unit = model.AddUnit(name);
    model.Add(unit, {.name = name, .shape = {16}, .init = Constant(1), .trainable = false});
    model.forward.push_back({.unit = unit, .output_bytes = 64});
  }
  Config config;
  config.micro_batch_size = 1;
  ASSERT_OK_AND_ASSIGN(Engine engine,
                       Engine::Create(World::Single(), Device::Cpu(1), model, config));
  const auto evaluate = [&](const std::vector<Visit>& forward) {
    Evaluation evaluation = engine.BeginEvaluation(1);
    for (size_t v = 0; v < forward.size(); ++v) {
      ForwardScope scope = evaluation.Forward(forward[v].unit);
      if (v > 0) {
        EXPECT_EQ(scope.input(0).as<float>()[0], static_cast<float>(v)) << v;
      }
      if (v + 1 < forward.size()) scope.output(0).as<float>()[0] = static_cast<float>(v + 1);
      if (v > 0) {
        EXPECT_EQ(scope.input(0).as<float>()[0], static_cast<float>(v)) << v;
      }
    }
    EXPECT_OK(evaluation.Finish());
  };
  evaluate(model.forward);
  const Visit a{.unit = UnitId{0}, .output_bytes = 64}, b{.unit = UnitId{1}, .output_bytes = 64},
      c{.unit = UnitId{2}, .output_bytes = 64};
  const std::vector<Visit> longer = {a, b, a, b, c};
  ASSERT_OK(engine.Reorder(longer));
  evaluate(longer);
}

TEST(ReorderCallTest, HeldMemoryStaysAndViewsAreOfTheNewPools) {
  RunOn(kTwoRanks, ScriptedModel(), ConfigFor(kTwoRanks),
        [&](Engine& engine, ScriptedTrainer& trainer) {
          const std::shared_ptr<void> held = engine.HoldMemory();
          const std::vector<ParameterView> before = engine.Views(UnitId{0});
          ASSERT_OK(Reorder(engine, Nested()));
          for (const ParameterView& view : before) {  // still memory
            volatile const float* const first = static_cast<const float*>(view.value.data);
            [[maybe_unused]] const float read = *first;
          }
          const std::vector<ParameterView> after = engine.Views(UnitId{0});
          trainer.BeginStep(0, nullptr);
          Step step = engine.BeginStep(kExactStep);
          const ForwardScope scope = step.Forward(UnitId{0});
          for (const ParameterView& view : after)
            EXPECT_EQ(scope.parameter(view.parameter).data, view.value.data);
        });
}

// Boundaries and gradients that live on the disk behind the states, where more of them comes to the
// file.
class ReorderOnDiskTest : public ::testing::Test {
 protected:
  const Scratch scratch_;
  const Config config_ = WithAllOnDisk(kTwoRanks, scratch_.path());
};

TEST_F(ReorderOnDiskTest, FilesGrow) {
  const Order small = AsScripted(kBoundaryBytes), large = Shuffled(4096 * kBoundaryBytes);
  const auto run = [&](bool reorders) {
    return EndOf(kTwoRanks, config_, reorders ? small : large, large,
                 [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
                   for (const int64_t number : {0, 1})
                     EBB_RETURN_IF_ERROR(Train(engine, reorders ? small : large, trainer, number));
                   return reorders ? Reorder(engine, large) : absl::OkStatus();
                 });
  };
  ExpectSame(run(false), run(true));
}

// The length of rank 0's file of states.
int64_t BytesOnDisk() {
  const MadeFiles& files = MadeFiles::OfProcess();
  return files.StatOf(files.Find("", "(states of engine-rank0)")).st_size;
}

TEST_F(ReorderOnDiskTest, FilesAreAsLongAsTheOrderNeeds) {
  const Order small = AsScripted(kBoundaryBytes), large = Shuffled(4096 * kBoundaryBytes);
  MadeFiles::Watch();
  RunOn(kTwoRanks, small.model, config_, [&](Engine& engine, ScriptedTrainer& trainer) {
    ASSERT_OK(engine.Agree(absl::OkStatus()));
    const int64_t before = BytesOnDisk();
    ASSERT_OK(Train(engine, small, trainer, 0));
    ASSERT_OK(Reorder(engine, large));
    EXPECT_GT(BytesOnDisk(), before);
    ASSERT_OK(Train(engine, large, trainer, 1));
    ASSERT_OK(Reorder(engine, small));
    EXPECT_EQ(BytesOnDisk(), before);
    ASSERT_OK(Train(engine, small, trainer, 2));
    ASSERT_OK(engine.Report().status());
    ASSERT_OK(engine.Agree(absl::OkStatus()));
  });
}

TEST_F(ReorderOnDiskTest, FilesAreCountedOnce) {
  const Order before = AsScripted(kBoundaryBytes), order = Shuffled(kBoundaryBytes);
  RunOn(kTwoRanks, before.model, config_, [&](Engine& engine, ScriptedTrainer&) {
    ASSERT_OK(Reorder(engine, order));
    for (const MemoryRow& row : engine.memory()) {
      if (row.tier == Tier::kNvme) {
        EXPECT_EQ(row.peak_bytes, row.current_bytes) << Name(row.state);
      }
    }
  });
}

TEST_F(ReorderOnDiskTest, ReadsBesideStepsEndBeforeItAndGoOnAfterIt) {
  const Order before = AsScripted(kBoundaryBytes), order = Shuffled(kBoundaryBytes);
  RunOn(kTwoRanks, before.model, config_, [&](Engine& engine, ScriptedTrainer& trainer) {
    using Values = std::map<std::pair<std::string, int>, std::vector<float>>;
    const auto read = [&](Values& values) {
      StateReader reader;
      reader.take = [&values](StateClass what, std::string_view state, const Slice& slice,
                              std::span<const float> of) {
        std::vector<float>& all = values[{absl::StrCat(static_cast<int>(what), std::string(state)),
                                          static_cast<int>(slice.parameter)}];
        all.insert(all.end(), of.begin(), of.end());
        return absl::OkStatus();
      };
      return engine.ReadAsync(std::move(reader));
    };
    ASSERT_OK(Train(engine, before, trainer, 0));
    Values first, second;
    ASSERT_OK_AND_ASSIGN(const std::shared_future<absl::Status> first_over, read(first));
    ASSERT_OK(Reorder(engine, order));
    EXPECT_FALSE(engine.IsReadingAsync());
    ASSERT_OK(first_over.get());
    EXPECT_EQ(engine.StateSlices().front().parameter, order.model[UnitId{3}].parameters[0]);
    ASSERT_OK_AND_ASSIGN(const std::shared_future<absl::Status> second_over, read(second));
    ASSERT_OK(Train(engine, order, trainer, 1));
    ASSERT_OK(second_over.get());
    EXPECT_EQ(first, second);
    ASSERT_OK(engine.Report().status());
  });
}

// Spans are written when the engine ends.
TEST(ReorderCallTest, TheTimelineNamesTheUnitsOfEveryOrder) {
  const Scratch scratch;
  Config config = ConfigFor(kTwoRanks);
  config.ebb.trace = scratch.path() + "/trace.json";
  ModelSpec model = ScriptedModel();
  for (UnitSpec& unit : model.units)  // too long to lie in a string itself
    unit.name = absl::StrCat("a unit with a long name, ", unit.name);
  std::set<std::string> named;
  RunOn(kTwoRanks, model, config, [&](Engine& engine, ScriptedTrainer& trainer) {
    const Order before = AsScripted(), order = Nested();
    ASSERT_OK(Train(engine, before, trainer, 0));
    ASSERT_OK(Reorder(engine, order));
    ASSERT_OK(Train(engine, order, trainer, 1));
    ASSERT_OK(engine.Report().status());
  });
  ASSERT_OK_AND_ASSIGN(const TraceTracks tracks, ReadTraceEvents(config.ebb.trace));
  for (const auto& [at, track] : tracks) {
    for (const TraceSpan& span : track.spans)
      if (span.name.starts_with("gather ")) named.insert(span.name.substr(7));
  }
  std::set<std::string> units;
  for (const UnitSpec& unit : model.units) units.insert(unit.name);
  EXPECT_EQ(named, units);
}

// ZeRO++'s hpZ, and shards that are repeated over groups of ranks.
TEST(ReorderOfFourRanksTest, GoesOnAsAnEngineThatWasCreatedSo) {
  for (const bool secondary : {false, true}) {
    const Setting setting{.world = 4, .stage = 3};
    Config config = ConfigFor(setting);
    if (secondary) config.zero.hpz_partition_size = 2;
    if (!secondary) config.ebb.shard_group = 2;
    config.ebb.deterministic_reduce = true;
    config.gradient_accumulation_steps = 2;
    const Order before = AsScripted();
    for (const Order& order : {Shuffled(), Repeated()}) {
      const auto run = [&](bool reorders) {
        const Order& created = reorders ? before : order;
        return EndOf(setting, config, created, order,
                     [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
                       EBB_RETURN_IF_ERROR(Evaluate(engine, created, trainer));
                       return reorders ? Reorder(engine, order) : absl::OkStatus();
                     });
      };
      SCOPED_TRACE(order.name);
      ExpectSame(run(false), run(true));
    }
  }
}

// States keep their part of ebb.host_memory, and other slots get the rest.
TEST(ReorderOnDiskBudgetTest, StatesStayInTheHostMemoryThatTheyHave) {
  Scratch scratch;
  const Setting setting{.world = 2, .stage = 3, .timing = Timing::kEarly};
  Config config = OnNvme(ConfigFor(setting), scratch.path());
  config.ebb.host_memory = 256 << 10;
  const Order before = AsScripted(), order = Shuffled();
  RunOn(setting, before.model, config, [&](Engine& engine, ScriptedTrainer& trainer) {
    ASSERT_OK(Train(engine, before, trainer, 0));
    const auto on_host = [&] {
      uint64_t bytes = 0;
      for (const MemoryRow& row : engine.memory())
        if (row.tier == Tier::kCpu && row.state == StateClass::kOptimizer)
          bytes = row.current_bytes;
      return bytes;
    };
    const uint64_t states = on_host();
    ASSERT_OK(Reorder(engine, order));
    EXPECT_EQ(on_host(), states);
    ASSERT_OK(Train(engine, order, trainer, 1));
  });
}

}  // namespace
}  // namespace ebb::testing::reorder_test
