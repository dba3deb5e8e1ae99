// After every test of a program that uses the last of the stand-in's devices alone, no other may have
// a context. And launch queues are finite.
#include <gtest/gtest.h>

#include "stand_in.h"

namespace ebb::stand_in {
namespace {

class LastDevice : public ::testing::EmptyTestEventListener {
  void OnTestEnd(const ::testing::TestInfo&) override {
    int devices = 0;
    ASSERT_EQ(cudaGetDeviceCount(&devices), cudaSuccess);
    for (int device = 0; device + 1 < devices; ++device) EXPECT_FALSE(HasContext(device)) << device;
  }
};

const bool registered = [] {
  SetLaunchQueue(400);  // fewer than a device takes: ranks on it may not fill theirs
  ::testing::UnitTest::GetInstance()->listeners().Append(new LastDevice);
  return true;
}();

}  // namespace
}  // namespace ebb::stand_in
