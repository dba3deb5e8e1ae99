// Messages between the processes of a world through rank 0, to which all are connected: texts for
// all ranks, a failure's reason, and a rank's death, which shows as a closed connection or an ended
// process.
//
//   rank 1 ---+            a rank sends a text     rank 0 sends it to the others
//   rank 2 ---+--- rank 0  its connection closes   rank 0 sends it to the others
//   rank 3 ---+            rank 0's closes         each sees it
//
// Rank 0 goes on passing messages on after it has left, until the others have left or its process
// ends.
//
// A thread of its own receives all this at once, also while the program waits. The thread watches
// processes of this host directly, so that they notice each other's end after rank 0 has left.
#pragma once

#include <poll.h>

#include <atomic>
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
#include "ebb/runtime/comm/rendezvous/hosts.h"
#include "ebb/runtime/comm/rendezvous/rendezvous.h"
#include "ebb/runtime/comm/wait_notice.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

// The first failure of a world, as far as this process knows it. The failure ends all communicators
// over MPI and NCCL. Any thread.
class WorldFailure {
 public:
  // The first stays. Neither waits nor calls CUDA.
  void Set(const absl::Status& why) {
    {
      const std::scoped_lock lock(mutex_);
      status_.Update(why);
      is_set_.store(!status_.ok(), std::memory_order_release);
    }
    changed_.Notify();
  }
  bool is_set() const { return is_set_.load(std::memory_order_acquire); }
  absl::Status Get() const {
    if (!is_set()) return absl::OkStatus();
    const std::scoped_lock lock(mutex_);
    return status_;
  }
  // Notified by a failure.
  WaitPoint& changed() { return changed_; }

 private:
  mutable std::mutex mutex_;
  absl::Status status_;
  std::atomic<bool> is_set_{false};
  WaitPoint changed_;
};

// The process that has started this one.
struct ParentProcess {
  // Nothing if it has ended already or is not visible.
  static std::optional<ParentProcess> Find(std::string name);

  int64_t pid = 0;
  Descriptor process;
  std::string name;  // for messages
};

// A rank that has left a communicator.
struct LeftRank {
  std::string name;    // for messages: "rank 1"
  uint64_t calls = 0;  // of all ranks together that it has made
};

class Store {
 public:
  using Listener = std::function<void(const absl::Status& why)>;

  // For ranks that have met. When its last owner lets go, this rank says goodbye. The end of
  // `launcher` before this world's end is a failure. `timeout_seconds`: of the world.
  static absl::StatusOr<std::shared_ptr<Store>> Hold(
      int rank, Rendezvous rendezvous, double timeout_seconds,
      std::optional<ParentProcess> launcher = std::nullopt);
  // For the ranks of one process, which are threads: a store for each. `calls`: as above, by rank,
  // if there are any.
  static absl::StatusOr<std::vector<std::shared_ptr<Store>>> OfThreads(
      int size, const std::vector<std::shared_ptr<CallOrder>>& calls = {});

  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
  // For ranks that share memory. `calls`: with records of all ranks, so they need not send each
  // other their calls. `ended_in_order`: whether a rank had left before its process ended; null for
  // threads. Call it before any rank makes calls.
  void ShareMemory(std::shared_ptr<CallOrder> calls, std::function<bool(int rank)> ended_in_order);
  // The thread receives nothing more.
  bool has_ended() const { return has_ended_.load(std::memory_order_acquire); }
  int rank() const { return rank_; }
  const std::vector<Participant>& participants() const { return participants_; }

  // An all-gather of texts among some ranks. Each round has its own name, and all members pass the
  // same round.
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
    uint64_t number = 0;             // of the round; no other complete round has it
    std::vector<std::string> texts;  // by place among the members
    std::vector<int> absent;         // members that are late, or the one that has left
  };
  // The outcome is the same on all members, also on those that come after it is settled. An error:
  // the world has failed.
  absl::StatusOr<Gathered> Gather(const Round& round, std::string_view mine);

  // The world has ended on this rank. The store still passes messages on.
  void Leave();
  // Waits for all ranks, after Leave(). False: the world has failed, or a rank has let go of its
  // store.
  bool MeetLast(double timeout_seconds);

  // Reports to all other ranks that the world has failed; does not wait for them. The first failure
  // stays. Any thread.
  void Fail(const absl::Status& why);
  absl::Status status() const { return failure_->Get(); }
  const std::shared_ptr<WorldFailure>& failure() const { return failure_; }
  // Calls `listener`, on any thread, with the first failure of any rank: at once if one has
  // happened already.
  void OnFailure(Listener listener);
  // WorldBackend::calls.
  CallOrder* calls() { return participants_.size() > 1 ? calls_.get() : nullptr; }
  // Sends this rank's calls to all others. Fails if the known calls differ.
  void SendCalls();
  // `listener`: called on the store's thread when calls of another rank have come, which waits.
  void OnCalls(std::function<void()> listener);
  // Compares the calls that are known here. If they do not differ, returns the last calls of
  // `ranks`.
  std::string CompareCalls(std::span<const int> ranks);

  // Reports to all other ranks that this rank leaves a communicator of `size` ranks. NCCL does not
  // report it, and a rank that makes more calls than one that has left waits in vain.
  void LeaveCommunicator(const std::string& name, int size, const LeftRank& mine);
  // Nothing once all ranks have left it.
  std::optional<LeftRank> FirstToLeave(const std::string& communicator);

 private:
  // A round at rank 0, until all members have come.
  struct Collected {
    Round round;                                    // as the first of them has come to it
    std::vector<std::optional<std::string>> texts;  // by place
    size_t here = 0;                                // members that have come
    WaitPoint::Deadline due = WaitPoint::kNever;
    std::optional<WaitNotice> notice;
    bool is_settled = false;
  };

  Store(int rank, std::vector<Participant> participants, std::vector<Connection> connections,
        std::optional<ParentProcess> launcher);
  static absl::StatusOr<std::shared_ptr<Store>> Start(std::shared_ptr<Store> store);
  static void Stop(std::shared_ptr<Store> store);
  void Run();
  void ReceiveFrom(size_t connection);
  void CompareReceived(std::unique_lock<std::mutex>& lock);
  // The rank at the other end of a connection.
  int RankAt(size_t connection) const { return rank_ == 0 ? static_cast<int>(connection) : 0; }
  bool IsOnThisHost(int rank) const;
  std::string Name(int rank) const { return Describe(participants_[rank]); }

  // Call it with mutex_ held.
  bool ReachesRankZero() const { return rank_ == 0 || connections_[0].is_open(); }
  bool HasOthers() const;
  void Handle(int from, Message message);
  bool AreRanks(const std::vector<int>& ranks) const;
  void Collect(int from, const Round& round, std::string text);
  void SettleIfOver(Collected& all);
  void Settle(Collected& all, Gathered::Outcome outcome, std::vector<int> absent);
  void LookAtRounds(WaitPoint::Deadline now);
  void Leave(int rank);
  void SetFailed(const absl::Status& why, int reported_by);
  void NoteLeft(const std::string& communicator, int size, LeftRank left);
  // `error`: of its connection; OK if its process has ended.
  void Died(int rank, const absl::Status& error);
  void SendToOthers(MessageType type, std::string_view payload, int except);

  const int rank_;
  const std::vector<Participant> participants_;
  const Descriptor wake_;
  const std::shared_ptr<WorldFailure> failure_ = std::make_shared<WorldFailure>();
  bool sends_calls_ = true;
  std::shared_ptr<CallOrder> calls_;
  std::vector<pollfd> polled_;               // used by the thread
  std::vector<std::string> received_calls_;  // used by the thread
  std::thread thread_;

  std::mutex mutex_;  // guards the members below; only the thread receives and closes
  std::condition_variable changed_;
  std::vector<Connection> connections_;
  std::optional<ParentProcess> launcher_;
  std::function<bool(int rank)> ended_in_order_;
  std::vector<Descriptor> processes_;  // by rank, for ranks of this host
  bool stopping_ = false;
  std::atomic<bool> has_ended_{false};
  std::function<void()> on_calls_;
  bool to_report_ = false;  // failure_ is still to be reported to the listeners
  std::vector<Listener> listeners_;
  std::vector<bool> has_left_;               // by rank
  std::map<std::string, Collected> rounds_;  // rank 0's
  uint64_t settled_ = 0;                     // rounds that are settled
  struct Left {
    LeftRank first;
    int count = 0;
  };
  std::map<std::string, Left> left_;  // by communicator, until all of its ranks have left
  std::map<std::string, Gathered>
      outcomes_;  // of rounds that this rank waits for or has not come to yet
};

}  // namespace ebb
