#include "program.h"

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>
#include <utmp.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <utility>

#include "gtest/gtest.h"

namespace ebb::gpt {
namespace {

// So that the log has no colours, and the test's launcher is the only one.
constexpr const char* kUnset[] = {
    "TERM",         "COLORTERM",    "RANK",        "WORLD_SIZE",           "LOCAL_RANK",
    "MASTER_ADDR",  "MASTER_PORT",  "PMI_RANK",    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
    "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID"};

std::vector<char*> Pointers(Words& words) {
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

Program::Program(Words arguments, const Options& options) {
  int ends[2];
  if (options.columns == 0) {
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
  } else {
    const winsize size = {.ws_row = 24, .ws_col = options.columns, .ws_xpixel = 0, .ws_ypixel = 0};
    EXPECT_EQ(openpty(&ends[0], &ends[1], nullptr, nullptr, &size), 0);
    // Ctrl-C does not throw away what the program has printed, and is not printed itself.
    termios settings = {};
    EXPECT_EQ(tcgetattr(ends[1], &settings), 0);
    settings.c_lflag = (settings.c_lflag | NOFLSH) & ~static_cast<tcflag_t>(ECHO);
    EXPECT_EQ(tcsetattr(ends[1], TCSANOW, &settings), 0);
  }
  Words command = Joined(Joined(options.before, {EBB_GPT_PROGRAM}), arguments);
  const std::vector<char*> pointers = Pointers(command);
  child_ = fork();
  if (child_ == 0) {
    close(ends[0]);
    for (const char* name : kUnset) unsetenv(name);
    // The program may inherit ignored signals from nohup or a shell's &; the tests send them all
    // the same.
    for (const int asked : {SIGHUP, SIGINT, SIGTERM}) std::signal(asked, SIG_DFL);
    for (const auto& [name, value] : options.environment) setenv(name.c_str(), value.c_str(), 1);
    if (options.columns > 0) {
      login_tty(ends[1]);
    } else {
      dup2(ends[1], STDOUT_FILENO);
      dup2(ends[1], STDERR_FILENO);
    }
    execvp(pointers[0], pointers.data());
    _exit(127);
  }
  close(ends[1]);
  output_ = ends[0];
}

Program::~Program() {
  if (output_ >= 0) CloseOutput();
}

bool Program::WaitFor(const std::string& text) {
  char piece[4096];
  size_t searched = 0;  // no `text` begins before
  while (printed_.find(text, searched) == std::string::npos) {
    searched = printed_.size() - std::min(printed_.size(), text.size() - 1);
    const ssize_t got = read(output_, piece, sizeof(piece));
    if (got <= 0) return false;
    printed_.append(piece, static_cast<size_t>(got));
  }
  return true;
}

void Program::CloseOutput() {
  close(std::exchange(output_, -1));
}

void Program::Signal(int signal) const {
  kill(child_, signal);
}

void Program::Interrupt() const {
  EXPECT_EQ(write(output_, "\x03", 1), 1);
}

int Program::FinishWhile(const std::function<void()>& meanwhile) {
  char piece[4096];
  while (true) {
    meanwhile();
    pollfd polled = {.fd = output_, .events = POLLIN, .revents = 0};
    if (poll(&polled, 1, 2) == 0) continue;
    const ssize_t got = read(output_, piece, sizeof(piece));
    if (got <= 0) return Finish();
    printed_.append(piece, static_cast<size_t>(got));
  }
}

int Program::Finish() {
  WaitFor(std::string(1, '\0'));
  int status = 0;
  waitpid(child_, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

std::string Program::ExitsWith(int code, std::source_location where) {
  const testing::ScopedTrace trace(where.file_name(), static_cast<int>(where.line()), "");
  EXPECT_EQ(Finish(), code) << printed_;
  return printed_;
}

Program::Options InShell(const std::string& commands) {
  return {.before = {"bash", "-c", commands + "; exec \"$0\" \"$@\""}};
}

Program::Options WithAddressSpace(int64_t kibibytes) {
  return InShell("ulimit -v " + std::to_string(kibibytes));
}

Variables Torchrun(int rank, int ranks, const std::string& port) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(ranks)},
          {"LOCAL_RANK", std::to_string(rank)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", port}};
}

Variables Srun(int rank, int ranks) {
  return {{"SLURM_PROCID", std::to_string(rank)},
          {"SLURM_NTASKS", std::to_string(ranks)},
          {"SLURM_STEP_NUM_TASKS", std::to_string(ranks)},
          {"SLURM_LOCALID", std::to_string(rank)},
          {"SLURM_JOB_ID", std::to_string(getpid())},
          {"SLURM_STEP_ID", "0"},
          {"SLURM_NNODES", "1"},
          {"SLURM_STEP_NODELIST", "localhost"}};
}

bool HasMpirun() {
  return std::system("mpirun --version > /dev/null 2>&1") == 0;
}

Program::Options Mpirun(int ranks) {
  return {.environment = {{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}},
          .before = {"mpirun", "--oversubscribe", "-n", std::to_string(ranks)}};
}

Words Joined(Words first, const Words& more) {
  first.insert(first.end(), more.begin(), more.end());
  return first;
}

Words Tiny(const Words& more) {
  return Joined(
      {"--layers", "1", "--heads", "1", "--width", "16", "--context", "8", "--batch", "1"}, more);
}

}  // namespace ebb::gpt
