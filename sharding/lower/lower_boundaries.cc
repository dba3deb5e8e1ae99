#include "ebb/sharding/lower/lower_boundaries.h"

#include "ebb/sharding/unit_places.h"

namespace ebb::sharding {

const Place& BoundaryLowering::PlaceOf(int visit) const {
  return in_.plan.pools.visits[static_cast<size_t>(visit)].place;
}

void BoundaryLowering::Move(OperationKind kind, StreamId stream, int visit, const Place& from,
                            const Place& to) {
  const bool of_file = kind == OperationKind::kRead || kind == OperationKind::kWrite;
  int64_t bytes = in_.plan.pools.visits[static_cast<size_t>(visit)].boundary_stride *
                  in_.plan.decisions.micro_batches_per_round;
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
  const Place below = swaps() ? slots_.Next() : PlaceOf(visit);
  Move(OperationKind::kDownload, StreamId::kDownload, visit, OutputPlace(in_.plan, visit), below);
  if (swaps()) Move(OperationKind::kWrite, StreamId::kWrite, visit, below, PlaceOf(visit));
}

void BoundaryLowering::Read(int visit) {
  const Place slot = slots_.Next();
  read_[visit] = slot;
  Move(OperationKind::kRead, StreamId::kReadParameters, visit, PlaceOf(visit), slot);
}

void BoundaryLowering::Bring(int visit) {
  Move(OperationKind::kUpload, StreamId::kUpload, visit, swaps() ? read_.at(visit) : PlaceOf(visit),
       OutputPlace(in_.plan, visit));
}

}  // namespace ebb::sharding
