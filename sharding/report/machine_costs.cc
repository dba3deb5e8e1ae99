#include "ebb/sharding/report/machine_costs.h"

#include <algorithm>
#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/newton_schulz_work.h"
#include "ebb/sharding/matrices.h"

namespace ebb::sharding {
namespace {

bool RunsOnHost(StreamId stream) {
  switch (stream) {
    case StreamId::kHostSum:
    case StreamId::kHostUpdate:
    case StreamId::kReadParameters:
    case StreamId::kReadStates:
    case StreamId::kWrite:
      return true;
    default:
      return false;
  }
}

// This rank's own part of an all-gather, unless it lies where the whole goes.
int64_t OwnBytesCopied(const Op& gather) {
  int64_t bytes = 0;
  for (const Operand& own : gather.operands) {
    if (!Reads(own.access)) continue;
    const bool in_place =
        std::any_of(gather.operands.begin(), gather.operands.end(), [&](const Operand& whole) {
          return Writes(whole.access) && whole.place.tier == own.place.tier &&
                 whole.place.pool == own.place.pool;
        });
    if (!in_place) bytes += own.bytes();
  }
  return bytes;
}

}  // namespace

absl::StatusOr<MachineCosts> MachineCosts::Make(const Plan& plan, const Machine& machine,
                                                std::span<const KernelWork> work,
                                                bool caller_awaits_report) {
  if (machine.ranks_per_host < 1)
    return absl::InvalidArgumentError(
        absl::StrCat("a machine of ", machine.ranks_per_host, " ranks a host: at least 1"));
  if (!(machine.core_bytes > 0))
    return absl::InvalidArgumentError(absl::StrCat("a machine whose cores move ",
                                                   machine.core_bytes, " bytes a second: above 0"));
  const auto visits = static_cast<size_t>(plan.table.visits);
  if (work.size() != visits)
    return absl::InvalidArgumentError(
        absl::StrCat("kernels of ", work.size(), " visits are given, the plan has ", visits));
  return MachineCosts(plan, machine, work, caller_awaits_report);
}

// Tensor ranks are neighbours, then ranks of a shard group. Ranks with the same shard are a group
// apart.
MachineCosts::Group MachineCosts::GroupOf(Axes axes) const {
  const Decisions& d = plan_.decisions;
  const int host = machine_.ranks_per_host, tensor = d.tensor_ranks(),
            data = std::max(1, host / tensor);  // data ranks of a host
  if (axes == Axes(Axis::kReplica))
    return {.ranks = d.replicas(), .in_host = std::clamp(data / d.shards, 1, d.replicas())};
  if (axes == Axes(Axis::kTensor)) return {.ranks = tensor, .in_host = std::min(tensor, host)};
  if (axes == kWorldAxes)
    return {.ranks = d.verdict_ranks, .in_host = std::min(d.verdict_ranks, host)};
  const int ranks = axes == Axes(Axis::kInner) ? d.secondary_shards : d.shards;
  return {.ranks = ranks, .in_host = std::min(ranks, data)};
}

// Adds what operands read and write; bytes of memory.
double MachineCosts::AddMemory(const Op& op, Amounts& amounts) const {
  double of_memory = 0;
  for (const Operand& operand : op.operands) {
    if (operand.place.pool == StateClass::kControl) continue;
    const auto bytes = static_cast<double>(operand.bytes());
    const double read = Reads(operand.access) ? bytes : 0,
                 written = Writes(operand.access) ? bytes : 0;
    if (operand.place.tier == Tier::kNvme) {
      amounts[Resource::kDiskRead] += read;
      amounts[Resource::kDiskWrite] += written;
      amounts[Resource::kDisk] += read + written;
      continue;
    }
    const bool of_device = operand.place.tier == Tier::kDevice && !machine_.device_is_host;
    amounts[of_device ? Resource::kDeviceMemory : Resource::kHostMemory] += read + written;
    of_memory += read + written;
  }
  return of_memory;
}

void MachineCosts::AddCollective(const Op& op, Cost& cost) const {
  if (op.code() != Code::kRedistribute) return;
  const Group group = GroupOf(op.axes());
  cost.latency = machine_.collective + (group.ranks - 1) * machine_.collective_rank;
  AddReceived(group, static_cast<double>(op.bytes), cost.amounts);
}

void MachineCosts::AddReceived(Group group, double bytes, Amounts& amounts) const {
  const double of_network = group.ranks > group.in_host ? bytes / group.in_host : 0;
  amounts[Resource::kNetwork] += of_network;
  amounts[Resource::kPeers] += bytes - of_network;
}

// The cores of a host copy what its ranks exchange, and add it up.
double MachineCosts::ExchangeSeconds(const Op& kernels) const {
  if (kernels.bytes == 0) return 0;
  const PlannedScope& scope = plan_.scopes[kernels.scope];
  const KernelWork& work = work_[scope.visit];
  const Group group = GroupOf(Axis::kTensor);
  const auto bytes = static_cast<double>(kernels.bytes);
  Amounts amounts;
  AddReceived(group, bytes, amounts);
  double seconds = machine_.device_is_host ? 2 * bytes / machine_.core_bytes : 0;
  for (const Resource resource : {Resource::kPeers, Resource::kNetwork})
    if (amounts[resource] > 0)
      seconds = std::max(seconds, amounts[resource] / machine_.rates[resource]);
  return seconds + (scope.backward ? work.backward_collectives : work.forward_collectives) *
                       (machine_.collective + (group.ranks - 1) * machine_.collective_rank);
}

void MachineCosts::AddKernels(const Op& op, Cost& cost) const {
  if (op.scope < 0 || op.goes_on) return;
  const PlannedScope& scope = plan_.scopes[static_cast<size_t>(op.scope)];
  const KernelWork& work = work_[static_cast<size_t>(scope.visit)];
  const double seconds = scope.backward ? work.backward : work.forward;
  if (machine_.device_is_host) {
    cost.amounts[Resource::kCores] = seconds * machine_.rates[Resource::kCores];
  } else {
    cost.amounts[Resource::kDevice] = seconds;
    cost.caller_seconds += scope.backward ? work.caller_backward : work.caller_forward;
  }
  if (op.bytes == 0) return;
  AddReceived(GroupOf(Axis::kTensor), static_cast<double>(op.bytes), cost.amounts);
  cost.seconds = seconds + ExchangeSeconds(op);
}

// The rank with the most work, for which the others wait. The products keep all cores busy.
void MachineCosts::AddIteration(const Op& op, Cost& cost) const {
  const Decisions& d = plan_.decisions;
  const int unit = op.parts.front().unit;
  std::vector<double> operations(static_cast<size_t>(d.exchanges_matrices() ? d.shards : 1), 0);
  for (const OwnedMatrix& matrix : d.matrices[unit]) {
    const double side = std::min(matrix.rows, matrix.columns);
    operations[matrix.owner] +=
        (1 + machine_.half_side / side) *
        NewtonSchulzOperations(matrix.rows, matrix.columns, d.iteration_steps,
                               /*halves=*/machine_.device_is_host);
  }
  const double most = *std::max_element(operations.begin(), operations.end());
  const double seconds = machine_.products > 0 ? most / machine_.products : 0;
  if (machine_.device_is_host) {
    cost.amounts[Resource::kCores] = seconds * machine_.rates[Resource::kCores];
  } else {
    cost.amounts[Resource::kDevice] = seconds;
  }
}

double MachineCosts::BytesOfCore(const Op& op) const {
  double bytes = 0;
  switch (op.code()) {
    case Code::kRedistribute:
      if (FactsOf(op.role).from == Spread::kPartial) bytes = machine_.sum_bytes;
      break;
    case Code::kAccumulate:
    case Code::kNorm:
      if (op.role == Role::kNorm) bytes = machine_.sum_bytes;
      break;
    case Code::kUpdate:
      bytes = machine_.update_bytes;
      break;
    default:
      break;
  }
  return bytes > 0 ? bytes : machine_.core_bytes;
}

Cost MachineCosts::Of(const Op& op) const {
  Cost cost{.caller_seconds = machine_.issue};
  if (op.code() == Code::kKernels) {
    AddKernels(op, cost);
    return cost;
  }
  if (op.role == Role::kOrthogonalise) {
    AddIteration(op, cost);
    return cost;
  }
  // A rank alone has its collectives' results where they belong.
  const bool is_collective = op.code() == Code::kRedistribute;
  if (is_collective && GroupOf(op.axes()).ranks == 1) return cost;
  // kSeal looks at gradients only where one is not finite.
  double bytes = op.role == Role::kSeal ? 0 : AddMemory(op, cost.amounts);
  if (op.code() == Code::kTransfer) {
    cost.latency = machine_.transfer;
    return cost;
  }
  AddCollective(op, cost);
  if (machine_.device_is_host || RunsOnHost(op.stream)) {
    if (machine_.device_is_host && is_collective && MovementOf(op.role) == Movement::kAllGather) {
      bytes = 2 * static_cast<double>(op.bytes + OwnBytesCopied(op));
      cost.amounts[Resource::kHostMemory] = bytes;
    }
    cost.amounts[Resource::kCores] = bytes / BytesOfCore(op);
  } else if (op.code() == Code::kCopy) {
    const bool comes = op.stream == StreamId::kUpload, leaves = op.stream == StreamId::kDownload;
    if (comes || leaves) cost.amounts[comes ? Resource::kToDevice : Resource::kToHost] = bytes / 2;
  }
  return cost;
}

}  // namespace ebb::sharding
