// Boundary activations that wait below the device for their backward. They leave when the scope that
// reads them in forward has closed, and come back kBoundaryAhead before the one that needs them.
#include <algorithm>

#include "ebb/sharding/plan_builder.h"

namespace ebb::sharding {

Place PlanBuilder::BoundaryOnDevice(int visit) const {
  return {.tier = Tier::kDevice,
          .pool = StateClass::kActivation,
          .offset = plan_.pools.visits[static_cast<size_t>(visit)].output};
}

int64_t PlanBuilder::BoundaryBytes(int visit) const {
  return plan_.pools.visits[static_cast<size_t>(visit)].boundary_stride *
         d_.micro_batches_per_round;
}

void PlanBuilder::MoveBoundary(OperationKind kind, StreamId stream, int visit, const Place& from,
                               const Place& to) {
  const bool swaps = kind == OperationKind::kRead || kind == OperationKind::kWrite;
  const int64_t bytes = swaps ? SwapAligned(BoundaryBytes(visit)) : BoundaryBytes(visit);
  Issue({.kind = kind,
         .stream = stream,
         .parts = {{.unit =
                        static_cast<int>(inputs_.model->forward[static_cast<size_t>(visit)].unit)}},
         .bytes = bytes,
         .moves = {{.state = StateClass::kActivation, .from = from, .to = to, .bytes = bytes}}});
}

void PlanBuilder::FindBoundaries() {
  const int visits = static_cast<int>(inputs_.model->forward.size());
  leaving_.assign(2 * plan_.scopes.size() + 1, {});
  coming_ = reading_ = leaving_;
  if (d_.activation_tier == Tier::kDevice) return;
  for (size_t s = 0; s < plan_.scopes.size(); ++s) {
    if (s > 0 && plan_.scopes[s].round == plan_.scopes[s - 1].round) continue;
    const std::vector<BoundaryUse> uses = UsesInRound(plan_.scopes, s, visits);
    for (int v = 0; v < visits; ++v) {
      const BoundaryUse& use = uses[static_cast<size_t>(v)];
      if (!plan_.pools.visits[static_cast<size_t>(v)].leaves || !LeavesDevice(plan_.scopes, use))
        continue;
      const int again = plan_.scopes[static_cast<size_t>(use.again)].open_tick;
      leaving_[static_cast<size_t>(plan_.scopes[static_cast<size_t>(use.reader)].close_tick)]
          .push_back(v);
      coming_[static_cast<size_t>(again - kBoundaryAhead)].push_back(v);
      reading_[static_cast<size_t>(again - 2 * kBoundaryAhead)].push_back(v);
    }
  }
}

// What is needed soon.
void PlanBuilder::BringBoundaries(int tick) {
  const Pools& pools = plan_.pools;
  for (int visit : reading_[static_cast<size_t>(tick)]) {
    if (d_.activation_tier != Tier::kNvme) break;
    const int turn = next_boundary_slot_++;
    boundary_slot_[visit] = turn;
    MoveBoundary(OperationKind::kRead, StreamId::kReadParameters, visit,
                 pools.visits[static_cast<size_t>(visit)].home, pools.boundary_slots.Slot(turn));
  }
  for (int visit : coming_[static_cast<size_t>(tick)]) {
    const bool swaps = d_.activation_tier == Tier::kNvme;
    MoveBoundary(OperationKind::kUpload, StreamId::kUpload, visit,
                 swaps ? pools.boundary_slots.Slot(boundary_slot_[visit])
                       : pools.visits[static_cast<size_t>(visit)].home,
                 BoundaryOnDevice(visit));
  }
}

// What the scope that has closed was the last to read.
void PlanBuilder::SendBoundaries(int tick) {
  const Pools& pools = plan_.pools;
  for (int visit : leaving_[static_cast<size_t>(tick)]) {
    const VisitAddresses& addresses = pools.visits[static_cast<size_t>(visit)];
    const bool swaps = d_.activation_tier == Tier::kNvme;
    const int turn = swaps ? next_boundary_slot_++ : 0;
    const Place below = swaps ? pools.boundary_slots.Slot(turn) : addresses.home;
    MoveBoundary(OperationKind::kDownload, StreamId::kDownload, visit, BoundaryOnDevice(visit),
                 below);
    if (swaps) MoveBoundary(OperationKind::kWrite, StreamId::kWrite, visit, below, addresses.home);
  }
}

}  // namespace ebb::sharding
