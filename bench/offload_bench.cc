// A step with parameters and optimizer states on NVMe against its bound. The bound follows from the
// time of the same step in memory, and from the disk's time for the same bytes. All are measured in
// turns, in one run; medians.
//
//   build/release/bin/offload_bench DIRECTORY [COMPUTE_MS [early|late|checksums]]
//
// One rank, 12 units of 4 M bf16 parameters, AdamW, stage 3, no state kept in RAM. COMPUTE_MS: the
// time of the kernels of a whole step, a third of it in forward (default: 1000). Bound, late
// updates: max(forward, its traffic and the states') + max(backward, its traffic); early: max(step,
// all traffic). Traffic is the plan's. The disk's time for it is measured before and after: as many
// bytes are read and written at once, in blocks of 1 MiB, 32 deep, through a file of Ebb's and
// through a bare loop (raw_disk.h). The faster median counts. If the file system refuses O_DIRECT,
// there is no bare loop, and a line says so. checksums: the cost of ebb.verify_swap in a step with
// only updates, which read, sum, update, sum and write their states. It prints time, which varies
// with the disk, and processor time, for "states" over "off" and "all" over "states", beside the
// estimate of "auto".
//
// DIRECTORY needs 2 GiB free: the engine's 14 bytes for each parameter, and two files, each as long
// as a step's traffic in its larger direction. checksums: the bytes of two engines.
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/ebb.h"
#include "ebb/offload/file_handle.h"
#include "ebb/offload/pinned_memory.h"
#include "ebb/offload/shard_file.h"
#include "ebb/offload/swap_directory.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/trace/standard_streams.h"
#include "ebb/sharding/plan.h"
#include "raw_disk.h"

namespace ebb::bench {
namespace {

constexpr int kUnits = 12, kWarmUps = 1, kTurns = 7;
constexpr int kChecksumTurns = 21;
constexpr int kStepsPerTurn = 4;  // in a row, after one that is not measured
constexpr int64_t kRows = 2048, kColumns = 2048;
constexpr int64_t kPiece = int64_t{12} << 20;
constexpr int64_t kBlock = int64_t{1} << 20;  // of requests of the bare loop
constexpr int kDepth = 32;

using Clock = std::chrono::steady_clock;
double Since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}
// The processor time of all threads, including the system's for them.
double ProcessorSeconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}
double Quantile(std::vector<double> values, double part) {
  const auto at = static_cast<int64_t>(static_cast<double>(values.size()) * part);
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[static_cast<size_t>(at)];
}
double Median(const std::vector<double>& values) {
  return Quantile(values, 0.5);
}

// Keeps a core busy for that time, instead of kernels.
void Compute(double seconds) {
  const auto begin = Clock::now();
  while (Since(begin) < seconds) continue;
}

struct Model {
  ModelSpec spec;
  std::vector<ParameterId> weights;
};
Model MakeModel() {
  Model model;
  for (int u = 0; u < kUnits; ++u) {
    const UnitId unit = model.spec.AddUnit(absl::StrCat("unit", u));
    model.weights.push_back(model.spec.Add(
        unit,
        {.name = absl::StrCat("w", u), .shape = {kRows, kColumns}, .init = Normal(0.02f, 1)}));
    model.spec.forward.push_back({.unit = unit});
  }
  return model;
}

Config ConfigFor(bool early, const std::string& directory) {
  Config config;
  config.micro_batch_size = 1;
  config.compute = DType::kBFloat16;
  config.zero.stage = 3;
  config.zero.param_persistence_threshold = 0;
  config.gradient_clipping = early ? 0 : 1;
  config.ebb.check_overflow = !early;
  if (directory.empty()) return config;
  config.aio.queue_depth = 32;
  config.zero.offload_param = {.device = Tier::kNvme, .nvme_paths = {directory}, .max_in_cpu = 0};
  config.zero.offload_optimizer = {.device = Tier::kNvme, .nvme_paths = {directory}};
  return config;
}

struct StepTime {
  double forward = 0, backward = 0;
  double all() const { return forward + backward; }
};
absl::StatusOr<StepTime> RunStep(Engine& engine, const Model& model, double compute) {
  StepTime time;
  auto begin = Clock::now();
  Step step = engine.BeginStep();
  for (int u = 0; u < kUnits; ++u) {
    const ForwardScope scope = step.Forward(UnitId{u});
    Compute(compute / 3 / kUnits);
  }
  time.forward = Since(begin);
  begin = Clock::now();
  for (int u = kUnits; u-- > 0;) {
    BackwardScope scope = step.Backward(UnitId{u});
    const MutableTensorView gradient = scope.gradient(model.weights[static_cast<size_t>(u)]);
    for (BFloat16& g : gradient.as<BFloat16>()) g.bits = 0x3c00;
    Compute(compute * 2 / 3 / kUnits);
  }
  EBB_RETURN_IF_ERROR(step.Finish());
  EBB_RETURN_IF_ERROR(engine.Report().status());
  time.backward = Since(begin);
  return time;
}

struct Bytes {
  int64_t read = 0, written = 0;
};
// Rounded to a size that a transfer with O_DIRECT may have.
constexpr int64_t Aligned(int64_t bytes) {
  return (bytes + ShardFile::kAlignment - 1) / ShardFile::kAlignment * ShardFile::kAlignment;
}
// The bytes that a step's operations move from and to the swap file, before and after the first
// backward.
std::vector<Bytes> TrafficOf(const sharding::Plan& plan) {
  std::vector<Bytes> phases(2);
  size_t phase = 0;
  for (const sharding::Moment& moment : plan.moments) {
    if (moment.scope >= 0 && plan.scopes[static_cast<size_t>(moment.scope)].backward) phase = 1;
    for (int index : moment.operations()) {
      const sharding::Operation& operation = plan.operations[static_cast<size_t>(index)];
      if (operation.condition == sharding::Condition::kNotCarrying) continue;
      for (const sharding::Move& move : operation.moves) {
        if (operation.kind == sharding::OperationKind::kRead) phases[phase].read += move.bytes;
        if (operation.kind == sharding::OperationKind::kWrite) phases[phase].written += move.bytes;
      }
    }
  }
  return phases;
}

// The seconds in which `run` moves the traffic.
absl::StatusOr<StepTime> TimePhases(const std::vector<Bytes>& phases,
                                    absl::FunctionRef<absl::Status(const Bytes&)> run) {
  StepTime time;
  for (size_t i = 0; i < phases.size(); ++i) {
    const auto begin = Clock::now();
    EBB_RETURN_IF_ERROR(run(phases[i]));
    (i == 0 ? time.forward : time.backward) = Since(begin);
  }
  return time;
}

// The disk without Ebb.
class BareFile {
 public:
  // Nothing: the file system refuses O_DIRECT at the opening or at the first write.
  static absl::StatusOr<std::optional<BareFile>> Create(const std::string& directory,
                                                        int64_t bytes) {
    EBB_ASSIGN_OR_RETURN(SwapDirectory own, SwapDirectory::Create(directory, "bare"));
    BareFile bare(std::move(own));
    const std::string path = absl::StrCat(bare.directory_.path(), "/shards");
    bare.file_ =
        FileHandle(open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_DIRECT, 0600));
    if (!bare.file_.is_open() && errno == EINVAL) return std::nullopt;
    if (!bare.file_.is_open()) return absl::ErrnoToStatus(errno, path);
    bare.descriptors_ = {bare.file_.get()};
    EBB_ASSIGN_OR_RETURN(bare.memory_, AllocatePinned(kBlock * kDepth, /*pin=*/true, "buffers"));
    const ssize_t block = pwrite(bare.file_.get(), bare.memory_.buffer.data(), kBlock, 0);
    if (block < 0 && errno == EINVAL) return std::nullopt;
    if (block < 0) return absl::ErrnoToStatus(errno, path);
    const RawDiskOptions options{.files = bare.descriptors_,
                                 .bytes = (bytes + kBlock - 1) / kBlock * kBlock,
                                 .block_bytes = kBlock,
                                 .depth = kDepth,
                                 .memory = bare.memory_.buffer.span()};
    bare.disk_ = RawUring(options);
    if (bare.disk_ == nullptr) bare.disk_ = RawThreads(options);
    EBB_RETURN_IF_ERROR(bare.disk_->Move(0, options.bytes));  // the first write
    return bare;
  }
  absl::Status Run(const Bytes& bytes) {
    return disk_->Move(Aligned(bytes.read), Aligned(bytes.written));
  }

 private:
  explicit BareFile(SwapDirectory directory) : directory_(std::move(directory)) {}

  SwapDirectory directory_;
  FileHandle file_;
  std::vector<int> descriptors_;
  PinnedMemory memory_;
  std::unique_ptr<RawDisk> disk_;
};

// The disk alone, through a file of Ebb's.
class OwnFile {
 public:
  static absl::StatusOr<OwnFile> Create(const std::string& directory, int64_t bytes) {
    EBB_ASSIGN_OR_RETURN(SwapDirectory own, SwapDirectory::Create(directory, "raw"));
    OwnFile raw(std::move(own));
    raw.bytes_ = (bytes + kPiece - 1) / kPiece * kPiece;
    EBB_ASSIGN_OR_RETURN(raw.memory_, AllocatePinned(4 * kPiece, /*pin=*/true, "buffers"));
    EBB_ASSIGN_OR_RETURN(raw.file_, ShardFile::Create({.directories = {raw.directory_.path()},
                                                       .name = "shards",
                                                       .bytes = raw.bytes_,
                                                       .aio = {},
                                                       .memory = {raw.memory_.buffer.span()},
                                                       .wrap_queue = {}}));
    EBB_RETURN_IF_ERROR(raw.Run({.read = 0, .written = raw.bytes_}));  // the first write
    return raw;
  }
  // Reads and writes at once, with two pieces of each under way.
  absl::Status Run(const Bytes& bytes) {
    IoTransfer transfers[4];  // two that read, two that write
    int64_t left[2] = {bytes.read, bytes.written}, at[2] = {0, bytes_ / 2 / kPiece * kPiece};
    bool started[4] = {};
    for (bool more = true; more;) {
      more = false;
      for (int i = 0; i < 4; ++i) {
        const int writes = i / 2;
        if (std::exchange(started[i], false)) EBB_RETURN_IF_ERROR(file_->Wait(transfers[i]));
        if (left[writes] <= 0) continue;
        const int64_t piece = std::min(kPiece, Aligned(left[writes]));
        std::byte* const data = memory_.buffer.data() + i * kPiece;
        if (writes == 0) {
          file_->StartRead(transfers[i], at[writes], data, piece);
        } else {
          file_->StartWrite(transfers[i], at[writes], data, piece);
        }
        at[writes] = (at[writes] + kPiece) % bytes_;
        left[writes] -= piece;
        started[i] = more = true;
      }
    }
    return absl::OkStatus();
  }

 private:
  explicit OwnFile(SwapDirectory directory) : directory_(std::move(directory)) {}

  SwapDirectory directory_;
  PinnedMemory memory_;
  std::unique_ptr<ShardFile> file_;
  int64_t bytes_ = 0;
};

absl::Status Compare(World world, const std::string& directory, bool early, double compute) {
  const Model model = MakeModel();
  const Device device = Device::Cpu();
  EBB_ASSIGN_OR_RETURN(Engine in_memory,
                       Engine::Create(world, device, model.spec, ConfigFor(early, "")));
  EBB_ASSIGN_OR_RETURN(Engine on_disk,
                       Engine::Create(world, device, model.spec, ConfigFor(early, directory)));
  const std::vector<Bytes> phases = TrafficOf(on_disk.program().plan());
  const Bytes all{.read = phases[0].read + phases[1].read,
                  .written = phases[0].written + phases[1].written};
  const int64_t most = std::max(all.read, all.written);
  EBB_ASSIGN_OR_RETURN(OwnFile own, OwnFile::Create(directory, most));
  EBB_ASSIGN_OR_RETURN(std::optional<BareFile> bare, BareFile::Create(directory, most));
  // The ways to the disk, in the order of turns.
  struct Disk {
    const char* name;
    std::function<absl::Status(const Bytes&)> run;
    std::vector<StepTime> times = {};
  };
  std::vector<Disk> disks = {{"Ebb's file", [&](const Bytes& bytes) { return own.Run(bytes); }}};
  if (bare) {
    disks.push_back({"a bare loop", [&](const Bytes& bytes) { return bare->Run(bytes); }});
  } else {
    std::printf(
        "%s refuses O_DIRECT: the disk alone is Ebb's file, without a bare loop beside it\n",
        directory.c_str());
  }
  std::vector<StepTime> in_memory_steps;
  std::vector<double> steps;
  for (int turn = 0; turn < kWarmUps + kTurns; ++turn) {
    EBB_ASSIGN_OR_RETURN(const StepTime memory, RunStep(in_memory, model, compute));
    // A disk's own time changes within seconds, so it is measured before and after.
    std::vector<StepTime> before, after;
    for (const Disk& disk : disks) {
      EBB_ASSIGN_OR_RETURN(before.emplace_back(), TimePhases(phases, disk.run));
    }
    EBB_RETURN_IF_ERROR(RunStep(on_disk, model, compute).status());
    double in_row = 0;
    for (int i = 0; i < kStepsPerTurn; ++i) {
      EBB_ASSIGN_OR_RETURN(const StepTime step, RunStep(on_disk, model, compute));
      in_row += step.all() / kStepsPerTurn;
    }
    // Waits for the updates, which would otherwise run in the next program's turn.
    on_disk.traffic();
    for (const Disk& disk : disks) {
      EBB_ASSIGN_OR_RETURN(after.emplace_back(), TimePhases(phases, disk.run));
    }
    if (turn < kWarmUps) continue;
    steps.push_back(in_row);
    in_memory_steps.push_back(memory);
    for (size_t d = 0; d < disks.size(); ++d) {
      disks[d].times.push_back({.forward = (before[d].forward + after[d].forward) / 2,
                                .backward = (before[d].backward + after[d].backward) / 2});
    }
  }
  const auto median = [](const std::vector<StepTime>& times) {
    std::vector<double> whole;
    for (const StepTime& time : times) whole.push_back(time.all());
    return Median(whole);
  };
  std::sort(disks.begin(), disks.end(),
            [&](const Disk& a, const Disk& b) { return median(a.times) < median(b.times); });
  const Disk& disk = disks[0];
  std::string ways = disk.name;
  if (disks.size() > 1)
    ways += absl::StrFormat("; %s %.1f", disks[1].name, median(disks[1].times) * 1e3);
  std::vector<double> bounds, ratios;
  for (size_t i = 0; i < steps.size(); ++i) {
    const StepTime &memory = in_memory_steps[i], &alone = disk.times[i];
    bounds.push_back(early ? std::max(memory.all(), alone.all())
                           : std::max(memory.forward, alone.forward) +
                                 std::max(memory.backward, alone.backward));
    ratios.push_back(steps[i] / bounds[i]);
  }
  const double parameters = static_cast<double>(kUnits) * kRows * kColumns;
  std::printf(
      "%-6s compute %5.0f ms: step %7.1f ms, in memory %7.1f, disk alone %7.1f (%s), "
      "bound %7.1f: %.2f x the bound; %.1f bytes a parameter\n",
      early ? "early" : "late", compute * 1e3, Median(steps) * 1e3, median(in_memory_steps) * 1e3,
      median(disk.times) * 1e3, ways.c_str(), Median(bounds) * 1e3, Median(ratios),
      static_cast<double>(all.read + all.written) / parameters);
  return absl::OkStatus();
}

absl::Status CompareChecksums(World world, const std::string& directory, VerifySwap fewer,
                              VerifySwap more, const char* names) {
  const Model model = MakeModel();
  const Device device = Device::Cpu();
  Config config = ConfigFor(/*early=*/false, directory);
  config.ebb.verify_swap = fewer;
  EBB_ASSIGN_OR_RETURN(Engine without, Engine::Create(world, device, model.spec, config));
  config.ebb.verify_swap = more;
  EBB_ASSIGN_OR_RETURN(Engine with, Engine::Create(world, device, model.spec, config));
  std::vector<double> times[2], busy[2], ratios, busy_ratios;
  for (int turn = 0; turn < kWarmUps + kChecksumTurns; ++turn) {
    double of_turn[2] = {}, busy_of_turn[2] = {};
    for (int i = 0; i < 2; ++i) {
      const int verifies = (turn + i) % 2;  // the first changes from turn to turn
      Engine& engine = verifies == 1 ? with : without;
      EBB_RETURN_IF_ERROR(RunStep(engine, model, /*compute=*/0).status());
      engine.traffic();  // waits for the updates
      const auto begin = Clock::now();
      const double busy_before = ProcessorSeconds();
      for (int step = 0; step < kStepsPerTurn; ++step)
        EBB_RETURN_IF_ERROR(RunStep(engine, model, /*compute=*/0).status());
      engine.traffic();
      of_turn[verifies] = Since(begin) / kStepsPerTurn;
      busy_of_turn[verifies] = (ProcessorSeconds() - busy_before) / kStepsPerTurn;
    }
    if (turn < kWarmUps) continue;
    for (int i = 0; i < 2; ++i) {
      times[i].push_back(of_turn[i]);
      busy[i].push_back(busy_of_turn[i]);
    }
    ratios.push_back(of_turn[1] / of_turn[0]);
    busy_ratios.push_back(busy_of_turn[1] / busy_of_turn[0]);
  }
  std::printf(
      "checksums, %s: step of updates alone %.1f ms, %.1f: %.3f (quartiles %.3f, %.3f)\n"
      "           of processors %.1f ms, %.1f: %.3f (quartiles %.3f, %.3f)\n",
      names, Median(times[0]) * 1e3, Median(times[1]) * 1e3, Median(ratios), Quantile(ratios, 0.25),
      Quantile(ratios, 0.75), Median(busy[0]) * 1e3, Median(busy[1]) * 1e3, Median(busy_ratios),
      Quantile(busy_ratios, 0.25), Quantile(busy_ratios, 0.75));
  return absl::OkStatus();
}

// Prints the decision of "auto" for the same step. The engine logs its reason.
absl::Status ShowAuto(World world, const std::string& directory) {
  const Model model = MakeModel();
  Config config = ConfigFor(/*early=*/false, directory);
  config.ebb.verify_swap = VerifySwap::kAuto;
  EBB_ASSIGN_OR_RETURN(Engine engine, Engine::Create(world, Device::Cpu(), model.spec, config));
  std::printf("           auto: %s\n",
              engine.config().ebb.verify_swap == VerifySwap::kAll ? "all" : "states");
  return absl::OkStatus();
}

}  // namespace
}  // namespace ebb::bench

int main(int argc, char** argv) {
  ebb::OpenMissingStandardStreams();
  const std::string_view only = argc == 4 ? argv[3] : "";
  if (argc < 2 || argc > 4 ||
      (argc == 4 && only != "early" && only != "late" && only != "checksums")) {
    std::fprintf(stderr, "usage: offload_bench DIRECTORY [COMPUTE_MS [early|late|checksums]]\n");
    return 2;
  }
  setenv("EBB_LOG_LEVEL", "warn", /*overwrite=*/0);
  const double compute = (argc >= 3 ? std::atof(argv[2]) : 1000.0) / 1e3;
  const absl::Status status = ebb::RunThreads(1, [&](ebb::World world) -> absl::Status {
    for (const bool early : {false, true}) {
      if (!only.empty() && only != (early ? "early" : "late")) continue;
      if (absl::Status compared = ebb::bench::Compare(world, argv[1], early, compute);
          !compared.ok())
        return compared;
    }
    if (!only.empty() && only != "checksums") return absl::OkStatus();
    using enum ebb::VerifySwap;
    EBB_RETURN_IF_ERROR(
        ebb::bench::CompareChecksums(world, argv[1], kOff, kStates, "off and states"));
    EBB_RETURN_IF_ERROR(
        ebb::bench::CompareChecksums(world, argv[1], kStates, kAll, "states and all"));
    return ebb::bench::ShowAuto(world, argv[1]);
  });
  if (status.ok()) return 0;
  std::fprintf(stderr, "offload_bench: %s\n", std::string(status.message()).c_str());
  return 1;
}
