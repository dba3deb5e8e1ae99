#include "thread_ranks.h"

#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/nccl/nccl_world.h"
#include "ebb/runtime/comm/rendezvous/store_group.h"
#include "ebb/runtime/device/device.h"

namespace ebb::testing {
namespace {

absl::Status RunRank(const std::shared_ptr<Store>& store, int devices,
                     const std::function<absl::Status(World)>& body) {
  EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda(store->rank() % devices));
  const auto ranks = std::make_shared<HostsRank>(std::make_shared<StoreGroup>(store));
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<WorldBackend> world, NewNcclWorld(ranks, device));
  return body(World(std::move(world)));
}

}  // namespace

absl::Status RunOnGpus(int ranks, int devices, std::function<absl::Status(World)> body) {
  EBB_ASSIGN_OR_RETURN(std::vector<std::shared_ptr<Store>> stores, Store::OfThreads(ranks));
  std::vector<absl::Status> results(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < stores.size(); ++rank) {
    threads.emplace_back([&, rank] {
      results[rank] = RunRank(stores[rank], devices, body);
      if (!results[rank].ok())
        stores[rank]->Fail(absl::UnavailableError(absl::StrCat("rank ", rank, " has ended")));
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
