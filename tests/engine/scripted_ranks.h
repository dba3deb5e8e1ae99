// Outcomes of steps without an engine: a script plays the calls, records and streams of ranks. A
// rank's stream runs its tasks when the script says so, or when the rank waits for a verdict.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/engine/outcome/step_outcome.h"
#include "tests/status.h"

namespace ebb::testing {

inline ModelSpec TwoUnits() {
  ModelSpec model;
  for (const char* name : {"a", "b"}) {
    const UnitId unit = model.AddUnit(name);
    model.Add(unit, {.name = absl::StrCat(name, ".weight"), .shape = {2}, .init = Constant(0)});
    model.forward.push_back({.unit = unit});
  }
  return model;
}

// The communicators of one rank, as the script sets them.
struct ScriptedPeers : StepPeers {
  std::function<void(int parity)> await;
  absl::Status broken, device, aborted, withdrawn;
  absl::StatusOr<std::vector<std::vector<int64_t>>> logs = absl::UnavailableError("no rank came");
  int logs_asked = 0;
  bool updates_awaited = false;

  void AwaitUpdates() override { updates_awaited = true; }
  void AwaitConclusion(int parity) override { await(parity); }
  absl::Status Broken() const override { return broken.ok() ? device : broken; }
  absl::Status DeviceFailure() const override { return device; }
  std::string WhereBroken(const absl::Status& seen) const override {
    return seen == broken ? "gather of unit 'a'" : "";
  }
  void Abort(const absl::Status& why) override {
    if (aborted.ok()) aborted = why;
  }
  void Withdraw(const absl::Status& why) override { withdrawn = why; }
  absl::StatusOr<std::vector<std::vector<int64_t>>> Logs(std::span<const int64_t>,
                                                         const absl::Status&) override {
    ++logs_asked;
    return logs;
  }
};

// One rank's part in a step.
struct RankScript {
  absl::Status error = {};  // noted while the step is open
  bool waits = false, early = false, starts_early = false;
  double loss = 0;
  std::array<double, 2> squares = {4, 5};  // by unit
  std::optional<double> learning_rate = {};
  std::vector<int> opened = {};  // scopes, by their codes
  absl::Status fails_before_seal = {}, exchanged = {};
};

struct Rank {
  const ModelSpec model = TwoUnits();
  const Config config;
  const UpdateTable table;
  StepErrors errors;
  ScriptedPeers peers;
  VerdictRanks verdict_ranks;
  OutcomeMessages messages;
  const std::vector<int> backwards;  // the units' own order
  std::optional<ControlBlock> control;
  std::optional<StepConstants> constants;
  std::optional<StepOutcome> outcome;
  std::deque<std::function<bool()>> stream;  // false: it waits for other ranks
  std::map<int64_t, ExchangeRecord> sealed;  // by exchange
  int parity = 0;

  Rank(const Config& of, int rank, int ranks)
      : config(of), messages("engine", {.rank = rank}, {.rank = rank}, model) {
    EXPECT_OK(ControlBlock::Create(Device::Cpu(1),
                                   {.units = 2, .ranks = static_cast<size_t>(ranks)}, {}, control));
    constants.emplace(config, table, *control, /*own_optimizer=*/false);
    outcome.emplace(config, errors, peers, *control, *constants, messages, backwards,
                    verdict_ranks);
  }
};

class Ranks {
 public:
  explicit Ranks(int count, const Config& config = {}) {
    for (int r = 0; r < count; ++r) {
      ranks_.push_back(std::make_unique<Rank>(config, r, count));
      ranks_.back()->peers.await = [this, r](int parity) {
        Run();
        const StepOutcome::State state = at(r).outcome->state(parity);
        ASSERT_EQ(state, StepOutcome::State::kJudged) << "rank " << r << " would wait for ever";
      };
    }
  }
  Rank& at(int rank) { return *ranks_[static_cast<size_t>(rank)]; }
  StepOutcome& operator[](int rank) { return *at(rank).outcome; }
  int size() const { return static_cast<int>(ranks_.size()); }

  // All streams, as far as they come.
  void Run() {
    bool ran = true;
    while (std::exchange(ran, false)) {
      for (const auto& rank : ranks_) {
        while (!rank->stream.empty() && rank->stream.front()()) {
          rank->stream.pop_front();
          ran = true;
        }
      }
    }
  }

  // From its begin until all is enqueued.
  void Enqueue(int r, const RankScript& script, bool evaluation = false) {
    Rank& rank = at(r);
    rank.parity = rank.outcome->Begin(evaluation);
    const int parity = rank.parity;
    EXPECT_EQ(rank.outcome->state(parity), StepOutcome::State::kBegun);
    if (script.early) {
      rank.stream.push_back([&rank, parity, rate = script.learning_rate] {
        rank.outcome->Prepare(parity, rate);
        return true;
      });
    }
    rank.errors.Note(script.error);
    if (script.starts_early) rank.outcome->StartEarlyUpdate();
    rank.control->sums(parity)[0] = script.loss;
    ScopeTrail trail;
    trail.begun = {1, 1};
    uint64_t hash = 1;
    for (const int code : script.opened) {
      trail.Open(code, /*expected=*/ScopeTrail::kNothing, /*then=*/ScopeTrail::kNothing);
      hash = hash * 31 + static_cast<uint64_t>(code);
    }
    std::vector<int64_t> log(trail.begun.begin(), trail.begun.end());
    Evaluation::Sums sums = {};
    sums[0].count = 1;
    rank.outcome->Close({.terms = {.waits = script.waits,
                                   .early = script.early,
                                   .divisor = 2,
                                   .learning_rate = script.learning_rate},
                         .scopes_hash = hash,
                         .trail = &trail,
                         .sums = &sums,
                         .log = log});
    EXPECT_EQ(rank.outcome->state(parity), StepOutcome::State::kSealed);
    rank.stream.push_back([&rank, parity, script] {
      for (int u = 0; u < 2; ++u) rank.control->square(u) = script.squares[static_cast<size_t>(u)];
      rank.errors.Fail(script.fails_before_seal);
      rank.outcome->Seal(parity);
      rank.sealed[rank.outcome->exchange(parity)] = rank.control->own_record(parity);
      return true;
    });
    rank.stream.push_back([this, &rank, parity, script] { return Exchange(rank, parity, script); });
  }
  // The results of Finish in a step of all ranks, with `other` on the rank `odd`.
  std::vector<absl::Status> Train(const RankScript& script = {}, int odd = -1,
                                  const RankScript& other = {}) {
    for (int r = 0; r < size(); ++r) Enqueue(r, r == odd ? other : script);
    std::vector<absl::Status> finished;
    for (int r = 0; r < size(); ++r) finished.push_back((*this)[r].Finish());
    return finished;
  }

 private:
  // The all-gather of records, which waits for the ranks that are not there yet, and what follows
  // from it.
  bool Exchange(Rank& rank, int parity, const RankScript& script) {
    const int64_t exchange = rank.outcome->exchange(parity);
    if (script.exchanged.ok()) {
      for (int r = 0; r < size(); ++r)
        if (!at(r).sealed.contains(exchange)) return false;
      for (int r = 0; r < size(); ++r)
        rank.control->records(parity)[static_cast<size_t>(r)] = at(r).sealed.at(exchange);
    }
    rank.outcome->Conclude(parity, script.exchanged);
    return true;
  }

  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace ebb::testing
