// Which ranks share a host, and whether hosts are alike.
#include "ebb/runtime/comm/rendezvous/hosts.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace ebb::hosts_test {
namespace {

using Ranks = std::vector<std::vector<int>>;

Hosts Find(const std::vector<int>& host_of) {
  std::vector<Participant> participants;
  for (const int host : host_of) participants.emplace_back().host_name = std::to_string(host);
  return FindHosts(participants);
}

TEST(FindHosts, RanksNumberedHostByHostAreEven) {
  const Hosts hosts = Find({7, 7, 7, 2, 2, 2});
  EXPECT_EQ(hosts.ranks, (Ranks{{0, 1, 2}, {3, 4, 5}}));
  EXPECT_TRUE(hosts.is_even);
  EXPECT_EQ(hosts.count(), 2);
  EXPECT_EQ(hosts.ranks_per_host(), 3);
}

TEST(FindHosts, OneHostOrOneRankOnEachHostIsEven) {
  EXPECT_TRUE(Find({4, 4, 4}).is_even);
  EXPECT_EQ(Find({4, 4, 4}).ranks_per_host(), 3);
  EXPECT_TRUE(Find({0, 1, 2}).is_even);
  EXPECT_EQ(Find({0, 1, 2}).ranks_per_host(), 1);
  EXPECT_TRUE(Find({0}).is_even);
}

TEST(FindHosts, UnevenOrScatteredRanksAreNot) {
  EXPECT_FALSE(Find({0, 0, 0, 1}).is_even);
  EXPECT_FALSE(Find({0, 1, 0, 1}).is_even);
  EXPECT_EQ(Find({0, 1, 0, 1}).ranks, (Ranks{{0, 2}, {1, 3}}));
  EXPECT_FALSE(Find({0, 1, 1, 0}).is_even);
}

TEST(FindHosts, ParticipantsAreOnTheHostsThatTheyName) {
  std::vector<Participant> participants(4);
  const std::vector<std::string> names = {"a", "a", "b", "b"};
  for (size_t i = 0; i < 4; ++i) participants[i].host_name = names[i];
  EXPECT_EQ(FindHosts(participants).ranks, (Ranks{{0, 1}, {2, 3}}));
  EXPECT_EQ(CpuRanksNeedMpi(participants).code(), absl::StatusCode::kUnimplemented);
  EXPECT_NE(CpuRanksNeedMpi(participants).message().find("2 hosts (a, b)"), std::string::npos);
}

}  // namespace
}  // namespace ebb::hosts_test
