// What Engine::ReadAsync gives a rank's state to.
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

// Elements [begin, end) of a parameter: of its master (of a frozen one its value) or of one of its optimizer's states.
struct StateSlice {
  StateClass what{};
  std::string state;  // of kOptimizer
  ParameterId parameter{};
  int64_t begin = 0, end = 0;
};

// Called on a thread of the engine's, one call after the other. Null where nothing is to be done. They must not call
// the engine.
struct StateReader {
  // At most 4 MiB a call: of one StateSlice, which come in the order of Engine::StateSlices. Its first error ends the
  // calls.
  std::function<absl::Status(StateClass what, std::string_view state, const Slice&,
                             std::span<const float>)>
      take;
  // When this rank's take has had all.
  std::function<absl::Status()> close;
  // On every rank, with what the ranks have agreed on: OK if all of them have closed. What it returns is agreed on, too.
  std::function<absl::Status(const absl::Status& closed)> commit;
  // False: nothing is trained before the end, so that states on NVMe need no second place on the disk.
  bool beside_steps = true;
  // What they take of host memory meanwhile, for memory().
  int64_t host_bytes = 0;
};

}  // namespace ebb
