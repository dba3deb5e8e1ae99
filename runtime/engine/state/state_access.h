// Access to an engine's state between steps: slices are read and written, a parameter is gathered,
// and what ranks keep whole follows. Call it with no work of steps under way.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/engine/core.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/optimizer_spec.h"
#include "ebb/runtime/engine/ranks/host_lane.h"
#include "ebb/runtime/engine/state/initial_values.h"
#include "ebb/runtime/engine/state/state_values.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/state_pieces.h"

namespace ebb {

// The names of an engine's optimizer states. Each parameter group has its own rule's names, so an
// array of a shard has several names:
//
//   shard      [ weights (SGD)     | biases (AdamW) ]
//   array 0      momentum_buffer     exp_avg
//   array 1                          exp_avg_sq
class OptimizerStateNames {
 public:
  OptimizerStateNames() = default;
  // `own`: an optimizer of the trainer's instead of the config's, or null.
  OptimizerStateNames(const ModelSpec& model, const Config& config, const OptimizerSpec* own);

  const std::vector<std::string>& Of(const std::string& group) const { return by_group_.at(group); }
  // The array that holds the state for parameters of this group; -1 if the group's rule keeps no
  // such state. A name that no group has is an error that lists all names.
  absl::StatusOr<int> IndexOf(const std::string& group, std::string_view name) const;

 private:
  std::map<std::string, std::vector<std::string>> by_group_;  // of the model's parameters
  std::vector<std::string> all_;                              // each once
};

class StateAccess {
 public:
  using Sink = absl::FunctionRef<absl::Status(const Slice&, std::span<const float>)>;
  // A class, and of kOptimizer the name of a state.
  struct What {
    StateClass of = StateClass::kMaster;
    std::string_view state = "";
  };
  StateAccess(const Core& core, const OptimizerStateNames& names, Issuer& issuer,
              SwapVerifier& verifier);

  // Whether this existing parameter has such a state. A name that no group has is an error.
  absl::StatusOr<bool> Has(ParameterId p, What what) const;
  // One parameter, or all. Values are multiplied with `scale` on the way out and divided by
  // it on the way in. Writing a parameter writes its master too.
  absl::Status Read(std::optional<ParameterId> p, What what, float scale, Sink sink);
  absl::Status Write(std::optional<ParameterId> p, What what, float scale,
                     const Initialiser& source);
  // Note each Write, also one that fails, perhaps on this rank only: all ranks spread their state.
  void NoteWrite(StateClass what);
  // Collective, as are those below: a state that the parameter has.
  absl::Status Gather(ParameterId p, What what, float scale, int root, Sink sink);

  // This rank's slices from the initialisers; collective if rank 0's count for all.
  absl::Status FillSlices();
  std::span<const int64_t> filled() const { return initial_.filled; }  // InitialValues::filled
  // Spreads slices that were filled, or written since the last call, to what ranks keep whole.
  absl::Status SpreadFilled();
  absl::Status SpreadWritten();
  bool has_written() const { return written_.masters || written_.parameters || written_.states; }

  // Between all else on the streams: gathers a unit from its slices to where a scope finds it
  // whole. May return before the all-gather is over.
  void GatherUnit(int unit);

  // This rank's slice of one parameter: elements [begin, end), the first at `offset` of the unit's
  // slice. Empty if it has none of that class.
  struct Found {
    sharding::StateArray array;
    int64_t begin = 0, end = 0, offset = 0;

    // By elements of the parameter.
    sharding::StateRange Range(int64_t first, int64_t last) const {
      return {array, offset + first - begin, offset + last - begin};
    }
  };
  absl::StatusOr<Found> Find(ParameterId p, What what) const;
  // Casts written masters, still in the cache, to this rank's parameters if these are copies.
  absl::Status CastMasters(sharding::StateRange range, std::span<const float> masters);
  StateValues& values() { return values_; }
  DType compute() const { return plan().decisions.compute; }
  DType master() const {
    return plan().decisions.stochastic_rounding ? compute() : DType::kFloat32;
  }
  const sharding::Plan& plan() const { return values_.plan(); }
  const ModelSpec& model() const { return core_.inputs.model; }

 private:
  struct Piece {
    Slice slice;
    sharding::StateRange range;
  };

  absl::StatusOr<std::vector<Piece>> PiecesOf(std::optional<ParameterId> p, What what) const;
  absl::Status Ask(const Initialiser& source, const Slice& slice, std::span<float> values) const;
  absl::Status WriteParameters(const sharding::StateRange& range, std::span<float> values);
  // state_gather.cc.
  struct Gathering {
    ParameterId parameter{};
    Found own;  // of this rank
    float scale = 1;
    int root = -1;
    // This rank's errors: of its own elements, and of the sink.
    absl::Status read = absl::OkStatus(), taken = absl::OkStatus();
    std::vector<float> values = {};

    bool Receives(int rank) const { return root < 0 || root == rank; }
  };
  absl::Status GatherWhole(Gathering& of, Sink sink);
  absl::Status GatherBlocks(Gathering& of, Sink sink);
  absl::Status PassPiece(Gathering& of, int from, int64_t begin, int64_t end);
  absl::Status ReadFrom(const Found& own, int64_t begin, std::span<float> values);
  absl::Status Pass(std::span<float> values, int from, int to);
  absl::Status Spread(const sharding::SpreadClasses& classes);

  const Core& core_;
  const OptimizerStateNames& names_;
  InitialValues initial_;
  const HostLane lane_;
  StateValues values_;
  sharding::SpreadClasses written_;
};

}  // namespace ebb
