#include "ebb/runtime/engine/issue/profiler_ranges.h"

#include <cstddef>

#include "absl/strings/str_cat.h"

namespace ebb {

ProfilerRanges::ProfilerRanges(std::span<const std::string> units) : units_(units.size()) {
  for (const std::string& unit : units) {
    using enum sharding::ScopeKind;
    for (const sharding::ScopeKind kind : {kForward, kBackward, kRecompute})
      scopes_.push_back(absl::StrCat(sharding::Name(kind), " ", unit));
  }
  for (int kind = 0; kind < sharding::kOperationKinds; ++kind) {
    const std::string name(sharding::Name(static_cast<sharding::OperationKind>(kind)));
    instructions_.push_back(name);
    for (const std::string& unit : units) instructions_.push_back(absl::StrCat(name, " ", unit));
  }
}

void ProfilerRanges::Begin(LinkedFragment& run, int index, const StepTag&, Stream&) {
  const sharding::Instruction& instruction = run[index];
  const size_t unit =
      instruction.parts.empty() ? 0 : 1 + static_cast<size_t>(instruction.parts.front().unit);
  profiler::Push(
      instructions_[static_cast<size_t>(instruction.role) * (units_ + 1) + unit].c_str());
}

void ProfilerRanges::End(LinkedFragment&, int, const StepTag&, Stream&) {
  profiler::Pop();
}

void ProfilerRanges::Open(int64_t scope, sharding::ScopeKind kind, int unit) {
  PopClosed();
  profiler::Push(scopes_[static_cast<size_t>(sharding::ScopeCode(kind, unit))].c_str());
  open_.push_back({.scope = scope, .thread = std::this_thread::get_id()});
}

void ProfilerRanges::Close(int64_t scope) {
  for (OpenRange& range : open_) range.closed |= range.scope == scope;
  PopClosed();
}

// Pops ranges of this thread only.
void ProfilerRanges::PopClosed() {
  const std::thread::id here = std::this_thread::get_id();
  for (size_t i = open_.size(); i-- > 0;) {
    if (open_[i].thread != here) continue;
    if (!open_[i].closed) return;
    open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(i));
    profiler::Pop();
  }
}

}  // namespace ebb
