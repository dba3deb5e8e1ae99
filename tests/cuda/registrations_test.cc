// Memory registered with NCCL: all memory that steps send and receive, on all ranks or on none. A
// registration ends before its memory does, as the stand-in checks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ebb/runtime/comm/nccl/communicator.h"
#include "ebb/runtime/comm/shared/world.h"
#include "ebb/runtime/config/status_macros.h"
#include "engine_creation.h"
#include "nccl_shares_device.h"
#include "stand_in.h"
#include "tests/engine/toy_model.h"
#include "thread_ranks.h"

namespace ebb::testing::registrations_test {
namespace {

using stand_in::Registers;
using ::testing::AnyOf;
using ::testing::HasSubstr;

class RegistrationsTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 4;

  void SetUp() override {
    setenv("EBB_LOG_LEVEL", "error", /*overwrite=*/0);
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
    const absl::Status status = RunThreads(kRanks, [&](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
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
      EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, device, model.spec(), config_));
      EBB_RETURN_IF_ERROR(train(engine));
      EBB_RETURN_IF_ERROR(engine.Suspend());
      note();
      EBB_RETURN_IF_ERROR(engine.Resume());
      EBB_RETURN_IF_ERROR(train(engine));
      EBB_ASSIGN_OR_RETURN(std::vector<uint32_t> masters, MasterBits(engine, model.spec()));
      if (world.rank() == 0) masters_ = std::move(masters);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
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
  RankOfAFailingHost(std::shared_ptr<ThreadWorld> world, int rank, std::string name, int nth)
      : SharedRank(std::move(world), rank), name_(std::move(name)), left_(nth) {}
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
    const auto host = std::make_shared<ThreadWorld>(kRanks);
    const absl::Status status = RunThreads(kRanks, [&](World threads) -> absl::Status {
      const int rank = threads.rank();
      const World world(std::make_shared<RankOfAFailingHost>(host, rank, "engine moved",
                                                             rank == 1 ? 1 + resumes : 0));
      EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
      ToyModel model(ToyOptions(), device);
      EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, device, model.spec(), config_));
      EBB_RETURN_IF_ERROR(model.Train(engine, rank, 0));
      absl::Status moved = engine.Suspend();
      if (resumes) {
        EXPECT_TRUE(moved.ok()) << moved;
        moved = engine.Resume();
      }
      EXPECT_EQ(moved.code(), absl::StatusCode::kDataLoss);
      EXPECT_THAT(std::string(moved.message()), HasSubstr("rank 1 failed: the host is gone"));
      for (const absl::Status& later : {engine.Suspend(), engine.Resume(),
                                        model.Train(engine, rank, 1), engine.Report().status()})
        EXPECT_THAT(std::string(later.message()), HasSubstr("the host is gone"));
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(stand_in::Alive().registrations, 0);
  }
}

// Gather and parameter pool for gathers, gradient and staging pool for reductions.
constexpr int kPools = 4;

TEST_F(RegistrationsTest, CoverTheMemoryOfStepsAfterEveryMoveOfThePools) {
  for (const Registers what : {Registers::kWindows, Registers::kBuffers}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const bool deterministic : {false, true}) {
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
  auto communicator = NcclCommunicator::Connect(
      {.nccl = nccl, .device = device, .group = std::make_shared<StoreGroup>(stores[0])}, id);
  ASSERT_TRUE(communicator.ok()) << communicator.status();
  const Buffer memory = *device.Allocate(4096, "test");
  const absl::Status registered = (*communicator)->Register(memory.span());
  EXPECT_TRUE(registered.ok()) << registered;
  EXPECT_EQ(stand_in::Alive().registrations, 1);
  EXPECT_TRUE((*communicator)->status().ok());
  communicator->reset();
}

}  // namespace
}  // namespace ebb::testing::registrations_test
