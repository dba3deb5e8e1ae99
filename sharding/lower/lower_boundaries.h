// Boundary activations that wait below the device for their backward, as operations. Boundaries on
// NVMe pass through a slot in host memory, both ways.
#pragma once

#include <map>

#include "ebb/sharding/lower/plan_writer.h"
#include "ebb/sharding/slots.h"

namespace ebb::sharding {

class BoundaryLowering {
 public:
  BoundaryLowering(const PassInputs& in, PlanWriter& writer)
      : in_(in), writer_(writer), slots_(in.plan.pools.boundary_slots) {}

  void BeginRound() { slots_.Restart(); }
  void Send(int visit);
  void Read(int visit);
  void Bring(int visit);

 private:
  bool swaps() const { return in_.plan.decisions.activation_tier == Tier::kNvme; }
  const Place& PlaceOf(int visit) const;
  void Move(OperationKind kind, StreamId stream, int visit, const Place& from, const Place& to);

  const PassInputs& in_;
  PlanWriter& writer_;
  SlotCursor slots_;
  std::map<int, Place> read_;  // by visit, on its way to the device
};

}  // namespace ebb::sharding
