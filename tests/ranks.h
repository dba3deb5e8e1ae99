// Runs ranks of a test as threads.
#pragma once

#include <gtest/gtest.h>

#include <source_location>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/comm/world.h"
#include "tests/status.h"

namespace ebb::testing {

// The result of a rank that asserts or returns a Status. An assertion lets other ranks go on.
template <class Body, class... Arguments>
absl::Status StatusOfRank(const Body& body, Arguments&... arguments) {
  if constexpr (std::is_void_v<std::invoke_result_t<const Body&, Arguments&...>>) {
    body(arguments...);
    return ::testing::Test::HasFatalFailure() ? absl::InternalError("an assertion failed")
                                              : absl::OkStatus();
  } else {
    return body(arguments...);
  }
}

// Fails the test where `body`, of each rank's World, returns an error.
template <class Body>
void OnThreads(int world, const Body& body,
               std::source_location at = std::source_location::current()) {
  ExpectOk(RunThreads(world, [&](World rank) { return StatusOfRank(body, rank); }), at);
}

// The statuses that `body` returns, by rank.
template <class Body>
std::vector<absl::Status> StatusesOnThreads(int world, const Body& body) {
  std::vector<absl::Status> statuses(static_cast<size_t>(world));
  RunThreads(world, [&](World rank) {
    return statuses[static_cast<size_t>(rank.rank())] = body(rank);
  }).IgnoreError();
  return statuses;
}

}  // namespace ebb::testing
