// One rank's end of a group of threads: what its communicators have in common, whatever their
// operations run on.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/local/formation.h"
#include "ebb/runtime/comm/local/group.h"
#include "ebb/runtime/comm/local/world.h"

namespace ebb {

class LocalMember : public CommunicatorBackend {
 public:
  LocalMember(std::shared_ptr<LocalWorld> world, Formation::Place place)
      : world_(std::move(world)), group_(std::move(place.group)), rank_(place.rank) {}

  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }
  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> Split(int colour, int key,
                                                             std::string_view name) override;
  absl::Status status() const override { return group_->status(); }
  void Abort(absl::Status why) override;
  int64_t bytes_moved() const override { return bytes_moved_.load(std::memory_order_relaxed); }

 protected:
  // Another of this kind.
  virtual absl::StatusOr<std::unique_ptr<CommunicatorBackend>> Join(Formation::Place place) = 0;

  const Collective& CallOf(int rank) const { return group_->seat(rank).call; }
  int world_rank() const { return group_->world_ranks()[static_cast<size_t>(rank_)]; }

  const std::shared_ptr<LocalWorld> world_;
  const std::shared_ptr<LocalGroup> group_;
  const int rank_;
  std::atomic<int64_t> bytes_moved_{0};
};

}  // namespace ebb
