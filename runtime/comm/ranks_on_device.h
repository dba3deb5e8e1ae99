// The ranks of a world with devices of their own. They keep their hosts and the world that they
// were made from.
#pragma once

#include <memory>
#include <utility>

#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/device/device.h"

namespace ebb {

class RanksOnDevice : public WorldBackend {
 public:
  RanksOnDevice(std::shared_ptr<WorldBackend> ranks, Device device)
      : ranks_(std::move(ranks)), device_(std::move(device)) {}

  int rank() const override { return ranks_->rank(); }
  int size() const override { return ranks_->size(); }
  int local_rank() const override { return ranks_->local_rank(); }
  int local_size() const override { return ranks_->local_size(); }
  int ranks_per_host() const override { return ranks_->ranks_per_host(); }

 protected:
  const std::shared_ptr<WorldBackend> ranks_;
  const Device device_;
};

}  // namespace ebb
