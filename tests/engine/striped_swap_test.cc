// Swap files over several folders under an engine: the bits of one folder, and a disk among several
// that fails is the one that is named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/offload/faulty_queue.h"
#include "tests/offload/scratch.h"
#include "tests/offload/test_overrides.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb {

void PrintTo(IoBackend backend, std::ostream* out) {
  *out << (backend == IoBackend::kAuto ? "Auto" : "Threads");
}

}  // namespace ebb

namespace ebb::testing::striped_swap_test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::Gt;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kWorld = 2, kSteps = 4;

// A rank's half of 4 layers of 400 x 400 in fp32: 1.3 MB of parameters and 3.8 MB of states, where
// a stripe has 1 MiB.
ToyModel SomeModel() {
  return ToyModel({.width = 400});
}

Config OnDevice(Timing timing) {
  Config config = ConfigFor({.world = kWorld, .stage = 3, .timing = timing});
  config.ebb.timeout_seconds = 60;
  return config;
}

Config Over(const std::vector<std::string>& parameters, const std::vector<std::string>& states,
            Timing timing) {
  Config config = OnNvme(OnDevice(timing), "");
  config.zero.offload_param.nvme_paths = parameters;
  config.zero.offload_optimizer.nvme_paths = states;
  return config;
}

absl::StatusOr<std::vector<uint32_t>> Trained(const Config& config) {
  return TrainedMasterBits(kWorld, SomeModel(), config, kSteps);
}

// Looks at every request, for as long as it lives.
class Between {
 public:
  using Fault = std::function<std::optional<int64_t>(std::string_view file, IoRequest& request)>;
  explicit Between(const Fault& fault) {
    TestOverrides().wrap_queue = [fault](std::string_view, std::string_view file) {
      return WithFaults(
          [fault, name = std::string(file)](IoRequest& request) { return fault(name, request); });
    };
  }
  Between(const Between&) = delete;
  ~Between() { TestOverrides() = {}; }
};

constexpr IoBackend kBackends[] = {IoBackend::kAuto, IoBackend::kThreads};

class StripedBackendTest : public ::testing::TestWithParam<IoBackend> {};
std::string NameOfBackend(const ::testing::TestParamInfo<IoBackend>& backend) {
  return ::testing::PrintToString(backend.param);
}
INSTANTIATE_TEST_SUITE_P(Backends, StripedBackendTest, ::testing::ValuesIn(kBackends),
                         NameOfBackend);

TEST(StripedSwapTest, SeveralPathsHaveTheBitsOfOneAndAllAreUsed) {
  for (const Timing timing : kTimings) {
    const Scratch scratch;
    const std::vector<std::string> disks = scratch.Directories(3);
    const auto expected = Trained(OnDevice(timing));
    const auto one = Trained(Over({disks[0]}, {disks[0]}, timing));
    ASSERT_TRUE(expected.ok() && one.ok()) << expected.status() << one.status();
    EXPECT_EQ(*one, *expected);

    for (const IoBackend backend : kBackends) {
      SCOPED_TRACE(absl::StrCat(static_cast<int>(timing), " ", static_cast<int>(backend)));
      Config config = Over({disks[0], disks[1]}, disks, timing);
      config.ebb.io_backend = backend;
      std::array<std::atomic<int>, 2> of_parameters = {};  // requests, by disk
      std::array<std::atomic<int>, 3> of_states = {};
      const Between count([&](std::string_view file, IoRequest& request) {
        const auto disk = static_cast<size_t>(request.file);
        ++(file == "parameters" ? of_parameters.at(disk) : of_states.at(disk));
        return std::optional<int64_t>();
      });
      ASSERT_OK_AND_ASSIGN(const auto striped, Trained(config));
      EXPECT_EQ(striped, *expected);
      EXPECT_THAT(of_parameters, Each(Gt(0)));
      EXPECT_THAT(of_states, Each(Gt(0)));
      EXPECT_THAT(scratch.Entries(), ::testing::IsEmpty());
    }
  }
}

TEST_P(StripedBackendTest, OneDiskThatFailsIsNamedOnEveryRank) {
  for (const bool write : {false, true}) {
    SCOPED_TRACE(write ? "write" : "read");
    const Scratch scratch;
    const std::vector<std::string> disks = scratch.Directories(2);
    Config config = Over(disks, disks, Timing::kLate);
    config.ebb.io_backend = GetParam();
    std::atomic<bool> armed = false;
    const Between fault([&](std::string_view file, IoRequest& request) {
      const bool fails = armed && file == "states" && request.file == 1 && request.write == write;
      return fails ? std::optional<int64_t>(-EIO) : std::nullopt;
    });
    std::vector<absl::Status> statuses(kWorld);
    OnThreads(kWorld, [&](World world) {
      ToyModel model = SomeModel();
      ASSERT_OK_AND_ASSIGN(Engine engine,
                           Engine::Create(world, Device::Cpu(1), model.spec(), config));
      absl::Status& result = statuses[static_cast<size_t>(world.rank())];
      for (int step = 0; step < kSteps && result.ok(); ++step) {
        if (step == 1) armed = true;
        result = model.Train(engine, world.rank(), step);
      }
    });
    for (const absl::Status& status : statuses) {
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr(write ? "cannot write" : "cannot read"),
                        HasSubstr(absl::StrCat("'", disks[1], " (states of")),
                        Not(HasSubstr(disks[0])), HasSubstr("point nvme_path at another one")));
    }
    EXPECT_THAT(scratch.Entries(), ::testing::IsEmpty());
  }
}

// Counts the requests in flight.
class CountingQueue final : public IoQueue, public IoListener {
 public:
  CountingQueue(IoListener& listener, std::atomic<int>& most) : listener_(listener), most_(most) {}
  absl::Status Make(const ShardFile::Options::MakeQueue& make) {
    EBB_ASSIGN_OR_RETURN(inner_, make(*this));
    return absl::OkStatus();
  }
  void Submit(std::span<IoRequest* const> requests) override {
    const int now = in_flight_ += static_cast<int>(requests.size());
    for (int most = most_; most < now && !most_.compare_exchange_weak(most, now);) {
    }
    inner_->Submit(requests);
  }
  void Completed(std::span<const IoCompletion> completions) override {
    in_flight_ -= static_cast<int>(completions.size());
    listener_.Completed(completions);
  }
  void Announce() override { listener_.Announce(); }
  std::string description() const override { return inner_->description(); }

 private:
  IoListener& listener_;
  std::atomic<int>& most_;
  std::atomic<int> in_flight_ = 0;
  std::unique_ptr<IoQueue> inner_;
};

// Like DeepSpeed's threads, which have a queue each, for each folder.
TEST_P(StripedBackendTest, SoManyAreInFlightAsAllThreadsQueuesHold) {
  const Scratch scratch;
  const std::vector<std::string> disks = scratch.Directories(2);
  Config config = Over({disks[0]}, disks, Timing::kLate);
  config.ebb.io_backend = GetParam();
  config.aio = {.block_size = 4096, .queue_depth = 2, .intra_op_parallelism = 3};
  std::atomic<int> of_parameters = 0, of_states = 0;
  TestOverrides().wrap_queue = [&](std::string_view, std::string_view file) {
    std::atomic<int>& most = file == "parameters" ? of_parameters : of_states;
    return [&most](IoListener& listener, const ShardFile::Options::MakeQueue& make)
               -> absl::StatusOr<std::unique_ptr<IoQueue>> {
      auto queue = std::make_unique<CountingQueue>(listener, most);
      EBB_RETURN_IF_ERROR(queue->Make(make));
      return queue;
    };
  };
  const auto trained = Trained(config);
  TestOverrides() = {};
  EXPECT_OK(trained);
  EXPECT_EQ(of_parameters, 6);
  EXPECT_EQ(of_states, 12);
}

}  // namespace
}  // namespace ebb::testing::striped_swap_test
