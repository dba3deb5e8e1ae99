// Which ranks share a host, and whether hosts are alike.
#include "ebb/runtime/comm/rendezvous/hosts.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

namespace ebb::hosts_test {
namespace {

using Ranks = std::vector<std::vector<int>>;

// A letter for the host of each rank.
std::vector<Participant> RanksOn(std::string_view hosts) {
  std::vector<Participant> participants;
  for (const char host : hosts) participants.emplace_back().host_name = host;
  return participants;
}

Hosts Find(std::string_view hosts) {
  return FindHosts(RanksOn(hosts));
}

TEST(FindHosts, RanksNumberedHostByHostAreEven) {
  const Hosts hosts = Find("hhhccc");
  EXPECT_EQ(hosts.ranks, (Ranks{{0, 1, 2}, {3, 4, 5}}));
  EXPECT_TRUE(hosts.is_even);
  EXPECT_EQ(hosts.count(), 2);
  EXPECT_EQ(hosts.ranks_per_host(), 3);
}

TEST(FindHosts, OneHostOrOneRankOnEachHostIsEven) {
  EXPECT_TRUE(Find("eee").is_even);
  EXPECT_EQ(Find("eee").ranks_per_host(), 3);
  EXPECT_TRUE(Find("abc").is_even);
  EXPECT_EQ(Find("abc").ranks_per_host(), 1);
  EXPECT_TRUE(Find("a").is_even);
}

TEST(FindHosts, UnevenOrScatteredRanksAreNot) {
  EXPECT_FALSE(Find("aaab").is_even);
  EXPECT_FALSE(Find("abab").is_even);
  EXPECT_EQ(Find("abab").ranks, (Ranks{{0, 2}, {1, 3}}));
  EXPECT_FALSE(Find("abba").is_even);
}

TEST(FindHosts, ParticipantsAreOnTheHostsThatTheyName) {
  std::vector<Participant> participants = RanksOn("aabb");
  EXPECT_EQ(FindHosts(participants).ranks, (Ranks{{0, 1}, {2, 3}}));
  EXPECT_EQ(CpuRanksNeedMpi(participants).code(), absl::StatusCode::kUnimplemented);
  EXPECT_NE(CpuRanksNeedMpi(participants).message().find("2 hosts (a, b)"), std::string::npos);
}

TEST(HostsWithoutMpi, NamesTheHostsAndTheRanksThatLackIt) {
  std::vector<Participant> participants = RanksOn("aabbc");
  EXPECT_EQ(HostsWithoutMpi(participants), "");
  participants[2].without_mpi = participants[3].without_mpi = "no such file";
  participants[4].without_mpi = "too old";
  const std::string missing =
      "Open MPI is missing on host 'b' (rank 2, rank 3), host 'c' (rank 4): no such file";
  EXPECT_EQ(HostsWithoutMpi(participants), missing);
  EXPECT_NE(CpuRanksNeedMpi(participants).message().find(missing), std::string::npos);
}

TEST(NamesAndHosts, AHostIsNamedAfterItsLastRank) {
  std::vector<Participant> participants = RanksOn("aabc");
  const std::vector<int> all = {0, 1, 2, 3}, some = {0, 3};
  EXPECT_EQ(NamesAndHosts(participants, all),
            "rank 0, rank 1 on host 'a', rank 2 on host 'b', rank 3 on host 'c'");
  EXPECT_EQ(NamesAndHosts(participants, some), "rank 0 on host 'a', rank 3 on host 'c'");
  EXPECT_EQ(NamesAndHosts(std::vector<Participant>(4), some), "rank 0, rank 3");  // threads
}

}  // namespace
}  // namespace ebb::hosts_test
