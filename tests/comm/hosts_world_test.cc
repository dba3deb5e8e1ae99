// Ranks that are connected only through rank 0: what they send each other, and what they learn when
// a rank is late, fails, dies or leaves. The hosts of the ranks make no difference here;
// two_hosts.sh has two hosts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/call_order.h"
#include "ebb/runtime/comm/rendezvous/store_group.h"
#include "processes.h"
#include "tests/status.h"

namespace ebb::testing::hosts_world_test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::Not;

using Backend = std::shared_ptr<WorldBackend>;
using Body = std::function<absl::Status(Backend world)>;

absl::Status RunRank(const std::string& name, int rank, int ranks, const Body& body) {
  const MeetingPlace place = {.host = "", .port = 0, .name = name};
  EBB_ASSIGN_OR_RETURN(Rendezvous rendezvous, Rendezvous::Join({.rank = rank,
                                                                .size = ranks,
                                                                .place = place,
                                                                .one_host = true,
                                                                .launcher = "a test",
                                                                .timeout_seconds = 60}));
  EBB_ASSIGN_OR_RETURN(Backend world, HostsRank::Form(rank, std::move(rendezvous)));
  return body(std::move(world));
}

// The result of each rank, which is a thread.
std::vector<absl::Status> OnThreads(int ranks, const Body& body) {
  const std::string name = NewMeetingName();
  std::vector<absl::Status> seen(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back(
        [&, rank] { seen[static_cast<size_t>(rank)] = RunRank(name, rank, ranks, body); });
  }
  for (std::thread& thread : threads) thread.join();
  return seen;
}

// Waits until a rank learns of a failure.
class Ear {
 public:
  explicit Ear(WorldBackend& world) {
    (*world.bootstrap())->store().OnFailure([said = said_](const absl::Status& why) {
      said->set_value(why);
    });
  }
  absl::Status Wait() { return said_->get_future().get(); }

 private:
  std::shared_ptr<std::promise<absl::Status>> said_ =
      std::make_shared<std::promise<absl::Status>>();
};

TEST(HostsWorld, EveryRankGetsTheTextsOfAll) {
  const auto seen = OnThreads(4, [](const Backend& world) -> absl::Status {
    for (int round = 0; round < 50; ++round) {
      const std::string mine(static_cast<size_t>(world->rank() * round), 'a');
      EBB_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                           (*world->bootstrap())->AllGather(mine, 60));
      EXPECT_EQ(all.size(), 4u);
      for (size_t rank = 0; rank < all.size(); ++rank)
        EXPECT_EQ(all[rank].size(), rank * static_cast<size_t>(round));
    }
    return absl::OkStatus();
  });
  for (const absl::Status& status : seen) EXPECT_TRUE(status.ok()) << status;
}

TEST(HostsWorld, CommunicatorsForTheCpuAreRefusedOnEveryRank) {
  const auto seen = OnThreads(3, [](const Backend& world) {
    EXPECT_EQ(World(world).MeetOnHost(), absl::OkStatus());  // there is no way to meet
    return world->NewCommunicator({.name = "all"}).status();
  });
  EXPECT_THAT(seen, Each(StatusIs(absl::StatusCode::kUnimplemented, "need MPI")));
}

TEST(HostsWorld, DifferentCallsAreAnErrorOnAllRanks) {
  const auto seen = OnThreads(4, [](const Backend& world) -> absl::Status {
    Ear ear(*world);
    const int engine = world->calls()->AddEngine("policy");
    EBB_RETURN_IF_ERROR((*world->bootstrap())->AllGather("", 60).status());  // all know it
    const CallKind kind = world->rank() == 3 ? CallKind::kEvaluation : CallKind::kStep;
    const absl::Status apart = world->calls()->Note({.kind = kind, .engine = engine});
    if (!apart.ok()) world->Fail(apart);
    (*world->bootstrap())->store().SendCalls();
    return ear.Wait();
  });
  EXPECT_THAT(seen, Each(Says("ranks do different things with the engine 'policy': "
                              "rank 3 began an evaluation where rank ")));
}

class OneRank : public ::testing::TestWithParam<int> {};

TEST_P(OneRank, ThatDoesNotComeIsNamedOnAllOthers) {
  const auto seen = OnThreads(3, [](const Backend& world) {
    Ear ear(*world);
    if (world->rank() == GetParam()) return ear.Wait();
    return (*world->bootstrap())->AllGather("", 0.2).status();
  });
  EXPECT_THAT(
      seen, Each(StatusIs(absl::StatusCode::kDeadlineExceeded,
                          "for rank " + std::to_string(GetParam()) + " (", "on host '", "0.2 s")));
}

TEST_P(OneRank, ThatFailsIsReportedToAll) {
  const auto seen = OnThreads(3, [](const Backend& world) {
    Ear ear(*world);
    if (world->rank() == GetParam()) world->Fail(absl::DataLossError("the disk is gone"));
    absl::Status heard = ear.Wait();
    EXPECT_EQ((*world->bootstrap())->AllGather("", 60).status(), heard);
    return heard;
  });
  const std::string rank = "rank " + std::to_string(GetParam());
  EXPECT_THAT(seen, Each(absl::DataLossError(rank + " failed: the disk is gone")));
}

TEST_P(OneRank, ThatIsKilledIsNoticedByAll) {
  const std::string name = NewMeetingName();
  Results results;
  Fork(3, [&](int rank) {
    results.Set(rank, RunRank(name, rank, 3, [](const Backend& world) -> absl::Status {
                  Ear ear(*world);
                  EBB_RETURN_IF_ERROR((*world->bootstrap())->AllGather("", 60).status());
                  if (world->rank() == GetParam()) raise(SIGKILL);
                  return ear.Wait();
                }));
    return 0;
  });
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == GetParam()) continue;
    EXPECT_THAT(results.Get(rank),
                Says("rank " + std::to_string(GetParam()) + " (", "on host '", "has died"));
  }
}

TEST_P(OneRank, ThatLeavesFailsOnlyTheWaitsForIt) {
  const auto seen = OnThreads(3, [](const Backend& world) -> absl::Status {
    EBB_RETURN_IF_ERROR((*world->bootstrap())->AllGather("", 60).status());
    if (world->rank() == GetParam()) return absl::OkStatus();
    return (*world->bootstrap())->AllGather("", 60).status();
  });
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == GetParam()) continue;
    EXPECT_THAT(
        seen[static_cast<size_t>(rank)],
        AllOf(Says("rank " + std::to_string(GetParam()) + " (", "has left"), Not(Says("died"))));
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, OneRank, ::testing::Values(0, 1, 2));

TEST(HostsWorld, NoRankGetsAnErrorIfAllLeave) {
  std::atomic<int> heard{0};
  const auto seen = OnThreads(3, [&](const Backend& world) {
    (*world->bootstrap())->store().OnFailure([&](const absl::Status&) { ++heard; });
    return (*world->bootstrap())->AllGather("", 60).status();
  });
  for (const absl::Status& status : seen) EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(heard, 0);
}

TEST(HostsWorld, RanksGoOnWithoutRankZero) {
  std::vector<std::shared_ptr<Store>> stores = *Store::OfThreads(4);
  std::vector<std::shared_ptr<StoreGroup>> parts(4);
  std::vector<std::thread> ranks;
  const auto on_ranks = [&](size_t first, const std::function<void(size_t rank)>& body) {
    for (size_t rank = first; rank < 4; ++rank) ranks.emplace_back(body, rank);
    for (std::thread& rank : ranks) rank.join();
    ranks.clear();
  };
  on_ranks(0, [&](size_t rank) {
    StoreGroup all(stores[rank]);
    parts[rank] = *all.Form({.options = {}, .colour = rank == 0 ? 0 : 1});
  });
  parts[0].reset();
  stores[0].reset();
  on_ranks(1, [&](size_t rank) {
    ASSERT_OK_AND_ASSIGN(const auto all, parts[rank]->AllGather(std::to_string(rank), 60));
    EXPECT_EQ(all, (std::vector<std::string>{"1", "2", "3"}));
    EXPECT_EQ((*parts[rank]->Form({.options = {}}))->size(), 3);
  });
  // Work that needs rank 0 learns that it has left.
  on_ranks(1, [&](size_t rank) {
    const absl::Status left = StoreGroup(stores[rank]).Form({.options = {.name = "all"}}).status();
    EXPECT_THAT(left, Says("rank 0 has left"));
  });
  // The others learn of a rank that fails.
  Ear ear(*std::make_shared<HostsRank>(parts[1]));
  stores[3]->Fail(absl::DataLossError("the disk is gone"));
  EXPECT_EQ(ear.Wait(), absl::DataLossError("the disk is gone"));
}

TEST(HostsWorld, MayBeDestroyedByTheListenerOfAFailure) {
  const auto seen = OnThreads(2, [](Backend world) -> absl::Status {
    const std::shared_ptr<StoreGroup> bootstrap = *world->bootstrap();
    EBB_RETURN_IF_ERROR(bootstrap->AllGather("", 60).status());
    if (world->rank() == 0) {
      Ear ear(*world);
      world->Fail(absl::DataLossError("the disk is gone"));
      return ear.Wait();
    }
    std::promise<absl::Status> ended;
    std::future<absl::Status> end = ended.get_future();
    auto last = std::make_shared<Backend>(std::move(world));
    bootstrap->store().OnFailure([last, &ended](const absl::Status& why) {
      last->reset();
      ended.set_value(why);
    });
    return end.get();
  });
  EXPECT_THAT(seen, Each(Says("disk")));
}

}  // namespace
}  // namespace ebb::testing::hosts_world_test
