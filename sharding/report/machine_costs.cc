#include "ebb/sharding/report/machine_costs.h"

#include <algorithm>
#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

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
int64_t OwnBytesCopied(const Instruction& gather) {
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

// Ranks of a shard group are neighbours. Ranks with the same shard are a group apart.
MachineCosts::Group MachineCosts::GroupOf(Lane lane) const {
  const Decisions& d = plan_.decisions;
  const int host = machine_.ranks_per_host;
  const auto consecutive = [&](int ranks) {
    return Group{.ranks = ranks, .in_host = std::min(ranks, host)};
  };
  switch (lane) {
    case Lane::kGather:
    case Lane::kReduce:
      return consecutive(d.shards);
    case Lane::kSecondary:
      return consecutive(d.secondary_shards);
    case Lane::kReplicas:
      return {.ranks = d.replicas(), .in_host = std::clamp(host / d.shards, 1, d.replicas())};
    case Lane::kExchange:
      return consecutive(d.verdict_ranks);
    case Lane::kNone:
      break;
  }
  return {};
}

// Adds what operands read and write; bytes of memory.
double MachineCosts::AddMemory(const Instruction& instruction, Amounts& amounts) const {
  double of_memory = 0;
  for (const Operand& operand : instruction.operands) {
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

void MachineCosts::AddCollective(const Instruction& instruction, Cost& cost) const {
  if (instruction.lane == Lane::kNone) return;
  const Group group = GroupOf(instruction.lane);
  cost.latency = machine_.collective + (group.ranks - 1) * machine_.collective_rank;
  const auto bytes = static_cast<double>(instruction.bytes);
  const double of_network = group.ranks > group.in_host ? bytes / group.in_host : 0;
  cost.amounts[Resource::kNetwork] += of_network;
  cost.amounts[Resource::kPeers] += bytes - of_network;
}

void MachineCosts::AddKernels(const Instruction& instruction, Cost& cost) const {
  if (instruction.scope < 0 || instruction.goes_on) return;
  const PlannedScope& scope = plan_.scopes[static_cast<size_t>(instruction.scope)];
  const KernelWork& work = work_[static_cast<size_t>(scope.visit)];
  const double seconds = scope.backward ? work.backward : work.forward;
  if (machine_.device_is_host) {
    cost.amounts[Resource::kCores] = seconds * machine_.rates[Resource::kCores];
  } else {
    cost.amounts[Resource::kDevice] = seconds;
    cost.caller_seconds += scope.backward ? work.caller_backward : work.caller_forward;
  }
}

double MachineCosts::BytesOfCore(Code code) const {
  double bytes = 0;
  switch (code) {
    case Code::kReduceScatter:
    case Code::kAllReduce:
    case Code::kAccumulate:
    case Code::kNorm:
      bytes = machine_.sum_bytes;
      break;
    case Code::kUpdate:
      bytes = machine_.update_bytes;
      break;
    default:
      break;
  }
  return bytes > 0 ? bytes : machine_.core_bytes;
}

Cost MachineCosts::Of(const Instruction& instruction) const {
  Cost cost{.caller_seconds = machine_.issue};
  if (instruction.code == Code::kKernels) {
    AddKernels(instruction, cost);
    return cost;
  }
  // A rank alone has its collectives' results where they belong.
  const bool is_collective = instruction.lane != Lane::kNone;
  if (is_collective && GroupOf(instruction.lane).ranks == 1) return cost;
  // kSeal looks at gradients only where one is not finite.
  double bytes = instruction.code == Code::kSeal ? 0 : AddMemory(instruction, cost.amounts);
  const bool moves_file = instruction.code == Code::kRead || instruction.code == Code::kWrite;
  if (moves_file) {
    cost.latency = machine_.transfer;
    return cost;
  }
  AddCollective(instruction, cost);
  if (machine_.device_is_host || RunsOnHost(instruction.stream)) {
    if (machine_.device_is_host && instruction.code == Code::kAllGather) {
      bytes = 2 * static_cast<double>(instruction.bytes + OwnBytesCopied(instruction));
      cost.amounts[Resource::kHostMemory] = bytes;
    }
    cost.amounts[Resource::kCores] = bytes / BytesOfCore(instruction.code);
  } else if (instruction.code == Code::kCopy) {
    const bool comes = instruction.stream == StreamId::kUpload,
               leaves = instruction.stream == StreamId::kDownload;
    if (comes || leaves) cost.amounts[comes ? Resource::kToDevice : Resource::kToHost] = bytes / 2;
  }
  return cost;
}

}  // namespace ebb::sharding
