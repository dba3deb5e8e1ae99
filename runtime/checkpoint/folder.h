// A folder of checkpoints:
//
//   DIR/step-000000200/       whole: rank files and the manifest
//   DIR/step-000000300/       the newest
//   DIR/latest                "step-000000300"
//   DIR/.saving-step-000000400/   is being written, or a killed run was writing it
//   DIR/.removing-step-000000100/ an old one that is being removed
//   DIR/.saving-seen-8c1f0e6b52a97d34   a file for which all ranks look (common_folder.h)
//   DIR/.lock                 held by the run that saves (folder_lock.h)
//
// A checkpoint gets its name when all of it is on the disk. So a folder with such a name is whole
// at any instant.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/checkpoint/folder_lock.h"
#include "ebb/runtime/checkpoint/manifest.h"

namespace ebb {

// "step-000000300"
std::string CheckpointName(int64_t step);
// The names of a folder's checkpoints, the newest first. No checkpoint is opened.
absl::StatusOr<std::vector<std::string>> CheckpointsIn(const std::string& folder);

// The checkpoints to load from `path`, the best first: `path` itself if it is a checkpoint. Those
// of a folder: the checkpoint that `latest` names, then the others, the newest first. kNotFound:
// there is no checkpoint.
absl::StatusOr<std::vector<std::string>> CandidatesIn(const std::string& path);
// The first candidate that is whole; a warning names those before it. kDataLoss: none is whole, and
// why.
absl::StatusOr<std::string> FindCheckpoint(const std::string& path);
// OK if the checkpoint is whole: its manifest is valid, and its files have the sizes and headers in
// it. A rank of several checks only its share of the files.
struct Share {
  int rank = 0, ranks = 1;
};
absl::StatusOr<Manifest> CheckWhole(const std::string& checkpoint, Share share = {});
// If `own` is an error about a damaged or missing file of the checkpoint, it also says which one to
// name instead: the newest whole checkpoint of an earlier step in the same folder, or else another
// whole one there; or that there is none. A file that is missing now does not mean that there was
// no checkpoint, so the error is kDataLoss.
absl::Status WithWayOut(const absl::Status& own, const std::string& checkpoint);

// Beginning of the name of the file for which all ranks look. Begin removes one that was left.
inline constexpr char kSought[] = ".saving-seen-";

// Makes the folder and its parents, if there is none.
absl::Status MakeSaveFolder(const std::string& folder);
// Removes a folder that has only its lock, if no run holds it.
void RemoveEmptyFolder(const std::string& folder);

// Engine::run after a load of the checkpoint. If the engine saves beside that checkpoint, the run
// keeps its name. `last_save`: LastSaveIn the checkpoint's folder, from before the load.
std::string RunOfLoaded(const Manifest& manifest, const std::string& checkpoint,
                        const std::string& last_save);
// Manifest::run of the checkpoints that an engine saves to `folder`. `run` is its Engine::run; this
// call changes it, so that later calls return the same. The name is new if the engine has saved and
// loaded nothing, or was loaded from another folder. kFailedPrecondition: another run has saved
// there since the load. Call it with the folder's lock.
absl::StatusOr<std::string> RunIn(const std::string& folder, std::string& run);
// kFailedPrecondition names a checkpoint after `step`, up to `last`, that this run may not replace.
absl::Status CheckFreeAfter(const std::string& folder, int64_t step, int64_t last,
                            const std::string& run);

// One checkpoint while one process writes it: the folder `path()`, until Commit gives it its name.
// The destructor removes a folder without its name.
class NewCheckpoint {
 public:
  // kFailedPrecondition: another run has a checkpoint of this step there; or the checkpoint of this
  // step cannot be read but is not damaged (another version). `run`: as Manifest::run. `lock`: of
  // the folder; null: takes it until the end, and makes the folder if there is none.
  static absl::StatusOr<NewCheckpoint> Begin(const std::string& folder, int64_t step,
                                             const std::string& run = "",
                                             std::shared_ptr<FolderLock> lock = nullptr);
  NewCheckpoint(NewCheckpoint&&) = default;
  ~NewCheckpoint();

  const std::string& path() const { return path_; }
  // Call it when the files of all ranks are on the disk. It adds them to the manifest, which it
  // writes. It gives the checkpoint its name, in place of one of the same step, and points `latest`
  // to it. The `keep` whole checkpoints that this run saved last
  // stay (0: all), and so do those of other runs. `damaged`: checkpoints of which a load has found
  // that they are not whole. A failed removal is a warning.
  absl::StatusOr<std::string> Commit(Manifest manifest, int ranks, int keep,
                                     std::span<const std::string> damaged = {});

 private:
  NewCheckpoint(std::string folder, int64_t step, std::string run,
                std::shared_ptr<FolderLock> lock);
  absl::Status WriteManifest(Manifest manifest, int ranks) const;
  absl::Status Name(const std::string& path);
  void RemoveOld(const std::string& name, int keep, std::span<const std::string> damaged) const;

  std::string folder_;
  int64_t step_ = 0;
  std::string run_;
  std::string path_;
  std::shared_ptr<FolderLock> lock_;
};

// NewCheckpoint::path(), for the ranks that have no NewCheckpoint.
std::string PathOfNewCheckpoint(const std::string& folder, int64_t step);

}  // namespace ebb
