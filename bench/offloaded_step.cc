// Steps with masters and optimizer states in RAM on demand: for each line of the input one step of an
// engine (one rank, stage 3, offload_optimizer cpu, clipping, Adam), and a line with the seconds of
// its backward, those of the rest, those of a pass that takes norms of as many gradients, and the first
// parameter's master. What offloaded_step_against_deepspeed.py runs in turns with DeepSpeed's engine.
//
//   offloaded_step bf16|fp16 UNITS ELEMENTS_OF_A_UNIT THREADS
//
// Backward ends when every gradient is reduced, in RAM, and its norm taken, as DeepSpeed's does; what
// follows is the norm over all, unscaling, clipping, update and 16-bit copy, until the last of it is
// where it lives. A layer's gradient is a fill with a constant. The engine takes norms in the pass that
// brings gradients to RAM; alone, over another array, they take at least as long.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/ebb.h"
#include "ebb/optim/norm.h"
#include "ebb/runtime/config/status_macros.h"
#include "huge_pages.h"

namespace ebb::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Arguments {
  DType compute = DType::kBFloat16;
  int units = 0;
  int64_t elements = 0;
  int threads = 0;
};

absl::Status Run(World world, const Arguments& arguments) {
  ModelSpec model;
  std::vector<ParameterId> weights;
  for (int u = 0; u < arguments.units; ++u) {
    const UnitId unit = model.AddUnit(absl::StrCat("unit", u));
    weights.push_back(model.Add(
        unit, {.name = absl::StrCat("w", u), .shape = {arguments.elements}, .init = Constant(1)}));
    model.forward.push_back({.unit = unit});
  }
  Config config;
  config.micro_batch_size = 1;
  config.compute = arguments.compute;
  config.zero.stage = 3;
  config.zero.offload_optimizer = {.device = Tier::kCpu};
  config.gradient_clipping = 1;
  config.optimizer.learning_rate = 1e-3;
  config.optimizer.weight_decay = 0.01;
  EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, Device::Cpu(arguments.threads),
                                                     std::move(model), config));

  HugePages copy(HugePages::BytesFor(1, arguments.units * arguments.elements));
  if (!copy.ok()) return absl::ResourceExhaustedError("no memory for the gradients' norms");
  BFloat16* const gradients = copy.Take(arguments.units * arguments.elements, BFloat16(0x1p-10f));
  std::vector<double> blocks(static_cast<size_t>(optim::NormBlocks(arguments.elements)));
  ThreadTeam team(arguments.threads);

  for (std::string line; std::getline(std::cin, line);) {
    Step step = engine.BeginStep({.hold_updates = true});
    for (int u = 0; u < arguments.units; ++u) step.Forward(UnitId{u}).Close();
    const float gradient = 0x1p-10f * step.loss_scale();
    const auto begin = Clock::now();
    for (int u = arguments.units; u-- > 0;) {
      BackwardScope scope = step.Backward(UnitId{u});
      WithNumbers(scope.fused_gradient(weights[static_cast<size_t>(u)]).tensor, [&](auto elements) {
        std::ranges::fill(elements, typename decltype(elements)::value_type(gradient));
      });
    }
    EBB_RETURN_IF_ERROR(step.Reduce());
    const auto reduced = Clock::now();
    EBB_RETURN_IF_ERROR(step.Finish());
    engine.traffic();  // waits until everything is where it lives
    const auto end = Clock::now();
    double squares = 0;
    for (int u = 0; u < arguments.units; ++u) {
      squares += optim::SumOfSquares(team, gradients + u * arguments.elements, DType::kBFloat16,
                                     arguments.elements, blocks);
    }
    const std::chrono::duration<double> norm = Clock::now() - end;
    if (!(squares > 0)) return absl::InternalError("the norm of the gradients is wrong");
    float first = 0;
    bool seen = false;
    EBB_RETURN_IF_ERROR(
        engine.Read(StateClass::kMaster, [&](const Slice&, std::span<const float> values) {
          if (!std::exchange(seen, true)) first = values[0];
          return absl::OkStatus();
        }));
    const std::chrono::duration<double> backward = reduced - begin, rest = end - reduced;
    std::cout << backward.count() << ' ' << rest.count() << ' ' << norm.count() << ' '
              << std::setprecision(9) << first << std::endl;
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace ebb::bench

int main(int argc, char** argv) {
  ebb::bench::Arguments arguments;
  if (argc == 5) {
    arguments = {
        .compute = std::string(argv[1]) == "fp16" ? ebb::DType::kFloat16 : ebb::DType::kBFloat16,
        .units = std::atoi(argv[2]),
        .elements = std::atoll(argv[3]),
        .threads = std::atoi(argv[4])};
  }
  if (arguments.units < 1 || arguments.elements < 1 || arguments.threads < 1) {
    std::cerr << "offloaded_step bf16|fp16 UNITS ELEMENTS_OF_A_UNIT THREADS\n";
    return 2;
  }
  setenv("EBB_LOG_LEVEL", "warn", /*overwrite=*/0);
  const absl::Status status =
      ebb::RunThreads(1, [&](ebb::World world) { return ebb::bench::Run(world, arguments); });
  if (status.ok()) return 0;
  std::cerr << "offloaded_step: " << status.message() << '\n';
  return 1;
}
