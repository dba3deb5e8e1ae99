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
absl::Status Executor::FillSlices() {
  struct Piece {
    int unit = 0;
    bool trainable = true;
    sharding::Interval interval;
  };
  constexpr int64_t kPieceElements = int64_t{1} << 18;
  std::vector<Piece> pieces;
  for (size_t u = 0; u < model_.units.size(); ++u) {
    for (const bool trainable : {true, false}) {
      const sharding::UnitLayout& layout = plan().layout.units[u];
      for (sharding::Interval interval :
           sharding::IntervalsOf(trainable ? layout.trainable : layout.frozen, shard_)) {
        for (; interval.begin < interval.end;
             interval.begin += kPieceElements, interval.offset += kPieceElements) {
          sharding::Interval piece = interval;
          piece.end = std::min(piece.end, piece.begin + kPieceElements);
          pieces.push_back({static_cast<int>(u), trainable, piece});
        }
      }
    }
  }
  std::mutex mutex;
  absl::Status first_error;
  compute_.team().Run(static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Piece& piece = pieces[static_cast<size_t>(i)];
      absl::Status status = FillPiece(piece.unit, piece.trainable, piece.interval);
      const std::lock_guard lock(mutex);
      if (first_error.ok()) first_error = std::move(status);
    }
  });
  return first_error;
}

absl::Status Executor::FillPiece(int unit, bool trainable, const sharding::Interval& interval) {
  const ParameterSpec& parameter = model_[interval.parameter];
  const size_t count = static_cast<size_t>(interval.end - interval.begin);
  Slice slice{.parameter = interval.parameter,
              .name = parameter.name,
              .shape = parameter.shape,
              .begin = interval.begin,
              .end = interval.end};
  std::vector<float> values;
  std::span<float> out;
  if (trainable) {
    out = {storage_->MasterSlice(unit) + interval.offset, count};
  } else {
    values.resize(count);
    out = values;
  }
  const auto named = [&](const absl::Status& status) {
    return absl::Status(
        status.code(), absl::StrCat("initial values of parameter '", parameter.name, "', elements ",
                                    slice.begin, " to ", slice.end, ": ", status.message()));
  };
  if (absl::Status status = parameter.init(slice, out); !status.ok()) return named(status);
  if (kPoisonReleased && count > 1) {
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
  if (!trainable) {
    ThreadTeam caller_only(1);
    optim::Cast(caller_only, out.data(), DType::kFloat32,
                storage_->Slice(unit, false) + interval.offset * SizeOf(config_.compute),
                config_.compute, static_cast<int64_t>(count), optim::Rounding::kParameter);
  }
  return absl::OkStatus();
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
    // Whoever wrote has waited for its own parameters' updates, but a slice may be padding alone.
    gather_->Wait(updated_[i]);
    std::vector<CollectiveSpan> fp32, compute;
    if (stage0 && masters && layout.trainable.shard > 0) {
      fp32.push_back({.send = storage_->MasterSlice(unit),
                      .receive = storage_->Master(unit),
                      .count = layout.trainable.shard});
    }
    for (int k = 0;
         states && stage0 && k < decisions.optimizer_states && layout.trainable.shard > 0; ++k) {
      fp32.push_back({.send = storage_->StateSlice(unit, k),
                      .receive = storage_->State(unit, k),
                      .count = layout.trainable.shard});
    }
    EBB_RETURN_IF_ERROR(gather(fp32, DType::kFloat32));
    if (masters && layout.trainable.shard > 0 && storage_->UpdatedParameter(unit) != nullptr) {
      optim::Cast(gather_->team(), storage_->Master(unit), DType::kFloat32,
                  storage_->UpdatedParameter(unit), decisions.compute,
                  storage_->UpdatedElements(unit), optim::Rounding::kParameter);
    }
    if (decisions.kept_whole[i] && (parameters || masters)) compute = GatherSpans(unit);
    EBB_RETURN_IF_ERROR(gather(compute, decisions.compute));
  }
  return gather_communicator_->status();
}

// After writing from outside, which touches slices only.
absl::Status Executor::SpreadWritten() {
  const bool masters = std::exchange(masters_written_, false),
             parameters = std::exchange(parameters_written_, false),
             states = std::exchange(states_written_, false);
  if (!masters && !parameters && !states) return absl::OkStatus();
  return SpreadSlices(masters, parameters, states);
}

}  // namespace ebb
