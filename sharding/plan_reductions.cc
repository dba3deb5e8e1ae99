// Reductions: a bucket of gradients leaves when its last scope closes. On the reduce stream, in
// order: the cast to the dtype that is sent, the reduce-scatter, with replicas the all-reduce between
// shard groups and the rounding of its sums, what is done with the slices (summed into the shard, or
// their norm taken where they are the shard), and at stage 0 the gather that makes complete gradients
// whole again. Slices whose shards live in host memory go there first, and are summed there.
#include <algorithm>
#include <functional>
#include <utility>

#include "ebb/sharding/conflicts.h"
#include "ebb/sharding/plan_builder.h"
#include "ebb/sharding/pool.h"

namespace ebb::sharding {

// Before backward writes a whole gradient, whatever read that memory before has read it. Readers of
// one stream are in order, so the last of each covers those before it.
void PlanBuilder::WaitForGradientMemory(int s, std::vector<Dependency>& waits) const {
  const auto [begin, end] = GradientMemory(plan_, plan_.scopes[s]);
  std::vector<int> readers;  // scopes
  for (const LatestUse& read : gradients_read_) {
    if (const int scope = read.Latest(begin, end); scope >= 0) readers.push_back(scope);
  }
  std::sort(readers.begin(), readers.end(), std::greater<>());
  for (int scope : readers) waits.push_back({Dependency::kOperation, gradient_reader_[scope]});
  if (readers.empty()) waits.push_back({Dependency::kExchanged, 0});
  const Dependency updated{Dependency::kUpdated, plan_.scopes[s].unit};
  if (GradientIsShard(updated.index) &&
      std::find(waits.begin(), waits.end(), updated) == waits.end())
    waits.push_back(updated);
}

std::vector<Part> PlanBuilder::PartsOf(const std::vector<int>& group) {
  std::vector<Part> parts;
  int64_t staged = plan_.pools.staging_cast, rounded = plan_.pools.staging_rounded, landed = 0;
  for (int s : group) {
    const int unit = plan_.scopes[s].unit;
    const Section& section = plan_.layout.units[unit].trainable;
    parts.push_back({.unit = unit,
                     .scope = s,
                     .first = contributions_[unit]++ == 0,
                     .last = --contributions_left_[unit] == 0,
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

// -1: no shard of theirs lives there.
int PlanBuilder::IssueLanding(const std::vector<Part>& parts) {
  OperationDraft download{
      .kind = OperationKind::kDownload,
      .stream = StreamId::kDownload,
      .parts = {},
      .after = {{Dependency::kOperation, static_cast<int>(plan_.operations.size()) - 1}}};
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
  if (download.parts.empty()) return -1;
  if (std::any_of(download.parts.begin(), download.parts.end(),
                  [](const Part& part) { return part.landed >= 0; }))
    AwaitLanding(download.after);
  return Issue(download);
}

// Where slices land is free again once what landed there has been added up.
void PlanBuilder::AwaitLanding(std::vector<Dependency>& after) const {
  if (last_host_sum_ >= 0) after.push_back({Dependency::kOperation, last_host_sum_});
}

int PlanBuilder::IssueSumInSlot(Part part, int reduced) {
  const Pools& pools = plan_.pools;
  const Section& section = plan_.layout.units[part.unit].trainable;
  const int turn = next_gradient_slot_++;
  const Place slot = pools.gradient_slots.Slot(turn), home = pools.GradientShard(part.unit);
  const Dependency slot_free{Dependency::kSlotFree, pools.SlotIndex(SlotKind::kGradient, turn)};
  const bool accumulates = d_.accumulates[part.unit];
  const auto move = [&](OperationKind kind, StreamId stream, const Place& from, const Place& to,
                        int64_t bytes, std::vector<Dependency> after) {
    return Issue(
        {.kind = kind,
         .stream = stream,
         .parts = {part},
         .after = std::move(after),
         .bytes = bytes,
         .moves = {{.state = StateClass::kGradient, .from = from, .to = to, .bytes = bytes}}});
  };
  const int64_t stored = SwapAligned(section.shard * SizeOf(d_.shard_dtype(part.unit)));
  part.gradient_slot = turn;
  std::vector<Dependency> ready = {slot_free};
  if (accumulates && !part.first) {
    ready = {
        {Dependency::kOperation, move(OperationKind::kRead, StreamId::kReadParameters, home, slot,
                                      stored, {slot_free, {Dependency::kStored, part.unit}})}};
  }
  std::vector<Dependency> after = {{Dependency::kOperation, reduced}, slot_free};
  if (accumulates) AwaitLanding(after);
  last_landing_ = move(OperationKind::kDownload, StreamId::kDownload, ReducedSlice(part),
                       accumulates ? pools.landing.Plus(part.landed) : slot,
                       section.shard * SizeOf(d_.communication), std::move(after));
  ready.push_back({Dependency::kOperation, last_landing_});
  last_host_sum_ = Issue({.kind = accumulates ? OperationKind::kAccumulate : OperationKind::kNorm,
                          .stream = StreamId::kHostSum,
                          .parts = {part},
                          .after = std::move(ready),
                          .bytes = accumulates ? AccumulateBytes({part}) : NormBytes({part})});
  const int write = move(OperationKind::kWrite, StreamId::kWrite, slot, home, stored,
                         {{Dependency::kOperation, last_host_sum_}});
  Frees(write, slot_free.index);
  plan_.operations[static_cast<size_t>(write)].stores = part.unit;
  return write;
}

// `landing`: what has brought them to host memory, if that is where they are.
int PlanBuilder::IssueSums(Tier home, const std::vector<Part>& parts, int landing) {
  const StreamId stream = home == Tier::kDevice ? StreamId::kReduce : StreamId::kHostSum;
  std::vector<Dependency> after;
  if (landing >= 0) after.push_back({Dependency::kOperation, landing});
  int last = -1;
  if (const std::vector<Part> summed = PartsThat(true, home, parts); !summed.empty()) {
    last = Issue({.kind = OperationKind::kAccumulate,
                  .stream = stream,
                  .parts = summed,
                  .after = after,
                  .bytes = AccumulateBytes(summed)});
  }
  if (const std::vector<Part> direct = PartsThat(false, home, parts); !direct.empty()) {
    last = Issue({.kind = OperationKind::kNorm,
                  .stream = stream,
                  .parts = direct,
                  .after = after,
                  .bytes = NormBytes(direct)});
  }
  return last;
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
  std::vector<Dependency> after = {{Dependency::kOperation, mark_of_scope_[group.back()]}};
  for (const Part& part : parts) {
    // The previous step's update has read the shard before this step writes it.
    // Where backward has written the shard itself, that has waited.
    if (part.first && !GradientIsShard(part.unit))
      after.push_back({Dependency::kUpdated, part.unit});
  }
  // Staging is free again once what lay there has gone to host memory.
  if (last_landing_ >= 0 && (d_.casts() || d_.rounds_slices()))
    after.push_back({Dependency::kOperation, last_landing_});
  int cast = -1;
  if (d_.casts()) {
    cast = Issue({.kind = OperationKind::kCast,
                  .stream = StreamId::kReduce,
                  .parts = parts,
                  .after = std::exchange(after, {}),
                  .bytes = CastBytes(parts)});
  }
  const int reduce = Issue({.kind = OperationKind::kReduce,
                            .stream = StreamId::kReduce,
                            .parts = parts,
                            .after = std::move(after),
                            .bytes = ReduceBytes(parts)});
  int reader = cast >= 0 ? cast : reduce;
  int last = reduce;
  if (d_.replicas() > 1) {
    last = Issue({.kind = OperationKind::kAllReduce,
                  .stream = StreamId::kReduce,
                  .parts = parts,
                  .after = {},
                  .bytes = AllReduceBytes(parts)});
    if (cast < 0) reader = last;
  }
  if (d_.rounds_slices()) {
    last = Issue({.kind = OperationKind::kRound,
                  .stream = StreamId::kReduce,
                  .parts = parts,
                  .after = {},
                  .bytes = RoundBytes(parts)});
  }
  if (const int sums = IssueSums(Tier::kDevice, parts, /*landing=*/-1); sums >= 0) {
    last = sums;
    // A slice that is added to its shard lies in the whole gradient.
    if (cast < 0 && !PartsThat(true, Tier::kDevice, parts).empty()) reader = last;
  }
  const int reduced = static_cast<int>(plan_.operations.size()) - 1;
  int last_on_host = -1;
  if (const int landing = IssueLanding(parts); landing >= 0) {
    if (cast < 0) reader = landing;
    last_landing_ = landing;
    last_on_host = last_host_sum_ = IssueSums(Tier::kCpu, parts, landing);
  }
  std::vector<int> complete;
  for (const Part& part : parts) {
    if (GradientHome(part.unit) != Tier::kNvme) continue;
    gradient_final_[part.unit] = IssueSumInSlot(part, reduced);
    if (cast < 0) reader = last_landing_;
  }
  for (const Part& part : parts) {
    gradient_reader_[part.scope] = reader;
    const auto [begin, end] = GradientMemory(plan_, plan_.scopes[part.scope]);
    gradients_read_[static_cast<size_t>(plan_.operations[static_cast<size_t>(reader)].stream)].Use(
        begin, end, part.scope);
    plan_.reduce_of_scope[part.scope] = reduce;
    if (part.last) complete.push_back(part.unit);
  }
  if (d_.stage == 0 && d_.world > 1 && !complete.empty()) last = IssueGradientGather(complete);
  for (int unit : complete) {
    const Tier home = GradientHome(unit);
    if (home != Tier::kNvme) gradient_final_[unit] = home == Tier::kDevice ? last : last_on_host;
    if (d_.timing == UpdateTiming::kEarly && !IsCarried(unit)) IssueUpdate(unit);
  }
  IssueSwaps(swaps_wanted_);  // into what updates have left
}

int PlanBuilder::IssueGradientGather(const std::vector<int>& units) {
  OperationDraft gather{.kind = OperationKind::kGatherGradient,
                        .stream = StreamId::kReduce,
                        .parts = {},
                        .after = {}};
  for (int unit : units) {
    gather.parts.push_back({.unit = unit});
    gather.bytes += RingBytes(plan_.layout.units[unit].trainable.shard, d_.accumulation);
  }
  return Issue(gather);
}

}  // namespace ebb::sharding
