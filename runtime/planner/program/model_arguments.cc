#include "ebb/runtime/planner/program/model_arguments.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "CLI/CLI.hpp"
#include "ebb/runtime/planner/adapters.h"
#include "ebb/runtime/planner/hugging_face_config.h"
#include "ebb/runtime/planner/model_of_tensors.h"

namespace ebb::planner {
namespace {

constexpr int64_t kSizeMax = 1 << 30;

// A given size replaces that of the named model or of the file.
absl::StatusOr<ModelShape> WithSizes(ModelShape shape, const ModelShape& given) {
  const bool is_known = shape.layers > 0;
  bool has_others = false;
  for (const ModelSize& size : ModelSizes()) {
    if (given.*size.of == 0) continue;
    has_others = has_others || shape.*size.of != given.*size.of;
    shape.*size.of = given.*size.of;
  }
  // 0: Complete derives these sizes from the new width and heads.
  if (given.head_width == 0 && (given.width > 0 || given.heads > 0)) shape.head_width = 0;
  if (given.key_value_heads == 0 && given.heads > 0) shape.key_value_heads = 0;
  if (given.feed_forward == 0 && given.width > 0) shape.feed_forward = 0;
  if (given.experts_of_token == 0)
    shape.experts_of_token = std::min(shape.experts_of_token, shape.experts);
  if (is_known && has_others) shape.name += ", other sizes";
  return Complete(std::move(shape));
}

absl::StatusOr<ModelShape> ShapeOfFile(const std::string& path) {
  return ReadAs(path, [&](const std::string& text) { return ShapeOfConfigJson(text, path); });
}

}  // namespace

bool ModelArguments::names_model() const {
  return !name.empty() || !config_json.empty() || !safetensors.empty() || shape.layers > 0;
}

absl::StatusOr<Model> ModelOf(const ModelArguments& arguments, int tensor_ranks) {
  if (!arguments.names_model())
    return absl::InvalidArgumentError(
        "no model: give --model NAME, --config-json FILE, --safetensors FILE or --layers, --width "
        "and --heads");
  if (tensor_ranks > 1 && !arguments.safetensors.empty())
    return ModelOfConfigBeside(arguments, tensor_ranks);
  if (tensor_ranks > 1 && !arguments.quantization.empty())
    return absl::InvalidArgumentError(
        "tensor ranks cannot cut a base of 4 bits, whose bytes bitsandbytes packs over rows: leave "
        "--quantized or --tensor out");
  if (!arguments.safetensors.empty())
    return ModelOfSafetensors(arguments.safetensors, arguments.trainable);
  if (!arguments.trainable.empty())
    return absl::InvalidArgumentError(
        "--trainable is for the names in --safetensors files; for a model by name, config.json or "
        "sizes give --lora-rank");
  ModelShape shape{.name = "a gated transformer", .vocabulary = 32000, .context = 1 << 20};
  if (!arguments.config_json.empty()) {
    EBB_ASSIGN_OR_RETURN(shape, ShapeOfFile(arguments.config_json));
  } else if (!arguments.name.empty()) {
    EBB_ASSIGN_OR_RETURN(shape, ShapeOfName(arguments.name));
  }
  EBB_ASSIGN_OR_RETURN(shape, WithSizes(std::move(shape), arguments.shape));
  EBB_RETURN_IF_ERROR(CheckTensorRanks(shape, tensor_ranks));
  Model model = ModelOf(shape, tensor_ranks);
  if (arguments.adapter_rank == 0) return model;
  Adapters adapters{.rank = arguments.adapter_rank};
  if (!arguments.adapter_modules.empty()) adapters.modules = arguments.adapter_modules;
  EBB_ASSIGN_OR_RETURN(model, WithAdapters(std::move(model), adapters));
  return arguments.quantization.empty() ? model : WithQuantizedBase(std::move(model));
}

// The headers of the files are read, too: they say whether the config.json is theirs.
absl::StatusOr<Model> ModelOfConfigBeside(const ModelArguments& arguments, int tensor_ranks) {
  const std::string& first = arguments.safetensors.front();
  const std::string config = std::filesystem::path(first).replace_filename("config.json");
  const auto wrong = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ranks of ", first, ": ", why));
  };
  if (std::error_code error; !std::filesystem::exists(config, error))
    return wrong(absl::StrCat(
        "the file says which shapes parameters have, but not how they are cut: put the "
        "model's config.json beside it, or give --config-json, --model or sizes instead"));
  EBB_ASSIGN_OR_RETURN(const Model of_files,
                       ModelOfSafetensors(arguments.safetensors, arguments.trainable));
  if (!of_files.trains_whole())
    return wrong("a part of it is frozen: give its config.json to --config-json, with --lora-rank");
  if (of_files.stored_bytes.size() > 1)
    return wrong(
        "it has several dtypes, and tensor ranks are planned with one: give its config.json to "
        "--config-json");
  EBB_ASSIGN_OR_RETURN(ModelShape shape, ShapeOfFile(config));
  shape.name = absl::StrCat(first, " and its config.json");
  EBB_RETURN_IF_ERROR(CheckTensorRanks(shape, tensor_ranks));
  Model model = ModelOf(shape, tensor_ranks);
  if (model.parameters() != of_files.parameters())
    return wrong(absl::StrCat(config, " is of another model, of ", model.parameters(),
                              " parameters; the files have ", of_files.parameters()));
  return model;
}

void AddModelOptions(CLI::App& app, ModelArguments& arguments) {
  CLI::Option* const named =
      app.add_option("--model", arguments.name, "the name of a model; ebb-plan --list shows all")
          ->option_text("NAME");
  CLI::Option* const described = app.add_option("--config-json", arguments.config_json,
                                                "Hugging Face's config.json of a model")
                                     ->option_text("FILE");
  CLI::Option* const stored =
      app.add_option("--safetensors", arguments.safetensors,
                     "files of a model, or their index; only their headers are read")
          ->option_text("FILE...");
  named->excludes(described)->excludes(stored);
  described->excludes(stored);
  app.add_option("--trainable", arguments.trainable,
                 "names in the files that train (default: those with lora_)")
      ->option_text("REGEX");
  CLI::Option* const rank = app.add_option("--lora-rank", arguments.adapter_rank,
                                           "train adapters of this rank beside a frozen base")
                                ->option_text("N")
                                ->check(CLI::Range(int64_t{1}, kAdapterRankMax))
                                ->excludes(stored);
  app.add_option("--lora-modules", arguments.adapter_modules,
                 "modules with adapters, as q_proj v_proj (default: all-linear)")
      ->option_text("NAME...")
      ->delimiter(',')
      ->needs(rank);
  app.add_option("--quantized", arguments.quantization, "the frozen base as bitsandbytes has it")
      ->option_text("4bit")
      ->check(CLI::IsMember({"4bit"}))
      ->needs(rank);
  for (const ModelSize& size : ModelSizes()) {
    if (size.what == nullptr) continue;
    app.add_option(absl::StrCat("--", size.name), arguments.shape.*size.of, size.what)
        ->option_text("N")
        ->check(CLI::Range(int64_t{1}, kSizeMax))
        ->excludes(stored);
  }
}

}  // namespace ebb::planner
