#include "ebb/runtime/checkpoint/folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "ebb/optim/checksum.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/checkpoint/rank_file.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

constexpr char kLatest[] = "latest", kReplaced[] = ".replaced";
constexpr std::string_view kSaving = ".saving-", kRemoving = ".removing-";
constexpr std::string_view kPrefix = "step-";

bool IsCheckpointName(std::string_view name) {
  return name.starts_with(kPrefix) && name.size() > kPrefix.size() && name.size() < 40 &&
         std::all_of(name.begin() + kPrefix.size(), name.end(),
                     [](char c) { return c >= '0' && c <= '9'; });
}

// A name with more digits is a later step.
bool Newer(const std::string& a, const std::string& b) {
  return a.size() != b.size() ? a.size() > b.size() : a > b;
}

absl::Status Remove(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  return error ? FileError("removing", path, error.value()) : absl::OkStatus();
}

absl::Status Rename(const std::string& from, const std::string& to) {
  return rename(from.c_str(), to.c_str()) == 0
             ? absl::OkStatus()
             : FileError(absl::StrCat("renaming '", from, "' to"), to, errno);
}

// Exchanges the names of two folders at once. False: it failed. Some file systems cannot.
bool Exchange(const std::string& a, const std::string& b) {
  return renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0;
}

// Renames the checkpoint first. If the removal is interrupted, the next save's RemoveRests removes
// the rest.
absl::Status RemoveCheckpoint(const std::string& folder, const std::string& name) {
  const std::string removing = absl::StrCat(folder, "/", std::string(kRemoving), name);
  EBB_RETURN_IF_ERROR(Rename(absl::StrCat(folder, "/", name), removing));
  return Remove(removing);
}

// Removes what killed runs have left.
absl::Status RemoveRests(const std::string& folder) {
  EBB_ASSIGN_OR_RETURN(const std::vector<std::string> names, NamesIn(folder));
  for (const std::string& name : names)
    if (name.starts_with(kSaving) || name.starts_with(kRemoving))
      EBB_RETURN_IF_ERROR(Remove(absl::StrCat(folder, "/", name)));
  return absl::OkStatus();
}

// If the file system cannot exchange names, a killed run may have left the checkpoint that it
// replaced under kReplaced.
absl::Status RestoreReplaced(const std::string& folder) {
  const std::string replaced = absl::StrCat(folder, "/", kReplaced);
  if (!IsThere(replaced)) return absl::OkStatus();
  const auto restore = [&]() -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const Manifest manifest, ReadManifest(replaced));
    const std::string named =
        absl::StrCat(folder, "/", CheckpointName(manifest.state.finished_steps));
    if (!IsThere(named)) return Rename(replaced, named);
    EBB_RETURN_IF_ERROR(CheckWhole(named).status());
    return RemoveCheckpoint(folder, kReplaced);
  };
  const absl::Status restored = restore();
  if (restored.ok()) return restored;
  return absl::Status(restored.code(), absl::StrCat(restored.message(), "; a killed run has left '",
                                                    replaced, "': check it, and move it away"));
}

// A damaged checkpoint, or one without a manifest, cannot be loaded and may be replaced. Other
// errors may be temporary.
absl::Status MayBeReplaced(const std::string& checkpoint, const std::string& run) {
  const absl::StatusOr<Manifest> manifest = ReadManifest(checkpoint);
  if (absl::IsNotFound(manifest.status()) || absl::IsDataLoss(manifest.status()))
    return absl::OkStatus();
  if (manifest.ok() && (manifest->run.empty() || manifest->run == run)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "'", checkpoint, "' ",
      manifest.ok()
          ? "is of another run, so it is not replaced: a run that goes on from it loads it "
            "first (LoadCheckpoint, then CheckSaves and saves); give any other run a "
            "folder of its own, or move that checkpoint away"
          : absl::StrCat("cannot be read (", manifest.status().message(),
                         "), so it is not replaced: give each run a folder of its own, or "
                         "move that checkpoint away")));
}

// In a run's name, before a step: the run was loaded from a checkpoint of that step without a run's
// name.
constexpr char kAfterUnnamed = '+';
// Between the parts of Engine::run after a load: the run's name, its name in other folders, the
// token of the last save in the checkpoint's folder (empty: the run has claimed that folder since),
// and that folder.
constexpr char kBetween[] = "\n";

// If the run was loaded from an unnamed checkpoint of an older version, unnamed checkpoints up to
// that step are its own. An import, which has no configuration, is not.
bool IsOwn(const Manifest& manifest, const std::string& run) {
  if (manifest.run == run) return true;
  const size_t after = run.find(kAfterUnnamed);
  int64_t step = 0;
  return manifest.run.empty() && manifest.config != "{}" && after != std::string::npos &&
         absl::SimpleAtoi(run.substr(after + 1), &step) && manifest.state.finished_steps <= step;
}

}  // namespace

// Each folder is on the disk when this returns.
absl::Status MakeSaveFolder(const std::string& folder) {
  const std::filesystem::path path(folder);
  if (path.empty() || IsThere(folder)) return absl::OkStatus();
  EBB_RETURN_IF_ERROR(MakeSaveFolder(path.parent_path().string()));
  if (mkdir(path.c_str(), 0777) != 0 && errno != EEXIST)
    return FileError("making the folder", folder, errno);
  return SyncFolder(path.has_parent_path() ? path.parent_path().string() : ".");
}

void RemoveEmptyFolder(const std::string& folder) {
  absl::StatusOr<std::shared_ptr<FolderLock>> lock = FolderLock::Take(folder);
  const absl::StatusOr<std::vector<std::string>> files = NamesIn(folder);
  if (!lock.ok() || !files.ok() || files->size() != 1) return;
  (*lock)->Remove();
  rmdir(folder.c_str());
}

std::string RunOfLoaded(const Manifest& manifest, const std::string& checkpoint,
                        const std::string& last_save) {
  std::string name = manifest.run;
  if (name.empty())
    name = absl::StrCat(RandomName(), std::string(1, kAfterUnnamed), manifest.state.finished_steps);
  if (absl::StrContains(name, kBetween)) name = RandomName();  // no run of ours had it
  // The checkpoint may be removed before the first save.
  std::error_code error;
  const std::string folder = std::filesystem::canonical(checkpoint + "/..", error).string();
  return absl::StrCat(name, kBetween, RandomName(), kBetween, last_save, kBetween, folder);
}

absl::StatusOr<std::string> RunIn(const std::string& folder, std::string& run) {
  if (run.empty()) return run = RandomName();
  std::vector<std::string> parts = absl::StrSplit(run, absl::MaxSplits(kBetween, /*limit=*/3));
  if (parts.size() == 1) return run;
  std::error_code error;
  if (!std::filesystem::equivalent(parts[3], folder, error)) return parts[1];
  const std::string last_save = LastSaveIn(folder);
  if (!parts[2].empty() && last_save != parts[2] && last_save != kNoSave) {
    return absl::FailedPreconditionError(absl::StrCat(
        "another run has saved to '", folder, "' since this one loaded a checkpoint from there: ",
        "load the newest checkpoint again, or save to a folder of your own"));
  }
  parts[2].clear();
  run = absl::StrJoin(parts, kBetween);
  return parts[0];
}

absl::Status CheckFreeAfter(const std::string& folder, int64_t step, int64_t last,
                            const std::string& run) {
  EBB_ASSIGN_OR_RETURN(const std::vector<std::string> names, CheckpointsIn(folder));
  for (const std::string& name : names) {
    int64_t of = 0;
    if (absl::SimpleAtoi(name.substr(kPrefix.size()), &of) && of > step && of <= last)
      EBB_RETURN_IF_ERROR(MayBeReplaced(absl::StrCat(folder, "/", name), run));
  }
  return absl::OkStatus();
}

std::string CheckpointName(int64_t step) {
  return absl::StrFormat("step-%09d", step);
}

absl::StatusOr<std::vector<std::string>> CheckpointsIn(const std::string& folder) {
  EBB_ASSIGN_OR_RETURN(std::vector<std::string> names, NamesIn(folder));
  std::erase_if(names, [&](const std::string& name) {
    std::error_code error;
    return !IsCheckpointName(name) ||
           !is_directory(std::filesystem::symlink_status(absl::StrCat(folder, "/", name), error));
  });
  std::sort(names.begin(), names.end(), Newer);
  return names;
}

absl::StatusOr<Manifest> CheckWhole(const std::string& checkpoint, Share share) {
  EBB_ASSIGN_OR_RETURN(Manifest manifest, ReadManifest(checkpoint));
  const int files = static_cast<int>(manifest.files.size());
  for (int file = share.rank; file < files; file += share.ranks) {
    const std::string path = absl::StrCat(checkpoint, "/", RankFileName(file, files));
    EBB_ASSIGN_OR_RETURN(const RankFileHeader found, ReadRankFileHeader(path));
    EBB_RETURN_IF_ERROR(CheckEntry(found.entry, manifest.files[file], path));
  }
  return manifest;
}

absl::StatusOr<std::vector<std::string>> CandidatesIn(const std::string& path) {
  if (HasManifest(path)) return std::vector<std::string>{path};
  absl::StatusOr<std::vector<std::string>> listed = CheckpointsIn(path);
  if (absl::IsNotFound(listed.status()))
    return absl::NotFoundError(absl::StrCat("there is no folder '", path, "'"));
  EBB_ASSIGN_OR_RETURN(std::vector<std::string> names, std::move(listed));
  const absl::StatusOr<std::string> latest =
      ReadWholeFile(absl::StrCat(path, "/", kLatest), /*bytes_max=*/100);
  if (latest.ok()) {
    const std::string name = latest->substr(0, latest->find('\n'));
    const auto found = std::find(names.begin(), names.end(), name);
    if (found != names.end()) std::rotate(names.begin(), found, found + 1);
  }
  if (IsThere(absl::StrCat(path, "/", kReplaced))) names.push_back(kReplaced);
  if (names.empty())
    return absl::NotFoundError(absl::StrCat("there is no checkpoint in '", path, "'"));
  for (std::string& name : names) name = absl::StrCat(path, "/", name);
  return names;
}

absl::StatusOr<std::string> FindCheckpoint(const std::string& path) {
  EBB_ASSIGN_OR_RETURN(const std::vector<std::string> candidates, CandidatesIn(path));
  std::string why;
  for (const std::string& checkpoint : candidates) {
    const absl::Status whole = CheckWhole(checkpoint).status();
    if (whole.ok()) return checkpoint;
    if (checkpoint == path) return whole;
    LogWarning(absl::StrCat("the checkpoint '", checkpoint, "' is skipped: ", whole.message()));
    absl::StrAppend(&why, why.empty() ? "; " : ", ", whole.message());
  }
  return absl::DataLossError(absl::StrCat("no checkpoint in '", path, "' is whole", why));
}

absl::Status WithWayOut(const absl::Status& own, const std::string& checkpoint) {
  if (!absl::IsNotFound(own) && !absl::IsDataLoss(own)) return own;
  std::filesystem::path path(checkpoint);
  if (path.filename().empty()) path = path.parent_path();  // it ended in a slash
  const std::string folder = path.parent_path().string(), damaged = path.filename().string();
  std::vector<std::string> names =
      CheckpointsIn(folder.empty() ? "." : folder).value_or(std::vector<std::string>());
  std::stable_partition(names.begin(), names.end(),
                        [&](const std::string& name) { return Newer(damaged, name); });
  for (const std::string& name : names) {
    const std::string other = (path.parent_path() / name).string();
    if (name != damaged && CheckWhole(other).ok())
      return absl::DataLossError(absl::StrCat(own.message(), "; name ",
                                              Newer(damaged, name) ? "an older" : "a newer",
                                              " checkpoint: '", other, "'"));
  }
  return absl::DataLossError(
      absl::StrCat(own.message(), "; there is no other whole checkpoint beside it"));
}

std::string PathOfNewCheckpoint(const std::string& folder, int64_t step) {
  return absl::StrCat(folder, "/", std::string(kSaving), CheckpointName(step));
}

NewCheckpoint::NewCheckpoint(std::string folder, int64_t step, std::string run,
                             std::shared_ptr<FolderLock> lock)
    : folder_(std::move(folder)),
      step_(step),
      run_(std::move(run)),
      path_(PathOfNewCheckpoint(folder_, step)),
      lock_(std::move(lock)) {}

absl::StatusOr<NewCheckpoint> NewCheckpoint::Begin(const std::string& folder, int64_t step,
                                                   const std::string& run,
                                                   std::shared_ptr<FolderLock> lock) {
  if (lock == nullptr) {
    EBB_RETURN_IF_ERROR(MakeSaveFolder(folder));
    EBB_ASSIGN_OR_RETURN(lock, FolderLock::Take(folder));
  }
  EBB_RETURN_IF_ERROR(lock->Sign());
  NewCheckpoint checkpoint(folder, step, run, std::move(lock));
  EBB_RETURN_IF_ERROR(RestoreReplaced(folder));
  EBB_RETURN_IF_ERROR(MayBeReplaced(absl::StrCat(folder, "/", CheckpointName(step)), run));
  EBB_RETURN_IF_ERROR(RemoveRests(folder));
  if (mkdir(checkpoint.path_.c_str(), 0777) != 0)
    return FileError("making the folder", checkpoint.path_, errno);
  return checkpoint;
}

NewCheckpoint::~NewCheckpoint() {
  if (lock_ != nullptr) Remove(path_).IgnoreError();
}

absl::Status NewCheckpoint::Name(const std::string& path) {
  if (!IsThere(path)) return Rename(path_, path);
  if (Exchange(path_, path)) return absl::OkStatus();
  const std::string replaced = absl::StrCat(folder_, "/", kReplaced);
  EBB_RETURN_IF_ERROR(Rename(path, replaced));
  if (const absl::Status named = Rename(path_, path); !named.ok()) {
    Rename(replaced, path).IgnoreError();  // after a failure the next run renames it
    return named;
  }
  EBB_RETURN_IF_ERROR(SyncFolder(folder_));
  if (const absl::Status removed = RemoveCheckpoint(folder_, kReplaced); !removed.ok())
    LogWarning(absl::StrCat("an old checkpoint is not removed: ", removed.message()));
  return absl::OkStatus();
}

absl::Status NewCheckpoint::WriteManifest(Manifest manifest, int ranks) const {
  for (int rank = 0; rank < ranks; ++rank) {
    EBB_ASSIGN_OR_RETURN(RankFileHeader written,
                         ReadRankFileHeader(absl::StrCat(path_, "/", RankFileName(rank, ranks))));
    manifest.files.push_back(std::move(written.entry));
  }
  const std::string path = absl::StrCat(path_, "/", kManifestName);
  std::string text = ToText(manifest);
  if (std::ssize(text) > kManifestBytesMax) {
    // Checksums of slices may be missing, because the checksums of headers include them.
    for (Manifest::File& file : manifest.files) file.slice_checksums.clear();
    text = ToText(manifest);
  }
  if (std::ssize(text) > kManifestBytesMax)
    return absl::ResourceExhaustedError(
        absl::StrCat("'", path, "' would have ", text.size(), " bytes, more than the ",
                     kManifestBytesMax, " that a reader takes: save less in SaveOptions::trainer"));
  return ReplaceFile(path, text);
}

absl::StatusOr<std::string> NewCheckpoint::Commit(Manifest manifest, int ranks, int keep,
                                                  std::span<const std::string> damaged) {
  EBB_RETURN_IF_ERROR(WriteManifest(std::move(manifest), ranks));
  const std::string name = CheckpointName(step_), path = absl::StrCat(folder_, "/", name);
  EBB_RETURN_IF_ERROR(SyncFolder(path_));
  EBB_RETURN_IF_ERROR(lock_->Sync());
  EBB_RETURN_IF_ERROR(Name(path));
  EBB_RETURN_IF_ERROR(SyncFolder(folder_));
  EBB_RETURN_IF_ERROR(ReplaceFile(absl::StrCat(folder_, "/", kLatest), name + "\n"));
  if (keep > 0) RemoveOld(name, keep, damaged);
  return path;
}

// If a run was resumed from an earlier step, checkpoints of later steps than `name` are older than
// it.
void NewCheckpoint::RemoveOld(const std::string& name, int keep,
                              std::span<const std::string> damaged) const {
  absl::StatusOr<std::vector<std::string>> names = CheckpointsIn(folder_);
  if (!names.ok())
    return LogWarning(absl::StrCat("old checkpoints are not removed: ", names.status().message()));
  std::erase(*names, name);
  std::stable_partition(names->begin(), names->end(),
                        [&](const std::string& other) { return Newer(name, other); });
  const auto is_damaged = [&](const std::string& path) {
    return std::any_of(damaged.begin(), damaged.end(), [&](const std::string& other) {
      std::error_code gone;
      return std::filesystem::equivalent(path, other, gone);
    });
  };
  int kept = 1;
  for (const std::string& old : *names) {
    const std::string path = absl::StrCat(folder_, "/", old);
    const absl::StatusOr<Manifest> manifest = ReadManifest(path);
    if (!manifest.ok() || !IsOwn(*manifest, run_)) continue;
    if (kept < keep) {
      if (!is_damaged(path) && CheckWhole(path).ok()) ++kept;
      continue;  // one that is not whole is kept, for the user to look at
    }
    const absl::Status removed = RemoveCheckpoint(folder_, old);
    if (!removed.ok())
      LogWarning(absl::StrCat("an old checkpoint is not removed: ", removed.message()));
  }
}

}  // namespace ebb
