// One rank keeps notices of communicators as long as it needs them, and no longer.
#include "ebb/runtime/comm/rendezvous/notices.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

namespace ebb {
namespace {

Departure Of(int rank, uint64_t calls) {
  return {.rank = rank, .name = "rank " + std::to_string(rank), .calls = calls};
}

TEST(Notices, TheFirstDepartureStays) {
  Notices notices;
  const std::shared_ptr<CommunicatorNotices> a = notices.Of("a");
  EXPECT_FALSE(a->FirstDeparture().has_value());
  notices.Depart("a", /*size=*/3, Of(1, 7));
  notices.Depart("a", /*size=*/3, Of(0, 9));
  ASSERT_TRUE(a->FirstDeparture().has_value());
  EXPECT_EQ(a->FirstDeparture()->name, "rank 1");
  EXPECT_EQ(a->FirstDeparture()->calls, 7u);
  EXPECT_FALSE(notices.Of("b")->FirstDeparture().has_value());
}

TEST(Notices, CallsWithAPeerCountForThatPeerAlone) {
  Notices notices;
  const std::shared_ptr<CommunicatorNotices> a = notices.Of("a");
  EXPECT_EQ(a->CallsOf(1, 0), CommunicatorNotices::kStillHere);
  Departure departure = Of(1, 7);
  departure.exchanges = {0, 2, 3, 5};
  notices.Depart("a", /*size=*/4, departure);
  EXPECT_EQ(a->CallsOf(1, 0), 9u);
  EXPECT_EQ(a->CallsOf(1, 2), 7u);
  EXPECT_EQ(a->CallsOf(1, 3), 12u);
  EXPECT_EQ(a->CallsOf(2, 1), CommunicatorNotices::kStillHere);
}

TEST(Notices, TheFirstFailureStays) {
  Notices notices;
  const std::shared_ptr<CommunicatorNotices> a = notices.Of("a"), b = notices.Of("b");
  a->Fail(absl::DataLossError("first"));
  a->Fail(absl::DataLossError("second"));
  EXPECT_EQ(a->failure(), absl::DataLossError("first"));
  EXPECT_FALSE(b->failed());
  notices.FailAll(absl::UnavailableError("world"));
  EXPECT_EQ(a->failure(), absl::DataLossError("first"));
  EXPECT_EQ(b->failure(), absl::UnavailableError("world"));
  EXPECT_EQ(notices.Of("later")->failure(), absl::UnavailableError("world"));
}

// This rank may join them later or never.
TEST(Notices, AreKeptUntilAllRanksHaveLeft) {
  Notices notices;
  for (const char* const name : {"whole", "whole.0:2", "whole.0:2.0:0"})
    notices.Depart(name, /*size=*/2, Of(1, 3));
  EXPECT_EQ(notices.known(), 3u);
  for (const char* const name : {"whole", "whole.0:2", "whole.0:2.0:0"}) {
    EXPECT_EQ(notices.Of(name)->FirstDeparture()->calls, 3u);
    notices.Depart(name, /*size=*/2, Of(0, 3));
  }
  notices.Depart("alone", /*size=*/1, Of(0, 1));
  EXPECT_EQ(notices.known(), 0u);
}

}  // namespace
}  // namespace ebb
