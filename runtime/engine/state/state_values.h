// Ranges of this rank's state as fp32 in host memory, wherever they live. An engine calls it when
// nothing of its steps is under way. A save has an object of its own, for its thread.
//
//   place --Start-> [ slot 0 ] --cast--> values       what lives on the disk, or on a device that
//   place --Start-> [ slot 1 ]                        the host cannot reach, passes through two
//                                                     slots: one is used, one filled or emptied.
//                                                     A save has more
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/offload/swap_verifier.h"
#include "ebb/optim/update_arrays.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/engine/core.h"
#include "ebb/runtime/engine/issue/linked_list.h"
#include "ebb/runtime/engine/issue/runnable_plans.h"
#include "ebb/runtime/engine/memory/host_pools.h"
#include "ebb/runtime/engine/memory/storage.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/state_pieces.h"

namespace ebb {

class Issuer;

class StateValues {
 public:
  // The slots, and the threads and the stream that fill and empty them.
  struct Way {
    ThreadTeam* team = nullptr;
    size_t slots = 2;
    sharding::Place staging = HostPools::kStateStaging;  // where they are
    // A save only reads, while steps go on. Data on a device that the host does not reach is copied
    // over `copies`.
    bool of_save = false;
    Stream* copies = nullptr;
  };
  StateValues(const Core& core, Issuer& issuer, SwapVerifier& verifier, const Way& way)
      : core_(core), issuer_(issuer), verifier_(verifier), way_(way), slots_(way.slots) {}

  // `next`: the range of the next Read, if known. That read, and writes, may last until Await.
  absl::Status Read(const sharding::StateRange& range, std::span<float> values,
                    const sharding::StateRange* next = nullptr);
  // Reads run by run, each verified as it comes, with as many runs on their way as there are slots.
  // Ends at the first error.
  using Show = absl::FunctionRef<absl::Status(const sharding::StateRun&, std::span<const float>)>;
  absl::Status ReadEach(const sharding::StateRange& range, Show show);
  absl::Status Write(const sharding::StateRange& range, std::span<const float> values);
  // Where the range's values lie as fp32 in one piece that the host reaches; null: not so.
  float* InPlace(const sharding::StateRange& range) const;
  // Checks that the files hold the bytes that were written, before values of the range are shown.
  absl::Status Verify(const sharding::StateRange& range);
  // Copies parameters from where they are kept to this rank's slice on the device; until Await.
  absl::Status Upload(const sharding::StateRange& range);
  // Runs a state call's operations behind all of the above: until they are over, or under way.
  absl::Status Run(sharding::OpList list);
  absl::Status Leave(sharding::OpList list);
  absl::Status Await();

  const sharding::Plan& plan() const { return core_.plans.plan(); }
  ThreadTeam& team() const { return *way_.team; }
  int shard() const { return core_.slice; }

 private:
  struct Slot {
    std::unique_ptr<LinkedList> under_way;
    std::vector<Event> over;        // by operation of that
    sharding::StateRun read_ahead;  // the next run, if it is read ahead; else nothing
  };

  std::vector<sharding::StateRun> RunsOf(const sharding::StateRange& range) const {
    return sharding::RunsOf(core_.plans.plan(), core_.slice, range);
  }
  sharding::StagedRun InSlot(const sharding::StateRun& run, size_t slot) const;
  size_t TakeSlot() { return next_slot_ = (next_slot_ + 1) % slots_.size(); }
  absl::Status Start(Slot& slot, sharding::OpList list);
  absl::Status Await(Slot& slot);
  // The slot that holds it or will hold it; any slot if the host reaches it in its place.
  absl::StatusOr<size_t> ReadAhead(const sharding::StateRun& run);
  absl::StatusOr<size_t> Fetch(const sharding::StateRun& run);
  optim::StateArray StateIn(const sharding::StagedRun& run) const;
  // The run's values as fp32.
  void ToFloat(const sharding::StagedRun& run, float* values);
  std::span<const float> ValuesOf(const sharding::StagedRun& run);
  bool VerifyScales(const sharding::StagedRun& run, bool ends);
  absl::Status PrepareWrite(const sharding::StagedRun& run, Slot& slot);
  absl::Status VerifyFile(const sharding::Place& place, int64_t bytes);
  template <class T>
  T* At(const sharding::StagedRun& run, size_t part) const {
    return reinterpret_cast<T*>(core_.storage.At(run.host[part]));
  }

  const Core& core_;
  Issuer& issuer_;
  SwapVerifier& verifier_;
  const Way way_;
  std::vector<Slot> slots_;
  size_t next_slot_ = 0;
  std::vector<float> values_;                        // of ReadEach, a run's
  std::array<SwapVerifier::Pieces, 2> pieces_ = {};  // likewise, by place
  // Likewise, of the array under way: from the first one on, all that have come.
  std::vector<std::byte> scales_;
  sharding::Place first_scale_;
};

}  // namespace ebb
