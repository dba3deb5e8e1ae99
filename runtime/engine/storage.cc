#include "ebb/runtime/engine/storage.h"

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/sharding/memory_model.h"

namespace ebb {

using sharding::Section;

absl::StatusOr<Storage> Storage::Create(const Device& device, const sharding::Plan& plan, int shard,
                                        MemoryLedger& ledger) {
  Storage storage;
  storage.plan_ = &plan;
  storage.shard_ = shard;
  for (const MemoryRow& row : sharding::PredictMemory(plan)) {
    const int state = static_cast<int>(row.state);
    const int64_t bytes = static_cast<int64_t>(row.predicted_bytes);
    const std::string_view name = Name(row.state);
    EBB_ASSIGN_OR_RETURN(storage.buffers_[state],
                         device.Allocate(bytes, absl::StrCat("the ", std::string(name), " pool")));
    storage.charges_[state] = MemoryLedger::Charge(ledger, row.state, row.tier, bytes);
    ledger.Predict(row.state, row.tier, bytes);
  }
  return storage;
}

std::byte* Storage::Whole(int unit, bool trainable) const {
  if (plan_->decisions.kept_whole[unit]) {
    return At(StateClass::kParameter,
              trainable ? Unit(unit).parameter_trainable : Unit(unit).parameter_frozen);
  }
  return At(StateClass::kGather,
            trainable ? Unit(unit).gather_trainable : Unit(unit).gather_frozen);
}

std::byte* Storage::Slice(int unit, bool trainable) const {
  const Section& section =
      trainable ? plan_->layout.units[unit].trainable : plan_->layout.units[unit].frozen;
  const int64_t offset = trainable ? Unit(unit).parameter_trainable : Unit(unit).parameter_frozen;
  const int64_t begin = plan_->decisions.kept_whole[unit]
                            ? shard_ * section.shard * SizeOf(plan_->decisions.compute)
                            : 0;
  return At(StateClass::kParameter, offset + begin);
}

float* Storage::Master(int unit) const {
  const bool whole = plan_->decisions.stage == 0;
  if (plan_->decisions.compute == DType::kFloat32) {
    return reinterpret_cast<float*>(whole ? Whole(unit, /*trainable=*/true)
                                          : Slice(unit, /*trainable=*/true));
  }
  return reinterpret_cast<float*>(At(StateClass::kMaster, Unit(unit).master));
}

float* Storage::MasterSlice(int unit) const {
  return Master(unit) +
         (plan_->decisions.stage == 0 ? shard_ * plan_->layout.units[unit].trainable.shard : 0);
}

float* Storage::State(int unit, int state) const {
  const sharding::Pools& pools = plan_->pools;
  return reinterpret_cast<float*>(
      At(StateClass::kOptimizer, pools.state_base + state * pools.state_stride + Unit(unit).state));
}

float* Storage::StateSlice(int unit, int state) const {
  return State(unit, state) +
         (plan_->decisions.stage == 0 ? shard_ * plan_->layout.units[unit].trainable.shard : 0);
}

std::byte* Storage::UpdatedParameter(int unit) const {
  if (plan_->decisions.compute == DType::kFloat32) return nullptr;
  return plan_->decisions.stage == 0 ? Whole(unit, /*trainable=*/true)
                                     : Slice(unit, /*trainable=*/true);
}

std::byte* Storage::Gradient(int visit) const {
  return At(StateClass::kGradient, plan_->pools.visits[visit].gradient);
}

std::byte* Storage::ReducedGradient(int unit) const {
  return At(StateClass::kGradient, Unit(unit).gradient_shard);
}

std::byte* Storage::GradientSlice(int unit) const {
  const sharding::Decisions& decisions = plan_->decisions;
  const int64_t begin =
      decisions.stage == 0 ? shard_ * plan_->layout.units[unit].trainable.shard : 0;
  return ReducedGradient(unit) + begin * SizeOf(decisions.shard_dtype(unit));
}

std::byte* Storage::Output(int visit, int index_in_round) const {
  const sharding::VisitAddresses& addresses = plan_->pools.visits[visit];
  return At(StateClass::kActivation, addresses.output + index_in_round * addresses.boundary_stride);
}

std::byte* Storage::OutputGradient(int visit, int index_in_round) const {
  const sharding::VisitAddresses& addresses = plan_->pools.visits[visit];
  return At(StateClass::kActivation,
            addresses.output_gradient + index_in_round * addresses.boundary_stride);
}

std::byte* Storage::EvaluationOutput(int visit, int micro_batch) const {
  return At(StateClass::kActivation, plan_->pools.EvaluationOutput(visit, micro_batch));
}

std::byte* Storage::Staging(int64_t address) const {
  return At(StateClass::kStaging, address);
}
double* Storage::NormScratch() const {
  return reinterpret_cast<double*>(At(StateClass::kStaging, plan_->pools.staging_norm));
}
std::byte* Storage::ExchangeRecords() const {
  return At(StateClass::kStaging, plan_->pools.staging_exchange);
}
float* Storage::GradientStaging() const {
  return reinterpret_cast<float*>(At(StateClass::kStaging, plan_->pools.staging_gradient));
}
std::byte* Storage::Workspace() const {
  return At(StateClass::kWorkspace, 0);
}

int64_t Storage::UpdatedElements(int unit) const {
  const Section& section = plan_->layout.units[unit].trainable;
  return plan_->decisions.stage == 0 ? section.elements : section.shard;
}

}  // namespace ebb
