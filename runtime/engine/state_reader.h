// The functions that take a rank's state from Engine::ReadAsync.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/state.h"

namespace ebb {

// Elements [begin, end) of a parameter: its master (its value if frozen) or an optimizer state. Of a
// parameter with a Split they are elements of this rank's block, as Slice's are here.
struct StateSlice {
  StateClass what{};
  std::string state;  // the state's name if it is kOptimizer
  ParameterId parameter{};
  int64_t begin = 0, end = 0;
};

// Called on a thread of the engine's, one call after the other. A null function is skipped. The
// functions must not call the engine.
struct StateReader {
  // At most 4 MiB a call, of one StateSlice; slices come in the order of Engine::StateSlices. The
  // first error ends the calls.
  std::function<absl::Status(StateClass what, std::string_view state, const Slice&,
                             std::span<const float>)>
      take;
  // Called after the last take of this rank.
  std::function<absl::Status()> close;
  // On every rank, with the ranks' agreement: OK if all have closed. The result is agreed on too.
  std::function<absl::Status(const absl::Status& closed)> commit;
  // False: no training before the end, so states on NVMe need no second place on the disk.
  bool beside_steps = true;
  // True: the next step does not wait for updates that it would otherwise carry (parameters on
  // NVMe), but does these itself. The calls come after that, or after Engine::AsyncReadBegin.
  bool may_begin_in_step = false;
};

}  // namespace ebb
