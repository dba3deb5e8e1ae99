// NCCL's part: communicators between the threads of this process, non-blocking as configured. A
// call on a communicator that was destroyed ends the program.
#include <nccl.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "clique.h"
#include "graph.h"
#include "order.h"
#include "state.h"

namespace {

using namespace ebb::stand_in;  // the file's own

constexpr size_t kGroupsMax = 64;  // under way on one communicator
constexpr size_t kPartsExpected = 80;
constexpr size_t kScratchExpected = size_t{1} << 16;

}  // namespace

struct ncclComm {
  struct Group {
    ncclComm* comm = nullptr;
    std::vector<Part> parts;
    std::atomic<bool> under_way{false};
  };
  struct Operator {
    float scale = 1;
    bool alive = false;
  };

  struct Registration {
    const std::byte* data = nullptr;
    size_t bytes = 0;
  };

  std::shared_ptr<Clique> clique;
  int rank = 0;
  bool stalled = false, gone = false;
  int looks = 0;  // until it is ready
  std::atomic<bool> aborted{false};
  std::vector<Group> groups = std::vector<Group>(kGroupsMax);
  size_t next_group = 0;
  std::vector<Operator> operators;
  std::list<Registration> registrations;
  Registration window;             // being registered
  void** window_answer = nullptr;  // where NCCL puts the result
  int windows_begun = 0;
  std::vector<std::byte> scratch = std::vector<std::byte>(kScratchExpected);
};

namespace {

std::mutex mutex;                                        // around everything but running groups
std::map<std::string, std::shared_ptr<Clique>> cliques;  // by id
// Kept during the whole test, because work of an aborted communicator refers to it.
std::vector<std::unique_ptr<ncclComm>> all;
int ids_made = 0;
bool creation_stalls = false, launches_stall = false;
int launch_looks = 0;
std::map<int, ncclResult_t> asynchronous;
std::map<const std::byte*, size_t> memory;  // of ncclMemAlloc
Registers registers = Registers::kWindows;
std::atomic<int> unregistered{0};

thread_local int group_depth = 0;
thread_local std::vector<Part> group_parts;
thread_local ncclComm_t group_comm = nullptr;
thread_local cudaStream_t group_stream = nullptr;

ncclResult_t Failure(const char* function) {
  RequireNoHostFunction();
  return static_cast<ncclResult_t>(Injected(function));
}

void Require(bool held, const char* what) {
  if (held) return;
  std::fprintf(stderr, "stand-in for NCCL: %s\n", what);
  std::abort();
}

const std::byte* Bytes(const void* data) {
  return static_cast<const std::byte*>(data);
}

ncclComm_t NewComm() {
  all.push_back(std::make_unique<ncclComm>());
  ncclComm_t comm = all.back().get();
  comm->stalled = creation_stalls;
  for (auto& group : comm->groups) {
    group.comm = comm;
    group.parts.reserve(kPartsExpected);
  }
  Count(Thing::kCommunicator, 1);
  return comm;
}

bool Covers(const ncclComm::Registration& of, const std::byte* data, size_t bytes) {
  return of.data <= data && data + bytes <= of.data + of.bytes;
}

void* AddRegistration(ncclComm_t comm, const ncclComm::Registration& made) {
  Count(Thing::kRegistration, 1);
  return &comm->registrations.emplace_back(made);
}

void RemoveRegistration(ncclComm_t comm, const void* made) {
  const size_t removed =
      comm->registrations.remove_if([&](const auto& other) { return &other == made; });
  Require(removed == 1, "a registration that is not there");
  Count(Thing::kRegistration, -1);
}

void NoteUnregistered(ncclComm_t comm, const Part& part) {
  const std::scoped_lock lock(mutex);
  if (comm->registrations.empty() || part.count <= 1) return;
  const size_t bytes = part.count * BytesOf(part.type);
  const size_t whole = static_cast<size_t>(comm->clique->size()) * bytes;
  const auto known = [&](const std::byte* data, size_t of) {
    return data == nullptr ||
           std::any_of(comm->registrations.begin(), comm->registrations.end(),
                       [&](const auto& registration) { return Covers(registration, data, of); });
  };
  if (!part.plain || !known(part.send, part.kind == PartKind::kReduceScatter ? whole : bytes) ||
      !known(part.receive, part.kind == PartKind::kAllGather ? whole : bytes))
    ++unregistered;
}

void End(ncclComm_t comm) {
  comm->gone = true;
  Count(Thing::kCommunicator, -1);
}

void RunGroup(void* argument) {
  auto& group = *static_cast<ncclComm::Group*>(argument);
  if (!group.comm->aborted)
    group.comm->clique->Run(group.comm->rank, group.parts, group.comm->aborted,
                            group.comm->scratch);
  group.under_way = false;
  group.under_way.notify_all();
}

// Notes this rank's memory; the other ranks order their own.
void NoteTouches(ncclComm_t comm, const std::vector<Part>& parts) {
  if (!WatchesOrder()) return;
  std::vector<Touched> touched;
  const auto ranks = static_cast<size_t>(comm->clique->size());
  for (const Part& part : parts) {
    const size_t bytes = part.count * BytesOf(part.type);
    const bool scatters = part.kind == PartKind::kReduceScatter,
               gathers = part.kind == PartKind::kAllGather;
    if (part.send != nullptr) touched.push_back(Reads(part.send, scatters ? ranks * bytes : bytes));
    if (part.receive != nullptr)
      touched.push_back(Writes(part.receive, gathers ? ranks * bytes : bytes));
  }
  NoteKernel(group_stream, "an operation of NCCL", touched);
}

ncclResult_t Launch() {
  ncclComm_t comm = std::exchange(group_comm, nullptr);
  if (comm == nullptr) return ncclSuccess;
  if (const auto failure = Failure("ncclGroupEnd")) {
    group_parts.clear();
    return failure;
  }
  auto& group = comm->groups[comm->next_group++ % kGroupsMax];
  group.under_way.wait(true);
  group.parts.assign(group_parts.begin(), group_parts.end());
  group.under_way = true;
  group_parts.clear();
  {
    const std::scoped_lock lock(mutex);
    if (launches_stall) comm->stalled = true;
    comm->looks = launch_looks;
  }
  NoteTouches(comm, group.parts);
  if (comm->clique->size() > 1) {
    RequireNoLoading();
    NoteCollective(group_stream);
  }
  EnqueueKernel(group_stream, &RunGroup, &group, nullptr);
  return ncclInProgress;
}

ncclResult_t Add(const char* function, ncclComm_t comm, cudaStream_t stream, const Part& part) {
  Require(!comm->gone, "a call on a communicator that is gone");
  Require(group_comm == nullptr || (group_comm == comm && group_stream == stream),
          "a group of several communicators or streams");
  Require(!Captures(stream), "an operation on a stream that captures a graph");
  if (const auto failure = Failure(function)) return failure;
  NoteUnregistered(comm, part);
  group_comm = comm;
  group_stream = stream;
  group_parts.push_back(part);
  return group_depth == 0 ? Launch() : ncclSuccess;
}

// Sets the effect of `op` on the numbers.
void SetOp(Part& part, ncclRedOp_t op, ncclComm_t comm) {
  if (op < ncclNumOps) {
    part.combine = op == ncclMax ? Combine::kMax : op == ncclMin ? Combine::kMin : Combine::kSum;
    return;
  }
  const auto& made = comm->operators.at(static_cast<size_t>(op - ncclNumOps));
  Require(made.alive, "an operator that is gone");
  part.plain = false;
  part.scale = made.scale;
}

}  // namespace

void ebb::stand_in::StallCreation() {
  const std::scoped_lock lock(mutex);
  creation_stalls = true;
}
void ebb::stand_in::StallLaunches() {
  const std::scoped_lock lock(mutex);
  launches_stall = true;
}
void ebb::stand_in::DelayLaunches(int looks) {
  const std::scoped_lock lock(mutex);
  launch_looks = looks;
}
void ebb::stand_in::FailCommunicators(int rank, ncclResult_t result) {
  const std::scoped_lock lock(mutex);
  asynchronous[rank] = result;
}
void ebb::stand_in::ForgetNcclFaults() {
  const std::scoped_lock lock(mutex);
  creation_stalls = launches_stall = false;
  launch_looks = 0;
  asynchronous.clear();
  registers = Registers::kWindows;
  unregistered = 0;
  cliques.clear();
  all.clear();
}

void ebb::stand_in::SetRegisters(Registers what) {
  const std::scoped_lock lock(mutex);
  registers = what;
}
int ebb::stand_in::TakeUnregistered() {
  return unregistered.exchange(0);
}

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NcclVersion() != 0 ? NcclVersion() : NCCL_VERSION_CODE;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclRemoteError ? "remote process exited or there was a network error"
                                   : "an error of the stand-in";
}
const char* ncclGetLastError(ncclComm_t) {
  return "said the stand-in";
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (const auto failure = Failure("ncclGetUniqueId")) return failure;
  const std::scoped_lock lock(mutex);
  *id = {};
  std::snprintf(id->internal, sizeof(id->internal), "%d", ++ids_made);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  Require(config->blocking == 0, "a communicator that blocks");
  if (const auto failure = Failure("ncclCommInitRankConfig")) return failure;
  const std::scoped_lock lock(mutex);
  std::shared_ptr<Clique>& clique = cliques[id.internal];
  if (clique == nullptr) clique = std::make_shared<Clique>(size);
  *comm = NewComm();
  (*comm)->clique = clique;
  (*comm)->rank = rank;
  clique->Join();
  return ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  RequireNoHostFunction();
  Require(!comm->gone, "a call on a communicator that is gone");
  const std::scoped_lock lock(mutex);
  if (comm->window_answer != nullptr && comm->clique->IsWindow(comm->windows_begun - 1))
    *std::exchange(comm->window_answer, nullptr) = AddRegistration(comm, comm->window);
  const bool looked = comm->looks == 0 || --comm->looks == 0;
  const bool ready = looked && !comm->stalled && comm->window_answer == nullptr && comm->clique &&
                     comm->clique->complete();
  const auto failed = asynchronous.find(comm->rank);
  *state = failed != asynchronous.end() ? failed->second : ready ? ncclSuccess : ncclInProgress;
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  Require(!comm->gone, "a call on a communicator that is gone");
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  Require(!comm->gone, "a communicator destroyed twice");
  for (const auto& group : comm->groups) Require(!group.under_way, "destroyed under an operation");
  Require(comm->registrations.empty(), "destroyed with memory registered");
  // The last rank of a process frees the memory of all.
  if (comm->clique->Leave()) AwaitDevice();
  End(comm);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  RequireNoHostFunction();
  Require(!comm->gone, "a communicator aborted that is gone");
  for (const auto& made : comm->operators) Count(Thing::kOperator, made.alive ? -1 : 0);
  {
    const std::scoped_lock lock(mutex);
    Count(Thing::kRegistration, -static_cast<int>(comm->registrations.size()));
    comm->registrations.clear();
    comm->window_answer = nullptr;
  }
  comm->aborted = true;
  if (comm->clique) comm->clique->Abort();
  AwaitDevice();  // frees its memory
  End(comm);
  return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** data, size_t bytes) {
  if (const auto failure = Failure("ncclMemAlloc")) return failure;
  if (cudaMalloc(data, bytes) != cudaSuccess) return ncclUnhandledCudaError;
  const std::scoped_lock lock(mutex);
  memory[Bytes(*data)] = bytes;
  return ncclSuccess;
}
ncclResult_t ncclMemFree(void* data) {
  {
    const std::scoped_lock lock(mutex);
    Require(memory.erase(Bytes(data)) == 1, "memory given back that is not NCCL's");
    for (const auto& comm : all) {
      for (const auto& registration : comm->registrations)
        Require(registration.data != data, "memory given back while it is registered");
    }
  }
  return cudaFree(data) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* data, size_t bytes, ncclWindow_t* window,
                                    int flags) {
  Require(!comm->gone, "a call on a communicator that is gone");
  Require(flags == NCCL_WIN_COLL_SYMMETRIC, "a window that is not symmetric");
  if (const auto failure = Failure("ncclCommWindowRegister")) return failure;
  const std::scoped_lock lock(mutex);
  *window = nullptr;
  if (registers != Registers::kWindows) return ncclSuccess;
  const auto allocated = memory.find(Bytes(data));
  Require(allocated != memory.end() && bytes <= allocated->second,
          "a window of memory that is not NCCL's");
  comm->window = {.data = Bytes(data), .bytes = bytes};
  comm->window_answer = reinterpret_cast<void**>(window);
  Require(comm->clique->JoinWindow(comm->windows_begun++, bytes),
          "a window of another size on another rank");
  return ncclInProgress;
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  Require(!comm->gone, "a call on a communicator that is gone");
  const std::scoped_lock lock(mutex);
  RemoveRegistration(comm, window);
  return ncclSuccess;
}
#endif
ncclResult_t ncclCommRegister(const ncclComm_t comm, void* data, size_t bytes, void** handle) {
  Require(!comm->gone, "a call on a communicator that is gone");
  if (const auto failure = Failure("ncclCommRegister")) return failure;
  const std::scoped_lock lock(mutex);
  *handle = registers == Registers::kNothing
                ? nullptr
                : AddRegistration(comm, {.data = Bytes(data), .bytes = bytes});
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  Require(!comm->gone, "a call on a communicator that is gone");
  const std::scoped_lock lock(mutex);
  RemoveRegistration(comm, handle);
  return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t, ncclComm_t comm) {
  if (const auto failure = Failure("ncclRedOpCreatePreMulSum")) return failure;
  size_t i = 0;
  while (i < comm->operators.size() && comm->operators[i].alive) ++i;
  if (i == comm->operators.size()) comm->operators.emplace_back();
  comm->operators[i] = {.scale = Load(type, scalar), .alive = true};
  *op = static_cast<ncclRedOp_t>(ncclNumOps + static_cast<int>(i));
  Count(Thing::kOperator, 1);
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  comm->operators.at(static_cast<size_t>(op - ncclNumOps)).alive = false;
  Count(Thing::kOperator, -1);
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  return --group_depth == 0 ? Launch() : ncclSuccess;
}
ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return Add("ncclAllGather", comm, stream,
             {.kind = PartKind::kAllGather,
              .send = Bytes(send),
              .receive = static_cast<std::byte*>(receive),
              .count = count,
              .type = type});
}
ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  Part part = {.kind = PartKind::kReduceScatter,
               .send = Bytes(send),
               .receive = static_cast<std::byte*>(receive),
               .count = count,
               .type = type};
  SetOp(part, op, comm);
  return Add("ncclReduceScatter", comm, stream, part);
}
ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  Part part = {.kind = PartKind::kAllReduce,
               .send = Bytes(send),
               .receive = static_cast<std::byte*>(receive),
               .count = count,
               .type = type};
  SetOp(part, op, comm);
  return Add("ncclAllReduce", comm, stream, part);
}
ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return Add("ncclBroadcast", comm, stream,
             {.kind = PartKind::kBroadcast,
              .send = Bytes(send),
              .receive = static_cast<std::byte*>(receive),
              .count = count,
              .type = type,
              .peer = root});
}
ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return Add(
      "ncclSend", comm, stream,
      {.kind = PartKind::kSend, .send = Bytes(send), .count = count, .type = type, .peer = peer});
}
ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return Add("ncclRecv", comm, stream,
             {.kind = PartKind::kReceive,
              .receive = static_cast<std::byte*>(receive),
              .count = count,
              .type = type,
              .peer = peer});
}

}  // extern "C"
