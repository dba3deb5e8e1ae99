// The scopes that one reduce-scatter takes gradients of, and how long each whole gradient keeps its
// memory.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "ebb/sharding/passes/pool.h"
#include "ebb/sharding/passes/residency.h"
#include "ebb/sharding/plan.h"

namespace ebb::sharding {

struct Reduction {
  std::vector<std::vector<int>>
      groups;  // scopes in the order they close; issued when the last one closes
  std::vector<int> group_of_scope;  // -1: no reduction follows this scope
  // By reduced scope: whether it is the step's first, or last, contribution to its unit's gradient.
  std::vector<bool> is_first, is_last;
  // Whole gradients by key: the unit (reduce_at round) or the visit (reduce_at step). See
  // GradientKey.
  std::vector<std::vector<Lifetime>> lifetimes;
};

// Whether the whole gradient of backward is also the shard: one rank's slice is all of it, a step
// reduces it once, and dtype and tier are the same. Then it has one buffer. The update of the step
// before reads the buffer until backward writes it again.
// `gradient`: where the shard is.
inline bool GradientIsShard(const Decisions& decisions, Tier gradient, int unit) {
  return decisions.shards == 1 && !decisions.casts(unit) && decisions.trainable[unit] &&
         !decisions.accumulates[unit] && gradient == Tier::kDevice;
}

// Neighbouring backward scopes with slices that fit `group_bytes` together; a unit is once in a
// group at most. A gradient keeps its memory until two ticks after its group's last scope closes.
// So its reduction runs beside the backward of the scope after that.
Reduction PlanReduction(const std::vector<PlannedScope>& scopes, const ModelLayout& layout,
                        const Decisions& decisions, int visits, int64_t group_bytes);

// The last gather of each unit in a step, and when an early update of the unit may follow. If the
// unit's parameters are on NVMe, the gather and the update can share one read. Both share the
// masters if the gather takes a cast of masters, or the parameters if updates read those.
//
//   read     m3     m2     m1
//   gather      g3     g2     g1
//   update             u3     u2     u1       the masters of m3 are kept until u3
struct LastGather {
  int interval = -1, group = -1;  // of Residency; -1: never gathered
  // Tick of the early update, when its gradient is final. Max: none in this walk.
  int updated = std::numeric_limits<int>::max();
  // False if the interval begins in forward: it lasts too long to keep a read for its end, unless
  // its backward comes at once.
  bool may_share = false;
};

// By unit.
std::vector<LastGather> FindLastGathers(std::span<const PlannedScope> scopes,
                                        const Residency& residency, const Reduction& reduction,
                                        int units);

}  // namespace ebb::sharding
