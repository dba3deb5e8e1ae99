// Machines as JSON: named ones, files, and JSON that is no machine.
#include "ebb/runtime/planner/machine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/planner/named_machines.h"
#include "tests/status.h"

namespace ebb::planner::machine_test {
namespace {

using ::ebb::testing::Says;

TEST(Machine, NamedOnesReadBackFromTheirJson) {
  for (const char* name :
       {"8xh100", "8xh200", "8xa100", "8xb200", "8xa100-40", "2xa100-80", "3xl40s", "1xa6000",
        "4xrtx4090", "1xrtx3090", "8xrtx5090", "rtx4090-64gb"}) {
    ASSERT_OK_AND_ASSIGN(const Machine machine, MachineOfName(name));
    ASSERT_OK_AND_ASSIGN(const Machine again, MachineOfJson(ToJson(machine), name));
    EXPECT_EQ(ToJson(again), ToJson(machine));
    EXPECT_GT(machine.device_room(1), int64_t{20} << 30);
  }
  EXPECT_THAT(MachineOfName("8xh10"), Says("did you mean 8xh100"));
}

TEST(Machine, RanksShareTheirHostsResources) {
  Machine machine = *MachineOfName("8xh100");
  EXPECT_EQ(machine.ranks_per_host(64), 8);
  EXPECT_EQ(machine.ranks_per_host(2), 2);
  // Two of eight GPUs have a quarter of the host, or all of it.
  EXPECT_EQ(machine.ram_room(2), machine.ram_room(64));
  machine.whole_host = true;
  EXPECT_NEAR(static_cast<double>(machine.ram_room(2)) / static_cast<double>(machine.ram_room(64)),
              4, 0.01);
  EXPECT_EQ(machine.device_room(2), machine.device_room(64));
  EXPECT_DOUBLE_EQ(machine.ForSimulation(64).rates[sharding::Resource::kNetwork], 5e10);
}

TEST(Machine, ANameSaysHowManyGpus) {
  const Machine eight = *MachineOfName("8xh100"), two = *MachineOfName("2xh100"),
                sixteen = *MachineOfName("16xh100"), all = *MachineOfName("2xh100", true);
  EXPECT_EQ(two.gpus, 2);
  EXPECT_EQ(two.ram * 4, eight.ram);
  EXPECT_EQ(two.cores * 4, eight.cores);
  EXPECT_EQ(two.disk_write_gb_s * 4, eight.disk_write_gb_s);
  EXPECT_EQ(two.network_gb_s, 0);  // no other host has the rest
  EXPECT_EQ(two.link_gb_s, eight.link_gb_s);
  EXPECT_EQ(all.ram, eight.ram);
  EXPECT_EQ(sixteen.gpus, 8);
  EXPECT_EQ(sixteen.named_ranks, 16);
  EXPECT_EQ(MachineOfName("2xl40s")->link_gb_s, MachineOfName("2xl40s")->pcie_gb_s / 2);
  EXPECT_EQ(MachineOfName("1xl40s")->link_gb_s, 0);
  for (const char* wrong : {"h100", "xh100", "0xh100", "-1xh100", "8x", "8xh1000", "9999999xh100"})
    EXPECT_FALSE(MachineOfName(wrong).ok()) << wrong;
}

TEST(Machine, EveryRateOfANameHasASource) {
  for (const char* name : {"8xh100", "1xa6000", "4xrtx4090"}) {
    const Machine machine = *MachineOfName(name);
    for (const char* key : {"gpu_memory", "gpu_memory_gb_s", "gpu_teraflops", "gpu_peak_teraflops",
                            "link_gb_s", "pcie_gb_s", "ram", "disk", "network_gb_s"})
      EXPECT_FALSE(machine.sources.at(key).empty()) << name << key;
  }
  EXPECT_THAT(MachineOfJson(R"({"sources": 1})", "m"), Says("must be an object of texts"));
  EXPECT_THAT(MachineOfJson(R"({"sources": {"ram": 1}})", "m"), Says("must be an object of texts"));
}

// Muon's products have the rate of a trainer's kernels, or their own; ranks on cores share it.
TEST(Machine, GivesTheRateOfMuonsProducts) {
  Machine machine = *MachineOfName("8xh100");
  EXPECT_EQ(machine.ForSimulation(4).products, 1e12 * machine.gpu_teraflops);
  EXPECT_EQ(machine.ForSimulation(4).half_side, 0);
  machine.newton_schulz_teraflops = 700, machine.newton_schulz_half_side = 300;
  EXPECT_DOUBLE_EQ(machine.ForSimulation(4).products, 700e12);
  EXPECT_EQ(machine.ForSimulation(4).half_side, 300);
  machine.is_cpu = true;
  EXPECT_DOUBLE_EQ(machine.ForSimulation(4).products, 175e12);
}

TEST(Machine, NamesTheErrorInAFile) {
  const auto with = [](const std::string& keys) {
    return MachineOfJson(absl::StrCat(R"({"device": "cpu", "gpus": 2, "gpu_teraflops": 0.1,
        "ram": "8GiB", "ram_gb_s": 20, "cores": 2)",
                                      keys, "}"),
                         "m");
  };
  EXPECT_OK(with(""));
  EXPECT_OK(with(R"(, "link_gb_s": 0)"));
  const std::pair<const char*, const char*> kWrong[] = {
      {R"(, "gpu_memori": 1)", "did you mean \"gpu_memory\""},
      {R"(, "disk": "much")", "must be a size such as"},
      {R"(, "disk": "1TB")", "disk_read_gb_s"},
      {R"(, "launch_us": -1)", "allowed are"},
      {R"(, "launch_us": 1e300)", "allowed are"},
      {R"(, "launch_us": 1e7)", "from 0 to 1e+06"},
      {R"(, "launch_us": "1")", "must be a number"},
      {R"(, "device": "tpu")", "device"}};
  for (const auto& [keys, message] : kWrong) EXPECT_THAT(with(keys), Says(message)) << keys;
  for (const char* rate : {"gpu_memory_gb_s", "link_gb_s", "pcie_gb_s", "network_gb_s", "core_gb_s",
                           "sum_gb_s", "update_gb_s", "newton_schulz_teraflops", "disk_read_gb_s",
                           "disk_write_gb_s", "disk_both_gb_s"})
    EXPECT_THAT(with(absl::StrCat(", \"", rate, "\": 1e-300")), Says(rate, "from 1e-06 to"));
  EXPECT_THAT(MachineOfJson(R"({"device": "gpu"})", "m"), Says("\"gpus\" is missing"));
  EXPECT_THAT(MachineOfJson(R"({"gpus": 1.5})", "m"), Says("whole numbers"));
  EXPECT_THAT(MachineOfJson(R"({"gpus": 3e9})", "m"), Says("from 1 to 1e+06"));
  std::string gpus = ToJson(*MachineOfName("rtx4090-64gb"));
  gpus.replace(gpus.find("\"gpus\": 1"), 9, "\"gpus\": 2");
  EXPECT_THAT(MachineOfJson(gpus, "m"), Says("\"link_gb_s\" is missing", "half of pcie_gb_s"));
  for (const char* text : {"[]", ""}) EXPECT_FALSE(MachineOfJson(text, "m").ok());
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
