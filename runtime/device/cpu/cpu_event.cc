#include "ebb/runtime/device/cpu/cpu_event.h"

namespace ebb {

void Tickets::Pass(int64_t ticket) {
  passed_.store(ticket, std::memory_order_release);
  changed_.Notify();
}

bool Tickets::Await(int64_t ticket, WaitPoint::Deadline deadline) {
  return changed_.Await([&] { return Passed(ticket); }, deadline);
}

Tickets* TicketPool::Take() {
  const std::scoped_lock lock(mutex_);
  if (free_.empty()) return &all_.emplace_back();
  Tickets* tickets = free_.back();
  free_.pop_back();
  return tickets;
}

void TicketPool::GiveBack(Tickets* tickets) {
  const std::scoped_lock lock(mutex_);
  free_.push_back(tickets);
}

void TicketPool::Add(std::atomic<int64_t>& passed) {
  const std::scoped_lock lock(mutex_);
  free_.push_back(&all_.emplace_back(passed));
}

bool TicketPool::HasFree() const {
  const std::scoped_lock lock(mutex_);
  return !free_.empty();
}

CpuEvent::Place CpuEvent::place() const {
  const std::scoped_lock lock(mutex_);
  return place_;
}

void CpuEvent::SetPlace(Place place) {
  const std::scoped_lock lock(mutex_);
  place_ = place;
}

}  // namespace ebb
