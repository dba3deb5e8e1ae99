// Runs peers.py, which trains the same tensors in PyTorch.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/planner/answer.h"

namespace ebb::bench {

// A peer's training, and Ebb's choice with the same shards and tiers.
struct Peer {
  const char* name;
  const char* kind;  // of peers.py
  planner::Choice choice;
};
inline constexpr Peer kPeers[] = {
    {"DDP", "ddp", {}},
    {"FSDP2", "fsdp2", {.stage = 3}},
    {"DeepSpeed 1", "deepspeed-1-device-device", {.stage = 1}},
    {"DeepSpeed 2", "deepspeed-2-device-device", {.stage = 2}},
    {"DeepSpeed 3", "deepspeed-3-device-device", {.stage = 3}},
    {"DeepSpeed 2, states in RAM", "deepspeed-2-device-cpu", {.stage = 2, .states = Tier::kCpu}},
    {"DeepSpeed 3, all in RAM",
     "deepspeed-3-cpu-cpu",
     {.stage = 3, .parameters = Tier::kCpu, .states = Tier::kCpu}},
    {"DeepSpeed 3, all on NVMe",
     "deepspeed-3-nvme-nvme",
     {.stage = 3, .parameters = Tier::kNvme, .states = Tier::kNvme}}};

struct PeerRun {
  int64_t peak = 0,
          idle = 0;  // bytes of the largest rank; idle: after a step of a tiny model
};

// `disk`: the folder for state on NVMe. Errors: the library is not installed, has failed, or has
// not ended in ten minutes.
absl::StatusOr<PeerRun> MeasurePeer(const std::string& python, const std::string& kind, int world,
                                    const planner::Model& model, const std::string& disk,
                                    int steps);

}  // namespace ebb::bench
