// What the processes of a world tell each other through rank 0, which all of them have a connection to: texts that all
// get, why one has failed, and, by connections and processes that end, that one has died.
//
//   rank 1 ---+            one says something      rank 0 tells the others
//   rank 2 ---+--- rank 0  one's connection closes rank 0 tells the others
//   rank 3 ---+            rank 0's closes         each sees it
//
// Rank 0 goes on passing on when it has left itself, until the others have, or its process ends.
//
// A thread of its own hears all this at once, whatever the program is waiting for. Processes of this host it also
// watches by themselves, so that they notice each other's end when rank 0 has left.
#pragma once

#include <poll.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/call_order.h"
#include "ebb/runtime/comm/rendezvous/connection.h"
#include "ebb/runtime/comm/rendezvous/departures.h"
#include "ebb/runtime/comm/rendezvous/participant.h"
#include "ebb/runtime/comm/rendezvous/rendezvous.h"
#include "ebb/runtime/comm/wait_notice.h"

namespace ebb {

// The process that has started this one.
struct ParentProcess {
  // Nothing if it has ended already or cannot be seen.
  static std::optional<ParentProcess> Find();

  int64_t pid = 0;
  Descriptor process;
};

class Store {
 public:
  using Heard = std::function<void(const absl::Status& why)>;

  // What is watched beside the connections.
  struct Watched {
    std::optional<ParentProcess> launcher;  // its end before this world's is a failure
    std::string launcher_name;
    // The processes of this host. Says of a rank whose process has ended whether that was in order. Null: not watched.
    std::function<bool(int rank)> ended_in_order;
    // Of ranks that can read each other's. Null: they tell each other their calls, through the store.
    std::shared_ptr<CallOrder> calls;
  };
  // Of ranks that have met. When the last that has it lets go, this rank says goodbye.
  static absl::StatusOr<std::shared_ptr<Store>> Hold(int rank, Rendezvous rendezvous,
                                                     Watched watched = {});
  // Of threads of this process: every rank's. `calls`: as above, by rank, if there are any.
  static absl::StatusOr<std::vector<std::shared_ptr<Store>>> OfThreads(
      int size, const std::vector<std::shared_ptr<CallOrder>>& calls = {});

  int rank() const { return rank_; }
  const std::vector<Participant>& participants() const { return participants_; }

  // Some ranks give each other a text. Each round has a name of its own; all members give the same of it.
  struct Round {
    std::string name;
    std::vector<int> members;
    double timeout_seconds = 600;
    NoticeTimes notices = {};
    std::string what = {};  // completes "rank 0 has waited 5 s for rank 1 ..."
  };
  struct Gathered {
    enum class Outcome : uint8_t { kAll, kLate, kLeft };
    Outcome outcome = Outcome::kAll;
    uint64_t number = 0;             // of the round; no other that is complete has it
    std::vector<std::string> texts;  // by place among the members
    std::vector<int> absent;         // that are late, or one that has left
  };
  // The outcome is the same on all members, also on those that come when it is settled. An error: the world has failed.
  absl::StatusOr<Gathered> Gather(const Round& round, std::string_view mine);
  // This rank will not come to that round. Waits for no rank.
  void LeaveRound(const Round& round);

  // Tells all other ranks that this one has given up; does not wait for them. The first failure stays. Any thread.
  void Fail(const absl::Status& why);
  // The same, in just these words.
  void Break(const absl::Status& why);
  absl::Status status();
  // `heard` is called, on any thread, with the first failure, whichever rank's: at once if that has happened already.
  void OnFailure(Heard heard);
  // As WorldBackend's.
  CallOrder* calls() { return participants_.size() > 1 ? calls_.get() : nullptr; }
  // This rank's calls, to all others. Fails where those that are known have gone apart.
  void TellCalls();
  // The same of what is known here; else what `ranks` have called last.
  std::string CompareCalls(std::span<const int> ranks);

  // Whether nothing is heard of other ranks any more, because rank 0's process has ended in order. All that had been told
  // before has been heard then.
  bool IsAlone();

  // This rank leaves a communicator of `size` ranks, which all are told.
  void Depart(const std::string& communicator, int size, const Departure& mine);
  // The first that has left it.
  std::optional<Departure> FirstDeparture(const std::string& communicator) {
    return departures_.First(communicator);
  }

  // A text for all other ranks, and what hears theirs, on the store's thread; set before any can come.
  void Tell(std::string_view note);
  void OnNote(std::function<void(std::string_view note)> hear);

 private:
  // A round at rank 0, until all members have come or left.
  struct Collected {
    std::vector<int> members;
    std::vector<std::optional<std::string>> texts;  // by place
    size_t here = 0;                                // members that have come or left
    std::string what;
    double timeout_seconds = 0;
    WaitPoint::Deadline due = WaitPoint::kNever;
    std::optional<WaitNotice> notice;
    std::optional<Gathered> outcome;
    bool answered = false;  // all have been told it
  };

  Store(int rank, std::vector<Participant> participants, std::vector<Connection> connections,
        Watched watched);
  static absl::StatusOr<std::shared_ptr<Store>> Start(std::shared_ptr<Store> store);
  void Stop();
  void Run();
  void WatchProcesses();
  void Hear(size_t connection);
  // Of the rank at the other end of a connection.
  int RankAt(size_t connection) const { return rank_ == 0 ? static_cast<int>(connection) : 0; }
  std::string Name(int rank) const { return Describe(participants_[static_cast<size_t>(rank)]); }

  // With mutex_ held.
  bool ReachesRankZero() const { return rank_ == 0 || connections_[0].is_open(); }
  bool HasOthers() const;
  void Understand(int from, Message message);
  void Collect(int from, const Round& round, bool comes, std::string text);
  void Settle(const std::string& name, Collected& round, Gathered::Outcome outcome,
              std::vector<int> absent);
  void Answer(const std::string& name, Collected& round);
  void LookAtRounds(WaitPoint::Deadline now);
  void Leave(int rank);
  void Broken(absl::Status why, int told_by);
  void Died(int rank, std::string_view how);
  void TellOthers(MessageType type, std::string_view payload, int except);

  const int rank_;
  const std::vector<Participant> participants_;
  const Descriptor wake_;
  Watched watched_;
  std::vector<Descriptor> processes_;  // by rank, of this host's
  Departures departures_;
  const bool tells_calls_;
  const std::shared_ptr<CallOrder> calls_;
  std::vector<pollfd> polled_;              // of the thread
  std::vector<std::string> calls_to_hear_;  // likewise
  std::vector<std::string> notes_to_hear_;
  std::thread thread_;

  std::mutex mutex_;  // of what follows; the thread alone receives, and alone closes
  std::condition_variable changed_;
  std::vector<Connection> connections_;
  bool stopping_ = false;
  absl::Status failure_;
  bool to_tell_ = false;  // failure_, to what listens
  std::vector<Heard> listeners_;
  std::function<void(std::string_view note)> hear_note_;
  std::vector<bool> has_left_;               // by rank
  std::map<std::string, Collected> rounds_;  // rank 0's
  uint64_t settled_ = 0;                     // of them
  std::map<std::string, Gathered>
      outcomes_;  // of rounds that this rank waits for, or is still to come to
};

}  // namespace ebb
