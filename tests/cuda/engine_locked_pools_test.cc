// The pools in host memory of an engine on GPUs: only the device locks them. If it cannot, they are
// used unlocked, with the same bits. On the stand-in, which reads other memory when its copies are
// called.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <ostream>
#include <string>
#include <vector>

#include "ebb/runtime/config/status_macros.h"
#include "nccl_shares_device.h"
#include "stand_in.h"
#include "tests/engine/offload_ratio.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/has_once.h"
#include "tests/offload/locked_memory.h"
#include "tests/offload/scratch.h"

namespace ebb::testing::engine_locked_pools_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kRanks = 2, kSteps = 4;

struct Case {
  Tier parameters = Tier::kDevice, optimizer = Tier::kCpu;
  bool early = false, nccl = false;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << Name(c.parameters) << " " << Name(c.optimizer) << (c.early ? " early" : " late")
       << (c.nccl ? " nccl" : " threads");
}

struct Outcome {
  std::vector<uint32_t> bits;
  std::vector<double> evaluations;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

class EngineLockedPoolsTest : public ::testing::TestWithParam<Case> {
 protected:
  EngineLockedPoolsTest() {
    config_.micro_batch_size = 1;
    config_.compute = DType::kBFloat16;
    config_.zero.stage = 3;
    config_.zero.param_persistence_threshold = 0;
    config_.zero.sub_group_size = 2048;
    config_.zero.offload_param = {
        .device = GetParam().parameters, .nvme_paths = {scratch_.path()}, .max_in_cpu = 0};
    config_.zero.offload_optimizer = {.device = GetParam().optimizer,
                                      .nvme_paths = {scratch_.path()}};
    config_.gradient_clipping = GetParam().early ? 0 : 1;
    config_.ebb.check_overflow = !GetParam().early;
    config_.ebb.timeout_seconds = 3600;  // so that a rank that waits for another would show
  }
  ~EngineLockedPoolsTest() override { stand_in::Reset(); }

  // Leaves the log in log_, and the number of locked pools in locked_.
  Outcome Train(const Config& config) {
    std::array<Outcome, kRanks> outcomes;
    ::testing::internal::CaptureStderr();
    const absl::Status status = RunThreads(kRanks, [&](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
      ToyModel model({.width = 67}, device);
      EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, device, model.spec(), config));
      // Every rank has its pools when Create returns on one rank, and trains only with this rank.
      if (world.rank() == 0) locked_ = stand_in::Alive().locked;
      Outcome& outcome = outcomes[static_cast<size_t>(world.rank())];
      for (int step = 0; step < kSteps; ++step) {
        EBB_RETURN_IF_ERROR(model.Train(engine, world.rank(), step));
        if (step != 1) continue;
        EBB_ASSIGN_OR_RETURN(const double evaluation, model.Evaluate(engine, world.rank()));
        outcome.evaluations.push_back(evaluation);
        EBB_RETURN_IF_ERROR(engine.Suspend());
        EBB_RETURN_IF_ERROR(engine.Resume());
      }
      EBB_ASSIGN_OR_RETURN(outcome.bits, MasterBits(engine, model.spec()));
      for (const MemoryRow& row : engine.memory()) {
        if (row.state != StateClass::kDriver) {
          EXPECT_EQ(row.predicted_bytes, row.peak_bytes);
        }
      }
      return absl::OkStatus();
    });
    log_ = ::testing::internal::GetCapturedStderr();
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_FALSE(outcomes[0].bits.empty());
    return outcomes[0];
  }

  const Scratch scratch_;
  const NcclSharesDevice nccl_{GetParam().nccl};
  Config config_;
  std::string log_;
  int locked_ = 0;  // pools of all ranks
};

INSTANTIATE_TEST_SUITE_P(
    Tiers, EngineLockedPoolsTest,
    ::testing::Values(Case{.optimizer = Tier::kCpu, .early = true},
                      Case{.parameters = Tier::kCpu, .optimizer = Tier::kCpu, .nccl = true},
                      Case{.parameters = Tier::kNvme, .optimizer = Tier::kNvme},
                      Case{.parameters = Tier::kNvme, .optimizer = Tier::kNvme, .early = true}));

constexpr char kGoingOn[] = "copies from and to this memory are slower and block the host";

// Device memory is the stand-in's, so all memory that this process locks with mlock is a pool.
TEST_P(EngineLockedPoolsTest, OnlyTheDeviceLocksThem) {
  const int64_t before = LockedBytes();
  for (const bool pin : {false, true}) {
    config_.zero.offload_param.pin_memory = config_.zero.offload_optimizer.pin_memory = pin;
    int64_t locked = 0;
    ::testing::internal::CaptureStderr();
    const absl::Status status = RunThreads(kRanks, [&](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
      const ToyModel model({.width = 67}, device);
      // Measuring takes host memory too.
      const Config config = GetParam().optimizer == Tier::kCpu ? WithAutoRatio(config_) : config_;
      EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, device, model.spec(), config));
      if (world.rank() == 0) locked = LockedBytes();  // of both ranks
      EXPECT_GE(stand_in::Alive().locked, 1);
      return absl::OkStatus();
    });
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(locked, before);
    EXPECT_THAT(log, AllOf(Not(HasSubstr("cannot pin")), Not(HasSubstr(kGoingOn))));
  }
}

TEST_P(EngineLockedPoolsTest, UnlockedPoolsTrainToTheSameBitsAndOneRankWarnsOnce) {
  const Outcome expected = Train(config_);
  EXPECT_THAT(log_, Not(HasSubstr(kGoingOn)));
  EXPECT_GE(locked_, 1);
  stand_in::RefuseLocks();
  const Outcome outcome = Train(config_);
  EXPECT_TRUE(outcome == expected);
  EXPECT_EQ(locked_, 0);
  EXPECT_THAT(log_, AllOf(HasSubstr("locking "), HasSubstr("out of memory"),
                          HasSubstr("keep less in host memory (ebb.host_memory, nvme)"),
                          HasSubstr("pool in host memory"), Not(HasSubstr("smaller batches")),
                          Not(HasSubstr("cannot pin"))));
  size_t lines = 0;
  for (size_t at = log_.find(kGoingOn); at != log_.npos; at = log_.find(kGoingOn, at + 1)) ++lines;
  EXPECT_EQ(lines, size_t{kRanks}) << log_;
}

TEST_P(EngineLockedPoolsTest, APoolThatCannotBeLockedIsNamedAndTheOthersAreLocked) {
  const Outcome expected = Train(config_);
  const int locked = locked_;
  for (int nth = 1;; ++nth) {
    stand_in::FailCall("cudaHostRegister", cudaErrorNotSupported, nth);
    const Outcome outcome = Train(config_);
    EXPECT_TRUE(outcome == expected) << nth;
    EXPECT_EQ(locked_, log_.find(kGoingOn) == log_.npos ? locked : locked - 1);
    if (nth > kRanks && log_.find(kGoingOn) == log_.npos) break;
    EXPECT_THAT(log_, AllOf(HasOnce(kGoingOn), HasSubstr("pool in host memory")));
    ASSERT_LE(nth, 100);
  }
}

}  // namespace
}  // namespace ebb::testing::engine_locked_pools_test
