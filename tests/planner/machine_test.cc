// Machines as JSON: named ones, files, and JSON that is no machine.
#include "ebb/runtime/planner/machine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>

namespace ebb::planner::machine_test {
namespace {

using ::testing::HasSubstr;

std::string Wrong(std::string_view text) {
  const absl::StatusOr<Machine> machine = MachineOfJson(text, "m");
  return machine.ok() ? "" : std::string(machine.status().message());
}

constexpr char kCpu[] =
    R"("device": "cpu", "gpus": 2, "gpu_teraflops": 0.1, "ram": "8GiB", "ram_gb_s": 20, "cores": 2)";

TEST(Machine, NamedOnesReadBackFromTheirJson) {
  for (const char* name : {"8xh100", "8xh200", "8xa100", "rtx4090-64gb"}) {
    const absl::StatusOr<Machine> machine = MachineOfName(name);
    ASSERT_TRUE(machine.ok()) << machine.status();
    const absl::StatusOr<Machine> again = MachineOfJson(ToJson(*machine), name);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(ToJson(*again), ToJson(*machine));
    EXPECT_GT(machine->device_room(1), int64_t{20} << 30);
  }
  EXPECT_THAT(MachineOfName("8xh10").status().message(), HasSubstr("did you mean 8xh100"));
}

TEST(Machine, RanksShareTheirHostsResources) {
  const Machine machine = *MachineOfName("8xh100");
  EXPECT_EQ(machine.ranks_per_host(64), 8);
  EXPECT_EQ(machine.ranks_per_host(2), 2);
  EXPECT_NEAR(static_cast<double>(machine.ram_room(2)) / static_cast<double>(machine.ram_room(64)),
              4, 0.01);
  EXPECT_EQ(machine.device_room(2), machine.device_room(64));
  EXPECT_DOUBLE_EQ(machine.ForSimulation(64).rates[sharding::Resource::kNetwork], 5e10);
}

TEST(Machine, NamesTheErrorInAFile) {
  const std::string cpu = kCpu;
  EXPECT_EQ(Wrong("{" + cpu + "}"), "");
  EXPECT_THAT(Wrong("{" + cpu + R"(, "gpu_memori": 1})"), HasSubstr("did you mean \"gpu_memory\""));
  EXPECT_THAT(Wrong("{" + cpu + R"(, "disk": "much"})"), HasSubstr("must be a size such as"));
  EXPECT_THAT(Wrong("{" + cpu + R"(, "disk": "1TB"})"), HasSubstr("disk_read_gb_s"));
  EXPECT_THAT(Wrong("{" + cpu + R"(, "launch_us": -1})"), HasSubstr("allowed are"));
  EXPECT_THAT(Wrong("{" + cpu + R"(, "launch_us": 1e300})"), HasSubstr("allowed are"));
  EXPECT_THAT(Wrong("{" + cpu + R"(, "launch_us": 1e7})"), HasSubstr("from 0 to 1e+06"));
  EXPECT_EQ(Wrong("{" + cpu + R"(, "link_gb_s": 0})"), "");
  for (const char* rate :
       {"gpu_memory_gb_s", "link_gb_s", "pcie_gb_s", "network_gb_s", "core_gb_s", "sum_gb_s",
        "update_gb_s", "disk_read_gb_s", "disk_write_gb_s", "disk_both_gb_s"}) {
    const std::string message = Wrong("{" + cpu + ", \"" + rate + "\": 1e-300}");
    EXPECT_THAT(message, HasSubstr(rate));
    EXPECT_THAT(message, HasSubstr("from 1e-06 to"));
  }
  EXPECT_THAT(Wrong("{" + cpu + R"(, "launch_us": "1"})"), HasSubstr("must be a number"));
  EXPECT_THAT(Wrong("{" + cpu + R"(, "device": "tpu"})"), HasSubstr("device"));
  EXPECT_THAT(Wrong(R"({"device": "gpu"})"), HasSubstr("\"gpus\" is missing"));
  EXPECT_THAT(Wrong(R"({"gpus": 1.5})"), HasSubstr("whole numbers"));
  EXPECT_THAT(Wrong(R"({"gpus": 3e9})"), HasSubstr("from 1 to 1e+06"));
  std::string gpus = ToJson(*MachineOfName("rtx4090-64gb"));
  gpus.replace(gpus.find("\"gpus\": 1"), 9, "\"gpus\": 2");
  EXPECT_THAT(Wrong(gpus), HasSubstr("\"link_gb_s\" is missing"));
  EXPECT_THAT(Wrong(gpus), HasSubstr("half of pcie_gb_s"));
  EXPECT_THAT(Wrong("[]"), testing::Not(testing::IsEmpty()));
  EXPECT_THAT(Wrong(""), testing::Not(testing::IsEmpty()));
}

TEST(Machine, DamagedTextNeverCrashes) {
  const std::string good = ToJson(*MachineOfName("rtx4090-64gb"));
  std::mt19937 random(11);
  for (int n = 0; n < 3000; ++n) {
    std::string text = good;
    for (unsigned change = random() % 4 + 1; change > 0; --change)
      text[random() % text.size()] = static_cast<char>(random() % 256);
    (void)MachineOfJson(text, "m");
  }
}

}  // namespace
}  // namespace ebb::planner::machine_test
