// Checks after every test of a program. No object of the stand-in exists any more. Operations on
// the same memory had an order. Only the watches among the engine's threads have called CUDA,
// because the device may be waiting for the threads of host streams.
#include <gtest/gtest.h>

#include "order.h"
#include "stand_in.h"

namespace ebb::stand_in {
namespace {

class GivenBack : public ::testing::EmptyTestEventListener {
  void OnTestEnd(const ::testing::TestInfo&) override {
    EXPECT_EQ(Alive(), Live{}) << "something was not given back";
    for (const std::string& race : TakeRaces()) ADD_FAILURE() << race;
    for (const std::string& caller : Callers())
      EXPECT_TRUE(!caller.starts_with("ebb ") || caller.ends_with(" watch")) << caller;
    ForgetCallers();
  }
};

const bool registered = [] {
  WatchOrder();
  ::testing::UnitTest::GetInstance()->listeners().Append(new GivenBack);
  return true;
}();

}  // namespace
}  // namespace ebb::stand_in
