// What runs the plans: made when everything is there that they name.
#include <utility>

#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/sharding/traffic.h"

namespace ebb {

using sharding::Fragment;

// Cells are cut by what the engine's plans touch; those of more rounds touch the same.
absl::Status Executor::MakeIssuer() {
  std::vector<Fragment> fragments;
  const auto add = [&](const sharding::Plan& plan) {
    for (const bool carrying : {false, true}) fragments.push_back(sharding::Lower(plan, carrying));
  };
  EBB_ASSIGN_OR_RETURN(const Runnable* const held, PlanFor(own_->plan.decisions.rounds, true));
  for (const Runnable* run :
       {static_cast<const Runnable*>(own_.get()), held, static_cast<const Runnable*>(walk_.get()),
        static_cast<const Runnable*>(drain_.get())})
    add(run->plan);
  std::vector<const Fragment*> all;
  for (const Fragment& fragment : fragments) all.push_back(&fragment);
  cells_.emplace(all, static_cast<int>(model_.units.size()), plan().decisions.shards);

  const auto or_null = [](auto& optional) { return optional ? &*optional : nullptr; };
  record_exchange_.emplace(RecordExchange::Parts{
      .plan = &plan(),
      .reduce = &*reduce_,
      .of_world = exchange_communicator_ ? &*exchange_communicator_ : &*reduce_communicator_,
      .of_shards = &*reduce_communicator_,
      .storage = &*storage_,
      .control = &*control_block_,
      .norms = or_null(norms_),
      .table = &update_table_,
      .constants = &*step_constants_,
      .outcome = &*outcome_,
      .errors = &errors_,
      .peers = &peers_,
      .concluded = &concluded_,
      .own_enqueues = own_optimizer_enqueues_});
  update_call_.emplace(UpdateCall::Parts{.plan = &plan(),
                                         .model = &model_,
                                         .config = &config_,
                                         .own = or_null(options_.optimizer),
                                         .table = &update_table_,
                                         .constants = &*step_constants_,
                                         .control = &*control_block_,
                                         .outcome = &*outcome_,
                                         .errors = &errors_,
                                         .verifier = &*swap_verifier_,
                                         .storage = &*storage_,
                                         .device = &device_,
                                         .kernels = kernels_.get(),
                                         .host_kernels = host_kernels_.get(),
                                         .shard = shard_,
                                         .own_enqueues = own_optimizer_enqueues_});
  issuer_.emplace(
      Issuer::Parts{
          .streams = {&compute_, or_null(gather_), or_null(reduce_), or_null(update_),
                      or_null(upload_), or_null(download_), or_null(host_sum_),
                      or_null(host_update_), or_null(read_parameters_), or_null(read_states_),
                      or_null(write_), or_null(check_), or_null(parameters_read_),
                      or_null(states_read_), or_null(written_)},
          .lanes = {nullptr, &gather_communicator_, &secondary_communicator_, &reduce_communicator_,
                    &replicas_communicator_,
                    exchange_communicator_ ? &exchange_communicator_ : &reduce_communicator_},
          .storage = &*storage_,
          .kernels = kernels_.get(),
          .host_kernels = host_kernels_.get(),
          .control = &*control_block_,
          .started = &*started_,
          .verifier = &*swap_verifier_,
          .updates = &*update_call_,
          .exchange = &*record_exchange_,
          .outcome = &*outcome_,
          .errors = &errors_,
          .peers = &peers_},
      *cells_, static_cast<int>(model_.units.size()));
  state_.emplace(StateAccess::Parts{.initial = {.model = &model_,
                                                .config = &config_,
                                                .own_optimizer = options_.optimizer.has_value()},
                                    .names = &state_names_,
                                    .errors = &errors_,
                                    .gather = &*gather_communicator_,
                                    .rank = rank_},
                 StateValues::Parts{.plan = &plan(),
                                    .config = &config_,
                                    .device = &device_,
                                    .team = &compute_.team(),
                                    .storage = &*storage_,
                                    .issuer = &*issuer_,
                                    .verifier = &*swap_verifier_,
                                    .errors = &errors_,
                                    .shard = shard_},
                 Control());
  if (timeline_ != nullptr) {
    tracer_.emplace(*timeline_, device_spans_.get());
    issuer_->Observe(*tracer_);
  }
  issuer_->Observe(*profiler_ranges_);
  observer_ =
      NewIssueObserver({.device = &device_, .storage = &*storage_, .control = &*control_block_});
  if (observer_ != nullptr) issuer_->Observe(*observer_);
  EBB_RETURN_IF_ERROR(issuer_->MakeFence(device_));
  EBB_RETURN_IF_ERROR(Link(*own_, /*carrying=*/false).status());
  if (own_->plan.decisions.carries()) EBB_RETURN_IF_ERROR(Link(*own_, /*carrying=*/true).status());
  EBB_RETURN_IF_ERROR(Link(*walk_, /*carrying=*/false).status());
  return Link(*drain_, /*carrying=*/true).status();
}

// Allocates, once.
absl::StatusOr<LinkedFragment*> Executor::Link(Runnable& run, bool carrying) {
  std::unique_ptr<LinkedFragment>& linked = run.linked[carrying ? 1 : 0];
  if (linked != nullptr) return linked.get();
  for (int kind = 0; kind < sharding::kOperationKinds; ++kind)
    run.bytes_of[kind] = run.plan.BytesOf(static_cast<sharding::OperationKind>(kind));
  run.traffic[carrying ? 1 : 0] = sharding::PredictTraffic(run.plan, carrying);
  Fragment fragment = sharding::Lower(run.plan, carrying);
  sharding::DeriveWaits(*cells_, fragment);
  EBB_ASSIGN_OR_RETURN(linked,
                       LinkedFragment::Link(std::move(fragment), run.plan, device_, *storage_,
                                            issuer_->frontier(), issuer_->events()));
  return linked.get();
}

void Executor::PointAll() {
  const auto point = [this](const Runnable& run) {
    for (const std::unique_ptr<LinkedFragment>& linked : run.linked)
      if (linked != nullptr) linked->Point(*storage_);
  };
  for (const auto* run : {&own_, &walk_, &drain_}) point(**run);
  for (const std::unique_ptr<Runnable>& run : plans_) point(*run);
}

}  // namespace ebb
