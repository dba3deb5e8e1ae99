#include "ebb/runtime/engine/ranks/engine_communicators.h"

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/ranks/reduction_group.h"

namespace ebb {

using sharding::LineOf;
using sharding::StreamId;

CommunicatorOptions EngineCommunicators::OptionsOf(std::string_view name) const {
  return {.name = absl::StrCat(inputs_.options.name, " ", std::string(name)),
          .reduction_group = ReductionGroupInEffect(inputs_.world, inputs_.config, inputs_.size()),
          .timeout_seconds = inputs_.config.ebb.timeout_seconds};
}

absl::Status EngineCommunicators::MakeForHost(std::string_view name, MemoryLedger& ledger,
                                              std::optional<Communicator>& communicator,
                                              DeviceMirror& mirror) const {
  if (communicator.has_value()) return absl::OkStatus();
  CommunicatorOptions options = OptionsOf(name);
  if (inputs_.cuts_model) options.reduction_group = 0;  // nothing is summed
  EBB_ASSIGN_OR_RETURN(Communicator made, inputs_.of_calls().NewCommunicator(options));
  communicator.emplace(std::move(made));
  constexpr int64_t kMirrorBytes = int64_t{1} << 20, kOfRankMin = 512;
  const absl::Status mirrored = mirror.Allocate(
      inputs_.device, std::max(kMirrorBytes, (inputs_.of_verdict().size() + 1) * kOfRankMin),
      ledger);
  if (!mirrored.ok()) communicator->Abort(mirrored);  // the others are about to wait in it
  return mirrored;
}

absl::Status EngineCommunicators::MakeControl(MemoryLedger& ledger) {
  return MakeForHost("control", ledger, control_, mirror_);
}

absl::Status EngineCommunicators::MakeVerdict() {
  if (!inputs_.verdict.has_value()) return absl::OkStatus();
  CommunicatorOptions options = OptionsOf("exchange");
  options.reduction_group = 0;  // nothing is summed
  EBB_ASSIGN_OR_RETURN(Communicator made, inputs_.verdict->NewCommunicator(options));
  of_steps_.push_back({LineOf(StreamId::kReduce), kWorldAxes, std::move(made)});
  return absl::OkStatus();
}

absl::Status EngineCommunicators::MakeTensor() {
  const Mesh mesh = MeshOf(inputs_.config, inputs_.given_world.size());
  if (mesh.size(Axis::kTensor) == 1) return absl::OkStatus();
  const int data = mesh.index(inputs_.given_world.rank(), kDataAxes);
  EBB_RETURN_IF_ERROR(Split(*inputs_.verdict, "tensor", data, StreamId::kCompute, Axis::kTensor));
  return Split(*inputs_.verdict, "tensor gradients", data, StreamId::kReduce, Axis::kTensor);
}

absl::Status EngineCommunicators::MakeAsyncReads(MemoryLedger& ledger) {
  return MakeForHost("async reads", ledger, async_reads_, async_reads_mirror_);
}

absl::Status EngineCommunicators::Make(std::string_view name, StreamId stream, Axes axes) {
  EBB_ASSIGN_OR_RETURN(Communicator made, inputs_.world.NewCommunicator(OptionsOf(name)));
  of_steps_.push_back({LineOf(stream), axes, std::move(made)});
  return absl::OkStatus();
}

absl::Status EngineCommunicators::Split(const World& world, std::string_view name, int group,
                                        StreamId stream, Axes axes) {
  CommunicatorOptions options = OptionsOf(name);
  options.reduction_group = 0;  // the world's need not divide its parts
  EBB_ASSIGN_OR_RETURN(const World part,
                       world.Divide(/*colour=*/group, /*key=*/world.rank(), options));
  EBB_ASSIGN_OR_RETURN(Communicator made, part.NewCommunicator(options));
  of_steps_.push_back({LineOf(stream), axes, std::move(made)});
  return absl::OkStatus();
}

Communicator* EngineCommunicators::Find(StreamId stream, Axes axes) {
  const auto found = std::find_if(of_steps_.begin(), of_steps_.end(), [&](const OfSteps& of) {
    return of.line == LineOf(stream) && of.axes == axes;
  });
  return found == of_steps_.end() ? nullptr : &found->communicator;
}

Communicator& EngineCommunicators::Along(StreamId stream, Axes axes) {
  Communicator* found = Find(stream, axes);
  if (found == nullptr && (axes == kWorldAxes || axes == kModelAxes))
    found = Find(stream, kShardAxes);
  assert(found != nullptr);
  return *found;
}

absl::Status EngineCommunicators::MakeGather(int shards) {
  if (shards == inputs_.size()) return Make("gather", StreamId::kGather, kShardAxes);
  return Split(inputs_.world, "gather", inputs_.rank() / shards, StreamId::kGather, kShardAxes);
}

// Gathers of either kind are on one stream; these reach the ranks of one group only.
absl::Status EngineCommunicators::MakeSecondary(int secondary_shards) {
  if (secondary_shards == 0) return absl::OkStatus();
  return Split(inputs_.world, "gather secondary", inputs_.rank() / secondary_shards,
               StreamId::kGather, Axis::kInner);
}

absl::Status EngineCommunicators::MakeReduce(int shards) {
  if (inputs_.cuts_model) {  // the shard group of this rank, with all tensor ranks
    EBB_RETURN_IF_ERROR(
        Split(*inputs_.verdict, "model", inputs_.rank() / shards, StreamId::kReduce, kModelAxes));
  }
  if (shards == inputs_.size()) return Make("reduce", StreamId::kReduce, kShardAxes);
  EBB_RETURN_IF_ERROR(
      Split(inputs_.world, "reduce", inputs_.rank() / shards, StreamId::kReduce, kShardAxes));
  EBB_RETURN_IF_ERROR(
      Split(inputs_.world, "replicas", inputs_.rank() % shards, StreamId::kReduce, Axis::kReplica));
  return inputs_.verdict.has_value() ? absl::OkStatus()
                                     : Make("exchange", StreamId::kReduce, kWorldAxes);
}

absl::Status EngineCommunicators::BarrierAfterFreedMemory() const {
  return inputs_.uses_nccl() ? inputs_.data_world.MeetOnHost(OptionsOf("moved")) : absl::OkStatus();
}

void EngineCommunicators::Leave() {
  for (OfSteps& of : of_steps_) of.communicator.Leave();
  if (control_.has_value()) control_->Leave();
  if (async_reads_.has_value()) async_reads_->Leave();
}

}  // namespace ebb
