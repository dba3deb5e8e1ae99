#include "ebb/runtime/engine/create/reorder.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/ranks/agreement.h"
#include "ebb/sharding/swap_files.h"

namespace ebb {
namespace {

// Forward as Engine::model() shows it: each unit, and then the parts that DivideByDType has added.
// Without an order, parts are visited with their unit.
void LeaveOutParts(ModelSpec& model) {
  std::vector<Visit> forward;
  const auto parts_of = [&](UnitId unit) {
    return static_cast<size_t>(unit) < model.units.size() ? model[unit].parts
                                                          : std::vector<UnitId>();
  };
  const auto is_part_of = [&](const Visit& visit, const Visit& of) {
    const std::vector<UnitId> parts = parts_of(of.unit);
    return std::count(parts.begin(), parts.end(), visit.unit) > 0 && visit.forward == of.forward &&
           visit.backward == of.backward && visit.gradients == of.gradients;
  };
  size_t shown = 0;  // visits, if each unit is followed by its parts
  for (const Visit& visit : model.forward) {
    if (!forward.empty() && is_part_of(visit, forward.back())) continue;
    forward.push_back(visit);
    shown += 1 + parts_of(visit.unit).size();
  }
  if (shown == model.forward.size()) model.forward = std::move(forward);
}

// Checks the order as the trainer gave it, so that errors count the trainer's visits and events and
// name its units. The units in `model` are divided. An order with a visit to every part came from
// Engine::model(). Such an order is divided already.
absl::Status ValidateGiven(ModelSpec model) {
  std::vector<UnitId> parts;
  for (const UnitSpec& unit : model.units)
    parts.insert(parts.end(), unit.parts.begin(), unit.parts.end());
  const auto is_visited = [&](UnitId part) {
    return std::any_of(model.forward.begin(), model.forward.end(),
                       [&](const Visit& visit) { return visit.unit == part; });
  };
  if (std::all_of(parts.begin(), parts.end(), is_visited)) return Validate(model);
  const size_t units = model.units.size() - parts.size();
  for (size_t u = 0; u < units; ++u)
    model.units[u].parameters = WithParts(model, static_cast<UnitId>(u));
  model.units.resize(units);  // parts are behind the trainer's own
  for (UnitSpec& unit : model.units) unit.parts.clear();
  return Validate(model);
}

}  // namespace

absl::Status Reorder::To(std::vector<Visit> forward, std::vector<ScopeEvent> order) {
  with_.calls.Note(CallKind::kReorder);
  absl::Status own = with_.interpreter->outcome.AwaitVerdicts();
  if (own.ok() && with_.interpreter->suspension.suspended())
    own = absl::FailedPreconditionError("Reorder of a suspended engine: call Resume first");
  // Updates that were carried over are the old plan's.
  with_.interpreter->runner.AwaitState();
  own.Update(with_.interpreter->state.values().Await());
  model_.forward = std::move(forward);
  model_.order = std::move(order);
  if (model_.order.empty()) LeaveOutParts(model_);
  if (own.ok()) own = ValidateGiven(model_);
  model_ = Divided(std::move(model_), with_.inputs.config, with_.inputs.own_optimizer());
  if (own.ok()) own = Plan();
  EBB_RETURN_IF_ERROR(with_.interpreter->barrier.Enter(CallKind::kReorder, /*subject=*/0, own));
  EBB_RETURN_IF_ERROR(AgreeOnOrder(with_.Control(), model_, next_.Fingerprint()));
  return Change();
}

// All that can be refused before anything changes.
absl::Status Reorder::Plan() {
  next_.KeepPlacement(sharding::PlacementOf(with_.plans.plan().table));
  EBB_RETURN_IF_ERROR(next_.Plan());
  EBB_RETURN_IF_ERROR(with_.storage->files().HasFilesFor(next_.plan()));
  return next_.Held().status();
}

// An engine that has neither order's pools has failed for good.
absl::Status Reorder::Change() {
  with_.collective_pools.Deregister();
  with_.plans.Swap(next_);
  const absl::Status followed = AgreeOnStatus(with_.Control(), FollowPlan());
  if (!followed.ok()) {
    with_.plans.Swap(next_);
    if (const absl::Status back = AgreeOnStatus(with_.Control(), FollowPlan()); !back.ok()) {
      with_.interpreter->suspension.LosePools();
      with_.errors.Fail(absl::Status(
          back.code(), absl::StrCat("the engine has failed: Reorder has lost its pools; make it "
                                    "anew. ",
                                    back.message())));
      return with_.errors.Report();
    }
  }
  absl::Status shown = with_.communicators.BarrierAfterFreedMemory();
  if (shown.ok()) shown = with_.collective_pools.Show(*with_.storage, with_.plans.plan().table);
  if (shown.ok()) return followed;
  with_.errors.Fail(
      absl::Status(shown.code(), absl::StrCat("the engine has failed: ", shown.message())));
  return with_.errors.Report();
}

absl::Status Reorder::FollowPlan() {
  const sharding::Plan& plan = with_.plans.plan();
  const Device& device = with_.inputs.device;
  EBB_RETURN_IF_ERROR(with_.storage->FollowPlan());
  with_.verifier->FollowPlan(sharding::LayOutSwapFiles(plan));
  EBB_RETURN_IF_ERROR(with_.streams.Make(device, &plan));
  EBB_RETURN_IF_ERROR(with_.streams.MakeOffload(device, plan));
  EBB_RETURN_IF_ERROR(with_.LinkPlan());
  with_.interpreter->FollowPlan();
  return absl::OkStatus();
}

}  // namespace ebb
