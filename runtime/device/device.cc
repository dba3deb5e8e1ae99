#include "ebb/runtime/device/device.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/awaited_event.h"
#include "ebb/runtime/device/backend.h"
#include "ebb/runtime/device/cores.h"
#include "ebb/runtime/device/cpu/cpu_device.h"
#include "ebb/runtime/device/stream_priority.h"

namespace ebb {
namespace {

constexpr int kThreadsMax = 1024;

}  // namespace

Device Device::Cpu(int threads) {
  const int used = threads > 0 ? threads : CoreShare::CoresPerRank();
  return Device(std::make_shared<CpuDevice>(std::min(used, kThreadsMax)));
}

absl::StatusOr<Device> Device::FromName(std::string_view name, int local_rank, int threads) {
  const absl::string_view text(name.data(), name.size());
  if (text == "cpu") return Cpu(threads);
  if (text == "cuda") {
    EBB_ASSIGN_OR_RETURN(const int count, CudaDevices());
    return Cuda(local_rank % count);
  }
  int ordinal = 0;
  if (absl::StartsWith(text, "cuda:") && absl::SimpleAtoi(text.substr(5), &ordinal))
    return Cuda(ordinal);
  return absl::InvalidArgumentError(
      absl::StrCat("'", text, "' is not a device: give cpu, cuda or cuda:N (the GPU number N)"));
}

DeviceKind Device::kind() const {
  return backend_->kind();
}

uint64_t Device::identity() const {
  return backend_->identity();
}

int Device::ordinal() const {
  return backend_->ordinal();
}

absl::Status Device::status() const {
  return backend_->status();
}

std::optional<int64_t> Device::free_bytes() const {
  return backend_->free_bytes();
}

int64_t Device::driver_bytes() const {
  const DriverMemory* const memory = backend_->driver_memory();
  return memory == nullptr ? 0 : memory->bytes();
}

std::string Device::description() const {
  return backend_->description();
}

absl::StatusOr<Stream> Device::NewStream(std::string_view name, int tasks_max) const {
  EBB_ASSIGN_OR_RETURN(std::unique_ptr<StreamBackend> stream, backend_->NewStream(name, tasks_max));
  return Stream(std::move(stream));
}

absl::StatusOr<Stream> NewStream(const Device& device, std::string_view name, int tasks_max,
                                 StreamPriority priority) {
  EBB_ASSIGN_OR_RETURN(std::unique_ptr<StreamBackend> stream,
                       device.backend().NewStreamOf(priority, name, tasks_max));
  return Stream(std::move(stream));
}

absl::StatusOr<Stream> Device::NewHostStream(std::string_view name, int tasks_max) const {
  EBB_ASSIGN_OR_RETURN(std::unique_ptr<StreamBackend> stream,
                       backend_->NewHostStream(name, tasks_max));
  return Stream(std::move(stream));
}

Stream Device::CallerStream() const {
  return Stream(backend_->CallerStream());
}

absl::StatusOr<Event> NewAwaitedEvent(const Device& device) {
  EBB_ASSIGN_OR_RETURN(std::unique_ptr<EventBackend> event, device.backend().NewAwaitedEvent());
  return Event(std::move(event));
}

absl::StatusOr<std::unique_ptr<SpanClock>> Device::NewSpanClock() const {
  return backend_->NewSpanClock();
}

absl::StatusOr<Event> Device::NewEvent() const {
  EBB_ASSIGN_OR_RETURN(std::unique_ptr<EventBackend> event, backend_->NewEvent());
  return Event(std::move(event));
}

absl::StatusOr<Buffer> Device::Allocate(int64_t bytes, std::string_view what) const {
  return backend_->Allocate(bytes, what);
}
absl::StatusOr<Buffer> Device::AllocateShared(int64_t bytes, std::string_view what) const {
  return backend_->AllocateShared(bytes, what);
}
absl::StatusOr<LockedRange> Device::LockHostMemory(std::span<std::byte> memory,
                                                   std::string_view what) const {
  return backend_->LockHostMemory(memory, what);
}

Stream::Stream(std::unique_ptr<StreamBackend> backend) : backend_(std::move(backend)) {}
Stream::Stream(Stream&&) noexcept = default;
Stream& Stream::operator=(Stream&&) noexcept = default;
Stream::~Stream() = default;

void Stream::Enqueue(Task task) {
  backend_->Enqueue(task);
}
void Stream::Copy(void* destination, const void* source, int64_t bytes) {
  backend_->Copy(destination, source, bytes);
}
void Stream::Zero(void* destination, int64_t bytes) {
  backend_->Zero(destination, bytes);
}
void Stream::Wait(const Event& event) {
  backend_->Wait(event.backend());
}
void Stream::Record(Event& event) {
  backend_->Record(event.backend());
}
void Stream::WaitIdle() {
  backend_->WaitIdle();
}
ThreadTeam& Stream::team() const {
  return backend_->team();
}
StreamView Stream::view() const {
  return backend_->view();
}
absl::Status Stream::status() const {
  return backend_->status();
}

Event::Event(std::unique_ptr<EventBackend> backend) : backend_(std::move(backend)) {}
Event::Event(Event&&) noexcept = default;
Event& Event::operator=(Event&&) noexcept = default;
Event::~Event() = default;

void Event::Wait() const {
  backend_->HostWait();
}
bool Event::Passed() const {
  return backend_->Passed();
}

}  // namespace ebb
