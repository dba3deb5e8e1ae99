#include "replay.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ebb::sharding {

OpLists::OpLists(std::span<const Plan* const> plans) {
  std::vector<const OpList*> all;
  for (const Plan* plan : plans) {
    for (const bool carrying : {false, true})
      all.push_back(&(lists_[{plan, carrying}] = ListOf(*plan, carrying)));
  }
  cells_ = std::make_unique<Cells>(all, *plans.front());
  for (auto& [key, list] : lists_) DeriveWaits(*cells_, list);
}

OpList& OpLists::Of(const Plan& plan, bool carrying) {
  const auto [found, is_new] = lists_.try_emplace({&plan, carrying});
  if (is_new) {
    found->second = ListOf(plan, carrying);
    DeriveWaits(*cells_, found->second);
  }
  return found->second;
}

Replay::Replay(const PlanInputs& inputs, const Plan& plan, int rank, OpLists& lists,
               const Plan* drain)
    : inputs_(inputs),
      rank_(rank % plan.decisions.shards),
      plan_(&plan),
      drain_(drain),
      memory_(order_, plan.table),
      lists_(lists),
      frontier_(lists.cells().count()) {
  constexpr int kStart = HappensBefore::kStart;
  const Decisions& d = plan.decisions;
  const int units = static_cast<int>(plan.layout.units.size());
  sub_group_versions_.assign(plan.table.sub_groups.size(), 0);
  for (int u = 0; u < units; ++u) {
    if (d.kept_whole[u]) {
      memory_.Write(kStart, Gathered(u), {Content::kParameter, u, 0});
      memory_.Write(kStart, GatheredFrozen(u), {Content::kFrozen, u});
      continue;
    }
    for (const bool of_trainable : {true, false}) {
      Content content = of_trainable ? OwnParametersOf(u, 0) : FrozenOf(u);
      const int64_t slice = content.first, size = SizeOf(d.compute_of(u));
      const int row = table().Find(Purpose::kParameter, u, of_trainable);
      for (const Extent& piece : table().ExtentsOf(row)) {
        content.first = slice + piece.begin * size;
        memory_.Write(kStart, RangeOf(piece.place, piece.count() * size), content);
      }
    }
  }
  for (const SubGroup& group : plan.table.sub_groups) {
    const int u = group.unit;
    if (d.writes_parameters(u) && d.keeps_master(u)) {
      const Place master = table().PlaceOf(table().Find(Purpose::kMaster, u), group.begin);
      memory_.Write(kStart, RangeOf(master, d.MasterBytes(u, group.count())),
                    {Content::kMaster, u, 0, 0, d.MasterBytes(u, group.begin)});
    }
    for (int i = 0; i < inputs_.optimizer_states; ++i) {
      const int state = table().Find(Purpose::kState, u, /*trainable=*/true, i);
      memory_.Write(kStart,
                    RangeOf(table().PlaceOf(state, group.begin), d.StateBytes(u, i, group.count())),
                    {Content::kOptimizerState, u, 0, i, d.StateBytes(u, i, group.begin)});
    }
  }
  Fail(memory_.complaint());
}

void Replay::Step(const Plan& plan, StepOptions options) {
  if (!plan.carries_updates) Drain();
  options_ = std::move(options);
  const bool applies = plan.decisions.timing == UpdateTiming::kEarly || !options_.overflows;
  options_.overflows = !applies;
  Begin(plan, /*walk=*/false);
  Run();
  if (!violation_.empty()) return;
  for (int u = 0; u < static_cast<int>(contributions_.size()); ++u) {
    if (plan.decisions.trainable[u] && contributions_[u] != expected_contributions(u)) {
      Fail(absl::StrCat("step ", steps_, ": unit ", u, " has ", contributions_[u],
                        " contributions instead of ", expected_contributions(u)));
    }
  }
  options_ = {};
  contributions_carried_ = contributions_;
  carries_ = plan.carries_updates && applies;
  version_ += applies ? 1 : 0;
  ++steps_;
  CheckVersions();
}

void Replay::Walk(const Plan& plan) {
  Drain();
  Begin(plan, /*walk=*/true);
  Run();
}

void Replay::Drain() {
  if (!carries_) return;
  if (drain_ == nullptr) return Fail("updates are carried, and there is no plan to drain them");
  Begin(*drain_, /*walk=*/false);
  Run();
  carries_ = false;
  CheckVersions();
}

// Every sub-group has been updated once a step, but for those with updates on their way to the
// next one.
void Replay::CheckVersions() {
  for (size_t g = 0; g < sub_group_versions_.size(); ++g) {
    const int u = table().sub_groups[g].unit;
    const std::span<const Extent> pieces = table().ExtentsOf(table().Find(Purpose::kParameter, u));
    const bool swaps = plan_->decisions.carried[u] &&
                       std::any_of(pieces.begin(), pieces.end(), [](const Extent& piece) {
                         return piece.place.tier == Tier::kNvme;
                       });
    const int expected = version_ - (carries_ && swaps ? 1 : 0);
    if (sub_group_versions_[g] == expected) continue;
    Fail(absl::StrCat("after ", steps_, " steps: sub-group ", g, " of unit ", u, " has ",
                      sub_group_versions_[g], " updates instead of ", expected));
  }
}

void Replay::Begin(const Plan& plan, bool walk) {
  plan_ = &plan;
  walks_ = walk;
  list_ = &lists_.Of(plan, carries_);
  things_.assign(list_->ops.size(), HappensBefore::kStart);
  contributions_.assign(plan.layout.units.size(), 0);
  norms_.clear();
  norms_taken_.assign(plan.table.sub_groups.size(), -1);
  norms_begun_[0] = norms_begun_[1] = false;
  norms_exchanged_ = -1;
}

void Replay::Run() {
  tick_ = -1;
  for (const Moment& moment : list_->moments) {
    ++tick_;
    for (int i = moment.begin; i < moment.end; ++i) Issue(i);
    if (!violation_.empty()) return;
  }
  if (plan_ != drain_) walked_ += plan_->decisions.rounds;
}

int Replay::Add(int index) {
  const Op& op = list_->ops[static_cast<size_t>(index)];
  std::vector<std::array<int, 2>>& events = events_[list_];
  if (events.empty()) {
    for (size_t other = 0; other < list_->ops.size(); ++other) {
      const Op& each = list_->ops[other];
      const bool awaited = list_->waits[other].awaited;
      const int first = awaited ? frontier_.AddEvent(each.ends) : -1;
      events.push_back({first, awaited && each.by_parity ? frontier_.AddEvent(each.ends) : first});
    }
    thing_of_event_.resize(static_cast<size_t>(frontier_.events()), HappensBefore::kStart);
  }
  const Waits& waits = list_->waits[static_cast<size_t>(index)];
  const int parity = steps_ % 2;
  const auto event_of = [&](int of) { return events[static_cast<size_t>(of)][parity]; };
  std::vector<int> after;
  for (int wait : waits.on) {
    after.push_back(things_[static_cast<size_t>(wait)]);
    frontier_.Follow(op.starts, event_of(wait));
  }
  frontier_.Enter(op.starts, waits.enters, parity,
                  [&](int event) { after.push_back(thing_of_event_[static_cast<size_t>(event)]); });
  const int thing = order_.Add(op.starts, op.ends, after);
  const int event = event_of(index);
  frontier_.Issue(op.starts, op.ends, event);
  if (event >= 0) {
    thing_of_event_[static_cast<size_t>(event)] = thing;
    frontier_.Leave(waits.leaves, parity, event);
  }
  return things_[static_cast<size_t>(index)] = thing;
}

void Replay::Issue(int index) {
  const Op& op = list_->ops[static_cast<size_t>(index)];
  const int thing = Add(index);
  const int scope = op.scope;
  const std::string step = absl::StrCat(plan_ == drain_ ? "drain before " : "",
                                        walks_ ? "walk before " : "", "step ", steps_);
  if (scope >= 0) {
    const PlannedScope& s = plan_->scopes[static_cast<size_t>(scope)];
    names_.push_back(absl::StrCat(step, " ", s.round, ":",
                                  s.backward    ? "B"
                                  : s.recompute ? "R"
                                                : "F",
                                  s.visit));
    // From this tick to the next, with all that is open then.
    for (int open = 0; open < static_cast<int>(plan_->scopes.size()); ++open) {
      const PlannedScope& other = plan_->scopes[static_cast<size_t>(open)];
      if (other.open_tick > tick_ || tick_ >= other.close_tick) continue;
      if (IsLeftOut(other.unit)) {
        if (tick_ + 1 == other.close_tick) LeaveOut(thing, open);
      } else {
        RunKernels(thing, open);
      }
    }
  } else if (op.code() == Code::kKernels) {
    names_.push_back(absl::StrCat(step, " kernels of no scope"));
    last_kernels_ = thing;
  } else {
    names_.push_back(absl::StrCat(step, " #", index, " ", std::string(Name(op.role))));
    Touch(thing, op);
  }
  Fail(memory_.complaint());
}

void Replay::Touch(int thing, const Op& operation) {
  switch (operation.role) {
    case Role::kMark:
    case Role::kScopes:
    case Role::kSave:
      break;
    case Role::kPrepare:
      memory_.Write(thing, Control(cells().early()), {Content::kExchanged, steps_});
      break;
    case Role::kRead:
    case Role::kUpload:
    case Role::kDownload:
    case Role::kWrite:
      Move(thing, operation);
      break;
    case Role::kCastMasters:
      CastMasters(thing, operation);
      break;
    case Role::kGather:
      Gather(thing, operation);
      break;
    case Role::kFillSecondary:
      FillSecondary(thing, operation);
      break;
    case Role::kGatherSecondary:
      GatherSecondary(thing, operation);
      break;
    case Role::kCast:
      Cast(thing, operation);
      break;
    case Role::kReduce:
      Reduce(thing, operation);
      break;
    case Role::kAllReduce:
      AllReduce(thing, operation);
      break;
    case Role::kRound:
      Round(thing, operation);
      break;
    case Role::kAccumulate:
      Accumulate(thing, operation);
      norms_.push_back(thing);
      break;
    case Role::kSumTensor:
      SumTensor(thing, operation);
      break;
    case Role::kNorm:
      Norm(thing, operation);
      norms_.push_back(thing);
      break;
    case Role::kGatherGradient:
      GatherGradient(thing, operation);
      break;
    case Role::kSeal:
      Seal(thing, operation);
      break;
    case Role::kCopyControl:
      CopyControl(thing, operation.operands);
      break;
    case Role::kExchange:
      Pass(thing, operation.operands, Content::kExchanged);
      break;
    case Role::kExchangeNorms:
      Pass(thing, operation.operands, Content::kNormRecords);
      break;
    case Role::kConclude:
      memory_.Read(thing, Control(is_walk() ? cells().walk_records() : cells().records()),
                   {Content::kExchanged, steps_});
      if (!is_walk())
        memory_.Write(thing, Control(cells().constants()), {Content::kExchanged, steps_});
      break;
    case Role::kParameterNorms:
      ParameterNorms(thing, operation);
      break;
    case Role::kSealNorms:
      SealNorms(thing);
      break;
    case Role::kConcludeNorms:
      ConcludeNorms(thing);
      break;
    case Role::kUpdate:
      Update(thing, operation);
      break;
    case Role::kMomentum:
      Momentum(thing, operation);
      break;
    case Role::kToOwners:
    case Role::kFromOwners:
      ExchangeMatrices(thing, operation);
      break;
    case Role::kOrthogonalise:
      Orthogonalise(thing, operation);
      break;
    case Role::kRefresh:
      Refresh(thing, operation);
      break;
  }
}

void Replay::RunKernels(int thing, int scope) {
  last_kernels_ = thing;
  const PlannedScope& s = plan_->scopes[scope];
  ReadWeights(thing, scope);
  if (!walks_) TouchBoundaries(thing, scope);
  if (s.gradients) WriteGradient(thing, scope);
  if (tick_ + 1 == s.close_tick) Release(thing, scope);
}

// The gradient of a scope that is left out is zeros, in the same memory.
void Replay::LeaveOut(int thing, int scope) {
  const PlannedScope& s = plan_->scopes[scope];
  const Decisions& d = plan_->decisions;
  if (!s.gradients) return;
  if (d.keeps_step_gradients && s.round + 1 < d.rounds) return;
  memory_.Write(thing, WholeGradient(scope), GradientOf(Content::kWholeGradient, scope));
}

// After the kernels of the last scope that a gather serves, because debug builds poison released
// memory.
void Replay::Release(int thing, int scope) {
  const int gather = plan_->gather_of_scope[scope], unit = plan_->scopes[scope].unit;
  if (gather < 0) return;
  for (size_t other = 0; other < plan_->scopes.size(); ++other) {
    if (plan_->scopes[other].unit == unit && plan_->gather_of_scope[other] == gather &&
        plan_->scopes[other].close_tick > tick_ + 1)
      return;
  }
  memory_.Write(thing, Gathered(unit), {Content::kNothing});
  memory_.Write(thing, GatheredFrozen(unit), {Content::kNothing});
}

void Replay::ReadWeights(int thing, int scope) {
  const int unit = plan_->scopes[scope].unit;
  memory_.Read(thing, Gathered(unit), {Content::kParameter, unit, version_});
  memory_.Read(thing, GatheredFrozen(unit), {Content::kFrozen, unit});
}

void Replay::TouchBoundaries(int thing, int scope) {
  const PlannedScope& s = plan_->scopes[scope];
  const int walk = walked_ + s.round;
  for (int64_t m = 0; m < plan_->decisions.micro_batches_per_round; ++m) {
    if (s.input >= 0)
      memory_.Read(thing, Output(s.input, m, false), {Content::kOutput, s.input, walk});
    if (!s.backward && s.hands_on)
      memory_.Write(thing, Output(s.visit, m, false), {Content::kOutput, s.visit, walk});
    if (!s.backward) continue;
    if (s.hands_on)
      memory_.Read(thing, Output(s.visit, m, true), {Content::kOutputGradient, s.visit, walk});
    if (s.input_gradient) {
      memory_.Write(thing, Output(s.input, m, true), {Content::kOutputGradient, s.input, walk});
    }
  }
}

void Replay::WriteGradient(int thing, int scope) {
  const PlannedScope& s = plan_->scopes[scope];
  if (tick_ > s.open_tick) {
    memory_.Read(thing, WholeGradient(scope), GradientOf(Content::kWholeGradient, scope));
  } else if (plan_->decisions.keeps_step_gradients && s.round > 0) {
    memory_.Read(thing, WholeGradient(scope),
                 {Content::kWholeGradient, s.visit, steps_, s.round - 1});
  }
  memory_.Write(thing, WholeGradient(scope), GradientOf(Content::kWholeGradient, scope));
}

void Replay::Gather(int thing, const Op& operation) {
  for (const Part& part : operation.parts) {
    const int u = part.unit;
    if (plan_->decisions.kept_whole[u]) Fail(absl::StrCat("unit ", u, " is whole, but gathered"));
    memory_.Read(thing, OwnSlice(u, /*is_trainable=*/true), OwnParametersOf(u, version_));
    memory_.Read(thing, OwnSlice(u, /*is_trainable=*/false), FrozenOf(u));
    memory_.Write(thing, Gathered(u), {Content::kParameter, u, version_});
    memory_.Write(thing, GatheredFrozen(u), {Content::kFrozen, u});
  }
}

// A part of what its gather has brought, which is still there.
void Replay::FillSecondary(int thing, const Op& operation) {
  for (const Part& part : operation.parts) {
    const int u = part.unit;
    for (const bool of_trainable : {true, false}) {
      const SecondaryRange to = Secondary(u, of_trainable);
      Content content =
          of_trainable ? Content{Content::kParameter, u, version_} : Content{Content::kFrozen, u};
      content.first = to.first;
      const Range whole = of_trainable ? Gathered(u) : GatheredFrozen(u);
      memory_.Read(thing, {whole.pool, whole.begin + to.first, to.shard.bytes}, content);
      memory_.Write(thing, to.shard, content);
    }
  }
}

void Replay::GatherSecondary(int thing, const Op& operation) {
  for (const Part& part : operation.parts) {
    const int u = part.unit;
    if (walks_) Fail("an evaluation gathers what a step has filled");
    for (const bool of_trainable : {true, false}) {
      const SecondaryRange from = Secondary(u, of_trainable);
      Content content =
          of_trainable ? Content{Content::kParameter, u, version_} : Content{Content::kFrozen, u};
      const Range whole = of_trainable ? Gathered(u) : GatheredFrozen(u);
      memory_.Write(thing, whole, content);
      content.first = from.first;
      memory_.Read(thing, from.shard, content);
    }
  }
}

void Replay::Refresh(int thing, const Op& operation) {
  const int version = version_ + (options_.overflows ? 0 : 1);
  for (const Part& part : operation.parts) {
    if (!plan_->decisions.kept_whole[part.unit])
      Fail(absl::StrCat("unit ", part.unit, " is refreshed, but not whole"));
    memory_.Read(thing, OwnParameters(part.unit), OwnParametersOf(part.unit, version));
    memory_.Write(thing, Gathered(part.unit), {Content::kParameter, part.unit, version});
  }
}

void Replay::Fail(const std::string& what) {
  if (what.empty() || !violation_.empty()) return;
  violation_ = what;
  if (what == memory_.complaint() && memory_.thing() != HappensBefore::kStart)
    absl::StrAppend(&violation_, " (it is ", names_[memory_.thing()], ")");
}

}  // namespace ebb::sharding
