#include "ebb/runtime/device/cuda/host_tasks.h"

#include <thread>

namespace ebb {

HostTasks::HostTasks(int tasks_max)
    : tasks_max_(static_cast<uint64_t>(tasks_max)), ring_(new Place[tasks_max_]) {
  for (uint64_t i = 0; i < tasks_max_; ++i) ring_[i].owner = this;
}

HostTasks::Place* HostTasks::TryPut(const Task& task, WaitPoint::Deadline deadline) {
  const auto has_room = [this] {
    return put_ - ended_.load(std::memory_order_acquire) < tasks_max_;
  };
  if (!not_full_.Await(has_room, deadline)) return nullptr;
  Place& place = ring_[put_++ % tasks_max_];
  place.task = task;
  place.claimed.store(false, std::memory_order_release);
  return &place;
}

bool HostTasks::RunUnclaimed(Place& place) {
  if (place.claimed.exchange(true, std::memory_order_acq_rel)) return false;
  place.task();
  ended_.fetch_add(1, std::memory_order_acq_rel);
  not_full_.Notify();
  left_.fetch_add(1, std::memory_order_acq_rel);
  return true;
}

void HostTasks::Run(void* place) {
  Place& mine = *static_cast<Place*>(place);
  mine.owner->RunUnclaimed(mine);
}

void HostTasks::RunAbandoned() {
  while (ended_.load(std::memory_order_acquire) < put_) {
    Place& oldest = ring_[ended_.load(std::memory_order_acquire) % tasks_max_];
    // The oldest task may be claimed, because CUDA was already running it when the device failed.
    if (!RunUnclaimed(oldest)) std::this_thread::yield();
  }
  while (left_.load(std::memory_order_acquire) < put_) std::this_thread::yield();
}

}  // namespace ebb
