// What all backends need to know about a call: whether its arguments can be right, how to say what
// it was, and whether two ranks called the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "ebb/runtime/comm/backend.h"

namespace ebb {

// "all-gather", "reduce-scatter", ...: the spelling of every message.
std::string_view Name(CollectiveKind kind);
inline bool IsPointToPoint(CollectiveKind kind) {
  return kind == CollectiveKind::kSend || kind == CollectiveKind::kReceive;
}
inline bool IsReduction(const Collective& call) {
  return call.kind == CollectiveKind::kReduceScatter || call.kind == CollectiveKind::kAllReduce;
}

// What one rank can see alone: counts, pointers, peers, buffers that overlap in a way that is not
// the documented in place.
absl::Status CheckArguments(const Collective& call, int rank, int size);

// Equal for calls that may meet, different (but for a chance of 2^-64) for others: kind, dtype,
// operation, scale, root and the counts of all spans.
uint64_t Fingerprint(const Collective& call);

// What another rank needs to know of a call, without pointers: it may cross processes.
struct CallSummary {
  static constexpr size_t kCounts = 16;  // of the first spans, for messages
  CollectiveKind kind = CollectiveKind::kBarrier;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  float scale = 1;
  int32_t peer = -1;
  int64_t spans = 0;
  int64_t elements = 0;      // of all spans
  uint64_t fingerprint = 0;  // of the whole call
  uint64_t shape = 0;        // of dtype and counts only: equal on both sides of an exchange
  int64_t counts[kCounts] = {};
};
CallSummary Summarise(const Collective& call);

// Whether a rank's send and its peer's receive, or the other way round, are of the same elements.
bool FitForExchange(const CallSummary& a, const CallSummary& b);

// "reduce-scatter of 2 spans, 1024 fp32 elements, scale 0.5".
std::string Describe(const CallSummary& call);

// Two calls that do not fit, in words: "rank 0 called ..., rank 2 called ...; span 1 has 64
// elements there and 32 here".
std::string DescribeMismatch(std::string_view first_rank, const CallSummary& first,
                             std::string_view second_rank, const CallSummary& second);

// Whether the call leaves every byte what and where it is: of one rank, in place, unscaled. What a
// backend would do more, a NaN without its payload, is none of the caller's concern.
bool MovesNothing(const Collective& call, int size);

// Bytes as Communicator::bytes_moved counts them.
int64_t BytesMoved(const Collective& call, int rank, int size);

}  // namespace ebb
