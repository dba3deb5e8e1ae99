#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/checkpoint/checkpoint.h"
#include "ebb/runtime/checkpoint/config_differences.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/checkpoint/slice_name.h"
#include "ebb/runtime/checkpoint/state_arrays.h"
#include "ebb/runtime/checkpoint/stored_values.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/update_table.h"
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
        absl::StrCat(all,
                     ". LoadOptions::partial loads only common values, LoadOptions::states = false "
                     "loads no optimizer states"));
  if (engine.world().rank() == 0)
    LogWarning(absl::StrCat(all, "; missing values are initial values"));
  return absl::OkStatus();
}

// An error about a missing part of a checkpoint.
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
  if (engine.IsReadingAsync())
    return absl::FailedPreconditionError(
        "LoadCheckpoint in a step, while a save is under way: load between steps");
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

// A damaged or missing file's error says which checkpoint to name instead. A file that is missing
// now does not mean that there was no checkpoint.
absl::Status WithWayOut(absl::Status own, const std::string& checkpoint) {
  if (!absl::IsNotFound(own) && !absl::IsDataLoss(own)) return own;
  const std::string older = WholeCheckpointBefore(checkpoint);
  return absl::DataLossError(absl::StrCat(
      own.message(), older.empty() ? "; there is no older checkpoint beside it"
                                   : absl::StrCat("; name an older checkpoint: '", older, "'")));
}

}  // namespace

absl::StatusOr<LoadedCheckpoint> LoadCheckpoint(Engine& engine, const std::string& path,
                                                const LoadOptions& options) {
  LoadedCheckpoint loaded;
  std::optional<StoredValues> stored;
  Manifest manifest;
  const auto open = [&]() -> absl::Status {
    EBB_ASSIGN_OR_RETURN(manifest, ReadManifest(loaded.path));
    EBB_RETURN_IF_ERROR(CheckFit(engine, manifest, options));
    EBB_ASSIGN_OR_RETURN(StoredValues values,
                         StoredValues::Open(loaded.path, manifest, engine.world().rank()));
    stored.emplace(std::move(values));
    return absl::OkStatus();
  };
  const absl::StatusOr<std::string> found = FindCheckpoint(path);
  const bool none = absl::IsNotFound(found.status());
  absl::Status own = none ? absl::OkStatus() : found.status();
  if (found.ok()) {
    loaded.path = *found;
    own = WithWayOut(open(), loaded.path);
  }
  // Another rank may see a newer checkpoint, because a run saves meanwhile, or it may not see the
  // folder.
  const absl::Status agreed = engine.Agree(
      own, none ? "LoadCheckpoint: none"
                : absl::StrCat("LoadCheckpoint: ", loaded.path, " ", ToText(manifest)));
  if (!agreed.ok() && own.ok() && absl::IsFailedPrecondition(agreed)) {
    return absl::FailedPreconditionError(
        absl::StrCat("LoadCheckpoint of '", path, "': ", agreed.message(),
                     ". Ranks may see different checkpoints there: check that no other run saves "
                     "to it, and that all ranks see one file system"));
  }
  EBB_RETURN_IF_ERROR(agreed);
  if (none) return found.status();
  own = WithWayOut(Fill(engine, *stored, options), loaded.path);
  EBB_RETURN_IF_ERROR(engine.Agree(own, "LoadCheckpoint: values"));
  if (options.states) {
    EBB_RETURN_IF_ERROR(engine.SetTrainingState(manifest.state));
    engine.SetRun(RunOfLoaded(manifest, loaded.path));
  }
  loaded.state = manifest.state;
  loaded.trainer = std::move(manifest.trainer);
  loaded.config = std::move(manifest.config);
  loaded.ranks = static_cast<int>(manifest.files.size());
  loaded.bytes_read = stored->bytes_read();
  if (options.states && engine.world().rank() == 0) WarnOfOtherBits(engine.config(), loaded);
  if (loaded.ranks == engine.world().size()) loaded.of_this_rank = stored->of_this_rank();
  return loaded;
}

}  // namespace ebb
