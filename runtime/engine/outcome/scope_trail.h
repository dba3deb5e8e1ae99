// The part of a rank's record about its scopes in a step: how the step was begun, the number of
// scopes, and the scopes that were off the plan's order. Ranks with the same scopes so far expect
// the same next scope. So two trails name the first difference without another exchange.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace ebb {

// How a call of all ranks was begun, and the scopes opened in it, as numbers. If ranks differ, the
// call is an error of all of them.
struct CallLog {
  std::vector<int64_t> entries;  // how it was begun (kBegunEntries), then scopes opened, as codes
  uint64_t hash = 0;             // of how it was begun

  // Reset in place, so that a step allocates nothing.
  void Clear() {
    entries.clear();
    hash = 0;
  }
  void Begin(int64_t code) {
    entries.push_back(code);
    hash = (hash ^ static_cast<uint64_t>(code + 1)) * 0x100000001b3ull;
  }
};

// The second entry of a log is a step's number of micro-batches, an evaluation's, which is negative,
// or this and a call that meets others (CallKind).
inline constexpr int64_t kOfCall = int64_t{1} << 40;

// Entries of a log before its scopes: which step or evaluation it is, and its options.
inline constexpr size_t kBegunEntries = 5;

struct ScopeTrail {
  static constexpr int kNothing = -1;  // no more scopes
  static constexpr int kOffPlanMax = 32;
  struct OffPlanScope {
    int32_t number = 0;  // among the step's scopes
    int32_t opened = 0, expected = kNothing;
  };

  std::array<int64_t, kBegunEntries> begun = {};
  int32_t opened = 0;
  int32_t next = kNothing;     // the declared next scope after the last that was opened
  int32_t off_plan_count = 0;  // also counts scopes that did not fit below
  std::array<OffPlanScope, kOffPlanMax> off_plan = {};

  // Scopes by their codes. `expected`, `then`: the declared next scope before and after this one.
  void Open(int code, int expected, int then);
  std::span<const OffPlanScope> Kept() const;
};

struct ScopeDifference {
  int number = 0;  // of the first scope that differs
  int first = ScopeTrail::kNothing, other = ScopeTrail::kNothing;
};
// Both trails have the same `begun`. None if they show no difference.
std::optional<ScopeDifference> FirstDifference(const ScopeTrail& first, const ScopeTrail& other);

}  // namespace ebb
