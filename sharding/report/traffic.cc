#include "ebb/sharding/report/traffic.h"

#include <algorithm>
#include <map>
#include <span>
#include <tuple>

namespace ebb::sharding {

TrafficRow RowOf(const Move& move) {
  const bool read = move.from.tier > move.to.tier;
  return {.state = move.state,
          .tier = std::max(move.from.tier, move.to.tier),
          .direction = read ? Direction::kRead : Direction::kWrite,
          .predicted_bytes = static_cast<uint64_t>(move.bytes)};
}

std::vector<TrafficRow> PredictTraffic(const Plan& plan, bool carrying, int rounds) {
  std::map<std::tuple<StateClass, Tier, Direction>, TrafficRow> rows;
  const auto add = [&](std::span<const Operation> operations, int times) {
    for (const Operation& operation : operations) {
      if (operation.condition == (carrying ? Condition::kNotCarrying : Condition::kCarrying))
        continue;
      for (const Move move : operation.moves()) {
        const TrafficRow of_move = RowOf(move);
        TrafficRow& row = rows[{of_move.state, of_move.tier, of_move.direction}];
        const uint64_t before = row.predicted_bytes;
        row = of_move;
        row.predicted_bytes = before + static_cast<uint64_t>(times) * of_move.predicted_bytes;
      }
    }
  };
  add(plan.operations, 1);
  add(plan.MiddleRound(), (rounds == 0 ? plan.step_rounds : rounds) - plan.decisions.rounds);
  std::vector<TrafficRow> table;
  for (const auto& [key, row] : rows) table.push_back(row);
  return table;
}

std::vector<CommunicationRow> CommunicationRows(BytesOfKind predicted, BytesOfKind moved) {
  const auto row = [&](std::string_view name, std::initializer_list<OperationKind> kinds) {
    CommunicationRow sum{.operation = name};
    for (const OperationKind kind : kinds) {
      sum.predicted_bytes += static_cast<uint64_t>(predicted(kind));
      sum.bytes += static_cast<uint64_t>(moved(kind));
    }
    return sum;
  };
  return {row("gather", {OperationKind::kGather, OperationKind::kRefresh}),
          row("gather_secondary", {OperationKind::kGatherSecondary}),
          row("reduce", {OperationKind::kReduce, OperationKind::kAllReduce}),
          row("gather_gradient", {OperationKind::kGatherGradient}),
          row("exchange", {OperationKind::kExchange, OperationKind::kExchangeNorms})};
}

std::vector<CommunicationRow> PredictCommunication(const Plan& plan) {
  return CommunicationRows([&](OperationKind kind) { return plan.BytesOf(kind); },
                           [](OperationKind) { return int64_t{0}; });
}

}  // namespace ebb::sharding
