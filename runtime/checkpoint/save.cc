#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "ebb/optim/cast.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/checkpoint.h"
#include "ebb/runtime/checkpoint/common_folder.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/checkpoint/rank_file.h"
#include "ebb/runtime/checkpoint/state_arrays.h"
#include "ebb/sharding/memory_model.h"
#include "ebb/sharding/state_pieces.h"

namespace ebb {
namespace {

static_assert(sharding::kSaveBufferBytes == StreamedFile::kMemoryBytes &&
              kSaveBytesMax == sharding::kSaveBufferBytes + 4 * sharding::kStateStagingBytes);

// The name under which a tensor rank's slices of the parameter are stored.
std::string StoredName(const ParameterSpec& parameter, int tensor_rank) {
  return parameter.block ? BlockName(parameter.name, tensor_rank, parameter.block->ranks)
                         : parameter.name;
}

// One rank's part of a save. It runs on the engine's thread that reads the state, and must not call
// the engine.
class Saving {
 public:
  Saving(std::string folder, int ranks, Manifest manifest, int keep,
         std::vector<std::string> damaged)
      : folder_(std::move(folder)),
        ranks_(ranks),
        keep_(keep),
        damaged_(std::move(damaged)),
        manifest_(std::move(manifest)) {}

  // Rank 0's part: the folder gets its name at the end.
  void Name(NewCheckpoint checkpoint) { checkpoint_.emplace(std::move(checkpoint)); }
  // Creates this rank's file. `slices`: in the order of their data.
  absl::Status Open(Engine& engine, int rank, std::span<const StateSlice> slices,
                    const std::map<std::string, std::string>& of_this_rank) {
    std::vector<RankFileWriter::Slice> stored;
    for (const StateSlice& slice : slices) {
      const ParameterSpec& parameter = engine.model()[slice.parameter];
      const StateArrayName array{.what = slice.what, .state = slice.state};
      stored.push_back(
          {.name = {.of = ClassOf(engine, slice.parameter, array),
                    .parameter = StoredName(parameter, parameter.block.value_or(Block()).rank),
                    .begin = slice.begin,
                    .end = slice.end},
           .encoding = StoredEncoding(engine, slice.parameter, array)});
    }
    std::map<std::string, std::string> metadata;
    for (const auto& [name, bytes] : of_this_rank) metadata[name] = absl::Base64Escape(bytes);
    EBB_ASSIGN_OR_RETURN(const std::span<std::byte> memory,
                         engine.FileBuffer(StreamedFile::kMemoryBytes));
    EBB_ASSIGN_OR_RETURN(
        RankFileWriter file,
        RankFileWriter::Create(absl::StrCat(folder_, "/", RankFileName(rank, ranks_)), stored,
                               std::move(metadata), engine.config().ebb.io_backend, memory));
    file_.emplace(std::move(file));
    return absl::OkStatus();
  }

  absl::Status Take(std::span<const float> values) { return file_->Append(values); }
  absl::Status Close() { return file_->Finish(); }
  // Call it when all ranks have closed their files, or one has failed. After a failure rank 0
  // removes the folder.
  absl::Status Commit(const absl::Status& closed) {
    std::optional<NewCheckpoint> checkpoint = std::exchange(checkpoint_, std::nullopt);
    if (!checkpoint.has_value() || !closed.ok()) return closed;
    return checkpoint->Commit(std::move(manifest_), ranks_, keep_, damaged_).status();
  }

 private:
  const std::string folder_;
  const int ranks_, keep_;
  const std::vector<std::string> damaged_;  // earlier checkpoints
  Manifest manifest_;
  std::optional<NewCheckpoint> checkpoint_;
  std::optional<RankFileWriter> file_;
};

Manifest ManifestOf(const Engine& engine, const TrainingState& state, const SaveOptions& options,
                    const std::string& run) {
  Manifest manifest{.state = state,
                    .reduction_group = ReductionGroupOf(engine),
                    .run = run,
                    .config = engine.config().ToJson(),
                    .trainer = options.trainer};
  const ModelSpec& model = engine.model();
  for (size_t p = 0; p < model.parameters.size(); ++p) {
    const ParameterId id{static_cast<int32_t>(p)};
    manifest.parameters.push_back(
        {.name = model[id].name,
         .shape = WholeShape(model[id]),
         .trainable = model[id].trainable,
         .group = model[id].group,
         .dtype = StoredEncoding(engine, id, {.what = StateClass::kMaster}).dtype,
         .states = engine.optimizer_states(id),
         .blocks = model[id].block ? model[id].block->ranks : 1,
         .split = model[id].block ? *model[id].split : Split()});
    for (const std::string& name : manifest.parameters.back().states) {
      const Encoding encoding =
          StoredEncoding(engine, id, {.what = StateClass::kOptimizer, .state = name});
      if (model[id].trainable && encoding.block > 0)
        manifest.state_encodings[name] = Name(encoding);
    }
  }
  return manifest;
}

// Checks that JSON and the names of slices can hold these names.
absl::Status CheckNames(const Engine& engine, const SaveOptions& options) {
  const auto refuse = [](std::string_view what, std::string_view name, std::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("SaveCheckpoint: the ", std::string(what), " '",
                                                   std::string(name), "' ", std::string(why)));
  };
  const ModelSpec& model = engine.model();
  std::set<std::string> names;  // as they are stored
  for (const ParameterSpec& parameter : model.parameters) {
    for (int rank = 0; rank < (parameter.block ? parameter.block->ranks : 1); ++rank) {
      if (!names.insert(StoredName(parameter, rank)).second)
        return refuse("parameter", StoredName(parameter, rank),
                      "has the name of another's block: rename it");
    }
  }
  for (size_t p = 0; p < model.parameters.size(); ++p) {
    if (!config::IsUtf8(model.parameters[p].name))
      return refuse("parameter", model.parameters[p].name, "is not UTF-8");
    for (const std::string& state : engine.optimizer_states(ParameterId{static_cast<int32_t>(p)})) {
      if (!MayBeState(state))
        return refuse("optimizer state", state,
                      "is not UTF-8, has a '/', or is a name that checkpoints use: rename it");
    }
  }
  for (const auto* own : {&options.trainer, &options.of_this_rank}) {
    for (const auto& [name, bytes] : *own)
      if (!config::IsUtf8(name) || name.find('/') != std::string::npos)
        return refuse("trainer's name", name, "is not UTF-8, or has a '/'");
  }
  return absl::OkStatus();
}

// Makes the folder if there is none. The engine holds its lock from then on.
absl::StatusOr<std::shared_ptr<FolderLock>> LockFor(Engine& engine, const std::string& folder) {
  EBB_RETURN_IF_ERROR(MakeSaveFolder(folder));
  return LockOf(folder, *engine.folder_locks());
}

// The run's name in the folder. Call it while the engine holds the folder's lock.
absl::StatusOr<std::string> RunOf(Engine& engine, const std::string& folder) {
  std::string run = engine.run();
  EBB_ASSIGN_OR_RETURN(std::string name, RunIn(folder, run));
  engine.SetRun(std::move(run));
  return name;
}

// `beside_steps`: steps may run before the save ends.
absl::StatusOr<SaveTicket> Begin(Engine& engine, const std::string& folder,
                                 const SaveOptions& options, bool beside_steps) {
  const int rank = engine.world().rank(), ranks = engine.world().size();
  const absl::StatusOr<TrainingState> state = engine.training_state();
  absl::Status own = state.ok() ? CheckNames(engine, options) : state.status();
  if (own.ok() && !options.waits && engine.IsReadingAsync()) {
    own = absl::UnavailableError(absl::StrCat("SaveAsync to '", folder, "' at step ",
                                              state->finished_steps,
                                              ": the save before it has not ended; wait for its "
                                              "ticket, or let SaveOptions::waits be true"));
  }
  if (options.waits) engine.AwaitAsyncRead();
  std::string run;                          // rank 0's
  std::optional<NewCheckpoint> checkpoint;  // likewise
  std::shared_ptr<FolderLock> lock;         // likewise
  if (own.ok() && rank == 0) {
    const auto begin = [&]() -> absl::StatusOr<NewCheckpoint> {
      EBB_ASSIGN_OR_RETURN(lock, LockFor(engine, folder));
      EBB_ASSIGN_OR_RETURN(run, RunOf(engine, folder));
      return NewCheckpoint::Begin(folder, state->finished_steps, run, lock);
    };
    absl::StatusOr<NewCheckpoint> begun = begin();
    own = begun.status();
    if (own.ok()) checkpoint.emplace(*std::move(begun));
  }
  EBB_RETURN_IF_ERROR(CheckCommonFolder(engine, folder, lock.get(), own, "SaveCheckpoint"));
  const auto saving = std::make_shared<Saving>(PathOfNewCheckpoint(folder, state->finished_steps),
                                               ranks, ManifestOf(engine, *state, options, run),
                                               options.keep, *engine.damaged_checkpoints());
  if (checkpoint.has_value()) saving->Name(*std::move(checkpoint));
  const std::vector<StateSlice> slices = engine.StateSlices();
  own = saving->Open(engine, rank, slices, options.of_this_rank);
  EBB_RETURN_IF_ERROR(engine.Agree(own, "SaveCheckpoint: open"));
  EBB_ASSIGN_OR_RETURN(
      std::shared_future<absl::Status> over,
      engine.ReadAsync(
          {.take =
               [saving](StateClass, std::string_view, const Slice&, std::span<const float> values) {
                 BlockFileSizeSignal();
                 return saving->Take(values);
               },
           .close =
               [saving] {
                 BlockFileSizeSignal();  // a rank may have no slices
                 return saving->Close();
               },
           .commit = [saving](const absl::Status& closed) { return saving->Commit(closed); },
           .beside_steps = beside_steps,
           .may_begin_in_step = beside_steps}));
  return SaveTicket(absl::StrCat(folder, "/", CheckpointName(state->finished_steps)),
                    std::move(over), engine.AsyncReadBegin());
}

}  // namespace

struct SaveTicket::Asked {
  std::thread::id thread;
  std::function<absl::Status()> begin;
  bool once = false;
};

SaveTicket::SaveTicket(std::string path, std::shared_future<absl::Status> over,
                       std::function<absl::Status()> begin)
    : path_(std::move(path)),
      over_(std::move(over)),
      asked_(std::make_shared<Asked>(
          Asked{.thread = std::this_thread::get_id(), .begin = std::move(begin)})) {}

bool SaveTicket::is_over() const {
  return over_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

// Only the second call begins the save, because a step may begin it before. Done ignores the error
// of a step under way.
bool SaveTicket::Done() const {
  if (is_over()) return true;
  if (std::this_thread::get_id() == asked_->thread && std::exchange(asked_->once, true))
    (void)asked_->begin();
  return false;
}

absl::StatusOr<std::string> SaveTicket::Wait() const {
  if (!is_over()) {
    if (const absl::Status begun = asked_->begin(); !begun.ok())
      return absl::Status(begun.code(), absl::StrCat("'", path_, "': ", begun.message()));
  }
  const absl::Status& status = over_.get();
  if (!status.ok()) return status;
  return path_;
}

absl::StatusOr<SaveTicket> SaveAsync(Engine& engine, const std::string& folder,
                                     const SaveOptions& options) {
  return Begin(engine, folder, options, /*beside_steps=*/true);
}

absl::Status CheckSaves(Engine& engine, const std::string& folder, int64_t last_step) {
  const absl::StatusOr<TrainingState> state = engine.training_state();
  absl::Status own = state.ok() ? engine.CheckRoomForSaves() : state.status();
  std::shared_ptr<FolderLock> lock;  // rank 0's
  if (own.ok() && engine.world().rank() == 0) {
    own = [&]() -> absl::Status {
      EBB_ASSIGN_OR_RETURN(lock, LockFor(engine, folder));
      EBB_ASSIGN_OR_RETURN(const std::string run, RunOf(engine, folder));
      return CheckFreeAfter(folder, state->finished_steps, last_step, run);
    }();
  }
  EBB_RETURN_IF_ERROR(CheckCommonFolder(engine, folder, lock.get(), own, "CheckSaves"));
  own =
      access(folder.c_str(), W_OK) == 0 ? absl::OkStatus() : FileError("writing to", folder, errno);
  return engine.Agree(own, "CheckSaves: writable");
}

absl::StatusOr<std::string> SaveCheckpoint(Engine& engine, const std::string& folder,
                                           const SaveOptions& options) {
  EBB_ASSIGN_OR_RETURN(const SaveTicket saving,
                       Begin(engine, folder, options, /*beside_steps=*/false));
  return saving.Wait();
}

}  // namespace ebb
