// plan_times [REPEATS]: how long the plan of a step takes; the table of its arrays alone, which a search
// lays out thousands of times; and the lists that run, with their waits. Processor time, because
// nothing waits. Also the bytes of plan and lists. A model like Llama-3 70B: on 1,024 ranks with all on the device, on 8 with all on NVMe.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <iostream>
#include <string>

#include "ebb/sharding/plan.h"
#include "ebb/sharding/waits.h"

namespace ebb {
namespace {

// 80 blocks of 856 M elements, each in nine parameters, and two units of a table.
ModelSpec SeventyBillion() {
  ModelSpec model;
  const auto add = [&](const std::string& name, int parameters, int64_t rows) {
    const UnitId unit = model.AddUnit(name);
    for (int p = 0; p < parameters; ++p) {
      const std::string parameter = name + "." + std::to_string(p);
      model.Add(unit, {.name = parameter, .shape = {rows, 8192}, .init = Constant(0)});
    }
    model.forward.push_back({.unit = unit, .output_bytes = int64_t{8192} * 8192 * 2});
  };
  add("embedding", 1, 128'256);
  for (int block = 0; block < 80; ++block) add("block" + std::to_string(block), 9, 11'605);
  add("head", 1, 128'256);
  return model;
}

Config OnNvme(Config config) {
  config.zero.offload_param = {.device = Tier::kNvme, .nvme_paths = {"/disk"}, .max_in_cpu = 0};
  config.zero.offload_param.buffer_size.reset();
  config.zero.offload_optimizer = {.device = Tier::kNvme, .nvme_paths = {"/disk"}};
  return config;
}

// Milliseconds of a call, on average; negative if it fails.
template <class Call>
double Milliseconds(int repeats, const Call& call) {
  const std::clock_t begin = std::clock();
  for (int i = 0; i < repeats; ++i) {
    if (const auto& result = call(); !result.ok()) {
      std::cerr << result.status() << '\n';
      return -1;
    }
  }
  return 1e3 * static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC / repeats;
}

bool Measure(const char* what, Config config, int ranks, int repeats) {
  const ModelSpec model = SeventyBillion();
  config.compute = DType::kBFloat16;
  config.zero.stage = 3;
  config.micro_batch_size = 1;
  const absl::StatusOr<Config> resolved = config.ForWorld(ranks);
  if (!resolved.ok()) {
    std::cerr << resolved.status() << '\n';
    return false;
  }
  const sharding::PlanInputs inputs{
      .model = &model, .config = &*resolved, .world = ranks, .optimizer_states = 2};
  absl::StatusOr<sharding::Plan> made;
  const double plan = Milliseconds(
      repeats, [&]() -> auto& { return made = sharding::PlanStep(inputs); });
  if (plan < 0) return false;
  int64_t bytes = made->OwnBytes();
  const double lists = Milliseconds(repeats, [&]() -> absl::StatusOr<int> {
    sharding::OpList both[] = {sharding::ListOf(*made, /*carrying=*/false),
                               sharding::ListOf(*made, /*carrying=*/true)};
    const sharding::OpList* const pointers[] = {&both[0], &both[1]};
    const sharding::Cells cells(pointers, *made);
    bytes = made->OwnBytes();
    for (sharding::OpList& list : both) {
      sharding::DeriveWaits(cells, list);
      bytes += list.OwnBytes();
    }
    return 0;
  });
  const double table = Milliseconds(repeats, [&] { return sharding::PlanTable(inputs); });
  std::printf("%-28s plan %8.2f ms  table %6.2f ms  lists %8.2f ms  %8.1f KiB\n", what, plan, table,
              lists, static_cast<double>(bytes) / 1024);
  return table >= 0;
}

}  // namespace
}  // namespace ebb

int main(int argc, char** argv) {
  const int repeats = argc > 1 ? std::atoi(argv[1]) : 20;
  if (repeats < 1) {
    std::cerr << "usage: plan_times [REPEATS]\n";
    return 2;
  }
  const bool measured = ebb::Measure("70B on 1,024 ranks", {}, 1024, repeats) &&
                        ebb::Measure("70B on 8 ranks, on NVMe", ebb::OnNvme({}), 8, repeats);
  return measured ? 0 : 1;
}
