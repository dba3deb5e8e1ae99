#include "ebb/sharding/passes/residency.h"

#include <algorithm>
#include <limits>
#include <map>

namespace ebb::sharding {
namespace {

// Whether a unit stays gathered from one use until the next, by scope `to`.
// `used[s]`: elements of the units of all scopes up to s.
bool ExtendsTo(std::span<const PlannedScope> scopes, std::span<const int64_t> used,
               const ResidencyInterval& interval, int to, const ResidencyLimits& limits) {
  const int from = interval.last;
  if (interval.end > scopes[to].open_tick) return true;  // a scope of the unit is open
  if (used[to] - used[from] > limits.reuse_elements) return false;
  if (interval.end + 1 == scopes[to].open_tick) return true;
  return !limits.reshard_after_forward && scopes[from].round == scopes[to].round &&
         !scopes[from].backward;
}

std::vector<ResidencyInterval> FindIntervals(std::span<const PlannedScope> scopes,
                                             std::span<const int64_t> elements,
                                             const std::vector<bool>& kept_whole,
                                             const ResidencyLimits& limits) {
  std::vector<ResidencyInterval> intervals;
  std::map<int, size_t> current;  // unit -> its interval
  std::vector<int64_t> used;
  int64_t sum = 0;
  for (const PlannedScope& scope : scopes) used.push_back(sum += elements[scope.unit]);
  for (int s = 0; s < static_cast<int>(scopes.size()); ++s) {
    const int unit = scopes[s].unit;
    if (kept_whole[unit]) continue;
    const auto found = current.find(unit);
    if (found != current.end() && ExtendsTo(scopes, used, intervals[found->second], s, limits)) {
      ResidencyInterval& interval = intervals[found->second];
      interval.last = s;
      interval.end = std::max(interval.end, scopes[s].close_tick);
      continue;
    }
    const bool from_secondary = limits.has_secondary && found != current.end();
    if (from_secondary) {
      ResidencyInterval& before = intervals[found->second];
      before.fills_secondary = !before.from_secondary;
    }
    current[unit] = intervals.size();
    intervals.push_back({.unit = unit,
                         .first = s,
                         .last = s,
                         .end = scopes[s].close_tick,
                         .from_secondary = from_secondary});
  }
  return intervals;
}

// Neighbouring intervals of one kind of scopes of one round, gathered over the same ranks, while
// they fit the limits. A unit joins only if its last interval is over when the group is gathered:
// both have the same slot.
std::vector<GatherGroup> FindGroups(std::span<const PlannedScope> scopes,
                                    std::span<const int64_t> elements,
                                    const std::vector<ResidencyInterval>& intervals,
                                    const ResidencyLimits& limits) {
  const int64_t group_elements = std::min(limits.group_elements, limits.live_elements);
  std::vector<GatherGroup> groups;
  std::vector<int> over(elements.size(),
                        -1);  // by unit: tick at which its interval before this one is
  int64_t grouped = 0, in_slot = 0;
  for (int i = 0; i < static_cast<int>(intervals.size()); ++i) {
    const ResidencyInterval& interval = intervals[i];
    const int64_t size = elements[interval.unit];
    const bool reads = !limits.slot_elements.empty() && !interval.from_secondary;
    const int64_t slot_size = reads ? limits.slot_elements[interval.unit] : 0;
    bool joins = !groups.empty() && groups.back().from_secondary == interval.from_secondary &&
                 grouped + size <= group_elements &&
                 in_slot + slot_size <= limits.slot_elements_max;
    if (joins) {
      const int first = intervals[groups.back().intervals.front()].first;
      joins = scopes[first].round == scopes[interval.first].round &&
              scopes[first].kind() == scopes[interval.first].kind() &&
              over[interval.unit] < scopes[first].open_tick;
    }
    if (!joins) {
      groups.push_back({.intervals = {}, .from_secondary = interval.from_secondary});
      grouped = 0;
      in_slot = 0;
    }
    groups.back().intervals.push_back(i);
    grouped += size;
    in_slot += slot_size;
    over[interval.unit] = interval.end;
  }
  return groups;
}

class Prefetch {
 public:
  Prefetch(std::span<const PlannedScope> scopes, std::span<const int64_t> elements,
           Residency& residency, const ResidencyLimits& limits)
      : scopes_(scopes), elements_(elements), residency_(residency), limits_(limits) {}

  // `ahead_max`: groups of a round that are issued in the round before it.
  void Run(int ahead_max) {
    ahead_max_ = ahead_max;
    next_ = 0;
    live_.clear();
    if (limits_.prefetch_depth > 0) IssueAt(/*tick=*/0, /*current=*/0);
    for (int s = 0; s < static_cast<int>(scopes_.size()); ++s) IssueAt(scopes_[s].open_tick, s);
  }
  // By round: how many of its groups were issued in the round before it.
  std::vector<int> Ahead() const {
    std::vector<int> ahead(static_cast<size_t>(scopes_.back().round) + 1, 0);
    std::vector<int> begins(ahead.size(), 0);  // ticks
    for (size_t s = 1; s < scopes_.size(); ++s) {
      if (scopes_[s].round > scopes_[s - 1].round) begins[scopes_[s].round] = scopes_[s].open_tick;
    }
    for (const GatherGroup& group : residency_.groups) {
      const auto round = static_cast<size_t>(RoundOf(group));
      ahead[round] += group.issue < begins[round] ? 1 : 0;
    }
    return ahead;
  }

 private:
  // First the gathers that scope `current` needs, then prefetches.
  void IssueAt(int tick, int current) {
    std::erase_if(live_, [&](int i) { return residency_.intervals[i].end < tick; });
    std::vector<GatherGroup>& groups = residency_.groups;
    while (next_ < groups.size() && FirstUse(groups[next_]) <= current) IssueNext(tick);
    while (next_ < groups.size() && MayPrefetch(groups[next_], current)) IssueNext(tick);
  }

  void IssueNext(int tick) {
    GatherGroup& group = residency_.groups[next_++];
    group.issue = tick;
    live_.insert(live_.end(), group.intervals.begin(), group.intervals.end());
  }

  int RoundOf(const GatherGroup& group) const { return scopes_[FirstUse(group)].round; }
  // Counted among the groups of its round.
  int NumberInRound(size_t group) const {
    int number = 0;
    while (group > 0 && RoundOf(residency_.groups[group - 1]) == RoundOf(residency_.groups[group]))
      --group, ++number;
    return number;
  }

  int FirstUse(const GatherGroup& group) const {
    return residency_.intervals[group.intervals.front()].first;
  }

  bool MayPrefetch(const GatherGroup& group, int current) const {
    const int rounds_ahead = RoundOf(group) - scopes_[current].round;
    if (rounds_ahead > 1 || (rounds_ahead == 1 && NumberInRound(next_) >= ahead_max_)) return false;
    int64_t units_ahead = 0, elements_ahead = 0, live = 0;
    for (int i : live_) {
      const ResidencyInterval& interval = residency_.intervals[i];
      live += elements_[interval.unit];
      if (interval.first <= current) continue;
      ++units_ahead;
      elements_ahead += elements_[interval.unit];
    }
    if (units_ahead >= limits_.prefetch_depth || elements_ahead >= limits_.prefetch_elements)
      return false;
    for (int i : group.intervals) {
      const int unit = residency_.intervals[i].unit;
      live += elements_[unit];
      // A unit's next interval may not begin while the last one lasts: they share one slot.
      for (int other : live_) {
        if (residency_.intervals[other].unit == unit) return false;
      }
    }
    return live <= limits_.live_elements;
  }

  std::span<const PlannedScope> scopes_;
  std::span<const int64_t> elements_;
  Residency& residency_;
  const ResidencyLimits& limits_;
  int ahead_max_ = 0;
  size_t next_ = 0;        // the first group not issued yet
  std::vector<int> live_;  // intervals that are issued and not over
};

}  // namespace

Residency PlanResidency(std::span<const PlannedScope> scopes, std::span<const int64_t> elements,
                        const std::vector<bool>& kept_whole, const ResidencyLimits& limits) {
  Residency residency;
  residency.intervals = FindIntervals(scopes, elements, kept_whole, limits);
  residency.groups = FindGroups(scopes, elements, residency.intervals, limits);
  // Each middle round begins with as much issued ahead as it leaves, so all middle rounds are the
  // same.
  Prefetch prefetch(scopes, elements, residency, limits);
  int ahead_max = std::numeric_limits<int>::max();
  prefetch.Run(ahead_max);
  while (!scopes.empty() && scopes.back().round > 1) {
    const std::vector<int> ahead = prefetch.Ahead();
    if (ahead[1] == ahead[2]) break;
    ahead_max = std::min(ahead[1], ahead[2]);
    prefetch.Run(ahead_max);
  }
  residency.lifetimes.resize(elements.size());
  for (const GatherGroup& group : residency.groups) {
    for (int i : group.intervals) {
      const ResidencyInterval& interval = residency.intervals[i];
      residency.lifetimes[interval.unit].push_back({group.issue, interval.end});
    }
  }
  return residency;
}

void MarkReleases(const Residency& residency, std::span<PlannedScope> scopes) {
  for (const ResidencyInterval& interval : residency.intervals) {
    for (int s = interval.first; s <= interval.last; ++s) {
      PlannedScope& scope = scopes[s];
      if (scope.unit == interval.unit && scope.close_tick == interval.end) scope.releases = true;
    }
  }
}

}  // namespace ebb::sharding
