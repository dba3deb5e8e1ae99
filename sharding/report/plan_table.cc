#include "ebb/sharding/report/plan_table.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "ebb/sharding/waits.h"

namespace ebb::sharding {
namespace {

constexpr size_t kWidth = 140, kArrays = 54;  // columns of a line, and where its arrays begin

class PlanText {
 public:
  explicit PlanText(const Plan& plan) : plan_(plan) {
    for (const bool carrying : {true, false}) lists_.push_back(ListOf(plan, carrying));
    const OpList* const both[] = {&lists_[0], &lists_[1]};
    const Cells cells(both, plan);
    for (OpList& list : lists_) {
      list.round_begins.clear();  // the rounds are shown one after the other
      DeriveWaits(cells, list);
    }
  }

  std::string Run() {
    for (size_t m = 0; m < plan_.moments.size(); ++m) {
      const Moment& moment = plan_.moments[m];
      const int kernels = lists_.front().moments[m].kernels;
      const bool is_shown =
          kernels >= 0 ||
          std::any_of(plan_.ops.begin() + moment.begin, plan_.ops.begin() + moment.end,
                      [](const Op& op) { return op.number >= 0; });
      if (is_shown) absl::StrAppend(&text_, TitleOf(moment), "\n");
      for (int index = moment.begin; index < moment.end; ++index)
        if (plan_.ops[index].number >= 0) Add(plan_.ops[index]);
      if (kernels >= 0) AddKernels(kernels);
    }
    return std::move(text_);
  }

 private:
  using Texts = std::vector<std::string>;

  // F3: the forward of visit 3; behind the round where there are several (1:F3).
  std::string ScopeName(int scope) const {
    const PlannedScope& s = plan_.scopes[scope];
    const std::string round = plan_.decisions.rounds > 1 ? absl::StrCat(s.round, ":") : "";
    return absl::StrCat(round, s.backward ? "B" : s.recompute ? "R" : "F", s.visit);
  }
  std::string TitleOf(const Moment& moment) const {
    if (moment.kind == Moment::kBegin) return "The step begins.";
    if (moment.kind == Moment::kFinish) return "The step finishes.";
    const PlannedScope& scope = plan_.scopes[moment.scope];
    return absl::StrCat(
        ScopeName(moment.scope), ": the ", Name(KindOf(scope.backward, scope.recompute)), " of ",
        plan_.unit_names[scope.unit], moment.kind == Moment::kOpen ? " opens." : " closes.");
  }

  // The array at a place, and the place: "master of block0 (master+0x40)". Empty: a control cell.
  std::string ArrayAt(const Place& place) const {
    if (place.row < 0) return "";
    const Array& row = plan_.table[place.row];
    const PurposeFacts& facts = FactsOf(row.purpose);
    std::string name(row.trainable ? "" : "frozen ");
    absl::StrAppend(&name, std::string(facts.name));
    if (row.purpose == Purpose::kState || row.purpose == Purpose::kWorkState)
      absl::StrAppend(&name, " ", row.state);
    const bool of_visit = facts.of == ArrayOf::kVisit || (facts.of == ArrayOf::kGradientKey &&
                                                          plan_.decisions.keeps_step_gradients);
    if (of_visit) {
      absl::StrAppend(&name, " of visit ", row.of);
    } else if (facts.of != ArrayOf::kRank && facts.of != ArrayOf::kTier) {
      absl::StrAppend(&name, " of ", plan_.unit_names[row.of]);
    }
    const bool in_file = place.tier == Tier::kNvme;
    return absl::StrFormat("%s (%s%s+0x%x)", name, place.tier == Tier::kCpu ? "cpu " : "",
                           in_file ? "nvme" : std::string(Name(place.pool)), place.offset);
  }
  // Read arrays, an arrow, and written ones. An array that is read and written in the same place
  // stands among the written ones.
  Texts ArraysOf(std::span<const Operand> operands) const {
    Texts read, written;
    const auto add = [](Texts& to, std::string text) {
      if (!text.empty() && std::find(to.begin(), to.end(), text) == to.end())
        to.push_back(std::move(text));
    };
    for (const Operand& operand : operands)
      if (Writes(operand.access)) add(written, ArrayAt(operand.place));
    for (const Operand& operand : operands)
      if (operand.access == Access::kRead) add(read, ArrayAt(operand.place));
    if (!read.empty() && !written.empty()) absl::StrAppend(&read.back(), " ->");
    read.insert(read.end(), written.begin(), written.end());
    return read;
  }
  void Add(const Op& op) {
    std::vector<Texts> arrays;
    // From and to; of a unit; or all.
    const bool has_pairs = op.code() == Code::kCopy || op.code() == Code::kTransfer ||
                           op.code() == Code::kConvert || op.code() == Code::kRedistribute;
    const size_t units = std::max<size_t>(1, op.parts.size());
    const bool is_all_reduce =
        op.code() == Code::kRedistribute && MovementOf(op.role) == Movement::kAllReduce;
    const size_t each = is_all_reduce ? 1 : has_pairs ? 2 : op.operands.size() / units;
    for (size_t first = 0; first < op.operands.size(); first += each) {
      const size_t count = std::min(each, op.operands.size() - first);
      if (Texts of = ArraysOf(op.operands.subspan(first, count)); !of.empty())
        arrays.push_back(std::move(of));
    }
    Write(absl::StrFormat("%6d  %-16s  %-15s %10d", op.number, std::string(Name(op.role)),
                          std::string(Name(op.stream)), op.bytes),
          arrays, AfterOf(op.number));
  }
  void AddKernels(int index) {
    const Op& kernels = lists_.front().ops[index];
    Write(absl::StrFormat("%6s  %-16s  %-15s", "", "kernels", std::string(Name(kernels.stream))),
          {{absl::StrCat("of ", plan_.unit_names[plan_.scopes[kernels.scope].unit])}},
          Waited(lists_.front(), index));
  }

  Texts AfterOf(int number) const {
    for (const OpList& list : lists_)
      if (const int index = list.index_of[number]; index >= 0) return Waited(list, index);
    return {};
  }
  Texts Waited(const OpList& list, int index) const {
    Texts after;
    for (const int wait : list.waits[index].on) {
      const Op& other = list.ops[wait];
      after.push_back(other.scope >= 0    ? ScopeName(other.scope)
                      : other.number >= 0 ? absl::StrCat("#", other.number)
                                          : std::string(Name(other.role)));
    }
    if (!list.waits[index].enters.empty()) after.push_back("earlier steps");
    return after;
  }

  // The words of a line, and of as many more as they take.
  void Write(const std::string& head, const std::vector<Texts>& arrays, const Texts& after) {
    std::string line = head;
    const auto add = [&](const std::string& word, const char* between) {
      if (line.size() + word.size() + 3 > kWidth) {
        absl::StrAppend(&text_, line, *between == ',' ? ",\n" : "\n");
        line.clear();
      }
      if (line.size() < kArrays) {
        line.resize(kArrays, ' ');
        line += word;
      } else {
        absl::StrAppend(&line, between, word);
      }
    };
    for (const Texts& of : arrays) {
      if (&of != &arrays.front()) {
        absl::StrAppend(&text_, line, "\n");
        line.clear();
      }
      for (const std::string& word : of) add(word, line.ends_with("->") ? " " : ", ");
    }
    // On one line, if it fits on any.
    const std::string all = absl::StrCat("after ", absl::StrJoin(after, ", "));
    if (kArrays + all.size() + 3 <= kWidth) {
      if (!after.empty()) add(all, "; ");
    } else {
      for (const std::string& word : after)
        add(&word == &after.front() ? "after " + word : word,
            &word == &after.front() ? "; " : ", ");
    }
    absl::StrAppend(&text_, line, "\n");
  }

  const Plan& plan_;
  std::vector<OpList> lists_;
  std::string text_;
};

constexpr char kLegend[] =
    "  Each line: number, operation, stream, bytes; the arrays that it reads -> and writes, with "
    "their offsets in a pool\n"
    "  of the device, of RAM (cpu) or of a swap file (nvme); and what it comes after: #N operation "
    "N, F1 and B1 the kernels\n"
    "  of the forward and backward of visit 1 (0:F1 of round 0), or earlier steps.\n";
// For an order that is declared.
constexpr char kLegendOfRecompute[] = "  R1 are the kernels of a recompute of visit 1.\n";
constexpr char kLegendOfNested[] =
    "  Kernels behind a close are those of the scopes that are still open.\n";

// For units that DivideByDType has divided.
constexpr char kLegendOfParts[] =
    "  A name with brackets is a part of a unit: \"block0 [whole]\" are the parameters of block0 "
    "that "
    "each tensor rank has\n"
    "  whole, beside those that are cut over them; \"[whole, summed over tensor]\" those with "
    "sums_gradient; \"[fp32]\" those of\n"
    "  another dtype.\n";

std::string Legend(const Plan& plan) {
  std::string legend = kLegend;
  if (std::any_of(plan.unit_names.begin(), plan.unit_names.end(),
                  [](const std::string& name) { return name.ends_with(']'); }))
    absl::StrAppend(&legend, kLegendOfParts);
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
  const int tensor = plan.decisions.tensor_ranks();
  return absl::StrFormat(
      "Plan of a step: %d ranks%s, stage %d, %d rounds of %d micro-batches, updates %s (%s)\n",
      plan.decisions.verdict_ranks,
      tensor > 1 ? absl::StrCat(" (", plan.decisions.world, " data x ", tensor, " tensor)") : "",
      plan.decisions.stage, plan.step_rounds, plan.decisions.micro_batches_per_round,
      absl::string_view(timing.data(), timing.size()), plan.decisions.timing_reason);
}

std::string PlanTable(const Plan& plan) {
  return absl::StrCat(PlanHeadline(plan), Legend(plan), PlanText(plan).Run());
}

}  // namespace ebb::sharding
