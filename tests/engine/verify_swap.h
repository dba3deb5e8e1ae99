// Engines with a disk that another program writes on (ebb.verify_swap).
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "ebb/sharding/plan.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/faulty_queue.h"
#include "tests/offload/made_files.h"
#include "tests/offload/test_overrides.h"
#include "tests/status.h"

namespace ebb::testing::verify_swap {

struct Cell {
  std::string name;
  int world = 1;
  Timing timing = Timing::kLate;
  DType compute = DType::kBFloat16;
  bool split = false, without_masters = false, groups = false, own = false, threads = false;
  // State that passes through the disk within a step: gradients, of several rounds or of one, and
  // boundary activations.
  bool gradients = false, rounds = false, boundaries = false;
  bool frozen = true;  // also parameters that are not trained
  OptimizerType optimizer = OptimizerType::kAdamW;
};
inline void PrintTo(const Cell& cell, std::ostream* out) {
  *out << cell.name;
}

// Width 67: units of more than one sub-group.
inline ToyOptions ModelOf(const Cell& cell) {
  return {.width = 67, .frozen = cell.frozen, .groups = cell.groups, .boundaries = cell.boundaries};
}

inline Config ConfigFor(const Cell& cell, const std::string& path) {
  Config config = testing::ConfigFor({.world = cell.world, .stage = 3, .timing = cell.timing});
  config.compute = cell.compute;
  config.optimizer.type = cell.optimizer;
  config.optimizer.momentum = cell.optimizer == OptimizerType::kLars ? 0.9 : 0;
  config.zero.offload_param.device = config.zero.offload_optimizer.device = Tier::kNvme;
  config.zero.offload_param.nvme_paths = config.zero.offload_optimizer.nvme_paths = {path};
  config.zero.offload_param.pin_memory = config.zero.offload_optimizer.pin_memory = false;
  config.zero.offload_param.max_in_cpu = 0;
  config.zero.sub_group_size = 2048;
  config.ebb.split_master = cell.split;
  config.ebb.stochastic_rounding = cell.without_masters;
  config.ebb.timeout_seconds = 60;
  config.ebb.verify_swap = VerifySwap::kStates;
  if (cell.gradients) config.ebb.offload_gradients = Tier::kNvme;
  if (cell.boundaries) config.ebb.offload_activations = Tier::kNvme;
  if (cell.rounds) config.gradient_accumulation_steps = 2;
  if (cell.groups) config.ebb.parameter_groups["bias"] = {.weight_decay = 0.0};
  return config;
}

inline EngineOptions OptionsFor(const Cell& cell) {
  if (!cell.own) return {};
  return {.optimizer = OptimizerSpec{.states = {"seen"}, .update = [](const UpdateSlice& slice) {
                                       for (size_t i = 0; i < slice.master.size(); ++i) {
                                         slice.states[0][i] += slice.gradient[i];
                                         slice.master[i] -= 0.01f * slice.states[0][i];
                                       }
                                       return absl::OkStatus();
                                     }}};
}

// The file of `rank` for "states" or "parameters", as messages call it.
inline std::string FileOf(const std::string& path, int rank, const std::string& what) {
  const std::string end = "(" + what + " of engine-rank" + std::to_string(rank) + ")";
  const std::string file = MadeFiles::OfProcess().Find(path, end);
  EXPECT_NE(file, "") << "no file of " << what << " of rank " << rank << " in " << path;
  return file;
}

inline int64_t DataBytes(const std::string& file) {
  return MadeFiles::OfProcess().StatOf(file).st_size;
}

// Another program's write, past whatever caches there are.
inline void FlipBit(const std::string& file, int64_t offset) {
  const int fd = open(MadeFiles::OfProcess().OpenPath(file).c_str(), O_RDWR);
  ASSERT_GE(fd, 0) << file;
  unsigned char byte = 0;
  ASSERT_EQ(pread(fd, &byte, 1, offset), 1);
  byte ^= 4;
  ASSERT_EQ(pwrite(fd, &byte, 1, offset), 1);
  ASSERT_EQ(fsync(fd), 0);
  close(fd);
}

// Another program that changes a byte of a rank's states while a step goes on: a bit of it, as the
// next read of the byte begins.
class FlipAtRead {
 public:
  explicit FlipAtRead(int rank) {
    MadeFiles::ClearOverrides();
    TestOverrides().wrap_queue = [this, rank](std::string_view owner, std::string_view file) {
      const bool is_meant = file == "states" && owner.ends_with("-rank" + std::to_string(rank));
      return WithFaults([this, rank, is_meant](IoRequest& request) -> std::optional<int64_t> {
        int64_t at = at_;
        if (is_meant && !request.write && request.offset <= at &&
            at < request.offset + request.bytes && at_.compare_exchange_strong(at, -1)) {
          path_ = FileOf("", rank, "states");
          FlipBit(path_, at);
        }
        return std::nullopt;
      });
    };
  }
  FlipAtRead(const FlipAtRead&) = delete;
  ~FlipAtRead() { MadeFiles::ClearOverrides(); }

  void Arm(int64_t offset) { at_ = offset; }
  // Where the bit was flipped; empty: nowhere. Once the engines are gone.
  const std::string& path() const { return path_; }

 private:
  std::atomic<int64_t> at_ = -1;
  std::string path_;
};

using Tamper = std::function<void(const std::string& path, const sharding::Plan& plan)>;

struct Trained {
  std::vector<absl::Status> statuses;  // by rank: the first that is no success, of up to `steps`
  int64_t steps_done = 0;
  std::vector<uint32_t> masters;
};

// Tampers once, after `before` steps, when all that these leave behind has been written.
inline Trained Train(const Cell& cell, const Config& config, int before, int steps,
                     const Tamper& tamper) {
  Trained run;
  run.statuses.resize(static_cast<size_t>(cell.world));
  setenv("EBB_IO_URING", cell.threads ? "0" : "1", /*overwrite=*/1);
  MadeFiles::Watch();
  const std::string path = config.zero.offload_optimizer.nvme_paths.front();
  ExpectOk(RunThreads(cell.world, [&](World world) -> absl::Status {
    ToyModel model(ModelOf(cell));
    absl::StatusOr<Engine> engine =
        Engine::Create(world, Device::Cpu(/*threads=*/1), model.spec(), config, OptionsFor(cell));
    if (!engine.ok()) return engine.status();
    absl::Status& own = run.statuses[static_cast<size_t>(world.rank())];
    for (int number = 0; number < steps && own.ok(); ++number) {
      if (number == before) {
        // Gathers wait for the updates and their writes.
        const auto bits = MasterBits(*engine, model.spec());
        if (!bits.ok()) return bits.status();
        engine->traffic();
        if (world.rank() + 1 == cell.world) tamper(path, engine->program().plan());
        const auto again = MasterBits(*engine, model.spec());  // a barrier
        (void)again;
      }
      own = Reported(*engine, model.Train(*engine, world.rank(), number));
      if (own.ok() && world.rank() == 0) ++run.steps_done;
    }
    if (own.ok()) own = MasterBits(*engine, model.spec()).status();
    if (own.ok() && world.rank() == 0) {
      auto bits = MasterBits(*engine, model.spec());
      if (bits.ok()) run.masters = *std::move(bits);
    } else if (own.ok()) {
      MasterBits(*engine, model.spec()).status().IgnoreError();
    }
    return absl::OkStatus();
  }));
  return run;
}

}  // namespace ebb::testing::verify_swap
