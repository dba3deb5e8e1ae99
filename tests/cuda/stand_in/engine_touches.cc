// Reports to the order check (order.h) what an engine's host touches of memory that the device
// reaches.
//
// A transfer with the swap file is noted at its start and at its end. The next user of its memory
// must wait for the end, and the transfer must wait for all users before it.
#include <memory>
#include <span>
#include <vector>

#include "ebb/runtime/device/cuda/cuda_host_stream.h"
#include "ebb/runtime/engine/control_block.h"
#include "ebb/runtime/engine/exchange.h"
#include "ebb/runtime/engine/issue_observer.h"
#include "order.h"

namespace ebb {
namespace {

using sharding::Code;
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

const char* NameOf(const sharding::Instruction& instruction) {
  switch (instruction.code) {
    case Code::kRead:
      return "the host's read of the swap file";
    case Code::kWrite:
      return "the host's write of the swap file";
    case Code::kAccumulate:
      return "the host's sum";
    case Code::kNorm:
      return "the host's norm";
    case Code::kCast:
      return "the host's cast of masters";
    case Code::kParameterNorms:
      return "the host's norms of parameters";
    case Code::kReadAsync:
      return "what the host reads beside steps";
    case Code::kPrepare:
      return "early constants";
    case Code::kExchange:
      return "the exchange of records";
    case Code::kExchangeNorms:
      return "the exchange of norms";
    default:
      return "the host's update";
  }
}

// Instructions in which the host touches memory in the order of a stream. The device notes its own
// accesses itself.
class HostTouches : public IssueObserver {
 public:
  explicit HostTouches(const ObservedEngine& engine) : engine_(engine) {}

  void Begin(LinkedFragment& run, int index, const StepTag& step, Stream& stream) override {
    starts_ = NativeOf(stream);
    const bool exchanges = IsExchange(run[index]);
    if (exchanges || stream.view().native == nullptr)
      Note(run, index, step, stream, /*reads=*/true, /*writes=*/!exchanges);
  }
  void End(LinkedFragment& run, int index, const StepTag& step, Stream& stream) override {
    const sharding::Instruction& instruction = run[index];
    const bool exchanges = IsExchange(instruction);
    // A transfer ends behind its start, without an event of the device.
    const cudaStream_t ends = NativeOf(stream);
    if (instruction.starts != instruction.ends && starts_ != nullptr && ends != nullptr) {
      stand_in::NoteRecord(starts_, reinterpret_cast<cudaEvent_t>(this));
      stand_in::NoteWait(ends, reinterpret_cast<cudaEvent_t>(this));
    }
    if (exchanges || instruction.starts != instruction.ends)
      Note(run, index, step, stream, /*reads=*/!exchanges, /*writes=*/true);
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
  static bool IsExchange(const sharding::Instruction& instruction) {
    return instruction.code == Code::kPrepare || instruction.code == Code::kExchange ||
           instruction.code == Code::kExchangeNorms;
  }
  void Note(const LinkedFragment& run, int index, const StepTag& step, Stream& stream, bool reads,
            bool writes) const {
    const cudaStream_t native = NativeOf(stream);
    if (native == nullptr || !IsOrdered(*engine_.device)) return;
    const sharding::Instruction& instruction = run[index];
    const int parity = instruction.carried ? 1 - step.parity : step.parity;
    std::vector<Touched> touched;
    for (int k = 0; k < std::ssize(instruction.operands); ++k) {
      const sharding::Operand& operand = instruction.operands[static_cast<size_t>(k)];
      const bool is_written = sharding::Writes(operand.access);
      if (operand.access == sharding::Access::kNone || !(is_written ? writes : reads)) continue;
      const auto add = [&](const void* at, int64_t bytes) {
        touched.push_back(is_written ? Writes(at, bytes) : Reads(at, bytes));
      };
      if (operand.place.pool == StateClass::kControl) {
        Control(run, operand, parity, add);
      } else if (run.At(index, k) != nullptr && !IsExchange(instruction)) {
        add(run.At(index, k), operand.bytes());
      }
    }
    stand_in::NoteTouch(native, NameOf(instruction), touched);
  }
  template <class Add>
  void Control(const LinkedFragment& run, const sharding::Operand& operand, int parity,
               Add add) const {
    const ControlBlock& block = *engine_.control;
    const sharding::ControlCells cells(static_cast<int>(run.plan().layout.units.size()));
    const auto all = [&](auto span) { add(span.data(), static_cast<int64_t>(span.size_bytes())); };
    const int64_t cell = operand.place.offset;
    if (cell < cells.scale) {
      for (int64_t unit = cell; unit < cell + operand.count; ++unit) {
        if (run.plan().decisions.trainable[static_cast<size_t>(unit)])
          add(&block.square(static_cast<int>(unit)), int64_t{sizeof(double)});
      }
    } else if (cell == cells.sums() || cell == cells.of_walks()) {
      add(block.sums(parity).data(), int64_t{sizeof(double)});
    } else if (cell == cells.constants() || cell == cells.early()) {
      all(block.constants(parity, /*early=*/cell == cells.early()));
    } else if (cell == cells.scale && run.plan().decisions.compute == DType::kFloat16) {
      add(&block.loss_scale(), int64_t{sizeof(float)});
    }
  }

  const ObservedEngine engine_;
  cudaStream_t starts_ = nullptr;  // of the instruction that begins
};

const bool kIsSet = [] {
  SetIssueObserver([](const ObservedEngine& engine) -> std::unique_ptr<IssueObserver> {
    return std::make_unique<HostTouches>(engine);
  });
  return true;
}();

}  // namespace

}  // namespace ebb
