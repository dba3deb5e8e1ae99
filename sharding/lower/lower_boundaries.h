// Boundary activations that wait below the device for their backward, as operations. Boundaries on
// NVMe pass through a slot in host memory, both ways.
#pragma once

#include <map>

#include "ebb/sharding/lower/op_writer.h"

namespace ebb::sharding {

class BoundaryLowering {
 public:
  BoundaryLowering(const PassInputs& in, OpWriter& writer)
      : in_(in), table_(in.plan.table), writer_(writer), slots_(table_, Purpose::kOutputSlot) {}

  void BeginRound() { slots_.Restart(); }
  void Send(int visit);
  void Read(int visit);
  void Bring(int visit);

 private:
  bool swaps() const { return in_.plan.decisions.activation_tier == Tier::kNvme; }
  Place PlaceOf(Purpose purpose, int visit) const {
    return table_.PlaceOf(table_.Find(purpose, visit));
  }
  void Move(Role role, StreamId stream, int visit, const Place& from, const Place& to);

  const PassInputs& in_;
  const Table& table_;
  OpWriter& writer_;
  TurnCursor slots_;
  std::map<int, Place> read_;  // by visit, on its way to the device
};

}  // namespace ebb::sharding
