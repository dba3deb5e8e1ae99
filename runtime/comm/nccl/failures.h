// Makes one rank's failure that of all: of every communicator of this rank's world, and through the store of every other
// rank's.
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
  // `why` is what all ranks will say. The first stays.
  void Report(const absl::Status& why);
  absl::Status status() const;
  Store& store() const { return *store_; }

 private:
  // What the store's thread uses when it has heard something. It may be the last to let go of that, so that does not own
  // the store, whose end waits for its thread.
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
