#include "ebb/runtime/engine/program.h"

#include <algorithm>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/matrix_groups.h"
#include "ebb/sharding/fit/offload_ratio.h"
#include "ebb/sharding/memory_model.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/plan_facts.h"
#include "ebb/sharding/report/plan_table.h"
#include "ebb/sharding/report/traffic.h"
#include "ebb/sharding/split.h"

namespace ebb {

int Program::shards() const {
  return plan_->layout.shards;
}
DType Program::gradient() const {
  return plan_->decisions.gradient;
}
int64_t Program::operations() const {
  return plan_->Shown();
}
int64_t Program::own_bytes() const {
  return plan_->OwnBytes();
}
std::vector<MemoryRow> Program::memory() const {
  std::vector<MemoryRow> rows = sharding::PredictMemory(plan_->table.bytes);
  const auto bytes =
      static_cast<uint64_t>(sharding::StateStagingBytes(plan_->table.bytes, /*has_gpu=*/false));
  if (bytes == 0) return rows;
  auto row = std::find_if(rows.begin(), rows.end(), [](const MemoryRow& one) {
    return (one.tier == Tier::kCpu && one.state == StateClass::kStaging) || one.tier == Tier::kNvme;
  });
  if (row == rows.end() || row->tier != Tier::kCpu)
    row = rows.insert(row, {.state = StateClass::kStaging, .tier = Tier::kCpu});
  row->predicted_bytes += bytes;
  return rows;
}
std::vector<TrafficRow> Program::traffic() const {
  return sharding::PredictTraffic(*plan_);
}
std::vector<CommunicationRow> Program::communication() const {
  return sharding::PredictCommunication(*plan_);
}
std::string Program::headline() const {
  return sharding::PlanHeadline(*plan_);
}
std::string Program::table() const {
  return sharding::PlanTable(*plan_);
}

absl::StatusOr<Program> PredictProgram(const ModelSpec& model, int world, const Config& config,
                                       bool advises, const OptimizerSpec* optimizer) {
  EBB_RETURN_IF_ERROR(config.Validate());
  EBB_ASSIGN_OR_RETURN(Config resolved, config.ForWorld(world));
  EBB_RETURN_IF_ERROR(Validate(model));
  // The first tensor rank has the largest blocks; all plan for these.
  EBB_ASSIGN_OR_RETURN(ModelSpec cut,
                       WithBlocks(model, /*rank=*/0, static_cast<int>(resolved.ebb.mesh.tensor)));
  if (resolved.ebb.mesh.tensor > 1) EBB_RETURN_IF_ERROR(CheckOverTensor(cut));
  EBB_ASSIGN_OR_RETURN(ModelSpec grouped,
                       WithMatrixGroups(std::move(cut), resolved, optimizer != nullptr));
  const ModelSpec divided = Divided(std::move(grouped), resolved, optimizer);
  sharding::PlanInputs inputs = PlanInputsFor(divided, resolved, world, optimizer);
  if (!advises) inputs.cap_error = sharding::PlanInputs::CapError::kNeed;
  if (OffloadOptimizerConfig& offload = resolved.zero.offload_optimizer; offload.measures_ratio)
    offload.ratio = sharding::ChooseRatio(inputs, /*balanced=*/0, resolved.ebb.device_memory);
  EBB_ASSIGN_OR_RETURN(sharding::Plan plan, sharding::PlanStep(inputs));
  return Program(std::make_shared<const sharding::Plan>(std::move(plan)));
}

absl::StatusOr<std::vector<MemoryRow>> PredictMemory(const ModelSpec& model, int world,
                                                     const Config& config,
                                                     const OptimizerSpec* optimizer) {
  EBB_ASSIGN_OR_RETURN(const Program program,
                       PredictProgram(model, world, config, /*advises=*/true, optimizer));
  return program.memory();
}

}  // namespace ebb
