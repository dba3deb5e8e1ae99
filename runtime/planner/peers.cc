#include "ebb/runtime/planner/peers.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace ebb::planner {
namespace {

constexpr double kFactor = 1.5;  // DeepSpeed's additional_buffer_factor

}  // namespace

PeerEstimate DeepSpeed(const PeerModel& model, int stage, bool offloads_optimizer,
                       bool offloads_parameters) {
  const auto p = static_cast<double>(model.parameters),
             largest = static_cast<double>(model.largest_module);
  const double all = model.ranks, here = model.ranks_per_host, hosts = std::max(1.0, all / here);
  PeerEstimate estimate{.program = "DeepSpeed's estimate"};
  if (stage < 3) {
    estimate.gpu = 2 * p + (offloads_optimizer ? 0 : 18 * p / all);
    estimate.host_ram = kFactor * p * (offloads_optimizer ? std::max(4 * all, 16.0) : 4 * here);
  } else if (offloads_optimizer) {
    estimate.gpu = 4 * largest + (offloads_parameters ? 0 : 2 * p / all);
    estimate.host_ram = kFactor * (offloads_parameters ? 18 : 16) * p / hosts;
  } else {
    estimate.gpu = 4 * largest + 18 * p / all;
    estimate.host_ram = kFactor * 4 * largest * here;
  }
  if (stage == 1) {
    // Stage 2 has a rank's 16-bit gradients on the GPU, or with offload none.
    estimate.gpu += 2 * p - (offloads_optimizer ? 0 : 2 * p / all);
    estimate.remark = "stage 2's with whole gradients";
  }
  return estimate;
}

PeerEstimate Fsdp2(const PeerModel& model, bool offloads) {
  const double cut = 16 * static_cast<double>(model.parameters) / model.ranks,
               whole = 4.0 * static_cast<double>(model.compute_bytes * model.largest_unit);
  if (!offloads) return {.gpu = cut + whole, .program = "FSDP2"};
  return {.gpu = whole, .host_ram = cut * model.ranks_per_host, .program = "FSDP2, CPU offload"};
}

PeerEstimate Ddp(const PeerModel& model) {
  return {.gpu = 16 * static_cast<double>(model.parameters), .program = "DDP"};
}

bool HasPeers(const Question& question, const Choice& choice) {
  return !question.machine.is_cpu && question.model.trains_whole() && choice.tensor == 1;
}

std::vector<PeerEstimate> PeerEstimates(const Question& question, const Choice& choice) {
  const PeerModel model{.parameters = question.model.parameters(),
                        .largest_module = question.model.largest_module(),
                        .largest_unit = question.model.largest_unit(),
                        .ranks = question.ranks,
                        .ranks_per_host = question.machine.ranks_per_host(question.ranks),
                        .compute_bytes = SizeOf(question.config.compute)};
  const bool states = choice.states != Tier::kDevice,
             parameters = choice.parameters != Tier::kDevice,
             is_on_nvme = choice.states == Tier::kNvme || choice.parameters == Tier::kNvme;
  std::vector<PeerEstimate> estimates;
  if (choice.stage == 0) estimates.push_back(Ddp(model));
  // DeepSpeed has no formula for parameters that are offloaded without states.
  if (choice.stage > 0 && (choice.stage < 3 || states || !parameters))
    estimates.push_back(DeepSpeed(model, choice.stage, states, parameters));
  for (PeerEstimate& estimate : estimates) {
    const auto remark = [&](const char* text) {
      absl::StrAppend(&estimate.remark, estimate.remark.empty() ? "" : "; ", text);
    };
    if (is_on_nvme) remark("it counts NVMe as RAM");
    if (choice.stage > 0 && model.compute_bytes != 2) remark("of 16-bit training");
  }
  estimates.push_back(Fsdp2(model, states || parameters));
  if (is_on_nvme) estimates.back().remark = "it has no NVMe";
  return estimates;
}

}  // namespace ebb::planner
