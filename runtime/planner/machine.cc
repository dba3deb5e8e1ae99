#include "ebb/runtime/planner/machine.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/config/document.h"
#include "ebb/runtime/config/nearest.h"
#include "ebb/sharding/fit/budget.h"

namespace ebb::planner {
namespace {

using config::Json;
using sharding::Resource;

enum class Kind { kNumber, kWhole, kBytes, kRate };  // a rate of 0: there is none
enum class Needed { kNo, kAlways, kByGpu, kBySeveralGpus, kByDisk };
constexpr double kMost = 1e15, kLeastRate = 1e-6, kMostMicroseconds = 1e6, kMostGpus = 1e6;
struct Key {
  const char* name;
  double Machine::*of;
  Kind kind = Kind::kNumber;
  double least = 0;
  Needed needed = Needed::kNo;
  double most = kMost;
};
constexpr Key kKeys[] = {
    {"gpus", &Machine::gpus, Kind::kWhole, 1, Needed::kAlways, kMostGpus},
    {"gpu_memory", &Machine::gpu_memory, Kind::kBytes, 0, Needed::kByGpu},
    {"gpu_reserved", &Machine::gpu_reserved, Kind::kBytes},
    {"gpu_teraflops", &Machine::gpu_teraflops, Kind::kNumber, kLeastRate, Needed::kAlways},
    {"gpu_peak_teraflops", &Machine::gpu_peak_teraflops, Kind::kRate, kLeastRate},
    {"newton_schulz_teraflops", &Machine::newton_schulz_teraflops, Kind::kRate, kLeastRate},
    {"newton_schulz_half_side", &Machine::newton_schulz_half_side},
    {"gpu_memory_gb_s", &Machine::gpu_memory_gb_s, Kind::kRate, kLeastRate, Needed::kByGpu},
    {"link_gb_s", &Machine::link_gb_s, Kind::kRate, kLeastRate, Needed::kBySeveralGpus},
    {"pcie_gb_s", &Machine::pcie_gb_s, Kind::kRate, kLeastRate, Needed::kByGpu},
    {"network_gb_s", &Machine::network_gb_s, Kind::kRate, kLeastRate},
    {"ram", &Machine::ram, Kind::kBytes, 1 << 20, Needed::kAlways},
    {"ram_gb_s", &Machine::ram_gb_s, Kind::kNumber, kLeastRate, Needed::kAlways},
    {"cores", &Machine::cores, Kind::kWhole, 1, Needed::kAlways},
    {"core_gb_s", &Machine::core_gb_s, Kind::kNumber, kLeastRate},
    {"sum_gb_s", &Machine::sum_gb_s, Kind::kRate, kLeastRate},
    {"update_gb_s", &Machine::update_gb_s, Kind::kRate, kLeastRate},
    {"disk", &Machine::disk, Kind::kBytes},
    {"disk_read_gb_s", &Machine::disk_read_gb_s, Kind::kRate, kLeastRate, Needed::kByDisk},
    {"disk_write_gb_s", &Machine::disk_write_gb_s, Kind::kRate, kLeastRate, Needed::kByDisk},
    {"disk_both_gb_s", &Machine::disk_both_gb_s, Kind::kRate, kLeastRate},
    {"disk_tbw", &Machine::disk_tbw, Kind::kBytes, 0, Needed::kNo, 1000 * kMost},
    {"launch_us", &Machine::launch_us, Kind::kNumber, 0, Needed::kNo, kMostMicroseconds},
    {"collective_us", &Machine::collective_us, Kind::kNumber, 0, Needed::kNo, kMostMicroseconds},
    {"collective_rank_us", &Machine::collective_rank_us, Kind::kNumber, 0, Needed::kNo,
     kMostMicroseconds},
    {"disk_us", &Machine::disk_us, Kind::kNumber, 0, Needed::kNo, kMostMicroseconds},
};
constexpr char kDevice[] = "device";    // "gpu" or "cpu"
constexpr char kSources[] = "sources";  // texts by the keys of figures

std::string KeyWords() {
  std::string words = kDevice;
  for (const Key& key : kKeys) absl::StrAppend(&words, "|", key.name);
  return words;
}

absl::Status Put(const Key& key, const Json& value, Machine& machine) {
  const auto refused = [&](absl::string_view why) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", key.name, "\" is ", config::Shown(value), ": ", why));
  };
  if (key.kind == Kind::kBytes) {
    const auto bytes = config::ToBytes(value);
    if (!bytes) return refused("it must be a size such as \"80GiB\"");
    machine.*key.of = static_cast<double>(*bytes);
  } else {
    if (!value.is_number()) return refused("it must be a number");
    machine.*key.of = value.get<double>();
  }
  const double number = machine.*key.of;
  const bool is_none = key.kind == Kind::kRate && number == 0;
  if (!(is_none || (number >= key.least && number <= key.most)) ||
      (key.kind == Kind::kWhole && number != std::floor(number)))
    return refused(absl::StrCat("allowed are ",
                                key.kind == Kind::kWhole  ? "whole numbers "
                                : key.kind == Kind::kRate ? "0 and "
                                                          : "",
                                "from ", key.least, " to ", key.most));
  return absl::OkStatus();
}

// The reason for which the machine needs the key; null: it does not.
const char* WhyNeeded(Needed needed, const Machine& machine) {
  switch (needed) {
    case Needed::kNo:
      return nullptr;
    case Needed::kAlways:
      return "";
    case Needed::kByGpu:
      return machine.is_cpu ? nullptr : ": the device is a GPU";
    case Needed::kBySeveralGpus:
      return machine.is_cpu || machine.gpus == 1
                 ? nullptr
                 : ": a host has several GPUs. GPUs without NVLink are connected by PCIe: write "
                   "half of pcie_gb_s";
    case Needed::kByDisk:
      return machine.disk == 0 ? nullptr : ": there is a disk";
  }
  return nullptr;
}

absl::Status CheckTogether(const Machine& machine, const std::set<std::string>& given) {
  for (const Key& key : kKeys) {
    const char* const why = WhyNeeded(key.needed, machine);
    const bool is_there =
        key.needed == Needed::kAlways ? given.contains(key.name) : machine.*key.of > 0;
    if (why != nullptr && !is_there)
      return absl::InvalidArgumentError(absl::StrCat("\"", key.name, "\" is missing", why));
  }
  return absl::OkStatus();
}

}  // namespace

int Machine::ranks_per_host(int ranks) const {
  return std::max(1, std::min(ranks, static_cast<int>(gpus)));
}
// A CPU's cores and RAM are those of the ranks that are there.
double Machine::rank_share(int ranks) const {
  return whole_host || is_cpu ? 1.0 / ranks_per_host(ranks) : 1 / gpus;
}
double Machine::flops_of_rank(int ranks) const {
  return 1e12 * gpu_teraflops * (is_cpu ? rank_share(ranks) : 1);
}
double Machine::newton_schulz_flops_of_rank(int ranks) const {
  if (newton_schulz_teraflops == 0) return flops_of_rank(ranks);
  return flops_of_rank(ranks) * newton_schulz_teraflops / gpu_teraflops;
}
int64_t Machine::device_room(int ranks) const {
  if (is_cpu) return ram_room(ranks);
  return static_cast<int64_t>(std::max(0.0, gpu_memory - gpu_reserved));
}
int64_t Machine::ram_room(int ranks) const {
  const auto share = static_cast<int64_t>(ram * rank_share(ranks));
  return share - sharding::HostRoom::BesidePools(share);
}
int64_t Machine::disk_room(int ranks) const {
  return static_cast<int64_t>(disk * rank_share(ranks));
}

sharding::Machine Machine::ForSimulation(int ranks) const {
  constexpr double kGiga = 1e9, kMicro = 1e-6;
  const double share = rank_share(ranks);
  sharding::Machine machine{.ranks_per_host = ranks_per_host(ranks),
                            .device_is_host = is_cpu,
                            .core_bytes = core_gb_s * kGiga,
                            .sum_bytes = sum_gb_s * kGiga,
                            .update_bytes = update_gb_s * kGiga,
                            .products = newton_schulz_flops_of_rank(ranks),
                            .half_side = newton_schulz_half_side,
                            .issue = launch_us * kMicro,
                            .collective = collective_us * kMicro,
                            .collective_rank = collective_rank_us * kMicro,
                            .transfer = disk_us * kMicro};
  // Ranks on a CPU reach each other through its RAM.
  const double link = is_cpu && link_gb_s == 0 ? ram_gb_s * share : link_gb_s;
  const double disk_both =
      disk_both_gb_s > 0 ? disk_both_gb_s : std::max(disk_read_gb_s, disk_write_gb_s);
  const std::pair<Resource, double> kRates[] = {
      {Resource::kDevice, 1},
      {Resource::kDeviceMemory, gpu_memory_gb_s * kGiga},
      {Resource::kCores, cores * share},
      {Resource::kHostMemory, ram_gb_s * kGiga * share},
      {Resource::kToDevice, pcie_gb_s * kGiga},
      {Resource::kToHost, pcie_gb_s * kGiga},
      {Resource::kPeers, link * kGiga},
      {Resource::kNetwork, network_gb_s * kGiga * share},
      {Resource::kDiskRead, disk_read_gb_s * kGiga * share},
      {Resource::kDiskWrite, disk_write_gb_s * kGiga * share},
      {Resource::kDisk, disk_both * kGiga * share}};
  for (const auto& [resource, rate] : kRates) machine.rates[resource] = rate;
  return machine;
}

absl::StatusOr<Machine> MachineOfJson(std::string_view text, std::string name) {
  EBB_ASSIGN_OR_RETURN(const config::Document document, config::ParseDocument(text));
  EBB_RETURN_IF_ERROR(document.problems.status());
  Machine machine{.name = std::move(name)};
  std::set<std::string> given;
  for (const auto& [word, value] : document.root.items()) {
    if (word == kDevice) {
      if (value != "gpu" && value != "cpu")
        return absl::InvalidArgumentError(absl::StrCat("\"device\" is ", config::Shown(value),
                                                       ": it must be \"gpu\" or \"cpu\""));
      machine.is_cpu = value == "cpu";
      continue;
    }
    if (word == kSources) {
      for (const auto& [key, text_of_key] : value.items()) {
        if (!value.is_object() || !text_of_key.is_string())
          return absl::InvalidArgumentError(
              "\"sources\" must be an object of texts, by the keys of figures");
        machine.sources[key] = text_of_key.get<std::string>();
      }
      continue;
    }
    const Key* const key = std::find_if(std::begin(kKeys), std::end(kKeys),
                                        [&](const Key& each) { return word == each.name; });
    if (key == std::end(kKeys)) {
      const std::string nearest = config::NearestWord(KeyWords(), word);
      return absl::InvalidArgumentError(
          absl::StrCat(config::Quoted(word), " is not a key of a machine",
                       nearest.empty() ? "" : absl::StrCat("; did you mean \"", nearest, "\"")));
    }
    EBB_RETURN_IF_ERROR(Put(*key, value, machine));
    given.insert(word);
  }
  EBB_RETURN_IF_ERROR(CheckTogether(machine, given));
  return machine;
}

std::string ToJson(const Machine& machine) {
  Json json = {{kDevice, machine.is_cpu ? "cpu" : "gpu"}};
  for (const Key& key : kKeys) {
    const double figure = machine.*key.of;
    if (key.kind == Kind::kBytes || figure == std::floor(figure)) {
      json[key.name] = static_cast<int64_t>(figure);
    } else {
      json[key.name] = figure;
    }
  }
  if (!machine.sources.empty()) json[kSources] = machine.sources;
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace ebb::planner
