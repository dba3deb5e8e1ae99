// The same tensors trained by PyTorch (peers.py), where it is installed for a Python.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/planner/model.h"

namespace ebb::bench {

struct Peer {
  const char* kind;
  int stage;  // Ebb's that cuts the same
};
inline constexpr Peer kPeers[] = {{"ddp", 0}, {"fsdp2", 3}};

struct PeerRun {
  std::string kind;
  int world = 1;
  int64_t peak = 0,
          idle = 0;  // bytes of the rank that has most; idle: after a step of a tiny model
};

// Errors: the library is not there, has failed, or has not ended in ten minutes.
absl::StatusOr<PeerRun> MeasurePeer(const std::string& python, const std::string& kind, int world,
                                    const planner::Model& model, int steps);

}  // namespace ebb::bench
