// A world between the engine and the real one. It counts and lists the calls of one rank, fails the
// call that a test has chosen, and reports the calls that have run.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

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
  std::function<void(CommunicatorOptions&)> adapt;  // what communicators are created with

  // The calls on each communicator, with their threads, in order.
  struct Call {
    std::string communicator;
    CollectiveKind kind{};
    int64_t elements = 0;
    std::thread::id thread;
    // Ranks may have other threads.
    friend bool operator==(const Call& a, const Call& b) {
      return a.communicator == b.communicator && a.kind == b.kind && a.elements == b.elements;
    }
  };
  bool lists = false;
  std::vector<Call> list;
};

inline constexpr char kInjected[] = "the line was cut";

World Watch(const World& world, std::shared_ptr<WatchedCalls> calls);

}  // namespace ebb::testing
