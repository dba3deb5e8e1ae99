// Muon's updates of units with matrices: directions by sub-group, the way to the owners of matrices
// and back. The parts that ranks exchange are those of all ranks, so one rank's memory shows which
// bytes they touch, and the contents name the unit and the step.
#include "replay.h"

namespace ebb::sharding {

// If the step is not applied, nothing is written, and what comes after has no known contents.
void Replay::Momentum(int thing, const Op& operation) {
  const Decisions& d = plan_->decisions;
  const UpdateDetail& detail = operation.updates.front();
  const SubGroup& group = table().sub_groups[detail.sub_group];
  const int u = operation.parts.front().unit;
  if (group.unit != u || !d.has_matrices(u)) Fail("a direction of another unit");
  const bool early = d.timing == UpdateTiming::kEarly, on_device = group.tier == Tier::kDevice;
  const int64_t of_host = early ? cells().early() : cells().constants(),
                of_device = early ? cells().device_early() : cells().device_constants();
  memory_.Read(thing, Control(on_device ? of_device : of_host), {Content::kExchanged, steps_});
  if (options_.overflows) return;
  const int64_t gradient_size = SizeOf(d.shard_dtype(u)), size = SizeOf(d.direction);
  const int64_t first = group.begin * gradient_size;
  const bool gathered = d.stage == 0 && d.world > 1;
  memory_.Read(thing, RangeOf(operation.operands[0].place, group.count() * gradient_size),
               gathered
                   ? Content{Content::kGatheredGradient, u, steps_, 0, first}
                   : Content{Content::kGradientShard, u, steps_, expected_contributions(u), first});
  const Range state = RangeOf(operation.operands[3].place, d.StateBytes(u, 0, group.count()));
  Content content{Content::kOptimizerState, u, version_, 0, d.StateBytes(u, 0, group.begin)};
  memory_.Read(thing, state, content);
  content.b = version_ + 1;
  memory_.Write(thing, state, content);
  memory_.Write(thing, RangeOf(operation.operands[1].place, group.count() * 4),
                {Content::kOptimizerGradient});
  const Place& direction = operation.operands[d.direction == DType::kFloat32 ? 1 : 2].place;
  memory_.Write(thing, RangeOf(direction, group.count() * size),
                {Content::kDirection, u, steps_, 0, group.begin * size});
}

void Replay::ExchangeMatrices(int thing, const Op& operation) {
  if (options_.overflows) return;
  const Decisions& d = plan_->decisions;
  const int u = operation.parts.front().unit;
  if (!d.exchanges_matrices()) Fail("an exchange of matrices that every rank has");
  const bool to_owners = operation.role == Role::kToOwners;
  const int64_t size = SizeOf(d.direction), shard = trainable(u).shard * size;
  const Range direction = RangeOf(operation.operands[to_owners ? 0 : 1].place, shard),
              owned = RangeOf(operation.operands[to_owners ? 1 : 0].place,
                              OwnedElements(d.matrices[static_cast<size_t>(u)]) * size);
  if (to_owners) {
    memory_.Read(thing, direction, {Content::kDirection, u, steps_});
    memory_.Write(thing, owned, {Content::kMatrices, u, steps_, 0});
  } else {
    memory_.Read(thing, owned, {Content::kMatrices, u, steps_, 1});
    memory_.Write(thing, direction, {Content::kOrthogonal, u, steps_});
  }
}

void Replay::Orthogonalise(int thing, const Op& operation) {
  const Decisions& d = plan_->decisions;
  const int u = operation.parts.front().unit;
  const int row = table().Find(Purpose::kIteration);
  memory_.Write(thing, RangeOf(operation.operands[1].place, table()[row].elements),
                {Content::kOptimizerGradient});
  if (options_.overflows) return;
  const int64_t size = SizeOf(d.direction);
  if (d.exchanges_matrices()) {
    const Range matrices = RangeOf(operation.operands[0].place,
                                   OwnedElements(d.matrices[static_cast<size_t>(u)]) * size);
    memory_.Read(thing, matrices, {Content::kMatrices, u, steps_, 0});
    memory_.Write(thing, matrices, {Content::kMatrices, u, steps_, 1});
    return;
  }
  const Range direction = RangeOf(operation.operands[0].place, owned(u) * size);
  memory_.Read(thing, direction, {Content::kDirection, u, steps_});
  memory_.Write(thing, direction, {Content::kOrthogonal, u, steps_});
}

}  // namespace ebb::sharding
