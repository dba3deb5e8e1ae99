// A profiler's view of a thread that calls an engine: its scope and the operation that it
// enqueues, with the timeline's names ("backward block3", "reduce block3").
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "ebb/runtime/engine/issue/issue_observer.h"
#include "ebb/runtime/trace/profiler.h"

namespace ebb {

class ProfilerRanges : public IssueObserver {
 public:
  // Makes all names, so that steps make none.
  explicit ProfilerRanges(std::span<const std::string> units);

  // A range for the time in which it is enqueued.
  void Begin(LinkedList& run, int op, const StepTag& step, Stream& stream) override;
  void End(LinkedList& run, int op, const StepTag& step, Stream& stream) override;

  // A scope's range ends when the scope and all later scopes of its thread are closed: ranges nest.
  // If another thread closes the scope, its range ends at its own thread's next call.
  void Open(int64_t scope, sharding::ScopeKind kind, int unit);
  void Close(int64_t scope);

 private:
  struct OpenRange {
    int64_t scope = 0;
    std::thread::id thread = {};
    bool closed = false;
  };
  void PopClosed();

  std::vector<std::string> scopes_;  // by ScopeCode
  std::vector<std::string> ops_;     // by role: of no unit, of each
  size_t units_ = 0;
  std::vector<OpenRange> open_;
};

}  // namespace ebb
