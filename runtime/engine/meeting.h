// Calls of all ranks outside of steps. The second entry of a log is one of these, a step's number
// of micro-batches, or an evaluation's, which is negative.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace ebb {

enum class Meeting : int64_t {
  kSuspend = int64_t{1} << 40,
  kResume,
  kCopyInto,
  kCopyFrom,
  kSetTrainingState,
  kAgree,
  kReadAsync,
  kReorder,
};

bool IsMeeting(std::span<const int64_t> log);
bool IsEvaluation(std::span<const int64_t> log);
// The second entry of a log, in words.
std::string DescribeBegun(int64_t begun);

}  // namespace ebb
