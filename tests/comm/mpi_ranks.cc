// The conformance suites over MPI: a program that mpirun starts as many times as a world has ranks.
// Every process runs every test; processes that a test's world does not need wait for the others.
// All ranks are on this machine, but they are told to be on several hosts, in the ways in which
// ranks may be spread over hosts. Real hosts: two_hosts_test.cc.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <mpi.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "backends.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/mpi/endpoint.h"
#include "ebb/runtime/comm/mpi/world.h"
#include "ebb/runtime/comm/rendezvous/connection.h"
#include "processes.h"

namespace ebb {

// Ebb declares Open MPI's interface itself.
static_assert(std::is_same_v<MPI_Comm, OpenMpi::Comm> &&
              std::is_same_v<MPI_Request, OpenMpi::Request> &&
              std::is_same_v<MPI_Status, OpenMpi::Status>);
#define EBB_DECLARED(name) \
  static_assert(std::is_same_v<decltype(&MPI_##name), decltype(OpenMpi::name)>)
EBB_DECLARED(Init_thread);
EBB_DECLARED(Initialized);
EBB_DECLARED(Query_thread);
EBB_DECLARED(Finalize);
EBB_DECLARED(Finalized);
EBB_DECLARED(Error_string);
EBB_DECLARED(Comm_rank);
EBB_DECLARED(Comm_size);
EBB_DECLARED(Comm_idup);
EBB_DECLARED(Comm_get_attr);
EBB_DECLARED(Comm_set_errhandler);
EBB_DECLARED(Ibcast);
EBB_DECLARED(Isend);
EBB_DECLARED(Issend);
EBB_DECLARED(Iprobe);
EBB_DECLARED(Irecv);
EBB_DECLARED(Test);
EBB_DECLARED(Cancel);
#undef EBB_DECLARED
static_assert(OpenMpi::kSuccess == MPI_SUCCESS && OpenMpi::kTagUpperBound == MPI_TAG_UB &&
              OpenMpi::kThreadSingle == MPI_THREAD_SINGLE &&
              OpenMpi::kThreadSerialized == MPI_THREAD_SERIALIZED &&
              OpenMpi::kThreadMultiple == MPI_THREAD_MULTIPLE &&
              OpenMpi::kErrorTextBytes >= MPI_MAX_ERROR_STRING);

TEST(OpenMpi, HasTheHandlesOfItsHeader) {
  const absl::StatusOr<const OpenMpi*> mpi = LoadOpenMpi();
  ASSERT_TRUE(mpi.ok()) << mpi.status();
  EXPECT_EQ((*mpi)->comm_world, MPI_COMM_WORLD);
  EXPECT_EQ((*mpi)->byte, MPI_BYTE);
  EXPECT_EQ((*mpi)->errors_return, MPI_ERRORS_RETURN);
}

}  // namespace ebb

namespace ebb::testing {
namespace {

int RankOfAll() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}
int AllRanks() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

// Messages about the tests, from all processes to all.
std::vector<std::string> Exchange(std::string_view mine) {
  constexpr size_t kBytes = 2048;
  std::vector<char> all(kBytes * static_cast<size_t>(AllRanks())), own(kBytes);
  const std::string packed = Packer().Add(mine.substr(0, kBytes - 8)).Take();
  std::copy(packed.begin(), packed.end(), own.begin());
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Iallgather(own.data(), kBytes, MPI_CHAR, all.data(), kBytes, MPI_CHAR, MPI_COMM_WORLD,
                 &request);
  int complete = 0;  // MPI's own waiting would take the cores from the ranks of a test
  for (Backoff backoff; complete == 0; backoff.Pause())
    MPI_Test(&request, &complete, MPI_STATUS_IGNORE);
  std::vector<std::string> texts;
  for (size_t rank = 0; rank < all.size() / kBytes; ++rank)
    texts.push_back(Unpacker({all.data() + rank * kBytes, kBytes}).Text());
  return texts;
}

absl::Status RunRank(MPI_Comm ranks, const std::string& host,
                     const std::function<absl::Status(World)>& body) {
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<WorldBackend> world,
                       NewMpiWorld({.ranks = ranks, .timeout_seconds = 60, .host = host}));
  return body(World(std::move(world)));
}

using HostOf = std::string (*)(int rank);

absl::Status Run(int ranks, HostOf host_of, const std::function<absl::Status(World)>& body) {
  const int me = RankOfAll();
  if (ranks > AllRanks())
    return absl::InvalidArgumentError("mpirun has not started enough processes");
  MPI_Comm members = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, me < ranks ? 0 : MPI_UNDEFINED, me, &members);
  absl::Status status;
  if (me < ranks) {
    status = RunRank(members, host_of(me), body);
    if (!status.ok())
      status = absl::Status(status.code(), absl::StrCat("rank ", me, ": ", status.message()));
  }
  for (const std::string& packed : Exchange(PackStatus(status))) {
    const absl::Status other = UnpackStatus(packed);
    if (status.ok() && !other.ok()) status = other;
  }
  if (members != MPI_COMM_NULL) MPI_Comm_free(&members);
  return status;
}

template <HostOf kHostOf>
Backend On(const char* name) {
  Backend backend;
  backend.name = name;
  backend.run = [](int ranks, std::function<absl::Status(World)> body) {
    return Run(ranks, kHostOf, body);
  };
  backend.many_ranks = 8;
  backend.fails_as_a_whole = true;
  backend.names_hosts = true;
  return backend;
}

std::string OneHost(int) {
  return "";
}
std::string HostEach(int rank) {
  return absl::StrCat(rank);
}
std::string Pairs(int rank) {  // an odd number of ranks leaves one alone
  return absl::StrCat(rank / 2);
}
std::string Alternating(int rank) {
  return absl::StrCat(rank % 2);
}

}  // namespace

std::vector<Backend> Backends() {
  return {On<OneHost>("mpi_one_host"), On<HostEach>("mpi_host_each"), On<Pairs>("mpi_pairs"),
          On<Alternating>("mpi_alternating")};
}

void* MakeShared(size_t bytes, absl::FunctionRef<void(void* at)> construct) {
  static int made = 0;
  const std::string name =
      absl::StrCat("/ebb-test-mpi-", Exchange(absl::StrCat(getpid()))[0], "-", ++made);
  const bool first = RankOfAll() == 0;
  void* pages = nullptr;
  const auto map = [&] {
    const int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
    if (ftruncate(file, static_cast<off_t>(bytes)) != 0) std::perror("ftruncate");
    pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
  };
  if (first) {
    map();
    construct(pages);
  }
  Exchange("");
  if (!first) map();
  Exchange("");
  if (first) shm_unlink(name.c_str());
  return pages;
}

uint64_t RandomSeed() {
  return std::stoull(Exchange(absl::StrCat(std::random_device()()))[0]);
}

}  // namespace ebb::testing

// The program initialises MPI itself here, as trainers do that use MPI.
int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  int level = MPI_THREAD_SINGLE;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  ::testing::TestEventListeners& listeners = ::testing::UnitTest::GetInstance()->listeners();
  // Each rank prints the failures that it sees; one rank prints the rest.
  class OnlyFailures : public ::testing::EmptyTestEventListener {
    void OnTestStart(const ::testing::TestInfo& test) override {
      name_ = absl::StrCat(test.test_suite_name(), ".", test.name());
    }
    void OnTestPartResult(const ::testing::TestPartResult& result) override {
      if (!result.failed()) return;
      std::fprintf(stderr, "%s, %s:%d: %s\n", name_.c_str(),
                   result.file_name() == nullptr ? "" : result.file_name(), result.line_number(),
                   result.message());
    }
    std::string name_;
  };
  if (rank != 0) {
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new OnlyFailures());
  }
  const int code = RUN_ALL_TESTS();
  MPI_Finalize();
  return code;
}
