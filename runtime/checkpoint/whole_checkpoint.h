// Reads a checkpoint into an engine: the newest whole one of a folder. All ranks read the same one.
// If a rank finds damage, all ranks read the one before instead.
#pragma once

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/engine/engine.h"

namespace ebb {

struct FoundCheckpoint {
  std::string path;
  Manifest manifest = {};
  std::string last_save = {};  // RunOfLoaded's
};

// How far the read of a checkpoint has come.
struct ReadAttempt {
  bool has_written = false;  // to the engine
  absl::Status damage;       // of the checkpoint's files, the same code on all ranks
};

// This rank's errors while a checkpoint is read into the engine.
struct ReadErrors {
  absl::Status engine;
  absl::Status files;  // of the checkpoint
};

// Collective: OK if every rank passes no error. Damage of files on any rank becomes the attempt's.
absl::Status AgreeOnRead(Engine& engine, const ReadErrors& own, ReadAttempt& attempt);

// Calls `read` with `path`, if that is a checkpoint, or else with the checkpoints there, the best
// first, until an attempt ends without damage. The read values of an attempt must replace those of
// the attempt before. A warning names what is skipped. Collective; errors as of LoadCheckpoint.
using ReadCheckpoint = absl::FunctionRef<absl::Status(FoundCheckpoint found, ReadAttempt& attempt)>;
absl::Status ReadWholeCheckpoint(Engine& engine, const std::string& path, ReadCheckpoint read);

}  // namespace ebb
