#include "ebb/sharding/budget.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/sharding/decisions.h"
#include "ebb/sharding/memory_model.h"

namespace ebb::sharding {
namespace {

// Of sub-groups that pass through slots: long enough for full bandwidth, short enough for all
// work slots to be in memory.
constexpr int64_t kSubGroupElements = int64_t{1} << 20;
constexpr int64_t kSubGroupElementsMin = int64_t{1} << 16;
constexpr int kParameterSlotsMin = 2;
// Of DeepSpeed's limits, which may be any number: more than any host has.
constexpr int64_t kBufferCountMax = 1 << 16, kBufferElementsMax = int64_t{1} << 40;

int64_t Total(const int64_t (&bytes)[kStateClasses]) {
  int64_t total = 0;
  for (int64_t of_class : bytes) total += BufferBytes(of_class);
  return total;
}

std::string Table(const int64_t (&bytes)[kStateClasses]) {
  std::vector<std::string> rows;
  for (int c = 0; c < kStateClasses; ++c) {
    if (bytes[c] == 0) continue;
    const std::string_view name = Name(static_cast<StateClass>(c));
    rows.push_back(absl::StrCat(std::string(name), " ", Megabytes(BufferBytes(bytes[c]))));
  }
  return absl::StrJoin(rows, ", ");
}

// DeepSpeed's pool of the swapper: buffer_count buffers of fp32, each as large as the largest
// sub-group.
int64_t SubGroupLimit(const PoolInputs& in, const Config& config) {
  // An optimizer of the trainer's may need whole rows, so it gets slices of parameters uncut.
  if (in.decisions->own_optimizer) return int64_t{1} << 40;
  const int64_t limit = std::min(config.zero.sub_group_size, kSubGroupElements);
  if (in.decisions->optimizer_tier != Tier::kNvme) return limit;
  int64_t largest = 0;
  for (const UnitLayout& unit : in.layout->units) largest = std::max(largest, unit.trainable.shard);
  const int64_t buffers = config.zero.offload_optimizer.buffer_count * 4 *
                          std::min(largest, config.zero.sub_group_size);
  const int64_t of_an_element = kWorkSlots * (in.decisions->state_bytes() + 4);
  return std::min(limit, buffers / of_an_element);
}

absl::Status CheckParameterBuffers(const PoolInputs& in, const Homes& homes, const Config& config) {
  const std::optional<int64_t> given = config.zero.offload_param.buffer_size;
  if (!given) return absl::OkStatus();
  const int64_t size = SizeOf(in.decisions->compute);
  for (size_t u = 0; u < homes.units.size(); ++u) {
    const int64_t elements = SwapBytes(homes, static_cast<int>(u), size) / size;
    if (elements <= *given) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "zero_optimization.offload_param.buffer_size is ", *given,
        " elements, but a rank's slice of unit '", in.model->units[u].name, "' has ", elements,
        " on NVMe: raise it to at least ", elements, ", or keep more of them in RAM (max_in_cpu)"));
  }
  return absl::OkStatus();
}

}  // namespace

std::string Megabytes(int64_t bytes) {
  return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
}

absl::StatusOr<Pools> LayOutNearBudget(PoolInputs inputs, const Config& config) {
  HomeLimits limits{.sub_group_elements = SubGroupLimit(inputs, config),
                    .parameters_in_cpu = config.zero.offload_param.max_in_cpu,
                    .states_on_device = 1 - config.zero.offload_optimizer.ratio};
  const int slots =
      static_cast<int>(std::min<int64_t>(config.zero.offload_param.buffer_count, kParameterSlots));
  inputs.parameter_slots = slots;
  const int64_t slot_elements = SlotElementsMax(config, *inputs.layout, inputs.decisions->compute);
  inputs.gather_slot_bytes = std::min(config.zero.offload_param.buffer_count, kBufferCountMax) *
                             std::min(slot_elements, kBufferElementsMax) *
                             SizeOf(inputs.decisions->compute);
  const auto lay_out = [&] {
    const Homes homes = DecideHomes(*inputs.decisions, *inputs.layout, limits);
    inputs.homes = &homes;
    return LayOutPools(inputs);
  };
  Pools pools = lay_out();
  if (!inputs.decisions->offloads() && !config.ebb.device_memory) return pools;
  EBB_RETURN_IF_ERROR(CheckParameterBuffers(inputs, pools.homes, config));
  if (!config.ebb.host_memory) return pools;
  const int64_t budget = *config.ebb.host_memory;
  const auto fits_with_all_states = [&] {
    if (inputs.decisions->optimizer_tier != Tier::kNvme) return false;
    limits.states_in_cpu_bytes = INT64_MAX;
    pools = lay_out();
    limits.states_in_cpu_bytes = 0;
    return HostBytes(pools) <= budget;
  };
  // Then none passes through slots, and the disk has nothing to do with them.
  for (; inputs.parameter_slots >= std::min(slots, kParameterSlotsMin); --inputs.parameter_slots) {
    if (fits_with_all_states()) return pools;
  }
  inputs.parameter_slots = slots;
  pools = lay_out();
  // Without slots for masters, gathers read parameters: more bytes, but nothing else is slower.
  if (HostBytes(pools) > budget) {
    inputs.gather_slot_bytes = 0;
    pools = lay_out();
  }
  while (HostBytes(pools) > budget && !inputs.decisions->own_optimizer &&
         limits.sub_group_elements > kSubGroupElementsMin) {
    limits.sub_group_elements /= 2;
    pools = lay_out();
  }
  while (HostBytes(pools) > budget && inputs.parameter_slots > kParameterSlotsMin) {
    --inputs.parameter_slots;
    pools = lay_out();
  }
  if (HostBytes(pools) > budget) {
    if (!fits_with_all_states()) pools = lay_out();
    return pools;
  }
  // The rest is for states. Rounding takes a little, so the share is lowered until it fits.
  limits.states_in_cpu_bytes = budget - HostBytes(pools);
  while (limits.states_in_cpu_bytes > 0) {
    Pools granted = lay_out();
    const int64_t excess = HostBytes(granted) - budget;
    if (excess <= 0) return granted;
    limits.states_in_cpu_bytes -= excess;
  }
  return pools;
}

int64_t DeviceBytes(const Pools& pools) {
  return Total(pools.bytes);
}
int64_t HostBytes(const Pools& pools) {
  return Total(pools.host_bytes);
}

absl::Status CheckBudget(const Pools& pools, const Config& config) {
  const std::optional<int64_t> host = config.ebb.host_memory, device = config.ebb.device_memory;
  if (host && HostBytes(pools) > *host) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "ebb.host_memory is ", Megabytes(*host), " a rank, but the pools in host memory need ",
        Megabytes(HostBytes(pools)), " (", Table(pools.host_bytes), ")"));
  }
  if (device && DeviceBytes(pools) > *device) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "ebb.device_memory is ", Megabytes(*device), " a rank, but the pools on the device need ",
        Megabytes(DeviceBytes(pools)), " (", Table(pools.bytes), ")"));
  }
  return absl::OkStatus();
}

}  // namespace ebb::sharding
