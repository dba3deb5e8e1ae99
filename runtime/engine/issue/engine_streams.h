// An engine's streams, by line: some start a plan's operations, some end transfers with
// files.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/event.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/sharding/op_list.h"
#include "ebb/sharding/plan.h"

namespace ebb {

class EngineStreams {
 public:
  explicit EngineStreams(const Device& device);

  // Makes the streams of every engine. They have room for two steps of the plan, which has three
  // rounds at most: enqueuing then waits for no work. In a longer step it may wait for the rounds
  // before. `plan`: null if there is none, and ranks only agree on that. Call again for
  // another plan while streams are idle: a stream without room for it is made anew, at its address.
  absl::Status Make(const Device& device, const sharding::Plan* plan);
  // Makes the streams of offloading.
  absl::Status MakeOffload(const Device& device, const sharding::Plan& plan);

  // Makes the stream that reads state beside steps, `units` at once. A second call does nothing.
  absl::Status MakeAsyncReads(const Device& device, int64_t units);
  Stream& async_reads() { return *lines_[sharding::kAsyncReads]; }

  Stream& compute() { return *lines_[sharding::LineOf(sharding::StreamId::kCompute)]; }
  Stream& gather() { return *lines_[sharding::LineOf(sharding::StreamId::kGather)]; }
  Stream& reduce() { return *lines_[sharding::LineOf(sharding::StreamId::kReduce)]; }
  Stream& update() { return *lines_[sharding::LineOf(sharding::StreamId::kUpdate)]; }
  Stream& upload() { return *lines_[sharding::LineOf(sharding::StreamId::kUpload)]; }
  Stream& download() { return *lines_[sharding::LineOf(sharding::StreamId::kDownload)]; }
  // Null where no operation runs.
  std::array<Stream*, sharding::kLines> all();
  const Event& concluded(int parity) const { return concluded_[static_cast<size_t>(parity)]; }
  std::vector<Event>& concluded() { return concluded_; }

  int count() const;  // but for the compute stream
  // The caller waits for all that was enqueued.
  void WaitIdle();

 private:
  using Made = absl::FunctionRef<absl::StatusOr<Stream>(int tasks)>;
  absl::Status MakeLine(sharding::Line line, int tasks, Made make);

  // Streams on which transfers start come before the streams on which they end.
  std::array<std::optional<Stream>, sharding::kLines> lines_;
  std::array<int, sharding::kLines> tasks_ = {};  // the most that each has room for
  std::vector<Event> concluded_;  // by parity: the caller waits for these when two steps ahead
};

// A warning if `streams` of an engine do not have a queue each of the hardware, over which CUDA
// spreads the streams of a process; else empty. Streams that share a queue wait for each other
// without a reason. `connections`: CUDA_DEVICE_MAX_CONNECTIONS; null: not set, so CUDA takes 8.
std::string WarnOfFewQueues(int streams, const char* connections);

}  // namespace ebb
