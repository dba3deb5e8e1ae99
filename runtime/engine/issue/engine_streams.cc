#include "ebb/runtime/engine/issue/engine_streams.h"

#include <tuple>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/awaited_event.h"
#include "ebb/runtime/device/stream_priority.h"
#include "ebb/runtime/engine/outcome/control_block.h"

namespace ebb {

using sharding::Line;
using sharding::LineOf;
using sharding::StreamId;

namespace {

int TasksMax(const sharding::Plan* plan, StreamId id) {
  size_t tasks = 0;
  for (size_t i = 0; plan != nullptr && i < plan->ops.size(); ++i) {
    const sharding::Op& op = plan->ops[i];
    if (op.stream != id) continue;
    constexpr size_t kOwn = 4;  // begin, work, a look at a collective's failure, end
    tasks += kOwn + sharding::kLines + op.moves().size() + op.parts.size();
    if (op.role == sharding::Role::kFillSecondary)
      tasks += op.parts.size();  // one copy of the trainable and one of the frozen part
  }
  return kStreamTasksMax + 2 * static_cast<int>(tasks);
}

}  // namespace

EngineStreams::EngineStreams(const Device& device) {
  lines_[LineOf(StreamId::kCompute)].emplace(device.CallerStream());
}

absl::Status EngineStreams::MakeLine(Line line, int tasks, Made make) {
  if (lines_[line].has_value() && tasks_[line] >= tasks) return absl::OkStatus();
  EBB_ASSIGN_OR_RETURN(Stream made, make(tasks));
  lines_[line].emplace(std::move(made));
  tasks_[line] = tasks;
  return absl::OkStatus();
}

absl::Status EngineStreams::Make(const Device& device, const sharding::Plan* plan) {
  // The others wait for what gathers and reductions carry.
  const std::tuple<const char*, StreamId, StreamPriority> streams[] = {
      {"ebb gather", StreamId::kGather, StreamPriority::kFirst},
      {"ebb reduce", StreamId::kReduce, StreamPriority::kFirst},
      {"ebb update", StreamId::kUpdate, StreamPriority::kUsual}};
  for (const auto& stream : streams) {
    const auto make = [&](int tasks) {
      return NewStream(device, std::get<0>(stream), tasks, std::get<2>(stream));
    };
    const StreamId id = std::get<1>(stream);
    EBB_RETURN_IF_ERROR(MakeLine(LineOf(id), TasksMax(plan, id), make));
  }
  while (concluded_.size() < ControlBlock::kSlots) {
    EBB_ASSIGN_OR_RETURN(Event made, NewAwaitedEvent(device));
    concluded_.push_back(std::move(made));
  }
  return absl::OkStatus();
}

absl::Status EngineStreams::MakeOffload(const Device& device, const sharding::Plan& plan) {
  if (!plan.decisions.offloads()) return absl::OkStatus();
  const std::pair<const char*, StreamId> copies[] = {{"ebb upload", StreamId::kUpload},
                                                     {"ebb download", StreamId::kDownload}};
  for (const auto& copy : copies) {
    const auto make = [&](int tasks) { return device.NewStream(copy.first, tasks); };
    EBB_RETURN_IF_ERROR(MakeLine(LineOf(copy.second), TasksMax(&plan, copy.second), make));
  }
  const std::tuple<const char*, StreamId, Line> on_host[] = {
      {"ebb host sum", StreamId::kHostSum, LineOf(StreamId::kHostSum)},
      {"ebb host upd", StreamId::kHostUpdate, LineOf(StreamId::kHostUpdate)},
      {"ebb read par", StreamId::kReadParameters, LineOf(StreamId::kReadParameters)},
      {"ebb par read", StreamId::kReadParameters, sharding::kParametersRead},
      {"ebb read sta", StreamId::kReadStates, LineOf(StreamId::kReadStates)},
      {"ebb sta read", StreamId::kReadStates, sharding::kStatesRead},
      {"ebb write", StreamId::kWrite, LineOf(StreamId::kWrite)},
      {"ebb written", StreamId::kWrite, sharding::kWritten}};
  for (const auto& stream : on_host) {
    const StreamId id = std::get<1>(stream);
    const auto make = [&](int tasks) { return device.NewHostStream(std::get<0>(stream), tasks); };
    EBB_RETURN_IF_ERROR(MakeLine(std::get<2>(stream), TasksMax(&plan, id), make));
  }
  return absl::OkStatus();
}

absl::Status EngineStreams::MakeAsyncReads(const Device& device, int64_t units) {
  if (lines_[sharding::kAsyncReads]) return absl::OkStatus();
  constexpr int kOwn = 4;  // work, its event, and the end
  EBB_ASSIGN_OR_RETURN(
      Stream made,
      device.NewHostStream("ebb async reads",
                           kStreamTasksMax + static_cast<int>(units) * (kOwn + sharding::kLines)));
  lines_[sharding::kAsyncReads].emplace(std::move(made));
  return absl::OkStatus();
}

std::array<Stream*, sharding::kLines> EngineStreams::all() {
  std::array<Stream*, sharding::kLines> all = {};
  for (size_t line = 0; line < lines_.size(); ++line)
    all[line] = lines_[line] ? &*lines_[line] : nullptr;
  return all;
}

int EngineStreams::count() const {
  int count = -1;
  for (const std::optional<Stream>& line : lines_) count += line.has_value() ? 1 : 0;
  return count;
}

void EngineStreams::WaitIdle() {
  for (std::optional<Stream>& line : lines_)
    if (line.has_value()) line->WaitIdle();
}

namespace {

constexpr int kQueuesByDefault = 8, kQueuesMax = 32;  // of CUDA

}  // namespace

std::string WarnOfFewQueues(int streams, const char* connections) {
  int queues = 0;
  const bool given = connections != nullptr && absl::SimpleAtoi(connections, &queues) && queues > 0;
  if (!given) queues = kQueuesByDefault;
  if (queues >= streams) return "";
  return absl::StrCat("CUDA_DEVICE_MAX_CONNECTIONS is ", given ? connections : "not set",
                      ", so the ", streams, " streams of this engine share ", queues,
                      queues == 1 ? " queue" : " queues",
                      " of the device and wait for each other: set it to ", kQueuesMax,
                      " where the ranks are launched");
}

}  // namespace ebb
