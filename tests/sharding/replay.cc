#include "replay.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ebb::sharding {

Replay::Replay(const PlanInputs& inputs, const Plan& plan, int rank)
    : inputs_(inputs),
      rank_(rank % plan.decisions.shards),
      plan_(&plan),
      memory_(order_, plan.pools.bytes) {
  const int units = static_cast<int>(plan.layout.units.size());
  updated_.assign(units, HappensBefore::kStart);
  refreshed_ = updated_;
  constexpr int kStart = HappensBefore::kStart;
  for (int u = 0; u < units; ++u) {
    const bool whole = plan.decisions.kept_whole[u];
    memory_.Write(kStart, whole ? Gathered(u) : OwnParameters(u), {Content::kParameter, u, 0});
    Range frozen_range = GatheredFrozen(u);
    if (!whole) {
      frozen_range = {StateClass::kParameter, plan.pools.units[u].parameter_frozen,
                      frozen(u).shard * SizeOf(plan.decisions.compute)};
    }
    memory_.Write(kStart, frozen_range, {Content::kFrozen, u});
    if (plan.decisions.compute != DType::kFloat32)
      memory_.Write(kStart, Master(u), {Content::kMaster, u, 0});
    for (int i = 0; i < inputs.optimizer_states; ++i)
      memory_.Write(kStart, OptimizerState(u, i), {Content::kOptimizerState, u, 0, i});
  }
  Fail(memory_.complaint());
}

void Replay::Step(const Plan& plan, std::vector<bool> left_out) {
  left_out_ = std::move(left_out);
  Run(plan, /*walk=*/false);
  left_out_.clear();
  for (int u = 0; u < static_cast<int>(contributions_.size()); ++u) {
    if (plan.decisions.trainable[u] && contributions_[u] != expected_contributions(u)) {
      Fail(absl::StrCat("step ", steps_, ": unit ", u, " has ", contributions_[u],
                        " contributions instead of ", expected_contributions(u)));
    }
  }
  ++steps_;
}

void Replay::Walk(const Plan& plan) {
  Run(plan, /*walk=*/true);
}

void Replay::Run(const Plan& plan, bool walk) {
  plan_ = &plan;
  walks_ = walk;
  things_.assign(plan.operations.size(), HappensBefore::kStart);
  contributions_.assign(plan.layout.units.size(), 0);
  for (const Moment& moment : plan.moments) {
    if (moment.kind == Moment::kClose) Release(moment.scope);
    for (int operation : moment.operations) Issue(operation);
    if (moment.kind == Moment::kOpen) {
      RunKernels(moment.scope, moment.compute);
    } else if (!moment.compute.empty()) {
      order_.Add(StreamId::kCompute, Resolve(moment.compute));
      names_.push_back("wait");
    }
    if (!violation_.empty()) return;
  }
  walked_ += plan.decisions.rounds;
}

std::vector<int> Replay::Resolve(const std::vector<Dependency>& dependencies) const {
  std::vector<int> things;
  for (const Dependency& dependency : dependencies) {
    switch (dependency.kind) {
      case Dependency::kOperation:
        things.push_back(things_[dependency.index]);
        break;
      case Dependency::kUpdated:
        things.push_back(updated_[dependency.index]);
        things.push_back(refreshed_[dependency.index]);
        break;
      case Dependency::kExchanged:
        things.push_back(exchanged_);
        break;
      case Dependency::kStored:
      case Dependency::kSlotFree:
        break;  // of what is offloaded, which is not replayed here
    }
  }
  return things;
}

void Replay::Issue(int index) {
  const Operation& operation = plan_->operations[index];
  const int thing = order_.Add(operation.stream, Resolve(operation.after));
  const std::string_view name = Name(operation.kind);
  names_.push_back(absl::StrCat("step ", steps_, " #", index, " ", std::string(name)));
  things_[index] = thing;
  switch (operation.kind) {
    case OperationKind::kMark:
    case OperationKind::kRead:
    case OperationKind::kUpload:
    case OperationKind::kDownload:
    case OperationKind::kWrite:
      break;
    case OperationKind::kGather:
      Gather(thing, operation);
      break;
    case OperationKind::kCast:
      Cast(thing, operation);
      break;
    case OperationKind::kReduce:
      Reduce(thing, operation);
      break;
    case OperationKind::kAllReduce:
      AllReduce(thing, operation);
      break;
    case OperationKind::kRound:
      Round(thing, operation);
      break;
    case OperationKind::kAccumulate:
      Accumulate(thing, operation);
      break;
    case OperationKind::kNorm:
      Norm(thing, operation);
      break;
    case OperationKind::kGatherGradient:
      GatherGradient(thing, operation);
      break;
    case OperationKind::kExchange:
      if (!order_.Before(last_kernels_, thing)) Fail("the exchange may leave out kernels' losses");
      memory_.Write(thing, Exchange(), {Content::kExchanged, steps_});
      exchanged_ = thing;
      break;
    case OperationKind::kUpdate:
      Update(thing, operation);
      break;
    case OperationKind::kRefresh:
      Refresh(thing, operation);
      break;
  }
  Fail(memory_.complaint());
}

void Replay::RunKernels(int scope, const std::vector<Dependency>& waits) {
  if (IsLeftOut(plan_->scopes[scope].unit)) return;
  const int thing = order_.Add(StreamId::kCompute, Resolve(waits));
  last_kernels_ = thing;
  const PlannedScope& s = plan_->scopes[scope];
  names_.push_back(absl::StrCat(walks_ ? "walk" : "step ", walks_ ? "" : absl::StrCat(steps_), " ",
                                s.round, ":", s.backward ? "B" : "F", s.visit));
  ReadWeights(thing, scope);
  if (!walks_) TouchBoundaries(thing, scope);
  if (s.backward && plan_->decisions.trainable[s.unit]) WriteGradient(thing, scope);
  Fail(memory_.complaint());
}

// Behind the kernels of the last scope that a gather serves, as debug builds poison what is
// released.
void Replay::Release(int scope) {
  const int gather = plan_->gather_of_scope[scope], unit = plan_->scopes[scope].unit;
  if (gather < 0 || IsLeftOut(unit)) return;
  for (int later = scope + 1; later < static_cast<int>(plan_->scopes.size()); ++later) {
    if (plan_->scopes[later].unit == unit && plan_->gather_of_scope[later] == gather) return;
  }
  const int thing = order_.Add(StreamId::kCompute, {});
  names_.push_back(absl::StrCat("step ", steps_, " release after scope ", scope));
  memory_.Write(thing, Gathered(unit), {Content::kNothing});
  memory_.Write(thing, GatheredFrozen(unit), {Content::kNothing});
}

void Replay::ReadWeights(int thing, int scope) {
  const int unit = plan_->scopes[scope].unit;
  memory_.Read(thing, Gathered(unit), {Content::kParameter, unit, steps_});
  memory_.Read(thing, GatheredFrozen(unit), {Content::kFrozen, unit});
}

void Replay::TouchBoundaries(int thing, int scope) {
  const PlannedScope& s = plan_->scopes[scope];
  const int last = static_cast<int>(inputs_.model->forward.size()) - 1;
  const int walk = walked_ + s.round;
  for (int64_t m = 0; m < plan_->decisions.micro_batches_per_round; ++m) {
    if (s.visit > 0)
      memory_.Read(thing, Output(s.visit - 1, m, false), {Content::kOutput, s.visit - 1, walk});
    if (!s.backward && s.visit < last)
      memory_.Write(thing, Output(s.visit, m, false), {Content::kOutput, s.visit, walk});
    if (!s.backward) continue;
    if (s.visit < last)
      memory_.Read(thing, Output(s.visit, m, true), {Content::kOutputGradient, s.visit, walk});
    if (s.visit > FirstTrainableVisit(*inputs_.model)) {
      memory_.Write(thing, Output(s.visit - 1, m, true),
                    {Content::kOutputGradient, s.visit - 1, walk});
    }
  }
}

void Replay::WriteGradient(int thing, int scope) {
  const PlannedScope& s = plan_->scopes[scope];
  if (plan_->decisions.keeps_step_gradients && s.round > 0) {
    memory_.Read(thing, WholeGradient(scope),
                 {Content::kWholeGradient, s.visit, steps_, s.round - 1});
  }
  memory_.Write(thing, WholeGradient(scope), GradientOf(Content::kWholeGradient, scope));
}

void Replay::Gather(int thing, const Operation& operation) {
  const int64_t size = SizeOf(plan_->decisions.compute);
  for (const Part& part : operation.parts) {
    const int u = part.unit;
    if (plan_->decisions.kept_whole[u]) Fail(absl::StrCat("unit ", u, " is whole, but gathered"));
    memory_.Read(thing, OwnParameters(u), {Content::kParameter, u, steps_});
    memory_.Read(
        thing,
        {StateClass::kParameter, plan_->pools.units[u].parameter_frozen, frozen(u).shard * size},
        {Content::kFrozen, u});
    memory_.Write(thing, Gathered(u), {Content::kParameter, u, steps_});
    memory_.Write(thing, GatheredFrozen(u), {Content::kFrozen, u});
  }
}

void Replay::Cast(int thing, const Operation& operation) {
  for (size_t i = 0; i < operation.parts.size(); ++i) {
    const int scope = operation.parts[i].scope;
    if (!IsLeftOut(operation.parts[i].unit))
      memory_.Read(thing, WholeGradient(scope), GradientOf(Content::kWholeGradient, scope));
    memory_.Write(thing, Reduced(operation, i), GradientOf(Content::kCastGradient, scope));
  }
}

void Replay::Reduce(int thing, const Operation& operation) {
  for (size_t i = 0; i < operation.parts.size(); ++i) {
    const Part& part = operation.parts[i];
    const Range source = Reduced(operation, i);
    if (casts()) {
      memory_.Read(thing, source, GradientOf(Content::kCastGradient, part.scope));
    } else if (!IsLeftOut(part.unit)) {
      memory_.Read(thing, source, GradientOf(Content::kWholeGradient, part.scope));
    }
    if (plan_->decisions.replicas() > 1) {
      memory_.Write(thing, Summed(operation, i), GradientOf(Content::kGroupSlice, part.scope));
    } else {
      WriteReduced(thing, operation, i);
    }
  }
}

void Replay::AllReduce(int thing, const Operation& operation) {
  for (size_t i = 0; i < operation.parts.size(); ++i) {
    const int scope = operation.parts[i].scope;
    memory_.Read(thing, Summed(operation, i), GradientOf(Content::kGroupSlice, scope));
    if (rounds()) {
      memory_.Write(thing, Summed(operation, i), GradientOf(Content::kSummedSlice, scope));
    } else {
      WriteReduced(thing, operation, i);
    }
  }
}

void Replay::Round(int thing, const Operation& operation) {
  for (size_t i = 0; i < operation.parts.size(); ++i) {
    memory_.Read(thing, Summed(operation, i),
                 GradientOf(Content::kSummedSlice, operation.parts[i].scope));
    WriteReduced(thing, operation, i);
  }
}

// The last of a reduction: what is accumulated next, or the shard itself.
void Replay::WriteReduced(int thing, const Operation& operation, size_t i) {
  const Part& part = operation.parts[i];
  if (plan_->decisions.accumulates[part.unit]) {
    memory_.Write(thing, ReducedSlice(operation, i),
                  GradientOf(Content::kReducedSlice, part.scope));
  } else {
    ++contributions_[part.unit];
    memory_.Write(thing, GradientShard(part.unit, /*whole=*/false),
                  {Content::kGradientShard, part.unit, steps_, 1});
  }
}

void Replay::Accumulate(int thing, const Operation& operation) {
  // The parts of the reduction before it, less those that wrote their shards themselves.
  int before = static_cast<int>(&operation - plan_->operations.data()) - 1;
  if (rounds() && plan_->operations[before].kind == OperationKind::kRound) --before;
  if (plan_->decisions.replicas() > 1 &&
      plan_->operations[before].kind == OperationKind::kAllReduce)
    --before;
  const Operation& reduction = plan_->operations[before];
  if (reduction.kind != OperationKind::kReduce) return Fail("an accumulate without its reduction");
  size_t found = 0;
  for (size_t i = 0; i < reduction.parts.size(); ++i) {
    const int unit = reduction.parts[i].unit;
    if (!plan_->decisions.accumulates[unit]) continue;
    if (found == operation.parts.size()) return Fail("an accumulate leaves out a part");
    const Part& part = operation.parts[found++];
    if (part.unit != unit || part.scope != reduction.parts[i].scope)
      return Fail("an accumulate has other parts than its reduction");
    int& so_far = contributions_[unit];
    memory_.Read(thing, ReducedSlice(reduction, i), GradientOf(Content::kReducedSlice, part.scope));
    if (part.first != (so_far == 0)) Fail(absl::StrCat("unit ", unit, ": wrong first"));
    if (part.first != true) {
      memory_.Read(thing, GradientShard(unit, /*whole=*/false),
                   {Content::kGradientShard, unit, steps_, so_far});
    }
    memory_.Write(thing, GradientShard(unit, /*whole=*/false),
                  {Content::kGradientShard, unit, steps_, ++so_far});
    if (part.last != (so_far == expected_contributions(unit)))
      Fail(absl::StrCat("unit ", unit, ": wrong last"));
    if (part.last) memory_.Write(thing, NormScratch(), {Content::kNorm});
  }
  if (found != operation.parts.size()) Fail("an accumulate has a part too many");
}

void Replay::Norm(int thing, const Operation& operation) {
  for (const Part& part : operation.parts) {
    if (plan_->decisions.accumulates[part.unit]) Fail("a norm of a shard that is not complete");
    if (!part.first || !part.last) Fail(absl::StrCat("unit ", part.unit, ": wrong first or last"));
    memory_.Read(thing, GradientShard(part.unit, /*whole=*/false),
                 {Content::kGradientShard, part.unit, steps_, 1});
    memory_.Write(thing, NormScratch(), {Content::kNorm});
  }
}

void Replay::GatherGradient(int thing, const Operation& operation) {
  for (const Part& part : operation.parts) {
    memory_.Read(thing, GradientShard(part.unit, /*whole=*/false),
                 {Content::kGradientShard, part.unit, steps_, expected_contributions(part.unit)});
    memory_.Write(thing, GradientShard(part.unit, /*whole=*/true),
                  {Content::kGatheredGradient, part.unit, steps_});
  }
}

void Replay::Update(int thing, const Operation& operation) {
  const Decisions& d = plan_->decisions;
  for (const Part& part : operation.parts) {
    const int u = part.unit;
    const bool gathered = d.stage == 0 && d.world > 1;
    memory_.Read(thing, GradientShard(u, d.stage == 0),
                 gathered ? Content{Content::kGatheredGradient, u, steps_}
                          : Content{Content::kGradientShard, u, steps_, expected_contributions(u)});
    if (d.timing != UpdateTiming::kEarly)
      memory_.Read(thing, Exchange(), {Content::kExchanged, steps_});
    if (d.compute == DType::kFloat32) {
      memory_.Read(thing, OwnParameters(u), {Content::kParameter, u, steps_});
    } else {
      memory_.Read(thing, Master(u), {Content::kMaster, u, steps_});
      memory_.Write(thing, Master(u), {Content::kMaster, u, steps_ + 1});
    }
    for (int i = 0; i < inputs_.optimizer_states; ++i) {
      memory_.Read(thing, OptimizerState(u, i), {Content::kOptimizerState, u, steps_, i});
      memory_.Write(thing, OptimizerState(u, i), {Content::kOptimizerState, u, steps_ + 1, i});
    }
    memory_.Write(thing, OwnParameters(u), {Content::kParameter, u, steps_ + 1});
    if (inputs_.own_optimizer) {
      int64_t longest = 0;
      for (const Placement& placement : trainable(u).placements)
        longest = std::max(longest, std::min(placement.elements, owned(u)));
      memory_.Write(thing, {StateClass::kStaging, plan_->pools.staging_gradient, longest * 4},
                    {Content::kOptimizerGradient});
    }
    updated_[u] = thing;
  }
}

void Replay::Refresh(int thing, const Operation& operation) {
  for (const Part& part : operation.parts) {
    if (!plan_->decisions.kept_whole[part.unit])
      Fail(absl::StrCat("unit ", part.unit, " is refreshed, but not whole"));
    memory_.Read(thing, OwnParameters(part.unit), {Content::kParameter, part.unit, steps_ + 1});
    memory_.Write(thing, Gathered(part.unit), {Content::kParameter, part.unit, steps_ + 1});
    refreshed_[part.unit] = thing;
  }
}

void Replay::Fail(const std::string& what) {
  if (what.empty() || !violation_.empty()) return;
  violation_ = what;
  if (what == memory_.complaint() && memory_.thing() != HappensBefore::kStart)
    absl::StrAppend(&violation_, " (it is ", names_[memory_.thing()], ")");
}

}  // namespace ebb::sharding
