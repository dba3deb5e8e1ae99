// Every combination of changes that the error of a cap may advise, for random models with configs
// and caps. Advice is compared with it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "ebb/sharding/fit/advice.h"
#include "ebb/sharding/fit/budget.h"
#include "random_model.h"
#include "tests/status.h"
#include "unit_chain.h"

namespace ebb::sharding {

// A small model with a config and caps. Some caps leave nothing that fits, some leave little.
struct CappedCase {
  explicit CappedCase(uint64_t seed);
  PlanInputs inputs(const Config& config) const {
    return {.model = &model,
            .config = &config,
            .world = world,
            .optimizer_states = 2,
            .sums_depend_on_groups = sums_depend_on_groups};
  }
  ModelSpec model;
  Config given;
  int world = 1;
  bool sums_depend_on_groups = false;
};

inline CappedCase::CappedCase(uint64_t seed) {
  using enum Tier;
  Random random(seed);
  world = static_cast<int>(random.OneOf<int64_t>({1, 2, 4}));
  std::vector<int64_t> sizes;
  for (int64_t units = random.Between(1, 5); units > 0; --units)
    sizes.push_back(random.OneOf<int64_t>({300, 9'000, random.Between(4'000, 60'000)}));
  model = UnitChain(sizes, random.OneOf<int64_t>({0, 0, 4'000, 60'000}));
  sums_depend_on_groups = world > 1 && random.OneIn(3);
  model.workspace_bytes = random.OneOf<int64_t>({0, 20'000});

  ZeroConfig& zero = given.zero;
  EbbConfig& ebb = given.ebb;
  given.micro_batch_size = 1;
  given.gradient_accumulation_steps = random.OneOf<int64_t>({1, 1, 4});
  if (random.OneIn(3)) ebb.micro_batches_per_round = given.gradient_accumulation_steps;
  given.compute = random.OneOf({DType::kFloat32, DType::kFloat32, DType::kBFloat16});
  ebb.split_master = given.compute == DType::kBFloat16 && random.OneIn(3);
  zero.stage = static_cast<int>(random.Between(0, 3));
  if (random.OneIn(3)) ebb.reduce_at = random.OneOf({ReduceAt::kRound, ReduceAt::kStep});
  zero.param_persistence_threshold = random.OneOf<int64_t>({0, 5'000});
  ebb.prefetch_depth = random.OneOf<int64_t>({0, 1, 4});
  if (random.OneIn(2)) ebb.coalesce_bytes = 0;
  if (random.OneIn(2)) zero.sub_group_size = kCutElements;
  const std::vector<std::string> folder = {"/disk"};
  if (zero.stage > 0) {
    zero.offload_optimizer.device = random.OneOf({kDevice, kCpu, kNvme});
    if (zero.offload_optimizer.device == kNvme) zero.offload_optimizer.nvme_paths = folder;
    if (random.OneIn(4)) zero.offload_optimizer.ratio = 0.5;
  }
  if (zero.stage == 3) {
    zero.offload_param.device = random.OneOf({kDevice, kDevice, kCpu, kNvme});
    if (zero.offload_param.device == kNvme) zero.offload_param.nvme_paths = folder;
    if (random.OneIn(3)) zero.offload_param.max_in_cpu = 0;
    if (random.OneIn(4)) zero.offload_param.buffer_size = 20'000;
  }
  const bool has_folder = given.uses_nvme();
  if (zero.stage > 0 && random.OneIn(3))
    ebb.offload_gradients = random.OneOf({kDevice, kCpu, has_folder ? kNvme : kCpu});
  if (random.OneIn(3))
    ebb.offload_activations = random.OneOf({kDevice, kCpu, has_folder ? kNvme : kCpu});

  const absl::StatusOr<Config> resolved = given.ForWorld(world);
  if (!resolved.ok()) return;
  const auto free = PlanTable(inputs(*resolved));
  if (!free.ok()) return;
  const auto share = [&](int64_t bytes) {
    return bytes * random.OneOf<int64_t>({5, 30, 50, 60, 70, 80, 90, 95, 130}) / 100 + 1;
  };
  // A cap that holds sums of one micro-batch. Other sums may need more.
  if (given.gradient_accumulation_steps > 1 && random.OneIn(3)) {
    Config least = *resolved;
    least.zero.stage = 3;
    least.zero.param_persistence_threshold = 0;
    least.zero.offload_optimizer.device = least.zero.offload_param.device = kCpu;
    least.ebb.offload_gradients = least.ebb.offload_activations = kCpu;
    least.ebb.reduce_at = ReduceAt::kRound;
    least.ebb.micro_batches_per_round = 1;
    least.ebb.prefetch_depth = 0;
    least.ebb.coalesce_bytes = 0;
    ebb.device_memory = DeviceBytes(PlanTable(inputs(least))->bytes);
    return;
  }
  const int64_t caps = random.Between(1, 3);
  if ((caps & 1) != 0) ebb.device_memory = share(DeviceBytes(free->bytes));
  if ((caps & 2) != 0)
    ebb.host_memory = share(HostBytes(free->bytes) + DeviceBytes(free->bytes) / 4);
}

inline int64_t Beyond(const Table& table, const Config& config) {
  const auto over = [](int64_t bytes, std::optional<int64_t> cap) {
    return cap ? std::max<int64_t>(0, bytes - *cap) : 0;
  };
  return over(DeviceBytes(table.bytes), config.ebb.device_memory) +
         over(HostBytes(table.bytes), config.ebb.host_memory);
}

// Every combination of what advice may change, one by one.
class BruteForce {
 public:
  BruteForce(const CappedCase& capped, const Config& resolved)
      : capped_(capped), given_(resolved), now_(*PlanTable(capped.inputs(given_))) {
    least_ = Beyond(now_, given_);
    Vary(0, given_);
  }

  // The fewest of a change that fits. Changes that keep the numbers, and changes that do not, are
  // counted apart; so are those that need no more on the device, and those that need more without a
  // cap there.
  struct Fewest {
    int keys = INT_MAX, growing = INT_MAX;
    bool any() const { return std::min(keys, growing) < INT_MAX; }
  };
  Fewest keeping, changing;
  int64_t least() const { return least_; }

 private:
  template <class T>
  void Each(size_t setting, Config& config, T& value, std::initializer_list<T> others) {
    const T given = value;
    Vary(setting + 1, config);
    for (const T& other : others) {
      if (other == given) continue;
      value = other;
      Vary(setting + 1, config);
    }
    value = given;
  }

  void Vary(size_t setting, Config config) {
    using enum Tier;
    using Optional = std::optional<Tier>;
    ZeroConfig& zero = config.zero;
    EbbConfig& ebb = config.ebb;
    switch (setting) {
      case 0:
        if (given_.zero.stage == 0) return Each(setting, config, zero.stage, {1, 3});
        return Each(setting, config, zero.stage, {given_.zero.stage == 3 ? 2 : 3});
      case 1:
        return Each(setting, config, ebb.reduce_at, {ReduceAt::kRound, ReduceAt::kStep});
      case 2:
        return Each(setting, config, zero.offload_optimizer.device, {kDevice, kCpu, kNvme});
      case 3:
        return Each(setting, config, zero.offload_optimizer.ratio, {1.0});
      case 4:
        return Each(setting, config, zero.offload_param.device, {kDevice, kCpu, kNvme});
      case 5:
        if (zero.offload_param.device == kNvme && given_.zero.offload_param.device != kNvme)
          zero.offload_param.max_in_cpu = 0;
        if (zero.offload_param.device != kNvme) return Vary(setting + 1, config);
        return Each(setting, config, zero.offload_param.max_in_cpu, {int64_t{0}});
      case 6:
        return Each(setting, config, ebb.offload_gradients,
                    {Optional(kDevice), Optional(kCpu), Optional(kNvme)});
      case 7:
        return Each(setting, config, ebb.offload_activations,
                    {Optional(kDevice), Optional(kCpu), Optional(kNvme)});
      case 8:
        return Each(setting, config, ebb.micro_batches_per_round, {int64_t{1}});
      case 9:
        return Each(setting, config, zero.param_persistence_threshold, {int64_t{0}});
      case 10:
        return Each(setting, config, ebb.prefetch_depth, {int64_t{0}});
      case 11:
        return Each(setting, config, ebb.coalesce_bytes, {std::optional<int64_t>(0)});
      case 12:
        if (given_.compute != DType::kBFloat16) return Vary(setting + 1, config);
        return Each(setting, config, ebb.split_master, {true});
      case 13:
        if (given_.zero.sub_group_size <= SmallSubGroup(now_)) return Try(config);
        zero.sub_group_size = SmallSubGroup(now_);
        Try(config);
        zero.sub_group_size = given_.zero.sub_group_size;
        return Try(config);
    }
  }

  void Try(Config& config) {
    const bool below = config.parameter_tier() != config.zero.offload_param.device ||
                       config.optimizer_tier() != config.zero.offload_optimizer.device;
    if (below || (config.zero.stage == 0 && config.gradient_tier() != Tier::kDevice)) return;
    // Only in order that several rounds have the sums of the one that is given.
    if (config.ebb.reduce_at == ReduceAt::kStep && given_.reduces_at_round() &&
        (given_.ebb.micro_batches_per_round < given_.gradient_accumulation_steps ||
         config.ebb.micro_batches_per_round == given_.ebb.micro_batches_per_round))
      return;
    const auto table = PlanTable(capped_.inputs(config));
    if (!table.ok()) return;
    ASSERT_OK_AND_ASSIGN(const auto bound, PlanLeastTable(capped_.inputs(config)));
    for (const Tier tier : {Tier::kDevice, Tier::kCpu}) {
      for (size_t c = 0; c < kStateClasses; ++c)
        ASSERT_LE(bound.bytes.On(tier)[c], table->bytes.On(tier)[c]) << config.ToJson();
    }
    least_ = std::min(least_, Beyond(*table, config));
    if (Beyond(*table, config) > 0) return;
    const bool grows =
        !config.ebb.device_memory && DeviceBytes(table->bytes) > DeviceBytes(now_.bytes);
    Fewest& of = KeepsNumbers(config) ? keeping : changing;
    int& fewest = grows ? of.growing : of.keys;
    fewest = std::min(fewest, KeysOf(config));
  }

  // The micro-batches that a rank adds up before others see the sum.
  static int64_t Summed(const Config& c) {
    return c.ebb.reduce_at == ReduceAt::kStep ? c.gradient_accumulation_steps
                                              : c.ebb.micro_batches_per_round;
  }
  bool KeepsNumbers(const Config& c) const {
    return Summed(c) == Summed(given_) &&
           (!capped_.sums_depend_on_groups || c.ebb.coalesce_bytes == given_.ebb.coalesce_bytes);
  }

  int KeysOf(const Config& c) const {
    const bool has_default = (c.zero.stage < 2) != (given_.zero.stage < 2) &&
                             c.gradient_accumulation_steps > c.ebb.micro_batches_per_round;
    return (c.zero.stage != given_.zero.stage) +
           (has_default || c.ebb.reduce_at != given_.ebb.reduce_at) +
           (c.zero.offload_optimizer.device != given_.zero.offload_optimizer.device) +
           (c.zero.offload_optimizer.ratio != given_.zero.offload_optimizer.ratio) +
           (c.zero.offload_param.device != given_.zero.offload_param.device) +
           (c.zero.offload_param.max_in_cpu != given_.zero.offload_param.max_in_cpu) +
           (c.ebb.offload_gradients != given_.ebb.offload_gradients) +
           (c.ebb.offload_activations != given_.ebb.offload_activations) +
           (c.ebb.micro_batches_per_round != given_.ebb.micro_batches_per_round) +
           (c.zero.param_persistence_threshold != given_.zero.param_persistence_threshold) +
           (c.ebb.prefetch_depth != given_.ebb.prefetch_depth) +
           (c.ebb.coalesce_bytes != given_.ebb.coalesce_bytes) +
           (c.ebb.split_master != given_.ebb.split_master) +
           (c.zero.sub_group_size != given_.zero.sub_group_size);
  }

  const CappedCase& capped_;
  const Config& given_;
  const Table now_;
  int64_t least_ = 0;
};

}  // namespace ebb::sharding
