#include "ebb/sharding/op.h"

#include <string_view>

namespace ebb::sharding {
namespace {

constexpr RoleFacts Gathers(std::string_view name, Axes axes, bool brings_parameters = false) {
  return {name, Code::kRedistribute, axes, Spread::kSlice, Spread::kWhole, brings_parameters};
}

constexpr RoleFacts kRoleFacts[kRoles] = {
    {"mark", Code::kKernels},
    {"kernels", Code::kKernels},
    Gathers("gather", kShardAxes, /*brings_parameters=*/true),
    {"fill secondary", Code::kCopy},
    Gathers("gather secondary", Axis::kInner, /*brings_parameters=*/true),
    {"cast", Code::kConvert},
    {"reduce", Code::kRedistribute, kShardAxes, Spread::kPartial, Spread::kSlice},
    {"all-reduce", Code::kRedistribute, Axis::kReplica, Spread::kPartial, Spread::kWhole},
    {"round", Code::kConvert},
    {"accumulate", Code::kAccumulate},
    {"norm", Code::kNorm},
    Gathers("gather gradient", kShardAxes),
    {"prepare", Code::kHost},
    {"seal", Code::kHost},
    Gathers("exchange", kWorldAxes),
    {"conclude", Code::kHost},
    {"parameter norms", Code::kNorm},
    {"seal norms", Code::kHost},
    Gathers("exchange norms", kShardAxes),
    {"conclude norms", Code::kHost},
    {"copy control", Code::kCopy},
    {"update", Code::kUpdate},
    Gathers("refresh", kShardAxes),
    {.name = "read", .code = Code::kTransfer, .brings_parameters = true},
    {.name = "upload", .code = Code::kCopy, .brings_parameters = true},
    {"download", Code::kCopy},
    {"write", Code::kTransfer},
    {.name = "cast masters", .code = Code::kConvert, .brings_parameters = true},
    {"read beside", Code::kHost},
};

}  // namespace

const RoleFacts& FactsOf(Role role) {
  return kRoleFacts[static_cast<int>(role)];
}

Movement MovementOf(Role role) {
  const RoleFacts& facts = FactsOf(role);
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
