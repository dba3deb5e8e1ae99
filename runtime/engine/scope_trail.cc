#include "ebb/runtime/engine/scope_trail.h"

#include <algorithm>
#include <limits>

namespace ebb {
namespace {

constexpr int kNever = std::numeric_limits<int>::max();

// What was opened as scope `number`, if both trails are alike up to there: what was expected, unless
// it is among the departures. `at`: the first of those that the two do not share.
int CodeAt(const ScopeTrail& trail, size_t at, int number, int expected) {
  if (number >= trail.opened) return ScopeTrail::kNothing;
  const std::span<const ScopeTrail::Departure> kept = trail.Kept();
  return at < kept.size() && kept[at].number == number ? kept[at].opened : expected;
}

}  // namespace

void ScopeTrail::Open(int code, int expected, int then) {
  if (code != expected) {
    if (departures < kDeparturesMax)
      departure[static_cast<size_t>(departures)] = {
          .number = opened, .opened = code, .expected = expected};
    ++departures;
  }
  ++opened;
  next = then;
}

std::span<const ScopeTrail::Departure> ScopeTrail::Kept() const {
  return std::span(departure).first(static_cast<size_t>(std::min(departures, kDeparturesMax)));
}

std::optional<ScopeDifference> FirstDifference(const ScopeTrail& first, const ScopeTrail& other) {
  const std::span<const ScopeTrail::Departure> mine = first.Kept(), theirs = other.Kept();
  size_t at = 0;
  while (at < mine.size() && at < theirs.size() && mine[at].number == theirs[at].number &&
         mine[at].opened == theirs[at].opened)
    ++at;
  // Beyond what was kept nothing is known.
  const bool known = (at < mine.size() || first.departures <= ScopeTrail::kDeparturesMax) &&
                     (at < theirs.size() || other.departures <= ScopeTrail::kDeparturesMax);
  if (!known) return {};
  const int mine_at = at < mine.size() ? mine[at].number : kNever,
            theirs_at = at < theirs.size() ? theirs[at].number : kNever;
  const int departs = std::min(mine_at, theirs_at), ends = std::min(first.opened, other.opened);
  const int number = std::min(departs, ends);
  if (departs == kNever && first.opened == other.opened) return {};
  int expected = first.opened < other.opened ? first.next : other.next;
  if (departs <= ends && departs != kNever)
    expected = mine_at <= theirs_at ? mine[at].expected : theirs[at].expected;
  return ScopeDifference{.number = number,
                         .first = CodeAt(first, at, number, expected),
                         .other = CodeAt(other, at, number, expected)};
}

}  // namespace ebb
