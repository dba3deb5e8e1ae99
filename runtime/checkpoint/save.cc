#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "ebb/optim/cast.h"
#include "ebb/runtime/checkpoint/checkpoint.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/checkpoint/rank_file.h"
#include "ebb/runtime/checkpoint/slice_name.h"
#include "ebb/runtime/checkpoint/state_arrays.h"
#include "ebb/runtime/config/message.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/sharding/interval.h"
#include "ebb/sharding/plan.h"

namespace ebb {
namespace {

// This rank's slices of one array, in the order in which Engine::Read gives them: of parameters as declared.
std::vector<StoredTensor> SlicesOf(const Engine& engine, int rank, const StateArrayName& array) {
  const ModelSpec& model = engine.model();
  const sharding::ModelLayout& layout = engine.plan().layout;
  std::vector<StoredTensor> tensors;
  if (rank / layout.shards > 0) return tensors;  // another shard group has the same
  for (size_t p = 0; p < model.parameters.size(); ++p) {
    const ParameterId parameter{static_cast<int32_t>(p)};
    if (!Keeps(engine, parameter, array)) continue;
    const sharding::ParameterLocation& location = layout.parameters[p];
    const sharding::UnitLayout& unit = layout.units[static_cast<size_t>(location.unit)];
    for (const sharding::Interval& interval : sharding::IntervalsOf(
             location.trainable ? unit.trainable : unit.frozen, rank % layout.shards)) {
      if (interval.parameter != parameter) continue;
      const DType dtype = StoredDType(engine, parameter, array);
      const int64_t elements = interval.end - interval.begin;
      tensors.push_back({.name = NameOf(SliceName{.of = ClassOf(engine, parameter, array),
                                                  .parameter = model[parameter].name,
                                                  .begin = interval.begin,
                                                  .end = interval.end}),
                         .dtype = std::string(SafetensorsName(dtype)),
                         .shape = {elements},
                         .begin = 0,
                         .end = elements * SizeOf(dtype)});
    }
  }
  return tensors;
}

absl::Status WriteRankFile(Engine& engine, int rank, const std::string& path,
                           const SaveOptions& options) {
  const std::vector<StateArrayName> arrays = ArraysOf(engine);
  std::vector<StoredTensor> tensors;
  for (const StateArrayName& array : arrays) {
    std::vector<StoredTensor> of_array = SlicesOf(engine, rank, array);
    std::move(of_array.begin(), of_array.end(), std::back_inserter(tensors));
  }
  std::map<std::string, std::string> metadata;
  for (const auto& [name, bytes] : options.of_this_rank) metadata[name] = absl::Base64Escape(bytes);
  const bool writes = !tensors.empty();
  EBB_ASSIGN_OR_RETURN(RankFileWriter file,
                       RankFileWriter::Create(path, std::move(tensors), std::move(metadata)));
  ThreadTeam caller_only(1);
  std::vector<std::byte> narrow;
  for (const StateArrayName& array : arrays) {
    if (!writes) break;
    const auto append = [&](const Slice& slice, std::span<const float> values) {
      const DType dtype = StoredDType(engine, slice.parameter, array);
      if (dtype == DType::kFloat32) return file.Append(std::as_bytes(values));
      narrow.resize(values.size() * static_cast<size_t>(SizeOf(dtype)));
      optim::Cast(caller_only, values.data(), DType::kFloat32, narrow.data(), dtype,
                  static_cast<int64_t>(values.size()), optim::Rounding::kNearest);
      return file.Append(narrow);
    };
    EBB_RETURN_IF_ERROR(engine.Read(array.what, append, array.state));
  }
  return file.Finish();
}

absl::Status WriteManifest(const Engine& engine, int ranks, const std::string& folder,
                           const TrainingState& state, const SaveOptions& options) {
  Manifest manifest{.state = state,
                    .config = engine.config().ToJson(),
                    .parameters = {},
                    .files = {},
                    .trainer = options.trainer};
  const ModelSpec& model = engine.model();
  for (size_t p = 0; p < model.parameters.size(); ++p) {
    const ParameterId id{static_cast<int32_t>(p)};
    manifest.parameters.push_back(
        {.name = model[id].name,
         .shape = model[id].shape,
         .trainable = model[id].trainable,
         .group = model[id].group,
         .dtype = StoredDType(engine, id, {.what = StateClass::kMaster, .state = ""}),
         .states = engine.optimizer_states(id)});
  }
  for (int rank = 0; rank < ranks; ++rank) {
    EBB_ASSIGN_OR_RETURN(const Manifest::File file,
                         DescribeRankFile(absl::StrCat(folder, "/", RankFileName(rank, ranks))));
    manifest.files.push_back(file);
  }
  return ReplaceFile(absl::StrCat(folder, "/", kManifestName), ToText(manifest));
}

// What JSON and the names of slices can hold.
absl::Status CheckNames(const Engine& engine, const SaveOptions& options) {
  const auto refuse = [](std::string_view what, std::string_view name, std::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("SaveCheckpoint: the ", std::string(what), " '",
                                                   std::string(name), "' ", std::string(why)));
  };
  const ModelSpec& model = engine.model();
  for (size_t p = 0; p < model.parameters.size(); ++p) {
    if (!config::IsUtf8(model.parameters[p].name))
      return refuse("parameter", model.parameters[p].name, "is not UTF-8");
    for (const std::string& state : engine.optimizer_states(ParameterId{static_cast<int32_t>(p)})) {
      if (!config::IsUtf8(state) || state.empty() || state.find('/') != std::string::npos ||
          state == kMasterClass || state == kParameterClass)
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

}  // namespace

absl::StatusOr<std::string> SaveCheckpoint(Engine& engine, const std::string& folder,
                                           const SaveOptions& options) {
  const int rank = engine.world().rank(), ranks = engine.world().size();
  const absl::StatusOr<TrainingState> state = engine.training_state();
  absl::Status own = state.ok() ? CheckNames(engine, options) : state.status();
  std::optional<NewCheckpoint> checkpoint;  // rank 0's
  if (own.ok() && rank == 0) {
    absl::StatusOr<NewCheckpoint> begun = NewCheckpoint::Begin(folder, state->finished_steps);
    own = begun.status();
    if (own.ok()) checkpoint.emplace(*std::move(begun));
  }
  EBB_RETURN_IF_ERROR(engine.Agree(own, "SaveCheckpoint: begin"));
  const std::string path = PathOfNewCheckpoint(folder, state->finished_steps);
  own = WriteRankFile(engine, rank, absl::StrCat(path, "/", RankFileName(rank, ranks)), options);
  EBB_RETURN_IF_ERROR(engine.Agree(own, "SaveCheckpoint: write"));
  if (rank == 0) {
    own = WriteManifest(engine, ranks, path, *state, options);
    if (own.ok()) own = checkpoint->Commit(options.keep).status();
    checkpoint.reset();
  }
  EBB_RETURN_IF_ERROR(engine.Agree(own, "SaveCheckpoint: commit"));
  return absl::StrCat(folder, "/", CheckpointName(state->finished_steps));
}

}  // namespace ebb
