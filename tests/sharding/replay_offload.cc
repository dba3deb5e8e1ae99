// Updates sub-group by sub-group, and moves between tiers.
#include <algorithm>
#include <span>

#include "absl/strings/str_cat.h"
#include "replay.h"

namespace ebb::sharding {
namespace {

// The places where an update, or the norms before it, reads and writes each array of one sub-group.
struct UpdateWork {
  explicit UpdateWork(const Op& operation)
      : sub_group(operation.updates.front().sub_group),
        gradient(operation.operands[0].place),
        master(operation.operands[1].place),
        parameter(operation.operands[2].place),
        states(operation.operands.subspan(3)) {}
  int sub_group;
  Place gradient, master, parameter;
  std::span<const Operand> states;
};

}  // namespace

void Replay::Update(int thing, const Op& operation) {
  const Decisions& d = plan_->decisions;
  const bool carried = operation.when == When::kCarrying;
  // A carried update belongs to the step before, which has been counted.
  const int step = steps_ - (carried ? 1 : 0), from = version_ - (carried ? 1 : 0), to = from + 1;
  for (const Part& part : operation.parts) {
    const UpdateWork work(operation);
    const SubGroup& group = table().sub_groups[work.sub_group];
    const int u = part.unit;
    if (group.unit != u) Fail("an update's sub-group is another unit's");
    const bool early = d.timing == UpdateTiming::kEarly && !carried,
               on_device = group.tier == Tier::kDevice;
    const int64_t of_host = early ? cells().early() : cells().constants(),
                  of_device = early ? cells().device_early() : cells().device_constants();
    memory_.Read(thing, Control(on_device ? of_device : of_host, step),
                 {Content::kExchanged, step});
    if (d.has_norms() && (norms_exchanged_ < 0 || !order_.Before(norms_exchanged_, thing)))
      Fail("an update may come before the norms of parameters");
    if (!carried && options_.overflows) {
      KeepParameters(thing, operation);
      continue;
    }
    int& version = sub_group_versions_[work.sub_group];
    if (version != from) {
      Fail(absl::StrCat("sub-group ", work.sub_group, " of unit ", u, " has ", version,
                        " updates and not ", from));
    }
    version = to;
    const int contributions = carried ? contributions_carried_[u] : expected_contributions(u);
    const int64_t gradient_size = SizeOf(d.shard_dtype(u)), size = SizeOf(d.compute_of(u));
    const bool gathered = d.stage == 0 && d.world > 1;
    const int64_t direction = SizeOf(d.direction);
    if (d.has_matrices(u)) {
      memory_.Read(thing, RangeOf(work.gradient, group.count() * direction),
                   {Content::kOrthogonal, u, step, 0, group.begin * direction});
    } else {
      memory_.Read(
          thing, RangeOf(work.gradient, group.count() * gradient_size),
          gathered ? Content{Content::kGatheredGradient, u, step, 0, group.begin * gradient_size}
                   : Content{Content::kGradientShard, u, step, contributions,
                             group.begin * gradient_size});
    }
    const Range master = RangeOf(work.master, d.MasterBytes(u, group.count()));
    const Range parameter = RangeOf(work.parameter, group.count() * size);
    if (d.writes_parameters(u)) {
      const int64_t first = d.MasterBytes(u, group.begin);
      if (d.keeps_master(u)) {
        memory_.Read(thing, master, {Content::kMaster, u, from, 0, first});
        memory_.Write(thing, master, {Content::kMaster, u, to, 0, first});
      }
      if (d.reads_parameters(u)) memory_.Read(thing, parameter, ParameterOf(u, from, group.begin));
      memory_.Write(thing, parameter, ParameterOf(u, to, group.begin));
    } else {
      memory_.Read(thing, master, ParameterOf(u, from, group.begin));
      memory_.Write(thing, master, ParameterOf(u, to, group.begin));
    }
    for (int i = 0; i < operation.updates.front().states; ++i) {
      const Range state = RangeOf(work.states[i].place, d.StateBytes(u, i, group.count()));
      memory_.Read(thing, state,
                   {Content::kOptimizerState, u, from, i, d.StateBytes(u, i, group.begin)});
      memory_.Write(thing, state,
                    {Content::kOptimizerState, u, to, i, d.StateBytes(u, i, group.begin)});
    }
    UseStaging(thing, u, group.tier == Tier::kDevice ? Tier::kDevice : Tier::kCpu);
  }
}

// Reads what the update of the sub-group will read, and leaves it as it is.
void Replay::ParameterNorms(int thing, const Op& operation) {
  const Decisions& d = plan_->decisions;
  for (const Part& part : operation.parts) {
    const UpdateWork work(operation);
    const SubGroup& group = table().sub_groups[work.sub_group];
    const int u = part.unit;
    memory_.Read(
        thing,
        Control(group.tier == Tier::kDevice ? cells().device_constants() : cells().constants()),
        {Content::kExchanged, steps_});
    if (group.unit != u) Fail("the norms' sub-group is another unit's");
    if (norms_taken_[work.sub_group] >= 0) Fail("norms of a sub-group are taken twice");
    norms_taken_[work.sub_group] = thing;
    const bool on_host = group.tier != Tier::kDevice;
    if (part.first == norms_begun_[on_host]) Fail("norms: wrong first");
    if (!part.first) memory_.Read(thing, NormSums(on_host), {Content::kParameterNorms, steps_});
    memory_.Write(thing, NormSums(on_host), {Content::kParameterNorms, steps_});
    norms_begun_[on_host] = true;
    const int64_t gradient_size = SizeOf(d.shard_dtype(u));
    const bool gathered = d.stage == 0 && d.world > 1;
    memory_.Read(
        thing, RangeOf(work.gradient, group.count() * gradient_size),
        gathered ? Content{Content::kGatheredGradient, u, steps_, 0, group.begin * gradient_size}
                 : Content{Content::kGradientShard, u, steps_, expected_contributions(u),
                           group.begin * gradient_size});
    const Range master = RangeOf(work.master, d.MasterBytes(u, group.count()));
    if (!d.writes_parameters(u)) {
      memory_.Read(thing, master, ParameterOf(u, version_, group.begin));
    } else if (d.keeps_master(u)) {
      memory_.Read(thing, master,
                   {Content::kMaster, u, version_, 0, d.MasterBytes(u, group.begin)});
    }
    if (d.reads_parameters(u)) {
      memory_.Read(thing, RangeOf(work.parameter, group.count() * SizeOf(d.compute_of(u))),
                   ParameterOf(u, version_, group.begin));
    }
    for (int i = 0; i < d.norm_states[u]; ++i) {
      memory_.Read(thing, RangeOf(work.states[i].place, d.StateBytes(u, i, group.count())),
                   {Content::kOptimizerState, u, version_, i, d.StateBytes(u, i, group.begin)});
    }
  }
}

// Masters of the step before, which the update of this one is still to read.
void Replay::CastMasters(int thing, const Op& operation) {
  const Decisions& d = plan_->decisions;
  for (size_t i = 0; i < operation.parts.size(); ++i) {
    const int unit = operation.parts[i].unit;
    if (d.reads_parameters(unit)) Fail("a copy of masters that are parameters, or halves of them");
    const SubGroup& group = table().sub_groups[operation.updates[i].sub_group];
    if (group.unit != unit) Fail("a copy's masters are another unit's");
    memory_.Read(thing,
                 RangeOf(operation.operands[2 * i].place, d.MasterBytes(group.unit, group.count())),
                 {Content::kMaster, unit, version_, 0, d.MasterBytes(group.unit, group.begin)});
    memory_.Write(
        thing,
        RangeOf(operation.operands[2 * i + 1].place, group.count() * SizeOf(d.compute_of(unit))),
        ParameterOf(unit, version_, group.begin));
  }
}

// Parameters without their update are carried to their place all the same.
void Replay::KeepParameters(int thing, const Op& update) {
  const Decisions& d = plan_->decisions;
  const UpdateWork work(update);
  const SubGroup& group = table().sub_groups[work.sub_group];
  if (d.reads_parameters(group.unit) || !update.updates.front().keeps_parameter) return;
  memory_.Read(thing, RangeOf(work.master, d.MasterBytes(group.unit, group.count())),
               {Content::kMaster, group.unit, version_, 0, d.MasterBytes(group.unit, group.begin)});
  memory_.Write(thing, RangeOf(work.parameter, group.count() * SizeOf(d.compute_of(group.unit))),
                ParameterOf(group.unit, version_, group.begin));
}

// For an optimizer of the trainer's: one parameter's slice in fp32.
void Replay::UseStaging(int thing, int unit, Tier here) {
  if (!inputs_.own_optimizer) return;
  int64_t longest = 0;
  for (const PlacedParameter& placement : trainable(unit).placements)
    longest = std::max(longest, std::min(placement.elements, owned(unit)));
  const auto use = [&](Purpose purpose) {
    const int row = table().OnTier(purpose, /*on_host=*/here == Tier::kCpu);
    memory_.Write(thing, RangeOf(table().PlaceOf(row), longest * 4), {Content::kOptimizerGradient});
  };
  use(Purpose::kOwnGradient);
  if (plan_->decisions.reads_parameters(unit)) use(Purpose::kOwnMaster);
}

void Replay::Move(int thing, const Op& operation) {
  if (operation.role == Role::kDownload && operation.parts.front().scope >= 0)
    return Land(thing, operation);
  for (const sharding::Move move : operation.moves())
    memory_.Copy(thing, RangeOf(move.from, move.bytes), RangeOf(move.to, move.bytes));
}

// Reduced slices to the host: to where they are summed, or to the shards that they are.
void Replay::Land(int thing, const Op& operation) {
  const Op* const reduction = ReductionOf(operation);
  if (reduction == nullptr) return Fail("a landing without its reduction");
  if (operation.moves().size() != operation.parts.size())
    return Fail("a landing without its moves");
  size_t landed = 0;
  // Slices of shards in host memory land together, each of a shard on NVMe alone.
  const Tier tier = GradientTier(operation.parts.front().unit);
  for (const Part& part : reduction->parts) {
    if (GradientTier(part.unit) != tier) continue;
    if (tier == Tier::kNvme && part.scope != operation.parts.front().scope) continue;
    if (landed == operation.parts.size()) return Fail("a landing leaves out a part");
    const sharding::Move move = operation.moves()[landed];
    if (operation.parts[landed++].scope != part.scope) return Fail("a landing of other parts");
    const Content slice = GradientOf(Content::kReducedSlice, part.scope);
    memory_.Read(thing, RangeOf(move.from, move.bytes), slice);
    if (IsAdded(part)) {
      memory_.Write(thing, RangeOf(move.to, move.bytes), slice);
    } else {
      WriteFirst(thing, RangeOf(move.to, move.bytes), part.unit);
    }
  }
  if (landed != operation.parts.size()) Fail("a landing has a part too many");
}

}  // namespace ebb::sharding
