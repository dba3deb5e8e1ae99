// Writes a plan's moments and operations: walks the scopes in order and issues, at each open and
// close, what may start there. Implemented in files of one concern each: plan_builder.cc (the
// walk), plan_gathers.cc, plan_reductions.cc, plan_updates.cc.
#pragma once

#include <cstdint>
#include <vector>

#include "ebb/sharding/plan.h"
#include "ebb/sharding/reduction.h"
#include "ebb/sharding/residency.h"

namespace ebb::sharding {

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

 private:
  void Prepare();
  void NewMoment(Moment::Kind kind, int scope);
  int Issue(Operation operation);     // in the newest moment; returns its index
  int Mark(std::vector<Part> parts);  // a point of the compute stream
  void WalkScopes();
  void Open(int s);
  void Close(int s);
  void Finish();

  // Bytes that one rank receives when `shard` elements of every rank of a shard group become whole,
  // or sends when they are summed.
  int64_t RingBytes(int64_t shard, DType dtype) const {
    return (d_.shards - 1) * shard * SizeOf(dtype);
  }

  // plan_gathers.cc
  void IssueGathers(int tick);
  int LastUserOfSlot(int unit, int tick) const;
  bool SlotsOverlap(int a, int b) const;

  // plan_reductions.cc
  void WaitForGradientMemory(int s, std::vector<Dependency>& waits) const;
  void IssueReduction(const std::vector<int>& group);
  std::vector<Part> PartsOf(const std::vector<int>& group);
  std::vector<Part> PartsThat(bool accumulate, const std::vector<Part>& parts) const;
  int IssueGradientGather(const std::vector<int>& units);
  int64_t WholeGradientBytes(int unit) const;
  int64_t ReduceBytes(const std::vector<Part>& parts) const;
  int64_t AllReduceBytes(const std::vector<Part>& parts) const;
  int64_t RoundBytes(const std::vector<Part>& parts) const;
  int64_t CastBytes(const std::vector<Part>& parts) const;
  int64_t AccumulateBytes(const std::vector<Part>& parts) const;
  int64_t NormBytes(const std::vector<Part>& parts) const;

  // plan_updates.cc
  int64_t UpdateBytes(int unit) const;
  void IssueUpdate(int unit);
  void IssueUpdates();

  const PlanInputs& inputs_;
  const Residency& residency_;
  const Reduction& reduction_;
  Plan& plan_;
  const Decisions& d_;
  size_t next_group_ = 0;  // of gathers, not issued yet
  int exchange_ = -1;
  std::vector<int> mark_of_scope_;    // the compute stream's, at the scope's close
  std::vector<int> gradient_reader_;  // by scope: the last that reads its whole gradient
  std::vector<int> last_gather_, gradient_final_, update_of_unit_;  // by unit; -1: none yet
  std::vector<int> contributions_, contributions_left_;             // by unit
};

}  // namespace ebb::sharding
