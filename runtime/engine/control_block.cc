#include "ebb/runtime/engine/control_block.h"

#include <algorithm>
#include <memory>
#include <string_view>

#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/device_reach.h"

namespace ebb {
namespace {

// Places of arrays, one behind the other, in memory that begins at a page.
class Cutter {
 public:
  template <class T>
  size_t Take(size_t count) {
    constexpr size_t kAlignment = 64;
    static_assert(alignof(T) <= kAlignment);
    const size_t at = (end_ + kAlignment - 1) / kAlignment * kAlignment;
    end_ = at + count * sizeof(T);
    return at;
  }
  int64_t bytes() const { return static_cast<int64_t>(end_); }

 private:
  size_t end_ = 0;
};

template <class T>
std::span<T> Construct(std::byte* at, size_t count) {
  T* const begin = reinterpret_cast<T*>(at);
  std::uninitialized_value_construct_n(begin, count);
  return {begin, count};
}

// On the CPU both are the same memory.
template <class T>
void CopyAll(Stream& stream, std::span<T> to, std::span<T> from) {
  if (to.data() != from.data())
    stream.Copy(to.data(), from.data(), static_cast<int64_t>(from.size_bytes()));
}

}  // namespace

absl::Status ControlBlock::Create(const Device& device, size_t units, size_t ranks, size_t sets,
                                  std::span<const optim::UpdateRun> runs,
                                  std::optional<ControlBlock>& into) {
  constexpr std::string_view kWhat = "what host and device tell each other";
  Cutter cutter;
  const size_t squares = cutter.Take<double>(units),
               sums = cutter.Take<double>(kSlots * Evaluation::kSums),
               loss_scale = cutter.Take<float>(1),
               records = cutter.Take<ExchangeRecord>(kSlots * (ranks + 1)),
               constants = cutter.Take<optim::UpdateConstants>(4 * sets),
               table = cutter.Take<optim::UpdateRun>(runs.size());
  ControlBlock& block = into.emplace();
  EBB_ASSIGN_OR_RETURN(block.memory_, device.AllocateShared(cutter.bytes(), kWhat));
  std::byte* const memory = block.memory_.data();
  block.squares_ = Construct<double>(memory + squares, units);
  block.sums_ = Construct<double>(memory + sums, kSlots * Evaluation::kSums);
  block.loss_scale_ = Construct<float>(memory + loss_scale, 1).data();
  block.records_ = Construct<ExchangeRecord>(memory + records, kSlots * (ranks + 1));
  block.device_constants_ = block.constants_ =
      Construct<optim::UpdateConstants>(memory + constants, 4 * sets);
  block.device_runs_ = block.runs_ = Construct<optim::UpdateRun>(memory + table, runs.size());
  std::copy(runs.begin(), runs.end(), block.runs_.begin());
  *block.loss_scale_ = 1;
  if (HostReaches(device)) return absl::OkStatus();

  Cutter on_device;
  const size_t device_constants = on_device.Take<optim::UpdateConstants>(4 * sets),
               device_runs = on_device.Take<optim::UpdateRun>(runs.size());
  EBB_ASSIGN_OR_RETURN(block.device_memory_,
                       device.Allocate(std::max<int64_t>(on_device.bytes(), 1), kWhat));
  // Not for the host to touch, and all zero: no update.
  std::byte* const there = block.device_memory_.data();
  block.device_constants_ = {reinterpret_cast<optim::UpdateConstants*>(there + device_constants),
                             4 * sets};
  block.device_runs_ = {reinterpret_cast<optim::UpdateRun*>(there + device_runs), runs.size()};
  return absl::OkStatus();
}

void ControlBlock::CopyConstants(Stream& stream, int parity, bool early) const {
  CopyAll(stream, Of(parity, early, device_constants_), Of(parity, early, constants_));
}

void ControlBlock::CopyRuns(Stream& stream) const {
  CopyAll(stream, device_runs_, runs_);
}

}  // namespace ebb
