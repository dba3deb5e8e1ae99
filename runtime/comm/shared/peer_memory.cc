#include "ebb/runtime/comm/shared/peer_memory.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/cpu/shared_heap.h"
#include "ebb/runtime/trace/log.h"

namespace ebb::shared {
namespace {

// Not mapped if the owner has no heap, or this process may not open it.
Mapping MapMemoryOf(const Participant& owner, std::string_view packed) {
  Unpacker unpacker(packed);
  const auto bytes = static_cast<int64_t>(unpacker.Number());
  const Descriptor file = OpenPeerFile(owner, unpacker.Text(), O_RDONLY);
  if (!unpacker.ok() || bytes == 0 || !file.is_open()) return Mapping();
  void* const data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ,
                          MAP_SHARED | MAP_NORESERVE, file.get(), 0);
  if (data == MAP_FAILED) return Mapping();
  madvise(data, static_cast<size_t>(bytes), MADV_DONTFORK);
  return Mapping(static_cast<std::byte*>(data), static_cast<size_t>(bytes));
}

}  // namespace

absl::StatusOr<std::vector<Mapping>> MapPeerMemory(int rank, Rendezvous& rendezvous) {
  const SharedHeap* const mine = SharedHeap::Install();
  Packer packer;
  if (mine != nullptr) {
    packer.Add(static_cast<uint64_t>(mine->bytes())).Add(PackFile(mine->file()));
  }
  EBB_ASSIGN_OR_RETURN(const std::vector<std::string> packed, rendezvous.AllGather(packer.Take()));
  std::vector<Mapping> memories(packed.size());
  bool all_mapped = true;
  for (size_t other = 0; other < packed.size(); ++other) {
    if (static_cast<int>(other) == rank) continue;
    memories[other] = MapMemoryOf(rendezvous.participants()[other], packed[other]);
    all_mapped = all_mapped && memories[other].data() != nullptr;
  }
  EBB_ASSIGN_OR_RETURN(const std::vector<std::string> mapped,
                       rendezvous.AllGather(all_mapped ? "all" : "not all"));
  const auto missing = std::find(mapped.begin(), mapped.end(), "not all");
  if (missing == mapped.end()) return memories;
  if (rank == 0) {
    LogInfo(absl::StrCat("rank ", missing - mapped.begin(),
                         " cannot map the buffers of the other ranks; large operations are staged, "
                         "which is slower"));
  }
  return std::vector<Mapping>();
}

}  // namespace ebb::shared
