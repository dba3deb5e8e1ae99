#include "ebb/runtime/engine/swap_checksums.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
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

// All that lies in the files, as it is written: visit(what, unit, offset, bytes, of_all_only).
template <class Visitor>
void VisitExtents(const sharding::Plan& plan, Visitor visit) {
  const sharding::Decisions& decisions = plan.decisions;
  const sharding::Homes& homes = plan.pools.homes;
  for (const sharding::SubGroup& group : homes.sub_groups) {
    if (group.tier != Tier::kNvme) continue;
    if (decisions.master_size() > 0) {
      visit(StateClass::kMaster, group.unit, group.master.offset,
            group.count() * decisions.master_size(), false);
    }
    for (int k = 0; k < decisions.optimizer_states; ++k) {
      visit(StateClass::kOptimizer, group.unit, group.states.offset + k * group.states_stride,
            group.count() * 4, false);
    }
  }
  // What is a master, or half of one, is as much of the state as the rest of it.
  const bool is_state = decisions.reads_parameters();
  const int64_t size = SizeOf(decisions.compute);
  for (size_t u = 0; u < homes.units.size(); ++u) {
    const int number = static_cast<int>(u);
    const sharding::Place gradient = plan.pools.GradientShard(number);
    const sharding::UnitHomes& unit = homes.units[u];
    for (const sharding::ParameterPiece& piece : unit.frozen) {
      if (piece.home.tier == Tier::kNvme)
        visit(StateClass::kParameter, number, piece.home.offset, piece.count() * size, true);
    }
    // Sub-groups are cut where pieces are.
    for (int g = 0; g < unit.sub_groups; ++g) {
      const sharding::SubGroup& group =
          homes.sub_groups[static_cast<size_t>(unit.first_sub_group + g)];
      if (gradient.tier == Tier::kNvme) {
        const int64_t gradient_size = SizeOf(decisions.shard_dtype(number));
        visit(StateClass::kGradient, number, gradient.offset + group.begin * gradient_size,
              group.count() * gradient_size, true);
      }
      for (const sharding::ParameterPiece& piece : unit.trainable) {
        if (piece.home.tier != Tier::kNvme || group.begin < piece.begin || group.begin >= piece.end)
          continue;
        visit(StateClass::kParameter, number,
              piece.home.offset + (group.begin - piece.begin) * size, group.count() * size,
              !is_state);
      }
    }
  }
  std::vector<bool> visited(plan.pools.visits.size());
  for (const sharding::PlannedScope& scope : plan.scopes) {
    const auto v = static_cast<size_t>(scope.visit);
    const sharding::VisitAddresses& address = plan.pools.visits[v];
    if (!address.leaves || address.home.tier != Tier::kNvme || visited[v]) continue;
    visited[v] = true;
    visit(StateClass::kActivation, scope.unit, address.home.offset,
          address.boundary_stride * decisions.micro_batches_per_round, true);
  }
}

bool HasSum(VerifySwap verify, bool of_all_only) {
  return verify == VerifySwap::kAll || (verify == VerifySwap::kStates && !of_all_only);
}

}  // namespace

ClassBytes BytesWithoutChecksum(const sharding::Plan& plan, VerifySwap verify) {
  ClassBytes left = {};
  VisitExtents(plan, [&](StateClass what, int, int64_t, int64_t bytes, bool of_all_only) {
    if (!HasSum(verify, of_all_only)) left[static_cast<size_t>(what)] += bytes;
  });
  return left;
}

std::string ClassesWithoutChecksum(const sharding::Plan& plan, VerifySwap verify) {
  const ClassBytes left = BytesWithoutChecksum(plan, verify);
  const bool trained_have = verify == VerifySwap::kStates && plan.decisions.reads_parameters();
  std::vector<std::string> classes;
  for (const auto& [what, name] :
       {std::pair(StateClass::kParameter, trained_have ? "frozen parameters" : "parameters"),
        std::pair(StateClass::kMaster, "masters"),
        std::pair(StateClass::kOptimizer, "optimizer states"),
        std::pair(StateClass::kGradient, "gradients"),
        std::pair(StateClass::kActivation, "boundary activations")}) {
    if (left[static_cast<size_t>(what)] > 0) classes.push_back(name);
  }
  if (classes.size() < 2) return absl::StrJoin(classes, "");
  const std::string last = std::move(classes.back());
  classes.pop_back();
  return absl::StrCat(absl::StrJoin(classes, ", "), " and ", last);
}

SwapChecksums::SwapChecksums(const sharding::Plan& plan, VerifySwap verify) {
  for (const sharding::SubGroup& group : plan.pools.homes.sub_groups) {
    if (group.tier == Tier::kNvme) elements_max_ = std::max(elements_max_, group.count());
  }
  VisitExtents(
      plan, [&](StateClass what, int unit, int64_t offset, int64_t bytes, bool of_all_only) {
        if (!HasSum(verify, of_all_only)) return;
        Extent extent;
        extent.what = what;
        extent.unit = unit;
        extent.offset = offset;
        extent.bytes = bytes;
        extent.of_all_only = of_all_only;
        if (what == StateClass::kOptimizer) extent.Set(ChecksumOfZeros(bytes));
        (what == StateClass::kParameter ? parameters_ : states_).push_back(std::move(extent));
      });
  const auto by_offset = [](const Extent& a, const Extent& b) { return a.offset < b.offset; };
  std::sort(states_.begin(), states_.end(), by_offset);
  std::sort(parameters_.begin(), parameters_.end(), by_offset);
}

void SwapChecksums::KeepStatesOnly() {
  for (std::vector<Extent>* extents : {&states_, &parameters_})
    std::erase_if(*extents, [](const Extent& extent) { return extent.of_all_only; });
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
