#include "ebb/runtime/comm/wait_notice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <string>
#include <vector>

namespace ebb::wait_notice_test {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr WaitNotice::Clock::time_point kBegin{std::chrono::hours(1)};

TEST(WaitNoticeTest, IsDueAfterAFewSecondsAndThenEveryMinute) {
  WaitNotice notice(NoticeTimes(), kBegin);
  std::vector<double> said;
  for (int second = 0; second <= 200; ++second) {
    if (const auto waited = notice.Take(kBegin + seconds(second))) said.push_back(*waited);
  }
  EXPECT_EQ(said, (std::vector<double>{5, 65, 125, 185}));
}

TEST(WaitNoticeTest, IsLoggedOnceIfItIsLate) {
  WaitNotice notice(NoticeTimes(), kBegin);
  EXPECT_EQ(notice.Take(kBegin + seconds(1000)), 1000);
  EXPECT_EQ(notice.Take(kBegin + seconds(1001)), std::nullopt);
  EXPECT_EQ(notice.due(), kBegin + seconds(1060));
}

TEST(WaitNoticeTest, MayNeverBeDue) {
  WaitNotice notice({.first_seconds = std::numeric_limits<double>::infinity()}, kBegin);
  EXPECT_EQ(notice.due(), WaitPoint::kNever);
}

TEST(WaitNoticeTest, AWaitGoesOnAfterItsLines) {
  WaitPoint point;
  int lines = 0;
  const auto say = [&](double waited) {
    EXPECT_GT(waited, 0);
    ++lines;
  };
  constexpr NoticeTimes kAtOnce{.first_seconds = 1e-3, .interval_seconds = 1e-3};
  EXPECT_TRUE(AwaitAndLog(
      point, [&] { return lines == 3; }, WaitPoint::kNever, WaitPoint::kSpin, kAtOnce, say));
  EXPECT_EQ(lines, 3);
  EXPECT_FALSE(AwaitAndLog(
      point, [] { return false; }, WaitPoint::Clock::now(), WaitPoint::kSpin, kAtOnce, say));
  EXPECT_EQ(lines, 3);
}

TEST(WaitNoticeTest, ALineHasAllParts) {
  ::testing::internal::CaptureStderr();
  LogWaiting("rank 0", 65.2, "for rank 2 in barrier on communicator 'reduce'", 600,
             "rank 2 last began a step");
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("rank 0 has waited 65 s of at most 600 s for rank 2 in barrier on "
                        "communicator 'reduce': rank 2 last began a step"));
}

}  // namespace
}  // namespace ebb::wait_notice_test
