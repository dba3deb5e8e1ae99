#include "ebb/sharding/lower/lower_tiers.h"

#include <map>

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

// Boundary activations that wait below the device for their backward, as operations. Boundaries on
// NVMe pass through a slot in host memory, both ways.
class BoundaryLowering {
 public:
  BoundaryLowering(const PassInputs& in, PlanWriter& writer)
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
  void Move(OperationKind kind, StreamId stream, int visit, const Place& from, const Place& to);

  const PassInputs& in_;
  const Table& table_;
  PlanWriter& writer_;
  TurnCursor slots_;
  std::map<int, Place> read_;  // by visit, on its way to the device
};

void BoundaryLowering::Move(OperationKind kind, StreamId stream, int visit, const Place& from,
                            const Place& to) {
  const bool of_file = kind == OperationKind::kRead || kind == OperationKind::kWrite;
  int64_t bytes = table_.ElementsOf(Purpose::kOutputAway, visit);
  if (of_file) bytes = SwapAligned(bytes);
  const int unit = static_cast<int>(in_.model.forward[static_cast<size_t>(visit)].unit);
  writer_.Issue(
      {.kind = kind,
       .stream = stream,
       .parts = {{.unit = unit}},
       .bytes = bytes,
       .moves = {{.state = StateClass::kActivation, .from = from, .to = to, .bytes = bytes}}});
}

void BoundaryLowering::Send(int visit) {
  const Place below = swaps() ? slots_.Next() : PlaceOf(Purpose::kOutputAway, visit);
  Move(OperationKind::kDownload, StreamId::kDownload, visit, PlaceOf(Purpose::kOutput, visit),
       below);
  if (swaps()) {
    Move(OperationKind::kWrite, StreamId::kWrite, visit, below,
         PlaceOf(Purpose::kOutputAway, visit));
  }
}

void BoundaryLowering::Read(int visit) {
  const Place slot = slots_.Next();
  read_[visit] = slot;
  Move(OperationKind::kRead, StreamId::kReadParameters, visit, PlaceOf(Purpose::kOutputAway, visit),
       slot);
}

void BoundaryLowering::Bring(int visit) {
  Move(OperationKind::kUpload, StreamId::kUpload, visit,
       swaps() ? read_.at(visit) : PlaceOf(Purpose::kOutputAway, visit),
       PlaceOf(Purpose::kOutput, visit));
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
