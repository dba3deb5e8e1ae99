#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "ebb/offload/file_handle.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/json_text.h"
#include "ebb/runtime/checkpoint/model_files.h"
#include "ebb/runtime/checkpoint/program/program.h"
#include "ebb/runtime/checkpoint/safetensors.h"

namespace ebb {
namespace {

// Python would import modules of the current folder, which may be another program's.
constexpr char kStart[] =
    "import sys; sys.path = [folder for folder in sys.path if folder]; "
    "from ebb.checkpoint import main; main(sys.argv[1])";

absl::Status NoPython(const std::string& path, std::string_view why) {
  return absl::FailedPreconditionError(absl::StrCat(
      "'", path,
      "' is read by python3, with torch and Ebb's package ebb. Install them for the python3 of "
      "PATH "
      "(pip install torch, and pip install . in Ebb's source), or name the package's folder in "
      "PYTHONPATH. python3: ",
      std::string(why)));
}

// The last line that python3 prints: the answer, or what its error is.
absl::StatusOr<std::string> AskPython(const std::string& path) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "making a pipe for python3");
  const FileHandle reads(ends[0]);
  FileHandle writes(ends[1]);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, writes.get(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, writes.get(), STDERR_FILENO);
  std::string program = "python3", option = "-c", start = kStart, argument = path;
  char* const arguments[] = {program.data(), option.data(), start.data(), argument.data(), nullptr};
  pid_t child = 0;
  const int error =
      posix_spawnp(&child, program.c_str(), &actions, /*attributes=*/nullptr, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return NoPython(path, std::strerror(error));
  writes = FileHandle();
  std::string printed;
  char bytes[65536];
  for (ssize_t got = 0; (got = read(reads.get(), bytes, sizeof(bytes))) != 0;) {
    if (got > 0) printed.append(bytes, static_cast<size_t>(got));
    if (got < 0 && errno != EINTR) break;
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFSIGNALED(status))
    return NoPython(path, absl::StrCat("signal ", WTERMSIG(status), " has ended it"));
  const std::vector<std::string> lines = absl::StrSplit(printed, '\n', absl::SkipEmpty());
  const std::string last = lines.empty() ? "it has printed nothing" : lines.back();
  if (status != 0) return NoPython(path, config::Shortened(last, /*bytes_max=*/400));
  return last;
}

absl::StatusOr<std::unique_ptr<TensorSource>> Parse(const nlohmann::json& json) {
  SourceDescription about = {.kind = json.at("kind"), .path = json.at("path")};
  if (json.at("is_model")) {
    EBB_ASSIGN_OR_RETURN(about.model_config, ModelConfigBeside(about.path));
  }
  auto tensors = std::make_unique<RawTensors>(std::move(about));
  std::string file;
  for (const nlohmann::json& tensor : json.at("tensors")) {
    const std::optional<DType> dtype = DTypeOfSafetensors(tensor.at("dtype").get<std::string>());
    if (!dtype) return absl::DataLossError("a tensor has an unknown dtype");
    if (tensor.at("file") != file) tensors->BeginFile(file = tensor.at("file"));
    tensors->Add({.name = tensor.at("name"),
                  .state = tensor.at("state"),
                  .dtype = *dtype,
                  .shape = tensor.at("shape")},
                 tensor.at("at"));
  }
  for (const nlohmann::json& tensor : json.at("left_out"))
    tensors->LeaveOut(tensor.at("name"), tensor.at("why"));
  const nlohmann::json& given = json.at("state");
  TrainingState state = {.applied_steps = given.value("applied_steps", int64_t{0}),
                         .skipped_steps = given.value("skipped_steps", int64_t{0})};
  state.finished_steps = state.applied_steps + state.skipped_steps;
  state.loss_scaler = {.scale = given.value("scale", state.loss_scaler.scale),
                       .clean_steps = given.value("clean_steps", int64_t{0}),
                       .hysteresis_left = given.value("hysteresis_left", int64_t{0})};
  if (const absl::Status valid = Validate(state); !valid.ok())
    return absl::InvalidArgumentError(absl::StrCat("'", tensors->description().path,
                                                   "' has impossible steps: ", valid.message()));
  tensors->SetState(state);
  return tensors;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TensorSource>> OpenAnySource(const std::string& path) {
  if (!IsForTorch(path)) return OpenTensorSource(path);
  EBB_ASSIGN_OR_RETURN(const std::string line, AskPython(path));
  const absl::StatusOr<nlohmann::json> json = ParseJsonObject(line, /*levels_max=*/8);
  if (!json.ok()) return NoPython(path, config::Shortened(line, /*bytes_max=*/400));
  try {
    if (!json->contains("error")) return Parse(*json);
    const std::string text = json->at("error");
    return json->at("code") == "DATA_LOSS" ? absl::DataLossError(text)
                                           : absl::InvalidArgumentError(text);
  } catch (const nlohmann::json::exception&) {
    return NoPython(path, "the package ebb is of another version");
  }
}

}  // namespace ebb
