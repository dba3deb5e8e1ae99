// Checkpoints of whole models that are cut over tensor ranks: each is loaded by every other number
// of data and tensor ranks, stage and tier, with the same bits. A gradient is a function of name,
// element of the whole, and step, so training is the same on every mesh.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/checkpoint.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/checkpoint/parameter_files.h"
#include "ebb/runtime/checkpoint/tensor_source.h"
#include "ebb/sharding/split.h"
#include "own_folder.h"
#include "tests/ranks.h"

namespace ebb::testing::tensor_checkpoint_test {
namespace {

struct MeshWay {
  int data = 1, tensor = 1, stage = 0;
  Tier tier = Tier::kDevice;
  OptimizerStates states = OptimizerStates::kFloat32;

  std::string name() const {
    return absl::StrCat("data ", data, " x tensor ", tensor, ", stage ", stage, ", ",
                        std::string(Name(tier)));
  }
};

Config ConfigOf(const MeshWay& way) {
  Config config;
  config.compute = DType::kFloat32;
  config.micro_batch_size = 1;
  config.optimizer.type = OptimizerType::kAdamW;
  config.optimizer.learning_rate = 0.01;
  config.optimizer.states = way.states;
  config.optimizer.min_8bit_size = 100;
  config.zero.stage = way.stage;
  config.zero.offload_param.max_in_cpu = 0;
  config.zero.param_persistence_threshold = 0;
  if (way.stage > 0) config.zero.offload_optimizer.device = way.tier;
  if (way.stage == 3) config.zero.offload_param.device = way.tier;
  config.zero.offload_optimizer.nvme_paths =
      config.zero.offload_param.nvme_paths = {::testing::TempDir()};
  config.ebb.mesh.tensor = way.tensor;
  config.ebb.timeout_seconds = 120;
  return config;
}

// Cut by rows, by columns, in parts of heads, in the middle; whole; and frozen.
ModelSpec Model() {
  ModelSpec model;
  const UnitId first = model.AddUnit("first"), second = model.AddUnit("second");
  const auto add = [&](UnitId unit, const char* name, std::vector<int64_t> shape,
                       std::optional<Split> split, bool trainable = true) {
    model.Add(unit, {.name = name,
                     .shape = std::move(shape),
                     .init = Normal(1, 5),
                     .trainable = trainable,
                     .split = std::move(split)});
  };
  add(first, "qkv", {30, 17}, Split{.dimension = 0, .parts = {18, 6, 6}, .multiple = 2});
  add(first, "bias", {30}, Split{.dimension = 0, .parts = {18, 6, 6}, .multiple = 2});
  add(first, "norm", {17}, {});
  add(second, "down", {23, 40}, Split{.dimension = 1});
  add(second, "experts", {3, 7, 11}, Split{.dimension = 1});
  add(second, "base", {9, 8}, Split{.dimension = 1}, /*trainable=*/false);
  model.forward = {{.unit = first}, {.unit = second}};
  return model;
}

absl::Status Train(Engine& engine, int from, int to) {
  const ModelSpec& model = engine.model();
  for (int number = from; number < to; ++number) {
    Step step = engine.BeginStep();
    for (const Visit& visit : model.forward)
      if (!visit.of_part) step.Forward(visit.unit);
    for (auto visit = model.forward.rbegin(); visit != model.forward.rend(); ++visit) {
      if (visit->of_part) continue;
      BackwardScope scope = step.Backward(visit->unit);
      for (const ParameterId p : WithParts(model, visit->unit)) {
        if (!model[p].trainable) continue;
        const std::span<float> gradient = scope.gradient(p).as<float>();
        EBB_RETURN_IF_ERROR(
            ForEachSlice(model, p, 0, std::ssize(gradient), [&](const Slice& slice, int64_t local) {
              for (int64_t i = slice.begin; i < slice.end; ++i)
                gradient[static_cast<size_t>(local + i - slice.begin)] +=
                    std::sin(static_cast<float>(i) * 0.7f + static_cast<float>(number) +
                             static_cast<float>(static_cast<int>(p)));
              return absl::OkStatus();
            }));
      }
    }
    EBB_RETURN_IF_ERROR(step.Finish());
    EBB_RETURN_IF_ERROR(engine.Report().status());
  }
  return absl::OkStatus();
}

absl::Status OnMesh(const MeshWay& way, const std::function<absl::Status(Engine&)>& body) {
  return RunThreads(way.data * way.tensor, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Engine engine,
                         Engine::Create(world, Device::Cpu(1), Model(), ConfigOf(way)));
    return body(engine);
  });
}

// Whole arrays of all ranks.
using State = std::map<std::string, std::vector<float>>;
class WholeState {
 public:
  absl::Status Add(Engine& engine) {
    for (const char* const state : {"", "exp_avg", "exp_avg_sq"}) {
      const bool masters = *state == 0;
      EBB_RETURN_IF_ERROR(engine.Read(
          masters ? StateClass::kMaster : StateClass::kOptimizer,
          [&](const Slice& slice, std::span<const float> values) {
            const std::scoped_lock lock(mutex_);
            std::vector<float>& all = values_[absl::StrCat(state, " of ", slice.name)];
            all.resize(static_cast<size_t>(Elements(slice.shape)), -12345);
            std::copy(values.begin(), values.end(), all.begin() + slice.begin);
            return absl::OkStatus();
          },
          state));
    }
    return absl::OkStatus();
  }
  const State& values() const { return values_; }

 private:
  std::mutex mutex_;
  State values_;
};

State TrainAndSave(const MeshWay& way, int steps, const std::string& folder) {
  WholeState state;
  EXPECT_OK(OnMesh(way, [&](Engine& engine) -> absl::Status {
    EBB_RETURN_IF_ERROR(Train(engine, 0, steps));
    EBB_RETURN_IF_ERROR(state.Add(engine));
    return SaveCheckpoint(engine, folder).status();
  }));
  return state.values();
}

class TensorCheckpointTest : public OwnFolderTest {};

// A mean over two or four equal gradients is exact.
constexpr MeshWay kWays[] = {{1, 1, 0}, {2, 1, 3, Tier::kNvme}, {1, 2, 1},
                             {2, 2, 3}, {2, 3, 2, Tier::kCpu},  {1, 3, 3, Tier::kNvme},
                             {4, 2, 0}};

TEST_F(TensorCheckpointTest, EveryMeshLoadsWhatEveryOtherSaves) {
  const State uninterrupted = TrainAndSave(kWays[0], 3, absl::StrCat(folder_, "/whole"));
  constexpr size_t kCount = std::size(kWays);
  for (size_t from = 0; from < kCount; ++from) {
    const MeshWay& saver = kWays[from];
    const std::string folder = absl::StrCat(folder_, "/", saver.name());
    const State saved = TrainAndSave(saver, 2, folder);
    // Each number of tensor ranks loads those of each other one, in both directions.
    for (const size_t to : {size_t{0}, (from + 1) % kCount, (from + 3) % kCount}) {
      const MeshWay& loader = kWays[to];
      SCOPED_TRACE(absl::StrCat(saver.name(), " to ", loader.name()));
      WholeState loaded, after;
      ASSERT_OK(OnMesh(loader, [&](Engine& engine) -> absl::Status {
        EBB_RETURN_IF_ERROR(LoadCheckpoint(engine, folder).status());
        EBB_RETURN_IF_ERROR(loaded.Add(engine));
        EBB_RETURN_IF_ERROR(Train(engine, 2, 3));
        return after.Add(engine);
      }));
      EXPECT_EQ(loaded.values(), saved);
      EXPECT_EQ(after.values(), uninterrupted);
    }
  }
}

// At one number of tensor ranks the codes are those that were saved.
TEST_F(TensorCheckpointTest, StatesOfEightBitsStayThoseOfTheirBlocks) {
  const MeshWay saver{2, 2, 3, Tier::kDevice, OptimizerStates::k8Bit};
  const State saved = TrainAndSave(saver, 2, folder_);
  for (const MeshWay& loader : {MeshWay{1, 2, 1, Tier::kDevice, OptimizerStates::k8Bit},
                                MeshWay{3, 2, 3, Tier::kNvme, OptimizerStates::k8Bit}}) {
    WholeState loaded;
    ASSERT_OK(OnMesh(loader, [&](Engine& engine) -> absl::Status {
      EBB_RETURN_IF_ERROR(LoadCheckpoint(engine, folder_).status());
      return loaded.Add(engine);
    }));
    EXPECT_EQ(loaded.values(), saved);
  }
  // Gathers begin within blocks of codes.
  ASSERT_OK(OnMesh(saver, [&](Engine& engine) -> absl::Status {
    EBB_RETURN_IF_ERROR(LoadCheckpoint(engine, folder_).status());
    for (size_t p = 0; p < engine.model().parameters.size(); ++p) {
      const ParameterSpec& parameter = engine.model().parameters[p];
      if (!parameter.trainable) continue;
      std::vector<float> whole(static_cast<size_t>(Elements(WholeShape(parameter))));
      EBB_RETURN_IF_ERROR(
          engine.Gather(static_cast<ParameterId>(p), StateClass::kOptimizer, whole, -1, "exp_avg"));
      EXPECT_EQ(whole, saved.at(absl::StrCat("exp_avg of ", parameter.name)));
    }
    return absl::OkStatus();
  }));
}

TEST_F(TensorCheckpointTest, ToolsSeeWholeTensors) {
  const std::string one = absl::StrCat(folder_, "/one"), cut = absl::StrCat(folder_, "/cut");
  TrainAndSave({1, 1, 0}, 2, one);
  TrainAndSave({2, 3, 3}, 2, cut);
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TensorSource> a, OpenTensorSource(one));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TensorSource> b, OpenTensorSource(cut));
  ASSERT_EQ(a->tensors().size(), b->tensors().size());
  for (size_t t = 0; t < a->tensors().size(); ++t) {
    EXPECT_EQ(a->tensors()[t].name, b->tensors()[t].name);
    EXPECT_EQ(a->tensors()[t].shape, b->tensors()[t].shape);
    ASSERT_OK_AND_ASSIGN(const TensorDifference difference, Compare(*a, t, *b, t));
    EXPECT_EQ(difference.elements, 0) << a->tensors()[t].name;
  }
}

TEST_F(TensorCheckpointTest, SafetensorsAreOfTheWholeModel) {
  const MeshWay way{2, 2, 3};
  const std::string files = absl::StrCat(folder_, "/files");
  WholeState written, read;
  ASSERT_OK(OnMesh(way, [&](Engine& engine) -> absl::Status {
    EBB_RETURN_IF_ERROR(Train(engine, 0, 1));
    EBB_RETURN_IF_ERROR(written.Add(engine));
    return ExportParameters(engine, files, {.dtype = DType::kFloat32});
  }));
  ASSERT_OK(OnMesh({1, 3, 1}, [&](Engine& engine) -> absl::Status {
    EBB_RETURN_IF_ERROR(ImportParameters(engine, files, {}));
    return read.Add(engine);
  }));
  for (const auto& [name, values] : written.values()) {
    if (!name.starts_with(" of ")) continue;
    EXPECT_EQ(read.values().at(name), values) << name;
  }
}

TEST_F(TensorCheckpointTest, TheManifestSaysHowParametersAreCut) {
  TrainAndSave({1, 2, 1}, 1, folder_);
  ASSERT_OK_AND_ASSIGN(const std::string checkpoint, FindCheckpoint(folder_));
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, ReadManifest(checkpoint));
  EXPECT_EQ(manifest.files.size(), 2u);
  for (const Manifest::Parameter& parameter : manifest.parameters) {
    EXPECT_EQ(parameter.blocks, parameter.name == "norm" ? 1 : 2) << parameter.name;
    if (parameter.name == "qkv") {
      EXPECT_EQ(parameter.shape, (std::vector<int64_t>{30, 17}));
      EXPECT_EQ(parameter.split, *Model().parameters[0].split);
    }
  }
  const std::string text = ToText(manifest);
  ASSERT_OK_AND_ASSIGN(const Manifest again, ParseManifest(text, "there"));
  EXPECT_EQ(again, manifest);
}

}  // namespace
}  // namespace ebb::testing::tensor_checkpoint_test
