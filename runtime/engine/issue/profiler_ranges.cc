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
  for (int role = 0; role < sharding::kRoles; ++role) {
    const std::string name(sharding::Name(static_cast<sharding::Role>(role)));
    ops_.push_back(name);
    for (const std::string& unit : units) ops_.push_back(absl::StrCat(name, " ", unit));
  }
}

void ProfilerRanges::Begin(LinkedList& run, int index, const StepTag&, Stream&) {
  const sharding::Op& op = run[index];
  const size_t unit = op.parts.empty() ? 0 : 1 + static_cast<size_t>(op.parts.front().unit);
  profiler::Push(ops_[static_cast<size_t>(op.role) * (units_ + 1) + unit].c_str());
}

void ProfilerRanges::End(LinkedList&, int, const StepTag&, Stream&) {
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
