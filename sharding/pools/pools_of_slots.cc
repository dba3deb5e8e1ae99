// The slots through which offloaded state passes, and what else updates below the device need.
#include <algorithm>
#include <vector>

#include "ebb/sharding/norm_records.h"
#include "ebb/sharding/pools/pool_parts.h"
#include "ebb/sharding/pools/reduction.h"

namespace ebb::sharding {
namespace {

// The parts of a work slot, each at a multiple of the swap file's alignment.
class WorkSlot {
 public:
  explicit WorkSlot(int64_t elements) : elements_(elements) {}
  int64_t Take(bool needed, int64_t size, int arrays = 1) {
    if (!needed || arrays == 0) return -1;
    const int64_t at = bytes_;
    bytes_ += arrays * SwapAligned(elements_ * size);
    return at;
  }
  int64_t stride() const { return SwapAligned(elements_ * 4); }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t elements_, bytes_ = 0;
};

// The work slots that sub-groups need on the device and on the host.
struct WorkNeeds {
  bool states = false, gradient = false, parameter = false;
  bool any() const { return states || gradient || parameter; }
};

// Slots for masters that a gather shares with an early update: for all units between their last
// gather and their update, and for one more that is read meanwhile. These slots serve as many
// groups of gathers as there are parameter slots, and take no more bytes than are left.
void LayOutMasterSlots(const PoolInputs& in, Pools& pools) {
  struct Shared {
    int group = 0, updated = 0;
    int sub_groups = 0;
  };
  const std::vector<LastGather> gathers = FindLastGathers(
      *in.scopes, *in.residency, *in.reduction, static_cast<int>(in.layout->units.size()));
  std::vector<Shared> shared;  // in the order of gathers
  std::vector<int> of_group(in.residency->groups.size(), 0);
  int64_t largest = 0;
  for (size_t u = 0; u < gathers.size(); ++u) {
    if (!gathers[u].may_share) continue;
    Shared unit{.group = gathers[u].group, .updated = gathers[u].updated};
    const UnitPlacement& placement = pools.placement.units[u];
    for (int g = 0; g < placement.sub_groups; ++g) {
      const SubGroup& group =
          pools.placement.sub_groups[static_cast<size_t>(placement.first_sub_group + g)];
      if (!SharesMasters(*in.decisions, pools.placement, group)) continue;
      largest = std::max(largest, group.count());
      ++unit.sub_groups;
    }
    if (unit.sub_groups == 0) continue;
    of_group[static_cast<size_t>(unit.group)] += unit.sub_groups;
    shared.push_back(unit);
  }
  if (shared.empty()) return;
  std::sort(shared.begin(), shared.end(),
            [](const Shared& a, const Shared& b) { return a.group < b.group; });
  int count = 0;
  for (size_t i = 0; i < shared.size(); ++i) {
    const int group = shared[i].group;
    const int issue = in.residency->groups[static_cast<size_t>(group)].issue;
    int live = 0;
    size_t next = 0;
    for (; next < shared.size() && shared[next].group <= group; ++next) {
      if (shared[next].updated >= issue) live += shared[next].sub_groups;
    }
    if (next < shared.size()) live += of_group[static_cast<size_t>(shared[next].group)];
    count = std::max(count, live);
  }
  count = std::min(
      count, pools.parameter_slots.count * *std::max_element(of_group.begin(), of_group.end()));
  const int64_t bytes = SwapAligned(largest * in.decisions->MostOfUnits(&Decisions::master_size));
  const int64_t left =
      in.gather_slot_bytes - pools.parameter_slots.count * pools.parameter_slots.bytes;
  count = static_cast<int>(std::clamp<int64_t>(left / bytes, 0, count));
  pools.master_slots = {.count = count, .bytes = count > 0 ? bytes : 0, .first = {}};
}

}  // namespace

void LayOutSlots(const PoolInputs& in, Pools& pools, Bump& device, int64_t slice,
                 int64_t norm_blocks) {
  const Decisions& d = *in.decisions;
  if (!d.offloads()) return;
  Bump host;
  const auto on_host = [&](int64_t bytes) {
    return Place{
        .tier = Tier::kCpu, .pool = StateClass::kStaging, .offset = host.Take(SwapAligned(bytes))};
  };
  // Reads ahead of gathers: no more slots than a step uses, each as large as a step's or a walk's
  // largest.
  int64_t read_bytes = 0;
  int reads = 0;
  for (const Residency* residency : {in.residency, in.walk}) {
    if (residency == nullptr) continue;
    for (const GatherGroup& group : residency->groups) {
      if (group.from_secondary) continue;
      int64_t bytes = 0;
      for (int interval : group.intervals) {
        const int unit = residency->intervals[interval].unit;
        bytes += SwapBytes(pools.placement, unit, SizeOf(d.compute_of(unit)));
      }
      read_bytes = std::max(read_bytes, bytes);
      reads += bytes > 0 && residency == in.residency ? 1 : 0;
    }
  }
  if (reads > 0) {
    const int count = std::min(reads, in.parameter_slots);
    pools.parameter_slots = {
        .count = count, .bytes = read_bytes, .first = on_host(count * read_bytes)};
  }
  if (in.has_work_slots) LayOutMasterSlots(in, pools);
  if (pools.master_slots.count > 0)
    pools.master_slots.first = on_host(pools.master_slots.count * pools.master_slots.bytes);
  // Sub-groups.
  WorkNeeds needs[2];  // for updates on the device, on the host
  int64_t largest = 0, parameter_size = 0;
  for (const SubGroup& group : pools.placement.sub_groups) {
    if (!in.has_work_slots) break;
    const UnitPlacement& unit = pools.placement.units[static_cast<size_t>(group.unit)];
    const Tier parameter = PieceOf(unit.trainable, group.begin).place.tier;
    // Carried updates leave parameters in the slots that gathers read from.
    const bool swaps_parameter =
        parameter == Tier::kNvme && !d.carried[static_cast<size_t>(group.unit)];
    largest = std::max(largest, group.count());
    parameter_size = std::max(parameter_size, SizeOf(d.compute_of(group.unit)));
    if (group.tier == Tier::kDevice) {
      needs[0].gradient |= unit.gradient != Tier::kDevice;
      needs[1].gradient |= unit.gradient == Tier::kNvme;
      needs[0].parameter |= parameter != Tier::kDevice;
      needs[1].parameter |= swaps_parameter;
    } else {
      needs[1].states |= group.tier == Tier::kNvme;
      needs[1].gradient |= unit.gradient != Tier::kCpu;
      needs[1].parameter |= parameter == Tier::kDevice || swaps_parameter;
    }
  }
  const auto work = [&](const WorkNeeds& need) {
    WorkSlots slots;
    WorkSlot slot(largest);
    const int64_t master_size = d.MostOfUnits(&Decisions::master_size);
    slots.master = slot.Take(need.states && master_size > 0, master_size);
    slots.states_stride = slot.stride();
    slots.states = slot.Take(need.states, 4, d.optimizer_states);
    slots.gradient = slot.Take(need.gradient, 4);
    slots.parameter = slot.Take(need.parameter, parameter_size);
    slots.ring.bytes = slot.bytes();
    return slots;
  };
  if (needs[0].any()) {
    pools.device_work = work(needs[0]);
    pools.device_work.ring.count = 2;
    pools.device_work.ring.first = {.tier = Tier::kDevice,
                                    .pool = StateClass::kStaging,
                                    .offset = device.Take(2 * pools.device_work.ring.bytes)};
  }
  if (needs[1].any()) {
    pools.host_work = work(needs[1]);
    pools.host_work.ring.count = kWorkSlots;
    pools.host_work.ring.first = on_host(kWorkSlots * pools.host_work.ring.bytes);
  }
  // Gradients.
  int64_t landing = 0;
  for (const std::vector<int>& group : in.reduction->groups) {
    int64_t bytes = 0;
    for (int s : group) {
      const int unit = (*in.scopes)[s].unit;
      if (pools.placement.units[static_cast<size_t>(unit)].gradient != Tier::kDevice &&
          d.accumulates[static_cast<size_t>(unit)])
        bytes += PoolAligned(in.layout->units[static_cast<size_t>(unit)].trainable.shard *
                             SizeOf(d.communication_of(unit)));
    }
    landing = std::max(landing, bytes);
  }
  pools.landing = on_host(landing);
  pools.gradient_slots.first = on_host(pools.gradient_slots.count * pools.gradient_slots.bytes);
  pools.boundary_slots.first = on_host(pools.boundary_slots.count * pools.boundary_slots.bytes);
  pools.host_norm = on_host(norm_blocks * 8);
  if (const NormRecords norms = LayOutNormRecords(*in.layout, d); norms.sums > 0)
    pools.host_norm_sums = on_host(norms.sums * kNormSumsBytes);
  if (d.own_optimizer && d.optimizer_tier != Tier::kDevice) {
    pools.host_gradient = on_host(slice * 4);
    if (d.reads_any_parameters()) pools.host_master = on_host(slice * 4);
  }
  pools.host_bytes[static_cast<int>(StateClass::kStaging)] = host.end();
}

}  // namespace ebb::sharding
