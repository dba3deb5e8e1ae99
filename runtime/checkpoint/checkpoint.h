// Checkpoints: everything a run is, in a folder of safetensors files that any number of ranks can load, at any stage,
// tier and precision (docs/format.md).
//
//   ebb::SaveCheckpoint(engine, "runs/7b", {.keep = 3});                // runs/7b/step-000000300
//   auto loaded = ebb::LoadCheckpoint(engine, "runs/7b");               // the newest whole one
//
// Both are collective and belong between steps. An error on any rank is every rank's. All ranks see one file system.
// What was saved before is whole whatever happens: a checkpoint has its name when all of it is on the disk, and an
// older one is removed after that.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/engine/engine.h"

namespace ebb {

struct SaveOptions {
  int keep = 0;  // the newest so many stay in the folder; 0: all
  // The trainer's own named bytes, such as its place in the data. `trainer`: rank 0's count for all ranks.
  // `of_this_rank`: each rank's own, as its random state is; a load at another world has none of them.
  std::map<std::string, std::string> trainer = {}, of_this_rank = {};
};

// Writes `folder`/step-N, N being the finished steps, and points `folder`/latest to it. Waits until it is on the disk.
// Memory: 4 MiB a rank beside the header of its file. It has to end within ebb.timeout_seconds. Returns the path.
absl::StatusOr<std::string> SaveCheckpoint(Engine& engine, const std::string& folder,
                                           const SaveOptions& options = {});

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
};

// `path`: a checkpoint, or a folder of them, of which the newest whole one is taken. Each rank reads the bytes that it
// needs. kNotFound: there is none. kDataLoss: none is whole. Of an engine that a failed load leaves behind, the values are undefined: load again,
// or create it anew.
absl::StatusOr<LoadedCheckpoint> LoadCheckpoint(Engine& engine, const std::string& path,
                                                const LoadOptions& options = {});

}  // namespace ebb
