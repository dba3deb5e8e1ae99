// Reading and writing state by slices, and gathering one parameter whole.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/optim/cast.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/agreement.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/sharding/interval.h"

namespace ebb {
namespace {

constexpr int64_t kPieceElements = int64_t{1} << 18;  // 1 MiB of fp32

}  // namespace

// Where this rank's slice of one parameter is; empty where it has none of that class.
absl::StatusOr<Executor::StateSlice> Executor::FindSlice(ParameterId p, StateClass what,
                                                         std::string_view optimizer_state) {
  const sharding::ParameterLocation& location = plan().layout.parameters[static_cast<size_t>(p)];
  const sharding::UnitLayout& unit = plan().layout.units[location.unit];
  const sharding::Section& section = location.trainable ? unit.trainable : unit.frozen;
  StateSlice found{.array = {.what = what, .unit = location.unit, .trainable = location.trainable}};
  switch (what) {
    case StateClass::kMaster:
      if (!location.trainable) found.array.what = StateClass::kParameter;
      break;
    case StateClass::kParameter:
      break;
    case StateClass::kGradient:
      if (!progress_.alive || !progress_.reduced)
        return absl::FailedPreconditionError(
            "gradients can be read and written between Step::Reduce and Step::Finish only");
      if (!location.trainable) return found;
      found.scale = 1.0f / control_block_->loss_scale();
      break;
    case StateClass::kOptimizer: {
      EBB_ASSIGN_OR_RETURN(const int state, state_names_.IndexOf(model_[p].group, optimizer_state));
      if (!location.trainable || state < 0) return found;
      found.array.state = state;
      break;
    }
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          "state of class '", std::string(Name(what)),
          "' cannot be read or written; parameter, master, gradient and optimizer can"));
  }
  for (const sharding::Interval& interval : sharding::IntervalsOf(section, shard_)) {
    if (interval.parameter != p) continue;
    found.begin = interval.begin;
    found.end = interval.end;
    found.offset = interval.offset;
  }
  return found;
}

// Calls `visit(piece, slice, at)` for pieces of this rank's slices in declared order, `at` in the
// unit's slice, once pending updates have written them.
absl::Status Executor::ForEachPiece(
    StateClass what, std::string_view optimizer_state,
    absl::FunctionRef<absl::Status(const Slice&, const StateSlice&, int64_t at)> visit) {
  EBB_RETURN_IF_ERROR(Settle());
  EBB_RETURN_IF_ERROR(MayLook());
  for (size_t i = 0; i < model_.parameters.size(); ++i) {
    const ParameterId p{static_cast<int32_t>(i)};
    EBB_ASSIGN_OR_RETURN(const StateSlice found, FindSlice(p, what, optimizer_state));
    if (found.begin == found.end) continue;
    AwaitState();
    EBB_RETURN_IF_ERROR(errors_.Tell());
    for (int64_t begin = found.begin; begin < found.end; begin += kPieceElements) {
      const Slice piece{.parameter = p,
                        .name = model_.parameters[i].name,
                        .shape = model_.parameters[i].shape,
                        .begin = begin,
                        .end = std::min(found.end, begin + kPieceElements)};
      EBB_RETURN_IF_ERROR(visit(piece, found, found.offset + begin - found.begin));
    }
  }
  return errors_.Tell();
}

absl::Status Executor::ReadValues(const StateArray& array, int64_t begin, std::span<float> values) {
  return VisitState(array, begin, begin + static_cast<int64_t>(values.size()), Access::kRead,
                    [&](std::byte* data, DType dtype, int64_t first, int64_t count) {
                      ThreadTeam caller_only(1);
                      optim::Cast(caller_only, data, dtype, values.data() + (first - begin),
                                  DType::kFloat32, count, optim::Rounding::kNearest);
                      return absl::OkStatus();
                    });
}

absl::Status Executor::WriteValues(const StateArray& array, int64_t begin,
                                   std::span<const float> values) {
  const bool parameter = array.what == StateClass::kParameter || array.what == StateClass::kMaster;
  return VisitState(
      array, begin, begin + static_cast<int64_t>(values.size()), Access::kWrite,
      [&](std::byte* data, DType dtype, int64_t first, int64_t count) {
        ThreadTeam caller_only(1);
        optim::Cast(caller_only, values.data() + (first - begin), DType::kFloat32, data, dtype,
                    count, parameter ? optim::Rounding::kParameter : optim::Rounding::kNearest);
        return absl::OkStatus();
      });
}

absl::Status Executor::Read(StateClass what, Engine::Sink sink, std::string_view optimizer_state) {
  std::vector<float> values;
  int verified = -1;  // unit and section
  return ForEachPiece(what, optimizer_state,
                      [&](const Slice& piece, const StateSlice& found, int64_t at) {
                        const int section = 2 * found.array.unit + (found.array.trainable ? 1 : 0);
                        if (std::exchange(verified, section) != section)
                          EBB_RETURN_IF_ERROR(VerifyArray(found.array));
                        values.resize(static_cast<size_t>(piece.end - piece.begin));
                        EBB_RETURN_IF_ERROR(ReadValues(found.array, at, values));
                        if (found.scale != 1) {
                          for (float& value : values) value *= found.scale;
                        }
                        return sink(piece, values);
                      });
}

absl::Status Executor::Write(StateClass what, const Initialiser& source,
                             std::string_view optimizer_state) {
  if (progress_.alive && what != StateClass::kGradient) {
    return absl::FailedPreconditionError(
        "Write while a Step or Evaluation is alive: only gradients can be written then, between "
        "Reduce and Finish");
  }
  // fp32 parameters are their own masters, and of split masters they are a part.
  const sharding::Decisions& decisions = plan().decisions;
  const bool also_masters = what == StateClass::kParameter &&
                            (config_.compute == DType::kFloat32 || decisions.split_master);
  std::vector<float> values;
  absl::Status written = ForEachPiece(
      what, optimizer_state, [&](const Slice& piece, const StateSlice& found, int64_t at) {
        values.resize(static_cast<size_t>(piece.end - piece.begin));
        EBB_RETURN_IF_ERROR(source(piece, values));
        if (found.scale != 1) {
          for (float& value : values) value /= found.scale;
        }
        StateArray array = found.array;
        if (also_masters && array.trainable && decisions.writes_parameters()) {
          array.what = StateClass::kMaster;
          if (decisions.split_master) {
            for (float& value : values) value = static_cast<float>(BFloat16(value));
          }
        }
        return WriteValues(array, at, values);
      });
  // Also after an error, which may be this rank's only: all ranks spread what they have.
  masters_written_ |= what == StateClass::kMaster || also_masters;
  parameters_written_ |= what == StateClass::kParameter;
  states_written_ |= what == StateClass::kOptimizer;
  parameters_differ_ |= what == StateClass::kParameter && decisions.shares_reads &&
                        !decisions.reads_parameters() && !also_masters;
  return written;
}

absl::Status Executor::Gather(ParameterId p, StateClass what, std::span<float> whole, int root) {
  const auto fits = [&] {
    const int64_t elements = Elements(model_[p].shape);
    if ((root >= 0 && root != rank_) || static_cast<int64_t>(whole.size()) == elements)
      return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("Gather of '", model_[p].name, "' into ",
                                                   whole.size(), " elements: it has ", elements));
  };
  return GatherPieces(p, what, root, fits, [&](const Slice& piece, std::span<const float> values) {
    std::copy(values.begin(), values.end(), whole.begin() + piece.begin);
    return absl::OkStatus();
  });
}

absl::Status Executor::Gather(ParameterId p, StateClass what, Engine::Sink sink, int root) {
  return GatherPieces(
      p, what, root, [] { return absl::OkStatus(); }, sink);
}

absl::Status Executor::GatherPieces(ParameterId p, StateClass what, int root,
                                    absl::FunctionRef<absl::Status()> fits, Engine::Sink sink) {
  calls_.Note(CallKind::kGather);
  if (errors_.has_failed()) return Withdraw();
  const auto check = [&]() -> absl::Status {
    EBB_RETURN_IF_ERROR(Settle());
    EBB_RETURN_IF_ERROR(MayLook());
    if (static_cast<size_t>(p) >= model_.parameters.size())
      return absl::InvalidArgumentError(absl::StrCat("Gather of parameter ", static_cast<int>(p),
                                                     ": the model has ", model_.parameters.size()));
    if (what != StateClass::kMaster && what != StateClass::kParameter)
      return absl::InvalidArgumentError("Gather takes kMaster or kParameter");
    if (root < -1 || root >= size_)
      return absl::InvalidArgumentError(
          absl::StrCat("Gather to root ", root, " in a world of ", size_));
    return fits();
  };
  EBB_RETURN_IF_ERROR(AgreeOnStatus(Control(), check()));
  const sharding::ParameterLocation& location = plan().layout.parameters[static_cast<size_t>(p)];
  AwaitState();
  EBB_ASSIGN_OR_RETURN(const StateSlice own, FindSlice(p, what, ""));
  absl::Status read = errors_.Tell();  // of the update that was waited for, on this rank
  if (read.ok() && own.begin != own.end)
    read = VerifyArray(own.array, own.offset, own.offset + own.end - own.begin);
  EBB_RETURN_IF_ERROR(AgreeOnStatus(Control(), read));
  const sharding::UnitLayout& unit = plan().layout.units[location.unit];
  const sharding::Section& section = location.trainable ? unit.trainable : unit.frozen;
  const bool receives = root < 0 || root == rank_;
  std::vector<float> values;
  absl::Status taken;
  for (int r = 0; r < plan().decisions.shards; ++r) {  // the first shard group has it all
    const bool sends = rank_ == r;
    if (!sends && !receives) continue;
    for (const sharding::Interval& interval : sharding::IntervalsOf(section, r)) {
      if (interval.parameter != p) continue;
      for (int64_t begin = interval.begin; begin < interval.end; begin += kPieceElements) {
        const int64_t end = std::min(interval.end, begin + kPieceElements);
        values.resize(static_cast<size_t>(end - begin));
        // A piece that cannot be read is passed on all the same: the others wait for it.
        if (sends && read.ok())
          read = ReadValues(own.array, own.offset + begin - own.begin, values);
        if (!sends || root != r) EBB_RETURN_IF_ERROR(PassValues(values, {.from = r, .to = root}));
        if (!receives || !taken.ok()) continue;
        taken = sink({.parameter = p,
                      .name = model_[p].name,
                      .shape = model_[p].shape,
                      .begin = begin,
                      .end = end},
                     values);
      }
    }
  }
  EBB_RETURN_IF_ERROR(AgreeOnStatus(Control(), read));
  return taken;
}

absl::Status Executor::PassValues(std::span<float> values, Passing ranks) {
  const bool sends = rank_ == ranks.from, receives = ranks.to < 0 || ranks.to == rank_;
  auto* const host = reinterpret_cast<std::byte*>(values.data());
  const auto bytes = static_cast<int64_t>(values.size_bytes());
  const int64_t piece = mirror_.Fitting(bytes, /*others=*/0);
  for (int64_t begin = 0; begin < bytes; begin += piece) {
    const int64_t length = std::min(piece, bytes - begin);
    std::byte* const data = mirror_.Of(host + begin, 0);
    const CollectiveSpan span{
        .send = data, .receive = data, .count = length / int64_t{sizeof(float)}};
    if (sends) mirror_.Upload(*reduce_, host + begin, 0, length);
    EBB_RETURN_IF_ERROR(
        ranks.to < 0 ? control_->Broadcast(*reduce_, {&span, 1}, DType::kFloat32, ranks.from)
        : sends      ? control_->Send(*reduce_, {&span, 1}, DType::kFloat32, ranks.to)
                     : control_->Receive(*reduce_, {&span, 1}, DType::kFloat32, ranks.from));
    if (receives) mirror_.Download(*reduce_, 0, length);
    reduce_->WaitIdle();
    if (receives) mirror_.Take(host + begin, 0, length);
  }
  return absl::OkStatus();
}

}  // namespace ebb
