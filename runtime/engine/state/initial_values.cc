#include "ebb/runtime/engine/state/initial_values.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/buffer.h"
#include "ebb/runtime/engine/updates/update_table.h"
#include "ebb/sharding/fingerprint.h"
#include "ebb/sharding/interval.h"
#include "ebb/sharding/plan_facts.h"
#include "ebb/sharding/split.h"

namespace ebb {
namespace {

absl::Status Ask(const ModelSpec& model, const Slice& slice, std::span<float> values) {
  absl::Status status = model[slice.parameter].init(slice, values);
  if (status.ok()) status = CheckBytes(model[slice.parameter], values);
  if (status.ok()) return status;
  return absl::Status(
      status.code(),
      absl::StrCat("initial values of parameter '", model[slice.parameter].name, "', elements ",
                   slice.begin, " to ", slice.end, ": ", status.message()));
}

// An initialiser is a pure function of name and index.
absl::Status AskTwice(const ModelSpec& model, Slice slice, std::span<float> values) {
  EBB_RETURN_IF_ERROR(Ask(model, slice, values));
  if (!kPoisonReleased || values.size() < 2) return absl::OkStatus();
  // A hidden state, such as a random generator, gives other values when the same elements are
  // asked for in another cut.
  std::vector<float> again(std::min<size_t>(values.size() / 2 + 1, 4096));
  slice.begin = slice.end - std::ssize(again);
  EBB_RETURN_IF_ERROR(Ask(model, slice, again));
  const auto same = [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); };
  if (std::equal(again.begin(), again.end(), values.end() - std::ssize(again), same))
    return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "initial values of parameter '", model[slice.parameter].name, "', elements ", slice.begin,
      " to ", slice.end,
      ": the initialiser was called twice, for slices of different lengths, and gave different "
      "values. Make it a function of name and index alone, or set "
      "EngineOptions::initial_values_of_rank_0"));
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
                   "so its values must be whole numbers from 0 to 255, not ", *wrong));
}

bool InitialValues::OfStates() const {
  return !inputs.options.optimizer &&
         std::any_of(inputs.model.parameters.begin(), inputs.model.parameters.end(),
                     [this](const ParameterSpec& parameter) {
                       return parameter.trainable &&
                              InitialState(inputs.config, parameter.group) != 0;
                     });
}

// `values` is of the interval.
absl::Status InitialValues::FillFrom(const sharding::Interval& interval,
                                     std::span<float> values) const {
  return ForEachSlice(inputs.model, interval.parameter, interval.begin, interval.end,
                      [&](const Slice& slice, int64_t local) {
                        const auto count = static_cast<size_t>(slice.end - slice.begin);
                        return AskTwice(inputs.model, slice,
                                        values.subspan(static_cast<size_t>(local), count));
                      });
}

// Runs that are as long as a slot of the staging is, each by all threads.
absl::Status InitialValues::Fill(StateValues& state) {
  std::vector<float> values;
  const auto fill = [&](const sharding::Section& section, int64_t first) -> absl::Status {
    std::mutex mutex;
    absl::Status error;
    state.team().Run(std::ssize(values), sharding::kCutElements, [&](int64_t from, int64_t to) {
      for (const sharding::Interval& interval :
           sharding::IntervalsIn(section, first + from, first + to)) {
        const auto at = static_cast<size_t>(from + interval.offset),
                   count = static_cast<size_t>(interval.end - interval.begin);
        const absl::Status asked = FillFrom(interval, std::span(values).subspan(at, count));
        const std::lock_guard lock(mutex);
        error.Update(asked);
      }
    });
    return error;
  };
  for (int unit = 0; unit < static_cast<int>(inputs.model.units.size()); ++unit) {
    for (const bool trainable : {true, false}) {
      const sharding::Section& section = sharding::SectionOf(state.plan(), unit, trainable);
      for (int64_t begin = 0; begin < section.shard; begin += sharding::kRunElements) {
        const int64_t end = std::min(section.shard, begin + sharding::kRunElements);
        values.assign(static_cast<size_t>(end - begin), 0);
        const int64_t first = state.shard() * section.shard + begin;
        EBB_RETURN_IF_ERROR(fill(section, first));
        EBB_RETURN_IF_ERROR(Store(state, unit, trainable, first, values));
      }
    }
  }
  return state.Await();
}

// Replicas are compared by these hashes. Without tensor ranks there are none.
void InitialValues::Hash(const sharding::Section& section, int64_t first,
                         std::span<const float> values) {
  if (!inputs.verdict.has_value()) return;
  filled.resize(inputs.model.parameters.size());
  for (const sharding::Interval& interval :
       sharding::IntervalsIn(section, first, first + std::ssize(values))) {
    if (inputs.model[interval.parameter].over_tensor != OverTensor::kWhole) continue;
    const auto count = static_cast<size_t>(interval.end - interval.begin);
    const std::span<const float> run = values.subspan(static_cast<size_t>(interval.offset), count);
    int64_t& hash = filled[static_cast<size_t>(interval.parameter)];
    hash =
        static_cast<int64_t>(sharding::Hasher()
                                 .Add(hash)
                                 .Add({reinterpret_cast<const char*>(run.data()), run.size_bytes()})
                                 .hash());
  }
}

absl::Status InitialValues::Store(StateValues& state, int unit, bool trainable, int64_t first,
                                  std::span<const float> values) {
  const sharding::Section& section = sharding::SectionOf(state.plan(), unit, trainable);
  Hash(section, first, values);
  const int64_t begin = first % section.shard;
  const auto write = [&](StateClass what, std::span<const float> from) {
    return state.Write(
        {{.what = what, .unit = unit, .trainable = trainable}, begin, begin + std::ssize(from)},
        from);
  };
  if (trainable) EBB_RETURN_IF_ERROR(write(StateClass::kMaster, values));
  if (trainable && OfStates()) {
    std::vector<float> states(values.size());
    for (const sharding::Interval& interval :
         sharding::IntervalsIn(section, first, first + std::ssize(values)))
      std::fill_n(&states[static_cast<size_t>(interval.offset)], interval.end - interval.begin,
                  InitialState(inputs.config, inputs.model[interval.parameter].group));
    EBB_RETURN_IF_ERROR(write(StateClass::kOptimizer, states));
  }
  if (trainable && !sharding::CopiesMasters(state.plan(), unit)) return absl::OkStatus();
  return write(StateClass::kParameter, values);
}

absl::Status InitialValues::AskInTurn(const sharding::Section& section, int64_t begin,
                                      std::span<float> values) const {
  for (const sharding::Interval& interval :
       sharding::IntervalsIn(section, begin, begin + std::ssize(values))) {
    EBB_RETURN_IF_ERROR(
        Ask(inputs.model,
            sharding::SliceOf(inputs.model, interval.parameter, interval.begin, interval.end),
            values.subspan(static_cast<size_t>(interval.offset),
                           static_cast<size_t>(interval.end - interval.begin))));
  }
  return absl::OkStatus();
}

// A rank that has an error broadcasts and receives on: the others wait for every piece.
absl::Status InitialValues::FillAsRank0(StateValues& state, bool is_rank_0, Broadcast broadcast) {
  if (inputs.cuts_model) return FillBlocksAsRank0(state, is_rank_0, broadcast);
  absl::Status own;
  std::vector<float> values;
  for (int unit = 0; unit < static_cast<int>(inputs.model.units.size()); ++unit) {
    for (const bool trainable : {true, false}) {
      const sharding::Section& section = sharding::SectionOf(state.plan(), unit, trainable);
      for (int64_t begin = 0, end = 0; begin < section.elements; begin = end) {
        const int64_t slice = begin / section.shard;
        end = std::min((slice + 1) * section.shard, begin + sharding::kRunElements);
        values.assign(static_cast<size_t>(end - begin), 0);
        if (is_rank_0 && own.ok()) own = AskInTurn(section, begin, values);
        EBB_RETURN_IF_ERROR(broadcast(values));
        if (slice != state.shard() || !own.ok()) continue;
        own = Store(state, unit, trainable, begin, values);
      }
    }
  }
  own.Update(state.Await());
  return own;
}

absl::Status InitialValues::FillBlocksAsRank0(StateValues& state, bool is_rank_0,
                                              Broadcast broadcast) {
  absl::Status own;
  std::vector<float> values, mine;
  for (int unit = 0; unit < static_cast<int>(inputs.model.units.size()); ++unit) {
    for (const bool trainable : {true, false}) {
      const sharding::Section& section = sharding::SectionOf(state.plan(), unit, trainable);
      const int64_t first = state.shard() * section.shard;
      mine.assign(static_cast<size_t>(section.shard), 0);
      for (const sharding::PlacedParameter& placed : section.placements) {
        const ParameterSpec& parameter = inputs.model[placed.parameter];
        const std::vector<int64_t>& shape = WholeShape(parameter);
        const int64_t elements = Elements(shape);
        for (int64_t begin = 0, end = 0; begin < elements; begin = end) {
          end = std::min(elements, begin + sharding::kRunElements);
          values.assign(static_cast<size_t>(end - begin), 0);
          const Slice slice = {placed.parameter, parameter.name, shape, begin, end};
          if (is_rank_0 && own.ok()) own = Ask(inputs.model, slice, values);
          EBB_RETURN_IF_ERROR(broadcast(values));
          TakeOfWhole(parameter, begin, values, first - placed.offset, mine);
        }
      }
      for (int64_t begin = 0; begin < section.shard && own.ok(); begin += sharding::kRunElements) {
        const int64_t count = std::min(section.shard - begin, sharding::kRunElements);
        own =
            Store(state, unit, trainable, first + begin,
                  std::span(mine).subspan(static_cast<size_t>(begin), static_cast<size_t>(count)));
      }
    }
  }
  own.Update(state.Await());
  return own;
}

}  // namespace ebb
