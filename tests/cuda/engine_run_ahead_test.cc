// Steps on a GPU that are enqueued before the outcome of earlier steps is known: the calls that
// wait for it, the bits of the CPU, and the path of errors. On the stand-in, with a compute stream
// that stands still until the host waits. So a call that returns before then has not waited.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <latch>
#include <limits>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "ebb/runtime/config/status_macros.h"
#include "nccl_shares_device.h"
#include "stand_in.h"
#include "state.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"

namespace ebb::testing::engine_run_ahead_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kRanks = 2;

std::string Text(const absl::Status& status) {
  return std::string(status.message());
}

class Hold {
 public:
  explicit Hold(const Engine& engine) : before_(stand_in::HostWaits()) {
    if (engine.compute_stream().native != nullptr)
      stand_in::HoldUntilHostWaits(static_cast<cudaStream_t>(engine.compute_stream().native));
  }
  bool has_waited() const { return stand_in::HostWaits() > before_; }

 private:
  const int before_;
};

// Writes gradients that depend on rank, step and visit, and never waits for the device.
class Trainer {
 public:
  Trainer(const ModelSpec& model, const Device& device, int rank)
      : model_(model),
        stream_(device.CallerStream()),
        sent_(*device.AllocateShared(kSentBytes, "gradients to copy")),
        rank_(rank) {}

  void Forward(Step& step, std::vector<int> without = {}) const {
    for (int visit = 0; visit < visits(); ++visit) {
      if (std::find(without.begin(), without.end(), visit) == without.end())
        step.Forward(unit(visit));
    }
  }
  void Backward(Step& step, int64_t number, bool overflows = false, int behind = 0) {
    for (int visit = visits() - 1 - behind; visit >= 0; --visit) {
      BackwardScope scope = step.Backward(unit(visit));
      for (const ParameterId p : model_.units[static_cast<size_t>(unit(visit))].parameters) {
        if (!model_.parameters[static_cast<size_t>(p)].trainable) continue;
        Write(scope.gradient(p), number * 3 + rank_ * 7 + visit * 11, overflows && visit == 3);
      }
    }
  }
  void Enqueue(Step& step, int64_t number, bool overflows = false) {
    Forward(step);
    Backward(step, number, overflows);
  }
  absl::Status Train(Engine& engine, int64_t number) {
    Step step = engine.BeginStep();
    Enqueue(step, number);
    return step.Finish();
  }
  // A whole step, in which rank 1 asks for a parameter of another unit.
  void EnqueueWithMistake(Step& step, int64_t number) {
    Forward(step);
    {
      const BackwardScope scope = step.Backward(unit(visits() - 1));
      if (rank_ == 1) {
        EXPECT_EQ(scope.parameter(ParameterId{2}).size(), 0);
      }
    }
    Backward(step, number, /*overflows=*/false, /*behind=*/1);
  }

 private:
  int visits() const { return static_cast<int>(model_.forward.size()); }
  UnitId unit(int visit) const { return model_.forward[static_cast<size_t>(visit)].unit; }
  // Numbers with few bits, so that sums are exact in every dtype and order.
  void Write(const MutableTensorView& view, int64_t seed, bool overflows) {
    std::vector<float> values(static_cast<size_t>(view.size()));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>((static_cast<int64_t>(i) * 5 + seed) % 17 - 8) / 8;
    if (overflows) values.back() = std::numeric_limits<float>::infinity();
    const int64_t bytes = view.size() * SizeOf(view.dtype);
    ASSERT_LE(sent_end_ + bytes, kSentBytes);
    std::byte* const sent = sent_.data() + sent_end_;
    sent_end_ += (bytes + kSentAlignment - 1) / kSentAlignment * kSentAlignment;
    std::fill_n(sent, bytes, std::byte{0});
    AddTo(MutableTensorView{.data = sent, .dtype = view.dtype, .shape = view.shape}, values);
    stream_.Copy(view.data, sent, bytes);
  }

  static constexpr int64_t kSentBytes = int64_t{4} << 20, kSentAlignment = 64;

  const ModelSpec& model_;
  Stream stream_;
  // The bytes that copies read when they run, each copy at its own place. Locked, because a copy of
  // other memory waits.
  Buffer sent_;
  int64_t sent_end_ = 0;
  const int rank_;
};

struct RunAhead {
  DType compute = DType::kBFloat16;
  Tier tier = Tier::kDevice;
  bool nccl = false;
  int stage = 3;
};
std::ostream& operator<<(std::ostream& out, const RunAhead& of) {
  return out << std::string(Name(of.compute)) << "_" << std::string(Name(of.tier))
             << (of.nccl ? "_nccl" : "_local") << "_stage" << of.stage;
}

class EngineRunsAheadTest : public ::testing::TestWithParam<RunAhead> {
 protected:
  using Body = std::function<absl::Status(Engine& engine, Trainer& trainer, int rank)>;

  static void SetUpTestSuite() { setenv("EBB_LOG_LEVEL", "error", /*overwrite=*/0); }
  void TearDown() override { stand_in::Reset(); }

  // Late updates, with a schedule and a scale that follow the applied steps.
  Config LateConfig() const {
    const RunAhead& of = GetParam();
    Config config;
    config.micro_batch_size = 1;
    config.compute = of.compute;
    config.zero.stage = of.stage;
    config.zero.param_persistence_threshold = 0;
    config.gradient_clipping = 0.5;
    config.optimizer.learning_rate = 1e-2;
    config.scheduler.type = SchedulerType::kWarmup;
    config.scheduler.warmup_max_lr = 1e-2;
    config.scheduler.warmup_num_steps = 8;
    config.loss_scale.initial_scale_power = 8;
    config.loss_scale.hysteresis = 1;
    config.loss_scale.window = 2;
    config.ebb.timeout_seconds = 60;
    const char* given = std::getenv("TEST_TMPDIR");
    config.zero.offload_param.nvme_paths =
        config.zero.offload_optimizer.nvme_paths = {given == nullptr ? "/tmp" : given};
    config.zero.offload_param.device = config.zero.offload_optimizer.device = of.tier;
    config.zero.offload_param.pin_memory = config.zero.offload_optimizer.pin_memory = false;
    return config;
  }
  Config EarlyConfig() const {
    Config config = LateConfig();
    config.compute = DType::kBFloat16;
    config.gradient_clipping = 0;
    config.ebb.check_overflow = false;
    return config;
  }

  absl::Status Run(const Config& config, bool on_gpu, const Body& body) const {
    return RunThreads(kRanks, [&](World world) -> absl::Status {
      absl::StatusOr<Device> device = Device::Cpu(1);
      if (on_gpu) device = Device::Cuda();
      EBB_RETURN_IF_ERROR(device.status());
      Trainer trainer(model_, *device, world.rank());
      EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, *device, model_, config));
      return body(engine, trainer, world.rank());
    });
  }

  // The masters of a CPU engine that has done these steps.
  ParameterValues MastersAfter(const Config& config, const std::vector<int64_t>& numbers) const {
    ParameterValues masters;
    const absl::Status status =
        Run(config, /*on_gpu=*/false, [&](Engine& engine, Trainer& trainer, int rank) {
          for (const int64_t number : numbers) EBB_RETURN_IF_ERROR(trainer.Train(engine, number));
          return Keep(engine, rank, masters);
        });
    EXPECT_TRUE(status.ok()) << status;
    return masters;
  }
  absl::Status Keep(Engine& engine, int rank, ParameterValues& masters) const {
    EBB_ASSIGN_OR_RETURN(ParameterValues all, GatherAll(engine, model_, StateClass::kMaster));
    if (rank == 0) masters = std::move(all);
    return absl::OkStatus();
  }

  const NcclSharesDevice nccl_{GetParam().nccl};
  const ModelSpec model_ = ScriptedModel();
};

// Step 0's overflow becomes known only when all of step 1 is in the queue.
TEST_P(EngineRunsAheadTest, OneStepAheadWithTheBitsOfTheCpu) {
  constexpr int kSteps = 7;
  struct Result {
    ParameterValues masters;
    StepReport report;
    float loss_scale = 0;
  };
  const auto train = [&](bool on_gpu, int overflow, Result& result) {
    const absl::Status status =
        Run(LateConfig(), on_gpu, [&](Engine& engine, Trainer& trainer, int rank) -> absl::Status {
          std::optional<Hold> hold;
          const int spinning_waits = stand_in::SpinningWaits();
          for (int number = 0; number < kSteps; ++number) {
            if (number == 0) hold.emplace(engine);
            Step step = engine.BeginStep();
            trainer.Enqueue(step, number, number == overflow && rank == kRanks - 1);
            EBB_RETURN_IF_ERROR(step.Finish());
            // Two steps are in the queue; a third one would have to wait.
            EXPECT_EQ(hold->has_waited(), on_gpu && number >= 2) << number;
          }
          EXPECT_EQ(stand_in::SpinningWaits(), spinning_waits);  // its waits sleep
          EBB_ASSIGN_OR_RETURN(const StepReport report, engine.Report());
          if (rank == 0) result.report = report;
          {
            const Step step = engine.BeginStep();
            if (rank == 0) result.loss_scale = step.loss_scale();
          }
          return Keep(engine, rank, result.masters);
        });
    ASSERT_TRUE(status.ok()) << status;
  };
  for (const int overflow : {0, 1, 5, kSteps}) {
    SCOPED_TRACE(overflow);
    Result cpu, gpu;
    train(/*on_gpu=*/false, overflow, cpu);
    train(/*on_gpu=*/true, overflow, gpu);
    ASSERT_FALSE(cpu.masters.empty());
    EXPECT_EQ(gpu.masters, cpu.masters);
    EXPECT_EQ(gpu.loss_scale, cpu.loss_scale);
    EXPECT_EQ(gpu.report.step, kSteps);
    EXPECT_EQ(gpu.report.skipped_steps, overflow < kSteps ? 1 : 0);
    EXPECT_EQ(gpu.report.skipped_steps, cpu.report.skipped_steps);
    EXPECT_EQ(gpu.report.applied, cpu.report.applied);
    EXPECT_EQ(gpu.report.gradient_norm, cpu.report.gradient_norm);
    EXPECT_EQ(gpu.report.loss_scale, cpu.report.loss_scale);
    EXPECT_EQ(gpu.report.learning_rate, cpu.report.learning_rate);
  }
}

TEST_P(EngineRunsAheadTest, CallsThatNeedTheOutcomeWait) {
  using Look = std::function<void(Engine & engine)>;
  const bool fp16 = GetParam().compute == DType::kFloat16;
  const std::pair<Look, bool> looks[] = {
      {[](Engine& engine) { EXPECT_TRUE(engine.Report().ok()); }, true},
      {[](Engine& engine) {
         const auto ignore = [](const Slice&, std::span<const float>) { return absl::OkStatus(); };
         EXPECT_TRUE(engine.Read(StateClass::kMaster, ignore).ok());
       },
       true},
      {[](Engine& engine) { engine.BeginEvaluation(); }, true},
      {[](Engine& engine) {
         EXPECT_TRUE(engine.Suspend().ok());
         EXPECT_TRUE(engine.Resume().ok());
       },
       true},
      {[](Engine& engine) { (void)engine.memory(); }, false},
  };
  for (const auto& [look, waits] : looks) {
    const absl::Status status = Run(LateConfig(), /*on_gpu=*/true,
                                    [&](Engine& engine, Trainer& trainer, int) -> absl::Status {
                                      const Hold hold(engine);
                                      EBB_RETURN_IF_ERROR(trainer.Train(engine, 0));
                                      EXPECT_FALSE(hold.has_waited());
                                      look(engine);
                                      EXPECT_EQ(hold.has_waited(), waits);
                                      return absl::OkStatus();
                                    });
    EXPECT_TRUE(status.ok()) << status;
  }
  const absl::Status status = Run(LateConfig(), /*on_gpu=*/true,
                                  [&](Engine& engine, Trainer& trainer, int) -> absl::Status {
                                    const Hold hold(engine);
                                    EBB_RETURN_IF_ERROR(trainer.Train(engine, 0));
                                    Step step = engine.BeginStep();
                                    EXPECT_NE(step.device_loss_scale().data, nullptr);
                                    EXPECT_FALSE(hold.has_waited());
                                    EXPECT_GE(step.loss_scale(), 1);
                                    EXPECT_EQ(hold.has_waited(), fp16);
                                    trainer.Enqueue(step, 1);
                                    return step.Finish();
                                  });
  EXPECT_TRUE(status.ok()) << status;
}

// The next step's work stands still until the report is there.
TEST_P(EngineRunsAheadTest, AReportInTheNextStepDoesNotWaitForThatStepsWork) {
  for (const bool mistaken : {false, true}) {
    const absl::Status status =
        Run(LateConfig(), /*on_gpu=*/true,
            [&](Engine& engine, Trainer& trainer, int rank) -> absl::Status {
              EBB_RETURN_IF_ERROR(trainer.Train(engine, 0));
              std::latch reported(1);
              Step step = engine.BeginStep();
              stand_in::EnqueueKernel(static_cast<cudaStream_t>(engine.compute_stream().native),
                                      Task([latch = &reported] { latch->wait(); }));
              if (mistaken) {
                trainer.EnqueueWithMistake(step, 1);
              } else {
                trainer.Enqueue(step, 1);
              }
              const absl::StatusOr<StepReport> report = engine.Report();
              reported.count_down();
              EBB_RETURN_IF_ERROR(report.status());
              EXPECT_EQ(report->step, 1);
              EXPECT_EQ(step.Finish().ok(), !mistaken || rank == 0);
              const absl::StatusOr<StepReport> last = engine.Report();
              EXPECT_EQ(last.ok(), !mistaken) << last.status();
              if (last.ok()) {
                EXPECT_EQ(last->step, 2);
              }
              return absl::OkStatus();
            });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// True also if its reads are under way when it is asked for.
TEST_P(EngineRunsAheadTest, TheTrafficOfAStepIsAllOfIt) {
  const absl::Status status = Run(LateConfig(), /*on_gpu=*/true,
                                  [&](Engine& engine, Trainer& trainer, int) -> absl::Status {
                                    for (int64_t number = 0; number < 3; ++number) {
                                      const Hold hold(engine);
                                      EBB_RETURN_IF_ERROR(trainer.Train(engine, number));
                                      const std::vector<TrafficRow> rows = engine.traffic();
                                      EXPECT_EQ(rows.empty(), GetParam().tier == Tier::kDevice);
                                      for (const TrafficRow& row : rows) {
                                        EXPECT_EQ(row.bytes, row.predicted_bytes)
                                            << number << " " << Name(row.state) << " "
                                            << Name(row.tier) << " " << Name(row.direction);
                                      }
                                    }
                                    return absl::OkStatus();
                                  });
  EXPECT_TRUE(status.ok()) << status;
}

// Neither in its own step nor in a step that began before the callers on all ranks knew of the
// error.
TEST_P(EngineRunsAheadTest, AnErrorOfOneRankLetsNoUpdateThroughOnAny) {
  const Config config = LateConfig();
  for (const bool first_rank_asks : {false, true}) {
    SCOPED_TRACE(first_rank_asks);
    ParameterValues masters;
    const absl::Status status = Run(
        config, /*on_gpu=*/true, [&](Engine& engine, Trainer& trainer, int rank) -> absl::Status {
          EBB_RETURN_IF_ERROR(trainer.Train(engine, 0));
          std::vector<absl::Status> finished;
          {
            // If both ranks went on, one would wait for the other's stream.
            std::optional<Hold> hold;
            if (!first_rank_asks) hold.emplace(engine);
            Step step = engine.BeginStep();
            trainer.EnqueueWithMistake(step, 1);
            finished.push_back(step.Finish());
          }
          if (rank == 0 && first_rank_asks) {
            EXPECT_THAT(Text(engine.Report().status()),
                        HasSubstr("rank 1: parameter 'w1' asked of"));
            EXPECT_FALSE(engine.Report().ok());
          }
          for (int64_t number = 2; number < 5; ++number)
            finished.push_back(trainer.Train(engine, number));
          if (rank == 1) {  // the error is its own
            EXPECT_THAT(Text(finished[0]), HasSubstr("parameter 'w1' asked of"));
            EXPECT_TRUE(finished[2].ok()) << finished[2];
          } else {
            EXPECT_TRUE(finished[0].ok()) << finished[0];
            EXPECT_EQ(finished[2].ok(), first_rank_asks) << finished[2];
          }
          EXPECT_TRUE(finished[1].ok()) << finished[1];
          EXPECT_TRUE(finished[3].ok()) << finished[3];
          EXPECT_TRUE(engine.Report().ok()) << engine.Report().status();
          EXPECT_EQ(engine.Report()->step, first_rank_asks ? 4 : 2);
          return Keep(engine, rank, masters);
        });
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(masters, MastersAfter(config, first_rank_asks ? std::vector<int64_t>{0, 2, 3, 4}
                                                            : std::vector<int64_t>{0, 4}));
  }
}

TEST_P(EngineRunsAheadTest, CallsThatReadStateReturnAnEarlierError) {
  const Config config = LateConfig();
  ParameterValues masters;
  const absl::Status status =
      Run(config, /*on_gpu=*/true, [&](Engine& engine, Trainer& trainer, int rank) -> absl::Status {
        EBB_RETURN_IF_ERROR(trainer.Train(engine, 0));
        const Hold hold(engine);  // else rank 0's Finish may know of the error already
        Step step = engine.BeginStep();
        trainer.EnqueueWithMistake(step, 1);
        EXPECT_EQ(step.Finish().ok(), rank == 0);
        const absl::Status looked = GatherAll(engine, model_, StateClass::kMaster).status();
        EXPECT_THAT(Text(looked), HasSubstr("parameter 'w1' asked of"));
        return Keep(engine, rank, masters);
      });
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(masters, MastersAfter(config, {0}));
}

TEST_P(EngineRunsAheadTest, EarlyUpdatesOfAStepThatFailsFailTheEngineOfAllRanks) {
  const absl::Status status =
      Run(EarlyConfig(), /*on_gpu=*/true,
          [&](Engine& engine, Trainer& trainer, int rank) -> absl::Status {
            EBB_RETURN_IF_ERROR(trainer.Train(engine, 0));
            const Hold hold(engine);  // else rank 0's Finish may know of the error already
            Step step = engine.BeginStep();
            trainer.EnqueueWithMistake(step, 1);
            EXPECT_EQ(step.Finish().ok(), rank == 0);
            trainer.Train(engine, 2).IgnoreError();
            EXPECT_THAT(Text(engine.Report().status()), HasSubstr("parameter 'w1' asked of"));
            EXPECT_THAT(Text(trainer.Train(engine, 3)), HasSubstr("the engine has failed"));
            EXPECT_FALSE(GatherAll(engine, model_, StateClass::kMaster).ok());
            return absl::OkStatus();
          });
  EXPECT_TRUE(status.ok()) << status;
}

// No rank has to be held back.
TEST_P(EngineRunsAheadTest, AMistakeOfAllRanksEndsWithItsStep) {
  for (const Config& config : {LateConfig(), EarlyConfig()}) {
    ParameterValues masters;
    const absl::Status status = Run(
        config, /*on_gpu=*/true, [&](Engine& engine, Trainer& trainer, int rank) -> absl::Status {
          EBB_RETURN_IF_ERROR(trainer.Train(engine, 0));
          Step step = engine.BeginStep();
          trainer.Forward(step);
          EXPECT_THAT(Text(step.Finish()), HasSubstr("Finish without any Backward"));
          EBB_RETURN_IF_ERROR(trainer.Train(engine, 2));
          EBB_RETURN_IF_ERROR(engine.Report().status());
          return Keep(engine, rank, masters);
        });
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(masters, MastersAfter(config, {0, 2}));
  }
}

TEST_P(EngineRunsAheadTest, ANonFiniteGradientWithoutChecksIsAnErrorOfAllRanks) {
  Config config = LateConfig();
  config.ebb.check_overflow = false;
  if (config.compute == DType::kFloat16) return;  // fp16 always checks
  ParameterValues masters;
  const absl::Status status =
      Run(config, /*on_gpu=*/true, [&](Engine& engine, Trainer& trainer, int rank) -> absl::Status {
        EBB_RETURN_IF_ERROR(trainer.Train(engine, 0));
        for (int64_t number = 1; number < 3; ++number) {
          Step step = engine.BeginStep();
          trainer.Enqueue(step, number, /*overflows=*/number == 1 && rank == 1);
          EBB_RETURN_IF_ERROR(step.Finish());
        }
        EXPECT_THAT(
            Text(engine.Report().status()),
            AllOf(HasSubstr("non-finite gradient in unit 'u3'"), HasSubstr("ebb.check_overflow")));
        return Keep(engine, rank, masters);
      });
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(masters, MastersAfter(config, {0}));
}

// Only stage 1 has collectives that do not notice it.
TEST_P(EngineRunsAheadTest, ScopesThatDifferAreNamedToAllRanks) {
  Config config = LateConfig();
  config.zero.stage = 1;
  config.zero.offload_param.device = Tier::kDevice;
  ParameterValues masters;
  const absl::Status status =
      Run(config, /*on_gpu=*/true, [&](Engine& engine, Trainer& trainer, int rank) -> absl::Status {
        EBB_RETURN_IF_ERROR(trainer.Train(engine, 0));
        Step step = engine.BeginStep();
        trainer.Forward(step, /*without=*/rank == 1 ? std::vector<int>{2} : std::vector<int>{});
        trainer.Backward(step, 1);
        EBB_RETURN_IF_ERROR(step.Finish());
        // One rank asks at once, the other one after its next step.
        if (rank == 1) EBB_RETURN_IF_ERROR(trainer.Train(engine, 2));
        EXPECT_THAT(Text(engine.Report().status()),
                    AllOf(HasSubstr("as number 3 of the step rank 0 opened Forward('u2')"),
                          HasSubstr("rank 1 Forward('u3')")));
        if (rank == 0) EBB_RETURN_IF_ERROR(trainer.Train(engine, 2));
        EBB_RETURN_IF_ERROR(trainer.Train(engine, 3));
        EBB_RETURN_IF_ERROR(engine.Report().status());
        return Keep(engine, rank, masters);
      });
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(masters, MastersAfter(config, {0, 3}));
}

// The others learn why the rank left, not only that it did.
TEST_P(EngineRunsAheadTest, ARankThatLeavesAfterItsErrorIsQuoted) {
  Config config = LateConfig();
  config.ebb.timeout_seconds = 5;  // NCCL does not see that a rank has left
  const absl::Status status =
      Run(config, /*on_gpu=*/true, [&](Engine& engine, Trainer& trainer, int rank) -> absl::Status {
        EBB_RETURN_IF_ERROR(trainer.Train(engine, 0));
        Step step = engine.BeginStep();
        trainer.EnqueueWithMistake(step, 1);
        absl::Status finished = step.Finish();
        EXPECT_EQ(finished.ok(), rank == 0);
        if (rank == 1) return finished;
        for (int64_t number = 2; number < 5 && finished.ok(); ++number)
          finished = trainer.Train(engine, number);
        EXPECT_THAT(Text(finished), HasSubstr("parameter 'w1' asked of"));
        return absl::OkStatus();
      });
  EXPECT_THAT(Text(status), HasSubstr("parameter 'w1' asked of"));
}

TEST_P(EngineRunsAheadTest, AnEngineEndsWithVerdictsOpen) {
  for (const bool in_error : {false, true}) {
    for (const bool in_step : {false, true}) {
      const absl::Status status =
          Run(LateConfig(), /*on_gpu=*/true, [&](Engine& engine, Trainer& trainer, int) {
            const Hold hold(engine);
            for (int64_t number = 0; number < 2; ++number) {
              Step step = engine.BeginStep();
              if (in_error) {
                trainer.EnqueueWithMistake(step, number);
              } else {
                trainer.Enqueue(step, number);
              }
              step.Finish().IgnoreError();
            }
            EXPECT_FALSE(hold.has_waited());
            if (in_step) engine.BeginStep();
            return absl::OkStatus();
          });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Gpu, EngineRunsAheadTest,
    ::testing::Values(RunAhead{.compute = DType::kFloat16},
                      RunAhead{.compute = DType::kBFloat16, .stage = 1},
                      RunAhead{.compute = DType::kFloat16, .nccl = true},
                      RunAhead{.compute = DType::kBFloat16, .tier = Tier::kCpu},
                      RunAhead{.compute = DType::kFloat16, .tier = Tier::kNvme},
                      RunAhead{.compute = DType::kBFloat16, .tier = Tier::kNvme, .nccl = true}),
    [](const ::testing::TestParamInfo<RunAhead>& param) {
      return ::testing::PrintToString(param.param);
    });

}  // namespace
}  // namespace ebb::testing::engine_run_ahead_test
