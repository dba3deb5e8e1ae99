// DeepSpeed's universal folders. A run that is imported from one goes on with the same bits, and
// errors name files that are not read. Files of torch itself: universal_folder_test.py.
#include "ebb/runtime/checkpoint/universal_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/checkpoint/checkpoint.h"
#include "ebb/runtime/checkpoint/import_checkpoint.h"
#include "ebb/runtime/config/status_macros.h"
#include "tests/checkpoint/torch_archive.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"

namespace ebb::testing::universal_folder_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

using Items = std::vector<std::pair<std::string, std::string>>;

class UniversalFolderTest : public ::testing::Test {
 protected:
  UniversalFolderTest() { fs::remove_all(folder_); }
  ~UniversalFolderTest() override { fs::remove_all(folder_); }

  void Write(const std::string& name, const std::string& bytes) const {
    const fs::path path = folder_ + "/" + name;
    fs::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << bytes;
  }
  // A parameter's file as stages 1 and 2 write it, or with `flat` as stage 3 does.
  void WriteTensor(const std::string& name, const std::vector<int64_t>& shape,
                   const std::vector<float>& values, bool flat = false) const {
    const int64_t elements = static_cast<int64_t>(values.size());
    Write(name, TorchArchive(flat ? PickledTensor({.shape = {elements}})
                                  : PickledDict({{"cat_dim", PickledInt(0)},
                                                 {"param", PickledTensor({.shape = shape})}}),
                             {FloatBytes(values)}));
  }
  // A parameter w of two elements with AdamW's states after 3 steps.
  void WriteSmall() const {
    for (const char* file : {"fp32", "exp_avg", "exp_avg_sq"})
      WriteTensor(absl::StrCat("zero/w/", file, ".pt"), {2}, {1, 2});
    Write("zero/w/step.pt", TorchArchive(PickledInt(3), {}));
  }
  void WriteModelStates(const Items& items, const std::vector<std::string>& storages = {}) const {
    Write("mp_rank_00_model_states.pt", TorchArchive(PickledDict(items), storages));
  }
  std::string Import() const {
    auto source = OpenTensorSource(folder_);
    if (!source.ok()) return std::string(source.status().message());
    const auto path = ImportCheckpoint(**source, imported_, [](int64_t) {});
    return path.ok() ? *path : std::string(path.status().message());
  }

  const std::string folder_ =
      absl::StrCat(::testing::TempDir(), "/universal_folder_",
                   ::testing::UnitTest::GetInstance()->current_test_info()->name());
  const std::string imported_ = folder_ + "/imported";
};

TEST_F(UniversalFolderTest, ARunGoesOnWithTheSameBits) {
  for (const bool stage3 : {false, true}) {
    fs::remove_all(folder_);
    const auto run = [&](const std::function<absl::Status(Engine&, ToyModel&)>& body) {
      return RunThreads(1, [&](World world) -> absl::Status {
        ToyModel model({.frozen = false, .groups = true});
        EBB_ASSIGN_OR_RETURN(Engine engine,
                             Engine::Create(world, Device::Cpu(1), model.spec(), ConfigFor({})));
        return body(engine, model);
      });
    };
    const auto write = [&](Engine& engine, const ModelSpec& spec) -> absl::Status {
      for (const std::string state : {"", "exp_avg", "exp_avg_sq"}) {
        const auto take = [&](const Slice& slice, std::span<const float> values) -> absl::Status {
          const std::vector<int64_t>& shape = spec[slice.parameter].shape;
          EXPECT_EQ(std::ssize(values), Elements(shape));
          WriteTensor(absl::StrCat("zero/", std::string(slice.name), "/",
                                   state.empty() ? "fp32" : state, ".pt"),
                      shape, {values.begin(), values.end()}, stage3);
          return absl::OkStatus();
        };
        EBB_RETURN_IF_ERROR(
            engine.Read(state.empty() ? StateClass::kMaster : StateClass::kOptimizer, take, state));
      }
      Items shapes;
      for (const ParameterSpec& parameter : spec.parameters) {
        shapes.emplace_back(parameter.name, PickledSize(parameter.shape));
        if (stage3) continue;
        Write(absl::StrCat("zero/", parameter.name, "/step.pt"),
              TorchArchive(PickledTensor({}), {FloatBytes(std::vector<float>{2})}));
      }
      WriteModelStates({{"param_shapes", PickledList({PickledOrderedDict(shapes)})},
                        {"global_steps", PickledInt(2)},
                        {"skipped_steps", PickledInt(0)}});
      return absl::OkStatus();
    };
    ParameterValues expected;
    ASSERT_EQ(run([&](Engine& engine, ToyModel& model) -> absl::Status {
                for (int step = 0; step < 4; ++step) {
                  if (step == 2) EBB_RETURN_IF_ERROR(write(engine, model.spec()));
                  EBB_RETURN_IF_ERROR(model.Train(engine, 0, step, {}));
                }
                EBB_ASSIGN_OR_RETURN(expected,
                                     GatherAll(engine, model.spec(), StateClass::kMaster));
                return absl::OkStatus();
              }),
              absl::OkStatus());
    ASSERT_EQ(Import(), imported_ + "/step-000000002");
    ASSERT_EQ(run([&](Engine& engine, ToyModel& model) -> absl::Status {
                EBB_ASSIGN_OR_RETURN(const LoadedCheckpoint loaded,
                                     LoadCheckpoint(engine, imported_));
                EXPECT_EQ(loaded.state.applied_steps, 2);
                for (int step = 2; step < 4; ++step)
                  EBB_RETURN_IF_ERROR(model.Train(engine, 0, step, {}));
                EBB_ASSIGN_OR_RETURN(const ParameterValues masters,
                                     GatherAll(engine, model.spec(), StateClass::kMaster));
                EXPECT_EQ(masters, expected) << "stage 3: " << stage3;
                return absl::OkStatus();
              }),
              absl::OkStatus());
  }
}

TEST_F(UniversalFolderTest, TiedNamesBuffersAndFrozenParametersAreDistinguished) {
  WriteSmall();
  WriteTensor("zero/head/fp32.pt", {2}, {1, 2});
  WriteTensor("zero/mask/fp32.pt", {2}, {1, 1});
  WriteModelStates(
      {{"module", PickledOrderedDict({{"w", PickledTensor({.shape = {2}})},
                                      {"head", PickledTensor({.shape = {2}})},
                                      {"mask", PickledTensor({.shape = {2}})},
                                      {"frozen", PickledTensor({.key = "1", .shape = {1, 2}})}})},
       {"buffer_names", PickledList({PickledText("mask")})},
       {"shared_params", PickledDict({{"head", PickledText("w")}})},
       {"args", PickledGlobal("argparse", "Namespace") + ")\x81" + PickledDict({}) + "b"},
       {"global_steps", PickledInt(5)},
       {"skipped_steps", PickledInt(2)}},
      {std::string(8, '\0'), FloatBytes(std::vector<float>{3, 4})});
  Write("zero/optimizer_state.pt",
        TorchArchive(
            PickledDict({{"loss_scaler",
                          PickledGlobal("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler") +
                              ")\x81" +
                              PickledDict({{"cur_scale", PickledFloat(4096)},
                                           {"cur_iter", PickledInt(5)},
                                           {"last_overflow_iter", PickledInt(1)},
                                           {"cur_hysteresis", PickledInt(2)}}) +
                              "b"}}),
            {}));
  const auto source = OpenTensorSource(folder_);
  ASSERT_TRUE(source.ok()) << source.status();
  std::vector<std::string> there, out;
  for (const TensorInfo& tensor : (*source)->tensors()) there.push_back(Described(tensor));
  for (const LeftOutTensor& tensor : (*source)->description().left_out)
    out.push_back(absl::StrCat(tensor.name, " is ", tensor.why));
  EXPECT_THAT(there, ElementsAre("'w'", "exp_avg of 'w'", "exp_avg_sq of 'w'", "'frozen'"));
  EXPECT_THAT(out, ElementsAre("head is tied to w", "mask is a buffer"));
  std::vector<float> frozen(2);
  EXPECT_TRUE((*source)->Read(3, 0, frozen).ok());
  EXPECT_THAT(frozen, ElementsAre(3, 4));
  const TrainingState expected = {
      .finished_steps = 5,
      .applied_steps = 3,
      .skipped_steps = 2,
      .loss_scaler = {.scale = 4096, .clean_steps = 3, .hysteresis_left = 2}};
  EXPECT_EQ((*source)->description().state, expected);
}

TEST_F(UniversalFolderTest, TheNewestOneIsFoundByItsName) {
  WriteSmall();
  fs::create_directories(folder_ + "_above");
  fs::rename(folder_, folder_ + "_above/step3");
  const auto latest = [&](const std::string& name) {
    std::ofstream(folder_ + "_above/latest_universal") << name;
    const auto source = OpenTensorSource(folder_ + "_above");
    return source.ok() ? (*source)->description().path : std::string(source.status().message());
  };
  EXPECT_EQ(latest("step3\n"), folder_ + "_above/step3");
  for (const char* name : {"../step3", "", ".", "..", "/etc"})
    EXPECT_THAT(latest(name), HasSubstr("not the plain name")) << name;
  EXPECT_THAT(latest("step4"), HasSubstr("is not a folder"));
  fs::remove_all(folder_ + "_above");
}

TEST_F(UniversalFolderTest, NamesThePartsThatItDoesNotRead) {
  struct Wrong {
    const char* said;
    std::function<void()> make;
  };
  const auto states = [&](const char* key, const std::string& value) {
    WriteModelStates({{key, value}});
  };
  const Wrong kWrong[] = {
      {"slices of tensor-parallel ranks",
       [&] {
         WriteTensor("zero/w/0/fp32.00", {2}, {1, 2});
       }},
      {"SubparamShape",
       [&] {
         Write("zero/w/fp32.pt",
               TorchArchive(PickledDict({{"param", PickledTensor({.shape = {2}})},
                                         {"sub_param_shape",
                                          PickledGlobal("deepspeed.checkpoint.universal_checkpoint",
                                                        "SubparamShape") +
                                              ")\x81"}}),
                            {FloatBytes(std::vector<float>{1, 2})}));
       }},
      {"lacks fp32.pt", [&] { fs::remove(folder_ + "/zero/w/fp32.pt"); }},
      {"neither a tensor nor a dict with \"param\"",
       [&] { Write("zero/w/fp32.pt", TorchArchive(PickledDict({}), {})); }},
      {"numbers of torch.DoubleStorage",
       [&] {
         Write("zero/w/exp_avg.pt",
               TorchArchive(PickledTensor({.storage = "DoubleStorage", .shape = {2}}),
                            {std::string(16, '\0')}));
       }},
      {"does not have its shape",
       [&] {
         WriteTensor("zero/w/fp32.pt", {}, {1, 2}, true);
       }},
      {"has the shape [2], its parameter [3]",
       [&] {
         WriteTensor("zero/w/fp32.pt", {}, {1, 2}, true);
         states("param_shapes", PickledDict({{"w", PickledSize({3})}}));
       }},
      {"has the shape [3], its parameter [2]",
       [&] {
         WriteTensor("zero/w/exp_avg.pt", {3}, {1, 2, 3});
       }},
      {"has no elements", [&] { WriteTensor("zero/v/fp32.pt", {0}, {}); }},
      {"says 4 steps, but another file says 3",
       [&] {
         WriteTensor("zero/z/fp32.pt", {1}, {1});
         Write("zero/z/step.pt", TorchArchive(PickledInt(4), {}));
       }},
      {"which is not a count",
       [&] { Write("zero/w/step.pt", TorchArchive(PickledFloat(1.5), {})); }},
      {"but no number of steps", [&] { fs::remove(folder_ + "/zero/w/step.pt"); }},
      {"which is impossible", [&] { states("skipped_steps", PickledInt(-1)); }},
      {"is neither a parameter's folder", [&] { Write("zero/notes.txt", "x"); }},
      {"is not a file of a parameter", [&] { Write("zero/w/inner/fp32.pt", "x"); }},
      {"a name that a checkpoint uses itself",
       [&] {
         WriteTensor("zero/w/master.pt", {2}, {1, 2});
       }},
      {"a link is there",
       [&] {
         fs::rename(folder_ + "/zero/w/fp32.pt", folder_ + "/outside.pt");
         fs::create_symlink(folder_ + "/outside.pt", folder_ + "/zero/w/fp32.pt");
       }},
      {"is neither a parameter's folder",
       [&] { fs::create_directory_symlink(folder_ + "/zero/w", folder_ + "/zero/linked"); }},
      {"not followed",
       [&] {
         fs::rename(folder_ + "/zero", folder_ + "/elsewhere");
         fs::create_directory_symlink(folder_ + "/elsewhere", folder_ + "/zero");
       }},
      {"convert it with deepspeed/checkpoint/ds_to_universal.py",
       [&] {
         fs::remove_all(folder_ + "/zero");
         Write("zero_pp_rank_0_mp_rank_00_optim_states.pt", "");
       }},
  };
  for (const Wrong& wrong : kWrong) {
    fs::remove_all(folder_);
    WriteSmall();
    EXPECT_EQ(Import(), imported_ + "/step-000000003");
    fs::remove_all(imported_);
    wrong.make();
    EXPECT_THAT(Import(), HasSubstr(wrong.said));
    EXPECT_FALSE(fs::exists(imported_ + "/latest")) << wrong.said;
  }
}

}  // namespace
}  // namespace ebb::testing::universal_folder_test
