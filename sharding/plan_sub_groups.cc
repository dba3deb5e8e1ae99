// The update of one sub-group: what it needs is brought to where it is updated, and what changed is
// brought back. States that live elsewhere pass through a slot, and so does what else does not live
// where the update runs:
//
//   read states   s0  s1  s2  s3 | s4
//   update            s0  s1  s2   s3         the slot of s0 is free for s4
//   write                 s0  s1   s2  s3
#include <utility>

#include "ebb/sharding/plan_builder.h"
#include "ebb/sharding/update_chain.h"

namespace ebb::sharding {
int64_t PlanBuilder::UpdateBytes(int unit, int64_t elements) const {
  const int64_t states = 2 * d_.state_bytes() + SizeOf(d_.shard_dtype(unit));
  int64_t parameter = d_.writes_parameters() ? SizeOf(d_.compute) : 0;
  if (d_.reads_parameters()) parameter *= 2;
  return elements * (states + parameter);
}

void PlanBuilder::IssueMoves(UpdateChain& chain, OperationKind kind, StreamId stream,
                             std::vector<Move> moves) {
  OperationDraft operation{.kind = kind,
                           .stream = stream,
                           .parts = {{.unit = chain.unit}},
                           .moves = std::move(moves),
                           .condition = chain.condition,
                           .of_update = true};
  for (const Move& move : operation.moves) operation.bytes += move.bytes;
  Issue(operation);
}

void PlanBuilder::IssueCopy(UpdateChain& chain, bool to_host, const Move& move) {
  IssueMoves(chain, to_host ? OperationKind::kDownload : OperationKind::kUpload,
             to_host ? StreamId::kDownload : StreamId::kUpload, {move});
}

SubGroupRoute PlanBuilder::RouteOf(const UpdateChain& chain, const SubGroup& group) const {
  const UnitHomes& unit = plan_.pools.homes.units[static_cast<size_t>(chain.unit)];
  SubGroupRoute route{.on_host = group.tier != Tier::kDevice, .swaps = group.tier == Tier::kNvme};
  route.moves_gradient = unit.gradient != route.here();
  if (!d_.writes_parameters()) return route;
  const ParameterPiece& piece = PieceOf(unit.trainable, d_.stage == 0 ? 0 : group.begin);
  route.parameter_home = piece.home.Plus((group.begin - piece.begin) * SizeOf(d_.compute));
  if (d_.stage == 0) route.parameter_home.per_slice = 0;  // updates the whole
  route.moves_parameter = route.parameter_home.tier != route.here();
  route.in_parameter_slot =
      route.moves_parameter && route.parameter_home.tier == Tier::kNvme && chain.turn >= 0;
  return route;
}

void PlanBuilder::TakeSlots(const UpdateChain& chain, const SubGroup& group, SubGroupRoute& route) {
  const Pools& pools = plan_.pools;
  const Tier gradient = GradientHome(chain.unit);
  // Parameters on NVMe pass through host memory also if the update runs on the device.
  const bool parameter_in_host = route.moves_parameter && !route.in_parameter_slot &&
                                 (route.on_host || route.parameter_home.tier == Tier::kNvme);
  const bool gradient_in_host = route.on_host ? route.moves_gradient : gradient == Tier::kNvme;
  if (route.swaps || gradient_in_host || parameter_in_host)
    route.host_slot = pools.host_work.ring.Slot(next_host_work_++);
  if (!route.on_host && (route.moves_gradient || route.moves_parameter))
    route.device_slot = pools.device_work.ring.Slot(next_device_work_++);
  if (!route.in_parameter_slot) {
    route.host_parameter = route.host_slot.Plus(pools.host_work.parameter);
    return;
  }
  route.host_parameter = InSlot(chain.turn, chain.unit, true, group.begin);
}

// Reads need no verdict and no gradient, only that what they read was written.
SubGroupRoute PlanBuilder::BringStates(UpdateChain& chain, int index) {
  const SubGroup& group = plan_.pools.homes.sub_groups[static_cast<size_t>(index)];
  SubGroupRoute route = RouteOf(chain, group);
  TakeSlots(chain, group, route);
  ReadStates(chain, index, d_.optimizer_states, route);
  return route;
}

void PlanBuilder::ReadStates(UpdateChain& chain, int index, int states, SubGroupRoute& route) {
  const SubGroup& group = plan_.pools.homes.sub_groups[static_cast<size_t>(index)];
  std::vector<Move> reads;
  if (route.swaps) {
    const WorkSlots& slots = plan_.pools.host_work;
    if (d_.master_size() > 0 && master_turn_[static_cast<size_t>(index)] < 0) {
      reads.push_back({.state = StateClass::kMaster,
                       .from = group.master,
                       .to = route.host_slot.Plus(slots.master),
                       .bytes = SwapAligned(group.count() * d_.master_size())});
    }
    for (int k = 0; k < states; ++k) {
      reads.push_back({.state = StateClass::kOptimizer,
                       .from = group.states.Plus(k * group.states_stride),
                       .to = route.host_slot.Plus(slots.states + k * slots.states_stride),
                       .bytes = group.states_stride});
    }
  }
  const bool is_there = route.in_parameter_slot && !chain.carried;
  if (route.moves_parameter && d_.reads_parameters() && !is_there &&
      route.parameter_home.tier == Tier::kNvme) {
    reads.push_back({.state = StateClass::kParameter,
                     .from = route.parameter_home,
                     .to = route.host_parameter,
                     .bytes = SwapAligned(group.count() * SizeOf(d_.compute))});
  }
  if (!reads.empty()) {
    IssueMoves(chain, OperationKind::kRead, StreamId::kReadStates, std::move(reads));
  }
}

void PlanBuilder::BringGradient(UpdateChain& chain, SubGroupRoute& route, UpdateWork& work) {
  const SubGroup& group = plan_.pools.homes.sub_groups[static_cast<size_t>(work.sub_group)];
  const int64_t size = SizeOf(d_.shard_dtype(chain.unit));
  if (work.gradient.tier == Tier::kNvme) {
    const Place in_host = route.host_slot.Plus(plan_.pools.host_work.gradient);
    IssueMoves(chain, OperationKind::kRead, StreamId::kReadStates,
               {{.state = StateClass::kGradient,
                 .from = work.gradient,
                 .to = in_host,
                 .bytes = SwapAligned(group.count() * size)}});
    work.gradient = in_host;
  }
  if (!route.moves_gradient || work.gradient.tier == route.here()) return;
  const WorkSlots& slots = route.on_host ? plan_.pools.host_work : plan_.pools.device_work;
  const Place to = route.slot().Plus(slots.gradient);
  IssueCopy(chain, route.on_host,
            {.state = StateClass::kGradient,
             .from = work.gradient,
             .to = to,
             .bytes = group.count() * size});
  work.gradient = to;
}

void PlanBuilder::BringParameter(UpdateChain& chain, SubGroupRoute& route, UpdateWork& work) {
  if (!route.moves_parameter) return;
  const SubGroup& group = plan_.pools.homes.sub_groups[static_cast<size_t>(work.sub_group)];
  const WorkSlots& slots = route.on_host ? plan_.pools.host_work : plan_.pools.device_work;
  const Place& home = route.parameter_home;
  work.parameter = route.on_host && home.tier == Tier::kNvme ? route.host_parameter
                                                             : route.slot().Plus(slots.parameter);
  // What is there is needed as the master or half of it, and from the swap file has come already.
  if (!d_.reads_parameters() || (route.on_host && home.tier == Tier::kNvme)) return;
  IssueCopy(chain, route.on_host,
            {.state = StateClass::kParameter,
             .from = home.tier == Tier::kNvme ? route.host_parameter : home,
             .to = work.parameter,
             .bytes = group.count() * SizeOf(d_.compute)});
}

// What the update wrote goes home.
void PlanBuilder::TakeHome(UpdateChain& chain, const SubGroupRoute& route, const UpdateWork& work) {
  const SubGroup& group = plan_.pools.homes.sub_groups[static_cast<size_t>(work.sub_group)];
  const Place& home = route.parameter_home;
  const int64_t parameter_bytes = group.count() * SizeOf(d_.compute);
  if (route.moves_parameter && (!route.on_host || home.tier == Tier::kDevice)) {
    IssueCopy(chain, /*to_host=*/!route.on_host,
              {.state = StateClass::kParameter,
               .from = work.parameter,
               .to = home.tier == Tier::kNvme ? route.host_parameter : home,
               .bytes = parameter_bytes});
  }
  std::vector<Move> writes;
  if (route.swaps) {
    if (d_.master_size() > 0) {
      writes.push_back({.state = StateClass::kMaster,
                        .from = work.master,
                        .to = group.master,
                        .bytes = SwapAligned(group.count() * d_.master_size())});
    }
    for (int k = 0; k < d_.optimizer_states; ++k) {
      writes.push_back({.state = StateClass::kOptimizer,
                        .from = work.states.Plus(k * work.states_stride),
                        .to = group.states.Plus(k * group.states_stride),
                        .bytes = group.states_stride});
    }
  }
  if (route.moves_parameter && home.tier == Tier::kNvme) {
    writes.push_back({.state = StateClass::kParameter,
                      .from = route.host_parameter,
                      .to = home,
                      .bytes = SwapAligned(parameter_bytes)});
  }
  if (!writes.empty())
    IssueMoves(chain, OperationKind::kWrite, StreamId::kWrite, std::move(writes));
}

UpdateWork PlanBuilder::WorkOf(const UpdateChain& chain, int index,
                               const SubGroupRoute& route) const {
  const Pools& pools = plan_.pools;
  const SubGroup& group = pools.homes.sub_groups[static_cast<size_t>(index)];
  UpdateWork work{
      .unit = chain.unit,
      .sub_group = index,
      .gradient =
          pools.GradientShard(chain.unit).Plus(group.begin * SizeOf(d_.shard_dtype(chain.unit))),
      .master = group.master,
      .states = group.states,
      .states_stride = group.states_stride,
      .writes_parameter = d_.writes_parameters(),
      .passes_slot = route.moves_parameter,
      .parameter = route.parameter_home};
  if (route.swaps) {
    const int master_turn = master_turn_[static_cast<size_t>(index)];
    if (master_turn >= 0) {
      work.master = pools.master_slots.Slot(master_turn);
    } else if (d_.master_size() > 0) {
      work.master = route.host_slot.Plus(pools.host_work.master);
    }
    work.states = route.host_slot.Plus(pools.host_work.states);
    work.states_stride = pools.host_work.states_stride;
  }
  return work;
}

void PlanBuilder::IssueOnSubGroup(UpdateChain& chain, SubGroupRoute& route, UpdateWork work,
                                  OperationDraft operation) {
  BringGradient(chain, route, work);
  BringParameter(chain, route, work);
  operation.parts.front().work = static_cast<int>(plan_.works.size());
  operation.condition = chain.condition;
  operation.of_update = true;
  plan_.works.push_back(std::move(work));
  Issue(operation);
}

void PlanBuilder::IssueSubGroup(UpdateChain& chain, int index) {
  const SubGroup& group = plan_.pools.homes.sub_groups[static_cast<size_t>(index)];
  const auto found = ahead_.extract(index);
  SubGroupRoute route = found ? std::move(found.mapped()) : BringStates(chain, index);
  IssueOnSubGroup(chain, route, WorkOf(chain, index, route),
                  {.kind = OperationKind::kUpdate,
                   .stream = route.on_host ? StreamId::kHostUpdate : StreamId::kUpdate,
                   .parts = {{.unit = chain.unit}},
                   .bytes = UpdateBytes(chain.unit, group.count())});
  // Of the last one, where everything lies by now.
  TakeHome(chain, route, plan_.works.back());
}

}  // namespace ebb::sharding
