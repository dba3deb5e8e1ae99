#include "ebb/runtime/engine/meeting.h"

namespace ebb {

bool IsMeeting(std::span<const int64_t> log) {
  return log.size() > 1 && log[1] >= static_cast<int64_t>(Meeting::kSuspend);
}

bool IsEvaluation(std::span<const int64_t> log) {
  return log.size() > 1 && log[1] < 0;
}

// The second entry of a log, in words.
std::string DescribeBegun(int64_t begun) {
  switch (static_cast<Meeting>(begun)) {
    case Meeting::kSuspend:
      return "calls Suspend";
    case Meeting::kResume:
      return "calls Resume";
    case Meeting::kCopyInto:
      return "calls CopyParametersFrom";
    case Meeting::kCopyFrom:
      return "copies its parameters into another engine";
    case Meeting::kSetTrainingState:
      return "calls SetTrainingState";
    case Meeting::kAgree:
      return "calls Agree";
    case Meeting::kReadAsync:
      return "calls ReadAsync";
    case Meeting::kReorder:
      return "calls Reorder";
  }
  return begun < 0 ? "is in an evaluation" : "is in a step";
}

}  // namespace ebb
