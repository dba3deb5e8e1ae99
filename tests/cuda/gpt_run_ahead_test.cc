// The GPT's trainer on a GPU, where the host is a step ahead of the known outcome: when it waits,
// and that the output equals that of a run which waits for every step.
#include <cublasLt.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../gpt/scratch_files.h"
#include "command_line/configuration.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/sharding/plan.h"
#include "nccl_shares_device.h"
#include "nlohmann/json.hpp"
#include "run.h"
#include "stand_in.h"
#include "tests/trace/trace_events.h"
#include "trainer.h"

namespace ebb::gpt::gpt_run_ahead_test {
namespace {

constexpr int kRanks = 2;

class GptRunsAheadTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { setenv("EBB_LOG_LEVEL", "error", /*overwrite=*/0); }
  void SetUp() override {
    options_.shape = {.layers = 2, .heads = 2, .width = 16, .context = 12, .vocabulary = 256};
    options_.ranks = kRanks;
    options_.threads = 1;
    options_.device = "cuda";
    options_.products = kDefaultProducts;
    options_.sample_bytes = 0;
    std::vector<uint8_t> bytes;
    for (int i = 0; i < 600; ++i)
      bytes.push_back(static_cast<uint8_t>("the quick brown fox "[i * i % 20]));
    text_ = Text::FromBytes(bytes, options_.shape.context);
    ASSERT_TRUE(text_.ok()) << text_.status();
  }
  void TearDown() override { stand_in::Reset(); }

  Config Resolve(nlohmann::json config, int micro_batches = 2) {
    config["train_micro_batch_size_per_gpu"] = 1;
    config["gradient_accumulation_steps"] = micro_batches;
    config["zero_optimization"] = {{"stage", 3}, {"stage3_param_persistence_threshold", 0}};
    options_.config_file = files_.Write("config.json", config.dump());
    absl::StatusOr<Config> resolved = ResolveConfig(options_);
    EXPECT_TRUE(resolved.ok()) << resolved.status();
    return *std::move(resolved);
  }

  const ScratchFiles files_;
  Options options_;
  absl::StatusOr<Text> text_;
};

// cuBLASLt's workspace comes after the tokens, for any number of them.
TEST_F(GptRunsAheadTest, TheWorkspaceOfCublasLtIsAligned) {
  for (const int micro_batches : {1, 2, 3}) {
    const Config config = Resolve({}, micro_batches);
    const absl::Status status = RunThreads(kRanks, [&](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(Device device, Device::Cuda());
      return Trainer::Create(world, std::move(device), options_, config, *text_).status();
    });
    EXPECT_TRUE(status.ok()) << micro_batches << " micro-batches: " << status;
  }
}

// A library's loading at a first launch waits for the device, where the other rank's gather may
// wait for this thread.
TEST_F(GptRunsAheadTest, NoKernelIsLaunchedForTheFirstTimeInAStep) {
  const testing::NcclSharesDevice shares;
  const Config config = Resolve({});
  stand_in::LoadProductsLazily();
  const absl::Status status = RunThreads(kRanks, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Device device, Device::Cuda());
    EBB_ASSIGN_OR_RETURN(const std::unique_ptr<Trainer> trainer,
                         Trainer::Create(world, std::move(device), options_, config, *text_));
    const auto ignore = [](const StepReport&) {};
    for (int64_t step = 0; step < 2; ++step) EBB_RETURN_IF_ERROR(trainer->Step(step, ignore));
    return trainer->AwaitReport(ignore);
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(GptRunsAheadTest, AllRanksComputeProductsAsTheFirstHasMeasured) {
  options_.products = kMeasuredProducts;
  // Sums are faster fused, GELUs apart; for plain products the third algorithm is the fastest.
  constexpr int64_t kSecond = 1'000'000'000;
  for (int algorithm = 0; algorithm < stand_in::kProductAlgorithms; ++algorithm) {
    stand_in::SetProductTime(CUBLASLT_EPILOGUE_DEFAULT, algorithm, (9 - algorithm) * kSecond);
    stand_in::SetProductTime(CUBLASLT_EPILOGUE_BIAS, algorithm, (9 - algorithm) * kSecond);
    stand_in::SetProductTime(CUBLASLT_EPILOGUE_BGRADB, algorithm, kSecond * (1 + algorithm));
    stand_in::SetProductTime(CUBLASLT_EPILOGUE_GELU_AUX_BIAS, algorithm, 20 * kSecond);
    stand_in::SetProductTime(CUBLASLT_EPILOGUE_DGELU, algorithm, 20 * kSecond);
  }
  const Config config = Resolve({});
  std::string said[kRanks];
  const auto run = [&] {
    const absl::Status status = RunThreads(kRanks, [&](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(Device device, Device::Cuda());
      EBB_ASSIGN_OR_RETURN(const std::unique_ptr<Trainer> trainer,
                           Trainer::Create(world, std::move(device), options_, config, *text_));
      said[world.rank()] = trainer->products();
      const auto ignore = [](const StepReport&) {};
      EBB_RETURN_IF_ERROR(trainer->Step(0, ignore));
      return trainer->AwaitReport(ignore);
    });
    return status;
  };
  absl::Status status = run();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(said[0], said[1]);
  const std::string mark = "--products ";
  ASSERT_NE(said[0].find(mark), std::string::npos) << said[0];
  const size_t begin = said[0].find(mark) + mark.size();
  const std::string letters = said[0].substr(begin, said[0].find(' ', begin) - begin);
  // Forward: qkv, projection, GELU, down.
  EXPECT_EQ(letters.substr(0, 4), "cccc") << letters;
  EXPECT_NE(letters.find('A'), std::string::npos) << letters;

  options_.products = letters;
  status = run();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(said[0], "products as given");
  options_.products = letters + "a";
  status = run();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
}

// The second rank waits for the first one's measurement.
TEST_F(GptRunsAheadTest, AFailureWhileProductsAreMeasuredEndsAllRanks) {
  options_.products = kMeasuredProducts;
  const Config config = Resolve({});
  stand_in::FailCall("cudaEventElapsedTime", cudaErrorInvalidResourceHandle);
  absl::Status seen[kRanks];
  const absl::Status status = RunThreads(kRanks, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Device device, Device::Cuda());
    return seen[world.rank()] =
               Trainer::Create(world, std::move(device), options_, config, *text_).status();
  });
  EXPECT_FALSE(status.ok());
  for (const absl::Status& of_rank : seen) EXPECT_FALSE(of_rank.ok());
}

// The compute stream stands still until the host first waits. So work that it enqueues before that
// has not run, and the first report must wait.
TEST_F(GptRunsAheadTest, AStepIsInTheQueueBeforeTheHostWaitsForTheOneBefore) {
  const std::string path = files_.Path("trace.json");
  Config config = Resolve({});
  config.ebb.trace = path;
  const absl::Status status = RunThreads(kRanks, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Device device, Device::Cuda());
    EBB_ASSIGN_OR_RETURN(const std::unique_ptr<Trainer> trainer,
                         Trainer::Create(world, std::move(device), options_, config, *text_));
    const int waits = stand_in::HostWaits();
    stand_in::HoldUntilHostWaits(
        static_cast<cudaStream_t>(trainer->engine().compute_stream().native));
    std::vector<int64_t> reported;
    const auto note = [&](const StepReport& report) {
      if (reported.empty()) {
        EXPECT_EQ(stand_in::HostWaits(), waits + 1);
      }
      reported.push_back(report.step);
    };
    EBB_RETURN_IF_ERROR(trainer->Step(0, note));
    EXPECT_EQ(stand_in::HostWaits(), waits);
    EXPECT_TRUE(reported.empty());
    EBB_RETURN_IF_ERROR(trainer->Step(1, note));
    EXPECT_EQ(reported, (std::vector<int64_t>{1}));
    EXPECT_TRUE(trainer->owes_report());
    EBB_RETURN_IF_ERROR(trainer->AwaitReport(note));
    EXPECT_EQ(reported, (std::vector<int64_t>{1, 2}));
    EXPECT_FALSE(trainer->owes_report());
    return trainer->AwaitReport(note);
  });
  ASSERT_TRUE(status.ok()) << status;

  const absl::StatusOr<TraceTracks> tracks = ReadTraceEvents(path);
  ASSERT_TRUE(tracks.ok()) << tracks.status();
  for (int rank = 0; rank < kRanks; ++rank) {
    int64_t enqueued = 0;  // closed scopes up to the second step's last
    for (const TraceSpan& span : tracks->at({rank, 0}).spans)
      if (span.step == 2) enqueued = std::max(enqueued, span.end_ns);
    int reductions = 0;
    for (const TraceSpan& span :
         tracks->at({rank, static_cast<int64_t>(sharding::StreamId::kReduce)}).spans) {
      if (span.step != 1) continue;
      ++reductions;
      EXPECT_GT(span.begin_ns, enqueued) << "rank " << rank << ", " << span.name;
    }
    EXPECT_GT(enqueued, 0);
    EXPECT_GT(reductions, 0);
  }
}

TEST_F(GptRunsAheadTest, AnErrorNamesItsStep) {
  options_.ranks = 1;
  const Config config = Resolve({});
  const absl::Status status = RunThreads(1, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Device device, Device::Cuda());
    EBB_ASSIGN_OR_RETURN(const std::unique_ptr<Trainer> trainer,
                         Trainer::Create(world, std::move(device), options_, config, *text_));
    int64_t last = 0;
    const auto note = [&](const StepReport& report) { last = report.step; };
    for (int64_t step = 0; step < 3; ++step) EBB_RETURN_IF_ERROR(trainer->Step(step, note));
    EXPECT_EQ(last, 2);
    EBB_RETURN_IF_ERROR(trainer->AwaitReport(note));
    stand_in::LoseDevice(cudaErrorIllegalAddress);
    absl::Status lost = trainer->Step(3, note);
    EXPECT_EQ(last, 3);
    return lost;
  });
  EXPECT_NE(status.message().find("in step 4"), absl::string_view::npos) << status;
}

TEST_F(GptRunsAheadTest, HasTheOutputOfARunThatWaitsForEveryStep) {
  options_.products = kDefaultProducts;     // measured choices may differ
  options_.cuda_graphs = CudaGraphs::kOff;  // measuring whether they pay takes seconds
  options_.steps = 5;
  options_.evaluate_every = 3;
  options_.dtype = DType::kFloat16;
  nlohmann::json summaries[2];
  std::string losses[2];
  for (const bool ahead : {false, true}) {
    options_.summary_file = files_.Path("summary.json");
    options_.losses_file = files_.Path("losses.csv");
    // The first scales overflow, and the schedule follows the applied steps.
    const Config config = Resolve(
        {{"fp16", {{"initial_scale_power", 18}, {"hysteresis", 1}, {"loss_scale_window", 2}}},
         {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 0.01}}}}},
         {"scheduler", {{"type", "WarmupLR"}, {"params", {{"warmup_num_steps", 5}}}}},
         {"ebb", {{"asynchronous_step", ahead ? "auto" : "off"}}}},
        /*micro_batches=*/1);
    absl::StatusOr<Reports> reports = Reports::Open(options_, config);
    ASSERT_TRUE(reports.ok()) << reports.status();
    const absl::Status status = RunThreads(kRanks, [&](World world) {
      return RunRank(world,
                     {.options = options_, .config = config, .text = *text_, .reports = *reports})
          .status();
    });
    ASSERT_TRUE(status.ok()) << status;
    nlohmann::json& summary = summaries[ahead];
    summary = nlohmann::json::parse(files_.Read("summary.json"));
    EXPECT_GT(summary["tokens_per_second"], 0);
    EXPECT_EQ(summary["losses"].size(), 5u);
    EXPECT_EQ(summary["held_out"].size(), 2u);
    EXPECT_GT(summary["skipped_steps"], 0);
    EXPECT_LT(summary["skipped_steps"], 4);
    summary.erase("tokens_per_second");
    summary.erase("resident");  // the second run begins with the first one's memory
    summary.erase("plan");      // it says whether a step ends in a wait
    // Ranks that share a device make their communicators at the same time, and each counts what all
    // take meanwhile.
    nlohmann::json& memory = summary["memory"];
    memory.erase(std::remove_if(memory.begin(), memory.end(),
                                [](const nlohmann::json& row) { return row["class"] == "driver"; }),
                 memory.end());
    summary["config"]["ebb"].erase("asynchronous_step");
    std::string line;  // without the tokens per second, which come last
    for (std::istringstream file(files_.Read("losses.csv")); std::getline(file, line);)
      losses[ahead] += line.substr(0, line.rfind(',')) + "\n";
  }
  EXPECT_EQ(summaries[1], summaries[0]);
  EXPECT_EQ(losses[1], losses[0]);
}

}  // namespace
}  // namespace ebb::gpt::gpt_run_ahead_test
