#include <algorithm>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/checkpoint.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/checkpoint/rank_file.h"
#include "ebb/runtime/checkpoint/state_arrays.h"
#include "ebb/runtime/checkpoint/stored_values.h"
#include "ebb/runtime/checkpoint/tensor_source.h"
#include "ebb/runtime/checkpoint/whole_checkpoint.h"
#include "ebb/runtime/engine/matrix_groups.h"
#include "ebb/runtime/engine/updates/update_table.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/interval.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/split.h"
#include "nlohmann/json.hpp"

namespace ebb {
namespace {

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
    if (const std::string why = Misfit(parameter, from.shape, from.dtype); !why.empty())
      return absl::FailedPreconditionError(
          absl::StrCat("the checkpoint does not fit: parameter ", why));
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
  const std::string all =
      absl::StrCat("the checkpoint does not fit: ", DifferencesText(differences));
  if (!options.partial)
    return absl::FailedPreconditionError(
        absl::StrCat(all, options.advice.empty() ? "" : ". ", options.advice));
  if (engine.world().rank() == 0)
    LogWarning(absl::StrCat(all, options.keeps_missing ? "; missing values stay as they are"
                                                       : "; missing values are initial values"));
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

// Adds what is read for elements that this rank has. For a block it is the block that was saved, or the
// part of the whole from its first run to its last. If that was cut in another way, nothing is
// read ahead.
void AddInterval(const ModelSpec& model, const StoredValues& stored, const std::string& of,
                 const sharding::Interval& interval,
                 std::vector<StoredValues::Interval>& intervals) {
  const ParameterSpec& parameter = model[interval.parameter];
  if (parameter.block) {
    const std::string block = stored.NameOfBlock(parameter);
    const int64_t end = std::min(interval.end, Elements(ShownShape(parameter)));
    if (!block.empty()) {
      if (interval.begin < end) intervals.push_back({of, block, interval.begin, end});
      return;
    }
  }
  StoredValues::Interval read = {of, parameter.name};
  ForEachSlice(model, interval.parameter, interval.begin, interval.end,
               [&](const Slice& slice, int64_t) {
                 if (read.end == 0) read.begin = slice.begin;
                 read.end = slice.end;
                 return absl::OkStatus();
               })
      .IgnoreError();
  if (read.end > 0 && !stored.IsCut(parameter.name)) intervals.push_back(std::move(read));
}

// The values that Fill needs, in the order in which it needs them.
std::vector<StoredValues::Interval> IntervalsOfRank(const Engine& engine,
                                                    std::span<const StateArrayName> arrays,
                                                    const StoredValues& stored) {
  const sharding::Plan& plan = engine.program().plan();
  const int shard = engine.data_rank() % plan.decisions.shards;
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
          AddInterval(engine.model(), stored, StoredClassOf(engine, stored, id, array), interval,
                      intervals);
    }
  }
  return intervals;
}

// Engine::Write is collective, so it is called for each array even after an error, then without
// values.
ReadErrors Fill(Engine& engine, StoredValues& stored, const LoadOptions& options) {
  std::vector<StateArrayName> arrays = ArraysOf(engine);
  if (!options.states)
    std::erase_if(arrays, [](const auto& array) { return array.what == StateClass::kOptimizer; });
  engine.AwaitAsyncRead();  // it uses the buffer
  ReadErrors errors;
  const absl::StatusOr<std::span<std::byte>> memory = engine.FileBuffer(ReadAhead::kMemoryBytes);
  errors.engine = memory.status();
  if (memory.ok()) {
    errors.files = stored.Expect(IntervalsOfRank(engine, arrays, stored),
                                 engine.config().ebb.io_backend, *memory);
  }
  for (const StateArrayName& array : arrays) {
    const auto give = [&](const Slice& slice, std::span<float> values) -> absl::Status {
      if (!errors.engine.ok()) return errors.engine;
      if (!errors.files.ok()) return errors.files;
      const std::string name(slice.name);
      const std::string of = StoredClassOf(engine, stored, slice.parameter, array);
      if (!stored.Has(of, name)) return InitialValues(engine, array, slice, values);
      return errors.files = stored.Read(of, name, slice.begin, values);
    };
    const auto note = [&](const absl::Status& written) {
      if (errors.engine.ok() && errors.files.ok()) errors.engine = written;
    };
    if (!options.keeps_missing) {
      note(engine.Write(array.what, give, array.state));
      continue;
    }
    for (size_t p = 0; p < engine.model().parameters.size(); ++p) {
      const ParameterId id{static_cast<int32_t>(p)};
      if (Keeps(engine, id, array) &&
          stored.Has(StoredClassOf(engine, stored, id, array), engine.model()[id].name))
        note(engine.Write(id, array.what, give, array.state));
    }
  }
  return errors;
}

// A sentence about states that the run that saved has kept in other bits; "": it kept none so.
std::string WhatStatesBecome(const Engine& engine, const Manifest& manifest) {
  const absl::StatusOr<Config> saver = Config::FromJson(manifest.config);
  if (saver.ok() && saver->optimizer.states == engine.config().optimizer.states) return "";
  std::string becomes;
  for (const Manifest::Parameter& parameter : manifest.parameters) {
    const auto found =
        std::find_if(engine.model().parameters.begin(), engine.model().parameters.end(),
                     [&](const ParameterSpec& own) { return own.name == parameter.name; });
    if (found == engine.model().parameters.end() || !found->trainable) continue;
    const ParameterId id{static_cast<int32_t>(found - engine.model().parameters.begin())};
    for (const std::string& state : parameter.states) {
      const StateArrayName array{.what = StateClass::kOptimizer, .state = state};
      if (!Keeps(engine, id, array)) continue;
      const Encoding own = StoredEncoding(engine, id, array);
      const auto saved = manifest.state_encodings.find(state);
      const bool has_codes = saved != manifest.state_encodings.end();
      if (own != DType::kFloat32 && (!has_codes || saved->second != Name(own)))
        return "optimizer states are rounded to this run's \"optimizer.params.states\", which is "
               "not the saved run's";
      const bool is_bf16 = saver.ok() && saver->optimizer.states == OptimizerStates::kBFloat16;
      if (own == DType::kFloat32 && (has_codes || is_bf16))
        becomes = absl::StrCat("optimizer states were saved in ", has_codes ? "8 bits" : "bf16",
                               "; this run keeps those values in fp32");
    }
  }
  return becomes;
}

// The tensor ranks of the run that saved, as far as its parameters were cut over them.
int TensorRanksOf(const Manifest& manifest) {
  int ranks = 1;
  for (const Manifest::Parameter& parameter : manifest.parameters)
    ranks = std::max(ranks, parameter.blocks);
  return ranks;
}

using Json = nlohmann::json;

constexpr std::string_view kTrained[] = {
    "train_batch_size", "gradient_clipping",       "data_types.grad_accum_dtype", "optimizer.",
    "scheduler.",       "ebb.stochastic_rounding", "ebb.parameter_groups."};
constexpr std::string_view kOfDType[] = {"fp16.", "bf16."};

template <size_t kCount>
bool IsOneOf(const std::string& key, const std::string_view (&begins)[kCount]) {
  return std::any_of(std::begin(begins), std::end(begins),
                     [&](std::string_view begin) { return key.starts_with(begin); });
}

void AddValues(const Json& json, const std::string& path, std::map<std::string, Json>& values) {
  if (!json.is_object()) {
    values[path] = json;
    return;
  }
  for (const auto& [key, value] : json.items())
    AddValues(value, path.empty() ? key : absl::StrCat(path, ".", key), values);
}

std::map<std::string, Json> ValuesOf(Config config) {
  // These groups follow from others, whose keys the user knows.
  std::erase_if(config.ebb.parameter_groups,
                [](const auto& group) { return IsBesideMuon(group.first); });
  std::map<std::string, Json> values;
  AddValues(Json::parse(config.ToJson()), "", values);
  return values;
}

// The keys that differ between two runs' configurations and change the result: "optimizer.params.lr",
// in the order of the JSON's names, "dtype" and "ebb.reduce_at" first. Keys about tiers, movement or
// logs are left out. A dtype's own keys are compared where both have that dtype.
std::vector<std::string> ConfigDifferences(const Config& a, const Config& b) {
  std::vector<std::string> keys;
  if (a.compute != b.compute) keys.emplace_back("dtype");
  if (b.gradient_accumulation_steps > 1 && a.reduces_at_round() != b.reduces_at_round())
    keys.emplace_back("ebb.reduce_at");
  std::map<std::string, Json> of_a = ValuesOf(a);
  const std::map<std::string, Json> of_b = ValuesOf(b);
  for (const auto& [key, value] : of_b) of_a.try_emplace(key);  // null: not given
  for (const auto& [key, value] : of_a) {
    if (!IsOneOf(key, kTrained) && (a.compute != b.compute || !IsOneOf(key, kOfDType))) continue;
    const auto other = of_b.find(key);
    if ((other == of_b.end() ? Json() : other->second) != value) keys.push_back(key);
  }
  return keys;
}

// The loaded values are exact, or rounded as WhatStatesBecome says. Another configuration may train,
// sum or round in another way. `group`: Manifest::reduction_group.
void WarnOfOtherBits(const Engine& engine, const LoadedCheckpoint& loaded, int64_t group,
                     int tensor_ranks) {
  const absl::StatusOr<Config> saved = Config::FromJson(loaded.config);
  if (!saved.ok() || loaded.config == "{}") return;  // another version's, or an import
  std::vector<std::string> others = ConfigDifferences(*saved, engine.config());
  const int64_t now = ReductionGroupOf(engine);
  if (tensor_ranks != engine.mesh().size(Axis::kTensor))
    others.push_back(absl::StrCat("ebb.mesh.tensor (", tensor_ranks, ", now ",
                                  engine.mesh().size(Axis::kTensor), ")"));
  if (group != 0 && group != now && loaded.ranks == engine.world().size())
    others.push_back(absl::StrCat("ebb.reduction_group (", group, ", now ", now,
                                  "; without the key it is the ranks of a host)"));
  if (others.empty()) return;
  LogWarning(absl::StrCat("the run that saved '", loaded.path, "' had another ",
                          absl::StrJoin(others, ", "),
                          ": the next steps do not have the bits of an uninterrupted run"));
}

static_assert(kLoadBytesMax == ReadAhead::kMemoryBytes && kLoadBytesMax >= kSaveBytesMax);

// In a checkpoint of `files` ranks, the file that has this rank's first values, if both divide the
// state alike.
int FirstFile(const World& world, int files) {
  return static_cast<int>(int64_t{world.rank()} * files / world.size());
}

absl::StatusOr<LoadedCheckpoint> LoadFound(Engine& engine, FoundCheckpoint found,
                                           const LoadOptions& options, ReadAttempt& attempt) {
  const World& world = engine.world();
  Manifest& manifest = found.manifest;
  LoadedCheckpoint loaded;
  loaded.path = found.path;
  loaded.state = manifest.state;
  loaded.config = manifest.config;
  loaded.ranks = static_cast<int>(manifest.files.size());
  EBB_RETURN_IF_ERROR(engine.Agree(CheckFit(engine, manifest, options), "LoadCheckpoint: fit"));
  attempt.has_written = true;
  ReadErrors own;
  {
    StoredValues stored(found.path, manifest, FirstFile(world, loaded.ranks));
    own = Fill(engine, stored, options);
    if (own.engine.ok() && own.files.ok() && loaded.ranks == world.size() &&
        TensorRanksOf(manifest) == engine.mesh().size(Axis::kTensor)) {
      absl::StatusOr<std::map<std::string, std::string>> values = stored.OfRank(world.rank());
      own.files = values.status();
      if (own.files.ok()) loaded.of_this_rank = *std::move(values);
    }
    loaded.bytes_read = stored.bytes_read();
  }
  EBB_RETURN_IF_ERROR(AgreeOnRead(engine, own, attempt));
  if (options.states) {
    EBB_RETURN_IF_ERROR(engine.SetTrainingState(manifest.state));
    engine.SetRun(RunOfLoaded(manifest, loaded.path, found.last_save));
  }
  if (options.states && world.rank() == 0) {
    const std::string becomes = WhatStatesBecome(engine, manifest);
    if (!becomes.empty()) LogInfo(absl::StrCat("'", loaded.path, "': ", becomes));
  }
  loaded.trainer = std::move(manifest.trainer);
  if (options.states && world.rank() == 0)
    WarnOfOtherBits(engine, loaded, manifest.reduction_group, TensorRanksOf(manifest));
  // The parts of a world load by themselves, and no part knows the step of another.
  if (options.states && world.is_part() && world.rank() == 0) {
    LogInfo(absl::StrCat("the part of the world with ", world.RankName(0), " goes on from step ",
                         loaded.state.finished_steps, " ('", loaded.path, "')"));
  }
  return loaded;
}

}  // namespace

absl::StatusOr<LoadedCheckpoint> LoadCheckpoint(Engine& engine, const std::string& path,
                                                const LoadOptions& options) {
  // FindTogether would take the error of a step for that of ranks with other candidates.
  EBB_RETURN_IF_ERROR(engine.Agree(absl::OkStatus(), "LoadCheckpoint: begin"));
  LoadedCheckpoint loaded;
  EBB_RETURN_IF_ERROR(ReadWholeCheckpoint(
      engine, path, [&](FoundCheckpoint found, ReadAttempt& attempt) -> absl::Status {
        EBB_ASSIGN_OR_RETURN(loaded, LoadFound(engine, std::move(found), options, attempt));
        return absl::OkStatus();
      }));
  return loaded;
}

}  // namespace ebb
