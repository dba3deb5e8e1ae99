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
  const auto add = [&](std::span<const Op> ops, int times) {
    for (const Op& op : ops) {
      if (!op.runs(carrying)) continue;
      for (const Move move : op.moves()) {
        const TrafficRow of_move = RowOf(move);
        TrafficRow& row = rows[{of_move.state, of_move.tier, of_move.direction}];
        const uint64_t before = row.predicted_bytes;
        row = of_move;
        row.predicted_bytes = before + static_cast<uint64_t>(times) * of_move.predicted_bytes;
      }
    }
  };
  add(plan.ops, 1);
  add(plan.MiddleRound(), (rounds == 0 ? plan.step_rounds : rounds) - plan.decisions.rounds);
  std::vector<TrafficRow> table;
  for (const auto& [key, row] : rows) table.push_back(row);
  return table;
}

std::vector<CommunicationRow> CommunicationRows(BytesOfRole predicted, BytesOfRole moved) {
  const auto row = [&](std::string_view name, std::initializer_list<Role> roles) {
    CommunicationRow sum{.operation = name};
    for (const Role role : roles) {
      sum.predicted_bytes += static_cast<uint64_t>(predicted(role));
      sum.bytes += static_cast<uint64_t>(moved(role));
    }
    return sum;
  };
  std::vector<CommunicationRow> rows = {
      row("gather", {Role::kGather, Role::kRefresh}),
      row("gather_secondary", {Role::kGatherSecondary}),
      row("reduce", {Role::kSumTensor, Role::kReduce, Role::kAllReduce}),
      row("gather_gradient", {Role::kGatherGradient}),
      row("exchange", {Role::kExchange, Role::kExchangeNorms})};
  const CommunicationRow tensor = row("tensor", {Role::kScopes});
  if (tensor.predicted_bytes + tensor.bytes > 0) rows.push_back(tensor);
  return rows;
}

std::vector<CommunicationRow> PredictCommunication(const Plan& plan) {
  return CommunicationRows([&](Role role) { return plan.BytesOf(role); },
                           [](Role) { return int64_t{0}; });
}

}  // namespace ebb::sharding
