#include "ebb/sharding/plan_table.h"

#include <algorithm>
#include <array>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace ebb::sharding {
namespace {

using Row = std::array<std::string, 9>;

std::string ScopeName(const Plan& plan, int scope) {
  const PlannedScope& s = plan.scopes[scope];
  const std::string round = plan.decisions.rounds > 1 ? absl::StrCat(s.round, ":") : "";
  return absl::StrCat(round, s.backward ? "B" : "F", s.visit);
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

std::string After(const Plan& plan, const std::vector<Dependency>& after) {
  return absl::StrJoin(after, " ", [&](std::string* out, const Dependency& dependency) {
    switch (dependency.kind) {
      case Dependency::kOperation:
        absl::StrAppend(out, "#", dependency.index);
        break;
      case Dependency::kUpdated:
        absl::StrAppend(out, "updated(", plan.unit_names[dependency.index], ")");
        break;
      case Dependency::kExchanged:
        absl::StrAppend(out, "exchanged");
        break;
    }
  });
}

std::string Address(const Plan& plan, const Operation& operation) {
  if (operation.parts.empty()) return "-";
  const Part& part = operation.parts.front();
  const UnitAddresses& unit = plan.pools.units[part.unit];
  const auto at = [](std::string_view pool, int64_t offset) {
    return absl::StrFormat("%s+0x%x", absl::string_view(pool.data(), pool.size()), offset);
  };
  switch (operation.kind) {
    case OperationKind::kMark:
    case OperationKind::kExchange:
      return "-";
    case OperationKind::kGather:
      return at("gather", unit.gather_trainable);
    case OperationKind::kCast:
      return at("staging", plan.pools.staging_cast);
    case OperationKind::kReduce:
      return at("gradient", plan.pools.visits[plan.scopes[part.scope].visit].gradient);
    case OperationKind::kAccumulate:
    case OperationKind::kNorm:
    case OperationKind::kGatherGradient:
      return at("gradient", unit.gradient_shard);
    case OperationKind::kUpdate:
      return plan.decisions.compute == DType::kFloat32 ? at("parameter", unit.parameter_trainable)
                                                       : at("master", unit.master);
    case OperationKind::kRefresh:
      return at("parameter", unit.parameter_trainable);
  }
  return "-";
}

}  // namespace

std::string PlanTable(const Plan& plan) {
  std::vector<Row> rows = {
      {"#", "when", "operation", "unit", "stage", "stream", "after", "bytes", "address"}};
  for (const Moment& moment : plan.moments) {
    for (int index : moment.operations) {
      const Operation& operation = plan.operations[index];
      std::vector<std::string> units;
      for (const Part& part : operation.parts) units.push_back(plan.unit_names[part.unit]);
      const std::string_view name = Name(operation.kind), stream = Name(operation.stream);
      rows.push_back({absl::StrCat(index), When(plan, moment), std::string(name),
                      absl::StrJoin(units, "+"), absl::StrCat(plan.decisions.stage),
                      std::string(stream), After(plan, operation.after),
                      absl::StrCat(operation.bytes), Address(plan, operation)});
    }
    if (moment.kind == Moment::kOpen) {
      const std::string unit = plan.unit_names[plan.scopes[moment.scope].unit];
      rows.push_back({"", When(plan, moment), "use", unit, absl::StrCat(plan.decisions.stage),
                      "compute", After(plan, moment.compute), "", ""});
    }
  }
  std::array<size_t, 9> widths{};
  for (const Row& row : rows) {
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  const std::string_view timing = Name(plan.decisions.timing);
  std::string table = absl::StrFormat(
      "Plan of a step: %d ranks, stage %d, %d rounds of %d micro-batches, updates %s (%s)\n",
      plan.decisions.world, plan.decisions.stage, plan.decisions.rounds,
      plan.decisions.micro_batches_per_round, absl::string_view(timing.data(), timing.size()),
      plan.decisions.timing_reason);
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
