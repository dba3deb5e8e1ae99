#include "ebb/sharding/placement.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/plan.h"

namespace ebb::sharding {
namespace {

// RAM's part of states on NVMe: as even as whole pieces allow, so that the disk has the same work in
// each second of a step.
class Share {
 public:
  explicit Share(double share) : share_(share) {}
  bool Takes(int64_t count) {
    seen_ += count;
    const bool takes =
        static_cast<double>(taken_ + count) <= share_ * static_cast<double>(seen_) || share_ >= 1;
    taken_ += takes ? count : 0;
    return takes;
  }

 private:
  double share_;
  int64_t seen_ = 0, taken_ = 0;
};

// Elements of a unit that this rank updates.
int64_t Updated(const Decisions& d, const UnitLayout& unit) {
  return d.stage == 0 ? unit.trainable.elements : unit.trainable.shard;
}

// The device's part of the states: the first, as far as whole pieces allow. Gradients of the first
// units come last and their forwards first, so a step would wait for their updates below the device.
// Gradients of units that are updated on the device alone also stay there.
class First {
 public:
  First(double share, const Decisions& d, const ModelLayout& layout) {
    for (const UnitLayout& unit : layout.units)
      left_ += share * static_cast<double>(Updated(d, unit));
    is_all_ = share >= 1;
  }
  bool Takes(int64_t count) {
    const auto elements = static_cast<double>(count);
    if (!is_all_ && elements > left_) return false;
    left_ -= elements;
    return true;
  }

 private:
  double left_ = 0;
  bool is_all_ = false;
};

std::vector<ParameterPiece> Pieces(const Decisions& d, int unit, int64_t shard, int64_t& in_cpu) {
  if (shard == 0) return {};
  const Tier tier = d.kept_whole[unit] ? Tier::kDevice : d.parameter_tier;
  if (tier != Tier::kNvme) return {{.begin = 0, .end = shard, .tier = tier}};
  int64_t cut = std::min(in_cpu, shard);
  if (cut < shard) cut -= cut % kCutElements;
  if (cut < shard && d.own_optimizer) cut = 0;  // an own optimizer gets slices of parameters uncut
  in_cpu -= cut;
  std::vector<ParameterPiece> pieces;
  if (cut > 0) pieces.push_back({.begin = 0, .end = cut, .tier = Tier::kCpu});
  if (cut < shard) pieces.push_back({.begin = cut, .end = shard, .tier = Tier::kNvme});
  return pieces;
}

// The parameters that a sub-group writes are in one tier. Sub-groups of one tier are equally large,
// because a small one at the end would take as long from a busy disk as a large one.
std::vector<int64_t> CutsOf(const std::vector<ParameterPiece>& pieces, int64_t elements,
                            int64_t step) {
  std::vector<int64_t> cuts = {0};
  for (const ParameterPiece& piece : pieces) {
    const int64_t end = std::min(piece.end, elements), count = end - cuts.back();
    if (count <= 0) continue;
    const int64_t block_of_each = (count + step - 1) / step * kCutElements;
    const int64_t equal = (count + block_of_each - 1) / block_of_each * kCutElements;
    while (cuts.back() < end) cuts.push_back(std::min(end, cuts.back() + equal));
  }
  return cuts;
}

}  // namespace

StatePlacement DecidePlacement(const Decisions& d, const ModelLayout& layout,
                               const PlacementLimits& limits) {
  StatePlacement placement;
  placement.units.resize(layout.units.size());
  int64_t in_cpu = limits.parameters_in_cpu, offloaded = 0, offloaded_bytes = 0;
  First device(limits.states_on_device, d, layout);
  const int64_t step =
      std::max(kCutElements, limits.sub_group_elements / kCutElements * kCutElements);
  for (size_t u = 0; u < layout.units.size(); ++u) {
    const UnitLayout& unit = layout.units[u];
    UnitPlacement& of_unit = placement.units[u];
    of_unit.trainable = Pieces(d, static_cast<int>(u), unit.trainable.shard, in_cpu);
    of_unit.frozen = Pieces(d, static_cast<int>(u), unit.frozen.shard, in_cpu);
    of_unit.first_sub_group = static_cast<int>(placement.sub_groups.size());
    const int64_t elements = Updated(d, unit);
    if (elements == 0) continue;
    if (d.optimizer_tier == Tier::kDevice && d.parameter_tier == Tier::kDevice &&
        d.gradient_tier == Tier::kDevice) {
      placement.sub_groups.push_back({.unit = static_cast<int>(u), .begin = 0, .end = elements});
      of_unit.sub_groups = 1;
      continue;
    }
    const std::vector<int64_t> cuts = CutsOf(of_unit.trainable, elements, step);
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      SubGroup group{.unit = static_cast<int>(u), .begin = cuts[i], .end = cuts[i + 1]};
      if (d.optimizer_tier != Tier::kDevice && !device.Takes(group.count())) {
        group.tier = d.optimizer_tier;
        offloaded += group.count();
        offloaded_bytes += d.BytesBeside(group.unit, group.count());
      }
      placement.sub_groups.push_back(group);
    }
    of_unit.sub_groups = static_cast<int>(cuts.size()) - 1;
  }
  if (d.optimizer_tier == Tier::kNvme && offloaded > 0) {
    const int64_t bytes = std::max<int64_t>(1, offloaded_bytes);
    Share cpu(std::min(
        1.0, static_cast<double>(limits.states_in_cpu_bytes) / static_cast<double>(bytes)));
    for (SubGroup& group : placement.sub_groups) {
      if (group.tier == Tier::kNvme && cpu.Takes(group.count())) group.tier = Tier::kCpu;
    }
  }
  for (int u = 0; u < std::ssize(placement.units); ++u) {
    UnitPlacement& unit = placement.units[u];
    // Tensor ranks add up their terms where they meet.
    if (d.gradient_tier == Tier::kDevice || d.sums_tensor[u]) continue;
    const auto begin = placement.sub_groups.begin() + unit.first_sub_group;
    const bool all_on_device =
        std::all_of(begin, begin + unit.sub_groups,
                    [](const SubGroup& group) { return group.tier == Tier::kDevice; });
    unit.gradient = d.gradients_follow && all_on_device ? Tier::kDevice : d.gradient_tier;
  }
  return placement;
}

bool SharesMasters(const Decisions& d, const SubGroup& group, Tier parameter) {
  return d.shares_reads && !d.reads_parameters(group.unit) && !d.carried[group.unit] &&
         !d.has_matrices(group.unit) && group.tier == Tier::kNvme && parameter == Tier::kNvme;
}

std::string WhyNoneIsOffloaded(const Decisions& d, const StatePlacement& placement,
                               const Config& config) {
  if (d.parameter_tier == Tier::kDevice) return "";
  bool in_cpu = false;
  for (const UnitPlacement& unit : placement.units) {
    for (const bool trainable : {true, false}) {
      for (const ParameterPiece& piece : unit.pieces(trainable)) {
        if (piece.tier == d.parameter_tier) return "";
        in_cpu = in_cpu || piece.tier == Tier::kCpu;
      }
    }
  }
  const std::string given = absl::StrCat("\"zero_optimization.offload_param.device\" is \"",
                                         std::string(Name(d.parameter_tier)), "\", but ");
  if (in_cpu) {
    return absl::StrCat(given, "\"zero_optimization.offload_param.max_in_cpu\" ",
                        config.zero.offload_param.max_in_cpu,
                        " keeps all parameters that leave the device in RAM; with 0 none stays "
                        "there");
  }
  return absl::StrCat(given,
                      "no unit has more elements than "
                      "\"zero_optimization.stage3_param_persistence_threshold\" ",
                      config.zero.param_persistence_threshold,
                      ": all parameters stay on the device; with 0 none does");
}

}  // namespace ebb::sharding
