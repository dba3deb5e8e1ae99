// The values that a model begins with, from its initialisers into the slices of this rank, and from
// there to what ranks keep whole.
#include <algorithm>
#include <cmath>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "ebb/optim/cast.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/sharding/interval.h"

namespace ebb {

using sharding::Section;

// Fills this rank's slices from the parameters' own initialisers, spread over the device's threads.
// Pieces begin where parts of a shard may be cut, so that no two of them share a block of the disk.
absl::Status Executor::FillSlices() {
  constexpr int64_t kPieceElements = 128 * sharding::kCutElements;
  std::vector<FillPiece> pieces;
  for (size_t u = 0; u < model_.units.size(); ++u) {
    for (const bool trainable : {true, false}) {
      const sharding::UnitLayout& layout = plan().layout.units[u];
      const int64_t shard = trainable ? layout.trainable.shard : layout.frozen.shard;
      for (int64_t begin = 0; begin < shard; begin += kPieceElements) {
        pieces.push_back({.unit = static_cast<int>(u),
                          .trainable = trainable,
                          .begin = begin,
                          .end = std::min(shard, begin + kPieceElements)});
      }
    }
  }
  std::mutex mutex;
  absl::Status first_error;
  compute_.team().Run(static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      absl::Status status = Fill(pieces[static_cast<size_t>(i)]);
      const std::lock_guard lock(mutex);
      if (first_error.ok()) first_error = std::move(status);
    }
  });
  return first_error;
}

absl::Status Executor::Fill(const FillPiece& piece) {
  const sharding::UnitLayout& layout = plan().layout.units[static_cast<size_t>(piece.unit)];
  const Section& section = piece.trainable ? layout.trainable : layout.frozen;
  std::vector<float> values(static_cast<size_t>(piece.end - piece.begin)), states;
  const int64_t start = shard_ * section.shard;
  for (const sharding::Interval& interval :
       sharding::IntervalsIn(section, start + piece.begin, start + piece.end)) {
    const ParameterSpec& parameter = model_[interval.parameter];
    const size_t count = static_cast<size_t>(interval.end - interval.begin);
    Slice slice{.parameter = interval.parameter,
                .name = parameter.name,
                .shape = parameter.shape,
                .begin = interval.begin,
                .end = interval.end};
    const std::span<float> out =
        std::span(values).subspan(static_cast<size_t>(interval.offset), count);
    const auto named = [&](const absl::Status& status) {
      return absl::Status(status.code(), absl::StrCat("initial values of parameter '",
                                                      parameter.name, "', elements ", slice.begin,
                                                      " to ", slice.end, ": ", status.message()));
    };
    if (absl::Status status = parameter.init(slice, out); !status.ok()) return named(status);
    const float state = options_.optimizer ? 0 : InitialState(config_, parameter.group);
    if (state != 0 && piece.trainable) {
      states.resize(values.size());
      std::fill_n(states.begin() + interval.offset, count, state);
    }
    if (!kPoisonReleased || count < 2) continue;
    // A hidden state, such as a random generator, gives other values when the same elements are
    // asked for in another cut.
    std::vector<float> again(std::min<size_t>(count / 2 + 1, 4096));
    slice.begin = interval.end - static_cast<int64_t>(again.size());
    if (absl::Status status = parameter.init(slice, again); !status.ok()) return named(status);
    const auto same = [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); };
    if (!std::equal(again.begin(), again.end(), out.end() - static_cast<int64_t>(again.size()),
                    same)) {
      return named(absl::InvalidArgumentError(
          "asked twice, in different cuts, the initialiser gave different values; it must be a "
          "pure function of name and index"));
    }
  }
  const StateArray parameters{
      .what = StateClass::kParameter, .unit = piece.unit, .trainable = piece.trainable};
  if (!piece.trainable) return WriteValues(parameters, piece.begin, values);
  EBB_RETURN_IF_ERROR(
      WriteValues({.what = StateClass::kMaster, .unit = piece.unit}, piece.begin, values));
  if (!states.empty()) {
    EBB_RETURN_IF_ERROR(
        WriteValues({.what = StateClass::kOptimizer, .unit = piece.unit}, piece.begin, states));
  }
  const sharding::Decisions& decisions = plan().decisions;
  if (!decisions.writes_parameters() || decisions.reads_parameters()) return absl::OkStatus();
  return WriteValues(parameters, piece.begin, values);
}

bool Executor::FillsStates() const {
  return !options_.optimizer && std::any_of(model_.parameters.begin(), model_.parameters.end(),
                                            [this](const ParameterSpec& parameter) {
                                              return parameter.trainable &&
                                                     InitialState(config_, parameter.group) != 0;
                                            });
}

// This rank's slice of the parameters from its masters.
absl::Status Executor::CastMasters(int unit, int64_t begin, int64_t end) {
  const sharding::Decisions& decisions = plan().decisions;
  if (!decisions.writes_parameters() || decisions.reads_parameters()) return absl::OkStatus();
  return VisitState({.what = StateClass::kMaster, .unit = unit}, begin, end, Access::kRead,
                    [&](std::byte* data, DType, int64_t first, int64_t count) {
                      return WriteValues(
                          {.what = StateClass::kParameter, .unit = unit}, first,
                          {reinterpret_cast<const float*>(data), static_cast<size_t>(count)});
                    });
}

// Makes what ranks keep whole of masters, parameters and states agree with the slices that were
// filled or written.
absl::Status Executor::SpreadSlices(bool masters, bool parameters, bool states) {
  const sharding::Decisions& decisions = plan().decisions;
  const bool stage0 = decisions.stage == 0;
  const auto gather = [&](const std::vector<CollectiveSpan>& spans, DType dtype) {
    absl::Status called = gather_communicator_->AllGather(*gather_, spans, dtype);
    if (!called.ok()) gather_communicator_->Abort(called);  // the others are waiting in it
    gather_->WaitIdle();
    return called;
  };
  for (size_t i = 0; i < model_.units.size(); ++i) {
    const int unit = static_cast<int>(i);
    const sharding::UnitLayout& layout = plan().layout.units[i];
    std::vector<CollectiveSpan> fp32, halves, compute;
    const int64_t shard = layout.trainable.shard;
    const auto add = [&](std::vector<CollectiveSpan>& spans, const sharding::Place& whole,
                         int64_t size) {
      std::byte* const values = storage_->At(whole);
      spans.push_back({.send = values + shard_ * shard * size, .receive = values, .count = shard});
    };
    if (stage0 && shard > 0) {
      const sharding::SubGroup& group = plan().pools.homes.sub_groups[static_cast<size_t>(
          plan().pools.homes.units[i].first_sub_group)];
      if (masters && decisions.master_size() > 0)
        add(decisions.split_master ? halves : fp32, group.master, decisions.master_size());
      for (int k = 0; states && k < decisions.optimizer_states; ++k)
        add(fp32, group.states.Plus(k * group.states_stride), 4);
    }
    EBB_RETURN_IF_ERROR(gather(fp32, DType::kFloat32));
    EBB_RETURN_IF_ERROR(gather(halves, DType::kBFloat16));  // 16 bits, whatever they mean
    if (decisions.kept_whole[i] && (parameters || masters)) compute = GatherSpans(unit);
    EBB_RETURN_IF_ERROR(gather(compute, decisions.compute));
  }
  NoteIfBroken(*gather_communicator_, "spreading of values");
  return gather_communicator_->status();
}

// After writing from outside, which touches slices only.
absl::Status Executor::SpreadWritten() {
  const bool masters = std::exchange(masters_written_, false),
             parameters = std::exchange(parameters_written_, false),
             states = std::exchange(states_written_, false);
  if (!masters && !parameters && !states) return absl::OkStatus();
  AwaitState();
  absl::Status cast;  // of this rank; all ranks spread what they have
  for (size_t u = 0; masters && u < model_.units.size(); ++u) {
    const int unit = static_cast<int>(u);
    const int64_t shard = plan().layout.units[u].trainable.shard;
    if (shard == 0) continue;
    if (absl::Status status = CastMasters(unit, 0, shard); cast.ok()) cast = std::move(status);
  }
  if (!cast.ok()) errors_.Fail(cast);
  return SpreadSlices(masters, parameters, states);
}

}  // namespace ebb
