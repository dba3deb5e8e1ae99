// Optimizer states of 8 bits. Run: build/release/bin/features.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "chain.h"

namespace {

struct Trained {
  int64_t state_bytes = 0;  // of this rank
  double loss = 0;
  double largest_momentum_here = 0;
};

absl::StatusOr<Trained> TrainWithStatesOf(const std::string& states, const ebb::World& world,
                                          const std::vector<Sample>& samples) {
  ebb::ModelSpec model;
  const std::vector<Layer> chain = Declare(model, /*depth=*/2);
  // Parameters of fewer than min_8bit_size elements, 4,096 by default, would keep fp32 states.
  const auto config = ebb::Config::FromJson(absl::StrCat(
      R"({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": )", samples.size(),
      R"(, "zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW",
          "params": {"lr": 0.01, "states": ")",
      states, R"(", "min_8bit_size": 256}}, "ebb": {"micro_batches_per_round": "all"}})"));
  if (!config.ok()) return config.status();
  auto engine = ebb::Engine::Create(world, ebb::Device::Cpu(1), std::move(model), *config,
                                    {.name = absl::StrCat("states of ", states)});
  if (!engine.ok()) return engine.status();
  for (int n = 0; n < 20; ++n) {
    if (absl::Status status = TrainStep(*engine, chain, samples); !status.ok()) return status;
  }
  Trained trained;
  for (const ebb::MemoryRow& row : engine->memory()) {
    if (row.state == ebb::StateClass::kOptimizer)
      trained.state_bytes += static_cast<int64_t>(row.current_bytes);
  }
  const auto evaluated = Evaluate(*engine, chain, samples);
  if (!evaluated.ok()) return evaluated.status();
  trained.loss = evaluated->loss;
  // Whatever the engine keeps, states are read and written as fp32 numbers.
  const auto look = [&](const ebb::Slice&, std::span<const float> values) {
    for (const float value : values)
      trained.largest_momentum_here =
          std::max<double>(trained.largest_momentum_here, std::abs(value));
    return absl::OkStatus();
  };
  if (absl::Status status = engine->Read(ebb::StateClass::kOptimizer, look, "exp_avg");
      !status.ok())
    return status;
  return trained;
}

}  // namespace

absl::Status TrainWith8BitStates(const ebb::World& world, const std::vector<Sample>& samples) {
  const auto whole = TrainWithStatesOf("fp32", world, samples);
  if (!whole.ok()) return whole.status();
  const auto in_8_bits = TrainWithStatesOf("8bit", world, samples);
  if (!in_8_bits.ok()) return in_8_bits.status();
  if (world.rank() == 0) {
    std::printf("states: fp32 %ld bytes, loss %.4f; 8bit %ld bytes, loss %.4f\n",
                static_cast<long>(whole->state_bytes), whole->loss,
                static_cast<long>(in_8_bits->state_bytes), in_8_bits->loss);
  }
  const bool as_good = std::abs(in_8_bits->loss - whole->loss) < 0.05 * whole->loss;
  // A quarter, but for the padding of arrays as small as these.
  const bool is_small = 2 * in_8_bits->state_bytes <= whole->state_bytes;
  return as_good && is_small && in_8_bits->largest_momentum_here > 0
             ? absl::OkStatus()
             : absl::InternalError("8-bit states are large, or train worse");
}
