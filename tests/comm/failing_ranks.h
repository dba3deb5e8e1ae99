// Ranks that fail, leave, make a different call or never come, and the errors of each rank.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "backends.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/device.h"
#include "processes.h"

namespace ebb::testing {

class FailingRanks : public ::testing::TestWithParam<Backend> {
 protected:
  // Runs `body` on every rank. Its result is what that rank saw; the run itself does not fail.
  std::vector<absl::Status> Seen(int ranks, std::function<absl::Status(World&)> body) {
    Results seen;
    const absl::Status status = GetParam().run(ranks, [&](World world) {
      seen.Set(world.rank(), body(world));
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    return seen.Take(ranks);
  }
};

inline std::string Message(const absl::Status& status) {
  return std::string(status.message());
}

// Calls `call` on the calling thread's stream and returns the communicator's status.
template <class Call>
absl::Status After(const Backend& backend, Communicator& communicator, Call call) {
  Stream stream = backend.device(1).CallerStream();
  EBB_RETURN_IF_ERROR(call(stream));
  stream.WaitIdle();
  return communicator.status();
}

}  // namespace ebb::testing
