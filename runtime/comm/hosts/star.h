// What the processes of a world tell each other through rank 0, which all of them have a connection
// to: texts that all get, why one has given up, and, by connections that close, that one has died.
//
//   rank 1 ---+            one says something      rank 0 tells the others
//   rank 2 ---+--- rank 0  one's connection closes rank 0 tells the others
//   rank 3 ---+            rank 0's closes         each sees it
//
// A thread of its own hears all this at once, whatever the program is waiting for. Owned by that
// thread too: what it tells may end the world.
#pragma once

#include <poll.h>

#include <condition_variable>
#include <functional>
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
#include "ebb/runtime/comm/farewells.h"
#include "ebb/runtime/comm/rendezvous/connection.h"
#include "ebb/runtime/comm/rendezvous/participant.h"
#include "ebb/runtime/comm/rendezvous/rendezvous.h"
#include "ebb/runtime/comm/wait_notice.h"

namespace ebb {

class Star {
 public:
  using Heard = std::function<void(const absl::Status& why)>;

  // Of ranks that have met. The thread runs until Stop.
  static absl::StatusOr<std::shared_ptr<Star>> Hold(int rank, Rendezvous rendezvous);
  // Says goodbye; no other call comes after it.
  void Stop();

  int rank() const { return rank_; }
  const std::vector<Participant>& participants() const { return participants_; }

  // As Bootstrap's.
  absl::StatusOr<std::vector<std::string>> AllGather(std::string_view mine, double timeout_seconds);
  // Whether all can have been told: without rank 0 no rank is.
  bool Fail(const absl::Status& why);
  void OnFailure(Heard heard);
  absl::StatusOr<std::unique_ptr<Farewells>> NewFarewells() { return notes_->New(); }
  CallOrder& calls() { return calls_; }
  // This rank's calls, to all others. Fails where those that are known have gone apart.
  void TellCalls();

 private:
  Star(int rank, Rendezvous rendezvous);
  void Run();
  void Hear(size_t connection);
  // Of the rank at the other end of a connection.
  int RankAt(size_t connection) const { return rank_ == 0 ? static_cast<int>(connection) : 0; }
  std::string Name(int rank) const { return Describe(participants_[static_cast<size_t>(rank)]); }

  // With mutex_ held.
  void Understand(int from, Message message);
  void Collect(int from, std::string text, double timeout_seconds);
  void Leave(int rank);
  void Broken(absl::Status why, int told_by);
  void TellOthers(MessageType type, std::string_view payload, int except);
  std::string Missing() const;
  void SayWaiting(double seconds) const;
  absl::Status Late() const;

  const int rank_;
  const std::vector<Participant> participants_;
  const Descriptor wake_;
  const std::shared_ptr<FarewellNotes> notes_;
  CallOrder calls_;
  std::vector<pollfd> polled_;              // of the thread
  std::vector<std::string> calls_to_hear_;  // likewise
  std::thread thread_;

  std::mutex mutex_;  // of what follows; the thread alone receives, and alone closes
  std::condition_variable changed_;
  std::vector<Connection> connections_;
  bool stopping_ = false;
  absl::Status failure_;
  bool to_tell_ = false;  // failure_, to ranks that do not know it
  std::vector<Heard> listeners_;
  std::vector<bool> has_left_;                     // by rank
  std::vector<std::optional<std::string>> texts_;  // rank 0's, of the present round
  WaitPoint::Deadline due_ = WaitPoint::kNever;    // and until when all have to be there
  std::optional<WaitNotice> notice_;               // rank 0's, likewise
  double timeout_seconds_ = 0;
  std::optional<std::vector<std::string>> round_;  // that is complete
};

}  // namespace ebb
