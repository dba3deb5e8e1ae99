#include "ebb/runtime/comm/shared/peer_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/rendezvous/connection.h"

namespace ebb::shared {
namespace {

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

std::string TellFile(int file) {
  const Identity identity = IdentityOf(file);
  return Packer().Add(static_cast<uint64_t>(file)).Add(identity.device).Add(identity.inode).Take();
}

Descriptor OpenPeerFile(const Participant& owner, std::string_view told, int flags) {
  Unpacker unpacker(told);
  const uint64_t number = unpacker.Number();
  Identity identity;
  identity.device = unpacker.Number();
  identity.inode = unpacker.Number();
  if (!unpacker.ok()) return Descriptor();
  const std::string path = absl::StrCat("/proc/", owner.pid, "/fd/", number);
  Descriptor file(open(path.c_str(), flags | O_CLOEXEC));
  if (!file.is_open() || IdentityOf(file.get()) != identity) return Descriptor();
  return file;
}

}  // namespace ebb::shared
