// Several engines of one world, and the parts into which World::Split divides a world. Run:
// build/release/bin/features.
#include <utility>

#include "chain.h"

// A policy that trains and a copy of it that generates, on a device that has room for one of them.
absl::Status TrainTwoEngines(const ebb::World& world, ebb::Engine& policy,
                             const std::vector<Layer>& chain, const std::vector<Sample>& samples) {
  absl::Status status = policy.Suspend();  // room for the other one's pools
  if (!status.ok()) return status;
  ebb::ModelSpec model;
  Declare(model, static_cast<int>(chain.size()));  // the same names, units and shapes
  for (ebb::ParameterSpec& parameter : model.parameters) {
    parameter.trainable = false;        // one value in the compute dtype, and nothing else
    parameter.init = ebb::Constant(0);  // what counts comes from the policy
  }
  ebb::Config config = policy.config();
  config.zero.stage = 0;  // every rank keeps all of it
  auto rollout =
      ebb::Engine::Create(world, ebb::Device::Cpu(/*threads=*/1), std::move(model), config,
                          {.compute = policy.compute_stream(), .name = "rollout"});
  if (!rollout.ok()) return rollout.status();
  for (int n = 0; n < 3; ++n) {
    status = rollout->CopyParametersFrom(policy);  // the policy is suspended, which does no harm
    if (!status.ok()) return status;
    const auto loss = Evaluate(*rollout, chain, samples);  // or generate
    if (!loss.ok()) return loss.status();
    if (status = rollout->Suspend(); !status.ok()) return status;
    if (status = policy.Resume(); !status.ok()) return status;
    if (status = TrainStep(policy, chain, samples); !status.ok()) return status;
    if (status = policy.Suspend(); !status.ok()) return status;
    if (status = rollout->Resume(); !status.ok()) return status;
  }
  return policy.Resume();
}

// The ranks of a trainer that divides its model by itself: the ranks of one model, and the ranks
// with the same part.
absl::StatusOr<Parts> DivideRanks(const ebb::World& world, int ranks_per_model) {
  absl::StatusOr<ebb::World> cut =
      world.Split(/*colour=*/world.rank() / ranks_per_model, /*key=*/world.rank());
  if (!cut.ok()) return cut.status();
  absl::StatusOr<ebb::World> copies =
      world.Split(/*colour=*/world.rank() % ranks_per_model, /*key=*/world.rank());
  if (!copies.ok()) return copies.status();
  return Parts{.cut = *std::move(cut), .copies = *std::move(copies)};
}
