// Makes one rank's failure that of all: of every communicator of this rank's world, and through the
// bootstrap of every other rank's.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/comm/nccl/bootstrap.h"
#include "ebb/runtime/comm/nccl/channel.h"

namespace ebb {

class SharedFailure {
 public:
  static std::shared_ptr<SharedFailure> Between(std::shared_ptr<Bootstrap> bootstrap);

  // Fails with the others from now on.
  void Join(const std::shared_ptr<NcclChannel>& channel);
  // `why` is what all ranks will say. The first stays.
  void Report(const absl::Status& why);

  absl::Status status() const;
  Bootstrap& bootstrap() const { return *bootstrap_; }

 private:
  // What the bootstrap's thread uses when it has heard something. It may be the last to let go of
  // that, so that does not own the bootstrap, whose end waits for its thread.
  struct Heard {
    mutable std::mutex mutex;
    absl::Status status;
    std::vector<std::weak_ptr<NcclChannel>> channels;
    // False: it was not the first.
    bool FailAll(const absl::Status& why);
  };

  explicit SharedFailure(std::shared_ptr<Bootstrap> bootstrap) : bootstrap_(std::move(bootstrap)) {}

  const std::shared_ptr<Bootstrap> bootstrap_;
  const std::shared_ptr<Heard> heard_ = std::make_shared<Heard>();
};

}  // namespace ebb
