// Messages between the ranks of a world. Its short calls begin a message or look whether one has
// ended.
//
// All communicators of a world share one MPI communicator and differ by tags. MPI matches messages
// by (communicator, sender, tag). So messages of different communicators never meet, whichever
// threads send them, and no communicator needs a collective call of MPI, which would hang after a
// rank has failed.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/mpi/library.h"
#include "ebb/runtime/comm/rendezvous/store.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

using MessageMemory = std::shared_ptr<void>;

class MpiEndpoint;

// A message under way, which keeps its memory.
class MpiMessage {
 public:
  MpiMessage() = default;
  MpiMessage(const MpiMessage&) = delete;
  MpiMessage& operator=(const MpiMessage&) = delete;
  // Gives up a message under way. Its memory stays as long as MPI may use it.
  ~MpiMessage();

  bool is_under_way() const { return request_ != nullptr; }
  // True: nothing is under way. Never true again once its endpoint has been abandoned.
  bool Test();

 private:
  friend class MpiEndpoint;
  MpiEndpoint* endpoint_ = nullptr;
  OpenMpi::Request request_ = nullptr;
  MessageMemory memory_;
  bool is_receive_ = false;
};

class MpiEndpoint {
 public:
  // All ranks of `parent` call it.
  static absl::StatusOr<std::unique_ptr<MpiEndpoint>> Open(MpiLibrary& library,
                                                           OpenMpi::Comm parent,
                                                           WaitPoint::Deadline deadline);
  ~MpiEndpoint();

  int rank() const { return rank_; }
  int size() const { return size_; }
  int tag_max() const { return tag_max_; }
  MpiLibrary& library() { return library_; }

  // `data` lies in `memory`. `to_be_taken`: ends only after the receiver has begun to receive it.
  void Send(MpiMessage& message, int to, int tag, MessageMemory memory, const std::byte* data,
            int64_t bytes, bool to_be_taken = false);
  void Receive(MpiMessage& message, int from, int tag, MessageMemory memory, std::byte* data,
               int64_t bytes);

  // Rank 0's text, of at most 2 KiB. All ranks call it, before any message.
  absl::StatusOr<std::string> Broadcast(std::string_view mine, WaitPoint::Deadline deadline);

  // From now on the world of `store` uses it. Once that world has failed, nothing is sent, received
  // or tested any more, and messages under way never end: after Open MPI could not send to a rank
  // that has died, any later call may spin.
  void Hold(std::shared_ptr<Store> store, double timeout_seconds);
  Store& store() const { return *store_; }
  // Waits until `sent()`. The waits of all communicators that leave take together at most 2 s.
  // Within this time messages have been sent, or another rank has ended.
  void AwaitSent(absl::FunctionRef<bool()> sent);
  bool abandoned() const { return store_ != nullptr && store_->failure()->is_set(); }

 private:
  friend class MpiMessage;
  MpiEndpoint(MpiLibrary& library, OpenMpi::Comm comm) : library_(library), comm_(comm) {}
  // Calls MPI, unless the endpoint has been abandoned.
  void Call(const char* what, absl::FunctionRef<int()> call);
  // A call of MPI that has failed fails the world, which may take a while: without the lock.
  void Note(const char* what, int result);

  MpiLibrary& library_;
  // Never freed: freeing is a collective call, and ranks end at different times.
  const OpenMpi::Comm comm_;
  int rank_ = 0;
  int size_ = 1;
  int tag_max_ = 32'767;  // at least, by the standard
  std::shared_ptr<Store> store_;
  std::atomic<WaitPoint::Clock::duration> patience_{std::chrono::seconds(2)};
};

// Sleeps between looks. MPI has no wait that a message ends, so a waiting thread has to look: at
// once while messages are coming, more and more seldom while none comes.
class Backoff {
 public:
  void Pause();

 private:
  int looks_ = 0;
};

}  // namespace ebb
