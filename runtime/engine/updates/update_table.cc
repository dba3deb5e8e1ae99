#include "ebb/runtime/engine/updates/update_table.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "ebb/optim/stochastic_rounding.h"
#include "ebb/optim/update.h"
#include "ebb/sharding/interval.h"
#include "ebb/sharding/layout.h"

namespace ebb {

static_assert(sharding::kAlignment % optim::kRunMultiple ==
              0);  // parameters begin at such elements

UpdateTable::UpdateTable(const ModelSpec& model, const Config& config, const sharding::Plan& plan,
                         int slice, bool rounds_stochastically) {
  parts_.resize(model.units.size());
  for (size_t u = 0; u < model.units.size(); ++u) {
    const auto [begin, count] = sharding::UpdatedBy(plan, static_cast<int>(u), slice);
    const auto first_run = static_cast<int64_t>(runs_.size());
    AddRuns(model, config, plan.layout.units[u].trainable, begin, count);
    AddParts(rounds_stochastically, first_run, begin, parts_[u]);
  }
}

OptimizerConfig OptimizerOf(const Config& config, const std::string& group) {
  const auto named = config.ebb.parameter_groups.find(group);
  if (named == config.ebb.parameter_groups.end()) return config.optimizer;
  OptimizerConfig optimizer = named->second.optimizer.value_or(config.optimizer);
  optimizer.weight_decay = named->second.weight_decay.value_or(optimizer.weight_decay);
  return optimizer;
}

float InitialState(const Config& config, const std::string& group) {
  const OptimizerConfig optimizer = OptimizerOf(config, group);
  if (optimizer.type != OptimizerType::kAdagrad) return 0;
  return static_cast<float>(optimizer.initial_accumulator_value);
}

int64_t UpdateTable::SetOf(const Config& config, const ParameterSpec& spec, ParameterId parameter) {
  const auto named = config.ebb.parameter_groups.find(spec.group);
  const ParameterGroupConfig* const group =
      named == config.ebb.parameter_groups.end() ? nullptr : &named->second;
  Set set{.group = group,
          .optimizer = OptimizerOf(config, spec.group),
          .lr_factor = group == nullptr ? 1 : group->lr_factor};
  if (TakesNorms(set.optimizer.type)) {
    set.parameter = parameter;
  } else {
    const auto found = std::find_if(sets_.begin(), sets_.end(),
                                    [group](const Set& each) { return each.group == group; });
    if (found != sets_.end()) return found - sets_.begin();
  }
  sets_.push_back(std::move(set));
  return static_cast<int64_t>(sets_.size()) - 1;
}

// Padding joins the run before it and stays zero; before the first parameter it joins that.
void UpdateTable::AddRuns(const ModelSpec& model, const Config& config,
                          const sharding::Section& section, int64_t begin, int64_t elements) {
  const size_t first = runs_.size();
  for (const sharding::Interval& interval :
       sharding::IntervalsIn(section, begin, begin + elements)) {
    const int64_t set = SetOf(config, model[interval.parameter], interval.parameter);
    if (runs_.size() > first) {
      if (runs_.back().set == set) continue;
      runs_.back().end = interval.offset;
    }
    runs_.push_back({.end = elements, .set = set});
  }
}

// Runs of another rule, and elements of another key of random bits, begin a part.
void UpdateTable::AddParts(bool rounds_stochastically, int64_t first_run, int64_t begin,
                           std::vector<Part>& parts) const {
  constexpr int64_t kKey = optim::kRoundingKeyElements;
  int64_t at = 0;
  for (auto run = first_run; run < static_cast<int64_t>(runs_.size()); ++run) {
    const optim::UpdateRun& own = runs_[static_cast<size_t>(run)];
    const optim::UpdateRule rule =
        optim::UpdateRuleOf(sets_[static_cast<size_t>(own.set)].optimizer);
    while (at < own.end) {
      const int64_t of_key = (begin + at) % kKey;
      const int64_t end = rounds_stochastically ? std::min(own.end, at + kKey - of_key) : own.end;
      const bool new_key = rounds_stochastically && of_key == 0;
      if (parts.empty() || parts.back().rule != rule || new_key)
        parts.push_back({.begin = at, .rule = rule, .first_run = run});
      parts.back().end = at = end;
      parts.back().runs = run + 1 - parts.back().first_run;
    }
  }
}

UpdateTable::Runs UpdateTable::RunsIn(const Part& part, int64_t begin, int64_t end) const {
  Runs in{.first = part.first_run, .count = part.runs};
  const auto end_of = [this](int64_t run) { return runs_[static_cast<size_t>(run)].end; };
  while (in.count > 1 && end_of(in.first) <= begin) {
    ++in.first;
    --in.count;
  }
  while (in.count > 1 && end_of(in.first + in.count - 2) >= end) --in.count;
  return in;
}

const UpdateTable::Set* UpdateTable::OnlySetOf(int unit, int64_t begin, int64_t end,
                                               int states) const {
  for (const Part& part : parts(unit)) {
    if (part.begin > begin || part.end < end || optim::TakesNorms(part.rule)) continue;
    const Runs in = RunsIn(part, begin, end);
    const Set& set = sets_[static_cast<size_t>(runs_[static_cast<size_t>(in.first)].set)];
    const auto own = static_cast<int>(optim::StateNames(set.optimizer).size());
    return in.count == 1 && own == states ? &set : nullptr;
  }
  return nullptr;
}

}  // namespace ebb
