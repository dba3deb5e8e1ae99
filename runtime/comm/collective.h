// Facts about a call that all backends need: whether its arguments can be right, its description,
// and whether two ranks have made the same call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "ebb/runtime/comm/backend.h"

namespace ebb {

// "all-gather", "reduce-scatter", ...: the spelling in every message.
std::string_view Name(CollectiveKind kind);
inline bool IsPointToPoint(CollectiveKind kind) {
  return kind == CollectiveKind::kSend || kind == CollectiveKind::kReceive;
}
inline bool IsReduction(const Collective& call) {
  return call.kind == CollectiveKind::kReduceScatter || call.kind == CollectiveKind::kAllReduce;
}

// Checks what one rank can see alone: counts, pointers, peers, and buffers that overlap other than
// in the documented in-place way.
absl::Status CheckArguments(const Collective& call, int rank, int size);

// How much memory a rank uses of a span of a call, in units of the span's count; 0: none.
struct Sides {
  int64_t send = 0;
  int64_t receive = 0;
};
Sides SidesOf(const Collective& call, const CollectiveSpan& span, int rank, int size);

// A hash that is equal for calls that may meet. Different for all others, but for a chance of
// 2^-64. It covers kind, dtype, operation, scale, root, and the counts and ranks of all spans.
uint64_t Fingerprint(const Collective& call);

// The facts that another rank needs of a call. They have no pointers, so they may cross processes.
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

// Whether a rank's send and its peer's receive (or the reverse) are of the same elements.
bool FitForExchange(const CallSummary& a, const CallSummary& b);

// "reduce-scatter of 2 spans, 1024 fp32 elements, scale 0.5".
std::string Describe(const CallSummary& call);

// Two calls that differ, in words: "rank 0 called ..., rank 2 called ...; span 1 has 64 elements
// there and 32 here".
std::string DescribeMismatch(std::string_view first_rank, const CallSummary& first,
                             std::string_view second_rank, const CallSummary& second);

// Whether the call leaves every byte as it is: one rank, in place, unscaled. A backend might still
// change the payload of a NaN, which no caller needs.
bool MovesNothing(const Collective& call, int size);

// The elements of all spans, and the bytes of these.
int64_t ElementsOf(const Collective& call);
inline int64_t BytesOf(const Collective& call) {
  return ElementsOf(call) * SizeOf(call.dtype);
}

// Bytes as Communicator::bytes_enqueued counts them.
int64_t BytesMoved(const Collective& call, int rank, int size);

}  // namespace ebb
