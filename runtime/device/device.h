// A device: where buffers live and streams run. A cheap, copyable handle; all copies are the same
// device.
//
// The CPU is a real device: its streams are threads that run what was enqueued in order, beside the
// calling thread. So work overlaps, races and needs events for its order as on a GPU. CUDA: the
// same calls, run by the device; the host does not wait.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/runtime/device/buffer.h"
#include "ebb/runtime/device/event.h"
#include "ebb/runtime/device/stream.h"

namespace ebb {

enum class DeviceKind : uint8_t { kCpu, kCuda };

class DeviceBackend;
class SpanClock;

class Device {
 public:
  // threads: how many threads one kernel may use (update, cast, reduction), including the enqueuing
  // stream's own; all streams of the device share them. 0: the cores that this process may use,
  // divided by the ranks of RunThreads when called inside one; at least 1.
  static Device Cpu(int threads = 0);
  // `compute`: the trainer's stream, borrowed, which CallerStream() then returns; null: a stream of
  // our own. A call leaves a thread its current CUDA device if it has used one; otherwise the
  // thread gets this one. kUnavailable: this machine has no driver or no device. kUnimplemented:
  // this build has no CUDA.
  static absl::StatusOr<Device> Cuda(int ordinal = 0, StreamView compute = {});
  // How many devices there are, or why none can be used, as above.
  static absl::StatusOr<int> CudaDevices();
  // "cpu", "cuda" (this rank's device: `local_rank` modulo the number of visible devices) or
  // "cuda:1". `threads`: as for Cpu.
  static absl::StatusOr<Device> FromName(std::string_view name, int local_rank = 0,
                                         int threads = 0);
  explicit Device(std::shared_ptr<DeviceBackend> backend) : backend_(std::move(backend)) {}

  DeviceKind kind() const;
  int ordinal() const;  // among devices of its kind
  // Identifies the hardware: equal in every process that uses it, whatever its ordinal. The CPU: 0.
  uint64_t identity() const;
  std::string description() const;  // in messages: "CPU, 2 threads", "CUDA device 0 (NVIDIA H200)"
  // The first failure of the device itself, sticky: its streams then do nothing. OK on the CPU.
  absl::Status status() const;
  // Device memory that Allocate could still hand out, whichever process uses the rest. Unknown if
  // the device's memory is the host's, or the device has failed.
  std::optional<int64_t> free_bytes() const;
  // Device memory that the driver and libraries have taken, as far as it was measured
  // (DriverMemory): the context, NCCL's communicators, and what the trainer measured. The context
  // counts as what was in use on the whole device, by any process, once this process had made it; 0
  // if it existed before. 0 on the CPU.
  int64_t driver_bytes() const;

  // A stream that runs beside the caller. `name` is what debuggers and timelines show, at most 15
  // characters on Linux. `tasks_max`: how many tasks may wait in it before Enqueue does.
  absl::StatusOr<Stream> NewStream(std::string_view name, int tasks_max = kStreamTasksMax) const;
  // A stream with tasks that run on a thread of the host. There they may compute with team() and
  // wait: for state that stays in the host's RAM or on disk while the device computes. Wait and
  // Record order it with all streams of the device, by the device's events; an event may be
  // recorded on either kind. Copy and Zero touch host memory only; view().native is null. Tasks run
  // also after the device has failed. The device's records then count as passed, so read what the
  // device should have written only while status() is OK. The CPU's streams are all of this kind.
  // CUDA: kUnimplemented if a stream of the device cannot wait for a value in host memory.
  absl::StatusOr<Stream> NewHostStream(std::string_view name,
                                       int tasks_max = kStreamTasksMax) const;
  // The trainer's stream. On the CPU it is the calling thread: Enqueue runs at once, Wait blocks.
  Stream CallerStream() const;
  absl::StatusOr<Event> NewEvent() const;
  // Null on the CPU, where streams read the time themselves.
  absl::StatusOr<std::unique_ptr<SpanClock>> NewSpanClock() const;
  // Zero-filled pages, aligned to 2 MiB from 2 MiB on (huge pages where the system grants them),
  // otherwise to a page. Pages that are never written cost nothing. kResourceExhausted names `what`
  // and the size. CUDA: zero-filled memory of the device, aligned to 256 bytes, which the host
  // cannot read.
  absl::StatusOr<Buffer> Allocate(int64_t bytes, std::string_view what) const;
  // Zero-filled host memory that kernels and copies of the device reach at the same address. CUDA:
  // locked in RAM; the host sees what a kernel writes there after an event behind the kernel.
  absl::StatusOr<Buffer> AllocateShared(int64_t bytes, std::string_view what) const;
  // Locks host memory that exists already, so that the device copies from and to it without the
  // host's help. Whole pages are locked; no part of `memory` may be locked yet. The CPU locks
  // nothing. An error: the system refuses it; status() does not change, and `memory` can be used as
  // any other.
  absl::StatusOr<LockedRange> LockHostMemory(std::span<std::byte> memory,
                                             std::string_view what) const;

  DeviceBackend& backend() const { return *backend_; }

 private:
  std::shared_ptr<DeviceBackend> backend_;
};

}  // namespace ebb
