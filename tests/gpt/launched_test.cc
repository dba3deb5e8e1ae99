// gpt with ranks that are processes, started as by torchrun, mpirun and srun: the same bits as
// threads, and the reports of the survivors if a rank is killed.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <regex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "program.h"

namespace ebb::gpt::launched_test {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

// Listens on a port of 127.0.0.1 that the system chooses.
class Listener {
 public:
  Listener() : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(socket_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(listen(socket_, 1), 0);
    getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = std::to_string(ntohs(address.sin_port));
  }
  ~Listener() { close(socket_); }
  const std::string& port() const { return port_; }
  void Accept() const { close(accept(socket_, nullptr, nullptr)); }

 private:
  const int socket_;
  std::string port_;
};

std::string FreePort() {
  return Listener().port();
}

using Ranks = std::vector<std::unique_ptr<Program>>;

std::unique_ptr<Program> StartRank(Words arguments, Variables environment) {
  return std::make_unique<Program>(std::move(arguments),
                                   Program::Options{.environment = std::move(environment)});
}

// The line that begins with "gpt: "; there is one.
std::string OneError(const std::string& printed) {
  std::smatch said;
  EXPECT_TRUE(std::regex_search(printed, said, std::regex("(?:^|\n)(gpt: .*)\n"))) << printed;
  EXPECT_EQ(printed.find("\ngpt: ", static_cast<size_t>(said.position(1))), std::string::npos)
      << printed;
  return said[1];
}

// The names in /dev/shm of the process `pid`; other tests run beside this one.
Words LeftInSharedMemory(int pid) {
  Words names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename();
    if (name.starts_with("ebb-" + std::to_string(pid) + "-")) names.push_back(name);
  }
  return names;
}

class LaunchedTest : public ProgramTest {
 protected:
  Words Arguments(const Words& more) const { return OnData(Joined({"--sample", "0"}, more)); }
  std::string Config(double timeout_seconds) {
    return files_.Write("config.json",
                        nlohmann::json{{"train_micro_batch_size_per_gpu", 1},
                                       {"ebb", {{"timeout_seconds", timeout_seconds}}}}
                            .dump());
  }
  // Ranks as torchrun starts them, with the same arguments.
  static Ranks Start(int ranks, const Words& arguments, const std::string& port = FreePort()) {
    Ranks started;
    for (int rank = 0; rank < ranks; ++rank)
      started.push_back(StartRank(arguments, Torchrun(rank, ranks, port)));
    return started;
  }
  // Two ranks, each with its own arguments.
  Ranks StartTwo(const Words& first, const Words& second) {
    const std::string port = FreePort();
    Ranks started;
    started.push_back(StartRank(first, Torchrun(0, 2, port)));
    started.push_back(StartRank(second, Torchrun(1, 2, port)));
    return started;
  }
  std::string DigestOfThreads(int ranks, const Words& more = {}) {
    Program(Arguments(Joined(
                {"--ranks", std::to_string(ranks), "--steps", "4", "--summary", summary_}, more)))
        .ExitsWith(0);
    return Digest();
  }
};

TEST_F(LaunchedTest, ProcessesHaveTheBitsOfThreadsAndRankZeroPrints) {
  const std::string port = FreePort();
  for (const bool slurm : {false, true}) {
    Ranks ranks;
    for (int rank = 0; rank < 3; ++rank) {
      ranks.push_back(StartRank(
          Arguments({"--steps", "4", "--summary", summary_, "--trace", files_.Path("trace.json")}),
          slurm ? Srun(rank, 3) : Torchrun(rank, 3, port)));
    }
    EXPECT_THAT(
        ranks[0]->ExitsWith(0),
        AllOf(HasSubstr("3 ranks"), HasSubstr(slurm ? "srun" : "torchrun"), HasSubstr("step 4/4")));
    for (const int rank : {1, 2}) EXPECT_THAT(ranks[rank]->ExitsWith(0), IsEmpty());
    const std::string digest = Digest();
    EXPECT_EQ(digest, DigestOfThreads(3));
    EXPECT_THAT(LeftInSharedMemory(ranks[0]->pid()), IsEmpty());
    const auto trace = nlohmann::json::parse(files_.Read("trace.json"));
    std::set<int> seen;
    for (const auto& event : trace) seen.insert(event["pid"].get<int>());
    EXPECT_EQ(seen, (std::set<int>{0, 1, 2}));
  }
}

// The device's memory is shared between them, host pools are not.
TEST_F(LaunchedTest, ProcessesWithStateOnDiskHaveTheBitsOfThreads) {
  const std::string disk = files_.Folder("disk");
  const Words on_device = {"--stage", "3", "--dtype", "bf16", "--width", "128", "--layers", "2"};
  const Words offloads = Joined(on_device, {"--offload-param", "nvme", "--offload-optimizer",
                                            "nvme", "--split-master", "--nvme-path", disk});
  Ranks ranks = Start(2, Arguments(Joined({"--steps", "4", "--summary", summary_}, offloads)));
  for (auto& rank : ranks) rank->ExitsWith(0);
  const std::string digest = Digest();
  EXPECT_EQ(digest, DigestOfThreads(2, offloads));
  EXPECT_EQ(digest, DigestOfThreads(2, on_device));
  EXPECT_TRUE(std::filesystem::is_empty(disk));
  EXPECT_THAT(LeftInSharedMemory(ranks[0]->pid()), IsEmpty());
}

TEST_F(LaunchedTest, ProcessesThatShareLayersHaveTheBitsOfThreads) {
  for (const Words& how : {Words{"--tensor", "2"}, {"--tensor", "4", "--sequence-parallel"}}) {
    const Words cut = Joined({"--heads", "4", "--width", "32"}, how);
    Ranks ranks = Start(4, Arguments(Joined({"--steps", "4", "--summary", summary_}, cut)));
    for (auto& rank : ranks) rank->ExitsWith(0);
    const std::string digest = Digest();
    EXPECT_EQ(digest, DigestOfThreads(4, cut));
    EXPECT_THAT(LeftInSharedMemory(ranks[0]->pid()), IsEmpty());
  }
}

TEST_F(LaunchedTest, UnderMpirunItsProcessesAreTheRanks) {
  if (!HasMpirun()) GTEST_SKIP() << "mpirun is not here";
  Program program(Arguments({"--steps", "4", "--summary", summary_}), Mpirun(3));
  EXPECT_THAT(program.ExitsWith(0), AllOf(HasSubstr("3 ranks"), HasSubstr("mpirun")));
  const std::string digest = Digest();
  EXPECT_EQ(digest, DigestOfThreads(3));
}

TEST_F(LaunchedTest, LaunchersMustAgree) {
  struct Case {
    Variables environment;
    std::string said;
  };
  Variables two_launchers = Torchrun(0, 2, "29500");
  two_launchers.insert({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "4"}});
  for (const Case& c : {Case{{{"RANK", "0"}}, "WORLD_SIZE"}, Case{{{"WORLD_SIZE", "2"}}, "RANK"},
                        Case{{{"RANK", "0"}, {"WORLD_SIZE", "2"}}, "MASTER_ADDR"},
                        Case{{{"RANK", "2"}, {"WORLD_SIZE", "2"}}, "RANK='2'"},
                        Case{two_launchers, "two launchers disagree"},
                        Case{Torchrun(0, 2, "port"), "MASTER_PORT='port'"}}) {
    auto program = StartRank(Arguments({}), c.environment);
    EXPECT_THAT(program->ExitsWith(2), HasSubstr(c.said));
  }
}

TEST_F(LaunchedTest, ARankThatNeverComesIsNamed) {
  for (const int rank : {0, 1}) {
    EXPECT_THAT(
        StartRank(Arguments({"--config", Config(1)}), Torchrun(rank, 2, FreePort()))->ExitsWith(1),
        HasSubstr("rank " + std::to_string(1 - rank)));
  }
}

TEST_F(LaunchedTest, APortThatAnotherProcessHasIsNamed) {
  const Listener stranger;
  for (auto& rank : Start(2, Arguments({"--config", Config(100'000)}), stranger.port()))
    EXPECT_THAT(rank->ExitsWith(2), HasSubstr(stranger.port()));
}

TEST_F(LaunchedTest, RanksThatDisagreeOnTheWorldsSizeAllSaySo) {
  const std::string port = FreePort();
  const Words arguments = Arguments({"--config", Config(20)});
  const auto first = StartRank(arguments, Torchrun(0, 2, port));
  const auto second = StartRank(arguments, Torchrun(1, 3, port));
  for (Program* program : {first.get(), second.get()})
    EXPECT_THAT(program->ExitsWith(2), AllOf(HasSubstr("2"), HasSubstr("3")));
}

TEST_F(LaunchedTest, AnErrorOfOneRankReachesTheOthers) {
  const std::string absent = files_.Path("absent");
  Ranks ranks = StartTwo(Arguments({}), Tiny({"--data", absent}));
  EXPECT_THAT(ranks[1]->ExitsWith(2), HasSubstr(absent));
  EXPECT_THAT(ranks[0]->ExitsWith(2), AllOf(HasSubstr("rank 1"), HasSubstr(absent)));
}

// Each rank has its own command line and each host its own files, so one rank may be refused before
// the ranks meet.
TEST_F(LaunchedTest, ARefusalOfOneRankBeforeTheMeetingReachesTheOthers) {
  std::filesystem::create_directory(files_.Path("saved"));
  files_.Write("saved/latest", "");
  for (const auto& [option, value] : {std::pair("--save", files_.Path("saved")),
                                      {"--export", data_},
                                      {"--config", files_.Path("absent")},
                                      {"--stage", "seven"},
                                      {"--ranks", "77"},
                                      {"--losses", files_.Path("absent/l.csv")}}) {
    for (const int refused : {0, 1}) {
      if (refused == 1 && option == std::string("--losses")) continue;  // rank 0 alone writes it
      const Words asks = Arguments({option, value}), plain = Arguments({});
      Ranks ranks = refused == 0 ? StartTwo(asks, plain) : StartTwo(plain, asks);
      for (auto& rank : ranks) {
        EXPECT_THAT(rank->ExitsWith(2),
                    AllOf(HasSubstr("rank " + std::to_string(refused)), HasSubstr(value)));
      }
    }
  }
}

// Each rank has its own folder, and one of them has no disk. All ranks report that rank's error in
// the same words, under its name alone.
TEST_F(LaunchedTest, ARefusalOfOneRanksEngineIsReportedByAllUnderItsName) {
  const std::string port = FreePort();
  Ranks ranks;
  for (int rank = 0; rank < 3; ++rank) {
    const std::string folder = files_.Path("rank" + std::to_string(rank));
    std::filesystem::create_directories(rank == 1 ? folder : folder + "/disk");
    if (rank == 1) std::ofstream(folder + "/disk") << "a file";
    ranks.push_back(std::make_unique<Program>(
        Arguments({"--offload-optimizer", "nvme", "--nvme-path", "disk"}),
        Program::Options{.environment = Torchrun(rank, 3, port),
                         .before = {"sh", "-c", "cd '" + folder + "' && exec \"$0\" \"$@\""}}));
  }
  for (auto& rank : ranks) {
    rank->ExitsWith(2);
    // "failed" if the departure of the rank is heard first.
    EXPECT_THAT(rank->printed(),
                AllOf(::testing::ContainsRegex(
                          "gpt: rank 1( failed)?: nvme_path 'disk' is not a directory"),
                      Not(HasSubstr("rank 0")), Not(HasSubstr("rank 2"))));
  }
}

// All ranks meet the error, and one of them may hear of it from another one.
TEST_F(LaunchedTest, ARefusalOfAllRanksNamesOneRank) {
  for (const char* option : {"--save", "--resume", "--init-from"}) {
    Ranks ranks = Start(3, Arguments({option, data_}));
    for (auto& rank : ranks) {
      rank->ExitsWith(2);
      std::smatch said;
      const std::string what = std::string(option) + " " + data_ + ": ";
      EXPECT_TRUE(std::regex_search(rank->printed(), said,
                                    std::regex("gpt: rank [0-2]( failed)?: " + what + "(.*)\n")))
          << rank->printed();
      EXPECT_THAT(said[2].str(), AllOf(Not(HasSubstr("rank ")), Not(HasSubstr("engine"))));
    }
  }
}

TEST_F(LaunchedTest, ASignalToOneRankEndsAllAfterTheSameStep) {
  Ranks ranks = Start(2, Arguments({"--steps", "100000000", "--summary", summary_}));
  ASSERT_TRUE(ranks[0]->WaitFor("step 1/"));
  ranks[1]->Signal(SIGINT);
  for (auto& rank : ranks) rank->ExitsWith(130);
  EXPECT_GE(Summary()["steps"], 1);
}

// Ranks wait for each other for minutes if one does not come.
TEST_F(LaunchedTest, ASignalWhileRanksMeetEndsTheRankWithALine) {
  struct Case {
    Words arguments;
    int signal, code;
  };
  const Words saves = {"--save", files_.Path("run")};
  for (const Case& c : {Case{{}, SIGTERM, 130}, Case{{}, SIGHUP, 130}, Case{saves, SIGTERM, 75},
                        Case{saves, SIGUSR1, 75}, Case{{"--steps", "many"}, SIGINT, 2}}) {
    const Listener place;
    const auto rank = StartRank(Arguments(c.arguments), Torchrun(1, 2, place.port()));
    place.Accept();
    rank->Signal(c.signal);
    EXPECT_THAT(rank->ExitsWith(c.code),
                AllOf(HasSubstr("gpt: stopped by SIG"), HasSubstr(" before training began\n")));
  }
}

TEST_F(LaunchedTest, ATimelineThatCannotBeWrittenIsWarnedOfOnce) {
  const std::string folder = files_.Folder("folder");
  Ranks ranks = Start(3, Arguments({"--steps", "100000000", "--trace", folder + "/trace.json"}));
  ASSERT_TRUE(ranks[0]->WaitFor("step 1/")) << ranks[0]->printed();
  std::filesystem::remove_all(folder);
  ranks[0]->Signal(SIGINT);
  int warned = 0;
  for (auto& rank : ranks) {
    rank->ExitsWith(130);
    warned += rank->printed().find("the timeline was not written") != std::string::npos;
  }
  EXPECT_EQ(warned, 1);
}

// Neither rank can end by itself, because the second one stands still.
TEST_F(LaunchedTest, OfLaterSignalsOnlyCtrlCInATerminalEndsAProgramAtOnce) {
  const std::string port = FreePort();
  const Words arguments = Arguments({"--steps", "100000000"});
  Program first(arguments, {.columns = 80, .environment = Torchrun(0, 2, port)});
  const auto second = StartRank(arguments, Torchrun(1, 2, port));
  ASSERT_TRUE(first.WaitFor("step 1/")) << first.printed();
  second->Signal(SIGSTOP);
  const int end = first.FinishWhile([&] {
    for (const int sent : {SIGTERM, SIGHUP, SIGINT}) first.Signal(sent);
    first.Interrupt();
  });
  EXPECT_EQ(end, -SIGINT) << first.printed();
  EXPECT_THAT(first.printed(), HasSubstr("gpt: ended by a second Ctrl-C; nothing was saved"));
  second->Signal(SIGKILL);
  second->Signal(SIGCONT);
  second->ExitsWith(-SIGKILL);
}

TEST_F(LaunchedTest, TheOthersLearnThatRankZeroCannotWriteItsOutput) {
  const std::string port = FreePort();
  const Words arguments = Arguments({"--steps", "100000000"});
  Program::Options full = InShell("exec > /dev/full");
  full.environment = Torchrun(0, 2, port);
  Program first(arguments, full);
  const auto second = StartRank(arguments, Torchrun(1, 2, port));
  EXPECT_THAT(first.ExitsWith(1), HasSubstr("No space left on device"));
  EXPECT_THAT(second->ExitsWith(1), HasSubstr("rank 0"));
}

TEST_F(LaunchedTest, TheOthersNameAKilledRankAndItsPlace) {
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  std::mt19937 random(7);
  for (int round = 0; round < 6; ++round) {
    const int killed = round % 3;
    Ranks ranks = Start(3, Arguments({"--steps", "100000000", "--layers", "3"}));
    ASSERT_TRUE(ranks[0]->WaitFor("step 1/"));
    // At any place of the step, which no event marks.
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
    ranks[static_cast<size_t>(killed)]->Signal(SIGKILL);
    const auto begin = std::chrono::steady_clock::now();
    for (int rank = 0; rank < 3; ++rank) {
      const int code = ranks[static_cast<size_t>(rank)]->Finish();
      const std::string& printed = ranks[static_cast<size_t>(rank)]->printed();
      EXPECT_EQ(code, rank == killed ? -SIGKILL : 1) << printed;
      if (rank == killed) continue;
      const std::string line = OneError(printed);
      EXPECT_THAT(line, AllOf(HasSubstr("rank " + std::to_string(killed) + " (process "),
                              HasSubstr(host), AnyOf(HasSubstr("block"), HasSubstr("embedding"))));
      for (int other = 0; other < 3; ++other) {
        if (other == killed) continue;
        EXPECT_THAT(line, Not(HasSubstr("rank " + std::to_string(other))));
      }
    }
    RecordProperty(
        "seconds until all had ended",
        std::to_string(
            std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()));
    EXPECT_THAT(LeftInSharedMemory(ranks[0]->pid()), IsEmpty());
  }
}

TEST_F(LaunchedTest, AnErrorOfOneRanksStepIsReportedByAllInTheSameWords) {
  const std::string config = files_.Write("config.json", R"({"train_micro_batch_size_per_gpu": 1,
      "fp32": {"enabled": true}, "ebb": {"check_overflow": false},
      "optimizer": {"type": "Adam", "params": {"lr": 1e30}}})");
  Ranks ranks = Start(3, Arguments({"--config", config, "--steps", "100"}));
  std::set<std::string> lines;
  for (auto& rank : ranks) {
    rank->ExitsWith(1);
    lines.insert(OneError(rank->printed()));
  }
  EXPECT_EQ(lines.size(), 1u) << testing::PrintToString(lines);
  EXPECT_THAT(*lines.begin(),
              testing::ContainsRegex("^gpt: .*rank [0-2] has a non-finite gradient"));
}

TEST_F(LaunchedTest, ARankThatStallsIsWaitedForOnlySoLong) {
  struct Case {
    Words arguments;
    std::string begun;
  };
  for (const Case& c :
       {Case{{"--steps", "100000000"}, "step 1/"},
        Case{{"--steps", "100000000", "--evaluate-every", "1"}, "held-out loss after 1 "},
        Case{{"--steps", "1", "--sample", "100000000"}, " tokens/s\n"}}) {
    const Words arguments = Arguments(Joined({"--config", Config(1)}, c.arguments));
    Ranks ranks = StartTwo(arguments, arguments);
    ASSERT_TRUE(ranks[0]->WaitFor(c.begun)) << ranks[0]->printed();
    ranks[1]->Signal(SIGSTOP);
    EXPECT_THAT(ranks[0]->ExitsWith(1), AllOf(HasSubstr("has waited 1 s for"), HasSubstr("rank 1"),
                                              AnyOf(HasSubstr("block"), HasSubstr("embedding"))));
    // The first wait, and no later one that it caused. The wait may be the run's own exchange of
    // signals, which runs beside the engine's.
    std::smatch said;
    const std::string& printed = ranks[0]->printed();
    if (printed.find("'gpt-stop'") == printed.npos &&
        std::regex_search(printed, said, std::regex("at the ([a-z -]+)( of unit |:)"))) {
      const bool gathers = said[1] == "gather" || said[1] == "refresh";
      EXPECT_THAT(printed, HasSubstr(gathers ? "'engine gather'" : "'engine reduce'"));
    }
    ranks[1]->Signal(SIGKILL);
    ranks[1]->Signal(SIGCONT);
    ranks[1]->ExitsWith(-SIGKILL);
  }
}

TEST_F(LaunchedTest, RanksWithDifferentOptionsAllSaySo) {
  const std::vector<std::pair<Words, std::string>> cases = {
      {{"--seed", "8"}, "--seed"},
      {{"--steps", "5"}, "--steps"},
      {{"--data", files_.Write("other", std::string(800, 'c'))}, "--data"},
      {{"--summary", summary_}, "--summary"},
      {{"--width", "32"}, "--width"}};
  for (const auto& [arguments, said] : cases) {
    for (auto& rank : StartTwo(Arguments({}), Arguments(arguments)))
      EXPECT_THAT(rank->ExitsWith(2), AllOf(HasSubstr(said), HasSubstr("differs")));
  }
}

TEST_F(LaunchedTest, UnderMpirunAKilledRankEndsTheJob) {
  if (!HasMpirun()) GTEST_SKIP() << "mpirun is not here";
  Program program(
      Arguments({"--steps", "100000000"}),
      {.environment = {{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}},
       .before = {
           "mpirun", "--oversubscribe", "-n", "2", "sh", "-c",
           // The second rank's shell kills the program that replaces it.
           R"(if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then (sleep 1; kill -9 $$) & else echo "rank 0 is $$;"; fi; exec "$0" "$@")"}});
  EXPECT_THAT(program.Finish(), Not(0)) << program.printed();
  std::smatch pid;
  ASSERT_TRUE(std::regex_search(program.printed(), pid, std::regex("rank 0 is ([0-9]+);")));
  EXPECT_THAT(LeftInSharedMemory(std::stoi(pid[1])), IsEmpty());
}

}  // namespace
}  // namespace ebb::gpt::launched_test
