// --save and --resume: a run that was stopped or killed ends with the bits of a run that was not.
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <regex>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "program.h"

namespace ebb::gpt::saved_run_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
namespace fs = std::filesystem;

class SavedRunTest : public ProgramTest {
 protected:
  Words Command(const Words& more, const std::string& steps = "40") const {
    return OnData(
        Joined({"--steps", steps, "--ranks", "2", "--sample", "0", "--summary", summary_}, more));
  }
  std::string Train(const Words& more, const std::string& steps = "40", int code = 0,
                    std::source_location where = std::source_location::current()) const {
    return Program(Command(more, steps)).ExitsWith(code, where);
  }
  int64_t Steps() const { return Summary()["steps"]; }

  // With one learning rate the number of steps may be chosen later.
  const std::string constant_rate_ = files_.Write(
      "c.json",
      R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "bf16": {"enabled": true}})");
  const std::string saves_ = files_.Path("saves");
  const Words goes_on_ = {"--config", constant_rate_, "--save", saves_, "--resume", "latest"};
};

TEST_F(SavedRunTest, ASignalSavesAndTheSameCommandGoesOn) {
  for (const int signal : {SIGTERM, SIGUSR1, SIGINT}) {
    fs::remove_all(saves_);
    Program first(Command(goes_on_, "100000000"));
    ASSERT_TRUE(first.WaitFor("step 1/")) << first.printed();
    first.Signal(signal);
    EXPECT_THAT(first.ExitsWith(75), HasSubstr("saved " + saves_ + "/step-"));
    const int64_t stopped = Steps();
    const std::string steps = std::to_string(stopped + 5);
    EXPECT_THAT(Train(goes_on_, steps), HasSubstr("after step " + std::to_string(stopped)));
    const std::string resumed = Digest();
    Train({"--config", constant_rate_}, steps);
    EXPECT_EQ(Digest(), resumed);
  }
}

// Slurm sends SIGTERM twice at a time limit, and a launcher passes on what the terminal has sent.
// Here they come all the time until the program has ended.
TEST_F(SavedRunTest, SignalsAfterTheFirstOneStopNoSave) {
  for (const auto& signals :
       {std::vector{SIGTERM}, {SIGTERM, SIGINT}, {SIGUSR1, SIGTERM}, {SIGINT, SIGHUP, SIGTERM}}) {
    fs::remove_all(saves_);
    Program first(Command(goes_on_, "100000000"));
    ASSERT_TRUE(first.WaitFor("step 1/")) << first.printed();
    const int code = first.FinishWhile([&] {
      for (const int sent : signals) first.Signal(sent);
    });
    EXPECT_EQ(code, 75) << first.printed();
    EXPECT_THAT(first.printed(),
                AllOf(HasSubstr("gpt: stopped by SIG"), HasSubstr("--resume latest goes on")));
    const int64_t stopped = Steps();
    EXPECT_THAT(Train(goes_on_, std::to_string(stopped + 1)),
                HasSubstr("after step " + std::to_string(stopped)));
  }
}

// Without the speed.
std::string WithoutLastColumn(const std::string& csv) {
  return std::regex_replace(csv, std::regex(",[^,\n]*\n"), "\n");
}

TEST_F(SavedRunTest, TheLossesOverStopsKillsAndResumesAreThoseOfOneRun) {
  const std::string kSteps = "100000000";
  const auto command = [&](const std::string& save, const std::string& csv,
                           const std::string& steps) {
    return Command({"--config", constant_rate_, "--save", files_.Path(save), "--save-every", "7",
                    "--resume", "latest", "--losses", files_.Path(csv)},
                   steps);
  };
  int64_t ended = 0;
  for (const int signal : {SIGTERM, SIGKILL, SIGKILL, SIGTERM}) {
    Program program(command("broken", "broken.csv", kSteps));
    ASSERT_TRUE(program.WaitFor(ended == 0 ? "saved" : "resumed from"));
    ASSERT_TRUE(program.WaitFor("saved")) << program.printed();
    program.Signal(signal);
    const int code = program.Finish();
    EXPECT_EQ(code, signal == SIGTERM ? 75 : -SIGKILL) << program.printed();
    const std::string csv = files_.Read("broken.csv");
    if (signal == SIGKILL)  // as if the kill had come within a line
      fs::resize_file(files_.Path("broken.csv"), csv.size() - 3);
    ended = std::count(csv.begin(), csv.end(), '\n') - 1;
  }
  const std::string steps = std::to_string(ended + 5);
  Program(command("broken", "broken.csv", steps)).ExitsWith(0);
  Program unbroken(command("unbroken", "unbroken.csv", steps));
  unbroken.ExitsWith(0);
  EXPECT_EQ(WithoutLastColumn(files_.Read("broken.csv")),
            WithoutLastColumn(files_.Read("unbroken.csv")));
  // Without --resume it is another run.
  Train({"--losses", files_.Path("broken.csv")}, "2");
  EXPECT_THAT(files_.Read("broken.csv"), testing::ContainsRegex("second\n1,[^\n]*\n2,[^\n]*\n$"));
}

// A reader that ends stands for a full disk.
TEST_F(SavedRunTest, ARunThatCannotWriteItsLossesIsSavedAndNamesTheFile) {
  const std::string pipe = files_.Path("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  std::ifstream reader;
  Program program(Command({"--save", saves_, "--losses", pipe}, "100000000"));
  reader.open(pipe);
  for (std::string line; line.rfind("3,", 0) != 0;) ASSERT_TRUE(std::getline(reader, line));
  reader.close();
  EXPECT_THAT(program.ExitsWith(1),
              AllOf(HasSubstr("saved " + saves_),
                    HasSubstr("gpt: --losses " + pipe + ": writing failed: Broken pipe")));
  EXPECT_GE(Summary()["steps"], 3);
}

// The limit of a file's size stands for a full disk. The lines do not fit, the parameters do.
TEST_F(SavedRunTest, WithoutASaveARunWhoseLossesDoNotFitTrainsAndExportsAndExitsWithOne) {
  const std::string csv = files_.Path("l.csv");
  Program program(Tiny({"--data", data_, "--steps", "3000", "--sample", "0", "--ranks", "1",
                        "--losses", csv, "--export", files_.Path("exported")}),
                  InShell("ulimit -f 100"));
  program.ExitsWith(1);
  const std::string failed = "--losses " + csv + ": writing failed: File too large";
  const size_t warned = program.printed().find(failed + "; the run goes on");
  ASSERT_NE(warned, std::string::npos) << program.printed();
  EXPECT_EQ(program.printed().find(failed + "; the run goes on", warned + 1), std::string::npos);
  EXPECT_THAT(program.printed(),
              AllOf(HasSubstr("step 3000/3000"), HasSubstr("exported " + files_.Path("exported")),
                    testing::EndsWith("gpt: " + failed + "\n")));
  EXPECT_THAT(files_.Read("l.csv"), testing::EndsWith("\n"));
}

TEST_F(SavedRunTest, AKilledRunGoesOnFromItsLastSave) {
  Train({});
  const std::string expected = Digest();
  const Words command =
      Command({"--save", saves_, "--save-every", "2", "--keep", "1", "--resume", "latest"});
  for (const char* at : {"step 3/", "saved", "step 20/"}) {
    Program killed(command);
    killed.WaitFor(at);
    killed.Signal(SIGKILL);
    killed.Finish();
  }
  Program(command).ExitsWith(0);
  EXPECT_EQ(Digest(), expected);
  // The lock, the pointer and one checkpoint.
  EXPECT_EQ(std::distance(fs::directory_iterator(saves_), fs::directory_iterator()), 3);
}

TEST_F(SavedRunTest, ACheckpointIsResumedByItsOwnName) {
  Train({"--save", saves_, "--save-every", "10", "--keep", "0"});
  const std::string expected = Digest();
  for (const char* step : {"10", "20", "30", "40"}) {
    Program program(Command({"--resume", saves_ + "/step-0000000" + step}));
    EXPECT_THAT(program.ExitsWith(0), HasSubstr(std::string("after step ") + step));
    EXPECT_EQ(program.printed().find("a larger --steps goes on") != std::string::npos,
              step == std::string("40"));
    EXPECT_EQ(Digest(), expected);
  }
}

// Each way to train on two ranks saves, and two other ways resume from the middle.
TEST_F(SavedRunTest, AnotherLauncherStageAndTierResumesBitForBit) {
  struct Way {
    std::string launcher;
    Words options;
  };
  const std::string disk = files_.Folder("disk");
  std::vector<Way> ways = {
      {"threads", {"--stage", "3", "--offload-param", "nvme", "--offload-optimizer", "nvme"}},
      {"torchrun", {"--stage", "2", "--offload-optimizer", "cpu"}},
      {"srun", {"--stage", "3", "--offload-optimizer", "nvme"}}};
  if (HasMpirun()) ways.push_back({"mpirun", {"--stage", "1"}});
  const auto digest = [&](const Way& way, const Words& more) {
    Words options = Joined({"--steps", "6", "--sample", "0", "--dtype", "bf16", "--summary",
                            summary_, "--nvme-path", disk},
                           Joined(way.options, more));
    if (way.launcher == "threads") options.insert(options.end(), {"--ranks", "2"});
    std::vector<std::unique_ptr<Program>> ranks;
    const bool one_command = way.launcher == "threads" || way.launcher == "mpirun";
    for (int rank = 0; rank < (one_command ? 1 : 2); ++rank) {
      Program::Options start;
      if (way.launcher == "mpirun") start = Mpirun(2);
      if (way.launcher == "torchrun")
        start.environment = Torchrun(rank, 2, std::to_string(20000 + getpid() % 10000));
      if (way.launcher == "srun") start.environment = Srun(rank, 2);
      ranks.push_back(std::make_unique<Program>(OnData(options), start));
    }
    for (const auto& rank : ranks) rank->ExitsWith(0);
    return Digest();
  };
  const std::string expected = digest(ways[0], {});
  for (size_t saver = 0; saver < ways.size(); ++saver) {
    SCOPED_TRACE("saved by " + ways[saver].launcher);
    const std::string saves = saves_ + std::to_string(saver);
    EXPECT_EQ(digest(ways[saver], {"--save", saves, "--save-every", "2", "--keep", "0"}), expected);
    for (const size_t after : {1, 2}) {
      const Way& loader = ways[(saver + after) % ways.size()];
      EXPECT_EQ(digest(loader, {"--resume", saves + "/step-00000000" + std::to_string(2 * after)}),
                expected)
          << "resumed by " << loader.launcher;
    }
  }
}

TEST_F(SavedRunTest, ARunThatReachesAnotherRunsCheckpointIsRefusedBeforeItTrains) {
  const std::string others = files_.Path("others");
  Train({"--save", saves_}, "2");
  Train({"--save", others}, "4");
  Program refused(Command({"--resume", saves_, "--save", others}, "6"));
  EXPECT_THAT(refused.ExitsWith(2), HasSubstr("step-000000004' is of another run"));
  EXPECT_THAT(refused.printed(), testing::Not(HasSubstr("step 3/")));
  // The run ends before that step.
  Train({"--resume", saves_, "--save", others}, "3");
}

// Otherwise each might replace and remove the other's checkpoints.
TEST_F(SavedRunTest, ASecondRunInAFolderIsRefusedBeforeItTrains) {
  const Words command = Command(
      {"--save", saves_, "--save-every", "20", "--keep", "0", "--resume", "latest"}, "100000000");
  Program first(command);
  ASSERT_TRUE(first.WaitFor("saved")) << first.printed();
  Program second(command);
  EXPECT_THAT(second.ExitsWith(2),
              AllOf(HasSubstr("--save " + saves_), HasSubstr("another run saves to"),
                    HasSubstr("on host"), HasSubstr("give each run a folder of its own")));
  EXPECT_THAT(second.printed(), testing::Not(HasSubstr("step 3/")));
  first.Signal(SIGTERM);
  first.ExitsWith(75);
}

TEST_F(SavedRunTest, AFileBeyondTheLimitOfItsSizeIsAnErrorWithARemedy) {
  EXPECT_THAT(Program(Command({"--save", saves_}, "2"), InShell("ulimit -f 16")).ExitsWith(1),
              AllOf(HasSubstr("rank-0000"), HasSubstr("ulimit -f")));
}

TEST_F(SavedRunTest, SavesTakeTheirMemoryFromTheHosts) {
  EXPECT_THAT(Train({"--save", saves_, "--host-memory", "40MiB"}, "2", 2),
              HasSubstr("saves and loads take 48 MiB of it"));
  EXPECT_THAT(
      Program(
          Command({"--save", saves_, "--host-memory", "80MiB", "--offload-optimizer", "cpu"}, "2"))
          .ExitsWith(0),
      HasSubstr("saves and loads take 48 MiB of --host-memory"));
}

TEST_F(SavedRunTest, AnImpossibleResumeIsRefused) {
  EXPECT_THAT(Train({"--resume", "latest"}, "2", 2), HasSubstr("requires --save"));
  EXPECT_THAT(Train({"--save-every", "2"}, "2", 2), HasSubstr("--save"));
  Train({"--save", saves_}, "2");
  EXPECT_THAT(Train({"--save", saves_}, "2", 2), HasSubstr("of another run"));
  EXPECT_THAT(Train({"--resume", saves_, "--layers", "3"}, "2", 2),
              AllOf(HasSubstr("it lacks the parameter"), HasSubstr("--init-from"),
                    testing::Not(HasSubstr("LoadOptions"))));
}

// Another number of heads changes no shape of a tensor.
TEST_F(SavedRunTest, AModelWithOtherHeadsIsRefused) {
  const std::string exported = files_.Path("exported");
  Train({"--export", exported, "--save", saves_}, "1");
  Train({"--init-from", exported}, "1");
  const Words reads[] = {{"--init-from", exported},
                         {"--init-from", exported + "/model.safetensors"},
                         {"--init-from", saves_},
                         {"--resume", saves_}};
  for (const Words& options : reads) {
    EXPECT_THAT(Train(Joined(options, {"--heads", "2"}), "1", 2),
                HasSubstr("has \"n_head\": 1, but the model has 2"));
  }
}

}  // namespace
}  // namespace ebb::gpt::saved_run_test
