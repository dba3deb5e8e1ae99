// Rows of what neighbouring operations hand on: on the device, and in host memory where something is
// kept below the device.
#include <algorithm>
#include <vector>

#include "ebb/runtime/base/newton_schulz_work.h"
#include "ebb/sharding/matrices.h"
#include "ebb/sharding/norm_records.h"
#include "ebb/sharding/passes/pool.h"
#include "ebb/sharding/passes/rows.h"

namespace ebb::sharding {
namespace {

// For the largest bucket, or as much as a piece of it needs: megabytes use the links well, and of
// many ranks each still sends no crumbs.
int64_t SumScratchBytes(int ranks, int64_t bucket) {
  constexpr int64_t kBytesMax = int64_t{64} << 20, kRankBytes = int64_t{256} << 10;
  const int64_t least = ranks * kPoolAlignment;  // a line a rank
  return std::min(PoolAligned(std::max(bucket, least)), std::max(kBytesMax, ranks * kRankBytes));
}

// A trainer's messages have any size, and pass in pieces of so much from each rank.
constexpr int64_t kTensorScratchOfRank = int64_t{1} << 20;

// Elements of the largest sub-group whose states, gradient or parameter pass through a slot on their
// way to its update.
struct WorkNeeds {
  int64_t states = 0, gradient = 0, parameter = 0;
  bool any() const { return std::max({states, gradient, parameter}) > 0; }
};

class StagingRows {
 public:
  StagingRows(const RowInputs& in, Table& table)
      : in_(in), d_(*in.decisions), table_(table), norms_(LayOutNormRecords(*in.layout, d_)) {
    for (const UnitLayout& unit : in.layout->units) {
      norm_blocks_ = std::max(norm_blocks_, (unit.trainable.shard + 1023) / 1024);
      const int64_t owned = d_.stage == 0 ? unit.trainable.elements : unit.trainable.shard;
      for (const PlacedParameter& p : unit.trainable.placements)
        slice_ = std::max(slice_, std::min(p.elements, owned));
    }
  }

  void OnDevice();
  void InHostMemory();

 private:
  void Add(Purpose purpose, Tier tier, int64_t bytes);
  void AddRing(Purpose purpose, int turns, int64_t turn_bytes);
  void AddWork(bool on_host, int turns);
  void AddMatrices();
  void AddDirections(bool on_host);
  void AddParameterSlots();
  void AddMasterSlots();
  WorkNeeds NeedsOf(bool on_host) const;
  // The most that a sub-group of any unit has.
  int64_t MasterBytes(int64_t elements) const {
    return d_.MostOfUnits([&](int unit) { return d_.MasterBytes(unit, elements); });
  }
  int64_t StateBytes(int state, int64_t elements) const {
    return d_.MostOfUnits([&](int unit) { return d_.StateBytes(unit, state, elements); });
  }

  const RowInputs& in_;
  const Decisions& d_;
  Table& table_;
  const NormRecords norms_;
  int64_t norm_blocks_ = 0;  // of the largest shard
  int64_t slice_ = 0;        // elements of the longest slice of a parameter
};

void StagingRows::Add(Purpose purpose, Tier tier, int64_t bytes) {
  if (bytes == 0) return;
  const bool by_tier = FactsOf(purpose).of == ArrayOf::kTier;
  table_.Add(
      {.purpose = purpose, .of = by_tier && tier != Tier::kDevice ? 1 : 0, .elements = bytes});
  table_.AddExtent({.begin = 0, .end = bytes, .place = {.tier = tier}});
}

void StagingRows::AddRing(Purpose purpose, int turns, int64_t turn_bytes) {
  if (turns == 0 || turn_bytes == 0) return;
  Add(purpose, Tier::kCpu, turn_bytes);
  table_.rows.back().turns = turns;
  table_.rows.back().turn_bytes = turn_bytes;
}

void StagingRows::OnDevice() {
  int64_t sent = 0, cast = 0, rounded = 0;
  for (const std::vector<int>& group : in_.reduction->groups) {
    int64_t whole = 0, slices = 0;
    for (int s : group) {
      const int unit = (*in_.scopes)[s].unit;
      const Section& section = SectionOf(*in_.layout, unit, /*trainable=*/true);
      whole += PoolAligned(section.elements * SizeOf(d_.reduced(unit)));
      slices += PoolAligned(section.shard * SizeOf(d_.communication_of(unit)));
    }
    const int first = (*in_.scopes)[group.front()].unit;
    sent = std::max(sent, whole);
    if (d_.casts(first)) cast = std::max(cast, whole);
    if (d_.rounds_slices(first)) rounded = std::max(rounded, slices);
  }
  Add(Purpose::kSentGradient, Tier::kDevice, cast);
  Add(Purpose::kRoundedSlice, Tier::kDevice, rounded);
  Add(Purpose::kNormScratch, Tier::kDevice, norm_blocks_ * 8);
  Add(Purpose::kRecords, Tier::kDevice, (d_.verdict_ranks + 1) * RecordBytes(d_));
  Add(Purpose::kNormSums, Tier::kDevice, norms_.sums * kNormSumsBytes);
  if (norms_.sums > 0 && norms_.exchanged())
    Add(Purpose::kNormRecords, Tier::kDevice, (norms_.ranks + 1) * norms_.bytes());
  if (d_.sums_in_scratch && sent > 0)
    Add(Purpose::kSumScratch, Tier::kDevice,
        SumScratchBytes(std::max(d_.world, d_.tensor_ranks()), sent));
  if (d_.tensor_sums_in_scratch)
    Add(Purpose::kTensorScratch, Tier::kDevice, d_.tensor_ranks() * kTensorScratchOfRank);
  if (d_.own_optimizer) Add(Purpose::kOwnGradient, Tier::kDevice, slice_ * 4);
  if (d_.own_optimizer && d_.reads_any_parameters())
    Add(Purpose::kOwnMaster, Tier::kDevice, slice_ * 4);
  if (d_.offloads()) AddWork(/*on_host=*/false, /*turns=*/2);
  AddMatrices();
}

void StagingRows::InHostMemory() {
  if (!d_.offloads()) return;
  AddParameterSlots();
  if (in_.has_work_slots) AddMasterSlots();
  AddWork(/*on_host=*/true, kWorkSlots);
  int64_t landing = 0;
  for (const std::vector<int>& group : in_.reduction->groups) {
    int64_t bytes = 0;
    for (int s : group) {
      const int unit = (*in_.scopes)[s].unit;
      const Tier gradient = in_.placement->units[unit].gradient;
      if (gradient != Tier::kDevice && d_.accumulates[unit])
        bytes += PoolAligned(SectionOf(*in_.layout, unit, /*trainable=*/true).shard *
                             SizeOf(d_.communication_of(unit)));
    }
    landing = std::max(landing, bytes);
  }
  Add(Purpose::kLanding, Tier::kCpu, landing);
  int64_t gradient = 0, output = 0;
  for (const Array& row : table_.rows) {
    if (row.elements == 0) continue;
    const Tier tier = table_.extents[row.first_extent].place.tier;
    if (row.purpose == Purpose::kGradientShard && tier == Tier::kNvme)
      gradient = std::max(gradient, SwapAligned(row.bytes()));
    if (row.purpose == Purpose::kOutputAway && tier == Tier::kNvme)
      output = std::max(output, SwapAligned(row.bytes()));
  }
  if (!d_.matrices.empty()) AddDirections(/*on_host=*/true);
  AddRing(Purpose::kGradientSlot, kGradientSlots, gradient);
  AddRing(Purpose::kOutputSlot, kOutputSlots, output);
  Add(Purpose::kNormScratch, Tier::kCpu, norm_blocks_ * 8);
  Add(Purpose::kNormSums, Tier::kCpu, norms_.sums * kNormSumsBytes);
  if (d_.own_optimizer && d_.optimizer_tier != Tier::kDevice) {
    Add(Purpose::kOwnGradient, Tier::kCpu, slice_ * 4);
    if (d_.reads_any_parameters()) Add(Purpose::kOwnMaster, Tier::kCpu, slice_ * 4);
  }
}

// No more slots than a step uses, each as large as a step's or a walk's largest group of gathers.
void StagingRows::AddParameterSlots() {
  int64_t slot_bytes = 0;
  int reads = 0;
  for (const Residency* residency : {in_.residency, in_.walk}) {
    if (residency == nullptr) continue;
    for (const GatherGroup& group : residency->groups) {
      if (group.from_secondary) continue;
      int64_t bytes = 0;
      for (int interval : group.intervals)
        bytes += SwapBytes(table_, residency->intervals[interval].unit);
      slot_bytes = std::max(slot_bytes, bytes);
      reads += bytes > 0 && residency == in_.residency ? 1 : 0;
    }
  }
  AddRing(Purpose::kParameterSlot, std::min(reads, in_.parameter_slots), slot_bytes);
}

// Slots for masters that a gather shares with an early update: for all units between their last
// gather and their update, and for one more that is read meanwhile. These slots serve as many
// groups of gathers as there are parameter slots, and take no more bytes than are left.
void StagingRows::AddMasterSlots() {
  struct Shared {
    int group = 0, updated = 0;
    int sub_groups = 0;
  };
  const std::vector<LastGather> gathers =
      FindLastGathers(*in_.scopes, *in_.residency, *in_.reduction, table_.units);
  std::vector<Shared> shared;  // in the order of gathers
  std::vector<int> of_group(in_.residency->groups.size(), 0);
  int64_t largest = 0;
  for (int u = 0; u < table_.units; ++u) {
    const LastGather& gather = gathers[u];
    if (!gather.may_share) continue;
    Shared unit{.group = gather.group, .updated = gather.updated};
    for (const SubGroup& group : table_.SubGroupsOf(u)) {
      if (!SharesMasters(d_, group, ParameterTierOf(table_, group))) continue;
      largest = std::max(largest, group.count());
      ++unit.sub_groups;
    }
    if (unit.sub_groups == 0) continue;
    of_group[unit.group] += unit.sub_groups;
    shared.push_back(unit);
  }
  if (shared.empty()) return;
  std::sort(shared.begin(), shared.end(),
            [](const Shared& a, const Shared& b) { return a.group < b.group; });
  int count = 0;
  for (size_t i = 0; i < shared.size(); ++i) {
    const int group = shared[i].group;
    const int issue = in_.residency->groups[group].issue;
    int live = 0;
    size_t next = 0;
    for (; next < shared.size() && shared[next].group <= group; ++next) {
      if (shared[next].updated >= issue) live += shared[next].sub_groups;
    }
    if (next < shared.size()) live += of_group[shared[next].group];
    count = std::max(count, live);
  }
  const int row = table_.Find(Purpose::kParameterSlot);
  const int64_t slots = row < 0 ? 0 : table_[row].turns,
                slot_bytes = row < 0 ? 0 : table_[row].turn_bytes;
  const int64_t bytes = SwapAligned(MasterBytes(largest)),
                left = in_.gather_slot_bytes - slots * slot_bytes;
  const int64_t served = slots * *std::max_element(of_group.begin(), of_group.end());
  AddRing(Purpose::kMasterSlot,
          static_cast<int>(std::clamp<int64_t>(left / bytes, 0, std::min<int64_t>(count, served))),
          bytes);
}

WorkNeeds StagingRows::NeedsOf(bool on_host) const {
  WorkNeeds needs;
  for (const SubGroup& group : table_.sub_groups) {
    const Tier gradient = in_.placement->units[group.unit].gradient,
               parameter = ParameterTierOf(table_, group);
    // Carried updates leave parameters in the slots that gathers read from.
    const bool swaps_parameter = parameter == Tier::kNvme && !d_.carried[group.unit];
    const auto take = [&group](int64_t& largest, bool needs_it) {
      if (needs_it) largest = std::max(largest, group.count());
    };
    if (group.tier == Tier::kDevice) {
      take(needs.gradient, on_host ? gradient == Tier::kNvme : gradient != Tier::kDevice);
      take(needs.parameter, on_host ? swaps_parameter : parameter != Tier::kDevice);
    } else if (on_host) {
      take(needs.states, group.tier == Tier::kNvme);
      take(needs.gradient, gradient != Tier::kCpu);
      take(needs.parameter, parameter == Tier::kDevice || swaps_parameter);
    }
  }
  return needs;
}

// The parts of a slot lie one behind the other in each of its turns.
void StagingRows::AddWork(bool on_host, int turns) {
  if (!in_.has_work_slots) return;
  const WorkNeeds needs = NeedsOf(on_host);
  if (!needs.any()) return;
  int64_t parameter_size = 0;
  for (const SubGroup& group : table_.sub_groups)
    parameter_size = std::max(parameter_size, SizeOf(d_.compute_of(group.unit)));
  const size_t first = table_.rows.size();
  int64_t turn_bytes = 0;
  const auto add = [&](Purpose purpose, int64_t of_largest, int state = 0) {
    const int64_t bytes = SwapAligned(of_largest);
    if (bytes == 0) return;
    Add(purpose, on_host ? Tier::kCpu : Tier::kDevice, bytes);
    table_.rows.back().state = state;
    table_.rows.back().behind = table_.rows.size() > first + 1;
    turn_bytes += bytes;
  };
  add(Purpose::kWorkMaster, MasterBytes(needs.states));
  for (int state = 0; state < d_.optimizer_states; ++state)
    add(Purpose::kWorkState, StateBytes(state, needs.states), state);
  add(Purpose::kWorkGradient, needs.gradient * 4);
  add(Purpose::kWorkParameter, needs.parameter * parameter_size);
  for (size_t row = first; row < table_.rows.size(); ++row) {
    table_.rows[row].turns = turns;
    table_.rows[row].turn_bytes = turn_bytes;
  }
}

// Muon's. While the matrices of one unit are computed, the parts of the next one come.
void StagingRows::AddMatrices() {
  if (d_.matrices.empty()) return;
  AddDirections(/*on_host=*/false);
  int64_t owned = 0, scratch = 0;
  for (const std::vector<OwnedMatrix>& matrices : d_.matrices) {
    owned = std::max(owned, OwnedElements(matrices) * SizeOf(d_.direction));
    for (const OwnedMatrix& matrix : matrices) {
      scratch = std::max(
          scratch, NewtonSchulzScratch(matrix.rows, matrix.columns, SizeOf(d_.direction)).bytes);
    }
  }
  if (d_.exchanges_matrices()) {
    Add(Purpose::kMatrices, Tier::kDevice, PoolAligned(owned));
    table_.rows.back().turns = kMatrixTurns;
    table_.rows.back().turn_bytes = PoolAligned(owned);
  }
  Add(Purpose::kIteration, Tier::kDevice, scratch);
}

void StagingRows::AddDirections(bool on_host) {
  int64_t elements = 0, of_sub_group = 0;
  for (const SubGroup& group : table_.sub_groups) {
    if (!d_.has_matrices(group.unit)) continue;
    const Section& section = in_.layout->units[group.unit].trainable;
    const bool is_here = (group.tier != Tier::kDevice) == on_host;
    if (is_here || !on_host)
      elements = std::max(elements, d_.stage == 0 ? section.elements : section.shard);
    if (is_here) of_sub_group = std::max(of_sub_group, group.count());
  }
  const Tier tier = on_host ? Tier::kCpu : Tier::kDevice;
  const int64_t bytes = PoolAligned(elements * SizeOf(d_.direction));
  Add(Purpose::kDirection, tier, bytes);
  if (bytes > 0) {
    table_.rows.back().turns = kMatrixTurns;
    table_.rows.back().turn_bytes = bytes;
  }
  if (d_.direction != DType::kFloat32) Add(Purpose::kWideDirection, tier, of_sub_group * 4);
}

}  // namespace

void AddStagingRows(const RowInputs& in, Table& table) {
  StagingRows rows(in, table);
  rows.OnDevice();
  rows.InHostMemory();
  if (in.model->workspace_bytes == 0) return;
  table.Add({.purpose = Purpose::kWorkspace, .elements = in.model->workspace_bytes});
  table.AddExtent({.begin = 0, .end = in.model->workspace_bytes});
}

}  // namespace ebb::sharding
