// Reading and writing state by slices, and gathering one parameter whole.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/optim/cast.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/agreement.h"
#include "ebb/runtime/engine/executor.h"
#include "ebb/sharding/interval.h"

namespace ebb {
namespace {

constexpr int64_t kPieceElements = int64_t{1} << 18;  // 1 MiB of fp32

}  // namespace

// Where this rank's slice of one parameter is; data null where it has none of that class.
absl::StatusOr<Executor::StateSlice> Executor::FindSlice(ParameterId p, StateClass what,
                                                         std::string_view optimizer_state) {
  const sharding::ParameterLocation& location = plan().layout.parameters[static_cast<size_t>(p)];
  const sharding::UnitLayout& unit = plan().layout.units[location.unit];
  const sharding::Section& section = location.trainable ? unit.trainable : unit.frozen;
  const DType compute = config_.compute;
  StateSlice found;
  std::byte* base = nullptr;
  switch (what) {
    case StateClass::kMaster:
    case StateClass::kParameter:
      if (what == StateClass::kMaster && location.trainable) {
        base = reinterpret_cast<std::byte*>(storage_->MasterSlice(location.unit));
      } else {
        base = storage_->Slice(location.unit, location.trainable);
        found.dtype = compute;
      }
      break;
    case StateClass::kGradient:
      if (!progress_.alive || !progress_.reduced)
        return absl::FailedPreconditionError(
            "gradients can be read and written between Step::Reduce and Step::Finish only");
      if (!location.trainable) return found;
      base = storage_->GradientSlice(location.unit);
      found.dtype = plan().decisions.shard_dtype(location.unit);
      found.scale = 1.0f / loss_scale_;
      break;
    case StateClass::kOptimizer: {
      std::vector<std::string> names;
      if (options_.optimizer) {
        names = options_.optimizer->states;
      } else {
        for (std::string_view name : optim::StateNames(config_.optimizer)) names.emplace_back(name);
      }
      const auto state = std::find(names.begin(), names.end(), std::string(optimizer_state));
      if (state == names.end()) {
        return absl::InvalidArgumentError(
            absl::StrCat("the optimizer has no state '", std::string(optimizer_state), "'; it has ",
                         names.empty() ? "none" : absl::StrJoin(names, ", ")));
      }
      if (!location.trainable) return found;
      base = reinterpret_cast<std::byte*>(
          storage_->StateSlice(location.unit, static_cast<int>(state - names.begin())));
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
    found.data = base + interval.offset * SizeOf(found.dtype);
  }
  return found;
}

// Calls `visit(piece, data)` for pieces of this rank's slices in declared order, once pending
// updates have written them.
absl::Status Executor::ForEachPiece(
    StateClass what, std::string_view optimizer_state,
    absl::FunctionRef<absl::Status(const Slice&, const StateSlice&, std::byte*)> visit) {
  EBB_RETURN_IF_ERROR(StuckError());
  for (size_t i = 0; i < model_.parameters.size(); ++i) {
    const ParameterId p{static_cast<int32_t>(i)};
    EBB_ASSIGN_OR_RETURN(const StateSlice found, FindSlice(p, what, optimizer_state));
    if (found.data == nullptr) continue;
    updated_[plan().layout.parameters[i].unit].Wait();
    for (int64_t begin = found.begin; begin < found.end; begin += kPieceElements) {
      const Slice piece{.parameter = p,
                        .name = model_.parameters[i].name,
                        .shape = model_.parameters[i].shape,
                        .begin = begin,
                        .end = std::min(found.end, begin + kPieceElements)};
      EBB_RETURN_IF_ERROR(
          visit(piece, found, found.data + (begin - found.begin) * SizeOf(found.dtype)));
    }
  }
  return StuckError();
}

absl::Status Executor::Read(StateClass what, Engine::Sink sink, std::string_view optimizer_state) {
  std::vector<float> converted;
  return ForEachPiece(
      what, optimizer_state, [&](const Slice& piece, const StateSlice& found, std::byte* data) {
        const size_t count = static_cast<size_t>(piece.end - piece.begin);
        if (found.dtype == DType::kFloat32 && found.scale == 1)
          return sink(piece, {reinterpret_cast<const float*>(data), count});
        converted.resize(count);
        optim::Cast(compute_.team(), data, found.dtype, converted.data(), DType::kFloat32,
                    static_cast<int64_t>(count), optim::Rounding::kNearest);
        if (found.scale != 1) {
          for (float& value : converted) value *= found.scale;
        }
        return sink(piece, converted);
      });
}

absl::Status Executor::Write(StateClass what, const Initialiser& source,
                             std::string_view optimizer_state) {
  if (progress_.alive && what != StateClass::kGradient) {
    return absl::FailedPreconditionError(
        "Write while a Step or Evaluation is alive: only gradients can be written then, between "
        "Reduce and Finish");
  }
  std::vector<float> values;
  absl::Status written = ForEachPiece(
      what, optimizer_state, [&](const Slice& piece, const StateSlice& found, std::byte* data) {
        values.resize(static_cast<size_t>(piece.end - piece.begin));
        EBB_RETURN_IF_ERROR(source(piece, values));
        if (found.scale != 1) {
          for (float& value : values) value /= found.scale;
        }
        const bool parameter = what == StateClass::kParameter || what == StateClass::kMaster;
        optim::Cast(compute_.team(), values.data(), DType::kFloat32, data, found.dtype,
                    piece.end - piece.begin,
                    parameter ? optim::Rounding::kParameter : optim::Rounding::kNearest);
        return absl::OkStatus();
      });
  // Also after an error, which may be this rank's only: all ranks spread what they have.
  masters_written_ |= what == StateClass::kMaster ||
                      (what == StateClass::kParameter && config_.compute == DType::kFloat32);
  parameters_written_ |= what == StateClass::kParameter;
  states_written_ |= what == StateClass::kOptimizer;
  progress_.gradients_written |= what == StateClass::kGradient;
  return written;
}

absl::Status Executor::Gather(ParameterId p, StateClass what, std::span<float> whole, int root) {
  if (HasFailed()) return Withdraw();
  const auto check = [&]() -> absl::Status {
    EBB_RETURN_IF_ERROR(StuckError());
    if (static_cast<size_t>(p) >= model_.parameters.size())
      return absl::InvalidArgumentError(absl::StrCat("Gather of parameter ", static_cast<int>(p),
                                                     ": the model has ", model_.parameters.size()));
    if (what != StateClass::kMaster && what != StateClass::kParameter)
      return absl::InvalidArgumentError("Gather takes kMaster or kParameter");
    if (root < -1 || root >= size_)
      return absl::InvalidArgumentError(
          absl::StrCat("Gather to root ", root, " in a world of ", size_));
    const int64_t elements = Elements(model_[p].shape);
    if ((root < 0 || root == rank_) && static_cast<int64_t>(whole.size()) != elements) {
      return absl::InvalidArgumentError(absl::StrCat("Gather of '", model_[p].name, "' into ",
                                                     whole.size(), " elements: it has ", elements));
    }
    return absl::OkStatus();
  };
  EBB_RETURN_IF_ERROR(AgreeOnStatus(*control_, *reduce_, check()));
  const sharding::ParameterLocation& location = plan().layout.parameters[static_cast<size_t>(p)];
  updated_[location.unit].Wait();
  EBB_ASSIGN_OR_RETURN(const StateSlice own, FindSlice(p, what, ""));
  std::vector<float> converted;
  const std::byte* send = own.data;
  if (own.data != nullptr && own.dtype != DType::kFloat32) {
    converted.resize(static_cast<size_t>(own.end - own.begin));
    optim::Cast(compute_.team(), own.data, own.dtype, converted.data(), DType::kFloat32,
                own.end - own.begin, optim::Rounding::kNearest);
    send = reinterpret_cast<const std::byte*>(converted.data());
  }
  const sharding::UnitLayout& unit = plan().layout.units[location.unit];
  const sharding::Section& section = location.trainable ? unit.trainable : unit.frozen;
  const int shards = plan().decisions.shards;
  for (int r = 0; r < shards; ++r) {  // the first shard group has it all
    for (const sharding::Interval& interval : sharding::IntervalsOf(section, r)) {
      if (interval.parameter != p) continue;
      const bool receives = root < 0 || root == rank_;
      const CollectiveSpan span{.send = send,
                                .receive = receives ? whole.data() + interval.begin : nullptr,
                                .count = interval.end - interval.begin};
      if (root < 0) {
        EBB_RETURN_IF_ERROR(control_->Broadcast(*reduce_, {&span, 1}, DType::kFloat32, r));
      } else if (rank_ == r && root == r) {
        std::memcpy(span.receive, span.send, static_cast<size_t>(span.count) * sizeof(float));
      } else if (rank_ == r) {
        EBB_RETURN_IF_ERROR(control_->Send(*reduce_, {&span, 1}, DType::kFloat32, root));
      } else if (rank_ == root) {
        EBB_RETURN_IF_ERROR(control_->Receive(*reduce_, {&span, 1}, DType::kFloat32, r));
      }
      reduce_->WaitIdle();
    }
  }
  return control_->status();
}

}  // namespace ebb
