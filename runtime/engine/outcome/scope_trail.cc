#include "ebb/runtime/engine/outcome/scope_trail.h"

#include <algorithm>
#include <limits>

namespace ebb {
namespace {

constexpr int kNever = std::numeric_limits<int>::max();

// The scope that was opened as number `number`, if both trails are the same up to it: the expected
// one, unless it was off plan. `at`: the first off-plan scope that the two do not share.
int CodeAt(const ScopeTrail& trail, size_t at, int number, int expected) {
  if (number >= trail.opened) return ScopeTrail::kNothing;
  const std::span<const ScopeTrail::OffPlanScope> kept = trail.Kept();
  return at < kept.size() && kept[at].number == number ? kept[at].opened : expected;
}

}  // namespace

void ScopeTrail::Open(int code, int expected, int then) {
  if (code != expected) {
    if (off_plan_count < kOffPlanMax)
      off_plan[static_cast<size_t>(off_plan_count)] = {
          .number = opened, .opened = code, .expected = expected};
    ++off_plan_count;
  }
  ++opened;
  next = then;
}

std::span<const ScopeTrail::OffPlanScope> ScopeTrail::Kept() const {
  return std::span(off_plan).first(static_cast<size_t>(std::min(off_plan_count, kOffPlanMax)));
}

std::optional<ScopeDifference> FirstDifference(const ScopeTrail& first, const ScopeTrail& other) {
  const std::span<const ScopeTrail::OffPlanScope> mine = first.Kept(), theirs = other.Kept();
  size_t at = 0;
  while (at < mine.size() && at < theirs.size() && mine[at].number == theirs[at].number &&
         mine[at].opened == theirs[at].opened)
    ++at;
  // Nothing is known about off-plan scopes that were not kept.
  const bool known = (at < mine.size() || first.off_plan_count <= ScopeTrail::kOffPlanMax) &&
                     (at < theirs.size() || other.off_plan_count <= ScopeTrail::kOffPlanMax);
  if (!known) return {};
  const int mine_at = at < mine.size() ? mine[at].number : kNever,
            theirs_at = at < theirs.size() ? theirs[at].number : kNever;
  const int differs = std::min(mine_at, theirs_at), ends = std::min(first.opened, other.opened);
  const int number = std::min(differs, ends);
  if (differs == kNever && first.opened == other.opened) return {};
  int expected = first.opened < other.opened ? first.next : other.next;
  if (differs <= ends && differs != kNever)
    expected = mine_at <= theirs_at ? mine[at].expected : theirs[at].expected;
  return ScopeDifference{.number = number,
                         .first = CodeAt(first, at, number, expected),
                         .other = CodeAt(other, at, number, expected)};
}

}  // namespace ebb
