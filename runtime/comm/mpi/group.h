// One rank's view of a communicator between hosts: its members, which of them have left,
// and the first failure. Every failure is told to all members by a notice (MpiWorld).
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/hosts/hosts.h"
#include "ebb/runtime/comm/mpi/letters.h"
#include "ebb/runtime/comm/mpi/world.h"
#include "ebb/runtime/comm/node/communicator.h"
#include "ebb/runtime/comm/turns.h"
#include "ebb/runtime/comm/wait_notice.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class MpiGroup {
 public:
  // A rank's place in a new communicator. `id`: its members have no other of that number.
  struct Place {
    int id = 0;
    CommunicatorOptions options;
    std::vector<int> world_ranks;
    int rank = 0;
    std::unique_ptr<NodeCommunicator> node;  // of the members on this host
  };
  static constexpr int kNoticeTag = 3;

  MpiGroup(MpiWorld& world, Place place);
  ~MpiGroup();

  int id() const { return place_.id; }
  int rank() const { return place_.rank; }
  int size() const { return static_cast<int>(place_.world_ranks.size()); }
  int world_rank(int rank) const { return place_.world_ranks[static_cast<size_t>(rank)]; }
  std::span<const int> world_ranks() const { return place_.world_ranks; }
  std::span<const int> others() const { return others_; }
  const CommunicatorOptions& options() const { return place_.options; }
  const Hosts& hosts() const { return hosts_; }
  MpiWorld& world() { return world_; }
  MpiPort& port() { return world_.port(); }
  NodeCommunicator& node() { return *place_.node; }
  Turns& turns() { return turns_; }
  Letters& calls() { return *calls_; }
  Letters& proposals() { return *proposals_; }
  int data_tag() const { return kTags * id() + 2; }

  // Until `condition()`, which looks at messages. False: the group has failed, or it is too late. `say`:
  // of the seconds, when the log is to hear of it.
  template <class Condition, class Say>
  bool Await(Condition condition, WaitPoint::Deadline deadline, NoticeTimes times, Say say) {
    Patience patience;
    std::optional<WaitNotice> notice, telling;
    for (;;) {
      world_.Poll();
      if (condition()) return true;
      const WaitPoint::Deadline now = WaitPoint::Clock::now();
      if (failed() || now >= deadline) return false;
      if (!notice.has_value()) {
        notice.emplace(times, now);
        times.first_seconds /= 5;  // the other hosts need them to compare
        telling.emplace(times, now);
      }
      if (telling->Take(now).has_value()) world_.TellCalls();
      if (const std::optional<double> seconds = notice->Take(now)) say(*seconds);
      patience.Pause();
    }
  }
  template <class Condition>
  bool Await(Condition condition, WaitPoint::Deadline deadline) {
    return Await(condition, deadline, options().notices, [](double) {});
  }

  // Where ranks of the group meet to create communicators, in the same order on all.
  absl::StatusOr<Place> Join(const Proposal& proposal);

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  absl::Status status() const;
  // The first failure stays, and is told to the others.
  void Fail(const absl::Status& why);
  // This rank has waited `seconds` for `absent`. The first of those that have come says so in the log.
  void SayWaiting(std::span<const int> absent, double seconds, const Letters::Waits& waits);
  void FailLate(const Collective& call, std::string_view for_whom);
  void FailMismatch(int first, const CallSummary& first_call, int second,
                    const CallSummary& second_call);
  void FailBecauseLeft(int rank);
  std::string RankName(int rank) const;
  std::string RankNames(std::span<const int> ranks) const;

  // This rank calls nothing any more.
  void Leave(const std::string& how);
  // Has `peer` left without sending a letter of these after its first `received`?
  bool HasLeft(int peer, const Letters& letters, uint64_t received) const;

  // What another rank has told.
  void Hear(int world_rank, const Notice& notice);

 private:
  static constexpr int kTags = 4;
  struct Farewell {
    uint64_t calls = 0;
    uint64_t proposals = 0;
    std::string how;
  };
  // False: it was not the first.
  bool SetFailed(const absl::Status& why);
  void HearFarewell(int world_rank, const Notice& notice);
  // One meeting of a Join.
  absl::Status MeetToJoin(const void* letter, const CommunicatorOptions& options,
                          WaitPoint::Deadline deadline);
  // No more communicators are created. Returns why.
  absl::Status Break(const absl::Status& why);
  absl::Status broken() const;

  MpiWorld& world_;
  Place place_;
  const Hosts hosts_;
  std::vector<int> others_;
  std::unique_ptr<Letters> calls_, proposals_;
  Turns turns_;
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  absl::Status status_;
  bool left_ = false;
  std::vector<std::optional<Farewell>> farewells_;
  absl::Status broken_;  // why no parts are created any more
};

}  // namespace ebb
