#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "ebb/offload/file_handle.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/model_files.h"
#include "ebb/runtime/checkpoint/program/program.h"

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

}  // namespace

absl::StatusOr<std::unique_ptr<TensorSource>> OpenAnySource(const std::string& path) {
  if (!IsForTorch(path)) return OpenTensorSource(path);
  EBB_ASSIGN_OR_RETURN(const std::string line, AskPython(path));
  absl::StatusOr<std::unique_ptr<TensorSource>> tensors = DescribedTensors(line);
  if (!absl::IsUnimplemented(tensors.status())) return tensors;
  return NoPython(path, std::string(tensors.status().message()));
}

}  // namespace ebb
