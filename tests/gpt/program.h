// gpt as a child process: started, read from, signalled and waited for.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <source_location>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "scratch_files.h"

namespace ebb::gpt {

using Words = std::vector<std::string>;
Words Joined(Words first, const Words& more);

// A program with standard output and error in one pipe, or in its terminal of so many columns.
class Program {
 public:
  struct Options {
    unsigned short columns = 0;                           // 0: a pipe
    std::map<std::string, std::string> environment = {};  // added; launchers' are removed
    Words before = {};                                    // the command that starts it: mpirun -n 2
  };
  explicit Program(Words arguments) : Program(std::move(arguments), Options()) {}
  Program(Words arguments, const Options& options);
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ~Program();

  // Reads until `text` or everything has been printed.
  bool WaitFor(const std::string& text);
  void Signal(int signal) const;
  // Presses Ctrl-C in its terminal, if it has one.
  void Interrupt() const;
  // Does `meanwhile` again and again, 2 ms apart, until the program ends; then as Finish.
  int FinishWhile(const std::function<void()>& meanwhile);
  void CloseOutput();  // the output has no reader any more: writes fail
  int pid() const { return child_; }
  // Reads the rest. Returns the exit code, or minus the signal that ended it.
  int Finish();
  // Finish, which has to return `code`. Returns all that was printed.
  std::string ExitsWith(int code, std::source_location where = std::source_location::current());
  const std::string& printed() const { return printed_; }

 private:
  int child_ = -1;
  int output_ = -1;
  std::string printed_;
};

// The command that limits a program's address space. Empty with a sanitizer that takes all of it
// for itself.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kCanLimitAddressSpace = false;
#else
inline constexpr bool kCanLimitAddressSpace = true;
#endif
Program::Options WithAddressSpace(int64_t kibibytes);

// Started by a shell, after `commands`.
Program::Options InShell(const std::string& commands);

// The environment in which launchers start a rank, and Open MPI all ranks. With torchrun the first
// rank listens on the port, and with Slurm the job's number is this process's.
using Variables = std::map<std::string, std::string>;
Variables Torchrun(int rank, int ranks, const std::string& port);
Variables Srun(int rank, int ranks);
bool HasMpirun();
Program::Options Mpirun(int ranks);

// Arguments of a model that trains in no time, followed by `more`.
Words Tiny(const Words& more);

// Runs of such a model on a text.
class ProgramTest : public testing::Test {
 protected:
  Words OnData(const Words& more) const { return Tiny(Joined({"--data", data_}, more)); }
  // It has to exit with `code`. Returns all that it has printed.
  std::string Run(const Words& more, int code = 0, const Program::Options& options = {},
                  std::source_location where = std::source_location::current()) const {
    return Program(OnData(more), options).ExitsWith(code, where);
  }
  nlohmann::json Summary() const { return nlohmann::json::parse(files_.Read("s.json")); }
  std::string Digest() const { return Summary()["parameter_digest"]; }

  ScratchFiles files_;
  const std::string data_ = files_.Write("text", std::string(400, 'a') + std::string(400, 'b'));
  const std::string summary_ = files_.Path("s.json");
};

}  // namespace ebb::gpt
