// Rows that share memory by lifetime: gathered units, gradients, boundary activations.
#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "ebb/sharding/passes/boundaries.h"
#include "ebb/sharding/passes/pool.h"
#include "ebb/sharding/passes/rows.h"

namespace ebb::sharding {
namespace {

void AddOnDevice(const Array& row, Table& table) {
  table.Add(row);
  if (row.elements > 0) table.AddExtent({.begin = 0, .end = row.elements});
}

void AddShared(const Array& of, std::span<const Lifetime> lives, Table& table) {
  AddOnDevice(of, table);
  Array& row = table.rows.back();
  row.shares = true;
  row.first_lifetime = static_cast<int>(table.lifetimes.size());
  row.lifetimes = static_cast<int>(lives.size());
  table.lifetimes.insert(table.lifetimes.end(), lives.begin(), lives.end());
}

void AddGathered(const RowInputs& in, Table& table) {
  const Decisions& d = *in.decisions;
  const int end_of_step = 2 * static_cast<int>(in.scopes->size()) + 1;
  for (int unit = 0; unit < table.units; ++unit) {
    const size_t u = static_cast<size_t>(unit);
    std::vector<Lifetime> lives = in.residency->lifetimes[u];
    if (in.walk != nullptr) {
      for (const Lifetime& life : in.walk->lifetimes[u])
        lives.push_back({end_of_step + life.begin, end_of_step + life.end});
    }
    for (const bool trainable : {true, false}) {
      Array row{.purpose = Purpose::kGathered,
                .of = unit,
                .trainable = trainable,
                .encoding = d.compute_of(unit),
                .elements = SectionOf(*in.layout, unit, trainable).elements,
                .behind = !trainable};
      if (d.kept_whole[u]) {
        row.elements = 0;
        row.same_as = table.Find(Purpose::kParameter, unit, trainable);
      }
      if (trainable) {
        AddShared(row, lives, table);
      } else {
        AddOnDevice(row, table);
      }
    }
  }
}

// Secondary shards of units that a step gathers more than once. Every step fills the ones that it
// reads.
void AddSecondary(const RowInputs& in, Table& table) {
  const Decisions& d = *in.decisions;
  if (!d.has_secondary()) return;
  std::vector<bool> fills(in.layout->units.size(), false);
  for (const ResidencyInterval& interval : in.residency->intervals) {
    if (interval.fills_secondary) fills[interval.unit] = true;
  }
  for (int unit = 0; unit < table.units; ++unit) {
    for (const bool trainable : {true, false}) {
      const Section& section = SectionOf(*in.layout, unit, trainable);
      AddOnDevice({.purpose = Purpose::kSecondary,
                   .of = unit,
                   .trainable = trainable,
                   .encoding = d.compute_of(unit),
                   .spread = Spread::kSecondarySlice,
                   .elements = fills[unit] ? d.SecondaryShard(section) : 0},
                  table);
    }
  }
}

void AddGradients(const RowInputs& in, Table& table) {
  const Decisions& d = *in.decisions;
  const int keys = static_cast<int>(in.reduction->lifetimes.size());
  const int shards = static_cast<int>(table.rows.size()) + keys;
  std::vector<Array> whole(static_cast<size_t>(keys));
  const std::vector<bool> takes_gradients = VisitsWithGradients(*in.model);
  for (int visit = 0; visit < table.visits; ++visit) {
    const int unit = static_cast<int>(in.model->forward[visit].unit);
    Array& row = whole[GradientKey(d, {.visit = visit, .unit = unit})];
    row.encoding = d.gradient_of(unit);
    if (GradientIsShard(d, in.placement->units[unit].gradient, unit)) {
      row.same_as = shards + unit;
    } else if (takes_gradients[visit]) {
      row.elements = SectionOf(*in.layout, unit, /*trainable=*/true).elements;
    }
  }
  for (int key = 0; key < keys; ++key) {
    Array& row = whole[key];
    row.purpose = Purpose::kGradient;
    row.of = key;
    AddShared(row, in.reduction->lifetimes[key], table);
  }
  for (int unit = 0; unit < table.units; ++unit) {
    const Section& section = SectionOf(*in.layout, unit, /*trainable=*/true);
    const int64_t elements = d.stage == 0 ? section.elements : section.shard;
    table.Add({.purpose = Purpose::kGradientShard,
               .of = unit,
               .encoding = d.shard_dtype(unit),
               .spread = d.stage == 0 ? Spread::kWhole : Spread::kSlice,
               .elements = elements});
    const Tier tier = in.placement->units[unit].gradient;
    if (elements > 0) table.AddExtent({.begin = 0, .end = elements, .place = {.tier = tier}});
  }
}

// The lives of boundaries and of their gradients on the device. Boundary v is what visit v's forward
// wrote; the next one reads it in forward and backward and writes its gradient.
class BoundaryLives {
 public:
  using Lives = std::vector<std::vector<Lifetime>>;

  BoundaryLives(const std::vector<PlannedScope>& scopes, int visits)
      : scopes_(scopes),
        visits_(visits),
        outputs_(static_cast<size_t>(visits)),
        gradients_(static_cast<size_t>(visits)) {}

  // `uses`: in the first round. `leaves`: by visit, whether its output leaves the device.
  void Find(std::vector<BoundaryUse> uses, const std::vector<bool>& leaves);
  // By visit.
  const Lives& outputs() const { return outputs_; }
  const Lives& gradients() const { return gradients_; }

 private:
  void Extend(Lives& of, int visit, const PlannedScope& scope, bool begins) const;

  const std::vector<PlannedScope>& scopes_;
  const int visits_;
  Lives outputs_, gradients_;
};

void BoundaryLives::Find(std::vector<BoundaryUse> uses, const std::vector<bool>& leaves) {
  for (size_t s = 0; s < scopes_.size(); ++s) {
    const PlannedScope& scope = scopes_[s];
    if (s > 0 && scope.round != scopes_[s - 1].round) uses = UsesInRound(scopes_, s, visits_);
    const int input = scope.input;
    const bool comes_back = input >= 0 && leaves[input] && scope.kind() != ScopeKind::kForward &&
                            uses[input].again == static_cast<int>(s);
    if (comes_back) {
      std::vector<Lifetime>& lives = outputs_[input];
      const int reader = uses[input].reader;
      lives.back().end = scopes_[reader].close_tick + kBoundaryAhead;
      lives.push_back({scope.open_tick - kBoundaryAhead, scope.close_tick});
    } else if (input >= 0) {
      Extend(outputs_, input, scope, /*begins=*/false);
    }
    if (!scope.backward) {
      if (scope.hands_on) Extend(outputs_, scope.visit, scope, /*begins=*/true);
      continue;
    }
    if (scope.input_gradient) Extend(gradients_, input, scope, /*begins=*/true);
    if (scope.hands_on) Extend(gradients_, scope.visit, scope, /*begins=*/false);
  }
}

void BoundaryLives::Extend(Lives& of, int visit, const PlannedScope& scope, bool begins) const {
  std::vector<Lifetime>& lives = of[visit];
  if (begins) {
    lives.push_back({scope.open_tick, scope.close_tick});
  } else if (!lives.empty()) {
    lives.back().end = scope.close_tick;
  }
}

void AddBoundaries(const RowInputs& in, Table& table) {
  const Decisions& d = *in.decisions;
  const int turns = static_cast<int>(d.micro_batches_per_round);
  int64_t largest = 0;
  std::vector<int64_t> turn_bytes(static_cast<size_t>(table.visits), 0);
  for (int visit = 0; visit < table.visits; ++visit) {
    if (!HandsOn(*in.model, visit)) continue;
    int64_t& bytes = turn_bytes[visit];
    bytes = PoolAligned(in.model->forward[visit].output_bytes);
    largest = std::max(largest, bytes);
  }
  if (largest == 0) return;
  std::vector<BoundaryUse> uses = UsesInRound(*in.scopes, 0, table.visits);
  std::vector<bool> leaves(uses.size(), false);
  for (size_t v = 0; v < leaves.size(); ++v)
    leaves[v] = d.activation_tier != Tier::kDevice && turn_bytes[v] > 0 &&
                LeavesDevice(*in.scopes, uses[v]);
  BoundaryLives lives(*in.scopes, table.visits);
  lives.Find(std::move(uses), leaves);
  for (const Purpose purpose : {Purpose::kOutput, Purpose::kOutputGradient}) {
    for (int visit = 0; visit < table.visits; ++visit) {
      const size_t v = static_cast<size_t>(visit);
      AddShared({.purpose = purpose,
                 .of = visit,
                 .elements = turn_bytes[v],
                 .turns = turns,
                 .turn_bytes = turn_bytes[v]},
                (purpose == Purpose::kOutput ? lives.outputs() : lives.gradients())[v], table);
    }
  }
  // One walk of an evaluation over a round's micro-batches always fits, two boundaries each. It
  // comes when no step is under way.
  const int end_of_step = 2 * static_cast<int>(in.scopes->size()) + 1;
  const Lifetime behind_step{end_of_step, end_of_step};
  AddShared({.purpose = Purpose::kWalkOutputs,
             .elements = largest,
             .turns = 2 * static_cast<int>(in.micro_batches),
             .turn_bytes = largest},
            {&behind_step, 1}, table);
  if (d.activation_tier == Tier::kDevice) return;
  for (int visit = 0; visit < table.visits; ++visit) {
    const size_t v = static_cast<size_t>(visit);
    const int64_t bytes = leaves[v] ? turns * turn_bytes[v] : 0;
    table.Add({.purpose = Purpose::kOutputAway, .of = visit, .elements = bytes});
    if (bytes > 0)
      table.AddExtent({.begin = 0, .end = bytes, .place = {.tier = d.activation_tier}});
  }
}

}  // namespace

void AddSharedRows(const RowInputs& in, Table& table) {
  AddGathered(in, table);
  AddSecondary(in, table);
  AddGradients(in, table);
  AddBoundaries(in, table);
}

}  // namespace ebb::sharding
