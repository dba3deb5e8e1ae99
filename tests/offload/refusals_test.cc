#include <gtest/gtest.h>

#include <cerrno>

#include "ebb/offload/io_error.h"

namespace ebb::testing::refusals_test {
namespace {

using std::chrono::milliseconds;

constexpr Refusals::Clock::time_point kStart{std::chrono::hours(1)};

class RefusalsTest : public ::testing::Test {
 protected:
  RefusalsTest() { Refusals::ForgetGivenUp(); }

  // Refuses once in a millisecond until it is given up. Returns how long that took.
  static milliseconds RefuseFrom(Refusals& refusals, Refusals::Clock::time_point start) {
    auto now = start;
    while (!refusals.Refused(now)) now += milliseconds(1);
    return std::chrono::duration_cast<milliseconds>(now - start);
  }
};

constexpr milliseconds kAtOnce{Refusals::kTriesMin};

TEST_F(RefusalsTest, LastForThePatienceCountedFromTheFirst) {
  Refusals refusals;
  EXPECT_EQ(RefuseFrom(refusals, kStart), Refusals::kPatience);
  EXPECT_TRUE(refusals.Refused(kStart + 2 * Refusals::kPatience)) << "not counted again";
}

TEST_F(RefusalsTest, EndWithAnyProgress) {
  Refusals refusals;
  EXPECT_FALSE(refusals.Refused(kStart));
  EXPECT_EQ(refusals.count(), 1);
  refusals.Moved();
  EXPECT_EQ(refusals.count(), 0);
  EXPECT_EQ(RefuseFrom(refusals, kStart + Refusals::kPatience), Refusals::kPatience);
}

// Refusals as for a thread that got no processor time.
TEST_F(RefusalsTest, AFewDoNotEndTheWait) {
  Refusals refusals;
  for (int i = 0; i < Refusals::kTriesMin; ++i)
    EXPECT_FALSE(refusals.Refused(kStart + i * Refusals::kPatience)) << i;
  EXPECT_TRUE(refusals.Refused(kStart + Refusals::kTriesMin * Refusals::kPatience));
}

TEST_F(RefusalsTest, RequestsRefusedTogetherEndTogether) {
  Refusals first, second;
  const auto later = kStart + Refusals::kPatience / 2;
  while (second.count() < Refusals::kTriesMin) EXPECT_FALSE(second.Refused(later));
  RefuseFrom(first, kStart);
  EXPECT_TRUE(second.Refused(kStart + Refusals::kPatience));
}

TEST_F(RefusalsTest, AfterSomethingWasGivenUpTheNextEndsSoon) {
  Refusals first, moves;
  RefuseFrom(first, kStart);
  auto now = kStart + Refusals::kPatience;
  for (int i = 0; i < 3; ++i) {
    moves.Moved();  // unrelated to the refusals
    Refusals next;
    now += Refusals::kRemembered / 4;
    EXPECT_EQ(RefuseFrom(next, now), kAtOnce);
    now += kAtOnce;
  }
  // Things that were given up early do not extend the time.
  Refusals later;
  now = kStart + Refusals::kPatience + Refusals::kRemembered;
  EXPECT_EQ(RefuseFrom(later, now), Refusals::kPatience);
}

TEST_F(RefusalsTest, AreForErrorsThatMayPass) {
  for (const int error : {EINTR, EAGAIN, ENOMEM}) EXPECT_TRUE(MayBeTakenLater(error)) << error;
  for (const int error : {0, EIO, ENOSPC, EPERM}) EXPECT_FALSE(MayBeTakenLater(error)) << error;
}

}  // namespace
}  // namespace ebb::testing::refusals_test
