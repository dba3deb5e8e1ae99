// The memory of the same model by the formulae of other programs, in bytes, without activations.
// P: parameters, L: parameters of the largest module or unit, N: ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ebb/runtime/planner/answer.h"

namespace ebb::planner {

struct PeerModel {
  int64_t parameters = 0;
  int64_t largest_module = 0;  // of DeepSpeed: those that one module itself owns, such as a matrix
  int64_t largest_unit = 0;    // of FSDP2: those that are gathered together, such as a block
  int ranks = 1, ranks_per_host = 1;
  int64_t compute_bytes = 2;  // of an element that is computed with
};

struct PeerEstimate {
  double gpu = 0;       // of a rank
  double host_ram = 0;  // of a host
  std::string program = "", remark = "";
};

// DeepSpeed's estimate_zero2_model_states_mem_needs and estimate_zero3_model_states_mem_needs, with
// their factor of 1.5 for RAM. DeepSpeed has no formula of stage 1: it is that of stage 2 with
// gradients that are not cut.
PeerEstimate DeepSpeed(const PeerModel& model, int stage, bool offloads_optimizer,
                       bool offloads_parameters = false);

// FSDP2: fp32 parameters, gradients and states are cut; two units and their
// gradients are whole. `offloads`: CPUOffloadPolicy keeps all that is cut in RAM.
PeerEstimate Fsdp2(const PeerModel& model, bool offloads);

// DistributedDataParallel: fp32 parameters, gradients and states, all whole. The gradients are views
// of its buckets.
PeerEstimate Ddp(const PeerModel& model);

// Whether the formulae are of such a training: of a model that trains whole, on GPUs, without tensor
// ranks.
bool HasPeers(const Question& question, const Choice& choice);
// The needs of the programs that have the answer's stage and offload.
std::vector<PeerEstimate> PeerEstimates(const Question& question, const Choice& choice);

}  // namespace ebb::planner
