// How far a CPU stream has come, and events as places in it.
//
// Record takes the next ticket of its stream and enqueues the passing of it; Wait compares the
// stream's progress with the ticket that the event holds at that moment. So an event may be
// recorded again, on any stream, while others still wait for its earlier place. Nothing that is
// enqueued refers to the event itself: it may be destroyed at any time.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "ebb/runtime/device/backend.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

// Tickets of one stream pass in order.
class Tickets {
 public:
  Tickets() : passed_(own_) {}
  // Counts in `passed`, which is 0 at first and outlives this object.
  explicit Tickets(std::atomic<int64_t>& passed) : passed_(passed) {}
  int64_t TakeTicket() { return ++taken_; }  // by the stream's enqueuing thread
  void Pass(int64_t ticket);
  void PassNext() { Pass(passed_.load(std::memory_order_relaxed) + 1); }
  bool Passed(int64_t ticket) const { return passed_.load(std::memory_order_acquire) >= ticket; }
  // False: the deadline came first.
  bool Await(int64_t ticket, WaitPoint::Deadline deadline = WaitPoint::kNever);
  const std::atomic<int64_t>& passed() const { return passed_; }

 private:
  int64_t taken_ = 0;
  std::atomic<int64_t> own_{0};
  std::atomic<int64_t>& passed_;
  WaitPoint changed_;
};

// Owns the tickets of every stream that the device ever had, because tasks and events name them by
// address. A new stream goes on with those of a destroyed one: their numbers only grow, so old
// events stay passed.
class TicketPool {
 public:
  Tickets* Take();
  void GiveBack(Tickets* tickets);
  // Adds tickets that count in the caller's memory, which outlives the pool.
  void Add(std::atomic<int64_t>& passed);
  bool HasFree() const;

 private:
  mutable std::mutex mutex_;
  std::deque<Tickets> all_;
  std::vector<Tickets*> free_;
};

class CpuEvent : public EventBackend {
 public:
  struct Place {
    Tickets* tickets =
        nullptr;  // null: passed, because never recorded or on the calling thread's stream
    int64_t ticket = 0;
    bool Passed() const { return tickets == nullptr || tickets->Passed(ticket); }
    void Await() const {
      if (tickets != nullptr) tickets->Await(ticket);
    }
  };

  explicit CpuEvent(std::shared_ptr<TicketPool> pool) : pool_(std::move(pool)) {}

  void HostWait() const override { place().Await(); }
  bool Passed() const override { return place().Passed(); }

  Place place() const;
  void SetPlace(Place place);

 private:
  std::shared_ptr<TicketPool> pool_;  // keeps the places' tickets alive
  mutable std::mutex mutex_;          // one thread may wait while another records
  Place place_;
};

}  // namespace ebb
