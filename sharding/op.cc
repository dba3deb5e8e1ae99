#include "ebb/sharding/op.h"

#include <iterator>
#include <string_view>

namespace ebb::sharding {
namespace {

constexpr RoleFacts Gathers(Role role, std::string_view name, Axes axes,
                            bool brings_parameters = false) {
  return {role, name, Code::kRedistribute, axes, Spread::kSlice, Spread::kWhole, brings_parameters};
}
constexpr RoleFacts Brings(Role role, std::string_view name, Code code) {
  return {.role = role, .name = name, .code = code, .brings_parameters = true};
}

using enum Role;
constexpr RoleFacts kRoleFacts[] = {
    {kMark, "mark", Code::kKernels},
    {kScopes, "kernels", Code::kKernels},
    Gathers(kGather, "gather", kShardAxes, /*brings_parameters=*/true),
    {kFillSecondary, "fill secondary", Code::kCopy},
    Gathers(kGatherSecondary, "gather secondary", Axis::kInner, /*brings_parameters=*/true),
    {kCast, "cast", Code::kConvert},
    {kReduce, "reduce", Code::kRedistribute, kShardAxes, Spread::kPartial, Spread::kSlice},
    {kAllReduce, "all-reduce", Code::kRedistribute, Axis::kReplica, Spread::kPartial,
     Spread::kWhole},
    {kRound, "round", Code::kConvert},
    {kAccumulate, "accumulate", Code::kAccumulate},
    {kNorm, "norm", Code::kNorm},
    {kSumTensor, "sum over tensor", Code::kRedistribute, Axis::kTensor, Spread::kPartial,
     Spread::kWhole},
    Gathers(kGatherGradient, "gather gradient", kShardAxes),
    {kPrepare, "prepare", Code::kHost},
    {kSeal, "seal", Code::kHost},
    Gathers(kExchange, "exchange", kWorldAxes),
    {kConclude, "conclude", Code::kHost},
    {kParameterNorms, "parameter norms", Code::kNorm},
    {kSealNorms, "seal norms", Code::kHost},
    Gathers(kExchangeNorms, "exchange norms", kModelAxes),
    {kConcludeNorms, "conclude norms", Code::kHost},
    {kCopyControl, "copy control", Code::kCopy},
    {kUpdate, "update", Code::kUpdate},
    {kMomentum, "momentum", Code::kUpdate},
    {kToOwners, "to owners", Code::kRedistribute, kShardAxes, Spread::kSlice, Spread::kOwned},
    {kOrthogonalise, "orthogonalise", Code::kUpdate},
    {kFromOwners, "from owners", Code::kRedistribute, kShardAxes, Spread::kOwned, Spread::kSlice},
    Gathers(kRefresh, "refresh", kShardAxes),
    Brings(kRead, "read", Code::kTransfer),
    Brings(kUpload, "upload", Code::kCopy),
    {kDownload, "download", Code::kCopy},
    {kWrite, "write", Code::kTransfer},
    Brings(kCastMasters, "cast masters", Code::kConvert),
    {kSave, "read beside", Code::kHost},
};
constexpr bool IsInOrder() {
  for (int role = 0; role < kRoles; ++role)
    if (kRoleFacts[role].role != static_cast<Role>(role)) return false;
  return std::size(kRoleFacts) == kRoles;
}
static_assert(IsInOrder());

}  // namespace

const RoleFacts& FactsOf(Role role) {
  return kRoleFacts[static_cast<int>(role)];
}

Movement MovementOf(Role role) {
  const RoleFacts& facts = FactsOf(role);
  if (facts.from == Spread::kOwned || facts.to == Spread::kOwned) return Movement::kAllToAllV;
  if (facts.from == Spread::kSlice) return Movement::kAllGather;
  return facts.to == Spread::kSlice ? Movement::kReduceScatter : Movement::kAllReduce;
}

std::string_view Name(StreamId stream) {
  constexpr std::string_view kNames[kStreams] = {
      "compute",  "gather",      "reduce",          "update",      "upload", "download",
      "host sum", "host update", "read parameters", "read states", "write"};
  return kNames[static_cast<int>(stream)];
}

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

}  // namespace ebb::sharding
