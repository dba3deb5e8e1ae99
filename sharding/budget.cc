#include "ebb/sharding/budget.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/sharding/memory_model.h"

namespace ebb::sharding {
namespace {

// Of sub-groups that pass through slots: long enough for full bandwidth, short enough for three of
// them to be in memory.
constexpr int64_t kSubGroupElements = int64_t{1} << 20;
constexpr int64_t kSubGroupElementsMin = int64_t{1} << 16;
constexpr int kParameterSlotsMin = 2;

int64_t Total(const int64_t (&bytes)[kStateClasses]) {
  int64_t total = 0;
  for (int64_t of_class : bytes) total += BufferBytes(of_class);
  return total;
}

std::string Megabytes(int64_t bytes) {
  return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
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
  const int64_t size = SizeOf(in.decisions->compute);
  for (size_t u = 0; u < homes.units.size(); ++u) {
    const int64_t elements = SwapBytes(homes, static_cast<int>(u), size) / size;
    if (elements <= config.zero.offload_param.buffer_size) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "zero_optimization.offload_param.buffer_size is ", config.zero.offload_param.buffer_size,
        " elements, but a rank's slice of unit '", in.model->units[u].name, "' has ", elements,
        " on NVMe: raise it to at least ", elements, ", or keep more of them in RAM (max_in_cpu)"));
  }
  return absl::OkStatus();
}

std::string DeviceAdvice(const PoolInputs& in, const Pools& pools) {
  const Decisions& d = *in.decisions;
  const auto bytes = [&](StateClass state) { return pools.bytes[static_cast<int>(state)]; };
  std::vector<std::string> advice;
  if (d.stage < 3) advice.push_back("zero_optimization.stage 3");
  if (d.optimizer_tier == Tier::kDevice && bytes(StateClass::kOptimizer) > 0)
    advice.push_back("zero_optimization.offload_optimizer.device \"cpu\" or \"nvme\"");
  if (d.parameter_tier == Tier::kDevice && bytes(StateClass::kParameter) > 0)
    advice.push_back("zero_optimization.offload_param.device \"cpu\" or \"nvme\" (stage 3)");
  if (bytes(StateClass::kGather) > 0) advice.push_back("ebb.prefetch_depth 0");
  if (d.parameter_tier != Tier::kDevice && bytes(StateClass::kParameter) > 0)
    advice.push_back("a smaller zero_optimization.stage3_param_persistence_threshold");
  if (bytes(StateClass::kActivation) > 0)
    advice.push_back("a smaller micro-batch, or fewer ebb.micro_batches_per_round");
  advice.push_back("smaller units, or more ranks");
  return absl::StrJoin(advice, "; ");
}

absl::StatusOr<Pools> WithinDevice(Pools pools, const PoolInputs& inputs, const Config& config) {
  if (!config.ebb.device_memory || Total(pools.bytes) <= *config.ebb.device_memory) return pools;
  return absl::ResourceExhaustedError(
      absl::StrCat("ebb.device_memory is ", Megabytes(*config.ebb.device_memory),
                   " a rank, but the pools on the device need ", Megabytes(Total(pools.bytes)),
                   " (", Table(pools.bytes), "); raise it, or try: ", DeviceAdvice(inputs, pools)));
}

}  // namespace

absl::StatusOr<Pools> LayOutWithinBudget(PoolInputs inputs, const Config& config) {
  HomeLimits limits{.sub_group_elements = SubGroupLimit(inputs, config),
                    .parameters_in_cpu = config.zero.offload_param.max_in_cpu,
                    .states_on_device = 1 - config.zero.offload_optimizer.ratio};
  inputs.parameter_slots =
      static_cast<int>(std::min<int64_t>(config.zero.offload_param.buffer_count, kParameterSlots));
  const auto lay_out = [&] {
    const Homes homes = DecideHomes(*inputs.decisions, *inputs.layout, limits);
    inputs.homes = &homes;
    return LayOutPools(inputs);
  };
  Pools pools = lay_out();
  if (!inputs.decisions->offloads() && !config.ebb.device_memory) return pools;
  EBB_RETURN_IF_ERROR(CheckParameterBuffers(inputs, pools.homes, config));
  if (config.ebb.host_memory) {
    const int64_t budget = *config.ebb.host_memory;
    while (Total(pools.host_bytes) > budget && !inputs.decisions->own_optimizer &&
           limits.sub_group_elements > kSubGroupElementsMin) {
      limits.sub_group_elements /= 2;
      pools = lay_out();
    }
    while (Total(pools.host_bytes) > budget && inputs.parameter_slots > kParameterSlotsMin) {
      --inputs.parameter_slots;
      pools = lay_out();
    }
    if (Total(pools.host_bytes) > budget) {
      // Where units are few, their states may take less than the slots that they would pass through.
      limits.states_in_cpu_bytes = INT64_MAX;
      pools = lay_out();
      if (Total(pools.host_bytes) <= budget) return WithinDevice(std::move(pools), inputs, config);
      limits.states_in_cpu_bytes = 0;
      pools = lay_out();
      return absl::ResourceExhaustedError(absl::StrCat(
          "ebb.host_memory is ", Megabytes(budget), " a rank, but the pools in host memory need ",
          Megabytes(Total(pools.host_bytes)), " (", Table(pools.host_bytes),
          "); raise it, move more to \"nvme\", or lower offload_param.max_in_cpu, "
          "sub_group_size or the size of the units"));
    }
    // The rest is for states. Rounding takes a little, so the share is lowered until it fits.
    limits.states_in_cpu_bytes = budget - Total(pools.host_bytes);
    for (Pools granted = lay_out(); limits.states_in_cpu_bytes > 0; granted = lay_out()) {
      const int64_t excess = Total(granted.host_bytes) - budget;
      if (excess <= 0) {
        pools = std::move(granted);
        break;
      }
      limits.states_in_cpu_bytes -= excess;
    }
  }
  return WithinDevice(std::move(pools), inputs, config);
}

}  // namespace ebb::sharding
