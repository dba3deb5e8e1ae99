#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/checkpoint/checkpoint.h"
#include "ebb/runtime/checkpoint/config_differences.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/checkpoint/slice_name.h"
#include "ebb/runtime/checkpoint/state_arrays.h"
#include "ebb/runtime/checkpoint/stored_values.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/updates/update_table.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/interval.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/unit_places.h"

namespace ebb {
namespace {

std::string ShapeOf(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// The differences between the model and the checkpoint: an error, or a warning with
// LoadOptions::partial.
absl::Status CheckFit(const Engine& engine, const Manifest& manifest, const LoadOptions& options) {
  std::vector<std::string> differences;
  std::map<std::string, const Manifest::Parameter*> saved;
  for (const Manifest::Parameter& parameter : manifest.parameters)
    saved.emplace(parameter.name, &parameter);
  const ModelSpec& model = engine.model();
  for (size_t p = 0; p < model.parameters.size(); ++p) {
    const ParameterSpec& parameter = model.parameters[p];
    const auto found = saved.find(parameter.name);
    if (found == saved.end()) {
      differences.push_back(absl::StrCat("it lacks the parameter '", parameter.name, "'"));
      continue;
    }
    const Manifest::Parameter& from = *found->second;
    saved.erase(found);
    if (from.shape != parameter.shape) {
      return absl::FailedPreconditionError(
          absl::StrCat("parameter '", parameter.name, "' has the shape ", ShapeOf(parameter.shape),
                       " in the model and ", ShapeOf(from.shape), " in the checkpoint"));
    }
    if ((from.dtype == DType::kInt8) != (parameter.compute == DType::kInt8)) {
      const auto kind = [](bool bytes) { return bytes ? "bytes" : "numbers"; };
      return absl::FailedPreconditionError(absl::StrCat(
          "parameter '", parameter.name, "' is ", kind(parameter.compute == DType::kInt8),
          " in the model and ", kind(from.dtype == DType::kInt8), " in the checkpoint"));
    }
    if (!options.states) continue;
    const std::vector<std::string> states =
        engine.optimizer_states(ParameterId{static_cast<int32_t>(p)});
    for (const std::string& state : states)
      if (std::find(from.states.begin(), from.states.end(), state) == from.states.end())
        differences.push_back(absl::StrCat("it lacks ", state, " of '", parameter.name, "'"));
    for (const std::string& state : from.states)
      if (std::find(states.begin(), states.end(), state) == states.end())
        differences.push_back(absl::StrCat("it has ", state, " of '", parameter.name,
                                           "', which the optimizer does not keep"));
  }
  for (const auto& [name, parameter] : saved) {
    if (parameter->dtype == DType::kInt8) continue;  // a buffer of another program, perhaps
    differences.push_back(absl::StrCat("it has '", name, "', which the model lacks"));
  }
  if (differences.empty()) return absl::OkStatus();
  constexpr size_t kShown = 5;
  std::string all = absl::StrCat("the checkpoint does not fit: ");
  for (size_t i = 0; i < std::min(kShown, differences.size()); ++i)
    absl::StrAppend(&all, i == 0 ? "" : "; ", differences[i]);
  if (differences.size() > kShown)
    absl::StrAppend(&all, "; and ", differences.size() - kShown, " differences more");
  if (!options.partial)
    return absl::FailedPreconditionError(
        absl::StrCat(all, options.advice.empty() ? "" : ". ", options.advice));
  if (engine.world().rank() == 0)
    LogWarning(absl::StrCat(all, "; missing values are initial values"));
  return absl::OkStatus();
}

absl::Status InitialValues(const Engine& engine, const StateArrayName& array, const Slice& slice,
                           std::span<float> values) {
  if (array.what == StateClass::kMaster) return engine.model()[slice.parameter].init(slice, values);
  std::fill(values.begin(), values.end(),
            InitialState(engine.config(), engine.model()[slice.parameter].group));
  return absl::OkStatus();
}

// A parameter may be frozen here and trained in the checkpoint, or the reverse.
std::string StoredClassOf(const Engine& engine, const StoredValues& stored, ParameterId parameter,
                          const StateArrayName& array) {
  const std::string of = ClassOf(engine, parameter, array);
  if (array.what != StateClass::kMaster || stored.Has(of, engine.model()[parameter].name))
    return of;
  return std::string(of == kMasterClass ? kParameterClass : kMasterClass);
}

// Starts to read the values that Fill needs.
absl::Status ReadAheadForFill(Engine& engine, std::span<const StateArrayName> arrays,
                              StoredValues& stored) {
  const sharding::Plan& plan = engine.program().plan();
  const int shard = engine.world().rank() % plan.decisions.shards;
  std::vector<StoredValues::Interval> intervals;
  for (const StateArrayName& array : arrays) {
    for (size_t p = 0; p < engine.model().parameters.size(); ++p) {
      const ParameterId id{static_cast<int32_t>(p)};
      const sharding::ParameterLocation& location = plan.layout.parameters[p];
      if (!Keeps(engine, id, array)) continue;
      const sharding::Section& section =
          sharding::SectionOf(plan, location.unit, location.trainable);
      for (const sharding::Interval& interval : sharding::IntervalsOf(section, shard))
        if (interval.parameter == id)
          intervals.push_back({.of = StoredClassOf(engine, stored, id, array),
                               .parameter = engine.model()[id].name,
                               .begin = interval.begin,
                               .end = interval.end});
    }
  }
  engine.AwaitAsyncRead();  // it uses the buffer
  EBB_ASSIGN_OR_RETURN(const std::span<std::byte> memory,
                       engine.FileBuffer(ReadAhead::kMemoryBytes));
  return stored.Expect(intervals, engine.config().ebb.io_backend, memory);
}

// Engine::Write is collective, so it is called for each array even after an error, then without
// values.
absl::Status Fill(Engine& engine, StoredValues& stored, const LoadOptions& options) {
  std::vector<StateArrayName> arrays = ArraysOf(engine);
  if (!options.states)
    std::erase_if(arrays, [](const auto& array) { return array.what == StateClass::kOptimizer; });
  absl::Status first = ReadAheadForFill(engine, arrays, stored);
  for (const StateArrayName& array : arrays) {
    const auto give = [&](const Slice& slice, std::span<float> values) -> absl::Status {
      if (!first.ok()) return first;
      const std::string name(slice.name);
      const std::string of = StoredClassOf(engine, stored, slice.parameter, array);
      if (!stored.Has(of, name)) return InitialValues(engine, array, slice, values);
      return stored.Read(of, name, slice.begin, values);
    };
    const absl::Status written = engine.Write(array.what, give, array.state);
    if (first.ok()) first = written;
  }
  return first;
}

// The loaded values are exact, but another configuration may train, sum or round in another way.
void WarnOfOtherBits(const Config& now, const LoadedCheckpoint& loaded) {
  const absl::StatusOr<Config> saved = Config::FromJson(loaded.config);
  if (!saved.ok() || loaded.config == "{}") return;  // another version's, or an import
  const std::vector<std::string> others = ConfigDifferences(*saved, now);
  if (others.empty()) return;
  LogWarning(absl::StrCat("the run that saved '", loaded.path, "' had another ",
                          absl::StrJoin(others, ", "),
                          ": the next steps do not have the bits of an uninterrupted run"));
}

static_assert(kLoadBytesMax == ReadAhead::kMemoryBytes && kLoadBytesMax >= kSaveBytesMax);

// Whether a file may be readable later, for example by another user. Loading an older checkpoint now
// would lose steps.
bool MayPass(const absl::Status& status) {
  return absl::IsPermissionDenied(status) || absl::IsResourceExhausted(status) ||
         absl::IsUnavailable(status);
}

struct Found {
  std::string path;
  Manifest manifest;
};

// The checkpoint to load, the same on all ranks. Each file is checked by one of them. kCancelled:
// the folder has changed meanwhile.
absl::StatusOr<Found> FindTogether(Engine& engine, const std::string& path) {
  const absl::StatusOr<std::vector<std::string>> listed = CandidatesIn(path);
  const bool none = absl::IsNotFound(listed.status());
  const std::vector<std::string> candidates = listed.value_or(std::vector<std::string>());
  absl::Status own = none ? absl::OkStatus() : listed.status();
  // Agree gives this code to ranks with other candidates.
  if (absl::IsFailedPrecondition(own)) own = absl::InvalidArgumentError(own.message());
  const absl::Status same = engine.Agree(
      own, absl::StrCat("LoadCheckpoint: candidates ", absl::StrJoin(candidates, " ")));
  if (!same.ok() && own.ok() && absl::IsFailedPrecondition(same))
    return absl::CancelledError(same.message());
  EBB_RETURN_IF_ERROR(same);
  if (none) return listed.status();
  const Share share = {.rank = engine.world().rank(), .ranks = engine.world().size()};
  std::string why;
  for (const std::string& checkpoint : candidates) {
    absl::StatusOr<Manifest> manifest = CheckWhole(checkpoint, share);
    const absl::Status whole =
        manifest.ok() ? absl::OkStatus() : absl::DataLossError(manifest.status().message());
    const absl::Status agreed = engine.Agree(
        whole,
        absl::StrCat("LoadCheckpoint: ", checkpoint, " ", manifest.ok() ? ToText(*manifest) : ""));
    if (agreed.ok()) return Found{.path = checkpoint, .manifest = *std::move(manifest)};
    if (absl::IsFailedPrecondition(agreed)) return absl::CancelledError(agreed.message());
    if (!absl::IsDataLoss(agreed)) return agreed;
    EBB_RETURN_IF_ERROR(
        engine.Agree(MayPass(manifest.status()) ? manifest.status() : absl::OkStatus(),
                     "LoadCheckpoint: readable"));
    if (checkpoint == path) {
      // Another version's checkpoint is not damaged.
      return absl::IsFailedPrecondition(manifest.status()) ? manifest.status()
                                                           : WithWayOut(agreed, checkpoint);
    }
    if (share.rank == 0)
      LogWarning(absl::StrCat("the checkpoint '", checkpoint, "' is skipped: ", agreed.message()));
    absl::StrAppend(&why, why.empty() ? "; " : ", ", agreed.message());
  }
  // A run that saves there may have removed all of them, after it has saved newer ones.
  EBB_RETURN_IF_ERROR(
      engine.Agree(CandidatesIn(path).value_or(std::vector<std::string>()) == candidates
                       ? absl::OkStatus()
                       : absl::CancelledError("it has other checkpoints now"),
                   "LoadCheckpoint: none is whole"));
  return absl::DataLossError(absl::StrCat("no checkpoint in '", path, "' is whole", why));
}

absl::StatusOr<Found> Find(Engine& engine, const std::string& path) {
  constexpr int kTries = 3;
  for (int tries = 1;; ++tries) {
    absl::StatusOr<Found> found = FindTogether(engine, path);
    if (!absl::IsCancelled(found.status())) return found;
    if (tries < kTries) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("LoadCheckpoint of '", path, "': ", found.status().message(),
                     ". Ranks may see different checkpoints there: check that no other run saves "
                     "to it, and that all ranks see one file system"));
  }
}

// In a checkpoint of `files` ranks, the file that has this rank's first values, if both divide the
// state alike.
int FirstFile(const World& world, int files) {
  return static_cast<int>(int64_t{world.rank()} * files / world.size());
}

// `last_save`: RunOfLoaded's.
absl::StatusOr<LoadedCheckpoint> LoadFound(Engine& engine, Found found, const LoadOptions& options,
                                           const std::string& last_save) {
  const World& world = engine.world();
  Manifest& manifest = found.manifest;
  LoadedCheckpoint loaded;
  loaded.path = found.path;
  loaded.state = manifest.state;
  loaded.config = manifest.config;
  loaded.ranks = static_cast<int>(manifest.files.size());
  EBB_RETURN_IF_ERROR(engine.Agree(CheckFit(engine, manifest, options), "LoadCheckpoint: fit"));
  absl::Status own;
  {
    StoredValues stored(found.path, manifest, FirstFile(world, loaded.ranks));
    own = Fill(engine, stored, options);
    if (own.ok() && loaded.ranks == world.size()) {
      absl::StatusOr<std::map<std::string, std::string>> values = stored.OfRank(world.rank());
      own = values.status();
      if (own.ok()) loaded.of_this_rank = *std::move(values);
    }
    loaded.bytes_read = stored.bytes_read();
  }
  EBB_RETURN_IF_ERROR(engine.Agree(WithWayOut(own, loaded.path), "LoadCheckpoint: values"));
  if (options.states) {
    EBB_RETURN_IF_ERROR(engine.SetTrainingState(manifest.state));
    engine.SetRun(RunOfLoaded(manifest, loaded.path, last_save));
  }
  loaded.trainer = std::move(manifest.trainer);
  if (options.states && world.rank() == 0) WarnOfOtherBits(engine.config(), loaded);
  // The parts of a world load by themselves, and no part knows the step of another.
  if (options.states && world.is_part() && world.rank() == 0) {
    LogInfo(absl::StrCat("the part of the world with ", world.RankName(0), " goes on from step ",
                         loaded.state.finished_steps, " ('", loaded.path, "')"));
  }
  return loaded;
}

// Whether a run that saves beside the checkpoint has removed it, on any rank.
bool WasRemoved(Engine& engine, const std::string& checkpoint) {
  return absl::IsCancelled(
      engine.Agree(IsThere(absl::StrCat(checkpoint, "/", kManifestName))
                       ? absl::OkStatus()
                       : absl::CancelledError(absl::StrCat("'", checkpoint, "' was removed")),
                   "LoadCheckpoint: removed"));
}

}  // namespace

absl::StatusOr<LoadedCheckpoint> LoadCheckpoint(Engine& engine, const std::string& path,
                                                const LoadOptions& options) {
  constexpr int kTries = 5;
  // FindTogether would take the error of a step for that of ranks with other candidates.
  EBB_RETURN_IF_ERROR(engine.Agree(absl::OkStatus(), "LoadCheckpoint: begin"));
  for (int tries = 1;; ++tries) {
    // Read before the checkpoint is found: a save meanwhile is one of another run.
    const std::string last_save =
        LastSaveIn(IsThere(absl::StrCat(path, "/", kManifestName)) ? path + "/.." : path);
    EBB_ASSIGN_OR_RETURN(Found found, Find(engine, path));
    const std::string checkpoint = found.path;
    absl::StatusOr<LoadedCheckpoint> loaded =
        LoadFound(engine, std::move(found), options, last_save);
    if (loaded.ok() || checkpoint == path || tries == kTries || !WasRemoved(engine, checkpoint))
      return loaded;
  }
}

}  // namespace ebb
