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
#include "ebb/runtime/checkpoint/tensor_source.h"
#include "file_calls.h"
#include "own_folder.h"
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

class SaveFaultTest : public OwnFolderTest {
 protected:
  // Loads the newest checkpoint and trains to `steps`: the bits are those of an uninterrupted run.
  void ExpectResumes(const Way& way, int steps) const {
    ParameterValues expected;
    for (const bool resumed : {false, true}) {
      OnWay(way, kSmall, [&](Engine& engine, ToyModel& model, int rank) {
        int from = 0;
        if (resumed) {
          ASSERT_OK_AND_ASSIGN(const LoadedCheckpoint loaded, LoadCheckpoint(engine, folder_));
          from = static_cast<int>(loaded.state.finished_steps);
        }
        ASSERT_OK(Train(engine, model, rank, from, steps));
        if (resumed)
          ExpectMasters(engine, model, expected);
        else
          ASSERT_OK(KeepMasters(engine, model, rank, expected));
      });
    }
  }
};

}  // namespace ebb::testing
