// Where reductions find and leave gradients: whole as backward wrote them, cast, as this rank's slice of the sum, and
// that where it is added to its shard.
#include "ebb/sharding/operands.h"
#include "ebb/sharding/unit_places.h"

namespace ebb::sharding {
namespace {

constexpr int64_t kNormBlock = 1024;  // elements, of which a norm has a sum each

// The operands of one unit's part.
class PartOperands {
 public:
  PartOperands(const Part& part, OperandWriter& to)
      : part_(part),
        to_(to),
        plan_(to.plan()),
        d_(plan_.decisions),
        section_(SectionOf(plan_, part.unit, true)),
        home_(plan_.pools.homes.units[static_cast<size_t>(part.unit)].gradient),
        accumulates_(d_.accumulates[static_cast<size_t>(part.unit)]) {}

  void Cast() {
    to_.Add(Whole(), d_.gradient, Access::kRead, section_.elements);
    to_.Add(StagingPlace(part_.staged), d_.reduced(), Access::kWrite, section_.elements);
  }
  void Reduce() {
    to_.Add(Source(), d_.reduced(), Access::kRead, section_.elements);
    to_.Add(Summed(), d_.reduced(), Access::kWrite, section_.shard);
  }
  void AllReduce() { to_.Add(Summed(), d_.reduced(), Access::kReadWrite, section_.shard); }
  void Round() {
    to_.Add(Summed(), d_.reduced(), Access::kRead, section_.shard);
    to_.Add(Rounded(), d_.communication, Access::kWrite, section_.shard);
  }
  void Accumulate() {
    const Place slice = part_.landed >= 0 ? plan_.pools.landing.Plus(part_.landed) : Rounded();
    to_.Add(slice, d_.communication, Access::kRead, section_.shard);
    to_.Add(Shard(), d_.shard_dtype(part_.unit), part_.first ? Access::kWrite : Access::kReadWrite,
            section_.shard);
    AddSquares(part_.last);
  }
  void Norm() {
    to_.Add(Shard(), d_.shard_dtype(part_.unit), Access::kRead, section_.shard);
    AddSquares(true);
  }
  void GatherGradient() {
    to_.Add(GradientSlicePlace(plan_, part_.unit), d_.accumulation, Access::kRead, section_.shard);
    to_.Add(plan_.pools.GradientShard(part_.unit), d_.accumulation, Access::kWrite,
            section_.elements);
  }

 private:
  Place Whole() const {
    const int visit = plan_.scopes[static_cast<size_t>(part_.scope)].visit;
    return DevicePlace(StateClass::kGradient,
                       plan_.pools.visits[static_cast<size_t>(visit)].gradient);
  }
  Place Source() const { return d_.casts() ? StagingPlace(part_.staged) : Whole(); }
  // Where a reduction and the all-reduce between replicas leave this rank's slice ...
  Place Summed() const {
    if (!d_.rounds_slices() && !accumulates_ && home_ == Tier::kDevice)
      return GradientSlicePlace(plan_, part_.unit);
    Place place = Source();
    place.per_slice = section_.shard * SizeOf(d_.reduced());
    return place;
  }
  // ... and where it is in the communication dtype: the shard itself unless it is added to that.
  Place Rounded() const {
    if (!d_.rounds_slices()) return Summed();
    return accumulates_ || home_ != Tier::kDevice ? StagingPlace(part_.rounded)
                                                  : GradientSlicePlace(plan_, part_.unit);
  }
  // Where its sums are made: the shard, or the slot that this passes through.
  Place Shard() const {
    return part_.gradient_slot < 0 ? GradientSlicePlace(plan_, part_.unit)
                                   : plan_.pools.gradient_slots.Slot(part_.gradient_slot);
  }
  void AddSquares(bool last) {
    to_.AddControl(to_.cells().squares + part_.unit, last ? Access::kWrite : Access::kNone);
    const Place scratch =
        home_ == Tier::kDevice ? StagingPlace(plan_.pools.staging_norm) : plan_.pools.host_norm;
    const int64_t blocks = (section_.shard + kNormBlock - 1) / kNormBlock;
    to_.AddBytes(scratch, Access::kWrite, last ? blocks * static_cast<int64_t>(sizeof(double)) : 0);
  }

  const Part& part_;
  OperandWriter& to_;
  const Plan& plan_;
  const Decisions& d_;
  const Section& section_;
  const Tier home_;  // of its shard
  const bool accumulates_;
};

void AddPart(OperationKind kind, PartOperands operands) {
  switch (kind) {
    case OperationKind::kCast:
      return operands.Cast();
    case OperationKind::kReduce:
      return operands.Reduce();
    case OperationKind::kAllReduce:
      return operands.AllReduce();
    case OperationKind::kRound:
      return operands.Round();
    case OperationKind::kAccumulate:
      return operands.Accumulate();
    case OperationKind::kNorm:
      return operands.Norm();
    default:
      return operands.GatherGradient();
  }
}

}  // namespace

void AddReductionOperands(const Operation& operation, OperandWriter& to) {
  for (const Part& part : operation.parts) AddPart(operation.kind, PartOperands(part, to));
  const bool sums =
      operation.kind == OperationKind::kReduce || operation.kind == OperationKind::kAllReduce;
  // Where pieces of all ranks are summed in one order.
  const Pools& pools = to.plan().pools;
  if (sums && pools.staging_sums_bytes > 0)
    to.AddBytes(StagingPlace(pools.staging_sums), Access::kWrite, pools.staging_sums_bytes);
}

}  // namespace ebb::sharding
