#include "ebb/offload/memory_limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "ebb/runtime/device/machine.h"
#include "system_files.h"

namespace ebb::testing::memory_limits_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int64_t kKibi = 1024;

TEST(MemoryLimits, AreTheMachinesAvailableMemoryAndFreeSwapSpace) {
  const SystemFiles files;
  files.Memory(/*available_kib=*/4'000, /*swap_kib=*/500);
  const std::vector<MemoryLimit> limits = ReadMemoryLimits(files.root());
  ASSERT_THAT(limits, SizeIs(1));
  EXPECT_THAT(limits[0].name, HasSubstr("this machine (MemAvailable of /proc/meminfo)"));
  EXPECT_EQ(limits[0].ram, 4'000 * kKibi);
  EXPECT_EQ(limits[0].swap, 500 * kKibi);
}

TEST(MemoryLimits, AreNoneWithoutProcOrWhereItSaysNothing) {
  const SystemFiles files;
  EXPECT_THAT(ReadMemoryLimits(files.root()), IsEmpty());
  files.Write("/proc/meminfo", "MemTotal: 5 kB\nMemAvailable: much\n");
  EXPECT_THAT(ReadMemoryLimits(files.root()), IsEmpty());
}

// A directory can be opened but not read, like a file of /proc that fails with EIO.
TEST(MemoryLimits, AFileThatCannotBeReadCountsAsAbsent) {
  const auto make_unreadable = [](const SystemFiles& files, const std::string& path) {
    std::filesystem::remove(files.root() + path);
    std::filesystem::create_directories(files.root() + path);
  };
  const auto write_all = [](const SystemFiles& files) {
    files.Memory(4'000, 500);
    files.Group("/job");
    files.GroupMemory("/job", "1000000", 400'000, 0);
  };
  for (const char* path : {"/proc/self/cgroup", "/proc/self/mountinfo",
                           "/sys/fs/cgroup/job/memory.max", "/sys/fs/cgroup/job/memory.current"}) {
    SCOPED_TRACE(path);
    const SystemFiles files;
    write_all(files);
    EXPECT_THAT(ReadMemoryLimits(files.root()), SizeIs(2));
    make_unreadable(files, path);
    EXPECT_THAT(ReadMemoryLimits(files.root()), SizeIs(1));
  }
  const SystemFiles files;
  write_all(files);
  make_unreadable(files, "/sys/fs/cgroup/job/memory.stat");
  make_unreadable(files, "/proc/sys/kernel/random/boot_id");
  EXPECT_THAT(ReadMemoryLimits(files.root()), SizeIs(2));
  make_unreadable(files, "/proc/meminfo");
  EXPECT_THAT(ReadMemoryLimits(files.root()), IsEmpty());
}

// Linux does not count it.
TEST(MemoryLimits, CountTheCacheOfZfsAsAvailable) {
  const SystemFiles files;
  files.Memory(4'000, 0);
  files.Write(
      "/proc/spl/kstat/zfs/arcstats",
      "13 1 0x01 96 26112\nname                            type data\n"
      "c_min                           4    1000\nc_max                           4    9000\n"
      "size                            4    6000\n");
  EXPECT_EQ(ReadMemoryLimits(files.root())[0].ram, 4'000 * kKibi + 5'000);
}

TEST(MemoryLimits, IncludeEveryParentGroupWithALimit) {
  const SystemFiles files;
  files.Memory(4'000, 500);
  files.Group("/slurm/job7/step0");
  files.GroupMemory("/slurm/job7/step0", "max", 300, 0);
  files.GroupMemory("/slurm/job7", "1000000", 400'000, 150'000);
  files.Write("/sys/fs/cgroup/slurm/job7/memory.swap.max", "70000\n");
  files.Write("/sys/fs/cgroup/slurm/job7/memory.swap.current", "30000\n");
  files.GroupMemory("/slurm", "5000", 6'000, 200);
  const std::vector<MemoryLimit> limits = ReadMemoryLimits(files.root());
  ASSERT_THAT(limits, SizeIs(3));
  EXPECT_EQ(limits[1].name,
            "control group " + files.root() + "/sys/fs/cgroup/slurm/job7 (memory.max 1000000)");
  EXPECT_EQ(limits[1].ram, 750'000) << "pages of files can be dropped";
  EXPECT_EQ(limits[1].swap, 40'000);
  EXPECT_EQ(limits[2].ram, 0) << "memory beyond the limit is not negative";
  EXPECT_EQ(limits[2].swap, 500 * kKibi) << "without a limit of its own, the machine's";
  EXPECT_NE(limits[1].identity, limits[2].identity);
  EXPECT_NE(limits[0].identity, limits[1].identity);
}

TEST(MemoryLimits, AreKnownByTheStartOfTheMachineOrElseByItsName) {
  const SystemFiles files;
  files.Memory(4'000, 0);
  EXPECT_EQ(BootId(files.root()), "5eb63bbb-e01e");
  EXPECT_EQ(ReadMemoryLimits(files.root()).front().identity, BootId(files.root()));
  files.Write("/proc/sys/kernel/random/boot_id", "");
  EXPECT_EQ(BootId(files.root()), "");
  EXPECT_FALSE(HostName().empty());
  EXPECT_EQ(ReadMemoryLimits(files.root()).front().identity, HostName());
}

// lxcfs shows each container its own memory.
TEST(MemoryLimits, AContainersLimitsAreItsOwn) {
  const SystemFiles machine, container;
  machine.Memory(4'000, 0);
  container.Memory(4'000, 0);
  EXPECT_EQ(ReadMemoryLimits(machine.root()).front().identity,
            ReadMemoryLimits(container.root()).front().identity);
  container.Write("/proc/self/ns/mnt", "");
  container.Write("/proc/self/mountinfo",
                  "612 601 0:71 /proc/meminfo /proc/meminfo rw,nosuid - fuse.lxcfs lxcfs rw\n");
  EXPECT_NE(ReadMemoryLimits(machine.root()).front().identity,
            ReadMemoryLimits(container.root()).front().identity);
}

TEST(MemoryLimits, AGroupsLimitsDoNotDependOnItsMountPoint) {
  const SystemFiles files;
  files.Memory(4'000, 0);
  files.Group("/pod/one");
  files.GroupMemory("/pod/one", "9000", 0, 0);
  const MemoryLimit outside = ReadMemoryLimits(files.root()).at(1);
  // In a container: its group is the top of the mount, and /proc has the path on the host, or "/".
  files.Write("/proc/self/mountinfo",
              "35 31 0:32 /pod/one /sys/fs/cgroup/pod/one ro shared:9 - cgroup2 cgroup rw\n");
  EXPECT_EQ(ReadMemoryLimits(files.root()).at(1).identity, outside.identity);
  files.Write("/proc/self/cgroup", "0::/\n");
  files.Write("/proc/self/mountinfo",
              "35 31 0:32 / /sys/fs/cgroup/pod/one ro - cgroup2 cgroup rw\n");
  EXPECT_EQ(ReadMemoryLimits(files.root()).at(1).identity, outside.identity);
}

TEST(MemoryLimits, VersionOneHasAHierarchyOfItsOwnForMemory) {
  const SystemFiles files;
  files.Memory(4'000, 1'000);
  files.Write("/proc/self/cgroup", "9:name=systemd:/x\n4:cpu,memory:/docker/abc/job\n0::/\n");
  files.Write("/proc/self/mountinfo",
              "34 31 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
              "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,cpu,memory\n"
              "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
  const std::string top = "/sys/fs/cgroup/memory";
  files.Write(top + "/job/memory.limit_in_bytes", "800000\n");
  files.Write(top + "/job/memory.usage_in_bytes", "500000\n");
  files.Write(top + "/job/memory.memsw.limit_in_bytes", "900000\n");
  files.Write(top + "/job/memory.memsw.usage_in_bytes", "520000\n");
  files.Write(top + "/job/memory.stat",
              "inactive_file 1\ntotal_inactive_file 20000\ntotal_active_file 3000\n");
  files.Write(top + "/memory.limit_in_bytes", "9223372036854771712\n");
  files.Write(top + "/memory.usage_in_bytes", "500000\n");
  std::vector<MemoryLimit> limits = ReadMemoryLimits(files.root());
  ASSERT_THAT(limits, SizeIs(2)) << "the number that stands for none is no limit";
  EXPECT_EQ(limits[1].ram, 323'000);
  EXPECT_EQ(limits[1].swap, 80'000) << "900,000 less 520,000 and 23,000 more, less 323,000 of RAM";
  // A parent's limit is valid for its children if a file says so.
  files.Write(top + "/memory.limit_in_bytes", "600000\n");
  EXPECT_THAT(ReadMemoryLimits(files.root()), SizeIs(3));
  files.Write(top + "/memory.use_hierarchy", "0\n");
  EXPECT_THAT(ReadMemoryLimits(files.root()), SizeIs(2));
}

TEST(MemoryLimits, ThisSystemsLimitsCanBeRead) {
  for (const MemoryLimit& limit : ReadMemoryLimits()) {
    EXPECT_FALSE(limit.name.empty());
    EXPECT_FALSE(limit.identity.empty());
    EXPECT_GE(limit.ram, 0);
    EXPECT_GE(limit.swap, 0);
  }
}

}  // namespace
}  // namespace ebb::testing::memory_limits_test
