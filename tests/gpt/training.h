// Whole runs of gpt's ranks as threads, on a small model and text.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "command_line/options.h"
#include "nlohmann/json.hpp"
#include "ops_fixture.h"
#include "run.h"

namespace ebb::gpt {

struct SmallRun {
  int ranks = 2, stage = 3, threads = 1;
  DType dtype = DType::kFloat32;
  int64_t steps = 3, micro_batch = 1, accumulation = 1;
  uint64_t seed = 1;
  bool recompute = false;
  double learning_rate = 0.01;
  std::string ebb = "{}", optimizer = R"({"type": "AdamW", "params": {}})";
  int64_t width = 16;
  Tier parameters = Tier::kDevice, states = Tier::kDevice;
  bool split_master = false, stochastic_rounding = false;
  std::string device = "cpu";
  CudaGraphs graphs = CudaGraphs::kOff;
  GptShape shape = {.layers = 2, .heads = 2, .context = 12, .vocabulary = 256};  // of this width
  int tensor = 1;
  bool sequence_parallel = false;
  double clipping = 0;
};

// The memory that was predicted. The driver's bytes are measured.
void ExpectMemoryAsPredicted(const nlohmann::json& summary);
// The bytes that a rank has received from others.
void ExpectCommunicationAsPredicted(const nlohmann::json& summary);
// The bits of `expected`, with the memory and all bytes moved that were predicted.
void ExpectSameAsPredicted(const nlohmann::json& summary, const nlohmann::json& expected);

// Calls `of_rank` in a thread for each rank. An error fails the test. Returns the summary that they
// have written; null: none.
nlohmann::json RunRanks(const SmallRun& recipe,
                        absl::FunctionRef<absl::Status(World, const Run&)> of_rank);
nlohmann::json Train(const SmallRun& recipe, std::atomic<int>* ranks_stopped = nullptr);
std::string Digest(const SmallRun& recipe);

// Runs on each device and dtype. Skips a GPU that is not there.
class DeviceRunsTest : public ::testing::TestWithParam<OpsCase> {
 protected:
  void SetUp() override {
    if (GetParam().kind == DeviceKind::kCpu) return;
    if (const auto devices = Device::CudaDevices(); !devices.ok()) GTEST_SKIP() << devices.status();
  }
  static SmallRun OnDevice(SmallRun recipe) {
    recipe.dtype = GetParam().compute;
    recipe.device = GetParam().kind == DeviceKind::kCuda ? "cuda" : "cpu";
    return recipe;
  }
};

}  // namespace ebb::gpt
