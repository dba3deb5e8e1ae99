// Spreads one rank's failure: to every communicator of this rank's world, and through the store to
// every other rank.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/comm/nccl/channel.h"
#include "ebb/runtime/comm/rendezvous/store.h"

namespace ebb {

class NcclFailures {
 public:
  static std::shared_ptr<NcclFailures> Of(std::shared_ptr<Store> store);

  // Fails with the others from now on.
  void Join(const std::shared_ptr<NcclChannel>& channel);
  // `why`: the error of all ranks. The first one stays.
  void Report(const absl::Status& why);
  absl::Status status() const;
  Store& store() const { return *store_; }

 private:
  // Used by the store's thread. That thread may be the last owner, so this does not own the store,
  // because the store's destructor waits for its thread.
  struct Heard {
    mutable std::mutex mutex;
    absl::Status status;
    std::vector<std::weak_ptr<NcclChannel>> channels;
    // False: it was not the first.
    bool FailAll(const absl::Status& why);
  };

  explicit NcclFailures(std::shared_ptr<Store> store) : store_(std::move(store)) {}

  const std::shared_ptr<Store> store_;
  const std::shared_ptr<Heard> heard_ = std::make_shared<Heard>();
};

}  // namespace ebb
