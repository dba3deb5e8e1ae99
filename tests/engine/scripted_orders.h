// The scripted model in other orders of scopes, and the final state of an engine that trained in
// one of them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/engine/scripted.h"

namespace ebb::testing {

inline constexpr int64_t kBoundaryBytes = 48 * sizeof(float);
inline constexpr Setting kTwoRanks{.world = 2, .stage = 3};

// The scripted model in another order. `of`: which of its visits each visit is.
struct Order {
  const char* name;
  std::vector<int> of;
  ModelSpec model;

  int unit(int visit) const { return kScriptedUnits[of[static_cast<size_t>(visit)]]; }
};

Order OrderOf(const char* name, std::vector<int> of, int64_t boundary_bytes = 0);
Order AsScripted(int64_t boundary_bytes = 0);
Order Shuffled(int64_t boundary_bytes = 0);
// The first visit stays open over the others, and each of these is recomputed.
Order Nested();
// More uses of a unit, so that its reduced gradients are summed; one leaves them to another.
Order Repeated(int64_t boundary_bytes = 0);

absl::Status Reorder(Engine& engine, const Order& order);

// A step in this order. It may carry updates over.
absl::Status Train(Engine& engine, const Order& order, ScriptedTrainer& trainer, int64_t number,
                   const ParameterValues* shown = nullptr, StepOptions options = kExactStep);
absl::Status Evaluate(Engine& engine, const Order& order, const ScriptedTrainer& trainer);

// A rank's state in the end, as text, so that a test names what differs.
struct Ended {
  Snapshot snapshot;
  std::string report, bytes;
};
// On every rank.
void ExpectSame(const std::vector<Ended>& one, const std::vector<Ended>& other);
absl::StatusOr<Ended> End(Engine& engine, const ModelSpec& model);

// By rank. `make`: prepares the engine before the last two steps, which are in the new order.
std::vector<Ended> EndOf(const Setting& setting, const Config& config, const Order& created,
                         const Order& order,
                         const std::function<absl::Status(Engine&, ScriptedTrainer&)>& make,
                         StepOptions options = kExactStep);

// Boundaries and gradients live on the disk behind the states.
Config WithAllOnDisk(const Setting& setting, const std::string& path);

}  // namespace ebb::testing
