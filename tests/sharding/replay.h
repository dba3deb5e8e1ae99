// Replays what an engine and a trainer do with a sequence of plans, in the order in which it is
// issued, on a model of memory. Which bytes each operation and each scope's kernels touch is
// written down here a second time, from the descriptions in plan.h, not taken from the builder.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "ebb/sharding/plan.h"
#include "shadow_memory.h"

namespace ebb::sharding {

class Replay {
 public:
  // As `rank` sees it. The pools are those of `plan`; parameters, masters and states are there.
  Replay(const PlanInputs& inputs, const Plan& plan, int rank);

  // Units with `left_out` are not used: their scopes are not opened, so nothing waits for their
  // gathers, and what is reduced for them is zeros.
  void Step(const Plan& plan, std::vector<bool> left_out = {});
  void Walk(const Plan& plan);

  // The first violation; empty while there is none.
  const std::string& violation() const { return violation_; }

 private:
  void Run(const Plan& plan, bool walk);
  void Issue(int operation);
  void RunKernels(int scope, const std::vector<Dependency>& waits);
  void Release(int scope);
  std::vector<int> Resolve(const std::vector<Dependency>& dependencies) const;

  void ReadWeights(int thing, int scope);
  void TouchBoundaries(int thing, int scope);
  void WriteGradient(int thing, int scope);

  void Gather(int thing, const Operation& operation);
  void Cast(int thing, const Operation& operation);
  void Reduce(int thing, const Operation& operation);
  void AllReduce(int thing, const Operation& operation);
  void Round(int thing, const Operation& operation);
  void WriteReduced(int thing, const Operation& operation, size_t part);
  void Accumulate(int thing, const Operation& operation);
  void Norm(int thing, const Operation& operation);
  void GatherGradient(int thing, const Operation& operation);
  void Update(int thing, const Operation& operation);
  void Refresh(int thing, const Operation& operation);

  bool IsLeftOut(int unit) const { return !left_out_.empty() && left_out_[unit]; }
  const Section& trainable(int unit) const { return plan_->layout.units[unit].trainable; }
  const Section& frozen(int unit) const { return plan_->layout.units[unit].frozen; }
  // With replicas sums are sent in fp32 and rounded after the last addition.
  bool rounds() const {
    return plan_->decisions.replicas() > 1 && plan_->decisions.communication != DType::kFloat32;
  }
  bool casts() const {
    return plan_->decisions.gradient != plan_->decisions.communication || rounds();
  }
  int64_t owned(int unit) const;  // trainable elements that this rank updates
  int expected_contributions(int unit) const;

  Range OwnParameters(int unit) const;  // what the update writes, a gather and a refresh read
  Range Gathered(int unit) const;       // trainable parameters, whole
  Range GatheredFrozen(int unit) const;
  const SubGroup& SubGroupOf(int unit) const;
  Range Master(int unit) const;
  Range OptimizerState(int unit, int state) const;
  Range GradientShard(int unit, bool whole) const;
  Range WholeGradient(int scope) const;
  Range Reduced(const Operation& operation, size_t part) const;  // what a reduction reads
  Range Summed(const Operation& operation, size_t part) const;
  Range ReducedSlice(const Operation& operation, size_t part) const;
  Range OwnSliceOf(const Range& whole) const;
  Range NormScratch() const;
  Range Exchange() const;
  Range Output(int visit, int64_t micro_batch, bool gradient) const;
  Content GradientOf(Content::Kind kind, int scope) const;

  void Fail(const std::string& what);

  const PlanInputs inputs_;
  const int rank_;    // in its shard group
  const Plan* plan_;  // the one that runs
  bool walks_ = false;
  std::vector<bool> left_out_;  // by unit; empty: none
  HappensBefore order_;
  ShadowMemory memory_;
  std::vector<std::string> names_;        // of the things in `order_`
  std::vector<int> things_;               // by operation of the plan that runs
  std::vector<int> updated_, refreshed_;  // by unit: the last ones, of whichever step
  std::vector<int> contributions_;        // by unit: added to the shard in this step
  int exchanged_ = HappensBefore::kStart, last_kernels_ = HappensBefore::kStart;
  int steps_ = 0, walked_ = 0;
  std::string violation_;
};

}  // namespace ebb::sharding
