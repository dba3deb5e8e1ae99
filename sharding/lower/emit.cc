// The order of a step's operations: one walk over the opens and closes of its scopes says what may
// start at each. Gathers come as early as their slot and the prefetch limits allow, reductions with
// the last gradient of their bucket, early updates when a unit's gradient is final.
//
//   open F1     gather 2 | upload 3, gather 3
//   close B1    reduce bucket 0, update sub-groups 4 and 5, read the states of 6
//
// Slots are taken round-robin: an operation is issued after the last use of its slot.
#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "ebb/sharding/lower/lower_boundaries.h"
#include "ebb/sharding/lower/lower_gathers.h"
#include "ebb/sharding/lower/lower_records.h"
#include "ebb/sharding/lower/lower_reductions.h"
#include "ebb/sharding/lower/lower_scopes.h"
#include "ebb/sharding/lower/lower_updates.h"
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

bool HasParametersOnNvme(const PassInputs& in) {
  for (int unit = 0; unit < in.plan.table.units; ++unit)
    if (SwapBytes(in.plan.table, unit) > 0) return true;
  return false;
}

// Early updates that wait for the last gradient, if states are below the device and no parameters are
// on NVMe (those have carried updates): by elements one of three, the second. They come in forward
// order. Otherwise, where updates take longer than backward, the next forward would begin
// with the unit that is updated last.
//
//   backward  B5 B4 B3 B2 B1 B0              F0 F1 F2 F3 F4 F5
//   updates      u5    u3    u2    u0  u1    u4
std::vector<bool> BehindGradients(const PassInputs& in) {
  constexpr int64_t kShare = 3;
  const Decisions& d = in.plan.decisions;
  std::vector<bool> behind(in.plan.layout.units.size(), false);
  if (in.kind != PlanKind::kStep || d.timing != UpdateTiming::kEarly ||
      d.optimizer_tier == Tier::kDevice || HasParametersOnNvme(in))
    return behind;
  int64_t taken = 0, seen = 0;  // elements
  for (int unit : TrainableInForward(in)) {
    const int64_t elements = in.plan.layout.units[unit].trainable.shard;
    if (d.has_matrices(unit)) continue;
    const auto groups = in.plan.table.SubGroupsOf(unit);
    if (std::all_of(groups.begin(), groups.end(),
                    [](const SubGroup& group) { return group.tier == Tier::kDevice; }))
      continue;  // it is short there
    seen += elements;
    if (kShare * (2 * taken + elements) > 2 * seen) continue;
    behind[unit] = true;
    taken += elements;
  }
  return behind;
}

class Emission {
 public:
  Emission(const PassInputs& in, const SwapIns& swap_ins);

  OpWriter Run();

 private:
  void WalkScopes();
  void Drain();
  void Finish();
  void BeginMoment(Moment::Kind kind, int scope);
  void Mark();
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
  void EndMatrices();
  void UpdateRest();
  void TakeParameterNorms();

  bool IsCarried(int unit) const { return swap_ins_.carried[unit]; }
  // Its update is issued when its gradient is final.
  bool IsEarly(int unit) const {
    return d_.timing == UpdateTiming::kEarly && !IsCarried(unit) && !behind_gradients_[unit];
  }
  auto SubGroupsOf(int unit) const { return in_.plan.table.SubGroupNumbersOf(unit); }
  // At stage 0 every rank updates with all of them.
  bool GathersGradients() const { return d_.stage == 0 && d_.world > 1; }

  const PassInputs& in_;
  const SwapIns& swap_ins_;
  const Decisions& d_;
  OpWriter writer_;
  ScopeLowering scopes_;
  GatherLowering gathers_;
  BoundaryLowering boundaries_;
  ReductionLowering reductions_;
  UpdateLowering updates_;
  Moment::Kind moment_ = Moment::kBegin;  // the newest
  int scope_ = -1, round_ = 0;            // of that
  size_t next_group_ = 0;                 // of gathers
  size_t next_swap_in_ = 0;
  int uploaded_swap_ins_ = 0;
  BoundaryTicks boundary_ticks_;
  const std::vector<bool> behind_gradients_;  // by unit
  std::vector<bool> updated_;                 // by unit: its update is issued
  int carried_left_ = 0;                      // units to come
  int begun_ = -1;                            // the unit whose matrices are on their way
  // Sub-groups of early updates, in their order, with states that have been or are being read; and
  // those of them that are not updated yet.
  std::vector<int> early_sub_groups_;
  size_t next_early_ = 0;
  std::set<int> ahead_;
};

Emission::Emission(const PassInputs& in, const SwapIns& swap_ins)
    : in_(in),
      swap_ins_(swap_ins),
      d_(in.plan.decisions),
      writer_(in.plan),
      scopes_(in, writer_),
      gathers_(in, swap_ins, writer_),
      boundaries_(in, writer_),
      reductions_(in, writer_),
      updates_(in, swap_ins, writer_),
      behind_gradients_(BehindGradients(in)),
      updated_(in.plan.layout.units.size(), false),
      carried_left_(
          static_cast<int>(std::count(swap_ins.carried.begin(), swap_ins.carried.end(), true))) {}

OpWriter Emission::Run() {
  if (in_.kind == PlanKind::kDrain) {
    Drain();
  } else {
    WalkScopes();
    Finish();
  }
  return std::move(writer_);
}

// Slots begin anew in every round, so that all in the middle are the same.
void Emission::BeginMoment(Moment::Kind kind, int scope) {
  scopes_.EndMoment(moment_, scope_);
  moment_ = kind;
  scope_ = scope;
  writer_.BeginMoment(kind, scope);
  if (scope < 0 || in_.plan.scopes[scope].round == round_) return;
  round_ = in_.plan.scopes[scope].round;
  if (!in_.repeats_round()) return;
  boundaries_.BeginRound();
  reductions_.BeginRound();
}

// Outside of scopes a trainer may add to the loss.
void Emission::Mark() {
  writer_.operands().AddControl(writer_.operands().sums(), Access::kReadWrite);
  writer_.Issue({.role = Role::kMark, .stream = StreamId::kCompute});
}

void Emission::Drain() {
  BeginMoment(Moment::kBegin, -1);
  for (const SwapIn& swap_in : swap_ins_.reads)
    for (int unit : swap_in.updated) Update(unit);
  BeginMoment(Moment::kFinish, -1);
}

void Emission::WalkScopes() {
  std::vector<bool> leaves;
  for (int visit = 0; visit < in_.plan.table.visits; ++visit)
    leaves.push_back(in_.plan.table.Has(Purpose::kOutputAway, visit));
  boundary_ticks_ = TicksOfBoundaries(in_.plan.scopes, leaves);
  FindEarlyUpdates();
  const std::vector<ScopeTick> ticks = TicksOf(in_.plan.scopes);
  BeginMoment(Moment::kBegin, -1);
  if (d_.timing == UpdateTiming::kEarly && !writer_.operands().is_walk()) PrepareConstants(writer_);
  Mark();
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
    const int group = opens ? -1 : in_.reduction.group_of_scope[scope];
    if (group >= 0 && in_.reduction.groups[group].back() == scope) Reduce(group);
  }
}

void Emission::Finish() {
  BeginMoment(Moment::kFinish, -1);
  if (in_.kind == PlanKind::kWalk) return Exchange();
  if (d_.holds) HoldNorms();
  for (int unit : TrainableInForward(in_))
    if (behind_gradients_[unit]) Update(unit);
  Exchange();
  if (d_.has_norms()) TakeParameterNorms();
  UpdateRest();
}

void Emission::Gather(int tick) {
  const std::vector<GatherGroup>& groups = in_.residency.groups;
  for (; next_group_ < groups.size() && groups[next_group_].issue == tick; ++next_group_) {
    const int group = static_cast<int>(next_group_);
    if (!groups[next_group_].from_secondary) {
      const int swap_in = swap_ins_.of_group[next_group_];
      if (swap_in >= 0) ReadParameters();
      gathers_.Upload(group);
      if (swap_in >= 0) {
        uploaded_swap_ins_ = swap_in + 1;
        ReadParameters();
      }
    }
    gathers_.Gather(group);
  }
}

bool Emission::MayRead(const SwapIn& swap_in) const {
  if (swap_in.after >= uploaded_swap_ins_ || swap_in.round > round_ + 1) return false;
  return std::all_of(swap_in.behind.begin(), swap_in.behind.end(),
                     [&](int unit) { return updated_[unit]; });
}

void Emission::ReadParameters() {
  while (next_swap_in_ < swap_ins_.reads.size() && MayRead(swap_ins_.reads[next_swap_in_])) {
    const int swap_in = static_cast<int>(next_swap_in_++);
    gathers_.Read(swap_in);
    for (int unit : swap_ins_.reads[swap_in].updated) Update(unit);
  }
}

// Boundaries that are needed soon.
void Emission::BringBoundaries(int tick) {
  if (d_.activation_tier == Tier::kNvme) {
    for (int visit : boundary_ticks_.reading[tick]) boundaries_.Read(visit);
  }
  for (int visit : boundary_ticks_.coming[tick]) boundaries_.Bring(visit);
}

// Boundaries that the closed scope was the last to read.
void Emission::SendBoundaries(int tick) {
  for (int visit : boundary_ticks_.leaving[tick]) boundaries_.Send(visit);
}

void Emission::Reduce(int group) {
  reductions_.Reduce(group);
  std::vector<int> complete;
  for (int scope : in_.reduction.groups[group]) {
    if (in_.reduction.is_last[scope]) complete.push_back(in_.plan.scopes[scope].unit);
  }
  if (GathersGradients() && !d_.holds && !complete.empty()) reductions_.GatherGradients(complete);
  for (int unit : complete)
    if (IsEarly(unit)) Update(unit);
  ReadParameters();  // into what updates have left
}

// Norms of the gradients that the trainer has left in the shards, in the order of the reductions.
void Emission::HoldNorms() {
  std::vector<int> units;
  for (const std::vector<int>& group : in_.reduction.groups) {
    for (int scope : group) {
      if (in_.reduction.is_first[scope]) units.push_back(in_.plan.scopes[scope].unit);
    }
  }
  reductions_.HeldNorms(units);
  if (GathersGradients()) reductions_.GatherGradients(units);
}

void Emission::Exchange() {
  Mark();
  ExchangeRecords(in_.plan, writer_);
}

// Carried updates come first, in forward; then early ones, in the order in which gradients are
// final; then those behind all gradients, in forward order.
void Emission::FindEarlyUpdates() {
  if (d_.timing != UpdateTiming::kEarly) return;
  for (const std::vector<int>& group : in_.reduction.groups) {
    for (int scope : group) {
      const int unit = in_.plan.scopes[scope].unit;
      if (!in_.reduction.is_last[scope] || !IsEarly(unit) || d_.has_matrices(unit)) continue;
      for (const int g : SubGroupsOf(unit)) early_sub_groups_.push_back(g);
    }
  }
  for (int unit : TrainableInForward(in_)) {
    if (!behind_gradients_[unit]) continue;
    for (const int g : SubGroupsOf(unit)) early_sub_groups_.push_back(g);
  }
}

// While a disk would wait for the next gradient, it reads states for the next updates. The
// sub-group that is updated keeps a slot of its own. Only in steps with early updates: late ones
// read all they need at once.
void Emission::ReadStatesAhead() {
  if (!d_.matrices.empty()) return;  // Muon's take all slots
  while (carried_left_ == 0 && next_early_ < early_sub_groups_.size() &&
         ahead_.size() < kWorkSlots - 1) {
    const int sub_group = early_sub_groups_[next_early_++];
    ahead_.insert(sub_group);
    updates_.ReadStates(sub_group);
  }
}

// Muon's update of the unit that was begun last, if there is one.
void Emission::EndMatrices() {
  if (begun_ < 0) return;
  updates_.EndMatrices(begun_);
  updated_[std::exchange(begun_, -1)] = true;
}

void Emission::Update(int unit) {
  if (d_.has_matrices(unit)) {
    updates_.BeginMatrices(unit);
    EndMatrices();
    begun_ = unit;
    return;
  }
  for (const int g : SubGroupsOf(unit)) {
    if (ahead_.erase(g) == 0) updates_.ReadStates(g);
    updates_.Update(g);
    if (!IsCarried(unit)) ReadStatesAhead();
  }
  updated_[unit] = true;
  if (IsCarried(unit) && --carried_left_ == 0) ReadStatesAhead();
}

// A group of refreshes follows the last update it needs.
void Emission::UpdateRest() {
  std::vector<int> refreshed;
  int64_t grouped = 0;
  const auto flush = [&] {
    if (!refreshed.empty()) {
      EndMatrices();
      gathers_.Refresh(std::exchange(refreshed, {}));
    }
    grouped = 0;
  };
  for (int unit : TrainableInForward(in_)) {
    if (IsCarried(unit)) continue;
    const int64_t elements = in_.plan.layout.units[unit].trainable.elements;
    const bool refreshes = d_.kept_whole[unit] && d_.stage > 0 && d_.shards > 1;
    if (refreshes && grouped > 0 && grouped + elements > in_.group_elements) flush();
    if (!updated_[unit] && begun_ != unit) Update(unit);
    if (!refreshes) continue;
    refreshed.push_back(unit);
    grouped += elements;
  }
  flush();
  EndMatrices();
}

// Optimizers that take norms (LAMB, LARS) need sums before their updates: each rank sums its part
// of every parameter, sub-group by sub-group, and the ranks exchange these. Sub-groups pass through
// the slots of updates, and nothing is written; the updates bring them again.
//
//   read states    s0  s1  s2             s0  s1  s2
//   host update        n0  n1  n2             u0  u1  u2        n: sums, u: update
//   reduce                        exchange
//   write                                         s0  s1  s2
void Emission::TakeParameterNorms() {
  for (int unit : TrainableInForward(in_)) {
    if (d_.norm_states[unit] < 0) continue;
    for (const int g : SubGroupsOf(unit)) updates_.TakeNorms(g);
  }
  ExchangeNorms(in_.plan, writer_);
}

}  // namespace

OpWriter Emit(const PassInputs& in, const SwapIns& swap_ins) {
  return Emission(in, swap_ins).Run();
}

}  // namespace ebb::sharding
