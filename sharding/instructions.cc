#include "ebb/sharding/instructions.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "ebb/sharding/lower/plan_writer.h"

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
      "kernels", "all-gather",   "reduce-scatter", "all-reduce",    "copy",
      "cast",    "cast masters", "accumulate",     "norm",          "parameter norms",
      "update",  "read",         "write",          "read beside",   "prepare",
      "seal",    "conclude",     "seal norms",     "conclude norms"};
  return kNames[static_cast<size_t>(code)];
}

namespace {

// The instruction of an operation, its communicator, and whether it brings parameters.
struct Runs {
  Code code{};
  Lane lane = Lane::kNone;
  bool brings_parameters = false;
};
constexpr Runs kRuns[kOperationKinds] = {
    {Code::kKernels},                            // kMark
    {Code::kAllGather, Lane::kGather, true},     // kGather
    {Code::kCopy},                               // kFillSecondary
    {Code::kAllGather, Lane::kSecondary, true},  // kGatherSecondary
    {Code::kCast},                               // kCast
    {Code::kReduceScatter, Lane::kReduce},       // kReduce
    {Code::kAllReduce, Lane::kReplicas},         // kAllReduce
    {Code::kCast},                               // kRound
    {Code::kAccumulate},                         // kAccumulate
    {Code::kNorm},                               // kNorm
    {Code::kAllGather, Lane::kReduce},           // kGatherGradient
    {Code::kSeal},                               // kSeal
    {Code::kAllGather, Lane::kExchange},         // kExchange
    {Code::kConclude},                           // kConclude
    {Code::kParameterNorms},                     // kParameterNorms
    {Code::kSealNorms},                          // kSealNorms
    {Code::kAllGather, Lane::kReduce},           // kExchangeNorms
    {Code::kConcludeNorms},                      // kConcludeNorms
    {Code::kCopy},                               // kCopyControl
    {Code::kUpdate},                             // kUpdate
    {Code::kAllGather, Lane::kGather},           // kRefresh
    {Code::kRead, Lane::kNone, true},            // kRead
    {Code::kCopy, Lane::kNone, true},            // kUpload
    {Code::kCopy},                               // kDownload
    {Code::kWrite},                              // kWrite
    {Code::kCastMasters, Lane::kNone, true},     // kCastMasters
};

// With replicas fp32 is sent, but its values were rounded to the communication dtype. So the sums
// are those of a world without replicas.
std::optional<DType> ViaOf(const Operation& operation, const Decisions& d) {
  if (operation.kind != OperationKind::kCast) return std::nullopt;
  const int unit = operation.parts.front().unit;
  const DType sent = d.communication_of(unit);
  if (d.gradient_of(unit) == sent || !d.rounds_slices(unit)) return std::nullopt;
  return sent;
}

class Lowering {
 public:
  Lowering(const Plan& plan, bool carrying)
      : plan_(plan), d_(plan.decisions), carrying_(carrying), operands_(plan) {}

  Fragment Run();

 private:
  void BeginMoment(const Moment& moment);
  void Lower(int index);
  void KernelsOfOpen();
  void Kernels(int scope);
  void Boundary(int visit, bool gradient, Access access);
  // With the operands that were written.
  int AppendWritten(Instruction instruction);
  int Append(Instruction instruction);

  const Plan& plan_;
  const Decisions& d_;
  const bool carrying_;
  OperandWriter operands_;  // of the instruction that is being written
  Fragment fragment_;
  std::vector<int> open_;  // scopes, as they opened
};

Fragment Lowering::Run() {
  fragment_.instruction_of.assign(plan_.operations.size(), -1);
  fragment_.again = plan_.step_rounds - d_.rounds;
  int round = 0;
  for (const Moment& moment : plan_.moments) {
    if (moment.kind == Moment::kOpen && d_.rounds == kPlannedRounds &&
        plan_.scopes[moment.scope].round > round) {
      ++round;
      fragment_.round_begins.push_back(static_cast<int>(fragment_.instructions.size()));
    }
    BeginMoment(moment);
    for (int index : moment.operations()) Lower(index);
    if (moment.kind == Moment::kOpen) open_.push_back(moment.scope);
    if (moment.kind == Moment::kClose) std::erase(open_, moment.scope);
    KernelsOfOpen();
  }
  fragment_.lists->operands.Close();
  fragment_.lists_of_plan = plan_.lists;
  return std::move(fragment_);
}

void Lowering::BeginMoment(const Moment& moment) {
  const int next = static_cast<int>(fragment_.instructions.size());
  fragment_.moments.push_back(
      {.kind = moment.kind, .scope = moment.scope, .begin = next, .end = next});
  const bool prepares = moment.kind == Moment::kBegin && d_.timing == UpdateTiming::kEarly &&
                        !operands_.is_walk() && !plan_.scopes.empty();
  if (!prepares) return;
  operands_.AddControl(operands_.cells().early(), Access::kWrite);
  operands_.AddControl(operands_.cells().scale, Access::kRead);
  AppendWritten(
      {.code = Code::kPrepare, .role = OperationKind::kConclude, .stream = StreamId::kReduce});
  operands_.AddControl(operands_.cells().early(), Access::kRead);
  operands_.AddControl(operands_.cells().device_early(), Access::kWrite);
  AppendWritten(
      {.code = Code::kCopy, .role = OperationKind::kCopyControl, .stream = StreamId::kReduce});
}

void Lowering::Lower(int index) {
  const Operation& operation = plan_.operations[index];
  if (operation.condition == (carrying_ ? Condition::kNotCarrying : Condition::kCarrying)) return;
  const Runs& runs = kRuns[static_cast<size_t>(operation.kind)];
  fragment_.instruction_of[index] =
      Append({.code = runs.code,
              .role = operation.kind,
              .stream = operation.stream,
              .lane = runs.lane,
              .carried = operation.condition == Condition::kCarrying,
              .brings_parameters = runs.brings_parameters,
              .divides = operation.kind == OperationKind::kAllReduce ||
                         (operation.kind == OperationKind::kReduce && d_.replicas() == 1),
              .via = ViaOf(operation, d_),
              .operation = index,
              .bytes = operation.bytes,
              .updates = operation.updates,
              .parts = operation.parts,
              .operands = operation.operands});
}

// The trainer's kernels between two moments, which serve all scopes that are open meanwhile.
void Lowering::KernelsOfOpen() {
  if (open_.empty()) return;
  for (int open : open_) Kernels(open);
  const int kernels = AppendWritten({.code = Code::kKernels,
                                     .role = OperationKind::kMark,
                                     .stream = StreamId::kCompute,
                                     .scope = open_.back(),
                                     .goes_on = fragment_.moments.back().kind == Moment::kClose});
  fragment_.moments.back().kernels = kernels;
}

// Everything that a scope shows. Debug builds poison what its close releases, which is a write.
void Lowering::Kernels(int s) {
  const PlannedScope& scope = plan_.scopes[s];
  const int unit = scope.unit, visits = plan_.table.visits;
  for (const bool trainable : {true, false}) {
    operands_.Add(plan_.table.PlaceOf(WholeRow(plan_.table, unit, trainable)), d_.compute_of(unit),
                  scope.releases ? Access::kReadWrite : Access::kRead,
                  SectionOf(plan_, unit, trainable).elements);
  }
  operands_.AddControl(operands_.sums(), Access::kReadWrite);
  if (operands_.is_walk()) {
    operands_.AddBytes(plan_.table.PlaceOf(plan_.table.Find(Purpose::kWalkOutputs)),
                       Access::kReadWrite,
                       plan_.table.bytes.Of(Tier::kDevice, StateClass::kActivation));
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
  const int gradient = plan_.table.Find(Purpose::kGradient, GradientKey(d_, scope));
  operands_.Add(plan_.table.PlaceOf(gradient), d_.gradient_of(unit),
                d_.keeps_step_gradients && scope.round > 0 ? Access::kReadWrite : Access::kWrite,
                SectionOf(plan_, unit, true).elements);
}

void Lowering::Boundary(int visit, bool gradient, Access access) {
  const int row = plan_.table.Find(gradient ? Purpose::kOutputGradient : Purpose::kOutput, visit);
  operands_.AddBytes(plan_.table.PlaceOf(row), access,
                     row < 0 ? 0 : plan_.table[row].turns * plan_.table[row].turn_bytes);
}

int Lowering::AppendWritten(Instruction instruction) {
  instruction.operands = fragment_.lists->operands.KeepOnce(operands_.operands());
  operands_.operands().clear();
  return Append(instruction);
}

int Lowering::Append(Instruction instruction) {
  instruction.starts = LineOf(instruction.stream);
  instruction.ends = EndOf(instruction.stream);
  if (instruction.code == Code::kCastMasters) instruction.starts = instruction.ends;
  instruction.by_parity = std::any_of(
      instruction.operands.begin(), instruction.operands.end(), [&](const Operand& operand) {
        return operand.place.pool == StateClass::kControl && operand.access != Access::kNone &&
               operands_.cells().by_parity(operand.place.offset);
      });
  fragment_.instructions.push_back(instruction);
  return fragment_.moments.back().end++;
}

}  // namespace

Fragment Lower(const Plan& plan, bool carrying) {
  return Lowering(plan, carrying).Run();
}

}  // namespace ebb::sharding
