// Which memory each of the plan's operations touches.
#include <algorithm>
#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "ebb/sharding/norm_records.h"
#include "ebb/sharding/program.h"
#include "ebb/sharding/unit_places.h"

namespace ebb::sharding {

Line EndOf(StreamId stream) {
  switch (stream) {
    case StreamId::kReadParameters:
      return kParametersRead;
    case StreamId::kReadStates:
      return kStatesRead;
    case StreamId::kWrite:
      return kWritten;
    default:
      return LineOf(stream);
  }
}

std::string_view Name(Code code) {
  constexpr std::string_view kNames[] = {
      "kernels",     "all-gather", "reduce-scatter",  "all-reduce",    "copy", "cast",
      "accumulate",  "norm",       "parameter norms", "update",        "read", "write",
      "check files", "prepare",    "exchange",        "exchange norms"};
  return kNames[static_cast<size_t>(code)];
}

namespace {

constexpr int64_t kNormBlock = 1024;  // elements, of which a norm has a sum each

class Lowering {
 public:
  Lowering(const Plan& plan, bool carrying)
      : plan_(plan),
        d_(plan.decisions),
        pools_(plan.pools),
        carrying_(carrying),
        is_walk_(std::none_of(plan.scopes.begin(), plan.scopes.end(),
                              [](const PlannedScope& scope) { return scope.backward; })),
        cells_(static_cast<int>(plan.layout.units.size())) {}

  Fragment Run();

 private:
  const Section& Trainable(int unit) const { return SectionOf(plan_, unit, true); }
  Tier GradientHome(int unit) const {
    return pools_.homes.units[static_cast<size_t>(unit)].gradient;
  }
  static Place OnDevice(StateClass pool, int64_t offset, int64_t per_slice = 0) {
    return {.tier = Tier::kDevice, .pool = pool, .offset = offset, .per_slice = per_slice};
  }
  static Place Staging(int64_t offset) { return OnDevice(StateClass::kStaging, offset); }

  // Where things are.
  Place Gradient(int visit) const;
  Place GradientSlice(int unit) const { return GradientSlicePlace(plan_, unit); }
  Place ReduceSource(const Part& part) const;
  Place Summed(const Part& part) const;
  Place Rounded(const Part& part) const;
  Place Reduced(const Part& part) const;
  Place ShardOf(const Part& part) const;

  // Operands of the instruction that is written.
  void Add(const Place& place, DType dtype, Access access, int64_t count) {
    operands_.push_back({.place = place,
                         .dtype = dtype,
                         .access = count > 0 ? access : Access::kNone,
                         .count = count});
  }
  void AddBytes(const Place& place, Access access, int64_t bytes) {
    Add(place, DType::kInt8, access, bytes);
  }
  void AddControl(int64_t cell, Access access, int64_t count = 1);
  void AddScratch();
  int64_t Sums() const { return is_walk_ ? cells_.of_walks() : cells_.sums(); }
  int64_t Files() const { return is_walk_ ? cells_.of_walks() + 1 : cells_.files(); }
  void AddNorm(int unit, bool last);

  void FindReleases();
  void Kernels(int scope);
  void KernelsOfOpen();
  void LossKernels();
  void Operands(const Operation& operation);
  void Secondary(const Part& part, bool fills);
  void Accumulate(const Part& part);
  void Moves(const Operation& operation);
  void Update(const Operation& operation, const UpdateWork& work);
  void ParameterNorms(const Operation& operation, const Part& part, const UpdateWork& work);
  void UpdateArrays(const UpdateWork& work, Access access, int states);
  void Exchange();
  void ExchangeNorms();
  void Boundary(int visit, bool gradient, Access access);
  std::optional<DType> ViaOf(OperationKind kind) const;
  int Finish(Instruction instruction);

  const Plan& plan_;
  const Decisions& d_;
  const Pools& pools_;
  const bool carrying_, is_walk_;
  const ControlCells cells_;
  Fragment fragment_;
  std::vector<Operand> operands_;
  std::vector<bool> releases_;  // by scope: it is the last to close of those that a gather serves
  std::vector<int> open_;       // scopes, as they opened
};

Place Lowering::Gradient(int visit) const {
  return OnDevice(StateClass::kGradient, pools_.visits[static_cast<size_t>(visit)].gradient);
}

// What a reduction reads: the whole gradient as backward wrote it, or its cast.
Place Lowering::ReduceSource(const Part& part) const {
  return d_.casts() ? Staging(part.staged)
                    : Gradient(plan_.scopes[static_cast<size_t>(part.scope)].visit);
}

// Where a reduction and the all-reduce between replicas leave this rank's slice ...
Place Lowering::Summed(const Part& part) const {
  const bool is_shard =
      !d_.accumulates[static_cast<size_t>(part.unit)] && GradientHome(part.unit) == Tier::kDevice;
  if (!d_.rounds_slices() && is_shard) return GradientSlice(part.unit);
  Place place = ReduceSource(part);
  place.per_slice = Trainable(part.unit).shard * SizeOf(d_.reduced());
  return place;
}

// ... and where it is in the communication dtype: the shard itself unless it is added to that.
Place Lowering::Rounded(const Part& part) const {
  if (!d_.rounds_slices()) return Summed(part);
  return d_.accumulates[static_cast<size_t>(part.unit)] || GradientHome(part.unit) != Tier::kDevice
             ? Staging(part.rounded)
             : GradientSlice(part.unit);
}

Place Lowering::Reduced(const Part& part) const {
  return part.landed >= 0 ? pools_.landing.Plus(part.landed) : Rounded(part);
}

// Where the sums of a part are made: its shard, or the slot that this passes through.
Place Lowering::ShardOf(const Part& part) const {
  return part.gradient_slot < 0 ? GradientSlice(part.unit)
                                : pools_.gradient_slots.Slot(part.gradient_slot);
}

void Lowering::AddControl(int64_t cell, Access access, int64_t count) {
  operands_.push_back({.place = {.tier = Tier::kCpu, .pool = StateClass::kControl, .offset = cell},
                       .access = access,
                       .count = count});
}

// Where pieces of all ranks are summed in one order.
void Lowering::AddScratch() {
  if (pools_.staging_sums_bytes > 0)
    AddBytes(Staging(pools_.staging_sums), Access::kWrite, pools_.staging_sums_bytes);
}

void Lowering::AddNorm(int unit, bool last) {
  AddControl(cells_.squares + unit, last ? Access::kWrite : Access::kNone);
  const Place scratch =
      GradientHome(unit) == Tier::kDevice ? Staging(pools_.staging_norm) : pools_.host_norm;
  const int64_t blocks = (Trainable(unit).shard + kNormBlock - 1) / kNormBlock;
  AddBytes(scratch, Access::kWrite, last ? blocks * static_cast<int64_t>(sizeof(double)) : 0);
}

void Lowering::Boundary(int visit, bool gradient, Access access) {
  const VisitAddresses& at = pools_.visits[static_cast<size_t>(visit)];
  AddBytes(OnDevice(StateClass::kActivation, gradient ? at.output_gradient : at.output), access,
           at.boundary_stride * d_.micro_batches_per_round);
}

void Lowering::FindReleases() {
  releases_.assign(plan_.scopes.size(), false);
  absl::flat_hash_map<std::pair<int, int>, size_t> last;  // by gather and unit
  for (size_t s = 0; s < plan_.scopes.size(); ++s) {
    const int gather = plan_.gather_of_scope[s];
    if (gather < 0) continue;
    const auto [found, is_new] = last.try_emplace({gather, plan_.scopes[s].unit}, s);
    if (plan_.scopes[found->second].close_tick < plan_.scopes[s].close_tick) found->second = s;
  }
  for (const auto& [key, scope] : last) releases_[scope] = true;
}

// What the trainer runs from a moment until the next: of all scopes that are open meanwhile.
void Lowering::KernelsOfOpen() {
  if (open_.empty()) return;
  for (int open : open_) Kernels(open);
  const int kernels = Finish({.code = Code::kKernels,
                              .role = OperationKind::kMark,
                              .stream = StreamId::kCompute,
                              .scope = open_.back(),
                              .goes_on = fragment_.moments.back().kind == Moment::kClose});
  fragment_.moments.back().kernels = kernels;
}

// Everything that a scope shows. Debug builds poison what its close releases, which is a write.
void Lowering::Kernels(int s) {
  const PlannedScope& scope = plan_.scopes[static_cast<size_t>(s)];
  const int unit = scope.unit, visits = static_cast<int>(pools_.visits.size());
  for (const bool trainable : {true, false}) {
    Add(WholePlace(plan_, unit, trainable), d_.compute,
        releases_[static_cast<size_t>(s)] ? Access::kReadWrite : Access::kRead,
        SectionOf(plan_, unit, trainable).elements);
  }
  AddControl(Sums(), Access::kReadWrite);
  if (is_walk_) {
    AddBytes(OnDevice(StateClass::kActivation, 0), Access::kReadWrite,
             pools_.bytes[static_cast<int>(StateClass::kActivation)]);
    return;
  }
  if (scope.visit > 0) Boundary(scope.visit - 1, false, Access::kRead);
  if (!scope.backward) {
    if (scope.visit + 1 < visits) Boundary(scope.visit, false, Access::kWrite);
    return;
  }
  if (scope.visit + 1 < visits) Boundary(scope.visit, true, Access::kRead);
  if (scope.visit > 0) Boundary(scope.visit - 1, true, Access::kWrite);
  if (!scope.gradients) return;
  Add(Gradient(scope.visit), d_.gradient,
      d_.keeps_step_gradients && scope.round > 0 ? Access::kReadWrite : Access::kWrite,
      Trainable(unit).elements);
}

// Outside of scopes a trainer may add to the loss.
void Lowering::LossKernels() {
  AddControl(Sums(), Access::kReadWrite);
}

// This rank's part of a unit just gathered into its secondary shard, or the unit from those of all ranks of a group.
void Lowering::Secondary(const Part& part, bool fills) {
  for (const bool trainable : {true, false}) {
    const Section& section = SectionOf(plan_, part.unit, trainable);
    const int64_t count = d_.SecondaryShard(section);
    if (count == 0) continue;
    const UnitAddresses& at = pools_.units[static_cast<size_t>(part.unit)];
    const Place secondary =
        OnDevice(StateClass::kSecondary, trainable ? at.secondary_trainable : at.secondary_frozen);
    Place whole = WholePlace(plan_, part.unit, trainable);
    if (fills) {
      whole.per_slice = count * SizeOf(d_.compute);
      whole.of_secondary = true;
      Add(whole, d_.compute, Access::kRead, count);
      Add(secondary, d_.compute, Access::kWrite, count);
    } else {
      Add(secondary, d_.compute, Access::kRead, count);
      Add(whole, d_.compute, Access::kWrite, section.elements);
    }
  }
}

void Lowering::Accumulate(const Part& part) {
  const int64_t count = Trainable(part.unit).shard;
  Add(Reduced(part), d_.communication, Access::kRead, count);
  Add(ShardOf(part), d_.shard_dtype(part.unit), part.first ? Access::kWrite : Access::kReadWrite,
      count);
  AddNorm(part.unit, part.last);
}

void Lowering::Moves(const Operation& operation) {
  for (const Move& move : operation.moves) {
    AddBytes(move.from, Access::kRead, move.bytes);
    AddBytes(move.to, Access::kWrite, move.bytes);
  }
}

// gradient, master, parameter, states.
void Lowering::UpdateArrays(const UpdateWork& work, Access access, int states) {
  const SubGroup& group = pools_.homes.sub_groups[static_cast<size_t>(work.sub_group)];
  const int64_t count = group.count();
  Add(work.gradient, d_.shard_dtype(work.unit), Access::kRead, count);
  // Of fp32 parameters the master is the parameter itself.
  const int64_t master_bytes = d_.writes_parameters() ? d_.master_size() : SizeOf(DType::kFloat32);
  AddBytes(work.master, access, count * master_bytes);
  const bool writes = Writes(access);
  const Access of_parameter = !writes                 ? Access::kRead
                              : d_.reads_parameters() ? Access::kReadWrite
                                                      : Access::kWrite;
  Add(work.parameter, d_.compute, of_parameter, work.writes_parameter ? count : 0);
  for (int k = 0; k < states; ++k)
    Add(work.states.Plus(k * work.states_stride), DType::kFloat32, access, count);
}

void Lowering::Update(const Operation& operation, const UpdateWork& work) {
  UpdateArrays(work, Access::kReadWrite, d_.optimizer_states);
  const bool early =
      d_.timing == UpdateTiming::kEarly && operation.condition != Condition::kCarrying;
  AddControl(early ? cells_.early() : cells_.constants(), Access::kRead);
  if (!d_.own_optimizer) return;
  const SubGroup& group = pools_.homes.sub_groups[static_cast<size_t>(work.sub_group)];
  const bool on_host = group.tier != Tier::kDevice;
  int64_t longest = 0;  // part of a parameter
  for (const Placement& placement : Trainable(work.unit).placements)
    longest = std::max(longest, std::min(placement.elements, group.count()));
  Add(on_host ? pools_.host_gradient : Staging(pools_.staging_gradient), DType::kFloat32,
      Access::kWrite, longest);
  if (!d_.reads_parameters()) return;
  Add(on_host ? pools_.host_master : Staging(pools_.staging_master), DType::kFloat32,
      Access::kWrite, longest);
}

void Lowering::ParameterNorms(const Operation& operation, const Part& part,
                              const UpdateWork& work) {
  UpdateArrays(work, Access::kRead, d_.norm_states[static_cast<size_t>(work.unit)]);
  const bool on_host = operation.stream == StreamId::kHostUpdate;
  const int64_t bytes = LayOutNormRecords(plan_.layout, d_).sums * kNormSumsBytes;
  AddBytes(on_host ? pools_.host_norm_sums : Staging(pools_.staging_norm_sums),
           part.first ? Access::kWrite : Access::kReadWrite, bytes);
  AddControl(cells_.constants(), Access::kRead);
}

void Lowering::Exchange() {
  AddBytes(Staging(pools_.staging_exchange), Access::kWrite, (d_.world + 1) * kExchangeBytes);
  const auto units = static_cast<int64_t>(plan_.layout.units.size());
  AddControl(cells_.squares, is_walk_ ? Access::kNone : Access::kRead, units);
  AddControl(Sums(), Access::kReadWrite);
  AddControl(Files(), Access::kRead);
  AddControl(cells_.constants(), is_walk_ ? Access::kNone : Access::kWrite);
  AddControl(cells_.scale, is_walk_ ? Access::kNone : Access::kReadWrite);
}

void Lowering::ExchangeNorms() {
  const NormRecords records = LayOutNormRecords(plan_.layout, d_);
  const auto& groups = pools_.homes.sub_groups;
  for (const bool on_host : {false, true}) {
    const bool any = std::any_of(groups.begin(), groups.end(), [&](const SubGroup& group) {
      return (group.tier != Tier::kDevice) == on_host &&
             d_.norm_states[static_cast<size_t>(group.unit)] >= 0;
    });
    AddBytes(on_host ? pools_.host_norm_sums : Staging(pools_.staging_norm_sums), Access::kRead,
             any ? records.sums * kNormSumsBytes : 0);
  }
  AddBytes(Staging(pools_.staging_norm_records), Access::kWrite,
           records.exchanged ? (d_.shards + 1) * records.bytes() : 0);
  AddControl(cells_.constants(), Access::kReadWrite);
}

void Lowering::Operands(const Operation& operation) {
  for (const Part& part : operation.parts) {
    const int64_t shard = Trainable(part.unit).shard, elements = Trainable(part.unit).elements;
    switch (operation.kind) {
      case OperationKind::kGather:
        AddGather(plan_, part.unit, operands_);
        break;
      case OperationKind::kFillSecondary:
      case OperationKind::kGatherSecondary:
        Secondary(part, operation.kind == OperationKind::kFillSecondary);
        break;
      case OperationKind::kRefresh:
        Add(SlicePlace(plan_, part.unit, true), d_.compute, Access::kRead, shard);
        Add(WholePlace(plan_, part.unit, true), d_.compute, Access::kWrite, elements);
        break;
      case OperationKind::kGatherGradient:
        Add(GradientSlice(part.unit), d_.accumulation, Access::kRead, shard);
        Add(pools_.GradientShard(part.unit), d_.accumulation, Access::kWrite, elements);
        break;
      case OperationKind::kCast:
        Add(Gradient(plan_.scopes[static_cast<size_t>(part.scope)].visit), d_.gradient,
            Access::kRead, elements);
        Add(Staging(part.staged), d_.reduced(), Access::kWrite, elements);
        break;
      case OperationKind::kReduce:
        Add(ReduceSource(part), d_.reduced(), Access::kRead, elements);
        Add(Summed(part), d_.reduced(), Access::kWrite, shard);
        break;
      case OperationKind::kAllReduce:
        Add(Summed(part), d_.reduced(), Access::kReadWrite, shard);
        break;
      case OperationKind::kRound:
        Add(Summed(part), d_.reduced(), Access::kRead, shard);
        Add(Rounded(part), d_.communication, Access::kWrite, shard);
        break;
      case OperationKind::kAccumulate:
        Accumulate(part);
        break;
      case OperationKind::kNorm:
        Add(ShardOf(part), d_.shard_dtype(part.unit), Access::kRead, shard);
        AddNorm(part.unit, true);
        break;
      case OperationKind::kParameterNorms:
        ParameterNorms(operation, part, plan_.works[static_cast<size_t>(part.work)]);
        break;
      case OperationKind::kUpdate:
        Update(operation, plan_.works[static_cast<size_t>(part.work)]);
        break;
      case OperationKind::kNarrow: {
        const Narrowing& of = plan_.narrowings[static_cast<size_t>(part.work)];
        const SubGroup& group = pools_.homes.sub_groups[static_cast<size_t>(of.sub_group)];
        Add(of.master, DType::kFloat32, Access::kRead, group.count());
        Add(of.parameter, d_.compute, Access::kWrite, group.count());
        break;
      }
      default:
        break;
    }
  }
  switch (operation.kind) {
    case OperationKind::kReduce:
    case OperationKind::kAllReduce:
      return AddScratch();
    case OperationKind::kExchange:
      return Exchange();
    case OperationKind::kExchangeNorms:
      return ExchangeNorms();
    case OperationKind::kCheck:
      return AddControl(Files(), Access::kWrite);
    default:
      return Moves(operation);
  }
}

Code CodeOf(OperationKind kind) {
  switch (kind) {
    case OperationKind::kMark:
      return Code::kKernels;
    case OperationKind::kGather:
    case OperationKind::kGatherSecondary:
    case OperationKind::kGatherGradient:
    case OperationKind::kRefresh:
      return Code::kAllGather;
    case OperationKind::kFillSecondary:
    case OperationKind::kUpload:
    case OperationKind::kDownload:
      return Code::kCopy;
    case OperationKind::kCast:
    case OperationKind::kRound:
    case OperationKind::kNarrow:
      return Code::kCast;
    case OperationKind::kReduce:
      return Code::kReduceScatter;
    case OperationKind::kAllReduce:
      return Code::kAllReduce;
    case OperationKind::kAccumulate:
      return Code::kAccumulate;
    case OperationKind::kNorm:
      return Code::kNorm;
    case OperationKind::kExchange:
      return Code::kExchange;
    case OperationKind::kParameterNorms:
      return Code::kParameterNorms;
    case OperationKind::kExchangeNorms:
      return Code::kExchangeNorms;
    case OperationKind::kUpdate:
      return Code::kUpdate;
    case OperationKind::kRead:
      return Code::kRead;
    case OperationKind::kWrite:
      return Code::kWrite;
    case OperationKind::kCheck:
      return Code::kCheckFiles;
  }
  return Code::kKernels;
}

Lane LaneOf(OperationKind kind) {
  switch (kind) {
    case OperationKind::kGather:
    case OperationKind::kRefresh:
      return Lane::kGather;
    case OperationKind::kGatherSecondary:
      return Lane::kSecondary;
    case OperationKind::kReduce:
    case OperationKind::kGatherGradient:
    case OperationKind::kExchangeNorms:
      return Lane::kReduce;
    case OperationKind::kAllReduce:
      return Lane::kReplicas;
    case OperationKind::kExchange:
      return Lane::kExchange;
    default:
      return Lane::kNone;
  }
}

// With replicas what is sent is fp32, and holds what was rounded to the communication dtype, so that the sums are
// those of a world without them.
std::optional<DType> Lowering::ViaOf(OperationKind kind) const {
  if (kind != OperationKind::kCast || d_.gradient == d_.communication ||
      d_.reduced() == d_.communication)
    return std::nullopt;
  return d_.communication;
}

int Lowering::Finish(Instruction instruction) {
  instruction.starts = LineOf(instruction.stream);
  instruction.ends = EndOf(instruction.stream);
  if (instruction.role == OperationKind::kNarrow) instruction.starts = instruction.ends;
  instruction.by_parity =
      std::any_of(operands_.begin(), operands_.end(), [&](const Operand& operand) {
        return operand.place.pool == StateClass::kControl && operand.access != Access::kNone &&
               cells_.by_parity(operand.place.offset);
      });
  instruction.operands = fragment_.lists->operands.KeepOnce(operands_);
  operands_.clear();
  fragment_.instructions.push_back(instruction);
  return fragment_.moments.back().end++;
}

Fragment Lowering::Run() {
  FindReleases();
  fragment_.instruction_of.assign(plan_.operations.size(), -1);
  for (const Moment& moment : plan_.moments) {
    const int next = static_cast<int>(fragment_.instructions.size());
    fragment_.moments.push_back(
        {.kind = moment.kind, .scope = moment.scope, .begin = next, .end = next});
    if (moment.kind == Moment::kBegin && d_.timing == UpdateTiming::kEarly && !is_walk_ &&
        !plan_.scopes.empty()) {
      AddControl(cells_.early(), Access::kWrite);
      AddControl(cells_.scale, Access::kRead);
      Finish(
          {.code = Code::kPrepare, .role = OperationKind::kExchange, .stream = StreamId::kReduce});
    }
    for (int index : moment.operations()) {
      const Operation& operation = plan_.operations[static_cast<size_t>(index)];
      if (operation.condition == (carrying_ ? Condition::kNotCarrying : Condition::kCarrying))
        continue;
      int& instruction = fragment_.instruction_of[static_cast<size_t>(index)];
      if (operation.kind == OperationKind::kMark) {
        LossKernels();
      } else {
        Operands(operation);
      }
      instruction =
          Finish({.code = CodeOf(operation.kind),
                  .role = operation.kind,
                  .stream = operation.stream,
                  .lane = LaneOf(operation.kind),
                  .carried = operation.condition == Condition::kCarrying,
                  .divides = operation.kind == OperationKind::kAllReduce ||
                             (operation.kind == OperationKind::kReduce && d_.replicas() == 1),
                  .via = ViaOf(operation.kind),
                  .operation = index,
                  .bytes = operation.bytes,
                  .parts = operation.parts});
    }
    if (moment.kind == Moment::kOpen) open_.push_back(moment.scope);
    if (moment.kind == Moment::kClose) std::erase(open_, moment.scope);
    KernelsOfOpen();
  }
  fragment_.lists->operands.Close();
  return std::move(fragment_);
}

}  // namespace

Fragment Lower(const Plan& plan, bool carrying) {
  return Lowering(plan, carrying).Run();
}

}  // namespace ebb::sharding
