#include "ebb/runtime/engine/async_reads.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/agreement.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/swap_files.h"
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
    if (with_.storage->second_places() != nullptr) before_ = std::move(read_);
  }
  return read_ != nullptr ? absl::OkStatus() : MakeRead();
}

// Updates that read parameters write these as well, which a step reads in pieces of their own: they wait for the save.
void AsyncReads::TakeSecondPlaces() {
  const sharding::Plan& plan = with_.programs->plan();
  if (plan.decisions.reads_parameters() || !with_.storage->HasFiles()) return;
  const absl::Status taken = with_.storage->TakeSecondPlaces(sharding::LayOutSwapFiles(plan),
                                                             with_.inputs->world.local_size());
  if (taken.ok()) return;
  LogWarning(absl::StrCat(
      "Saved beside steps, states on NVMe stay in their place: updates wait until theirs "
      "are saved. ",
      taken.message()));
}

absl::Status AsyncReads::MakeStreams() {
  const Device& device = with_.inputs->device;
  const bool reaches_device = device.kind() == DeviceKind::kCpu;
  if (!reaches_device || with_.storage->HasFiles()) {
    EBB_ASSIGN_OR_RETURN(
        staging_, device.AllocateShared(sharding::kStateStagingBytes,
                                        "the memory that state passes through beside steps"));
    charge_ = MemoryLedger::Charge(*with_.ledger, StateClass::kStaging, Tier::kCpu,
                                   sharding::kStateStagingBytes);
  }
  if (!reaches_device) {
    EBB_ASSIGN_OR_RETURN(Stream copies, device.NewStream("ebb beside up"));
    copies_.emplace(std::move(copies));
  }
  EBB_ASSIGN_OR_RETURN(Stream agreement, device.NewStream("ebb beside ag"));
  agreement_.emplace(std::move(agreement));
  return with_.streams->MakeAsyncReads(device, std::ssize(with_.inputs->model.units) + 1);
}

absl::Status AsyncReads::MakeRead() {
  const Device& device = with_.inputs->device;
  const sharding::Plan& plan = with_.programs->plan();
  sharding::Fragment fragment =
      sharding::LowerAsyncRead(plan, with_.inputs->rank() % plan.decisions.shards, UnitsInOrder(),
                               /*has_second_places=*/with_.storage->second_places() != nullptr);
  sharding::DeriveWaits(with_.programs->cells(), fragment);
  with_.issuer->UseStream(sharding::kAsyncReads, with_.streams->async_reads());
  with_.issuer->OnReadAsync([this](int unit) { Read(unit); });
  EBB_ASSIGN_OR_RETURN(read_,
                       LinkedFragment::Link(std::move(fragment), plan, device, *with_.storage,
                                            with_.issuer->frontier(), with_.issuer->events()));
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

std::vector<StateSlice> AsyncReads::SlicesOf(int unit) const {
  std::vector<StateSlice> slices;
  const ModelSpec& model = with_.inputs->model;
  const auto add = [&](ParameterId p, StateClass what, const std::string& state) {
    const absl::StatusOr<StateAccess::Found> found = with_.state->Find(p, what, state);
    if (!found.ok() || found->begin == found->end) return;
    slices.push_back({what, state, p, found->begin, found->end});
  };
  for (const ParameterId p : model.units[static_cast<size_t>(unit)].parameters) {
    add(p, StateClass::kMaster, "");
    if (!model[p].trainable) continue;
    for (const std::string& state : with_.names->Of(model[p].group))
      add(p, StateClass::kOptimizer, state);
  }
  return slices;
}

std::vector<StateSlice> AsyncReads::Slices() const {
  std::vector<StateSlice> slices;
  if (with_.inputs->rank() >= with_.programs->plan().decisions.shards) return slices;
  for (const int unit : UnitsInOrder()) {
    const std::vector<StateSlice> of_unit = SlicesOf(unit);
    slices.insert(slices.end(), of_unit.begin(), of_unit.end());
  }
  return slices;
}

std::shared_future<absl::Status> AsyncReads::Start(StateReader reader) {
  Await();
  reader_ = std::move(reader);
  // The ranks of the first shard group have all of it.
  if (with_.inputs->rank() >= with_.programs->plan().decisions.shards) reader_.take = nullptr;
  status_ = absl::OkStatus();
  end_ = {};
  over_ = end_.get_future().share();
  read_->Point(*with_.storage);  // pools may have moved
  if (with_.storage->second_places() != nullptr) with_.storage->second_places()->BeginSave();
  if (with_.storage->HasFiles()) {
    with_.streams->async_reads().Enqueue([this] {
      if (!with_.verifier->FilesAreOurs()) status_ = with_.errors->failure();
    });
  }
  with_.issuer->Run(*read_, 0, read_->size(), StepTag(), /*counted=*/nullptr);
  with_.streams->async_reads().Enqueue([this] { End(); });
  return over_;
}

void AsyncReads::Read(int unit) {
  if (!status_.ok() || reader_.take == nullptr) return;
  if (with_.errors->has_failed()) {
    status_ = with_.errors->failure();
    return;
  }
  for (const StateSlice& slice : SlicesOf(unit))
    if (status_.ok()) status_ = Read(slice);
}

absl::Status AsyncReads::Read(const StateSlice& slice) {
  const ParameterId p = slice.parameter;
  EBB_ASSIGN_OR_RETURN(const StateAccess::Found found,
                       with_.state->Find(p, slice.what, slice.state));
  EBB_RETURN_IF_ERROR(VerifyFiles(found.Range(found.begin, found.end)));
  const ParameterSpec& parameter = with_.inputs->model[p];
  const bool reaches_device = with_.inputs->device.kind() == DeviceKind::kCpu;
  const sharding::Plan& plan = with_.programs->plan();
  for (int64_t begin = found.begin; begin < found.end; begin += sharding::kRunElements) {
    const int64_t end = std::min(found.end, begin + sharding::kRunElements);
    const StateRange range = found.Range(begin, end);
    values_.resize(static_cast<size_t>(end - begin));
    for (const StateRun& run :
         sharding::RunsOf(plan, with_.inputs->rank() % plan.decisions.shards, range)) {
      const StagedRun staged(run, kStaging, reaches_device);
      EBB_RETURN_IF_ERROR(Fetch(staged));
      ToFloat(
          team_, staged, [this](const Place& place) { return At(place); },
          values_.data() + (run.begin - range.begin));
    }
    EBB_RETURN_IF_ERROR(reader_.take(slice.what, slice.state,
                                     {.parameter = p,
                                      .name = parameter.name,
                                      .shape = parameter.shape,
                                      .begin = begin,
                                      .end = end},
                                     values_));
  }
  return absl::OkStatus();
}

std::byte* AsyncReads::At(const Place& place) const {
  return place.tier == kStaging.tier && place.pool == kStaging.pool ? staging_.data() + place.offset
                                                                    : with_.storage->At(place);
}

absl::Status AsyncReads::Fetch(const StagedRun& run) {
  if (!run.is_staged()) return absl::OkStatus();
  const sharding::Fragment read = sharding::LowerStateRead(run);
  for (const sharding::Instruction& instruction : read.instructions) {
    for (size_t k = 0; k < instruction.operands.size(); k += 2) {
      const sharding::Operand &from = instruction.operands[k], &to = instruction.operands[k + 1];
      if (instruction.code == sharding::Code::kRead) {
        ShardFile& file = with_.storage->SavedFile(from.place);
        file.StartRead(transfer_, from.place.offset, At(to.place), to.bytes());
        EBB_RETURN_IF_ERROR(file.Wait(transfer_));
      } else {
        copies_->Copy(At(to.place), At(from.place), from.bytes());
        copies_->WaitIdle();
        EBB_RETURN_IF_ERROR(copies_->status());
      }
    }
  }
  return absl::OkStatus();
}

absl::Status AsyncReads::VerifyFiles(const StateRange& array) {
  if (with_.inputs->config.ebb.verify_swap == VerifySwap::kOff) return absl::OkStatus();
  const sharding::Plan& plan = with_.programs->plan();
  const int shard = with_.inputs->rank() % plan.decisions.shards;
  for (const StateRun& run : sharding::RunsOf(plan, shard, array, /*elements_max=*/INT64_MAX)) {
    for (const sharding::Operand& home : run.homes) {
      if (home.place.tier != Tier::kNvme || home.count == 0) continue;
      const auto read = [&](const Place& from, int64_t count, auto show) -> absl::Status {
        const StagedRun piece(
            {.end = count, .homes = {sharding::Operand{.place = from, .count = count}}}, kStaging,
            /*reaches_device=*/true);
        EBB_RETURN_IF_ERROR(Fetch(piece));
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
