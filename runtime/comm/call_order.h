// The calls that all ranks of a world make together, in one order: which call each rank has come to, and
// whether two ranks have made different ones in the same place. Ranks that go apart so learn it with the
// call, where a collective would wait for its time-out.
//
//   rank 0   create 'policy' | step | finish | step ...       the third call of rank 2 is another one:
//   rank 1   create 'policy' | step | finish                  "rank 2 began an evaluation where rank 0
//   rank 2   create 'policy' | step | evaluation               finished a step"
//
// Each rank keeps a record of its last calls. Others read it where the ranks share memory (threads,
// processes of a host); to other hosts a rank sends it when it has waited for a while. A call costs one
// store and a look at one other record.
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

namespace ebb {

enum class CallKind : uint8_t {
  kNone,
  kCommunicator,
  kCreate,
  kStep,
  kStepWithWritten,  // which passes on what was written from outside
  kFinish,
  kEvaluation,
  kEvaluationWithWritten,
  kFinishEvaluation,
  kGather,
  // Ranks that call different ones of these meet all the same, and all get a Status (engine/meeting.cc).
  kSuspend,
  kResume,
  kCopy,
  kSetTrainingState,
  kAgree,
  kReadAsync,
  kReorder,
};

struct CallOfWorld {
  CallKind kind = CallKind::kNone;
  int engine = -1;  // which one, counted over the calls of Create; -1: of none
};

// One rank's calls, for the ranks that can read its memory. Zeros are no calls.
struct alignas(64) CallRecord {
  static constexpr uint64_t kKept = 14;
  std::atomic<uint64_t> count;
  std::atomic<uint32_t> errors;  // a hash of which calls have returned one
  std::atomic<uint64_t> calls[kKept];
};

class CallOrder {
 public:
  // Of rank `rank`. `records`: by rank of the world, null where this process cannot read that rank's memory;
  // where this rank's is null, it can read none.
  CallOrder(int rank, std::vector<CallRecord*> records);

  // The number of a new engine. Its Create is the next call.
  int AddEngine(std::string_view name);
  // This rank's next call. kFailedPrecondition: another rank has made a different one in its place.
  absl::Status Note(CallOfWorld call);
  // A call of this engine (-1: of none) has returned an error, this rank's last one or one behind it. What
  // ranks do then may differ, because some learn of a failure one step later than others. So the next
  // calls of two ranks are compared only where both have had errors from the same calls. Any thread.
  // `in_call`: of one that all ranks make; an error that a rank only asks for, as by Report, is another one.
  void NoteError(int engine, bool in_call = true);
  // Compares all that is known. Any thread.
  absl::Status Check() const;
  // Compares what is known of `rank` with all others. Any thread.
  absl::Status Check(int rank) const;

  // Whether `rank` is known to have made fewer calls than this one.
  bool IsBehind(int rank) const;
  // Whether this rank is the first that is known to have come so far: all before it are behind, and a
  // rank that waits tells what it has called. Not where one of them has had other errors. Any thread.
  bool IsFirstHere() const;
  // "rank 2 has begun a step of the engine 'policy' as its last call, number 7; ...", or "" where it
  // is not known. Any thread.
  std::string Describe(int rank) const;
  // The same of the first few of these.
  std::string Describe(std::span<const int> ranks) const;

  // For records that are not in shared memory: a text with this rank's, and what Check says of
  // another once its text has come. Any thread.
  std::string Pack() const;
  absl::Status Hear(std::string_view packed);

 private:
  CallRecord& Mine() const { return *records_[static_cast<size_t>(rank_)]; }
  absl::Status Compare(int first, int second, uint64_t oldest) const;
  std::string NameOf(int engine) const;
  std::string Past(CallOfWorld call, bool with_engine) const;
  absl::Status Different(int first, CallOfWorld one, int second, CallOfWorld other) const;

  const int rank_;
  std::vector<CallRecord*> records_;
  std::vector<std::unique_ptr<CallRecord>> told_;  // of ranks elsewhere
  int nearest_ = 0;                                // the first rank that has its memory read
  mutable std::mutex names_mutex_;
  std::vector<std::string> names_;
  std::mutex errors_mutex_;
  uint64_t errors_at_ = 0;       // the number of calls made when the last errors came
  std::vector<int> engines_at_;  // theirs
  std::mutex hearing_;
};

}  // namespace ebb
