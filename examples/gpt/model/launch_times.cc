#include "model/launch_times.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "model/pass_buffers.h"
#include "status_macros.h"

namespace ebb::gpt {
namespace {

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
