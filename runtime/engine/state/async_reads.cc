#include "ebb/runtime/engine/state/async_reads.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/device_reach.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/issue/engine_streams.h"
#include "ebb/runtime/engine/issue/issuer.h"
#include "ebb/runtime/engine/issue/runnable_plans.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/runtime/engine/ranks/agreement.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/interval.h"
#include "ebb/sharding/plan_facts.h"
#include "ebb/sharding/waits.h"

namespace ebb {

using sharding::StateRun;

bool AsyncReads::is_over() const {
  return !over_.valid() || over_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

void AsyncReads::Await() const {
  if (over_.valid()) over_.wait();
}

absl::Status AsyncReads::Prepare(bool beside_steps) {
  if (agreement_ == std::nullopt) {
    EBB_RETURN_IF_ERROR(core_.communicators.MakeAsyncReads(core_.ledger));
    EBB_RETURN_IF_ERROR(MakeStreams());
  }
  if (beside_steps && !std::exchange(asked_for_places_, true)) {
    TakeSecondPlaces();
    if (core_.storage.files().has_second_places()) before_ = std::move(read_);
  }
  return read_ != nullptr ? absl::OkStatus() : MakeRead();
}

// Updates that read parameters write these as well, which a step reads in pieces of their own: they
// wait for the save.
void AsyncReads::TakeSecondPlaces() {
  if (sharding::UpdatesReadParameters(core_.plans.plan())) return;
  const absl::Status taken = core_.storage.files().TakeSecondPlaces();
  if (taken.ok()) return;
  LogWarning(absl::StrCat(
      "There is no room for second places of states on NVMe. So while a save runs beside steps, "
      "an update waits until the save has read its states. ",
      taken.message()));
}

absl::Status AsyncReads::MakeStreams() {
  const Device& device = core_.inputs.device;
  constexpr int kSlots = 4;
  EBB_RETURN_IF_ERROR(core_.storage.TakeSaveStaging(kSlots * sharding::kStateStagingBytes));
  if (!HostReaches(device)) {
    EBB_ASSIGN_OR_RETURN(Stream copies, device.NewStream("ebb save up"));
    copies_.emplace(std::move(copies));
  }
  EBB_ASSIGN_OR_RETURN(Stream agreement, device.NewStream("ebb save agree"));
  agreement_.emplace(std::move(agreement));
  state_values_.emplace(core_, issuer_, verifier_,
                        StateValues::Way{.team = &team_,
                                         .slots = kSlots,
                                         .staging = HostPools::kSaveStaging,
                                         .of_save = true,
                                         .copies = copies_ ? &*copies_ : nullptr});
  return core_.streams.MakeAsyncReads(device, std::ssize(core_.inputs.model.units) + 1);
}

absl::Status AsyncReads::MakeRead() {
  const Device& device = core_.inputs.device;
  const sharding::Plan& plan = core_.plans.plan();
  sharding::OpList list =
      sharding::LowerAsyncRead(plan, core_.slice, core_.storage.files().has_second_places());
  sharding::DeriveWaits(core_.plans.cells(), list);
  core_.order.UseStream(sharding::kAsyncReads, core_.streams.async_reads());
  issuer_.OnHost(sharding::Role::kSave, [this](const LinkedList& run, int op, int, Stream& stream) {
    stream.Enqueue([this, unit = run[op].parts.front().unit] { Read(unit); });
  });
  EBB_ASSIGN_OR_RETURN(read_,
                       LinkedList::Link(std::move(list), plan, device, core_.storage, core_.order));
  return absl::OkStatus();
}

// Masters and frozen parameters, then one state after the other: as they lie in files.
std::vector<AsyncReads::Array> AsyncReads::ArraysOf(int unit) const {
  std::vector<Array> arrays;
  const ModelSpec& model = core_.inputs.model;
  const EngineInputs& inputs = core_.inputs;
  const auto add = [&](ParameterId p, StateClass what, const std::string& state) {
    // The first tensor rank gives what all of them have.
    if (!model[p].block && inputs.tensor_rank() > 0) return;
    const absl::StatusOr<StateAccess::Found> found = state_.Find(p, {what, state});
    if (!found.ok() || found->begin == found->end) return;
    auto array = std::find_if(arrays.begin(), arrays.end(), [&](const Array& other) {
      return other.range.array == found->array;
    });
    if (array == arrays.end()) {
      const int64_t end =
          sharding::SectionOf(core_.plans.plan(), unit, found->array.trainable).shard;
      array = arrays.insert(array, {.range = {.array = found->array, .end = end}, .parts = {}});
    }
    int64_t end = found->end;
    if (model[p].block) end = std::min(end, Elements(ShownShape(model[p])));
    if (found->begin < end)
      array->parts.push_back({{what, state, p, found->begin, end}, found->offset});
  };
  const std::vector<ParameterId>& parameters = model.units[static_cast<size_t>(unit)].parameters;
  for (const ParameterId p : parameters) add(p, StateClass::kMaster, "");
  bool more = true;
  for (size_t index = 0; std::exchange(more, false); ++index) {
    for (const ParameterId p : parameters) {
      const auto& names = names_.Of(model[p].group);
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
  if (core_.inputs.rank() >= sharding::Slices(core_.plans.plan())) return slices;
  for (const int unit : sharding::UnitsByUpdate(core_.plans.plan()))
    for (const Array& array : ArraysOf(unit))
      for (const Array::Part& part : array.parts) slices.push_back(part.slice);
  return slices;
}

std::shared_future<absl::Status> AsyncReads::Take(StateReader reader) {
  Await();
  reader_ = std::move(reader);
  // The ranks of the first shard group have all of it.
  if (core_.inputs.rank() >= sharding::Slices(core_.plans.plan())) reader_.take = nullptr;
  status_ = absl::OkStatus();
  waits_ = std::make_shared<std::atomic<bool>>(true);
  end_ = {};
  over_ = end_.get_future().share();
  return over_;
}

// The waits of a step do not cover operations that are issued beside it.
bool AsyncReads::MayBeginInStep() const {
  if (!core_.storage.files().has_second_places()) return false;
  const std::vector<sharding::Op>& all = read_->list().ops;
  return std::none_of(all.begin(), all.end(), [](const sharding::Op& op) {
    return op.role == sharding::Role::kSave &&
           std::any_of(op.operands.begin(), op.operands.end(),
                       [](const sharding::Operand& operand) {
                         return operand.place.pool != StateClass::kParameter;
                       });
  });
}

void AsyncReads::Begin() {
  read_->Point(core_.storage);  // pools may have moved
  core_.storage.files().BeginSave();
  issuer_.Run(*read_, 0, read_->size(), StepTag(), /*counted=*/nullptr);
  core_.streams.async_reads().Enqueue([this] { End(); });
  *waits_ = false;
}

void AsyncReads::Read(int unit) {
  if (!status_.ok() || reader_.take == nullptr) return;
  if (core_.errors.has_failed()) {
    status_ = core_.errors.failure();
    return;
  }
  for (const Array& array : ArraysOf(unit)) {
    if (!status_.ok()) return;
    status_ = state_values_->ReadEach(array.range,
                                      [&](const StateRun& run, std::span<const float> values) {
                                        return Give(array, run, values);
                                      });
  }
}

// Each parameter's part of the run.
absl::Status AsyncReads::Give(const Array& array, const StateRun& run,
                              std::span<const float> values) {
  callers_core_.Leave();
  for (const auto& [slice, offset] : array.parts) {
    const int64_t begin = std::max(run.begin, offset),
                  end = std::min(run.end, offset + slice.end - slice.begin);
    if (begin >= end) continue;
    EBB_RETURN_IF_ERROR(reader_.take(
        slice.what, slice.state,
        sharding::SliceOf(core_.inputs.model, slice.parameter, slice.begin + begin - offset,
                          slice.begin + end - offset),
        values.subspan(static_cast<size_t>(begin - run.begin), static_cast<size_t>(end - begin))));
  }
  return absl::OkStatus();
}

void AsyncReads::End() {
  if (status_.ok() && core_.errors.has_failed()) status_ = core_.errors.failure();
  if (status_.ok() && reader_.close != nullptr) status_ = reader_.close();
  const HostLane lane = core_.communicators.AsyncReads(*agreement_);
  const absl::Status closed = AgreeOnStatus(lane, status_);
  const absl::Status committed = reader_.commit != nullptr ? reader_.commit(closed) : closed;
  const absl::Status over = AgreeOnStatus(lane, closed.ok() ? committed : closed);
  reader_ = {};
  end_.set_value(over);
}

}  // namespace ebb
