// Which rank this is, and which others there are. A cheap, copyable handle; engines and their
// communicators are made from it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/device/device.h"

namespace ebb {

struct WorldOptions {
  double timeout_seconds = 600;  // until all ranks must be there
};

class World {
 public:
  // The world that the launcher of this process describes (launch/launch.h): torchrun, Open MPI,
  // SLURM and others. No launcher, or one of a single process: a world of one rank. Waits until all
  // ranks are there; rank 0 says in the log what was picked up. Ranks on one host become a world of
  // processes that share memory; MPI connects ranks on several hosts if an MPI launcher has started
  // them. Ranks on several hosts without MPI become a world in which NCCL connects GPUs only (On):
  // communicators for the CPU are refused, on every rank. An error goes to every rank that can be
  // reached, and no rank waits longer than the time-out.
  static absl::StatusOr<World> FromEnvironment(const WorldOptions& options = {});
  // A world of one rank.
  static World Single();
  explicit World(std::shared_ptr<WorldBackend> backend) : backend_(std::move(backend)) {}

  int rank() const { return backend_->me().rank; }
  int size() const { return backend_->me().size; }
  int local_rank() const { return backend_->me().local_rank; }  // on this host
  int local_size() const { return backend_->me().local_size; }
  // The default reduction group: consecutive ranks that share a host, the same number on every host
  // and rank. The group is all ranks if they share one host, or if the hosts have different numbers
  // of ranks or ranks that are not consecutive.
  int ranks_per_host() const { return backend_->me().ranks_per_host; }

  // Whether ranks of the whole world are missing here (Split).
  bool is_part() const { return size() < backend_->me().whole_size; }
  // For messages: "rank 1", or of a part whose ranks have other numbers in the whole world "rank 1
  // (world rank 5)".
  std::string RankName(int rank) const { return backend_->me().RankName(rank); }

  // Collective: every rank calls it, in the same order, with the same options.
  absl::StatusOr<Communicator> NewCommunicator(const CommunicatorOptions& options = {}) const;

  // Collective: the ranks with the same colour become a world of their own, ordered by (key, rank),
  // for example the ranks that hold the same part of a model which a trainer divides by itself:
  //
  //   world      0   1   2   3        tensor parallel in pairs: 0 and 1, 2 and 3
  //   colour     0   1   0   1        rank % 2: rank 0's part has ranks 0 and 2
  //
  // Communicators, devices (On) and parts of a part are between its ranks alone. Each part makes
  // its calls in its own order, which is not compared (calls). Ranks that all have devices may also
  // split the world that On makes. A rank that dies or fails ends all parts, because they are one
  // job. The name in `options`, for messages, and the time-out are for this call.
  absl::StatusOr<World> Split(int colour, int key, const CommunicatorOptions& options = {}) const;
  // Split for an engine's own use: messages go on to count ranks in this world.
  absl::StatusOr<World> Divide(int colour, int key, const CommunicatorOptions& options) const;

  // Collective, as NewCommunicator: returns when all ranks have come here. The call uses the device
  // only in a world that On has made. Use it where ranks may be threads that share a GPU and have
  // just freed memory of it: freeing waits for the device, so no rank may go on to a collective
  // before all ranks have freed theirs. Ranks of several hosts without MPI share no GPU and cannot
  // meet: OK at once.
  absl::Status MeetOnHost(const CommunicatorOptions& options = {}) const;

  // A world of these ranks with communicators for streams and memory of `device`, each rank's own;
  // for the CPU this very world. Collective. On CUDA devices:
  //
  //   one rank                    needs no connection and no NCCL
  //   threads of one process      that name the same device share it: sums have the bits of the
  //                               CPU's. A call returns once all ranks have made it, so all ranks
  //                               make the calls of all communicators in one order
  //   all others                  NCCL, which has its own order of sums. kUnimplemented,
  //                               kUnavailable: it is not in this build, or not on this machine
  //
  // With NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment NCCL connects ranks that share a device
  // too, threads included.
  absl::StatusOr<World> On(const Device& device) const;

  bool connected_by_nccl() const { return backend_->connected_by_nccl(); }

  // Memory of `device`, as Device::Allocate's, that communicators can register. If NCCL connects
  // the ranks it is NCCL's memory, rounded up to the driver's pages (2 MiB).
  absl::StatusOr<Buffer> Allocate(const Device& device, int64_t bytes,
                                  std::string_view what) const {
    return backend_->Allocate(device, bytes, what);
  }

  // Whether both are handles of the same world.
  friend bool operator==(const World& a, const World& b) { return a.backend_ == b.backend_; }

  // The calls that all ranks make in one order; null in a world of one rank and in parts. It lives
  // as long as the world.
  CallOrder* calls() const { return backend_->calls(); }

  // Every communicator of every rank, parts included, fails with `why`. No rank waits for this one
  // any longer.
  void Fail(absl::Status why) const { backend_->Fail(std::move(why)); }

  const std::shared_ptr<WorldBackend>& backend() const { return backend_; }

 private:
  void NoteCreation() const;

  std::shared_ptr<WorldBackend> backend_;
};

// Runs `body` as `ranks` threads of this process, each with its own World, and returns when all
// have ended: OK, or the error of the rank that failed first, prefixed with its number. A rank
// leaves when its body returns: ranks that still wait for it fail with a Status that names it.
absl::Status RunThreads(int ranks, std::function<absl::Status(World)> body);

}  // namespace ebb
