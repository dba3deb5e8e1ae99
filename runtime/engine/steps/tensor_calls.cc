#include "ebb/runtime/engine/steps/tensor_calls.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/name_view.h"
#include "ebb/runtime/engine/device_reach.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/issue/engine_streams.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/runtime/engine/ranks/engine_calls.h"
#include "ebb/runtime/engine/ranks/engine_communicators.h"
#include "ebb/runtime/engine/tensor_axis.h"

namespace ebb {
namespace {

const char* NameOf(CallKind kind) {
  if (kind == CallKind::kTensorAllReduce) return "AllReduce";
  return kind == CallKind::kTensorAllGather ? "AllGather" : "ReduceScatter";
}

// Whether `whole` holds a block like `block` for each rank.
absl::Status CheckBlocks(CallKind kind, const TensorView& block, const TensorView& whole,
                         int ranks) {
  if (block.dtype == whole.dtype && block.size() * ranks == whole.size()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("TensorAxis::", NameOf(kind), " between a block of ", block.size(),
                   " elements (", std::string(Name(block.dtype)), ") and ", whole.size(),
                   " elements (", std::string(Name(whole.dtype)), ") for ", ranks,
                   " ranks: give views of one dtype, the "
                   "larger one with a block for each rank"));
}

}  // namespace

int TensorAxis::rank() const {
  return calls_ == nullptr ? 0 : calls_->rank();
}
int TensorAxis::size() const {
  return calls_ == nullptr ? 1 : calls_->size();
}
void TensorAxis::AllReduce(MutableTensorView values, ReduceOp op) const {
  if (calls_ != nullptr) calls_->AllReduce(values, op);
}
void TensorAxis::AllGather(TensorView block, MutableTensorView blocks) const {
  if (calls_ != nullptr) calls_->AllGather(block, blocks);
}
void TensorAxis::ReduceScatter(TensorView blocks, MutableTensorView block) const {
  if (calls_ != nullptr) calls_->ReduceScatter(blocks, block);
}

Communicator* TensorCalls::Find() const {
  return core_.communicators.Find(sharding::StreamId::kCompute, Axis::kTensor);
}

int TensorCalls::rank() const {
  const Communicator* const along = Find();
  return along == nullptr ? 0 : along->rank();
}

int TensorCalls::size() const {
  const Communicator* const along = Find();
  return along == nullptr ? 1 : along->size();
}

std::string_view TensorCalls::OpenUnit() const {
  const auto newest = std::find_if(progress_.open.rbegin(), progress_.open.rend(),
                                   [](const OpenScope& scope) { return scope.whole == 0; });
  if (newest == progress_.open.rend()) return "";
  return core_.inputs.model.units[newest->unit].name;
}

void TensorCalls::Run(CallKind kind, const absl::Status& fits, const CollectiveSpan& span,
                      absl::FunctionRef<absl::Status(Communicator&, Stream&)> call) {
  core_.calls.NoteInStep(kind);
  const char* const name = NameOf(kind);
  Communicator& along = *Find();
  Stream& stream = core_.streams.compute();
  const bool shows = span.send != nullptr && span.receive != nullptr;
  absl::Status status = fits;
  if (status.ok() && !shows && span.count > 0)
    status = absl::InvalidArgumentError(absl::StrCat("TensorAxis::", name, " of an empty view"));
  span_ = span;
  const int64_t before = along.bytes_enqueued(), begun = timeline_.Begin(progress_.trace, stream);
  if (status.ok()) status = call(along, stream);
  const int64_t bytes = along.bytes_enqueued() - before;
  const std::string_view unit = OpenUnit();
  timeline_.End(progress_.trace, begun, name, unit, bytes, stream);
  runner_.CountOfKernels(bytes);
  peers_.NoteCollective(along, std::move(status), core_.errors);
  const auto note = [this, &along, name, unit] {
    peers_.NoteIfBroken(along, [&] {
      return absl::StrCat("TensorAxis::", name,
                          unit.empty() ? "" : absl::StrCat(" in unit '", NameView(unit), "'"));
    });
  };
  if (RunsOnDevice(stream)) {
    note();
  } else {
    stream.Enqueue(note);
  }
}

void TensorCalls::Copy(const TensorView& from, const MutableTensorView& to) {
  if (from.data == to.data || from.data == nullptr || to.data == nullptr) return;
  core_.streams.compute().Copy(to.data, from.data, from.size() * SizeOf(from.dtype));
}

void TensorCalls::AllReduce(MutableTensorView values, ReduceOp op) {
  if (Find() == nullptr) return;
  Run(CallKind::kTensorAllReduce, absl::OkStatus(),
      {.send = values.data, .receive = values.data, .count = TensorView(values).size()},
      [&](Communicator& along, Stream& stream) {
        return along.AllReduce(stream, {&span_, 1}, values.dtype, op);
      });
}

void TensorCalls::AllGather(TensorView block, MutableTensorView blocks) {
  if (Find() == nullptr) return Copy(block, blocks);
  Run(CallKind::kTensorAllGather, CheckBlocks(CallKind::kTensorAllGather, block, blocks, size()),
      {.send = block.data, .receive = blocks.data, .count = block.size()},
      [&](Communicator& along, Stream& stream) {
        return along.AllGather(stream, {&span_, 1}, block.dtype);
      });
}

void TensorCalls::ReduceScatter(TensorView blocks, MutableTensorView block) {
  if (Find() == nullptr) return Copy(blocks, block);
  Run(CallKind::kTensorReduceScatter,
      CheckBlocks(CallKind::kTensorReduceScatter, block, blocks, size()),
      {.send = blocks.data, .receive = block.data, .count = TensorView(block).size()},
      [&](Communicator& along, Stream& stream) {
        return along.ReduceScatter(stream, {&span_, 1}, block.dtype);
      });
}

}  // namespace ebb
