// Checkpoints: everything a run is, in a folder of safetensors files that any number of ranks can
// load, at any stage, tier and precision (docs/format.md).
//
//   ebb::SaveCheckpoint(engine, "runs/7b", {.keep = 3});            // runs/7b/step-000000300
//   auto saving = ebb::SaveAsync(engine, "runs/7b", {.keep = 3});   // the same, beside later steps
//   auto loaded = ebb::LoadCheckpoint(engine, "runs/7b");           // the newest complete one
//
// All calls are collective and belong between steps. An error on any rank is every rank's. The
// hosts of all ranks must share the folder. CheckSaves, or else the first save, checks that all
// ranks see the same one.
// Earlier checkpoints survive any failure: a checkpoint gets its name when all of it is on the
// disk, and only then is an older one removed.
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
  int keep = 0;  // how many checkpoints stay in the folder, the newest; 0: all
  // False: an error (kUnavailable) on all ranks if the save before this one has not ended on some
  // rank.
  bool waits = true;
  // The trainer's own named bytes, such as its place in the data. `trainer`: rank 0's are saved for
  // all ranks. `of_this_rank`: each rank's own, such as its random state. A load at another world
  // returns none of them.
  std::map<std::string, std::string> trainer = {}, of_this_rank = {};
};

// A save under way. Copies stand for the same save. A ticket does not keep the engine alive; the
// engine ends after the save. With parameters on NVMe a save may begin in the next step, after the
// updates in that step's forward. Without a next step, it begins when the saving thread calls Wait,
// or calls Done twice. Until then, Wait on another thread fails.
class SaveTicket {
 public:
  SaveTicket(std::string path, std::shared_future<absl::Status> over,
             std::function<absl::Status()> begin);

  // Whether the save has ended, with or without an error. So that a loop over Done ends, the second
  // call on the saving thread begins a save that no step has begun.
  bool Done() const;
  // Waits until the checkpoint is on the disk and has its name. Returns its path. An error is every
  // rank's.
  absl::StatusOr<std::string> Wait() const;

 private:
  struct Asked;
  bool is_over() const;

  std::string path_;
  std::shared_future<absl::Status> over_;
  std::shared_ptr<Asked> asked_;
};

// The most host memory that a save takes, beside the header of its file.
inline constexpr int64_t kSaveBytesMax = int64_t{48} << 20;
// The most that a load takes. Later saves use it.
inline constexpr int64_t kLoadBytesMax = int64_t{64} << 20;

// Writes `folder`/step-N, where N is the number of finished steps, and points `folder`/latest to
// it. Waits for the verdict on the last step, then returns while the save goes on. The saved state
// is that of this step: a unit's next update waits until the unit's state has been read
// (Engine::ReadAsync). Updates of state on NVMe do not wait, because the first save reserves a
// second place on the disk, and updates write to that place. A second save waits for the first, or
// is refused (SaveOptions::waits). Memory: 32 MiB a rank (48 with state on NVMe or a GPU) and the
// header of its file. The engine keeps it, in memory(), for later saves; ebb.host_memory does not
// count it. A save has to end within ebb.timeout_seconds.
//
// kFailedPrecondition: another run saves to the folder, or has saved there since this engine has
// loaded a checkpoint of it; or some ranks see another folder than rank 0, and the error names them
// and their hosts. The first save, or CheckSaves, locks the folder until the engine ends;
// if the process dies, the lock ends, too.
absl::StatusOr<SaveTicket> SaveAsync(Engine& engine, const std::string& folder,
                                     const SaveOptions& options = {});
// SaveAsync that returns when the checkpoint is on the disk. Returns its path.
absl::StatusOr<std::string> SaveCheckpoint(Engine& engine, const std::string& folder,
                                           const SaveOptions& options = {});

// Call it before training up to `last_step`, and after LoadCheckpoint: it checks that each of these
// steps can be saved to `folder`, which it makes if there is none, and locks. Collective.
// kFailedPrecondition: as for SaveAsync, or it names a checkpoint there that a save would refuse to
// replace. To an engine that has loaded nothing, every checkpoint there is one of another run.
// kResourceExhausted: the host has no memory for a save beside the engine's pools.
absl::Status CheckSaves(Engine& engine, const std::string& folder, int64_t last_step);

struct LoadOptions {
  // False: masters and frozen parameters alone; optimizer states and the training state stay as
  // they are.
  bool states = true;
  // True: missing values become initial values, and values that the model lacks are left out.
  // False: both are errors, which name them.
  bool partial = false;
  // With `partial`: missing values stay as they are.
  bool keeps_missing = false;
  // The end of that error: how the trainer's user asks for less.
  std::string advice =
      "LoadOptions::partial loads only common values, LoadOptions::states = false loads no "
      "optimizer states";
};

struct LoadedCheckpoint {
  std::string path;
  TrainingState state;  // of the run that saved
  std::map<std::string, std::string> trainer, of_this_rank;
  std::string config;  // of the run that saved, JSON
  int ranks = 0;       // likewise
  int64_t bytes_read =
      0;  // read values of this rank, in whole checked blocks of at most 4 MiB, without headers
};

// `path`: a checkpoint, or a folder of checkpoints, of which the newest undamaged one is loaded: if
// a rank finds damage in its part, all ranks load the one before, with a warning. Saves then go on
// from there, and replace the damaged one when they come to its step. Each rank reads only the
// headers and bytes that it needs, through 64 MiB of memory, which later saves use. kNotFound:
// there is no checkpoint. kDataLoss: none is undamaged; the error lists them. kFailedPrecondition:
// the ranks see different checkpoints. After a failed load the engine's values are undefined: load
// again, or create the engine again.
absl::StatusOr<LoadedCheckpoint> LoadCheckpoint(Engine& engine, const std::string& path,
                                                const LoadOptions& options = {});

}  // namespace ebb
