#include "ebb/sharding/lower/lower_tiers.h"

#include "ebb/sharding/lower/lower_boundaries.h"
#include "ebb/sharding/lower/lower_exchange.h"
#include "ebb/sharding/lower/lower_gathers.h"
#include "ebb/sharding/lower/lower_reductions.h"
#include "ebb/sharding/lower/lower_updates.h"

namespace ebb::sharding {
namespace {

// Outside of scopes a trainer may add to the loss.
void Mark(PlanWriter& writer) {
  writer.operands().AddControl(writer.operands().sums(), Access::kReadWrite);
  writer.Issue({.kind = OperationKind::kMark, .stream = StreamId::kCompute});
}

class TierLowering {
 public:
  TierLowering(const PassInputs& in, const SwapIns& swap_ins)
      : in_(in),
        writer_(in.plan),
        gathers_(in, swap_ins, writer_),
        boundaries_(in, writer_),
        reductions_(in, writer_),
        updates_(in, swap_ins, writer_) {}

  PlanWriter Run(std::span<const LogicalMoment> moments);

 private:
  void BeginMoment(const LogicalMoment& moment);
  void Lower(const LogicalOp& operation);

  const PassInputs& in_;
  PlanWriter writer_;
  GatherLowering gathers_;
  BoundaryLowering boundaries_;
  ReductionLowering reductions_;
  UpdateLowering updates_;
  int round_ = 0;
};

PlanWriter TierLowering::Run(std::span<const LogicalMoment> moments) {
  for (const LogicalMoment& moment : moments) {
    BeginMoment(moment);
    for (const LogicalOp& operation : moment.operations) Lower(operation);
  }
  return std::move(writer_);
}

// Slots begin anew in every round, so that all in the middle are the same.
void TierLowering::BeginMoment(const LogicalMoment& moment) {
  writer_.BeginMoment(moment.kind, moment.scope);
  const int round =
      moment.scope < 0 ? round_ : in_.plan.scopes[static_cast<size_t>(moment.scope)].round;
  if (round == round_) return;
  round_ = round;
  if (!in_.repeats_round()) return;
  boundaries_.BeginRound();
  reductions_.BeginRound();
}

void TierLowering::Lower(const LogicalOp& operation) {
  switch (operation.kind) {
    case LogicalOp::kMark:
      return Mark(writer_);
    case LogicalOp::kReadParameters:
      return gathers_.Read(operation.index);
    case LogicalOp::kUploadParameters:
      return gathers_.Upload(operation.index);
    case LogicalOp::kGather:
      return gathers_.Gather(operation.index);
    case LogicalOp::kSendBoundary:
      return boundaries_.Send(operation.index);
    case LogicalOp::kReadBoundary:
      return boundaries_.Read(operation.index);
    case LogicalOp::kBringBoundary:
      return boundaries_.Bring(operation.index);
    case LogicalOp::kReduce:
      return reductions_.Reduce(operation.index);
    case LogicalOp::kHeldNorms:
      return reductions_.HeldNorms(operation.units);
    case LogicalOp::kGatherGradients:
      return reductions_.GatherGradients(operation.units);
    case LogicalOp::kReadStates:
      return updates_.ReadStates(operation.index);
    case LogicalOp::kUpdate:
      return updates_.Update(operation.index);
    case LogicalOp::kParameterNorms:
      return updates_.TakeNorms(operation.index);
    case LogicalOp::kExchangeNorms:
      return ExchangeNorms(in_.plan, writer_);
    case LogicalOp::kRefresh:
      return gathers_.Refresh(operation.units);
    case LogicalOp::kExchange:
      return ExchangeRecords(in_.plan, writer_);
  }
}

}  // namespace

PlanWriter LowerTiers(const PassInputs& in, const SwapIns& swap_ins,
                      std::span<const LogicalMoment> moments) {
  return TierLowering(in, swap_ins).Run(moments);
}

}  // namespace ebb::sharding
