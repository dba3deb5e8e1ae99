// Reads state beside the next steps (Engine::ReadAsync): one instruction a unit, in the order of
// the next step's updates, on its own stream. An update waits only for its unit's instruction.
//
//   beside    | unit 2 | unit 1 | unit 0 | close, agree, commit
//   updates            | unit 2 | unit 1 | unit 0
#pragma once

#include <array>
#include <cstddef>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/offload/shard_file.h"
#include "ebb/runtime/device/buffer.h"
#include "ebb/runtime/device/thread_team.h"
#include "ebb/runtime/engine/engine_communicators.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/engine_streams.h"
#include "ebb/runtime/engine/linked_fragment.h"
#include "ebb/runtime/engine/optimizer_state_names.h"
#include "ebb/runtime/engine/programs.h"
#include "ebb/runtime/engine/state_access.h"
#include "ebb/runtime/engine/state_reader.h"
#include "ebb/runtime/engine/step_errors.h"
#include "ebb/runtime/engine/storage.h"
#include "ebb/runtime/engine/stream_order.h"
#include "ebb/runtime/engine/swap_verifier.h"
#include "ebb/runtime/trace/ledger.h"
#include "ebb/sharding/state_pieces.h"

namespace ebb {

class Issuer;

class AsyncReads {
 public:
  struct Parts {  // borrowed
    const EngineInputs* inputs = nullptr;
    Programs* programs = nullptr;
    EngineCommunicators* communicators = nullptr;
    EngineStreams* streams = nullptr;
    MemoryLedger* ledger = nullptr;
    const OptimizerStateNames* names = nullptr;
    const StateAccess* state = nullptr;
    Storage* storage = nullptr;
    StreamOrder* order = nullptr;
    Issuer* issuer = nullptr;
    SwapVerifier* verifier = nullptr;
    StepErrors* errors = nullptr;
  };
  explicit AsyncReads(const Parts& parts) : with_(parts) {}

  // As Engine::StateSlices.
  std::vector<StateSlice> Slices() const;
  // Takes memory, a stream and a communicator, at the first read. Collective if there is no error.
  absl::Status Prepare(bool beside_steps);
  // One read at a time. It begins with Begin, once updates of the last step have been issued.
  std::shared_future<absl::Status> Take(StateReader reader);
  void Begin();
  // Whether it may begin within a step: all that updates write has a second place.
  bool MayBeginInStep() const;
  // Another plan has come, while no read is under way.
  void FollowPlan() {
    read_.reset();
    before_.reset();
  }
  // Whether the last read is over; true if there was none.
  bool is_over() const;
  void Await() const;

 private:
  // An array of a unit: this rank's slice of it, and the parameters' parts of the slice, in order.
  struct Array {
    struct Part {
      StateSlice slice;
      int64_t offset = 0;  // of slice.begin, in elements of the array
    };
    sharding::StateRange range;
    std::vector<Part> parts;
  };
  // One run on its way to the staging, while earlier ones are given to the reader.
  struct Slot {
    std::array<IoTransfer, 2> transfers;
    std::array<ShardFile*, 2> files = {};  // files of the transfers under way
  };

  absl::Status MakeStreams();
  absl::Status MakeRead();
  void TakeSecondPlaces();
  std::vector<int> UnitsInOrder() const;
  std::vector<Array> ArraysOf(int unit) const;
  void Read(int unit);
  absl::Status Read(const Array& array);
  sharding::StagedRun InSlot(const sharding::StateRun& run, size_t slot) const;
  void Start(const sharding::StagedRun& run, Slot& slot);
  absl::Status Await(Slot& slot);
  std::span<const float> ValuesOf(const sharding::StagedRun& run);
  absl::Status Give(const Array& array, const sharding::StateRun& run,
                    std::span<const float> values);
  absl::Status VerifyFiles(const sharding::StateRange& array);
  std::byte* At(const sharding::Place& place) const;
  void End();

  const Parts with_;
  std::unique_ptr<LinkedFragment> read_;
  std::unique_ptr<LinkedFragment>
      before_;  // without second places: its events may still have waiters
  bool asked_for_places_ = false;
  static constexpr size_t kSlots = 4;
  Buffer staging_;  // for kSlots runs, if the host does not reach all state
  MemoryLedger::Charge charge_;
  std::optional<Stream> copies_;     // from the device
  std::optional<Stream> agreement_;  // of the communicator
  std::array<Slot, kSlots> slots_;
  ThreadTeam team_{1};
  // The read under way, for its stream alone.
  StateReader reader_;
  absl::Status status_;
  std::vector<float> values_;
  std::promise<absl::Status> end_;
  std::shared_future<absl::Status> over_;
};

}  // namespace ebb
