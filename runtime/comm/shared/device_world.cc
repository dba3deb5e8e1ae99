#include "ebb/runtime/comm/shared/device_world.h"

#include <cstdlib>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/shared/device_communicator.h"
#include "ebb/runtime/comm/shared/world.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

class SharedDeviceRank : public WorldBackend {
 public:
  // `threads`: the ranks' group, that of `ranks` or of a single rank.
  SharedDeviceRank(std::shared_ptr<WorldBackend> ranks, std::shared_ptr<WorldBackend> threads,
                   const Device& device)
      : WorldBackend(ranks->me()),
        ranks_(std::move(ranks)),
        threads_(std::move(threads)),
        device_(device) {}

  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NewCommunicator(
      const CommunicatorOptions& options) override {
    return SharedDeviceCommunicator::Create(*threads_->threads(), {.options = options}, device_);
  }

  absl::StatusOr<std::shared_ptr<WorldBackend>> Split(const Proposal& proposal) override {
    EBB_ASSIGN_OR_RETURN(std::shared_ptr<WorldBackend> part, threads_->Split(proposal));
    return std::make_shared<SharedDeviceRank>(part, part, device_);
  }

  void Fail(absl::Status why) override {
    threads_->Fail(why);
    if (threads_ != ranks_) ranks_->Fail(std::move(why));
  }

 private:
  const std::shared_ptr<WorldBackend> ranks_;  // the world that this one was made from
  const std::shared_ptr<WorldBackend> threads_;
  const Device device_;
};

bool NcclSharesDevices() {
  const char* const enabled = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return enabled != nullptr && std::string_view(enabled) == "1";
}

absl::StatusOr<bool> AllHave(SharedGroup& threads, const Device& device) {
  const int mine = device.ordinal();
  bool all = true;
  EBB_ASSIGN_OR_RETURN(
      SharedGroup::Place place,
      threads.Join({.options = {.name = "gpu-devices"}}, &mine, [&](int, const void* attached) {
        all = all && *static_cast<const int*>(attached) == mine;
      }));
  const SharedGroup formed(threads.world(), std::move(place));  // frees its memory
  return all;
}

}  // namespace

absl::StatusOr<std::shared_ptr<WorldBackend>> ShareDevice(std::shared_ptr<WorldBackend> world,
                                                          const Device& device) {
  std::shared_ptr<WorldBackend> threads = world->threads() == nullptr ? nullptr : world;
  if (world->size() > 1) {
    if (threads == nullptr || NcclSharesDevices()) return nullptr;
    EBB_ASSIGN_OR_RETURN(const bool shared, AllHave(*threads->threads(), device));
    if (!shared) return nullptr;
  }
  if (world->size() > StreamMover::kInputsMax) {
    return absl::InvalidArgumentError(absl::StrCat(world->size(), " ranks cannot share ",
                                                   device.description(), "; at most ",
                                                   StreamMover::kInputsMax));
  }
  if (threads == nullptr) threads = std::make_shared<SharedRank>(ThreadWorld(1).rank(0));
  return std::make_shared<SharedDeviceRank>(std::move(world), std::move(threads), device);
}

}  // namespace ebb
