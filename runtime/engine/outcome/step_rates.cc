#include "ebb/runtime/engine/outcome/step_rates.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/engine/matrix_groups.h"
#include "ebb/sharding/fingerprint.h"

namespace ebb {
namespace {

bool IsRate(const std::optional<double>& value) {
  return !value || (std::isfinite(static_cast<float>(*value)) && *value >= 0);
}

}  // namespace

StepRates::StepRates(const Config& config, bool own_optimizer)
    : config_(config), own_optimizer_(own_optimizer), groups_({nullptr}) {
  for (const auto& [name, group] : config_.ebb.parameter_groups) groups_.push_back(&group);
  for (std::vector<Rates>& rates : rates_) rates.resize(groups_.size());
}

size_t StepRates::IndexOf(const ParameterGroupConfig* group) const {
  return static_cast<size_t>(std::find(groups_.begin(), groups_.end(), group) - groups_.begin());
}

void StepRates::Clear(int parity) {
  std::fill(rates_[parity].begin(), rates_[parity].end(), Rates());
}

absl::Status StepRates::Give(int parity, std::span<const GroupRates> rates) {
  const auto& named = config_.ebb.parameter_groups;
  for (const GroupRates& given : rates) {
    const std::string group = given.group.empty() ? std::string("the parameters of no group")
                                                  : absl::StrCat("group '", given.group, "'");
    if (!given.group.empty() && named.find(given.group) == named.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rates for ", group,
          ", which \"ebb.parameter_groups\" does not name: add it there, {} is enough"));
    }
    if (own_optimizer_ && given.weight_decay) {
      return absl::InvalidArgumentError(
          absl::StrCat("weight_decay ", *given.weight_decay, " for ", group,
                       ": with EngineOptions::optimizer it is that optimizer's own"));
    }
    for (const auto& [name, value] : {std::pair("learning_rate", given.learning_rate),
                                      std::pair("weight_decay", given.weight_decay)}) {
      if (IsRate(value)) continue;
      return absl::InvalidArgumentError(absl::StrCat(name, " ", *value, " for ", group,
                                                     ": it must be 0 or more, and an fp32 number"));
    }
  }
  // Rates that are given themselves replace those that follow from others.
  for (const GroupRates& given : rates) GiveBeside(parity, given);
  for (const GroupRates& given : rates) {
    const ParameterGroupConfig* const group =
        given.group.empty() ? nullptr : &named.find(given.group)->second;
    Rates& of = rates_[parity][IndexOf(group)];
    if (given.learning_rate) of.learning_rate = given.learning_rate;
    if (given.weight_decay) of.weight_decay = given.weight_decay;
  }
  return absl::OkStatus();
}

// The parameters of the group that AdamW updates beside Muon keep their part of the rate.
void StepRates::GiveBeside(int parity, const GroupRates& given) {
  const auto beside = config_.ebb.parameter_groups.find(GroupBeside(given.group));
  if (beside == config_.ebb.parameter_groups.end()) return;
  const auto group = config_.ebb.parameter_groups.find(given.group);
  const double own = group == config_.ebb.parameter_groups.end() ? 1 : group->second.lr_factor;
  Rates& of = rates_[parity][IndexOf(&beside->second)];
  if (given.learning_rate && own > 0)
    of.learning_rate = *given.learning_rate * (beside->second.lr_factor / own);
  if (given.weight_decay) of.weight_decay = given.weight_decay;
}

std::optional<double> StepRates::learning_rate(int parity,
                                               const ParameterGroupConfig* group) const {
  return rates_[parity][IndexOf(group)].learning_rate;
}

std::optional<double> StepRates::weight_decay(int parity, const ParameterGroupConfig* group) const {
  return rates_[parity][IndexOf(group)].weight_decay;
}

uint64_t StepRates::hash(int parity) const {
  sharding::Hasher hasher;
  for (const Rates& rates : rates_[parity]) {
    for (const std::optional<double>& value : {rates.learning_rate, rates.weight_decay})
      hasher.Add(std::bit_cast<int64_t>(value.value_or(-1)));
  }
  return hasher.hash();
}

}  // namespace ebb
