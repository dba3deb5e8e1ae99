// Where the collectives of a plan find their memory.
#include <utility>

#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/sharding/conflicts.h"
#include "ebb/sharding/traffic.h"

namespace ebb {

using sharding::OperationKind;
using sharding::Section;

std::vector<CollectiveSpan> Executor::GatherSpans(int unit) const {
  std::vector<CollectiveSpan> spans;
  for (const bool trainable : {true, false}) {
    const sharding::UnitLayout& layout = plan().layout.units[unit];
    const int64_t shard = trainable ? layout.trainable.shard : layout.frozen.shard;
    if (shard > 0)
      spans.push_back({.send = storage_->Slice(unit, trainable),
                       .receive = storage_->Whole(unit, trainable),
                       .count = shard});
  }
  return spans;
}

std::vector<CollectiveSpan> Executor::SecondarySpans(int unit, bool fills) const {
  std::vector<CollectiveSpan> spans;
  for (const bool trainable : {true, false}) {
    const sharding::UnitLayout& layout = plan().layout.units[unit];
    const int64_t part =
        plan().decisions.SecondaryShard(trainable ? layout.trainable : layout.frozen);
    if (part == 0) continue;
    std::byte* const secondary = storage_->Secondary(unit, trainable);
    if (fills) {
      spans.push_back(
          {.send = storage_->SecondaryPart(unit, trainable), .receive = secondary, .count = part});
    } else {
      spans.push_back(
          {.send = secondary, .receive = storage_->Whole(unit, trainable), .count = part});
    }
  }
  return spans;
}

// Makes the events of a plan's operations and the spans of its collectives.
absl::Status Executor::Prepare(Runnable& run) {
  const size_t operations = run.plan.operations.size();
  if (timeline_ != nullptr) run.begin_ns.resize(operations);
  run.issued.resize(operations);
  run.carried = sharding::CarriedOperations(run.plan);
  run.transfers_started.resize(operations);
  for (int kind = 0; kind < sharding::kOperationKinds; ++kind)
    run.bytes_of[kind] = run.plan.BytesOf(static_cast<OperationKind>(kind));
  for (size_t index = 0; index < operations; ++index) {
    const sharding::Operation& operation = run.plan.operations[index];
    run.event_of.push_back(operation.awaited ? static_cast<int>(run.events.size()) : -1);
    if (operation.awaited) EBB_RETURN_IF_ERROR(MakeEvents(run.events.size() + 1, run.events));
    const bool transfers =
        operation.kind == OperationKind::kRead || operation.kind == OperationKind::kWrite;
    run.transfers.push_back(transfers ? std::make_unique<IoTransfer[]>(operation.moves.size())
                                      : nullptr);
  }
  run.traffic[0] = sharding::PredictTraffic(run.plan, /*carrying=*/false);
  run.traffic[1] = sharding::PredictTraffic(run.plan, /*carrying=*/true);
  PointCollectives(run);
  return absl::OkStatus();
}

// Where the pools are now; again once they have moved.
void Executor::PointCollectives(Runnable& run) {
  run.spans.clear();
  run.span_lists.Clear();
  std::vector<CollectiveSpan> spans;
  for (const sharding::Operation& operation : run.plan.operations) {
    spans.clear();
    for (const sharding::Part& part : operation.parts) {
      const int unit = part.unit;
      const Section& section = run.plan.layout.units[unit].trainable;
      switch (operation.kind) {
        case OperationKind::kGather: {
          const std::vector<CollectiveSpan> own = GatherSpans(unit);
          spans.insert(spans.end(), own.begin(), own.end());
          break;
        }
        case OperationKind::kFillSecondary:
        case OperationKind::kGatherSecondary: {
          const std::vector<CollectiveSpan> own =
              SecondarySpans(unit, operation.kind == OperationKind::kFillSecondary);
          spans.insert(spans.end(), own.begin(), own.end());
          break;
        }
        case OperationKind::kRefresh:
          spans.push_back({.send = storage_->Slice(unit, true),
                           .receive = storage_->Whole(unit, true),
                           .count = section.shard});
          break;
        case OperationKind::kGatherGradient:
          spans.push_back({.send = storage_->GradientSlice(unit),
                           .receive = storage_->ReducedGradient(unit),
                           .count = section.shard});
          break;
        case OperationKind::kReduce: {
          spans.push_back({.send = ReduceSource(run.plan, part),
                           .receive = SummedSlice(run.plan, part),
                           .count = section.shard});
          break;
        }
        case OperationKind::kAllReduce: {
          std::byte* const slice = SummedSlice(run.plan, part);
          spans.push_back({.send = slice, .receive = slice, .count = section.shard});
          break;
        }
        default:
          break;
      }
    }
    run.spans.push_back(run.span_lists.KeepOnce(spans));
  }
  run.span_lists.Close();
}

// Of one unit alone, for a scope that is opened again.
void Executor::PointSingleCollectives() {
  single_gather_.resize(model_.units.size());
  for (size_t u = 0; u < single_gather_.size(); ++u)
    single_gather_[u] = GatherSpans(static_cast<int>(u));
}

}  // namespace ebb
