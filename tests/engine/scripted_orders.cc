#include "tests/engine/scripted_orders.h"

#include <map>
#include <string_view>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/sharding/scopes.h"

namespace ebb::testing {

Order OrderOf(const char* name, std::vector<int> of, int64_t boundary_bytes) {
  Order order{.name = name, .of = std::move(of), .model = ScriptedModel()};
  order.model.forward.clear();
  for (const int visit : order.of)
    order.model.forward.push_back(
        {.unit = UnitId{kScriptedUnits[visit]}, .output_bytes = boundary_bytes});
  order.model.forward.back().output_bytes = 0;
  return order;
}

Order AsScripted(int64_t boundary_bytes) {
  return OrderOf("as scripted", {0, 1, 2, 3, 4, 5}, boundary_bytes);
}

Order Shuffled(int64_t boundary_bytes) {
  return OrderOf("shuffled", {3, 5, 2, 4, 0, 1}, boundary_bytes);
}

Order Nested() {
  Order order = OrderOf("nested", {0, 4, 3, 2, 1});
  ModelSpec& model = order.model;
  model.order.push_back({.visit = 0});
  for (const int v : {1, 2, 3, 4}) model.AddScope({.visit = v});
  model.order.push_back({.opens = false, .visit = 0});
  model.order.push_back({.backward = true, .visit = 0});
  for (const int v : {4, 3, 2, 1}) {
    model.AddScope({.recompute = true, .visit = v});
    model.AddScope({.backward = true, .visit = v});
  }
  model.order.push_back({.opens = false, .backward = true, .visit = 0});
  return order;
}

Order Repeated(int64_t boundary_bytes) {
  Order order = OrderOf("repeated", {1, 0, 2, 4, 3, 1, 4, 5}, boundary_bytes);
  order.model.forward[6].gradients = false;
  return order;
}

absl::Status Reorder(Engine& engine, const Order& order) {
  return engine.Reorder(order.model.forward, order.model.order);
}

namespace {

void TrainRound(const Order& order, const ScriptedTrainer& trainer, Step& step) {
  std::map<std::pair<int, int>, std::variant<ForwardScope, BackwardScope>> open;
  const std::vector<bool> gradients = sharding::VisitsWithGradients(order.model);
  for (const ScopeEvent& event : sharding::EventsOfRound(order.model)) {
    const std::pair key(event.visit, event.backward ? 1 : event.recompute ? 2 : 0);
    if (!event.opens) {
      open.erase(key);
      continue;
    }
    const int unit = order.unit(event.visit);
    if (!event.backward) {
      ForwardScope scope =
          event.recompute ? step.Recompute(UnitId{unit}) : step.Forward(UnitId{unit});
      trainer.Look(scope, unit);
      open.emplace(key, std::move(scope));
      continue;
    }
    BackwardScope scope = step.Backward(UnitId{unit});
    trainer.Look(scope, unit);
    if (gradients[static_cast<size_t>(event.visit)])
      trainer.Add(scope, order.of[static_cast<size_t>(event.visit)]);
    open.emplace(key, std::move(scope));
  }
}

std::string Rows(Engine& engine) {
  std::string text;
  for (const MemoryRow& row : engine.memory()) {
    // The pools that state passes through are there from the first call for state on.
    EXPECT_EQ(row.predicted_bytes, row.current_bytes)
        << Name(row.state) << " on " << Name(row.tier);
    absl::StrAppend(&text, std::string(Name(row.state)), " ", std::string(Name(row.tier)), " ",
                    row.predicted_bytes, "\n");
  }
  for (const TrafficRow& row : engine.traffic())
    absl::StrAppend(&text, std::string(Name(row.state)), " ", std::string(Name(row.tier)), " ",
                    static_cast<int>(row.direction), " ", row.predicted_bytes, " ", row.bytes,
                    "\n");
  for (const CommunicationRow& row : engine.communication())
    absl::StrAppend(&text, std::string(row.operation), " ", row.predicted_bytes, " ", row.bytes,
                    "\n");
  return text;
}

}  // namespace

absl::Status Train(Engine& engine, const Order& order, ScriptedTrainer& trainer, int64_t number,
                   const ParameterValues* shown, StepOptions options) {
  trainer.BeginStep(number, shown);
  Step step = engine.BeginStep(options);
  for (int round = 0; round < step.rounds(); ++round) TrainRound(order, trainer, step);
  return step.Finish();
}

absl::Status Evaluate(Engine& engine, const Order& order, const ScriptedTrainer& trainer) {
  Evaluation evaluation = engine.BeginEvaluation();
  for (size_t v = 0; v < order.of.size(); ++v) {
    const int unit = order.unit(static_cast<int>(v));
    trainer.Look(evaluation.Forward(UnitId{unit}), unit);
  }
  return evaluation.Finish().status();
}

void ExpectSame(const std::vector<Ended>& one, const std::vector<Ended>& other) {
  ASSERT_EQ(one.size(), other.size());
  for (size_t rank = 0; rank < one.size(); ++rank) {
    SCOPED_TRACE(absl::StrCat("rank ", rank));
    EXPECT_TRUE(one[rank].snapshot == other[rank].snapshot);
    EXPECT_EQ(one[rank].report, other[rank].report);
    EXPECT_EQ(one[rank].bytes, other[rank].bytes);
  }
}

absl::StatusOr<Ended> End(Engine& engine, const ModelSpec& model) {
  Ended ended;
  EBB_ASSIGN_OR_RETURN(const StepReport report, engine.Report());
  ended.report = absl::StrCat(report.step, " ", report.applied, " ", report.gradient_norm);
  ended.bytes = Rows(engine);
  EBB_ASSIGN_OR_RETURN(ended.snapshot, TakeSnapshot(engine, model));
  return ended;
}

std::vector<Ended> EndOf(const Setting& setting, const Config& config, const Order& created,
                         const Order& order,
                         const std::function<absl::Status(Engine&, ScriptedTrainer&)>& make,
                         StepOptions options) {
  std::vector<Ended> ended(static_cast<size_t>(setting.world));
  RunOn(setting, created.model, config, [&](Engine& engine, ScriptedTrainer& trainer) {
    ASSERT_OK(make(engine, trainer));
    ASSERT_OK(Evaluate(engine, order, trainer));
    for (const int64_t number : {2, 3}) {
      ASSERT_OK_AND_ASSIGN(const ParameterValues shown,
                           GatherAll(engine, order.model, StateClass::kParameter));
      ASSERT_OK(Train(engine, order, trainer, number, &shown, options));
    }
    ASSERT_OK_AND_ASSIGN(ended[static_cast<size_t>(trainer.rank())], End(engine, order.model));
  });
  return ended;
}

Config WithAllOnDisk(const Setting& setting, const std::string& path) {
  Config config = OnNvme(ConfigFor(setting), path);
  config.ebb.offload_activations = config.ebb.offload_gradients = Tier::kNvme;
  config.ebb.verify_swap = VerifySwap::kAll;
  return config;
}

}  // namespace ebb::testing
