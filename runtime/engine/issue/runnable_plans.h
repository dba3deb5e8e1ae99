// The plans that an engine runs, and their lists, linked when each is first needed; with the
// order of scopes that the plans are of.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/issue/runnable.h"
#include "ebb/runtime/engine/issue/stream_order.h"
#include "ebb/runtime/engine/memory/storage.h"
#include "ebb/sharding/waits.h"

namespace ebb {

class RunnablePlans {
 public:
  // `model`: the one of the inputs, or the same in another order. Both outlive this.
  RunnablePlans(const EngineInputs& inputs, ModelSpec& model) : inputs_(inputs), model_(model) {}

  // The config's own. Again once the config has changed.
  absl::Status Plan();
  // For later plans: state keeps its places, whatever the order is.
  void KeepPlacement(sharding::StatePlacement placement) { placement_ = std::move(placement); }
  // Each model takes the order of the other's scopes and its plans, which are linked again. The
  // config's own plans stay at the addresses where the others' were.
  void Swap(RunnablePlans& other);
  bool has_plans() const { return own_ != nullptr; }
  Runnable& own() const { return *own_; }      // the config's own step
  Runnable& walk() const { return *walk_; }    // a walk of an evaluation
  Runnable& drain() const { return *drain_; }  // carried updates alone
  // Facts that are the same in all plans: layout, pools, all of plan_facts.h but rounds and timing.
  const sharding::Plan& plan() const { return own_->plan; }
  // A step of this many rounds; planned once for all of more than two.
  absl::StatusOr<Runnable*> Of(int rounds, bool hold_updates);

  // The config's own step, where it holds its updates.
  absl::StatusOr<Runnable*> Held() {
    return Of(sharding::PlannedRounds(plan()), /*hold_updates=*/true);
  }

  // The hash of the config's own plans. Plans of other steps are made when these begin. Such plans
  // follow from the same model, config, optimizer and placement, which ranks compare, too.
  uint64_t Fingerprint() const;

  // Cuts memory into cells at the operands of the config's own plans. Plans of more rounds touch
  // the same operands.
  absl::Status CutCells();
  const sharding::Cells& cells() const { return *cells_; }
  // Both outlive this.
  absl::Status LinkOwn(StreamOrder& order, const Storage& storage);
  // With or without the updates that the step before has left. Allocates, once.
  absl::Status Link(Runnable& run, bool carrying);
  void PointAll();  // once the pools have moved

 private:
  sharding::PlanInputs PlanInputs() const;
  template <class Do>
  void ForEachLinked(const Do& act);
  void Unlink();

  const EngineInputs& inputs_;
  ModelSpec& model_;
  std::optional<sharding::StatePlacement> placement_;  // nothing: as the inputs decide
  std::unique_ptr<Runnable> own_, walk_, drain_;
  std::vector<std::unique_ptr<Runnable>> others_;  // of other rounds, or that hold their updates
  std::optional<sharding::Cells> cells_;
  StreamOrder* order_ = nullptr;
  const Storage* storage_ = nullptr;
};

}  // namespace ebb
