#include "training.h"

#include <filesystem>
#include <vector>

#include "command_line/configuration.h"
#include "data/text.h"
#include "gtest/gtest.h"
#include "report/reports.h"
#include "scratch_files.h"

namespace ebb::gpt {

void ExpectMemoryAsPredicted(const nlohmann::json& summary) {
  for (const auto& row : summary["memory"]) {
    if (row["class"] != "driver") {
      EXPECT_EQ(row["predicted_bytes"], row["peak_bytes"]) << row;
    }
  }
}

void ExpectCommunicationAsPredicted(const nlohmann::json& summary) {
  for (const auto& row : summary["communication"])
    EXPECT_EQ(row["predicted_bytes"], row["bytes"]) << row;
}

void ExpectSameAsPredicted(const nlohmann::json& summary, const nlohmann::json& expected) {
  EXPECT_EQ(summary["parameter_digest"], expected["parameter_digest"]);
  EXPECT_EQ(summary["losses"], expected["losses"]);
  ExpectMemoryAsPredicted(summary);
  for (const auto& row : summary["traffic"]) EXPECT_EQ(row["predicted_bytes"], row["bytes"]) << row;
  ExpectCommunicationAsPredicted(summary);
}

nlohmann::json RunRanks(const SmallRun& recipe,
                        absl::FunctionRef<absl::Status(World, const Run&)> of_rank) {
  ScratchFiles files;
  Options options;
  options.shape = recipe.shape;
  options.shape.width = recipe.width;
  options.tensor = recipe.tensor;
  options.sequence_parallel = recipe.sequence_parallel;
  options.ranks = recipe.ranks;
  options.threads = recipe.threads;
  options.device = recipe.device;
  options.cuda_graphs = recipe.graphs;
  options.products = kDefaultProducts;  // measured choices may have other bits
  options.stage = recipe.stage;
  options.dtype = recipe.dtype;
  options.steps = recipe.steps;
  options.seed = recipe.seed;
  options.recompute = recipe.recompute;
  options.sample_bytes = 5;
  options.split_master = recipe.split_master;
  options.stochastic_rounding = recipe.stochastic_rounding;
  options.offload_param = recipe.parameters;
  options.offload_optimizer = recipe.states;
  options.nvme_paths = {files.Path("nvme")};
  std::filesystem::create_directory(options.nvme_paths.front());
  options.summary_file = files.Path("summary.json");
  auto optimizer = nlohmann::json::parse(recipe.optimizer);
  optimizer["params"]["lr"] = recipe.learning_rate;
  options.config_file = files.Write(
      "config.json", nlohmann::json{{"train_micro_batch_size_per_gpu", recipe.micro_batch},
                                    {"gradient_accumulation_steps", recipe.accumulation},
                                    {"gradient_clipping", recipe.clipping},
                                    {"zero_optimization",
                                     {{"stage", 0},
                                      {"stage3_param_persistence_threshold", 0},
                                      {"offload_param", {{"max_in_cpu", 0}}}}},
                                    {"fp16", {{"enabled", false}, {"initial_scale_power", 8}}},
                                    {"optimizer", optimizer},
                                    {"ebb", nlohmann::json::parse(recipe.ebb)}}
                         .dump());
  std::vector<uint8_t> bytes;
  for (int i = 0; i < 600; ++i)
    bytes.push_back(static_cast<uint8_t>("the quick brown fox "[i * i % 20]));
  const auto text = Text::FromBytes(bytes, options.shape.context);
  const auto config = ResolveConfig(options);
  auto reports = Reports::Open(options, *config);
  EXPECT_TRUE(text.ok() && config.ok() && reports.ok())
      << text.status() << config.status() << reports.status();
  const absl::Status status = RunThreads(recipe.ranks, [&](World world) {
    return of_rank(world,
                   {.options = options, .config = *config, .text = *text, .reports = *reports});
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(std::filesystem::is_empty(options.nvme_paths.front()));
  const std::string summary = files.Read("summary.json");
  return summary.empty() || !status.ok() ? nlohmann::json() : nlohmann::json::parse(summary);
}

nlohmann::json Train(const SmallRun& recipe, std::atomic<int>* ranks_stopped) {
  return RunRanks(recipe, [&](const World& world, const Run& run) {
    const auto stopped = RunRank(world, run);
    if (ranks_stopped != nullptr && stopped.ok()) *ranks_stopped += stopped->empty() ? 0 : 1;
    return stopped.status();
  });
}

std::string Digest(const SmallRun& recipe) {
  return Train(recipe)["parameter_digest"];
}

}  // namespace ebb::gpt
