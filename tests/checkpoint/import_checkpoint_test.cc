// Bytes (U8) in the files of other programs: codes of numbers, and buffers beside the parameters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/checkpoint.h"
#include "ebb/runtime/checkpoint/checkpoint_tensors.h"
#include "ebb/runtime/checkpoint/parameter_files.h"
#include "ebb/runtime/checkpoint/safetensors.h"
#include "own_folder.h"
#include "tests/engine/scripted.h"
#include "tests/status.h"

namespace ebb::testing::import_checkpoint_test {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kElements = 4;

class ImportCheckpointTest : public OwnFolderTest {
 protected:
  ImportCheckpointTest() { fs::create_directories(folder_); }

  void Add(const std::string& name, const std::string& dtype, int64_t elements) {
    const int64_t begin = header_.tensors.empty() ? 0 : header_.tensors.back().end;
    header_.tensors.push_back({.name = name,
                               .dtype = dtype,
                               .shape = {elements},
                               .begin = begin,
                               .end = begin + elements * (dtype == "F32" ? 4 : 1)});
  }
  // The tensors are zeros.
  std::string Write() const {
    const std::string path = folder_ + "/model.safetensors",
                      prefix = SafetensorsPrefix(header_, 64);
    std::ofstream(path, std::ios::binary) << prefix;
    fs::resize_file(path, prefix.size() + static_cast<size_t>(header_.tensors.back().end));
    return path;
  }
  absl::StatusOr<std::string> Import() const {
    EBB_ASSIGN_OR_RETURN(const std::unique_ptr<TensorSource> source, OpenTensorSource(Write()));
    return ImportCheckpoint(*source, folder_ + "/runs", [](int64_t) {});
  }

  // An engine of one parameter 'w', whose initial values are 7.
  static absl::Status WithEngine(std::optional<DType> dtype,
                                 const std::function<absl::Status(Engine&)>& body) {
    ModelSpec model;
    const UnitId unit = model.AddUnit("unit");
    model.Add(unit, {.name = "w",
                     .shape = {kElements},
                     .init = Constant(7),
                     .trainable = dtype != DType::kInt8,
                     .compute = dtype});
    model.forward = {{.unit = unit}};
    return RunThreads(1, [&](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(Engine engine,
                           Engine::Create(world, Device::Cpu(1), model, ConfigFor({.world = 1})));
      return body(engine);
    });
  }
  static absl::Status ExpectZeros(Engine& engine) {
    std::vector<float> values(kElements);
    EBB_RETURN_IF_ERROR(engine.Gather(ParameterId{0}, StateClass::kMaster, values));
    EXPECT_EQ(values, std::vector<float>(kElements, 0.0f));
    return absl::OkStatus();
  }
  SafetensorsHeader header_;
};

TEST_F(ImportCheckpointTest, BytesAreNoNumbersAndNumbersAreNoBytes) {
  Add("w", "U8", kElements);
  absl::Status status = WithEngine(
      DType::kBFloat16, [&](Engine& engine) { return ImportParameters(engine, Write()); });
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition,
                               "'w' is bytes there and numbers in the model"));
  header_ = {};
  Add("w", "F32", kElements);
  status =
      WithEngine(DType::kInt8, [&](Engine& engine) { return ImportParameters(engine, Write()); });
  EXPECT_THAT(status, Says("'w' is numbers there and bytes in the model"));
}

TEST_F(ImportCheckpointTest, BytesAreParametersOfBytes) {
  Add("w", "U8", kElements);
  const absl::Status status = WithEngine(DType::kInt8, [&](Engine& engine) -> absl::Status {
    EBB_RETURN_IF_ERROR(ImportParameters(engine, Write()));
    return ExpectZeros(engine);
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(ImportCheckpointTest, BuffersThatTheModelLacksAreSkipped) {
  Add("w", "F32", kElements);
  Add("mask", "U8", 9);
  Add("unfilled", "U8", 0);
  ASSERT_OK_AND_ASSIGN(const auto imported, Import());
  const absl::Status status = WithEngine(std::nullopt, [&](Engine& engine) -> absl::Status {
    EBB_RETURN_IF_ERROR(LoadCheckpoint(engine, imported, {.states = false}).status());
    return ExpectZeros(engine);
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(ImportCheckpointTest, NumbersThatTheModelLacksAreNamed) {
  Add("w", "F32", kElements);
  Add("more", "F32", 9);
  ASSERT_OK_AND_ASSIGN(const auto imported, Import());
  const absl::Status status = WithEngine(
      std::nullopt, [&](Engine& engine) { return LoadCheckpoint(engine, imported).status(); });
  EXPECT_THAT(status, Says("it has 'more', which the model lacks"));
}

// A state of another program, whose numbers are zeros.
class StateSource : public TensorSource {
 public:
  explicit StateSource(DType dtype) {
    description_ = {.kind = "a test's", .path = "other.pt"};
    tensors_ = {{.name = "w", .shape = {kElements}},
                {.name = "w", .state = "exp_avg", .dtype = dtype, .shape = {kElements}}};
  }
  absl::Status Read(size_t, int64_t, std::span<float> values) override {
    std::fill(values.begin(), values.end(), 0.0f);
    return absl::OkStatus();
  }
};

TEST_F(ImportCheckpointTest, CodesOfStatesAreRefused) {
  const std::string runs = folder_ + "/runs";
  StateSource codes(DType::kInt8), numbers(DType::kFloat32);
  EXPECT_THAT(ImportCheckpoint(codes, runs, [](int64_t) {}).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "has bytes (uint8), which are codes of another optimizer: decode them"));
  EXPECT_FALSE(fs::exists(runs));
  EXPECT_TRUE(ImportCheckpoint(numbers, runs, [](int64_t) {}).ok());
}

TEST_F(ImportCheckpointTest, NumbersWithoutElementsAreRefused) {
  Add("w", "F32", kElements);
  Add("none", "F32", 0);
  EXPECT_THAT(Import().status(), Says("has no elements"));
}

}  // namespace
}  // namespace ebb::testing::import_checkpoint_test
