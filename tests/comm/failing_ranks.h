// Ranks that fail, leave, make a different call or never come, and the errors of each rank.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "backends.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/device.h"
#include "processes.h"

namespace ebb::testing {

// Calls `call` on the calling thread's stream and returns the communicator's status.
template <class Call>
absl::Status After(const Backend& backend, Communicator& communicator, Call call) {
  Stream stream = backend.device(1).CallerStream();
  EBB_RETURN_IF_ERROR(call(stream));
  stream.WaitIdle();
  return communicator.status();
}

class FailingRanks : public OnEveryBackend {
 protected:
  // Runs `body` on every rank. Its result is what that rank saw; the run itself does not fail.
  std::vector<absl::Status> Seen(int ranks, std::function<absl::Status(World&)> body) {
    Results seen;
    Run(ranks, [&](World world) {
      seen.Set(world.rank(), body(world));
      return absl::OkStatus();
    });
    return seen.Take(ranks);
  }
  template <class Call>
  static absl::Status After(Communicator& communicator, Call call) {
    return testing::After(GetParam(), communicator, call);
  }
  static absl::Status Meet(Communicator& communicator) {
    return After(communicator, [&](Stream& stream) { return communicator.Barrier(stream); });
  }
  // Exchanges of one number.
  static absl::Status Send(Communicator& communicator, int peer) {
    const float value = 0;
    const CollectiveSpan span = {.send = &value, .count = 1};
    return After(communicator, [&](Stream& stream) {
      return communicator.Send(stream, {&span, 1}, DType::kFloat32, peer);
    });
  }
  static absl::Status Receive(Communicator& communicator, int peer) {
    float value = 0;
    const CollectiveSpan span = {.receive = &value, .count = 1};
    return After(communicator, [&](Stream& stream) {
      return communicator.Receive(stream, {&span, 1}, DType::kFloat32, peer);
    });
  }
  // The message of an error, as `matcher` wants it.
  template <class Matcher>
  static auto Message(Matcher matcher) {
    return ::testing::ResultOf(
        [](const absl::Status& status) { return std::string(status.message()); }, matcher);
  }
};

inline std::string Message(const absl::Status& status) {
  return std::string(status.message());
}

}  // namespace ebb::testing
