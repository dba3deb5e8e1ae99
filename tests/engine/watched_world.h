// A world between the engine and the real one that counts the calls of one rank, fails the one that
// a test has chosen, and tells what has run.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "ebb/runtime/comm/world.h"

namespace ebb::testing {

struct WatchedCalls {
  enum Fault : uint8_t {
    kRefuse,  // the call returns an error: the engine is told at once
    kAbort,   // the operation fails when its turn comes on the stream
  };

  // Calls are counted, and fail_at is changed, on the thread that calls.
  int64_t calls = 0;
  int64_t fail_at = -1;  // the number of the call that fails; -1: none
  Fault fault = kRefuse;
  std::atomic<int> reductions_run{0};
};

inline constexpr char kInjected[] = "the line was cut";

World Watch(const World& world, std::shared_ptr<WatchedCalls> calls);

}  // namespace ebb::testing
