// A folder of checkpoints:
//
//   DIR/step-000000200/       whole: rank files and the manifest
//   DIR/step-000000300/       the newest
//   DIR/latest                "step-000000300"
//   DIR/.saving-step-000000400/   is being written, or a killed run was writing it
//   DIR/.removing-step-000000100/ an old one that is being removed
//   DIR/.lock                 held while a checkpoint is written
//
// A checkpoint gets its name when all of it is on the disk. So a folder with such a name is whole
// at any instant.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/offload/file_handle.h"
#include "ebb/runtime/checkpoint/manifest.h"

namespace ebb {

// "step-000000300"
std::string CheckpointName(int64_t step);
// The names of a folder's checkpoints, the newest first. No checkpoint is opened.
absl::StatusOr<std::vector<std::string>> CheckpointsIn(const std::string& folder);

// The checkpoint to load from `path`, a checkpoint or a folder of checkpoints. Of a folder it is
// the one that `latest` names. If that one is not whole, it is the newest whole one, and a warning
// says so. kNotFound: there is no checkpoint. kDataLoss: none is whole, and why. Whole: its
// manifest is valid, and its files have the sizes and headers in it.
absl::StatusOr<std::string> FindCheckpoint(const std::string& path);
// OK if the checkpoint is whole by that rule.
absl::Status CheckWhole(const std::string& checkpoint);
// The newest whole checkpoint of an earlier step in the same folder; empty: there is none.
std::string WholeCheckpointBefore(const std::string& checkpoint);

// Engine::run after a load of the checkpoint. If the engine saves beside that checkpoint, the run
// keeps its name.
std::string RunOfLoaded(const Manifest& manifest, const std::string& checkpoint);
// Manifest::run of the checkpoints that an engine saves to `folder`, from its Engine::run. It is a
// new name if the engine has saved and loaded nothing, or was loaded from another folder.
std::string RunIn(const std::string& folder, const std::string& run);
// Makes the folder if there is none. kFailedPrecondition names a checkpoint after `step`, up to
// `last`, that this run may not replace.
absl::Status CheckFreeAfter(const std::string& folder, int64_t step, int64_t last,
                            const std::string& run);

// One checkpoint while one process writes it: the folder `path()`, until Commit gives it its name.
// The destructor removes a folder without its name.
class NewCheckpoint {
 public:
  // Makes `folder` if it does not exist. kFailedPrecondition: another run writes to it, or has a
  // checkpoint of this step there; or the checkpoint of this step cannot be read but is not damaged
  // (another version). `run`: as Manifest::run.
  static absl::StatusOr<NewCheckpoint> Begin(const std::string& folder, int64_t step,
                                             const std::string& run = "");
  NewCheckpoint(NewCheckpoint&&) = default;
  ~NewCheckpoint();

  const std::string& path() const { return path_; }
  // Call it when all files are on the disk. It gives the checkpoint its name, in place of one of
  // the same step, and points `latest` to it. The `keep` whole checkpoints that this run saved last
  // stay (0: all), and so do those of other runs. A failed removal is a warning.
  absl::StatusOr<std::string> Commit(int keep);

 private:
  NewCheckpoint(std::string folder, int64_t step, std::string run, FileHandle lock);
  absl::Status Name(const std::string& path);
  void RemoveOld(const std::string& name, int keep) const;

  std::string folder_;
  int64_t step_ = 0;
  std::string run_;
  std::string path_;
  FileHandle lock_;
};

// NewCheckpoint::path(), for the ranks that have no NewCheckpoint.
std::string PathOfNewCheckpoint(const std::string& folder, int64_t step);

}  // namespace ebb
