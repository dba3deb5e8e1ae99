// The interface of a way of connecting ranks. It is small, so that processes, GPUs and a simulated
// network fit behind it. One conformance suite (tests/comm/conformance_test.cc) says what every
// backend must do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/stream.h"

namespace ebb {

class CallOrder;
class SharedGroup;
class StoreGroup;

enum class CollectiveKind : uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kAllToAll,
  kAllToAllV,
  kSend,
  kReceive,
  kBarrier,
};
inline constexpr int kCollectiveKinds = 9;

// One call. A rank checks what it can see alone.
struct Collective {
  CollectiveKind kind = CollectiveKind::kBarrier;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  float scale = 1;
  int peer = -1;  // root or peer
  std::span<const CollectiveSpan> spans = {};
};

class CommunicatorBackend {
 public:
  virtual ~CommunicatorBackend() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual absl::Status Enqueue(Stream& stream, const Collective& collective) = 0;
  // For backends with an order of sums of their own.
  virtual absl::Status SumInOrder(std::span<std::byte> /*scratch*/) { return absl::OkStatus(); }
  // For backends that move registered memory without copies.
  virtual absl::Status Register(std::span<std::byte> /*memory*/) { return absl::OkStatus(); }
  virtual void Deregister() {}
  virtual void Leave() {}
  virtual absl::Status status() const = 0;
  virtual void Abort(absl::Status why) = 0;
};

// When the log says which ranks are waited for.
struct NoticeTimes {
  double first_seconds = 5;
  double interval_seconds = 60;
};

struct CommunicatorOptions {
  std::string name = "communicator";  // in messages
  int reduction_group = 0;       // consecutive ranks summed first; 0: all. Must divide the size
  double timeout_seconds = 600;  // a rank that is missing after this time fails the communicator
  NoticeTimes notices = {};
};

// The proposal of a rank to the others. Ranks that propose the same colour become a group, ordered
// by (key, rank). All propose the same options and device.
struct Proposal {
  CommunicatorOptions options;
  std::string device = {};  // shared by the ranks, for messages; empty: none that is certain
  int colour = 0;
  int key = 0;
};

// Where a rank is. A backend that wraps another world has that world's.
struct WorldRank {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;  // on its host
  // How many consecutive ranks always share a host, the same on all ranks; all of them if no number
  // divides every host. The number is the default reduction group and so decides the bits of sums.
  int ranks_per_host = 1;
  // For a part (World::Split): the size of the whole world, and the part's ranks there, by rank.
  int whole_size = 0;
  std::vector<int> world_ranks = {};

  // World::RankName.
  std::string RankName(int of) const;
};

class WorldBackend {
 public:
  explicit WorldBackend(const WorldRank& me) : me_(me) {}
  virtual ~WorldBackend() = default;
  const WorldRank& me() const { return me_; }
  int rank() const { return me_.rank; }
  int size() const { return me_.size; }
  virtual absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NewCommunicator(
      const CommunicatorOptions& options) = 0;
  // World::Split.
  virtual absl::StatusOr<std::shared_ptr<WorldBackend>> Split(const Proposal& proposal) = 0;
  virtual bool connected_by_nccl() const { return false; }
  // World::Allocate.
  virtual absl::StatusOr<Buffer> Allocate(const Device& device, int64_t bytes,
                                          std::string_view what) {
    return device.Allocate(bytes, what);
  }
  virtual void Fail(absl::Status why) = 0;
  // Where the ranks compare the order of their calls. Null: they do not, or there is one rank.
  virtual CallOrder* calls() { return nullptr; }
  // Where ranks with GPUs exchange what connects their GPUs. An error: they have no such place.
  virtual absl::StatusOr<std::shared_ptr<StoreGroup>> bootstrap() {
    return absl::UnimplementedError("these ranks cannot be given GPUs");
  }
  // Where ranks that are threads of one process form communicators. Null: they are no such threads.
  virtual SharedGroup* threads() { return nullptr; }

 private:
  const WorldRank me_;
};

}  // namespace ebb
