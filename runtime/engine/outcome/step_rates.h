// The learning rates and weight decays that a trainer gives for one step, by group. Other rates are
// the schedule's and the config's. Rates are kept by parity, because updates of two steps may run
// at once. A read waits for the write of its own step.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/engine/step.h"

namespace ebb {

class StepRates {
 public:
  // `config`: borrowed. `own_optimizer`: the trainer's optimizer has its own weight decay.
  StepRates(const Config& config, bool own_optimizer);

  // Begins a step without given rates.
  void Clear(int parity);
  // Replaces rates that were given before. On an error, which names group and value, none counts.
  absl::Status Give(int parity, std::span<const GroupRates> rates);
  // `group`: of the config; null: the parameters without a group.
  std::optional<double> learning_rate(int parity, const ParameterGroupConfig* group) const;
  std::optional<double> weight_decay(int parity, const ParameterGroupConfig* group) const;
  // Equal on ranks with equal rates.
  uint64_t hash(int parity) const;

 private:
  struct Rates {
    std::optional<double> learning_rate = {}, weight_decay = {};
  };
  size_t IndexOf(const ParameterGroupConfig* group) const;
  void GiveBeside(int parity, const GroupRates& given);

  const Config& config_;
  const bool own_optimizer_;
  std::vector<const ParameterGroupConfig*> groups_;  // the first: none
  std::vector<Rates> rates_[2];                      // by parity, by group
};

}  // namespace ebb
