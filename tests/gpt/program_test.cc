// The program itself: exit codes, messages, and a signal in the middle of training.
#include "program.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gmock/gmock.h"

namespace ebb::gpt::program_test {
namespace {

using testing::HasSubstr;

// Grants one thread more each time, until there are enough. Each missing thread gives the same
// message.
TEST_F(ProgramTest, ThreadsThatTheMachineDoesNotGrantExitWithTwo) {
  std::filesystem::permissions(files_.Path(""), std::filesystem::perms::all);
  // Root has no such limit, and another user's processes would count.
  const std::string user = std::to_string(100'000 + getpid() % 100'000);
  const auto run = [&](int threads) {
    return std::make_unique<Program>(
        OnData({"--ranks", "2", "--steps", "1", "--sample", "0"}),
        Program::Options{.before = {"prlimit", "--nproc=" + std::to_string(threads), "setpriv",
                                    "--reuid=" + user, "--clear-groups"}});
  };
  constexpr int kPlenty = 200;
  if (const auto program = run(kPlenty); program->Finish() != 0)
    GTEST_SKIP() << "no user of its own here: " << program->printed();
  int refused = 0;
  for (int threads = 1; threads < kPlenty; ++threads) {
    SCOPED_TRACE(threads);
    const auto program = run(threads);
    const int code = program->Finish();
    if (code == 0) break;
    ++refused;
    EXPECT_EQ(code, 2) << program->printed();
    EXPECT_THAT(program->printed(), HasSubstr("ulimit -u"));
  }
  EXPECT_GT(refused, 3);
}

// The words of requests that cannot be met. The first rows are refused before ranks meet, and name
// no rank; the rows that follow by their engines, after the option and its value.
TEST_F(ProgramTest, ImpossibleRequestsExitWithTwoAndSayWhy) {
  const std::string disk = files_.Folder("disk"), absent = files_.Path("absent");
  const std::string plain = files_.Write("plain.json", R"({"train_micro_batch_size_per_gpu": 1})");
  const std::string text = files_.Read("text");
  struct Case {
    Words arguments, said;
  };
  const auto expect = [&](const Words& arguments, const Words& said) {
    const std::string printed = Run(arguments, 2);
    for (const std::string& each : said) EXPECT_THAT(printed, HasSubstr(each));
    return printed;
  };
  std::vector<Case> cases = {
      {{"--no-such-flag"}, {"--no-such-flag"}},
      {{"--data", data_, absent}, {absent}},
      {{"--data", "/dev/zero"}, {"/dev/zero: is a device"}},
      {{"--context", "500"}, {"--context 500"}},
      {{"--config", absent}, {absent}},
      {{"--losses", files_.Path("no/losses.csv")}, {"--losses"}},
      {{"--losses", data_ + "/l.csv"}, {"--losses"}},
      {{"--losses", data_}, {"--losses would overwrite " + data_}},
      {{"--config", plain, "--losses", plain}, {"--losses would overwrite " + plain}},
      {{"--export", "/proc/none"}, {"--export: "}},
      {{"--trace", files_.Path("no/trace.json")}, {"--trace"}},
      {{"--config", files_.Write("trace.json", R"({"train_micro_batch_size_per_gpu": 1,
                                                   "ebb": {"trace": "/absent/trace.json"}})")},
       {"ebb.trace"}},
      // An error of all ranks names none of them.
      {{"--ranks", "3", "--config",
        files_.Write("groups.json", R"({"train_micro_batch_size_per_gpu": 1,
            "ebb": {"parameter_groups": {"absent": {"lr_factor": 2}}}})")},
       {"gpt: ebb.parameter_groups.absent"}},
      {{"--offload-optimizer", "nvme", "--nvme-path", "/proc/none"},
       {"nvme_path '/proc/none' does not exist and cannot be made"}},
      {{"--offload-optimizer", "nvme", "--nvme-path", data_}, {"is not a directory"}},
      {{"--offload-optimizer", "nvme", "--nvme-path", "/proc"},
       {"cannot create a file in nvme_path '/proc': No such file or directory; nvme_path has to be "
        "a directory in which files can be made"}},
      // All errors of options, configuration and folders together.
      {{"--config", files_.Write("wrong.json", R"({"gradient_accumulation_steps": 4,
            "gradient_clipping": -1,
            "ebb": {"micro_batches_per_round": 3, "reduction_group": 3, "shard_group": 5}})"),
        "--ranks", "2", "--stage", "1", "--offload-param", "cpu", "--export", disk + "/../text"},
       {"gradient_clipping", "ebb.micro_batches_per_round", "ebb.reduction_group",
        "ebb.shard_group", "gpt: --offload-param cpu", "gpt: --export: "}}};
  if (!std::filesystem::exists("/dev/nvidiactl"))
    cases.push_back({{"--device", "cuda"}, {"gpt: --device cuda: "}});
  for (const Case& c : cases) {
    const std::string printed = expect(c.arguments, c.said);
    EXPECT_THAT(printed, testing::StartsWith("gpt: "));
    if (c.said.size() > 1) continue;  // the words of some keys have ranks
    EXPECT_THAT(printed, testing::Not(HasSubstr("rank")));
  }
  EXPECT_EQ(files_.Read("text"), text);

  const std::string not_a_folder = "is a file, not a folder";
  for (const auto& [option, value, said] :
       {std::tuple("--losses", std::string("/dev/full"),
                   std::string("writing failed: No space left on device")),
        {"--save", data_, not_a_folder},
        {"--save", "/proc/none", "/proc/none"},
        {"--resume", data_, not_a_folder},
        {"--resume", absent, "leave --resume out"},
        {"--init-from", data_, "is not"},
        {"--init-from", files_.Write("m.safetensors", "{"), "is not a complete safetensors file"},
        {"--init-from", absent, "absent"}}) {
    EXPECT_THAT(expect({option, value}, {said}),
                testing::ContainsRegex("gpt: .*" + (option + (" " + value)) + ": "));
  }

  // A cap that is too low: the classes and the change.
  const std::string fits = " would fit (", cpu = R"("device": "cpu")";
  for (const Case& c : std::vector<Case>{
           {{"--device-memory", "3.5MiB"},
            {"ebb.device_memory is 3.5 MiB", "optimizer ", "{\"offload_optimizer\": {" + cpu,
             fits}},
           {{"--device-memory", "2.25MiB", "--offload-optimizer", "nvme"},
            {"workspace ", "\"offload_param\": {" + cpu, fits}},
           {{"--host-memory", "512KiB", "--offload-optimizer", "cpu"},
            {"ebb.host_memory is 0.5 MiB", "optimizer ",
             R"("offload_optimizer": {"device": "nvme")", fits}},
           {{"--device-memory", "20KiB"},
            {"ebb.device_memory is 20.0 KiB", "no setting fits; the least, ", "smaller units"}}}) {
    expect(Joined(c.arguments, {"--nvme-path", disk, "--steps", "1", "--dtype", "fp32", "--layers",
                                "4", "--width", "64", "--heads", "2", "--context", "16"}),
           c.said);
    EXPECT_TRUE(std::filesystem::is_empty(disk));
  }
}

TEST_F(ProgramTest, ATimelineThatIsFullIsWarnedOfOnce) {
  Program program(OnData(
      {"--steps", "3000", "--ranks", "3", "--sample", "0", "--trace", files_.Path("t.json")}));
  program.ExitsWith(0);
  const size_t first = program.printed().find("the timeline was full: ");
  ASSERT_NE(first, std::string::npos) << program.printed();
  EXPECT_EQ(program.printed().find("the timeline was full: ", first + 1), std::string::npos);
}

TEST_F(ProgramTest, RefusesTwoReportsInOneFile) {
  const Words flags = {"--losses", "--curve", "--summary", "--trace"};
  const std::string path = files_.Write("report", "old");
  for (size_t a = 0; a < flags.size(); ++a) {
    for (size_t b = a + 1; b < flags.size(); ++b) {
      EXPECT_THAT(Run({flags[a], path, flags[b], files_.Path("./absent/../report")}, 2),
                  testing::AllOf(HasSubstr(flags[a]), HasSubstr(flags[b])));
      EXPECT_EQ(files_.Read("report"), "old");
    }
  }
  Run({"--steps", "1", "--losses", "/dev/stdout", "--summary", "/dev/stdout"});
}

TEST_F(ProgramTest, TheTrafficIsThatOfAnAppliedStep) {
  const std::string disk = files_.Folder("disk");
  const auto train = [&](int scale_power, const char* steps) {
    nlohmann::json config = {{"train_micro_batch_size_per_gpu", 1}};
    config["fp16"] = {{"enabled", true}, {"initial_scale_power", scale_power}, {"hysteresis", 1}};
    config["zero_optimization"] = {{"stage", 3},
                                   {"stage3_param_persistence_threshold", 0},
                                   {"offload_param", {{"max_in_cpu", 0}}}};
    const std::string printed =
        Run({"--config", files_.Write("config.json", config.dump()), "--offload-param", "nvme",
             "--offload-optimizer", "nvme", "--nvme-path", disk, "--steps", steps, "--sample", "0",
             "--summary", summary_});
    auto summary = Summary();
    const bool steady = summary["traffic_is_steady"];
    EXPECT_THAT(printed, HasSubstr(steady ? "Traffic of a step\n" : "none in steady state"));
    return summary;
  };
  const auto applied = train(4, "3");
  EXPECT_EQ(applied["skipped_steps"], 0);
  EXPECT_EQ(applied["traffic_is_steady"], true);
  const auto recovered = train(24, "20");
  EXPECT_GT(recovered["skipped_steps"], 2);
  EXPECT_EQ(recovered["traffic_is_steady"], true);
  EXPECT_EQ(recovered["traffic"], applied["traffic"]);
  const auto skipped = train(24, "3");
  EXPECT_EQ(skipped["skipped_steps"], 3);
  EXPECT_EQ(skipped["traffic_is_steady"], false);
}

// For every setting of the order and placement of gradients' sums, also of those that a cap
// decides.
TEST_F(ProgramTest, AdviceForACapTrainsTheSameNumbersOrSaysThatItDoesNot) {
  std::string varied;
  for (int i = 0; i < 400; ++i) varied += "the quick brown fox "[i * i % 20];
  const std::string data = files_.Write("varied", varied);
  int kept = 0, changed = 0;
  for (const auto& [stage, per_round, reduce_at] :
       {std::tuple(3, 4, "round"), std::tuple(3, 2, "round"), std::tuple(1, 1, "step"),
        std::tuple(2, 4, "step")}) {
    const nlohmann::json given = {
        {"train_micro_batch_size_per_gpu", 1},
        {"gradient_accumulation_steps", 4},
        {"bf16", {{"enabled", true}}},
        {"zero_optimization", {{"stage", stage}}},
        {"ebb", {{"micro_batches_per_round", per_round}, {"reduce_at", reduce_at}}}};
    const auto train = [&](const nlohmann::json& config, int code) {
      return Program(Tiny({"--data", data, "--layers", "3", "--ranks", "2", "--recompute",
                           "--config", files_.Write("config.json", config.dump()), "--steps", "2",
                           "--sample", "0", "--summary", summary_}))
          .ExitsWith(code);
    };
    train(given, 0);
    const auto free = Summary();
    // The workspace does not depend on the cap, and is larger on processors that do not multiply
    // bf16.
    int64_t needed = 0, workspace = 0;
    for (const auto& row : free["memory"]) {
      if (row["tier"] != "device") continue;
      (row["class"] == "workspace" ? workspace : needed) += row["predicted_bytes"].get<int64_t>();
    }
    for (const int percent : {90, 70, 50, 35, 30}) {
      nlohmann::json config = given;
      config["ebb"]["device_memory"] = workspace + needed * percent / 100;
      const std::string said = train(config, 2);
      SCOPED_TRACE(config.dump() + said);
      const size_t begin = said.find('{'), end = said.find(" would fit");
      if (end == said.npos) continue;
      config.merge_patch(nlohmann::json::parse(said.substr(begin, end - begin)));
      train(config, 0);
      const bool same = Summary()["parameter_digest"] == free["parameter_digest"];
      EXPECT_EQ(same, said.find("changes the numbers") == said.npos);
      ++(same ? kept : changed);
    }
  }
  EXPECT_GT(kept, 5);
  EXPECT_GT(changed, 0);
}

TEST_F(ProgramTest, ATierWithoutParametersIsLoggedAtTheStart) {
  const std::string disk = files_.Folder("disk");
  const std::string start = R"({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {)"
                            R"("stage": 3, "stage3_param_persistence_threshold": )";
  for (const auto& [threshold, said] : {std::pair("100000", "stage3_param_persistence_threshold"),
                                        std::pair("0", "offload_param.max_in_cpu")}) {
    const std::string config = files_.Write("config.json", start + threshold + "}}");
    EXPECT_THAT(
        Run({"--steps", "1", "--config", config, "--offload-param", "nvme", "--nvme-path", disk}),
        testing::ContainsRegex(std::string("offload_param.device\" is \"nvme\", but .*") + said));
  }
}

// The unnamed files under the path that the process has open.
int UnnamedFilesIn(const std::string& path, int pid) {
  int files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry, gone);
    files += target.starts_with(path + "/") && target.ends_with("(deleted)");
  }
  return files;
}

TEST_F(ProgramTest, SwapFilesHaveNoNameAndNoSignalLeavesOne) {
  for (const int signal : {SIGINT, SIGKILL}) {
    const std::string disk = files_.Folder("disk");
    Program program(OnData({"--steps", "100000000", "--offload-param", "nvme",
                            "--offload-optimizer", "nvme", "--nvme-path", disk}));
    ASSERT_TRUE(program.WaitFor("step 1/"));
    EXPECT_EQ(UnnamedFilesIn(disk, program.pid()), 2);  // parameters and states
    EXPECT_TRUE(std::filesystem::is_empty(disk));
    program.Signal(signal);
    const int exit_code = program.Finish();
    EXPECT_TRUE(std::filesystem::is_empty(disk));
    if (signal == SIGKILL) continue;
    EXPECT_EQ(exit_code, 130) << program.printed();
    EXPECT_THAT(program.printed(), HasSubstr("NVMe, bytes a parameter and step: "));
  }
}

TEST_F(ProgramTest, OptionsWithoutMeaningOnTheCpuCauseAWarning) {
  for (const auto& [graphs, products, says] :
       {std::tuple("on", "default", true), std::tuple("auto", "auto", false)}) {
    const std::string printed = Run({"--cuda-graphs", graphs, "--products", products});
    for (const char* what : {"--cuda-graphs on has no meaning", "--products has no meaning"})
      EXPECT_EQ(printed.find(what) != std::string::npos, says) << printed;
  }
}

// gpt | head: each step prints a line, into a pipe that is closed.
TEST_F(ProgramTest, OutputWithoutAReaderEndsTheRunAndLeavesNothingOnTheDisk) {
  const std::string disk = files_.Folder("disk");
  Program program(OnData({"--steps", "100000000", "--evaluate-every", "1", "--offload-param",
                          "nvme", "--offload-optimizer", "nvme", "--nvme-path", disk}));
  ASSERT_TRUE(program.WaitFor("step 1/"));
  EXPECT_EQ(UnnamedFilesIn(disk, program.pid()), 2);
  program.CloseOutput();
  program.ExitsWith(130);
  EXPECT_TRUE(std::filesystem::is_empty(disk));
}

// gpt > a file on a full disk. /dev/full takes nothing; messages go to standard error.
TEST_F(ProgramTest, OutputThatCannotBeWrittenEndsTheRunWithAnErrorAndTheReportsAreThere) {
  const Program::Options full = InShell("exec > /dev/full");
  for (const char* ranks : {"1", "2"}) {
    EXPECT_THAT(Run({"--steps", "100000000", "--ranks", ranks, "--losses", files_.Path("l.csv"),
                     "--summary", summary_},
                    1, full),
                HasSubstr("gpt: standard output: writing failed: No space left on device"));
    EXPECT_GE(Summary()["steps"], 1);
  }
  for (const auto& arguments : {Words{"--help"}, OnData({"--show-plan"})}) {
    EXPECT_THAT(Program(arguments, full).ExitsWith(1), HasSubstr("No space left on device"));
  }
}

// gpt >&-: printed text is lost, and does not get into the files that the program opens.
TEST_F(ProgramTest, WithoutStandardStreamsItTrainsAndItsFilesStayClean) {
  const std::string disk = files_.Folder("disk");
  std::string digest;
  for (const char* closed : {">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"}) {
    Run({"--steps", "2", "--ranks", "2", "--offload-optimizer", "nvme", "--nvme-path", disk,
         "--summary", summary_, "--trace", files_.Path("t.json"), "--losses", files_.Path("l.csv")},
        0, InShell(std::string("exec ") + closed));
    const auto summary = Summary();
    EXPECT_EQ(summary["steps"], 2) << closed;
    if (digest.empty()) digest = summary["parameter_digest"];
    EXPECT_EQ(summary["parameter_digest"], digest) << closed;
    EXPECT_FALSE(nlohmann::json::parse(files_.Read("t.json")).empty()) << closed;
    EXPECT_THAT(files_.Read("l.csv"), testing::StartsWith("step,")) << closed;
    EXPECT_TRUE(std::filesystem::is_empty(disk)) << closed;
  }
}

// nohup has hang-ups ignored. Between the signal and the last expected line there is more text than
// a pipe holds.
TEST_F(ProgramTest, AHangUpThatIsIgnoredFromOutsideStaysIgnored) {
  Program program(OnData({"--steps", "100000000", "--evaluate-every", "1"}), {.before = {"nohup"}});
  ASSERT_TRUE(program.WaitFor("step 1/"));
  program.Signal(SIGHUP);
  EXPECT_TRUE(program.WaitFor("held-out loss after 3000 steps"));
  program.Signal(SIGTERM);
  program.ExitsWith(130);
}

TEST_F(ProgramTest, LeavesItsReports) {
  EXPECT_THAT(
      Run({"--steps", "3", "--losses", files_.Path("l.csv"), "--curve", files_.Path("c.svg"),
           "--trace", files_.Path("t.json"), "--summary", summary_, "--sample", "4"}),
      testing::AllOf(HasSubstr("step 3/3"), HasSubstr("predicted MiB"), HasSubstr("Sample")));
  EXPECT_THAT(files_.Read("l.csv"), HasSubstr("\n3,"));
  EXPECT_THAT(files_.Read("c.svg"), testing::EndsWith("</svg>\n"));
  EXPECT_FALSE(nlohmann::json::parse(files_.Read("t.json")).empty());
  EXPECT_EQ(Summary()["losses"].size(), 3u);
  EXPECT_EQ(files_.Count(), 5u);
}

TEST_F(ProgramTest, ASampleIsLeftOutOnlyWhereItWouldReadParametersFromNvme) {
  const std::string disk = files_.Folder("disk");
  const auto printed = [&](const std::string& threshold, const Words& more) {
    const std::string config = files_.Write(
        "config.json",
        R"({"train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": )" +
            threshold + R"(, "offload_param": {"device": "nvme", "max_in_cpu": 0, "nvme_path": ")" +
            disk + R"("}}})");
    return Run(Joined(more, {"--config", config, "--steps", "1"}));
  };
  EXPECT_THAT(printed("0", {}),
              testing::ContainsRegex("No sample: .* MiB of parameters from NVMe"));
  EXPECT_THAT(printed("0", {"--sample", "3"}), HasSubstr("\nSample\n"));
  EXPECT_THAT(printed("1000000000", {}), HasSubstr("\nSample\n"));  // all stay on the device
}

TEST_F(ProgramTest, ASignalEndsTrainingAndTheReportsAreWritten) {
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) {
    Program program(OnData({"--steps", "100000000", "--ranks", "3", "--summary", summary_}));
    ASSERT_TRUE(program.WaitFor("step 1/"));
    program.Signal(signal);
    program.ExitsWith(130);
    const auto summary = Summary();
    EXPECT_EQ(summary["steps"], summary["losses"].size());
    EXPECT_GE(summary["steps"], 1);
    const std::string name = signal == SIGINT ? "SIGINT" : signal == SIGTERM ? "SIGTERM" : "SIGHUP";
    EXPECT_EQ(summary["stopped"]["by"], name);
    EXPECT_EQ(summary["stopped"]["during"], "training");
    EXPECT_EQ(summary["stopped"]["after_steps"], summary["steps"]);
    EXPECT_THAT(program.printed(),
                HasSubstr("gpt: stopped by " + name + " in training, after step " +
                          std::to_string(summary["steps"].get<int>()) +
                          " of 100000000; nothing was saved"));
  }
}

TEST_F(ProgramTest, ASignalEndsTheSampleAndTheReportsAreThereBefore) {
  Program program(OnData({"--steps", "1", "--sample", "100000000", "--ranks", "2", "--losses",
                          files_.Path("l.csv"), "--summary", summary_}));
  ASSERT_TRUE(program.WaitFor(" tokens/s\n"));
  EXPECT_THAT(files_.Read("l.csv"), HasSubstr("\n1,"));
  EXPECT_EQ(Summary()["held_out"].size(), 1u);
  EXPECT_TRUE(Summary()["stopped"].is_null());
  program.Signal(SIGINT);
  EXPECT_THAT(program.ExitsWith(130),
              testing::ContainsRegex(
                  "gpt: stopped by SIGINT in the sample, after [0-9]+ of 100000000 bytes;"));
  EXPECT_EQ(Summary()["stopped"]["during"], "sample");
}

TEST_F(ProgramTest, OnATerminalLogLinesDoNotMixWithTheProgressLine) {
  constexpr size_t kColumns = 40;
  const std::string config = files_.Write("config.json", R"({"train_micro_batch_size_per_gpu": 1,
      "optimizer": {"type": "SGD", "params": {"lr": 1e30}}, "gradient_clipping": 0})");
  Program program(OnData({"--config", config, "--steps", "5", "--sample", "0"}),
                  {.columns = kColumns, .environment = {{"TERM", "vt220"}}});
  program.ExitsWith(0);
  const std::string& printed = program.printed();
  const size_t warning = printed.find("ebb warning");
  ASSERT_NE(warning, std::string::npos) << printed;
  const std::string cleared = "\r\x1b[K";
  const size_t begin = printed.rfind(cleared, warning) + cleared.size();
  EXPECT_EQ(printed.substr(begin, warning - begin).find_first_not_of("0123456789-:. "),
            std::string::npos)
      << "before the warning, after the cleared line: " << printed.substr(begin, warning - begin);
  int lines = 0;
  for (size_t at = printed.find("\rstep"); at != std::string::npos;
       at = printed.find("\rstep", at + 1), ++lines) {
    EXPECT_EQ(printed.find("\x1b", at) - at - 1, kColumns - 1) << printed.substr(at, 80);
  }
  EXPECT_EQ(lines, 5);
}

// Open MPI gives a rank a terminal, and copies what the rank writes there into mpirun's output.
TEST_F(ProgramTest, ATerminalThatCannotRewriteALineHasPlainLinesWithTheDate) {
  const std::map<std::string, std::string> open_mpi = {
      {"TERM", "xterm"}, {"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}};
  for (const auto& environment :
       {open_mpi, {{"TERM", "dumb"}}, {{"TERM", ""}}, std::map<std::string, std::string>()}) {
    Program program(OnData({"--steps", "3", "--sample", "0", "--ranks", "1"}),
                    {.columns = 80, .environment = environment});
    EXPECT_THAT(program.ExitsWith(0), testing::Not(HasSubstr("\x1b[K")));
    EXPECT_THAT(program.printed(),
                testing::ContainsRegex("\n[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}  "
                                       "step 3/3  loss "));
  }
}

TEST_F(ProgramTest, ADivergingModelDoesNotHang) {
  // A learning rate beyond all bounds: infinite parameters after the first update, NaN as loss
  // after that.
  const std::string config = files_.Write("config.json", R"({"train_micro_batch_size_per_gpu": 1,
      "optimizer": {"type": "SGD", "params": {"lr": 1e30}}, "gradient_clipping": 0})");
  EXPECT_THAT(Run({"--config", config, "--steps", "5", "--sample", "3"}),
              HasSubstr("not a number"));
}

// There are neither data nor a folder for swap files, and no machine holds the model.
TEST_F(ProgramTest, ShowPlanAloneNeedsNothingButTheModel) {
  for (const auto& [given, operations] :
       {std::pair("--show-plan", false), std::pair("--show-plan=operations", true)}) {
    const std::string all =
        Program({given, "--layers", "4", "--width", "65536", "--heads", "64", "--data",
                 files_.Path("absent"), "--losses", files_.Path("no/losses.csv"), "--offload-param",
                 "nvme", "--offload-optimizer", "nvme", "--nvme-path", files_.Path("none")})
            .ExitsWith(0);
    const std::string printed = all.substr(0, 8192);  // the tables, and the first operations
    EXPECT_THAT(printed, testing::ContainsRegex("Memory of a rank\n.*predicted MiB\n"));
    EXPECT_THAT(printed, testing::ContainsRegex("optimizer +nvme +[0-9]+"));
    EXPECT_THAT(printed, HasSubstr("Traffic of a step"));
    EXPECT_THAT(printed, HasSubstr("Communication of a rank in a step"));
    EXPECT_EQ(all.find("tokens/s"), std::string::npos);
    EXPECT_THAT(printed, testing::ContainsRegex("Plan of a step: .*updates [a-z]+ \\(.+\\)\n"));
    EXPECT_EQ(printed.find("The step begins.") != std::string::npos, operations);
    if (operations) {
      for (const char* said : {" gather ", " reduce ", " of block0 "})
        EXPECT_NE(all.find(said), std::string::npos) << said;
      EXPECT_LT(printed.find("Memory of a rank"), printed.find("Plan of a step: "));
    }
  }
  EXPECT_EQ(files_.Count(), 1u);
}

// The figures that an engine counts, for the run asked for; and a row for each stage and tier.
TEST_F(ProgramTest, PredictsTheMemoryOfTraining) {
  const std::string disk = files_.Folder("disk");
  for (const Words& choice : std::vector<Words>{
           {"--stage", "1"},
           {"--stage", "3", "--offload-optimizer", "cpu"},
           {"--stage", "3", "--offload-param", "nvme", "--offload-optimizer", "nvme"}}) {
    const Words arguments = Joined(choice, {"--nvme-path", disk});
    Run(Joined(arguments, {"--steps", "3", "--sample", "0", "--summary", summary_}));
    std::map<std::string, double> held;
    const auto summary = Summary();
    for (const auto& row : summary["memory"])
      held[row["tier"]] += row["predicted_bytes"].get<double>() / (1 << 20);

    const std::string printed = Run(Joined(arguments, {"--predict"}));
    std::istringstream lines(printed);
    int rows = 0, marked = 0;
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line[0] == '*' ? line.substr(1) : line);
      int stage = -1;
      std::string parameters, states;
      double device = 0, ram = 0, nvme = 0;
      if (!(words >> stage >> parameters >> states >> device >> ram >> nvme)) continue;
      ++rows;
      if (line[0] != '*') continue;
      ++marked;
      EXPECT_EQ(stage, summary["config"]["zero_optimization"]["stage"]);
      EXPECT_NEAR(device, held["device"], 0.051);
      EXPECT_NEAR(ram, held["cpu"], 0.051);
      EXPECT_NEAR(nvme, held["nvme"], 0.051);
    }
    EXPECT_EQ(rows, 1 + 3 + 3 + 9) << printed;
    EXPECT_EQ(marked, 1) << printed;
  }
}

TEST_F(ProgramTest, PredictsConfigsAboveACapAndRefusesImpossibleOnes) {
  Program capped(Tiny({"--predict", "--dtype", "fp32", "--device-memory", "1140KiB"}));
  EXPECT_THAT(capped.ExitsWith(0),
              testing::ContainsRegex("0      device      device    ebb.device_memory is "
                                     "[0-9.]+ MiB a rank, but the pools on the device need "
                                     "[0-9.]+ MiB\n"));
  EXPECT_THAT(capped.printed(), testing::ContainsRegex("3      nvme        nvme +[0-9.]+ +[0-9]"));
  EXPECT_THAT(Program(Tiny({"--predict", "--device-memory", "20KiB"})).ExitsWith(2),
              HasSubstr("gpt: ebb.device_memory is 20.0 KiB a rank"));
}

TEST_F(ProgramTest, APipeThatNeverEndsIsRefused) {
  if (!kCanLimitAddressSpace) GTEST_SKIP() << "a pipe's limit may be a GiB";
  const std::string pipe = files_.Path("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  Program::Options options = WithAddressSpace(700'000);
  options.before[2].insert(0, "yes > " + pipe + " & ");
  EXPECT_THAT(Program(Tiny({"--data", pipe}), options).ExitsWith(2),
              testing::AllOf(HasSubstr(pipe), HasSubstr("write it to a file")));
}

// Address space runs out at some point between the start and the first step; the last run has
// enough. oneDNN itself crashes if it lacks memory.
TEST_F(ProgramTest, ARunWithoutMemoryIsRefusedWithAMessage) {
  if (!kCanLimitAddressSpace) GTEST_SKIP();
  int trained = 0, refused = 0;
  for (int64_t kibibytes = 140'000; trained == 0; kibibytes += 20'000) {
    ASSERT_LT(kibibytes, 4'000'000);
    Program program(
        Tiny({"--data", data_, "--steps", "2", "--ranks", "1", "--threads", "1", "--sample", "0"}),
        WithAddressSpace(kibibytes));
    const int code = program.Finish();
    SCOPED_TRACE(std::to_string(kibibytes) + " KiB:\n" + program.printed());
    // Before main the program's loader may lack memory for the libraries.
    if (code == 127 && program.printed().find("shared object") != std::string::npos) continue;
    if (code == 0) {
      ++trained;
      continue;
    }
    ++refused;
    EXPECT_EQ(code, 2);
    EXPECT_THAT(program.printed(),
                testing::ContainsRegex("gpt: .*ulimit -v, now " + std::to_string(kibibytes)));
  }
  EXPECT_GT(refused, 0);
}

// A file that is larger than the address space.
TEST_F(ProgramTest, TrainsOnDataLargerThanMemory) {
  if (!kCanLimitAddressSpace) GTEST_SKIP();
  const std::string large = files_.Write("large", "");
  std::filesystem::resize_file(large, int64_t{1} << 36);
  Program(
      Tiny({"--data", large, "--steps", "2", "--sample", "0", "--threads", "1", "--ranks", "1"}),
      WithAddressSpace(4'000'000))
      .ExitsWith(0);
}

}  // namespace
}  // namespace ebb::gpt::program_test
