// Reductions as operations: a bucket of gradients becomes slices of sums, which end in the shards.
// On the reduce stream, in order: the cast to the sent dtype; the reduce-scatter; with replicas the
// all-reduce between shard groups and the rounding of its sums; the sum of the slices into the
// shard, or their norm if they are the shard; the sum over tensor of finished shards of which each
// tensor rank has a term, and their norm; and at stage 0 the gather that makes gradients whole
// again. Slices with shards in host memory go there first, and are summed there. Slices with shards
// on NVMe are summed one at a time, in a slot.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "ebb/sharding/lower/op_writer.h"
#include "ebb/sharding/place.h"

namespace ebb::sharding {

class ReductionLowering {
 public:
  ReductionLowering(const PassInputs& in, OpWriter& writer)
      : in_(in),
        d_(in.plan.decisions),
        writer_(writer),
        to_(writer.operands()),
        table_(in.plan.table),
        slots_(table_, Purpose::kGradientSlot) {}

  void BeginRound() { slots_.Restart(); }
  void Reduce(int group);
  // The norms of a step that holds its gradients: of the shards, as the trainer has left them.
  void HeldNorms(const std::vector<int>& units);
  void GatherGradients(const std::vector<int>& units);

 private:
  // The gradient of a scope on its way, or of a unit that only needs its norm.
  struct Gradient {
    Part part;
    const Section& section;
    Tier shard_tier{};  // of its shard
    DType communication{};
    bool accumulates = false;
    bool sums_with_norm = false;  // its norm is taken with the last addition
    // The step's last contribution. part.last: and nothing changes the shard after it.
    bool is_finished = false;
    Place whole = {}, source = {};  // as backward leaves it; as the reduction sends it
    // This rank's slice of the sum: in the sent dtype; in the communication dtype; and, if the
    // shard is in host memory, the copy there that is added to the shard.
    Place summed = {}, rounded = {}, landed = {};
    Place shard = {};  // where sums are made: the shard, or the slot that it passes through

    bool lands() const { return shard_tier != Tier::kDevice && accumulates; }
  };
  using Gradients = std::vector<Gradient>;
  Gradient OfUnit(const Part& part) const;
  Gradients OfGroup(const std::vector<int>& group) const;
  // Those with shards in this tier whose slices are added to the shard, or whose norms are taken
  // alone, because nothing is added or because a sum over tensor comes between.
  Gradients Added(Tier shard_tier, const Gradients& gradients) const;
  Gradients Measured(Tier shard_tier, const Gradients& gradients) const;

  // One operation for all of them; `add` writes the operands of each and returns its bytes.
  void Issue(OpDraft draft, std::span<const Gradient> gradients,
             absl::FunctionRef<int64_t(const Gradient&)> add);
  // Finished shards of which each tensor rank has a term.
  void SumTensor(const Gradients& gradients);
  int64_t AddAccumulate(const Gradient& gradient);
  int64_t AddNorm(const Gradient& gradient);
  void AddSquares(const Gradient& gradient, bool last);
  // Sums reduced slices into shards in `shard_tier`, or takes the norms of those that lie there.
  void Sum(Tier shard_tier, const Gradients& gradients);
  void Land(const Gradients& gradients);
  void SumInSlot(Gradient gradient);
  void Move(Role role, StreamId stream, const Gradient& gradient, const Place& from,
            const Place& to, int64_t bytes);
  int64_t StoredBytes(const Gradient& gradient) const;

  const PassInputs& in_;
  const Decisions& d_;
  OpWriter& writer_;
  OperandWriter& to_;
  const Table& table_;
  TurnCursor slots_;
};

}  // namespace ebb::sharding
