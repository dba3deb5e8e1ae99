#include "model/trial_passes.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "status_macros.h"

namespace ebb::gpt {
namespace {

// Memory for one pass over the layers of a micro-batch. The results are not used, so all inputs may
// have one address. The memory is zero at first, and so all tokens are 0.
struct PassBuffers {
  void* parameters = nullptr;  // as large as the largest; all gradients are there, too
  void *input = nullptr, *output = nullptr, *output_gradient = nullptr, *input_gradient = nullptr;
  int32_t *tokens = nullptr, *targets = nullptr;
  int64_t bytes = 0;

  // `gradient`: the dtype of gradients. Over null it only counts.
  PassBuffers(const GptShape& shape, const Layers::Options& options, DType gradient,
              std::byte* base) {
    const int64_t rows = options.sequences * shape.context;
    const TensorShare share = ShareOf(shape, 0, options.tensor.ranks);
    const int64_t largest =
        shape.width * std::max({share.hidden, 3 * share.width, share.vocabulary, shape.context});
    const int64_t boundary = rows * shape.width * SizeOf(options.compute);
    Arena arena(base);
    parameters = arena.Take(largest * std::max(SizeOf(options.compute), SizeOf(gradient)));
    for (void** each : {&input, &output, &output_gradient, &input_gradient})
      *each = arena.Take(boundary);
    for (int32_t** each : {&tokens, &targets}) *each = arena.Take<int32_t>(rows);
    bytes = arena.used();
  }
};

// So few that the host enqueues them without waiting for the device. The best repeat counts,
// because nothing else on the machine has disturbed it.
constexpr int kPasses = 4, kRepeats = 3;

// The best time of one of kPasses calls.
double Best(absl::FunctionRef<void()> before, absl::FunctionRef<void()> pass,
            absl::FunctionRef<void()> after) {
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kRepeats; ++i) {
    before();
    const auto begin = std::chrono::steady_clock::now();
    for (int p = 0; p < kPasses; ++p) pass();
    after();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    best = std::min(best, took.count() / kPasses);
  }
  return best;
}

}  // namespace

absl::StatusOr<std::string> WarmUp(const Device& device, const Gpt& gpt,
                                   const Layers::Options& options, DType gradient,
                                   const ProductChoice& choice, Layers& layers) {
  GPT_ASSIGN_OR_RETURN(
      const Buffer memory,
      device.Allocate(PassBuffers(gpt.shape, options, gradient, nullptr).bytes, "a first pass"));
  const PassBuffers buffers(gpt.shape, options, gradient, memory.data());
  Stream stream =
      device.CallerStream();  // destroyed first: its work has ended before the memory is freed
  const Batch batch = {.tokens = buffers.tokens,
                       .targets = buffers.targets,
                       .sequences = options.sequences,
                       .length = gpt.shape.context};
  const auto parameter = [&](ParameterId) -> const void* { return buffers.parameters; };
  layers.ChooseProducts(choice);
  layers.SetAlone(true);
  layers.Embed(parameter, batch, buffers.input);
  layers.BlockForward(parameter, 0, batch, buffers.input, 0, buffers.output);
  layers.HeadLoss(parameter, batch, buffers.output);
  for (const float beta : {0.0f, 1.0f}) {
    const auto target = [&](ParameterId) { return Target{buffers.parameters, gradient, beta}; };
    layers.HeadBackward(parameter, target, batch, buffers.output, /*loss_scale=*/nullptr,
                        buffers.output_gradient);
    layers.BlockBackward(parameter, target, 0, batch, buffers.input, 0, buffers.output_gradient,
                         buffers.input_gradient);
    layers.EmbedBackward(target, batch, buffers.input_gradient);
  }
  layers.LastLogits(parameter, batch, buffers.output);
  layers.SetAlone(false);
  stream.WaitIdle();
  std::string letters = layers.product_letters();
  layers.ChooseProducts({});
  GPT_RETURN_IF_ERROR(layers.status());
  GPT_RETURN_IF_ERROR(device.status());
  return letters;
}

std::string LaunchTimes::Text() const {
  return absl::StrFormat("a block takes %.0f us to launch and %.0f us to run", 1e6 * host_seconds,
                         1e6 * device_seconds);
}

absl::StatusOr<LaunchTimes> MeasureLaunches(const Device& device, const Gpt& gpt,
                                            const Layers::Options& options, DType gradient,
                                            Layers& layers) {
  GPT_ASSIGN_OR_RETURN(const Buffer memory,
                       device.Allocate(PassBuffers(gpt.shape, options, gradient, nullptr).bytes,
                                       "measuring launches"));
  const PassBuffers buffers(gpt.shape, options, gradient, memory.data());
  Stream stream =
      device.CallerStream();  // destroyed first: its work has ended before the memory is freed
  const Batch batch = {.sequences = options.sequences, .length = gpt.shape.context};
  const auto parameter = [&](ParameterId) -> const void* { return buffers.parameters; };
  const auto target = [&](ParameterId) { return Target{buffers.parameters, gradient, 0}; };
  const auto wait = [&] { stream.WaitIdle(); };
  const auto pass = [&] {
    layers.BlockForward(parameter, 0, batch, buffers.input, 0, buffers.output);
    layers.BlockBackward(parameter, target, 0, batch, buffers.input, 0, buffers.output_gradient,
                         buffers.input_gradient);
  };

  pass();  // the first pass takes longer
  LaunchTimes times;
  times.host_seconds = Best(wait, pass, [] {});
  // CUDA graphs, so that the device does not wait for the host.
  layers.KeepGraphs(2);
  pass();
  pass();
  times.device_seconds = Best(wait, pass, wait);
  const GraphUse graphs = layers.graphs();
  wait();
  layers.KeepGraphs(0);
  GPT_RETURN_IF_ERROR(layers.status());
  if (!graphs.given_up.empty()) return absl::UnavailableError(graphs.given_up);
  return times;
}

}  // namespace ebb::gpt
