#include "ebb/sharding/state_pieces.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "ebb/sharding/unit_places.h"

namespace ebb::sharding {
namespace {

Operand OperandAt(const Place& place, DType dtype, int64_t count, Access access = Access::kNone) {
  return {.place = place, .dtype = dtype, .access = access, .count = count};
}

// Runs of at most kRunElements of what is between `begin` and `end` both.
class Runs {
 public:
  Runs(int64_t begin, int64_t end) : begin_(begin), end_(end) {}

  // `home_of(element)`: of the elements [first, last), whose homes are each in one place.
  template <class HomesOf>
  void Add(int64_t first, int64_t last, HomesOf homes_of) {
    last = std::min(last, end_);
    for (int64_t at = std::max(first, begin_); at < last; at += kRunElements) {
      StateRun run{.begin = at, .end = std::min(last, at + kRunElements)};
      run.homes = homes_of(at);
      for (Operand& home : run.homes)
        if (home.count > 0) home.count = run.count();
      runs_.push_back(run);
    }
  }
  std::vector<StateRun> Take() { return std::move(runs_); }

 private:
  const int64_t begin_, end_;
  std::vector<StateRun> runs_;
};

}  // namespace

std::vector<StateRun> RunsOf(const Plan& plan, int shard, const StateRange& range) {
  const auto& [array, begin, end] = range;
  const Decisions& d = plan.decisions;
  const UnitHomes& unit = plan.pools.homes.units[static_cast<size_t>(array.unit)];
  const bool masters = array.what == StateClass::kMaster;
  Runs runs(begin, end);
  const auto parameter = [&](const ParameterPiece& piece, int64_t at) {
    return OperandAt(piece.home.Plus((at - piece.begin) * SizeOf(d.compute)), d.compute, 1);
  };
  if (array.what == StateClass::kGradient) {
    const DType dtype = d.shard_dtype(array.unit);
    const Place slice = GradientSlicePlace(plan, array.unit);
    runs.Add(begin, end, [&](int64_t at) {
      return std::array{OperandAt(slice.Plus(at * SizeOf(dtype)), dtype, 1), Operand()};
    });
    return runs.Take();
  }
  if (array.what == StateClass::kParameter || (masters && d.stochastic_rounding)) {
    for (const ParameterPiece& piece : unit.pieces(array.trainable)) {
      runs.Add(piece.begin, piece.end, [&](int64_t at) {
        return std::array{parameter(piece, at), Operand()};
      });
    }
    return runs.Take();
  }
  // What a rank updates is whole at stage 0, and this its slice of it.
  const int64_t slice = d.stage == 0 ? shard * SectionOf(plan, array.unit, true).shard : 0;
  for (int g = 0; g < unit.sub_groups; ++g) {
    const SubGroup& group =
        plan.pools.homes.sub_groups[static_cast<size_t>(unit.first_sub_group + g)];
    const int64_t first = group.begin - slice, last = group.end - slice;
    const Place home =
        masters ? group.master : group.states.Plus(array.state * group.states_stride);
    const bool splits = masters && d.split_master;
    const DType dtype = splits ? DType::kBFloat16 : DType::kFloat32;
    const auto of_group = [&](int64_t at) {
      return OperandAt(home.Plus((at - first) * SizeOf(dtype)), dtype, 1);
    };
    if (!splits) {
      runs.Add(first, last, [&](int64_t at) { return std::array{of_group(at), Operand()}; });
      continue;
    }
    for (const ParameterPiece& piece : unit.trainable) {
      runs.Add(std::max(first, piece.begin), std::min(last, piece.end), [&](int64_t at) {
        return std::array{parameter(piece, at), of_group(at)};
      });
    }
  }
  return runs.Take();
}

namespace {

// What passes between a home and the staging: of a file whole blocks.
struct Passing {
  Operand home, staging;
};

int64_t InBlock(const Place& home) {
  return home.tier == Tier::kNvme ? home.offset % kSwapAlignment : 0;
}

Passing PassingOf(const StagedRun& run, size_t part) {
  const Operand& home = run.run.homes[part];
  const int64_t skipped = InBlock(home.place), bytes = skipped + home.bytes();
  const int64_t moved = home.place.tier == Tier::kNvme ? SwapAligned(bytes) : bytes;
  return {.home = OperandAt(home.place.Plus(-skipped), DType::kInt8, moved),
          .staging = OperandAt(run.host[part].Plus(-skipped), DType::kInt8, moved)};
}

class StateLowering {
 public:
  StateLowering() { fragment_.of_state = true; }

  void Move(Operand from, Operand to) {
    from.access = Access::kRead;
    to.access = Access::kWrite;
    operands_.insert(operands_.end(), {from, to});
  }
  void Add(Instruction instruction, int unit = -1) {
    if (operands_.empty()) return;
    instruction.starts = LineOf(instruction.stream);
    instruction.ends = EndOf(instruction.stream);
    instruction.operands = fragment_.lists->operands.Keep(operands_);
    if (unit >= 0) {
      const Part part{.unit = unit};
      instruction.parts = fragment_.lists->parts.Keep({&part, 1});
    }
    operands_.clear();
    fragment_.instructions.push_back(instruction);
  }
  void AddRead(const Place& file) {
    Add({.code = Code::kRead,
         .role = OperationKind::kRead,
         .stream = file.pool == StateClass::kParameter ? StreamId::kReadParameters
                                                       : StreamId::kReadStates});
  }
  void AddCopy(OperationKind role, StreamId stream) {
    Add({.code = Code::kCopy, .role = role, .stream = stream});
  }
  void AddGather(OperationKind role, int unit) {
    Add({.code = Code::kAllGather,
         .role = role,
         .stream = StreamId::kGather,
         .lane = Lane::kGather},
        unit);
  }
  std::vector<Operand>& operands() { return operands_; }
  Fragment Take() { return std::move(fragment_); }

 private:
  Fragment fragment_;
  std::vector<Operand> operands_;
};

}  // namespace

StagedRun::StagedRun(const StateRun& of, const Place& staging, bool reaches_device) : run(of) {
  Place free = staging;
  for (size_t part = 0; part < run.homes.size(); ++part) {
    const Operand& home = run.homes[part];
    host[part] = home.place;
    if (home.count == 0 || home.place.tier == Tier::kCpu ||
        (home.place.tier == Tier::kDevice && reaches_device))
      continue;
    staged[part] = true;
    host[part] = free.Plus(InBlock(home.place));
    free = free.Plus(SwapAligned(InBlock(home.place) + home.bytes()));
  }
}

Fragment LowerStateRead(const StagedRun& run) {
  StateLowering lowering;
  for (size_t part = 0; part < run.staged.size(); ++part) {
    if (!run.staged[part]) continue;
    const Passing passing = PassingOf(run, part);
    lowering.Move(passing.home, passing.staging);
    if (passing.home.place.tier == Tier::kNvme) {
      lowering.AddRead(passing.home.place);
    } else {
      lowering.AddCopy(OperationKind::kDownload, StreamId::kReduce);
    }
  }
  return lowering.Take();
}

Fragment LowerStateEdges(const StagedRun& run) {
  StateLowering lowering;
  for (size_t part = 0; part < run.staged.size(); ++part) {
    const Operand& home = run.run.homes[part];
    if (!run.staged[part] || home.place.tier != Tier::kNvme) continue;
    const Passing passing = PassingOf(run, part);
    const auto read = [&](int64_t at) {
      lowering.Move(OperandAt(passing.home.place.Plus(at), DType::kInt8, kSwapAlignment),
                    OperandAt(passing.staging.place.Plus(at), DType::kInt8, kSwapAlignment));
    };
    const int64_t skipped = InBlock(home.place), last = passing.home.count - kSwapAlignment;
    const bool ends_inside = skipped + home.bytes() < passing.home.count;
    if (skipped > 0 || (ends_inside && last == 0)) read(0);
    if (ends_inside && last > 0) read(last);
    lowering.AddRead(home.place);
  }
  return lowering.Take();
}

Fragment LowerStateWrite(const StagedRun& run) {
  StateLowering lowering;
  for (size_t part = 0; part < run.staged.size(); ++part) {
    if (!run.staged[part]) continue;
    const Passing passing = PassingOf(run, part);
    lowering.Move(passing.staging, passing.home);
    if (passing.home.place.tier == Tier::kNvme) {
      lowering.Add(
          {.code = Code::kWrite, .role = OperationKind::kWrite, .stream = StreamId::kWrite});
    } else {
      lowering.AddCopy(OperationKind::kUpload, StreamId::kReduce);
    }
  }
  return lowering.Take();
}

Fragment LowerStateUpload(const Plan& plan, const StateArray& array, const StagedRun& run) {
  StateLowering lowering;
  const Operand& home = run.run.homes[0];
  const Place slice = SlicePlace(plan, array.unit, array.trainable);
  lowering.Move(OperandAt(run.host[0], home.dtype, home.count),
                OperandAt(slice.Plus(run.run.begin * SizeOf(home.dtype)), home.dtype, home.count));
  lowering.AddCopy(OperationKind::kUpload, StreamId::kUpload);
  return lowering.Take();
}

Fragment LowerGather(const Plan& plan, int unit) {
  StateLowering lowering;
  AddGather(plan, unit, lowering.operands());
  lowering.AddGather(OperationKind::kGather, unit);
  return lowering.Take();
}

Fragment LowerSpread(const Plan& plan, int unit, const SpreadClasses& classes) {
  const Decisions& d = plan.decisions;
  const UnitHomes& homes = plan.pools.homes.units[static_cast<size_t>(unit)];
  const Section& section = SectionOf(plan, unit, true);
  StateLowering lowering;
  const auto whole = [&](Place place, DType dtype) {
    const Operand all = OperandAt(place, dtype, section.elements);
    place.per_slice = section.shard * SizeOf(dtype);
    lowering.Move(OperandAt(place, dtype, section.shard), all);
  };
  const auto gather = [&] { lowering.AddGather(OperationKind::kRefresh, unit); };
  if (d.stage == 0 && section.shard > 0) {
    const SubGroup& group = plan.pools.homes.sub_groups[static_cast<size_t>(homes.first_sub_group)];
    const bool masters = classes.masters && d.master_size() > 0;
    if (masters && !d.split_master) whole(group.master, DType::kFloat32);
    for (int k = 0; classes.states && k < d.optimizer_states; ++k)
      whole(group.states.Plus(k * group.states_stride), DType::kFloat32);
    gather();
    if (masters && d.split_master) whole(group.master, DType::kBFloat16);  // whatever they mean
    gather();
  }
  if (d.kept_whole[static_cast<size_t>(unit)] && (classes.parameters || classes.masters))
    AddGather(plan, unit, lowering.operands());
  gather();
  return lowering.Take();
}

}  // namespace ebb::sharding
