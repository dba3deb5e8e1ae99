#include "ebb/sharding/fit/advice.h"

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/fit/advice_settings.h"
#include "ebb/sharding/fit/budget.h"
#include "ebb/sharding/memory_model.h"
#include "ebb/sharding/placement.h"
#include "ebb/sharding/state_pieces.h"

namespace ebb::sharding {
namespace {

class Search {
 public:
  Search(const Config& config, const MemoryCaps& caps, const AdviceTrials& trials)
      : config_(config), start_(config), caps_(caps), trials_(trials) {}

  FoundAdvice Run() {
    absl::StatusOr<Table> table = trials_.lay_out(start_);
    if (!table.ok()) return {.text = std::string(caps_.relief)};
    now_ = NeedOf(table->bytes);
    // The advised host_memory must not exceed the host's memory, so states do not fill it.
    if (const int64_t room = HostRoom();
        !caps_.of_config && room > 0 && room < start_.ebb.host_memory.value_or(0)) {
      start_.ebb.host_memory = room;
      const std::optional<Need> lower = TryOf(start_);
      if (lower && lower->over == 0) return Fits({}, start_);
      start_.ebb.host_memory.reset();  // only what must be there counts, no states that could move
      table = trials_.lay_out(start_);
      if (!table.ok()) return {.text = std::string(caps_.relief)};
      now_ = NeedOf(table->bytes);
      if (now_.over == 0) return Fits({}, start_);
    }
    settings_ = SettingsOf(start_, *table, trials_.sums_depend_on_groups);
    units_ = std::max(1, table->units);
    work_left_ = std::max(kAdviceTrialsMin * units_, kAdviceWorkMax);
    least_ = now_;
    std::vector<Candidate> candidates = Candidates();
    if (const std::optional<Candidate> fits = FirstThatFits(candidates))
      return Fits(*fits, With(*fits));
    FindLeast(std::move(candidates));
    const Config changed = With(with_least_);
    if (least_.over == 0) return Fits(with_least_, changed);
    const std::string wanted = absl::StrCat(
        std::string(caps_.relief), ", or take smaller units, a smaller micro-batch or more ",
        caps_.of_config ? "ranks" : "hosts");
    if (changed == start_) return {.text = "no other setting needs less: " + wanted};
    return {.text = absl::StrCat("no setting fits; the least, ", Shown(least_, /*fills=*/false),
                                 ", is with ", Described(config_, Capped(changed, least_)),
                                 Warning(with_least_), ": ", wanted)};
  }

 private:
  struct Need {
    int64_t device = 0, host = 0, disk = 0;  // bytes
    int64_t over = 0;                        // bytes above the caps, by what they cost
  };
  struct Candidate {
    uint64_t choices = 0;  // a digit of kChoices for each setting; 0: as given
    int keys = 0, cost = 0;
    bool changes_numbers = false;
    // A lower bound of the bytes beyond the caps; INT64_MAX when nothing is left to try.
    int64_t over = INT64_MAX;
  };
  static constexpr uint64_t kChoices = 16;

  // In the order of the candidates; one that takes more of the device, whose room is not known,
  // only if no other fits. The others keep their lower bounds.
  std::optional<Candidate> FirstThatFits(std::vector<Candidate>& candidates) {
    std::optional<Candidate> growing;
    for (Candidate& candidate : candidates) {
      if (work_left_ <= 0 || (candidate.changes_numbers && growing)) break;
      const Config changed = With(candidate);
      if (!MakesSense(start_, changed)) continue;
      candidate.over = OverAtLeast(changed);
      if (candidate.over > 0) continue;
      candidate.over = INT64_MAX;
      const std::optional<Need> need = TryOf(changed);
      if (!need) continue;
      if (need->over == 0 && !Grows(*need)) return candidate;
      if (need->over == 0 && !growing) growing = candidate;
      Keep(candidate, *need, least_.over - 1);
    }
    return growing;
  }

  // Nothing fits. The lowest lower bound is tried first, until no other one is lower than a need
  // that is known. Without work left, the settings that save by themselves are tried together.
  // Then the changes that save nothing are left out.
  void FindLeast(std::vector<Candidate> candidates) {
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const Candidate& a, const Candidate& b) { return a.over < b.over; });
    for (const Candidate& candidate : candidates) {
      if (work_left_ <= 0 || candidate.over >= least_.over) break;
      Try(candidate, least_.over - 1);
    }
    for (const bool changes_numbers : {false, true}) {
      if (work_left_ <= 0 && least_.over > 0) Try(AllTogether(changes_numbers), least_.over - 1);
    }
    for (uint64_t place = 1, s = 0; s < settings_.size(); ++s, place *= kChoices) {
      const uint64_t digit = with_least_.choices / place % kChoices;
      if (digit > 0) Try(CandidateOf(with_least_.choices - digit * place), least_.over);
    }
  }

  void Try(const Candidate& candidate, int64_t over_most) {
    const Config changed = With(candidate);
    if (!MakesSense(start_, changed)) return;
    if (const std::optional<Need> need = TryOf(changed)) Keep(candidate, *need, over_most);
  }
  void Keep(const Candidate& candidate, const Need& need, int64_t over_most) {
    if (need.over > over_most || (need.over == 0 && Grows(need))) return;
    least_ = need;
    with_least_ = candidate;
  }

  // Calls `visit` with each choice that is made.
  template <class Visitor>
  void ForEachChoice(uint64_t choices, const Visitor& visit) const {
    for (const Setting& setting : settings_) {
      if (const uint64_t digit = choices % kChoices; digit > 0) visit(setting[digit - 1]);
      choices /= kChoices;
    }
  }
  Candidate CandidateOf(uint64_t choices) const {
    Candidate candidate{.choices = choices};
    ForEachChoice(choices, [&](const Choice& choice) {
      candidate.keys += choice.keys;
      candidate.cost += choice.cost;
      candidate.changes_numbers |= choice.changes_numbers;
    });
    return candidate;
  }
  Config With(const Candidate& candidate) const {
    Config changed = start_;
    ForEachChoice(candidate.choices, [&](const Choice& choice) { choice.make(changed); });
    GiveFolders(changed);
    return changed;
  }

  // All combinations: first those that keep the numbers, and among these the smallest change.
  std::vector<Candidate> Candidates() const {
    std::vector<Candidate> candidates = {{}};
    uint64_t place = 1;
    for (const Setting& setting : settings_) {
      const size_t before = candidates.size();
      for (uint64_t digit = 1; digit <= setting.size(); ++digit) {
        for (size_t c = 0; c < before; ++c)
          candidates.push_back(CandidateOf(candidates[c].choices + digit * place));
      }
      place *= kChoices;
    }
    candidates.erase(candidates.begin());
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const Candidate& a, const Candidate& b) {
                       return std::tuple(a.changes_numbers, a.keys, a.cost) <
                              std::tuple(b.changes_numbers, b.keys, b.cost);
                     });
    return candidates;
  }
  // For each setting, the choice that needs the fewest bytes by itself.
  Candidate AllTogether(bool changes_numbers) const {
    uint64_t choices = 0, place = 1;
    for (const Setting& setting : settings_) {
      uint64_t digit = setting.size();
      while (digit > 0 && !(setting[digit - 1].saves &&
                            (changes_numbers || !setting[digit - 1].changes_numbers)))
        --digit;
      choices += place * digit;
      place *= kChoices;
    }
    return CandidateOf(choices);
  }

  Need NeedOf(const PoolBytes& pools) const {
    const auto over = [](int64_t bytes, std::optional<int64_t> cap) {
      return cap ? std::max<int64_t>(0, bytes - *cap) : 0;
    };
    // The config's caps do not count it.
    const int64_t staging =
        caps_.of_config ? 0 : StateStagingBytes(pools, /*has_gpu=*/!caps_.together.has_value());
    Need need{.device = DeviceBytes(pools), .host = HostBytes(pools), .disk = DiskBytes(pools)};
    // A byte of a disk counts less than one of memory, because it costs less.
    constexpr int64_t kDiskBytes = 16;
    need.over = std::max(over(need.device, caps_.device) + over(need.host + staging, caps_.host),
                         over(need.device + need.host + staging, caps_.together)) +
                (over(need.disk, caps_.disk) + kDiskBytes - 1) / kDiskBytes;
    return need;
  }
  std::optional<Need> TryOf(const Config& changed) {
    const absl::StatusOr<Table> table = trials_.lay_out(changed);
    work_left_ -= units_;
    if (!table.ok()) return std::nullopt;
    work_left_ -= static_cast<int64_t>(table->sub_groups.size()) / kSubGroupsOfAUnit;
    return NeedOf(table->bytes);
  }
  // Bytes beyond the caps; INT64_MAX if the plan cannot be laid out.
  int64_t OverAtLeast(const Config& changed) {
    absl::StatusOr<Table> table = trials_.lay_out_least(changed);
    work_left_ -= units_;
    if (!table.ok()) return INT64_MAX;
    // The least table has all states in files, but RAM or the device may hold some of them.
    if (changed.ebb.host_memory || changed.zero.offload_optimizer.ratio != 1)
      table->bytes.On(Tier::kNvme) = {};
    return NeedOf(table->bytes).over;
  }

  // The device's room is not known then, so such a change is advised last.
  bool Grows(const Need& need) const {
    return !caps_.device && !caps_.together && need.device > now_.device;
  }

  // The caps' sizes, for pools in host memory beside staging and the pools on the device, in whole
  // MiB.
  int64_t HostRoom() const {
    int64_t room = caps_.host.value_or(INT64_MAX);
    if (caps_.together) room = std::min(room, std::max<int64_t>(0, *caps_.together - now_.device));
    if (!caps_.of_config && room < INT64_MAX) room -= 2 * kStateStagingBytes;
    return std::max<int64_t>(0, room) >> 20 << 20;
  }
  // A cap that the search left out is a cap again, as large as the need.
  Config Capped(Config changed, const Need& need) const {
    if (config_.ebb.host_memory && !changed.ebb.host_memory)
      changed.ebb.host_memory = std::max<int64_t>(need.host, 1);
    return changed;
  }

  std::string Shown(const Need& need, bool fills) const {
    return absl::StrCat(
        SizeText(need.device), " on the device and ", fills ? "at least " : "", SizeText(need.host),
        " in host memory",
        caps_.disk && need.disk > 0 ? absl::StrCat(" and ", SizeText(need.disk), " on NVMe") : "");
  }
  static absl::string_view Warning(const Candidate& candidate) {
    if (!candidate.changes_numbers) return "";
    return ", but changes the numbers (sums of gradients are rounded otherwise)";
  }
  // Lowers a setting no further than it must.
  FoundAdvice Fits(const Candidate& candidate, Config changed) {
    Loosen(changed, [](Config& c) -> int64_t& { return c.ebb.micro_batches_per_round; });
    Loosen(changed, [](Config& c) -> int64_t& { return c.ebb.prefetch_depth; });
    Loosen(changed, [](Config& c) -> int64_t& { return c.zero.sub_group_size; });
    const Need need = *TryOf(changed);
    changed = Capped(changed, need);
    // States that would be on NVMe fill the room below a cap.
    const bool fills = changed.optimizer_tier() == Tier::kNvme &&
                       changed.ebb.host_memory.value_or(need.host) > need.host;
    const std::string keys = Described(config_, changed);
    return {.text = absl::StrCat(
                keys, " would fit", Grows(need) ? " if the device has room for it" : "", " (",
                Shown(need, fills), ")", Warning(candidate), ", or ", std::string(caps_.relief)),
            .config = std::move(changed),
            .keys = keys};
  }
  void Loosen(Config& changed, int64_t& (*number)(Config&)) {
    Config given = start_;
    Config looser = changed;
    while (number(changed) < number(given) / 2) {
      number(looser) = std::max<int64_t>(1, 2 * number(changed));
      if (looser.gradient_accumulation_steps % looser.ebb.micro_batches_per_round != 0) return;
      const std::optional<Need> need = TryOf(looser);
      if (!need || need->over > 0 || (Grows(*need) && !Grows(*TryOf(changed)))) return;
      changed = looser;
    }
  }

  const Config& config_;
  Config start_;  // changes are made to this one
  const MemoryCaps& caps_;
  const AdviceTrials& trials_;
  std::vector<Setting> settings_;
  int64_t units_ = 1, work_left_ = 0;
  Need now_, least_;
  Candidate with_least_;
};

}  // namespace

int64_t SmallSubGroup(const Table& table) {
  constexpr int64_t kSubGroups = 256;
  int64_t elements = 0;
  for (const SubGroup& group : table.sub_groups) elements += group.count();
  const int64_t cuts = std::max<int64_t>(1, elements / kSubGroups / kCutElements);
  return std::max(std::min(cuts * kCutElements, kSubGroupElementsMin),
                  SubGroupElementsLeast(elements));
}

MemoryCaps CapsOf(const Config& config) {
  return {.device = config.ebb.device_memory, .host = config.ebb.host_memory};
}

MemoryCaps CapsOf(const Config& config, const HostRoom& room) {
  MemoryCaps caps{.device = config.ebb.device_memory, .of_config = false, .relief = "free memory"};
  const int64_t of_pools =
      room.bytes_of_rank() - HostRoom::BesidePools(room.bytes_of_rank()) - room.save;
  if (room.holds_device) {
    caps.together = of_pools + room.untouched;
  } else {
    caps.host = of_pools;
  }
  return caps;
}

FoundAdvice FindAdvice(const Config& config, const MemoryCaps& caps, const AdviceTrials& trials) {
  return Search(config, caps, trials).Run();
}

}  // namespace ebb::sharding
