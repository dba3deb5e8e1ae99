// What a profiler shows of the thread that calls an engine: which scope it is in, and which instruction
// it enqueues, named as the timeline names them ("backward block3", "reduce block3").
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "ebb/runtime/engine/issue_observer.h"
#include "ebb/runtime/trace/profiler.h"

namespace ebb {

class ProfilerRanges : public IssueObserver {
 public:
  // Makes all names, so that steps make none.
  explicit ProfilerRanges(std::span<const std::string> units);

  // While it is enqueued.
  void Begin(LinkedFragment& run, int instruction, const StepTag& step, Stream& stream) override;
  void End(LinkedFragment& run, int instruction, const StepTag& step, Stream& stream) override;

  // A scope's range ends when it is closed and all that its thread opened after it are: ranges nest. Of
  // a scope that another thread closes, when its own thread calls next.
  void Open(int64_t scope, sharding::ScopeKind kind, int unit);
  void Close(int64_t scope);

 private:
  struct OpenRange {
    int64_t scope = 0;
    std::thread::id thread = {};
    bool closed = false;
  };
  void PopClosed();

  std::vector<std::string> scopes_;        // by ScopeCode
  std::vector<std::string> instructions_;  // by role: of no unit, of each
  size_t units_ = 0;
  std::vector<OpenRange> open_;
};

}  // namespace ebb
