#include "ebb/runtime/engine/swap_checksums.h"

#include <algorithm>

#include "ebb/optim/checksum.h"
#include "ebb/sharding/homes.h"

namespace ebb {
namespace {

uint64_t ChecksumOfZeros(int64_t bytes) {
  static const std::vector<std::byte> zeros(optim::kChecksumBlock);
  std::vector<uint64_t> blocks(static_cast<size_t>(optim::ChecksumBlocks(bytes)),
                               optim::ChecksumOfBlock(zeros));
  if (const int64_t rest = bytes % optim::kChecksumBlock; rest > 0)
    blocks.back() = optim::ChecksumOfBlock(std::span(zeros).first(static_cast<size_t>(rest)));
  return optim::ChecksumFromBlocks(blocks, bytes);
}

}  // namespace

SwapChecksums::SwapChecksums(const sharding::Plan& plan, VerifySwap verify) {
  if (verify == VerifySwap::kOff) return;
  const sharding::Decisions& decisions = plan.decisions;
  const sharding::Homes& homes = plan.pools.homes;
  const auto add = [](std::vector<Extent>& to, StateClass what, size_t unit, int64_t offset,
                      int64_t bytes) -> Extent& {
    Extent extent;
    extent.what = what;
    extent.unit = static_cast<int>(unit);
    extent.offset = offset;
    extent.bytes = bytes;
    to.push_back(std::move(extent));
    return to.back();
  };
  for (const sharding::SubGroup& group : homes.sub_groups) {
    if (group.tier != Tier::kNvme) continue;
    elements_max_ = std::max(elements_max_, group.count());
    const auto unit = static_cast<size_t>(group.unit);
    if (decisions.master_size() > 0) {
      add(states_, StateClass::kMaster, unit, group.master.offset,
          group.count() * decisions.master_size());
    }
    for (int k = 0; k < decisions.optimizer_states; ++k) {
      const int64_t bytes = group.count() * 4;
      add(states_, StateClass::kOptimizer, unit, group.states.offset + k * group.states_stride,
          bytes)
          .Set(ChecksumOfZeros(bytes));
    }
  }
  const bool all = verify == VerifySwap::kAll;
  // What is a master, or half of one, is as much of the state as the rest of it.
  const bool trained = all || decisions.reads_parameters();
  const int64_t size = SizeOf(decisions.compute);
  for (size_t u = 0; trained && u < homes.units.size(); ++u) {
    const sharding::Place gradient = plan.pools.GradientShard(static_cast<int>(u));
    const sharding::UnitHomes& unit = homes.units[u];
    for (const sharding::ParameterPiece& piece : unit.frozen) {
      if (all && piece.home.tier == Tier::kNvme)
        add(parameters_, StateClass::kParameter, u, piece.home.offset, piece.count() * size);
    }
    // Sub-groups are cut where pieces are.
    for (int g = 0; g < unit.sub_groups; ++g) {
      const sharding::SubGroup& group =
          homes.sub_groups[static_cast<size_t>(unit.first_sub_group + g)];
      if (all && gradient.tier == Tier::kNvme) {
        const int64_t gradient_size = SizeOf(decisions.shard_dtype(static_cast<int>(u)));
        add(states_, StateClass::kGradient, u, gradient.offset + group.begin * gradient_size,
            group.count() * gradient_size);
      }
      for (const sharding::ParameterPiece& piece : unit.trainable) {
        if (piece.home.tier != Tier::kNvme || group.begin < piece.begin || group.begin >= piece.end)
          continue;
        add(parameters_, StateClass::kParameter, u,
            piece.home.offset + (group.begin - piece.begin) * size, group.count() * size);
      }
    }
  }
  std::vector<bool> added(plan.pools.visits.size());
  for (const sharding::PlannedScope& scope : plan.scopes) {
    const auto v = static_cast<size_t>(scope.visit);
    const sharding::VisitAddresses& visit = plan.pools.visits[v];
    if (!all || !visit.leaves || visit.home.tier != Tier::kNvme || added[v]) continue;
    added[v] = true;
    add(states_, StateClass::kActivation, static_cast<size_t>(scope.unit), visit.home.offset,
        visit.boundary_stride * decisions.micro_batches_per_round);
  }
  const auto by_offset = [](const Extent& a, const Extent& b) { return a.offset < b.offset; };
  std::sort(states_.begin(), states_.end(), by_offset);
  std::sort(parameters_.begin(), parameters_.end(), by_offset);
}

std::span<SwapChecksums::Extent> SwapChecksums::In(const sharding::Place& place, int64_t bytes) {
  std::vector<Extent>& extents = place.pool == StateClass::kParameter ? parameters_ : states_;
  const auto first = std::partition_point(
      extents.begin(), extents.end(),
      [&](const Extent& extent) { return extent.offset + extent.bytes <= place.offset; });
  const auto last = std::partition_point(first, extents.end(), [&](const Extent& extent) {
    return extent.offset < place.offset + bytes;
  });
  return {first, last};
}

}  // namespace ebb
