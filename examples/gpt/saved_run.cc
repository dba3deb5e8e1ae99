#include "saved_run.h"

#include <algorithm>
#include <filesystem>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/trace/log.h"
#include "nlohmann/json.hpp"
#include "refusal.h"
#include "status_macros.h"

namespace ebb::gpt {
namespace {

// Facts about the model that Hugging Face's loaders need.
std::string ModelConfig(const GptShape& shape) {
  return nlohmann::json{{"model_type", "gpt2"},
                        {"architectures", {"GPT2LMHeadModel"}},
                        {"n_layer", shape.layers},
                        {"n_head", shape.heads},
                        {"n_embd", shape.width},
                        {"n_positions", shape.context},
                        {"vocab_size", shape.vocabulary},
                        {"activation_function", "gelu_new"},
                        {"layer_norm_epsilon", 1e-5},
                        {"tie_word_embeddings", true},
                        {"resid_pdrop", 0},
                        {"embd_pdrop", 0},
                        {"attn_pdrop", 0},
                        {"bos_token_id", 0},
                        {"eos_token_id", 0}}
             .dump(1) +
         "\n";
}

constexpr char kModelConfig[] =
    "config.json";  // which `ebb-checkpoint export` writes beside the tensors
constexpr char kText[] = "text fingerprint", kSeed[] = "seed", kTokens[] = "tokens per step";

std::map<std::string, std::string> OwnValues(const Trainer& trainer, const Run& run) {
  return {{kText, absl::StrCat(run.text.fingerprint())},
          {kSeed, absl::StrCat(run.options.seed)},
          {kTokens, absl::StrCat(trainer.tokens_per_step())},
          {kModelConfig, ModelConfig(run.options.shape)}};
}

// The shapes of tensors do not say how many heads there are, or which the activation function is.
// `model_config`: of the parameters that are read; empty: there is none.
absl::Status CheckModelConfig(const std::string& model_config, const GptShape& shape) {
  const auto theirs = nlohmann::json::parse(model_config, nullptr, /*allow_exceptions=*/false),
             ours = nlohmann::json::parse(ModelConfig(shape));
  for (const char* key : {"n_head", "activation_function"}) {
    if (theirs.is_object() && theirs.contains(key) && theirs[key] != ours[key])
      return absl::InvalidArgumentError(absl::StrCat("its ", kModelConfig, " has \"", key,
                                                     "\": ", theirs[key].dump(),
                                                     ", but the model has ", ours[key].dump()));
  }
  return absl::OkStatus();
}

// `error` of what an option of the command line asks for, under the name of one rank at most; OK
// stays OK.
absl::Status RefusalOf(std::string_view option, std::string_view value, const absl::Status& error,
                       std::string_view advice = "") {
  const std::string asked = absl::StrCat(std::string(option), " ", std::string(value), ": ");
  std::string message(error.message());
  if (const size_t told = message.find(asked); told != message.npos) {
    // This rank was in a call when another one reported the error.
    message.erase(0, std::min(told, message.rfind("rank ", told)));
  } else {
    const size_t name = message.find(": ");
    const bool names_rank = message.rfind("rank ", 0) == 0 && name != message.npos;
    message.insert(names_rank ? name + 2 : 0, asked);
    message += advice;
  }
  return RefusalByCode(absl::Status(error.code(), message));
}

}  // namespace

absl::StatusOr<int64_t> Resume(Trainer& trainer, const Run& run) {
  const Options& options = run.options;
  if (options.resume.empty()) return 0;
  const bool latest = options.resume == Options::kLatest;
  const absl::StatusOr<LoadedCheckpoint> loaded =
      LoadCheckpoint(trainer.engine(), latest ? options.save_folder : options.resume,
                     {.advice = "--init-from instead of --resume begins a new run with the "
                                "checkpoint's parameters, if the model is the same"});
  if (latest && absl::IsNotFound(loaded.status())) return 0;
  if (!loaded.ok()) {
    return RefusalOf("--resume", options.resume, loaded.status(),
                     absl::IsNotFound(loaded.status())
                         ? "; name a checkpoint (step-...) or a folder that --save has written, or "
                           "leave --resume out to begin afresh"
                         : "");
  }
  const auto model_config = loaded->trainer.find(kModelConfig);
  if (model_config != loaded->trainer.end()) {
    const absl::Status same = CheckModelConfig(model_config->second, options.shape);
    if (!same.ok()) return RefusalOf("--resume", options.resume, same);
  }
  const int64_t finished = loaded->state.finished_steps;
  if (trainer.world().rank() != 0) return finished;
  LogInfo(absl::StrCat("resumed from '", loaded->path, "', after step ", finished));
  if (options.steps > 0 && finished >= options.steps) {
    LogInfo(absl::StrCat("--steps ", options.steps,
                         " asks for no step after these, so none is trained: a larger --steps goes "
                         "on"));
  }
  for (const auto& [name, value] : OwnValues(trainer, run)) {
    const auto saved = loaded->trainer.find(name);
    if (saved == loaded->trainer.end() || saved->second == value) continue;
    LogWarning(absl::StrCat("the run that saved '", loaded->path, "' had another ", name, " (",
                            saved->second, ", now ", value,
                            "): its losses will not be those of one run"));
  }
  return finished;
}

bool ResumesItsFolder(const Run& run) {
  const Options& options = run.options;
  if (options.resume == Options::kLatest) return true;
  std::error_code error;  // paths that cannot be made absolute are compared as they are
  const auto path = [&](const std::string& name) {
    return std::filesystem::weakly_canonical(name, error).string();
  };
  const std::string resumed = path(options.resume), folder = path(options.save_folder);
  return resumed == folder || std::filesystem::path(resumed).parent_path() == folder;
}

absl::Status CheckSaves(Trainer& trainer, const Run& run) {
  const std::string& folder = run.options.save_folder;
  if (folder.empty()) return absl::OkStatus();
  return RefusalOf("--save", folder, ebb::CheckSaves(trainer.engine(), folder, run.options.steps));
}

absl::Status Saves::Begin() {
  GPT_RETURN_IF_ERROR(End());
  GPT_ASSIGN_OR_RETURN(SaveTicket ticket, SaveAsync(trainer_.engine(), run_.options.save_folder,
                                                    {.keep = static_cast<int>(run_.options.keep),
                                                     .trainer = OwnValues(trainer_, run_)}));
  ticket_.emplace(std::move(ticket));
  shown_ = false;
  return absl::OkStatus();
}

absl::Status Saves::End() {
  if (!ticket_.has_value()) return absl::OkStatus();
  const absl::Status ended = ticket_->Wait().status();
  Show();
  return ended;
}

void Saves::Show() {
  if (shown_ || !ticket_.has_value() || !ticket_->Done()) return;
  shown_ = true;
  const auto path = ticket_->Wait();
  if (progress_ != nullptr && path.ok()) progress_->Say(absl::StrCat("saved ", *path));
}

absl::Status InitFrom(Trainer& trainer, const Run& run, int64_t resumed) {
  const std::string& path = run.options.init_from;
  if (path.empty() || resumed > 0) return absl::OkStatus();
  return RefusalOf(
      "--init-from", path,
      ImportParameters(trainer.engine(), path, {.check = [&](const std::string& model_config) {
                         return CheckModelConfig(model_config, run.options.shape);
                       }}));
}

absl::Status Export(Trainer& trainer, const Run& run) {
  return ExportParameters(
      trainer.engine(), run.options.export_folder,
      {.names = ParameterNames::kGpt2, .files = {{kModelConfig, ModelConfig(run.options.shape)}}});
}

absl::Status CheckSave(const Options& options) {
  std::error_code error;
  if (options.save_folder.empty() || !options.resume.empty() ||
      !std::filesystem::exists(options.save_folder + "/latest", error))
    return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--save ", options.save_folder,
                   ": has checkpoints of another run, which this one would remove; go on from them "
                   "(--resume latest), or name another folder"));
}

absl::Status CheckExport(const Options& options) {
  if (options.export_folder.empty()) return absl::OkStatus();
  const absl::Status free = CheckExports(options.export_folder);
  return free.ok() ? free : absl::InvalidArgumentError(absl::StrCat("--export: ", free.message()));
}

}  // namespace ebb::gpt
