#include "ebb/sharding/lower/lower_reductions.h"

#include <optional>
#include <utility>

#include "ebb/sharding/passes/pool.h"
#include "ebb/sharding/passes/reduction.h"

namespace ebb::sharding {
namespace {

constexpr int64_t kNormBlock = 1024;  // elements; a norm has one sum for each block

}  // namespace

ReductionLowering::Gradient ReductionLowering::OfUnit(const Part& part) const {
  const int shard = table_.Find(Purpose::kGradientShard, part.unit);
  // The first contribution is the shard, if it comes in the shard's dtype.
  const bool accumulates =
      d_.accumulates[part.unit] &&
      !(part.first && d_.communication_of(part.unit) == d_.shard_dtype(part.unit));
  return {.part = part,
          .section = SectionOf(in_.plan, part.unit, /*trainable=*/true),
          .shard_tier = table_.TierOf(shard),
          .communication = d_.communication_of(part.unit),
          .accumulates = accumulates,
          .sums_with_norm = accumulates && !d_.sums_tensor[part.unit],
          .shard = table_.OwnSlice(shard)};
}

// Casts and slices of a bucket lie end to end.
ReductionLowering::Gradients ReductionLowering::OfGroup(const std::vector<int>& group) const {
  const auto scratch = [this](Purpose purpose, int64_t bytes) {
    return table_.PlaceOf(table_.Find(purpose)).Plus(bytes);
  };
  Gradients gradients;
  int64_t cast = 0, rounded = 0, landed = 0;
  for (int s : group) {
    const auto scope = static_cast<size_t>(s);
    const PlannedScope& planned = in_.plan.scopes[scope];
    Gradient& gradient =
        gradients.emplace_back(OfUnit({.unit = planned.unit,
                                       .scope = s,
                                       .first = in_.reduction.is_first[scope],
                                       .last = in_.reduction.is_last[scope] && !d_.holds}));
    gradient.is_finished = in_.reduction.is_last[scope];
    const int64_t slice_bytes =
        PoolAligned(gradient.section.shard * SizeOf(gradient.communication));
    const bool is_shard = !gradient.accumulates && gradient.shard_tier == Tier::kDevice;
    gradient.whole = table_.PlaceOf(table_.Find(Purpose::kGradient, GradientKey(d_, planned)));
    gradient.source =
        d_.casts(planned.unit) ? scratch(Purpose::kSentGradient, cast) : gradient.whole;
    gradient.summed = gradient.source;
    gradient.summed.per_slice = gradient.section.shard * SizeOf(d_.reduced(planned.unit));
    gradient.rounded =
        d_.rounds_slices(planned.unit) ? scratch(Purpose::kRoundedSlice, rounded) : gradient.summed;
    if (is_shard) {
      gradient.rounded = gradient.shard;
      if (!d_.rounds_slices(planned.unit)) gradient.summed = gradient.shard;
    }
    gradient.landed = gradient.lands() ? scratch(Purpose::kLanding, landed) : gradient.rounded;
    cast += PoolAligned(gradient.section.elements * SizeOf(d_.reduced(planned.unit)));
    rounded += slice_bytes;
    if (gradient.lands()) landed += slice_bytes;
  }
  return gradients;
}

ReductionLowering::Gradients ReductionLowering::Added(Tier shard_tier,
                                                      const Gradients& gradients) const {
  Gradients those;
  for (const Gradient& gradient : gradients)
    if (gradient.accumulates && gradient.shard_tier == shard_tier) those.push_back(gradient);
  return those;
}

ReductionLowering::Gradients ReductionLowering::Measured(Tier shard_tier,
                                                         const Gradients& gradients) const {
  Gradients those;
  for (const Gradient& gradient : gradients) {
    if (!gradient.sums_with_norm && gradient.part.last && gradient.shard_tier == shard_tier)
      those.push_back(gradient);
  }
  return those;
}

void ReductionLowering::Issue(OpDraft draft, std::span<const Gradient> gradients,
                              absl::FunctionRef<int64_t(const Gradient&)> add) {
  for (const Gradient& gradient : gradients) {
    draft.parts.push_back(gradient.part);
    draft.bytes += add(gradient);
  }
  // A ring's all-reduce: a reduce-scatter and an all-gather.
  const int64_t ring = draft.role == Role::kAllReduce   ? d_.replicas()
                       : draft.role == Role::kSumTensor ? d_.tensor_ranks()
                                                        : 0;
  if (ring > 0) draft.bytes = 2 * (ring - 1) * draft.bytes / ring;
  // Where pieces of all ranks are summed in one order.
  const bool sums = FactsOf(draft.role).from == Spread::kPartial;
  if (const int scratch = table_.Find(Purpose::kSumScratch); sums && scratch >= 0)
    to_.AddBytes(table_.PlaceOf(scratch), Access::kWrite, table_[scratch].elements);
  writer_.Issue(draft);
}

void ReductionLowering::Reduce(int group) {
  const Gradients gradients = OfGroup(in_.reduction.groups[group]);
  // All units of a group have the same dtypes.
  const int unit = gradients.front().part.unit;
  const DType whole = d_.gradient_of(unit), sent = d_.reduced(unit);
  if (d_.casts(unit)) {
    // With replicas fp32 is sent, but its values were rounded to the communication dtype. So the
    // sums are those of a world without replicas.
    const DType rounded = d_.communication_of(unit);
    const bool rounds = whole != rounded && d_.rounds_slices(unit);
    Issue({.role = Role::kCast,
           .stream = StreamId::kReduce,
           .via = rounds ? std::optional(rounded) : std::nullopt},
          gradients, [&](const Gradient& of) {
            to_.Add(of.whole, whole, Access::kRead, of.section.elements);
            to_.Add(of.source, sent, Access::kWrite, of.section.elements);
            return of.section.elements * (SizeOf(whole) + SizeOf(sent));
          });
  }
  Issue({.role = Role::kReduce, .stream = StreamId::kReduce, .divides = d_.replicas() == 1},
        gradients, [&](const Gradient& of) {
          to_.Add(of.source, sent, Access::kRead, of.section.elements);
          to_.Add(of.summed, sent, Access::kWrite, of.section.shard);
          return d_.RingBytes(of.section.shard, sent);
        });
  if (d_.replicas() > 1) {
    Issue({.role = Role::kAllReduce, .stream = StreamId::kReduce, .divides = true}, gradients,
          [&](const Gradient& of) {
            to_.Add(of.summed, sent, Access::kReadWrite, of.section.shard);
            return of.section.shard * SizeOf(sent);
          });
  }
  if (d_.rounds_slices(unit)) {
    Issue({.role = Role::kRound, .stream = StreamId::kReduce}, gradients, [&](const Gradient& of) {
      to_.Add(of.summed, sent, Access::kRead, of.section.shard);
      to_.Add(of.rounded, of.communication, Access::kWrite, of.section.shard);
      return of.section.shard * (SizeOf(sent) + SizeOf(of.communication));
    });
  }
  Sum(Tier::kDevice, gradients);
  Land(gradients);
  for (const Gradient& gradient : gradients)
    if (gradient.shard_tier == Tier::kNvme) SumInSlot(gradient);
}

// They are on the device (placement.h), where the tensor ranks meet.
void ReductionLowering::SumTensor(const Gradients& gradients) {
  Gradients those;
  for (const Gradient& gradient : gradients)
    if (d_.sums_tensor[gradient.part.unit] && gradient.is_finished) those.push_back(gradient);
  if (those.empty()) return;
  Issue({.role = Role::kSumTensor, .stream = StreamId::kReduce}, those, [&](const Gradient& of) {
    to_.Add(of.shard, d_.accumulation, Access::kReadWrite, of.section.shard);
    return of.section.shard * SizeOf(d_.accumulation);
  });
}

// The first contribution is written, later ones are read, added and written.
int64_t ReductionLowering::AddAccumulate(const Gradient& gradient) {
  const int64_t shard = gradient.section.shard;
  to_.Add(gradient.landed, gradient.communication, Access::kRead, shard);
  to_.Add(gradient.shard, d_.shard_dtype(gradient.part.unit),
          gradient.part.first ? Access::kWrite : Access::kReadWrite, shard);
  AddSquares(gradient, gradient.part.last && gradient.sums_with_norm);
  return shard *
         (SizeOf(d_.accumulation) * (gradient.part.first ? 1 : 2) + SizeOf(gradient.communication));
}

int64_t ReductionLowering::AddNorm(const Gradient& gradient) {
  to_.Add(gradient.shard, d_.shard_dtype(gradient.part.unit), Access::kRead,
          gradient.section.shard);
  AddSquares(gradient, /*last=*/true);
  return gradient.section.shard * SizeOf(d_.shard_dtype(gradient.part.unit));
}

void ReductionLowering::AddSquares(const Gradient& gradient, bool last) {
  const int64_t blocks = (gradient.section.shard + kNormBlock - 1) / kNormBlock;
  to_.AddControl(to_.cells().squares + gradient.part.unit, last ? Access::kWrite : Access::kNone);
  const bool on_host = gradient.shard_tier != Tier::kDevice;
  to_.AddBytes(table_.PlaceOf(table_.OnTier(Purpose::kNormScratch, on_host)), Access::kWrite,
               last ? blocks * static_cast<int64_t>(sizeof(double)) : 0);
}

void ReductionLowering::Sum(Tier shard_tier, const Gradients& gradients) {
  const StreamId stream = shard_tier == Tier::kDevice ? StreamId::kReduce : StreamId::kHostSum;
  const auto accumulate = [this](const Gradient& of) { return AddAccumulate(of); };
  const auto norm = [this](const Gradient& of) { return AddNorm(of); };
  if (const Gradients added = Added(shard_tier, gradients); !added.empty())
    Issue({.role = Role::kAccumulate, .stream = stream}, added, accumulate);
  if (shard_tier == Tier::kDevice) SumTensor(gradients);
  if (const Gradients measured = Measured(shard_tier, gradients); !measured.empty())
    Issue({.role = Role::kNorm, .stream = stream}, measured, norm);
}

void ReductionLowering::Land(const Gradients& gradients) {
  OpDraft download{.role = Role::kDownload, .stream = StreamId::kDownload};
  for (const Gradient& gradient : gradients) {
    if (gradient.shard_tier != Tier::kCpu) continue;
    download.parts.push_back(gradient.part);
    download.bytes += to_.Move(StateClass::kGradient, gradient.rounded,
                               gradient.lands() ? gradient.landed : gradient.shard,
                               gradient.section.shard * SizeOf(gradient.communication));
  }
  if (download.parts.empty()) return;
  writer_.Issue(download);
  Sum(Tier::kCpu, gradients);
}

void ReductionLowering::Move(Role role, StreamId stream, const Gradient& gradient,
                             const Place& from, const Place& to, int64_t bytes) {
  to_.Move(StateClass::kGradient, from, to, bytes);
  writer_.Issue({.role = role, .stream = stream, .parts = {gradient.part}, .bytes = bytes});
}

int64_t ReductionLowering::StoredBytes(const Gradient& gradient) const {
  return SwapAligned(gradient.section.shard * SizeOf(d_.shard_dtype(gradient.part.unit)));
}

void ReductionLowering::SumInSlot(Gradient gradient) {
  const Place place = std::exchange(gradient.shard, slots_.Next());
  if (gradient.accumulates && !gradient.part.first) {
    Move(Role::kRead, StreamId::kReadParameters, gradient, place, gradient.shard,
         StoredBytes(gradient));
  }
  Move(Role::kDownload, StreamId::kDownload, gradient, gradient.rounded,
       gradient.accumulates ? gradient.landed : gradient.shard,
       gradient.section.shard * SizeOf(gradient.communication));
  Sum(Tier::kNvme, {gradient});
  Move(Role::kWrite, StreamId::kWrite, gradient, gradient.shard, place, StoredBytes(gradient));
}

// Gradients on NVMe pass through their slots.
void ReductionLowering::HeldNorms(const std::vector<int>& units) {
  Gradients gradients;
  for (int unit : units) {
    Gradient gradient = OfUnit({.unit = unit, .first = true, .last = true});
    gradient.accumulates = gradient.sums_with_norm = false;  // not any more
    if (gradient.shard_tier != Tier::kNvme) {
      gradients.push_back(gradient);
      continue;
    }
    const Place place = std::exchange(gradient.shard, slots_.Next());
    Move(Role::kRead, StreamId::kReadParameters, gradient, place, gradient.shard,
         StoredBytes(gradient));
    Sum(Tier::kNvme, {gradient});
  }
  for (const Tier shard_tier : {Tier::kDevice, Tier::kCpu}) Sum(shard_tier, gradients);
}

void ReductionLowering::GatherGradients(const std::vector<int>& units) {
  OpDraft gather{.role = Role::kGatherGradient, .stream = StreamId::kReduce};
  for (int unit : units) {
    const Section& section = SectionOf(in_.plan, unit, true);
    gather.parts.push_back({.unit = unit});
    gather.bytes += d_.RingBytes(section.shard, d_.accumulation);
    const int shard = table_.Find(Purpose::kGradientShard, unit);
    to_.Add(table_.OwnSlice(shard), d_.accumulation, Access::kRead, section.shard);
    to_.Add(table_.PlaceOf(shard), d_.accumulation, Access::kWrite, section.elements);
  }
  writer_.Issue(gather);
}

}  // namespace ebb::sharding
