#include "ebb/sharding/fit/budget.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/sharding/decisions.h"
#include "ebb/sharding/memory_model.h"

namespace ebb::sharding {
namespace {

// The size of sub-groups that pass through slots: long enough for full bandwidth, short enough for
// all work slots to be in memory.
constexpr int64_t kSubGroupElements = int64_t{1} << 20;
constexpr int kParameterSlotsMin = 2;
constexpr int64_t kUncut = int64_t{1} << 60;
// A bound for DeepSpeed's limits, which may be any number: more than any host has.
constexpr int64_t kBufferCountMax = 1 << 16, kBufferElementsMax = int64_t{1} << 40;

int64_t Total(const PoolBytes::Classes& bytes) {
  int64_t total = 0;
  for (int64_t of_class : bytes) total += BufferBytes(of_class);
  return total;
}

std::string ListOf(const PoolBytes::Classes& bytes) {
  std::vector<std::string> rows;
  for (int c = 0; c < kStateClasses; ++c) {
    if (bytes[c] == 0) continue;
    const std::string_view name = Name(static_cast<StateClass>(c));
    rows.push_back(absl::StrCat(std::string(name), " ", SizeText(BufferBytes(bytes[c]))));
  }
  return absl::StrJoin(rows, ", ");
}

// The elements that a rank updates.
int64_t Updated(const RowInputs& in) {
  int64_t elements = 0;
  for (const UnitLayout& unit : in.layout->units)
    elements += in.decisions->stage == 0 ? unit.trainable.elements : unit.trainable.shard;
  return elements;
}

// DeepSpeed's pool of the swapper: buffer_count buffers of fp32, each as large as the largest
// sub-group.
int64_t SubGroupLimit(const RowInputs& in, const Config& config) {
  // An optimizer of the trainer's may need whole rows, so it gets slices of parameters uncut
  // (WhatOwnOptimizerOverrules).
  if (in.decisions->own_optimizer) return kUncut;
  const int64_t limit = std::min(config.zero.sub_group_size, kSubGroupElements);
  if (in.decisions->optimizer_tier != Tier::kNvme) return limit;
  int64_t largest = 0;
  for (const UnitLayout& unit : in.layout->units) largest = std::max(largest, unit.trainable.shard);
  const int64_t count = std::min(config.zero.offload_optimizer.buffer_count, kBufferCountMax),
                elements = std::min({largest, config.zero.sub_group_size, kBufferElementsMax}),
                buffers = count * 4 * elements;
  // A state in blocks has less than a byte for an element's part of the scale.
  const int64_t of_a_cut =
      kWorkSlots * (4 * kCutElements + in.decisions->MostOfUnits([&](int unit) {
        return in.decisions->BytesBeside(unit, kCutElements);
      }));
  return std::min(limit, buffers * kCutElements / of_a_cut);
}

absl::Status CheckParameterBuffers(const RowInputs& in, const Table& table, const Config& config) {
  const std::optional<int64_t> given = config.zero.offload_param.buffer_size;
  if (!given) return absl::OkStatus();
  const Decisions& d = *in.decisions;
  for (int unit = 0; unit < table.units; ++unit) {
    const int64_t elements = SwapBytes(table, unit) / SizeOf(d.compute);
    if (elements <= *given) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "zero_optimization.offload_param.buffer_size is ", *given,
        " elements, but a rank's slice of unit '", in.model->units[unit].name, "' has ", elements,
        " on NVMe: raise it to at least ", elements, ", or keep more of them in RAM (max_in_cpu)"));
  }
  return absl::OkStatus();
}

// The table of one step with other limits, until host memory holds its pools.
class HostFit {
 public:
  HostFit(const RowInputs& inputs, const Config& config)
      : budget_(config.ebb.host_memory.value_or(INT64_MAX)),
        inputs_(inputs),
        given_(inputs.placement),
        sub_group_least_(SubGroupElementsLeast(Updated(inputs))),
        limits_{.sub_group_elements = std::max(SubGroupLimit(inputs, config), sub_group_least_),
                .parameters_in_cpu = config.zero.offload_param.max_in_cpu,
                .states_on_device = 1 - config.zero.offload_optimizer.ratio} {
    const int64_t count = config.zero.offload_param.buffer_count;
    const int64_t slot_elements = SlotElementsMax(config, *inputs.layout, *inputs.decisions);
    inputs_.parameter_slots = static_cast<int>(std::min<int64_t>(count, kParameterSlots));
    inputs_.gather_slot_bytes = std::min(count, kBufferCountMax) *
                                std::min(slot_elements, kBufferElementsMax) *
                                SizeOf(inputs.decisions->compute);
  }

  // The table with the smallest of all limits, without what follows from sub-groups.
  Table Least(bool has_budget) {
    const Decisions& d = *inputs_.decisions;
    const double on_device = limits_.states_on_device;
    const int64_t sub_group = std::max(limits_.sub_group_elements, kCutElements);
    if (has_budget) inputs_.parameter_slots = std::min(inputs_.parameter_slots, kParameterSlotsMin);
    inputs_.gather_slot_bytes = 0;
    inputs_.has_work_slots = false;
    limits_.sub_group_elements = kUncut;
    if (d.optimizer_tier == Tier::kDevice || on_device <= 0 || on_device >= 1) return LayOut();
    // Which units' gradients follow the shared states is not known, so neither tier counts any.
    // Each class of states has its share, rounded to a sub-group.
    limits_.states_on_device = 0;
    Table least = LayOut();
    limits_.states_on_device = 1;
    least.bytes.On(Tier::kCpu) = LayOut().bytes.On(Tier::kCpu);
    const auto add = [&](Tier tier, double share) {
      const double all = static_cast<double>(Updated(inputs_));
      const int64_t elements =
          std::max<int64_t>(0, static_cast<int64_t>(share * all * (1 - 1e-9)) - sub_group);
      const int64_t master = d.MostOfUnits([&](int unit) { return d.MasterBytes(unit, elements); });
      least.bytes.Of(tier, StateClass::kMaster) = master;
      least.bytes.Of(tier, StateClass::kOptimizer) =
          d.MostOfUnits([&](int unit) { return d.BytesBeside(unit, elements); }) - master;
    };
    add(Tier::kDevice, on_device);
    if (d.optimizer_tier == Tier::kCpu) add(Tier::kCpu, 1 - on_device);
    return least;
  }

  Table LayOut() {
    if (given_ != nullptr) return Allocated();
    const StatePlacement placement = DecidePlacement(*inputs_.decisions, *inputs_.layout, limits_);
    inputs_.placement = &placement;
    return Allocated();
  }

  // A table within the budget if there is any, else the smallest.
  Table Shrunk() {
    const HostFit wanted = *this;
    TakeLeast();
    Table table = LayOut();
    // Nothing between the two is tried then.
    if (!Fits(table) && !FitsWithAllStates(table)) return table;
    *this = wanted;
    // If all states are there, none passes through slots or moves to the disk.
    const int slots = inputs_.parameter_slots;
    for (; inputs_.parameter_slots >= std::min(slots, kParameterSlotsMin);
         --inputs_.parameter_slots) {
      if (FitsWithAllStates(table)) return table;
    }
    inputs_.parameter_slots = slots;
    table = LayOut();
    // Without slots for masters, gathers read parameters. Parameters are more bytes, but nothing
    // else gets slower.
    if (!Fits(table)) {
      inputs_.gather_slot_bytes = 0;
      table = LayOut();
    }
    while (!Fits(table) && MayHalve()) {
      limits_.sub_group_elements /= 2;
      table = LayOut();
    }
    while (!Fits(table) && inputs_.parameter_slots > kParameterSlotsMin) {
      --inputs_.parameter_slots;
      table = LayOut();
    }
    if (!Fits(table)) FitsWithAllStates(table);
    return table;
  }

  // The rest of the budget is for states. Rounding takes a little, so the share is lowered until
  // it fits.
  Table Filled(Table table) {
    if (limits_.states_in_cpu_bytes > 0) return table;  // all states are in host memory
    limits_.states_in_cpu_bytes = budget_ - HostBytes(table.bytes);
    while (limits_.states_in_cpu_bytes > 0) {
      Table granted = LayOut();
      const int64_t excess = HostBytes(granted.bytes) - budget_;
      if (excess <= 0) return granted;
      limits_.states_in_cpu_bytes -= excess;
    }
    return table;
  }

  bool Fits(const Table& table) const { return HostBytes(table.bytes) <= budget_; }

 private:
  Table Allocated() const {
    Table table = RowsOf(inputs_);
    Allocate(table);
    return table;
  }
  // If they fit, `table` is the one with all states in host memory.
  bool FitsWithAllStates(Table& table) {
    if (inputs_.decisions->optimizer_tier != Tier::kNvme) return false;
    limits_.states_in_cpu_bytes = INT64_MAX;
    Table all = LayOut();
    const bool fits = Fits(all);
    if (fits) table = std::move(all);
    if (!fits) limits_.states_in_cpu_bytes = 0;
    return fits;
  }
  bool MayHalve() const {
    return !inputs_.decisions->own_optimizer &&
           limits_.sub_group_elements > std::max(kSubGroupElementsMin, 2 * sub_group_least_ - 1);
  }
  void TakeLeast() {
    inputs_.gather_slot_bytes = 0;
    inputs_.parameter_slots = std::min(inputs_.parameter_slots, kParameterSlotsMin);
    while (MayHalve()) limits_.sub_group_elements /= 2;
  }

  int64_t budget_;
  RowInputs inputs_;
  const StatePlacement* given_;
  int64_t sub_group_least_;
  PlacementLimits limits_;
};

}  // namespace

std::string SizeText(int64_t bytes) {
  constexpr int64_t kKibi = 1 << 10, kMebi = 1 << 20, kGibi = 1 << 30;
  if (0 < bytes && bytes < kKibi) return absl::StrCat(bytes, bytes == 1 ? " byte" : " bytes");
  if (0 < bytes && bytes < kMebi / 10)
    return absl::StrFormat("%.1f KiB", static_cast<double>(bytes) / kKibi);
  if (bytes >= kGibi) return absl::StrFormat("%.2f GiB", static_cast<double>(bytes) / kGibi);
  return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / kMebi);
}

int64_t SubGroupElementsLeast(int64_t elements) {
  return (elements / kSubGroupsMax + kCutElements - 1) / kCutElements * kCutElements;
}

absl::StatusOr<Table> LayOutNearBudget(const RowInputs& inputs, const Config& config) {
  HostFit fit(inputs, config);
  Table table = fit.LayOut();
  if (!inputs.decisions->offloads() && !config.ebb.device_memory) return table;
  EBB_RETURN_IF_ERROR(CheckParameterBuffers(inputs, table, config));
  if (!config.ebb.host_memory) return table;
  table = fit.Shrunk();
  return inputs.fills_host && fit.Fits(table) ? fit.Filled(std::move(table)) : std::move(table);
}

std::string WhatOwnOptimizerOverrules(const Config& config) {
  const ZeroConfig& zero = config.zero;
  const ZeroConfig defaults;
  const bool cuts = zero.offload_optimizer.device != Tier::kDevice ||
                    zero.offload_param.device != Tier::kDevice ||
                    config.ebb.offload_gradients.value_or(Tier::kDevice) != Tier::kDevice;
  std::vector<std::string> keys;
  if (cuts && zero.sub_group_size != defaults.sub_group_size)
    keys.push_back(absl::StrCat("\"zero_optimization.sub_group_size\" ", zero.sub_group_size));
  if (zero.offload_optimizer.device == Tier::kNvme &&
      zero.offload_optimizer.buffer_count != defaults.offload_optimizer.buffer_count) {
    keys.push_back(absl::StrCat("\"zero_optimization.offload_optimizer.buffer_count\" ",
                                zero.offload_optimizer.buffer_count));
  }
  if (keys.empty()) return "";
  return absl::StrCat(
      absl::StrJoin(keys, " and "), keys.size() == 1 ? " is" : " are",
      " no limit for EngineOptions::optimizer, which may need whole rows: it gets a "
      "rank's slices of parameters uncut, and staging has room for the largest");
}

Table LeastTable(const RowInputs& inputs, const Config& config) {
  return HostFit(inputs, config).Least(config.ebb.host_memory.has_value());
}

int64_t DeviceBytes(const PoolBytes& pools) {
  return Total(pools.On(Tier::kDevice));
}
int64_t HostBytes(const PoolBytes& pools) {
  return Total(pools.On(Tier::kCpu));
}
int64_t DiskBytes(const PoolBytes& pools) {
  return Total(pools.On(Tier::kNvme));
}

namespace {

std::string Needed(const PoolBytes& pools, const HostRoom& room) {
  std::vector<std::string> tiers;
  if (room.holds_device) tiers.push_back(absl::StrCat("device: ", ListOf(pools.On(Tier::kDevice))));
  if (HostBytes(pools) > 0) tiers.push_back(absl::StrCat("cpu: ", ListOf(pools.On(Tier::kCpu))));
  if (room.holds_device && room.untouched > 0)
    tiers.push_back(absl::StrCat("of the workspace untouched: ", SizeText(room.untouched)));
  if (const int64_t staging = StateStagingBytes(pools, !room.holds_device); staging > 0)
    tiers.push_back(absl::StrCat("staging of calls for state: ", SizeText(staging)));
  if (room.save > 0) tiers.push_back(absl::StrCat("a save: ", SizeText(room.save)));
  const int64_t bytes = BytesInRam(pools, room);
  const std::string all = room.ranks == 1
                              ? ""
                              : absl::StrCat(", ", SizeText(bytes * room.ranks), " for the ",
                                             room.ranks, " ranks that share it");
  return absl::StrCat("has ", SizeText(room.ram), " of RAM and ", SizeText(room.swap),
                      " of swap space left, but the pools in RAM",
                      room.save > 0 ? " and a save" : "", " need ", SizeText(bytes), " a rank (",
                      absl::StrJoin(tiers, "; "), ")", all);
}

}  // namespace

int64_t BytesInRam(const PoolBytes& pools, const HostRoom& room) {
  return HostBytes(pools) + (room.holds_device ? DeviceBytes(pools) - room.untouched : 0) +
         StateStagingBytes(pools, !room.holds_device) + room.save;
}

absl::Status CheckHostRoom(const PoolBytes& pools, const HostRoom& room) {
  if (BytesInRam(pools, room) <= room.bytes_of_rank()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(room.of, " ", Needed(pools, room)));
}

std::string HostRoomWarning(const PoolBytes& pools, const HostRoom& room, int64_t save) {
  const int64_t bytes = BytesInRam(pools, room), of_rank = room.ram / room.ranks;
  std::string warning;
  if (bytes > of_rank) {
    warning = ": what does not fit will be swapped, and the process may be killed";
  } else if (bytes > of_rank - HostRoom::BesidePools(of_rank)) {
    warning = ": that leaves little to the rest of the process, which may be killed";
  }
  if (bytes + save > room.bytes_of_rank())
    absl::StrAppend(&warning, warning.empty() ? ": " : "; ",
                    "a save does not fit, because it takes ", SizeText(save), " more a rank");
  return warning.empty() ? "" : absl::StrCat(room.of, " ", Needed(pools, room), warning);
}

absl::Status CheckBudget(const PoolBytes& pools, const Config& config, bool names_classes) {
  const auto classes = [&](const auto& bytes) {
    return names_classes ? absl::StrCat(" (", ListOf(bytes), ")") : "";
  };
  const std::optional<int64_t> host = config.ebb.host_memory, device = config.ebb.device_memory;
  if (host && HostBytes(pools) > *host) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "ebb.host_memory is ", SizeText(*host), " a rank, but the pools in host memory need ",
        SizeText(HostBytes(pools)), classes(pools.On(Tier::kCpu))));
  }
  if (device && DeviceBytes(pools) > *device) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "ebb.device_memory is ", SizeText(*device), " a rank, but the pools on the device need ",
        SizeText(DeviceBytes(pools)), classes(pools.On(Tier::kDevice))));
  }
  return absl::OkStatus();
}

}  // namespace ebb::sharding
