// Replays the operations of an engine and a trainer for a sequence of plans, in the order of issue,
// on a model of memory. Which bytes each operation and each scope's kernels touch is written down
// here a second time, from the descriptions in plan.h, not taken from the passes. Moves between
// tiers carry any contents: the user of the bytes knows the right ones.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ebb/sharding/frontier.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/waits.h"
#include "shadow_memory.h"

namespace ebb::sharding {

// The lists of plans of one engine. Cells are cut by the operands of the first lists;
// others may come later.
class OpLists {
 public:
  explicit OpLists(std::span<const Plan* const> plans);

  OpList& Of(const Plan& plan, bool carrying);
  const Cells& cells() const { return *cells_; }

 private:
  std::map<std::pair<const Plan*, bool>, OpList> lists_;
  std::unique_ptr<Cells> cells_;
};

class Replay {
 public:
  // Replays plans of `rank`. The pools are those of `plan`; parameters, masters and states are
  // there. `drain`: runs when updates were carried and the next list does not take them.
  Replay(const PlanInputs& inputs, const Plan& plan, int rank, OpLists& lists,
         const Plan* drain = nullptr);

  struct StepOptions {
    // Units that are not used: nothing waits for their gathers, and zeros are reduced for them.
    std::vector<bool> left_out = {};
    bool overflows = false;  // updates that wait for the verdict do not happen
  };
  void Step(const Plan& plan, StepOptions options);
  void Step(const Plan& plan) { Step(plan, {}); }
  void Walk(const Plan& plan);
  void Drain();  // a call looks at the state

  // The first violation; empty while there is none.
  const std::string& violation() const { return violation_; }

 private:
  void Begin(const Plan& plan, bool walk);
  void Run();
  void CheckVersions();
  void Issue(int op);
  void Touch(int thing, const Op& operation);
  void RunKernels(int thing, int scope);
  void LeaveOut(int thing, int scope);
  void Release(int thing, int scope);
  // Waits, and enters and leaves the frontier.
  int Add(int op);

  void ReadWeights(int thing, int scope);
  void TouchBoundaries(int thing, int scope);
  void WriteGradient(int thing, int scope);

  void Gather(int thing, const Op& operation);
  void FillSecondary(int thing, const Op& operation);
  void GatherSecondary(int thing, const Op& operation);
  void Cast(int thing, const Op& operation);
  void Reduce(int thing, const Op& operation);
  void AllReduce(int thing, const Op& operation);
  void Round(int thing, const Op& operation);
  void WriteReduced(int thing, const Op& operation, size_t part);
  void WriteFirst(int thing, const Range& shard, int unit);
  void Accumulate(int thing, const Op& operation);
  void UseSumScratch(int thing);
  void SumTensor(int thing, const Op& operation);
  void Norm(int thing, const Op& operation);
  void GatherGradient(int thing, const Op& operation);
  void Update(int thing, const Op& operation);
  void Momentum(int thing, const Op& operation);
  void ExchangeMatrices(int thing, const Op& operation);
  void Orthogonalise(int thing, const Op& operation);
  void ParameterNorms(int thing, const Op& operation);
  void Seal(int thing, const Op& operation);
  void SealNorms(int thing);
  void ConcludeNorms(int thing);
  // From the first place to the second.
  void Pass(int thing, std::span<const Operand> operands, Content::Kind kind);
  void CopyControl(int thing, std::span<const Operand> operands);
  void CastMasters(int thing, const Op& operation);
  void KeepParameters(int thing, const Op& update);
  void UseStaging(int thing, int unit, Tier here);
  void Move(int thing, const Op& operation);
  void Land(int thing, const Op& operation);
  void Refresh(int thing, const Op& operation);

  // Also of a step in which nothing is trainable.
  bool is_walk() const;
  bool IsLeftOut(int unit) const { return !options_.left_out.empty() && options_.left_out[unit]; }
  const Section& trainable(int unit) const { return plan_->layout.units[unit].trainable; }
  const Section& frozen(int unit) const { return plan_->layout.units[unit].frozen; }
  // With replicas sums are sent in fp32 and rounded after the last addition.
  bool rounds(int unit) const { return plan_->decisions.rounds_slices(unit); }
  bool casts(int unit) const { return plan_->decisions.casts(unit); }
  bool sums_tensor(int unit) const { return plan_->decisions.sums_tensor[unit]; }
  int64_t owned(int unit) const;  // trainable elements that this rank updates
  int expected_contributions(int unit) const;

  Range OwnParameters(int unit) const;  // on the device: read by a gather and a refresh
  // Where a gather finds this rank's slice.
  Range OwnSlice(int unit, bool is_trainable) const;
  int64_t SliceBytes(int unit, bool is_trainable) const;
  Range RangeOf(const Place& place, int64_t bytes) const;
  Range Gathered(int unit) const;  // trainable parameters, whole
  Range GatheredFrozen(int unit) const;
  // This rank's secondary shard of a section; of the section, from the byte `first` on.
  struct SecondaryRange {
    Range shard;
    int64_t first = 0;
  };
  SecondaryRange Secondary(int unit, bool is_trainable) const;
  const Table& table() const { return plan_->table; }
  // A row, or this rank's slice of it.
  Range RangeOfRow(int row, bool slice = false) const;
  Range ScratchRange(Purpose purpose, int64_t at, int64_t bytes) const;
  Tier GradientTier(int unit) const {
    return table().TierOf(table().Find(Purpose::kGradientShard, unit));
  }
  Content ParameterOf(int unit, int version, int64_t first_element) const;
  Content OwnParametersOf(int unit, int version) const;
  Content FrozenOf(int unit) const;
  Range GradientShard(int unit, bool whole) const;
  Range WholeGradient(int scope) const;
  bool IsShard(int scope) const;                          // that gradient, where it lies
  Range Reduced(const Op& operation, size_t part) const;  // read by a reduction
  Range Summed(const Op& operation, size_t part) const;
  Range ReducedSlice(const Op& operation, size_t part) const;
  Range LandedSlice(const Op& reduction, size_t part) const;
  // The kReduce that an operation on its slices belongs to.
  const Op* ReductionOf(const Op& operation) const;
  bool IsAdded(const Part& part) const;  // to a shard, or else it is the shard
  // The reduction's parts with shards in `tier` that are added to them or not, as indices.
  std::vector<size_t> PartsThat(const Op& reduction, bool are_added, Tier tier) const;
  std::vector<size_t> PartsThat(const Op& reduction, bool are_added, Tier tier,
                                const Op& operation) const;
  // Those whose norms are not taken with their last addition.
  std::vector<size_t> MeasuredParts(const Op& reduction, Tier tier, const Op& norm) const;
  Range SummedShard(const Op& operation, const Part& part) const;
  bool HasTheParts(const Op& operation, const Op& reduction, const std::vector<size_t>& parts);
  Range OwnSliceOf(const Range& whole) const;
  Range NormScratch(Tier tier) const;
  const ControlCells& cells() const { return lists_.cells().control(); }
  Range Control(int64_t cell, int step) const;
  Range Control(int64_t cell) const { return Control(cell, steps_); }  // of the step that runs
  Range NormSums(bool on_host) const;
  Range Output(int visit, int64_t micro_batch, bool gradient) const;
  Content GradientOf(Content::Kind kind, int scope) const;

  void Fail(const std::string& what);

  const PlanInputs inputs_;
  const int rank_;    // in its shard group
  const Plan* plan_;  // the one that runs
  const Plan* const drain_;
  bool walks_ = false;
  int tick_ = -1;  // of the issued operations
  StepOptions options_;
  HappensBefore order_;
  ShadowMemory memory_;
  std::vector<std::string> names_;  // of the things in `order_`
  OpLists& lists_;
  Frontier frontier_;
  const OpList* list_ = nullptr;  // the one that runs
  std::vector<int> things_;       // by its operations; kStart: has not run
  // Events of the frontier by operation and parity, and the last thing of each.
  std::map<const OpList*, std::vector<std::array<int, 2>>> events_;
  std::vector<int> thing_of_event_;
  std::vector<int> contributions_;          // by unit: added to the shard in this step
  std::vector<int> contributions_carried_;  // likewise, in the step that carries its updates over
  std::vector<int> norms_;                  // things of this step that the exchange tells of
  int last_kernels_ = HappensBefore::kStart;
  // By sub-group: the operation that has summed its norms in this step; and the exchange of them.
  // -1: none.
  std::vector<int> norms_taken_;
  bool norms_begun_[2] = {};  // on the device, on the host
  int norms_exchanged_ = -1;
  bool carries_ = false;  // updates of the last step are still to be done
  // Steps so far, and the steps among them that updated. Scopes must see parameters `version_`.
  int steps_ = 0, version_ = 0, walked_ = 0;
  std::vector<int> sub_group_versions_;
  std::string violation_;
};

}  // namespace ebb::sharding
