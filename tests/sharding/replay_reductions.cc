#include <algorithm>

#include "absl/strings/str_cat.h"
#include "replay.h"

namespace ebb::sharding {

void Replay::Cast(int thing, const Op& operation) {
  for (size_t i = 0; i < operation.parts.size(); ++i) {
    const int scope = operation.parts[i].scope;
    memory_.Read(thing, WholeGradient(scope), GradientOf(Content::kWholeGradient, scope));
    memory_.Write(thing, Reduced(operation, i), GradientOf(Content::kCastGradient, scope));
  }
}

void Replay::Reduce(int thing, const Op& operation) {
  UseSumScratch(thing);
  for (size_t i = 0; i < operation.parts.size(); ++i) {
    const Part& part = operation.parts[i];
    const Range source = Reduced(operation, i);
    memory_.Read(thing, source,
                 GradientOf(casts(part.unit) ? Content::kCastGradient : Content::kWholeGradient,
                            part.scope));
    if (plan_->decisions.replicas() > 1) {
      memory_.Write(thing, Summed(operation, i), GradientOf(Content::kGroupSlice, part.scope));
    } else {
      WriteReduced(thing, operation, i);
    }
  }
}

void Replay::AllReduce(int thing, const Op& operation) {
  UseSumScratch(thing);
  for (size_t i = 0; i < operation.parts.size(); ++i) {
    const int scope = operation.parts[i].scope;
    memory_.Read(thing, Summed(operation, i), GradientOf(Content::kGroupSlice, scope));
    if (rounds(operation.parts[i].unit)) {
      memory_.Write(thing, Summed(operation, i), GradientOf(Content::kSummedSlice, scope));
    } else {
      WriteReduced(thing, operation, i);
    }
  }
}

// Where pieces of all ranks meet.
void Replay::UseSumScratch(int thing) {
  if (!inputs_.config->ebb.deterministic_reduce || plan_->decisions.verdict_ranks == 1) return;
  memory_.Write(thing, RangeOfRow(table().Find(Purpose::kSumScratch)), {Content::kSums});
}

void Replay::Round(int thing, const Op& operation) {
  for (size_t i = 0; i < operation.parts.size(); ++i) {
    memory_.Read(thing, Summed(operation, i),
                 GradientOf(Content::kSummedSlice, operation.parts[i].scope));
    WriteReduced(thing, operation, i);
  }
}

// The last operation of a reduction: its result is accumulated next, or is the shard itself.
void Replay::WriteReduced(int thing, const Op& operation, size_t i) {
  const Part& part = operation.parts[i];
  if (IsAdded(part) || GradientTier(part.unit) != Tier::kDevice) {
    memory_.Write(thing, ReducedSlice(operation, i),
                  GradientOf(Content::kReducedSlice, part.scope));
  } else {
    WriteFirst(thing, GradientShard(part.unit, /*whole=*/false), part.unit);
  }
}

void Replay::WriteFirst(int thing, const Range& shard, int unit) {
  if (contributions_[unit]++ != 0) Fail(absl::StrCat("unit ", unit, ": written, not added"));
  memory_.Write(thing, shard, {Content::kGradientShard, unit, steps_, 1});
}

// `op` does something with these parts of the reduction, and with no others.
bool Replay::HasTheParts(const Op& operation, const Op& reduction,
                         const std::vector<size_t>& parts) {
  bool same = operation.parts.size() == parts.size();
  for (size_t i = 0; same && i < parts.size(); ++i) {
    same = operation.parts[i].unit == reduction.parts[parts[i]].unit &&
           operation.parts[i].scope == reduction.parts[parts[i]].scope;
  }
  const std::string_view name = Name(operation.role);
  if (!same) Fail(absl::StrCat("parts of a ", std::string(name), " are not its reduction's"));
  return same;
}

void Replay::Accumulate(int thing, const Op& operation) {
  const Op* const reduction = ReductionOf(operation);
  if (reduction == nullptr) return Fail("an accumulate without its reduction");
  const Tier tier = GradientTier(operation.parts.front().unit);
  if (tier != Tier::kDevice && operation.stream != StreamId::kHostSum) Fail("a sum out of place");
  const std::vector<size_t> parts = PartsThat(*reduction, /*are_added=*/true, tier, operation);
  if (!HasTheParts(operation, *reduction, parts)) return;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& part = operation.parts[i];
    const int unit = part.unit;
    int& so_far = contributions_[unit];
    memory_.Read(thing,
                 tier == Tier::kDevice ? ReducedSlice(*reduction, parts[i])
                                       : LandedSlice(*reduction, parts[i]),
                 GradientOf(Content::kReducedSlice, part.scope));
    if (part.first != (so_far == 0)) Fail(absl::StrCat("unit ", unit, ": wrong first"));
    const Range shard = SummedShard(operation, part);
    if (!part.first) memory_.Read(thing, shard, {Content::kGradientShard, unit, steps_, so_far});
    memory_.Write(thing, shard, {Content::kGradientShard, unit, steps_, ++so_far});
    const int to_add = expected_contributions(unit) - (sums_tensor(unit) ? 1 : 0);
    const bool is_last = so_far == to_add && !plan_->decisions.holds;
    if (part.last != is_last) Fail(absl::StrCat("unit ", unit, ": wrong last"));
    if (part.last && !sums_tensor(unit)) memory_.Write(thing, NormScratch(tier), {Content::kNorm});
  }
}

// Once a step, of what no reduction changes any more.
void Replay::SumTensor(int thing, const Op& operation) {
  UseSumScratch(thing);
  for (const Part& part : operation.parts) {
    const int unit = part.unit;
    int& so_far = contributions_[unit];
    if (!sums_tensor(unit)) Fail(absl::StrCat("unit ", unit, ": summed over tensor"));
    if (so_far + 1 != expected_contributions(unit))
      Fail(absl::StrCat("unit ", unit, ": summed over tensor before its last reduction"));
    const Range shard = GradientShard(unit, /*whole=*/false);
    memory_.Read(thing, shard, {Content::kGradientShard, unit, steps_, so_far});
    memory_.Write(thing, shard, {Content::kGradientShard, unit, steps_, ++so_far});
  }
}

// Nothing changes these shards after the reduction. An addition takes the norm of its sum, unless a
// sum over tensor comes between.
std::vector<size_t> Replay::MeasuredParts(const Op& reduction, Tier tier, const Op& norm) const {
  std::vector<size_t> parts = PartsThat(reduction, /*are_added=*/false, tier, norm);
  for (const size_t i : PartsThat(reduction, /*are_added=*/true, tier))
    if (sums_tensor(reduction.parts[i].unit)) parts.push_back(i);
  std::erase_if(parts, [&](size_t i) {
    const int unit = reduction.parts[i].unit;
    return contributions_[unit] != expected_contributions(unit);
  });
  std::sort(parts.begin(), parts.end());
  return parts;
}

void Replay::Norm(int thing, const Op& operation) {
  const Tier tier = GradientTier(operation.parts.front().unit);
  if (tier != Tier::kDevice && operation.stream != StreamId::kHostSum) Fail("a norm out of place");
  if (!plan_->decisions.holds) {
    const Op* const reduction = ReductionOf(operation);
    if (reduction == nullptr) return Fail("a norm without its reduction");
    if (!HasTheParts(operation, *reduction, MeasuredParts(*reduction, tier, operation))) return;
  }
  for (const Part& part : operation.parts) {
    if (!part.last) Fail(absl::StrCat("unit ", part.unit, ": wrong last"));
    memory_.Read(thing, SummedShard(operation, part),
                 {Content::kGradientShard, part.unit, steps_, expected_contributions(part.unit)});
    memory_.Write(thing, NormScratch(tier), {Content::kNorm});
  }
}

void Replay::GatherGradient(int thing, const Op& operation) {
  for (const Part& part : operation.parts) {
    memory_.Read(thing, GradientShard(part.unit, /*whole=*/false),
                 {Content::kGradientShard, part.unit, steps_, expected_contributions(part.unit)});
    memory_.Write(thing, GradientShard(part.unit, /*whole=*/true),
                  {Content::kGatheredGradient, part.unit, steps_});
  }
}

}  // namespace ebb::sharding
