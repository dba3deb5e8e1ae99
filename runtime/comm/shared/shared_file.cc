#include "ebb/runtime/comm/shared/shared_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/rendezvous/connection.h"

namespace ebb {
namespace {

absl::StatusOr<Descriptor> OpenNamed(std::string_view name, int flags) {
  const std::string path = absl::StrCat("/", absl::string_view(name.data(), name.size()));
  Descriptor file(shm_open(path.c_str(), flags | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (file.is_open()) return file;
  const std::string message =
      absl::StrCat("shared memory '/dev/shm", path, "': ", std::strerror(errno));
  if (errno == EEXIST) return absl::AlreadyExistsError(message);
  if (errno == ENOENT) return absl::NotFoundError(message);
  return absl::FailedPreconditionError(message);
}

struct Identity {
  uint64_t device = 0;
  uint64_t inode = 0;
  friend bool operator==(const Identity&, const Identity&) = default;
};

Identity IdentityOf(int file) {
  struct stat info = {};
  if (fstat(file, &info) != 0) return {};
  return {.device = info.st_dev, .inode = info.st_ino};
}

}  // namespace

Mapping::~Mapping() {
  if (data_ != nullptr && bytes_ > 0) munmap(data_, bytes_);
}

std::optional<SharedFile> SharedFile::CreateNameless() {
  Descriptor file(memfd_create("ebb-world", MFD_CLOEXEC));
  if (!file.is_open()) return std::nullopt;
  return SharedFile(std::move(file));
}

absl::StatusOr<SharedFile> SharedFile::Create(std::string_view name) {
  absl::StatusOr<Descriptor> file = OpenNamed(name, O_CREAT | O_EXCL);
  if (!file.ok()) return file.status();
  return SharedFile(*std::move(file));
}

absl::StatusOr<SharedFile> SharedFile::Open(std::string_view name) {
  absl::StatusOr<Descriptor> file = OpenNamed(name, 0);
  if (!file.ok()) return file.status();
  return SharedFile(*std::move(file));
}

void SharedFile::RemoveName(std::string_view name) {
  shm_unlink(absl::StrCat("/", absl::string_view(name.data(), name.size())).c_str());
}

absl::Status SharedFile::Reserve(int64_t offset, int64_t bytes) {
  int error;
  do {
    error = posix_fallocate(file_.get(), offset, bytes);
  } while (error == EINTR);
  if (error == 0) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "no ", (bytes + (1 << 20) - 1) >> 20, " MiB of memory can be shared by the ranks of",
      " this host: ", std::strerror(error),
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

std::string PackFile(int file) {
  const Identity identity = IdentityOf(file);
  return Packer().Add(file, identity.device, identity.inode).Take();
}

Descriptor OpenPeerFile(const Participant& owner, std::string_view packed, int flags) {
  int number = 0;
  Identity identity;
  if (!Unpacker(packed).Read(number, identity.device, identity.inode)) return Descriptor();
  const std::string path = absl::StrCat("/proc/", owner.pid, "/fd/", number);
  Descriptor file(open(path.c_str(), flags | O_CLOEXEC));
  if (!file.is_open() || IdentityOf(file.get()) != identity) return Descriptor();
  return file;
}

}  // namespace shared

}  // namespace ebb
