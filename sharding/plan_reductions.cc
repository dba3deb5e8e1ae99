// Reductions: a bucket of gradients leaves when its last scope closes. On the reduce stream, in
// order: the cast to the dtype that is sent, the reduce-scatter, with replicas the all-reduce between
// shard groups and the rounding of its sums, what is done with the slices (summed into the shard, or
// their norm taken where they are the shard), and at stage 0 the gather that makes complete gradients
// whole again. Slices whose shards live in host memory go there first, and are summed there.
#include <algorithm>
#include <utility>

#include "ebb/sharding/plan_builder.h"
#include "ebb/sharding/pool.h"

namespace ebb::sharding {

std::vector<Part> PlanBuilder::PartsOf(const std::vector<int>& group) {
  std::vector<Part> parts;
  int64_t staged = plan_.pools.staging_cast, rounded = plan_.pools.staging_rounded, landed = 0;
  for (int s : group) {
    const int unit = plan_.scopes[s].unit;
    const Section& section = plan_.layout.units[unit].trainable;
    parts.push_back({.unit = unit,
                     .scope = s,
                     .first = contributions_[unit]++ == 0,
                     .last = --contributions_left_[unit] == 0 && !d_.holds,
                     .staged = staged,
                     .rounded = rounded});
    staged += PoolAligned(section.elements * SizeOf(d_.reduced()));
    rounded += PoolAligned(section.shard * SizeOf(d_.communication));
    if (GradientHome(unit) == Tier::kDevice || !d_.accumulates[unit]) continue;
    parts.back().landed = landed;
    landed += PoolAligned(section.shard * SizeOf(d_.communication));
  }
  return parts;
}

std::vector<Part> PlanBuilder::PartsThat(bool accumulate, Tier home,
                                         const std::vector<Part>& parts) const {
  std::vector<Part> matching;
  for (const Part& part : parts) {
    if (d_.accumulates[part.unit] == accumulate && GradientHome(part.unit) == home)
      matching.push_back(part);
  }
  return matching;
}

// Where on the device a reduction leaves the slice of a shard that lives in host memory.
Place PlanBuilder::ReducedSlice(const Part& part) const {
  Place place{.tier = Tier::kDevice, .pool = StateClass::kStaging, .offset = part.rounded};
  if (d_.rounds_slices()) return place;
  place.offset = part.staged;
  place.per_slice = plan_.layout.units[part.unit].trainable.shard * SizeOf(d_.reduced());
  if (d_.casts()) return place;
  place.pool = StateClass::kGradient;
  place.offset = plan_.pools.visits[plan_.scopes[part.scope].visit].gradient;
  return place;
}

void PlanBuilder::IssueLanding(const std::vector<Part>& parts) {
  OperationDraft download{
      .kind = OperationKind::kDownload, .stream = StreamId::kDownload, .parts = {}};
  for (const Part& part : parts) {
    if (GradientHome(part.unit) != Tier::kCpu) continue;
    const Place shard = plan_.pools.GradientShard(part.unit);
    download.parts.push_back(part);
    download.moves.push_back(
        {.state = StateClass::kGradient,
         .from = ReducedSlice(part),
         .to = part.landed < 0 ? shard : plan_.pools.landing.Plus(part.landed),
         .bytes = plan_.layout.units[part.unit].trainable.shard * SizeOf(d_.communication)});
    download.bytes += download.moves.back().bytes;
  }
  if (download.parts.empty()) return;
  Issue(download);
  IssueSums(Tier::kCpu, parts);
}

void PlanBuilder::IssueSumInSlot(Part part) {
  const Pools& pools = plan_.pools;
  const Section& section = plan_.layout.units[part.unit].trainable;
  const Place slot = pools.gradient_slots.Slot(next_gradient_slot_),
              home = pools.GradientShard(part.unit);
  const bool accumulates = d_.accumulates[part.unit];
  const auto move = [&](OperationKind kind, StreamId stream, const Place& from, const Place& to,
                        int64_t bytes) {
    Issue({.kind = kind,
           .stream = stream,
           .parts = {part},
           .bytes = bytes,
           .moves = {{.state = StateClass::kGradient, .from = from, .to = to, .bytes = bytes}}});
  };
  const int64_t stored = SwapAligned(section.shard * SizeOf(d_.shard_dtype(part.unit)));
  part.gradient_slot = next_gradient_slot_++;
  if (accumulates && !part.first)
    move(OperationKind::kRead, StreamId::kReadParameters, home, slot, stored);
  move(OperationKind::kDownload, StreamId::kDownload, ReducedSlice(part),
       accumulates ? pools.landing.Plus(part.landed) : slot,
       section.shard * SizeOf(d_.communication));
  if (accumulates || !d_.holds) {
    Issue({.kind = accumulates ? OperationKind::kAccumulate : OperationKind::kNorm,
           .stream = StreamId::kHostSum,
           .parts = {part},
           .bytes = accumulates ? AccumulateBytes({part}) : NormBytes({part})});
  }
  move(OperationKind::kWrite, StreamId::kWrite, slot, home, stored);
}

void PlanBuilder::IssueSums(Tier home, const std::vector<Part>& parts) {
  const StreamId stream = home == Tier::kDevice ? StreamId::kReduce : StreamId::kHostSum;
  if (const std::vector<Part> summed = PartsThat(true, home, parts); !summed.empty()) {
    Issue({.kind = OperationKind::kAccumulate,
           .stream = stream,
           .parts = summed,
           .bytes = AccumulateBytes(summed)});
  }
  if (const std::vector<Part> direct = PartsThat(false, home, parts);
      !direct.empty() && !d_.holds) {
    Issue({.kind = OperationKind::kNorm,
           .stream = stream,
           .parts = direct,
           .bytes = NormBytes(direct)});
  }
}

int64_t PlanBuilder::CastBytes(const std::vector<Part>& parts) const {
  int64_t elements = 0;
  for (const Part& part : parts) elements += plan_.layout.units[part.unit].trainable.elements;
  return elements * (SizeOf(d_.gradient) + SizeOf(d_.reduced()));
}

int64_t PlanBuilder::ReduceBytes(const std::vector<Part>& parts) const {
  int64_t bytes = 0;
  for (const Part& part : parts)
    bytes += RingBytes(plan_.layout.units[part.unit].trainable.shard, d_.reduced());
  return bytes;
}

// A ring's: a reduce-scatter and an all-gather.
int64_t PlanBuilder::AllReduceBytes(const std::vector<Part>& parts) const {
  int64_t bytes = 0;
  for (const Part& part : parts)
    bytes += plan_.layout.units[part.unit].trainable.shard * SizeOf(d_.reduced());
  return 2 * (d_.replicas() - 1) * bytes / d_.replicas();
}

int64_t PlanBuilder::RoundBytes(const std::vector<Part>& parts) const {
  int64_t elements = 0;
  for (const Part& part : parts) elements += plan_.layout.units[part.unit].trainable.shard;
  return elements * (SizeOf(d_.reduced()) + SizeOf(d_.communication));
}

// The first contribution is written, later ones are read, added and written.
int64_t PlanBuilder::AccumulateBytes(const std::vector<Part>& parts) const {
  int64_t bytes = 0;
  for (const Part& part : parts) {
    bytes += plan_.layout.units[part.unit].trainable.shard *
             (SizeOf(d_.accumulation) * (part.first ? 1 : 2) + SizeOf(d_.communication));
  }
  return bytes;
}

int64_t PlanBuilder::NormBytes(const std::vector<Part>& parts) const {
  int64_t elements = 0;
  for (const Part& part : parts) elements += plan_.layout.units[part.unit].trainable.shard;
  return elements * SizeOf(d_.communication);
}

void PlanBuilder::IssueReduction(const std::vector<int>& group) {
  const std::vector<Part> parts = PartsOf(group);
  const auto issue = [&](OperationKind kind, int64_t bytes) {
    return Issue({.kind = kind, .stream = StreamId::kReduce, .parts = parts, .bytes = bytes});
  };
  if (d_.casts()) issue(OperationKind::kCast, CastBytes(parts));
  const int reduce = issue(OperationKind::kReduce, ReduceBytes(parts));
  if (d_.replicas() > 1) issue(OperationKind::kAllReduce, AllReduceBytes(parts));
  if (d_.rounds_slices()) issue(OperationKind::kRound, RoundBytes(parts));
  IssueSums(Tier::kDevice, parts);
  IssueLanding(parts);
  std::vector<int> complete;
  for (const Part& part : parts) {
    if (GradientHome(part.unit) == Tier::kNvme) IssueSumInSlot(part);
    plan_.reduce_of_scope[part.scope] = reduce;
    if (contributions_left_[part.unit] == 0) complete.push_back(part.unit);
  }
  if (GathersGradients() && !d_.holds && !complete.empty()) IssueGradientGather(complete);
  for (int unit : complete)
    if (d_.timing == UpdateTiming::kEarly && !IsCarried(unit)) IssueUpdate(unit);
  IssueSwaps();  // into what updates have left
}

// What the trainer has left in the shards, in the order of the reductions. Those on NVMe pass through their slots.
void PlanBuilder::IssueHeldNorms() {
  if (!d_.holds) return;
  std::vector<int> units;
  std::vector<Part> on_device, in_host;
  for (const std::vector<int>& group : reduction_.groups) {
    for (int s : group) {
      const int unit = plan_.scopes[s].unit;
      if (std::find(units.begin(), units.end(), unit) != units.end()) continue;
      units.push_back(unit);
      const Part part{.unit = unit, .first = true, .last = true};
      switch (GradientHome(unit)) {
        case Tier::kDevice:
          on_device.push_back(part);
          break;
        case Tier::kCpu:
          in_host.push_back(part);
          break;
        case Tier::kNvme:
          IssueHeldNormInSlot(part);
      }
    }
  }
  for (const auto& [stream, parts] :
       {std::pair(StreamId::kReduce, &on_device), {StreamId::kHostSum, &in_host}}) {
    if (parts->empty()) continue;
    Issue({.kind = OperationKind::kNorm,
           .stream = stream,
           .parts = *parts,
           .bytes = NormBytes(*parts)});
  }
  if (GathersGradients()) IssueGradientGather(units);
}

void PlanBuilder::IssueHeldNormInSlot(Part part) {
  const Pools& pools = plan_.pools;
  part.gradient_slot = next_gradient_slot_++;
  const int64_t bytes = SwapAligned(plan_.layout.units[part.unit].trainable.shard *
                                    SizeOf(d_.shard_dtype(part.unit)));
  Issue({.kind = OperationKind::kRead,
         .stream = StreamId::kReadParameters,
         .parts = {part},
         .bytes = bytes,
         .moves = {{.state = StateClass::kGradient,
                    .from = pools.GradientShard(part.unit),
                    .to = pools.gradient_slots.Slot(part.gradient_slot),
                    .bytes = bytes}}});
  Issue({.kind = OperationKind::kNorm,
         .stream = StreamId::kHostSum,
         .parts = {part},
         .bytes = NormBytes({part})});
}

void PlanBuilder::IssueGradientGather(const std::vector<int>& units) {
  OperationDraft gather{
      .kind = OperationKind::kGatherGradient, .stream = StreamId::kReduce, .parts = {}};
  for (int unit : units) {
    gather.parts.push_back({.unit = unit});
    gather.bytes += RingBytes(plan_.layout.units[unit].trainable.shard, d_.accumulation);
  }
  Issue(gather);
}

}  // namespace ebb::sharding
