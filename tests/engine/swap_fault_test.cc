// Disks that fail under an engine. Every rank ends with a Status that says what failed and what to
// do, nothing waits for ever, no update passes the error, and nothing is left on the disk.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "tests/engine/scripted.h"
#include "tests/engine/swap_faults.h"
#include "tests/offload/gate.h"
#include "tests/offload/scratch.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::swap_faults::swap_fault_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct DiskFault {
  const char* name;
  const char* file;  // of rank 1
  bool write;
  int error;
  absl::StatusCode code;
  std::vector<const char*> classes;  // one of them is named
  const char* advice;
};

void PrintTo(const DiskFault& fault, std::ostream* out) {
  *out << fault.name;
}

class SwapFaultTest : public ::testing::TestWithParam<DiskFault> {
 protected:
  Scratch scratch_;
};

std::string NameOf(const ::testing::TestParamInfo<DiskFault>& info) {
  return info.param.name;
}

INSTANTIATE_TEST_SUITE_P(Disks, SwapFaultTest,
                         ::testing::Values(DiskFault{"ParameterRead",
                                                     "parameters",
                                                     false,
                                                     EIO,
                                                     absl::StatusCode::kDataLoss,
                                                     {"the parameter"},
                                                     "see the kernel's log"},
                                           DiskFault{"StateRead",
                                                     "states",
                                                     false,
                                                     EIO,
                                                     absl::StatusCode::kDataLoss,
                                                     {"the master", "the optimizer"},
                                                     "see the kernel's log"},
                                           DiskFault{"ParameterWrite",
                                                     "parameters",
                                                     true,
                                                     EIO,
                                                     absl::StatusCode::kDataLoss,
                                                     {"the parameter"},
                                                     "see the kernel's log"},
                                           DiskFault{"StateWrite",
                                                     "states",
                                                     true,
                                                     EIO,
                                                     absl::StatusCode::kDataLoss,
                                                     {"the master", "the optimizer"},
                                                     "see the kernel's log"},
                                           DiskFault{"Full",
                                                     "states",
                                                     true,
                                                     ENOSPC,
                                                     absl::StatusCode::kResourceExhausted,
                                                     {"the master", "the optimizer"},
                                                     "free space there"}),
                         NameOf);

IoBackend BackendOf(int seed) {
  return seed % 2 == 0 ? IoBackend::kAuto : IoBackend::kThreads;
}

struct FaultyRun {
  std::vector<absl::Status> statuses = std::vector<absl::Status>(kWorld);
  std::vector<int> failed_step = std::vector<int>(kWorld, -1);
};

// Rank 1's disk answers `fault` from a request of step `faulty` on, the `skip`th that matches.
// `hold`: of FaultyQueue.
FaultyRun RunWithFault(const Config& config, const DiskFault& fault, int faulty, int skip,
                       size_t hold) {
  FaultyRun run;
  std::atomic<bool> armed = false;
  std::atomic<int> left = skip;
  Overrides overrides;
  overrides.Between(
      [&](const std::string& whose, IoRequest& request) -> std::optional<int64_t> {
        if (!armed || whose != absl::StrCat("rank1/", fault.file) || request.write != fault.write ||
            left.fetch_sub(1) > 0)
          return std::nullopt;
        return -fault.error;
      },
      hold);
  OnThreads(kWorld, [&](World world) {
    const size_t rank = static_cast<size_t>(world.rank());
    ToyModel model = SomeModel();
    ASSERT_OK_AND_ASSIGN(Engine engine, Engine::Create(world, Device::Cpu(1), model.spec(), config,
                                                       {.name = "toy"}));
    absl::Status& result = run.statuses[rank];
    for (int step = 0; step < kSteps && result.ok(); ++step) {
      if (rank == 1 && step == faulty) armed = true;
      result = Reported(engine, model.Train(engine, world.rank(), step));
      if (!result.ok()) run.failed_step[rank] = step;
    }
    // A failed engine stays failed, and says so at once.
    EXPECT_EQ(engine.Report().status(), result);
    EXPECT_EQ(model.Train(engine, world.rank(), kSteps), result);
    std::vector<float> whole(67 * 67);
    EXPECT_EQ(engine.Gather(ParameterId{0}, StateClass::kMaster, whole), result);
  });
  return run;
}

TEST_P(SwapFaultTest, FailsEveryRankWithAStatusAndARemedy) {
  const DiskFault& fault = GetParam();
  struct Way {
    IoBackend backend;
    size_t hold;
  };
  std::mt19937 random(0);  // of each timing and way another step and request
  for (const Timing timing : kTimings) {
    for (const Way& way : {Way{IoBackend::kAuto, 1},
                           {IoBackend::kAuto, FaultyQueue::kAllInFlight},
                           {IoBackend::kThreads, 1},
                           {IoBackend::kThreads, FaultyQueue::kAllInFlight}}) {
      const int faulty = static_cast<int>(random() % 3) + 1, skip = static_cast<int>(random() % 5);
      SCOPED_TRACE(absl::StrCat("timing ", static_cast<int>(timing), ", backend ",
                                static_cast<int>(way.backend), ", hold ", way.hold, ": step ",
                                faulty, ", request ", skip));
      Config config = OnNvme(scratch_.path(), timing);
      config.ebb.io_backend = way.backend;
      const FaultyRun run = RunWithFault(config, fault, faulty, skip, way.hold);
      const std::string path = absl::StrCat(scratch_.path(), " (", fault.file, " of toy-rank1)");
      for (int rank = 0; rank < kWorld; ++rank) {
        const absl::Status& status = run.statuses[static_cast<size_t>(rank)];
        const std::string message(status.message());
        EXPECT_EQ(status.code(), fault.code) << "rank " << rank << ": " << status;
        EXPECT_GE(run.failed_step[static_cast<size_t>(rank)], faulty);
        EXPECT_THAT(message, AllOf(HasSubstr("the engine has failed"), HasSubstr("in step "),
                                   HasSubstr("of unit 'layer")));
        EXPECT_TRUE(std::any_of(fault.classes.begin(), fault.classes.end(), [&](const char* name) {
          return message.find(name) != std::string::npos;
        })) << message;
        EXPECT_THAT(message,
                    AllOf(HasSubstr(fault.write ? "cannot write" : "cannot read"), HasSubstr(path),
                          HasSubstr(fault.file), HasSubstr(fault.advice), HasSubstr("nvme_path")));
        // A rank's own errors do not name it.
        if (rank == 0) {
          EXPECT_THAT(message, HasSubstr("rank 1"));
        }
      }
      EXPECT_EQ(EntriesUnder(scratch_.path()), 0);
    }
  }
}

// No update comes after the update that could not read its states.
TEST_P(SwapFaultTest, NoUpdatePassesTheError) {
  const DiskFault& fault = GetParam();
  for (const Timing timing : kTimings) {
    for (int seed = 0; seed < 3; ++seed) {
      SCOPED_TRACE(absl::StrCat("timing ", static_cast<int>(timing), ", seed ", seed));
      const int faulty = 1 + seed;
      std::atomic<bool> armed = false, over[kWorld] = {};
      std::mutex mutex;
      std::map<int64_t, std::set<std::string>> of_rank_1;  // parameters, by step from 0
      int64_t latest[kWorld] = {-1, -1};                   // step from 0
      std::atomic<int> after = 0;
      Overrides overrides;
      overrides.Between([&](const std::string& whose,
                            IoRequest& request) -> std::optional<int64_t> {
        if (!armed || whose != absl::StrCat("rank1/", fault.file) || request.write != fault.write)
          return std::nullopt;
        return -fault.error;
      });
      OnThreads(kWorld, [&](World world) {
        ToyModel model = SomeModel();
        OptimizerSpec optimizer{
            .states = {"momentum"}, .update = [&](const UpdateSlice& update) {
              const std::lock_guard lock(mutex);
              const size_t rank = static_cast<size_t>(world.rank());
              if (over[rank]) ++after;
              latest[rank] = std::max(latest[rank], update.step - 1);
              if (world.rank() == 1)
                of_rank_1[update.step - 1].insert(std::string(update.slice.name));
              return absl::OkStatus();
            }};
        Config config = OnNvme(scratch_.path(), timing);
        config.ebb.io_backend = BackendOf(seed);
        ASSERT_OK_AND_ASSIGN(Engine engine,
                             Engine::Create(world, Device::Cpu(1), model.spec(), config,
                                            {.optimizer = std::move(optimizer), .name = "toy"}));
        absl::Status result;
        int step = 0;
        for (; step < kSteps && result.ok(); ++step) {
          if (world.rank() == 1 && step == faulty) armed = true;
          result = Reported(engine, model.Train(engine, world.rank(), step));
        }
        over[static_cast<size_t>(world.rank())] = true;
        EXPECT_FALSE(result.ok());
        // Early and held-off updates of the faulty step stop there; late ones run in the next.
        EXPECT_LE(step, faulty + 2);
        for (int further = 0; further < 2; ++further)
          EXPECT_EQ(model.Train(engine, world.rank(), step), result);
      });
      EXPECT_EQ(after, 0);
      // Early updates of other ranks may have started in the step in which they learn of it.
      EXPECT_LE(latest[0], faulty + (timing == Timing::kEarly ? 1 : 0));
      EXPECT_LE(latest[1], faulty);
      // All of the faulty step were updated only if nothing of it was read in vain.
      if (!fault.write && std::string_view(fault.file) == "states") {
        EXPECT_LT(of_rank_1[faulty].size(), SomeModel().spec().parameters.size());
      }
    }
  }
}

// The disk answers in any order, and little at a time.
TEST(SwapFaults, SlowAndPartialAnswersChangeNoBit) {
  for (const Timing timing : kTimings) {
    SCOPED_TRACE(static_cast<int>(timing));
    ASSERT_OK_AND_ASSIGN(const auto expected, Trained(OnDevice(OnNvme("/unused", timing))));
    for (const IoBackend backend : {IoBackend::kAuto, IoBackend::kThreads}) {
      Scratch scratch;
      Config config = OnNvme(scratch.path(), timing);
      config.ebb.io_backend = backend;
      {
        Overrides reversed;
        reversed.Between([](const std::string&, IoRequest&) { return std::nullopt; },
                         FaultyQueue::kAllInFlight);
        ASSERT_OK_AND_ASSIGN(const auto bits, Trained(config));
        EXPECT_EQ(bits, expected);
      }
      config.aio.block_size = 16384;
      std::atomic<int> requests = 0;
      Overrides partial;
      partial.Between([&](const std::string&, IoRequest& request) -> std::optional<int64_t> {
        const int number = ++requests;
        if (number % 7 == 0) return -EINTR;
        if (number % 5 == 0) return -EAGAIN;
        if (number % 2 == 0 && request.bytes > 4096) request.bytes = 4096;
        return std::nullopt;
      });
      ASSERT_OK_AND_ASSIGN(const auto bits, Trained(config));
      EXPECT_EQ(bits, expected);
      EXPECT_GT(requests, 0);
      EXPECT_EQ(EntriesUnder(scratch.path()), 0);
    }
  }
}

TEST(SwapFaults, OnMemoryNoBitChanges) {
  if (access("/dev/shm", W_OK | X_OK) != 0) GTEST_SKIP() << "no /dev/shm";
  const Scratch scratch("/dev/shm");
  for (const Timing timing : kTimings) {
    Config config = OnNvme(scratch.path(), timing);
    const auto expected = Trained(OnDevice(config));
    for (const IoBackend backend : {IoBackend::kAuto, IoBackend::kThreads}) {
      config.ebb.io_backend = backend;
      const auto bits = Trained(config);
      ASSERT_TRUE(bits.ok() && expected.ok()) << bits.status() << expected.status();
      EXPECT_EQ(*bits, *expected);
      EXPECT_EQ(EntriesUnder(scratch.path()), 0);
    }
  }
}

TEST(SwapFaultsDeathTest, AKilledRunLeavesNothingOnTheDisk) {
  const Scratch scratch;
  const Config config = OnNvme(scratch.path(), Timing::kLate);
  const auto killed = [&] {
    RunThreads(kWorld, [&](World world) -> absl::Status {
      ToyModel model = SomeModel();
      EBB_ASSIGN_OR_RETURN(Engine engine,
                           Engine::Create(world, Device::Cpu(1), model.spec(), config));
      for (int step = 0; step < kSteps; ++step) {
        EBB_RETURN_IF_ERROR(model.Train(engine, world.rank(), step));
        if (step == 2 && world.rank() == 1) raise(SIGKILL);
      }
      return absl::OkStatus();
    }).IgnoreError();
  };
  EXPECT_EXIT(killed(), ::testing::KilledBySignal(SIGKILL), "");
  EXPECT_EQ(EntriesUnder(scratch.path()), 0);
}

TEST(SwapFaults, ThreadsInThePlaceOfIoUringChangeNoBit) {
  Scratch scratch;
  const Config config = OnNvme(scratch.path(), Timing::kLate);
  const auto expected = Trained(config);
  // The queues that serve the files.
  std::mutex mutex;
  std::vector<std::string> queues;
  TestOverrides().wrap_queue = [&](std::string_view, std::string_view) {
    return [&](IoListener& listener, const ShardFile::Options::MakeQueue& make) {
      auto queue = make(listener);
      const std::lock_guard lock(mutex);
      queues.push_back(queue.ok() ? (*queue)->description() : queue.status().ToString());
      return queue;
    };
  };
  setenv("EBB_IO_URING", "0", /*overwrite=*/1);
  const auto bits = Trained(config);
  unsetenv("EBB_IO_URING");
  TestOverrides() = {};
  ASSERT_TRUE(bits.ok() && expected.ok()) << bits.status() << expected.status();
  EXPECT_EQ(*bits, *expected);
  EXPECT_EQ(queues.size(), 2u * kWorld);
  EXPECT_THAT(queues, ::testing::Each(HasSubstr("threads")));
}

TEST(SwapFaults, TwoEnginesOnOnePathDoNotDisturbEachOther) {
  Scratch scratch;
  const Config config = OnNvme(scratch.path(), Timing::kLate);
  ASSERT_OK_AND_ASSIGN(const auto expected, Trained(config));
  OnThreads(kWorld, [&](World world) {
    ToyModel model = SomeModel(), other = SomeModel();
    ASSERT_OK_AND_ASSIGN(Engine first, Engine::Create(world, Device::Cpu(1), model.spec(), config));
    ASSERT_OK_AND_ASSIGN(Engine second,
                         Engine::Create(world, Device::Cpu(1), other.spec(), config));
    for (int step = 0; step < kSteps; ++step) {
      ASSERT_OK(model.Train(first, world.rank(), step));
      ASSERT_OK(other.Train(second, world.rank(), step));
    }
    for (Engine* engine : {&first, &second}) {
      ASSERT_OK_AND_ASSIGN(const std::vector<uint32_t> bits, MasterBits(*engine, model.spec()));
      EXPECT_EQ(bits, expected);
    }
  });
  EXPECT_EQ(EntriesUnder(scratch.path()), 0);
}

// The engine gets no call after its last step, and updates of that step are still to be written.
TEST(SwapFaults, AFailureAfterTheLastStepIsInTheLog) {
  Scratch scratch;
  Config config = OnNvme(scratch.path(), Timing::kLate);
  config.zero.offload_param = {};  // or the updates would be the next step's
  const Overrides overrides;
  std::atomic<bool> armed = false;
  // Held until the last Finish is back, which so cannot know of it.
  Gate gate([&](const IoRequest& request) { return armed && request.write; });
  TestOverrides().wrap_queue = [&](std::string_view owner, std::string_view) -> Gate::WrapQueue {
    if (!owner.ends_with("-rank1")) return {};
    return gate.Before(WithFaults([&](IoRequest& request) -> std::optional<int64_t> {
      if (armed && request.write) return -EIO;
      return std::nullopt;
    }));
  };
  ::testing::internal::CaptureStderr();
  const absl::Status status = RunThreads(kWorld, [&](World world) -> absl::Status {
    ToyModel model = SomeModel();
    EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, Device::Cpu(1), model.spec(), config,
                                                       {.name = "toy"}));
    EBB_RETURN_IF_ERROR(model.Train(engine, world.rank(), 0));
    // Waits for the updates of the first step. Otherwise they would be held too, and with them the
    // next step's gradients.
    EBB_RETURN_IF_ERROR(engine.Read(StateClass::kMaster, [](const Slice&, std::span<const float>) {
      return absl::OkStatus();
    }));
    if (world.rank() == 1) armed = true;
    const absl::Status trained = Reported(engine, model.Train(engine, world.rank(), 1));
    if (world.rank() == 1) gate.Open();
    return trained;
  });
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_OK(status);
  EXPECT_THAT(log, AllOf(HasSubstr("toy rank 1"), HasSubstr("write"), HasSubstr("states")));
}

// With updates carried into the step that is dropped, and a step begun after it.
TEST(SwapFaults, ADroppedStepLosesNoUpdateThatWasCarriedIntoIt) {
  Scratch scratch;
  const Config config = OnNvme(scratch.path(), Timing::kLate);
  ASSERT_OK_AND_ASSIGN(const auto expected, Trained(config));
  for (int opened = 0; opened <= 10; ++opened) {
    SCOPED_TRACE(opened);
    OnThreads(kWorld, [&](World world) {
      ToyModel model = SomeModel();
      ASSERT_OK_AND_ASSIGN(Engine engine,
                           Engine::Create(world, Device::Cpu(1), model.spec(), config));
      for (int step = 0; step < kSteps; ++step) {
        if (step == 3) {
          Step dropped = engine.BeginStep();
          for (int scope = 0; scope < opened; ++scope) {
            if (scope < model.visits()) {
              model.Forward(dropped, scope, world.rank(), step);
            } else {
              model.Backward(dropped, 2 * model.visits() - 1 - scope, world.rank(), step);
            }
          }
        }
        ASSERT_OK(model.Train(engine, world.rank(), step));
      }
      ASSERT_OK_AND_ASSIGN(const std::vector<uint32_t> bits, MasterBits(engine, model.spec()));
      EXPECT_EQ(bits, expected);
    });
  }
}

TEST(SwapFaults, AnEngineMayGoInMidStepAndWithUpdatesToCome) {
  Scratch scratch;
  for (const Timing timing : kTimings) {
    for (int opened = 0; opened <= 10; ++opened) {
      SCOPED_TRACE(absl::StrCat("timing ", static_cast<int>(timing), ", scopes ", opened));
      OnThreads(kWorld, [&](World world) {
        ToyModel model = SomeModel();
        ASSERT_OK_AND_ASSIGN(Engine engine, Engine::Create(world, Device::Cpu(1), model.spec(),
                                                           OnNvme(scratch.path(), timing)));
        for (int step = 0; step < 2; ++step) ASSERT_OK(model.Train(engine, world.rank(), step));
        if (opened == 0) return;
        Step step = engine.BeginStep();
        for (int scope = 0; scope < opened; ++scope) {
          if (scope < model.visits()) {
            model.Forward(step, scope, world.rank(), 2);
          } else {
            model.Backward(step, 2 * model.visits() - 1 - scope, world.rank(), 2);
          }
        }
      });
      EXPECT_EQ(EntriesUnder(scratch.path()), 0);
    }
  }
}

}  // namespace
}  // namespace ebb::testing::swap_faults::swap_fault_test
