// The CPU behind the Device interface: its streams, and the device that makes them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "ebb/runtime/device/backend.h"
#include "ebb/runtime/device/cpu/cpu_event.h"
#include "ebb/runtime/device/thread_team.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

// The two streams of a CPU device: a thread with a bounded queue of tasks, and the calling thread
// itself.
//
//   enqueuer --> [ task | task | task | ... ] --> thread    tail_ - head_ tasks wait
//
// The queue is in blocks of memory, and takes the first free block next. A short queue never
// touches the later blocks, so their pages take no memory.
class CpuStream : public StreamBackend {
 public:
  static absl::StatusOr<std::unique_ptr<CpuStream>> Create(std::string_view name, int tasks_max,
                                                           std::shared_ptr<ThreadTeam> team,
                                                           std::shared_ptr<TicketPool> pool);
  ~CpuStream() override;

  void Enqueue(const Task& task) override;
  void Copy(void* destination, const void* source, int64_t bytes) override;
  void Zero(void* destination, int64_t bytes) override;
  void Wait(const EventBackend& event) override;
  void Record(EventBackend& event) override;
  void WaitIdle() override;
  ThreadTeam& team() override { return *team_; }
  StreamView view() const override { return {}; }

  // Wait and Record for other kinds of events, which keep the place themselves.
  void WaitFor(const CpuEvent::Place& place);
  CpuEvent::Place EnqueuePlace();

 private:
  CpuStream(int tasks_max, std::shared_ptr<ThreadTeam> team, std::shared_ptr<TicketPool> pool);
  void Run();

  struct Block {
    static constexpr uint64_t kTasks = 64;
    alignas(Task) std::byte tasks[kTasks][sizeof(Task)];
  };
  std::byte* PlaceOf(uint64_t task) const {
    return (*block_of_[task / Block::kTasks % blocks_]).tasks[task % Block::kTasks];
  }
  void TakeBlock(uint64_t first_task);
  void GiveBlockBack(uint64_t last_task);

  std::shared_ptr<ThreadTeam> team_;
  std::shared_ptr<TicketPool> pool_;
  Tickets* tickets_;
  const uint64_t tasks_max_;
  const uint64_t blocks_;  // enough for tasks_max_ tasks, wherever the first one is in its block
  std::unique_ptr<Block[]> memory_;
  std::unique_ptr<std::atomic<bool>[]> taken_;  // by block of memory_
  std::unique_ptr<Block*[]> block_of_;          // by task / Block::kTasks, modulo blocks_
  // Counts of tasks, which only grow. Each end is on a cache line of its own.
  alignas(64) std::atomic<uint64_t> tail_{0};
  std::atomic<bool> stop_{false};
  WaitPoint not_empty_;
  alignas(64) std::atomic<uint64_t> head_{0};
  WaitPoint not_full_;
  std::thread thread_;
};

class CpuCallerStream : public StreamBackend {
 public:
  explicit CpuCallerStream(std::shared_ptr<ThreadTeam> team) : team_(std::move(team)) {}

  void Enqueue(const Task& task) override { task(); }
  void Copy(void* destination, const void* source, int64_t bytes) override;
  void Zero(void* destination, int64_t bytes) override;
  void Wait(const EventBackend& event) override { event.HostWait(); }
  void Record(EventBackend& event) override { static_cast<CpuEvent&>(event).SetPlace({}); }
  void WaitIdle() override {}
  ThreadTeam& team() override { return *team_; }
  StreamView view() const override { return {}; }

 private:
  std::shared_ptr<ThreadTeam> team_;
};

// Memory straight from the system, streams as threads, one team of threads for all kernels.
class CpuDevice : public DeviceBackend {
 public:
  explicit CpuDevice(int threads);

  DeviceKind kind() const override { return DeviceKind::kCpu; }
  std::string description() const override;
  absl::StatusOr<std::unique_ptr<StreamBackend>> NewStream(std::string_view name,
                                                           int tasks_max) override;
  std::unique_ptr<StreamBackend> CallerStream() override;
  absl::StatusOr<std::unique_ptr<EventBackend>> NewEvent() override;
  absl::StatusOr<Buffer> Allocate(int64_t bytes, std::string_view what) override;

 private:
  // Streams and events own these too, so they may outlive the device's last handle.
  std::shared_ptr<ThreadTeam> team_;
  std::shared_ptr<TicketPool> pool_;
};

}  // namespace ebb
