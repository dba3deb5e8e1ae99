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
#include "ebb/sharding/plan_facts.h"
#include "ebb/sharding/unit_places.h"

namespace ebb {
namespace {

absl::Status Ask(const ParameterSpec& parameter, const Slice& slice, std::span<float> values) {
  absl::Status status = parameter.init(slice, values);
  if (status.ok()) status = CheckBytes(parameter, values);
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat("initial values of parameter '", parameter.name, "', elements ",
                                   slice.begin, " to ", slice.end, ": ", status.message()));
}

Slice SliceOf(const ParameterSpec& parameter, const sharding::Interval& interval) {
  return {.parameter = interval.parameter,
          .name = parameter.name,
          .shape = parameter.shape,
          .begin = interval.begin,
          .end = interval.end};
}

// Those of one interval, from an initialiser that is a pure function of name and index.
absl::Status AskTwice(const ParameterSpec& parameter, const sharding::Interval& interval,
                      std::span<float> values) {
  Slice slice = SliceOf(parameter, interval);
  EBB_RETURN_IF_ERROR(Ask(parameter, slice, values));
  if (!kPoisonReleased || values.size() < 2) return absl::OkStatus();
  // A hidden state, such as a random generator, gives other values when the same elements are
  // asked for in another cut.
  std::vector<float> again(std::min<size_t>(values.size() / 2 + 1, 4096));
  slice.begin = interval.end - std::ssize(again);
  EBB_RETURN_IF_ERROR(Ask(parameter, slice, again));
  const auto same = [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); };
  if (std::equal(again.begin(), again.end(), values.end() - std::ssize(again), same))
    return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "initial values of parameter '", parameter.name, "', elements ", slice.begin, " to ",
      slice.end,
      ": asked twice, in different cuts, the initialiser gave different values; it must be a pure "
      "function of name and index, or EngineOptions::initial_values_of_rank_0 be set"));
}

}  // namespace

absl::Status CheckBytes(const ParameterSpec& parameter, std::span<const float> values) {
  if (parameter.compute != DType::kInt8) return absl::OkStatus();
  const auto wrong = std::find_if(values.begin(), values.end(), [](float value) {
    return !(value >= 0 && value <= 255 && value == std::floor(value));
  });
  if (wrong == values.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("parameter '", parameter.name, "' is bytes (ParameterSpec::compute is int8), ",
                   "whose values are whole numbers from 0 to 255, and ", *wrong, " is none"));
}

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
        const absl::Status asked =
            AskTwice(parameter, interval, std::span(values).subspan(at, count));
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
        EBB_RETURN_IF_ERROR(Store(state, unit, trainable, begin, values, states));
      }
    }
  }
  return state.Await();
}

absl::Status InitialValues::Store(StateValues& state, int unit, bool trainable, int64_t begin,
                                  std::span<const float> values,
                                  std::span<const float> states) const {
  const auto write = [&](StateClass what, std::span<const float> from) {
    return state.Write(
        {{.what = what, .unit = unit, .trainable = trainable}, begin, begin + std::ssize(from)},
        from);
  };
  if (trainable) EBB_RETURN_IF_ERROR(write(StateClass::kMaster, values));
  if (!states.empty()) EBB_RETURN_IF_ERROR(write(StateClass::kOptimizer, states));
  if (trainable && !sharding::CopiesMasters(state.plan(), unit)) return absl::OkStatus();
  return write(StateClass::kParameter, values);
}

absl::Status InitialValues::AskInTurn(const sharding::Section& section, int64_t begin,
                                      std::span<float> values) const {
  for (const sharding::Interval& interval :
       sharding::IntervalsIn(section, begin, begin + std::ssize(values))) {
    const ParameterSpec& parameter = (*model)[interval.parameter];
    EBB_RETURN_IF_ERROR(Ask(parameter, SliceOf(parameter, interval),
                            values.subspan(static_cast<size_t>(interval.offset),
                                           static_cast<size_t>(interval.end - interval.begin))));
  }
  return absl::OkStatus();
}

// A rank that has an error broadcasts and receives on: the others wait for every piece.
absl::Status InitialValues::FillAsRank0(StateValues& state, bool is_rank_0,
                                        Broadcast broadcast) const {
  absl::Status own;
  std::vector<float> values, states;
  for (int unit = 0; unit < static_cast<int>(model->units.size()); ++unit) {
    for (const bool trainable : {true, false}) {
      const sharding::Section& section = sharding::SectionOf(state.plan(), unit, trainable);
      for (int64_t begin = 0, end = 0; begin < section.elements; begin = end) {
        const int64_t slice = begin / section.shard;
        end = std::min((slice + 1) * section.shard, begin + sharding::kRunElements);
        values.assign(static_cast<size_t>(end - begin), 0);
        if (is_rank_0 && own.ok()) own = AskInTurn(section, begin, values);
        EBB_RETURN_IF_ERROR(broadcast(values));
        if (slice != state.shard() || !own.ok()) continue;
        states.assign(trainable && OfStates() ? values.size() : 0, 0);
        if (!states.empty()) {
          for (const sharding::Interval& interval : sharding::IntervalsIn(section, begin, end))
            std::fill_n(&states[static_cast<size_t>(interval.offset)],
                        interval.end - interval.begin,
                        InitialState(*config, (*model)[interval.parameter].group));
        }
        own = Store(state, unit, trainable, begin - slice * section.shard, values, states);
      }
    }
  }
  own.Update(state.Await());
  return own;
}

}  // namespace ebb
