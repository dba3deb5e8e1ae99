// What a trainer asks of an engine's state between steps: slices read and written, one parameter gathered; and what
// follows for what ranks keep whole. An engine calls it when nothing of its steps is under way.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/engine/host_lane.h"
#include "ebb/runtime/engine/initial_values.h"
#include "ebb/runtime/engine/optimizer_state_names.h"
#include "ebb/runtime/engine/state_values.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/state_pieces.h"

namespace ebb {

class StateAccess {
 public:
  using Sink = absl::FunctionRef<absl::Status(const Slice&, std::span<const float>)>;
  struct Parts {  // borrowed
    InitialValues initial;
    const OptimizerStateNames* names = nullptr;
    StepErrors* errors = nullptr;
    Communicator* gather = nullptr;
    int rank = 0, shards = 1;
    // Of parameters, and of what Read shows as their masters.
    DType compute{}, master{};
    // Masters are kept beside the parameters, or half of each; parameters are copies of masters in another dtype.
    bool has_masters = false, casts_masters = false;
    bool parameters_on_device = true;
  };
  StateAccess(const Parts& parts, const StateValues::Parts& values, const HostLane& lane)
      : with_(parts), lane_(lane), values_(values) {}

  // Every value is multiplied with `scale` on its way out, and divided by it on its way in. What is written as a
  // parameter its master becomes, too.
  absl::Status Read(StateClass what, std::string_view state, float scale, Sink sink);
  absl::Status Write(StateClass what, std::string_view state, float scale,
                     const Initialiser& source);
  // Said of each Write, also of one that fails, perhaps on this rank only: all ranks spread what they have.
  void NoteWrite(StateClass what);
  // Collective, as those below: of a parameter that there is, kMaster or kParameter.
  absl::Status Gather(ParameterId p, StateClass what, int root, Sink sink);

  // This rank's slices from the parameters' own initialisers; collective where those of rank 0 count for all.
  absl::Status FillSlices();
  // What ranks keep whole from the slices that were filled, or written since it was called last.
  absl::Status SpreadFilled();
  absl::Status SpreadWritten();
  bool has_written() const { return written_.masters || written_.parameters || written_.states; }

  // Between all else that streams do: a unit from where its slices live to where a scope finds it whole. May return
  // before the all-gather is over.
  void GatherUnit(int unit);

  // This rank's slice of one parameter: elements [begin, end) of it, the first at `offset` of the unit's slice. Empty
  // where it has none of that class.
  struct Found {
    sharding::StateArray array;
    int64_t begin = 0, end = 0, offset = 0;

    // Of elements of the parameter.
    sharding::StateRange Range(int64_t first, int64_t last) const {
      return {array, offset + first - begin, offset + last - begin};
    }
  };
  absl::StatusOr<Found> Find(ParameterId p, StateClass what, std::string_view state) const;
  // To this rank's parameters, where they are copies of the masters that were written: while these are in the cache.
  absl::Status CastMasters(sharding::StateRange range, std::span<const float> masters);
  StateValues& values() { return values_; }
  DType compute() const { return with_.compute; }
  DType master() const { return with_.master; }
  const sharding::Plan& plan() const { return values_.plan(); }
  const ModelSpec& model() const { return *with_.initial.model; }

 private:
  struct Piece {
    Slice slice;
    sharding::StateRange range;
  };

  Slice SliceOf(ParameterId p, int64_t begin, int64_t end) const;
  absl::StatusOr<std::vector<Piece>> PiecesOf(StateClass what, std::string_view state) const;
  absl::Status WriteParameters(const sharding::StateRange& range, std::span<float> values);
  absl::Status Pass(std::span<float> values, int from, int to);
  absl::Status Spread(const sharding::SpreadClasses& classes);

  const Parts with_;
  const HostLane lane_;
  StateValues values_;
  sharding::SpreadClasses written_;
};

}  // namespace ebb
