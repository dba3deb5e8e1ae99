#include "ebb/runtime/comm/shared/shared_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/cpu/pages.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

absl::StatusOr<SharedFile> OpenNamed(std::string_view name, int flags) {
  const std::string path = absl::StrCat("/", absl::string_view(name.data(), name.size()));
  Descriptor file(shm_open(path.c_str(), flags | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (file.is_open()) return SharedFile(std::move(file));
  const std::string message =
      absl::StrCat("shared memory '/dev/shm", path, "': ", std::strerror(errno));
  if (errno == EEXIST) return absl::AlreadyExistsError(message);
  if (errno == ENOENT) return absl::NotFoundError(message);
  return absl::FailedPreconditionError(message);
}

// The device and inode of a file.
std::pair<uint64_t, uint64_t> IdentityOf(int file) {
  struct stat info = {};
  if (fstat(file, &info) != 0) return {};
  return {info.st_dev, info.st_ino};
}

}  // namespace

void Mapping::Unmap::operator()(std::byte* data) const {
  if (bytes > 0) munmap(data, bytes);
}

absl::StatusOr<SharedFile> SharedFile::Create(std::string_view name) {
  if (!name.empty()) return OpenNamed(name, O_CREAT | O_EXCL);
  Descriptor file(memfd_create("ebb-world", MFD_CLOEXEC));
  if (!file.is_open()) return absl::UnavailableError(std::strerror(errno));
  return SharedFile(std::move(file));
}

absl::Status SharedFile::Reserve(int64_t offset, int64_t bytes) {
  int error;
  do {
    error = posix_fallocate(file_.get(), offset, bytes);
  } while (error == EINTR);
  if (error == 0) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "the ranks of this host cannot share ", (bytes + (1 << 20) - 1) >> 20,
      " MiB of memory: ", std::strerror(error),
      ". A container may need more memory or a larger /dev/shm (docker run --shm-size=1g)"));
}

void SharedFile::Release(int64_t offset, int64_t bytes) {
  fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
}

absl::StatusOr<Mapping> SharedFile::Map(int64_t offset, int64_t bytes) const {
  void* const data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED,
                          file_.get(), offset);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot map ", bytes, " bytes of shared memory: ", std::strerror(errno)));
  }
  return Mapping(static_cast<std::byte*>(data), static_cast<size_t>(bytes));
}

namespace shared {
namespace {

// The text by which other processes open this process's `file`.
std::string PackFile(int file) {
  const auto [device, inode] = IdentityOf(file);
  return Packer().Add(file, device, inode).Take();
}

// The file that `owner` has packed. Not open if a container hides processes from each other, or
// `owner`'s process id belongs to another process here.
Descriptor OpenPeerFile(const Participant& owner, std::string_view packed, int flags) {
  int number = 0;
  std::pair<uint64_t, uint64_t> identity;
  if (!Unpacker(packed).Read(number, identity.first, identity.second)) return Descriptor();
  const std::string path = absl::StrCat("/proc/", owner.pid, "/fd/", number);
  Descriptor file(open(path.c_str(), flags | O_CLOEXEC));
  if (!file.is_open() || IdentityOf(file.get()) != identity) return Descriptor();
  return file;
}

// Not mapped if the owner has no heap, or this process may not open it.
Mapping MapMemoryOf(const Participant& owner, std::string_view packed) {
  size_t bytes = 0;
  std::string packed_file;
  if (!Unpacker(packed).Read(bytes, packed_file)) return Mapping();
  const Descriptor file = OpenPeerFile(owner, packed_file, O_RDONLY);
  if (!file.is_open()) return Mapping();
  void* const data = mmap(nullptr, bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, file.get(), 0);
  if (data == MAP_FAILED) return Mapping();
  madvise(data, bytes, MADV_DONTFORK);
  return Mapping(static_cast<std::byte*>(data), bytes);
}

}  // namespace

std::string SharedFileName(const Rendezvous& rendezvous) {
  return absl::StrCat("ebb-", rendezvous.participants()[0].pid, "-",
                      absl::Hex(rendezvous.nonce(), absl::kZeroPad16));
}

absl::StatusOr<SharedFile> ShareFile(StoreGroup& ranks, const std::string& name,
                                     double timeout_seconds,
                                     absl::FunctionRef<absl::Status(SharedFile& file)> fill) {
  const std::vector<Participant>& participants = ranks.store().participants();
  // Every rank removes the name, on every path, because its maker may have been killed.
  const absl::Cleanup unnamed = [&] { shm_unlink(absl::StrCat("/", name).c_str()); };
  for (const bool has_name : {false, true}) {
    absl::StatusOr<SharedFile> file = absl::UnavailableError("rank 0's file cannot be opened");
    if (ranks.rank() == 0) {
      file = SharedFile::Create(has_name ? name : "");
      if (file.ok()) {
        if (const absl::Status filled = fill(*file); !filled.ok()) file = filled;
      }
    }
    // If one rank fails, all ranks learn it here, before they wait for it.
    const auto settle = [&] {
      if (has_name && !file.ok()) ranks.store().Fail(file.status());
    };
    if (ranks.rank() == 0) settle();
    EBB_ASSIGN_OR_RETURN(
        const std::vector<std::string> packed,
        ranks.AllGather(ranks.rank() == 0 && file.ok() ? PackFile(file->descriptor()) : "",
                        timeout_seconds));
    if (ranks.rank() != 0 && has_name) {
      file = OpenNamed(name, 0);
      const Participant& me = participants[ranks.rank()];
      if (!file.ok()) {
        file = absl::Status(file.status().code(),
                            absl::StrCat(Describe(me), ": ", file.status().message()));
      }
      settle();
    } else if (ranks.rank() != 0) {
      Descriptor opened = OpenPeerFile(participants[0], packed[0], O_RDWR);
      if (opened.is_open()) file = SharedFile(std::move(opened));
    }
    EBB_ASSIGN_OR_RETURN(const std::vector<std::string> open,
                         ranks.AllGather(file.ok() ? "open" : "not open", timeout_seconds));
    if (std::count(open.begin(), open.end(), "open") == ranks.size()) return file;
  }
  return ranks.store().status();
}

absl::StatusOr<std::vector<Mapping>> MapPeerMemory(StoreGroup& ranks, double timeout_seconds) {
  const SharedHeap* const mine = SharedHeap::Install();
  Packer packer;
  if (mine != nullptr) packer.Add(mine->bytes(), PackFile(mine->file()));
  EBB_ASSIGN_OR_RETURN(const std::vector<std::string> packed,
                       ranks.AllGather(packer.Take(), timeout_seconds));
  std::vector<Mapping> memories(packed.size());
  bool all_mapped = true;
  for (size_t other = 0; other < packed.size(); ++other) {
    if (static_cast<int>(other) == ranks.rank()) continue;
    memories[other] = MapMemoryOf(ranks.store().participants()[other], packed[other]);
    all_mapped = all_mapped && memories[other].data() != nullptr;
  }
  EBB_ASSIGN_OR_RETURN(const std::vector<std::string> mapped,
                       ranks.AllGather(all_mapped ? "all" : "not all", timeout_seconds));
  const auto missing = std::find(mapped.begin(), mapped.end(), "not all");
  if (missing == mapped.end()) return memories;
  if (ranks.rank() == 0) {
    LogInfo(absl::StrCat("rank ", missing - mapped.begin(),
                         " cannot map the buffers of the other ranks; large operations are staged, "
                         "which is slower"));
  }
  return std::vector<Mapping>();
}

}  // namespace shared

}  // namespace ebb
