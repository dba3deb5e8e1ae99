#include "ebb/sharding/report/plan_table.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/sharding/waits.h"

namespace ebb::sharding {
namespace {

using Row = std::array<std::string, 9>;
constexpr size_t kUnit = 3, kAfter = 6, kAddress = 8;

std::string ScopeName(const Plan& plan, int scope) {
  const PlannedScope& s = plan.scopes[scope];
  const std::string round = plan.decisions.rounds > 1 ? absl::StrCat(s.round, ":") : "";
  return absl::StrCat(round, s.backward ? "B" : s.recompute ? "R" : "F", s.visit);
}

std::string When(const Plan& plan, const Moment& moment) {
  switch (moment.kind) {
    case Moment::kBegin:
      return "begin";
    case Moment::kOpen:
      return absl::StrCat("open ", ScopeName(plan, moment.scope));
    case Moment::kClose:
      return absl::StrCat("close ", ScopeName(plan, moment.scope));
    case Moment::kFinish:
      return "finish";
  }
  return "";
}

// The waits that follow from a step's operands, with and without updates of the step before.
class Waits {
 public:
  explicit Waits(const Plan& plan) : plan_(plan) {
    for (const bool carrying : {true, false}) fragments_.push_back(Lower(plan, carrying));
    const Fragment* const both[] = {&fragments_[0], &fragments_[1]};
    const Cells cells(both, plan);
    for (Fragment& fragment : fragments_) {
      fragment.round_begins.clear();  // the rounds are shown one after the other
      DeriveWaits(cells, fragment);
    }
  }

  // A line holds as many as fit.
  std::vector<std::string> OfOperation(int operation) const {
    for (const Fragment& fragment : fragments_) {
      const int index = fragment.instruction_of[operation];
      if (index >= 0) return Lines(fragment, index);
    }
    return {};
  }
  // The kernels that begin with a moment; none while no scope is open.
  struct Kernels {
    int scope = 0;  // the newest open scope
    std::vector<std::string> after;
  };
  std::optional<Kernels> OfMoment(size_t moment) const {
    const Fragment& fragment = fragments_.front();
    const int kernels = fragment.moments[moment].kernels;
    if (kernels < 0) return std::nullopt;
    return Kernels{fragment.instructions[kernels].scope, Lines(fragment, kernels)};
  }

 private:
  std::vector<std::string> Lines(const Fragment& fragment, int index) const {
    const Instruction& instruction = fragment.instructions[index];
    std::vector<std::string> waits;
    for (int wait : instruction.waits) {
      const Instruction& other = fragment.instructions[wait];
      waits.push_back(other.scope >= 0       ? ScopeName(plan_, other.scope)
                      : other.operation >= 0 ? absl::StrCat("#", other.operation)
                                             : std::string(Name(other.code)));
    }
    if (!instruction.enters.empty()) waits.push_back("earlier");
    constexpr size_t kWidth = 28;
    std::vector<std::string> lines;
    for (const std::string& text : waits) {
      if (lines.empty() || lines.back().size() + 1 + text.size() > kWidth) {
        lines.push_back(text);
      } else {
        absl::StrAppend(&lines.back(), " ", text);
      }
    }
    return lines;
  }

  const Plan& plan_;
  std::vector<Fragment> fragments_;
};

// The pool's name, with its tier unless that is the device, and the offset there.
std::string Address(const Place& place) {
  const std::string_view tier = Name(place.tier), pool = Name(place.pool);
  std::string where(pool);
  if (place.tier == Tier::kCpu) where = absl::StrCat(std::string(tier), " ", where);
  if (place.tier == Tier::kNvme) where = std::string(tier);
  return absl::StrFormat("%s+0x%x", where, place.offset);
}

// The operand of part `p`: a reduction's or norm's input, an update's master, any other operation's
// output.
std::string Address(const Plan& plan, const Operation& operation, size_t p) {
  const Table& table = plan.table;
  const int unit = operation.parts[p].unit;
  switch (operation.kind) {
    case OperationKind::kGather:
    case OperationKind::kGatherSecondary:
      return Address(table.PlaceOf(WholeRow(table, unit, /*trainable=*/true)));
    case OperationKind::kFillSecondary:
      return Address(table.PlaceOf(table.Find(Purpose::kSecondary, unit)));
    case OperationKind::kRead:
    case OperationKind::kUpload:
    case OperationKind::kDownload:
    case OperationKind::kWrite:
      return Address(operation.moves().front().to);
    default: {
      const bool reads = operation.kind == OperationKind::kReduce ||
                         operation.kind == OperationKind::kAllReduce ||
                         operation.kind == OperationKind::kNorm;
      const size_t each = operation.operands.size() / operation.parts.size();
      return Address(operation.operands[p * each + (reads ? 0 : 1)].place);
    }
  }
}

// A line for each of the columns.
constexpr char kLegend[] =
    "  when       begin and finish of the step; open or close of a scope: F forward, B backward "
    "and the "
    "number of\n"
    "             the visit, behind the round's where there are several (1:B3)\n"
    "  operation  use: the compute stream may begin with the scope\n"
    "  after      what its stream waits for: #N operation N; B3 the kernels of that scope; earlier "
    "the "
    "last uses,\n"
    "             by earlier steps, of what it touches\n"
    "  address    offset in a pool of the device, or of RAM (cpu), or in the swap file (nvme)\n";
// For an order that is declared.
constexpr char kLegendOfRecompute[] =
    "             R, in when and after: a recompute of the visit\n";
constexpr char kLegendOfNested[] =
    "             use, when a scope closes: the compute stream goes on with what is still open\n";

std::string Legend(const Plan& plan) {
  std::string legend = kLegend;
  if (std::any_of(plan.scopes.begin(), plan.scopes.end(),
                  [](const PlannedScope& scope) { return scope.recompute; }))
    absl::StrAppend(&legend, kLegendOfRecompute);
  if (std::any_of(plan.scopes.begin(), plan.scopes.end(),
                  [](const PlannedScope& scope) { return scope.close_tick > scope.open_tick + 1; }))
    absl::StrAppend(&legend, kLegendOfNested);
  return legend;
}

}  // namespace

std::string PlanHeadline(const Plan& plan) {
  const std::string_view timing = Name(plan.decisions.timing);
  return absl::StrFormat(
      "Plan of a step: %d ranks, stage %d, %d rounds of %d micro-batches, updates %s (%s)\n",
      plan.decisions.world, plan.decisions.stage, plan.step_rounds,
      plan.decisions.micro_batches_per_round, absl::string_view(timing.data(), timing.size()),
      plan.decisions.timing_reason);
}

std::string PlanTable(const Plan& plan) {
  std::vector<Row> rows = {
      {"#", "when", "operation", "unit", "stage", "stream", "after", "bytes", "address"}};
  // The first line says all; those below it name the further units of a bucket, with their
  // addresses, and what else it comes after.
  const auto add = [&](Row row, const std::vector<std::string>& units,
                       const std::vector<std::string>& addresses,
                       const std::vector<std::string>& after) {
    const size_t lines = std::max({size_t{1}, units.size(), after.size()});
    for (size_t line = 0; line < lines; ++line) {
      if (line < units.size()) row[kUnit] = units[line];
      if (line < addresses.size()) row[kAddress] = addresses[line];
      if (line < after.size()) row[kAfter] = after[line];
      rows.push_back(std::exchange(row, Row()));
    }
  };
  const std::string stage = absl::StrCat(plan.decisions.stage);
  const Waits waits(plan);
  for (size_t m = 0; m < plan.moments.size(); ++m) {
    const Moment& moment = plan.moments[m];
    for (int index : moment.operations()) {
      const Operation& operation = plan.operations[index];
      std::vector<std::string> units, addresses;
      for (size_t p = 0; p < operation.parts.size(); ++p) {
        units.push_back(plan.unit_names[operation.parts[p].unit]);
        addresses.push_back(Address(plan, operation, p));
      }
      const std::string_view name = Name(operation.kind), stream = Name(operation.stream);
      add({absl::StrCat(index), When(plan, moment), std::string(name), "", stage,
           std::string(stream), "", absl::StrCat(operation.bytes), "-"},
          units, addresses, waits.OfOperation(index));
    }
    if (const auto kernels = waits.OfMoment(m)) {
      add({"", When(plan, moment), "use", "", stage, "compute", "", "", ""},
          {plan.unit_names[plan.scopes[kernels->scope].unit]}, {}, kernels->after);
    }
  }
  std::array<size_t, 9> widths{};
  for (const Row& row : rows) {
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string table = absl::StrCat(PlanHeadline(plan), Legend(plan));
  for (const Row& row : rows) {
    std::string line;
    for (size_t c = 0; c < row.size(); ++c) {
      const bool number = c == 0 || c == 7;
      const std::string padding(widths[c] - row[c].size(), ' ');
      absl::StrAppend(&line, c == 0 ? "" : "  ", number ? padding : "", row[c],
                      number ? "" : padding);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&table, line, "\n");
  }
  return table;
}

}  // namespace ebb::sharding
