// GPUs for the ranks of any world: World::On decides whether ranks share a device or NCCL connects
// them, and a failure of the CPU's world fails the GPUs' world. On the stand-in.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <vector>

#include "../comm/processes.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/rendezvous/store_group.h"
#include "ebb/runtime/comm/shared/world.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/device.h"
#include "nccl_shares_device.h"
#include "stand_in.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb {
namespace {

// A rank that says it is on one of several hosts.
class PairedRank : public WorldBackend {
 public:
  explicit PairedRank(const std::shared_ptr<SharedWorld>& thread)
      : WorldBackend({.rank = thread->rank(), .size = thread->size(), .ranks_per_host = 2}),
        thread_(thread) {}
  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NewCommunicator(
      const CommunicatorOptions& options) override {
    return thread_.NewCommunicator(options);
  }
  absl::StatusOr<std::shared_ptr<WorldBackend>> Split(const Proposal& proposal) override {
    return thread_.Split(proposal);
  }
  void Fail(absl::Status why) override { thread_.Fail(std::move(why)); }
  SharedGroup* threads() override { return thread_.threads(); }
  absl::StatusOr<std::shared_ptr<StoreGroup>> bootstrap() override { return thread_.bootstrap(); }

 private:
  SharedRank thread_;
};

void ExpectTheCpusReductionGroup() {
  const auto ranks = SharedWorld::OfThreads(4);
  testing::OnThreads(4, [&](World world) {
    const World pairs(std::make_shared<PairedRank>(ranks[static_cast<size_t>(world.rank())]));
    ASSERT_OK_AND_ASSIGN(const Device device, Device::Cuda());
    ASSERT_OK_AND_ASSIGN(const World gpus, pairs.On(device));
    EXPECT_EQ(gpus.ranks_per_host(), 2);
  });
}

// A rank that is a process alone.
class LonelyProcess : public SharedRank {
 public:
  using SharedRank::SharedRank;
  SharedGroup* threads() override { return nullptr; }
};

class ConnectionTest : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(stand_in::Alive(), stand_in::Live{}) << "something was not given back";
    stand_in::Reset();
  }

  // How many communicators of NCCL exist while every rank has one of its world on its device.
  int NcclCommunicators(int ranks, std::function<absl::StatusOr<World>(const World&)> on_device) {
    int seen = -1;
    testing::OnThreads(ranks, [&](World world) {
      ASSERT_OK_AND_ASSIGN(const World gpus, on_device(world));
      EXPECT_EQ(gpus.rank(), world.rank());
      EXPECT_EQ(gpus.size(), world.size());
      EXPECT_EQ(gpus.local_rank(), world.local_rank());
      EXPECT_EQ(gpus.local_size(), world.local_size());
      EXPECT_EQ(gpus.ranks_per_host(), world.ranks_per_host());
      ASSERT_OK_AND_ASSIGN(const Communicator communicator, gpus.NewCommunicator());
      ASSERT_OK_AND_ASSIGN(Communicator together, world.NewCommunicator());
      Stream stream = Device::Cpu(1).CallerStream();
      ASSERT_OK(together.Barrier(stream));
      if (world.rank() == 0) seen = stand_in::Alive().communicators;
      ASSERT_OK(together.Barrier(stream));
      ASSERT_OK(together.status());
    });
    return seen;
  }
};

TEST_F(ConnectionTest, ThreadsThatNameTheSameDeviceShareItWithoutNccl) {
  EXPECT_EQ(NcclCommunicators(3, [](const World& world) { return world.On(*Device::Cuda(1)); }), 0);
}

TEST_F(ConnectionTest, ThreadsOnDifferentDevicesAreConnectedByNccl) {
  const auto on_own = [](const World& world) { return world.On(*Device::Cuda(world.rank())); };
  EXPECT_EQ(NcclCommunicators(2, on_own), 2);
}

TEST_F(ConnectionTest, NcclConnectsRanksOnOneDeviceIfTheEnvironmentAllowsIt) {
  const auto on_device = [](const World& world) { return world.On(*Device::Cuda()); };
  {
    const testing::NcclSharesDevice nccl;
    EXPECT_EQ(NcclCommunicators(2, on_device), 2);
    EXPECT_EQ(NcclCommunicators(1, on_device), 0);
  }
  const testing::NcclSharesDevice not_nccl(/*shares=*/false);
  EXPECT_EQ(NcclCommunicators(2, on_device), 0);
}

TEST_F(ConnectionTest, ARankAloneOnItsDeviceNeedsNoNcclInAnyWorld) {
  EXPECT_EQ(NcclCommunicators(1, [](const World& world) { return world.On(*Device::Cuda()); }), 0);
  const World lonely(std::make_shared<LonelyProcess>(SharedWorld::OfThreads(1)[0]));
  const World gpus = *lonely.On(*Device::Cuda());
  const Communicator communicator = *gpus.NewCommunicator();
  EXPECT_EQ(communicator.size(), 1);
  EXPECT_EQ(stand_in::Alive().communicators, 0);
  gpus.Fail(absl::DataLossError("a page is missing"));
  EXPECT_EQ(communicator.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(lonely.NewCommunicator().status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(ConnectionTest, PartsOfThreadsThatShareADeviceShareIt) {
  for (const bool splits_first : {false, true}) {
    testing::OnThreads(4, [&](World world) {
      ASSERT_OK_AND_ASSIGN(const Device device, Device::Cuda());
      ASSERT_OK_AND_ASSIGN(const World given, splits_first ? world : world.On(device));
      ASSERT_OK_AND_ASSIGN(const World part, given.Split(world.rank() % 2, 0));
      ASSERT_OK_AND_ASSIGN(const World gpus,
                           splits_first ? part.On(device) : absl::StatusOr<World>(part));
      ASSERT_OK_AND_ASSIGN(Communicator pair, gpus.NewCommunicator());
      EXPECT_EQ(pair.size(), 2);
      EXPECT_EQ(stand_in::Alive().communicators, 0);
      ASSERT_OK_AND_ASSIGN(Stream stream, device.NewStream("barrier"));
      ASSERT_OK(pair.Barrier(stream));
      stream.WaitIdle();
      ASSERT_OK(pair.status());
    });
  }
}

TEST_F(ConnectionTest, SharingRanksKeepTheCpusDefaultReductionGroup) {
  ExpectTheCpusReductionGroup();
}

TEST_F(ConnectionTest, SharedDeviceMayBeTakenAgain) {
  testing::OnThreads(2, [](World world) {
    ASSERT_OK_AND_ASSIGN(const Device device, Device::Cuda());
    ASSERT_OK_AND_ASSIGN(const World kept, world.On(device));
    for (int round = 0; round < 3; ++round) {
      ASSERT_OK_AND_ASSIGN(const World gpus, world.On(device));
      ASSERT_OK(gpus.NewCommunicator().status());
    }
    ASSERT_OK(kept.NewCommunicator().status());
  });
}

TEST_F(ConnectionTest, AFailureOfTheCpusWorldFailsTheSharedDevices) {
  std::array<absl::Status, 3> seen;
  testing::OnThreads(3, [&](World world) {
    ASSERT_OK_AND_ASSIGN(const Device device, Device::Cuda());
    ASSERT_OK_AND_ASSIGN(const World gpus, world.On(device));
    ASSERT_OK_AND_ASSIGN(Communicator communicator, gpus.NewCommunicator());
    Stream stream = device.CallerStream();
    if (world.rank() == 1) world.Fail(absl::DataLossError("a page is missing"));
    ASSERT_OK(communicator.Barrier(stream));
    seen[static_cast<size_t>(world.rank())] = communicator.status();
  });
  for (const absl::Status& rank : seen)
    EXPECT_EQ(std::string(rank.message()), "rank 1 failed: a page is missing");
}

// All ranks on one device of the stand-in, which only an NCCL that allows sharing can connect.
class WorldOnGpusTest : public ConnectionTest {
 protected:
  static constexpr int kRanks = 3;

  // A rank on one of several hosts that no MPI connects.
  static absl::StatusOr<World> MeetAsHosts(int rank, const std::string& name) {
    const MeetingPlace place = {.host = "", .port = 0, .name = name};
    EBB_ASSIGN_OR_RETURN(Rendezvous rendezvous, Rendezvous::Join({.rank = rank,
                                                                  .size = kRanks,
                                                                  .place = place,
                                                                  .one_host = true,
                                                                  .launcher = "a test",
                                                                  .timeout_seconds = 60}));
    EBB_ASSIGN_OR_RETURN(std::shared_ptr<WorldBackend> backend,
                         HostsRank::Form(rank, std::move(rendezvous)));
    return World(std::move(backend));
  }

  const testing::NcclSharesDevice nccl_;
};

TEST_F(WorldOnGpusTest, TheCpusIsTheWorldItself) {
  const World world = World::Single();
  EXPECT_EQ(world.On(Device::Cpu())->size(), 1);
}

TEST_F(WorldOnGpusTest, RanksKeepTheirPlacesAndSumOnTheirDevices) {
  testing::OnThreads(3, [](World world) {
    ASSERT_OK_AND_ASSIGN(const Device device, Device::Cuda());
    ASSERT_OK_AND_ASSIGN(const World gpus, world.On(device));
    EXPECT_EQ(gpus.rank(), world.rank());
    EXPECT_EQ(gpus.size(), 3);
    EXPECT_EQ(gpus.local_rank(), world.local_rank());
    ASSERT_OK_AND_ASSIGN(Communicator communicator, gpus.NewCommunicator());
    ASSERT_OK_AND_ASSIGN(Stream stream, device.NewStream("sum"));
    ASSERT_OK_AND_ASSIGN(Buffer memory, device.Allocate(256, "sum"));
    const float own = static_cast<float>(world.rank() + 1);
    float sum = 0;
    stream.Copy(memory.data(), &own, sizeof(own));
    const CollectiveSpan span = {.send = memory.data(), .receive = memory.data(), .count = 1};
    ASSERT_OK(communicator.AllReduce(stream, {&span, 1}, DType::kFloat32));
    stream.WaitIdle();
    stream.Copy(&sum, memory.data(), sizeof(sum));
    stream.WaitIdle();
    EXPECT_EQ(sum, 6);
    ASSERT_OK(communicator.status());
  });
}

TEST_F(WorldOnGpusTest, TheDefaultReductionGroupIsTheCpusWorlds) {
  ExpectTheCpusReductionGroup();
}

TEST_F(WorldOnGpusTest, RanksWithoutCommunicatorsForTheCpuMeetThroughRankZero) {
  const std::string name = ebb::testing::NewMeetingName();
  const auto run = [&](int rank) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const World hosts, MeetAsHosts(rank, name));
    EXPECT_FALSE(hosts.NewCommunicator().ok());
    EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
    EBB_ASSIGN_OR_RETURN(const World gpus, hosts.On(device));
    EBB_ASSIGN_OR_RETURN(Communicator communicator, gpus.NewCommunicator());
    EBB_ASSIGN_OR_RETURN(Stream stream, device.NewStream("barrier"));
    EBB_RETURN_IF_ERROR(communicator.Barrier(stream));
    stream.WaitIdle();
    if (rank == 1) {
      EXPECT_OK(communicator.status());
      hosts.Fail(absl::DataLossError("a page is missing"));
      return absl::OkStatus();
    }
    // Rank 1 never comes: only the connections between the hosts can report its end.
    EBB_RETURN_IF_ERROR(communicator.Barrier(stream));
    stream.WaitIdle();
    return communicator.status();
  };
  std::array<absl::Status, 3> seen;
  testing::OnThreads(
      3, [&](World threads) { seen[static_cast<size_t>(threads.rank())] = run(threads.rank()); });
  EXPECT_OK(seen[1]);
  for (const int rank : {0, 2})
    EXPECT_THAT(seen[static_cast<size_t>(rank)], testing::Says("rank 1", "a page is missing"));
}

// For threads, and for ranks connected only through rank 0; one part is connected before the other
// has come.
TEST_F(WorldOnGpusTest, PartsOfAWorldHaveGpusOfTheirOwn) {
  for (const bool as_hosts : {false, true}) {
    for (const bool splits_first : {false, true}) {
      const std::string name = ebb::testing::NewMeetingName();
      std::latch first_is_done(1);
      testing::OnThreads(kRanks, [&](World threads) {
        const int rank = threads.rank();
        ASSERT_OK_AND_ASSIGN(const World world,
                             as_hosts ? MeetAsHosts(rank, name) : absl::StatusOr<World>(threads));
        ASSERT_OK_AND_ASSIGN(const Device device, Device::Cuda());
        ASSERT_OK_AND_ASSIGN(const World given, splits_first ? world : world.On(device));
        ASSERT_OK_AND_ASSIGN(const World part, given.Split(rank == 1 ? 1 : 0, -rank));
        if (rank == 1) first_is_done.wait();
        ASSERT_OK_AND_ASSIGN(const World gpus,
                             splits_first ? part.On(device) : absl::StatusOr<World>(part));
        EXPECT_EQ(gpus.size(), rank == 1 ? 1 : 2);
        EXPECT_EQ(gpus.rank(), rank == 0 ? 1 : 0);
        ASSERT_OK_AND_ASSIGN(Communicator pair, gpus.NewCommunicator());
        ASSERT_OK_AND_ASSIGN(Stream stream, device.NewStream("sum"));
        ASSERT_OK_AND_ASSIGN(Buffer memory, device.Allocate(256, "sum"));
        const float own = static_cast<float>(rank + 1);
        float sum = 0;
        stream.Copy(memory.data(), &own, sizeof(own));
        const CollectiveSpan span = {.send = memory.data(), .receive = memory.data(), .count = 1};
        ASSERT_OK(pair.AllReduce(stream, {&span, 1}, DType::kFloat32));
        stream.WaitIdle();
        stream.Copy(&sum, memory.data(), sizeof(sum));
        stream.WaitIdle();
        EXPECT_EQ(sum, rank == 1 ? 2 : 4);
        if (rank == 0) first_is_done.count_down();
        ASSERT_OK(pair.status());
      });
    }
  }
}

// The rank may do anything then, and its world may notify the others in any way.
TEST_F(WorldOnGpusTest, ARankThatDestroysItsCommunicatorIsNotWaitedFor) {
  for (const bool as_hosts : {false, true}) {
    const std::string name = ebb::testing::NewMeetingName();
    std::array<absl::Status, kRanks> seen;
    std::latch others_know(kRanks - 1);
    const auto run = [&](const World& threads) -> absl::Status {
      const int rank = threads.rank();
      EBB_ASSIGN_OR_RETURN(const World world,
                           as_hosts ? MeetAsHosts(rank, name) : absl::StatusOr<World>(threads));
      EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
      EBB_ASSIGN_OR_RETURN(const World gpus, world.On(device));
      EBB_ASSIGN_OR_RETURN(const Communicator all, gpus.NewCommunicator());
      EBB_ASSIGN_OR_RETURN(Stream stream, device.NewStream("barrier"));
      {
        EBB_ASSIGN_OR_RETURN(Communicator part, gpus.NewCommunicator({.name = "part"}));
        EBB_RETURN_IF_ERROR(part.Barrier(stream));
        if (rank != 1) EBB_RETURN_IF_ERROR(part.Barrier(stream));
        stream.WaitIdle();
        seen[static_cast<size_t>(rank)] = part.status();
      }
      rank == 1 ? others_know.wait() : others_know.count_down();
      return absl::OkStatus();
    };
    EXPECT_OK(RunThreads(kRanks, run));
    EXPECT_OK(seen[1]);
    for (const int rank : {0, 2})
      EXPECT_THAT(seen[static_cast<size_t>(rank)],
                  testing::Says("rank 1 has left communicator 'part'"));
  }
}

TEST_F(WorldOnGpusTest, ARankThatFailsOnTheCpuFailsTheGpusOfAll) {
  const auto run = [](const World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
    EBB_ASSIGN_OR_RETURN(const World gpus, world.On(device));
    EBB_ASSIGN_OR_RETURN(Communicator communicator, gpus.NewCommunicator());
    if (world.rank() == 1) world.Fail(absl::DataLossError("a page is missing"));
    EBB_ASSIGN_OR_RETURN(Stream stream, device.NewStream("barrier"));
    // Spans of ranks 0 and 2; rank 1 never comes to the second.
    EBB_RETURN_IF_ERROR(communicator.Barrier(stream));
    if (world.rank() != 1) EBB_RETURN_IF_ERROR(communicator.Barrier(stream));
    stream.WaitIdle();
    return communicator.status();
  };
  std::array<absl::Status, 3> seen;
  testing::OnThreads(3, [&](World world) { seen[static_cast<size_t>(world.rank())] = run(world); });
  for (const int rank : {0, 2})
    EXPECT_THAT(seen[static_cast<size_t>(rank)], testing::Says("rank 1", "a page is missing"));
}

TEST_F(WorldOnGpusTest, TheStatusNamesARankWithoutADevice) {
  const absl::Status status = RunThreads(2, [](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const Device device,
                         world.rank() == 1 ? Device::Cuda(99) : Device::Cuda());
    EBB_ASSIGN_OR_RETURN(const World gpus, world.On(device));
    return gpus.NewCommunicator().status();
  });
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(status, testing::Says("rank 1"));
}

}  // namespace
}  // namespace ebb
