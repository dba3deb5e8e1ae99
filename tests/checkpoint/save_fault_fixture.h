// A folder of checkpoints of small models, and the laws that hold for it after any failure.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/checkpoint/checkpoint.h"
#include "ebb/runtime/checkpoint/checkpoint_tensors.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/checkpoint/tensor_source.h"
#include "file_calls.h"
#include "tests/engine/scripted.h"
#include "way.h"

namespace ebb::testing {

inline constexpr ToyOptions kSmall = {.layers = 1, .width = 5};

// Every value of a checkpoint is read and its checksum compared.
inline absl::Status ReadAll(const std::string& path) {
  EBB_ASSIGN_OR_RETURN(const std::unique_ptr<TensorSource> source, OpenCheckpointSource(path));
  return ForEachPiece(*source, [](size_t, std::span<const float>) { return absl::OkStatus(); });
}

// A name for each call: "pwrite .saving-step-N/rank-00000-of-00002.safetensors, 2".
class CallNames {
 public:
  std::string Next(const FileCall& call) {
    std::string path;
    if (call.path.starts_with(kSought)) return absl::StrCat(call.name, " ", kSought);
    for (size_t i = 0; i < call.path.size(); ++i) {
      const bool in_number = i > 0 && std::isdigit(call.path[i]) != 0 &&
                             path.find("step-") != path.npos && path.find('/') == path.npos;
      if (!in_number)
        path += call.path[i];
      else if (path.back() != 'N')
        path += 'N';
    }
    constexpr int kCountedApart = 3;  // the third stands for those after it
    const std::string name = absl::StrCat(call.name, " ", path);
    return absl::StrCat(name, ", ", std::min(++times_[name], kCountedApart));
  }

 private:
  std::map<std::string, int> times_;
};

// Checks that a killed or failed save has left nothing behind.
inline std::vector<std::string> Rests(const std::string& folder) {
  std::vector<std::string> rests;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (name != "latest" && name != ".lock" && !name.starts_with("step-")) rests.push_back(name);
  }
  return rests;
}

class SaveFaultTest : public ::testing::Test {
 protected:
  SaveFaultTest()
      : folder_(
            absl::StrCat(::testing::TempDir(),
                         ::testing::UnitTest::GetInstance()->current_test_info()->test_suite_name(),
                         "-", ::testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::replace(folder_.begin() + 5, folder_.end(), '/', '-');
    std::filesystem::remove_all(folder_);
  }
  ~SaveFaultTest() override { std::filesystem::remove_all(folder_); }

  std::string At(int64_t step) const { return absl::StrCat(folder_, "/", CheckpointName(step)); }

  // Loads the newest checkpoint and trains to `steps`: the bits are those of an uninterrupted run.
  void ExpectResumes(const Way& way, int steps) const {
    ParameterValues expected;
    for (const bool resumed : {false, true}) {
      ASSERT_EQ(RunWay(
                    way,
                    [&](Engine& engine, ToyModel& model, int rank) -> absl::Status {
                      int from = 0;
                      if (resumed) {
                        EBB_ASSIGN_OR_RETURN(const LoadedCheckpoint loaded,
                                             LoadCheckpoint(engine, folder_));
                        from = static_cast<int>(loaded.state.finished_steps);
                      }
                      EBB_RETURN_IF_ERROR(Train(engine, model, rank, from, steps));
                      EBB_ASSIGN_OR_RETURN(ParameterValues masters,
                                           GatherAll(engine, model.spec(), StateClass::kMaster));
                      if (rank != 0) return absl::OkStatus();
                      if (!resumed)
                        expected = std::move(masters);
                      else
                        EXPECT_EQ(masters, expected);
                      return absl::OkStatus();
                    },
                    kSmall),
                absl::OkStatus());
    }
  }

  std::string folder_;
};

}  // namespace ebb::testing
