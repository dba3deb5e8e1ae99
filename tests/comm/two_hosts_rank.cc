// A rank on one of two hosts (two_hosts.sh): compares the results of all operations with those of
// the same ranks as threads of this process, bit for bit, or ends in one of the ways in which ranks
// end.
//
//   two_hosts_rank RANKS_PER_HOST [compare | fails | absent | initialises | killed | exits |
//       mpi_on_one_host | stays_killed | stays_cut | without_mpi [LEAVER] | quiet FILE |
//       leaves_late FILE | many_worlds]
//
// RANKS_PER_HOST: the expected default reduction group. Exit codes: 0; 1 after an error; 3 if the
// world has failed as expected.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <future>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/mpi/library.h"
#include "ebb/runtime/comm/rendezvous/store_group.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/machine.h"
#include "ebb/runtime/trace/log.h"
#include "numbers.h"

namespace ebb {
namespace {

using ebb::testing::Numbers;

constexpr int kFailedAsExpected = 3;

// The spans' counts; the last span is moved in several steps.
constexpr int64_t kCounts[] = {515, 0, 1, 300'001};

// Memory of one operation, with so many blocks of each span in and out.
class Operation {
 public:
  Operation(DType dtype, int rank, int sent_blocks, int received_blocks) {
    for (size_t s = 0; s < std::size(kCounts); ++s) {
      send_.emplace_back(dtype, sent_blocks * kCounts[s]);
      send_.back().Fill(static_cast<uint64_t>(rank) * 1000 + s);
      receive_.emplace_back(dtype, received_blocks * kCounts[s]);
    }
    for (size_t s = 0; s < std::size(kCounts); ++s) {
      spans_.push_back({.send = send_[s].at(0), .receive = receive_[s].at(0), .count = kCounts[s]});
    }
  }
  std::span<const CollectiveSpan> spans() const { return spans_; }
  std::vector<Numbers> Take() { return std::move(receive_); }

 private:
  std::vector<Numbers> send_, receive_;
  std::vector<CollectiveSpan> spans_;
};

// The results of all operations on this rank of `world`.
absl::StatusOr<std::vector<Numbers>> Results(const World& world, DType dtype, int group) {
  EBB_ASSIGN_OR_RETURN(Communicator all,
                       world.NewCommunicator({.name = "all", .reduction_group = group}));
  EBB_ASSIGN_OR_RETURN(const World every_second, world.Split(world.rank() % 2, -world.rank()));
  EBB_ASSIGN_OR_RETURN(Communicator part, every_second.NewCommunicator());
  EBB_ASSIGN_OR_RETURN(Stream stream, Device::Cpu(2).NewStream("comm"));
  const int rank = world.rank(), size = world.size();
  std::vector<Numbers> results;
  const auto run = [&](int sent, int received, auto call) -> absl::Status {
    Operation operation(dtype, rank, sent, received);
    EBB_RETURN_IF_ERROR(call(operation.spans()));
    stream.WaitIdle();
    EBB_RETURN_IF_ERROR(all.status());
    EBB_RETURN_IF_ERROR(part.status());
    for (Numbers& numbers : operation.Take()) results.push_back(std::move(numbers));
    return absl::OkStatus();
  };
  EBB_RETURN_IF_ERROR(
      run(1, size, [&](auto spans) { return all.AllGather(stream, spans, dtype); }));
  EBB_RETURN_IF_ERROR(
      run(size, 1, [&](auto spans) { return all.ReduceScatter(stream, spans, dtype, 0.3f); }));
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
    EBB_RETURN_IF_ERROR(
        run(1, 1, [&](auto spans) { return all.AllReduce(stream, spans, dtype, op, 0.3f); }));
  }
  for (int root = 0; root < size; ++root) {
    EBB_RETURN_IF_ERROR(
        run(1, 1, [&](auto spans) { return all.Broadcast(stream, spans, dtype, root); }));
  }
  EBB_RETURN_IF_ERROR(
      run(size, size, [&](auto spans) { return all.AllToAll(stream, spans, dtype); }));
  if (rank == 0 || rank == size - 1) {
    EBB_RETURN_IF_ERROR(run(1, 1, [&](auto spans) {
      return rank == 0 ? all.Send(stream, spans, dtype, size - 1)
                       : all.Receive(stream, spans, dtype, 0);
    }));
  }
  EBB_RETURN_IF_ERROR(run(
      part.size(), 1, [&](auto spans) { return part.ReduceScatter(stream, spans, dtype, 0.5f); }));
  EBB_RETURN_IF_ERROR(all.Barrier(stream));
  stream.WaitIdle();
  EBB_RETURN_IF_ERROR(all.status());
  return results;
}

absl::Status Compare(const World& world) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt8}) {
    for (const int group : {0, world.ranks_per_host(), 1}) {
      EBB_ASSIGN_OR_RETURN(const std::vector<Numbers> found, Results(world, dtype, group));
      std::vector<Numbers> expected;
      EBB_RETURN_IF_ERROR(RunThreads(world.size(), [&](World threads) -> absl::Status {
        EBB_ASSIGN_OR_RETURN(std::vector<Numbers> results, Results(threads, dtype, group));
        if (threads.rank() == world.rank()) expected = std::move(results);
        return absl::OkStatus();
      }));
      if (found == expected) continue;
      for (size_t i = 0; i < found.size(); ++i) {
        if (found[i] == expected[i]) continue;
        return absl::InternalError(absl::StrCat("rank ", world.rank(), ", reduction group ", group,
                                                ": result ", i, " differs"));
      }
    }
  }
  if (world.rank() == 0) std::puts("the same bits");
  return absl::OkStatus();
}

// The last rank ends as `how` says. The others work on until they learn of it.
absl::Status WorkUntilTheLastEnds(const World& world, std::string_view how) {
  EBB_ASSIGN_OR_RETURN(Communicator all,
                       world.NewCommunicator({.name = "all", .timeout_seconds = 60}));
  Stream stream = Device::Cpu(1).CallerStream();
  float value = 0;
  const CollectiveSpan span = {.send = &value, .receive = &value, .count = 1};
  for (int step = 0; all.status().ok(); ++step) {
    if (step == 3 && world.rank() == world.size() - 1) {
      if (how == "killed") raise(SIGKILL);
      if (how == "exits") std::exit(1);  // while its world exists
      if (how == "fails") world.Fail(absl::DataLossError("the disk is gone"));
      if (how == "cut" && std::system("ip link set cable down") != 0)
        return absl::InternalError("the cable cannot be cut");
    }
    EBB_RETURN_IF_ERROR(all.AllReduce(stream, {&span, 1}, DType::kFloat32));
  }
  return all.status();
}

// Ranks started as by torchrun: mpirun only reaches the hosts. The ranks know their hosts, are
// refused communicators for the CPU, and learn that the last rank has died. With a `leaver`, this
// rank leaves in order and ends at once instead, and the others learn that no rank has died.
absl::Status WithoutMpi(int ranks_per_host, std::optional<int> leaver) {
  const int rank = std::atoi(std::getenv("OMPI_COMM_WORLD_RANK"));
  const int size = std::atoi(std::getenv("OMPI_COMM_WORLD_SIZE"));
  setenv("RANK", std::getenv("OMPI_COMM_WORLD_RANK"), 1);
  setenv("WORLD_SIZE", std::getenv("OMPI_COMM_WORLD_SIZE"), 1);
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE"})
    unsetenv(name);
  MeetingPlace place = {.host = "192.0.2.1", .port = 29411, .name = ""};
  setenv("MASTER_ADDR", place.host.c_str(), 1);
  setenv("MASTER_PORT", std::to_string(place.port).c_str(), 1);
  {
    EBB_ASSIGN_OR_RETURN(const World world, World::FromEnvironment({.timeout_seconds = 60}));
    if (world.ranks_per_host() != ranks_per_host || world.local_size() != ranks_per_host ||
        world.local_rank() != rank % ranks_per_host)
      return absl::InternalError("a rank is not where it should be");
    const absl::Status refused = world.NewCommunicator().status();
    if (!absl::StrContains(refused.message(), "on 2 hosts (ebb-a, ebb-b): CPU ranks on several"))
      return absl::InternalError(absl::StrCat("not refused, but: ", refused.message()));
  }
  ++place.port;
  const RendezvousOptions options = {.rank = rank,
                                     .size = size,
                                     .place = place,
                                     .one_host = false,
                                     .launcher = "a test",
                                     .timeout_seconds = 60};
  EBB_ASSIGN_OR_RETURN(Rendezvous rendezvous, Rendezvous::Join(options));
  EBB_ASSIGN_OR_RETURN(const auto world, HostsRank::Form(rank, std::move(rendezvous)));
  std::promise<absl::Status> heard;
  Store& store = (*world->bootstrap())->store();
  store.OnFailure([&](const absl::Status& why) { heard.set_value(why); });
  EBB_RETURN_IF_ERROR((*world->bootstrap())->AllGather("", 60).status());
  if (rank == leaver) store.Leave();
  if (rank == leaver.value_or(size - 1)) _exit(0);
  if (leaver.has_value()) {
    const bool has_ended = !store.MeetLast(60);
    const bool is_cut_off = leaver == 0 && size > 2 && rank >= ranks_per_host;
    const bool is_right = is_cut_off ? absl::StrContains(store.status().message(),
                                                         "has left and its process has ended")
                                     : store.status().ok();
    if (has_ended && is_right) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("rank ", rank, ": ", store.status().ToString()));
  }
  const absl::Status why = heard.get_future().get();
  if (!absl::StrContains(why.message(), absl::StrCat("rank ", size - 1, " (process ")) ||
      !absl::StrContains(why.message(), "on host 'ebb-b') has died"))
    return absl::InternalError(absl::StrCat("not the death of the last, but: ", why.message()));
  std::fprintf(stderr, "rank %d has heard: %s\n", rank, why.ToString().c_str());
  return absl::OkStatus();
}

// Starts ranks as srun does, which does not end them when one dies: each is a child of a process
// that mpirun has started. Nothing in the child; the exit code in the parent. mpirun does not know
// the children. It may end all when the first parent ends, or never. So the killed rank's parent
// stays, and the surviving rank 0's parent ends mpirun. Rank 0 writes to mpirun's own standard error,
// because an mpirun that is killed forwards nothing any more.
std::optional<int> StartAsSrunDoes() {
  const std::string rank = std::getenv("OMPI_COMM_WORLD_RANK");
  const std::string size = std::getenv("OMPI_COMM_WORLD_SIZE");
  const std::string error = absl::StrCat("/proc/", getppid(), "/fd/2");
  if (rank == "0" && std::freopen(error.c_str(), "a", stderr) == nullptr) return 1;
  const pid_t child = fork();
  if (child == 0) {
    for (const char* name : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}) unsetenv(name);
    for (const auto& [name, value] : std::initializer_list<std::pair<const char*, std::string>>{
             {"SLURM_PROCID", rank},
             {"SLURM_STEP_NUM_TASKS", size},
             {"SLURM_JOB_ID", "29431"},
             {"SLURM_STEP_ID", "0"},
             {"SLURM_STEP_NUM_NODES", "2"},
             {"SLURM_STEP_NODELIST", "ebb-[a,b]"}})
      setenv(name, value.c_str(), 1);
    return std::nullopt;
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return 1;
  while (WIFSIGNALED(status)) pause();
  if (rank == "0") kill(getppid(), SIGKILL);
  return WEXITSTATUS(status) == kFailedAsExpected ? 0 : 1;
}

// A number in a file that all ranks map; null: an error.
std::atomic<int64_t>* MapNumber(const char* path) {
  const int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof(std::atomic<int64_t>)) != 0) return nullptr;
  void* const page =
      mmap(nullptr, sizeof(std::atomic<int64_t>), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return page == MAP_FAILED ? nullptr : static_cast<std::atomic<int64_t>*>(page);
}

// Rank 0 leaves its communicator once its log says that another rank waits at its exit. No rank ends
// MPI before that, although MPI_Finalize does not wait here (OMPI_MCA_async_mpi_finalize).
std::atomic<int64_t>* has_left = nullptr;  // 1: rank 0 has

// Call it before MPI is initialised, so that it runs after MPI_Finalize.
void CheckAtExit(const char* path) {
  has_left = MapNumber(path);
  std::atexit([] {
    if (has_left == nullptr || has_left->load() == 0) {
      std::fputs("a rank has ended MPI before rank 0 had left\n", stderr);
      _exit(1);
    }
  });
}

absl::Status LeaveLate(const World& world) {
  std::promise<void> waits;
  if (world.rank() == 0) {
    SendLogTo([&](LogLevel, std::string_view line) {
      if (line.find("for rank 0 on host 'ebb-a' to end the program") != line.npos)
        waits.set_value();
    });
  }
  {
    EBB_ASSIGN_OR_RETURN(Communicator all,
                         world.NewCommunicator({.name = "all", .timeout_seconds = 60}));
    Stream stream = Device::Cpu(1).CallerStream();
    EBB_RETURN_IF_ERROR(all.Barrier(stream));
    if (world.rank() > 0) return all.status();
    waits.get_future().wait();
  }
  SendLogTo({});
  has_left->store(1);
  return absl::OkStatus();
}

// A world that has ended leaves no thread behind, except the one that all ranks meet in at exit.
absl::Status MakeManyWorlds() {
  const auto threads = [] {
    const std::filesystem::directory_iterator all("/proc/self/task");
    return std::distance(begin(all), end(all));
  };
  constexpr int kFirst = 3, kLast = 33;
  std::ptrdiff_t at_first = 0;
  for (int i = 0; i <= kLast; ++i) {
    EBB_ASSIGN_OR_RETURN(const World world, World::FromEnvironment({.timeout_seconds = 60}));
    EBB_ASSIGN_OR_RETURN(Communicator all, world.NewCommunicator({.name = "all"}));
    Stream stream = Device::Cpu(1).CallerStream();
    EBB_RETURN_IF_ERROR(all.Barrier(stream));
    if (i == kFirst) at_first = threads();
  }
  // Rank 0's thread of the last world but one may still hear that the others have let it go.
  const std::ptrdiff_t more = threads() - at_first;
  if (more < (kLast - kFirst) / 2) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(kLast - kFirst, " worlds leave ", more, " threads"));
}

// Ranks that do not call MPI after an operation until all others have ended it, too. Bytes that
// these ranks have sent still arrive. The ranks meet in a file that all map.
absl::Status BeQuiet(const World& world, const char* path) {
  auto* const ended = MapNumber(path);
  if (ended == nullptr) return absl::InternalError(absl::StrCat(path, ": ", std::strerror(errno)));
  EBB_ASSIGN_OR_RETURN(Communicator all,
                       world.NewCommunicator({.name = "all", .timeout_seconds = 60}));
  EBB_ASSIGN_OR_RETURN(Stream stream, Device::Cpu(1).NewStream("comm"));
  constexpr int kRounds = 40;
  for (int round = 0; round < kRounds; ++round) {
    // Steps of many sizes; the last one has a few bytes or a whole slot.
    const int64_t count = 1 + round % 8 * 40'000;
    std::vector<float> send(static_cast<size_t>(count * world.size())), receive(send.size());
    const CollectiveSpan span{.send = send.data(), .receive = receive.data(), .count = count};
    const int root = round % world.size();
    EBB_RETURN_IF_ERROR(round % 2 == 0 ? all.AllToAll(stream, {&span, 1}, DType::kFloat32)
                                       : all.Broadcast(stream, {&span, 1}, DType::kFloat32, root));
    stream.WaitIdle();
    EBB_RETURN_IF_ERROR(all.status());
    ended->fetch_add(1);
    const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (ended->load() < int64_t{round + 1} * world.size()) {
      if (std::chrono::steady_clock::now() > late)
        return absl::DeadlineExceededError(absl::StrCat("round ", round, " has not ended"));
      std::this_thread::yield();
    }
  }
  return absl::OkStatus();
}

// MASTER_ADDR and MASTER_PORT are set, and the host ebb-b has no Open MPI: no rank waits in MPI_Init
// for a rank that cannot come there, and all know the host.
absl::Status WithMpiOnOneHost() {
  const bool lacks_it = HostName() == "ebb-b";
  constexpr const char* kHide =
      "mount --bind /dev/null \"$(ldconfig -p | sed -n 's/.*libmpi[.]so[.]40 .*=> //p' | head -n "
      "1)\"";
  if (lacks_it && (unshare(CLONE_NEWNS) != 0 || std::system(kHide) != 0))
    return absl::InternalError("Open MPI cannot be hidden");
  EBB_ASSIGN_OR_RETURN(const World world, World::FromEnvironment({.timeout_seconds = 60}));
  const absl::Status refused = world.NewCommunicator().status();
  if (!absl::StrContains(refused.message(),
                         "Open MPI is missing on host 'ebb-b' (rank 2, rank 3): "))
    return absl::InternalError(absl::StrCat("not refused, but: ", refused.message()));
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  const int ranks_per_host = argc > 1 ? std::atoi(argv[1]) : 0;
  std::string_view how = argc > 2 ? argv[2] : "compare";
  if (how == "stays_killed" || how == "stays_cut") {
    if (const std::optional<int> parent = StartAsSrunDoes()) return *parent;
    how = how == "stays_cut" ? "cut" : "killed";
  }
  if (how == "many_worlds") {
    const absl::Status status = MakeManyWorlds();
    if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return status.ok() ? 0 : 1;
  }
  if (how == "leaves_late") CheckAtExit(argv[3]);
  const char* const rank = std::getenv("OMPI_COMM_WORLD_RANK");
  if ((how == "absent" || how == "initialises") && rank != nullptr &&
      std::string_view(rank) == "3") {
    if (how == "initialises" && !MpiLibrary::Get(60).ok()) return 1;
    for (;;) pause();
  }
  if (how == "without_mpi" || how == "mpi_on_one_host") {
    const absl::Status status = how == "mpi_on_one_host" ? WithMpiOnOneHost()
                                : argc > 3 ? WithoutMpi(ranks_per_host, std::atoi(argv[3]))
                                           : WithoutMpi(ranks_per_host, std::nullopt);
    if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return status.ok() ? 0 : 1;
  }
  // Only what follows MPI_Init is to be late.
  if (how == "initialises" && !MpiLibrary::Get(60).ok()) return 1;
  const double timeout_seconds = how == "absent" || how == "initialises" ? 1 : 60;
  const absl::StatusOr<World> world = World::FromEnvironment({.timeout_seconds = timeout_seconds});
  absl::Status status = world.status();
  if (status.ok() && world->ranks_per_host() != ranks_per_host) {
    status = absl::InternalError(
        absl::StrCat("the default reduction group is ", world->ranks_per_host()));
  }
  const bool fails = how != "compare" && how != "quiet" && how != "leaves_late";
  if (status.ok()) {
    status = fails                  ? WorkUntilTheLastEnds(*world, how)
             : how == "quiet"       ? BeQuiet(*world, argv[3])
             : how == "leaves_late" ? LeaveLate(*world)
                                    : Compare(*world);
  }
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return fails ? kFailedAsExpected : 1;
}

}  // namespace
}  // namespace ebb

int main(int argc, char** argv) {
  return ebb::Main(argc, argv);
}
