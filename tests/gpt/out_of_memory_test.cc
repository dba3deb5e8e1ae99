// If a rank's thread gets no memory, before or during training, the run is refused and the process
// goes on.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <new>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "command_line/configuration.h"
#include "ebb/runtime/device/memory_limit.h"
#include "gmock/gmock.h"
#include "ops/no_memory.h"
#include "refusal.h"
#include "run.h"
#include "scratch_files.h"

namespace {

// Larger allocations fail.
std::atomic<size_t> largest{SIZE_MAX};

}  // namespace

// Not inlined, because the compiler takes a new with a free for a mistake.
[[gnu::noinline]] void* operator new(size_t bytes) {
  if (bytes <= largest)
    if (void* memory = std::malloc(std::max<size_t>(1, bytes))) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace ebb::gpt::out_of_memory_test {
namespace {

struct Case {
  const char* name;
  int64_t layers = 1, steps = 1;
  bool shows_plan = false, writes_summary = false;
  size_t largest = 0;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

class OutOfMemoryTest : public testing::TestWithParam<Case> {};

TEST_P(OutOfMemoryTest, IsARefusal) {
  const Case& c = GetParam();
  ScratchFiles files;
  Options options;
  options.shape = {.layers = c.layers, .heads = 1, .width = 16, .context = 8, .vocabulary = 256};
  options.ranks = 2;
  options.threads = 1;
  options.device = "cpu";
  options.steps = c.steps;
  options.sample_bytes = 0;
  if (c.shows_plan) options.show_plan = ShowPlan::kOperations;
  if (c.writes_summary) options.summary_file = files.Path("summary.json");
  const auto text = Text::FromBytes(std::vector<uint8_t>(600, 'a'), options.shape.context);
  const auto config = ResolveConfig(options);
  auto reports = Reports::Open(options, *config);
  ASSERT_TRUE(text.ok() && config.ok() && reports.ok())
      << text.status() << config.status() << reports.status();
  std::vector<absl::Status> ended(static_cast<size_t>(options.ranks));
  largest = c.largest;
  const absl::Status status = RunThreads(options.ranks, [&](World world) {
    return ended[static_cast<size_t>(world.rank())] =
               RunRank(world,
                       {.options = options, .config = *config, .text = *text, .reports = *reports})
                   .status();
  });
  largest = SIZE_MAX;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("no memory is left"));
  EXPECT_TRUE(std::any_of(ended.begin(), ended.end(), IsRefusal)) << status;
}

// The larger allocations: the text of the plan; the places for the losses of 2^16 steps.
INSTANTIATE_TEST_SUITE_P(
    Places, OutOfMemoryTest,
    testing::Values(
        Case{.name = "BeforeTraining", .layers = 200, .shows_plan = true, .largest = 550 << 10},
        Case{.name = "InTraining", .steps = 1 << 20, .writes_summary = true, .largest = 1 << 20}),
    [](const auto& c) { return c.param.name; });

// A limit of this process that leaves `room` bytes or a little more, until the end of its scope.
class LimitWithRoom {
 public:
  LimitWithRoom(decltype(RLIMIT_AS) resource, int64_t room) : resource_(resource) {
    int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    EXPECT_EQ(getrlimit(resource_, &before_), 0);
    rlimit limit = before_;
    limit.rlim_cur = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE) + room);
    EXPECT_EQ(setrlimit(resource_, &limit), 0);
  }
  ~LimitWithRoom() { setrlimit(resource_, &before_); }

 private:
  const decltype(RLIMIT_AS) resource_;
  rlimit before_ = {};
};

constexpr int64_t kGiB = int64_t{1} << 30;

TEST(MemoryLimitTest, IsTheOneWithTheLeastRoomThatTheRequestDoesNotFitInto) {
  const LimitWithRoom address_space(RLIMIT_AS, 100 * kGiB);
  {
    const LimitWithRoom data(RLIMIT_DATA, kGiB);
    EXPECT_THAT(MemoryLimitBelow(1000 * kGiB), testing::HasSubstr("ulimit -d, now "));
    EXPECT_EQ(MemoryLimitBelow(kGiB / 2), "");
  }
  const LimitWithRoom data(RLIMIT_DATA, 200 * kGiB);
  EXPECT_THAT(MemoryLimitBelow(300 * kGiB), testing::HasSubstr("ulimit -v, now "));
  EXPECT_EQ(MemoryLimitBelow(50 * kGiB), "");
}

TEST(MemoryLimitTest, WithMoreRoomThanTheMachineHasMemoryIsNotBlamed) {
  const int64_t machine = sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
  {
    const LimitWithRoom address_space(RLIMIT_AS, machine + kGiB);
    EXPECT_THAT(std::string(NoMemoryFor("a test").message()), testing::HasSubstr(": free some, "));
  }
  const LimitWithRoom address_space(RLIMIT_AS, machine - kGiB);
  EXPECT_THAT(std::string(NoMemoryFor("a test").message()), testing::HasSubstr("ulimit -v, now "));
}

}  // namespace
}  // namespace ebb::gpt::out_of_memory_test
