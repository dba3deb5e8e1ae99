#include "ebb/sharding/report/bound.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <vector>

namespace ebb::sharding {
namespace {

constexpr int kHostUpdate = kResources;  // behind the resources
using Seconds = std::array<double, kResources + 1>;

bool IsOfDisk(int r) {
  const auto resource = static_cast<Resource>(r);
  return r < kResources && (resource == Resource::kDiskRead || resource == Resource::kDiskWrite ||
                            resource == Resource::kDisk);
}

class BoundFinder {
 public:
  BoundFinder(const Plan& plan, const OpList& later, const Costs& costs)
      : plan_(plan), later_(later), costs_(costs), rates_(costs.rates()) {
    first_use_.assign(plan.layout.units.size(), kNever);
    last_use_.assign(plan.layout.units.size(), -1);
  }

  StepBound Run();

 private:
  static constexpr int kNever = std::numeric_limits<int>::max();
  // Kernels are numbered in their order. Work that comes after kernel `after` and before the next
  // step's kernel `before`.
  struct Between {
    int after = 0, before = 0;
    auto operator<=>(const Between&) const = default;
  };

  double TimesOf(int index) const;
  double DiskSeconds(const Seconds& seconds) const;
  Seconds SecondsOf(const Op& op) const;
  static void Add(double times, const Seconds& seconds, Seconds& to) {
    for (size_t line = 0; line < to.size(); ++line) to[line] += times * seconds[line];
  }
  void NumberKernels();
  bool IsOfUpdate(const Op& op, int kernels_before) const;
  Between BetweenOf(const Op& op) const;
  double HiddenBySlots(int line) const;
  void AddGather(const Op& op, double times, int kernels_before, const Seconds& seconds);
  Seconds HiddenByGathers() const;
  void FindOrder(StepBound& bound) const;

  const Plan& plan_;
  const OpList& later_;
  const Costs& costs_;
  const Amounts rates_;
  std::vector<double> until_ = {0};        // seconds of all kernels before the one of this number
  std::vector<int> first_use_, last_use_;  // by unit: numbers of kernels
  std::vector<int> unit_of_;               // by kernel
  std::map<Between, Seconds> work_;
  // Gathers that are not of an update, by the kernel that needs them first; and, of one of the bytes
  // that they bring, the most seconds of a read, an upload and a collective.
  std::vector<Seconds> gathers_;
  std::map<Role, Seconds> of_byte_;
};

// How often a step runs the operation.
double BoundFinder::TimesOf(int index) const {
  const bool repeats =
      later_.again > 0 && index >= later_.round_begins[0] && index < later_.round_begins[1];
  return repeats ? 1 + later_.again : 1;
}

// A read and a write at once slow down alike (ShareRates), as long as there are both. Then the others
// go on alone.
double BoundFinder::DiskSeconds(const Seconds& seconds) const {
  const double reads = seconds[static_cast<int>(Resource::kDiskRead)],
               writes = seconds[static_cast<int>(Resource::kDiskWrite)],
               of_both = rates_[Resource::kDiskRead] + rates_[Resource::kDiskWrite];
  if (reads <= 0 || writes <= 0) return seconds[static_cast<int>(Resource::kDisk)];
  const double speed = std::min(1.0, rates_[Resource::kDisk] / of_both);
  return std::min(reads, writes) / speed + std::abs(reads - writes);
}

Seconds BoundFinder::SecondsOf(const Op& op) const {
  const Cost cost = costs_.Of(op);
  Seconds seconds = {};
  double alone = cost.seconds;
  for (int r = 0; r < kResources; ++r) {
    const auto resource = static_cast<Resource>(r);
    if (cost.amounts[resource] <= 0) continue;
    seconds[r] = cost.amounts[resource] / rates_[resource];
    alone = std::max(alone, seconds[r]);
  }
  if (op.stream == StreamId::kHostUpdate) seconds[kHostUpdate] = alone;
  return seconds;
}

void BoundFinder::NumberKernels() {
  for (int index = 0; index < later_.size(); ++index) {
    const Op& op = later_.ops[index];
    if (op.code() != Code::kKernels || op.scope < 0 || op.goes_on) continue;
    const auto unit = static_cast<size_t>(plan_.scopes[op.scope].unit);
    const int number = static_cast<int>(until_.size()) - 1;
    first_use_[unit] = std::min(first_use_[unit], number);
    last_use_[unit] = number;
    unit_of_.push_back(plan_.scopes[op.scope].unit);
    const Seconds seconds = SecondsOf(op);
    until_.push_back(until_.back() +
                     TimesOf(index) * *std::max_element(seconds.begin(), seconds.end()));
  }
}

// Moves of parameters up to the unit's first forward are between its update and that too, and so are
// reductions and moves of its gradient behind its last backward.
bool BoundFinder::IsOfUpdate(const Op& op, int kernels_before) const {
  const auto moves = [&](StateClass content) { return op.operands.front().content == content; };
  switch (op.role) {
    case Role::kUpdate:
    case Role::kMomentum:
    case Role::kOrthogonalise:
      return true;
    case Role::kRead:
      return op.stream == StreamId::kReadStates;
    case Role::kWrite:
      return moves(StateClass::kMaster) || moves(StateClass::kOptimizer) ||
             moves(StateClass::kParameter);
    case Role::kCast:
    case Role::kReduce:
    case Role::kAllReduce:
    case Role::kRound:
    case Role::kAccumulate:
    case Role::kNorm:
      return kernels_before >= BetweenOf(op).after;
    case Role::kUpload:
    case Role::kDownload:
      if (moves(StateClass::kGradient)) return kernels_before >= BetweenOf(op).after;
      return moves(StateClass::kParameter) &&
             std::any_of(op.parts.begin(), op.parts.end(), [&](const Part& part) {
               const auto unit = static_cast<size_t>(part.unit);
               return kernels_before <= first_use_[unit] || kernels_before > last_use_[unit];
             });
    default:
      return false;
  }
}

BoundFinder::Between BoundFinder::BetweenOf(const Op& op) const {
  const int all = static_cast<int>(until_.size()) - 1;
  Between between{.after = all, .before = 0};
  for (const Part& part : op.parts) {
    const auto unit = static_cast<size_t>(part.unit);
    if (plan_.decisions.timing == UpdateTiming::kEarly)
      between.after = std::min(between.after, last_use_[unit] + 1);
    between.before = std::max(between.before, first_use_[unit]);
  }
  return between;
}

// The slots of transfers are full before, and are written after.
double BoundFinder::HiddenBySlots(int line) const {
  if (!IsOfDisk(line)) return 0;
  int64_t bytes = 0;
  for (const Array& row : plan_.table.rows) {
    const bool is_slot =
        row.purpose == Purpose::kParameterSlot || row.purpose == Purpose::kMasterSlot ||
        ((row.purpose == Purpose::kWorkMaster || row.purpose == Purpose::kWorkState ||
          row.purpose == Purpose::kWorkGradient || row.purpose == Purpose::kWorkParameter) &&
         !row.behind);
    if (is_slot && row.turns > 0) bytes += row.turns * row.turn_bytes;
  }
  const auto resource = static_cast<Resource>(line);
  const int ways = resource == Resource::kDisk ? 2 : 1;
  return rates_[resource] > 0 ? ways * static_cast<double>(bytes) / rates_[resource] : 0;
}

// A gather is over before the next kernel of its unit begins.
void BoundFinder::AddGather(const Op& op, double times, int kernels_before,
                            const Seconds& seconds) {
  const bool gathers =
      op.role == Role::kGather || op.stream == StreamId::kReadParameters ||
      (op.role == Role::kUpload && op.operands.front().content == StateClass::kParameter);
  if (!gathers || op.bytes <= 0) return;
  auto first = unit_of_.end();
  for (const Part& part : op.parts)
    first = std::min(first, std::find(unit_of_.begin() + kernels_before, first, part.unit));
  if (first == unit_of_.end()) return;
  Add(times, seconds, gathers_[first - unit_of_.begin()]);
  Seconds& most = of_byte_[op.role];
  for (size_t line = 0; line < most.size(); ++line)
    most[line] = std::max(most[line], seconds[line] / static_cast<double>(op.bytes));
}

// Gathers may have come before all of the kernels that they are for: as much as the device and the
// slots in RAM hold.
Seconds BoundFinder::HiddenByGathers() const {
  double bytes = static_cast<double>(plan_.table.bytes.Of(Tier::kDevice, StateClass::kGather));
  if (const int row = plan_.table.Find(Purpose::kParameterSlot); row >= 0)
    bytes += static_cast<double>(plan_.table[row].turns * plan_.table[row].turn_bytes);
  Seconds hidden = {};
  for (const auto& [role, seconds] : of_byte_) Add(bytes, seconds, hidden);
  return hidden;
}

// All work between the same kernels or closer ones, and the kernels of the rest of the step. Beside
// it come gathers for the kernels outside of that rest.
void BoundFinder::FindOrder(StepBound& bound) const {
  std::vector<std::pair<Between, Seconds>> by_after(work_.rbegin(), work_.rend());
  std::array<double, kResources + 1> hidden = {};
  for (int line = 0; line <= kResources; ++line) hidden[line] = HiddenBySlots(line);
  const Seconds hidden_gathers = HiddenByGathers();
  // By kernel: the sum of those for earlier kernels.
  std::vector<Seconds> gathers(gathers_.size() + 1, Seconds{});
  for (size_t kernel = 0; kernel < gathers_.size(); ++kernel) {
    gathers[kernel + 1] = gathers[kernel];
    Add(1, gathers_[kernel], gathers[kernel + 1]);
  }
  std::map<int, Seconds> by_before;  // of the work behind `after` and later kernels
  for (size_t i = 0; i < by_after.size(); ++i) {
    const auto& [between, seconds] = by_after[i];
    Seconds& sums = by_before[between.before];
    for (int line = 0; line <= kResources; ++line) sums[line] += seconds[line];
    if (i + 1 < by_after.size() && by_after[i + 1].first.after == between.after) continue;
    Seconds all = {};
    for (const auto& [before, of_before] : by_before) {
      if (before >= between.after) break;
      const double kernels = until_[between.after] - until_[before];
      for (int line = 0; line <= kResources; ++line) all[line] += of_before[line];
      Seconds with_gathers = all;
      Add(1, gathers.back(), with_gathers);
      Add(-1, gathers[between.after], with_gathers);
      Add(1, gathers[before], with_gathers);
      Seconds needed = all, needed_with = with_gathers;
      needed[static_cast<int>(Resource::kDisk)] = DiskSeconds(all);
      needed_with[static_cast<int>(Resource::kDisk)] = DiskSeconds(with_gathers);
      for (int line = 0; line <= kResources; ++line) {
        const double forced = kernels - hidden[line] +
                              std::max(needed[line], needed_with[line] - hidden_gathers[line]);
        if (forced <= bound.order) continue;
        bound.order = forced;
        bound.order_by = line;
      }
    }
  }
}

StepBound BoundFinder::Run() {
  NumberKernels();
  gathers_.assign(unit_of_.size(), Seconds{});
  StepBound bound{.awaits_verdict = plan_.decisions.timing == UpdateTiming::kLate};
  Seconds of_step = {};
  int kernels = 0;
  for (int index = 0; index < later_.size(); ++index) {
    const Op& op = later_.ops[index];
    const Seconds seconds = SecondsOf(op);
    const double times = TimesOf(index);
    for (int line = 0; line <= kResources; ++line) of_step[line] += times * seconds[line];
    if (op.code() == Code::kKernels) {
      if (op.scope >= 0 && !op.goes_on) ++kernels;
      continue;
    }
    if (op.parts.empty() || op.operands.empty()) continue;
    if (IsOfUpdate(op, kernels)) {
      Add(1, seconds, work_[BetweenOf(op)]);
    } else {
      AddGather(op, times, kernels, seconds);
    }
  }
  of_step[static_cast<int>(Resource::kDisk)] = DiskSeconds(of_step);
  std::copy_n(of_step.begin(), kResources, bound.resources.begin());
  bound.host_update = of_step[kHostUpdate];
  if (until_.size() > 1) FindOrder(bound);
  return bound;
}

}  // namespace

std::vector<std::pair<std::string, double>> StepBound::lines() const {
  std::vector<std::pair<std::string, double>> lines = {{"order", order},
                                                       {"host update", host_update}};
  for (int r = 0; r < kResources; ++r)
    lines.emplace_back(Name(static_cast<Resource>(r)), resources[r]);
  std::erase_if(lines, [](const auto& line) { return line.second <= 0; });
  std::stable_sort(lines.begin(), lines.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  return lines;
}

double StepBound::seconds() const {
  return std::max({*std::max_element(resources.begin(), resources.end()), host_update, order});
}

std::string StepBound::line() const {
  const auto all = lines();
  return all.empty() ? "" : all.front().first;
}

std::string StepBound::order_word() const {
  return order_by == kHostUpdate ? "host update"
                                 : std::string(Name(static_cast<Resource>(order_by)));
}

StepBound BoundOf(const Plan& plan, const OpList& later, const Costs& costs) {
  return BoundFinder(plan, later, costs).Run();
}

}  // namespace ebb::sharding
