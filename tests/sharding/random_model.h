// Seeded models and configs for property tests: a seed is the same case on every machine.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <random>
#include <string>

#include "ebb/runtime/config/config.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/plan.h"

namespace ebb::sharding {

// The distributions of <random> differ between libraries, so these are our own.
class Random {
 public:
  explicit Random(uint64_t seed) : bits_(seed) {}
  // Both ends included.
  int64_t Between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(bits_() % static_cast<uint64_t>(high - low + 1));
  }
  bool OneIn(int64_t n) { return Between(1, n) == 1; }
  template <class T>
  T OneOf(std::initializer_list<T> choices) {
    return choices.begin()[Between(0, static_cast<int64_t>(choices.size()) - 1)];
  }

 private:
  std::mt19937_64 bits_;
};

// 1 to 12 units, trainable, frozen or mixed; parameters from scalars to 300,000 elements, odd sizes
// and row cuts among them; units visited again, next to each other or far apart; with and without
// boundaries. The model may ask for row cuts that Partition refuses.
ModelSpec RandomModel(Random& random);

// One parameter of a size up to about `elements_max`, now and then with row cuts.
ParameterSpec RandomParameter(Random& random, int64_t elements_max);

// A resolved config, random in all that the plan reads.
Config RandomConfig(Random& random);

// The random order of a round, in terms of ModelSpec::order and Visit's flags: scopes that stay
// open over others, several walks, backwards out of order, recomputes alone and by segments, visits
// that take no gradients. All that the model's boundaries allow, by chance.
void DeclareOrder(Random& random, ModelSpec& model);

struct RandomCase {
  // `offloads`: a case where at least one class lives below the device, where the stage allows it.
  // `orders`: one that declares an order.
  explicit RandomCase(uint64_t seed, bool offloads = false, bool orders = false);
  PlanInputs inputs() const {
    return {.model = &model,
            .config = &config,
            .world = world,
            .optimizer_states = optimizer_states,
            .state_encodings = state_encodings,
            .own_optimizer = own_optimizer};
  }
  // The seed and the settings, for the message of a failure.
  int shards() const {
    return config.ebb.shard_group > 0 ? static_cast<int>(config.ebb.shard_group) : world;
  }
  std::string description() const;
  // Gives some parameters dtypes of their own, bytes among them, where no boundaries are the
  // engine's.
  void MixDTypes();
  // Keeps the optimizer's states in bf16 or in blocks of 8 bits.
  void EncodeStates();
  // Lets Muon update some matrices, or all.
  void UpdateMatrices();
  // Some trainable parameter's optimizer takes norms.
  bool TakesNorms() const;
  OptimizerType OptimizerOf(ParameterId id) const;

  uint64_t seed;
  ModelSpec model;  // one that LayOut accepts for `world`
  Config config;
  int world = 1, optimizer_states = 0;
  std::vector<Encoding> state_encodings;
  bool own_optimizer = false;

 private:
  void TakeNorms();
  void Offload(Random& random);
};

// Bytes of a tier's pools, as the ledger counts them.
int64_t BytesOn(Tier tier, const Plan& plan);

// How many random cases a test tries: twenty times as many where the environment has EBB_FULL=1.
int Cases(int count);

}  // namespace ebb::sharding
