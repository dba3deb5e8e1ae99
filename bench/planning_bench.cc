// The time of planning, for shapes of known models: all that Engine::Create does before it touches
// a device. That is a step, a step that holds its updates, an evaluation and a drain, as
// instructions with their waits, and the hash that ranks compare. `instructions`: of a step that
// begins with updates of the step before. `waits`: between these instructions. `records`: of events
// for these and later waits. `cells`: the ranges in which waits are counted. "simulate": six steps
// on hosts of 8 GPUs with about an H100's figures; `step_s` is the simulated time of one step.
//
//   build/release/bin/planning_bench
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "ebb/runtime/config/config.h"
#include "ebb/sharding/fingerprint.h"
#include "ebb/sharding/instructions.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/report/machine_costs.h"
#include "ebb/sharding/report/simulate.h"
#include "ebb/sharding/waits.h"

namespace ebb::sharding {
namespace {

struct Shape {
  int64_t layers = 0, width = 0, key_values = 0, feed_forward = 0, vocabulary = 0, context = 0;
  int feed_forward_matrices = 2;
};
// Llama 3 and GPT-3.
constexpr Shape k70B{80, 8192, 2048, 28672, 128256, 8192, 3},
    k175B{96, 12288, 24576, 49152, 50257, 2048, 2};

// Units: embedding, layers, head.
ModelSpec ModelOf(const Shape& shape) {
  ModelSpec model;
  const auto add = [&](UnitId unit, std::string name, std::vector<int64_t> dimensions) {
    model.Add(unit, {.name = std::move(name), .shape = std::move(dimensions), .init = Constant(0)});
  };
  add(model.AddUnit("embedding"), "embedding", {shape.vocabulary, shape.width});
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    const std::string name = absl::StrCat("layer", layer);
    const UnitId unit = model.AddUnit(name);
    add(unit, name + ".norms", {2, shape.width});
    add(unit, name + ".queries", {shape.width, shape.width});
    add(unit, name + ".keys_values", {shape.key_values, shape.width});
    add(unit, name + ".projection", {shape.width, shape.width});
    for (int matrix = 0; matrix < shape.feed_forward_matrices; ++matrix)
      add(unit, absl::StrCat(name, ".feed_forward", matrix), {shape.feed_forward, shape.width});
  }
  add(model.AddUnit("head"), "head", {shape.vocabulary, shape.width});
  for (size_t unit = 0; unit < model.units.size(); ++unit) {
    model.forward.push_back(
        {.unit = static_cast<UnitId>(unit), .output_bytes = 2 * shape.context * shape.width});
  }
  return model;
}

struct Case {
  ModelSpec model;
  Config config;
  int world = 1;
  PlanInputs inputs() const {
    return {.model = &model, .config = &config, .world = world, .optimizer_states = 2};
  }
};

Case CaseOf(const Shape& shape, int world, Tier tier, int rounds) {
  Case made{.model = ModelOf(shape), .config = {}, .world = world};
  made.config.gradient_accumulation_steps = rounds;
  made.config.compute = DType::kBFloat16;
  made.config.gradient_clipping = 1;
  made.config.zero.stage = 3;
  // Room for a few layers, because the next one is gathered ahead.
  made.config.zero.prefetch_bucket_size = 2'000'000'000;
  made.config.zero.max_live_parameters = 8'000'000'000;
  made.config.zero.offload_param.device = tier;
  made.config.zero.offload_optimizer.device = tier;
  return made;
}

// The plans that decide the cells of an engine's memory (Programs::CutCells).
struct Planned {
  Plan step, held, walk, drain;
  std::vector<Fragment> fragments;
  std::unique_ptr<Cells> cells;
};

void PlanAll(const PlanInputs& inputs, Planned& planned) {
  planned.step = *PlanStep(inputs);
  planned.held = *PlanStep(inputs, planned.step.decisions.rounds, /*hold_updates=*/true);
  planned.walk = *PlanWalk(inputs);
  planned.drain = *PlanDrain(inputs);
}

// As Programs::Fingerprint: the held step follows from the others.
uint64_t HashAll(const Planned& planned) {
  return Fingerprint(planned.step) ^ Fingerprint(planned.walk) ^ Fingerprint(planned.drain);
}

void LowerAll(Planned& planned) {
  for (const Plan* plan : {&planned.step, &planned.held, &planned.walk, &planned.drain}) {
    for (const bool carrying : {false, true}) planned.fragments.push_back(Lower(*plan, carrying));
  }
}

void CutCells(Planned& planned) {
  std::vector<const Fragment*> all;
  for (const Fragment& fragment : planned.fragments) all.push_back(&fragment);
  planned.cells = std::make_unique<Cells>(all, planned.step);
}

void DeriveAll(Planned& planned) {
  for (Fragment& fragment : planned.fragments) DeriveWaits(*planned.cells, fragment);
}

// The device reaches half of its peak arithmetic. A host's 8 ranks share its cores, memory and
// disks.
Machine HostOf8() {
  Machine machine{.ranks_per_host = 8,
                  .core_bytes = 8e9,
                  .issue = 5e-6,
                  .collective = 2e-5,
                  .collective_rank = 1e-6,
                  .transfer = 1e-4};
  const std::pair<Resource, double> kRates[] = {
      {Resource::kDevice, 1},        {Resource::kDeviceMemory, 3e12}, {Resource::kCores, 12},
      {Resource::kHostMemory, 4e10}, {Resource::kToDevice, 5e10},     {Resource::kToHost, 5e10},
      {Resource::kPeers, 3.6e11},    {Resource::kNetwork, 4.5e10},    {Resource::kDiskRead, 6e9},
      {Resource::kDiskWrite, 4e9},   {Resource::kDisk, 8e9}};
  for (const auto& [resource, rate] : kRates) machine.rates[resource] = rate;
  return machine;
}

// For one sequence: forward uses each element in two operations for each token, backward in four.
std::vector<KernelWork> WorkOf(const Plan& plan, int64_t tokens) {
  constexpr double kFlops = 5e14, kLaunches = 1e-4;
  std::vector<KernelWork> work;
  for (const PlannedScope& scope : plan.scopes) {
    if (scope.backward || scope.round > 0) continue;
    const auto elements =
        static_cast<double>(plan.layout.units[static_cast<size_t>(scope.unit)].elements());
    const double forward = 2 * elements * static_cast<double>(tokens) / kFlops;
    work.push_back({.forward = forward,
                    .backward = 2 * forward,
                    .caller_forward = kLaunches,
                    .caller_backward = kLaunches});
  }
  return work;
}

enum class Part { kAll, kPlan, kHash, kLower, kCells, kWaits };

void Simulating(benchmark::State& state, const Shape& shape, int world, Tier tier, int rounds) {
  const Case of = CaseOf(shape, world, tier, rounds);
  const absl::StatusOr<Plan> plan = PlanStep(of.inputs());
  if (!plan.ok()) {
    state.SkipWithError(plan.status().ToString().c_str());
    return;
  }
  const MachineCosts costs = *MachineCosts::Make(*plan, HostOf8(), WorkOf(*plan, shape.context),
                                                 /*caller_awaits_report=*/false);
  Simulated simulated;
  for (auto _ : state) simulated = *Simulate(*plan, costs);
  state.counters["step_s"] = simulated.seconds_per_step;
  const std::string_view line = NameOfLine(simulated.critical_line());
  state.SetLabel("waits most for " + std::string(line));
}

void Planning(benchmark::State& state, const Shape& shape, int world, Tier tier, int rounds,
              Part part) {
  const Case of = CaseOf(shape, world, tier, rounds);
  if (const absl::StatusOr<Plan> plan = PlanStep(of.inputs()); !plan.ok()) {
    state.SkipWithError(plan.status().ToString().c_str());
    return;
  }
  std::unique_ptr<Planned> planned;
  const auto run = [&](Part now, auto work) {
    const bool timed = part == Part::kAll || part == now;
    if (!timed) state.PauseTiming();
    work();
    if (!timed) state.ResumeTiming();
  };
  for (auto _ : state) {
    run(Part::kPlan, [&] {
      planned = std::make_unique<Planned>();
      PlanAll(of.inputs(), *planned);
    });
    run(Part::kHash, [&] { benchmark::DoNotOptimize(HashAll(*planned)); });
    run(Part::kLower, [&] { LowerAll(*planned); });
    run(Part::kCells, [&] { CutCells(*planned); });
    run(Part::kWaits, [&] { DeriveAll(*planned); });
  }
  const std::vector<Instruction>& step = planned->fragments[1].instructions;
  size_t waits = 0, records = 0;
  for (const Instruction& instruction : step) {
    waits += instruction.waits.size();
    records += instruction.awaited ? 1 : 0;
  }
  state.counters["instructions"] = static_cast<double>(step.size());
  state.counters["waits"] = static_cast<double>(waits);
  state.counters["records"] = static_cast<double>(records);
  state.counters["cells"] = planned->cells->count();
}

void Register() {
  const struct {
    const char* name;
    const Shape& shape;
    int world;
    Tier tier;
    int rounds = 1;
  } kCases[] = {{"70B on 1024 ranks", k70B, 1024, Tier::kDevice},
                {"70B on 8 ranks, all on NVMe", k70B, 8, Tier::kNvme},
                {"175B on 1024 ranks", k175B, 1024, Tier::kDevice},
                {"175B on 1024 ranks, 32 rounds", k175B, 1024, Tier::kDevice, 32}};
  const std::pair<const char*, Part> kParts[] = {{"plan", Part::kPlan},   {"hash", Part::kHash},
                                                 {"lower", Part::kLower}, {"cells", Part::kCells},
                                                 {"waits", Part::kWaits}, {"all", Part::kAll}};
  for (const auto& each : kCases) {
    for (const auto& [name, part] : kParts) {
      benchmark::RegisterBenchmark(absl::StrCat(each.name, "/", name).c_str(),
                                   [each, part = part](benchmark::State& state) {
                                     Planning(state, each.shape, each.world, each.tier, each.rounds,
                                              part);
                                   })
          ->Unit(benchmark::kMillisecond);
    }
    benchmark::RegisterBenchmark(absl::StrCat(each.name, "/simulate").c_str(),
                                 [each](benchmark::State& state) {
                                   Simulating(state, each.shape, each.world, each.tier,
                                              each.rounds);
                                 })
        ->Unit(benchmark::kMillisecond);
  }
}

}  // namespace
}  // namespace ebb::sharding

int main(int argc, char** argv) {
  ebb::sharding::Register();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
