// A timeline of a GPU with two steps in its queue. A step's spans are its own, on their streams and
// in the plan's order, although the host was in the next step when they were recorded. On the
// stand-in.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <ostream>
#include <string>

#include "ebb/runtime/base/status_macros.h"
#include "nccl_shares_device.h"
#include "stand_in.h"
#include "tests/engine/plan_spans.h"
#include "tests/engine/scripted.h"
#include "tests/offload/scratch.h"
#include "tests/status.h"

namespace ebb::testing::engine_timeline_test {
namespace {

constexpr int kRanks = 2;
constexpr int64_t kSteps = 4;

struct Traced {
  const char* name;
  int stage = 3;
  Timing timing = Timing::kLate;
  Tier parameters = Tier::kDevice, states = Tier::kDevice;
  int64_t coalesce = 0;  // bytes
  bool nccl = false;
};
void PrintTo(const Traced& of, std::ostream* out) {
  *out << of.name;
}

class TimelineOfGpuTest : public ::testing::TestWithParam<Traced> {
 protected:
  void TearDown() override { stand_in::Reset(); }

  // Opens every scope and computes nothing; gradients are zeros.
  static absl::Status Train(Engine& engine, const ModelSpec& model) {
    Step step = engine.BeginStep();
    for (const Visit& visit : model.forward) step.Forward(visit.unit);
    for (auto visit = model.forward.rbegin(); visit != model.forward.rend(); ++visit)
      step.Backward(visit->unit);
    return step.Finish();
  }

  const NcclSharesDevice nccl_{GetParam().nccl};
  const Scratch scratch_;
};
INSTANTIATE_TEST_SUITE_P(
    Cases, TimelineOfGpuTest,
    ::testing::Values(Traced{.name = "stage1", .stage = 1}, Traced{.name = "stage3"},
                      Traced{.name = "stage3_early", .timing = Timing::kEarly},
                      Traced{.name = "in_groups", .coalesce = 1200},
                      Traced{.name = "nccl", .nccl = true},
                      Traced{.name = "states_on_cpu", .states = Tier::kCpu},
                      Traced{.name = "parameters_on_nvme", .parameters = Tier::kNvme},
                      Traced{
                          .name = "all_on_nvme", .parameters = Tier::kNvme, .states = Tier::kNvme}),
    [](const auto& each) { return std::string(each.param.name); });

TEST_P(TimelineOfGpuTest, ShowsEachOfTwoOpenStepsInItsOrder) {
  const Traced& of = GetParam();
  const ModelSpec model = ScriptedModel();
  const std::string path = scratch_.path() + "/trace.json";
  Config config =
      OnNvme(ConfigFor({.world = kRanks, .stage = of.stage, .timing = of.timing}), scratch_.path());
  config.compute = DType::kBFloat16;
  config.zero.offload_param.device = of.parameters;
  config.zero.offload_optimizer.device = of.states;
  config.ebb.coalesce_bytes = of.coalesce;
  config.ebb.trace = path;
  sharding::Plan plan;
  const absl::Status status = RunThreads(kRanks, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
    EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, device, model, config));
    if (world.rank() == 0) plan = engine.program().plan();
    const int waits = stand_in::HostWaits();
    stand_in::HoldUntilHostWaits(static_cast<cudaStream_t>(engine.compute_stream().native));
    for (int64_t step = 1; step <= kSteps; ++step) {
      EBB_RETURN_IF_ERROR(Train(engine, model));
      if (step == 2) {
        EXPECT_EQ(stand_in::HostWaits(), waits);
      }
    }
    return engine.Report().status();
  });
  ASSERT_OK(status);
  ASSERT_OK_AND_ASSIGN(const TraceTracks tracks, ReadTraceEvents(path));
  for (int rank = 0; rank < kRanks; ++rank) {
    StepSpans before;
    for (int64_t step = 1; step <= kSteps; ++step) {
      SCOPED_TRACE(::testing::Message() << "rank " << rank << ", step " << step);
      const bool carrying = step > 1 && plan.carries_updates;
      const StepSpans spans = Match(plan, tracks, rank, step, carrying);
      ExpectOrder(plan, spans, before.empty() || carrying ? nullptr : &before,
                  Clocks::kOfGpuAndHost);
      if (HasFailure()) return;
      // Two steps were open: the host had closed the second one's scopes before the first had its
      // verdict.
      int64_t closed = 0, concluded = 0;
      for (const TraceSpan& span : tracks.at({rank, 0}).spans)
        if (span.step == 2) closed = std::max(closed, span.end_ns);
      for (const sharding::Op& op : plan.ops) {
        if (step == 1 && op.role == sharding::Role::kConclude)
          concluded = spans[static_cast<size_t>(op.number)]->end_ns;
      }
      if (step == 1) {
        EXPECT_GT(concluded, closed);
      }
      before = spans;
    }
  }
}

// The device measures the times: a timeline enqueues nothing that calls the host. A step's
// reductions begin after the step's first scope was opened, by the host's clock, and end before the
// next step's first reduction.
TEST_P(TimelineOfGpuTest, EnqueuesNoHostFunctionAndKeepsSpansInTheirStep) {
  const Traced& of = GetParam();
  const ModelSpec model = ScriptedModel();
  const std::string path = scratch_.path() + "/trace.json";
  Config config =
      OnNvme(ConfigFor({.world = kRanks, .stage = of.stage, .timing = of.timing}), scratch_.path());
  config.compute = DType::kBFloat16;
  config.zero.offload_param.device = of.parameters;
  config.zero.offload_optimizer.device = of.states;
  config.ebb.coalesce_bytes = of.coalesce;
  const auto host_functions = [&]() -> absl::StatusOr<int> {
    const int before = stand_in::HostFunctions();
    const absl::Status status = RunThreads(kRanks, [&](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
      EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, device, model, config));
      for (int64_t step = 1; step <= kSteps; ++step) {
        EBB_RETURN_IF_ERROR(Train(engine, model));
        EBB_RETURN_IF_ERROR(engine.Report().status());
      }
      return absl::OkStatus();
    });
    if (!status.ok()) return status;
    return stand_in::HostFunctions() - before;
  };
  const absl::StatusOr<int> untraced = host_functions();
  config.ebb.trace = path;
  const absl::StatusOr<int> traced = host_functions();
  ASSERT_TRUE(untraced.ok() && traced.ok()) << untraced.status() << traced.status();
  EXPECT_EQ(*traced, *untraced);
  ASSERT_OK_AND_ASSIGN(const TraceTracks tracks, ReadTraceEvents(path));
  for (int rank = 0; rank < kRanks; ++rank) {
    std::map<int64_t, int64_t> begun;  // by step
    for (const TraceSpan& span : tracks.at({rank, 0}).spans) {
      const auto [found, is_first] = begun.try_emplace(span.step, span.begin_ns);
      if (!is_first) found->second = std::min(found->second, span.begin_ns);
    }
    int64_t ended = 0, reduced_in = 0;
    for (const auto& [id, track] : tracks) {
      if (id.first != rank || track.name != "reduce") continue;
      for (const TraceSpan& span : track.spans) {
        SCOPED_TRACE(::testing::Message()
                     << "rank " << rank << ", step " << span.step << ": " << span.name);
        EXPECT_GE(span.begin_ns, begun.at(span.step));
        EXPECT_GE(span.begin_ns, ended);
        EXPECT_GE(span.step, reduced_in);
        ended = span.end_ns;
        reduced_in = span.step;
      }
    }
    EXPECT_EQ(reduced_in, kSteps);
  }
}

}  // namespace
}  // namespace ebb::testing::engine_timeline_test
