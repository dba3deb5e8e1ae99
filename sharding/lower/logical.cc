#include "ebb/sharding/lower/logical.h"

#include <algorithm>
#include <set>
#include <utility>

#include "ebb/sharding/passes/boundaries.h"
#include "ebb/sharding/passes/rows.h"

namespace ebb::sharding {
namespace {

// Trainable units in the order in which forward first needs them.
std::vector<int> TrainableInForward(const PassInputs& in) {
  std::vector<int> units;
  std::vector<bool> seen(in.plan.layout.units.size(), false);
  for (const Visit& visit : in.model.forward) {
    const auto unit = static_cast<size_t>(visit.unit);
    if (in.plan.decisions.trainable[unit] && !seen[unit]) units.push_back(static_cast<int>(unit));
    seen[unit] = true;
  }
  return units;
}

class LogicalPlanner {
 public:
  LogicalPlanner(const PassInputs& in, const SwapIns& swap_ins);

  std::vector<LogicalMoment> Run();

 private:
  void WalkScopes();
  void Drain();
  void Finish();
  void BeginMoment(Moment::Kind kind, int scope);
  void Issue(LogicalOp operation) { moments_.back().operations.push_back(std::move(operation)); }

  void Gather(int tick);
  void ReadParameters();  // as far as gathers and updates have left slots
  bool MayRead(const SwapIn& swap_in) const;
  void BringBoundaries(int tick);
  void SendBoundaries(int tick);
  void Reduce(int group);
  void HoldNorms();
  void Exchange();
  void FindEarlyUpdates();
  void ReadStatesAhead();
  void Update(int unit);
  void UpdateRest();
  void TakeParameterNorms();

  bool IsCarried(int unit) const { return swap_ins_.carried[static_cast<size_t>(unit)]; }
  auto SubGroupsOf(int unit) const { return in_.plan.table.SubGroupNumbersOf(unit); }
  // At stage 0 every rank updates with all of them.
  bool GathersGradients() const { return d_.stage == 0 && d_.world > 1; }

  const PassInputs& in_;
  const SwapIns& swap_ins_;
  const Decisions& d_;
  std::vector<LogicalMoment> moments_;
  int round_ = 0;          // of the newest moment
  size_t next_group_ = 0;  // of gathers
  size_t next_swap_in_ = 0;
  int uploaded_swap_ins_ = 0;
  BoundaryTicks boundaries_;
  std::vector<bool> updated_;  // by unit: its update is issued
  int carried_left_ = 0;       // units to come
  // Sub-groups of early updates, in their order, with states that have been or are being read; and
  // those of them that are not updated yet.
  std::vector<int> early_sub_groups_;
  size_t next_early_ = 0;
  std::set<int> ahead_;
};

LogicalPlanner::LogicalPlanner(const PassInputs& in, const SwapIns& swap_ins)
    : in_(in),
      swap_ins_(swap_ins),
      d_(in.plan.decisions),
      updated_(in.plan.layout.units.size(), false),
      carried_left_(
          static_cast<int>(std::count(swap_ins.carried.begin(), swap_ins.carried.end(), true))) {}

std::vector<LogicalMoment> LogicalPlanner::Run() {
  if (in_.kind == PlanKind::kDrain) {
    Drain();
  } else {
    WalkScopes();
    Finish();
  }
  return std::move(moments_);
}

void LogicalPlanner::BeginMoment(Moment::Kind kind, int scope) {
  moments_.push_back({.kind = kind, .scope = scope});
  if (scope >= 0) round_ = in_.plan.scopes[static_cast<size_t>(scope)].round;
}

void LogicalPlanner::Drain() {
  BeginMoment(Moment::kBegin, -1);
  for (const SwapIn& swap_in : swap_ins_.reads)
    for (int unit : swap_in.updated) Update(unit);
  BeginMoment(Moment::kFinish, -1);
}

void LogicalPlanner::WalkScopes() {
  std::vector<bool> leaves;
  for (int visit = 0; visit < in_.plan.table.visits; ++visit)
    leaves.push_back(in_.plan.table.Has(Purpose::kOutputAway, visit));
  boundaries_ = TicksOfBoundaries(in_.plan.scopes, leaves);
  FindEarlyUpdates();
  const std::vector<ScopeTick> ticks = TicksOf(in_.plan.scopes);
  moments_.reserve(ticks.size() + 2);
  BeginMoment(Moment::kBegin, -1);
  Issue({.kind = LogicalOp::kMark});
  ReadParameters();
  ReadStatesAhead();
  Gather(/*tick=*/0);
  for (int tick = 1; const auto& [scope, opens] : ticks) {
    BeginMoment(opens ? Moment::kOpen : Moment::kClose, scope);
    if (opens) {
      Gather(tick);
    } else {
      SendBoundaries(tick);
    }
    BringBoundaries(tick++);
    const int group = opens ? -1 : in_.reduction.group_of_scope[static_cast<size_t>(scope)];
    if (group >= 0 && in_.reduction.groups[static_cast<size_t>(group)].back() == scope)
      Reduce(group);
  }
}

void LogicalPlanner::Finish() {
  BeginMoment(Moment::kFinish, -1);
  if (in_.kind == PlanKind::kWalk) return Exchange();
  if (d_.holds) HoldNorms();
  Exchange();
  if (d_.has_norms()) TakeParameterNorms();
  UpdateRest();
}

void LogicalPlanner::Gather(int tick) {
  const std::vector<GatherGroup>& groups = in_.residency.groups;
  for (; next_group_ < groups.size() && groups[next_group_].issue == tick; ++next_group_) {
    const int group = static_cast<int>(next_group_);
    if (!groups[next_group_].from_secondary) {
      const int swap_in = swap_ins_.of_group[next_group_];
      if (swap_in >= 0) ReadParameters();
      Issue({.kind = LogicalOp::kUploadParameters, .index = group});
      if (swap_in >= 0) {
        uploaded_swap_ins_ = swap_in + 1;
        ReadParameters();
      }
    }
    Issue({.kind = LogicalOp::kGather, .index = group});
  }
}

bool LogicalPlanner::MayRead(const SwapIn& swap_in) const {
  if (swap_in.after >= uploaded_swap_ins_ || swap_in.round > round_ + 1) return false;
  return std::all_of(swap_in.behind.begin(), swap_in.behind.end(),
                     [&](int unit) { return updated_[static_cast<size_t>(unit)]; });
}

void LogicalPlanner::ReadParameters() {
  while (next_swap_in_ < swap_ins_.reads.size() && MayRead(swap_ins_.reads[next_swap_in_])) {
    const size_t swap_in = next_swap_in_++;
    Issue({.kind = LogicalOp::kReadParameters, .index = static_cast<int>(swap_in)});
    for (int unit : swap_ins_.reads[swap_in].updated) Update(unit);
  }
}

// Boundaries that are needed soon.
void LogicalPlanner::BringBoundaries(int tick) {
  if (d_.activation_tier == Tier::kNvme) {
    for (int visit : boundaries_.reading[static_cast<size_t>(tick)])
      Issue({.kind = LogicalOp::kReadBoundary, .index = visit});
  }
  for (int visit : boundaries_.coming[static_cast<size_t>(tick)])
    Issue({.kind = LogicalOp::kBringBoundary, .index = visit});
}

// Boundaries that the closed scope was the last to read.
void LogicalPlanner::SendBoundaries(int tick) {
  for (int visit : boundaries_.leaving[static_cast<size_t>(tick)])
    Issue({.kind = LogicalOp::kSendBoundary, .index = visit});
}

void LogicalPlanner::Reduce(int group) {
  Issue({.kind = LogicalOp::kReduce, .index = group});
  std::vector<int> complete;
  for (int scope : in_.reduction.groups[static_cast<size_t>(group)]) {
    if (in_.reduction.is_last[static_cast<size_t>(scope)])
      complete.push_back(in_.plan.scopes[static_cast<size_t>(scope)].unit);
  }
  if (GathersGradients() && !d_.holds && !complete.empty())
    Issue({.kind = LogicalOp::kGatherGradients, .units = complete});
  for (int unit : complete)
    if (d_.timing == UpdateTiming::kEarly && !IsCarried(unit)) Update(unit);
  ReadParameters();  // into what updates have left
}

// Norms of the gradients that the trainer has left in the shards, in the order of the reductions.
void LogicalPlanner::HoldNorms() {
  std::vector<int> units;
  for (const std::vector<int>& group : in_.reduction.groups) {
    for (int scope : group) {
      if (in_.reduction.is_first[static_cast<size_t>(scope)])
        units.push_back(in_.plan.scopes[static_cast<size_t>(scope)].unit);
    }
  }
  Issue({.kind = LogicalOp::kHeldNorms, .units = units});
  if (GathersGradients()) Issue({.kind = LogicalOp::kGatherGradients, .units = units});
}

void LogicalPlanner::Exchange() {
  Issue({.kind = LogicalOp::kMark});
  Issue({.kind = LogicalOp::kExchange});
}

// Carried updates come first, in forward; then early ones, in the order in which gradients are
// final.
void LogicalPlanner::FindEarlyUpdates() {
  if (d_.timing != UpdateTiming::kEarly) return;
  for (const std::vector<int>& group : in_.reduction.groups) {
    for (int scope : group) {
      const int unit = in_.plan.scopes[static_cast<size_t>(scope)].unit;
      if (!in_.reduction.is_last[static_cast<size_t>(scope)] || IsCarried(unit)) continue;
      for (const int g : SubGroupsOf(unit)) early_sub_groups_.push_back(g);
    }
  }
}

// While a disk would wait for the next gradient, it reads states for the next updates. The
// sub-group that is updated keeps a slot of its own. Only in steps with early updates: late ones
// read all they need at once.
void LogicalPlanner::ReadStatesAhead() {
  while (carried_left_ == 0 && next_early_ < early_sub_groups_.size() &&
         ahead_.size() < kWorkSlots - 1) {
    const int sub_group = early_sub_groups_[next_early_++];
    ahead_.insert(sub_group);
    Issue({.kind = LogicalOp::kReadStates, .index = sub_group});
  }
}

void LogicalPlanner::Update(int unit) {
  for (const int g : SubGroupsOf(unit)) {
    if (ahead_.erase(g) == 0) Issue({.kind = LogicalOp::kReadStates, .index = g});
    Issue({.kind = LogicalOp::kUpdate, .index = g});
    if (!IsCarried(unit)) ReadStatesAhead();
  }
  updated_[static_cast<size_t>(unit)] = true;
  if (IsCarried(unit) && --carried_left_ == 0) ReadStatesAhead();
}

// A group of refreshes follows the last update it needs.
void LogicalPlanner::UpdateRest() {
  LogicalOp refresh{.kind = LogicalOp::kRefresh};
  int64_t grouped = 0;
  const auto flush = [&] {
    if (!refresh.units.empty()) Issue(std::exchange(refresh, {.kind = LogicalOp::kRefresh}));
    grouped = 0;
  };
  for (int unit : TrainableInForward(in_)) {
    if (IsCarried(unit)) continue;
    const int64_t elements = in_.plan.layout.units[static_cast<size_t>(unit)].trainable.elements;
    const bool refreshes =
        d_.kept_whole[static_cast<size_t>(unit)] && d_.stage > 0 && d_.shards > 1;
    if (refreshes && grouped > 0 && grouped + elements > in_.group_elements) flush();
    if (!updated_[static_cast<size_t>(unit)]) Update(unit);
    if (!refreshes) continue;
    refresh.units.push_back(unit);
    grouped += elements;
  }
  flush();
}

// Optimizers that take norms (LAMB, LARS) need sums before their updates: each rank sums its part
// of every parameter, sub-group by sub-group, and the ranks exchange these. Sub-groups pass through
// the slots of updates, and nothing is written; the updates bring them again.
//
//   read states    s0  s1  s2             s0  s1  s2
//   host update        n0  n1  n2             u0  u1  u2        n: sums, u: update
//   reduce                        exchange
//   write                                         s0  s1  s2
void LogicalPlanner::TakeParameterNorms() {
  for (int unit : TrainableInForward(in_)) {
    if (d_.norm_states[static_cast<size_t>(unit)] < 0) continue;
    for (const int g : SubGroupsOf(unit)) Issue({.kind = LogicalOp::kParameterNorms, .index = g});
  }
  Issue({.kind = LogicalOp::kExchangeNorms});
}

}  // namespace

std::vector<LogicalMoment> PlanLogical(const PassInputs& in, const SwapIns& swap_ins) {
  return LogicalPlanner(in, swap_ins).Run();
}

}  // namespace ebb::sharding
