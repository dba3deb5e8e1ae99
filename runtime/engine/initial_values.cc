#include "ebb/runtime/engine/initial_values.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/buffer.h"
#include "ebb/runtime/engine/update_table.h"
#include "ebb/sharding/interval.h"
#include "ebb/sharding/unit_places.h"

namespace ebb {
namespace {

// Those of one interval.
absl::Status Ask(const ParameterSpec& parameter, const sharding::Interval& interval,
                 std::span<float> values) {
  Slice slice{.parameter = interval.parameter,
              .name = parameter.name,
              .shape = parameter.shape,
              .begin = interval.begin,
              .end = interval.end};
  const auto named = [&](const absl::Status& status) {
    return absl::Status(
        status.code(), absl::StrCat("initial values of parameter '", parameter.name, "', elements ",
                                    slice.begin, " to ", slice.end, ": ", status.message()));
  };
  if (absl::Status status = parameter.init(slice, values); !status.ok()) return named(status);
  if (!kPoisonReleased || values.size() < 2) return absl::OkStatus();
  // A hidden state, such as a random generator, gives other values when the same elements are
  // asked for in another cut.
  std::vector<float> again(std::min<size_t>(values.size() / 2 + 1, 4096));
  slice.begin = interval.end - std::ssize(again);
  if (absl::Status status = parameter.init(slice, again); !status.ok()) return named(status);
  const auto same = [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); };
  if (std::equal(again.begin(), again.end(), values.end() - std::ssize(again), same))
    return absl::OkStatus();
  return named(absl::InvalidArgumentError(
      "asked twice, in different cuts, the initialiser gave different values; it must be a "
      "pure function of name and index"));
}

}  // namespace

bool InitialValues::OfStates() const {
  return !own_optimizer && std::any_of(model->parameters.begin(), model->parameters.end(),
                                       [this](const ParameterSpec& parameter) {
                                         return parameter.trainable &&
                                                InitialState(*config, parameter.group) != 0;
                                       });
}

// Runs that are as long as a slot of the staging is, each by all threads.
absl::Status InitialValues::Fill(StateValues& state) const {
  const bool of_states = OfStates();
  std::vector<float> values, states;
  const auto fill = [&](const sharding::Section& section, int64_t first) -> absl::Status {
    std::mutex mutex;
    absl::Status error;
    state.team().Run(std::ssize(values), sharding::kCutElements, [&](int64_t from, int64_t to) {
      for (const sharding::Interval& interval :
           sharding::IntervalsIn(section, first + from, first + to)) {
        const ParameterSpec& parameter = (*model)[interval.parameter];
        const auto at = static_cast<size_t>(from + interval.offset),
                   count = static_cast<size_t>(interval.end - interval.begin);
        const absl::Status asked = Ask(parameter, interval, std::span(values).subspan(at, count));
        if (!states.empty())
          std::fill_n(&states[at], count, InitialState(*config, parameter.group));
        const std::lock_guard lock(mutex);
        error.Update(asked);
      }
    });
    return error;
  };
  for (int unit = 0; unit < static_cast<int>(model->units.size()); ++unit) {
    for (const bool trainable : {true, false}) {
      const sharding::Section& section = sharding::SectionOf(state.plan(), unit, trainable);
      for (int64_t begin = 0; begin < section.shard; begin += sharding::kRunElements) {
        const int64_t end = std::min(section.shard, begin + sharding::kRunElements);
        values.assign(static_cast<size_t>(end - begin), 0);
        states.assign(trainable && of_states ? values.size() : 0, 0);
        EBB_RETURN_IF_ERROR(fill(section, state.shard() * section.shard + begin));
        const auto write = [&](StateClass what, std::span<const float> from) {
          return state.Write({{.what = what, .unit = unit, .trainable = trainable}, begin, end},
                             from);
        };
        if (trainable) EBB_RETURN_IF_ERROR(write(StateClass::kMaster, values));
        if (!states.empty()) EBB_RETURN_IF_ERROR(write(StateClass::kOptimizer, states));
        if (!trainable || casts_masters) EBB_RETURN_IF_ERROR(write(StateClass::kParameter, values));
      }
    }
  }
  return state.Await();
}

}  // namespace ebb
