// Updates, and at stages 1 and 2 (or for units kept whole) the refresh of what every rank keeps.
//
// A sub-group whose states live elsewhere passes through a slot, and so does what else does not live
// where the update runs:
//
//   read states   s0  s1  s2 | s3
//   update            s0  s1   s2         the slot of s0 is free for s3
//   write                 s0   s1  s2
#include <algorithm>
#include <utility>

#include "ebb/sharding/decisions.h"
#include "ebb/sharding/plan_builder.h"

namespace ebb::sharding {

int64_t PlanBuilder::UpdateBytes(int unit, int64_t elements) const {
  const int64_t states = 2 * d_.state_bytes() + SizeOf(d_.shard_dtype(unit));
  int64_t parameter = d_.has_masters() ? SizeOf(d_.compute) : 0;
  if (d_.split_master) parameter *= 2;
  return elements * (states + parameter);
}

// The operations of one unit's update.
struct PlanBuilder::Chain {
  int unit = 0;
  int turn = -1;  // of the parameter slot that carried updates fill
  Condition condition = Condition::kAlways;
  std::vector<Dependency> ready;  // what every operation on its state comes after
  int last[kStreams];             // operation, by stream; -1: none
  bool stores = false;
  int last_update = -1;

  explicit Chain(int of_unit) : unit(of_unit) { std::fill(std::begin(last), std::end(last), -1); }
};

// One sub-group: what it needs is brought to where it is updated, and what changed is brought back.
void PlanBuilder::IssueSubGroup(Chain& chain, int index) {
  const Pools& pools = plan_.pools;
  const SubGroup& group = pools.homes.sub_groups[static_cast<size_t>(index)];
  const UnitHomes& unit = pools.homes.units[static_cast<size_t>(chain.unit)];
  const bool on_host = group.tier != Tier::kDevice, swaps = group.tier == Tier::kNvme;
  const WorkSlots& slots = on_host ? pools.host_work : pools.device_work;
  const int64_t size = SizeOf(d_.compute), gradient_size = SizeOf(d_.shard_dtype(chain.unit));
  const Tier here = on_host ? Tier::kCpu : Tier::kDevice;

  UpdateWork work{.unit = chain.unit,
                  .sub_group = index,
                  .gradient = pools.GradientShard(chain.unit).Plus(group.begin * gradient_size),
                  .master = group.master,
                  .states = group.states,
                  .states_stride = group.states_stride,
                  .writes_parameter = d_.has_masters(),
                  .parameter = {}};
  Place home;
  if (work.writes_parameter) {
    const ParameterPiece& piece = PieceOf(unit.trainable, d_.stage == 0 ? 0 : group.begin);
    home = piece.home.Plus((group.begin - piece.begin) * size);
    if (d_.stage == 0) home.per_slice = 0;  // updates the whole
    work.parameter = home;
  }
  const bool moves_gradient = unit.gradient != here;
  const bool moves_parameter = work.writes_parameter && home.tier != here;
  work.passes_slot = moves_parameter;
  const bool in_parameter_slot = moves_parameter && home.tier == Tier::kNvme && chain.turn >= 0;
  // Parameters on NVMe pass through host memory also if the update runs on the device.
  const bool needs_host_slot =
      on_host ? swaps || moves_gradient || (moves_parameter && !in_parameter_slot)
              : unit.gradient == Tier::kNvme ||
                    (moves_parameter && home.tier == Tier::kNvme && !in_parameter_slot);
  const bool needs_device_slot = !on_host && (moves_gradient || moves_parameter);
  Place host_slot, device_slot;
  std::vector<Dependency> slot_free;
  int host_index = -1, device_index = -1;
  if (needs_host_slot) {
    host_slot = pools.host_work.ring.Slot(next_host_work_);
    host_index = pools.SlotIndex(SlotKind::kHostWork, next_host_work_++);
    slot_free.push_back({Dependency::kSlotFree, host_index});
  }
  if (needs_device_slot) {
    device_slot = pools.device_work.ring.Slot(next_device_work_);
    device_index = pools.SlotIndex(SlotKind::kDeviceWork, next_device_work_++);
    slot_free.push_back({Dependency::kSlotFree, device_index});
  }
  if (in_parameter_slot && opened_turn_ == chain.turn) {
    slot_free.push_back({Dependency::kOperation, opened_by_});
  } else if (in_parameter_slot) {
    WaitForParameterSlot(chain.turn, slot_free);
    opened_turn_ = chain.turn;
    opened_by_ = static_cast<int>(plan_.operations.size());
  }
  const Place here_slot = on_host ? host_slot : device_slot;
  // Where the parameters are in host memory on their way to or from the swap file.
  const Place host_parameter = in_parameter_slot ? InSlot(chain.turn, chain.unit, true, group.begin)
                                                 : host_slot.Plus(pools.host_work.parameter);

  std::vector<int> brought;  // operations
  const auto issue = [&](OperationKind kind, StreamId stream, std::vector<Move> moves,
                         std::vector<Dependency> after) {
    Operation operation{.kind = kind,
                        .stream = stream,
                        .parts = {{.unit = chain.unit}},
                        .after = std::move(after),
                        .moves = std::move(moves),
                        .condition = chain.condition};
    for (const Move& move : operation.moves) operation.bytes += move.bytes;
    const int issued = Issue(std::move(operation));
    chain.last[static_cast<int>(stream)] = issued;
    return issued;
  };
  const auto last_of = [](const std::vector<int>& operations) -> std::vector<Dependency> {
    if (operations.empty()) return {};
    return {{Dependency::kOperation, operations.back()}};
  };
  const auto with = [](std::vector<Dependency> after, const std::vector<Dependency>& more) {
    after.insert(after.end(), more.begin(), more.end());
    return after;
  };

  // In.
  std::vector<Move> reads;
  const int64_t master_bytes = SwapAligned(group.count() * d_.master_size());
  if (swaps) {
    work.master = here_slot.Plus(slots.master);
    work.states = here_slot.Plus(slots.states);
    work.states_stride = slots.states_stride;
    reads.push_back({.state = StateClass::kMaster,
                     .from = group.master,
                     .to = work.master,
                     .bytes = master_bytes});
    for (int k = 0; k < d_.optimizer_states; ++k) {
      reads.push_back({.state = StateClass::kOptimizer,
                       .from = group.states.Plus(k * group.states_stride),
                       .to = work.states.Plus(k * work.states_stride),
                       .bytes = group.states_stride});
    }
  }
  const bool reads_parameter = moves_parameter && d_.split_master;
  if (reads_parameter && home.tier == Tier::kNvme) {
    reads.push_back({.state = StateClass::kParameter,
                     .from = home,
                     .to = host_parameter,
                     .bytes = SwapAligned(group.count() * size)});
  }
  if (!reads.empty()) {
    // Reads need no verdict and no gradient, only that what they read was written.
    brought.push_back(issue(OperationKind::kRead, StreamId::kReadStates, std::move(reads),
                            with(slot_free, {{Dependency::kStored, chain.unit}})));
  }
  if (unit.gradient == Tier::kNvme) {
    const Place in_host = host_slot.Plus(pools.host_work.gradient);
    brought.push_back(
        issue(OperationKind::kRead, StreamId::kReadStates,
              {{.state = StateClass::kGradient,
                .from = work.gradient,
                .to = in_host,
                .bytes = SwapAligned(group.count() * gradient_size)}},
              with(with(slot_free, chain.ready), {{Dependency::kStored, chain.unit}})));
    work.gradient = in_host;
  }
  if (moves_gradient && work.gradient.tier != here) {
    const Place to = here_slot.Plus(slots.gradient);
    brought.push_back(issue(on_host ? OperationKind::kDownload : OperationKind::kUpload,
                            on_host ? StreamId::kDownload : StreamId::kUpload,
                            {{.state = StateClass::kGradient,
                              .from = work.gradient,
                              .to = to,
                              .bytes = group.count() * gradient_size}},
                            with(with(slot_free, chain.ready), last_of(brought))));
    work.gradient = to;
  }
  if (moves_parameter) {
    work.parameter =
        on_host && home.tier == Tier::kNvme ? host_parameter : here_slot.Plus(slots.parameter);
  }
  if (reads_parameter && (!on_host || home.tier == Tier::kDevice)) {
    std::vector<Dependency> after = with(slot_free, chain.ready);
    if (!brought.empty()) after.push_back({Dependency::kOperation, brought.front()});
    brought.push_back(issue(on_host ? OperationKind::kDownload : OperationKind::kUpload,
                            on_host ? StreamId::kDownload : StreamId::kUpload,
                            {{.state = StateClass::kParameter,
                              .from = home.tier == Tier::kNvme ? host_parameter : home,
                              .to = work.parameter,
                              .bytes = group.count() * size}},
                            std::move(after)));
  }

  std::vector<Dependency> after = with(chain.ready, slot_free);
  for (int operation : brought) after.push_back({Dependency::kOperation, operation});
  const StreamId stream = on_host ? StreamId::kHostUpdate : StreamId::kUpdate;
  plan_.works.push_back(work);
  const int update =
      Issue({.kind = OperationKind::kUpdate,
             .stream = stream,
             .parts = {{.unit = chain.unit, .work = static_cast<int>(plan_.works.size()) - 1}},
             .after = std::move(after),
             .bytes = UpdateBytes(chain.unit, group.count()),
             .condition = chain.condition});
  chain.last[static_cast<int>(stream)] = chain.last_update = update;

  // Out.
  int last = update;
  if (moves_parameter && home.tier == Tier::kDevice) {
    last = issue(OperationKind::kUpload, StreamId::kUpload,
                 {{.state = StateClass::kParameter,
                   .from = work.parameter,
                   .to = home,
                   .bytes = group.count() * size}},
                 {{Dependency::kOperation, update}});
  } else if (moves_parameter && !on_host) {
    last = issue(OperationKind::kDownload, StreamId::kDownload,
                 {{.state = StateClass::kParameter,
                   .from = work.parameter,
                   .to = home.tier == Tier::kCpu ? home : host_parameter,
                   .bytes = group.count() * size}},
                 {{Dependency::kOperation, update}});
  }
  if (device_index >= 0) plan_.operations[static_cast<size_t>(last)].frees.push_back(device_index);
  std::vector<Move> writes;
  if (swaps) {
    writes.push_back({.state = StateClass::kMaster,
                      .from = work.master,
                      .to = group.master,
                      .bytes = master_bytes});
    for (int k = 0; k < d_.optimizer_states; ++k) {
      writes.push_back({.state = StateClass::kOptimizer,
                        .from = work.states.Plus(k * work.states_stride),
                        .to = group.states.Plus(k * group.states_stride),
                        .bytes = group.states_stride});
    }
  }
  if (moves_parameter && home.tier == Tier::kNvme) {
    writes.push_back({.state = StateClass::kParameter,
                      .from = host_parameter,
                      .to = home,
                      .bytes = SwapAligned(group.count() * size)});
  }
  if (!writes.empty()) {
    last = issue(OperationKind::kWrite, StreamId::kWrite, std::move(writes),
                 {{Dependency::kOperation, last}});
    chain.stores = true;
    if (in_parameter_slot)
      plan_.operations[static_cast<size_t>(last)].frees.push_back(
          pools.SlotIndex(SlotKind::kParameterStored, chain.turn));
  }
  if (host_index >= 0) plan_.operations[static_cast<size_t>(last)].frees.push_back(host_index);
}

void PlanBuilder::IssueUpdate(int unit, int turn) {
  Chain chain(unit);
  chain.turn = turn;
  if (turn >= 0) {
    chain.condition = Condition::kCarrying;
    chain.ready.push_back({Dependency::kExchanged, 0});
  } else {
    if (gradient_final_[unit] >= 0)
      chain.ready.push_back({Dependency::kOperation, gradient_final_[unit]});
    if (d_.timing != UpdateTiming::kEarly)
      chain.ready.push_back({Dependency::kOperation, exchange_});
    // The last gather has read the slice that the update writes.
    if (last_gather_[unit] >= 0)
      chain.ready.push_back({Dependency::kOperation, last_gather_[unit]});
  }
  const UnitHomes& homes = plan_.pools.homes.units[static_cast<size_t>(unit)];
  for (int g = 0; g < homes.sub_groups; ++g) IssueSubGroup(chain, homes.first_sub_group + g);

  // The parameters are there when the last operation of every stream but that of the writes has run.
  constexpr int kWrites = static_cast<int>(StreamId::kWrite),
                kReads = static_cast<int>(StreamId::kReadStates);
  std::vector<int> lasts;
  for (int s = 0; s < kStreams; ++s) {
    if (s != kWrites && s != kReads && chain.last[s] >= 0) lasts.push_back(chain.last[s]);
  }
  int last = *std::max_element(lasts.begin(), lasts.end());
  if (lasts.size() > 1) {
    Operation settled{.kind = OperationKind::kMark,
                      .stream = plan_.operations[static_cast<size_t>(last)].stream,
                      .parts = {{.unit = unit}},
                      .after = {},
                      .condition = chain.condition};
    for (int operation : lasts) {
      if (operation != last) settled.after.push_back({Dependency::kOperation, operation});
    }
    last = Issue(std::move(settled));
  }
  plan_.operations[static_cast<size_t>(last)].updates = unit;
  if (chain.stores) plan_.operations[static_cast<size_t>(chain.last[kWrites])].stores = unit;
  update_of_unit_[unit] = last;
}

// Units in the order in which the next forward needs them; a group of refreshes follows the last
// update it needs.
void PlanBuilder::IssueUpdates() {
  const int64_t limit = GatherGroupElements(*inputs_.config, d_.compute);
  Operation refresh{
      .kind = OperationKind::kRefresh, .stream = StreamId::kGather, .parts = {}, .after = {}};
  int64_t grouped = 0;
  const auto flush = [&] {
    if (refresh.parts.empty()) return;
    Issue(std::move(refresh));
    refresh = {
        .kind = OperationKind::kRefresh, .stream = StreamId::kGather, .parts = {}, .after = {}};
    grouped = 0;
  };
  std::vector<bool> seen(plan_.layout.units.size(), false);
  for (const Visit& visit : inputs_.model->forward) {
    const int unit = static_cast<int>(visit.unit);
    if (seen[unit] || !d_.trainable[unit] || IsCarried(unit)) continue;
    seen[unit] = true;
    const Section& section = plan_.layout.units[unit].trainable;
    const bool refreshes = d_.kept_whole[unit] && d_.stage > 0 && d_.shards > 1;
    if (refreshes && grouped > 0 && grouped + section.elements > limit) flush();
    if (update_of_unit_[unit] < 0) IssueUpdate(unit);
    if (!refreshes) continue;
    refresh.parts.push_back({.unit = unit});
    refresh.after.push_back({Dependency::kOperation, update_of_unit_[unit]});
    refresh.bytes += RingBytes(section.shard, d_.compute);
    grouped += section.elements;
  }
  flush();
}

}  // namespace ebb::sharding
