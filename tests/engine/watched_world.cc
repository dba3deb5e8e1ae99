#include "tests/engine/watched_world.h"

#include <utility>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/grouping.h"

namespace ebb::testing {
namespace {

class WatchedCommunicator : public CommunicatorBackend {
 public:
  WatchedCommunicator(Communicator inner, std::string name, std::shared_ptr<WatchedCalls> calls)
      : inner_(std::move(inner)), name_(std::move(name)), calls_(std::move(calls)) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  absl::Status status() const override { return inner_.status(); }
  void Abort(absl::Status why) override { inner_.Abort(std::move(why)); }

  absl::Status Enqueue(Stream& stream, const Collective& call) override {
    if (calls_->lists) {
      WatchedCalls::Call& listed = calls_->list.emplace_back();
      listed = {.communicator = name_, .kind = call.kind, .thread = std::this_thread::get_id()};
      for (const CollectiveSpan& span : call.spans) listed.elements += span.count;
    }
    if (calls_->calls++ == calls_->fail_at) {
      if (calls_->fault == WatchedCalls::kRefuse) return absl::DataLossError(kInjected);
      stream.Enqueue([inner = &inner_] { inner->Abort(absl::DataLossError(kInjected)); });
      return absl::OkStatus();
    }
    EBB_RETURN_IF_ERROR(Forward(stream, call));
    if (call.kind == CollectiveKind::kReduceScatter)
      stream.Enqueue([run = &calls_->reductions_run] { run->fetch_add(1); });
    return absl::OkStatus();
  }

 private:
  absl::Status Forward(Stream& stream, const Collective& call) {
    switch (call.kind) {
      case CollectiveKind::kAllGather:
        return inner_.AllGather(stream, call.spans, call.dtype);
      case CollectiveKind::kReduceScatter:
        return inner_.ReduceScatter(stream, call.spans, call.dtype, call.scale);
      case CollectiveKind::kAllReduce:
        return inner_.AllReduce(stream, call.spans, call.dtype, call.op, call.scale);
      case CollectiveKind::kBroadcast:
        return inner_.Broadcast(stream, call.spans, call.dtype, call.peer);
      case CollectiveKind::kAllToAll:
        return inner_.AllToAll(stream, call.spans, call.dtype);
      case CollectiveKind::kAllToAllV:
        return inner_.AllToAllV(stream, call.spans, call.dtype);
      case CollectiveKind::kSend:
        return inner_.Send(stream, call.spans, call.dtype, call.peer);
      case CollectiveKind::kReceive:
        return inner_.Receive(stream, call.spans, call.dtype, call.peer);
      case CollectiveKind::kBarrier:
        return inner_.Barrier(stream);
    }
    return absl::OkStatus();
  }

  Communicator inner_;
  const std::string name_;
  std::shared_ptr<WatchedCalls> calls_;
};

class WatchedWorld : public WorldBackend {
 public:
  WatchedWorld(World world, std::shared_ptr<WatchedCalls> calls)
      : WorldBackend(world.backend()->me()), world_(std::move(world)), calls_(std::move(calls)) {}

  void Fail(absl::Status why) override { world_.Fail(std::move(why)); }
  CallOrder* calls() override { return world_.calls(); }

  absl::StatusOr<std::shared_ptr<WorldBackend>> Split(const Proposal& proposal) override {
    EBB_ASSIGN_OR_RETURN(World part, world_.Split(proposal.colour, proposal.key, proposal.options));
    return std::make_shared<WatchedWorld>(std::move(part), calls_);
  }

  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NewCommunicator(
      const CommunicatorOptions& options) override {
    CommunicatorOptions adapted = options;
    if (calls_->adapt) calls_->adapt(adapted);
    EBB_ASSIGN_OR_RETURN(Communicator made, world_.NewCommunicator(adapted));
    return std::make_unique<WatchedCommunicator>(std::move(made), options.name, calls_);
  }

 private:
  World world_;
  std::shared_ptr<WatchedCalls> calls_;
};

}  // namespace

World Watch(const World& world, std::shared_ptr<WatchedCalls> calls) {
  return World(std::make_shared<WatchedWorld>(world, std::move(calls)));
}

}  // namespace ebb::testing
