// The pools in host memory of an engine on GPUs: only the device locks them. If it cannot, they are
// used unlocked, with the same bits. On the stand-in, which reads other memory when its copies are
// called.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/nccl/communicator.h"
#include "ebb/runtime/comm/shared/world.h"
#include "ebb/runtime/device/driver_memory.h"
#include "engine_creation.h"
#include "nccl_shares_device.h"
#include "stand_in.h"
#include "tests/engine/offload_ratio.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/full.h"
#include "tests/offload/has_once.h"
#include "tests/offload/locked_memory.h"
#include "tests/offload/scratch.h"
#include "tests/ranks.h"
#include "tests/status.h"
#include "thread_ranks.h"

namespace ebb::testing::engine_memory_test {
namespace {

using stand_in::Registers;
using ::testing::AllOf;
using ::testing::AnyOf;
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
    EXPECT_OK(status);
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
    EXPECT_OK(status);
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
  // Each pool on one of the ranks.
  for (int nth = 1;; nth += Full() ? 1 : kRanks) {
    stand_in::FailCall("cudaHostRegister", cudaErrorNotSupported, nth);
    const Outcome outcome = Train(config_);
    EXPECT_TRUE(outcome == expected) << nth;
    EXPECT_EQ(locked_, log_.find(kGoingOn) == log_.npos ? locked : locked - 1);
    if (nth > kRanks && log_.find(kGoingOn) == log_.npos) break;
    EXPECT_THAT(log_, AllOf(HasOnce(kGoingOn), HasSubstr("pool in host memory")));
    ASSERT_LE(nth, 100);
  }
}

// Memory registered with NCCL: all memory that steps send and receive, on all ranks or on none. A
// registration ends before its memory does, as the stand-in checks.

class RegistrationsTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 4;

  void SetUp() override {
    config_.micro_batch_size = 1;
    config_.gradient_accumulation_steps = 2;
    config_.zero.stage = 3;
    config_.zero.param_persistence_threshold = 0;
    config_.ebb.timeout_seconds = 20;
  }
  void TearDown() override { stand_in::Reset(); }

  // Trains, is suspended and resumed, and trains again. Returns the registrations of all ranks
  // before, in between and after.
  std::vector<int> Train() {
    std::vector<int> registrations;
    int unregistered = 0;
    std::barrier barrier(kRanks);
    OnThreads(kRanks, [&](World world) {
      ASSERT_OK_AND_ASSIGN(const Device device, Device::Cuda());
      ToyModel model(ToyOptions(), device);
      const auto note = [&] {
        barrier.arrive_and_wait();
        if (world.rank() == 0) registrations.push_back(stand_in::Alive().registrations);
        if (world.rank() == 0) stand_in::TakeUnregistered();
        barrier.arrive_and_wait();
      };
      const auto train = [&](Engine& engine) -> absl::Status {
        note();
        for (int step = 0; step < 2; ++step)
          EBB_RETURN_IF_ERROR(model.Train(engine, world.rank(), step));
        EBB_RETURN_IF_ERROR(model.Evaluate(engine, world.rank()).status());
        EBB_RETURN_IF_ERROR(engine.Report().status());
        barrier.arrive_and_wait();
        if (world.rank() == 0) unregistered += stand_in::TakeUnregistered();
        barrier.arrive_and_wait();
        return absl::OkStatus();
      };
      ASSERT_OK_AND_ASSIGN(Engine engine, Engine::Create(world, device, model.spec(), config_));
      ASSERT_OK(train(engine));
      ASSERT_OK(engine.Suspend());
      note();
      ASSERT_OK(engine.Resume());
      ASSERT_OK(train(engine));
      ASSERT_OK_AND_ASSIGN(std::vector<uint32_t> masters, MasterBits(engine, model.spec()));
      if (world.rank() == 0) masters_ = std::move(masters);
    });
    EXPECT_EQ(unregistered, 0);
    return registrations;
  }

  const NcclSharesDevice nccl_;
  Config config_;
  std::vector<uint32_t> masters_;  // after the last Train()
};

// A rank with a host that fails when it is to make the `nth` communicator of a name.
class RankOfAFailingHost : public SharedRank {
 public:
  RankOfAFailingHost(std::shared_ptr<SharedWorld> world, std::string name, int nth)
      : SharedRank(std::move(world)), name_(std::move(name)), left_(nth) {}
  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NewCommunicator(
      const CommunicatorOptions& options) override {
    if (options.name == name_ && --left_ == 0) Fail(absl::DataLossError("the host is gone"));
    return SharedRank::NewCommunicator(options);
  }

 private:
  const std::string name_;
  int left_;
};

// Memory has been freed by then: a rank that went on would not know that the others do.
TEST_F(RegistrationsTest, PoolsThatMoveWithoutTheRanksMeetingAfterwardsFailTheEngineOfAll) {
  config_.ebb.timeout_seconds = 3600;
  for (const bool resumes : {false, true}) {
    SCOPED_TRACE(resumes ? "Resume" : "Suspend");
    const auto host = SharedWorld::OfThreads(kRanks);
    OnThreads(kRanks, [&](World threads) {
      const int rank = threads.rank();
      const World world(std::make_shared<RankOfAFailingHost>(
          host[static_cast<size_t>(rank)], "engine moved", rank == 1 ? 1 + resumes : 0));
      ASSERT_OK_AND_ASSIGN(const Device device, Device::Cuda());
      ToyModel model(ToyOptions(), device);
      ASSERT_OK_AND_ASSIGN(Engine engine, Engine::Create(world, device, model.spec(), config_));
      ASSERT_OK(model.Train(engine, rank, 0));
      absl::Status moved = engine.Suspend();
      if (resumes) {
        EXPECT_OK(moved);
        moved = engine.Resume();
      }
      EXPECT_THAT(moved, StatusIs(absl::StatusCode::kDataLoss, "rank 1 failed: the host is gone"));
      for (const absl::Status& later : {engine.Suspend(), engine.Resume(),
                                        model.Train(engine, rank, 1), engine.Report().status()})
        EXPECT_THAT(later, Says("the host is gone"));
    });
    EXPECT_EQ(stand_in::Alive().registrations, 0);
  }
}

// Gather and parameter pool for gathers, gradient and staging pool for reductions.
constexpr int kPools = 4;

TEST_F(RegistrationsTest, CoverTheMemoryOfStepsAfterEveryMoveOfThePools) {
  for (const Registers what : {Registers::kWindows, Registers::kBuffers}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const bool deterministic : {false, true}) {
        if (!Full() && deterministic != ((stage + static_cast<int>(what)) % 2 == 1)) continue;
        SCOPED_TRACE(::testing::Message() << "stage " << stage << ", deterministic "
                                          << deterministic << ", " << static_cast<int>(what));
        stand_in::SetRegisters(what);
        config_.zero.stage = stage;
        config_.compute = stage % 2 == 0 ? DType::kBFloat16 : DType::kFloat32;
        config_.ebb.deterministic_reduce = deterministic;
        const int all = kRanks * (stage == 3 ? kPools : kPools - 1);  // parameters stay whole
        EXPECT_EQ(Train(), (std::vector<int>{all, 0, all}));
      }
    }
  }
}

TEST_F(RegistrationsTest, CoverReplicasAndTheirExchange) {
  config_.ebb.shard_group = 2;
  const int all = kRanks * (kPools + 2 + 1);
  EXPECT_EQ(Train(), (std::vector<int>{all, 0, all}));
}

// Also the gather pool's with the other communicator, and those of a separate pool.
TEST_F(RegistrationsTest, CoverSecondaryShardsWhichChangeNoBit) {
  Train();
  const std::vector<uint32_t> masters = std::exchange(masters_, {});
  config_.zero.hpz_partition_size = 2;
  const int all = kRanks * (kPools + 2);
  EXPECT_EQ(Train(), (std::vector<int>{all, 0, all}));
  EXPECT_EQ(masters_, masters);
  EXPECT_FALSE(masters.empty());
}

TEST_F(RegistrationsTest, NcclThatTakesNoMemoryCopiesIt) {
  stand_in::SetRegisters(Registers::kNothing);
  EXPECT_EQ(Train(), (std::vector<int>{0, 0, 0}));
}

TEST_F(RegistrationsTest, NoneAreMadeWhereTheConfigSaysSo) {
  config_.ebb.register_buffers = false;
  EXPECT_EQ(Train(), (std::vector<int>{0, 0, 0}));
}

// An error of one rank alone leaves the others inside NCCL; an error of all does not.
TEST_F(RegistrationsTest, AnErrorOfOneRankEndsInTime) {
  config_.ebb.timeout_seconds = 0.5;
  stand_in::FailCall("ncclCommWindowRegister", ncclSystemError);
  for (const absl::Status& each : RefusalsOfAll(kRanks, config_))
    EXPECT_THAT(std::string(each.message()),
                AnyOf(HasSubstr("ebb.register_buffers"), HasSubstr("has waited 0.5 s")));
}

TEST_F(RegistrationsTest, AnErrorOfBuffersOnOneRankMakesAllCopy) {
  stand_in::SetRegisters(Registers::kBuffers);
  stand_in::FailCall("ncclCommRegister", ncclSystemError, /*nth=*/5);
  const std::vector<int> registrations = Train();
  EXPECT_EQ(registrations[0], 0);
  EXPECT_GT(registrations[2], 0);  // registration is tried again
}

// Like a library that lacks these functions.
TEST_F(RegistrationsTest, BuffersStandInForTheWindowsOfALaterNccl) {
  NcclLibrary nccl = **LoadNccl();
  nccl.CommWindowRegister = nullptr;
  nccl.CommWindowDeregister = nullptr;
  const std::vector<std::shared_ptr<Store>> stores = *Store::OfThreads(1);
  const Device device = *Device::Cuda();
  ncclUniqueId id;
  nccl.GetUniqueId(&id);
  ASSERT_OK_AND_ASSIGN(
      auto communicator,
      NcclCommunicator::Connect(
          {.nccl = nccl, .device = device, .group = std::make_shared<StoreGroup>(stores[0])}, id));
  const Buffer memory = *device.Allocate(4096, "test");
  EXPECT_OK(communicator->Register(memory.span()));
  EXPECT_EQ(stand_in::Alive().registrations, 1);
  EXPECT_OK(communicator->status());
  communicator.reset();
}

// Memory of a GPU that the driver and libraries take, in the memory table. On the stand-in, which
// says how much each of them takes.

class DriverMemoryTest : public ::testing::Test {
 protected:
  void TearDown() override { stand_in::Reset(); }

  static std::vector<MemoryRow> DriverRows(const Engine& engine) {
    std::vector<MemoryRow> rows = engine.memory();
    std::erase_if(rows, [](const MemoryRow& row) { return row.state != StateClass::kDriver; });
    return rows;
  }

  static void ExpectOneDriverRow(const Engine& engine, const Device& device) {
    const std::vector<MemoryRow> rows = DriverRows(engine);
    ASSERT_EQ(rows.size(), 1u);
    EXPECT_EQ(rows[0].tier, Tier::kDevice);
    EXPECT_EQ(rows[0].predicted_bytes, 0u);
    EXPECT_EQ(rows[0].current_bytes, static_cast<uint64_t>(device.driver_bytes()));
    EXPECT_GE(rows[0].peak_bytes, rows[0].current_bytes);
    EXPECT_GE(rows[0].current_bytes,
              static_cast<uint64_t>(stand_in::kContextBytes + stand_in::kCommunicatorBytes));
  }
};

TEST_F(DriverMemoryTest, IsMeasuredAroundAllocations) {
  const Device device = *Device::Cuda();
  const int64_t before = device.driver_bytes();
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0), cudaSuccess);
  cudaGraph_t graph = nullptr;
  {
    const DriverMemory::Measured outer(device), nested(device);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  }
  EXPECT_EQ(device.driver_bytes(), before + stand_in::kGraphBytes);
  {
    const DriverMemory::Measured measured(device);
    ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
  EXPECT_EQ(device.driver_bytes(), before);
  cudaStreamDestroy(stream);
}

// Ranks that share a GPU share the measurement: no rank makes or destroys an engine while another
// reads it.
TEST_F(DriverMemoryTest, IsARowOfAnEngineOverNccl) {
  const NcclSharesDevice nccl(true);
  std::barrier together(2);
  OnThreads(2, [&](World world) {
    ASSERT_OK_AND_ASSIGN(const Device device, Device::Cuda());
    const absl::StatusOr<Engine> engine =
        Engine::Create(world, device, ScriptedModel(), ConfigFor({.world = 2, .stage = 2}));
    together.arrive_and_wait();
    if (engine.ok()) ExpectOneDriverRow(*engine, device);
    together.arrive_and_wait();
    ASSERT_OK(engine.status());
  });
}

TEST_F(DriverMemoryTest, HasNoRowOnTheCpu) {
  EXPECT_EQ(Device::Cpu().driver_bytes(), 0);
  ASSERT_OK_AND_ASSIGN(const Engine engine,
                       Engine::Create(World::Single(), Device::Cpu(1), ScriptedModel(),
                                      ConfigFor({.world = 1, .stage = 2})));
  EXPECT_TRUE(DriverRows(engine).empty());
}

}  // namespace
}  // namespace ebb::testing::engine_memory_test
