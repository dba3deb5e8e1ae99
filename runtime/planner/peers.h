// The memory of the same model by the formulae of other programs, in bytes, without activations.
// P: parameters, L: parameters of the largest unit, N: ranks.
#pragma once

#include <array>
#include <cstdint>

namespace ebb::planner {

struct PeerModel {
  int64_t parameters = 0, largest_unit = 0;
  int ranks = 1, ranks_per_host = 1;
};

// ZeRO's table 1 (Rajbhandari et al., "ZeRO: memory optimizations toward training trillion
// parameter models", SC 2020, section 3), by stage: 2P parameters, 2P gradients and 12P states,
// each cut over N from stage 3, 2 and 1 on.
std::array<double, 4> ZeroTable(const PeerModel& model);

// DeepSpeed's estimate_zero2_model_states_mem_needs and estimate_zero3_model_states_mem_needs.
struct DeepSpeedEstimate {
  double gpu = 0;       // of a rank
  double host_ram = 0;  // of a host, with DeepSpeed's factor of 1.5
};
DeepSpeedEstimate DeepSpeedStage2(const PeerModel& model, bool offloads_optimizer);
DeepSpeedEstimate DeepSpeedStage3(const PeerModel& model, bool offloads_optimizer,
                                  bool offloads_parameters);

// FSDP2 with 16-bit compute: fp32 parameters, gradients and states are cut; two units and their
// gradients are whole.
double Fsdp2(const PeerModel& model);

}  // namespace ebb::planner
