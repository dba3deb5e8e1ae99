// A rank's work in a step: the model that it declares to the engine, and the device memory that the
// trainer takes for itself. Both follow only from options and configuration, so a run can be
// planned on a machine that is too small for it.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "command_line/options.h"
#include "ebb/runtime/config/config.h"
#include "model/layers.h"
#include "model/model.h"

namespace ebb::gpt {

struct Workload {
  ModelSpec spec;
  Gpt gpt;
  Layers::Options layers;
  int64_t sequences = 0;      // of a micro-batch
  int64_t micro_batches = 0;  // of a step
  int64_t passes = 0;         // over blocks, each with its own addresses or betas
  int64_t batches_bytes = 0;  // the start of the workspace; the rest is for the layers
};

// `config`: completed by Config::ForWorld. kInvalidArgument: no memory is so large.
absl::StatusOr<Workload> WorkloadOf(const Options& options, const Config& config,
                                    const Processor& processor);

int64_t ParametersOf(const ModelSpec& model);

}  // namespace ebb::gpt
