// Names of operations, streams and classes in tables and timelines.
#include "ebb/sharding/plan.h"

namespace ebb::sharding {

std::string_view Name(OperationKind kind) {
  constexpr std::string_view kNames[kOperationKinds] = {
      "mark",           "gather",         "fill secondary",  "gather secondary",
      "cast",           "reduce",         "all-reduce",      "round",
      "accumulate",     "norm",           "gather gradient", "seal",
      "exchange",       "conclude",       "parameter norms", "seal norms",
      "exchange norms", "conclude norms", "copy control",    "update",
      "refresh",        "read",           "upload",          "download",
      "write",          "cast masters"};
  return kNames[static_cast<int>(kind)];
}

std::string_view Name(StreamId stream) {
  constexpr std::string_view kNames[kStreams] = {
      "compute",  "gather",      "reduce",          "update",      "upload", "download",
      "host sum", "host update", "read parameters", "read states", "write"};
  return kNames[static_cast<int>(stream)];
}

std::string_view Name(UpdateTiming timing) {
  constexpr std::string_view kNames[] = {"early", "late", "off"};
  return kNames[static_cast<int>(timing)];
}

}  // namespace ebb::sharding
