// Updates of sub-groups as operations: arrays are brought to where the sub-group is updated, and
// changed arrays are brought back. States and other arrays that are kept on another tier pass
// through a slot:
//
//   read states   s0  s1  s2  s3 | s4
//   update            s0  s1  s2   s3         the slot of s0 is free for s4
//   write                 s0  s1   s2  s3
//
// Some optimizers take norms of parameters before. Reads for norms go the same way.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "ebb/sharding/lower/emit.h"
#include "ebb/sharding/lower/op_writer.h"
#include "ebb/sharding/place.h"

namespace ebb::sharding {

class UpdateLowering {
 public:
  UpdateLowering(const PassInputs& in, const SwapIns& swap_ins, OpWriter& writer);

  // Reads need no verdict and no gradient, only that the bytes were written.
  void ReadStates(int sub_group);
  void Update(int sub_group);  // after its ReadStates
  void TakeNorms(int sub_group);
  // Muon's update of a unit of matrices, in two halves. Each sub-group moves twice: its states for the
  // direction, and then its master. While matrices are computed, those of the next unit come.
  //
  //   update     d0        d1  o0        a0  d2  o1        a1     d: direction, o: iteration, a: apply
  //   reduce         to0       to1  from0        to2  from1       the matrices, to and from owners
  void BeginMatrices(int unit);
  void EndMatrices(int unit);  // in the order of begins, at most one behind

 private:
  // The route of one sub-group: the slots that it moves through, and where its arrays are by now.
  struct Route {
    int unit = 0, sub_group = 0;
    bool carried = false;
    int states = 0;           // that the update touches
    bool has_master = false;  // it touches the master, if there is one
    bool on_host = false;     // it is updated on the host
    bool swaps = false;       // its states, from and to the swap file
    bool moves_gradient = false, moves_parameter = false;
    bool in_parameter_slot = false;  // its parameters pass through the slot that gathers read from
    Place parameter_place = {};
    int64_t host_turn = 0, device_turn = 0;  // of work slots
    Place host_parameter = {};               // on the way to or from the swap file
    Place gradient = {}, master = {}, parameter = {};

    Tier here() const { return on_host ? Tier::kCpu : Tier::kDevice; }
    StreamId stream() const { return on_host ? StreamId::kHostUpdate : StreamId::kUpdate; }
  };
  const SubGroup& GroupOf(const Route& route) const { return table_.sub_groups[route.sub_group]; }
  // An array of the sub-group where it lives between steps.
  Place StoredPlace(const Route& route, Purpose purpose, int state = 0) const;
  // Where the update finds a state: in its place, or in the sub-group's slot.
  Place StatePlace(const Route& route, int state) const;
  // A part of the sub-group's slot.
  Place SlotPlace(const Route& route, bool on_host, Purpose part, int state = 0) const;
  // `swap_in`: a carried update fills its parameter slot, or an early update shares its read; -1:
  // none.
  Route RouteOf(int sub_group, int swap_in) const;
  void TakeSlots(int swap_in, Route& route);
  // Reads the states, the master, and the parameters if the update reads them.
  void Read(const Route& route);
  void Bring(Route& route);
  void BringGradient(Route& route);
  void BringParameter(Route& route);
  void WriteBack(const Route& route);
  void Transfer(const Route& route, Role role, StreamId stream, int64_t bytes);
  void Copy(const Route& route, bool to_host, StateClass state, const Place& from, const Place& to,
            Encoding encoding);
  int64_t SwappedBytes(const Route& route, Encoding encoding) const;
  void AddArrays(const Route& route, Access access, bool has_parameter);
  // An array of a unit's directions, from a sub-group's first element on.
  Place DirectionPlace(const Route& route, bool on_host, int64_t turn) const;
  void FindDirection(int sub_group);
  void ExchangeMatrices(Role role, int unit, int64_t turn);
  void Orthogonalise(int unit);
  void ApplyDirection(int sub_group);
  void AddOwnStaging(const Route& route);
  UpdateDetail DetailOf(const Route& route) const;
  void AddConstants(const Route& route, bool early);

  const PassInputs& in_;
  const SwapIns& swap_ins_;
  const Decisions& d_;
  OpWriter& writer_;
  OperandWriter& to_;
  const Table& table_;
  int64_t next_turn_[2] = {};                        // of work slots on the device, on the host
  int64_t begun_matrices_ = 0, ended_matrices_ = 0;  // units
  std::map<int, Route> read_;                        // by sub-group with states on their way
  bool norms_begun_[2] = {};                         // on the device, on the host
};

}  // namespace ebb::sharding
