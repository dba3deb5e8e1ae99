#include "ebb/sharding/instructions.h"

#include <string_view>

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

}  // namespace ebb::sharding
