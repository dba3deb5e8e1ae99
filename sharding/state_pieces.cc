#include "ebb/sharding/state_pieces.h"

#include <algorithm>
#include <cassert>
#include <initializer_list>
#include <memory>
#include <utility>

namespace ebb::sharding {
namespace {

Operand OperandAt(const Place& place, Encoding encoding, int64_t count,
                  Access access = Access::kNone) {
  return {.place = place, .encoding = encoding, .access = access, .count = count};
}

// The part of `stored` that begins at its element `skipped` and has `count` elements.
Operand Further(Operand stored, int64_t skipped, int64_t count) {
  if (stored.count == 0) return stored;
  stored.place.offset += skipped * stored.encoding.code_bytes();
  stored.count = count;
  return stored;
}

}  // namespace

std::vector<StateRun> RunsOf(const Plan& plan, int shard, const StateRange& range,
                             int64_t elements_max) {
  const Decisions& d = plan.decisions;
  const StateArray& array = range.array;
  const Table& table = plan.table;
  const int parameters = table.Find(Purpose::kParameter, array.unit, array.trainable);
  const bool masters = array.what == StateClass::kMaster;
  const bool reads_parameters = d.reads_parameters(array.unit);
  const DType compute = d.compute_of(array.unit);
  std::vector<StateRun> runs;
  // The asked-for part of elements [begin, end). `stored` and `beside` are the places of `begin`; one
  // element of `beside` is for so many.
  const auto add = [&](int64_t begin, int64_t end, const Operand& stored,
                       const Operand& beside = {}, int64_t block = 1) {
    end = std::min(end, range.end);
    for (int64_t at = std::max(begin, range.begin); at < end;) {
      const int64_t count = std::min(end - at, elements_max);
      assert((at - begin) % block == 0);
      runs.push_back({at,
                      at + count,
                      {Further(stored, at - begin, count),
                       Further(beside, (at - begin) / block, (count + block - 1) / block)}});
      at += count;
    }
  };
  const int64_t elements = SectionOf(plan, array.unit, array.trainable).shard;
  if (array.what == StateClass::kGradient) {
    const int shard_row = table.Find(Purpose::kGradientShard, array.unit);
    add(0, elements, OperandAt(table.OwnSlice(shard_row), d.shard_dtype(array.unit), 1));
    return runs;
  }
  if (array.what == StateClass::kParameter ||
      (masters && d.stochastic_rounding && reads_parameters)) {
    for (const Extent& piece : table.OwnExtents(parameters))
      add(piece.begin, piece.end, OperandAt(piece.place, compute, 1));
    return runs;
  }
  // At stage 0 a rank updates the whole unit; this is the rank's slice of it.
  const int64_t slice = d.stage == 0 ? shard * elements : 0;
  const int row = masters ? table.Find(Purpose::kMaster, array.unit)
                          : table.Find(Purpose::kState, array.unit, true, array.state);
  const std::vector<Extent> pieces =
      reads_parameters ? table.OwnExtents(parameters) : std::vector<Extent>();
  for (const SubGroup& group : table.SubGroupsOf(array.unit)) {
    const int64_t begin = group.begin - slice, end = group.end - slice;
    if (!masters || !reads_parameters) {
      const Encoding encoding = table[row].encoding;
      const Place place = table.UpdatedPlace(row, group.begin);
      if (encoding.block == 0) {
        add(begin, end, OperandAt(place, encoding, 1));
      } else {
        const Place scales = place.Plus(group.count() * encoding.code_bytes());
        add(begin, end, OperandAt(place, encoding.codes(), 1),
            OperandAt(scales, DType::kFloat32, 1), encoding.block);
      }
      continue;
    }
    const Operand low = OperandAt(table.PlaceOf(row, group.begin), kLowHalves, 1);
    for (const Extent& piece : pieces) {
      const int64_t first = std::max(begin, piece.begin);
      add(first, std::min(end, piece.end),
          Further(OperandAt(piece.place, compute, 1), first - piece.begin, 1),
          Further(low, first - begin, 1));
    }
  }
  return runs;
}

namespace {

// The bytes that pass between a place and the staging: whole blocks of a file.
struct Passing {
  Operand stored, staging;
};

int64_t InBlock(const Place& place) {
  return place.tier == Tier::kNvme ? place.offset % kSwapAlignment : 0;
}

int64_t EndOf(const Operand& stored) {
  return stored.place.offset + stored.bytes();
}

Passing PassingOf(const StagedRun& run, size_t part) {
  const Operand& stored = run.run.stored[part];
  const int64_t skipped = InBlock(stored.place),
                bytes =
                    skipped + EndOf(run.run.stored[run.joined ? 1 : part]) - stored.place.offset;
  const int64_t moved = stored.place.tier == Tier::kNvme ? SwapAligned(bytes) : bytes;
  return {.stored = OperandAt(stored.place.Plus(-skipped), DType::kInt8, moved),
          .staging = OperandAt(run.host[part].Plus(-skipped), DType::kInt8, moved)};
}

class StateLowering {
 public:
  StateLowering() { list_.of_state = true; }

  void Move(Operand from, Operand to) {
    from.access = Access::kRead;
    to.access = Access::kWrite;
    operands_.insert(operands_.end(), {from, to});
  }
  void Add(Role role, StreamId stream, int unit = -1) {
    if (operands_.empty() && role != Role::kSave) return;
    Op op{.role = role,
          .stream = stream,
          .starts = LineOf(stream),
          .ends = EndOf(stream),
          .operands = memory_->operands.Keep(operands_)};
    if (unit >= 0) {
      const Part part{.unit = unit};
      op.parts = memory_->parts.Keep({&part, 1});
    }
    operands_.clear();
    list_.ops.push_back(op);
  }
  void AddRead(const Place& file) {
    const bool of_parameters = file.pool == StateClass::kParameter;
    Add(Role::kRead, of_parameters ? StreamId::kReadParameters : StreamId::kReadStates);
  }
  std::vector<Operand>& operands() { return operands_; }
  OpList Take() {
    list_.memory = std::move(memory_);
    return std::move(list_);
  }

 private:
  OpList list_;
  std::shared_ptr<OpMemory> memory_ = std::make_shared<OpMemory>();
  std::vector<Operand> operands_;
};

}  // namespace

StagedRun::StagedRun(const StateRun& of, const Place& staging, bool reaches_device) : run(of) {
  Place free = staging;
  const auto& [codes, scales] = run.stored;
  joined = run.has_scales() && codes.place.tier == Tier::kNvme &&
           SwapAligned(EndOf(codes)) > scales.place.offset - InBlock(scales.place);
  for (size_t part = 0; part < run.stored.size(); ++part) {
    const Operand& stored = run.stored[part];
    host[part] = stored.place;
    if (joined && part == 1) {
      staged[1] = true;
      host[1] = host[0].Plus(scales.place.offset - codes.place.offset);
      break;
    }
    if (stored.count == 0 || stored.place.tier == Tier::kCpu ||
        (stored.place.tier == Tier::kDevice && reaches_device))
      continue;
    staged[part] = true;
    host[part] = free.Plus(InBlock(stored.place));
    free = free.Plus(SwapAligned(InBlock(stored.place) + stored.bytes()));
  }
}

OpList LowerStateRead(const StagedRun& run) {
  StateLowering lowering;
  for (int part = 0; part < run.parts(); ++part) {
    if (!run.staged[part]) continue;
    const Passing passing = PassingOf(run, part);
    lowering.Move(passing.stored, passing.staging);
    if (passing.stored.place.tier == Tier::kNvme) {
      lowering.AddRead(passing.stored.place);
    } else {
      lowering.Add(Role::kDownload, StreamId::kReduce);
    }
  }
  return lowering.Take();
}

OpList LowerStateEdges(const StagedRun& run) {
  StateLowering lowering;
  for (int part = 0; part < run.parts(); ++part) {
    const Operand& stored = run.run.stored[part];
    if (!run.staged[part] || stored.place.tier != Tier::kNvme) continue;
    const Passing passing = PassingOf(run, part);
    const int64_t first = passing.stored.place.offset;
    std::vector<int64_t> blocks;  // from the first one on
    // Bytes [begin, end) of the file are not the run's.
    const auto keep = [&](int64_t begin, int64_t end) {
      for (int64_t at = (begin - first) / kSwapAlignment * kSwapAlignment; at < end - first;
           at += kSwapAlignment)
        if (blocks.empty() || blocks.back() < at) blocks.push_back(at);
    };
    keep(first, stored.place.offset);
    if (run.joined) keep(EndOf(stored), run.run.stored[1].place.offset);
    keep(EndOf(run.run.stored[run.joined ? 1 : part]), first + passing.stored.count);
    for (const int64_t at : blocks) {
      lowering.Move(OperandAt(passing.stored.place.Plus(at), DType::kInt8, kSwapAlignment),
                    OperandAt(passing.staging.place.Plus(at), DType::kInt8, kSwapAlignment));
    }
    lowering.AddRead(stored.place);
  }
  return lowering.Take();
}

OpList LowerStateWrite(const StagedRun& run) {
  StateLowering lowering;
  for (int part = 0; part < run.parts(); ++part) {
    if (!run.staged[part]) continue;
    const Passing passing = PassingOf(run, part);
    lowering.Move(passing.staging, passing.stored);
    if (passing.stored.place.tier == Tier::kNvme) {
      lowering.Add(Role::kWrite, StreamId::kWrite);
    } else {
      lowering.Add(Role::kUpload, StreamId::kReduce);
    }
  }
  return lowering.Take();
}

OpList LowerStateUpload(const Plan& plan, const StateArray& array, const StagedRun& run) {
  StateLowering lowering;
  const Operand& stored = run.run.stored[0];
  const int to = GatheredFrom(plan.table, array.unit, array.trainable);
  lowering.Move(OperandAt(run.host[0], stored.encoding, stored.count),
                OperandAt(plan.table.OwnSlice(to, run.run.begin), stored.encoding, stored.count));
  lowering.Add(Role::kUpload, StreamId::kUpload);
  return lowering.Take();
}

std::vector<int> UnitsByUpdate(const Plan& plan) {
  std::vector<int> units;
  std::vector<bool> has(plan.layout.units.size(), false);
  const auto add = [&](int unit) {
    if (!has[unit]) units.push_back(unit);
    has[unit] = true;
  };
  for (const Op& op : plan.ops) {
    if (op.role == Role::kUpdate) add(op.parts.front().unit);
  }
  for (int unit = 0; unit < static_cast<int>(has.size()); ++unit) add(unit);
  return units;
}

OpList LowerAsyncRead(const Plan& plan, int shard, bool has_second_places) {
  const std::vector<int> units = UnitsByUpdate(plan);
  StateLowering lowering;
  const auto in_second_place = [&](const Operand& stored) {
    return has_second_places && stored.place.tier == Tier::kNvme &&
           stored.place.pool != StateClass::kParameter;
  };
  bool of_moved = has_second_places;
  const auto add = [&](const StateArray& array) {
    for (const StateRun& run : RunsOf(plan, shard, {.array = array}, INT64_MAX)) {
      for (Operand stored : run.stored) {
        if (stored.count == 0 || in_second_place(stored) != of_moved) continue;
        stored.access = Access::kRead;
        lowering.operands().push_back(stored);
      }
    }
  };
  const auto add_unit = [&](int unit) {
    add({.what = StateClass::kParameter, .unit = unit, .trainable = false});
    add({.what = StateClass::kMaster, .unit = unit});
    for (int state = 0; state < plan.decisions.states_of(unit); ++state)
      add({.what = StateClass::kOptimizer, .unit = unit, .state = state});
  };
  // Updates of arrays with a second place wait for this operation alone.
  if (of_moved) {
    for (const int unit : units) add_unit(unit);
    lowering.Add(Role::kMark, StreamId::kCompute);
    of_moved = false;
  }
  for (const int unit : units) {
    add_unit(unit);
    lowering.Add(Role::kSave, StreamId::kCompute, unit);
  }
  OpList list = lowering.Take();
  for (Op& op : list.ops) op.starts = op.ends = kAsyncReads;
  list.of_state = false;
  return list;
}

OpList LowerGather(const Plan& plan, int unit) {
  StateLowering lowering;
  AddGather(plan.table, unit, lowering.operands());
  lowering.Add(Role::kGather, StreamId::kGather, unit);
  return lowering.Take();
}

OpList LowerSpread(const Plan& plan, int unit, const SpreadClasses& classes) {
  const Decisions& d = plan.decisions;
  const Table& table = plan.table;
  const Section& section = SectionOf(plan, unit, true);
  StateLowering lowering;
  // `block`: elements of the unit for one that is moved.
  const auto whole = [&](Place place, Encoding encoding, int64_t block = 1) {
    const Operand all = OperandAt(place, encoding, section.elements / block);
    place.per_slice = section.shard / block * encoding.code_bytes();
    lowering.Move(OperandAt(place, encoding, section.shard / block), all);
  };
  const auto gather = [&] { lowering.Add(Role::kRefresh, StreamId::kGather, unit); };
  if (d.stage == 0 && section.shard > 0) {
    const bool masters = classes.masters && d.keeps_master(unit);
    const Place master = table.PlaceOf(table.Find(Purpose::kMaster, unit));
    if (masters && !d.reads_parameters(unit)) whole(master, DType::kFloat32);
    const auto for_states = [&](const auto& each) {
      for (int k = 0; classes.states && k < d.states_of(unit); ++k)
        each(table.PlaceOf(table.Find(Purpose::kState, unit, true, k)), d.state_encoding(unit, k));
    };
    for_states([&](const Place& place, const Encoding& encoding) {
      if (encoding == DType::kFloat32) whole(place, encoding);
    });
    gather();
    if (masters && d.reads_parameters(unit)) whole(master, kLowHalves);
    gather();
    // One collective moves numbers of one dtype.
    for_states([&](const Place& place, const Encoding& encoding) {
      if (encoding != DType::kFloat32) whole(place, encoding.codes());
    });
    gather();
    for_states([&](const Place& place, const Encoding& encoding) {
      if (encoding.block > 0)
        whole(place.Plus(section.elements * encoding.code_bytes()), DType::kFloat32,
              encoding.block);
    });
    gather();
  }
  if (d.kept_whole[unit] && (classes.parameters || classes.masters))
    AddGather(plan.table, unit, lowering.operands());
  gather();
  return lowering.Take();
}

}  // namespace ebb::sharding
