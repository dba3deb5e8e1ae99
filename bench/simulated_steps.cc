// How long ebb-plan says that steps take beside their bound (sharding/report/bound.h), with the memory
// that each configuration leaves free: 3 models, 3 places, 3 batches, with clipping and without.
//
//   simulated_steps                 a table in Markdown; it needs no GPU and no disk
#include <cstdio>
#include <vector>

#include "ebb/runtime/planner/batch.h"
#include "ebb/runtime/planner/model_shape.h"
#include "ebb/runtime/planner/named_machines.h"
#include "ebb/runtime/planner/search.h"

namespace ebb::planner {
namespace {

Question QuestionOf(const char* model, bool clips, int64_t sequences) {
  Question question{.model = ModelOf(*ShapeOfName(model)),
                    .machine = *MachineOfName("rtx4090-64gb"),
                    .config = {},
                    .pass = {.context = 4096},
                    .sequences = sequences};
  Config& config = question.config;
  config.compute = DType::kBFloat16;
  config.micro_batch_size = config.gradient_accumulation_steps = 1;
  config.zero.offload_param.max_in_cpu = 0;
  config.gradient_clipping = clips ? 1 : 0;
  config.ebb.check_overflow = config.bf16_check_grad_overflow = clips;
  config = WithGathers(question.model, std::move(config));
  return question;
}

// The fastest with and without recomputation, with boundary activations on the device and in RAM.
void Print(const char* model, const char* place, Choice choice, bool clips, int64_t sequences) {
  const Question question = QuestionOf(model, clips, sequences);
  std::vector<Answer> answers;
  for (const bool recompute : {false, true}) {
    for (const Tier boundaries : {Tier::kDevice, Tier::kCpu}) {
      if (!recompute && boundaries == Tier::kCpu) continue;
      choice.recompute = recompute;
      choice.boundaries = boundaries;
      answers.push_back(AnswerForBatch(question, choice, Depth::kTime));
    }
  }
  std::printf("| %s | %s | %d | %s | ", model, place, static_cast<int>(sequences),
              clips ? "yes" : "no");
  const Answer* best = Fastest(answers);
  if (best == nullptr) {
    std::printf("it %s |  |  |  |\n", answers.back().lacks().c_str());
    return;
  }
  const std::optional<Answer> with = WithFreeMemory(question, *best, Depth::kTime);
  const StepTime& time = with ? *with->time : *best->time;
  std::printf("%.3f | %.3f | %.3f | %s: %s |\n", time.simulated.seconds_per_step,
              time.bound.seconds(), time.of_bound(), time.bound.line().c_str(),
              time.bound.order_word().c_str());
}

}  // namespace
}  // namespace ebb::planner

int main() {
  using ebb::Tier;
  const struct {
    const char* name;
    Tier parameters, states;
  } places[] = {{"states in RAM", Tier::kDevice, Tier::kCpu},
                {"all in RAM", Tier::kCpu, Tier::kCpu},
                {"all on NVMe", Tier::kNvme, Tier::kNvme}};
  std::printf(
      "| model | asked for | sequences | clipping | step s | bound s | step / bound | bound's line "
      "|\n"
      "|---|---|---|---|---|---|---|---|\n");
  for (const char* model : {"qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b"})
    for (const auto& [name, parameters, states] : places)
      for (const bool clips : {false, true})
        for (const int64_t sequences : {1, 4, 16})
          ebb::planner::Print(model, name, {.stage = 3, .parameters = parameters, .states = states},
                              clips, sequences);
}
