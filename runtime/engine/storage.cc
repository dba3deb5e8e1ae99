#include "ebb/runtime/engine/storage.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/sharding/memory_model.h"

namespace ebb {

using sharding::Section;

absl::StatusOr<Storage> Storage::Create(const Device& device, const sharding::Plan& plan, int shard,
                                        MemoryLedger& ledger) {
  Storage storage;
  storage.device_ = &device;
  storage.plan_ = &plan;
  storage.ledger_ = &ledger;
  storage.shard_ = shard;
  for (const MemoryRow& row : sharding::PredictMemory(plan)) {
    const int64_t bytes = static_cast<int64_t>(row.predicted_bytes);
    storage.bytes_[static_cast<int>(row.state)] = bytes;
    ledger.Predict(row.state, row.tier, bytes);
  }
  EBB_ASSIGN_OR_RETURN(Room room, storage.MakeRoom(Tier::kDevice));
  for (int state = 0; state < kStateClasses; ++state) {
    storage.buffers_[state] = std::move(room.buffers_[state]);
    storage.charges_[state] = std::move(room.charges_[state]);
  }
  return storage;
}

absl::StatusOr<Storage::Room> Storage::MakeRoom(Tier tier) const {
  Room room;
  room.tier_ = tier;
  const Device at = tier == Tier::kDevice || SharesHostMemory() ? *device_ : Device::Cpu(1);
  for (int state = 0; state < kStateClasses; ++state) {
    if (bytes_[state] == 0 || (tier == Tier::kCpu && !IsKept(state))) continue;
    if (buffers_[state].data() != nullptr && SharesHostMemory()) continue;  // stays where it is
    const StateClass named = static_cast<StateClass>(state);
    EBB_ASSIGN_OR_RETURN(
        room.buffers_[state],
        at.Allocate(bytes_[state],
                    absl::StrCat("the ", std::string(Name(named)), " pool",
                                 tier == Tier::kCpu ? " of a suspended engine" : "")));
    room.charges_[state] = MemoryLedger::Charge(*ledger_, named, tier, bytes_[state]);
  }
  return room;
}

void Storage::MoveInto(Room room, Stream& stream) {
  const bool predicts = room.tier_ == Tier::kCpu && !std::exchange(host_predicted_, true);
  for (int state = 0; state < kStateClasses; ++state) {
    if (bytes_[state] == 0 || !IsKept(state)) continue;
    const StateClass named = static_cast<StateClass>(state);
    if (room.buffers_[state].data() == nullptr) {
      room.buffers_[state] = std::move(buffers_[state]);
      room.charges_[state] = MemoryLedger::Charge(*ledger_, named, room.tier_, bytes_[state]);
    } else {
      stream.Copy(room.buffers_[state].data(), buffers_[state].data(), bytes_[state]);
    }
    if (predicts) ledger_->Predict(named, Tier::kCpu, bytes_[state]);
  }
  stream.WaitIdle();
  for (int state = 0; state < kStateClasses; ++state) {
    buffers_[state] = std::exchange(room.buffers_[state], Buffer());
    charges_[state] = std::exchange(room.charges_[state], MemoryLedger::Charge());
  }
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
