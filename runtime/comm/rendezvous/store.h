// What the ranks of a world tell each other beside their collectives: texts for all ranks, a
// failure's reason, departures, and a rank's death, which shows as a closed connection or an ended
// process. A process has one store. Ranks that are threads share it, and it has no connections. All
// other processes are connected to rank 0's:
//
//   rank 1 ---+            a rank sends a text     rank 0 sends it to the others
//   rank 2 ---+--- rank 0  its connection closes   rank 0 tells the others
//   rank 3 ---+            rank 0's closes         each sees it
//
// Rank 0 goes on passing messages on after it has left, until the others have left or its process
// ends.
//
// In processes a thread of its own receives all this at once, also while the program waits. It also
// watches the processes of this host directly, so that they notice each other's end after rank 0
// has left.
#pragma once

#include <poll.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/call_order.h"
#include "ebb/runtime/comm/rendezvous/connection.h"
#include "ebb/runtime/comm/rendezvous/participant.h"
#include "ebb/runtime/comm/rendezvous/rendezvous.h"
#include "ebb/runtime/comm/rendezvous/rounds.h"
#include "ebb/runtime/comm/rendezvous/world_failure.h"

namespace ebb {

// The process that has started this one.
struct ParentProcess {
  // Nothing if it has ended already or is not visible.
  static std::optional<ParentProcess> Find();

  int64_t pid = 0;
  Descriptor process;
  std::string name = "";  // of the launcher, for messages
};

// A rank that has left a communicator.
struct Departure {
  std::string name;    // for messages: "rank 1"
  uint64_t calls = 0;  // of all ranks together that it has made
};

class Store {
 public:
  using Heard = std::function<void(const absl::Status& why)>;

  // For a rank that has met the others; its process has no other rank. When the last owner lets go,
  // this rank says goodbye. The end of `launcher` before this world's end is a failure.
  static absl::StatusOr<std::shared_ptr<Store>> Hold(
      int rank, Rendezvous rendezvous, std::optional<ParentProcess> launcher = std::nullopt);
  // For the ranks of one process, which are threads.
  static std::shared_ptr<Store> OfThreads(int size) { return std::make_shared<Store>(size); }
  explicit Store(int threads);
  ~Store();

  // For ranks that share memory. `calls`: whose records they can read, so they do not send each
  // other their calls. `ended_in_order`: whether a rank had left in order before its process ended.
  void ShareMemory(std::shared_ptr<CallOrder> calls, std::function<bool(int rank)> ended_in_order);

  int size() const { return static_cast<int>(participants_.size()); }
  const std::vector<Participant>& participants() const { return participants_; }
  uint64_t nonce() const { return nonce_; }

  // Takes part in a round as `rank`, which is a rank of this process. The outcome is the same on
  // all members, also on those that come after it is settled. An error: the world has failed.
  absl::StatusOr<Gathered> Gather(int rank, const Round& round, std::string_view mine);
  // `rank` will not come to that round. Does not wait.
  void LeaveRound(int rank, const Round& round);
  // For threads: `rank` comes to no round any more.
  void Leave(int rank, const std::string& how);

  // Reports to all other ranks that this process has given up, and names it as the reporter; does
  // not wait for them. The first failure stays. Any thread.
  void Fail(const absl::Status& why);
  // The same without the name.
  void Break(const absl::Status& why);
  absl::Status status() const { return failure_->Get(); }
  const std::shared_ptr<WorldFailure>& failure() const { return failure_; }
  // Calls `heard`, on any thread, with the first failure of any rank: at once if one has happened
  // already.
  void OnFailure(Heard heard);
  // `rank` has failed, aborted, returned an error, or made another rank fail by leaving.
  void NoteFailure(int rank);
  // The ranks of this process that have failed, in the order in which they first did.
  std::vector<int> failures();

  CallOrder* calls(int rank) const { return calls_[calls_.size() > 1 ? ToIndex(rank) : 0].get(); }
  // Sends the calls of `rank` to all others that cannot read them. Fails if the known calls differ.
  void TellCalls(int rank);
  // The same for the calls that are known to this process's rank. If they do not differ, returns
  // what `ranks` have called last.
  std::string CompareCalls(std::span<const int> ranks);

  // A rank leaves a communicator of `size` ranks, which NCCL does not tell the others: a rank that
  // makes more calls than one that has left waits in vain.
  void Depart(const std::string& communicator, int size, const Departure& mine);
  // Nothing once all of its ranks have left.
  std::optional<Departure> FirstDeparture(const std::string& communicator);

  // Whether its thread has nothing to do any more.
  bool has_ended() const { return has_ended_.load(std::memory_order_acquire); }

 private:
  Store(int rank, uint64_t nonce, std::vector<Participant> participants,
        std::vector<Connection> connections, std::optional<ParentProcess> launcher);
  static size_t ToIndex(int rank) { return static_cast<size_t>(rank); }
  bool is_threads() const { return rank_ < 0; }
  void Stop(std::shared_ptr<Store> self);
  void Run();
  void Wake();
  void Poll(std::unique_lock<std::mutex>& lock);
  void HearCalls(std::unique_lock<std::mutex>& lock);
  void TellListeners(std::unique_lock<std::mutex>& lock);
  void Hear(size_t connection);
  // The rank at the other end of a connection.
  int RankAt(size_t connection) const { return rank_ == 0 ? static_cast<int>(connection) : 0; }

  // Call it with mutex_ held.
  bool ReachesRankZero() const { return rank_ <= 0 || connections_[0].is_open(); }
  bool HasOthers() const;
  bool GoesOn() const { return rank_ == 0 && !failure_->is_set() && HasOthers(); }
  void Understand(int from, Message message);
  bool AreRanks(const std::vector<int>& ranks) const;
  void Collect(int rank, const Round& round, std::optional<std::string> text);
  void Answer(int member, const std::string& round, const Gathered& outcome);
  void LookAtRounds();
  void HasLeft(int rank, const std::string& how);
  void Broken(absl::Status why, int reported_by);
  void Died(int rank, std::string_view how);
  void HasDeparted(const std::string& communicator, int size, const Departure& departure);
  void TellOthers(MessageType type, std::string_view payload, int except);

  const int rank_;  // -1: the ranks are threads of this process
  const uint64_t nonce_ = 0;
  const std::vector<Participant> participants_;
  const Descriptor wake_;
  const std::shared_ptr<WorldFailure> failure_ = std::make_shared<WorldFailure>();
  std::atomic<bool> has_ended_{false};
  std::vector<CallRecord> records_;  // of threads
  bool tells_calls_ = true;
  std::vector<std::shared_ptr<CallOrder>> calls_;  // of the ranks of this process
  std::vector<pollfd> polled_;                     // used by the thread
  std::vector<std::string> calls_to_hear_;         // used by the thread
  std::thread thread_;

  std::mutex mutex_;  // guards the members below; only the thread receives and closes
  std::condition_variable changed_;
  std::optional<ParentProcess> launcher_;
  std::function<bool(int rank)> ended_in_order_;
  std::vector<Descriptor> processes_;  // by rank, for ranks of this host
  std::vector<Connection> connections_;
  bool stopping_ = false;
  bool to_tell_ = false;  // failure_ is still to be reported to the listeners
  std::vector<Heard> listeners_;
  std::vector<int> failures_;
  struct Departures {
    Departure first;
    int count = 0;
  };
  std::map<std::string, Departures> departures_;  // by communicator
  Rounds rounds_;                                 // of rank 0's process
  // By round and rank, for ranks of this process that wait for it or have not come to it yet.
  std::map<std::pair<std::string, int>, Gathered> outcomes_;
};

}  // namespace ebb
