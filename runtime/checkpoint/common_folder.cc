#include "ebb/runtime/checkpoint/common_folder.h"

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/offload/file_handle.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/device/machine.h"

namespace ebb {
namespace {

// The file that all ranks look for. It exists on rank 0 only until the ranks have looked.
class SoughtFile {
 public:
  explicit SoughtFile(const std::string& folder) : folder_(folder) {}
  ~SoughtFile() {
    if (!name_.empty()) unlink(absl::StrCat(folder_, "/", name_).c_str());
  }
  SoughtFile(const SoughtFile&) = delete;
  SoughtFile& operator=(const SoughtFile&) = delete;

  absl::Status Create() {
    std::string name = absl::StrCat(kSought, RandomName());
    EBB_RETURN_IF_ERROR(CreateFile(absl::StrCat(folder_, "/", name)).status());
    name_ = std::move(name);
    return absl::OkStatus();
  }
  const std::string& name() const { return name_; }

 private:
  const std::string& folder_;
  std::string name_;
};

// Opening a folder makes NFS ask the server for it. So a folder that this host has found missing,
// and rank 0 has made since, is looked up again.
void OpenEach(const std::filesystem::path& folder) {
  if (folder.has_relative_path()) OpenEach(folder.parent_path());
  const FileHandle opened(
      open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

}  // namespace

std::string RanksOnHosts(const std::vector<std::string>& hosts) {
  std::string text;
  for (size_t first = 0, end = 0; first < hosts.size(); first = end) {
    for (end = first + 1; end < hosts.size() && hosts[end] == hosts[first];) ++end;
    if (hosts[first].empty()) continue;
    absl::StrAppend(&text, text.empty() ? "" : ", ", end - first == 1 ? "rank " : "ranks ", first);
    if (end - first > 1) absl::StrAppend(&text, " to ", end - 1);
    absl::StrAppend(&text, " on host '", hosts[first], "'");
  }
  return text;
}

absl::Status CheckCommonFolder(Engine& engine, const std::string& folder, FolderLock* lock,
                               absl::Status own, std::string_view call) {
  const int rank = engine.world().rank();
  SoughtFile sought(folder);
  if (own.ok() && rank == 0 && engine.world().size() > 1 && !lock->is_common())
    own = sought.Create();
  const std::string about = absl::StrCat(std::string(call), ": folder");
  EBB_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                       engine.Exchange(own, about, sought.name()));
  if (names[0].empty()) return absl::OkStatus();
  OpenEach(folder);
  const bool sees = IsThere(absl::StrCat(folder, "/", names[0]));
  EBB_ASSIGN_OR_RETURN(
      std::vector<std::string> hosts,
      engine.Exchange(absl::OkStatus(), about, absl::StrCat(sees ? "+" : "-", HostName())));
  const std::string of_rank_0 = hosts[0].substr(1);
  for (std::string& host : hosts) host = host.front() == '-' ? host.substr(1) : "";
  const std::string blind = RanksOnHosts(hosts);
  if (blind.empty()) {
    if (rank == 0) lock->SetCommon();
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "ranks have different folders: '", folder, "' on host '", of_rank_0,
      "' (rank 0) is another one than that of ", blind,
      ", so a checkpoint there would lack files. Name a folder that all hosts share, such as one "
      "on NFS, by a path that leads to it on each of them"));
}

}  // namespace ebb
