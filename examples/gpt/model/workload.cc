#include "model/workload.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "data/batches.h"

namespace ebb::gpt {
namespace {

constexpr char kVectorGroup[] =
    "no_decay";  // for norms and biases, if the configuration has such a group

// Above this, sums of sizes would not fit in 64 bits.
constexpr double kBytesMax = 0x1p60;

// At least the memory of the slots and of one block's activations; the rest is of that order.
double LeastBytes(const GptShape& shape, double rows, double slots, double micro_batches) {
  const double width = static_cast<double>(shape.width);
  return rows * (width * (9 * slots + 10) * 4 + 16 * micro_batches);
}

}  // namespace

absl::StatusOr<Workload> WorkloadOf(const Options& options, const Config& config,
                                    const Processor& processor) {
  const GptShape& shape = options.shape;
  Workload work = {.spec = {},
                   .gpt = {},
                   .layers = {},
                   .sequences = config.micro_batch_size,
                   .micro_batches = config.gradient_accumulation_steps};
  const int64_t per_round = config.ebb.micro_batches_per_round > 0
                                ? std::min(config.ebb.micro_batches_per_round, work.micro_batches)
                                : work.micro_batches;
  const double slots =
      options.recompute ? 1 : static_cast<double>(per_round) * static_cast<double>(shape.layers);
  const TensorSplit tensor = {
      .ranks = static_cast<int>(config.ebb.mesh.tensor),
      .divides_rows = options.sequence_parallel && config.ebb.mesh.tensor > 1};
  const double rows_of_any_size =
      static_cast<double>(work.sequences) * static_cast<double>(shape.context) / tensor.ranks;
  if (LeastBytes(shape, rows_of_any_size, slots, static_cast<double>(work.micro_batches)) >
      kBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--batch ", work.sequences, " with --context ", shape.context, " and ", work.micro_batches,
        " micro-batches a step: their activations would take more than 2^60 bytes a rank; make "
        "the batch or the model smaller"));
  }
  const int64_t rows = work.sequences * shape.context;
  work.layers = {.compute = config.compute,
                 .sequences = work.sequences,
                 .slots = options.recompute ? 1 : per_round * shape.layers,
                 .tensor = tensor};
  work.gpt = Declare(
      {.shape = shape,
       .seed = options.seed,
       .boundary_bytes = rows / tensor.row_parts() * shape.width * SizeOf(config.compute),
       .vector_group = config.ebb.parameter_groups.contains(kVectorGroup) ? kVectorGroup : "",
       .tensor = tensor,
       .exchanged = Layers::Exchanged(processor, shape, work.layers, options.recompute)},
      work.spec);
  // For each micro-batch of a round: forward, forward again in backward, and backward, which writes
  // gradients or adds to them. And the evaluation's forward.
  work.passes = shape.layers * (per_round * (options.recompute ? 4 : 3) + 1);
  work.batches_bytes = Arena::Rounded(Batches::DeviceBytes(work.micro_batches, rows));
  work.spec.workspace_bytes =
      work.batches_bytes + Layers::WorkspaceBytes(processor, shape, work.layers);
  return work;
}

int64_t ParametersOf(const ModelSpec& model) {
  int64_t parameters = 0;
  for (const ParameterSpec& parameter : model.parameters) parameters += Elements(parameter.shape);
  return parameters;
}

}  // namespace ebb::gpt
