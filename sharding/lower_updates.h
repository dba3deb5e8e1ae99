// Updates of sub-groups as operations: what one needs is brought to where it is updated, and what changed is
// brought back. States that live elsewhere pass through a slot, and so does what else does not live
// where the update runs:
//
//   read states   s0  s1  s2  s3 | s4
//   update            s0  s1  s2   s3         the slot of s0 is free for s4
//   write                 s0  s1   s2  s3
//
// Norms of parameters, which some optimizers take before, go the same way as far as they read.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "ebb/sharding/plan_writer.h"
#include "ebb/sharding/read_turns.h"
#include "ebb/sharding/slots.h"

namespace ebb::sharding {

class UpdateLowering {
 public:
  UpdateLowering(const PassInputs& in, const ReadTurns& turns, PlanWriter& writer);

  // Reads need no verdict and no gradient, only that what they read was written.
  void ReadStates(int sub_group);
  void Update(int sub_group);  // after its ReadStates
  void TakeNorms(int sub_group);
  void ExchangeNorms();

 private:
  // The way of one sub-group: through which slots it moves, and where its arrays are by now.
  struct Route {
    int unit = 0, sub_group = 0;
    bool carried = false;
    bool on_host = false;  // where it is updated
    bool swaps = false;    // its states, from and to the swap file
    bool moves_gradient = false, moves_parameter = false;
    bool in_parameter_slot = false;  // its parameters pass through the slot that gathers read from
    Place parameter_home = {};
    Place host_slot = {}, device_slot = {};
    Place host_parameter = {};  // on the way to or from the swap file
    Place gradient = {}, master = {}, states = {}, parameter = {};
    int64_t states_stride = 0;

    Tier here() const { return on_host ? Tier::kCpu : Tier::kDevice; }
    StreamId stream() const { return on_host ? StreamId::kHostUpdate : StreamId::kUpdate; }
    const Place& slot() const { return on_host ? host_slot : device_slot; }
  };
  const SubGroup& GroupOf(const Route& route) const {
    return in_.plan.pools.homes.sub_groups[static_cast<size_t>(route.sub_group)];
  }
  // `turn`: of the parameter slot that carried updates fill, and shared reads have filled; -1: none.
  Route RouteOf(int sub_group, int turn) const;
  void TakeSlots(int turn, Route& route);
  // The first `states` of its states; beside them the master, and the parameters where those are read.
  void Read(int states, const Route& route);
  void Bring(Route& route);
  void BringGradient(Route& route);
  void BringParameter(Route& route);
  void TakeHome(const Route& route);
  void Move(const Route& route, OperationKind kind, StreamId stream,
            std::vector<sharding::Move> moves);
  void Copy(const Route& route, bool to_host, const sharding::Move& move);
  void AddArrays(const Route& route, Access access, int states, bool has_parameter);
  void AddOwnStaging(const Route& route);
  UpdateDetail DetailOf(const Route& route, int states) const;
  Place NormSums(bool on_host) const;

  const PassInputs& in_;
  const ReadTurns& turns_;
  const Decisions& d_;
  PlanWriter& writer_;
  OperandWriter& to_;
  SlotTurns host_slots_, device_slots_;
  std::map<int, Route> read_;  // by sub-group with states on their way
  bool norms_begun_[2] = {};   // on the device, on the host
};

}  // namespace ebb::sharding
