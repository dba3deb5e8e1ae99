// Reports to the order check (order.h) the device-visible memory that an engine's host touches.
//
// A transfer with the swap file is noted at its start and at its end. The next user of its memory
// must wait for the end, and the transfer must wait for all users before it.
#include <memory>
#include <span>
#include <vector>

#include "ebb/runtime/device/cuda/cuda_host_stream.h"
#include "ebb/runtime/engine/issue/issue_observer.h"
#include "ebb/runtime/engine/outcome/control_block.h"
#include "ebb/runtime/engine/outcome/exchange.h"
#include "order.h"

namespace ebb {
namespace {

using sharding::Role;
using stand_in::Reads;
using stand_in::Touched;
using stand_in::Writes;

// Null: the CPU's.
cudaStream_t NativeOf(const Stream& stream) {
  if (stream.view().native != nullptr) return static_cast<cudaStream_t>(stream.view().native);
  const auto* const host = dynamic_cast<const CudaHostStream*>(&stream.backend());
  return host == nullptr ? nullptr : host->crossing();
}

// A failed device takes no waits any more, and runs no work that they would order.
bool IsOrdered(const Device& device) {
  return stand_in::WatchesOrder() && device.status().ok();
}

const char* NameOf(const sharding::Op& op) {
  switch (op.role) {
    case Role::kRead:
      return "the host's read of the swap file";
    case Role::kWrite:
      return "the host's write of the swap file";
    case Role::kAccumulate:
      return "the host's sum";
    case Role::kNorm:
      return "the host's norm";
    case Role::kCast:
    case Role::kRound:
      return "the host's cast";
    case Role::kCastMasters:
      return "the host's cast of masters";
    case Role::kParameterNorms:
      return "the host's norms of parameters";
    case Role::kSave:
      return "what the host reads beside steps";
    case Role::kPrepare:
      return "early constants";
    case Role::kSeal:
      return "a rank's record";
    case Role::kConclude:
      return "the verdict";
    case Role::kSealNorms:
      return "a rank's record of norms";
    case Role::kConcludeNorms:
      return "constants that follow from norms";
    default:
      return "the host's update";
  }
}

// Operations in which the host touches memory in the order of a stream. The device notes its own
// accesses itself.
class HostTouches : public IssueObserver {
 public:
  explicit HostTouches(const ObservedEngine& engine) : engine_(engine) {}

  void Begin(LinkedList& run, int index, const StepTag& step, Stream& stream) override {
    starts_ = NativeOf(stream);
    if (IsTask(run[index]) || stream.view().native == nullptr) Note(run, index, step, stream);
  }
  void End(LinkedList& run, int index, const StepTag& step, Stream& stream) override {
    const sharding::Op& op = run[index];
    if (op.starts == op.ends) return;
    // A transfer ends behind its start, without an event of the device.
    if (const cudaStream_t ends = NativeOf(stream); starts_ != nullptr && ends != nullptr) {
      stand_in::NoteRecord(starts_, reinterpret_cast<cudaEvent_t>(this));
      stand_in::NoteWait(ends, reinterpret_cast<cudaEvent_t>(this));
    }
    Note(run, index, step, stream);
  }
  // For accesses of the calling thread.
  void Touch(CallerTouch what, int parity) override {
    if (engine_.device->kind() != DeviceKind::kCuda || !IsOrdered(*engine_.device)) return;
    const ControlBlock& block = *engine_.control;
    switch (what) {
      case CallerTouch::kBeginLoss: {
        const std::span<double> sums = block.sums(parity);
        const Touched touched[] = {Writes(sums.data(), static_cast<int64_t>(sums.size_bytes()))};
        return stand_in::NoteHostTouch("the begin of a step", touched);
      }
      case CallerTouch::kBeginRecord: {
        const Touched touched[] = {Writes(&block.own_record(parity), sizeof(ExchangeRecord))};
        return stand_in::NoteHostTouch("the begin of a rank's record", touched);
      }
      case CallerTouch::kReadScale: {
        const Touched touched[] = {Reads(&block.loss_scale(), sizeof(float))};
        return stand_in::NoteHostTouch("the host's look at the loss scale", touched);
      }
    }
  }

 private:
  // A task of the host, also where the device has a stream.
  static bool IsTask(const sharding::Op& op) {
    return op.code() == sharding::Code::kHost && op.role != Role::kSave;
  }
  void Note(const LinkedList& run, int index, const StepTag& step, Stream& stream) const {
    const cudaStream_t native = NativeOf(stream);
    if (native == nullptr || !IsOrdered(*engine_.device)) return;
    const sharding::Op& op = run[index];
    const int parity = op.carried() ? 1 - step.parity : step.parity;
    std::vector<Touched> touched;
    for (int k = 0; k < std::ssize(op.operands); ++k) {
      const sharding::Operand& operand = op.operands[static_cast<size_t>(k)];
      if (operand.access == sharding::Access::kNone) continue;
      const bool is_written = sharding::Writes(operand.access);
      const auto add = [&](const void* at, int64_t bytes) {
        touched.push_back(is_written ? Writes(at, bytes) : Reads(at, bytes));
      };
      if (operand.place.pool == StateClass::kControl) {
        Control(run, operand, parity, add);
      } else if (run.At(index, k) != nullptr && operand.place.tier == Tier::kCpu) {
        add(run.At(index, k), operand.bytes());
      }
    }
    stand_in::NoteTouch(native, NameOf(op), touched);
  }
  template <class Add>
  void Control(const LinkedList& run, const sharding::Operand& operand, int parity, Add add) const {
    const sharding::ControlCells cells(static_cast<int>(run.plan().layout.units.size()));
    for (int64_t cell = operand.place.offset; cell < operand.place.offset + operand.count; ++cell) {
      if (cell < cells.scale && !run.plan().decisions.trainable[static_cast<size_t>(cell)])
        continue;
      if (cell == cells.scale && run.plan().decisions.compute != DType::kFloat16) continue;
      const std::span<const std::byte> memory = engine_.control->At(cell, parity);
      if (!memory.empty()) add(memory.data(), static_cast<int64_t>(memory.size()));
    }
  }

  const ObservedEngine engine_;
  cudaStream_t starts_ = nullptr;  // of the operation that begins
};

}  // namespace

std::unique_ptr<IssueObserver> NewIssueObserver(const ObservedEngine& engine) {
  return std::make_unique<HostTouches>(engine);
}

}  // namespace ebb
