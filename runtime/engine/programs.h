// The plans that an engine runs, and their fragments, linked when each is first needed.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/runnable.h"
#include "ebb/runtime/engine/storage.h"
#include "ebb/runtime/engine/stream_order.h"
#include "ebb/sharding/waits.h"

namespace ebb {

class Programs {
 public:
  explicit Programs(const EngineInputs& inputs) : inputs_(inputs) {}

  // The config's own. Again once the config has changed.
  absl::Status Plan();
  // Of plans to come: state lives where it is, whatever their order is.
  void KeepHomes(const sharding::Homes& homes) { homes_ = homes; }
  // Each takes the other's plans, at the addresses where its own were, to be linked anew.
  void Swap(Programs& other);
  bool has_plans() const { return own_ != nullptr; }
  Runnable& own() const { return *own_; }      // the config's own step
  Runnable& walk() const { return *walk_; }    // a walk of an evaluation
  Runnable& drain() const { return *drain_; }  // carried updates alone
  // What is the same in all plans: layout, pools, what plan_facts.h has but for rounds and timing.
  const sharding::Plan& plan() const { return own_->plan; }
  // A step of this many rounds; planned once for all of more than two.
  absl::StatusOr<Runnable*> Of(int rounds, bool hold_updates);

  // Cuts memory into cells, by what the config's own plans touch: those of more rounds touch the same.
  absl::Status CutCells();
  const sharding::Cells& cells() const { return *cells_; }
  // Both outlive this.
  absl::Status LinkOwn(StreamOrder& order, const Storage& storage);
  // With or without the updates that the step before has left. Allocates, once.
  absl::Status Link(Runnable& run, bool carrying);
  void PointAll();  // once the pools have moved

 private:
  sharding::PlanInputs PlanInputs() const;

  const EngineInputs& inputs_;
  std::optional<sharding::Homes> homes_;  // nothing: as the inputs decide
  std::unique_ptr<Runnable> own_, walk_, drain_;
  std::vector<std::unique_ptr<Runnable>> others_;  // of other rounds, or that hold their updates
  std::optional<sharding::Cells> cells_;
  StreamOrder* order_ = nullptr;
  const Storage* storage_ = nullptr;
};

}  // namespace ebb
