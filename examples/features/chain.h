// The model that the programs of this folder train: a chain of element-wise layers, y = w * x,
// because its arithmetic is short.
//
//   build/release/bin/features   trains it in each way that docs/trainer.md describes, on two ranks
//
//   chain.cc         kernels, initial values, accumulation over rounds, evaluation
//   order.cc         a scope is left out; a root stays open over its layers; segments run again
//   state.cc         state is read, written and gathered; a run goes on from saved state; gradients
//                    are read before the update
//   encodings.cc     optimizer states have 8 bits
//   matrices.cc      Muon updates matrices, and AdamW the rest
//   tensor.cc        two ranks share a layer, and its checkpoint is loaded whole
//   engines.cc       two engines use a device in turn; ranks form the worlds of a divided model
//   optimizer.h      Lion as a trainer's own optimizer
//   communicator.h   a communicator that calls another one and counts the calls
#pragma once

#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/ebb.h"

constexpr int64_t kWidth = 1024;

struct Layer {
  ebb::UnitId unit;
  ebb::ParameterId weight;
};
struct Sample {
  std::vector<float> input, target;
};

// chain.cc
void Multiply(std::span<const float> w, std::span<const float> x, std::span<float> y);
void AddProducts(ebb::BackwardScope& scope, ebb::ParameterId weight, std::span<const float> dy,
                 std::span<const float> x);
std::vector<Layer> Declare(ebb::ModelSpec& model, int depth);
void WalkThrough(ebb::Step& step, const std::vector<Layer>& chain,
                 const std::vector<Sample>& samples);
absl::Status TrainStep(ebb::Engine& engine, const std::vector<Layer>& chain,
                       const std::vector<Sample>& samples);
struct Evaluated {
  double loss, right;  // right: the share of outputs that are within a tenth of their targets
};
absl::StatusOr<Evaluated> Evaluate(ebb::Engine& engine, const std::vector<Layer>& chain,
                                   const std::vector<Sample>& samples);
absl::Status TrainWithGradientsOf(const std::string& dtype, const ebb::World& world,
                                  const std::vector<Sample>& samples);
absl::Status SurviveAMistake(ebb::Engine& engine, const std::vector<Layer>& chain);

// order.cc
absl::Status TrainOneLayerOfTwo(const ebb::World& world);
absl::Status TrainUnderARoot(const ebb::World& world, const std::vector<float>& sample);
absl::Status TrainInSegments(const ebb::World& world, const std::vector<float>& sample);
absl::Status GoOnUnderARoot(ebb::Engine& engine);

// state.cc
absl::StatusOr<double> SumOfSquaresHere(ebb::Engine& engine);
absl::Status ForgetMomentum(ebb::Engine& engine);
absl::Status Print(ebb::Engine& engine, ebb::World world, ebb::ParameterId parameter);
absl::Status StepTwice(ebb::Engine& engine, const std::vector<Layer>& chain,
                       const std::vector<Sample>& samples);
absl::Status LookAtGradients(ebb::Engine& engine, const std::vector<Layer>& chain,
                             const std::vector<Sample>& samples, float& largest_here);

// encodings.cc
absl::Status TrainWith8BitStates(const ebb::World& world, const std::vector<Sample>& samples);

// matrices.cc
absl::Status TrainMatrices(const ebb::World& world, const std::vector<Sample>& samples);

// tensor.cc
absl::Status TrainTensor(const ebb::World& world, const std::vector<Sample>& samples);

// engines.cc
absl::Status TrainTwoEngines(const ebb::World& world, ebb::Engine& policy,
                             const std::vector<Layer>& chain, const std::vector<Sample>& samples);
struct Parts {
  ebb::World cut;     // which hold one model together: communicators of the trainer's own
  ebb::World copies;  // which hold the same part of it: an engine's world
};
absl::StatusOr<Parts> DivideRanks(const ebb::World& world, int ranks_per_model);
