#include "ebb/runtime/comm/rendezvous/rounds.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/rank_errors.h"

namespace ebb {

void Rounds::Collect(int from, const Round& round, std::optional<std::string> text) {
  Collected& all = rounds_[round.name];
  if (all.members.empty()) {
    all.members = round.members;
    all.texts.resize(round.members.size());
  }
  const auto found = std::find(all.members.begin(), all.members.end(), from);
  if (found == all.members.end()) return;
  ++all.here;
  const bool comes = text.has_value();
  // The first member that waits sets the time.
  if (comes && !all.notice.has_value()) {
    all.what = round.what;
    all.timeout_seconds = round.timeout_seconds;
    all.due = DeadlineAfter(round.timeout_seconds);
  }
  // Ranks of other processes do not say when they want to be logged.
  if (comes && (from == 0 || !all.notice.has_value())) all.notice.emplace(round.notices);
  if (comes) all.texts[static_cast<size_t>(found - all.members.begin())] = std::move(text);
  if (!comes) {
    SettleLeft(round.name, all, from, "its communicator or World was destroyed");
  } else if (!all.outcome.has_value() && all.here == all.members.size()) {
    Settle(round.name, all, {.outcome = Gathered::Outcome::kAll});
  }
  for (const int member : all.members) {
    const std::optional<std::string>& how = how_left_[static_cast<size_t>(member)];
    if (how.has_value()) SettleLeft(round.name, all, member, *how);
  }
  AnswerAll(round.name, all);
  if (all.here == all.members.size()) rounds_.erase(round.name);
}

void Rounds::SettleLeft(const std::string& name, Collected& round, int rank,
                        const std::string& how) {
  if (round.outcome.has_value()) return;
  Settle(name, round, {.outcome = Gathered::Outcome::kLeft, .absent = {rank}, .how_left = how});
}

void Rounds::Settle(const std::string& name, Collected& round, Gathered outcome) {
  outcome.number = ++settled_;
  if (outcome.outcome == Gathered::Outcome::kAll) {
    for (std::optional<std::string>& text : round.texts)
      outcome.texts.push_back(*std::exchange(text, std::nullopt));
  }
  round.outcome = std::move(outcome);
  AnswerAll(name, round);
}

// Answers all members, also those that have not come, because rank 0 may leave before they do.
// Answers none if no member waits.
void Rounds::AnswerAll(const std::string& name, Collected& round) {
  if (!round.outcome.has_value() || !round.notice.has_value() || round.answered) return;
  round.answered = true;
  for (const int member : round.members) answer_(member, name, *round.outcome);
}

void Rounds::Leave(int rank, const std::string& how) {
  how_left_[static_cast<size_t>(rank)] = how;
  for (auto& [name, round] : rounds_) {
    if (std::find(round.members.begin(), round.members.end(), rank) != round.members.end())
      SettleLeft(name, round, rank, how);
  }
}

WaitPoint::Deadline Rounds::due() const {
  WaitPoint::Deadline first = WaitPoint::kNever;
  for (const auto& [name, round] : rounds_) {
    if (!round.outcome.has_value() && round.notice.has_value())
      first = std::min({first, round.due, round.notice->due()});
  }
  return first;
}

void Rounds::Look(WaitPoint::Deadline now,
                  absl::FunctionRef<std::string(const std::vector<int>& absent)> known) {
  for (auto& [name, round] : rounds_) {
    if (round.outcome.has_value() || !round.notice.has_value()) continue;
    std::vector<int> absent;
    std::optional<int> speaks;  // the first that has come
    for (size_t place = 0; place < round.members.size(); ++place) {
      if (!round.texts[place].has_value()) {
        absent.push_back(round.members[place]);
      } else if (!speaks.has_value()) {
        speaks = round.members[place];
      }
    }
    if (now >= round.due) {
      Settle(name, round, {.outcome = Gathered::Outcome::kLate, .absent = std::move(absent)});
    } else if (const std::optional<double> seconds = round.notice->Take(now)) {
      LogWaiting(absl::StrCat("rank ", *speaks), *seconds,
                 absl::StrCat("for ", RankNames(absent), " ", round.what), round.timeout_seconds,
                 known(absent));
    }
  }
}

}  // namespace ebb
