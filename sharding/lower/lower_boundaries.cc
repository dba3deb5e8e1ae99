#include "ebb/sharding/lower/lower_boundaries.h"

namespace ebb::sharding {

void BoundaryLowering::Move(Role role, StreamId stream, int visit, const Place& from,
                            const Place& to) {
  const bool of_file = role == Role::kRead || role == Role::kWrite;
  int64_t bytes = table_.ElementsOf(Purpose::kOutputAway, visit);
  if (of_file) bytes = SwapAligned(bytes);
  const int unit = static_cast<int>(in_.model.forward[visit].unit);
  writer_.operands().Move(StateClass::kActivation, from, to, bytes);
  writer_.Issue({.role = role, .stream = stream, .parts = {{.unit = unit}}, .bytes = bytes});
}

void BoundaryLowering::Send(int visit) {
  const Place below = swaps() ? slots_.Next() : PlaceOf(Purpose::kOutputAway, visit);
  Move(Role::kDownload, StreamId::kDownload, visit, PlaceOf(Purpose::kOutput, visit), below);
  if (swaps()) {
    Move(Role::kWrite, StreamId::kWrite, visit, below, PlaceOf(Purpose::kOutputAway, visit));
  }
}

void BoundaryLowering::Read(int visit) {
  const Place slot = slots_.Next();
  read_[visit] = slot;
  Move(Role::kRead, StreamId::kReadParameters, visit, PlaceOf(Purpose::kOutputAway, visit), slot);
}

void BoundaryLowering::Bring(int visit) {
  Move(Role::kUpload, StreamId::kUpload, visit,
       swaps() ? read_.at(visit) : PlaceOf(Purpose::kOutputAway, visit),
       PlaceOf(Purpose::kOutput, visit));
}

}  // namespace ebb::sharding
