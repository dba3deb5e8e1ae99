// Writes a plan's moments and operations: walks the ticks of a step and issues, at each open and
// close, what may start there. Implemented in files of one concern each: plan_builder.cc (the
// walk), plan_gathers.cc, plan_swaps.cc (what gathers take from below the device),
// plan_boundaries.cc (activations that wait there), plan_reductions.cc, plan_updates.cc (which
// updates, when), plan_sub_groups.cc (how one of them runs), plan_norms.cc (norms of parameters before
// them).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "ebb/sharding/boundaries.h"
#include "ebb/sharding/last_gathers.h"
#include "ebb/sharding/lists.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/reduction.h"
#include "ebb/sharding/residency.h"
#include "ebb/sharding/update_chain.h"

namespace ebb::sharding {

// What the spans of a plan's operations and moments point into.
struct PlanLists {
  Lists<Part> parts;
  Lists<Move> moves;
};

// An operation while its lists grow.
struct OperationDraft {
  OperationKind kind{};
  StreamId stream{};
  std::vector<Part> parts;
  int64_t bytes = 0;
  std::vector<Move> moves = {};
  Condition condition = Condition::kAlways;
  bool of_update = false;
};

class PlanBuilder {
 public:
  // Expects `plan` to have its layout, decisions, pools and scopes. Keeps references to all.
  PlanBuilder(const PlanInputs& inputs, const Residency& residency, const Reduction& reduction,
              Plan& plan)
      : inputs_(inputs),
        residency_(residency),
        reduction_(reduction),
        plan_(plan),
        d_(plan.decisions) {}

  void BuildStep();
  void BuildWalk();
  void BuildDrain();

 private:
  void Prepare();
  void Complete();
  void NewMoment(Moment::Kind kind, int scope);
  int Issue(const OperationDraft& operation);  // in the newest moment; returns its index
  void Mark();
  void WalkScopes();
  void BeginRound();
  bool Repeats() const { return d_.rounds >= kPlannedRounds; }  // a round in the middle
  int TicksOfRound() const { return 2 * static_cast<int>(plan_.scopes.size()) / d_.rounds; }
  void Open(int s);
  void Close(int s);
  void IssueExchange();
  void Finish();

  // Bytes that one rank receives when `shard` elements of every rank of a shard group become whole,
  // or sends when they are summed.
  int64_t RingBytes(int64_t shard, DType dtype) const {
    return (d_.shards - 1) * shard * SizeOf(dtype);
  }

  // plan_gathers.cc
  void IssueGathers(int tick);
  int64_t GatherBytes(const Stay& stay) const;
  void IssueFill(const GatherGroup& group);

  // plan_swaps.cc
  // One group of gathers with something to read from the swap file, in the slot of its turn.
  struct Swap {
    int group = 0;  // of Residency::groups
    int round = 0;
    int number = 0;            // of the slot, not counting how many there are
    int after = -1;            // turn that has the slot before it; -1: none
    std::vector<int> updated;  // units whose carried update brings the parameters of this turn
    // Units whose last gather this is, and whose updates find there what it has brought; units whose
    // updates have to be issued before this turn may be read.
    std::vector<int> shared = {}, behind = {};
  };
  void FindSwaps();
  void FindSharedReads();
  void ShareParameters(int unit, const LastGather& gather);
  void ShareMasters(int unit, const std::vector<LastGather>& gathers, std::vector<int>& users);
  int FirstNotReadAhead() const;
  bool MayRead(int turn) const;
  std::vector<std::pair<int64_t, int64_t>> NotNarrowed(int turn, int unit, bool trainable,
                                                       const ParameterPiece& piece) const;
  void ReadSharedMasters(int turn);
  void NarrowSharedMasters(int turn);
  void IssueSwaps();  // as far as gathers and updates have left slots
  void IssueRead(int turn, bool carried);
  bool IsCarried(int unit) const;
  void UploadParameters(const GatherGroup& group, int group_index);
  Place InSlot(int turn, int unit, bool trainable, int64_t at) const;

  // plan_boundaries.cc
  void FindBoundaries();
  void BringBoundaries(int tick);
  void SendBoundaries(int tick);
  void MoveBoundary(OperationKind kind, StreamId stream, int visit, const Place& from,
                    const Place& to);
  Place BoundaryOnDevice(int visit) const;
  int64_t BoundaryBytes(int visit) const;

  // plan_reductions.cc
  bool GradientIsShard(int unit) const {
    return sharding::GradientIsShard(d_, plan_.pools.homes, unit);
  }
  void IssueReduction(const std::vector<int>& group);
  std::vector<Part> PartsOf(const std::vector<int>& group);
  std::vector<Part> PartsThat(bool accumulate, Tier home, const std::vector<Part>& parts) const;
  // What is done with reduced slices whose shards live in `home`.
  void IssueSums(Tier home, const std::vector<Part>& parts);
  // The same of one slice whose shard lives on NVMe, in a slot.
  void IssueSumInSlot(Part part);
  void IssueLanding(const std::vector<Part>& parts);
  // Of a step that holds its gradients until Finish.
  void IssueHeldNorms();
  void IssueHeldNormInSlot(Part part);
  // At stage 0 every rank updates with all of them.
  bool GathersGradients() const { return d_.stage == 0 && d_.world > 1; }
  Place ReducedSlice(const Part& part) const;
  Tier GradientHome(int unit) const {
    return plan_.pools.homes.units[static_cast<size_t>(unit)].gradient;
  }
  void IssueGradientGather(const std::vector<int>& units);
  int64_t ReduceBytes(const std::vector<Part>& parts) const;
  int64_t AllReduceBytes(const std::vector<Part>& parts) const;
  int64_t RoundBytes(const std::vector<Part>& parts) const;
  int64_t CastBytes(const std::vector<Part>& parts) const;
  int64_t AccumulateBytes(const std::vector<Part>& parts) const;
  int64_t NormBytes(const std::vector<Part>& parts) const;

  // plan_updates.cc
  // `turn`: of the parameter slot that a carried update fills; -1: not carried.
  void IssueUpdate(int unit, int turn = -1);
  void IssueUpdates();
  // The turn of the parameter slot in which the update finds what it reads of the parameters.
  int SharedSlot(int unit) const { return d_.reads_parameters() ? shared_turn_[unit] : -1; }
  void FindEarlyUpdates();
  void ReadAhead();

  // plan_sub_groups.cc
  void IssueSubGroup(UpdateChain& chain, int sub_group);
  SubGroupRoute RouteOf(const UpdateChain& chain, const SubGroup& group) const;
  void TakeSlots(const UpdateChain& chain, const SubGroup& group, SubGroupRoute& route);
  SubGroupRoute BringStates(UpdateChain& chain, int sub_group);
  // The first `states` of its states; beside them the master, and the parameters where those are read.
  void ReadStates(UpdateChain& chain, int sub_group, int states, SubGroupRoute& route);
  UpdateWork WorkOf(const UpdateChain& chain, int sub_group, const SubGroupRoute& route) const;
  // Brings the rest, and issues `operation` of one part with that work behind all of it.
  void IssueOnSubGroup(UpdateChain& chain, SubGroupRoute& route, UpdateWork work,
                       OperationDraft operation);
  void BringGradient(UpdateChain& chain, SubGroupRoute& route, UpdateWork& work);
  void BringParameter(UpdateChain& chain, SubGroupRoute& route, UpdateWork& work);
  void TakeHome(UpdateChain& chain, const SubGroupRoute& route, const UpdateWork& work);
  void IssueMoves(UpdateChain& chain, OperationKind kind, StreamId stream, std::vector<Move> moves);
  void IssueCopy(UpdateChain& chain, bool to_host, const Move& move);
  int64_t UpdateBytes(int unit, int64_t elements) const;

  // plan_norms.cc
  void IssueParameterNorms();
  void IssueNormsOf(UpdateChain& chain, int sub_group);
  int64_t NormsBytes(int unit, int64_t elements) const;

  const PlanInputs& inputs_;
  const Residency& residency_;
  const Reduction& reduction_;
  Plan& plan_;
  const std::shared_ptr<PlanLists> lists_ = std::make_shared<PlanLists>();
  const Decisions& d_;
  size_t next_group_ = 0;  // of gathers, not issued yet
  bool carries_ = false;   // updates of the step before, which a walk does not
  std::vector<Swap> swaps_;
  std::vector<int> swap_of_group_;  // turn; -1: nothing to read
  int next_swap_ = 0, uploaded_swaps_ = 0, next_master_slot_ = 0;
  int round_ = 0;  // of the newest moment
  // By unit: the turn whose read its update shares. By sub-group: its masters' turn in
  // Pools::master_slots. -1: none.
  std::vector<int> shared_turn_, master_turn_;
  int next_host_work_ = 0, next_device_work_ = 0;
  // Sub-groups of early updates in their order, up to where their states are on their way, and those
  // of them that are not updated yet; carried units to come.
  std::vector<int> early_sub_groups_;
  size_t next_early_ = 0;
  std::map<int, SubGroupRoute> ahead_;
  int carried_left_ = 0;
  int next_gradient_slot_ = 0;
  // Boundaries: by tick the visits whose outputs leave, are read from the swap file and come back to the device;
  // by visit its slot.
  std::vector<std::vector<int>> leaving_, reading_, coming_;
  std::map<int, int> boundary_slot_;
  int next_boundary_slot_ = 0;
  bool norms_begun_[2] = {};      // of parameters: on the device, on the host
  std::vector<uint8_t> updated_;  // by unit: its update is issued
  std::vector<int> contributions_, contributions_left_;  // by unit
};

}  // namespace ebb::sharding
