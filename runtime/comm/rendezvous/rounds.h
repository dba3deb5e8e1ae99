// All-gathers of texts among ranks of a world, as rank 0 sees them: who has come, what the outcome
// is, and who has to be told. No locks, no messages.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/wait_notice.h"

namespace ebb {

// One all-gather. Each has its own name, and all members pass the same.
struct Round {
  std::string name = {};
  std::vector<int> members = {};
  double timeout_seconds = 600;
  NoticeTimes notices = {};
  std::string what = {};  // completes "rank 0 has waited 5 s for rank 1 ..."
};

struct Gathered {
  enum class Outcome : uint8_t { kAll, kLate, kLeft };
  Outcome outcome = Outcome::kAll;
  uint64_t number = 0;                  // of the round; no other complete round has it
  std::vector<std::string> texts = {};  // by place among the members
  std::vector<int> absent = {};         // members that are late, or the one that has left
  std::string how_left = {};            // completes "rank 1 has left: ..."
};

class Rounds {
 public:
  // Called with each member that is to be told an outcome.
  using Answer = std::function<void(int member, const std::string& round, const Gathered& outcome)>;

  Rounds(int ranks, Answer answer)
      : answer_(std::move(answer)), how_left_(static_cast<size_t>(ranks)) {}

  // `from` comes with its text, or (none) will not come.
  void Collect(int from, const Round& round, std::optional<std::string> text);
  // `rank` comes to no more rounds. A departure is a failure only if a rank waits for it.
  void Leave(int rank, const std::string& how);
  // When Look has something to do.
  WaitPoint::Deadline due() const;
  // Settles the rounds that are late, and logs waits. `known`: what is known of absent ranks.
  void Look(WaitPoint::Deadline now,
            absl::FunctionRef<std::string(const std::vector<int>& absent)> known);

 private:
  // A round until all members have come or left.
  struct Collected {
    std::vector<int> members;
    std::vector<std::optional<std::string>> texts;  // by place
    size_t here = 0;                                // members that have come or left
    std::string what;
    double timeout_seconds = 0;
    WaitPoint::Deadline due = WaitPoint::kNever;
    std::optional<WaitNotice> notice;  // once a member waits
    std::optional<Gathered> outcome;
    bool answered = false;  // all members have the answer
  };
  void Settle(const std::string& name, Collected& round, Gathered outcome);
  void SettleLeft(const std::string& name, Collected& round, int rank, const std::string& how);
  void AnswerAll(const std::string& name, Collected& round);

  const Answer answer_;
  std::vector<std::optional<std::string>> how_left_;  // by rank
  std::map<std::string, Collected> rounds_;
  uint64_t settled_ = 0;
};

}  // namespace ebb
