// A folder of checkpoints:
//
//   DIR/step-000000200/       whole: rank files and the manifest
//   DIR/step-000000300/       the newest
//   DIR/latest                "step-000000300"
//   DIR/.saving-step-000000400/   one that is being written, or was when its run was killed
//   DIR/.removing-step-000000100/ an old one on its way out
//   DIR/.lock                 held while one is written
//
// A checkpoint gets its name when all of it is on the disk. So what has the name is whole, at any instant.
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
// Of a folder of checkpoints, the newest first. Nothing of it is opened.
absl::StatusOr<std::vector<std::string>> CheckpointsIn(const std::string& folder);

// The checkpoint to load from `path`, which is one, or a folder of them: then the one that `latest` names, or where
// that one is not whole the newest that is, with a warning. kNotFound: there is none. kDataLoss: none is whole, and why.
// Whole: its manifest is valid, and its files are there with the sizes and headers that it says.
absl::StatusOr<std::string> FindCheckpoint(const std::string& path);
// OK if the checkpoint is whole by that rule.
absl::Status CheckWhole(const std::string& checkpoint);
// The newest whole one of an earlier step beside it; empty: there is none.
std::string WholeCheckpointBefore(const std::string& checkpoint);

// Engine::run after a load of the checkpoint. Such a run goes on where it saves beside that checkpoint.
std::string RunOfLoaded(const Manifest& manifest, const std::string& checkpoint);
// Manifest::run of the checkpoints that an engine saves to `folder`, from its Engine::run. A new name: the engine has
// saved and loaded nothing, or it was loaded from another folder.
std::string RunIn(const std::string& folder, const std::string& run);
// kFailedPrecondition names a checkpoint behind `step`, up to `last`, that this run may not replace.
absl::Status CheckFreeAfter(const std::string& folder, int64_t step, int64_t last,
                            const std::string& run);

// One checkpoint that is being written, by one process: the folder `path()` until Commit gives it its name. Its
// destructor removes one that was not named.
class NewCheckpoint {
 public:
  // Makes `folder` where it is not there. kFailedPrecondition: another run writes to it, or has a checkpoint of this
  // step there; or one that is there can be neither read nor called damaged, as of another version. `run`: as Manifest::run.
  static absl::StatusOr<NewCheckpoint> Begin(const std::string& folder, int64_t step,
                                             const std::string& run = "");
  NewCheckpoint(NewCheckpoint&&) = default;
  ~NewCheckpoint();

  const std::string& path() const { return path_; }
  // When all files are on the disk: gives it its name in the place of one of the same step, points `latest` to it,
  // and keeps the `keep` whole ones of this run that were saved last (0: all), with all of other runs. What cannot be
  // removed is a warning.
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

// Where the ranks that do not begin it write: NewCheckpoint::path().
std::string PathOfNewCheckpoint(const std::string& folder, int64_t step);

}  // namespace ebb
