// The files that a run leaves, which are whole or absent: CSV, SVG, digest, summary, lines for
// people.
#include "report/reports.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iterator>
#include <limits>
#include <thread>

#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "report/digest.h"
#include "report/output.h"
#include "report/progress.h"
#include "report/tables.h"
#include "scratch_files.h"

namespace ebb::gpt::reports_test {
namespace {

using testing::HasSubstr;

TEST(OutputFileTest, IsCompleteOrAbsent) {
  ScratchFiles files;
  files.Write("old", "before");
  {
    auto file = OutputFile::Open("--summary", files.Path("old"));
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ(files.Count(), 1u);  // nor would one be if this process were killed
  }
  EXPECT_EQ(files.Read("old"), "before");
  auto file = OutputFile::Open("--summary", files.Path("old"));
  for (const char* contents : {"after", "again"}) {
    ASSERT_TRUE(file->Write(contents).ok());
    EXPECT_EQ(files.Read("old"), contents);
    EXPECT_EQ(files.Count(), 1u);
  }
}

TEST(OutputFileTest, OpenNamesAFileThatCannotBeWritten) {
  ScratchFiles files;
  for (const std::string& path : {files.Path("absent/file"), files.Path("")}) {
    const auto file = OutputFile::Open("--summary", path);
    ASSERT_FALSE(file.ok());
    EXPECT_THAT(std::string(file.status().message()),
                testing::AllOf(HasSubstr("--summary"), HasSubstr(path)));
  }
}

TEST(OutputFileTest, TheUnfinishedFileOfAnotherRunIsLeftAlone) {
  ScratchFiles files;
  files.Write("s.json.partial.1", "half");
  auto file = OutputFile::Open("--summary", files.Path("s.json"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_TRUE(file->Write("whole").ok());
  EXPECT_EQ(files.Read("s.json.partial.1"), "half");
  EXPECT_EQ(files.Read("s.json"), "whole");
  EXPECT_EQ(files.Count(), 2u);
}

// gpt --losses /dev/stdout > FILE
TEST(OutputFileTest, AFileThatIsStandardOutputIsNotReplaced) {
  ScratchFiles files;
  const int saved = dup(STDOUT_FILENO);
  const int out = open(files.Write("out", "").c_str(), O_WRONLY | O_CLOEXEC);
  dup2(out, STDOUT_FILENO);
  absl::Status status;
  for (const char* text : {"a", "b"}) {
    status.Update(OutputFile::Open("--summary", "/dev/stdout")->Write(text));
    status.Update(OutputFile::OpenToAppend("--losses", files.Path("out"))->Append(text));
  }
  dup2(saved, STDOUT_FILENO);
  close(saved);
  close(out);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(files.Read("out"), "aabb");
  EXPECT_EQ(files.Count(), 1u);
}

// More than a pipe holds, so that writing waits for the reader.
TEST(OutputFileTest, APipeGetsAllBytes) {
  ScratchFiles files;
  const std::string path = files.Path("pipe");
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  const std::string contents(1 << 20, 'x');
  std::string read;
  std::thread reader([&] {
    std::ifstream in(path);
    read.assign(std::istreambuf_iterator<char>(in), {});
  });
  {
    auto file = OutputFile::Open("--losses", path);
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_TRUE(file->Write(contents).ok());
  }
  reader.join();
  EXPECT_EQ(read, contents);
  EXPECT_TRUE(std::filesystem::is_fifo(path));
}

TEST(OutputFileTest, DevicesAreWrittenDirectly) {
  auto file = OutputFile::Open("--losses", "/dev/null");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_TRUE(file->Write("text").ok());
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
}

History Steps(int count, int64_t warm_up = History::kWarmUp) {
  History history = {.tokens_per_step = 100, .warm_up = warm_up};
  for (int i = 1; i <= count; ++i) {
    history.Add({.report = {.step = i,
                            .applied = i != 2,
                            .skipped_steps = i > 1,
                            .loss = 6.0 - i,
                            .gradient_norm = 0.5,
                            .loss_scale = 2,
                            .learning_rate = 0.001},
                 .seconds = i < 3 ? 100.0 : 0.5});
  }
  history.held_out.push_back({.step = count, .loss = 3.5});
  return history;
}
History ThreeSteps() {
  return Steps(3);
}

TEST(HistoryTest, SpeedLeavesOutTheFirstTwoStepsAndAtMostHalfOfFew) {
  EXPECT_DOUBLE_EQ(ThreeSteps().TokensPerSecond(), 200);
  EXPECT_DOUBLE_EQ(Steps(2).TokensPerSecond(), 1);
  EXPECT_EQ(Steps(0).TokensPerSecond(), 0);
  for (const auto& [steps, warm_up] : {std::pair(1, 0), {2, 1}, {3, 1}, {4, 2}, {1000, 2}})
    EXPECT_EQ(History::WarmUp(steps), warm_up) << steps;
  EXPECT_DOUBLE_EQ(Steps(3, History::WarmUp(3)).TokensPerSecond(), 200 / 100.5);
}

// If no file has a line for every step, memory does not grow with the number of steps.
TEST(HistoryTest, StepsThatNothingWritesAreNotKept) {
  History history = {.tokens_per_step = 100, .keeps_steps = false};
  for (int i = 1; i <= 5; ++i)
    history.Add({.report = {.step = i, .loss = 6.0 - i}, .seconds = 0.5});
  EXPECT_TRUE(history.steps.empty());
  EXPECT_EQ(history.finished, 5);
  EXPECT_EQ(history.last.loss, 1);
  EXPECT_DOUBLE_EQ(history.TokensPerSecond(), 200);
}

constexpr char kHeader[] =
    "step,loss,gradient_norm,learning_rate,loss_scale,applied,tokens_per_second\n";

class LossesFileTest : public testing::Test {
 protected:
  absl::Status Run(int64_t finished, int64_t last) {
    auto file = LossesFile::Open(path_);
    if (!file.ok()) return file.status();
    absl::Status status = file->Begin(finished);
    if (!status.ok()) return status;
    for (int64_t step = finished + 1; step <= last; ++step)
      status.Update(file->Add(ThreeSteps().steps[static_cast<size_t>(step - 1)], 100));
    status.Update(file->Sync());
    return status;
  }
  // The limit of a file's size stands for a full disk.
  template <class Work>
  void ExpectFull(rlim_t bytes, const Work& work) {
    std::signal(SIGXFSZ, SIG_IGN);
    rlimit limit = {};
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
    const rlim_t before = std::exchange(limit.rlim_cur, bytes);
    setrlimit(RLIMIT_FSIZE, &limit);
    const absl::Status full = work();
    limit.rlim_cur = before;
    setrlimit(RLIMIT_FSIZE, &limit);
    EXPECT_THAT(std::string(full.message()), HasSubstr("--losses " + path_ + ": writing failed"));
  }

  ScratchFiles files_;
  const std::string path_ = files_.Path("losses.csv");
  const std::string one_ = "1,5,0.5,0.001,2,1,1.0\n", two_ = "2,4,0.5,0.001,2,0,1.0\n",
                    three_ = "3,3,0.5,0.001,2,1,200.0\n";
};

TEST_F(LossesFileTest, HasAHeaderAndEachLineAtOnce) {
  auto file = LossesFile::Open(path_);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE(file->Begin(0).ok());
  EXPECT_EQ(files_.Read("losses.csv"), kHeader);
  ASSERT_TRUE(file->Add(ThreeSteps().steps[0], 100).ok());
  EXPECT_EQ(files_.Read("losses.csv"), kHeader + one_);
  ASSERT_TRUE(file->Add(ThreeSteps().steps[1], 100).ok());
  EXPECT_EQ(files_.Read("losses.csv"), kHeader + one_ + two_);
}

TEST_F(LossesFileTest, AResumeKeepsTheLinesBeforeItsStep) {
  const std::string whole = kHeader + one_ + two_ + three_;
  struct Case {
    std::string there;
    int64_t finished;
    std::string expected;
  };
  for (const Case& c :
       {Case{kHeader + one_, 1, whole}, Case{whole, 1, whole}, Case{whole, 3, whole},
        Case{whole, 0, whole}, Case{"", 0, whole},
        Case{kHeader + one_ + "2,4,0.", 1, whole},                 // killed in the line
        Case{kHeader + one_ + std::string(4096, '\0'), 1, whole},  // the machine stopped
        Case{kHeader + one_ + two_ + "9,9\n10,", 1, whole},        // of a later checkpoint
        Case{"step,lo", 0, whole}, Case{"step,lo", 2, kHeader + three_},
        Case{"", 2, kHeader + three_}, Case{kHeader + two_, 2, kHeader + two_ + three_}}) {
    files_.Write("losses.csv", c.there);
    EXPECT_TRUE(Run(c.finished, 3).ok());
    EXPECT_EQ(files_.Read("losses.csv"), c.expected) << c.there << " after " << c.finished;
  }
}

TEST_F(LossesFileTest, AnotherFileIsRefusedAndStays) {
  for (const std::string& there :
       {std::string("notes"), std::string("step,loss\n1,2\n"), kHeader + one_ + "notes\n"}) {
    files_.Write("losses.csv", there);
    const absl::Status status = Run(2, 3);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << there;
    EXPECT_THAT(std::string(status.message()), HasSubstr("--losses " + path_ + ": line "));
    EXPECT_EQ(files_.Read("losses.csv"), there);
  }
}

TEST_F(LossesFileTest, ARunThatDoesNotBeginChangesNothing) {
  { ASSERT_TRUE(LossesFile::Open(path_).ok()); }
  EXPECT_EQ(files_.Count(), 0u);
  files_.Write("losses.csv", kHeader + one_);
  { ASSERT_TRUE(LossesFile::Open(path_).ok()); }
  EXPECT_EQ(files_.Read("losses.csv"), kHeader + one_);
}

TEST_F(LossesFileTest, ALineThatDoesNotFitComesLaterOrNotAtAll) {
  auto file = LossesFile::Open(path_);
  ASSERT_TRUE(file.ok() && file->Begin(0).ok());
  ExpectFull(sizeof(kHeader) + 5, [&] { return file->Add(ThreeSteps().steps[0], 100); });
  EXPECT_EQ(files_.Read("losses.csv"), kHeader);
  EXPECT_TRUE(file->Add(ThreeSteps().steps[1], 100).ok());
  EXPECT_EQ(files_.Read("losses.csv"), kHeader + one_ + two_);
}

// A few more lines would fit.
TEST_F(LossesFileTest, AResumeOnADiskThatIsStillFullFailsBeforeItsFirstStepAndKeepsTheLines) {
  files_.Write("losses.csv", kHeader + one_ + two_);
  ExpectFull(4096, [&] { return LossesFile::Open(path_)->Begin(2); });
  EXPECT_EQ(files_.Read("losses.csv"), kHeader + one_ + two_);
  EXPECT_TRUE(Run(2, 3).ok());
  EXPECT_EQ(files_.Read("losses.csv"), kHeader + one_ + two_ + three_);
}

TEST(CurveTest, DrawsLossesWithoutNaNsAndNamesModelDataAndTheLastLosses) {
  History history = ThreeSteps();
  history.steps[1].report.loss = std::numeric_limits<double>::quiet_NaN();
  const std::string svg =
      CurveSvg(history, {.model = "GPT, 1 layer", .data = "400 bytes of a<b>&\xff"});
  EXPECT_THAT(svg, testing::StartsWith("<svg "));
  for (const std::string& each : {svg, CurveSvg({}, {})}) {
    EXPECT_THAT(each, testing::EndsWith("</svg>\n"));
    EXPECT_THAT(each, testing::Not(HasSubstr("nan")));
  }
  for (const char* drawn :
       {"<polyline", "<circle", ">GPT, 1 layer<", ">400 bytes of a&lt;b&gt;&amp;\\xff<",
        ">loss 3.0000 after step 3<", ">held-out loss 3.5000 after step 3<"})
    EXPECT_THAT(svg, HasSubstr(drawn));
}

TEST(DigestTest, HashesNameShapeAndValuesInOrder) {
  ParameterDigest digest;
  const int64_t shape[] = {2, 1};
  const float values[] = {1.0f, -2.5f};
  digest.Begin("w", shape);
  digest.Add({values, 1});
  digest.Add({values + 1, 1});
  // printf 'w\0\2\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\0\0\200\77\0\0\40\300' | sha256sum
  EXPECT_EQ(digest.Finish(), "010bb1760b0630c0d2a952c7b248d24596c18014bb52ff829c88fe137ca64d4a");
  EXPECT_EQ(ParameterDigest().Finish(),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

TEST(SummaryTest, HasEveryField) {
  const Summary summary = {
      .config_json = R"({"zero_optimization": {"stage": 3}})",
      .version = "1.2.3",
      .parameters = 42,
      .ranks = 2,
      .usage = {.memory = {{.state = StateClass::kMaster,
                            .tier = Tier::kDevice,
                            .predicted_bytes = 8,
                            .peak_bytes = 9}},
                .communication = {{.operation = "gather", .predicted_bytes = 5, .bytes = 6}},
                .traffic = {{.state = StateClass::kOptimizer,
                             .tier = Tier::kNvme,
                             .direction = Direction::kWrite,
                             .predicted_bytes = 7,
                             .bytes = 7}}},
      .resident = ResidentRow{.before_bytes = 10, .predicted_bytes = 30, .peak_bytes = 31},
      .graphs = {.most = 6, .kept = 4, .launches = 40, .given_up = ""},
      .products = "abA",
      .parameter_digest = "abc"};
  History history = ThreeSteps();
  history.steps[1].report.loss = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(nlohmann::json::parse(SummaryJson(summary, history)), nlohmann::json::parse(R"({
      "version": "1.2.3", "config": {"zero_optimization": {"stage": 3}}, "ranks": 2, "parameters": 42, "steps": 3,
      "resumed_after_steps": 0, "tokens_per_step": 100, "tokens_per_second": 200.0, "skipped_steps": 1,
      "stopped": null, "parameter_digest": "abc", "products": "abA",
      "cuda_graphs": {"most": 6, "kept": 4, "launches": 40, "given_up": ""},
      "memory": [{"class": "master", "tier": "device", "predicted_bytes": 8, "peak_bytes": 9}],
      "traffic": [{"class": "optimizer", "tier": "nvme", "direction": "write", "predicted_bytes": 7, "bytes": 7}],
      "plan": {"operations": 0, "bytes": 0}, "traffic_is_steady": false,
      "resident": {"before_bytes": 10, "predicted_bytes": 30, "peak_bytes": 31},
      "communication": [{"operation": "gather", "predicted_bytes": 5, "bytes": 6}],
      "held_out": [{"step": 3, "loss": 3.5}], "losses": [5.0, null, 3.0], "gradient_norms": [0.5, 0.5, 0.5],
      "learning_rates": [0.001, 0.001, 0.001]})"));
}

TEST(SummaryTest, SaysWhichSignalStoppedTheRunAndLeavesOutCountsThatTheSystemLacks) {
  Summary summary;
  summary.config_json = "{}";
  History history = ThreeSteps();
  history.stopped = {.by = "SIGINT", .during = "evaluation", .steps = 3, .after = "step 3 of 9"};
  const auto json = nlohmann::json::parse(SummaryJson(summary, history));
  EXPECT_EQ(json["stopped"],
            nlohmann::json::parse(R"({"by": "SIGINT", "during": "evaluation", "after_steps": 3})"));
  EXPECT_FALSE(json.contains("resident"));
}

TEST(ProgressTest, TheLineShowsTheProgress) {
  History history = ThreeSteps();
  EXPECT_EQ(ProgressLine(history, 403, 3 << 20),
            "step 3/403  loss 3.0000  500 ms a step  200 tokens/s  3.0 MiB a rank  skipped 1  "
            "3m20s left");
  history.warm_seconds = 0.0042;
  history.scales_loss = true;
  EXPECT_EQ(ProgressLine(history, 403, 3 << 20),
            "step 3/403  loss 3.0000  4.2 ms a step  23810 tokens/s  3.0 MiB a rank  loss scale 2  "
            "skipped 1  2s left");
}

TEST(ProgressTest, PlainLinesComeEachTwentiethAndEachMinuteWithTheRateSinceTheLast) {
  PlainLines lines(2000);
  EXPECT_EQ(lines.Due(7, 1000), 0);  // the first
  EXPECT_EQ(lines.Due(8, 1059), std::nullopt);
  EXPECT_EQ(lines.Due(13, 1060), 0.1);
  EXPECT_EQ(lines.Due(100, 1061), 87);
  EXPECT_EQ(lines.Due(101, 1062), std::nullopt);
  EXPECT_EQ(lines.Due(102, 1121), 2 / 60.0);
  EXPECT_EQ(lines.Due(2000, 1122), 1898);
}

TEST(ProgressTest, GeneratedTextCannotSteerATerminal) {
  EXPECT_EQ(Printable("a\n\x1b[2J\xff~"), "a\n\\x1b[2J\\xff~");
}

TEST(MemoryTableTest, SumsTheRowsOfEachTier) {
  constexpr uint64_t kMiB = 1 << 20;
  using enum StateClass;
  const std::string table = MemoryTable({{kMaster, Tier::kDevice, kMiB, 0, 2 * kMiB},
                                         {kGather, Tier::kDevice, kMiB, 0, kMiB},
                                         {kMaster, Tier::kNvme, 5 * kMiB, 0, 5 * kMiB},
                                         {kDriver, Tier::kDevice, 0, 0, 7 * kMiB}});
  EXPECT_THAT(table, HasSubstr("master"));
  EXPECT_THAT(table, testing::ContainsRegex("all +device +2.00 +3.00"));
  EXPECT_THAT(table, testing::ContainsRegex("all +nvme +5.00 +5.00"));
  EXPECT_THAT(table, testing::Not(testing::ContainsRegex("all +cpu")));
  EXPECT_THAT(table, testing::ContainsRegex("driver +device +- +7.00"));
}

Config OnNvme(bool parameters, bool states, int64_t micro_batches) {
  Config config;
  config.compute = DType::kBFloat16;
  config.zero.stage = 3;
  config.gradient_accumulation_steps = micro_batches;
  if (parameters) config.zero.offload_param.device = Tier::kNvme;
  if (states) config.zero.offload_optimizer.device = Tier::kNvme;
  return config;
}

TEST(TrafficTest, TheComparisonFollowsFromTheConfiguration) {
  const auto expect = [](const Config& config, double least, double deepspeed) {
    const auto schemes = NvmeSchemes(config);
    ASSERT_TRUE(schemes.has_value());
    EXPECT_EQ(schemes->least, least);
    EXPECT_EQ(schemes->deepspeed, deepspeed);
  };
  expect(OnNvme(true, true, 4), 26, 32 + 18);
  expect(OnNvme(false, true, 4), 20, 32);
  expect(OnNvme(true, false, 1), 6, 6);
  Config other = OnNvme(true, true, 4);
  other.ebb.stochastic_rounding = true;
  expect(other, 22, 32 + 18);
  other.optimizer.states = OptimizerStates::k8Bit;
  expect(other, 10.0625, 32 + 18);
  other.optimizer.states = OptimizerStates::kBFloat16;
  expect(other, 14, 32 + 18);
  other = OnNvme(true, true, 1);
  other.compute = DType::kFloat16;
  expect(other, 28, 32 + 6);
  other.compute = DType::kFloat32;
  EXPECT_FALSE(NvmeSchemes(other).has_value());
  EXPECT_FALSE(NvmeSchemes(OnNvme(false, false, 1)).has_value());
}

TEST(TrafficTest, TheTableCountsPerParameterAndSumsTheDisks) {
  constexpr uint64_t kMiB = 1 << 20;
  using enum StateClass;
  const std::string table =
      TrafficTable({{kGradient, Tier::kCpu, Direction::kWrite, 2 * kMiB, 2 * kMiB},
                    {kOptimizer, Tier::kNvme, Direction::kRead, 8 * kMiB, 8 * kMiB},
                    {kOptimizer, Tier::kNvme, Direction::kWrite, 8 * kMiB, 8 * kMiB}},
                   OnNvme(false, true, 1), kMiB);
  EXPECT_THAT(table, testing::ContainsRegex("gradient +cpu +write +2.00 +2.00 +2.00"));
  EXPECT_THAT(table,
              HasSubstr("16.00 (read 8.00, written 8.00); least possible with nothing in RAM 20; "
                        "DeepSpeed's scheme 32\n"));
}

}  // namespace
}  // namespace ebb::gpt::reports_test
