#include "ebb/runtime/device/cpu/cpu_device.h"

#include <pthread.h>

#include <new>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/device/cpu/copy.h"
#include "ebb/runtime/device/cpu/pages.h"
#include "ebb/runtime/device/thread_limit.h"

namespace ebb {
namespace {

constexpr size_t kThreadNameCharacters = 15;  // Linux keeps no more

}  // namespace

absl::StatusOr<std::unique_ptr<CpuStream>> CpuStream::Create(std::string_view name, int tasks_max,
                                                             std::shared_ptr<ThreadTeam> team,
                                                             std::shared_ptr<TicketPool> pool) {
  std::unique_ptr<CpuStream> stream(new CpuStream(tasks_max, std::move(team), std::move(pool)));
  try {
    stream->thread_ = std::thread([raw = stream.get()] { raw->Run(); });
  } catch (const std::system_error& error) {
    return NoThread("cannot start a thread for stream '" + std::string(name) + "'", error);
  }
  pthread_setname_np(stream->thread_.native_handle(),
                     std::string(name.substr(0, kThreadNameCharacters)).c_str());
  return stream;
}

CpuStream::CpuStream(int tasks_max, std::shared_ptr<ThreadTeam> team,
                     std::shared_ptr<TicketPool> pool)
    : team_(std::move(team)),
      pool_(std::move(pool)),
      tickets_(pool_->Take()),
      tasks_max_(static_cast<uint64_t>(tasks_max)),
      blocks_((tasks_max_ + Block::kTasks - 1) / Block::kTasks + 1),
      memory_(std::make_unique_for_overwrite<Block[]>(blocks_)),
      taken_(std::make_unique<std::atomic<bool>[]>(blocks_)),
      block_of_(std::make_unique<Block*[]>(blocks_)) {}

CpuStream::~CpuStream() {
  stop_.store(true, std::memory_order_release);
  not_empty_.Notify();
  if (thread_.joinable()) thread_.join();
  pool_->GiveBack(tickets_);
}

void CpuStream::Run() {
  uint64_t next = 0;
  for (;;) {
    not_empty_.Await([&] {
      return tail_.load(std::memory_order_acquire) != next || stop_.load(std::memory_order_acquire);
    });
    if (tail_.load(std::memory_order_acquire) == next) return;  // stopped, and everything has run
    (*std::launder(reinterpret_cast<Task*>(PlaceOf(next))))();
    if (++next % Block::kTasks == 0) GiveBlockBack(next - 1);
    head_.store(next, std::memory_order_release);
    not_full_.Notify();
  }
}

// Called by the enqueuing thread. A block is free, because at most tasks_max_ tasks wait.
void CpuStream::TakeBlock(uint64_t first_task) {
  uint64_t free = 0;
  while (taken_[free].load(std::memory_order_acquire)) ++free;
  taken_[free].store(true, std::memory_order_relaxed);
  block_of_[first_task / Block::kTasks % blocks_] = &memory_[free];
}

// Called by the stream's thread when all tasks of the block have run.
void CpuStream::GiveBlockBack(uint64_t last_task) {
  const Block* const block = block_of_[last_task / Block::kTasks % blocks_];
  taken_[static_cast<uint64_t>(block - memory_.get())].store(false, std::memory_order_release);
}

void CpuStream::Enqueue(const Task& task) {
  const uint64_t tail = tail_.load(std::memory_order_relaxed);
  not_full_.Await([&] { return tail - head_.load(std::memory_order_acquire) < tasks_max_; });
  if (tail % Block::kTasks == 0) TakeBlock(tail);
  ::new (static_cast<void*>(PlaceOf(tail))) Task(task);
  tail_.store(tail + 1, std::memory_order_release);
  not_empty_.Notify();
}

void CpuStream::Copy(void* destination, const void* source, int64_t bytes) {
  Enqueue(Task([team = team_.get(), destination, source, bytes] {
    CopyBytes(*team, destination, source, bytes);
  }));
}

void CpuStream::Zero(void* destination, int64_t bytes) {
  Enqueue(Task([team = team_.get(), destination, bytes] { ZeroBytes(*team, destination, bytes); }));
}

void CpuStream::Wait(const EventBackend& event) {
  WaitFor(static_cast<const CpuEvent&>(event).place());
}

void CpuStream::WaitFor(const CpuEvent::Place& place) {
  if (place.tickets == tickets_ || place.Passed())
    return;  // the queue's order has passed own places
  Enqueue(Task([place] { place.Await(); }));
}

CpuEvent::Place CpuStream::EnqueuePlace() {
  const int64_t ticket = tickets_->TakeTicket();
  Enqueue(Task([tickets = tickets_, ticket] { tickets->Pass(ticket); }));
  return {.tickets = tickets_, .ticket = ticket};
}

void CpuStream::Record(EventBackend& event) {
  static_cast<CpuEvent&>(event).SetPlace(EnqueuePlace());
}

void CpuStream::WaitIdle() {
  EnqueuePlace().Await();
}

void CpuCallerStream::Copy(void* destination, const void* source, int64_t bytes) {
  CopyBytes(*team_, destination, source, bytes);
}

void CpuCallerStream::Zero(void* destination, int64_t bytes) {
  ZeroBytes(*team_, destination, bytes);
}

CpuDevice::CpuDevice(int threads)
    : team_(std::make_shared<ThreadTeam>(threads)), pool_(std::make_shared<TicketPool>()) {}

std::string CpuDevice::description() const {
  return absl::StrCat("CPU, ", team_->threads(), team_->threads() == 1 ? " thread" : " threads");
}

absl::StatusOr<std::unique_ptr<StreamBackend>> CpuDevice::NewStream(std::string_view name,
                                                                    int tasks_max) {
  return CpuStream::Create(name, tasks_max, team_, pool_);
}

std::unique_ptr<StreamBackend> CpuDevice::CallerStream() {
  return std::make_unique<CpuCallerStream>(team_);
}

absl::StatusOr<std::unique_ptr<EventBackend>> CpuDevice::NewEvent() {
  return std::make_unique<CpuEvent>(pool_);
}

absl::StatusOr<Buffer> CpuDevice::Allocate(int64_t bytes, std::string_view what) {
  return AllocatePages(bytes, what);
}

}  // namespace ebb
