#include "ebb/runtime/engine/state/state_values.h"

#include <algorithm>
#include <utility>

#include "ebb/optim/block_codes.h"
#include "ebb/optim/cast.h"
#include "ebb/optim/split_master.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/device_reach.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/issue/issuer.h"
#include "ebb/runtime/engine/outcome/step_errors.h"

namespace ebb {

using sharding::Place;
using sharding::StagedRun;
using sharding::StateRange;
using sharding::StateRun;

optim::StateArray StateValues::StateIn(const StagedRun& run) const {
  return {.codes = At<void>(run, 0),
          .scales = run.run.has_scales() ? At<float>(run, 1) : nullptr,
          .encoding = run.run.stored[0].encoding};
}

void StateValues::ToFloat(const StagedRun& run, float* values) {
  const StateRun& of = run.run;
  if (of.is_split()) {
    optim::Join(team(), At<BFloat16>(run, 0), At<uint16_t>(run, 1), values, of.count());
  } else {
    optim::Decode(team(), StateIn(run), values, of.count());
  }
}

StagedRun StateValues::InSlot(const StateRun& run, size_t slot) const {
  const auto offset = static_cast<int64_t>(slot) * sharding::kStateStagingBytes;
  return {run, way_.staging.Plus(offset), HostReaches(core_.inputs.device)};
}

absl::Status StateValues::Start(Slot& slot, sharding::OpList list) {
  slot.read_ahead = {};
  EBB_RETURN_IF_ERROR(Await(slot));
  list.of_save = way_.of_save;
  while (!way_.of_save && slot.over.size() < list.ops.size()) {
    EBB_ASSIGN_OR_RETURN(Event made, core_.inputs.device.NewEvent());
    slot.over.push_back(std::move(made));
  }
  EBB_ASSIGN_OR_RETURN(
      slot.under_way,
      LinkedList::Link(std::move(list), plan(), core_.inputs.device, core_.storage, core_.order));
  if (way_.of_save) {
    issuer_.StartOfSave(*slot.under_way, way_.copies);
  } else {
    issuer_.StartNow(*slot.under_way, slot.over);
  }
  return absl::OkStatus();
}

absl::Status StateValues::Await(Slot& slot) {
  if (slot.under_way == nullptr) return absl::OkStatus();
  absl::Status status = way_.of_save ? issuer_.AwaitOfSave(*slot.under_way, way_.copies)
                                     : issuer_.AwaitNow(*slot.under_way, slot.over);
  slot.under_way.reset();
  return status;
}

absl::Status StateValues::Await() {
  absl::Status first;
  for (Slot& slot : slots_) {
    slot.read_ahead = {};
    first.Update(Await(slot));
  }
  return first;
}

absl::Status StateValues::Run(sharding::OpList list) {
  EBB_RETURN_IF_ERROR(Leave(std::move(list)));
  return Await();
}

absl::Status StateValues::Leave(sharding::OpList list) {
  absl::Status first = Await();
  first.Update(Start(slots_[0], std::move(list)));
  return first;
}

absl::StatusOr<size_t> StateValues::ReadAhead(const StateRun& run) {
  if (!InSlot(run, 0).is_staged()) return 0;
  for (size_t slot = 0; slot < slots_.size(); ++slot)
    if (slots_[slot].read_ahead == run) return slot;
  const size_t slot = TakeSlot();
  EBB_RETURN_IF_ERROR(Start(slots_[slot], sharding::LowerStateRead(InSlot(run, slot))));
  slots_[slot].read_ahead = run;
  return slot;
}

absl::StatusOr<size_t> StateValues::Fetch(const StateRun& run) {
  EBB_ASSIGN_OR_RETURN(const size_t slot, ReadAhead(run));
  if (!InSlot(run, slot).is_staged()) return slot;
  slots_[slot].read_ahead = {};
  EBB_RETURN_IF_ERROR(Await(slots_[slot]));
  return slot;
}

absl::Status StateValues::Read(const StateRange& range, std::span<float> values,
                               const StateRange* next) {
  std::vector<StateRun> runs = RunsOf(range);
  const size_t own = runs.size();
  if (next != nullptr) runs.push_back(RunsOf(*next).front());
  for (size_t r = 0; r < own; ++r) {
    const StateRun& run = runs[r];
    EBB_RETURN_IF_ERROR(ReadAhead(run).status());
    if (r + 1 < runs.size()) EBB_RETURN_IF_ERROR(ReadAhead(runs[r + 1]).status());
    EBB_ASSIGN_OR_RETURN(const size_t slot, Fetch(run));
    ToFloat(InSlot(run, slot), values.data() + (run.begin - range.begin));
  }
  return absl::OkStatus();
}

absl::Status StateValues::ReadEach(const StateRange& range, Show show) {
  const bool verifies = core_.inputs.config.ebb.verify_swap != VerifySwap::kOff;
  const std::vector<StateRun> runs = RunsOf(range);
  size_t started = 0;
  const auto read = [&](size_t r) -> absl::Status {
    for (; started < std::min(r + slots_.size(), runs.size()); ++started)
      EBB_RETURN_IF_ERROR(ReadAhead(runs[started]).status());
    EBB_ASSIGN_OR_RETURN(const size_t slot, Fetch(runs[r]));
    const StagedRun found = InSlot(runs[r], slot);
    for (size_t k = 0; verifies && k < pieces_.size(); ++k) {
      const sharding::Operand& stored = found.run.stored[k];
      if (stored.place.tier != Tier::kNvme || stored.count == 0) continue;
      if (k == 1 && found.run.has_scales()) {
        const bool ends = r + 1 == runs.size() ||
                          runs[r + 1].stored[0].place.offset !=
                              found.run.stored[0].place.offset + found.run.stored[0].bytes();
        if (!VerifyScales(found, ends)) return core_.errors.failure();
        continue;
      }
      if (!verifier_.VerifyPiece(
              pieces_[k], stored.place,
              {At<const std::byte>(found, k), static_cast<size_t>(stored.bytes())}))
        return core_.errors.failure();
    }
    return show(runs[r], ValuesOf(found));
  };
  absl::Status status;
  for (size_t r = 0; r < runs.size() && status.ok(); ++r) status = read(r);
  status.Update(Await());
  return status;
}

// The scales of an array lie behind all of its codes, so they are kept until these have come.
bool StateValues::VerifyScales(const StagedRun& run, bool ends) {
  const sharding::Operand& stored = run.run.stored[1];
  if (scales_.empty()) first_scale_ = stored.place;
  const std::byte* const data = At<const std::byte>(run, 1);
  scales_.insert(scales_.end(), data, data + stored.bytes());
  if (!ends) return true;
  const bool agrees = verifier_.VerifyPiece(pieces_[0], first_scale_, scales_);
  scales_.clear();
  return agrees;
}

// Where they are, if that is how they are kept.
std::span<const float> StateValues::ValuesOf(const StagedRun& run) {
  const auto count = static_cast<size_t>(run.run.count());
  if (!run.run.is_split() && run.run.stored[0].encoding == DType::kFloat32)
    return {At<const float>(run, 0), count};
  values_.resize(count);
  ToFloat(run, values_.data());
  return values_;
}

// Blocks that the run covers in part it may share with the run before, which is on its way.
absl::Status StateValues::PrepareWrite(const StagedRun& run, Slot& slot) {
  EBB_RETURN_IF_ERROR(Await(slot));
  sharding::OpList edges = sharding::LowerStateEdges(run);
  if (edges.ops.empty()) return absl::OkStatus();
  EBB_RETURN_IF_ERROR(Await());
  EBB_RETURN_IF_ERROR(Start(slot, std::move(edges)));
  return Await(slot);
}

absl::Status StateValues::Write(const StateRange& range, std::span<const float> values) {
  const bool parameters =
      range.array.what == StateClass::kParameter || range.array.what == StateClass::kMaster;
  for (Slot& slot : slots_) slot.read_ahead = {};
  for (const StateRun& run : RunsOf(range)) {
    const size_t slot = TakeSlot();
    const StagedRun found = InSlot(run, slot);
    if (found.is_staged()) EBB_RETURN_IF_ERROR(PrepareWrite(found, slots_[slot]));
    const float* const from = values.data() + (run.begin - range.begin);
    if (run.is_split()) {
      optim::Split(team(), from, At<BFloat16>(found, 0), At<uint16_t>(found, 1), run.count());
    } else if (parameters) {
      optim::Cast(team(), from, DType::kFloat32, At<void>(found, 0), run.stored[0].encoding.dtype,
                  run.count(), optim::Rounding::kParameter);
    } else {
      optim::Encode(team(), from, StateIn(found), run.count());
    }
    if (found.is_staged())
      EBB_RETURN_IF_ERROR(Start(slots_[slot], sharding::LowerStateWrite(found)));
  }
  return absl::OkStatus();
}

float* StateValues::InPlace(const StateRange& range) const {
  const std::vector<StateRun> runs = RunsOf(range);
  if (runs.size() != 1 || runs[0].is_split() || runs[0].stored[0].encoding != DType::kFloat32)
    return nullptr;
  const StagedRun run = InSlot(runs[0], 0);
  return run.is_staged() ? nullptr : At<float>(run, 0);
}

absl::Status StateValues::Upload(const StateRange& range) {
  for (const StateRun& run : RunsOf(range)) {
    EBB_ASSIGN_OR_RETURN(const size_t slot, Fetch(run));
    EBB_RETURN_IF_ERROR(
        Start(slots_[slot], sharding::LowerStateUpload(plan(), range.array, InSlot(run, slot))));
  }
  return absl::OkStatus();
}

absl::Status StateValues::VerifyFile(const Place& place, int64_t bytes) {
  if (place.tier != Tier::kNvme) return absl::OkStatus();
  EBB_ASSIGN_OR_RETURN(
      const bool agrees,
      verifier_.VerifyFile(
          place, bytes, [&](const Place& from, int64_t count, auto show) -> absl::Status {
            const StateRun run{.end = count,
                               .stored = {sharding::Operand{.place = from, .count = count}}};
            EBB_ASSIGN_OR_RETURN(const size_t slot, Fetch(run));
            show(At<std::byte>(InSlot(run, slot), 0));
            return absl::OkStatus();
          }));
  return agrees ? absl::OkStatus() : core_.errors.failure();
}

// If an extent holds any of it, the whole extent.
absl::Status StateValues::Verify(const StateRange& range) {
  if (core_.inputs.config.ebb.verify_swap == VerifySwap::kOff) return absl::OkStatus();
  for (const StateRun& run :
       sharding::RunsOf(plan(), core_.slice, range, /*elements_max=*/INT64_MAX)) {
    EBB_RETURN_IF_ERROR(VerifyFile(run.stored[0].place, run.stored[0].bytes()));
    // Scales are in the extent of their codes.
    if (!run.has_scales())
      EBB_RETURN_IF_ERROR(VerifyFile(run.stored[1].place, run.stored[1].bytes()));
  }
  return absl::OkStatus();
}

}  // namespace ebb
