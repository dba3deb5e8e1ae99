// After every test of a program that uses only the last of the stand-in's devices, no other device
// may have a context. Launch queues are finite there.
#include <gtest/gtest.h>

#include "../nccl_shares_device.h"
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
  SetLaunchQueue(400);  // fewer than on a device: ranks here may not fill their queues
  testing::nccl_sums_in_one_order = true;
  ::testing::UnitTest::GetInstance()->listeners().Append(new LastDevice);
  return true;
}();

}  // namespace
}  // namespace ebb::stand_in
