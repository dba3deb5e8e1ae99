// The calls that all ranks of a world make together, in one order: which call each rank has come
// to, and whether two ranks have made different calls in the same place. Ranks with different
// orders learn it in that call, where a collective would wait until its time-out.
//
//   rank 0   create 'policy' | step | finish | step ...    the third call of rank 2 differs:
//   rank 1   create 'policy' | step | finish               "rank 2 began an evaluation where rank 0
//   rank 2   create 'policy' | step | evaluation            finished a step"
//
// Each rank keeps a record of its last calls. The others read it where the ranks share memory
// (threads, processes of a host). A rank sends it to other hosts once it has waited for a while. A
// call costs one store and one look at one other record.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/comm/call_kind.h"
#include "ebb/runtime/comm/wait_cycles.h"

namespace ebb {

struct CallOfWorld {
  CallKind kind = CallKind::kNone;
  int engine = -1;  // which engine, counted over the calls of Create; -1: none
};

// One rank's calls, for the ranks that can read its memory. A zeroed record has no calls.
struct alignas(64) CallRecord {
  static constexpr uint64_t kKept = 14;
  std::atomic<uint64_t> count;
  std::atomic<uint32_t> errors;   // a hash of which calls have returned one
  std::atomic<uint32_t> warning;  // a hash of the last one, in the record that all ranks can read
  std::atomic<uint64_t> calls[kKept];
};

class CallOrder {
 public:
  // For rank `rank`. `records`: by rank of the world, null where this process cannot read that
  // rank's memory. Null at this rank's own place: this rank can read no record.
  // `logs` likewise, or none.
  CallOrder(int rank, std::vector<CallRecord*> records, std::vector<RankLog*> logs = {});

  // The number of a new engine with these units. The engine's Create is the next call.
  int AddEngine(std::string_view name, std::vector<std::string> units = {});
  // This rank's next call. kFailedPrecondition: another rank has made a different call in its
  // place.
  absl::Status Note(CallOfWorld call);
  // A scope of `unit` of the engine, or kDrop. The engine's calling thread.
  void NoteScope(int engine, CallKind kind, int unit = -1);
  // A call of this engine (-1: of none) has returned an error: this rank's last call, or one before
  // it. From then on ranks may differ, because some learn of a failure one step later than others.
  // So the next calls of two ranks are compared only if both have had errors from the same calls.
  // Any thread. `in_call`: the call is one that all ranks make. An error that a rank only asks for,
  // as with Report, does not count as that.
  void NoteError(int engine, bool in_call = true);
  // From here on texts say "world rank 2", because parts of the world count their own ranks.
  void NoteParts() { has_parts_ = true; }
  // Ranks that wait for each other. Communicators of this world have lanes there.
  WaitCycles& cycles() { return cycles_; }
  // Compares all records that are known. Any thread.
  absl::Status Check() const;
  // Compares the record of `rank` with all others. Any thread.
  absl::Status Check(int rank) const;

  // Whether `rank` is known to have made fewer calls than this one.
  bool IsBehind(int rank) const;
  // Whether this rank is the first that is known to have come so far: all ranks before it are
  // behind. Among the ranks that wait, the first sends its calls. False if one of them has had
  // other errors. Any thread.
  bool IsFirstHere() const;
  // "rank 2 has begun a step of the engine 'policy' as its last call, number 7; ...", or "" if rank
  // 2's calls are unknown. Any thread.
  std::string Describe(int rank) const;
  // Describes the first few of `ranks`, and for whom they wait themselves.
  std::string Describe(std::span<const int> ranks) const;

  // True for the first of the ranks that share memory and would all log `warning`. Any thread.
  bool IsFirstToWarn(std::string_view warning);

  // For records outside of shared memory. Pack makes a text of this rank's record. The other takes
  // another rank's text, and returns what Check says of that rank. Any thread.
  std::string Pack() const;
  absl::Status Receive(std::string_view packed);

 private:
  CallRecord& Mine() const { return *records_[rank_]; }
  absl::Status Compare(int first, int second, uint64_t oldest) const;
  std::string NameOf(int engine) const;
  std::string NameOfRank(int rank) const;
  std::string Past(CallKind kind, int engine) const;
  // `its`, `others`: in the past tense. -1: no engine, or several.
  absl::Status Different(int engine, int first, std::string_view its, int second,
                         std::string_view others) const;
  std::string DescribeWait(int rank) const;
  std::string Scope(int engine, const WaitCycles::What& what) const;
  absl::Status DifferentLogs(int engine, int first, const WaitCycles::What& its, int second,
                             const WaitCycles::What& others) const;

  const int rank_;
  std::vector<CallRecord*> records_;
  std::vector<std::unique_ptr<CallRecord>> received_;  // records of ranks in other memory
  int nearest_ = 0;                                    // first rank with a record in reach
  mutable std::mutex names_mutex_;
  struct Names {
    std::string engine;
    std::vector<std::string> units;
  };
  std::vector<Names> names_;
  std::mutex errors_mutex_;
  uint64_t errors_at_ = 0;       // the number of calls made when the last errors came
  std::vector<int> engines_at_;  // the engines of those errors
  std::mutex receiving_;
  std::atomic<bool> has_parts_{false};
  WaitCycles cycles_;
};

}  // namespace ebb
