// ebb-checkpoint: looks at checkpoints, compares them, and converts them from and to Hugging Face's
// safetensors files.
#include <csignal>
#include <cstdio>
#include <exception>
#include <functional>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/checkpoint_tensors.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/checkpoint/parameter_names.h"
#include "ebb/runtime/checkpoint/program/program.h"
#include "ebb/runtime/checkpoint/safetensors_writer.h"
#include "ebb/runtime/checkpoint/tensor_source.h"
#include "ebb/runtime/config/value.h"
#include "ebb/runtime/trace/standard_streams.h"

namespace ebb {
namespace {

struct ConvertOptions {
  std::string from, to;
  DType dtype = DType::kFloat32;
  int64_t file_bytes_max = 0;
  ParameterNames names = ParameterNames::kAuto;
  bool force = false;  // imports beside other checkpoints
};

int64_t ElementsOf(const TensorSource& source) {
  int64_t elements = 0;
  for (const TensorInfo& tensor : source.tensors()) elements += tensor.elements();
  return elements;
}

absl::StatusOr<int> Export(const ConvertOptions& options) {
  EBB_ASSIGN_OR_RETURN(std::unique_ptr<TensorSource> opened, OpenAnySource(options.from));
  EBB_ASSIGN_OR_RETURN(const std::unique_ptr<TensorSource> source,
                       NamedOutside(std::move(opened), options.names, options.dtype));
  EBB_ASSIGN_OR_RETURN(
      const std::unique_ptr<SafetensorsWriter> writer,
      SafetensorsWriter::Create(options.to, source->tensors(), options.file_bytes_max));
  {
    ProgressBar bar("exporting", ElementsOf(*source));
    EBB_RETURN_IF_ERROR(ForEachPiece(*source, [&](size_t, std::span<const float> piece) {
      bar.Add(static_cast<int64_t>(piece.size()));
      return writer->Append(piece);
    }));
  }
  const std::string& config = source->description().model_config;
  if (!config.empty()) EBB_RETURN_IF_ERROR(writer->AddFile(kModelConfigName, config));
  EBB_RETURN_IF_ERROR(writer->Finish());
  absl::PrintF("exported %d tensors of %s to %s\n", source->tensors().size(),
               source->description().path, options.to);
  if (config.empty())
    absl::PrintF(
        "the checkpoint has no %s: copy the model's into the folder, because Hugging Face's "
        "loaders need it\n",
        kModelConfigName);
  return kDone;
}

absl::StatusOr<int> Import(const ConvertOptions& options) {
  if (!options.force && !CheckpointsIn(options.to).value_or(std::vector<std::string>()).empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("'", options.to,
                     "' has checkpoints, and the import would be its newest one: name another "
                     "folder, or add --force"));
  }
  EBB_ASSIGN_OR_RETURN(std::unique_ptr<TensorSource> opened, OpenAnySource(options.from));
  EBB_ASSIGN_OR_RETURN(const std::unique_ptr<TensorSource> source,
                       NamedInside(std::move(opened), options.names));
  std::string path;
  {
    ProgressBar bar("importing", ElementsOf(*source));
    EBB_ASSIGN_OR_RETURN(
        path, ImportCheckpoint(*source, options.to, [&](int64_t done) { bar.Add(done); }));
  }
  absl::PrintF("imported %d tensors of %s as %s\n", source->tensors().size(),
               source->description().path, path);
  for (const LeftOutTensor& tensor : source->description().left_out)
    absl::PrintF("left out: %s, which is %s\n", config::Shortened(tensor.name), tensor.why);
  return kDone;
}

constexpr char kPathHelp[] =
    "a checkpoint, a folder of them, a safetensors file ... (ebb-checkpoint --help)";
constexpr char kFooter[] =
    "PATH is a checkpoint, a folder of them (the newest complete one is taken), a safetensors file "
    "or one of torch.save,\n"
    "a folder with model.safetensors, pytorch_model.bin or the index of either, or a universal "
    "checkpoint of DeepSpeed.\n"
    "Files of torch.save and DeepSpeed's need python3 with torch and Ebb's package. Nothing of a "
    "pickle is executed.\n"
    "ebb-checkpoint COMMAND --help shows a command's options, with examples.\n"
    "Memory is usually below 256 MiB, and always below 1 GiB; python3 takes torch's beside it.\n"
    "Exit status: 0 done (diff: no difference); 1 data is damaged (diff: they differ); 2 it cannot "
    "be done as asked.";

int Fail(std::string_view what, int code) {
  std::fprintf(stderr, "ebb-checkpoint: %.*s\n", static_cast<int>(what.size()), what.data());
  return code;
}

int Main(int argc, char** argv) {
  CLI::App app(
      "Looks at checkpoints of Ebb, compares them, and converts them from and to Hugging Face's "
      "files.",
      "ebb-checkpoint");
  app.require_subcommand(1);
  app.set_version_flag("--version", "ebb-checkpoint " EBB_VERSION " (Ebb)");
  app.footer(kFooter);
  std::function<absl::StatusOr<int>()> command;

  InspectOptions inspected;
  CLI::App* inspect =
      app.add_subcommand("inspect", "show step, ranks, tensors and sizes, and check all checksums");
  inspect->footer(
      "Examples:\n"
      "  ebb-checkpoint inspect runs/a                      the newest checkpoint of a folder\n"
      "  ebb-checkpoint inspect runs/a/step-000000400 --headers");
  inspect->add_option("PATH", inspected.path, kPathHelp)->required();
  inspect->add_flag_callback(
      "--headers", [&] { inspected.verify = false; }, "read only headers, and no values");
  inspect->callback([&] { command = [&] { return Inspect(inspected); }; });

  std::string a, b;
  CLI::App* diff =
      app.add_subcommand("diff", "show which tensors of two checkpoints differ, and by how much");
  diff->footer(
      "Examples:\n"
      "  ebb-checkpoint diff runs/a runs/b\n"
      "  ebb-checkpoint diff runs/a exported                a checkpoint and what was exported of "
      "it");
  diff->add_option("A", a, kPathHelp)->required();
  diff->add_option("B", b, "likewise")->required();
  diff->callback([&] { command = [&] { return Diff(a, b); }; });

  ConvertOptions converted;
  std::string size = "5GB";
  const std::map<std::string, ParameterNames> names = {{"auto", ParameterNames::kAuto},
                                                       {"same", ParameterNames::kSame},
                                                       {"gpt2", ParameterNames::kGpt2}};
  const std::map<std::string, DType> dtypes = {{"fp32", DType::kFloat32},
                                               {"bf16", DType::kBFloat16}};
  const auto add_names = [&](CLI::App* to) {
    to->add_option_function<std::string>(
          "--names", [&](const std::string& word) { converted.names = names.at(word); },
          "same: names stay, as Llama's do; gpt2: Hugging Face's GPT-2 against examples/gpt; "
          "auto (the default): gpt2 if all names are GPT-2's, else same")
        ->option_text("auto|same|gpt2")
        ->check(CLI::IsMember({"auto", "same", "gpt2"}));
  };
  CLI::App* exported = app.add_subcommand(
      "export", "write the parameters as safetensors files for Hugging Face's loaders");
  exported->footer(
      "Examples:\n"
      "  ebb-checkpoint export runs/a exported              "
      "GPT2LMHeadModel.from_pretrained(\"exported\")\n"
      "  ebb-checkpoint export runs/a exported --dtype bf16 --file-size 2GB");
  exported->add_option("PATH", converted.from, kPathHelp)->required();
  exported->add_option("DIR", converted.to, "a new folder")->required();
  exported
      ->add_option_function<std::string>(
          "--dtype", [&](const std::string& word) { converted.dtype = dtypes.at(word); },
          "of the values (default: fp32)")
      ->option_text("fp32|bf16")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  exported->add_option("--file-size", size, "largest size of a file, such as 500MB (default: 5GB)")
      ->option_text("SIZE");
  add_names(exported);
  exported->callback([&] { command = [&] { return Export(converted); }; });

  CLI::App* imported =
      app.add_subcommand("import", "write the tensors of other programs as a checkpoint");
  imported->footer(
      "Examples:\n"
      "  ebb-checkpoint import gpt2-folder runs/imported    what save_pretrained has written\n"
      "  ebb-checkpoint import run/universal runs/imported  what DeepSpeed's ds_to_universal.py "
      "has written\n"
      "  ebb-checkpoint import gpt2-folder runs/a --force   runs/a goes on from the import");
  imported->add_option("PATH", converted.from, kPathHelp)->required();
  imported->add_option("DIR", converted.to, "a folder of checkpoints")->required();
  imported->add_flag("--force", converted.force,
                     "import into a folder with checkpoints: `latest` names the import then, which "
                     "replaces an earlier import of its step");
  add_names(imported);
  imported->callback([&] { command = [&] { return Import(converted); }; });

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    return Fail(absl::StrCat(error.what(), "\nTry ebb-checkpoint --help."), kUsageError);
  }
  converted.file_bytes_max = config::ToBytes(size).value_or(0);
  if (converted.file_bytes_max <= 0)
    return Fail(absl::StrCat("--file-size ", size, " is not a size such as 5GB"), kUsageError);
  const absl::StatusOr<int> code = command();
  if (!code.ok()) {
    const auto& message = code.status().message();
    return Fail({message.data(), message.size()},
                absl::IsDataLoss(code.status()) ? kDamaged : kUsageError);
  }
  if (std::fflush(stdout) != 0) return Fail("standard output cannot be written", kUsageError);
  return *code;
}

}  // namespace
}  // namespace ebb

int main(int argc, char** argv) {
  ebb::OpenMissingStandardStreams();
  // A file beyond the limit of its size (ulimit -f) is an error with a message then.
  std::signal(SIGXFSZ, SIG_IGN);
  try {
    return ebb::Main(argc, argv);
  } catch (const std::bad_alloc&) {
    return ebb::Fail("too little memory for the headers of these files", ebb::kUsageError);
  }
}
