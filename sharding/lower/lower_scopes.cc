#include "ebb/sharding/lower/lower_scopes.h"

namespace ebb::sharding {

void ScopeLowering::EndMoment(Moment::Kind kind, int scope) {
  if (kind == Moment::kOpen) open_.push_back(scope);
  if (kind == Moment::kClose) std::erase(open_, scope);
  if (open_.empty()) return;
  for (const int open : open_) Add(in_.plan.scopes[open]);
  const bool goes_on = kind == Moment::kClose;
  const PlannedScope& newest = in_.plan.scopes[open_.back()];
  const Visit& visit = in_.model.forward[newest.visit];
  const int64_t exchanged =
      newest.backward ? visit.backward_tensor_bytes : visit.forward_tensor_bytes;
  writer_.IssueKernels({.role = Role::kScopes,
                        .stream = StreamId::kCompute,
                        .bytes = goes_on ? 0 : exchanged * d_.micro_batches_per_round,
                        .goes_on = goes_on,
                        .scope = open_.back(),
                        .shown = false});
}

// Everything that a scope shows. Debug builds poison what its close releases, which is a write.
void ScopeLowering::Add(const PlannedScope& scope) {
  const int unit = scope.unit;
  for (const bool trainable : {true, false}) {
    to_.Add(table_.PlaceOf(WholeRow(table_, unit, trainable)), d_.compute_of(unit),
            scope.releases ? Access::kReadWrite : Access::kRead,
            SectionOf(in_.plan, unit, trainable).elements);
  }
  to_.AddControl(to_.sums(), Access::kReadWrite);
  if (to_.is_walk()) {
    to_.AddBytes(table_.PlaceOf(table_.Find(Purpose::kWalkOutputs)), Access::kReadWrite,
                 table_.bytes.Of(Tier::kDevice, StateClass::kActivation));
    return;
  }
  if (scope.input >= 0) AddBoundary(scope.input, false, Access::kRead);
  if (!scope.backward) {
    if (scope.hands_on) AddBoundary(scope.visit, false, Access::kWrite);
    return;
  }
  if (scope.hands_on) AddBoundary(scope.visit, true, Access::kRead);
  if (scope.input >= 0) AddBoundary(scope.input, true, Access::kWrite);
  if (!scope.gradients) return;
  const int gradient = table_.Find(Purpose::kGradient, GradientKey(d_, scope));
  to_.Add(table_.PlaceOf(gradient), d_.gradient_of(unit),
          d_.keeps_step_gradients && scope.round > 0 ? Access::kReadWrite : Access::kWrite,
          SectionOf(in_.plan, unit, true).elements);
}

void ScopeLowering::AddBoundary(int visit, bool gradient, Access access) {
  const int row = table_.Find(gradient ? Purpose::kOutputGradient : Purpose::kOutput, visit);
  to_.AddBytes(table_.PlaceOf(row), access,
               row < 0 ? 0 : table_[row].turns * table_[row].turn_bytes);
}

}  // namespace ebb::sharding
