#include "ebb/offload/refusals.h"

#include <gtest/gtest.h>

#include <cerrno>

namespace ebb::testing {
namespace {

using std::chrono::milliseconds;

constexpr Refusals::Clock::time_point kStart{std::chrono::hours(1)};

TEST(RefusalsTest, LastForThePatienceCountedFromTheFirst) {
  Refusals refusals;
  for (int ms = 0; ms < 1000; ms += 100)
    EXPECT_FALSE(refusals.Refused(kStart + milliseconds(ms))) << ms;
  EXPECT_TRUE(refusals.Refused(kStart + Refusals::kPatience));
  EXPECT_TRUE(refusals.Refused(kStart + 2 * Refusals::kPatience)) << "not counted again";
}

TEST(RefusalsTest, EndWithWhateverMoves) {
  Refusals refusals;
  EXPECT_FALSE(refusals.Refused(kStart));
  refusals.Moved();
  EXPECT_FALSE(refusals.Refused(kStart + Refusals::kPatience));
  EXPECT_TRUE(refusals.Refused(kStart + 2 * Refusals::kPatience));
}

TEST(RefusalsTest, AreForgotten) {
  Refusals refusals;
  EXPECT_FALSE(refusals.Refused(kStart));
  const auto later = kStart + Refusals::kForgottenAfter + milliseconds(1);
  EXPECT_FALSE(refusals.Refused(later));
  EXPECT_TRUE(refusals.Refused(later + Refusals::kPatience));
}

TEST(RefusalsTest, AreOfErrorsThatMayPass) {
  for (const int error : {EINTR, EAGAIN, ENOMEM}) EXPECT_TRUE(MayBeTakenLater(error)) << error;
  for (const int error : {0, EIO, ENOSPC, EPERM}) EXPECT_FALSE(MayBeTakenLater(error)) << error;
}

}  // namespace
}  // namespace ebb::testing
