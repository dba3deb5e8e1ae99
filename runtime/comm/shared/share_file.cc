#include "ebb/runtime/comm/shared/share_file.h"

#include <fcntl.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb::shared {
namespace {

using Fill = absl::FunctionRef<absl::Status(SharedFile& file)>;

// If one rank fails, all ranks learn it here, before they wait for it.
template <class T>
absl::StatusOr<T> OrRefuse(Rendezvous& rendezvous, absl::StatusOr<T> result) {
  if (!result.ok()) rendezvous.Refuse(result.status());
  return result;
}

absl::StatusOr<SharedFile> Filled(absl::StatusOr<SharedFile> file, Fill fill) {
  EBB_RETURN_IF_ERROR(file.status());
  EBB_RETURN_IF_ERROR(fill(*file));
  return file;
}

// Nothing, on all ranks, if one of them cannot open it.
absl::StatusOr<std::optional<SharedFile>> ShareNameless(int rank, Rendezvous& rendezvous,
                                                        Fill fill) {
  std::optional<SharedFile> file;
  if (rank == 0) file = SharedFile::CreateNameless();
  if (file.has_value()) {
    EBB_ASSIGN_OR_RETURN(file, OrRefuse(rendezvous, Filled(*std::move(file), fill)));
  }
  EBB_ASSIGN_OR_RETURN(const std::vector<std::string> told,
                       rendezvous.AllGather(file.has_value() ? PackFile(file->descriptor()) : ""));
  if (rank != 0) {
    Descriptor opened = OpenPeerFile(rendezvous.participants()[0], told[0], O_RDWR);
    if (opened.is_open()) file = SharedFile(std::move(opened));
  }
  EBB_ASSIGN_OR_RETURN(const std::vector<std::string> open,
                       rendezvous.AllGather(file.has_value() ? "open" : "not open"));
  if (std::count(open.begin(), open.end(), "open") < static_cast<int64_t>(open.size()))
    file.reset();
  return file;
}

absl::StatusOr<SharedFile> OpenNamed(const Participant& me, const std::string& name) {
  absl::StatusOr<SharedFile> file = SharedFile::Open(name);
  if (file.ok()) return file;
  return absl::Status(file.status().code(),
                      absl::StrCat(Describe(me), ": ", file.status().message()));
}

absl::StatusOr<SharedFile> ShareNamed(int rank, Rendezvous& rendezvous, Fill fill,
                                      const std::string& name) {
  absl::StatusOr<SharedFile> file = absl::UnknownError("not tried");
  if (rank == 0) {
    file = OrRefuse(rendezvous, Filled(SharedFile::Create(name), fill));
    EBB_RETURN_IF_ERROR(file.status());
  }
  EBB_RETURN_IF_ERROR(rendezvous.AllGather("").status());
  if (rank != 0) {
    const Participant& me = rendezvous.participants()[static_cast<size_t>(rank)];
    file = OrRefuse(rendezvous, OpenNamed(me, name));
    EBB_RETURN_IF_ERROR(file.status());
  }
  EBB_RETURN_IF_ERROR(rendezvous.AllGather("").status());
  return file;
}

}  // namespace

std::string SharedFileName(const Rendezvous& rendezvous) {
  return absl::StrCat("ebb-", rendezvous.participants()[0].pid, "-",
                      absl::Hex(rendezvous.nonce(), absl::kZeroPad16));
}

absl::StatusOr<SharedFile> ShareFile(int rank, Rendezvous& rendezvous, Fill fill) {
  EBB_ASSIGN_OR_RETURN(std::optional<SharedFile> nameless, ShareNameless(rank, rendezvous, fill));
  if (nameless.has_value()) return *std::move(nameless);
  const std::string name = SharedFileName(rendezvous);
  absl::StatusOr<SharedFile> file = ShareNamed(rank, rendezvous, fill, name);
  // Every rank removes the name, on every path, because its maker may have been killed.
  SharedFile::RemoveName(name);
  return file;
}

}  // namespace ebb::shared
