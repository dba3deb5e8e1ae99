// Checkpoints against the disk, and beside training:
//
//   build/release/bin/checkpoint_bench DIRECTORY [disk|ram|nvme|commands] [--units 13]
//       [--elements 8388608] [--turns 7] [--compute 1000] [--threads 1] [--early]
//
// disk: SaveCheckpoint and LoadCheckpoint of one rank with states in RAM (12 bytes a parameter), in
//   turns with bare transfers (O_DIRECT, 1 MiB, 32 deep). They write as many bytes to
//   a new file in the same folder, and read the file that is loaded. Both ways to write end with a
//   sync of the file. Files are dropped from the page cache before they are read.
// ram, nvme: steps during SaveAsync against steps without a save, in turns: the time that SaveAsync
//   blocks, the longer steps, and the extra memory. nvme has all state on DIRECTORY's disk.
//   --compute: milliseconds of a step's kernels, which keep --threads cores busy: with as many as
//   the machine has, the save has no core of its own. Updates come after backward (clipping), so
//   training uses these cores; with --early updates run beside backward.
// commands: for each line of the input ("save", "load", "write", "read") it prints a line with
//   seconds, for checkpoint_against_peers.py.
//
// DIRECTORY needs room for three times the states.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/ebb.h"
#include "ebb/offload/file_handle.h"
#include "ebb/offload/file_transfers.h"
#include "ebb/offload/pinned_memory.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/checkpoint.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/checkpoint/rank_file.h"
#include "ebb/runtime/device/thread_team.h"
#include "ebb/runtime/trace/standard_streams.h"
#include "io_bench_candidate.h"

namespace ebb::bench {
namespace {

constexpr int64_t kBlock = int64_t{1} << 20;
constexpr int kDepth = 32;
constexpr int64_t kBytesOfElement = 12;  // master and Adam's two states

using Clock = std::chrono::steady_clock;
double Since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

struct Arguments {
  std::string directory, what = "disk";
  int units = 13, turns = 7, threads = 1;
  int64_t elements = int64_t{8} << 20;  // of a unit
  double compute_ms = 1000;
  bool early = false;

  int64_t bytes() const { return units * elements * kBytesOfElement; }
};

// A new folder in another. It is removed with all its contents.
class Folder {
 public:
  static absl::StatusOr<Folder> Create(const std::string& parent) {
    std::string path = absl::StrCat(parent, "/checkpoint-bench-XXXXXX");
    if (mkdtemp(path.data()) == nullptr) return absl::ErrnoToStatus(errno, path);
    return Folder(std::move(path));
  }
  Folder(Folder&& other) noexcept : path_(std::exchange(other.path_, "")) {}
  ~Folder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  explicit Folder(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

// Bare transfers with O_DIRECT: 1 MiB, 32 deep, from locked huge pages.
class BareDisk {
 public:
  static absl::StatusOr<BareDisk> Create(const std::string& directory, int64_t bytes) {
    BareDisk bare;
    EBB_ASSIGN_OR_RETURN(Folder own, Folder::Create(directory));
    bare.folder_.emplace(std::move(own));
    bare.bytes_ = (bytes + kBlock - 1) / kBlock * kBlock;
    EBB_ASSIGN_OR_RETURN(bare.memory_,
                         AllocatePinned(2 * kBlock * kDepth, /*pin=*/true, "buffers"));
    return bare;
  }
  std::string path() const { return absl::StrCat(folder_->path(), "/bytes"); }

  // Writes like a checkpoint: makes a new file, reserves its space, writes and syncs it. If the
  // file system tells the disk which files are removed (discard), the disk writes a new file slower
  // than an existing one.
  absl::StatusOr<double> WriteNew() {
    std::filesystem::remove(path());
    return Write(O_CREAT | O_EXCL);
  }
  absl::StatusOr<double> Overwrite() { return Write(0); }
  // Reads all whole blocks of a file.
  absl::StatusOr<double> Read(const std::string& path) {
    const auto begin = Clock::now();
    EBB_ASSIGN_OR_RETURN(const FileHandle file, Open(path, O_RDONLY));
    const auto size = static_cast<int64_t>(std::filesystem::file_size(path));
    EBB_RETURN_IF_ERROR(Move(file, size / kDiskAlignment * kDiskAlignment, /*write=*/false));
    return Since(begin);
  }

 private:
  absl::StatusOr<double> Write(int flags) {
    const auto begin = Clock::now();
    EBB_ASSIGN_OR_RETURN(const FileHandle file, Open(path(), O_RDWR | flags));
    if (flags != 0) {
      if (const int error = WaitReserved(file.get(), bytes_, path()))
        return absl::ErrnoToStatus(error, path());
    }
    EBB_RETURN_IF_ERROR(Move(file, bytes_, /*write=*/true));
    if (fsync(file.get()) != 0) return absl::ErrnoToStatus(errno, "fsync");
    return Since(begin);
  }
  static absl::StatusOr<FileHandle> Open(const std::string& path, int flags) {
    FileHandle file(open(path.c_str(), flags | O_DIRECT | O_CLOEXEC, 0600));
    if (!file.is_open()) return absl::ErrnoToStatus(errno, path);
    return file;
  }
  // One half of the memory is filled while the other is transferred.
  absl::Status Move(const FileHandle& file, int64_t bytes, bool write) {
    EBB_ASSIGN_OR_RETURN(
        const std::unique_ptr<FileTransfers> disk,
        FileTransfers::Create({1, bytes, kBlock},
                              {.files = {file.get()},
                               .paths = {path()},
                               .direct = true,
                               .aio = {.block_bytes = kBlock, .queue_depth = kDepth},
                               .memory = {memory_.buffer.span()}}));
    IoTransfer transfers[2];
    const int64_t window = memory_.buffer.bytes() / 2;
    for (int64_t at = 0, i = 0; at < bytes; at += window, ++i) {
      EBB_RETURN_IF_ERROR(disk->Wait(transfers[i % 2]));
      disk->Start(transfers[i % 2], write, at, memory_.buffer.data() + i % 2 * window,
                  std::min(window, bytes - at));
    }
    for (IoTransfer& transfer : transfers) EBB_RETURN_IF_ERROR(disk->Wait(transfer));
    return absl::OkStatus();
  }

  std::optional<Folder> folder_;
  int64_t bytes_ = 0;
  PinnedMemory memory_;
};

// CPU seconds of this process and of its calls to the kernel, without the kernel's own threads.
double CpuSeconds() {
  timespec time = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}

absl::Status DropFromPageCache(const std::string& folder) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const FileHandle file(open(entry.path().c_str(), O_RDONLY | O_CLOEXEC));
    if (!file.is_open() || posix_fadvise(file.get(), 0, 0, POSIX_FADV_DONTNEED) != 0)
      return absl::ErrnoToStatus(errno, entry.path().string());
  }
  return absl::OkStatus();
}

// The peak memory of the process since this object was made, in MiB.
class PeakMemory {
 public:
  PeakMemory() {
    std::ofstream("/proc/self/clear_refs") << "5";
    before_ = Peak();
  }
  double Added() const { return Peak() - before_; }

 private:
  static double Peak() {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);)
      if (line.starts_with("VmHWM:")) return std::stod(line.substr(6)) / 1024;
    return 0;
  }
  double before_ = 0;
};

class Bench {
 public:
  static absl::StatusOr<Bench> Create(World world, const Arguments& arguments) {
    ModelSpec model;
    std::vector<ParameterId> weights;
    for (int u = 0; u < arguments.units; ++u) {
      const UnitId unit = model.AddUnit(absl::StrCat("unit", u));
      weights.push_back(model.Add(unit, {.name = absl::StrCat("w", u),
                                         .shape = {2048, arguments.elements / 2048},
                                         .init = Constant(static_cast<float>(u + 1))}));
      model.forward.push_back({.unit = unit});
    }
    Config config;
    config.micro_batch_size = 1;
    config.compute = DType::kBFloat16;
    config.zero.stage = 3;
    config.zero.param_persistence_threshold = 0;
    config.gradient_clipping = arguments.early ? 0 : 1;
    config.ebb.check_overflow = !arguments.early;
    config.zero.offload_optimizer = {.device = Tier::kCpu};
    if (arguments.what == "nvme") {
      config.aio.queue_depth = 32;
      config.zero.offload_param = {
          .device = Tier::kNvme, .nvme_paths = {arguments.directory}, .max_in_cpu = 0};
      config.zero.offload_optimizer = {.device = Tier::kNvme, .nvme_paths = {arguments.directory}};
    }
    EBB_ASSIGN_OR_RETURN(Folder folder, Folder::Create(arguments.directory));
    EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, Device::Cpu(arguments.threads),
                                                       std::move(model), config));
    Bench bench(arguments, std::move(folder), std::move(engine), std::move(weights));
    EBB_RETURN_IF_ERROR(bench.Step().status());
    return bench;
  }

  absl::StatusOr<double> Save() {
    engine_.traffic();  // waits for the updates
    // Removing an old checkpoint is no part of a save.
    for (const auto& old : std::filesystem::directory_iterator(folder_.path()))
      std::filesystem::remove_all(old.path());
    const auto begin = Clock::now();
    EBB_RETURN_IF_ERROR(SaveCheckpoint(engine_, folder_.path()).status());
    return Since(begin);
  }
  absl::StatusOr<double> Load() {
    EBB_RETURN_IF_ERROR(DropFromPageCache(folder_.path()));
    const auto begin = Clock::now();
    EBB_RETURN_IF_ERROR(LoadCheckpoint(engine_, folder_.path()).status());
    // Waits until the first unit can be used.
    Evaluation evaluation = engine_.BeginEvaluation();
    evaluation.Forward(UnitId{0}).Close();
    const double seconds = Since(begin);
    for (int u = 1; u < arguments_.units; ++u) evaluation.Forward(UnitId{u}).Close();
    EBB_RETURN_IF_ERROR(evaluation.Finish().status());
    return seconds;
  }

  // Waits until the next step may begin.
  absl::StatusOr<double> Step() {
    const auto begin = Clock::now();
    const double compute = arguments_.compute_ms / 1e3 / 3 / arguments_.units;
    ebb::Step step = engine_.BeginStep();
    for (int u = 0; u < arguments_.units; ++u) {
      const ForwardScope scope = step.Forward(UnitId{u});
      Compute(compute);
    }
    for (int u = arguments_.units; u-- > 0;) {
      BackwardScope scope = step.Backward(UnitId{u});
      const MutableTensorView gradient = scope.gradient(weights_[u]);
      std::ranges::fill(gradient.as<BFloat16>(), BFloat16(0x1p-10f));
      Compute(2 * compute);
    }
    EBB_RETURN_IF_ERROR(step.Finish());
    EBB_RETURN_IF_ERROR(engine_.Report().status());
    return Since(begin);
  }

  absl::Status CompareDisk();
  absl::Status CompareSteps();
  absl::Status Obey();

 private:
  Bench(const Arguments& arguments, Folder folder, Engine engine, std::vector<ParameterId> weights)
      : arguments_(arguments),
        folder_(std::move(folder)),
        engine_(std::move(engine)),
        weights_(std::move(weights)),
        team_(std::make_unique<ThreadTeam>(arguments.threads)),
        rounds_per_second_(RoundsPerSecond()) {}

  std::string RankFile() const {
    return absl::StrCat(*FindCheckpoint(folder_.path()), "/", RankFileName(0, 1));
  }

  // Kernels: arithmetic on each thread that takes `seconds` if nothing else runs. A save that needs
  // one of these cores makes them longer.
  void Compute(double seconds) const {
    const auto rounds = static_cast<int64_t>(seconds * rounds_per_second_);
    team_->Run(team_->threads(), /*grain=*/1, [&](int64_t begin, int64_t end) {
      for (; begin < end; ++begin) Arithmetic(rounds);
    });
  }
  static void Arithmetic(int64_t rounds) {
    static thread_local volatile uint64_t result = 1;
    uint64_t value = result;
    for (int64_t i = 0; i < rounds; ++i)
      value = value * 6364136223846793005u + 1442695040888963407u;
    result = value;
  }
  static double RoundsPerSecond() {
    constexpr int64_t kRounds = 1 << 26;
    double best = 0;
    for (int i = 0; i < 3; ++i) {
      const auto begin = Clock::now();
      Arithmetic(kRounds);
      best = std::max(best, static_cast<double>(kRounds) / Since(begin));
    }
    return best;
  }

  Arguments arguments_;
  Folder folder_;
  Engine engine_;
  std::vector<ParameterId> weights_;
  std::unique_ptr<ThreadTeam> team_;
  double rounds_per_second_ = 0;
};

absl::Status Bench::CompareDisk() {
  EBB_ASSIGN_OR_RETURN(BareDisk bare, BareDisk::Create(arguments_.directory, arguments_.bytes()));
  EBB_RETURN_IF_ERROR(Save().status());
  EBB_RETURN_IF_ERROR(bare.WriteNew().status());
  struct Row {
    const char* what = "";
    std::vector<double> own = {}, disk = {}, ratios = {}, cpu = {};
  };
  Row save{.what = "save"}, load{.what = "load"};
  std::vector<double> over;
  // A disk's own rate changes within seconds, so it is measured before and after.
  const auto turn = [&](Row& row, auto disk, auto own) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const double before, disk());
    const double cpu = CpuSeconds();
    EBB_ASSIGN_OR_RETURN(row.own.emplace_back(), own());
    row.cpu.push_back(CpuSeconds() - cpu);
    EBB_ASSIGN_OR_RETURN(const double after, disk());
    row.disk.push_back((before + after) / 2);
    row.ratios.push_back(row.disk.back() / row.own.back());
    return absl::OkStatus();
  };
  for (int i = 0; i < arguments_.turns; ++i) {
    EBB_RETURN_IF_ERROR(turn(
        save, [&] { return bare.WriteNew(); }, [&] { return Save(); }));
    EBB_ASSIGN_OR_RETURN(over.emplace_back(), bare.Overwrite());
    // The bare transfers read the bytes that are loaded.
    EBB_RETURN_IF_ERROR(turn(
        load, [&] { return bare.Read(RankFile()); }, [&] { return Load(); }));
  }
  const double gigabytes = static_cast<double>(arguments_.bytes()) / 1e9;
  std::printf(
      "%.2f GB, %d turns\n| | GB/s | bare disk | ratio | of turns | CPU s per GB "
      "|\n|---|---|---|---|---|---|\n",
      gigabytes, arguments_.turns);
  for (const Row& row : {save, load}) {
    std::printf("| %s | %.2f | %.2f | %.2f | %.2f to %.2f | %.3f |\n", row.what,
                gigabytes / Median(row.own), gigabytes / Median(row.disk), Median(row.ratios),
                std::ranges::min(row.ratios), std::ranges::max(row.ratios),
                Median(row.cpu) / gigabytes);
  }
  std::printf("(the bare disk writes over a file that is there at %.2f GB/s)\n",
              gigabytes / Median(over));
  return absl::OkStatus();
}

absl::Status Bench::CompareSteps() {
  std::vector<double> alone, beside, ratios, blocked, lasted, added;
  size_t steps = 0;
  for (int turn = 0; turn <= arguments_.turns; ++turn) {
    EBB_RETURN_IF_ERROR(Step().status());
    std::vector<double> of_save;
    const PeakMemory peak;
    const auto begin = Clock::now();
    EBB_ASSIGN_OR_RETURN(const SaveTicket ticket, SaveAsync(engine_, folder_.path(), {.keep = 1}));
    const double block = Since(begin);
    while (!ticket.Done()) {
      EBB_ASSIGN_OR_RETURN(of_save.emplace_back(), Step());
    }
    EBB_RETURN_IF_ERROR(ticket.Wait().status());
    const double last = Since(begin), more = peak.Added();
    double before = 0, with = 0;
    EBB_RETURN_IF_ERROR(Step().status());
    for (size_t i = 0; i < of_save.size(); ++i) {
      EBB_ASSIGN_OR_RETURN(const double step, Step());
      before += step / static_cast<double>(of_save.size());
      with += of_save[i] / static_cast<double>(of_save.size());
    }
    added.push_back(more);
    if (turn == 0) continue;  // the first turn makes streams, communicators and memory, which stay
    alone.push_back(before);
    beside.push_back(with);
    ratios.push_back(with / before);
    blocked.push_back(block);
    lasted.push_back(last);
    steps += of_save.size();
  }
  // One core's copy of a unit, for comparison.
  std::vector<char> from(static_cast<size_t>(arguments_.elements * kBytesOfElement), 1), to(from);
  const auto begin = Clock::now();
  std::memcpy(to.data(), from.data(), from.size());
  const double copy = Since(begin);
  std::printf(
      "%s, %s updates, kernels %.0f ms, %d thread(s), %.2f GB, %d saves over %zu steps:\n"
      "  step %.1f ms alone, %.1f while it is saved: %.3f (of turns %.3f to %.3f)\n"
      "  SaveAsync blocks %.2f ms (at most %.2f); a copy of a unit takes %.1f ms; a save lasts "
      "%.2f s to the end of a "
      "step\n"
      "  memory: the first save keeps %.1f MiB, later saves take at most %.1f more\n",
      arguments_.what.c_str(), arguments_.early ? "early" : "late", arguments_.compute_ms,
      arguments_.threads, static_cast<double>(arguments_.bytes()) / 1e9, arguments_.turns, steps,
      Median(alone) * 1e3, Median(beside) * 1e3, Median(ratios), std::ranges::min(ratios),
      std::ranges::max(ratios), Median(blocked) * 1e3, std::ranges::max(blocked) * 1e3, copy * 1e3,
      Median(lasted), added.front(), std::ranges::max(std::span(added).subspan(1)));
  for (const MemoryRow& row : engine_.memory())
    if (row.state == StateClass::kStaging)
      std::printf("  the memory table has %.1f MiB of staging in %s\n",
                  static_cast<double>(row.peak_bytes) / 0x1p20,
                  std::string(Name(row.tier)).c_str());
  return absl::OkStatus();
}

absl::Status Bench::Obey() {
  EBB_ASSIGN_OR_RETURN(BareDisk bare, BareDisk::Create(arguments_.directory, arguments_.bytes()));
  for (std::string line; std::getline(std::cin, line);) {
    absl::StatusOr<double> seconds = absl::InvalidArgumentError(line);
    if (line == "save") seconds = Save();
    if (line == "load") seconds = Load();
    if (line == "write") seconds = bare.WriteNew();
    if (line == "read") seconds = bare.Read(bare.path());
    EBB_RETURN_IF_ERROR(seconds.status());
    std::printf("%.6f\n", *seconds);
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

absl::Status Run(World world, const Arguments& arguments) {
  EBB_ASSIGN_OR_RETURN(Bench bench, Bench::Create(world, arguments));
  if (arguments.what == "commands") return bench.Obey();
  return arguments.what == "disk" ? bench.CompareDisk() : bench.CompareSteps();
}

}  // namespace
}  // namespace ebb::bench

int main(int argc, char** argv) {
  ebb::OpenMissingStandardStreams();
  ebb::bench::Arguments arguments;
  CLI::App app("Checkpoints against the disk, and beside training");
  app.add_option("directory", arguments.directory, "where checkpoints go")->required();
  app.add_option("what", arguments.what,
                 "disk: saves and loads beside bare transfers; ram, nvme: saves beside steps with "
                 "states there; commands: saves and loads on demand, for "
                 "checkpoint_against_peers.py")
      ->check(CLI::IsMember({"disk", "ram", "nvme", "commands"}));
  app.add_option("--units", arguments.units, "units of the model")->check(CLI::Range(1, 10000));
  app.add_option("--elements", arguments.elements, "elements of a unit, a multiple of 2048")
      ->check(CLI::Range(int64_t{2048}, int64_t{1} << 32));
  app.add_option("--turns", arguments.turns, "turns, of which medians are taken")
      ->check(CLI::Range(1, 1000));
  app.add_option("--compute", arguments.compute_ms, "milliseconds of a step's kernels");
  app.add_option("--threads", arguments.threads, "threads of the rank")->check(CLI::Range(1, 1024));
  app.add_flag("--early", arguments.early, "updates beside backward");
  CLI11_PARSE(app, argc, argv);
  if (arguments.what == "disk" || arguments.what == "commands") arguments.compute_ms = 0;
  setenv("EBB_LOG_LEVEL", "warn", /*overwrite=*/0);
  const absl::Status status =
      ebb::RunThreads(1, [&](ebb::World world) { return ebb::bench::Run(world, arguments); });
  if (status.ok()) return 0;
  std::cerr << "checkpoint_bench: " << status.message() << '\n';
  return 1;
}
