// Finds good aio settings for a path:
//
//   build/release/bin/io_bench /nvme/ebb
//
// Exit codes: 0; 1 if a transfer failed; 2 if the command line is impossible (a path, a size); 130
// if a signal ended it.
//
// Each candidate of a stage has a file. All are measured in turns, a write and a read of the whole
// file, until the stage's share of the time is over; medians. Among candidates within 3% of the
// best (by the time of a write and a read) the one with the least memory is chosen. The stages
// choose the block size, then the queue depth (without io_uring: the threads), then the files, with
// as many requests in flight over all of them as before. A folder that is in the list nvme_path
// several times gets several files, because Ebb stripes over the entries.
//
// io_against_peers.py compares the result with fio.
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/offload/io_error.h"
#include "ebb/offload/pinned_memory.h"
#include "ebb/offload/shard_file.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/thread_limit.h"
#include "ebb/runtime/trace/standard_streams.h"
#include "io_bench_arguments.h"
#include "io_bench_candidate.h"
#include "progress.h"

namespace ebb::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kKiB = int64_t{1} << 10;
constexpr int64_t kMiB = int64_t{1} << 20;
constexpr double kNearBest = 1.03;
constexpr int kFailed = 1, kStopped = 130;

constexpr int64_t kBlocksTried[] = {128 * kKiB, 256 * kKiB, 512 * kKiB, kMiB, 2 * kMiB, 4 * kMiB};
constexpr int kDepthsTried[] = {4, 8, 16, 32, 64};
constexpr int kThreadsTried[] = {4, 8, 16, 32};
constexpr int kFilesTried[] = {1, 2, 4};

volatile std::sig_atomic_t interrupted = 0;

std::string Size(int64_t bytes) {
  return bytes % kMiB == 0 ? absl::StrCat(bytes / kMiB, " MiB")
                           : absl::StrCat(bytes / kKiB, " KiB");
}

// Streams through the whole file with two windows: one is filled while the other is transferred.
absl::Status Stream(ShardFile& file, const PinnedMemory& memory, int64_t bytes, bool write) {
  IoTransfer transfers[2];
  const int64_t window = memory.buffer.bytes() / 2;
  for (int64_t at = 0, i = 0; at < bytes; at += window, ++i) {
    IoTransfer& transfer = transfers[i % 2];
    EBB_RETURN_IF_ERROR(file.Wait(transfer));
    std::byte* const data = memory.buffer.data() + i % 2 * window;
    const int64_t part = std::min(window, bytes - at);
    write ? file.StartWrite(transfer, at, data, part) : file.StartRead(transfer, at, data, part);
  }
  for (IoTransfer& transfer : transfers) EBB_RETURN_IF_ERROR(file.Wait(transfer));
  return absl::OkStatus();
}

// A candidate with a file of its own.
struct EbbFile {
  PinnedMemory memory;
  std::unique_ptr<ShardFile> file;
};

class Bench {
 public:
  explicit Bench(const Arguments& arguments)
      : arguments_(arguments), progress_(arguments.seconds) {}
  absl::Status Run();
  // Whether a failed transfer ended Run. False: a wrong request.
  bool transfer_failed() const { return transfer_failed_; }

 private:
  absl::Status Probe();
  int64_t FilesAtATime() const;
  absl::Status ChooseBytes();
  absl::StatusOr<EbbFile*> MakeFile(const Settings& settings, int64_t bytes);
  absl::StatusOr<Candidate> MakeEbb(const Settings& settings);
  absl::StatusOr<Candidate> MakePair(const Settings& settings);
  absl::Status Measure(std::vector<Candidate>& candidates, double seconds);
  absl::Status Once(Candidate& candidate, bool write, bool count);
  absl::StatusOr<Settings> Find(const std::vector<Settings>& tried, double seconds);
  absl::Status Compare(const Settings& found, double seconds);
  int InFlight(const Settings& settings) const;
  std::string Name(const Settings& settings) const;
  void PrintJson(const Settings& found) const;
  void PrintRow(const Candidate& candidate);
  void Print(const char* line) const {
    if (!arguments_.json_only) std::puts(line);
  }

  Arguments arguments_;
  Progress progress_;
  std::vector<std::unique_ptr<EbbFile>> files_;  // of the stage
  bool uring_ = false;
  bool transfer_failed_ = false;
  bool heading_printed_ = false;
};

absl::Status Bench::Once(Candidate& candidate, bool write, bool count) {
  if (interrupted != 0) return absl::CancelledError("interrupted; its files are removed");
  const auto begin = Clock::now();
  if (absl::Status status = candidate.pass(write); !status.ok()) {
    transfer_failed_ = !IsNoThread(status);
    return status;
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  const double rate = static_cast<double>(arguments_.bytes) / seconds;
  progress_.Show(
      absl::StrFormat("%s: %s %.2f GB/s", candidate.name, write ? "write" : "read", rate / 1e9));
  if (count) (write ? candidate.write_rates : candidate.read_rates).push_back(rate);
  return absl::OkStatus();
}

// Measures in turns, at least three of each candidate.
absl::Status Bench::Measure(std::vector<Candidate>& candidates, double seconds) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  // The first write to reserved space also changes the file system's records of that space.
  for (Candidate& candidate : candidates) EBB_RETURN_IF_ERROR(Once(candidate, true, false));
  for (int round = 0; round < 3 || Clock::now() < end; ++round) {
    for (Candidate& candidate : candidates) {
      EBB_RETURN_IF_ERROR(Once(candidate, true, true));
      EBB_RETURN_IF_ERROR(Once(candidate, false, true));
    }
  }
  return absl::OkStatus();
}

// The requests over all files.
int Bench::InFlight(const Settings& settings) const {
  return uring_ ? settings.aio.queue_depth * settings.files : settings.aio.threads;
}

std::string Bench::Name(const Settings& settings) const {
  const std::string each = absl::StrCat(Size(settings.aio.block_bytes), " x ",
                                        uring_ ? settings.aio.queue_depth : settings.aio.threads,
                                        uring_ ? "" : " threads");
  return settings.files == 1 ? each : absl::StrCat(each, ", ", settings.files, " files");
}

absl::StatusOr<EbbFile*> Bench::MakeFile(const Settings& settings, int64_t bytes) {
  auto ebb = std::make_unique<EbbFile>();
  const AioOptions& aio = settings.aio;
  const int64_t window = std::max(aio.block_bytes * InFlight(settings), 4 * kMiB);
  EBB_ASSIGN_OR_RETURN(ebb->memory, AllocatePinned(2 * window, true, "io_bench"));
  ShardFile::Options options;
  options.directories.assign(static_cast<size_t>(settings.files), arguments_.path);
  options.name = "shards";
  options.bytes = bytes;
  options.aio = aio;
  options.memory = {ebb->memory.buffer.span()};
  EBB_ASSIGN_OR_RETURN(ebb->file, ShardFile::Create(options));
  files_.push_back(std::move(ebb));
  return files_.back().get();
}

// Finds out whether Ebb uses io_uring here.
absl::Status Bench::Probe() {
  EBB_ASSIGN_OR_RETURN(EbbFile* const ebb, MakeFile({}, ShardFile::kAlignment));
  uring_ = ebb->file->backend() == IoBackend::kUring;
  files_.clear();
  return absl::OkStatus();
}

absl::StatusOr<Candidate> Bench::MakeEbb(const Settings& settings) {
  EBB_ASSIGN_OR_RETURN(EbbFile* const ebb, MakeFile(settings, arguments_.bytes));
  Candidate candidate;
  candidate.name = Name(settings);
  candidate.settings = settings;
  candidate.pass = [ebb, bytes = arguments_.bytes](bool write) {
    return Stream(*ebb->file, ebb->memory, bytes, write);
  };
  return candidate;
}

// Measures like two ranks: each has a ring, and half of the bytes.
absl::StatusOr<Candidate> Bench::MakePair(const Settings& settings) {
  const int64_t half = (arguments_.bytes / 2 + kMiB - 1) / kMiB * kMiB;
  EBB_ASSIGN_OR_RETURN(EbbFile* const first, MakeFile(settings, half));
  EBB_ASSIGN_OR_RETURN(EbbFile* const second, MakeFile(settings, arguments_.bytes - half));
  Candidate candidate;
  candidate.name = "Ebb, as two ranks";
  candidate.settings = settings;
  candidate.pass = [first, second, half, rest = arguments_.bytes - half](bool write) {
    absl::Status status;
    std::thread beside;
    try {
      beside = std::thread([&] { status = Stream(*second->file, second->memory, rest, write); });
    } catch (const std::system_error& error) {
      return NoThread("cannot start a thread for the second rank", error);
    }
    absl::Status own = Stream(*first->file, first->memory, half, write);
    beside.join();
    own.Update(status);
    return own;
  };
  return candidate;
}

void Bench::PrintRow(const Candidate& candidate) {
  if (arguments_.json_only) return;
  if (!std::exchange(heading_printed_, true)) {
    std::printf("'%s', files of %s; medians of turns, GB/s\n\n%-28s %8s %8s\n",
                arguments_.path.c_str(), Size(arguments_.bytes).c_str(), "block size x queue depth",
                "write", "read");
  }
  std::printf("%-28s %8.2f %8.2f\n", candidate.name.c_str(), candidate.write_rate() / 1e9,
              candidate.read_rate() / 1e9);
}

absl::StatusOr<Settings> Bench::Find(const std::vector<Settings>& tried, double seconds) {
  std::vector<Candidate> candidates;
  files_.clear();
  for (const Settings& settings : tried) {
    EBB_ASSIGN_OR_RETURN(Candidate candidate, MakeEbb(settings));
    candidates.push_back(std::move(candidate));
  }
  EBB_RETURN_IF_ERROR(Measure(candidates, seconds));
  progress_.Clear();
  double best = candidates.front().seconds_per_byte();
  for (const Candidate& candidate : candidates) {
    PrintRow(candidate);
    best = std::min(best, candidate.seconds_per_byte());
  }
  files_.clear();
  // Candidates go from the least memory to the most.
  for (const Candidate& candidate : candidates) {
    if (candidate.seconds_per_byte() <= kNearBest * best) return candidate.settings;
  }
  return tried.front();
}

// Prints only the keys that Ebb reads, so that Ebb runs with the measured settings.
void Bench::PrintJson(const Settings& found) const {
  std::string folders;
  if (found.files > 1) {
    std::string path;
    for (const char c : arguments_.path) {
      if (c == '"' || c == '\\') path += '\\';
      path += c;
    }
    std::string list;
    for (int i = 0; i < found.files; ++i)
      absl::StrAppend(&list, i == 0 ? "" : ", ", "\"", path, "\"");
    folders = absl::StrCat("\"zero_optimization\": {\"offload_param\": {\"nvme_path\": [", list,
                           "]}, \"offload_optimizer\": {\"nvme_path\": [", list, "]}}, ");
  }
  std::printf(
      "{%s\"aio\": {\"block_size\": %lld, \"queue_depth\": %d, \"intra_op_parallelism\": %d}}\n",
      folders.c_str(), static_cast<long long>(found.aio.block_bytes),
      std::max(found.aio.queue_depth / found.aio.threads, 1), found.aio.threads);
}

absl::Status Bench::Compare(const Settings& found, double seconds) {
  std::vector<Candidate> candidates;
  EBB_ASSIGN_OR_RETURN(Candidate ebb, MakeEbb(found));
  ebb.name = absl::StrCat("Ebb ", ebb.name);
  const std::string description = files_.back()->file->description();
  candidates.push_back(std::move(ebb));
  if (!arguments_.json_only && arguments_.bytes >= 4 * kMiB) {
    EBB_ASSIGN_OR_RETURN(Candidate pair, MakePair(found));
    candidates.push_back(std::move(pair));
  }
  EBB_RETURN_IF_ERROR(Measure(candidates, seconds));
  progress_.Clear();
  const Candidate& found_rates = candidates.front();
  if (arguments_.json_only) {
    std::printf(
        "{\"block_size\": %lld, \"queue_depth\": %d, \"files\": %d, \"write\": %.0f, \"read\": "
        "%.0f, \"description\": \"%s\"}\n",
        static_cast<long long>(found.aio.block_bytes), found.aio.queue_depth, found.files,
        found_rates.write_rate(), found_rates.read_rate(), description.c_str());
    return absl::OkStatus();
  }
  for (const Candidate& candidate : candidates) PrintRow(candidate);
  std::printf("\nEbb reaches the disk by %s. For the configuration:\n\n", description.c_str());
  PrintJson(found);
  return absl::OkStatus();
}

// The number of files of that size at a time: those of the stage with most files. The last stage
// has a file, and those of the pair, which are as large together.
int64_t Bench::FilesAtATime() const {
  size_t files = 2;
  if (arguments_.files == 0) files = std::max(files, std::size(kFilesTried));
  if (arguments_.depth == 0) {
    files = std::max(files, uring_ ? std::size(kDepthsTried) : std::size(kThreadsTried));
  }
  if (arguments_.block_bytes == 0) files = std::max(files, std::size(kBlocksTried));
  return static_cast<int64_t>(files);
}

// Uses the requested bytes, or as many as fit.
absl::Status Bench::ChooseBytes() {
  struct statvfs disk = {};
  if (statvfs(arguments_.path.c_str(), &disk) != 0) {
    return IoError(absl::StrCat("cannot look at '", arguments_.path, "'"), errno);
  }
  const auto free = static_cast<int64_t>(disk.f_bavail) * static_cast<int64_t>(disk.f_frsize);
  const int64_t files = FilesAtATime();
  if (arguments_.bytes == 0) {
    // At most half of the free space, and a little less.
    const int64_t share = free / (2 * (files + 1));
    const int64_t unit = share >= 4 * kMiB ? 4 * kMiB : kBytesMin;
    arguments_.bytes = std::clamp(share / unit * unit, kBytesMin, 512 * kMiB);
  }
  arguments_.bytes = (arguments_.bytes + ShardFile::kAlignment - 1) / ShardFile::kAlignment *
                     ShardFile::kAlignment;
  if (arguments_.bytes <= free / files) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      files, " files of ", Size(arguments_.bytes), " at a time do not fit into '", arguments_.path,
      "', where ", Size(free / kMiB * kMiB), " are free: free space there",
      arguments_.bytes > kBytesMin ? ", or lower --bytes" : ""));
}

absl::Status Bench::Run() {
  EBB_RETURN_IF_ERROR(Probe());
  EBB_RETURN_IF_ERROR(ChooseBytes());
  const bool find_block = arguments_.block_bytes == 0;
  const bool find_depth = arguments_.depth == 0;
  const bool find_files = arguments_.files == 0;
  const double share = arguments_.seconds / (1 + find_block + find_depth + find_files);
  Settings best;
  best.aio.block_bytes = find_block ? kMiB : arguments_.block_bytes;
  best.aio.queue_depth = find_depth ? 32 : static_cast<int>(arguments_.depth);
  best.files = find_files ? 1 : static_cast<int>(arguments_.files);
  if (!uring_) best.aio.threads = 8;
  const auto find = [&](const auto& values, const auto& set) -> absl::Status {
    std::vector<Settings> tried;
    for (const auto value : values) {
      tried.push_back(best);
      set(tried.back(), value);
    }
    EBB_ASSIGN_OR_RETURN(best, Find(tried, share));
    return absl::OkStatus();
  };
  if (find_block) {
    EBB_RETURN_IF_ERROR(find(
        kBlocksTried, [](Settings& settings, int64_t bytes) { settings.aio.block_bytes = bytes; }));
  }
  if (find_depth && uring_) {
    EBB_RETURN_IF_ERROR(find(
        kDepthsTried, [](Settings& settings, int depth) { settings.aio.queue_depth = depth; }));
  } else if (find_depth) {
    EBB_RETURN_IF_ERROR(find(
        kThreadsTried, [](Settings& settings, int threads) { settings.aio.threads = threads; }));
  }
  if (find_files) {
    EBB_RETURN_IF_ERROR(find(kFilesTried, [](Settings& settings, int files) {
      settings.files = files;
      settings.aio.queue_depth = std::max(settings.aio.queue_depth / files, 1);
    }));
  }
  return Compare(best, share);
}

int Main(int argc, char** argv) {
  Arguments arguments;
  if (const std::optional<int> exit_code = Parse(argc, argv, arguments)) return *exit_code;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    // A signal that the parent ignores, as nohup does, stays ignored.
    if (std::signal(signal, [](int) { interrupted = 1; }) == SIG_IGN) std::signal(signal, SIG_IGN);
  }
  Bench bench(arguments);
  const absl::Status status = bench.Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "io_bench: %s\n", std::string(status.message()).c_str());
  if (absl::IsCancelled(status)) return kStopped;
  return bench.transfer_failed() ? kFailed : kUsageError;
}

}  // namespace
}  // namespace ebb::bench

int main(int argc, char** argv) {
  // Otherwise the first opened files would take their descriptors.
  ebb::OpenMissingStandardStreams();
  return ebb::bench::Main(argc, argv);
}
