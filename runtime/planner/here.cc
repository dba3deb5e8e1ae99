#include "ebb/runtime/planner/here.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ebb/offload/file_handle.h"
#include "ebb/offload/memory_limits.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/device.h"

namespace ebb::planner {
namespace {

constexpr double kGiga = 1e9;

double Seconds(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The best of a few, which other programs disturb least.
double LeastSeconds(const std::function<void()>& work) {
  double least = Seconds(work);
  for (int again = 0; again < 4; ++again) least = std::min(least, Seconds(work));
  return least;
}

int Cores() {
  cpu_set_t allowed;
  return sched_getaffinity(0, sizeof(allowed), &allowed) == 0 ? std::max(1, CPU_COUNT(&allowed))
                                                              : 1;
}

void OnThreads(int threads, const std::function<void(int)>& work) {
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
  work(0);
  for (std::thread& other : others) other.join();
}

// Bytes read and written a second by copies larger than caches, in at most 2 GiB in all.
double CopyRate(int threads) {
  const size_t bytes = std::min(size_t{64} << 20, (size_t{1} << 30) / static_cast<size_t>(threads));
  std::vector<std::vector<char>> from, to;
  for (int thread = 0; thread < threads; ++thread) {
    from.emplace_back(bytes, 'a');
    to.emplace_back(bytes, 'b');
  }
  const double seconds = LeastSeconds([&] {
    OnThreads(threads, [&](int thread) {
      const auto of = static_cast<size_t>(thread);
      std::memcpy(to[of].data(), from[of].data(), bytes);
    });
  });
  return 2.0 * static_cast<double>(bytes) * threads / seconds;
}

// Of fp32 products that stay in a core's cache: c += a b.
double ProductRate(int threads) {
  constexpr size_t kSide = 192;
  const double seconds = LeastSeconds([&] {
    OnThreads(threads, [&](int) {
      std::vector<float> a(kSide * kSide, 0.5f), b(a), c(kSide * kSide);
      for (size_t i = 0; i < kSide; ++i) {
        for (size_t k = 0; k < kSide; ++k) {
          const float factor = a[i * kSide + k];
          for (size_t j = 0; j < kSide; ++j) c[i * kSide + j] += factor * b[k * kSide + j];
        }
      }
      // What is computed is looked at.
      if (c[0] < 0) std::abort();
    });
  });
  return 2.0 * kSide * kSide * kSide * threads / seconds;
}

struct FreeMemory {
  void operator()(void* memory) const { std::free(memory); }
};

absl::Status MeasureDisk(const std::string& folder, Machine& machine) {
  constexpr size_t kBlock = size_t{8} << 20, kBlocks = 32, kAlignment = 4096;
  struct statvfs space;
  if (statvfs(folder.c_str(), &space) != 0)
    return absl::InvalidArgumentError(absl::StrCat(folder, ": ", std::strerror(errno)));
  machine.disk = static_cast<double>(space.f_bavail) * static_cast<double>(space.f_frsize);
  std::string path = absl::StrCat(folder, "/ebb-plan-XXXXXX");
  const FileHandle made(mkstemp(path.data()));
  if (!made.is_open())
    return absl::InvalidArgumentError(absl::StrCat(folder, ": ", std::strerror(errno)));
  // Past the page cache, where the file system can.
  FileHandle file(open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC));
  if (!file.is_open()) file = FileHandle(open(path.c_str(), O_RDWR | O_CLOEXEC));
  unlink(path.c_str());
  const std::unique_ptr<char, FreeMemory> block(
      static_cast<char*>(std::aligned_alloc(kAlignment, kBlock)));
  if (block == nullptr) return absl::ResourceExhaustedError("no memory to measure the disk");
  std::memset(block.get(), 'e', kBlock);
  const std::span<std::byte> bytes(reinterpret_cast<std::byte*>(block.get()), kBlock);
  absl::Status status;
  const auto pass = [&](auto transfer) {
    return Seconds([&] {
      for (size_t i = 0; i < kBlocks && status.ok(); ++i)
        status = transfer(file.get(), path, static_cast<int64_t>(i * kBlock), bytes);
      status.Update(SyncFile(file.get(), path));
    });
  };
  const double written = pass(WriteAt), read = pass(ReadAt);
  EBB_RETURN_IF_ERROR(status);
  constexpr double kBytes = static_cast<double>(kBlock * kBlocks);
  machine.disk_write_gb_s = kBytes / written / kGiga;
  machine.disk_read_gb_s = kBytes / read / kGiga;
  machine.disk_both_gb_s = std::max(machine.disk_write_gb_s, machine.disk_read_gb_s);
  return absl::OkStatus();
}

// The named machine with GPUs as this one's.
absl::StatusOr<Machine> MachineOfGpus(int gpus) {
  EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
  const std::string description = device.description();
  constexpr std::pair<const char*, const char*> kKinds[] = {
      {"H200", "8xh200"}, {"H100", "8xh100"}, {"A100", "8xa100"}, {"4090", "rtx4090-64gb"}};
  for (const auto& [kind, name] : kKinds) {
    if (!absl::StrContains(description, kind)) continue;
    EBB_ASSIGN_OR_RETURN(Machine machine, MachineOfName(name));
    machine.gpus = gpus;
    machine.network_gb_s = 0;  // what this host has is not known
    if (const auto bytes = device.free_bytes())
      machine.gpu_memory = static_cast<double>(*bytes) + machine.gpu_reserved;
    if (gpus > 1 && machine.link_gb_s == 0) machine.link_gb_s = machine.pcie_gb_s / 2;
    return machine;
  }
  return absl::UnimplementedError(absl::StrCat(
      "what ", description, " reaches is not known: write its figures into a file for --machine"));
}

}  // namespace

absl::StatusOr<Machine> MeasureHere(const std::string& folder) {
  Machine machine{.is_cpu = true};
  const absl::StatusOr<int> gpus = Device::CudaDevices();
  if (gpus.ok() && *gpus > 0) {
    EBB_ASSIGN_OR_RETURN(machine, MachineOfGpus(*gpus));
  }
  const int cores = Cores();
  machine.name = "here";
  machine.cores = cores;
  if (machine.is_cpu) {
    machine.gpus = cores;
    machine.gpu_teraflops = ProductRate(cores) / 1e12;
    machine.launch_us = 1;
  }
  machine.ram = 0;
  for (const MemoryLimit& limit : ReadMemoryLimits()) {
    const auto bytes = static_cast<double>(limit.ram);
    machine.ram = machine.ram == 0 ? bytes : std::min(machine.ram, bytes);
  }
  machine.ram_gb_s = CopyRate(cores) / kGiga;
  machine.core_gb_s = CopyRate(1) / kGiga;
  machine.disk = 0;
  if (!folder.empty()) EBB_RETURN_IF_ERROR(MeasureDisk(folder, machine));
  return machine;
}

}  // namespace ebb::planner
