// A WorldBackend and a CommunicatorBackend that pass each call on to others, and count the calls of
// a rank's engine.
#pragma once

#include <memory>
#include <utility>

#include "ebb/ebb.h"

struct Calls {
  int gathers = 0, others = 0;
};

class CountingCommunicator : public ebb::CommunicatorBackend {
 public:
  CountingCommunicator(ebb::Communicator inner, Calls& calls)
      : inner_(std::move(inner)), calls_(calls) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  absl::Status status() const override { return inner_.status(); }
  void Abort(absl::Status why) override { inner_.Abort(std::move(why)); }
  absl::Status Enqueue(ebb::Stream& stream, const ebb::Collective& call) override {
    ++(call.kind == ebb::CollectiveKind::kAllGather ? calls_.gathers : calls_.others);
    switch (call.kind) {
      case ebb::CollectiveKind::kAllGather:
        return inner_.AllGather(stream, call.spans, call.dtype);
      case ebb::CollectiveKind::kReduceScatter:
        return inner_.ReduceScatter(stream, call.spans, call.dtype, call.scale);
      case ebb::CollectiveKind::kAllReduce:
        return inner_.AllReduce(stream, call.spans, call.dtype, call.op, call.scale);
      case ebb::CollectiveKind::kBroadcast:
        return inner_.Broadcast(stream, call.spans, call.dtype, call.peer);
      case ebb::CollectiveKind::kAllToAll:
        return inner_.AllToAll(stream, call.spans, call.dtype);
      case ebb::CollectiveKind::kAllToAllV:
        return inner_.AllToAllV(stream, call.spans, call.dtype);
      case ebb::CollectiveKind::kSend:
        return inner_.Send(stream, call.spans, call.dtype, call.peer);
      case ebb::CollectiveKind::kReceive:
        return inner_.Receive(stream, call.spans, call.dtype, call.peer);
      case ebb::CollectiveKind::kBarrier:
        return inner_.Barrier(stream);
    }
    return absl::UnimplementedError("a collective of a later version");
  }

 private:
  ebb::Communicator inner_;
  Calls& calls_;
};

class CountingWorld : public ebb::WorldBackend {
 public:
  CountingWorld(ebb::World inner, Calls& calls)
      : WorldBackend(inner.backend()->me()), inner_(std::move(inner)), calls_(calls) {}
  void Fail(absl::Status why) override { inner_.Fail(std::move(why)); }
  ebb::CallOrder* calls() override { return inner_.calls(); }
  absl::StatusOr<std::shared_ptr<ebb::WorldBackend>> Split(const ebb::Proposal& proposal) override {
    absl::StatusOr<ebb::World> part = inner_.Split(proposal.colour, proposal.key, proposal.options);
    if (!part.ok()) return part.status();
    return std::make_shared<CountingWorld>(*std::move(part), calls_);
  }
  absl::StatusOr<std::unique_ptr<ebb::CommunicatorBackend>> NewCommunicator(
      const ebb::CommunicatorOptions& options) override {
    absl::StatusOr<ebb::Communicator> made = inner_.NewCommunicator(options);
    if (!made.ok()) return made.status();
    return std::make_unique<CountingCommunicator>(*std::move(made), calls_);
  }

 private:
  ebb::World inner_;
  Calls& calls_;
};
