// Tests of the CUDA device on the stand-in, which give back all that they take.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "ebb/runtime/device/device.h"
#include "stand_in.h"

namespace ebb::cuda_device {

inline std::string Message(const absl::Status& status) {
  return std::string(status.message());
}

class CudaDeviceTest : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(stand_in::Alive(), stand_in::Live{}) << "something was not given back";
    stand_in::Reset();
  }
};

}  // namespace ebb::cuda_device
