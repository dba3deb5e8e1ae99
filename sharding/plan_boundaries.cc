// Boundary activations that wait below the device for their backward. They leave when the scope that
// reads them in forward has closed, and come back one scope before the one that needs them.
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

int PlanBuilder::MoveBoundary(OperationKind kind, StreamId stream, int visit, const Place& from,
                              const Place& to, std::vector<Dependency> after) {
  const bool swaps = kind == OperationKind::kRead || kind == OperationKind::kWrite;
  const int64_t bytes = swaps ? SwapAligned(BoundaryBytes(visit)) : BoundaryBytes(visit);
  return Issue(
      {.kind = kind,
       .stream = stream,
       .parts = {{.unit =
                      static_cast<int>(inputs_.model->forward[static_cast<size_t>(visit)].unit)}},
       .after = std::move(after),
       .bytes = bytes,
       .moves = {{.state = StateClass::kActivation, .from = from, .to = to, .bytes = bytes}}});
}

void PlanBuilder::FindBoundaries() {
  const int visits = static_cast<int>(inputs_.model->forward.size());
  leaving_.assign(plan_.scopes.size(), {});
  coming_ = reading_ = leaving_;
  coming_op_.assign(plan_.scopes.size(), -1);
  stored_boundary_.assign(static_cast<size_t>(visits), -1);
  if (d_.activation_tier == Tier::kDevice) return;
  for (size_t s = 0; s < plan_.scopes.size(); ++s) {
    if (s > 0 && plan_.scopes[s].round == plan_.scopes[s - 1].round) continue;
    const std::vector<BoundaryUse> uses = UsesInRound(plan_.scopes, s, visits);
    for (int v = 0; v < visits; ++v) {
      const BoundaryUse& use = uses[static_cast<size_t>(v)];
      if (!plan_.pools.visits[static_cast<size_t>(v)].leaves || !LeavesDevice(use)) continue;
      leaving_[static_cast<size_t>(use.reader)].push_back(v);
      coming_[static_cast<size_t>(use.backward - kBoundaryAhead)].push_back(v);
      reading_[static_cast<size_t>(use.backward - kBoundaryAhead - 1)].push_back(v);
    }
  }
}

// When scope `s` opens: what its successors need.
void PlanBuilder::BringBoundaries(int s) {
  const Pools& pools = plan_.pools;
  for (int visit : reading_[static_cast<size_t>(s)]) {
    if (d_.activation_tier != Tier::kNvme) break;
    const int turn = next_boundary_slot_++;
    boundary_slot_[visit] = turn;
    stored_boundary_[static_cast<size_t>(visit)] =
        MoveBoundary(OperationKind::kRead, StreamId::kReadParameters, visit,
                     pools.visits[static_cast<size_t>(visit)].home, pools.boundary_slots.Slot(turn),
                     {{Dependency::kOperation, stored_boundary_[static_cast<size_t>(visit)]},
                      {Dependency::kSlotFree, pools.SlotIndex(SlotKind::kBoundary, turn)}});
  }
  for (int visit : coming_[static_cast<size_t>(s)]) {
    const bool swaps = d_.activation_tier == Tier::kNvme;
    std::vector<Dependency> after = {
        {Dependency::kOperation, stored_boundary_[static_cast<size_t>(visit)]},
        // What lay there has been used, and what left from there has left.
        {Dependency::kOperation, mark_of_scope_[static_cast<size_t>(s) - 1]},
        {Dependency::kOperation, last_boundary_out_}};
    const int turn = swaps ? boundary_slot_[visit] : 0;
    const int upload = MoveBoundary(
        OperationKind::kUpload, StreamId::kUpload, visit,
        swaps ? pools.boundary_slots.Slot(turn) : pools.visits[static_cast<size_t>(visit)].home,
        BoundaryOnDevice(visit), std::move(after));
    if (swaps) Frees(upload, pools.SlotIndex(SlotKind::kBoundary, turn));
    coming_op_[static_cast<size_t>(s + kBoundaryAhead)] = upload;
  }
}

// Scope `s` has closed.
void PlanBuilder::SendBoundaries(int s) {
  const Pools& pools = plan_.pools;
  for (int visit : leaving_[static_cast<size_t>(s)]) {
    const VisitAddresses& addresses = pools.visits[static_cast<size_t>(visit)];
    const bool swaps = d_.activation_tier == Tier::kNvme;
    std::vector<Dependency> after = {
        {Dependency::kOperation, mark_of_scope_[static_cast<size_t>(s)]}};
    const int turn = swaps ? next_boundary_slot_++ : 0;
    if (swaps) after.push_back({Dependency::kSlotFree, pools.SlotIndex(SlotKind::kBoundary, turn)});
    const Place below = swaps ? pools.boundary_slots.Slot(turn) : addresses.home;
    last_boundary_out_ = MoveBoundary(OperationKind::kDownload, StreamId::kDownload, visit,
                                      BoundaryOnDevice(visit), below, std::move(after));
    boundaries_out_.Use(addresses.output, addresses.output + BoundaryBytes(visit),
                        last_boundary_out_);
    stored_boundary_[static_cast<size_t>(visit)] = last_boundary_out_;
    if (!swaps) continue;
    const int write = MoveBoundary(OperationKind::kWrite, StreamId::kWrite, visit, below,
                                   addresses.home, {{Dependency::kOperation, last_boundary_out_}});
    Frees(write, pools.SlotIndex(SlotKind::kBoundary, turn));
    stored_boundary_[static_cast<size_t>(visit)] = write;
  }
}

// Before scope `s` writes where a boundary was, that one has left; and what it reads has come.
void PlanBuilder::WaitForBoundaries(int s, std::vector<Dependency>& waits) const {
  if (coming_op_[static_cast<size_t>(s)] >= 0)
    waits.push_back({Dependency::kOperation, coming_op_[static_cast<size_t>(s)]});
  const PlannedScope& scope = plan_.scopes[static_cast<size_t>(s)];
  const int visit = scope.backward ? scope.visit - 1 : scope.visit;
  if (visit < 0) return;
  const VisitAddresses& addresses = plan_.pools.visits[static_cast<size_t>(visit)];
  const int64_t begin = scope.backward ? addresses.output_gradient : addresses.output;
  const int last = boundaries_out_.Latest(begin, begin + BoundaryBytes(visit));
  if (last >= 0) waits.push_back({Dependency::kOperation, last});
}

}  // namespace ebb::sharding
