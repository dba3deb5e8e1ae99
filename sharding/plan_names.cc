// What people and timelines call the plan's things.
#include "ebb/sharding/plan.h"

namespace ebb::sharding {

std::string_view Name(OperationKind kind) {
  switch (kind) {
    case OperationKind::kMark:
      return "mark";
    case OperationKind::kGather:
      return "gather";
    case OperationKind::kFillSecondary:
      return "fill secondary";
    case OperationKind::kGatherSecondary:
      return "gather secondary";
    case OperationKind::kCast:
      return "cast";
    case OperationKind::kReduce:
      return "reduce";
    case OperationKind::kAllReduce:
      return "all-reduce";
    case OperationKind::kRound:
      return "round";
    case OperationKind::kAccumulate:
      return "accumulate";
    case OperationKind::kNorm:
      return "norm";
    case OperationKind::kGatherGradient:
      return "gather gradient";
    case OperationKind::kExchange:
      return "exchange";
    case OperationKind::kParameterNorms:
      return "parameter norms";
    case OperationKind::kExchangeNorms:
      return "exchange norms";
    case OperationKind::kUpdate:
      return "update";
    case OperationKind::kRefresh:
      return "refresh";
    case OperationKind::kRead:
      return "read";
    case OperationKind::kUpload:
      return "upload";
    case OperationKind::kDownload:
      return "download";
    case OperationKind::kWrite:
      return "write";
    case OperationKind::kNarrow:
      return "narrow";
    case OperationKind::kCheck:
      return "check";
  }
  return "";
}

std::string_view Name(StreamId stream) {
  constexpr std::string_view kNames[kStreams] = {
      "compute",  "gather",      "reduce",          "update",      "upload", "download",
      "host sum", "host update", "read parameters", "read states", "write",  "check"};
  return kNames[static_cast<int>(stream)];
}

std::string_view Name(UpdateTiming timing) {
  switch (timing) {
    case UpdateTiming::kEarly:
      return "early";
    case UpdateTiming::kLate:
      return "late";
    case UpdateTiming::kOff:
      return "off";
  }
  return "";
}

}  // namespace ebb::sharding
