// Addresses of boundary activations and their gradients, which share the device's memory by
// lifetime, and addresses of boundaries that leave the device.
#include <algorithm>

#include "ebb/sharding/pools/boundaries.h"
#include "ebb/sharding/pools/pool_parts.h"

namespace ebb::sharding {
namespace {

// Boundaries that leave the device lie in the swap file of states, after the states.
void LayOutBoundaryPlaces(const PoolInputs& in, const std::vector<BoundaryUse>& uses,
                          Pools& pools) {
  const Tier tier = in.decisions->activation_tier;
  if (tier == Tier::kDevice) return;
  Bump host;
  const int64_t states = pools.state_file_bytes();
  int64_t file = states, leaving = 0, largest = 0;
  for (size_t v = 0; v < pools.visits.size(); ++v) {
    VisitAddresses& visit = pools.visits[v];
    visit.leaves = visit.boundary_stride > 0 && LeavesDevice(*in.scopes, uses[v]);
    if (!visit.leaves) continue;
    const int64_t bytes =
        SwapAligned(visit.boundary_stride * in.decisions->micro_batches_per_round);
    visit.place = {.tier = tier,
                   .pool = StateClass::kActivation,
                   .offset = tier == Tier::kCpu ? host.Take(bytes) : file};
    if (tier == Tier::kNvme) file += bytes;
    largest = std::max(largest, bytes);
    ++leaving;
  }
  pools.host_bytes[static_cast<int>(StateClass::kActivation)] = host.end();
  pools.file_bytes[static_cast<int>(StateClass::kActivation)] = file - states;
  if (tier == Tier::kNvme && leaving > 0)
    pools.boundary_slots = {.count = kBoundarySlots, .bytes = largest, .first = {}};
}

}  // namespace

// Boundary v is what visit v's forward wrote; visit v + 1 reads it in forward and backward and
// writes its gradient.
void LayOutBoundaries(const PoolInputs& in, Pools& pools) {
  const std::vector<Visit>& forward = in.model->forward;
  const std::vector<PlannedScope>& scopes = *in.scopes;
  const int visits = static_cast<int>(forward.size());
  const int64_t per_round = in.decisions->micro_batches_per_round;
  std::vector<PoolBlock> outputs(visits), gradients(visits);
  std::vector<BoundaryUse> uses = UsesInRound(scopes, 0, visits);
  int64_t largest = 0;
  for (int v = 0; v + 1 < visits; ++v) {
    pools.visits[v].boundary_stride = PoolAligned(forward[v].output_bytes);
    largest = std::max(largest, pools.visits[v].boundary_stride);
    outputs[v].bytes = gradients[v].bytes = pools.visits[v].boundary_stride * per_round;
  }
  if (largest == 0) return;
  LayOutBoundaryPlaces(in, uses, pools);
  const auto use_of_round = [&](int s) -> const std::vector<BoundaryUse>& {
    if (scopes[s].round != scopes[uses.front().writer].round) {
      int first = s;
      while (first > 0 && scopes[first - 1].round == scopes[s].round) --first;
      uses = UsesInRound(scopes, static_cast<size_t>(first), visits);
    }
    return uses;
  };
  for (int s = 0; s < static_cast<int>(scopes.size()); ++s) {
    const PlannedScope& scope = scopes[s];
    const auto extend = [&](std::vector<PoolBlock>& blocks, int visit, bool begins) {
      if (visit < 0 || visit + 1 >= visits) return;
      if (begins) {
        blocks[visit].lifetimes.push_back({scope.open_tick, scope.close_tick});
      } else if (!blocks[visit].lifetimes.empty()) {
        blocks[visit].lifetimes.back().end = scope.close_tick;
      }
    };
    const int input = scope.visit - 1;
    const bool comes_back = scope.visit > 0 && pools.visits[input].leaves &&
                            scope.kind() != ScopeKind::kForward &&
                            use_of_round(s)[input].again == s;
    if (comes_back) {
      std::vector<Lifetime>& lives = outputs[input].lifetimes;
      lives.back().end = scopes[use_of_round(s)[input].reader].close_tick + kBoundaryAhead;
      lives.push_back({scope.open_tick - kBoundaryAhead, scope.close_tick});
    } else {
      extend(outputs, input, /*begins=*/false);
    }
    if (!scope.backward) {
      extend(outputs, scope.visit, /*begins=*/true);
      continue;
    }
    if (scope.input_gradient) extend(gradients, input, /*begins=*/true);
    extend(gradients, scope.visit, /*begins=*/false);
  }
  std::vector<PoolBlock> all = outputs;
  all.insert(all.end(), gradients.begin(), gradients.end());
  int64_t bytes = Pack(all);
  // One walk of an evaluation over a round's micro-batches always fits: two boundaries each.
  bytes = std::max(bytes, 2 * largest * in.micro_batches);
  for (int v = 0; v < visits; ++v) {
    pools.visits[v].output = all[v].offset;
    pools.visits[v].output_gradient = all[visits + v].offset;
  }
  Bytes(pools, StateClass::kActivation) = bytes;
  pools.evaluation_stride = largest;
  pools.evaluation_micro_batches = bytes / (2 * largest);
}

}  // namespace ebb::sharding
