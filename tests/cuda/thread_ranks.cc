#include "thread_ranks.h"

#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/nccl/nccl_world.h"
#include "ebb/runtime/comm/rendezvous/hosts_rank.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/device.h"

namespace ebb::testing {
namespace {

absl::Status RunRank(const std::shared_ptr<Store>& store, int rank, int devices,
                     const std::function<absl::Status(World)>& body) {
  EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda(rank % devices));
  const auto ranks = std::make_shared<HostsRank>(std::make_shared<StoreGroup>(store, rank));
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<WorldBackend> world, NewNcclWorld(ranks, device));
  return body(World(std::move(world)));
}

}  // namespace

absl::Status RunOnGpus(int ranks, int devices, std::function<absl::Status(World)> body) {
  const std::shared_ptr<Store> store = Store::OfThreads(ranks);
  std::vector<absl::Status> results(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      absl::Status& result = results[static_cast<size_t>(rank)];
      result = RunRank(store, rank, devices, body);
      if (!result.ok())
        store->Break(absl::UnavailableError(absl::StrCat("rank ", rank, " has ended")));
      store->Leave(rank, "its thread has ended");
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& result : results) {
    if (!result.ok()) return result;
  }
  return absl::OkStatus();
}

absl::Status RunOnGpu(int ranks, std::function<absl::Status(World)> body) {
  return RunOnGpus(ranks, /*devices=*/1, std::move(body));
}

}  // namespace ebb::testing
