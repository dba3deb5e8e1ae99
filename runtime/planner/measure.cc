#include "ebb/runtime/planner/measure.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ebb/offload/memory_limits.h"
#include "ebb/offload/shard_file.h"
#include "ebb/optim/newton_schulz.h"
#include "ebb/optim/update.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/config/requests_in_flight.h"
#include "ebb/runtime/device/cores.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/runtime/kernels/reduce.h"
#include "ebb/runtime/planner/named_machines.h"

namespace ebb::planner {
namespace {

constexpr double kGiga = 1e9;

// The arrays below are larger than the caches, in memory like an engine's pools. None lies a
// multiple of 128 MiB from another: that would halve the rates, and an engine's arrays do not.
//
// A second of work in memory of so many bytes does so much of `amount`: bytes, or operations.
absl::StatusOr<double> RateOf(int threads, int64_t bytes, double amount,
                              const std::function<void(Stream&, std::byte*)>& work) {
  const Device device = Device::Cpu(threads);
  EBB_ASSIGN_OR_RETURN(const Buffer memory, device.Allocate(bytes, "measuring RAM"));
  std::memset(memory.data(), 0, static_cast<size_t>(bytes));
  Stream stream = device.CallerStream();
  return amount / MedianSeconds([&] { work(stream, memory.data()); });
}

absl::StatusOr<double> CopyRate(int threads) {
  constexpr int64_t kBytes = 250'000'000;
  return RateOf(threads, 2 * kBytes, 2 * kBytes, [](Stream& stream, std::byte* memory) {
    stream.Copy(memory + kBytes, memory, kBytes);
  });
}

// Sums of two ranks' gradients.
absl::StatusOr<double> SumRate(int threads) {
  constexpr int64_t kElements = 33'000'000, kBytes = 2 * kElements;
  return RateOf(threads, 3 * kBytes, 3 * kBytes, [](Stream& stream, std::byte* memory) {
    const void* const inputs[] = {memory, memory + kBytes};
    Reduce(stream.team(), {.dtype = DType::kBFloat16}, inputs, memory + 2 * kBytes, kElements);
  });
}

// Updates of AdamW, of pieces as large as parameters.
absl::StatusOr<double> UpdateRate(int threads) {
  constexpr int64_t kPiece = 1'000'000, kElements = 33 * kPiece,
                    kStored = 3 * sizeof(float) + 2 + 2,
                    kMoved = 3 * 2 * sizeof(float) + 2 + 2;  // bytes of an element
  const auto update = [](Stream& stream, std::byte* memory) {
    auto* const floats = reinterpret_cast<float*>(memory);
    std::byte* const halves = memory + kElements * 3 * int64_t{sizeof(float)};
    for (int64_t begin = 0; begin < kElements; begin += kPiece) {
      optim::UpdateArrays piece{.master = floats + begin,
                                .gradient = halves + 2 * begin,
                                .gradient_dtype = DType::kBFloat16,
                                .parameter = halves + 2 * (kElements + begin),
                                .parameter_dtype = DType::kBFloat16,
                                .count = kPiece};
      piece.states[0].codes = floats + kElements + begin;
      piece.states[1].codes = floats + 2 * kElements + begin;
      optim::Update(stream.team(), OptimizerConfig(), piece, {.step = 2, .learning_rate = 1e-4});
    }
  };
  return RateOf(threads, kElements * kStored, kElements * kMoved, update);
}

// Operations a second of Muon's iteration on a matrix with sides of `side` and twice as much.
absl::StatusOr<double> NewtonSchulzRate(int threads, int64_t side) {
  constexpr DType kDType = DType::kBFloat16;
  const int64_t bytes = 2 * side * side * SizeOf(kDType);
  const optim::NewtonSchulz rule;
  const NewtonSchulzScratch scratch(side, 2 * side, SizeOf(kDType));
  const double operations = NewtonSchulzOperations(side, 2 * side, rule.steps, /*halves=*/true);
  return RateOf(threads, bytes + scratch.bytes, operations, [&](Stream& stream, std::byte* memory) {
    std::memset(memory, '>', static_cast<size_t>(bytes));  // 0.186
    optim::Orthogonalise(stream.team(), rule,
                         {memory, side, 2 * side, kDType, /*scratch=*/memory + bytes});
  });
}

// A product of n^3 operations also takes time for its n^2 elements, so that its rate is
// R n / (n + half): two measured rates give both.
absl::Status MeasureNewtonSchulz(int threads, Machine& machine) {
  constexpr double kSmall = 384, kLarge = 768;
  EBB_ASSIGN_OR_RETURN(const double of_small, NewtonSchulzRate(threads, kSmall));
  EBB_ASSIGN_OR_RETURN(const double of_large, NewtonSchulzRate(threads, kLarge));
  // Within what a disturbed measurement may say.
  const double most = 0.5 * kLarge / of_large;
  const double of_elements =
      std::clamp((1 / of_small - 1 / of_large) / (1 / kSmall - 1 / kLarge), 0.0, most);
  const double rate = 1 / (1 / of_large - of_elements / kLarge);
  machine.newton_schulz_teraflops = rate / 1e12;
  machine.newton_schulz_half_side = of_elements * rate;
  return absl::OkStatus();
}

// A file of shards as an engine has it by default, and its bytes a second. Two whole windows are
// under way at a time, so that the disk always has requests in line.
class DiskMeasurement {
 public:
  static absl::StatusOr<DiskMeasurement> Make(const std::string& folder) {
    EBB_ASSIGN_OR_RETURN(Buffer memory,
                         Device::Cpu(1).Allocate(2 * kWindows * kWindow, "measuring the disk"));
    std::memset(memory.data(), 'e', static_cast<size_t>(memory.bytes()));
    ShardFile::Options options;
    options.directories = {folder};
    options.name = "states";
    options.bytes = 2 * kHalf;
    const Config by_default;
    options.aio.block_bytes = by_default.aio.block_size;
    options.aio.queue_depth = static_cast<int>(RequestsInFlight(by_default.aio));
    EBB_ASSIGN_OR_RETURN(std::unique_ptr<ShardFile> file, ShardFile::Create(options));
    return DiskMeasurement(std::move(memory), std::move(file));
  }

  absl::Status Into(Machine& machine) {
    constexpr int kRounds = 3;
    // The first write of a block also changes the file system's records.
    EBB_RETURN_IF_ERROR(Pass(/*reads=*/-1, /*writes=*/0).status());
    EBB_RETURN_IF_ERROR(Pass(-1, 1).status());
    double read = 0, write = 0, both = 0;
    for (int round = 0; round < kRounds; ++round) {
      EBB_ASSIGN_OR_RETURN(const double reads, Pass(0, -1));
      EBB_ASSIGN_OR_RETURN(const double writes, Pass(-1, 1));
      EBB_ASSIGN_OR_RETURN(const double together, Pass(0, 1));
      read += reads / kRounds;
      write += writes / kRounds;
      both += together / kRounds;
    }
    machine.disk_read_gb_s = read / kGiga;
    machine.disk_write_gb_s = write / kGiga;
    machine.disk_both_gb_s = both / kGiga;
    return absl::OkStatus();
  }

 private:
  static constexpr int64_t kWindow = int64_t{16} << 20, kHalf = int64_t{256} << 20;
  static constexpr int kWindows = 2;

  DiskMeasurement(Buffer memory, std::unique_ptr<ShardFile> file)
      : memory_(std::move(memory)), file_(std::move(file)) {}

  // Bytes a second. Reads half `reads` of the file and writes half `writes`; -1: none.
  absl::StatusOr<double> Pass(int reads, int writes) {
    const int halves[] = {reads, writes};
    absl::Status status;
    const double seconds = Seconds([&] {
      IoTransfer transfers[2][kWindows];
      for (int64_t at = 0, window = 0; at < kHalf;
           at += kWindow, window = (window + 1) % kWindows) {
        for (int way = 0; way < 2; ++way) {
          if (halves[way] < 0) continue;
          IoTransfer& transfer = transfers[way][window];
          status.Update(file_->Wait(transfer));
          const int64_t offset = halves[way] * kHalf + at;
          std::byte* const data = memory_.data() + (way * kWindows + window) * kWindow;
          way == 0 ? file_->StartRead(transfer, offset, data, kWindow)
                   : file_->StartWrite(transfer, offset, data, kWindow);
        }
      }
      for (auto& of_way : transfers)
        for (IoTransfer& transfer : of_way) status.Update(file_->Wait(transfer));
    });
    EBB_RETURN_IF_ERROR(status);
    return static_cast<double>(kHalf * ((reads >= 0) + (writes >= 0))) / seconds;
  }

  Buffer memory_;
  std::unique_ptr<ShardFile> file_;  // goes first
};

absl::Status MeasureDisk(const std::string& folder, Machine& machine) {
  struct statvfs space;
  if (statvfs(folder.c_str(), &space) != 0)
    return absl::InvalidArgumentError(absl::StrCat(folder, ": ", std::strerror(errno)));
  machine.disk = static_cast<double>(space.f_bavail) * static_cast<double>(space.f_frsize);
  EBB_ASSIGN_OR_RETURN(DiskMeasurement measurement, DiskMeasurement::Make(folder));
  return measurement.Into(machine);
}

// Bytes a second of copies between two memories, one way.
double CopyRate(Stream& stream, const Buffer& to, const Buffer& from) {
  return static_cast<double>(from.bytes()) / MedianSeconds([&] {
           stream.Copy(to.data(), from.data(), from.bytes());
           stream.WaitIdle();
         });
}

// Whole trainers reach this part of the rate of a large product. On an H200 examples/gpt reached
// 0.56 to 0.73 (bench/results/2026-11-26-h200.md), on two cores of an EPYC 0.63 to 0.84
// (bench/results/2026-11-26-plan.md).
constexpr double kOfProductRate = 0.63, kOfProductRateOfCores = 0.78;

// The machine that the driver and the first GPU describe. A rate that cannot be measured here is
// that of the named machine with the same GPUs.
absl::StatusOr<Machine> MachineOfGpus(int gpus) {
  EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
  const std::string description = device.description();
  Machine machine{.gpu_reserved = 2.0 * (1 << 30)};
  constexpr std::pair<const char*, const char*> kKinds[] = {
      {"H200", "8xh200"}, {"H100", "8xh100"}, {"A100", "8xa100"}, {"4090", "rtx4090-64gb"}};
  for (const auto& [kind, name] : kKinds) {
    if (!absl::StrContains(description, kind)) continue;
    EBB_ASSIGN_OR_RETURN(machine, MachineOfName(name));  // links of a host with eight
    break;
  }
  machine.gpus = gpus;
  machine.named_ranks = 0;
  machine.sources.clear();
  machine.network_gb_s = 0;  // this host's network is not known
  if (const auto bytes = device.free_bytes())
    machine.gpu_memory = static_cast<double>(*bytes) + machine.gpu_reserved;

  Stream stream = device.CallerStream();
  constexpr int64_t kBytes = 500'000'000;
  EBB_ASSIGN_OR_RETURN(const Buffer here, device.Allocate(kBytes, "measuring copies"));
  EBB_ASSIGN_OR_RETURN(const Buffer there, device.Allocate(kBytes, "measuring copies"));
  EBB_ASSIGN_OR_RETURN(const Buffer ram, device.AllocateShared(kBytes, "measuring copies"));
  machine.gpu_memory_gb_s = 2 * CopyRate(stream, there, here) / kGiga;  // reads and writes
  machine.pcie_gb_s = std::min(CopyRate(stream, here, ram), CopyRate(stream, ram, here)) / kGiga;
  EBB_RETURN_IF_ERROR(stream.status());
  if (gpus > 1 && machine.link_gb_s == 0) machine.link_gb_s = machine.pcie_gb_s / 2;
  const absl::StatusOr<double> products = ProductRateOfGpu(device);
  if (products.ok()) machine.gpu_teraflops = kOfProductRate * *products / 1e12;
  if (machine.gpu_teraflops == 0) return products.status();
  return machine;
}

}  // namespace

absl::StatusOr<Machine> MeasureHere(const std::string& folder) {
  Machine machine{.is_cpu = true};
  const absl::StatusOr<int> gpus = Device::CudaDevices();
  if (gpus.ok() && *gpus > 0) {
    EBB_ASSIGN_OR_RETURN(machine, MachineOfGpus(*gpus));
  }
  const int cores = CoreShare::Cores();
  machine.name = "here";
  machine.cores = cores;
  if (machine.is_cpu) {
    machine.gpus = cores;
    EBB_ASSIGN_OR_RETURN(const double products, ProductRateOfCores(cores));
    machine.gpu_teraflops = kOfProductRateOfCores * products / 1e12;
    EBB_RETURN_IF_ERROR(MeasureNewtonSchulz(cores, machine));
    machine.launch_us = 1;
  }
  machine.ram = 0;
  for (const MemoryLimit& limit : ReadMemoryLimits()) {
    const auto bytes = static_cast<double>(limit.ram);
    machine.ram = machine.ram == 0 ? bytes : std::min(machine.ram, bytes);
  }
  // A core's rates are measured while all cores do the same, because ranks do so.
  EBB_ASSIGN_OR_RETURN(const double copies, CopyRate(cores));
  EBB_ASSIGN_OR_RETURN(const double sums, SumRate(cores));
  EBB_ASSIGN_OR_RETURN(const double updates, UpdateRate(cores));
  machine.ram_gb_s = std::max(copies, updates) / kGiga;
  machine.core_gb_s = copies / cores / kGiga;
  machine.sum_gb_s = sums / cores / kGiga;
  machine.update_gb_s = updates / cores / kGiga;
  machine.disk = 0;
  if (!folder.empty()) EBB_RETURN_IF_ERROR(MeasureDisk(folder, machine));
  return machine;
}

}  // namespace ebb::planner
