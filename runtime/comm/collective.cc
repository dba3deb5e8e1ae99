#include "ebb/runtime/comm/collective.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/name_view.h"

namespace ebb {
namespace {

bool IsInPlace(const Collective& call, int rank, const CollectiveSpan& span) {
  const auto* send = static_cast<const std::byte*>(span.send);
  const auto* receive = static_cast<const std::byte*>(span.receive);
  const int64_t mine = rank * span.count * SizeOf(call.dtype);
  switch (call.kind) {
    case CollectiveKind::kAllGather:
      return send == receive + mine;
    case CollectiveKind::kReduceScatter:
      return receive == send + mine;
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kBroadcast:
      return send == receive;
    default:
      return false;
  }
}

bool Overlap(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  const auto a_begin = reinterpret_cast<uintptr_t>(a), b_begin = reinterpret_cast<uintptr_t>(b);
  return a_begin < b_begin + static_cast<uintptr_t>(b_bytes) &&
         b_begin < a_begin + static_cast<uintptr_t>(a_bytes);
}

// The finaliser of splitmix64 (Steele et al. 2014), chained.
struct Mixer {
  uint64_t state = 0;
  void Add(uint64_t value) {
    state += value + 0x9e3779b97f4a7c15;
    state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9;
    state = (state ^ (state >> 27)) * 0x94d049bb133111eb;
    state ^= state >> 31;
  }
};

uint64_t Shape(const Collective& call) {
  Mixer mixer;
  mixer.Add(static_cast<uint64_t>(call.dtype));
  mixer.Add(call.spans.size());
  for (const CollectiveSpan& span : call.spans) {
    mixer.Add(static_cast<uint64_t>(span.count));
    mixer.Add(static_cast<uint64_t>(span.from));
    mixer.Add(static_cast<uint64_t>(span.to));
  }
  return mixer.state;
}

}  // namespace

std::string_view Name(CollectiveKind kind) {
  static constexpr std::string_view kNames[kCollectiveKinds] = {
      "all-gather",   "reduce-scatter", "all-reduce", "broadcast", "all-to-all",
      "all-to-all-v", "send",           "receive",    "barrier"};
  return kNames[static_cast<int>(kind)];
}

Sides SidesOf(const Collective& call, const CollectiveSpan& span, int rank, int size) {
  const int64_t root = rank == call.peer ? 1 : 0;
  const Sides by_kind[kCollectiveKinds] = {
      {.send = 1, .receive = size},                                             // all-gather
      {.send = size, .receive = 1},                                             // reduce-scatter
      {.send = 1, .receive = 1},                                                // all-reduce
      {.send = root, .receive = 1},                                             // broadcast
      {.send = size, .receive = size},                                          // all-to-all
      {.send = span.from == rank ? 1 : 0, .receive = span.to == rank ? 1 : 0},  // all-to-all-v
      {.send = 1, .receive = 0},                                                // send
      {.send = 0, .receive = 1},                                                // receive
      {.send = 0, .receive = 0}};                                               // barrier
  return by_kind[static_cast<int>(call.kind)];
}

absl::Status CheckArguments(const Collective& call, int rank, int size) {
  const auto invalid = [&](const auto&... why) {
    return absl::InvalidArgumentError(absl::StrCat(NameView(Name(call.kind)), ": ", why...));
  };
  const bool has_peer = IsPointToPoint(call.kind) || call.kind == CollectiveKind::kBroadcast;
  if (has_peer && (call.peer < 0 || call.peer >= size))
    return invalid("there is no rank ", call.peer, " among ", size, " ranks");
  if (IsPointToPoint(call.kind) && call.peer == rank)
    return invalid("rank ", rank, " cannot be its own peer");
  if (!std::isfinite(call.scale)) return invalid("the scale ", call.scale, " is not finite");
  const int64_t count_max = std::numeric_limits<int64_t>::max() / SizeOf(call.dtype) / size;
  for (size_t i = 0; i < call.spans.size(); ++i) {
    const CollectiveSpan& span = call.spans[i];
    const Sides sides = SidesOf(call, span, rank, size);
    if (span.count < 0 || span.count > count_max)
      return invalid("span ", i, " has ", span.count, " elements");
    if (call.kind == CollectiveKind::kAllToAllV) {
      if (std::min(span.from, span.to) < 0 || std::max(span.from, span.to) >= size)
        return invalid("span ", i, " is from rank ", span.from, " to rank ", span.to, " of ", size);
      const CollectiveSpan& before = call.spans[i == 0 ? 0 : i - 1];
      if (std::pair(span.from, span.to) < std::pair(before.from, before.to))
        return invalid("span ", i, " is not in the order of ranks");
    }
    if (span.count == 0) continue;
    if ((sides.send > 0 && span.send == nullptr) ||
        (sides.receive > 0 && span.receive == nullptr)) {
      return invalid("span ", i, " has no memory to ",
                     sides.send > 0 && span.send == nullptr ? "send" : "receive into");
    }
    const int64_t bytes = span.count * SizeOf(call.dtype);
    if (sides.send > 0 && sides.receive > 0 && !IsInPlace(call, rank, span) &&
        Overlap(span.send, sides.send * bytes, span.receive, sides.receive * bytes)) {
      return invalid("span ", i,
                     " sends from and receives into memory that overlaps, and not in the way that "
                     "is allowed");
    }
  }
  return absl::OkStatus();
}

uint64_t Fingerprint(const Collective& call) {
  Mixer mixer;
  mixer.Add(static_cast<uint64_t>(call.kind));
  mixer.Add(static_cast<uint64_t>(call.op));
  mixer.Add(std::bit_cast<uint32_t>(call.scale));
  // The two ranks of an exchange each name the other as peer, and the backend has paired them.
  mixer.Add(call.kind == CollectiveKind::kBroadcast ? static_cast<uint64_t>(call.peer) : 0);
  mixer.Add(Shape(call));
  return mixer.state;
}

CallSummary Summarise(const Collective& call) {
  CallSummary summary = {.kind = call.kind,
                         .dtype = call.dtype,
                         .op = call.op,
                         .scale = call.scale,
                         .peer = call.peer,
                         .spans = static_cast<int64_t>(call.spans.size()),
                         .elements = ElementsOf(call),
                         .fingerprint = Fingerprint(call),
                         .shape = Shape(call)};
  for (size_t i = 0; i < std::min(call.spans.size(), CallSummary::kCounts); ++i)
    summary.counts[i] = call.spans[i].count;
  return summary;
}

bool FitForExchange(const CallSummary& a, const CallSummary& b) {
  const bool sends_and_receives =
      (a.kind == CollectiveKind::kSend && b.kind == CollectiveKind::kReceive) ||
      (a.kind == CollectiveKind::kReceive && b.kind == CollectiveKind::kSend);
  return sends_and_receives && a.shape == b.shape;
}

std::string Describe(const CallSummary& call) {
  std::string text(Name(call.kind));
  if (call.kind == CollectiveKind::kBarrier) return text;
  absl::StrAppend(&text, " of ", call.spans, call.spans == 1 ? " span, " : " spans, ",
                  call.elements, " ", NameView(Name(call.dtype)),
                  call.elements == 1 ? " element" : " elements");
  if (call.op != ReduceOp::kSum)
    absl::StrAppend(&text, call.op == ReduceOp::kMax ? ", maximum" : ", minimum");
  if (call.scale != 1) absl::StrAppend(&text, ", scale ", call.scale);
  if (call.kind == CollectiveKind::kBroadcast) absl::StrAppend(&text, ", root ", call.peer);
  if (call.kind == CollectiveKind::kSend) absl::StrAppend(&text, ", to ", call.peer);
  if (call.kind == CollectiveKind::kReceive) absl::StrAppend(&text, ", from ", call.peer);
  return text;
}

std::string DescribeMismatch(std::string_view first_rank, const CallSummary& first,
                             std::string_view second_rank, const CallSummary& second) {
  std::string text = absl::StrCat(NameView(first_rank), " called ", Describe(first), ", ",
                                  NameView(second_rank), " called ", Describe(second));
  const int64_t spans = std::min({first.spans, second.spans, int64_t{CallSummary::kCounts}});
  for (int64_t i = 0; i < spans; ++i) {
    if (first.counts[i] == second.counts[i]) continue;
    absl::StrAppend(&text, "; span ", i, " has ", first.counts[i], " elements on ",
                    NameView(first_rank), " and ", second.counts[i], " on ", NameView(second_rank));
    break;
  }
  return text;
}

bool MovesNothing(const Collective& call, int size) {
  return size == 1 && call.scale == 1 && !call.spans.empty() &&
         std::all_of(call.spans.begin(), call.spans.end(),
                     [&](const CollectiveSpan& span) { return IsInPlace(call, /*rank=*/0, span); });
}

int64_t ElementsOf(const Collective& call) {
  int64_t count = 0;
  for (const CollectiveSpan& span : call.spans) count += span.count;
  return count;
}

int64_t BytesMoved(const Collective& call, int rank, int size) {
  const int64_t bytes = BytesOf(call);
  switch (call.kind) {
    case CollectiveKind::kAllGather:
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kAllToAll:
      return (size - 1) * bytes;
    case CollectiveKind::kAllReduce:
      return 2 * (size - 1) * bytes / size;
    case CollectiveKind::kBroadcast:
      return rank == call.peer ? 0 : bytes;
    case CollectiveKind::kReceive:
      return bytes;
    case CollectiveKind::kAllToAllV: {
      int64_t received = 0;
      for (const CollectiveSpan& span : call.spans)
        received += span.to == rank && span.from != rank ? span.count : 0;
      return received * SizeOf(call.dtype);
    }
    case CollectiveKind::kSend:
    case CollectiveKind::kBarrier:
      return 0;
  }
  return 0;
}

}  // namespace ebb
