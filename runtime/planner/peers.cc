#include "ebb/runtime/planner/peers.h"

#include <algorithm>

namespace ebb::planner {
namespace {

constexpr double kFactor = 1.5;  // DeepSpeed's additional_buffer_factor

}  // namespace

std::array<double, 4> ZeroTable(const PeerModel& model) {
  const auto p = static_cast<double>(model.parameters);
  const double n = model.ranks;
  return {16 * p, 4 * p + 12 * p / n, 2 * p + 14 * p / n, 16 * p / n};
}

DeepSpeedEstimate DeepSpeedStage2(const PeerModel& model, bool offloads_optimizer) {
  const auto p = static_cast<double>(model.parameters);
  const double all = model.ranks, here = model.ranks_per_host;
  if (offloads_optimizer) return {.gpu = 2 * p, .host_ram = kFactor * p * std::max(4 * all, 16.0)};
  return {.gpu = 2 * p + 18 * p / all, .host_ram = kFactor * p * 4 * here};
}

DeepSpeedEstimate DeepSpeedStage3(const PeerModel& model, bool offloads_optimizer,
                                  bool offloads_parameters) {
  const auto p = static_cast<double>(model.parameters),
             largest = static_cast<double>(model.largest_unit);
  const double all = model.ranks, here = model.ranks_per_host, hosts = std::max(1.0, all / here);
  if (!offloads_optimizer)
    return {.gpu = 4 * largest + 18 * p / all, .host_ram = kFactor * 4 * largest * here};
  return {.gpu = 4 * largest + (offloads_parameters ? 0 : 2 * p / all),
          .host_ram = kFactor * (offloads_parameters ? 18 : 16) * p / hosts};
}

double Fsdp2(const PeerModel& model) {
  return 16 * static_cast<double>(model.parameters) / model.ranks +
         8 * static_cast<double>(model.largest_unit);
}

}  // namespace ebb::planner
