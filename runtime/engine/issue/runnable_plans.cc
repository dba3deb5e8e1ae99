#include "ebb/runtime/engine/issue/runnable_plans.h"

#include <algorithm>
#include <utility>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/sharding/fingerprint.h"
#include "ebb/sharding/plan_facts.h"
#include "ebb/sharding/report/traffic.h"

namespace ebb {

using sharding::OpList;

sharding::PlanInputs RunnablePlans::PlanInputs() const {
  sharding::PlanInputs inputs = inputs_.ForPlan();
  inputs.model = &model_;
  if (placement_) inputs.placement = &*placement_;
  return inputs;
}

absl::Status RunnablePlans::Plan() {
  const sharding::PlanInputs inputs = PlanInputs();
  EBB_ASSIGN_OR_RETURN(sharding::Plan step, sharding::PlanStep(inputs));
  EBB_ASSIGN_OR_RETURN(sharding::Plan walk, sharding::PlanWalk(inputs));
  EBB_ASSIGN_OR_RETURN(sharding::Plan drain, sharding::PlanDrain(inputs));
  own_ = std::make_unique<Runnable>(std::move(step));
  walk_ = std::make_unique<Runnable>(std::move(walk));
  drain_ = std::make_unique<Runnable>(std::move(drain));
  return absl::OkStatus();
}

void RunnablePlans::Swap(RunnablePlans& other) {
  model_.forward.swap(other.model_.forward);
  model_.order.swap(other.model_.order);
  placement_.swap(other.placement_);
  std::swap(*own_, *other.own_);
  std::swap(*walk_, *other.walk_);
  std::swap(*drain_, *other.drain_);
  others_.swap(other.others_);
  Unlink();
  other.Unlink();
}

template <class Do>
void RunnablePlans::ForEachLinked(const Do& act) {
  const auto both = [&](Runnable& run) {
    for (std::unique_ptr<LinkedList>& linked : run.linked) act(linked);
  };
  for (const auto* run : {&own_, &walk_, &drain_}) both(**run);
  for (const std::unique_ptr<Runnable>& run : others_) both(*run);
}

void RunnablePlans::Unlink() {
  ForEachLinked([](std::unique_ptr<LinkedList>& linked) { linked.reset(); });
}

absl::StatusOr<Runnable*> RunnablePlans::Of(int rounds, bool hold_updates) {
  const int planned = std::min(rounds, sharding::kPlannedRounds);
  if (planned == sharding::PlannedRounds(own_->plan) && !hold_updates) return own_.get();
  for (const std::unique_ptr<Runnable>& run : others_) {
    if (sharding::PlannedRounds(run->plan) == planned && run->hold_updates == hold_updates)
      return run.get();
  }
  EBB_ASSIGN_OR_RETURN(sharding::Plan plan,
                       sharding::PlanStep(PlanInputs(), planned, hold_updates));
  others_.push_back(std::make_unique<Runnable>(std::move(plan)));
  others_.back()->hold_updates = hold_updates;
  return others_.back().get();
}

uint64_t RunnablePlans::Fingerprint() const {
  sharding::Hasher hasher;
  for (const auto* run : {&own_, &walk_, &drain_})
    hasher.Add(static_cast<int64_t>(sharding::Fingerprint((*run)->plan)));
  return hasher.hash();
}

absl::Status RunnablePlans::CutCells() {
  EBB_ASSIGN_OR_RETURN(const Runnable* const held, Held());
  std::vector<OpList> lists;
  for (const Runnable* run :
       {static_cast<const Runnable*>(own_.get()), held, static_cast<const Runnable*>(walk_.get()),
        static_cast<const Runnable*>(drain_.get())}) {
    for (const bool carrying : {false, true})
      lists.push_back(sharding::ListOf(run->plan, carrying));
  }
  std::vector<const OpList*> all;
  for (const OpList& list : lists) all.push_back(&list);
  cells_.emplace(all, plan());
  return absl::OkStatus();
}

absl::Status RunnablePlans::LinkOwn(StreamOrder& order, const Storage& storage) {
  order_ = &order;
  storage_ = &storage;
  EBB_RETURN_IF_ERROR(Link(*own_, /*carrying=*/false));
  if (sharding::CarriesUpdates(plan())) EBB_RETURN_IF_ERROR(Link(*own_, /*carrying=*/true));
  EBB_RETURN_IF_ERROR(Link(*walk_, /*carrying=*/false));
  return Link(*drain_, /*carrying=*/true);
}

absl::Status RunnablePlans::Link(Runnable& run, bool carrying) {
  std::unique_ptr<LinkedList>& linked = run.linked[carrying ? 1 : 0];
  if (linked != nullptr) return absl::OkStatus();
  OpList list = sharding::ListOf(run.plan, carrying);
  sharding::DeriveWaits(*cells_, list);
  EBB_ASSIGN_OR_RETURN(
      linked, LinkedList::Link(std::move(list), run.plan, inputs_.device, *storage_, *order_));
  return absl::OkStatus();
}

void RunnablePlans::PointAll() {
  ForEachLinked([this](std::unique_ptr<LinkedList>& linked) {
    if (linked != nullptr) linked->Point(*storage_);
  });
}

}  // namespace ebb
