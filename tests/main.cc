// The main function of test programs, in place of GoogleTest's: ctest shows a program as skipped if
// all of its tests were skipped. For other programs tests/run.sh says which tests were skipped, and
// why.

#include <gtest/gtest.h>

namespace {

constexpr int kAllSkipped = 77;  // SKIP_RETURN_CODE in cmake/EbbBuild.cmake

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const int failed = RUN_ALL_TESTS();
  const ::testing::UnitTest& tests = *::testing::UnitTest::GetInstance();
  if (failed == 0 && tests.successful_test_count() == 0 && tests.skipped_test_count() > 0)
    return kAllSkipped;
  return failed;
}
