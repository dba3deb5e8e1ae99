#include "ebb/runtime/engine/async_reads.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/agreement.h"
#include "ebb/runtime/engine/device_reach.h"
#include "ebb/runtime/engine/issuer.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/plan_facts.h"
#include "ebb/sharding/swap_files.h"
#include "ebb/sharding/unit_places.h"
#include "ebb/sharding/waits.h"

namespace ebb {

using sharding::Place;
using sharding::StagedRun;
using sharding::StateRange;
using sharding::StateRun;

namespace {

// Where a run is staged that the engine's own staging has no part in.
constexpr Place kStaging = {.tier = Tier::kCpu, .pool = StateClass::kStaging};

}  // namespace

bool AsyncReads::is_over() const {
  return !over_.valid() || over_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

void AsyncReads::Await() const {
  if (over_.valid()) over_.wait();
}

absl::Status AsyncReads::Prepare(bool beside_steps) {
  if (agreement_ == std::nullopt) {
    EBB_RETURN_IF_ERROR(with_.communicators->MakeAsyncReads(*with_.ledger));
    EBB_RETURN_IF_ERROR(MakeStreams());
  }
  if (beside_steps && !std::exchange(asked_for_places_, true)) {
    TakeSecondPlaces();
    if (with_.storage->files().second_places() != nullptr) before_ = std::move(read_);
  }
  return read_ != nullptr ? absl::OkStatus() : MakeRead();
}

// Updates that read parameters write these as well, which a step reads in pieces of their own: they wait for the save.
void AsyncReads::TakeSecondPlaces() {
  const sharding::Plan& plan = with_.programs->plan();
  if (sharding::UpdatesReadParameters(plan) || !with_.storage->files().exist()) return;
  const absl::Status taken = with_.storage->files().TakeSecondPlaces(
      sharding::LayOutSwapFiles(plan), with_.inputs->world.local_size());
  if (taken.ok()) return;
  LogWarning(absl::StrCat(
      "Saved beside steps, states on NVMe stay in their place: updates wait until theirs "
      "are saved. ",
      taken.message()));
}

absl::Status AsyncReads::MakeStreams() {
  const Device& device = with_.inputs->device;
  const bool reaches_device = HostReaches(device);
  if (!reaches_device || with_.storage->files().exist()) {
    EBB_ASSIGN_OR_RETURN(
        staging_, device.AllocateShared(kSlots * sharding::kStateStagingBytes,
                                        "the memory that state passes through beside steps"));
    charge_ =
        MemoryLedger::Charge(*with_.ledger, StateClass::kStaging, Tier::kCpu, staging_.bytes());
  }
  if (!reaches_device) {
    EBB_ASSIGN_OR_RETURN(Stream copies, device.NewStream("ebb save up"));
    copies_.emplace(std::move(copies));
  }
  EBB_ASSIGN_OR_RETURN(Stream agreement, device.NewStream("ebb save agree"));
  agreement_.emplace(std::move(agreement));
  return with_.streams->MakeAsyncReads(device, std::ssize(with_.inputs->model.units) + 1);
}

absl::Status AsyncReads::MakeRead() {
  const Device& device = with_.inputs->device;
  const sharding::Plan& plan = with_.programs->plan();
  sharding::Fragment fragment = sharding::LowerAsyncRead(
      plan, sharding::SliceOf(plan, with_.inputs->rank()), UnitsInOrder(),
      /*has_second_places=*/with_.storage->files().second_places() != nullptr);
  sharding::DeriveWaits(with_.programs->cells(), fragment);
  with_.order->UseStream(sharding::kAsyncReads, with_.streams->async_reads());
  with_.issuer->OnReadAsync([this](int unit) { Read(unit); });
  EBB_ASSIGN_OR_RETURN(
      read_, LinkedFragment::Link(std::move(fragment), plan, device, *with_.storage, *with_.order));
  return absl::OkStatus();
}

// In that of the updates; those that have none, last.
std::vector<int> AsyncReads::UnitsInOrder() const {
  const auto count = static_cast<int>(with_.inputs->model.units.size());
  std::vector<int> units;
  std::vector<uint8_t> has(static_cast<size_t>(count), 0);
  const auto add = [&](int unit) {
    if (!std::exchange(has[static_cast<size_t>(unit)], uint8_t{1})) units.push_back(unit);
  };
  for (const sharding::Operation& operation : with_.programs->plan().operations) {
    if (operation.kind != sharding::OperationKind::kUpdate) continue;
    for (const sharding::Part& part : operation.parts) add(part.unit);
  }
  for (int unit = 0; unit < count; ++unit) add(unit);
  return units;
}

// Masters and frozen parameters, then one state after the other: as they lie in files.
std::vector<AsyncReads::Array> AsyncReads::ArraysOf(int unit) const {
  std::vector<Array> arrays;
  const ModelSpec& model = with_.inputs->model;
  const auto add = [&](ParameterId p, StateClass what, const std::string& state) {
    const absl::StatusOr<StateAccess::Found> found = with_.state->Find(p, what, state);
    if (!found.ok() || found->begin == found->end) return;
    auto array = std::find_if(arrays.begin(), arrays.end(), [&](const Array& other) {
      return other.range.array == found->array;
    });
    if (array == arrays.end()) {
      const int64_t end =
          sharding::SectionOf(with_.programs->plan(), unit, found->array.trainable).shard;
      array = arrays.insert(array, {.range = {.array = found->array, .end = end}, .parts = {}});
    }
    array->parts.push_back({{what, state, p, found->begin, found->end}, found->offset});
  };
  const std::vector<ParameterId>& parameters = model.units[static_cast<size_t>(unit)].parameters;
  for (const ParameterId p : parameters) add(p, StateClass::kMaster, "");
  bool more = true;
  for (size_t index = 0; std::exchange(more, false); ++index) {
    for (const ParameterId p : parameters) {
      const auto& names = with_.names->Of(model[p].group);
      if (!model[p].trainable || index >= names.size()) continue;
      add(p, StateClass::kOptimizer, names[index]);
      more = true;
    }
  }
  for (Array& array : arrays) {
    std::sort(array.parts.begin(), array.parts.end(),
              [](const Array::Part& a, const Array::Part& b) { return a.offset < b.offset; });
  }
  return arrays;
}

std::vector<StateSlice> AsyncReads::Slices() const {
  std::vector<StateSlice> slices;
  if (with_.inputs->rank() >= sharding::Slices(with_.programs->plan())) return slices;
  for (const int unit : UnitsInOrder())
    for (const Array& array : ArraysOf(unit))
      for (const Array::Part& part : array.parts) slices.push_back(part.slice);
  return slices;
}

std::shared_future<absl::Status> AsyncReads::Take(StateReader reader) {
  Await();
  reader_ = std::move(reader);
  // The ranks of the first shard group have all of it.
  if (with_.inputs->rank() >= sharding::Slices(with_.programs->plan())) reader_.take = nullptr;
  status_ = absl::OkStatus();
  end_ = {};
  over_ = end_.get_future().share();
  return over_;
}

// A step's own waits know nothing of what is issued in it.
bool AsyncReads::MayBeginInStep() const {
  if (with_.storage->files().second_places() == nullptr) return false;
  const std::vector<sharding::Instruction>& all = read_->fragment().instructions;
  return std::none_of(all.begin(), all.end(), [](const sharding::Instruction& instruction) {
    return instruction.code == sharding::Code::kReadAsync &&
           std::any_of(instruction.operands.begin(), instruction.operands.end(),
                       [](const sharding::Operand& operand) {
                         return operand.place.pool != StateClass::kParameter;
                       });
  });
}

void AsyncReads::Begin() {
  read_->Point(*with_.storage);  // pools may have moved
  if (with_.storage->files().second_places() != nullptr)
    with_.storage->files().second_places()->BeginSave();
  if (with_.storage->files().exist()) {
    with_.streams->async_reads().Enqueue([this] {
      if (!with_.verifier->FilesAreOurs()) status_ = with_.errors->failure();
    });
  }
  with_.issuer->Run(*read_, 0, read_->size(), StepTag(), /*counted=*/nullptr);
  with_.streams->async_reads().Enqueue([this] { End(); });
}

void AsyncReads::Read(int unit) {
  if (!status_.ok() || reader_.take == nullptr) return;
  if (with_.errors->has_failed()) {
    status_ = with_.errors->failure();
    return;
  }
  for (const Array& array : ArraysOf(unit))
    if (status_.ok()) status_ = Read(array);
}

absl::Status AsyncReads::Read(const Array& array) {
  const sharding::Plan& plan = with_.programs->plan();
  const bool verifies = with_.inputs->config.ebb.verify_swap != VerifySwap::kOff;
  // A rank's slice is then a part of what was summed as a whole.
  if (verifies && sharding::UpdatesWhole(plan)) EBB_RETURN_IF_ERROR(VerifyFiles(array.range));
  const std::vector<StateRun> runs =
      sharding::RunsOf(plan, sharding::SliceOf(plan, with_.inputs->rank()), array.range);
  std::array<SwapVerifier::Pieces, 2> pieces;
  size_t started = 0;
  const auto read = [&](size_t r) -> absl::Status {
    for (; started < std::min(r + kSlots, runs.size()); ++started)
      Start(InSlot(runs[started], started % kSlots), slots_[started % kSlots]);
    const StagedRun run = InSlot(runs[r], r % kSlots);
    EBB_RETURN_IF_ERROR(Await(slots_[r % kSlots]));
    for (size_t k = 0; verifies && k < pieces.size(); ++k) {
      const sharding::Operand& home = run.run.homes[k];
      if (home.place.tier != Tier::kNvme || home.count == 0) continue;
      const std::span<const std::byte> bytes(At(run.host[k]), static_cast<size_t>(home.bytes()));
      if (!with_.verifier->VerifyPiece(pieces[k], home.place, bytes))
        return with_.errors->failure();
    }
    return Give(array, runs[r], ValuesOf(run));
  };
  absl::Status status;
  for (size_t r = 0; r < runs.size() && status.ok(); ++r) status = read(r);
  for (Slot& slot : slots_) status.Update(Await(slot));
  return status;
}

StagedRun AsyncReads::InSlot(const StateRun& run, size_t slot) const {
  return {run, kStaging.Plus(static_cast<int64_t>(slot) * sharding::kStateStagingBytes),
          HostReaches(with_.inputs->device)};
}

std::span<const float> AsyncReads::ValuesOf(const StagedRun& run) {
  const auto count = static_cast<size_t>(run.run.count());
  if (!run.run.is_split() && run.run.homes[0].dtype == DType::kFloat32)
    return {reinterpret_cast<const float*>(At(run.host[0])), count};
  values_.resize(count);
  ToFloat(
      team_, run, [this](const Place& place) { return At(place); }, values_.data());
  return values_;
}

// Each parameter's part of the run.
absl::Status AsyncReads::Give(const Array& array, const StateRun& run,
                              std::span<const float> values) {
  for (const auto& [slice, offset] : array.parts) {
    const int64_t begin = std::max(run.begin, offset),
                  end = std::min(run.end, offset + slice.end - slice.begin);
    if (begin >= end) continue;
    const ParameterSpec& parameter = with_.inputs->model[slice.parameter];
    EBB_RETURN_IF_ERROR(reader_.take(
        slice.what, slice.state,
        {.parameter = slice.parameter,
         .name = parameter.name,
         .shape = parameter.shape,
         .begin = slice.begin + begin - offset,
         .end = slice.begin + end - offset},
        values.subspan(static_cast<size_t>(begin - run.begin), static_cast<size_t>(end - begin))));
  }
  return absl::OkStatus();
}

std::byte* AsyncReads::At(const Place& place) const {
  return place.tier == kStaging.tier && place.pool == kStaging.pool ? staging_.data() + place.offset
                                                                    : with_.storage->At(place);
}

void AsyncReads::Start(const StagedRun& run, Slot& slot) {
  if (!run.is_staged()) return;
  size_t next = 0;
  const sharding::Fragment read = sharding::LowerStateRead(run);
  for (const sharding::Instruction& instruction : read.instructions) {
    for (size_t k = 0; k < instruction.operands.size(); k += 2) {
      const sharding::Operand &from = instruction.operands[k], &to = instruction.operands[k + 1];
      if (instruction.code == sharding::Code::kRead) {
        slot.files[next] = &with_.storage->files().SavedFile(from.place);
        slot.files[next]->StartRead(slot.transfers[next], from.place.offset, At(to.place),
                                    to.bytes());
        ++next;
      } else {
        copies_->Copy(At(to.place), At(from.place), from.bytes());
      }
    }
  }
}

absl::Status AsyncReads::Await(Slot& slot) {
  absl::Status first;
  for (size_t k = 0; k < slot.files.size(); ++k)
    if (ShardFile* const file = std::exchange(slot.files[k], nullptr))
      first.Update(file->Wait(slot.transfers[k]));
  if (copies_.has_value()) {
    copies_->WaitIdle();
    first.Update(copies_->status());
  }
  return first;
}

// Ahead of reads that show parts of what was summed as a whole.
absl::Status AsyncReads::VerifyFiles(const StateRange& array) {
  const sharding::Plan& plan = with_.programs->plan();
  const int shard = sharding::SliceOf(plan, with_.inputs->rank());
  for (const StateRun& run : sharding::RunsOf(plan, shard, array, /*elements_max=*/INT64_MAX)) {
    for (const sharding::Operand& home : run.homes) {
      if (home.place.tier != Tier::kNvme || home.count == 0) continue;
      const auto read = [&](const Place& from, int64_t count, auto show) -> absl::Status {
        const StagedRun piece(
            {.end = count, .homes = {sharding::Operand{.place = from, .count = count}}}, kStaging,
            /*reaches_device=*/true);
        Start(piece, slots_[0]);
        EBB_RETURN_IF_ERROR(Await(slots_[0]));
        show(At(piece.host[0]));
        return absl::OkStatus();
      };
      EBB_ASSIGN_OR_RETURN(
          const bool agrees,
          with_.verifier->VerifyFile(home.place, home.bytes(), read, /*beside_steps=*/true));
      if (!agrees) return with_.errors->failure();
    }
  }
  return absl::OkStatus();
}

void AsyncReads::End() {
  if (status_.ok() && with_.errors->has_failed()) status_ = with_.errors->failure();
  if (status_.ok() && reader_.close != nullptr) status_ = reader_.close();
  const HostLane lane = with_.communicators->AsyncReads(*agreement_);
  const absl::Status closed = AgreeOnStatus(lane, status_);
  const absl::Status committed = reader_.commit != nullptr ? reader_.commit(closed) : closed;
  const absl::Status over = AgreeOnStatus(lane, closed.ok() ? committed : closed);
  reader_ = {};
  end_.set_value(over);
}

}  // namespace ebb
