#include "measured_run.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/ebb.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/runtime/trace/resident_set.h"

namespace ebb::bench {
namespace {

// The figures that the run's process sends to this process.
struct RunFigures {
  std::array<MemoryRow, size_t{3} * (kStateClasses + 1)> rows = {};
  int64_t count = 0;
  int64_t resident = 0, predicted_resident = 0;
  std::array<char, 512> error = {};
};
static_assert(std::is_trivially_copyable_v<RunFigures>);

int64_t PeakBytes() {
  return ReadResidentSet().value_or(ResidentSet()).peak_bytes;
}

void Touch(const MutableTensorView& view) {
  if (view.data != nullptr)
    std::memset(view.data, 0, static_cast<size_t>(view.size() * SizeOf(view.dtype)));
}

absl::Status TrainStep(Engine& engine, const ModelSpec& model) {
  Step step = engine.BeginStep();
  const int64_t rounds =
      engine.config().gradient_accumulation_steps / engine.config().ebb.micro_batches_per_round;
  for (int64_t round = 0; round < rounds; ++round) {
    for (const Visit& visit : model.forward) {
      ForwardScope scope = step.Forward(visit.unit);
      for (const int micro_batch : scope.micro_batches()) Touch(scope.output(micro_batch));
      scope.Close();
    }
    for (size_t at = model.forward.size(); at-- > 0;) {
      const Visit& visit = model.forward[at];
      BackwardScope scope = step.Backward(visit.unit);
      for (const ParameterId parameter : model[visit.unit].parameters)
        (void)scope.gradient(parameter);
      for (const int micro_batch : scope.micro_batches()) Touch(scope.input_gradient(micro_batch));
      scope.Close();
    }
  }
  return step.Finish();
}

absl::Status Train(World world, const ModelSpec& model, const Config& config, int steps,
                   RunFigures& figures) {
  auto engine = Engine::Create(world, Device::Cpu(1), model, config);
  if (!engine.ok()) return engine.status();
  Touch(engine->workspace());
  for (int step = 0; step < steps; ++step) {
    if (absl::Status status = TrainStep(*engine, model); !status.ok()) return status;
  }
  if (absl::Status status = engine->Report().status(); !status.ok()) return status;
  if (world.rank() != 0) return absl::OkStatus();
  for (const MemoryRow& row : engine->memory()) {
    if (figures.count == std::ssize(figures.rows)) break;
    figures.rows[figures.count++] = row;
    if (row.tier != Tier::kNvme)
      figures.predicted_resident += static_cast<int64_t>(row.predicted_bytes);
  }
  figures.predicted_resident += engine->program().own_bytes();
  return absl::OkStatus();
}

RunFigures RunHere(const planner::Question& question, const planner::Choice& choice,
                   const std::string& folder, int steps) {
  RunFigures figures;
  Config config = question.With(choice);
  config.zero.offload_param.nvme_paths = {folder};
  config.zero.offload_optimizer.nvme_paths = {folder};
  planner::Pass pass = question.pass;
  pass.recompute = choice.recompute;
  pass.sequences = config.micro_batch_size;
  pass.micro_batches = config.gradient_accumulation_steps;
  pass.compute = config.compute;
  SendLogTo([](LogLevel level, std::string_view message) {
    if (level == LogLevel::kWarning)
      std::fprintf(stderr, "%.*s\n", static_cast<int>(message.size()), message.data());
  });
  const int64_t before = PeakBytes();
  absl::StatusOr<ModelSpec> model = planner::SpecOf(question.model, pass);
  absl::Status status = model.status();
  if (status.ok()) {
    status = RunThreads(question.ranks, [&](World world) {
      return Train(std::move(world), *model, config, steps, figures);
    });
  }
  figures.resident = (PeakBytes() - before) / question.ranks;
  const std::string message(status.message());
  std::copy_n(message.begin(), std::min(message.size(), figures.error.size() - 1),
              figures.error.begin());
  return figures;
}

}  // namespace

absl::StatusOr<MeasuredRun> Measure(const planner::Question& question,
                                    const planner::Choice& choice, const std::string& folder,
                                    int steps) {
  int ends[2];
  if (pipe(ends) != 0) return absl::InternalError("cannot make a pipe to a run's process");
  const pid_t child = fork();
  if (child == 0) {
    const RunFigures figures = RunHere(question, choice, folder, steps);
    _exit(write(ends[1], &figures, sizeof(figures)) == sizeof(figures) ? 0 : 1);
  }
  close(ends[1]);
  RunFigures figures;
  const bool came = read(ends[0], &figures, sizeof(figures)) == sizeof(figures);
  close(ends[0]);
  if (child > 0) waitpid(child, nullptr, 0);
  if (!came) return absl::InternalError("the run's process ended early, perhaps without memory");
  if (figures.error[0] != '\0') return absl::InvalidArgumentError(figures.error.data());
  return MeasuredRun{.choice = choice,
                     .world = question.ranks,
                     .rows = {figures.rows.begin(), figures.rows.begin() + figures.count},
                     .resident = figures.resident,
                     .predicted_resident = figures.predicted_resident};
}

}  // namespace ebb::bench
