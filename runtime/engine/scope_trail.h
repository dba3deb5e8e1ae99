// What a rank's record tells of the scopes that it opened in a step: how the step was begun, how many
// scopes there were, and where they were others than the declared order has next. Ranks that were
// alike up to some scope expected the same one then, so their trails name the first in which they
// differ, and nothing more has to be exchanged.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace ebb {

// Entries of a log before its scopes: which step or evaluation it is, and its options.
inline constexpr size_t kBegunEntries = 5;

struct ScopeTrail {
  static constexpr int kNothing = -1;  // no scope more
  static constexpr int kDeparturesMax = 32;
  struct Departure {
    int32_t number = 0;  // among the step's scopes
    int32_t opened = 0, expected = kNothing;
  };

  std::array<int64_t, kBegunEntries> begun = {};
  int32_t opened = 0;
  int32_t next = kNothing;  // what the declared order has after the last of them
  int32_t departures = 0;   // all of them, also those that have no place below
  std::array<Departure, kDeparturesMax> departure = {};

  // Scopes by their codes. `expected` and `then`: what the declared order had before, and has after.
  void Open(int code, int expected, int then);
  std::span<const Departure> Kept() const;
};

struct ScopeDifference {
  int number = 0;  // of the first scope that differs
  int first = ScopeTrail::kNothing, other = ScopeTrail::kNothing;
};
// Of trails that were begun alike. None where nothing that was kept differs.
std::optional<ScopeDifference> FirstDifference(const ScopeTrail& first, const ScopeTrail& other);

}  // namespace ebb
