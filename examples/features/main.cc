// Uses each feature that docs/trainer.md describes, on two ranks that train a small chain of
// layers. chain.h lists the files, one for each topic.
//
//   build/release/bin/features   prints the loss before and after; exit status 1: a feature failed
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "chain.h"
#include "communicator.h"
#include "optimizer.h"

std::vector<Sample> Samples(int count, int rank) {
  std::vector<Sample> samples(static_cast<size_t>(count));
  for (int m = 0; m < count; ++m) {
    for (int64_t j = 0; j < kWidth; ++j) {
      const float x = std::sin(static_cast<float>(1 + j + 31 * m + 17 * rank));
      samples[m].input.push_back(x);
      samples[m].target.push_back(2 * x);
    }
  }
  return samples;
}

absl::Status Train(ebb::World world) {
  Calls calls;
  const ebb::World counted(std::make_shared<CountingWorld>(world, calls));
  ebb::ModelSpec model;
  const std::vector<Layer> chain = Declare(model, /*depth=*/3);
  const auto config = ebb::Config::FromJson(R"({
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "ebb": {"micro_batches_per_round": "all"}})");
  if (!config.ok()) return config.status();
  auto engine = ebb::Engine::Create(counted, ebb::Device::Cpu(/*threads=*/1), std::move(model),
                                    *config, {.optimizer = Lion(0.9f, 0.99f, 0), .name = "chain"});
  if (!engine.ok()) return engine.status();

  const std::vector<Sample> samples = Samples(/*count=*/4, world.rank());
  const auto before = Evaluate(*engine, chain, samples);
  if (!before.ok()) return before.status();
  for (int n = 0; n < 20; ++n) {
    if (absl::Status status = TrainStep(*engine, chain, samples); !status.ok()) return status;
  }
  const auto report = engine->Report();
  if (!report.ok()) return report.status();
  const auto after = Evaluate(*engine, chain, samples);
  if (!after.ok()) return after.status();
  if (world.rank() == 0) {
    std::printf("step %ld  loss %.4f -> %.4f, %.0f%% right, %d gathers\n",
                static_cast<long>(report->step), before->loss, after->loss, 100 * after->right,
                calls.gathers);
  }

  const auto squares = SumOfSquaresHere(*engine);
  if (!squares.ok()) return squares.status();
  float largest = 0;
  for (const std::function<absl::Status()>& use : std::vector<std::function<absl::Status()>>{
           [&] { return Print(*engine, world, chain[0].weight); },
           [&] { return StepTwice(*engine, chain, samples); },
           [&] { return ForgetMomentum(*engine); },
           [&] { return LookAtGradients(*engine, chain, samples, largest); },
           [&] { return SurviveAMistake(*engine, chain); },
           [&] { return DivideRanks(world, /*ranks_per_model=*/2).status(); },
           [&] { return TrainOneLayerOfTwo(counted); },
           [&] { return TrainUnderARoot(counted, samples[0].input); },
           [&] { return TrainInSegments(counted, samples[0].input); },
           [&] { return TrainWithGradientsOf("fp32", counted, samples); },
           [&] { return TrainWithGradientsOf("bf16", counted, samples); },
           [&] { return TrainWith8BitStates(counted, samples); },
           [&] { return TrainMatrices(counted, samples); },
           [&] { return TrainTensor(world, Samples(/*count=*/4, /*rank=*/0)); },
           [&] { return TrainTwoEngines(counted, *engine, chain, samples); },
           [&] { return TrainStep(*engine, chain, samples); },
           [&] { return GoOnUnderARoot(*engine); }}) {
    if (absl::Status status = use(); !status.ok()) return status;
  }
  const bool learned = after->loss < before->loss / 2 && after->right > before->right &&
                       *squares > 0 && largest > 0 && calls.gathers > 0;
  return learned ? absl::OkStatus() : absl::InternalError("nothing was learned");
}

int main() {
  const absl::Status status = ebb::RunThreads(/*ranks=*/2, Train);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
