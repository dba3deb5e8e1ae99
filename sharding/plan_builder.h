// Writes a plan's moments and operations: walks the scopes in order and issues, at each open and
// close, what may start there. Implemented in files of one concern each: plan_builder.cc (the
// walk), plan_gathers.cc, plan_swaps.cc (what gathers take from below the device),
// plan_boundaries.cc (activations that wait there), plan_reductions.cc, plan_updates.cc (which
// updates, when), plan_sub_groups.cc (how one of them runs), plan_norms.cc (norms of parameters before
// them).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "ebb/sharding/boundaries.h"
#include "ebb/sharding/last_gathers.h"
#include "ebb/sharding/latest_use.h"
#include "ebb/sharding/lists.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/reduction.h"
#include "ebb/sharding/residency.h"
#include "ebb/sharding/update_chain.h"

namespace ebb::sharding {

// What the spans of a plan's operations and moments point into.
struct PlanLists {
  Lists<Part> parts;
  Lists<Dependency> dependencies;
  Lists<Move> moves;
  Lists<int> slots;
};

// An operation while its lists grow.
struct OperationDraft {
  OperationKind kind{};
  StreamId stream{};
  std::vector<Part> parts;
  std::vector<Dependency> after;
  int64_t bytes = 0;
  std::vector<Move> moves = {};
  Condition condition = Condition::kAlways;
  bool of_update = false;
  std::vector<int> frees = {};
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
        d_(plan.decisions) {
    std::fill(std::begin(last_norms_), std::end(last_norms_), -1);
  }

  void BuildStep();
  void BuildWalk();
  void BuildDrain();

 private:
  void Prepare();
  void Complete();
  void NewMoment(Moment::Kind kind, int scope);
  int Issue(const OperationDraft& operation);  // in the newest moment; returns its index
  void Frees(int operation, int slot);
  std::span<const Dependency> Keep(std::span<const Dependency> waits);
  int Mark(std::vector<Part> parts);  // a point of the compute stream
  void WalkScopes();
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
  int LastUserOfSlot(int unit) const;
  int64_t GatherBytes(const Stay& stay) const;
  int IssueFill(const GatherGroup& group);  // -1: nothing to fill

  // plan_swaps.cc
  // One group of gathers with something to read from the swap file, in the slot of its turn.
  struct Swap {
    int group = 0;             // of Residency::groups
    std::vector<int> updated;  // units whose carried update brings the parameters of this turn
    std::vector<int> operations = {};  // that fill the slot
    // Units whose last gather this is, and whose updates find there what it has brought; units whose
    // updates have to be issued before this turn may be read.
    std::vector<int> shared = {}, behind = {};
  };
  void FindSwaps();
  void FindSharedReads();
  void ShareParameters(int unit, const LastGather& gather);
  void ShareMasters(int unit, const std::vector<LastGather>& gathers, std::vector<int>& users);
  bool MayRead(int turn) const;
  std::vector<std::pair<int64_t, int64_t>> NotNarrowed(int turn, int unit, bool trainable,
                                                       const ParameterPiece& piece) const;
  void ReadSharedMasters(int turn);
  void NarrowSharedMasters(int turn);
  void IssueSwaps(int turns);  // as far as that many turns, and as updates have left slots
  void IssueRead(int turn, bool carried);
  bool IsCarried(int unit) const;
  int UploadParameters(const GatherGroup& group, int group_index,
                       std::vector<Dependency> after);  // -1: all are on the device
  Place InSlot(int turn, int unit, bool trainable, int64_t at) const;
  void WaitForParameterSlot(int turn, std::vector<Dependency>& after) const;

  // plan_boundaries.cc
  void FindBoundaries();
  void BringBoundaries(int s);
  void SendBoundaries(int s);
  void WaitForBoundaries(int s, std::vector<Dependency>& waits) const;
  int MoveBoundary(OperationKind kind, StreamId stream, int visit, const Place& from,
                   const Place& to, std::vector<Dependency> after);
  Place BoundaryOnDevice(int visit) const;
  int64_t BoundaryBytes(int visit) const;

  // plan_reductions.cc
  void WaitForGradientMemory(int s, std::vector<Dependency>& waits) const;
  bool GradientIsShard(int unit) const {
    return sharding::GradientIsShard(d_, plan_.pools.homes, unit);
  }
  void IssueReduction(const std::vector<int>& group);
  std::vector<Part> PartsOf(const std::vector<int>& group);
  std::vector<Part> PartsThat(bool accumulate, Tier home, const std::vector<Part>& parts) const;
  // What is done with reduced slices whose shards live in `home`; the last operation, -1: nothing.
  int IssueSums(Tier home, const std::vector<Part>& parts, int landing);
  void AwaitLanding(std::vector<Dependency>& after) const;
  // The same of one slice whose shard lives on NVMe, in a slot; the write.
  int IssueSumInSlot(Part part, int reduced);
  int IssueLanding(const std::vector<Part>& parts);
  Place ReducedSlice(const Part& part) const;
  Tier GradientHome(int unit) const {
    return plan_.pools.homes.units[static_cast<size_t>(unit)].gradient;
  }
  int IssueGradientGather(const std::vector<int>& units);
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
  int IssueOnSubGroup(UpdateChain& chain, SubGroupRoute& route, UpdateWork work,
                      OperationDraft operation);
  void BringGradient(UpdateChain& chain, SubGroupRoute& route, UpdateWork& work);
  void BringParameter(UpdateChain& chain, SubGroupRoute& route, UpdateWork& work);
  void TakeHome(UpdateChain& chain, const SubGroupRoute& route, const UpdateWork& work, int update);
  int IssueMoves(UpdateChain& chain, OperationKind kind, StreamId stream, std::vector<Move> moves,
                 std::vector<Dependency> after);
  int IssueCopy(UpdateChain& chain, bool to_host, const Move& move, std::vector<Dependency> after);
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
  int next_swap_ = 0, swaps_wanted_ = 0, next_master_slot_ = 0;
  // By unit: the turn whose read its update shares, and that read. By sub-group: its masters' turn in
  // Pools::master_slots. -1: none.
  std::vector<int> shared_turn_, shared_read_, master_turn_;
  int next_host_work_ = 0, next_device_work_ = 0;
  // The last parameter slot that a carried update began to fill, and the operation that waited for
  // what it held before.
  int opened_turn_ = -1, opened_by_ = -1;
  // Sub-groups of early updates in their order, up to where their states are on their way, and those
  // of them that are not updated yet; carried units to come.
  std::vector<int> early_sub_groups_;
  size_t next_early_ = 0;
  std::map<int, SubGroupRoute> ahead_;
  int carried_left_ = 0;
  int next_gradient_slot_ = 0;
  int last_landing_ = -1, last_host_sum_ = -1;  // of reduced slices; what is done with them there
  // Boundaries: by scope the visits whose outputs leave when it closes, are read from the swap file
  // and come back to the device when it opens; what brings its input; by visit the operation after
  // which the output is below the device (or in a slot), and its slot.
  std::vector<std::vector<int>> leaving_, reading_, coming_;
  std::vector<int> coming_op_, stored_boundary_;
  std::map<int, int> boundary_slot_;
  LatestUse
      boundaries_out_;  // of the activation pool: the operation that took a boundary from there
  int next_boundary_slot_ = 0, last_boundary_out_ = -1;
  int exchange_ = -1, exchange_norms_ = -1;
  int last_norms_[kStreams];          // operation, by stream; -1: none
  std::vector<int> mark_of_scope_;    // the compute stream's, at the scope's close
  LatestUse slots_used_;              // of the gather pool: the last scope that closed
  std::vector<int> gradient_reader_;  // by scope: the last that reads its whole gradient
  // Of the gradient pool, by the stream of that reader: the last such scope.
  std::array<LatestUse, kStreams> gradients_read_;
  // By unit; -1: none yet. The last gather is what last read the parameters where they live.
  std::vector<int> last_gather_, gradient_final_, update_of_unit_;
  std::vector<int> fill_of_unit_;    // of its secondary shards; -1: none yet
  std::vector<int> ready_of_scope_;  // what its kernels wait for: the gather, or the fill behind it
  std::vector<int> contributions_, contributions_left_;  // by unit
};

}  // namespace ebb::sharding
