#include "ebb/runtime/comm/call_order.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/substitute.h"
#include "ebb/runtime/base/name_view.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/packer.h"
#include "ebb/runtime/comm/rank_errors.h"

namespace ebb {
namespace {

constexpr int kEngineShift = 8, kErrorsShift = 32;

// A call, and the errors that its rank had returned before it.
struct KeptCall {
  CallOfWorld call;
  uint32_t errors = 0;
};

uint64_t Pack(const KeptCall& kept) {
  return static_cast<uint64_t>(kept.call.kind) |
         static_cast<uint64_t>(kept.call.engine + 1) << kEngineShift |
         static_cast<uint64_t>(kept.errors) << kErrorsShift;
}

KeptCall Unpack(uint64_t word) {
  return {.call = {.kind = static_cast<CallKind>(word & 0xff),
                   .engine =
                       static_cast<int>(word << kErrorsShift >> (kErrorsShift + kEngineShift)) - 1},
          .errors = static_cast<uint32_t>(word >> kErrorsShift)};
}

// The hash of one error. A rank adds the hashes, so the sum does not depend on the order of errors
// behind one call.
uint32_t HashOf(uint64_t number, int engine) {
  uint64_t hash = (number << 24 ^ static_cast<uint64_t>(engine + 1)) + 0x9e3779b97f4a7c15u;
  hash = (hash ^ hash >> 30) * 0xbf58476d1ce4e5b9u;
  hash = (hash ^ hash >> 27) * 0x94d049bb133111ebu;
  return static_cast<uint32_t>(hash >> 32);
}

bool Alike(CallOfWorld one, CallOfWorld other) {
  return one.engine == other.engine &&
         (one.kind == other.kind || (Meets(one.kind) && Meets(other.kind)));
}

// The place of call `number`; numbers begin at 1.
size_t PlaceOf(uint64_t number) {
  return (number - 1) % CallRecord::kKept;
}

// Nothing if the record holds the call no longer, or the rank has not made it yet.
std::optional<KeptCall> CallAt(const CallRecord& record, uint64_t number) {
  if (record.count.load(std::memory_order_seq_cst) < number) return std::nullopt;
  const uint64_t word = record.calls[PlaceOf(number)].load(std::memory_order_acquire);
  // The rank writes a call before it counts it, so one more call may be in that place already.
  const uint64_t count = record.count.load(std::memory_order_seq_cst);
  if (count < number || count + 1 >= number + CallRecord::kKept) return std::nullopt;
  return Unpack(word);
}

}  // namespace

CallOrder::CallOrder(int rank, std::vector<CallRecord*> records, std::vector<RankLog*> logs)
    : rank_(rank),
      records_(std::move(records)),
      cycles_(rank, std::move(logs),
              [this](int engine, int first, const WaitCycles::What& its, int second,
                     const WaitCycles::What& others) {
                return DifferentLogs(engine, first, its, second, others);
              }) {
  const auto read = std::find_if(records_.begin(), records_.end(),
                                 [](const CallRecord* record) { return record != nullptr; });
  nearest_ = read == records_.end() ? rank : static_cast<int>(read - records_.begin());
  for (CallRecord*& record : records_) {
    if (record == nullptr) record = received_.emplace_back(std::make_unique<CallRecord>()).get();
  }
}

int CallOrder::AddEngine(std::string_view name, std::vector<std::string> units) {
  const std::scoped_lock lock(names_mutex_);
  names_.push_back({.engine = std::string(name), .units = std::move(units)});
  const int engine = static_cast<int>(names_.size()) - 1;
  cycles_.AddEngine(engine, Mine().count.load());
  return engine;
}

void CallOrder::NoteScope(int engine, CallKind kind, int unit) {
  cycles_.Note(engine, Mine().count.load(std::memory_order_relaxed), {.kind = kind, .unit = unit});
}

absl::Status CallOrder::Note(CallOfWorld call) {
  CallRecord& mine = Mine();
  const uint64_t number = mine.count.load(std::memory_order_relaxed) + 1;
  mine.calls[PlaceOf(number)].store(
      ebb::Pack({.call = call, .errors = mine.errors.load(std::memory_order_seq_cst)}),
      std::memory_order_release);
  // The count is stored before the others' counts are read, in one order for all ranks. So of two
  // ranks that differ, the second one sees it.
  mine.count.store(number, std::memory_order_seq_cst);
  NoteScope(call.engine, call.kind);
  if (rank_ != nearest_) EBB_RETURN_IF_ERROR(Compare(nearest_, rank_, number));
  if (rank_ == nearest_ || !received_.empty()) {
    for (int other = 0; other < static_cast<int>(records_.size()); ++other)
      EBB_RETURN_IF_ERROR(Compare(rank_, other, number));
  }
  return absl::OkStatus();
}

void CallOrder::NoteError(int engine, bool in_call) {
  const std::scoped_lock lock(errors_mutex_);
  CallRecord& mine = Mine();
  const uint64_t number = mine.count.load(std::memory_order_seq_cst);
  if (std::exchange(errors_at_, number) != number) engines_at_.clear();
  // An error that is returned again, like the last step's error by Report, is the same error.
  if (std::find(engines_at_.begin(), engines_at_.end(), engine) != engines_at_.end()) return;
  engines_at_.push_back(engine);
  const uint32_t error = HashOf(2 * number + (in_call ? 0 : 1), engine);
  cycles_.NoteError(mine.errors.fetch_add(error, std::memory_order_seq_cst) + error);
}

absl::Status CallOrder::Check(int rank) const {
  for (int other = 0; other < static_cast<int>(records_.size()); ++other)
    EBB_RETURN_IF_ERROR(Compare(rank, other, /*oldest=*/1));
  return absl::OkStatus();
}

absl::Status CallOrder::Check() const {
  for (int first = 0; first < static_cast<int>(records_.size()); ++first) {
    for (int second = first + 1; second < static_cast<int>(records_.size()); ++second)
      EBB_RETURN_IF_ERROR(Compare(first, second, /*oldest=*/1));
  }
  return absl::OkStatus();
}

// Compares the calls from number `oldest` on that both ranks have made and still have in their
// records.
absl::Status CallOrder::Compare(int first, int second, uint64_t oldest) const {
  if (first == second) return absl::OkStatus();
  if (first > second) std::swap(first, second);
  const CallRecord &one = *records_[first], &other = *records_[second];
  const uint64_t last = std::min(one.count.load(std::memory_order_seq_cst),
                                 other.count.load(std::memory_order_seq_cst));
  if (last > CallRecord::kKept) oldest = std::max(oldest, last - CallRecord::kKept + 1);
  for (uint64_t number = oldest; number <= last; ++number) {
    const std::optional<KeptCall> of_one = CallAt(one, number), of_other = CallAt(other, number);
    if (!of_one.has_value() || !of_other.has_value() || Alike(of_one->call, of_other->call))
      continue;
    // Both have had the same errors before, and none since.
    const uint32_t errors = of_one->errors;
    if (of_other->errors != errors || one.errors.load(std::memory_order_seq_cst) != errors ||
        other.errors.load(std::memory_order_seq_cst) != errors)
      return absl::OkStatus();
    const int its = of_one->call.engine, others = of_other->call.engine;
    const bool same = its == others;
    return Different(same ? its : -1, first, Past(of_one->call.kind, same ? -1 : its), second,
                     Past(of_other->call.kind, same ? -1 : others));
  }
  return absl::OkStatus();
}

std::string CallOrder::NameOf(int engine) const {
  const std::scoped_lock lock(names_mutex_);
  const auto index = static_cast<size_t>(engine);
  return index < names_.size() ? absl::StrCat("the engine '", names_[index].engine, "'")
                               : "another engine";
}

// "began a step of the engine 'policy'"; -1: an engine that needs no name.
std::string CallOrder::Past(CallKind kind, int engine) const {
  // By CallKind. $0: " of the engine 'policy'"; $1: "the engine 'policy'".
  static constexpr const char* kPast[] = {"made another call",
                                          "created a communicator",
                                          "created $1",
                                          "began a step$0",
                                          "began a step$0 after a Write",
                                          "began an evaluation$0",
                                          "began an evaluation$0 after a Write",
                                          "finished a step$0",
                                          "finished an evaluation$0",
                                          "gathered a parameter$0",
                                          "called Suspend$0",
                                          "called Resume$0",
                                          "copied parameters into $1",
                                          "copied parameters of $1",
                                          "called SetTrainingState$0",
                                          "called Agree$0",
                                          "called ReadAsync$0",
                                          "called Reorder$0",
                                          "dropped a step or evaluation$0",
                                          "called TensorAxis::AllReduce",
                                          "called TensorAxis::AllGather",
                                          "called TensorAxis::ReduceScatter"};
  static_assert(std::size(kPast) == static_cast<size_t>(CallKind::kTensorReduceScatter) + 1);
  const std::string name = engine >= 0 ? NameOf(engine) : "it";
  // Another rank's text may hold any number.
  const auto row = static_cast<size_t>(kind);
  return absl::Substitute(kPast[row < std::size(kPast) ? row : 0],
                          engine >= 0 ? absl::StrCat(" of ", name) : "", name);
}

std::string CallOrder::NameOfRank(int rank) const {
  return absl::StrCat(has_parts_ ? "world rank " : "rank ", rank);
}

absl::Status CallOrder::Different(int engine, int first, std::string_view its, int second,
                                  std::string_view others) const {
  return DoDifferentThings(
      absl::StrCat(engine >= 0 ? absl::StrCat(" with ", NameOf(engine)) : "", ": ",
                   NameOfRank(second), " ", NameView(others), " where ", NameOfRank(first), " ",
                   NameView(its), ". Every rank has to make the same calls in the same order"));
}

// "Forward('block')", "nothing more".
std::string CallOrder::Scope(int engine, const WaitCycles::What& what) const {
  if (!IsScope(what.kind)) return "nothing more";
  const char* const name = what.kind == CallKind::kForward    ? "Forward"
                           : what.kind == CallKind::kBackward ? "Backward"
                                                              : "Recompute";
  const std::scoped_lock lock(names_mutex_);
  const auto index = static_cast<size_t>(engine), unit = static_cast<size_t>(what.unit);
  const bool known = index < names_.size() && unit < names_[index].units.size();
  return absl::StrCat(name, "('", known ? names_[index].units[unit] : absl::StrCat(what.unit),
                      "')");
}

absl::Status CallOrder::DifferentLogs(int engine, int first, const WaitCycles::What& its,
                                      int second, const WaitCycles::What& others) const {
  const auto of_scopes = [](CallKind kind) { return IsScope(kind) || Finishes(kind); };
  if (of_scopes(its.kind) && of_scopes(others.kind)) {
    return OpenedDifferentScopes(int64_t{its.scopes} + (IsScope(its.kind) ? 0 : 1),
                                 NameOfRank(first), Scope(engine, its), NameOfRank(second),
                                 Scope(engine, others));
  }
  const auto act = [&](const WaitCycles::What& what) {
    return of_scopes(what.kind) ? absl::StrCat("opened ", Scope(engine, what))
                                : Past(what.kind, /*engine=*/-1);
  };
  return Different(engine, first, act(its), second, act(others));
}

bool CallOrder::IsBehind(int rank) const {
  const CallRecord& theirs = *records_[rank];
  return theirs.count.load() > 0 && theirs.count.load() < Mine().count.load();
}

bool CallOrder::IsFirstHere() const {
  const uint64_t here = Mine().count.load();
  return std::all_of(records_.begin(), records_.begin() + rank_, [&](const CallRecord* theirs) {
    return theirs->count.load() < here && theirs->errors.load() == Mine().errors.load();
  });
}

std::string CallOrder::Describe(int rank) const {
  const CallRecord &theirs = *records_[rank], &mine = Mine();
  if (theirs.errors.load() != mine.errors.load()) return "";
  const uint64_t count = theirs.count.load(std::memory_order_seq_cst), here = mine.count.load();
  const std::optional<KeptCall> last = count == 0 ? std::nullopt : CallAt(theirs, count);
  if (!last.has_value()) return "";
  const std::string text =
      absl::StrCat(NameOfRank(rank), " last ", Past(last->call.kind, last->call.engine));
  if (count == here) return absl::StrCat(text, ", as ", NameOfRank(rank_), " did");
  const std::optional<KeptCall> next = count < here ? CallAt(mine, count + 1) : std::nullopt;
  if (!next.has_value()) return text;
  return absl::StrCat(text, "; ", NameOfRank(rank_), " then ",
                      Past(next->call.kind, next->call.engine));
}

std::string CallOrder::Describe(std::span<const int> ranks) const {
  constexpr size_t kNamed = 4;
  std::string text;
  for (const int rank : ranks.first(std::min(ranks.size(), kNamed))) {
    const std::string one = Describe(rank), in_turn = DescribeWait(rank);
    for (const std::string& more : {one, in_turn})
      if (!more.empty()) absl::StrAppend(&text, text.empty() ? "" : "; ", more);
  }
  return text;
}

// Each rank of a chain of waits sees the next one alone.
std::string CallOrder::DescribeWait(int rank) const {
  const std::vector<int> awaited = cycles_.AwaitedBy(rank);
  if (awaited.empty()) return "";
  return absl::StrCat(NameOfRank(rank), " waits for ",
                      absl::StrJoin(awaited, ", ", [this](std::string* out, int of) {
                        absl::StrAppend(out, NameOfRank(of));
                      }));
}

bool CallOrder::IsFirstToWarn(std::string_view warning) {
  const uint32_t hash = static_cast<uint32_t>(std::hash<std::string_view>()(warning)) | 1;
  return records_[nearest_]->warning.exchange(hash) != hash;
}

std::string CallOrder::Pack() const {
  for (;;) {
    const uint64_t count = Mine().count.load();
    Packer packer;
    packer.Add(rank_, Mine().errors.load(), count);
    for (const std::atomic<uint64_t>& call : Mine().calls) packer.Add(call.load());
    if (Mine().count.load() != count) continue;
    cycles_.Pack(packer);
    return packer.Take();
  }
}

absl::Status CallOrder::Receive(std::string_view packed) {
  Unpacker unpacker(packed);
  size_t rank = 0;
  uint32_t errors = 0;
  uint64_t count = 0, calls[CallRecord::kKept];
  unpacker.Read(rank, errors, count);
  for (uint64_t& call : calls) unpacker.Read(call);
  const bool is_other = rank < records_.size() && rank != static_cast<size_t>(rank_);
  if (!unpacker.ok() || !is_other) return absl::OkStatus();
  const absl::Status differ = cycles_.Receive(static_cast<int>(rank), unpacker);
  {
    const std::scoped_lock lock(receiving_);
    CallRecord& theirs = *records_[rank];
    const bool is_received =
        std::any_of(received_.begin(), received_.end(),
                    [&](const auto& received) { return received.get() == &theirs; });
    if (!is_received || count < theirs.count.load()) return differ;
    theirs.errors.store(errors);
    theirs.count.store(0);  // a comparison meanwhile finds no calls
    for (uint64_t i = 0; i < CallRecord::kKept; ++i) theirs.calls[i].store(calls[i]);
    theirs.count.store(count);
  }
  const absl::Status apart = Check(static_cast<int>(rank));
  return apart.ok() ? differ : apart;
}

}  // namespace ebb
