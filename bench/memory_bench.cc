// Memory as the operating system sees it against the prediction: two ranks as threads, at least 1
// GiB of states a rank, each stage in a process of its own so that its peak resident set is its
// own.
//
//   build/release/bin/memory_bench            all stages, bf16 and fp32
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "ebb/ebb.h"

namespace ebb::bench {
namespace {

constexpr int kRanks = 2;
constexpr int kUnits = 20;
constexpr int64_t kRows = 4096, kColumns = 2048;  // 8.4 M parameters a unit

int64_t StatusBytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field + ":")) return std::atoll(line.c_str() + field.size() + 1) * 1024;
  }
  return 0;
}

absl::Status Train(World world, const Config& config, int64_t& predicted) {
  ModelSpec model;
  std::vector<ParameterId> weights;
  for (int u = 0; u < kUnits; ++u) {
    const UnitId unit = model.AddUnit(absl::StrCat("unit", u));
    weights.push_back(model.Add(
        unit, {.name = absl::StrCat("w", u), .shape = {kRows, kColumns}, .init = Constant(0.5f)}));
    model.forward.push_back({.unit = unit});
  }
  auto engine = Engine::Create(world, Device::Cpu(1), model, config);
  if (!engine.ok()) return engine.status();
  for (int n = 0; n < 3; ++n) {
    Step step = engine->BeginStep();
    for (int u = 0; u < kUnits; ++u) step.Forward(UnitId{u}).Close();
    for (int u = kUnits; u-- > 0;) {
      BackwardScope scope = step.Backward(UnitId{u});
      const MutableTensorView gradient = scope.gradient(weights[static_cast<size_t>(u)]);
      for (float& g : gradient.as<float>()) g += 1e-3f;
      for (BFloat16& g : gradient.as<BFloat16>()) g = BFloat16(1e-3f);
    }
    if (absl::Status status = step.Finish(); !status.ok()) return status;
  }
  if (world.rank() == 0) {
    for (const MemoryRow& row : engine->memory())
      predicted += static_cast<int64_t>(row.predicted_bytes);
  }
  return absl::OkStatus();
}

int RunStage(int stage, DType dtype) {
  Config config;
  config.micro_batch_size = 1;
  config.zero.stage = stage;
  config.compute = dtype;
  const int64_t before = StatusBytes("VmHWM");
  int64_t predicted = 0;
  if (absl::Status status =
          RunThreads(kRanks, [&](World world) { return Train(world, config, predicted); });
      !status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  }
  const int64_t measured = StatusBytes("VmHWM") - before;
  std::printf(
      "| %d | %.*s | %8.1f | %8.1f | %+6.2f%% |\n", stage, static_cast<int>(Name(dtype).size()),
      Name(dtype).data(), static_cast<double>(predicted) / (1 << 20),
      static_cast<double>(measured) / kRanks / (1 << 20),
      100.0 * (static_cast<double>(measured) / static_cast<double>(predicted * kRanks) - 1));
  std::fflush(stdout);
  return 0;
}

}  // namespace
}  // namespace ebb::bench

int main() {
  std::printf(
      "| stage | compute | predicted MiB a rank | measured MiB a rank | difference "
      "|\n|---|---|---|---|---|\n");
  std::fflush(stdout);
  int failures = 0;
  for (const ebb::DType dtype : {ebb::DType::kBFloat16, ebb::DType::kFloat32}) {
    for (int stage = 0; stage <= 3; ++stage) {
      const pid_t child = fork();
      if (child == 0) _exit(ebb::bench::RunStage(stage, dtype));
      int status = 0;
      failures += child < 0 || waitpid(child, &status, 0) < 0 || status != 0;
    }
  }
  return failures == 0 ? 0 : 1;
}
