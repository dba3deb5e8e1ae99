// Reads state beside the next steps (Engine::ReadAsync): one operation a unit, in the order of
// the next step's updates, on its own stream. An update waits only for its unit's operation.
//
//   beside    | unit 2 | unit 1 | unit 0 | close, agree, commit
//   updates            | unit 2 | unit 1 | unit 0
#pragma once

#include <atomic>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "ebb/offload/swap_verifier.h"
#include "ebb/runtime/device/cores.h"
#include "ebb/runtime/device/thread_team.h"
#include "ebb/runtime/engine/core.h"
#include "ebb/runtime/engine/issue/linked_list.h"
#include "ebb/runtime/engine/memory/storage.h"
#include "ebb/runtime/engine/ranks/engine_communicators.h"
#include "ebb/runtime/engine/state/state_access.h"
#include "ebb/runtime/engine/state/state_values.h"
#include "ebb/runtime/engine/state_reader.h"
#include "ebb/sharding/state_pieces.h"

namespace ebb {

class Issuer;

class AsyncReads {
 public:
  AsyncReads(const Core& core, const OptimizerStateNames& names, StateAccess& state, Issuer& issuer,
             SwapVerifier& verifier, const CallersCore& callers_core)
      : core_(core),
        names_(names),
        state_(state),
        issuer_(issuer),
        verifier_(verifier),
        callers_core_(callers_core) {}

  // Engine::StateSlices.
  std::vector<StateSlice> Slices() const;
  // Takes memory, a stream and a communicator, at the first read. Collective if there is no error.
  absl::Status Prepare(bool beside_steps);
  // One read at a time. The read begins with Begin, once updates of the last step have been issued.
  std::shared_future<absl::Status> Take(StateReader reader);
  void Begin();
  // Any thread: whether the last read waits for Begin.
  std::shared_ptr<const std::atomic<bool>> waits() const { return waits_; }
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
  absl::Status MakeStreams();
  absl::Status MakeRead();
  void TakeSecondPlaces();
  std::vector<Array> ArraysOf(int unit) const;
  void Read(int unit);
  absl::Status Give(const Array& array, const sharding::StateRun& run,
                    std::span<const float> values);
  void End();

  const Core& core_;
  const OptimizerStateNames& names_;
  StateAccess& state_;
  Issuer& issuer_;
  SwapVerifier& verifier_;
  const CallersCore& callers_core_;
  std::unique_ptr<LinkedList> read_;
  std::unique_ptr<LinkedList> before_;  // without second places: its events may still have waiters
  bool asked_for_places_ = false;
  std::optional<Stream> copies_;     // from the device
  std::optional<Stream> agreement_;  // of the communicator
  ThreadTeam team_{1};
  std::optional<StateValues> state_values_;
  // The read under way, for its stream alone.
  StateReader reader_;
  std::shared_ptr<std::atomic<bool>> waits_ = std::make_shared<std::atomic<bool>>(false);
  absl::Status status_;
  std::promise<absl::Status> end_;
  std::shared_future<absl::Status> over_;
};

}  // namespace ebb
