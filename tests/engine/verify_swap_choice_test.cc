// The classes on the disk that have checksums: the choice of ebb.verify_swap "auto", and the
// message about classes without checksums.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/engine/verify_swap.h"
#include "tests/offload/has_once.h"
#include "tests/offload/scratch.h"

namespace ebb::testing::verify_swap::verify_swap_choice_test {
namespace {

using ::testing::HasSubstr;

struct Chosen {
  std::vector<VerifySwap> of_ranks;
  std::string log;
};

Chosen ChosenFor(const Cell& cell, const Config& config) {
  Chosen chosen;
  chosen.of_ranks.assign(static_cast<size_t>(cell.world), VerifySwap::kAuto);
  ::testing::internal::CaptureStderr();
  const absl::Status status = RunThreads(cell.world, [&](World world) -> absl::Status {
    const ToyModel model(ModelOf(cell));
    absl::StatusOr<Engine> engine =
        Engine::Create(world, Device::Cpu(/*threads=*/1), model.spec(), config);
    if (!engine.ok()) return engine.status();
    chosen.of_ranks[static_cast<size_t>(world.rank())] = engine->config().ebb.verify_swap;
    return absl::OkStatus();
  });
  chosen.log = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(status.ok()) << status;
  return chosen;
}

// One that is slow beside the sums, and one that is fast.
constexpr double kDiskRates[] = {1, 1e15};

TEST(VerifySwapChoice, AutoIsAllIfTheDiskTakesLongerAndLogsTheMeasurement) {
  for (const int world : {1, 2}) {
    for (const double rate : kDiskRates) {
      const Scratch scratch;
      const Cell cell{.name = "", .world = world};
      Config config = ConfigFor(cell, scratch.path());
      config.ebb.verify_swap = VerifySwap::kAuto;
      GetOffloadTestHooks().disk_rate = rate;
      const Chosen chosen = ChosenFor(cell, config);
      GetOffloadTestHooks() = {};
      const bool is_all = rate == kDiskRates[0];
      for (const VerifySwap of_rank : chosen.of_ranks)
        EXPECT_EQ(of_rank, is_all ? VerifySwap::kAll : VerifySwap::kStates);
      EXPECT_THAT(chosen.log, HasOnce(is_all ? "\"ebb.verify_swap\" auto is all here: "
                                             : "\"ebb.verify_swap\" auto is states here: "));
      EXPECT_EQ(Occurrences(chosen.log, "parameters on the disk have no checksum"), is_all ? 0 : 1);
    }
  }
}

// Sums from before the choice remain, if their class still has sums.
TEST(VerifySwapChoice, AutoFindsAFlippedBitInTheChosenClasses) {
  for (const double rate : kDiskRates) {
    for (const bool of_states : {false, true}) {
      const Scratch scratch;
      const Cell cell{.name = ""};
      Config config = ConfigFor(cell, scratch.path());
      config.ebb.verify_swap = VerifySwap::kAuto;
      GetOffloadTestHooks().disk_rate = rate;
      const Trained run =
          Train(cell, config, /*before=*/0, 3, [&](const std::string& path, const sharding::Plan&) {
            FlipBit(FileOf(path, 0, of_states ? "states" : "parameters"), 1);
          });
      GetOffloadTestHooks() = {};
      const bool is_found = of_states || rate == kDiskRates[0];
      EXPECT_EQ(run.statuses.front().code(),
                is_found ? absl::StatusCode::kDataLoss : absl::StatusCode::kOk)
          << run.statuses.front();
    }
  }
}

TEST(VerifySwapChoice, ClassesOnTheDiskWithoutAChecksumAreSaidAtTheStart) {
  struct Case {
    Cell cell;
    VerifySwap verify;
    std::string left;  // "": nothing is said
  };
  const Cell trained{.name = "", .split = true, .frozen = false};
  const Cell all_classes{.name = "", .gradients = true, .boundaries = true};
  for (const Case& c : {
           Case{all_classes, VerifySwap::kOff,
                "parameters, masters, optimizer states, gradients and boundary activations"},
           Case{all_classes, VerifySwap::kStates, "parameters, gradients and boundary activations"},
           Case{all_classes, VerifySwap::kAll, ""},
           Case{{.name = "", .split = true}, VerifySwap::kStates, "frozen parameters"},
           Case{trained, VerifySwap::kStates, ""},
           Case{trained, VerifySwap::kAuto, ""},
       }) {
    SCOPED_TRACE(c.left);
    const Scratch scratch;
    Config config = ConfigFor(c.cell, scratch.path());
    config.ebb.verify_swap = c.verify;
    const Chosen chosen = ChosenFor(c.cell, config);
    const std::string line = " on the disk have no checksum";
    EXPECT_EQ(Occurrences(chosen.log, line), c.left.empty() ? 0 : 1);
    EXPECT_EQ(Occurrences(chosen.log, "engine: " + c.left + line), c.left.empty() ? 0 : 1);
    // If "states" leaves no class out, "all" is the same, and nothing has to be measured.
    EXPECT_THAT(chosen.log, ::testing::Not(HasSubstr("\"ebb.verify_swap\" auto")));
    EXPECT_EQ(chosen.of_ranks.front(), c.verify == VerifySwap::kAuto ? VerifySwap::kAll : c.verify);
  }
}

}  // namespace
}  // namespace ebb::testing::verify_swap::verify_swap_choice_test
