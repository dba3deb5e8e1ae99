// The spans of a traced run: every operation of the plan on its stream, and none before its waits
// have ended. Without a clock: backward overlaps reductions, and the next forward overlaps updates.
#include "ebb/runtime/trace/timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/engine/issue/profiler_ranges.h"
#include "ebb/sharding/plan.h"
#include "tests/engine/plan_spans.h"
#include "tests/engine/scripted.h"
#include "tests/engine/watched_world.h"
#include "tests/offload/gate.h"
#include "tests/offload/scratch.h"
#include "tests/offload/test_overrides.h"
#include "tests/ranks.h"
#include "tests/status.h"
#include "tests/trace/trace_events.h"

namespace ebb::testing {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;

constexpr int kSteps = 3;

class TimelineTest : public ::testing::TestWithParam<Setting> {
 protected:
  void TearDown() override { unlink(path_.c_str()); }

  const std::string path_ = absl::StrCat(::testing::TempDir(), "engine_timeline_test.", getpid(),
                                         ".", GetParam().world, ".", GetParam().stage, ".json");
};
INSTANTIATE_TEST_SUITE_P(Cells, TimelineTest,
                         ::testing::ValuesIn(WorldsAndStages({.world = 3, .stage = 2})), NameOf);

// A reduction begins after its backward scope has been closed, a scope after its gather has ended.
void ExpectScopes(const sharding::Plan& plan, const StepSpans& spans, const TraceTrack& compute,
                  int64_t step) {
  std::vector<const TraceSpan*> scopes;
  for (const TraceSpan& span : compute.spans) {
    if (span.step == step && span.category != "wait") scopes.push_back(&span);
  }
  ASSERT_EQ(scopes.size(), plan.scopes.size());
  for (size_t s = 0; s < scopes.size(); ++s) {
    const std::string unit = plan.unit_names[static_cast<size_t>(plan.scopes[s].unit)];
    EXPECT_EQ(scopes[s]->name,
              absl::StrCat(plan.scopes[s].backward ? "backward " : "forward ", unit));
    for (const sharding::Op& op : plan.ops) {
      if (op.role != sharding::Role::kReduce) continue;
      for (const sharding::Part& part : op.parts) {
        if (part.scope != static_cast<int>(s)) continue;
        EXPECT_GE(spans[static_cast<size_t>(op.number)]->begin_ns, scopes[s]->end_ns);
      }
    }
    if (const int gather = plan.gather_of_scope[s]; gather >= 0) {
      EXPECT_GE(scopes[s]->begin_ns, spans[static_cast<size_t>(gather)]->end_ns);
    }
  }
}

// Trains with a timeline, and compares that with the plan.
void ExpectEveryOperation(const Setting& setting, Config config, const std::string& path) {
  config.ebb.trace = path;
  sharding::Plan plan;
  const absl::Status status =
      RunEngines(setting, ScriptedModel(), config,
                 [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
                   if (trainer.rank() == 0) plan = engine.program().plan();
                   for (int s = 0; s < kSteps; ++s) {
                     trainer.BeginStep(s, nullptr);
                     Step step = engine.BeginStep();
                     trainer.Round(step);
                     if (absl::Status finished = step.Finish(); !finished.ok()) return finished;
                   }
                   return absl::OkStatus();
                 });
  ASSERT_OK(status);
  ASSERT_OK_AND_ASSIGN(const TraceTracks tracks, ReadTraceEvents(path));
  for (int rank = 0; rank < setting.world; ++rank) {
    StepSpans before;
    for (int64_t step = 1; step <= kSteps; ++step) {
      SCOPED_TRACE(::testing::Message() << "rank " << rank << ", step " << step);
      const StepSpans spans = Match(plan, tracks, rank, step);
      ExpectOrder(plan, spans, before.empty() ? nullptr : &before);
      ExpectScopes(plan, spans, tracks.at({rank, 0}), step);
      before = spans;
      if (::testing::Test::HasFailure()) return;
    }
  }
}

TEST_P(TimelineTest, ShowsEveryOperationOnItsStreamInOrder) {
  for (const Setting& setting : At(GetParam(), kTimings)) {
    for (const int64_t coalesce : {0, 1200}) {
      SCOPED_TRACE(::testing::Message() << setting << ", coalesce_bytes " << coalesce);
      Config config = ConfigFor(setting);
      config.ebb.coalesce_bytes = coalesce;
      ExpectEveryOperation(setting, config, path_);
    }
  }
}

class SecondaryTimelineTest : public TimelineTest {};
INSTANTIATE_TEST_SUITE_P(Cells, SecondaryTimelineTest,
                         ::testing::Values(Setting{.world = 4, .stage = 3}), NameOf);

TEST_P(SecondaryTimelineTest, ShowsFillsAndGathersFromThem) {
  Config config = ConfigFor(GetParam());
  config.zero.hpz_partition_size = 2;
  ExpectEveryOperation(GetParam(), config, path_);
}

// Steps have the numbers of their reports, evaluations numbers of their own; a step that was
// dropped or has failed leaves its number to the next one. An evaluation that is not to be traced
// is not there.
TEST_P(TimelineTest, EvaluationsAreNamedAndAreNoSteps) {
  const ModelSpec model = ScriptedModel();
  Config config = ConfigFor(GetParam());
  config.ebb.trace = path_;
  const absl::Status status = RunEngines(
      GetParam(), model, config, [&](Engine& engine, ScriptedTrainer& trainer) -> absl::Status {
        const auto train = [&](int64_t expected) -> absl::Status {
          Step step = engine.BeginStep();
          trainer.Round(step);
          if (absl::Status finished = step.Finish(); !finished.ok()) return finished;
          const absl::StatusOr<StepReport> report = engine.Report();
          if (!report.ok()) return report.status();
          EXPECT_EQ(report->step, expected);
          return absl::OkStatus();
        };
        const auto evaluate = [&](EvaluationOptions options) {
          Evaluation evaluation = engine.BeginEvaluation(1, options);
          for (const int unit : kScriptedUnits) evaluation.Forward(UnitId{unit});
          return evaluation.Finish().status();
        };
        if (absl::Status failed = train(1); !failed.ok()) return failed;
        if (absl::Status failed = evaluate({}); !failed.ok()) return failed;
        if (absl::Status failed = evaluate({.traced = false}); !failed.ok()) return failed;
        engine.BeginStep({.hold_updates = true});        // dropped
        EXPECT_FALSE(engine.BeginStep().Finish().ok());  // no Backward
        if (absl::Status failed = train(2); !failed.ok()) return failed;
        return evaluate({});
      });
  ASSERT_OK(status);
  ASSERT_OK_AND_ASSIGN(const TraceTracks tracks, ReadTraceEvents(path_));
  std::map<int64_t, int> forwards;  // by evaluation
  std::set<int64_t> steps;
  for (const auto& [id, track] : tracks) {
    for (const TraceSpan& span : track.spans) {
      EXPECT_EQ(span.name.starts_with("evaluation: "), span.evaluation > 0) << span.name;
      if (span.evaluation == 0) steps.insert(span.step);
      if (id.first == 0 && span.evaluation > 0 && span.category == "forward")
        ++forwards[span.evaluation];
    }
  }
  EXPECT_EQ(steps, (std::set<int64_t>{1, 2}));
  EXPECT_EQ(forwards, (std::map<int64_t, int>{{1, kScriptedVisits}, {2, kScriptedVisits}}));
}

// Waits for what another thread does meanwhile; a run in which it never does ends all the same.
bool Comes(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

TEST_P(TimelineTest, ReductionsRunWhileALaterBackwardIsOpen) {
  if (GetParam().world == 1) GTEST_SKIP() << "one rank's gradients lie in their shards";
  const ModelSpec model = ScriptedModel();
  for (const Setting& setting : At(GetParam(), kTimings)) {
    SCOPED_TRACE(::testing::Message() << setting);
    OnThreads(setting.world, [&](World world) -> absl::Status {
      const auto calls = std::make_shared<WatchedCalls>();
      absl::StatusOr<Engine> engine =
          Engine::Create(Watch(world, calls), Device::Cpu(), model, ConfigFor(setting));
      if (!engine.ok()) return engine.status();
      ScriptedTrainer trainer(model, world.rank());
      Step step = engine->BeginStep();
      trainer.ForwardAll(step);
      int closed = 0;  // trainable
      for (int visit = kScriptedVisits - 1; visit >= 0; --visit) {
        BackwardScope scope = step.Backward(UnitId{kScriptedUnits[visit]});
        trainer.Add(scope, visit);
        EXPECT_TRUE(Comes([&] { return calls->reductions_run.load() >= closed; }))
            << "in the backward of visit " << visit;
        closed += visit == 2 ? 0 : 1;
      }
      return step.Finish();
    });
  }
}

// An update that waits for the next forward to begin: if Finish or that forward waited for it, it
// would wait for ever.
TEST_P(TimelineTest, TheNextForwardRunsWhileUpdatesDo) {
  const ModelSpec model = ScriptedModel();
  Setting setting = GetParam();
  setting.timing = Timing::kLate;
  std::vector<std::atomic<bool>> begun(static_cast<size_t>(setting.world));
  std::vector<int> overlapped(begun.size());
  OnThreads(setting.world, [&](World world) -> absl::Status {
    const size_t rank = static_cast<size_t>(world.rank());
    const auto update = [&, rank](const UpdateSlice& slice) {
      if (slice.step == 1 && slice.slice.name == "w4")  // of the last unit
        overlapped[rank] = Comes([&] { return begun[rank].load(); }) ? 1 : -1;
      return absl::OkStatus();
    };
    absl::StatusOr<Engine> engine =
        Engine::Create(world, Device::Cpu(), model, ConfigFor(setting),
                       {.optimizer = OptimizerSpec{.states = {}, .update = update}});
    if (!engine.ok()) return engine.status();
    ScriptedTrainer trainer(model, world.rank());
    for (int s = 0; s < 2; ++s) {
      Step step = engine->BeginStep();
      ForwardScope first = step.Forward(UnitId{0});
      if (s == 1) begun[rank] = true;
      first.Close();
      for (int visit = 1; visit < kScriptedVisits; ++visit)
        trainer.Forward(step, kScriptedUnits[visit]);
      trainer.BackwardAll(step);
      if (absl::Status finished = step.Finish(); !finished.ok()) return finished;
    }
    return absl::OkStatus();
  });
  for (const int rank : overlapped) EXPECT_EQ(rank, 1);
}

struct Offloaded {
  Timing timing;
  bool parameters;  // on NVMe as well as states
  // Units with this part of their update held back: of the writes the first, as those behind it are
  // shown from its end on.
  int written = 0, updated = 3, read = 0;
};

// The spans of this name in a step of a single rank: there is one at least.
std::vector<TraceSpan> Named(const TraceTracks& tracks, sharding::StreamId stream,
                             const std::string& name, int64_t step) {
  std::vector<TraceSpan> named;
  for (const TraceSpan& span : tracks.at({0, static_cast<int>(stream)}).spans) {
    if (span.name == name && span.step == step) named.push_back(span);
  }
  EXPECT_FALSE(named.empty()) << name << " is not in step " << step;
  return named.empty() ? std::vector<TraceSpan>(1) : named;
}

// The disk writes slowly for one update and reads slowly for another, and an update between them is
// slow. Scopes open and close meanwhile.
TEST(OffloadedTimeline, ReadsUpdatesAndWritesOverlapEachOtherAndCompute) {
  const ModelSpec model = ScriptedModel();
  for (const Offloaded& offloaded : {Offloaded{Timing::kLate, false, 0, 3, 4},
                                     {Timing::kLate, true, 0, 3, 4},
                                     {Timing::kEarly, false, 4, 3, 1}}) {
    const bool late = offloaded.timing == Timing::kLate;
    SCOPED_TRACE(::testing::Message() << (late ? "late" : "early") << ", "
                                      << (offloaded.parameters ? "all" : "states") << " on NVMe");
    const Scratch scratch;
    const std::string path = scratch.path() + "/timeline.json";
    Config config =
        OnNvme(ConfigFor({.world = 1, .stage = 3, .timing = offloaded.timing}), scratch.path());
    if (!offloaded.parameters) config.zero.offload_param = {};
    config.aio.queue_depth = 64;  // held requests leave room for all others
    config.ebb.trace = path;

    std::mutex mutex;
    // Writes (true) and reads, by their place in the file of states.
    std::set<std::pair<bool, int64_t>> held;
    Gate gate([&](const IoRequest& request) {
      const std::lock_guard lock(mutex);
      return held.contains({request.write, request.offset});
    });
    TestOverrides().wrap_queue = [&](std::string_view, std::string_view file) {
      return file == "states" ? gate.Before() : Gate::WrapQueue();
    };
    std::atomic<bool> updating = false, released = false;
    const auto update = [&](const UpdateSlice& slice) {
      if (slice.slice.name == absl::StrCat("w", offloaded.updated)) {
        updating = true;
        Comes([&] { return released.load(); });
      }
      return absl::OkStatus();
    };
    const auto release = [&] {
      released = true;
      gate.Open();
    };
    const absl::Status status = RunThreads(1, [&](World world) -> absl::Status {
      absl::StatusOr<Engine> engine =
          Engine::Create(world, Device::Cpu(), model, config,
                         {.optimizer = OptimizerSpec{.states = {"momentum"}, .update = update}});
      if (!engine.ok()) return engine.status();
      for (const sharding::Op& operation : engine->program().plan().ops) {
        if (operation.moves().empty()) continue;
        const bool write = operation.role == sharding::Role::kWrite;
        // Reads of gathers and writes of gradient sums are left out.
        const StateClass state = operation.moves().front().state;
        if (write ? state == StateClass::kGradient
                  : operation.stream == sharding::StreamId::kReadParameters &&
                        state != StateClass::kMaster)
          continue;
        if (!write && operation.role != sharding::Role::kRead) continue;
        if (operation.parts[0].unit != (write ? offloaded.written : offloaded.read)) continue;
        const std::lock_guard lock(mutex);
        for (const sharding::Move move : operation.moves()) {
          if (move.state != StateClass::kParameter)
            held.emplace(write, write ? move.to.offset : move.from.offset);
        }
      }
      const auto all_under_way = [&] {
        return updating.load() && gate.held_reads() > 0 && gate.held_writes() > 0;
      };
      ScriptedTrainer trainer(model, 0);
      for (int s = 0; s < 2; ++s) {
        Step step = engine->BeginStep();
        for (int visit = 0; visit < kScriptedVisits; ++visit) {
          const ForwardScope scope = step.Forward(UnitId{kScriptedUnits[visit]});
          if (!late || s == 0) continue;
          if (visit == 0) {
            EXPECT_TRUE(Comes(all_under_way));
          }
          if (visit == 2) release();
        }
        for (int visit = kScriptedVisits - 1; visit >= 0; --visit) {
          BackwardScope scope = step.Backward(UnitId{kScriptedUnits[visit]});
          trainer.Add(scope, visit);
          if (late || s == 1 || visit > 0) continue;
          EXPECT_TRUE(Comes(all_under_way));
          release();
        }
        const absl::Status finished = step.Finish();
        if (s == 1 || !finished.ok()) release();  // at the latest: else the engine would not go
        if (!finished.ok()) return finished;
      }
      return absl::OkStatus();
    });
    TestOverrides() = {};
    ASSERT_OK(status);

    ASSERT_OK_AND_ASSIGN(const TraceTracks tracks, ReadTraceEvents(path));
    using sharding::StreamId;
    const int64_t step = offloaded.parameters ? 2 : 1;  // the first one's updates run in the next
    const TraceSpan parts[] = {
        Named(tracks, StreamId::kWrite, absl::StrCat("write u", offloaded.written), step).front(),
        Named(tracks, StreamId::kHostUpdate, absl::StrCat("update u", offloaded.updated), step)
            .front(),
        Named(tracks, StreamId::kReadStates, absl::StrCat("read u", offloaded.read), step).front()};
    int64_t from = INT64_MIN, to = INT64_MAX;  // when all of them were under way
    for (const TraceSpan& part : parts) {
      from = std::max(from, part.begin_ns);
      to = std::min(to, part.end_ns);
    }
    EXPECT_LT(from, to);
    if (late) {  // a whole scope meanwhile
      const TraceSpan scope = Named(tracks, StreamId::kCompute, "forward u1", 2).front();
      EXPECT_LE(from, scope.begin_ns);
      EXPECT_LE(scope.end_ns, to);
    } else {
      const TraceSpan scope = Named(tracks, StreamId::kCompute, "backward u0", 1).back();
      EXPECT_LT(from, scope.end_ns);
      EXPECT_LT(scope.begin_ns, to);
    }
  }
}

TEST_P(TimelineTest, TheLedgerPeaksAtThePrediction) {
  const ModelSpec model = ScriptedModel(/*boundary_bytes=*/40);
  for (const Setting& setting : At(GetParam(), kTimings)) {
    const Config config = ConfigFor(setting);
    const absl::StatusOr<std::vector<MemoryRow>> predicted =
        PredictMemory(model, setting.world, config);
    ASSERT_OK(predicted);
    const absl::Status status =
        RunEngines(setting, model, config, [&](Engine& engine, ScriptedTrainer& trainer) {
          Step step = engine.BeginStep();
          trainer.Round(step);
          const absl::Status finished = step.Finish();
          const std::vector<MemoryRow> rows = engine.memory();
          EXPECT_EQ(rows.size(), predicted->size());
          for (size_t i = 0; i < std::min(rows.size(), predicted->size()); ++i) {
            SCOPED_TRACE(::testing::Message()
                         << setting << ", " << std::string(Name(rows[i].state)));
            EXPECT_EQ(rows[i].state, (*predicted)[i].state);
            EXPECT_EQ(rows[i].predicted_bytes, (*predicted)[i].predicted_bytes);
            EXPECT_EQ(rows[i].peak_bytes, rows[i].predicted_bytes);
            EXPECT_EQ(rows[i].current_bytes, rows[i].predicted_bytes);
          }
          return finished;
        });
    EXPECT_OK(status);
  }
}

// A profiler's view of an engine's calls: ranges that nest, named by operation, scope and unit.

// "forward u0 > gather u1": the ranges that are open whenever one begins.
struct Shown {
  std::vector<std::string> open, paths;
  int depth_wrong = 0;
} shown;

constexpr profiler::Sink kSink = {
    .push =
        [](const char* name) {
          shown.open.push_back(shown.open.empty() ? name
                                                  : absl::StrCat(shown.open.back(), " > ", name));
          shown.paths.push_back(shown.open.back());
        },
    .pop =
        [] {
          shown.depth_wrong += shown.open.empty() ? 1 : 0;
          if (!shown.open.empty()) shown.open.pop_back();
        }};

class ProfilerRangesTest : public ::testing::Test {
 protected:
  ProfilerRangesTest() {
    shown = {};
    profiler::SetSink(&kSink);
  }
  ~ProfilerRangesTest() override { profiler::SetSink(nullptr); }
};

TEST_F(ProfilerRangesTest, ScopesThatAreClosedInAnotherOrderNestAllTheSame) {
  const std::vector<std::string> units = {"a", "b"};
  ProfilerRanges ranges(units);
  ranges.Open(1, sharding::ScopeKind::kForward, 0);
  ranges.Open(2, sharding::ScopeKind::kBackward, 1);
  ranges.Close(1);
  EXPECT_THAT(shown.open, ElementsAre("forward a", "forward a > backward b"));
  ranges.Close(2);
  EXPECT_TRUE(shown.open.empty());
  EXPECT_EQ(shown.depth_wrong, 0);
}

// Each thread has its own ranges.
TEST_F(ProfilerRangesTest, AScopeThatAnotherThreadClosesEndsWithTheNextCallOfItsOwn) {
  const std::vector<std::string> units = {"a"};
  ProfilerRanges ranges(units);
  ranges.Open(1, sharding::ScopeKind::kForward, 0);
  std::thread([&] { ranges.Close(1); }).join();
  EXPECT_THAT(shown.open, ElementsAre("forward a"));
  ranges.Open(2, sharding::ScopeKind::kBackward, 0);
  EXPECT_THAT(shown.open, ElementsAre("backward a"));
  ranges.Close(2);
  EXPECT_TRUE(shown.open.empty());
}

TEST_F(ProfilerRangesTest, AStepShowsEachScopeAndItsOperations) {
  const Setting setting{.world = 1, .stage = 2};
  const ModelSpec model = ScriptedModel();
  absl::StatusOr<Engine> engine =
      Engine::Create(World::Single(), Device::Cpu(1), model, ConfigFor(setting));
  ASSERT_OK(engine);
  const ScriptedTrainer trainer(model, /*rank=*/0);
  shown = {};
  Step step = engine->BeginStep();
  trainer.Round(step);
  ASSERT_OK(step.Finish());
  EXPECT_TRUE(shown.open.empty());
  EXPECT_EQ(shown.depth_wrong, 0);
  for (const char* path : {"forward u0", "backward u4", "backward u4 > reduce u4",
                           "backward u4 > norm u4", "exchange", "update u1"})
    EXPECT_THAT(shown.paths, Contains(path));
}

}  // namespace
}  // namespace ebb::testing
