// Checkpoints: everything a run is, in a folder of safetensors files that any number of ranks can load, at any stage,
// tier and precision (docs/format.md).
//
//   ebb::SaveCheckpoint(engine, "runs/7b", {.keep = 3});                // runs/7b/step-000000300
//   auto saving = ebb::SaveAsync(engine, "runs/7b", {.keep = 3});       // the same, beside the steps that come
//   auto loaded = ebb::LoadCheckpoint(engine, "runs/7b");               // the newest whole one
//
// All are collective and belong between steps. An error on any rank is every rank's. All ranks see one file system.
// Earlier checkpoints survive any failure: a checkpoint gets its name when all of it is on the disk, and an older one
// is removed after that.
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/engine/engine.h"

namespace ebb {

struct SaveOptions {
  int keep = 0;  // the newest so many stay in the folder; 0: all
  // Where the save before this one has not ended on some rank: false makes this one an error (kUnavailable) on all.
  bool waits = true;
  // The trainer's own named bytes, such as its place in the data. `trainer`: rank 0's count for all ranks.
  // `of_this_rank`: each rank's own, as its random state is; a load at another world has none of them.
  std::map<std::string, std::string> trainer = {}, of_this_rank = {};
};

// A checkpoint on its way. Copies are the same. It does not keep the engine: that ends after the save. With parameters on
// NVMe a save may begin in the next step, behind the updates that this step does in its forward. Without a step it begins
// when the thread that saves waits, or asks twice whether it is done. Until it has begun, Wait on another thread is an error.
class SaveTicket {
 public:
  SaveTicket(std::string path, std::shared_future<absl::Status> over,
             std::function<absl::Status()> begin);

  // Ended, well or not.
  bool Done() const;
  // Its path, once all of it is on the disk and has its name; an error is every rank's.
  absl::StatusOr<std::string> Wait() const;

 private:
  struct Asked;
  bool is_over() const;

  std::string path_;
  std::shared_future<absl::Status> over_;
  std::shared_ptr<Asked> asked_;
};

// Writes `folder`/step-N, N being the finished steps, and points `folder`/latest to it. Returns when the save is on
// its way, having waited for the verdict on the last step. The saved state is that of this step, whatever is trained
// meanwhile: a unit's next update waits until the unit's state has been read (Engine::ReadAsync). State on NVMe is
// not waited for: the first save reserves a second place for it on its disk, to which updates write. A second save
// waits for the first, or is refused (SaveOptions::waits). Memory: 32 MiB a rank and the header of its file. The
// engine keeps the 32 MiB, in memory(), for later saves. The first load replaces them with 64 MiB, which later saves
// use too. A save has to end within ebb.timeout_seconds.
absl::StatusOr<SaveTicket> SaveAsync(Engine& engine, const std::string& folder,
                                     const SaveOptions& options = {});
// The same, until it is on the disk. Returns the path.
absl::StatusOr<std::string> SaveCheckpoint(Engine& engine, const std::string& folder,
                                           const SaveOptions& options = {});

// Before training up to `last_step`: whether each step that is not finished can be saved to `folder`. Collective.
// kFailedPrecondition names a checkpoint there that a save would refuse to replace.
absl::Status CheckSaves(Engine& engine, const std::string& folder, int64_t last_step);

struct LoadOptions {
  // False: masters and frozen parameters alone; optimizer states and the training state stay as they are.
  bool states = true;
  // What the checkpoint lacks takes its initial value, and what it has beside the model is left out; else either is an
  // error that names the first.
  bool partial = false;
};

struct LoadedCheckpoint {
  std::string path;
  TrainingState state;  // of the run that saved
  std::map<std::string, std::string> trainer, of_this_rank;
  std::string config;  // of the run that saved, JSON
  int ranks = 0;       // likewise
  int64_t bytes_read =
      0;  // values that this rank read, in whole checked blocks of at most 4 MiB; headers are not counted
};

// `path`: a checkpoint, or a folder of them; then the newest complete one is loaded. Each rank reads the bytes that
// it needs, through 64 MiB; a save uses 32 of these. kNotFound: there is none. kDataLoss: none is complete. After a
// failed load the engine's values are undefined: load again, or create the engine again.
absl::StatusOr<LoadedCheckpoint> LoadCheckpoint(Engine& engine, const std::string& path,
                                                const LoadOptions& options = {});

}  // namespace ebb
