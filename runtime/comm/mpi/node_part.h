// A communicator of a world on several hosts whose members are all on one of them.
#pragma once

#include <memory>
#include <utility>

#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/mpi/world.h"
#include "ebb/runtime/comm/node/communicator.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {

class NodePart : public CommunicatorBackend {
 public:
  NodePart(std::shared_ptr<MpiWorld> world, std::unique_ptr<NodeCommunicator> node)
      : world_(std::move(world)), node_(std::move(node)) {}

  int rank() const override { return node_->rank(); }
  int size() const override { return node_->size(); }
  absl::Status Enqueue(Stream& stream, const Collective& call) override {
    return node_->Enqueue(stream, call);
  }
  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> Split(int colour, int key,
                                                             std::string_view name) override {
    EBB_ASSIGN_OR_RETURN(std::unique_ptr<NodeCommunicator> part,
                         node_->SplitNode(colour, key, name));
    return std::make_unique<NodePart>(world_, std::move(part));
  }
  // Other hosts may have told that the world has failed.
  absl::Status status() const override {
    world_->Poll();
    return node_->status();
  }
  void Abort(absl::Status why) override { node_->Abort(std::move(why)); }
  int64_t bytes_moved() const override { return node_->bytes_moved(); }

 private:
  const std::shared_ptr<MpiWorld> world_;
  const std::unique_ptr<NodeCommunicator> node_;
};

}  // namespace ebb
