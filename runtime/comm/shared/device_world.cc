#include "ebb/runtime/comm/shared/device_world.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/communicator.h"
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

absl::StatusOr<bool> AllHave(WorldBackend& world, const Device& device) {
  EBB_ASSIGN_OR_RETURN(std::unique_ptr<CommunicatorBackend> backend,
                       world.NewCommunicator({.name = "gpu-devices"}));
  Communicator communicator(std::move(backend));
  const int32_t mine = device.ordinal();
  std::vector<int32_t> all(static_cast<size_t>(world.size()));
  const CollectiveSpan span = {
      .send = &mine, .receive = all.data(), .count = static_cast<int64_t>(sizeof(mine))};
  Stream stream = Device::Cpu(1).CallerStream();
  EBB_RETURN_IF_ERROR(communicator.AllGather(stream, {&span, 1}, DType::kInt8));
  EBB_RETURN_IF_ERROR(communicator.status());
  return std::count(all.begin(), all.end(), mine) == world.size();
}

}  // namespace

absl::StatusOr<std::shared_ptr<WorldBackend>> ShareDevice(std::shared_ptr<WorldBackend> world,
                                                          const Device& device) {
  std::shared_ptr<WorldBackend> threads = world->threads() == nullptr ? nullptr : world;
  if (world->size() > 1) {
    if (threads == nullptr || NcclSharesDevices()) return nullptr;
    EBB_ASSIGN_OR_RETURN(const bool shared, AllHave(*world, device));
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
