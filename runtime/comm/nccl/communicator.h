// One rank's end of an NCCL communicator: enqueues its operations, and watches them.
//
//   enqueuing thread   [ begin | ncclGroup ... | end ]  on the stream, after the host's part
//   watching thread    asynchronous errors, late operations, waits for a rank that left
//
// Every failure fails the world, and so aborts its communicators on all ranks.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <thread>

#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/call_order.h"
#include "ebb/runtime/comm/nccl/channel.h"
#include "ebb/runtime/comm/nccl/in_flight.h"
#include "ebb/runtime/comm/nccl/library.h"
#include "ebb/runtime/comm/nccl/operations.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/comm/rendezvous/store_group.h"
#include "ebb/runtime/comm/wait_notice.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

struct ReduceGrids;

class NcclCommunicator : public CommunicatorBackend {
 public:
  struct Parts {
    const NcclLibrary& nccl;
    Device device;
    CommunicatorOptions options = {};
    std::shared_ptr<StoreGroup> group = nullptr;         // the communicator's ranks
    std::shared_ptr<const ReduceGrids> grids = nullptr;  // of our kernels; Connect loads them
  };

  // This rank's end of a communicator of the ranks of `world`, all with one version of NCCL. Ranks
  // that cannot reach each other any more, or cannot be connected, fail the world.
  static absl::StatusOr<std::unique_ptr<CommunicatorBackend>> Form(Parts parts, StoreGroup& world);
  // Connects this rank with the others of its group, which have the same id.
  static absl::StatusOr<std::unique_ptr<NcclCommunicator>> Connect(Parts parts,
                                                                   const ncclUniqueId& id);
  // Waits for what was enqueued, then leaves. A rank that makes more calls than this one gets an
  // error.
  ~NcclCommunicator() override;

  int rank() const override { return group_.rank; }
  int size() const override { return group_.size; }
  absl::Status Enqueue(Stream& stream, const Collective& call) override;
  absl::Status SumInOrder(std::span<std::byte> scratch) override;
  absl::Status Register(std::span<std::byte> memory) override;
  void Deregister() override;
  void Leave() override;
  absl::Status status() const override { return store().status(); }
  void Abort(absl::Status why) override;

 private:
  NcclCommunicator(Parts parts, std::shared_ptr<NcclChannel> channel,
                   std::unique_ptr<InFlight> in_flight, Buffer barrier);

  absl::Status EnqueueNow(Stream& stream, const Collective& call);
  absl::Status EnqueueSums(Stream& stream, const Collective& call);
  void Watch();
  absl::Status WhatIsWrong();
  void LogIfWaiting();
  absl::Status LeftByAnother();
  absl::Status LookForCycle();
  Store& store() const { return parts_.group->store(); }
  absl::Status Named(const absl::Status& error, const CallSummary& call) const;

  Parts parts_;
  const Members members_;
  const std::shared_ptr<NcclChannel> channel_;
  const std::unique_ptr<InFlight> in_flight_;
  const Buffer barrier_;
  const NcclGroup group_;
  std::optional<OrderedSums> ordered_sums_;
  std::optional<WaitCycles::Lane> lane_;
  std::atomic<uint64_t> calls_{0};    // of all ranks together
  uint64_t registering_calls_ = 0;    // of those, since the last Deregister
  std::atomic<bool> calling_{false};  // NCCL, which waits on the host for ranks not met yet
  bool left_ = false;
  std::array<bool, kCollectiveKinds> has_called_ = {};  // by kind
  std::atomic<bool> stop_{false};
  WaitPoint changed_;
  std::optional<WaitNotice> notice_;  // of the watching thread
  std::thread watch_;
};

}  // namespace ebb
