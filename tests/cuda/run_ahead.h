// Steps on a GPU that are enqueued before the outcome of earlier steps is known, on the stand-in, with
// a compute stream that stands still until the host waits. So a call that returns before then has not
// waited.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "nccl_shares_device.h"
#include "stand_in.h"
#include "state.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/status.h"

namespace ebb::testing::run_ahead {

inline constexpr int kRanks = 2;

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
inline std::ostream& operator<<(std::ostream& out, const RunAhead& of) {
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
    EXPECT_OK(status);
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

// The tested cases, as values of a suite and in its names.
inline auto RunsAhead() {
  return ::testing::Values(
      RunAhead{.compute = DType::kFloat16}, RunAhead{.compute = DType::kBFloat16, .stage = 1},
      RunAhead{.compute = DType::kFloat16, .nccl = true},
      RunAhead{.compute = DType::kBFloat16, .tier = Tier::kCpu},
      RunAhead{.compute = DType::kFloat16, .tier = Tier::kNvme},
      RunAhead{.compute = DType::kBFloat16, .tier = Tier::kNvme, .nccl = true});
}
inline std::string NameOf(const ::testing::TestParamInfo<RunAhead>& param) {
  return ::testing::PrintToString(param.param);
}

}  // namespace ebb::testing::run_ahead
